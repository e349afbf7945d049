"""How test/device runs scripts: each in a process that ends, with all it started, when its time is over."""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from lib.scripts import ROOT, Scripts, size_flags
from safetensors.torch import load_file
from tiny import TinySizes, assets_in
from tiny.split import split_assets_in
from torch import Tensor

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
# The released DiT's width (32 heads of 128 and 64 channels), two blocks of its 48; all around it stays tiny.
WIDE = TinySizes(layers=2, heads=32, head_dim=128, audio_head_dim=64, connector_layers=1)
WIDE_SIZE = Size(height=384, width=512, num_frames=25)
SCRIPT_SECONDS = 3 * 3600  # published compiles take up to half an hour; what takes longer than this hangs
SHOWN_LINES = 15  # of a failed script's output
TIDY_SECONDS = 15.0  # that a script has to end its ranks
KILL_SECONDS = 15.0  # that the kernel has to end a killed process


def doctor_flags(args: argparse.Namespace) -> list[object]:
    words: list[object] = [word for setting in args.profile_set for word in ("--profile-set", setting)]
    for name in ("profile", "checkpoint_path", "gemma_root", "tp_degree", "artifacts_dir"):
        if value := getattr(args, name):
            words += [f"--{name.replace('_', '-')}", value]
    return words


class Target(NamedTuple):
    profile: str
    settings: tuple[str, ...]
    dtype: str

    @property
    def flags(self) -> list[str]:
        settings = [word for setting in self.settings for word in ("--profile-set", setting)]
        return ["--profile", self.profile, *settings, "--dtype", self.dtype]


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
    output: str
    seconds: float


@dataclass(frozen=True)
class Bench:
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

    def device(self, model: Model) -> Target:
        """What a model is run on. The tiny ones' heads have 8 and 4 channels, and nkilib tests its kernel with 64 and
        more: it might fail there for a reason that no real model has."""
        tiny = model.name in ("tiny", "ltx25") and self.profile.attention == "nki"
        settings = (*self.profile.settings, "attention=matmul") if tiny else self.profile.settings
        return Target(self.profile.name, settings, self.args.dtype)

    def run(self, log: str, *command: object, codes: tuple[int, ...] = (0,)) -> Run:
        """Run a Python script of this repository in its own process, its output in logs/. The section fails where its
        exit code is not among `codes` or it takes longer than SCRIPT_SECONDS; Stopped where its own time ends."""
        path = self.folder / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Scripts of this folder import others of it.
        paths = [str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        words, began = [sys.executable, *map(str, command)], time.perf_counter()
        with open(path, "w") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(min(SCRIPT_SECONDS, self.budget.section_left()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
        took, text = time.perf_counter() - began, path.read_text(errors="replace")
        if code in codes:
            return Run(text, took)
        last = "\n".join(text.replace("\r", "\n").strip().splitlines()[-SHOWN_LINES:])
        stopped = f"{log} was stopped after {took / 60:.1f} minutes"
        if code is not None:
            pytest.fail(f"{log} ended with exit code {code} ({path}):\n{last}")
        if self.budget.section_left():
            pytest.fail(f"{stopped}, its longest time ({path}):\n{last}")
        raise Stopped(f"{stopped}: {self.budget.end()} ({path}):\n{last}")

    def scripted(self, script: str, name: str, target: Target, content: dict, ending: str = ".json") -> Path:
        """Run a script of this folder with a request: what it runs on, and `content`. Returns the file it wrote."""
        request, output = self.folder / f"{name}-request.json", self.folder / f"{name}{ending}"
        content |= {"profile": target.profile, "settings": target.settings, "dtype": target.dtype}
        write_json(request, {"tp": self.tp, "output": str(output)} | content)
        self.run(name, "-m", f"device.{script}", request)
        return output

    def scripts(self, model: Model, target: Target) -> Scripts:
        run = ["--tp-degree", self.tp, *target.flags]
        size = [*size_flags(model.size), "--recipe", "distilled"]
        return Scripts(model.checkpoint, model.artifacts, run, size, model.gemma_root, model.upsampler)

    def make(self, model: Model, target: Target, *names: str) -> list[float]:
        """Seconds of scripts that shard or compile, such as shard_vae."""
        logs = {name: f"{model.name}-{name.replace('_', '-')}-{target.profile}-{target.dtype}" for name in names}
        return [self.run(log, *self.scripts(model, target).command(name)).seconds for name, log in logs.items()]

    def shard(self, model: Model, target: Target, gemma: bool) -> float:
        """Seconds to shard the DiT, and with `gemma` the text encoder."""
        return sum(self.make(model, target, "shard_dit", *["shard_gemma3"] * gemma))

    def compile(self, model: Model, target: Target, gemma: bool) -> list[float]:
        """Seconds for the DiT's graphs, and with `gemma` for the text encoder's."""
        return self.make(model, target, "compile_dit", *["compile_gemma3"] * gemma)

    def generate(self, model: Model, target: Target, name: str, *more: object) -> tuple[Run, dict[str, Tensor], dict]:
        """Run generate_ltx23.py: the run, every named tensor, and the latency report."""
        out = self.folder / f"{model.name}-{name}"
        flags = ["--prompt", PROMPT, "--output-path", out / "video.mp4", "--perf-dump-path", out / "perf.json"]
        flags += ["--save-tensors", out / "tensors.safetensors", *more]
        command = self.scripts(model, target).command("generate", *flags)
        run = self.run(f"{model.name}-generate-{name}", *command)
        return run, load_file(out / "tensors.safetensors"), table.load(out / "perf.json")

    def step(self, model: Model, target: Target) -> dict[str, Tensor]:
        name = f"{model.name}-step-{target.profile}-{target.dtype}"
        return load_file(self.scripted("one_step", name, target, request(model, model.size), ".safetensors"))


def request(model: Model, size: Size) -> dict:
    paths = {"checkpoint": str(model.checkpoint), "artifacts": str(model.artifacts)}
    return paths | {"size": dataclasses.asdict(size)}


def end_group(process: subprocess.Popen) -> None:
    """End a process that leads a session, and all that it started: first it is asked to, which lets a script end its
    ranks and remove its temporary files."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIDY_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that waits in the driver does not end
        process.wait(KILL_SECONDS)


def tiny(bench: Bench) -> Model:
    return _model("tiny", TINY_SIZE, bench)


def wide(bench: Bench) -> Model:
    return _model("wide", WIDE_SIZE, bench)


def _model(name: str, size: Size, bench: Bench) -> Model:
    files = assets_in(bench.folder / name)
    paths = files.checkpoint, files.gemma_root, files.spatial_upsampler
    return Model(name, *paths, size, bench.folder / "artifacts")


def ltx25(bench: Bench) -> Model:
    """Tiny files of LTX-2.5, with the diffusion decoder. The others are found beside the transformer's."""
    transformer = split_assets_in(bench.folder / "ltx25").distilled
    return Model("ltx25", transformer, None, None, TINY_SIZE, bench.folder / "artifacts")


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
