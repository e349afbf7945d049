"""One denoising step on given noise and contexts, compared by on_device.py between device and CPU.

    python benchmarks/lib/one_step.py REQUEST.json

It is the last step of stage 1, to sigma 0, which leaves the model's prediction itself
(ltx_neuron.tune.step). The first step's prediction changes the latents by about as much as the rule
allows it to be off.

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
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.tune.step import Inputs, last_step, random_inputs, with_inputs
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.rankfiles import open_host_file
from ltx_neuron.workspace import Workspace


def write_inputs(path: Path, checkpoint: Path, size: Size) -> None:
    """Write random noise (1, tokens, channels) and contexts (1, 1024, width) for a step. bf16 holds
    the numbers exactly, so runs of every dtype start from equal ones."""
    config = transformer_config(Checkpoint(checkpoint).config)
    job = Job("contexts are given", size)
    given = random_inputs(config, job, job.stages[0])
    context = {f"{name}_context": getattr(given.contexts[0], name) for name in ("video", "audio")}
    save_file({"video": given.video, "audio": given.audio, **context}, path)


@torch.no_grad()
def take_step(request: dict) -> None:
    """Run the last step of stage 1 on the inputs and write the latents of both streams."""
    given = load_file(request["inputs"])
    job = Job("contexts are given", Size(**request["size"]))
    profile = resolve(request["profile"], tuple(request["settings"]))
    workspace = Workspace(
        request["checkpoint"], profile, request["artifacts"], request["tp"], request["dtype"]
    )
    dtype, stage = workspace.dtype, job.stages[0]
    torch.set_num_threads(profile.host_threads)
    bucket, manifest = workspace.dit_program_for(job, stage)
    weights = workspace.dit_weights()
    host = open_host_file(weights)
    adaln = {name: host.read(name) for name in host.shapes}
    mask = torch.ones(1, TEXT_TOKENS)
    contexts = Contexts(given["video_context"], given["audio_context"], mask, None)
    inputs = Inputs(given["video"], given["audio"], [contexts])
    with registry.ranks(profile, request["tp"], workspace.compiler_cache) as ranks:
        ranks.load(weights, {bucket.name: manifest}, dtype)
        compiled = CompiledStep(bucket, manifest)
        run = StageRun(ranks, compiled, workspace.transformer, dtype, adaln, COMPAT[None])
        latents = last_step(with_inputs(run, job, stage, inputs))
    save_file(
        {name.removeprefix("s1_"): value for name, value in latents.items()}, request["output"]
    )


if __name__ == "__main__":
    errors.run(lambda: take_step(read_json(Path(sys.argv[1]))))
