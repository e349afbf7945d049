"""Shapes, patches and positions of both streams are ltx-core's."""

import pytest
import torch
from helpers import furthest, randn

from ltx_neuron.sampling.latents import (
    audio_positions,
    keyframe_positions,
    patchify_audio,
    patchify_video,
    reference_positions,
    unpatchify_audio,
    unpatchify_video,
    video_positions,
)
from ltx_neuron.sampling.shapes import audio_latent_frames, video_latent_shape

SIZES = [(1, 1, 1), (3, 2, 5), (16, 3, 2)]  # latent frames, rows, columns
# One fp32 rounding of a time below 32 s: half of its last bit. A frame too early or late is 4e-2.
SECONDS = 2**-20


def ltx_video(shape):
    from ltx_core.components.patchifiers import VideoLatentPatchifier
    from ltx_core.types import VideoLatentShape

    return VideoLatentPatchifier(1), VideoLatentShape(1, 128, *shape)


def middles(bounds):
    return (bounds[..., 0] + bounds[..., 1]) / 2.0


@pytest.mark.parametrize("fps", [24.0, 25.0, 23.976])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SIZES)
def test_video_positions_and_patches_are_ltx_cores_and_keyframes_behind_them_are_dropped(shape, dtype, fps):
    from ltx_core.tools import VideoLatentTools

    patchifier, latent_shape = ltx_video(shape)
    theirs = middles(VideoLatentTools(patchifier, latent_shape, fps).create_initial_state("cpu", dtype).positions)
    ours = video_positions(shape, fps, dtype)
    assert ours.dtype == theirs.dtype == dtype and torch.equal(ours, theirs)
    latent = randn(*latent_shape.to_torch_shape())
    tokens = patchify_video(latent)
    assert torch.equal(tokens, patchifier.patchify(latent))
    assert torch.equal(unpatchify_video(tokens, shape), latent)
    assert torch.equal(unpatchify_video(torch.cat([tokens, tokens[:, :1]], dim=1), shape), latent)


def test_the_first_latent_frame_is_one_frame_and_every_other_is_eight():
    seconds = video_positions((4, 1, 1), 24.0)[0, 0]
    assert furthest(seconds, torch.tensor([0.5, 5, 13, 21]) / 24) < SECONDS


@pytest.mark.parametrize("frames", [1, 26, 251])
def test_audio_positions_and_patches_are_ltx_cores(frames):
    from ltx_core.components.patchifiers import AudioPatchifier
    from ltx_core.types import AudioLatentShape

    patchifier, shape = AudioPatchifier(1), AudioLatentShape(1, 8, frames, 16)
    positions, latent = audio_positions(frames), randn(*shape.to_torch_shape())
    assert positions.dtype == torch.float32
    assert torch.equal(positions, middles(patchifier.get_patch_grid_bounds(shape)))
    tokens = patchify_audio(latent)
    assert torch.equal(tokens, patchifier.patchify(latent)) and torch.equal(unpatchify_audio(tokens), latent)


@pytest.mark.parametrize(("frame", "fps"), [(8, 24.0), (40, 25.0), (119, 23.976)])
def test_a_keyframe_lasts_from_its_own_frame_for_one_frame_or_eight_as_in_ltx_core_1_0_0(frame, fps):
    from ltx_core.conditioning import VideoConditionByKeyframeIndex
    from ltx_core.tools import VideoLatentTools

    tools = VideoLatentTools(*ltx_video((16, 2, 3)), fps)
    condition = VideoConditionByKeyframeIndex(torch.zeros(1, 128, 1, 2, 3), frame, 1.0)
    state = condition.apply_to(tools.create_initial_state("cpu", torch.float32), tools)
    theirs = middles(state.positions[:, :, -6:])
    assert torch.equal(keyframe_positions(2, 3, frame, fps, duration=8), theirs)
    theirs[:, 0] -= 3.5 / fps
    assert furthest(keyframe_positions(2, 3, frame, fps, 1), theirs) < SECONDS


def test_latents_have_the_shapes_that_ltx_core_gives_a_video_and_its_sound():
    from ltx_core.types import AudioLatentShape, VideoLatentShape, VideoPixelShape

    for height, width, frames in (512, 768, 121), (64, 128, 1), (512, 512, 28), (64, 64, 32):
        theirs = VideoLatentShape.from_pixel_shape(VideoPixelShape(1, frames, height, width, 24.0))
        assert video_latent_shape(height, width, frames) == (theirs.frames, theirs.height, theirs.width)
    # The sound is as long as the video. The last three are rounded: up, half to even, half to even.
    wanted = {(25, 24): 26, (97, 24): 101, (121, 25): 121, (17, 24): 18, (33, 30): 28, (9, 50): 4}
    assert {each: audio_latent_frames(*each) for each in wanted} == wanted
    for (frames, rate), latents in wanted.items():
        assert AudioLatentShape.from_video_pixel_shape(VideoPixelShape(1, frames, 64, 64, rate)).frames == latents


def test_a_token_of_a_half_size_reference_is_at_the_middle_of_the_four_that_it_stands_for():
    whole, half = reference_positions((2, 4, 6), 24.0), reference_positions((2, 2, 3), 24.0, space_scale=2)
    expected = whole.unflatten(2, (2, 2, 2, 3, 2)).mean((4, 6)).flatten(2)
    assert torch.allclose(half, expected)
