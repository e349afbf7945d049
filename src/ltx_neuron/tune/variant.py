"""Measures one variant in this process: ltx-neuron tune --variant FOLDER

It compiles missing graphs, loads the rank files, and times a cold and some warm steps of every
stage on random latents. The process and its children end when their parent ends.
"""

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.files import MANIFEST, read_json, write_checked, write_json
from ltx_neuron.job import Job
from ltx_neuron.models.programs import program_name
from ltx_neuron.tune.step import last_step, prepared, reference
from ltx_neuron.weights.tensorfile import write_tensors

RESULT, OUTPUTS = "result.json", "outputs.safetensors"  # in the variant's folder
_TIDY_SECONDS = 3.0
_CUT = "main of the first blocks"


def run(
    workspace: Workspace, job: Job, folder: Path, steps: int, layers: int | None, exact: bool
) -> None:
    """Measure, and write RESULT and OUTPUTS into a folder. steps: warm steps of each stage. layers:
    run only the first `layers` blocks; None: all. exact: compute the float32 reference instead."""
    errors.end_with_parent(_TIDY_SECONDS)
    if exact:
        outputs, result = reference(workspace, job, layers), {}
    else:
        result, outputs = measure(workspace, job, folder, steps, layers)
    write_tensors(folder / OUTPUTS, outputs, {})
    write_json(folder / RESULT, result)


@torch.no_grad()
def measure(
    workspace: Workspace, job: Job, folder: Path, steps: int, layers: int | None
) -> tuple[dict, dict[str, Tensor]]:
    """Returns the times (milliseconds of every stage's steps, the cold one first; seconds of
    compiling and loading) and the latents after each stage's last step."""
    torch.set_num_threads(workspace.profile.host_threads)
    began = time.perf_counter()
    buckets = job.buckets
    folders = build.make(workspace, workspace.dit_graphs(buckets))
    compiled = time.perf_counter()
    if layers:
        folders = [first_blocks(path, layers, folder) for path in folders]
    programs = dict(zip((b.name for b in buckets), map(Manifest, folders), strict=True))
    steps_ms: dict[str, list[float]] = {}
    outputs: dict[str, Tensor] = {}
    with registry.ranks(workspace.profile, workspace.tp, workspace.compiler_cache) as ranks:
        ranks.load(workspace.dit_weights(job.loras), programs, workspace.dtype)
        loaded = time.perf_counter()
        for stage, bucket in zip(job.stages, buckets, strict=True):
            program = CompiledStep(bucket, programs[bucket.name])
            run = prepared(ranks, program, workspace, workspace.dtype, job, stage)
            steps_ms[stage.name] = [_timed_step(run) for _ in range(1 + steps)]
            outputs |= last_step(run)
    seconds = {"compile_seconds": compiled - began, "load_seconds": loaded - compiled}
    counts = {stage.name: stage.steps for stage in job.stages}
    return seconds | {"steps_ms": steps_ms, "counts": counts}, outputs


def _timed_step(run) -> float:
    run.start()
    began = time.perf_counter()
    run.step(run.stage.steps - 1)
    return (time.perf_counter() - began) * 1e3


@torch.no_grad()
def compare_convolutions(workspace: Workspace, job: Job, rounds: int) -> None:
    """Decode the largest tile of a clip on every rank with each form of the VAE's convolutions, and
    print the milliseconds. Saves nothing."""
    clip, profile, pixels = job.latent_shape, workspace.profile, []
    tile = max(workspace.tile_shapes(clip), key=math.prod)
    name, generator = program_name("vae", *tile), torch.Generator().manual_seed(0)
    latent = torch.randn(1, 128, *tile, generator=generator).to(workspace.dtype)
    for form in ("conv2d", "conv3d"):
        workspace.profile = replace(profile, vae_convolution=form)
        graphs = workspace.decoder_graphs(clip)
        build.make(workspace, graphs)
        programs = {name: workspace.programs(graphs)[name]}
        with registry.ranks(profile, workspace.tp, workspace.compiler_cache) as ranks:
            ranks.load(workspace.weights("vae"), programs, workspace.dtype)
            ranks.put(name, tile_latent=torch.cat([latent] * ranks.size))
            ms = statistics.median([ranks.run(name) for _ in range(1 + rounds)][1:])
            pixels.append(ranks.get(name, "tile_pixels"))
        distance = rel_l2(pixels[-1], pixels[0])
        print(f"vae_convolution={form}: {ms:.2f} ms a tile, {distance:.1e} from conv2d", flush=True)


def rel_l2(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, summed in fp64; infinite where there is NaN."""
    error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


def first_blocks(folder: Path, layers: int, place: Path) -> Path:
    """A copy, in `place`, of compiled graphs whose runs call only the first `layers` blocks. The
    other calls move to an unused run, so that the manifest still lists all weights."""
    content = read_json(folder / MANIFEST)
    cut = place / folder.name
    cut.mkdir(parents=True, exist_ok=True)
    for graph in content["graphs"].values():
        (cut / graph["file"]).unlink(missing_ok=True)
        (cut / graph["file"]).symlink_to((folder / graph["file"]).absolute())
    for run, calls in list(content["runs"].items()):
        first = [call for call in calls if call[0] != "blocks" or call[1] < layers]
        if len(first) != len(calls):
            content["runs"] |= {run: first, _CUT: [call for call in calls if call not in first]}
    write_checked(cut, content)
    return cut
