"""What the host does in a warm denoising step, of a DiT without its blocks.

    python benchmarks/host_step.py

The DiT has the released widths and random bf16 weights; its transformer blocks, which a device
computes, are left out. The engine's own loop runs on a rank process that holds the step's first and
last graph. Whatever passes between two ends of steps and is not within those graphs counts as the
host's: the pipe, the process that wakes up, the check for NaN, the report and the callback. The
cases take turns, a schedule of 8 steps each; medians count. The last line is JSON.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from lib.harness import finish, print_conditions
from lib.harness import parser as harness_parser
from tiny import TinySizes
from tiny.config import released_config, tiny_config
from tiny.weights import DIFFUSION, random_weight, save
from torch import Tensor
from tqdm import tqdm

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.denoise import CompiledStep, StageRun, starting_states
from ltx_neuron.engine.run import Engine, measured_step
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.job import Job, Size
from ltx_neuron.models.modulation import modulation_table
from ltx_neuron.models.programs import Program, dit_program
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling import shapes
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import open_host_file
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS

SIZES = {"384x512x25": Size(384, 512, 25), "512x768x121": Size(512, 768, 121)}
TINY_SIZES = {"64x64x9": Size(64, 64, 9)}
DTYPE = torch.bfloat16


class Steps(NamedTuple):
    """Host milliseconds and bytes to the device of warm steps."""

    milliseconds: list[float]
    sent: list[int]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DTYPE)


def without_blocks(config: dict):
    """ltx-core's DiT of no blocks, on the meta device."""
    import_ltx_core()
    from ltx_core.model.transformer import LTXModelConfigurator

    with torch.device("meta"):
        return LTXModelConfigurator.from_config(
            config | {"transformer": config["transformer"] | {"num_layers": 0}}
        )


def write_checkpoint(path: Path, config: dict) -> None:
    """A checkpoint of everything in the DiT but its blocks, random."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, like in without_blocks(config).state_dict().items():
        dtype = torch.float32 if "scale_shift_table" in name else DTYPE
        weights[DIFFUSION + name] = random_weight(name, like, generator).to(dtype)
    save(path, weights, {"config": json.dumps(config), "model_version": "2.3.0"})


class TimedStage(StageRun):
    """A stage whose steps' device milliseconds are kept."""

    def step(self, number: int) -> float:
        self.device_ms.append(super().step(number))
        return self.device_ms[-1]


