"""A variant, measured in a process of its own: python -m ltx_neuron.tune.variant REQUEST.json

It compiles what is not compiled yet, loads the rank files, and takes a cold and some warm steps of
every stage on random latents. The process ends, with all that it started, when its parent has
ended.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron import errors, flags
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_json, write_tensors
from ltx_neuron.job import Job
from ltx_neuron.profiles import resolve
from ltx_neuron.sampling.spec import JobSpec
from ltx_neuron.tune.step import last_step, prepared, reference
from ltx_neuron.workspace import Workspace

RESULT, OUTPUTS = "result.json", "outputs.safetensors"  # in the request's folder
_TIDY_SECONDS = 3.0
_CUT = "main of the first blocks"


@dataclass(frozen=True)
class Request:
    """What a variant's process is asked for; travels as JSON.

    line      the job, as a prompts file says it
    settings  of the profile, key=value: those that were typed and the variant's
    layers    the first so many blocks; None: all of them
    steps     warm steps of each stage; 0: the reference in float32 instead of a variant
    folder    where results go
    """

    checkpoint: str
    artifacts: str
    profile: str
    settings: tuple[str, ...]
    tp: int
    dtype: str
    line: dict
    layers: int | None
    steps: int
    folder: str

    def workspace(self) -> Workspace:
        profile = resolve(self.profile, tuple(self.settings))
        return Workspace(self.checkpoint, profile, self.artifacts, self.tp, self.dtype)

    def job(self) -> Job:
        return flags.job_of(JobSpec().with_line(self.line))


def request(workspace: Workspace, job: Job) -> Request:
    """What every variant of a tuning is asked for."""
    return Request(
        str(workspace.checkpoint_path.absolute()),
        str(workspace.artifacts.absolute()),
        workspace.profile.name,
        (),
        workspace.tp,
        workspace.dtype_name,
        dataclasses.replace(job, prompt="random contexts").spec.line(),
        None,
        0,
        "",
    )


@torch.no_grad()
def measure(request: Request) -> tuple[dict, dict[str, Tensor]]:
    """Milliseconds of every stage's steps, cold one first, and the seconds before them; and the
    latents that each stage's last step leaves."""
    workspace, job = request.workspace(), request.job()
    torch.set_num_threads(workspace.profile.host_threads)
    began = time.perf_counter()
    buckets = job.buckets
    folders = workspace.compile_dit(buckets)
    compiled = time.perf_counter()
    if request.layers:
        folders = [first_blocks(path, request.layers, Path(request.folder)) for path in folders]
    programs = dict(zip((b.name for b in buckets), map(Manifest, folders), strict=True))
    steps: dict[str, list[float]] = {}
    outputs: dict[str, Tensor] = {}
    with registry.ranks(workspace.profile, request.tp, workspace.compiler_cache) as ranks:
        ranks.load(workspace.dit_weights(job.loras), programs, workspace.dtype)
        loaded = time.perf_counter()
        for stage, bucket in zip(job.stages, buckets, strict=True):
            program = CompiledStep(bucket, programs[bucket.name])
            run = prepared(ranks, program, workspace, workspace.dtype, job, stage)
            steps[stage.name] = [_timed_step(run) for _ in range(1 + request.steps)]
            outputs |= last_step(run)
    seconds = {"compile_seconds": compiled - began, "load_seconds": loaded - compiled}
    counts = {stage.name: stage.steps for stage in job.stages}
    return seconds | {"steps_ms": steps, "counts": counts}, outputs


def _timed_step(run) -> float:
    """Milliseconds of a step from noise, on the host's clock."""
    run.start()
    began = time.perf_counter()
    run.step(run.stage.steps - 1)
    return (time.perf_counter() - began) * 1e3


def first_blocks(folder: Path, layers: int, place: Path) -> Path:
    """A copy, in `place`, of compiled graphs whose runs call the first blocks alone. A graph of
    blocks is the same at any depth; the other calls stay, in a run that nobody runs, so that the
    rank files fit. Raises UserError where no call ends after so many blocks."""
    content = read_json(folder / MANIFEST)
    cut = place / folder.name
    cut.mkdir(parents=True, exist_ok=True)
    for graph in content["graphs"].values():
        (cut / graph["file"]).unlink(missing_ok=True)
        (cut / graph["file"]).symlink_to((folder / graph["file"]).absolute())
    for run, calls in list(content["runs"].items()):
        kept = [call for call in calls if call[0] != "blocks" or call[1] < layers]
        if len(kept) != len(calls):
            content["runs"] |= {run: kept, _CUT: [call for call in calls if call not in kept]}
    write_json(cut / MANIFEST, content)
    return cut


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("python -m ltx_neuron.tune.variant takes one REQUEST.json")
    errors.end_with_parent(_TIDY_SECONDS)
    asked = Request(**read_json(Path(sys.argv[1])))
    folder = Path(asked.folder)
    if asked.steps:
        result, outputs = measure(asked)
    else:
        began = time.perf_counter()
        outputs = reference(asked.workspace(), asked.job(), asked.layers)
        result = {"seconds": time.perf_counter() - began}
    write_tensors(folder / OUTPUTS, outputs, {})
    write_json(folder / RESULT, result)


if __name__ == "__main__":
    errors.run(main)
