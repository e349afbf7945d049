"""What the streams of a stage begin with, from all that a job was given."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ltx_neuron.sampling import conditioning, latents
from ltx_neuron.sampling.attention_mask import attention_bias
from ltx_neuron.sampling.compat import Compat
from ltx_neuron.sampling.conditioning import LatentState
from ltx_neuron.sampling.conditions import ImageCondition, ReferenceVideo
from ltx_neuron.sampling.extension import Window
from ltx_neuron.sampling.inputs import Inputs


def initial_states(
    inputs: Inputs,
    frame_rate: float,
    upsampled: bool,
    tensors: Mapping[str, Tensor],
    start: tuple[Tensor, Tensor],
    images: list[tuple[ImageCondition, Tensor]],
    compat: Compat,
    dtype: torch.dtype,
    window: Window | None = None,
) -> tuple[LatentState, LatentState]:
    """What video and audio of a stage begin with, and what of them is held.

    upsampled  of the second stage, which has no references
    tensors  the inputs as encoded, by their names in --save-tensors
    start    (1, 128, F, h, w) and (1, 8, Ta, 16): zeros, a file's, or the stage before's latents
    images   each with its latent (1, 128, 1, h, w) at this stage's size
    window   of a video that is made longer
    """
    # fp32 positions since ltx-core 1.1.3: bf16 ones put sound up to 28 ms off the picture.
    positions = dtype if compat.positions else torch.float32
    video = conditioning.video_state(
        start[0], frame_rate, images, compat.conditioning, positions, inputs.images_as_guides
    )
    audio = conditioning.audio_state(start[1])
    if inputs.references and not upsampled:
        own_tokens = start[0].shape[2:].numel()
        video = _with_references(inputs.references, video, own_tokens, frame_rate, tensors)
    if window:
        return window.states(video, audio, frame_rate, positions)
    if retake := inputs.retake:
        times, noise = (retake.start_time, retake.end_time), float(compat.retake_noise)
        audio_seconds = latents.audio_seconds(start[1].shape[2])
        video = video.retake(latents.video_seconds(start[0].shape[2], frame_rate), *times)
        if retake.regenerate == "audio":
            video = video.freeze(noise)
        if "audio_latent" in tensors:  # without sound in the file, all of it is new
            audio = audio.retake(audio_seconds, *times)
            if retake.regenerate == "video":
                audio = audio.freeze(noise)
    return video, audio.freeze() if inputs.sound else audio


def _with_references(
    references: tuple[ReferenceVideo, ...],
    video: LatentState,
    own_tokens: int,
    frame_rate: float,
    tensors: Mapping[str, Tensor],
) -> LatentState:
    """The video's state with its references, and with their mask as a bias.

    own_tokens  how many of the state's are the clip's
    """
    guides = len(video.denoise_mask) - own_tokens
    groups, weights = [(guides, None)], tensors.get("reference_attention")
    for number, reference in enumerate(references):
        latent = tensors[f"reference_latent_{number}" if number else "reference_latent"]
        video = conditioning.with_reference(video, reference, latent, frame_rate)
        count = latent.shape[2:].numel()
        if weights is not None:
            groups.append((count, weights[0, :count]))
            weights = weights[:, count:]
    if weights is None:
        return video
    return replace(video, bias=attention_bias(own_tokens, groups, video.latent.dtype))
