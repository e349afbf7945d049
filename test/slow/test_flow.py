"""The demo's DiT is trained and sampled as the released pipelines run it: ltx-core's own loop, with
the numerics of its later releases, makes the same latents."""

import pytest
import torch
from golden.patches import later_semantics
from helpers import one_thread  # noqa: F401

SIGMAS = (1.0, 0.975, 0.421875, 0.0)


def flow():
    """The training's module, a DiT of one block with its layouts, and one with the same random
    weights that is as ltx-core made it."""
    import dit

    torch.manual_seed(3)
    models = [dit.new_model().eval() for _ in range(2)]
    for model in models:
        del model.transformer_blocks[1:]
    torch.nn.init.normal_(models[0].proj_out.weight, 0, 0.2)
    torch.nn.init.normal_(models[0].audio_proj_out.weight, 0, 0.2)
    models[1].load_state_dict(models[0].state_dict())
    return dit, models[0], dit.Layouts(models[0]), models[1]


def drawn(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Noise of both streams, both contexts, and the latents of an image."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((1, 128, 7, *size), (1, 8, 51, 16), (1, 1024, 160), (1, 1024, 80), (1, 128, 1, *size))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@torch.no_grad()
def released(model, video, audio, contexts, first):
    """The latents that ltx-pipelines' loop makes of the noise."""
    from dataclasses import replace

    from ltx_core.components.diffusion_steps import EulerDiffusionStep
    from ltx_core.components.patchifiers import AudioPatchifier, VideoLatentPatchifier
    from ltx_core.model.transformer import X0Model
    from ltx_core.tools import AudioLatentTools, VideoLatentTools
    from ltx_core.types import AudioLatentShape, VideoLatentShape
    from ltx_pipelines.utils import euler_denoising_loop
    from ltx_pipelines.utils.helpers import simple_denoising_func

    tools = (
        VideoLatentTools(VideoLatentPatchifier(1), VideoLatentShape(*video.shape), 24.0),
        AudioLatentTools(AudioPatchifier(1), AudioLatentShape(*audio.shape)),
    )
    held = video if first is None else torch.cat([first, video[:, :, 1:]], 2)
    states = [
        each.create_initial_state("cpu", torch.float32, latent)
        for each, latent in zip(tools, (held, audio), strict=True)
    ]
    if first is not None:
        states[0].denoise_mask[:, : first[0, 0].numel()] = 0
    predict = simple_denoising_func(*contexts, X0Model(model))
    states = euler_denoising_loop(torch.tensor(SIGMAS), *states, EulerDiffusionStep(), predict)
    ends = zip(tools, states, strict=True)
    return [each.unpatchify(replace(state, attention_mask=None)).latent for each, state in ends]


@pytest.mark.parametrize(("size", "with_image"), [((2, 3), False), ((4, 6), True)])
def test_samples_are_those_of_the_released_loop(size, with_image):
    dit, model, layouts, other = flow()
    video, audio, *contexts, first = drawn(size)
    first = first if with_image else None
    with later_semantics():
        upstream = released(other, video, audio, contexts, first)
    latents = dit.sample(model, layouts, contexts, video, audio, SIGMAS, first)
    for one, two in zip(latents, upstream, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
