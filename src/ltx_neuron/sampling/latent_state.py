"""A stage's initial tokens: noise, latents of an earlier stage or of a file, images and references,
with their positions and denoise masks.

Sources: ltx-core conditioning/types, components/noisers.py, the later behaviour of both (1.1.2,
1.1.6) by default; conditioning/mask_utils.py and transformer_args.py.

Shapes (the batch is always 1): C latent channels (128), F latent frames, h, w latent rows and
columns, T video tokens: F h w of the clip, then h w for each keyframe; U distinct denoise masks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ltx_neuron.sampling.chunks import CARRIED
from ltx_neuron.sampling.compat import Compat
from ltx_neuron.sampling.conditions import ANCHOR, ImageCondition, held_mask
from ltx_neuron.sampling.extension import Window
from ltx_neuron.sampling.inputs import JobInputs
from ltx_neuron.sampling.latents import (
    audio_positions,
    audio_seconds,
    keyframe_positions,
    patchify_audio,
    patchify_video,
    reference_audio_positions,
    reference_positions,
    video_positions,
    video_seconds,
)
from ltx_neuron.sampling.shapes import SPACE_SCALE
from ltx_neuron.sampling.tiles import Tile


@dataclass(frozen=True)
class LatentState:
    """Tokens of one stream of a stage, appended ones last (ltx-core's LatentState)."""

    # (1, T, C), to which noise is added: zeros, an earlier stage's latents, or a file's
    latent: Tensor
    # (1, T, C), latents of held tokens: images, references, a retake's kept part
    clean_latent: Tensor
    denoise_mask: Tensor  # (T, 1) fp32: 1 denoised freely, 0 kept as in clean_latent
    # (1, 3, T) fp32: seconds, pixel row, pixel column; for audio (1, 1, T): seconds
    positions: Tensor
    frozen: bool = False  # the stream is an input: its sigma is 0 at every step
    # Initial noise of a frozen stream: with 0 it does not change, with 1 it is denoised to the held
    # latents (ltx-pipelines 1.2.0, in a retake)
    frozen_noise: float = 0.0
    # (T, T), added to its self-attention scores; None: all tokens attend to all
    bias: Tensor | None = None
    # (T, 1) fp32: 1 for tokens of latent frame 0 and of generated keyframes, which have a single
    # pixel frame; None for audio
    keyframes_mask: Tensor | None = None

    @property
    def masks(self) -> tuple[float, ...]:
        """The distinct denoise masks, 1 first. Each has its own timestep at every step."""
        return (1.0, *sorted(set(self.denoise_mask.flatten().tolist()) - {1.0}))

    def retake(self, seconds: Tensor, start: float, end: float) -> "LatentState":
        """Keep all tokens except those whose time overlaps `start` to `end`. seconds: start of each
        latent frame, and end of the last one."""
        return self._pinned((seconds[1:] <= start) | (seconds[:-1] >= end))

    def with_prefix(self, count: int) -> "LatentState":
        """Keep the first `count` tokens: what a window has of the one before it."""
        return self._pinned(torch.arange(self.latent.shape[1]) < count)

    def at_times(self, seconds: Tensor, new: tuple[int, int]) -> "LatentState":
        """Keep all tokens except those of the new frames, at other times (as in `retake`)."""
        kept, positions = torch.ones(len(seconds) - 1, dtype=torch.bool), self.positions.clone()
        kept[slice(*new)] = False
        middles = (seconds[:-1] + seconds[1:]) / 2
        positions[:, 0] = middles.repeat_interleave(len(self.denoise_mask) // len(kept))
        return replace(self._pinned(kept), positions=positions)

    def _pinned(self, kept: Tensor) -> "LatentState":
        """Keep some frames, or tokens, as in `latent`. kept: (F,) or (T,) bool."""
        tokens = kept.repeat_interleave(len(self.denoise_mask) // max(1, len(kept)))[:, None]
        return replace(self, denoise_mask=self.denoise_mask.masked_fill(tokens, 0))

    def seen_by(self, tile: Tile, tokens: Tensor) -> "LatentState":
        """The tokens that a tile sees, with positions that begin at its corner."""
        corner = torch.tensor([0, tile.rows.start, tile.columns.start]) * SPACE_SCALE
        marked, bias = self.keyframes_mask, self.bias
        return replace(
            self,
            latent=self.latent[:, tokens],
            clean_latent=self.clean_latent[:, tokens],
            denoise_mask=self.denoise_mask[tokens],
            positions=self.positions[:, :, tokens] - corner[None, :, None],
            keyframes_mask=None if marked is None else marked[tokens],
            bias=None if bias is None else bias[tokens][:, tokens],
        )

    def freeze(self, noise: float = 0.0) -> "LatentState":
        mask = torch.zeros_like(self.denoise_mask)
        return replace(self, denoise_mask=mask, frozen=True, frozen_noise=noise)

    def append(
        self,
        tokens: Tensor,
        positions: Tensor,
        denoise_mask: float,
        start: Tensor | None = None,
        generated: bool = False,
    ) -> "LatentState":
        """Append tokens (1, N, C) with a denoise mask. Noise is added to `start`, or to zeros.
        generated: whether they are a keyframe that the model generates."""
        mask = torch.full((tokens.shape[1], 1), denoise_mask)
        start = torch.zeros_like(tokens) if start is None else start
        marked = self.keyframes_mask
        if marked is not None:
            marked = torch.cat([marked, torch.full_like(mask, generated)])
        return replace(
            self,
            latent=torch.cat([self.latent, start], dim=1),
            clean_latent=torch.cat([self.clean_latent, tokens], dim=1),
            denoise_mask=torch.cat([self.denoise_mask, mask]),
            positions=torch.cat([self.positions, positions], dim=2),
            keyframes_mask=marked,
        )

    def with_keyframes(
        self, planes: Tensor, frames: Sequence[int], frame_rate: float, denoise_mask: float
    ) -> "LatentState":
        """Append known keyframes. planes: (1, C, K, h, w), of these frames."""
        state = self
        for frame, plane in zip(frames, planes.split(1, dim=2), strict=True):
            rows, columns = plane.shape[3:]
            positions = keyframe_positions(rows, columns, frame, frame_rate)
            state = state.append(patchify_video(plane), positions, denoise_mask)
        return state

    def noised(
        self, generator: torch.Generator, scale: float, compat_1_0_0: bool = False
    ) -> Tensor:
        """Draw noise in the latent's dtype and shape (1, T, C), appended tokens included, and mix
        it in by `scale` (1: noise only). Returns (1, T, C) in the latent's dtype. Noise is drawn
        for a frozen stream as well, because later draws depend on it."""
        latent, clean_latent, mask = self.latent, self.clean_latent, self.denoise_mask
        if self.frozen:
            scale, clean_latent, mask = self.frozen_noise, latent, torch.ones_like(mask)
        noise = torch.randn(latent.shape, dtype=latent.dtype, generator=generator)
        weight = torch.tensor(scale, dtype=torch.float32)
        if compat_1_0_0:
            # One blend by mask * scale: a held token keeps its initial latent, the image.
            mixed = noise * (mask * weight) + latent * (1 - mask * weight)
        else:
            # Noise by scale first, then the image by the mask (since 1.1.6).
            noisy = torch.lerp(latent.float(), noise.float(), weight)
            mixed = torch.lerp(clean_latent.float(), noisy, mask)
        return mixed.to(latent.dtype)

    def timestep_choice(self, timesteps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For a graph with U = `timesteps` modulation rows: the rows' masks (U,) fp32, and each
        token's row (T, U), one-hot. Surplus rows repeat mask 1 and are not used. With one row all
        tokens use it."""
        masks = self.masks if timesteps > 1 else (1.0,)
        rows = torch.tensor([*masks, *[1.0] * (timesteps - len(masks))], dtype=torch.float32)
        timestep_mask = torch.zeros(len(self.denoise_mask), timesteps)
        row_of_token = (self.denoise_mask == rows[: len(masks)]).int().argmax(dim=1)
        timestep_mask[torch.arange(len(self.denoise_mask)), row_of_token] = 1
        return rows, timestep_mask.to(dtype)


def initial_states(
    inputs: JobInputs,
    # Whether this is the second stage, which has no references except a dubbed clip
    upsampled: bool,
    tensors: Mapping[str, Tensor],  # encoded inputs by their --save-tensors names
    # (1, 128, F, h, w) and (1, 8, Ta, 16): zeros, a file's or the previous stage's latents
    start: tuple[Tensor, Tensor],
    # Each with its latent (1, 128, 1, h, w) at this stage's size
    images: list[tuple[ImageCondition, Tensor]],
    compat: Compat,
    dtype: torch.dtype,
    window: Window | None = None,  # of an extended video
) -> tuple[LatentState, LatentState]:
    """The initial state of a stage's video and audio."""
    frame_rate, shape = inputs.position_rate, start[0].shape[2:]
    frames, rows, columns = shape
    # fp32 positions since ltx-core 1.1.3: bf16 ones shift sound by up to 28 ms.
    positions_dtype = dtype if compat.positions else torch.float32
    video = video_state(
        start[0], frame_rate, images, compat.conditioning, positions_dtype, inputs.images_as_guides
    )
    audio, keyframes = audio_state(start[1]), inputs.generated_keyframes(upsampled)
    if references := inputs.appended_references(upsampled):
        counts, images_end = [], len(video.denoise_mask)
        names = reference_names(len(references), upsampled)
        for reference, latent in zip(references, map(tensors.__getitem__, names), strict=True):
            tokens, scales = patchify_video(latent), (reference.space_scale, reference.time_scale)
            positions = reference_positions(latent.shape[2:], frame_rate, *scales)
            dropped = reference.dropped_latents * latent[0, 0, 0].numel()
            tokens, positions = tokens[:, dropped:], positions[:, :, dropped:]
            first = tokens if compat.conditioning else None
            video = video.append(tokens, positions, held_mask(reference.strength), first)
            counts.append(tokens.shape[1])
        if (weights := tensors.get("reference_attention")) is not None:
            masked = zip(counts, weights[0].split(counts), strict=True)
            generated = len(keyframes) * rows * columns
            groups = (images_end - shape.numel(), None), *masked, (generated, None)
            video = replace(video, bias=attention_bias(shape.numel(), groups, video.latent.dtype))
    if given := inputs.given_keyframes:
        planes, mask = tensors["given_keyframes"], held_mask(ANCHOR)
        video = video.with_keyframes(planes, given, frame_rate, mask)
    # They begin as noise or, in stage 2, as stage 1's planes (1, C, K, h, w).
    for number, frame in enumerate(keyframes):
        tokens, first = torch.zeros_like(video.latent[:, : rows * columns]), None
        if upsampled:
            first = patchify_video(tensors["upsampled_keyframes"][:, :, number : number + 1])
        positions = keyframe_positions(rows, columns, frame, frame_rate)
        video = video.append(tokens, positions, 1.0, first, generated=True)
    if (chunk := inputs.chunk) and chunk.held:
        planes = tensors[f"{CARRIED}s{1 + upsampled}_generated_keyframes"]
        video = video.with_keyframes(planes, chunk.held, frame_rate, 0.0)
    if inputs.details(upsampled):
        half, scale = tensors["s2_reference_latent"], inputs.detailing_scale or 1
        positions = reference_positions(half.shape[2:], frame_rate, scale)
        video = video.append(patchify_video(half), positions, 0.0)
    if (temporal := inputs.temporal) and temporal.holds:
        video = video.with_prefix(temporal.shared * rows * columns)
    if window:  # its latents are at the clip's times, all held except the new ones
        bounds = video_seconds(window.video + frames, frame_rate)
        origin = bounds[window.video].item()
        sound = audio_seconds(window.audio + len(audio.denoise_mask)) - window.sound_offset
        window_bounds = (bounds[window.video :] - origin).to(positions_dtype)
        video = video.at_times(window_bounds, window.new_video)
        return video, audio.at_times(sound[window.audio :] - origin, window.new_audio)
    if retake := inputs.retake:
        times, noise = (retake.start_time, retake.end_time), float(compat.retake_noise)
        video = video.retake(video_seconds(frames, frame_rate), *times)
        if retake.regenerate == "audio":
            video = video.freeze(noise)
        if "audio_latent" in tensors:  # otherwise the file has no sound, and all of it is new
            audio = audio.retake(audio_seconds(start[1].shape[2]), *times)
            if retake.regenerate == "video":
                audio = audio.freeze(noise)
    if inputs.appended_audio(upsampled):
        # Stage 2 has stage 1's sound as its reference.
        tokens = patchify_audio(start[1] if upsampled else tensors["audio_reference"])
        audio = audio.append(tokens, reference_audio_positions(tokens.shape[1]), 0.0, tokens)
    return video, audio.freeze() if inputs.freezes_sound(upsampled) else audio


def reference_names(count: int, upsampled: bool) -> list[str]:
    """The names of a stage's encoded reference videos in --save-tensors."""
    name = "s2_reference_latent" if upsampled else "reference_latent"
    return [f"{name}_{number}" if number else name for number in range(count)]


def audio_state(latent: Tensor) -> LatentState:
    """The audio's state from its initial latent (1, 8, Ta, 16)."""
    tokens = patchify_audio(latent)
    mask = torch.ones(tokens.shape[1], 1)
    return LatentState(tokens, tokens.clone(), mask, audio_positions(tokens.shape[1]))


def video_state(
    latent: Tensor,
    frame_rate: float,
    images: list[tuple[ImageCondition, Tensor]],
    compat_1_0_0: bool = False,
    positions_dtype: torch.dtype = torch.float32,
    images_as_guides: bool = False,
) -> LatentState:
    """The video's state from its initial latent (1, C, F, h, w) and images (1, C, 1, h, w). An
    image at frame 0 replaces the first latent frame's tokens, unless images are guides; others are
    appended as keyframe tokens. compat_1_0_0 and positions_dtype: see compat.Compat
    (conditioning, positions)."""
    shape = frames, rows, columns = tuple(latent.shape[2:])
    # ltx-core 1.0.0 appends a keyframe's fp32 bounds to the rounded ones, and then computes all
    # mid-points in fp32.
    has_keyframes = any(images_as_guides or image.frame_index for image, _ in images)
    midpoints_dtype = torch.float32 if has_keyframes else positions_dtype
    tokens = patchify_video(latent).clone()  # (1, T, C)
    positions = video_positions(shape, frame_rate, positions_dtype, midpoints_dtype)  # (1, 3, T)
    mask, per_frame = torch.ones(tokens.shape[1], 1), rows * columns
    # Like a keyframe, latent frame 0 has a single pixel frame.
    marked = (torch.arange(len(mask)) < per_frame).float()[:, None]
    state = LatentState(tokens, tokens.clone(), mask, positions, keyframes_mask=marked)
    for image, encoded in images:
        image_tokens, mask = patchify_video(encoded), held_mask(image.strength)  # (1, h w, C)
        # In later releases only clean_latent has the image.
        if image.frame_index == 0 and not images_as_guides:
            state.clean_latent[:, :per_frame] = image_tokens
            state.denoise_mask[:per_frame] = mask
            if compat_1_0_0:
                state.latent[:, :per_frame] = image_tokens
        else:
            duration = 8 if compat_1_0_0 else 1
            added = keyframe_positions(rows, columns, image.frame_index, frame_rate, duration)
            state = state.append(image_tokens, added, mask, image_tokens if compat_1_0_0 else None)
    return state


def attention_bias(
    target_tokens: int, groups: Sequence[tuple[int, Tensor | None]], dtype: torch.dtype
) -> Tensor:
    """The bias (T, T) of the video's self-attention, the same for all heads: the logarithm of the
    attention weight between two tokens, or the dtype's lowest number for weight 0.

    target_tokens  number of the clip's tokens, which come first
    groups  appended tokens in order: (count, weights), weights (count,), or None for images and for
            references without a mask

    Attention between the clip and a token has the token's weight. From the first group with weights
    on, groups do not attend to earlier groups.
    """
    total, limits = target_tokens + sum(count for count, _ in groups), torch.finfo(dtype)
    bias = torch.full((total, total), limits.min, dtype=dtype)
    end, masked = target_tokens, False
    bias[:end, :end] = 0
    for count, weights in groups:
        start, end = end, end + count
        masked = masked or weights is not None
        if not masked:
            bias[:end, :end] = 0
            continue
        bias[start:end, start:end] = 0
        between = torch.zeros(count)
        if weights is not None:
            weights = weights.to(dtype)
            between = weights.clamp(min=limits.tiny).log().masked_fill(weights <= 0, limits.min)
        bias[:target_tokens, start:end] = between
        bias[start:end, :target_tokens] = between[:, None]
    return bias
