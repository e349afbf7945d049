"""Our forward of the video decoder against ltx-core's, on the same modules."""

from pathlib import Path

import pytest
import torch
from helpers import fp32_bound, generator, one_thread, randn, randomised, rel  # noqa: F401
from tiny import TinySizes
from tiny.config import merge, released_config, tiny_config
from torch import nn

from ltx_neuron.host import vae, winograd
from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic, arithmetic, bfloat16_speed
from ltx_neuron.host.vae import FastVideoDecoder

# What tiles multiply roundings by: see test_vae_winograd. A frame, pixel or channel in the wrong
# place leaves 0.1.
AMPLIFICATION = 3.3**3
LATENTS = [(1, 1, 1), (2, 3, 1), (3, 2, 5)]
# Not the released order, nor its factors.
OTHER_ORDER = [
    ["res_x", {"num_layers": 2}],
    ["compress_space", {"multiplier": 1}],
    ["compress_all", {"multiplier": 4}],
    ["res_x", {"num_layers": 1}],
    ["compress_time", {"multiplier": 2}],
]


def ltx_decoder(**changes) -> nn.Module:
    """ltx-core's decoder of the tiny config with changes, with random weights."""
    from ltx_core.model.video_vae import VideoDecoderConfigurator

    return randomised(
        VideoDecoderConfigurator.from_config(merge(tiny_config(TinySizes()), {"vae": changes}))
    )


def rounding(decoder: nn.Module, amplification: float = AMPLIFICATION) -> float:
    """Bound of the decoder's frames: its convolutions follow one another, each in tiles of six
    points along three axes, there and back."""
    convolutions = [module for module in decoder.modules() if isinstance(module, nn.Conv3d)]
    return amplification * fp32_bound(*(c.in_channels + 6 * 6 for c in convolutions))


@pytest.fixture(params=["tiles", "direct"])
def method(request, monkeypatch) -> float:
    """Every convolution by one method; what the method multiplies roundings by."""
    monkeypatch.setattr(
        winograd, "winograd_is_faster", lambda shape, outputs, speed: request.param == "tiles"
    )
    return AMPLIFICATION if request.param == "tiles" else 1.0


@pytest.mark.parametrize("size", LATENTS, ids=str)
def test_frames_equal_ltx_cores(method, size):
    decoder = ltx_decoder()
    latent = randn(1, 128, *size)
    wanted = decoder(latent)
    assert wanted.shape == (1, 3, 8 * size[0] - 7, 32 * size[1], 32 * size[2])
    assert rel(FastVideoDecoder(decoder)(latent), wanted) < rounding(decoder, method)


def test_another_order_of_blocks_is_followed(method, monkeypatch):
    # Some of eight parts of an upsampling at a time, not evenly.
    monkeypatch.setattr(vae, "LARGEST_FILTERS", 3 * 32 * 16)
    decoder = ltx_decoder(decoder_blocks=OTHER_ORDER, patch_size=2, decoder_base_channels=8)
    latent = randn(1, 128, 2, 3, 2)
    assert rel(FastVideoDecoder(decoder)(latent), decoder(latent)) < rounding(decoder, method)


def test_each_latent_of_a_batch_is_decoded():
    decoder = FastVideoDecoder(ltx_decoder())
    latents = randn(2, 128, 1, 2, 1)
    wanted = torch.cat([decoder(latent[None]) for latent in latents])
    assert torch.equal(decoder(latents), wanted)


def test_twice_the_same_latent_gives_the_same_bits(method):
    decoder, latent = FastVideoDecoder(ltx_decoder()), randn(1, 128, 2, 2, 3)
    assert torch.equal(decoder(latent), decoder(latent))


def test_bfloat16_weights_and_latents_are_computed_with_in_float32():
    decoder, latent = ltx_decoder().bfloat16(), randn(1, 128, 2, 2, 2).bfloat16()
    frames = FastVideoDecoder(decoder)(latent)
    assert frames.dtype == torch.float32
    assert rel(frames, decoder.float()(latent.float())) < rounding(decoder)


BFLOAT16 = Arithmetic(torch.bfloat16, 8)


def bfloat16_decoders() -> tuple[nn.Module, nn.Module]:
    """ltx-core's decoder with weights that bfloat16 holds, in float32 and in bfloat16."""
    decoder = ltx_decoder().bfloat16()
    return ltx_decoder_like(decoder).float(), decoder


def ltx_decoder_like(decoder: nn.Module) -> nn.Module:
    other = ltx_decoder()
    other.load_state_dict(decoder.state_dict())
    return other


@pytest.mark.parametrize("size", LATENTS[1:], ids=str)  # the first has too few numbers to say
def test_bfloat16_is_no_further_from_float32_than_ltx_cores_own(method, size):
    exact, decoder = bfloat16_decoders()
    latent = randn(1, 128, *size)
    wanted = exact(latent)
    theirs = rel(decoder(latent.bfloat16()), wanted)
    frames = FastVideoDecoder(decoder, BFLOAT16)(latent)
    assert frames.dtype == torch.float32
    assert 0 < rel(frames, wanted) <= theirs


