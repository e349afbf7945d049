"""What a stage begins with: its initial latents, and the tokens of all its inputs."""

import torch
from torch import Tensor

from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.job import Job, Stage
from ltx_neuron.sampling import chunks, latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.dfr import CLIPS
from ltx_neuron.sampling.extension import start_of
from ltx_neuron.sampling.latent_state import LatentState, initial_states


def to_upsample(
    job: Job, stage: Stage, tensors: dict[str, Tensor]
) -> dict[str, tuple[Tensor, str]]:
    """The latents that a stage needs from the upsamplers: by their --save-tensors names, the input
    (1, 128, F, h, w) and "spatial" or "temporal". tensors: of the job so far."""
    if window := stage.temporal:
        name, clip = CLIPS[window.round - 1], job.rendering.clip
        return {} if name in tensors else {name: (clip(tensors, window.round - 1), "temporal")}
    sources = {"upsampled": "s1_video"} if stage.upsampled else {}
    if sources and job.of(stage).generated_keyframes(upsampled=True):  # as one clip of K latents
        sources["upsampled_keyframes"] = "s1_generated_keyframes"
    return {name: (tensors[source], "spatial") for name, source in sources.items()}


def starting_states(
    job: Job,
    stage: Stage,
    tensors: dict[str, Tensor],
    images: list[tuple[ImageCondition, Tensor]],
    dtype: torch.dtype,
) -> tuple[LatentState, LatentState]:
    """The initial state of a stage's video and audio.

    tensors  of the job so far, with what to_upsample names
    images   each with its latent (1, 128, 1, h, w) at this stage's size
    """
    stage_job, tensors = job.of(stage), dict(tensors)
    if stage_job.chunk:
        tensors |= chunks.sounds_of(stage_job.chunk, stage_job.size.frame_rate, tensors)
    if stage.temporal:
        tensors |= job.rendering.start(stage.temporal, tensors)
        video, audio = tensors["video"], tensors["audio"]
    elif stage.window:
        assert job.extension
        video, audio = start_of(job.extension, stage.window, tensors)
    elif stage.upsampled:
        video, audio = tensors["upsampled"], tensors["s1_audio"]
    else:
        shape = stage.height, stage.width, stage_job.size.num_frames, stage_job.size.frame_rate
        video, audio = latents.zeros(*shape, dtype)
        video, audio = tensors.get("video_latent", video), tensors.get("audio_latent", audio)
    held = heard = video[:, :, :0]  # what a window begins with
    if stage_job.chunk and stage_job.chunk.taken:
        held, heard = (tensors[f"{chunks.CARRIED}{stage.key}_{kind}"] for kind in STREAMS)
        video = torch.cat([held, video[:, :, held.shape[2] :]], dim=2)
        if not stage_job.freezes_sound(stage.upsampled):
            audio = torch.cat([heard, audio[:, :, heard.shape[2] :]], dim=2)
    inputs = tensors, (video, audio), images, COMPAT[job.compat], dtype
    states = initial_states(stage_job, stage.upsampled, *inputs, stage.window)
    return states[0].with_prefix(held[0, 0].numel()), states[1].with_prefix(heard.shape[2])
