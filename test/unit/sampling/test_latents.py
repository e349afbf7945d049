"""Shapes, patches and positions of both streams are ltx-core's."""

import pytest
import torch
from helpers import furthest, randn

from ltx_neuron.sampling.latents import (
    audio_positions,
    keyframe_positions,
    patchify_audio,
    patchify_video,
    unpatchify_audio,
    unpatchify_video,
    video_positions,
)
from ltx_neuron.sampling.shapes import audio_latent_frames, video_latent_shape

SIZES = [(1, 1, 1), (3, 2, 5), (4, 6, 4), (16, 3, 2)]  # latent frames, rows, columns
RATES = [24.0, 25.0, 30.0, 23.976]
# (frames, frame rate) and the audio latents that last as long; the last three are rounded: up, half
# to even, half to even
AUDIO_FRAMES = {(25, 24): 26, (97, 24): 101, (121, 24): 126, (121, 25): 121, (241, 24): 251}
AUDIO_FRAMES |= {(17, 24): 18, (33, 30): 28, (9, 50): 4}
# One fp32 rounding of a time below 32 s: half of its last bit. A frame too early or late is 4e-2.
SECONDS = 2**-20


def ltx_video(shape):
    from ltx_core.components.patchifiers import VideoLatentPatchifier
    from ltx_core.types import VideoLatentShape

    return VideoLatentPatchifier(1), VideoLatentShape(1, 128, *shape)


def ltx_audio(frames):
    from ltx_core.components.patchifiers import AudioPatchifier
    from ltx_core.types import AudioLatentShape

    return AudioPatchifier(1), AudioLatentShape(1, 8, frames, 16)


def middles(bounds):
    return (bounds[..., 0] + bounds[..., 1]) / 2.0


def pixel_bounds(shape, causal_fix=True):
    from ltx_core.components.patchifiers import get_pixel_coords
    from ltx_core.types import SpatioTemporalScaleFactors

    patchifier, latent_shape = ltx_video(shape)
    scales = SpatioTemporalScaleFactors.default()
    return get_pixel_coords(patchifier.get_patch_grid_bounds(latent_shape), scales, causal_fix).float()


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SIZES)
def test_video_positions_are_those_that_ltx_cores_tools_give_a_stage(shape, dtype, fps):
    from ltx_core.tools import VideoLatentTools

    theirs = middles(VideoLatentTools(*ltx_video(shape), fps).create_initial_state("cpu", dtype).positions)
    ours = video_positions(shape, fps, dtype)
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(ours, theirs)


def test_the_first_latent_frame_is_one_frame_and_every_other_is_eight():
    seconds = video_positions((4, 1, 1), 24.0)[0, 0]
    assert furthest(seconds, torch.tensor([0.5, 5, 13, 21]) / 24) < SECONDS


@pytest.mark.parametrize("frames", [1, 26, 126, 251])
def test_audio_positions_are_the_middles_of_ltx_cores_timings(frames):
    patchifier, shape = ltx_audio(frames)
    positions = audio_positions(frames)
    assert positions.dtype == torch.float32
    assert torch.equal(positions, middles(patchifier.get_patch_grid_bounds(shape)))


@pytest.mark.parametrize("extent", [1, 8])
@pytest.mark.parametrize(("frame", "fps"), [(8, 24.0), (40, 25.0), (119, 23.976)])
def test_a_keyframe_lasts_from_its_own_frame_for_as_many_as_said(extent, frame, fps):
    positions = keyframe_positions(2, 3, frame, fps, extent)
    bounds = pixel_bounds((1, 2, 3), causal_fix=False)
    bounds[:, 0] = torch.tensor([frame, frame + extent]) / fps
    assert furthest(positions, middles(bounds)) < SECONDS


@pytest.mark.parametrize(("frame", "fps"), [(8, 24.0), (40, 25.0)])
def test_a_keyframe_of_eight_frames_stands_where_ltx_core_1_0_0_puts_it(frame, fps):
    from ltx_core.conditioning import VideoConditionByKeyframeIndex
    from ltx_core.tools import VideoLatentTools

    tools = VideoLatentTools(*ltx_video((5, 2, 3)), fps)
    condition = VideoConditionByKeyframeIndex(torch.zeros(1, 128, 1, 2, 3), frame, 1.0)
    state = condition.apply_to(tools.create_initial_state("cpu", torch.float32), tools)
    assert torch.equal(keyframe_positions(2, 3, frame, fps, duration=8), middles(state.positions[:, :, -6:]))


@pytest.mark.parametrize(("video", "latents"), AUDIO_FRAMES.items())
def test_audio_lasts_as_long_as_the_video(video, latents):
    from ltx_core.types import AudioLatentShape, VideoPixelShape

    assert audio_latent_frames(*video) == latents
    assert AudioLatentShape.from_video_pixel_shape(VideoPixelShape(1, video[0], 64, 64, video[1])).frames == latents


@pytest.mark.parametrize("pixels", [(512, 768, 121), (64, 128, 1), (1024, 1536, 25), (512, 512, 28), (64, 64, 32)])
def test_video_latents_have_the_shape_that_ltx_core_gives_a_video(pixels):
    from ltx_core.types import VideoLatentShape, VideoPixelShape

    height, width, frames = pixels
    theirs = VideoLatentShape.from_pixel_shape(VideoPixelShape(1, frames, height, width, 24.0))
    assert video_latent_shape(height, width, frames) == (theirs.frames, theirs.height, theirs.width)


@pytest.mark.parametrize("shape", SIZES)
def test_video_patches_are_ltx_cores_and_go_back(shape):
    patchifier, latent_shape = ltx_video(shape)
    latent = randn(*latent_shape.to_torch_shape())
    tokens = patchify_video(latent)
    assert torch.equal(tokens, patchifier.patchify(latent))
    assert torch.equal(unpatchify_video(tokens, shape), patchifier.unpatchify(tokens, latent_shape))
    assert torch.equal(unpatchify_video(tokens, shape), latent)


def test_keyframe_tokens_are_dropped_when_a_video_is_put_together():
    latent = randn(1, 128, 3, 2, 5)
    tokens = torch.cat([patchify_video(latent), randn(1, 10, 128, seed=1)], dim=1)
    assert torch.equal(unpatchify_video(tokens, (3, 2, 5)), latent)


@pytest.mark.parametrize("frames", [1, 26])
def test_audio_patches_are_ltx_cores_and_go_back(frames):
    patchifier, latent_shape = ltx_audio(frames)
    latent = randn(*latent_shape.to_torch_shape())
    tokens = patchify_audio(latent)
    assert torch.equal(tokens, patchifier.patchify(latent))
    assert torch.equal(unpatchify_audio(tokens), patchifier.unpatchify(tokens, latent_shape))
    assert torch.equal(unpatchify_audio(tokens), latent)