def test_twice_the_same_latent_gives_the_same_bits_in_bfloat16(method):
    decoder, latent = FastVideoDecoder(ltx_decoder(), BFLOAT16), randn(1, 128, 2, 2, 3)
    assert torch.equal(decoder(latent), decoder(latent))


def test_weights_laid_out_for_bfloat16_are_the_same_weights():
    decoder = ltx_decoder().bfloat16()
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    after = FastVideoDecoder(decoder, BFLOAT16).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bfloat16_is_taken_for_a_run_in_it_where_this_cpu_is_faster_in_it():
    speed = bfloat16_speed()
    faster = FLOAT32 if speed == 1 else Arithmetic(torch.bfloat16, speed)
    assert arithmetic("auto", torch.bfloat16) == faster
    assert arithmetic("auto", torch.float32) == FLOAT32
    assert arithmetic("float32", torch.bfloat16) == FLOAT32
    assert arithmetic("bfloat16", torch.float32) == Arithmetic(torch.bfloat16, speed)


def test_the_released_decoder_is_known():
    from ltx_core.model.video_vae import VideoDecoderConfigurator

    with torch.device("meta"):
        released = VideoDecoderConfigurator.from_config(released_config())
        assert FastVideoDecoder.unknown_modules(released) == []


def another_activation(decoder):
    decoder.up_blocks[2].res_blocks[0].non_linearity = nn.GELU()


def another_epsilon(decoder):
    decoder.conv_norm_out.eps = 1e-6


@pytest.mark.parametrize(
    ("changes", "change", "named"),
    [
        ({"causal_decoder": True}, None, "decoder: VideoDecoder"),
        ({"timestep_conditioning": True}, None, "up_blocks.0: UNetMidBlock3D"),
        (
            {"decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": True}]]},
            None,
            "res_blocks.0: ResnetBlock3D",
        ),
        (
            {"decoder_blocks": [["compress_all", {"residual": True}]]},
            None,
            "up_blocks.0: DepthToSpaceUpsample",
        ),
        (
            {"decoder_blocks": [["res_x_y", {"multiplier": 2}]]},
            None,
            "up_blocks.0.norm3: GroupNorm",
        ),
        ({"norm_layer": "group_norm"}, None, "conv_norm_out: GroupNorm"),
        ({"spatial_padding_mode": "reflect"}, None, "conv_in.conv: Conv3d"),
        ({}, another_activation, "up_blocks.2.res_blocks.0.non_linearity: GELU"),
        ({}, another_epsilon, "conv_norm_out: PixelNorm"),
    ],
)
def test_what_the_released_decoder_does_not_have_is_refused_by_name(changes, change, named):
    decoder = ltx_decoder(decoder_base_channels=32, **changes)
    if change:
        change(decoder)
    with pytest.raises(ValueError, match="not the released video decoder") as error:
        FastVideoDecoder(decoder)
    assert named in str(error.value)


def test_weights_are_shared_with_the_decoder_it_was_made_from():
    decoder = ltx_decoder()
    ours = FastVideoDecoder(decoder)
    assert ours.state_dict().keys() == decoder.state_dict().keys()
    assert all(
        ours.state_dict()[name].data_ptr() == tensor.data_ptr()
        for name, tensor in decoder.state_dict().items()
    )


def test_no_noise_is_drawn():
    decoder, noise = FastVideoDecoder(ltx_decoder()), generator(3)
    before = noise.get_state()
    decoder(randn(1, 128, 1, 1, 1), generator=noise)
    assert torch.equal(noise.get_state(), before)


def resident() -> int:
    """Bytes of memory of this process that are no file's."""
    line = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(line.split()[0]) * 1024


def free_between(in_use: list) -> None:
    """Take 131 MB in blocks of 64 KB and free all but every eighth: glibc keeps what lies between
    blocks that are in use."""
    blocks = [torch.zeros(2**14) for _ in range(2000)]
    in_use += blocks[::8]


def test_memory_that_earlier_tiles_freed_is_given_back_before_the_next():
    decoder, latent, in_use = FastVideoDecoder(ltx_decoder()), randn(1, 128, 1, 1, 1), []
    for _ in range(2):
        free_between(in_use)
        before = resident()
        decoder(latent)
        assert resident() < before - 80e6


def test_memory_that_a_tiles_earlier_stages_freed_is_given_back_before_the_next_stage(monkeypatch):
    in_use, freed, given_back = [], [], []
    upsample, unpatchify = vae._DecoderStage.upsample, vae.unpatchify

    def upsample_and_free(stage, block):
        if freed:
            given_back.append(freed[-1] - resident())
        following = upsample(stage, block)
        free_between(in_use)
        freed.append(resident())
        return following

    def last(pixels, patch_size):
        given_back.append(freed[-1] - resident())
        return unpatchify(pixels, patch_size)

    monkeypatch.setattr(vae._DecoderStage, "upsample", upsample_and_free)
    monkeypatch.setattr(vae, "unpatchify", last)
    FastVideoDecoder(ltx_decoder())(randn(1, 128, 1, 1, 1))
    assert len(given_back) == 4 and min(given_back) > 80e6