class Ours:
    """The engine's denoising loop on ranks that hold the step's head and tail."""

    def __init__(self, checkpoint: Path, folder: Path, tp: int, cases: dict[str, Job]):
        self.tp = tp
        self.cases = cases
        self.workspace = Workspace(checkpoint, resolve("cpu"), folder / "artifacts", tp, "bfloat16")
        self.engine = Engine(self.workspace, Recorder())
        source = Source(SHARDED_MODELS["dit"], [self.workspace.checkpoint])
        self.weights = folder / "weights"
        shard_weights(
            source, self.weights, {"model": "dit", "tp": tp}, tp, DTYPE, shard_specs(source, tp, {})
        )
        host = open_host_file(self.weights)
        weights = {name: host.read(name) for name in host.shapes}
        self.modulation = partial(modulation_table, weights, self.workspace.transformer)
        self.buckets = {case: job.buckets[0] for case, job in cases.items()}
        for bucket in set(self.buckets.values()):
            path = folder / bucket.name
            registry.compile_program(
                lambda b=bucket: self._program(b), path, {}, DTYPE, self.workspace.profile, tp
            )
        self.programs = {
            bucket.name: Manifest(folder / bucket.name) for bucket in self.buckets.values()
        }

    def _program(self, bucket) -> Program:
        """A bucket's step without its blocks: the tail takes what the head returns."""
        config, comm = transformer_config(self.workspace.checkpoint.config), TorchDistComm(self.tp)
        whole = dit_program(config, bucket, self.tp, comm, DTYPE, blocks_per_graph=1)
        modules = {name: whole.modules[name] for name in ("head", "tail")}
        return replace(whole, modules=modules, runs={"main": (("head", 0), ("tail", 0))})

    def __enter__(self) -> "Ours":
        self.ranks = registry.ranks(self.workspace.profile, self.tp, self.workspace.compiler_cache)
        self.ranks.load(self.weights, self.programs, DTYPE)
        return self

    def __exit__(self, *_) -> None:
        self.ranks.close()

    def prepare(self, case: str) -> None:
        """What a stage uploads before its steps."""
        job, config = self.cases[case], self.workspace.transformer
        rows, columns = shapes.video_latent_shape(job.size.height, job.size.width, 1)[1:]
        held = 1, shapes.VIDEO_CHANNELS, 1, rows, columns
        images = [(image, randn(*held)) for image in job.images]
        widths = config.video.inner, config.audio.inner
        contexts = Contexts(
            *(randn(1, TEXT_TOKENS, width) for width in widths), torch.ones(1, TEXT_TOKENS), None
        )
        self.run = TimedStage(
            self.ranks,
            CompiledStep(self.buckets[case], self.programs[self.buckets[case].name]),
            config,
            DTYPE,
            self.modulation,
            COMPAT[None],
        )
        states = starting_states(job, job.stages[0], {}, images, DTYPE)
        self.run.prepare(job, job.stages[0], [contexts], states, torch.Generator().manual_seed(0))

    def steps(self) -> Steps:
        """A schedule's warm steps, each from the end of the one before it to its own end."""
        ends = []  # of every step: the time, and the bytes so far, which are all of commands
        self.run.device_ms = []
        ranks = self.ranks
        self.run.start()
        # The progress bar is drawn all the same.
        quiet = contextlib.redirect_stderr(io.StringIO())
        with quiet, self.engine.recorder.phase("denoise_stage_1"):
            for number in tqdm(range(self.run.stage.steps)):
                measured_step(self.run, number, self.engine.recorder)
                ends.append((time.perf_counter(), ranks.bytes_sent + ranks.command_bytes))
        times, sent = zip(*ends, strict=True)
        walls = [(after - before) * 1e3 for before, after in pairwise(times)]
        host = [wall - device for wall, device in zip(walls, self.run.device_ms[1:], strict=True)]
        return Steps(host, [after - before for before, after in pairwise(sent)])


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument(
        "--tp-degree",
        type=int,
        default=1,
        help="rank processes (default %(default)s: one core for the rank)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="schedules of 8 steps of each (default %(default)s)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny widths and one tiny size: shows that this script runs",
    )
    args = parser.parse_args()
    config = tiny_config(TinySizes()) if args.tiny else released_config()
    image = ImageCondition("a random latent", 0, 1.0)
    cases = {
        f"{name} {kind}": Job.of_size(size, prompt="contexts are given", image=images)
        for name, size in (TINY_SIZES if args.tiny else SIZES).items()
        for kind, images in (("text to video", ()), ("image to video", (image,)))
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "without-blocks.safetensors"
        write_checkpoint(checkpoint, config)
        print_conditions(f"TP={args.tp_degree}")
        with Ours(checkpoint, Path(folder), args.tp_degree, cases) as ours:
            finish(args, **measured(ours, args.repeats))


def measured(ours: Ours, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds and bytes of every case, printed; the cases take turns."""
    steps = {case: Steps([], []) for case in ours.cases}
    for number in range(1 + repeats):
        for case, of_case in steps.items():
            ours.prepare(case)
            ours.steps()  # cold: caches, allocations, the first run of the graphs
            for values, new in zip(of_case, ours.steps(), strict=True):
                values.extend(new if number else [])
    medians = {}
    for case, (milliseconds, sent) in steps.items():
        found = {"ms": statistics.median(milliseconds), "bytes": statistics.median(sent)}
        slow = statistics.quantiles(milliseconds, n=10)[-1]
        print(
            f"{case:28} {found['ms']:9.3f} ms a step (p90 {slow:.3f}, n {len(milliseconds)}),"
            f" {found['bytes']:,.0f} bytes",
            flush=True,
        )
        medians[case] = found
    return medians


if __name__ == "__main__":
    main()
