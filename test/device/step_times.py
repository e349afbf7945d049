"""How long each graph of a step takes, and what is in the cores' memory, for test/device.

    python -m device.step_times REQUEST.json

REQUEST.json has what Bench.scripted and bench.request write, and folder, for a copy of the manifest. The output has
steps_ms of whole steps, the cold one first, calls with the milliseconds of each, and memory: bytes by core before
loading, loaded, after the steps, unloaded. Memory is never asked for beside a timed step. Not run on hardware.
"""

import contextlib
import statistics
import sys
import time
from pathlib import Path

import torch
from jobs import make_job

from device.one_step import workspace_of
from ltx_neuron import errors
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.job import Size
from ltx_neuron.tune.step import prepared

STEPS = 10  # warm ones


def core_memory(root: Path) -> dict[str, int]:
    """Bytes of device memory in use by core, as "neuron0/neuron_core1", by the driver's counters.

    The counter `total` is what is used now. To driver 2.30 it lies in stats/memory_usage/ of the core's folder; 2.31
    "moved several nodes to new paths", of which we know no list, so it is looked for by its name
    (neuron-sysfs-user-guide of the SDK's documentation, 2.32 and 2.33).
    """
    used, base = {}, root / "sys/devices/virtual/neuron_device"
    for path in sorted(base.glob("neuron*/neuron_core*/**/device_mem/total")):
        with contextlib.suppress(OSError, ValueError):
            used["/".join(path.relative_to(base).parts[:2])] = int(path.read_text())
    return used


def with_run_of_each_call(manifest: Manifest, place: Path) -> Manifest:
    """A copy, in `place`, of compiled graphs whose calls are runs of their own as well: "call 0", "call 1", ..."""
    content = read_json(manifest.folder / MANIFEST)
    place.mkdir(parents=True, exist_ok=True)
    for graph in content["graphs"].values():
        (place / graph["file"]).unlink(missing_ok=True)
        (place / graph["file"]).symlink_to((manifest.folder / graph["file"]).absolute())
    calls = content["runs"]["main"]
    content["runs"] |= {f"call {number}": [call] for number, call in enumerate(calls)}
    write_json(place / MANIFEST, content)
    return Manifest(place)


@torch.no_grad()
def measure(request: dict, root: Path = Path("/")) -> dict:
    """The times of the last stage's step on random latents, distilled."""
    workspace = workspace_of(request)
    job = workspace.resolved(make_job("random contexts", Size(**request["size"])))
    stage = job.stages[-1]
    bucket, compiled = workspace.dit_program_for(job, stage)
    manifest = with_run_of_each_call(compiled, Path(request["folder"]))
    calls = manifest.runs["main"]
    memory = {"before": core_memory(root)}
    with registry.ranks(workspace.profile, request["tp"], workspace.compiler_cache) as ranks:
        began = time.perf_counter()
        ranks.load(workspace.dit_weights(), {bucket.name: manifest}, workspace.dtype)
        load_seconds = time.perf_counter() - began
        memory["loaded"] = core_memory(root)
        run = prepared(ranks, CompiledStep(bucket, manifest), workspace, workspace.dtype, job, stage)
        steps = [_milliseconds(run, ["main"]) for _ in range(1 + STEPS)]
        by_call = [_milliseconds(run, [f"call {n}" for n in range(len(calls))]) for _ in steps]
        memory["after the steps"] = core_memory(root)
        ranks.unload()
        memory["unloaded"] = core_memory(root)
    medians = [statistics.median(times) for times in zip(*by_call[1:], strict=True)]
    return {
        "load_seconds": load_seconds,
        "steps_ms": [milliseconds for (milliseconds,) in steps],
        "calls": [
            {"graph": graph, "first_block": first, "ms": ms, **manifest.graphs[graph]["cost"]}
            for (graph, first), ms in zip(calls, medians, strict=True)
        ],
        "memory": memory,
    }


def _milliseconds(run: StageRun, names: list[str]) -> list[float]:
    """Of each of these runs, in order, of the last step from noise."""
    run.start()
    ranks, program = run.ranks, run.bucket.name
    return [ranks.run(program, name, step=run.stage.steps - 1) for name in names]


if __name__ == "__main__":
    request = read_json(Path(sys.argv[1]))
    errors.run(lambda: write_json(Path(request["output"]), measure(request)))
