"""How much a reference is attended to: weights of its tokens and the bias that they become, against
ltx-pipelines' and ltx-core's own."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import generator, one_thread  # noqa: F401

from ltx_neuron.host.encode_inputs import mask_divides, token_weights
from ltx_neuron.sampling.latent_state import attention_bias

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = 6


def weights(count, seed=0):
    """Some in between, and both ends."""
    drawn = torch.rand(count, generator=generator(seed))
    return torch.where(drawn < 0.2, 0.0, torch.where(drawn > 0.8, 1.0, drawn))


def reference_bias(groups, dtype):
    """The bias as ltx-core 1.0.0 builds it, one conditioning item after the other."""
    from ltx_core.conditioning.mask_utils import update_attention_mask
    from ltx_core.model.transformer.transformer_args import TransformerArgsPreprocessor

    mask, tokens = None, TARGET
    for count, given in groups:
        state = SimpleNamespace(attention_mask=mask, latent=torch.empty(1, tokens, 1))
        given = None if given is None else given[None]
        mask = update_attention_mask(state, given, TARGET, count, 1, torch.device("cpu"), dtype)
        tokens += count
    bias = TransformerArgsPreprocessor._prepare_self_attention_mask(None, mask, dtype)
    return bias[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kinds",
    # m: a reference with a mask, -: an image or a reference without one
    ["m", "-m", "m-", "mm", "--m", "-m-m", "mm-", "-m--m"],
)
def test_the_bias_is_that_of_ltx_core(kinds, dtype):
    groups = [
        (count, weights(count, count).to(dtype) if kind == "m" else None)
        for count, kind in zip(itertools.count(3), kinds, strict=False)
    ]
    got = attention_bias(TARGET, groups, dtype)
    assert got.dtype == dtype and torch.equal(got, reference_bias(groups, dtype))


def test_what_is_appended_before_any_mask_is_attended_to_by_the_clip_and_by_each_other():
    bias = attention_bias(TARGET, [(2, None), (3, None), (4, torch.full((4,), 0.5))], torch.float32)
    assert (bias[:11, :11] == 0).all()
    assert (bias[6:11, 11:] == torch.finfo(torch.float32).min).all()
    assert torch.equal(bias[:6, 11:], torch.full((6, 4), 0.5).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "frames, shape", [(17, (3, 2, 3)), (9, (2, 4, 6)), (17, (2, 2, 3)), (9, (3, 2, 3)), (9, (1, 2, 3)), (1, (1, 1, 1))]
)
def test_weights_of_tokens_are_those_of_ltx_pipelines(frames, shape, dtype):
    from ltx_core.types import VideoLatentShape
    from ltx_pipelines.ic_lora import ICLoraPipeline

    pixels = (torch.rand(1, 3, frames, 64, 96, generator=generator()) * 2.4 - 1.2).to(dtype)
    mask = ((pixels.mean(dim=1, keepdim=True) + 1.0) / 2.0).clamp(0.0, 1.0)
    expected = ICLoraPipeline._downsample_mask_to_latent(mask, VideoLatentShape(1, 128, *shape))
    weights = token_weights(pixels, shape)
    assert weights.dtype == dtype and torch.equal(weights, expected)


@pytest.mark.parametrize(
    "frames, latent_frames, divides",
    [(17, 3, True), (17, 2, True), (9, 3, True), (12, 3, False), (17, 4, False), (1, 1, True)]
    + [(5, 1, True), (1, 2, False), (2, 3, False), (3, 3, True)],
)
def test_a_mask_has_equally_many_frames_for_each_later_latent_frame(frames, latent_frames, divides):
    assert mask_divides(frames, latent_frames) is divides
