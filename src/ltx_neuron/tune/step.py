"""One denoising step on random latents and contexts, on the ranks or as a reference in float32."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.ranks import HostRanks, Ranks
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.denoise.tiled import TiledStageRun
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.modulation import modulation_table
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling import latents, shapes
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.latent_state import initial_states
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.rankfiles import open_host_file


def prepared(
    on: Ranks,
    compiled: CompiledStep,
    workspace: Workspace,
    dtype: torch.dtype,
    job: Job,
    stage: Stage,
) -> StageRun:
    """A stage on ranks that have loaded its program, with seeded random noise, contexts and images.
    All inputs are exact in bfloat16, so runs of every dtype start from equal values."""
    host, config = open_host_file(workspace.dit_weights(job.loras)), workspace.transformer
    weights = {name: host.read(name).to(dtype) for name in host.shapes}
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(dtype)

    video = randn(1, job.bucket(stage).video_tokens, config.in_channels)
    audio = randn(1, compiled.bucket.audio_tokens, config.audio_in_channels)
    widths, mask = (config.video.inner, config.audio.inner), torch.ones(1, TEXT_TOKENS)
    pairs = [[randn(1, TEXT_TOKENS, width) for width in widths] for _ in range(2)]
    # Of the prompt and of the negative prompt.
    contexts = [
        Contexts(video_context, audio_context, mask, None) for video_context, audio_context in pairs
    ]
    zeros = latents.zeros(
        stage.height, stage.width, job.size.num_frames, job.size.frame_rate, dtype
    )
    generator = torch.Generator().manual_seed(1)
    image_shape = 1, shapes.VIDEO_CHANNELS, 1, *zeros[0].shape[3:]
    images = [
        (image, torch.randn(image_shape, generator=generator).to(dtype)) for image in job.placed
    ]
    modulation = partial(modulation_table, weights, config)
    kind = TiledStageRun if compiled.tiles else StageRun
    run = kind(on, compiled, config, dtype, modulation, COMPAT[None])
    inputs = {}, zeros, images, COMPAT[None], dtype
    states = initial_states(job, stage.upsampled, *inputs, stage.window)
    run.prepare(job, stage, contexts, states, generator)
    run.video, run.audio = video, audio
    return run


def last_step(run: StageRun) -> dict[str, Tensor]:
    """Run a prepared stage's last step, to sigma 0, on its noise; returns its latents, (1, 128, F,
    h, w) and (1, 8, Ta, 16). The last step returns the model's prediction. The first step, from
    sigma 1 to 0.994, would return almost its input."""
    run.start()
    run.step(run.stage.steps - 1)
    results, key = dict(zip(STREAMS, run.result(), strict=True)), run.stage.key
    return {f"{key}_{name}": results[name].contiguous() for name in run.bucket.streams}


@torch.no_grad()
def reference(workspace: Workspace, job: Job, layers: int | None) -> dict[str, Tensor]:
    """The expected latents of every stage's last step: computed in float32 on this machine's CPU
    from the checkpoint in the rank files' dtype, one block in memory at a time. layers: run only
    the first `layers` blocks; None: all."""
    source, outputs = workspace.source("dit", job.loras), {}

    def weight(name: str) -> Tensor:
        return source.tensor(name).to(workspace.dtype).float()

    for stage in job.stages:
        bucket = job.bucket(stage)
        comm: Any = SingleRank()  # lacks the methods of sequence parallelism
        program: Any = dit_program(workspace.transformer, bucket, 1, comm, torch.float32, 1)
        runs = {
            run: tuple(call for call in calls if layers is None or call[1] < layers)
            for run, calls in program.runs.items()
        }
        program = dataclasses.replace(program, runs=runs)
        on: Any = HostRanks(bucket.name, program, weight)
        compiled = CompiledStep(bucket, program)
        outputs |= last_step(prepared(on, compiled, workspace, torch.float32, job, stage))
    return outputs
