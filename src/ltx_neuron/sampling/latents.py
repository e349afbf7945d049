"""Patches and positions of the latents of a video of H x W pixels, frames and frame rate.

Sources: ltx-core types.py, components/patchifiers.py, tools.py. The scale factors are fixed
upstream.

Shapes (the batch is always 1): C video channels (128), F latent frames, h, w latent rows and
columns, Ta audio latents; an audio token has AUDIO_CHANNELS * MEL_BINS = 128 numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ltx_neuron.sampling.shapes import (
    AUDIO_CHANNELS,
    HOP,
    MEL_BINS,
    MEL_FRAMES_PER_LATENT,
    SAMPLE_RATE,
    SPACE_SCALE,
    TIME_SCALE,
    VIDEO_CHANNELS,
    audio_latent_frames,
    video_latent_shape,
)

REFERENCE_GAP = 0.04  # seconds between the end of a reference's sound and the clip's beginning


def zeros(
    height: int, width: int, num_frames: int, frame_rate: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(1, C, F, h, w) and (1, 8, Ta, 16): a first stage's initial latents, which noise replaces."""
    shape = video_latent_shape(height, width, num_frames)
    frames = audio_latent_frames(num_frames, frame_rate)
    video = torch.zeros(1, VIDEO_CHANNELS, *shape, dtype=dtype)
    return video, torch.zeros(1, AUDIO_CHANNELS, frames, MEL_BINS, dtype=dtype)


def patchify_video(latent: Tensor) -> Tensor:
    """(1, C, F, h, w) -> (1, F*h*w, C)"""
    return latent.flatten(2).transpose(1, 2)


def unpatchify_video(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """(1, F*h*w, C) -> (1, C, F, h, w); keyframe tokens beyond the clip are dropped."""
    count = shape[0] * shape[1] * shape[2]
    return tokens[:, :count].transpose(1, 2).unflatten(2, shape).contiguous()


def patchify_audio(latent: Tensor) -> Tensor:
    """(1, 8, Ta, 16) -> (1, Ta, 128)"""
    return latent.transpose(1, 2).flatten(2)


def unpatchify_audio(tokens: Tensor) -> Tensor:
    """(1, Ta, 128) -> (1, 8, Ta, 16)"""
    return tokens.unflatten(2, (AUDIO_CHANNELS, MEL_BINS)).transpose(1, 2).contiguous()


def video_positions(
    shape: Sequence[int],
    frame_rate: float,
    dtype: torch.dtype = torch.float32,
    midpoints_dtype: torch.dtype | None = None,
) -> Tensor:
    """Mid-points (1, 3, F*h*w) of every token: seconds, pixel row, pixel column. dtype and
    midpoints_dtype round the bounds and the mid-points: see compat.Compat.positions. The first
    latent frame is one pixel frame and every later one eight ("causal"): at 24 fps .0208, .2083,
    .5417 s. Audio-video attention compares these seconds with the audio's, so an offset here shifts
    sound against the picture."""
    bounds = video_seconds(shape[0], frame_rate).to(dtype).to(midpoints_dtype or dtype)
    return _grid(_middles(bounds), shape[1], shape[2])


def video_seconds(latent_frames: int, frame_rate: float) -> Tensor:
    """Start of each latent frame and end of the last one in seconds, (F + 1,) fp32."""
    # In pixel frames 0, 1, 9, 17, ...
    frames = torch.arange(latent_frames + 1)
    return (frames * TIME_SCALE + 1 - TIME_SCALE).clamp(min=0).float() / frame_rate


def reference_positions(
    shape: Sequence[int], frame_rate: float, space_scale: int = 1, time_scale: int = 1
) -> Tensor:
    """Mid-points (1, 3, F*h*w) of a reference video's tokens beside a clip of `frame_rate`. One of
    its pixels covers space_scale pixels of the clip per side, a frame time_scale frames; both end
    at the same time. Source: ltx-core 1.2.0 reference_video_cond.py."""
    bounds = video_seconds(shape[0], 1.0) / (frame_rate / time_scale)
    if time_scale != 1:
        first = video_seconds(1, frame_rate)[1]  # end of the clip's first latent frame
        bounds = (bounds - (time_scale - 1) * first).clamp(min=0)
    return _grid(_middles(bounds), shape[1], shape[2], SPACE_SCALE * space_scale)


def keyframe_positions(
    rows: int, columns: int, frame_index: int, frame_rate: float, duration: int = 1
) -> Tensor:
    """Mid-points (1, 3, h*w) of an appended keyframe's tokens; it lasts `duration` pixel frames
    (ltx-core 1.0.0: 8)."""
    start = torch.tensor([float(frame_index)]) / frame_rate
    end = torch.tensor([float(frame_index + duration)]) / frame_rate
    return _grid((start + end) / 2.0, rows, columns)


def between_keyframes(count: int, num_frames: int) -> tuple[int, ...]:
    """Frames of `count` keyframes between a clip's first and last frame, at equal distances.
    Source: ltx-pipelines 1.2.0 evenly_spaced_keyframe_positions."""
    frames = torch.linspace(0, num_frames - 1, count + 2).round().int()
    return tuple(frames[1:-1].tolist())


def _middles(bounds: Tensor) -> Tensor:
    return (bounds[:-1] + bounds[1:]) / 2.0


def _grid(seconds: Tensor, rows: int, columns: int, pixels: int = SPACE_SCALE) -> Tensor:
    """Mid-points (1, 3, F*h*w) from those in time (F,), in the order of patchify_video's tokens.
    pixels: between latent rows and columns."""

    def midpoints(count: int) -> Tensor:
        return _middles((torch.arange(count + 1) * pixels).to(seconds.dtype))

    grid = torch.meshgrid(seconds, midpoints(rows), midpoints(columns), indexing="ij")
    return torch.stack(grid).flatten(1).unsqueeze(0)


def audio_positions(latent_frames: int) -> Tensor:
    """Mid-points (1, 1, Ta) in seconds, fp32, shifted so that a latent ends with the last sample on
    which it depends."""
    return _middles(audio_seconds(latent_frames))[None, None]


def reference_audio_positions(latent_frames: int) -> Tensor:
    """Mid-points (1, 1, Ta) in seconds, fp32, of a reference's sound: all before the clip, the end
    0.04 s before its beginning. Source: ltx-pipelines 1.2.0 dubit.py."""
    bounds = audio_seconds(latent_frames)
    return _middles(bounds - bounds[-1].item() - REFERENCE_GAP)[None, None]


def audio_seconds(latent_frames: int) -> Tensor:
    """Start of each audio latent and end of the last one in seconds, (Ta + 1,) fp32."""
    # In mel frames 0, 1, 5, 9, ...: causal like the video's.
    mel = torch.arange(latent_frames + 1, dtype=torch.float32) * MEL_FRAMES_PER_LATENT
    mel = (mel + 1 - MEL_FRAMES_PER_LATENT).clip(min=0)
    return mel * HOP / SAMPLE_RATE
