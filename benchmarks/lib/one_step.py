"""One denoising step on given noise and contexts, compared by on_device.py between device and CPU.

    python benchmarks/lib/one_step.py REQUEST.json

It is the last step of stage 1, to sigma 0, which leaves the model's prediction itself. The first
step, from sigma 1 to 0.994, leaves almost what it began with: the model's prediction changes that
by about as much as the rule allows it to be off.

REQUEST.json has checkpoint, artifacts, size (the fields of job.Size), profile, settings, dtype, tp,
inputs (written by `write_inputs`) and output, the file for the latents after the step: video (1,
128, F, h, w) and audio (1, 8, Ta, 16).
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ltx_neuron import errors
from ltx_neuron.backends import registry
from ltx_neuron.config import TEXT_TOKENS, transformer_config
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.files import read_json
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.rankfiles import load_host
from ltx_neuron.workspace import Workspace


def write_inputs(path: Path, checkpoint: Path, size: Size) -> None:
    """Write random noise (1, tokens, channels) and contexts (1, 1024, width) for a step. bf16 holds
    the numbers exactly, so runs of every dtype start from equal ones."""
    config = transformer_config(Checkpoint(checkpoint).config)
    stage = size.stages()[0]
    shape = latents.video_latent_shape(stage.height, stage.width, size.num_frames)
    audio = latents.audio_latent_frames(size.num_frames, size.frame_rate)
    shapes = {
        "video": (1, shape[0] * shape[1] * shape[2], config.in_channels),
        "audio": (1, audio, config.audio_in_channels),
        "video_context": (1, TEXT_TOKENS, config.video.inner),
        "audio_context": (1, TEXT_TOKENS, config.audio.inner),
    }
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(size, generator=generator).bfloat16() for name, size in shapes.items()},
        path,
    )


@torch.no_grad()
def take_step(request: dict) -> None:
    """Run the last step of stage 1 on the inputs and write the latents of both streams."""
    inputs = load_file(request["inputs"])
    job = Job("contexts are given", Size(**request["size"]))
    profile = resolve(request["profile"], tuple(request["settings"]))
    workspace = Workspace(
        request["checkpoint"], profile, request["artifacts"], request["tp"], request["dtype"]
    )
    dtype = workspace.dtype
    stage = job.stages[0]
    torch.set_num_threads(profile.host_threads)
    bucket, manifest = workspace.dit_program_for(job.size, stage, (), job.recipe)
    weights = workspace.dit_weights()
    host = load_host(weights)
    shape = latents.video_latent_shape(stage.height, stage.width, job.size.num_frames)
    frames = latents.audio_latent_frames(job.size.num_frames, job.size.frame_rate)
    contexts = Contexts(
        inputs["video_context"].to(dtype),
        inputs["audio_context"].to(dtype),
        torch.ones(1, TEXT_TOKENS),
        None,
    )
    with registry.ranks(profile, request["tp"], workspace.compiler_cache) as ranks:
        ranks.load(weights, {bucket.name: manifest}, dtype)
        run = StageRun(
            ranks,
            CompiledStep(bucket, manifest),
            workspace.transformer,
            dtype,
            {name: host.read(name) for name in host.shapes},
            COMPAT[None],
        )
        empty = (
            torch.zeros(1, latents.VIDEO_CHANNELS, *shape, dtype=dtype),
            torch.zeros(1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS, dtype=dtype),
        )
        run.prepare(job, stage, [contexts], *empty, torch.Generator().manual_seed(0), [])
        run.video = inputs["video"].to(dtype)
        run.audio = inputs["audio"].to(dtype)
        run.start()
        run.step(len(stage.sigmas) - 2)
        video, audio = run.result()
    save_file({"video": video.contiguous(), "audio": audio.contiguous()}, request["output"])


if __name__ == "__main__":
    errors.run(lambda: take_step(read_json(Path(sys.argv[1]))))
