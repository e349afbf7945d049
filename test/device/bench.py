"""What the sections of test/device run on: models, the time that is left, the page, scripts that end with it."""

import argparse
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from lib.scripts import ROOT, Scripts, size_flags
from safetensors.torch import load_file
from tiny import TinySizes, assets_in
from tiny.split import split_assets_in
from torch import Tensor

from ltx_neuron import flags
from ltx_neuron.config.profiles import Profile, resolve
from ltx_neuron.demo import ASSETS
from ltx_neuron.doctor.public import public
from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.job import Size
from ltx_neuron.report import latency
from ltx_neuron.tune.variant import OUTPUTS, RESULT

PROMPT = "waves crash on the shore"
TINY_SIZE = Size(height=64, width=64, num_frames=9, two_stage=True)
# The released DiT's width (32 heads of 128 and 64 channels), two blocks of its 48; all around it stays tiny.
WIDE = TinySizes(layers=2, heads=32, head_dim=128, audio_head_dim=64, connector_layers=1)
WIDE_SIZE = Size(height=384, width=512, num_frames=25)
STEPS = 10  # warm ones that are timed
LONGEST = 4  # a section that takes so many times its estimate may hang: the others want their time
SCRIPT_SECONDS = 3 * 3600  # published compiles take up to half an hour; what takes longer than this hangs
SHOWN_LINES = 15  # of a failed script's output
TIDY_SECONDS = 15.0  # that a script has to end its ranks, and the kernel to end a killed process


class Section(NamedTuple):
    """A test of test_device.py."""

    name: str
    minutes: float  # an estimate of what it takes
    run: Callable[["Bench"], Iterable[str]]  # returns the lines of what it found
    needs: tuple[str, ...] = ()  # names of the sections that must be done before it

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


class Target(NamedTuple):
    profile: str
    settings: tuple[str, ...]
    dtype: str


BF16 = Target("cpu", (), "bfloat16")


class Model(NamedTuple):
    """A model to run: its files, the size of its video, and where its artifacts lie."""

    name: str
    checkpoint: Path
    gemma_root: Path | None
    upsampler: Path | None
    size: Size
    artifacts: Path
    film: Path | None = None  # of that size, to be made again from its first frame to its last


