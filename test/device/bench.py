"""How test/device runs the project's scripts: what they run on, the models that they run, and each
script in a process that ends, with all it started, when its time is over."""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from lib.scripts import ROOT, Scripts, size_flags
from safetensors.torch import load_file
from tiny import TinySizes, assets_in
from tiny.split import split_assets_in
from torch import Tensor

from device.core_memory import counted_memory
from device.report import Budget, Stopped
from ltx_neuron import flags
from ltx_neuron.config.profiles import Profile
from ltx_neuron.demo import ASSETS
from ltx_neuron.doctor.system import System
from ltx_neuron.files import write_json
from ltx_neuron.job import Size
from ltx_neuron.report import table

PROMPT = "waves crash on the shore"
TINY_SIZE = Size(height=64, width=64, num_frames=9, two_stage=True)
# The released DiT's width (32 heads of 128 and 64 channels), two blocks of its 48; all around it
# stays tiny.
WIDE = TinySizes(layers=2, heads=32, head_dim=128, audio_head_dim=64, connector_layers=1)
WIDE_SIZE = Size(height=384, width=512, num_frames=25)
# Published compiles take up to half an hour; what takes longer than this hangs.
SCRIPT_SECONDS = 3 * 3600
SAMPLE_SECONDS = 0.5  # between two readings of the cores' memory
SHOWN_LINES = 15  # of a failed script's output
TIDY_SECONDS = 15.0  # that a script has to end its ranks
KILL_SECONDS = 15.0  # that the kernel has to end a killed process


def profile_settings(settings: tuple[str, ...]) -> list[str]:
    """Settings as --profile-set flags."""
    return [word for setting in settings for word in ("--profile-set", setting)]


class Target(NamedTuple):
    """What a script runs on: the flags --profile, --profile-set and --dtype."""

    profile: str
    settings: tuple[str, ...]
    dtype: str

    @property
    def flags(self) -> list[str]:
        return ["--profile", self.profile, *profile_settings(self.settings), "--dtype", self.dtype]


FP32, BF16 = Target("cpu", (), "float32"), Target("cpu", (), "bfloat16")


class Model(NamedTuple):
    """A model to run: its files, the size of its video, and where its artifacts lie."""

    name: str
    checkpoint: Path
    gemma_root: Path | None
    upsampler: Path | None
    size: Size
    artifacts: Path


class Run(NamedTuple):
    """A finished script: its output, its seconds, and the largest memory seen of each core, in
    bytes."""

    output: str
    seconds: float
    memory: dict[str, int]


