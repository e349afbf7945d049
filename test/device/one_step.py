"""One denoising step on random noise and contexts, compared by test/device between device and CPU.

    python -m device.one_step REQUEST.json

It is the last step of stage 1, to sigma 0, which leaves the model's prediction itself; of the ancestral sampler the one
before, which is the last that adds noise. The inputs are the same in every run (ltx_neuron.tune.step). The first step's
prediction changes the latents by about as much as the rule allows it to be off.

REQUEST.json has what Bench.scripted and bench.request write. The output has the latents of both streams.
"""

import sys
from pathlib import Path

import torch
from jobs import make_job
from safetensors.torch import save_file

from ltx_neuron import errors
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.files import read_json
from ltx_neuron.job import Size
from ltx_neuron.tune.step import prepared


def workspace_of(request: dict, *settings: str) -> Workspace:
    profile = resolve(request["profile"], (*request["settings"], *settings))
    torch.set_num_threads(profile.host_threads)
    return Workspace(request["checkpoint"], profile, request["artifacts"], request["tp"], request["dtype"])


@torch.no_grad()
def take_step(request: dict) -> None:
    workspace = workspace_of(request)
    job = workspace.resolved(make_job("random contexts", Size(**request["size"])))
    dtype, stage = workspace.dtype, job.stages[0]
    bucket, manifest = workspace.dit_program_for(job, stage)
    with registry.ranks(workspace.profile, request["tp"], workspace.compiler_cache) as ranks:
        ranks.load(workspace.dit_weights(), {bucket.name: manifest}, dtype)
        run = prepared(ranks, CompiledStep(bucket, manifest), workspace, dtype, job, stage)
        run.start()
        run.step(stage.steps - 1 - bucket.ancestral)
        latents = [latent.contiguous() for latent in run.result()]
    save_file(dict(zip(STREAMS, latents, strict=True)), request["output"])


if __name__ == "__main__":
    errors.run(lambda: take_step(read_json(Path(sys.argv[1]))))