class Bench:
    """done: names of the sections that are."""

    def __init__(self, args: argparse.Namespace, profile: Profile):
        self.args, self.profile, self.folder = args, profile, args.work_dir
        self.tp, self.page, self.done = profile.degree(args.tp_degree), self.folder / "report.md", set()
        minutes = math.inf if args.minutes is None else args.minutes
        if not minutes > 0:
            raise UserError(f"--minutes {minutes:g}: wanted minutes above 0, as in --minutes 60")
        self.end = self.section_end = time.monotonic() + 60 * minutes

    def say(self, *lines: str) -> None:
        """Add lines to the page, without what it must not carry. It has them however the section ends."""
        with open(self.page, "a") as page:
            page.writelines(f"{public(line)}\n" for line in lines)

    def begin(self, section: Section) -> None:
        """Give a section its time; skip it where that is too short, or one that it needs is not done."""
        if missing := [need.replace("_", " ") for need in section.needs if need not in self.done]:
            pytest.skip(f"needs {', '.join(missing)}")
        if section.minutes > (left := max(0.0, self.end - time.monotonic()) / 60):
            pytest.skip(f"takes about {section.minutes:g} minutes, {left:.1f} are left")
        longest = 60 * LONGEST * section.minutes if self.end < math.inf else math.inf
        self.section_end = min(self.end, time.monotonic() + longest)
        self.say("", f"## {section.title}", "")

    def device(self, model: Model) -> Target:
        """What a model is run on. The small ones' heads have at most 40 channels, and nkilib tests its kernel with 64
        and more: it might fail there for a reason that no real model has."""
        small = model.name in ("tiny", "ltx25", "demo") and self.profile.attention == "nki"
        settings = (*self.profile.settings, "attention=matmul") if small else self.profile.settings
        return Target(self.profile.name, settings, self.args.dtype)

    def run(self, log: str, *command: object, codes: tuple[int, ...] = (0,)) -> str:
        """The output of a Python script, run in its own process; it is in logs/ too. The section fails where the exit
        code is not among `codes` or the script takes longer than SCRIPT_SECONDS, and is skipped where its time ends."""
        path = self.folder / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        paths = f"{ROOT / 'test'}:{os.environ.get('PYTHONPATH', '')}"  # scripts of this folder import others of it
        environment = os.environ | {"PYTHONPATH": paths.removesuffix(":")}
        words, began = [sys.executable, *map(str, command)], time.monotonic()
        # The end of its stdin tells a measured variant that we have exited.
        how = dict(cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        with open(path, "w") as output:
            process = subprocess.Popen(words, stdout=output, **how)
            try:
                code = process.wait(min(SCRIPT_SECONDS, max(0.0, self.section_end - began)))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
        text = path.read_text(errors="replace")
        if code in codes:
            return text
        last = "\n".join([f" ({path}):", *text.replace("\r", "\n").strip().splitlines()[-SHOWN_LINES:]])
        if code is not None:
            pytest.fail(f"{log} ended with exit code {code}{last}", pytrace=False)
        now = time.monotonic()
        stopped = f"{log} was stopped after {(now - began) / 60:.1f} minutes"
        if now < self.section_end:
            pytest.fail(f"{stopped}, its longest time{last}", pytrace=False)
        pytest.skip(f"{stopped}: {f'{LONGEST} times the estimate' if now < self.end else 'the budget ended'}{last}")

    def probed(self, name: str, **content) -> dict:
        """What probes.py finds. Probes attend to nothing: the sections that need a kernel find that it is missing."""
        request, output = self.folder / f"{name}-request.json", self.folder / f"{name}.json"
        content |= {"probe": name, "folder": str(self.folder / name), "output": str(output), "tp": self.tp}
        settings = [*self.profile.settings, "attention=matmul"]
        content |= {"profile": self.profile.name, "settings": settings, "dtype": self.args.dtype}
        write_json(request, content)
        self.run(name, "-m", "device.probes", request)
        return read_json(output)

    def scripts(self, model: Model, target: Target) -> Scripts:
        settings = [word for setting in target.settings for word in ("--profile-set", setting)]
        run = ["--tp-degree", self.tp, "--profile", target.profile, *settings, "--dtype", target.dtype]
        size = ["--video-path", model.film] if model.film else size_flags(model.size)
        size += ["--recipe", "distilled"]
        return Scripts(model.checkpoint, model.artifacts, run, size, model.gemma_root, model.upsampler)

    def make(self, model: Model, target: Target, *names: str) -> str:
        """Run scripts that shard or compile, such as shard_vae: a line with the seconds of each."""
        seconds = []
        for name in names:
            began, log = time.monotonic(), f"{model.name}-{name.replace('_', '-')}-{target.profile}-{target.dtype}"
            self.run(log, *self.scripts(model, target).command(name))
            seconds.append(f"{name.replace('_', ' ')} {time.monotonic() - began:.1f}")
        return f"Seconds: {', '.join(seconds)}."

    def prepare(self, model: Model, target: Target, gemma: bool = True) -> str:
        """The DiT, and with `gemma` the text encoder."""
        return self.make(model, target, "shard_dit", "compile_dit", *["shard_gemma3", "compile_gemma3"] * gemma)

    def generate(self, model: Model, target: Target, name: str, *more: object) -> dict[str, Tensor]:
        """Run generate_ltx23.py: every named tensor. Its latency report goes to the page."""
        out = self.folder / f"{model.name}-{name}"
        words = ["--prompt", PROMPT, "--output-path", out / "video.mp4", "--perf-dump-path", out / "perf.json"]
        words += ["--save-tensors", out / "tensors.safetensors", *more]
        words += ["--start-time", 0, "--end-time", model.size.seconds] if model.film else []
        self.run(f"{model.name}-generate-{name}", *self.scripts(model, target).command("generate", *words))
        self.say("", f"{name}:", "```", latency.table(latency.load(out / "perf.json")), "```", "")
        return load_file(out / "tensors.safetensors")

    def step(self, model: Model, target: Target, kind: str = "variant", steps: int = 1) -> tuple[dict, dict]:
        """The latents of each stage's last step from seeded noise, and the times, of a variant that `ltx-neuron tune`
        measures with so many warm steps. kind: or "reference", the step in float32 on the host."""
        name, scripts = f"{model.name}-{kind}-{target.profile}-{target.dtype}", self.scripts(model, target)
        out = self.folder / name
        out.mkdir(exist_ok=True)
        words = [*scripts.common, *scripts.size, "--steps", steps, f"--{kind}", out]
        self.run(name, "-m", "ltx_neuron.tune", *words)
        return load_file(out / OUTPUTS), read_json(out / RESULT)


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
        process.wait(TIDY_SECONDS)


def doctor_flags(args: argparse.Namespace) -> list[object]:
    words: list[object] = [word for setting in args.profile_set for word in ("--profile-set", setting)]
    for name in ("profile", "checkpoint_path", "gemma_root", "tp_degree", "artifacts_dir"):
        if value := getattr(args, name):
            words += [f"--{name.replace('_', '-')}", value]
    return words


def tiny(bench: Bench) -> Model:
    return Model("tiny", *assets_in(bench.folder / "tiny")[:3], TINY_SIZE, bench.folder / "artifacts")


def wide(bench: Bench) -> Model:
    return Model("wide", *assets_in(bench.folder / "wide")[:2], None, WIDE_SIZE, bench.folder / "artifacts")


def ltx25(bench: Bench) -> Model:
    """Tiny files of LTX-2.5, with the diffusion decoder. The others are found beside the transformer's."""
    transformer = split_assets_in(bench.folder / "ltx25").distilled
    return Model("ltx25", transformer, None, None, TINY_SIZE, bench.folder / "artifacts")


def demo(bench: Bench) -> Model:
    """The trained checkpoint of a clone: angles of its vocoder reach 37, and random ones do not."""
    return Model("demo", *ASSETS[:3], TINY_SIZE, bench.folder / "artifacts")


def full(bench: Bench) -> Model:
    args = bench.args
    for flag in ("checkpoint_path", "gemma_root"):
        if getattr(args, flag) is None:
            pytest.skip(f"no --{flag.replace('_', '-')}")
    size = dataclasses.replace(flags.spec(args).size, two_stage=args.spatial_upsampler_path is not None)
    return Model("full", args.checkpoint_path, args.gemma_root, args.spatial_upsampler_path, size, args.artifacts_dir)


def rehearsal(folder: Path, minutes: float | None = None) -> Bench:
    """A bench on a CPU and in a folder of its own, for the tests of this one."""
    args = dict(work_dir=folder, minutes=minutes, dtype="bfloat16", tp_degree=None, profile=None, profile_set=[])
    args |= dict(height=64, width=64, num_frames=9, frame_rate=24.0, two_stage=False, video_path=None)
    args |= dict.fromkeys(("checkpoint_path", "gemma_root", "artifacts_dir"))
    return Bench(argparse.Namespace(**args), resolve("cpu"))