@dataclass(frozen=True)
class Bench:
    """The flags, the machine, and how scripts are run."""

    args: argparse.Namespace
    profile: Profile
    system: System = System()
    budget: Budget = field(default_factory=Budget)

    @property
    def folder(self) -> Path:
        return self.args.work_dir

    @property
    def tp(self) -> int:
        return self.profile.degree(self.args.tp_degree)

    def device(self, model: "Model") -> Target:
        """What a model is run on. The tiny ones' heads have 8 and 4 channels, and nkilib tests its
        kernel with 64 and more: it might fail there for a reason that no real model has."""
        tiny = model.name in ("tiny", "ltx25") and self.profile.attention == "nki"
        settings = (*self.profile.settings, "attention=matmul") if tiny else self.profile.settings
        return Target(self.profile.name, settings, self.args.dtype)

    def need_device(self) -> None:
        if self.profile.device != "neuron":
            pytest.skip("no Neuron device")

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def run(self, log: str, *command: object, codes: tuple[int, ...] = (0,), seconds: float = SCRIPT_SECONDS) -> Run:
        """Run a Python script of this repository in its own process, its output in logs/. The
        section fails where its exit code is not among `codes` or it takes longer than `seconds`;
        Stopped where its own time ends."""
        path = self.log(log)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Scripts of this folder import others of it.
        paths = [str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        began = time.perf_counter()
        with open(path, "w") as log_file, CoreMemory(self.system) as memory:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=environment,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(min(seconds, self.budget.section_left()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_tree(process)
        took, output = time.perf_counter() - began, path.read_text(errors="replace")
        if code in codes:
            return Run(output, took, memory.most)
        last = "\n".join(output.replace("\r", "\n").strip().splitlines()[-SHOWN_LINES:])
        if code is None:
            stopped = f"{log} was stopped after {took / 60:.1f} minutes"
            if self.budget.section_left():
                pytest.fail(f"{stopped}, its longest time ({path}):\n{last}")
            raise Stopped(f"{stopped}: {self.budget.end()} ({path}):\n{last}")
        return pytest.fail(f"{log} ended with exit code {code} ({path}):\n{last}")

    def scripted(
        self,
        script: str,
        name: str,
        target: Target,
        content: dict,
        ending: str = ".json",
        seconds: float = SCRIPT_SECONDS,
    ) -> Path:
        """Run a script of this folder with a request: what it runs on, and `content`. Returns the
        file that it wrote."""
        request, output = self.folder / f"{name}-request.json", self.folder / f"{name}{ending}"
        content |= {"profile": target.profile, "settings": target.settings, "dtype": target.dtype}
        write_json(request, {"tp": self.tp, "output": str(output)} | content)
        self.run(name, "-m", f"device.{script}", request, seconds=seconds)
        return output

    def scripts(self, model: Model, target: Target) -> Scripts:
        """The scripts on a model, of a distilled generation."""
        run = ["--tp-degree", self.tp, *target.flags]
        size = [*size_flags(model.size), "--recipe", "distilled"]
        paths = model.gemma_root, model.upsampler
        return Scripts(model.checkpoint, model.artifacts, run, size, *paths)

    def _script(self, name: str, model: Model, target: Target) -> float:
        """Seconds of a script that shards or compiles."""
        log = f"{model.name}-{name.replace('_', '-')}-{target.profile}-{target.dtype}"
        return self.run(log, *self.scripts(model, target).command(name)).seconds

    def shard(self, model: Model, target: Target, gemma: bool) -> float:
        """Seconds to shard the DiT, and with `gemma` the text encoder."""
        names = ["shard_dit", *["shard_gemma3"] * gemma]
        return sum(self._script(name, model, target) for name in names)

    def compile(self, model: Model, target: Target, gemma: bool) -> tuple[float, float]:
        """Seconds for the DiT's graphs and for the text encoder's."""
        dit = self._script("compile_dit", model, target)
        return dit, self._script("compile_gemma3", model, target) if gemma else 0.0

    def decoder(self, model: Model, target: Target) -> tuple[float, float]:
        """Seconds to shard the video decoder, and to compile it for the model's size."""
        names = ("shard_vae", "compile_vae")
        return tuple(self._script(name, model, target) for name in names)

    def generate(self, model: Model, target: Target, name: str, *more: object) -> tuple[Run, dict[str, Tensor], dict]:
        """Run generate_ltx23.py: the run, every named tensor, and the latency report."""
        out = self.folder / f"{model.name}-{name}"
        flags = ["--prompt", PROMPT, "--output-path", out / "video.mp4"]
        flags += ["--perf-dump-path", out / "perf.json"]
        flags += ["--save-tensors", out / "tensors.safetensors", *more]
        command = self.scripts(model, target).command("generate", *flags)
        run = self.run(f"{model.name}-generate-{name}", *command)
        return run, load_file(out / "tensors.safetensors"), table.load(out / "perf.json")

    def step(self, model: Model, target: Target) -> dict[str, Tensor]:
        """The latents after one step (one_step), by a process of its own."""
        name = f"{model.name}-step-{target.profile}-{target.dtype}"
        content = request(model, model.size)
        return load_file(self.scripted("one_step", name, target, content, ".safetensors"))


def request(model: Model, size: Size) -> dict:
    """The fields of a request that name a model, and a size of video."""
    paths = {"checkpoint": str(model.checkpoint), "artifacts": str(model.artifacts)}
    return paths | {"size": dataclasses.asdict(size)}


def end_tree(process: subprocess.Popen) -> None:
    """End a process that leads a session, and all that it started: first it is asked to, which lets
    a script end its ranks and remove its temporary files."""
    started = []
    if process.poll() is None:
        # Listed while it lives: afterwards nobody knows who started what.
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIDY_SECONDS)
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # kill() returns before a process has ended; one that waits in the driver does not end.
    latest = time.monotonic() + KILL_SECONDS
    while any(map(_runs, started)) and time.monotonic() < latest:
        time.sleep(0.01)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs: one that has ended stays in the table until its parent asks."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class CoreMemory:
    """Reads the driver's counters of each core's memory as long as the `with` block runs. `most`
    has the largest bytes by core; it is empty where the driver has none.

    neuron-monitor would tell it too, but is a process to start each time, beside steps that are
    timed: step_times.py asks it between them.
    """

    def __init__(self, system: System):
        self.system, self.most, self._stop = system, {}, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "CoreMemory":
        if counted_memory(self.system.root):
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            for core, used in counted_memory(self.system.root).items():
                self.most[core] = max(used, self.most.get(core, 0))


def tiny(bench: Bench) -> Model:
    return _model("tiny", TINY_SIZE, bench)


def ltx25(bench: Bench) -> Model:
    """Tiny files of LTX-2.5, with the diffusion decoder. The others are found beside the
    transformer's."""
    transformer = split_assets_in(bench.folder / "ltx25").distilled
    return Model("ltx25", transformer, None, None, TINY_SIZE, bench.folder / "artifacts")


def wide(bench: Bench) -> Model:
    return _model("wide", WIDE_SIZE, bench)


def demo(bench: Bench) -> Model:
    """The trained checkpoint of a clone: angles of its vocoder reach 37, and random ones do not."""
    return Model("demo", ASSETS.checkpoint, None, None, TINY_SIZE, bench.folder / "artifacts")


def full(bench: Bench) -> Model:
    args = bench.args
    for flag in ("checkpoint_path", "gemma_root"):
        if getattr(args, flag) is None:
            pytest.skip(f"no --{flag.replace('_', '-')}")
    two_stage = args.spatial_upsampler_path is not None
    size = dataclasses.replace(flags.spec(args).size, two_stage=two_stage)
    return Model("full", args.checkpoint_path, args.gemma_root, args.spatial_upsampler_path, size, args.artifacts_dir)


def _model(name: str, size: Size, bench: Bench) -> Model:
    files = assets_in(bench.folder / name)
    paths = files.checkpoint, files.gemma_root, files.spatial_upsampler
    return Model(name, *paths, size, bench.folder / "artifacts")
