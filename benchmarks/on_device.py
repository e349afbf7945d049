"""Check and measure this toolkit on the machine at hand: one command, one Markdown report.

    python benchmarks/on_device.py --checkpoint-path CKPT --gemma-root DIR \\
        --spatial-upsampler-path FILE

Doctor; a tiny model compiled, run and compared with the CPU; two blocks at full width, compared;
and, where the checkpoint is given, the full model: sharded, compiled, one step compared, whole
videos with the time of every step, the cold start and the memory of every core, models in turn and
resident, and with frames that the ranks decode; last a tuning. Every section drives the real
scripts in processes of their own.

A section that fails is recorded with its error, and those that do not need it go on. Typed again,
the same command runs what is not finished; report and state lie in --work-dir. With --profile cpu
everything but the device itself runs on any machine.

When something went wrong, `--bundle FILE.tar.gz` packs what runs have left for a bug report.

"Compared" is the three-way rule: rel_L2(device, fp32) <= 2 * rel_L2(CPU in bf16, fp32) + 0.005,
from equal noise and contexts. The fp32 reference of the full model wants its weights in host memory
and on the disk once more, as fp32 (74 GB).
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lib import bundle
from lib.one_step import write_inputs
from lib.redact import Redactor
from lib.sections import Failed, NotRun, Section, cell, markdown, rel, restored, run_all, three_way
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from ltx_neuron import errors, files, flags
from ltx_neuron.artifacts import code_digest
from ltx_neuron.doctor.finding import gb
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.job import Size
from ltx_neuron.profiles import Profile, resolve
from ltx_neuron.report import table
from ltx_neuron.tiny import TinyAssets, TinySizes, assets_in, make_tiny
from ltx_neuron.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]

PROMPT = "waves crash on the shore"
# Frames of bfloat16 weights on both sides; ltx-core's own bfloat16 has 48 dB from its float32
# (benchmarks/vae_decode.md).
LEAST_PSNR = 40
TINY_SIZE = Size(height=64, width=64, num_frames=9, two_stage=True)
# The released DiT's width (32 heads of 128 and 64 channels), two blocks of its 48; all around it
# stays tiny.
WIDE = TinySizes(layers=2, heads=32, head_dim=128, audio_head_dim=64, connector_layers=1)
WIDE_SIZE = Size(height=384, width=512, num_frames=25)
# Published compiles take up to half an hour; what takes longer than this hangs.
SCRIPT_SECONDS = 3 * 3600
SAMPLE_SECONDS = 0.5  # between two readings of the cores' memory
SHOWN_LINES = 15  # of a failed script's output


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

    @property
    def folder(self) -> Path:
        return self.args.work_dir

    @property
    def tp(self) -> int:
        return self.profile.degree(self.args.tp_degree)

    def device(self, model: "Model") -> Target:
        """What a model is run on. The tiny one's heads have 8 and 4 channels, and nkilib tests its
        kernel with 64 and more: it might fail there for a reason that no real model has."""
        tiny = model.name == "tiny" and self.profile.attention == "nki"
        settings = (*self.profile.settings, "attention=matmul") if tiny else self.profile.settings
        return Target(self.profile.name, settings, self.args.dtype)

    def need_device(self) -> None:
        if self.profile.device != "neuron":
            raise NotRun("no Neuron device")

    def run(self, log: str, *command: object, codes: tuple[int, ...] = (0,)) -> Run:
        """Run a Python script of this repository in its own process, its output in logs/. Failed
        where its exit code is not among `codes`."""
        path = self.folder / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with open(path, "w") as log_file, CoreMemory(self.system) as memory:
            try:
                code = subprocess.run(
                    [sys.executable, *map(str, command)],
                    cwd=ROOT,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    timeout=SCRIPT_SECONDS,
                ).returncode
            except subprocess.TimeoutExpired:
                raise Failed(
                    f"{log} did not end within {SCRIPT_SECONDS / 3600:g} hours ({path})"
                ) from None
        output = path.read_text(errors="replace")
        if code not in codes:
            last = "\n".join(output.replace("\r", "\n").strip().splitlines()[-SHOWN_LINES:])
            raise Failed(f"{log} ended with exit code {code} ({path}):\n{last}")
        return Run(output, time.perf_counter() - began, memory.most)

    def shard(self, model: Model, target: Target, gemma: bool) -> float:
        """Seconds to shard the DiT, and with `gemma` the text encoder."""
        common = self._common(model, target)
        name = f"{model.name}-shard-dit-{target.dtype}"
        seconds = self.run(name, ROOT / "shards/shard_backbone_weights.py", *common).seconds
        if gemma:
            name = f"{model.name}-shard-gemma3-{target.dtype}"
            common += ["--gemma-root", model.gemma_root]
            seconds += self.run(name, ROOT / "shards/shard_gemma3_weights.py", *common).seconds
        return seconds

    def compile(self, model: Model, target: Target, gemma: bool) -> tuple[float, float]:
        """Seconds for the DiT's graphs and for the text encoder's."""
        common = self._common(model, target)
        suffix = f"{target.profile}-{target.dtype}"
        dit = self.run(
            f"{model.name}-compile-dit-{suffix}",
            ROOT / "compile/compile_transformer.py",
            *common,
            *size_flags(model.size),
        )
        if not gemma:
            return dit.seconds, 0.0
        text = self.run(
            f"{model.name}-compile-gemma3-{suffix}",
            ROOT / "compile/compile_gemma3.py",
            *common,
            "--gemma-root",
            model.gemma_root,
        )
        return dit.seconds, text.seconds

    def decoder(self, model: Model, target: Target) -> tuple[float, float]:
        """Seconds to shard the video decoder, and to compile it for the model's size."""
        common, name = self._common(model, target), f"{model.name}-{{}}-vae-{target.dtype}"
        shard, compiled = ROOT / "shards/shard_vae_weights.py", ROOT / "compile/compile_vae.py"
        sharding = self.run(name.format("shard"), shard, *common)
        compiling = self.run(name.format("compile"), compiled, *common, *size_flags(model.size))
        return sharding.seconds, compiling.seconds

    def generate(
        self, model: Model, target: Target, name: str, *more: object
    ) -> tuple[Run, dict[str, Tensor], dict]:
        """Run generate_ltx23.py: the run, every named tensor, and the latency report."""
        out = self.folder / f"{model.name}-{name}"
        flags = [*self._common(model, target), *size_flags(model.size)]
        flags += ["--neuron-gemma", "--gemma-root", model.gemma_root, "--prompt", PROMPT]
        flags += ["--spatial-upsampler-path", model.upsampler] if model.upsampler else []
        flags += ["--output-path", out / "video.mp4", "--perf-dump-path", out / "perf.json"]
        flags += ["--save-tensors", out / "tensors.safetensors", *more]
        run = self.run(f"{model.name}-generate-{name}", ROOT / "src/generate_ltx23.py", *flags)
        return run, load_file(out / "tensors.safetensors"), table.load(out / "perf.json")

    def _common(self, model: Model, target: Target) -> list:
        """The flags that every script takes."""
        return [
            *("--checkpoint-path", model.checkpoint, "--artifacts-dir", model.artifacts),
            *("--tp-degree", self.tp, *target.flags),
        ]

    def step(self, model: Model, target: Target, inputs: Path) -> dict[str, Tensor]:
        """The latents after one step (one_step.py), by a process of its own."""
        name = f"{model.name}-step-{target.profile}-{target.dtype}"
        request = self.folder / f"{name}.json"
        output = self.folder / f"{name}.safetensors"
        paths = {
            "checkpoint": model.checkpoint,
            "artifacts": model.artifacts,
            "inputs": inputs,
            "output": output,
        }
        content = {key: str(path) for key, path in paths.items()}
        content |= {"size": dataclasses.asdict(model.size), "tp": self.tp}
        content |= {"profile": target.profile, "settings": target.settings, "dtype": target.dtype}
        write_json(request, content)
        self.run(name, ROOT / "benchmarks/lib/one_step.py", request)
        return load_file(output)


def size_flags(size: Size) -> list:
    """The flags of a distilled generation of that size, for compile_transformer.py and generate."""
    flags = ["--height", size.height, "--width", size.width, "--num-frames", size.num_frames]
    flags += ["--frame-rate", size.frame_rate, "--recipe", "distilled"]
    return flags + (["--two-stage"] if size.two_stage else [])


class CoreMemory:
    """Reads how much of each core's memory is used, as long as the `with` block runs. `most` has
    the largest bytes by core; it is empty where neither the driver nor neuron-monitor tells."""

    def __init__(self, system: System):
        self.system, self.most, self._stop = system, {}, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "CoreMemory":
        if self.system.core_memory():
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            for core, used in self.system.core_memory().items():
                self.most[core] = max(used, self.most.get(core, 0))


def doctor(bench: Bench) -> list[str]:
    """The doctor's findings; Failed where one of them blocks a run."""
    flags = ["--profile", bench.profile.name, "--json", *profile_settings(bench.profile.settings)]
    flags += ["--checkpoint-path", bench.args.checkpoint_path] if bench.args.checkpoint_path else []
    flags += ["--gemma-root", bench.args.gemma_root] if bench.args.gemma_root else []
    flags += ["--tp-degree", bench.tp, "--artifacts-dir", bench.args.artifacts_dir]
    output = bench.run("doctor", "-m", "ltx_neuron.doctor", *flags, codes=(0, 1)).output
    # Libraries may print warnings before and after the JSON.
    report, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))
    lines = ["| | check | |", "|---|---|---|"]
    lines += [f"| {f['state']} | {f['check']} | {cell(f['text'])} |" for f in report["findings"]]
    if not report["can_run"]:
        raise Failed("something blocks: python -m ltx_neuron.doctor says what to type", lines)
    return lines


def tiny(bench: Bench) -> Model:
    assets = assets_in(bench.folder / "tiny")
    return _model("tiny", assets, TINY_SIZE, bench)


def wide(bench: Bench) -> Model:
    return _model("wide", assets_in(bench.folder / "wide"), WIDE_SIZE, bench)


def full(bench: Bench) -> Model:
    args = bench.args
    for flag in ("checkpoint_path", "gemma_root"):
        if getattr(args, flag) is None:
            raise NotRun(f"no --{flag.replace('_', '-')}")
    size = dataclasses.replace(flags.size(args), two_stage=args.spatial_upsampler_path is not None)
    return Model(
        "full",
        args.checkpoint_path,
        args.gemma_root,
        args.spatial_upsampler_path,
        size,
        args.artifacts_dir,
    )


def _model(name: str, assets: TinyAssets, size: Size, bench: Bench) -> Model:
    return Model(
        name,
        assets.checkpoint,
        assets.gemma_root,
        assets.spatial_upsampler,
        size,
        bench.folder / "artifacts",
    )


def tiny_compiles(bench: Bench) -> list[str]:
    make_tiny(bench.folder / "tiny")
    settings = " ".join(bench.device(tiny(bench)).settings) or "no settings"
    return [f"With {settings}.", *_shard_and_compile(bench, tiny(bench), gemma=True)]


def wide_compiles(bench: Bench) -> list[str]:
    if bench.args.skip_wide:
        raise NotRun("--skip-wide")
    assets = make_tiny(bench.folder / "wide", WIDE)
    lines = [
        f"Checkpoint of {WIDE.layers} blocks, {WIDE.video_inner} and {WIDE.audio_inner} channels: "
        f"{gb(assets.checkpoint.stat().st_size)}."
    ]
    return lines + _shard_and_compile(bench, wide(bench), gemma=False)


def _shard_and_compile(bench: Bench, model: Model, gemma: bool) -> list[str]:
    return _sharded(bench, model, gemma) + _compiled(bench, model, gemma)


def _sharded(bench: Bench, model: Model, gemma: bool) -> list[str]:
    seconds = bench.shard(model, bench.device(model), gemma)
    return [f"Sharding for {bench.tp} ranks: {seconds:.1f} s."]


def _compiled(bench: Bench, model: Model, gemma: bool) -> list[str]:
    dit, text = bench.compile(model, bench.device(model), gemma)
    return [
        f"Compiling: DiT {dit:.1f} s"
        + (f", text encoder and connectors {text:.1f} s." if gemma else ".")
    ]


def full_shards(bench: Bench) -> list[str]:
    return _sharded(bench, full(bench), gemma=True)


def full_compiles(bench: Bench) -> list[str]:
    return _compiled(bench, full(bench), gemma=True)


def one_step(bench: Bench, model: Model) -> list[str]:
    """One step by the three-way rule. The CPU's runs are sharded and compiled first."""
    inputs = bench.folder / f"{model.name}-inputs.safetensors"
    write_inputs(inputs, model.checkpoint, model.size)
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=False)
        bench.compile(model, target, gemma=False)
        on_cpu[target] = bench.step(model, target, inputs)
    device = bench.step(model, bench.device(model), inputs)
    return three_way(device, on_cpu[BF16], on_cpu[FP32], ("video", "audio"))


def full_step(bench: Bench) -> list[str]:
    model = full(bench)
    transformer = Workspace(
        model.checkpoint, resolve("cpu"), model.artifacts, bench.tp, "float32"
    ).dit_source()
    need = sum(torch.Size(transformer.shape(name)).numel() for name in transformer.names) * 4
    available = bench.system.memory().get("MemAvailable", 0)
    if need > available:
        raise NotRun(
            f"the fp32 reference needs {gb(need)} of host memory, {gb(available)} are available"
        )
    return one_step(bench, model)


def tiny_video(bench: Bench) -> list[str]:
    """Two stages through the real script: twice alike, and its text contexts by the three-way
    rule."""
    model = tiny(bench)
    device = bench.device(model)
    runs = [bench.generate(model, device, f"device-{number}") for number in (1, 2)]
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=True)
        bench.compile(model, target, gemma=True)
        on_cpu[target] = bench.generate(model, target, f"cpu-{target.dtype}")[1]
    first, second = (tensors for _, tensors, _ in runs)
    lines = [
        f"End to end {runs[0][2]['end_to_end_seconds']:.1f} s, again"
        f" {runs[1][2]['end_to_end_seconds']:.1f} s."
    ]
    lines += [
        "",
        *three_way(first, on_cpu[BF16], on_cpu[FP32], ("video_context", "audio_context")),
        "",
    ]
    names = ("s1_video", "s1_audio", "s2_video", "s2_audio")
    drift = ", ".join(f"{name} {rel(first[name], on_cpu[BF16][name]):.2%}" for name in names)
    lines += [
        "Latents against the CPU's bf16 run from the same noise, after 8 and 3 steps (not judged:"
        f" every rounding grows over the steps): {drift}."
    ]
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    if unequal:
        raise Failed(f"two runs of one command differ in {', '.join(unequal)}", lines)
    return [*lines, "Two runs of the same command are equal bit for bit."]


def decoded_on_ranks(bench: Bench, model: Model) -> list[str]:
    """A video whose frames come from the ranks, against the host's frames of equal latents."""
    target, frames, lines = bench.device(model), {}, []
    sharding, compiling = bench.decoder(model, target)
    lines.append(f"Sharding the decoder: {sharding:.1f} s; compiling it: {compiling:.1f} s.")
    for name, more in (("host", ()), ("ranks", ("--neuron-vae",))):
        folder = bench.folder / f"{model.name}-frames-{name}"
        more = (*more, "--save-frames", folder)
        run, _, perf = bench.generate(model, target, f"decoded-{name}", *more)
        frames[name] = load_frames(folder)
        decoding = [p["seconds"] for p in perf["phases"] if p["name"] == "decode_video"]
        lines.append(
            f"Decoded by the {name}: {sum(decoding):.2f} s of it alone, a whole run"
            f" {run.seconds:.1f} s; at most a core"
            f" {gb(max(run.memory.values())) if run.memory else 'not known'}."
        )
    difference = (frames["ranks"] - frames["host"]).abs()
    psnr = 20 * math.log10(255 / max(difference.square().mean().sqrt().item(), 1e-9))
    lines.append(
        f"Frames of the ranks against the host's: {psnr:.1f} dB, at most {difference.max():.0f} of"
        f" 255 (wanted: {LEAST_PSNR} dB)."
    )
    if psnr < LEAST_PSNR:
        raise Failed("the ranks decode other frames than the host", lines)
    return lines


def load_frames(folder: Path) -> Tensor:
    """The PNG pictures in a folder: float32 (N, H, W, 3)."""
    pictures = [np.asarray(Image.open(path)) for path in sorted(folder.glob("frame_*.png"))]
    return torch.from_numpy(np.stack(pictures)).float()


def in_turn(bench: Bench) -> list[str]:
    return _measured(bench, bench.device(full(bench)), "in-turn")


def resident(bench: Bench) -> list[str]:
    target = bench.device(full(bench))
    bench.need_device()
    settings = (*target.settings, "resident=true")
    return _measured(bench, target._replace(settings=settings), "resident")


def _measured(bench: Bench, target: Target, name: str) -> list[str]:
    """Two videos, the second one with warm caches: their times and the cores' memory."""
    model, lines = full(bench), []
    for number in (1, 2):
        run, _, perf = bench.generate(model, target, f"{name}-{number}")
        phases: dict[str, float] = {}
        for phase in perf["phases"]:
            phases[phase["name"]] = phases.get(phase["name"], 0.0) + phase["seconds"]
        steps, warm = perf["denoise_steps_ms"], perf["warm_step_ms"]
        first = next(times[0] for times in steps.values() if times)
        lines += [
            (
                f"Run {number}: {run.seconds:.1f} s with the start of the process,"
                f" {perf['end_to_end_seconds']:.1f} s end to end."
            ),
            (
                f"Cold start: Gemma3 {phases['load_gemma3']:.1f} s, DiT"
                f" {phases['load_transformer']:.1f} s, first step {first / 1e3:.2f} s."
            ),
            "",
            "| stage | steps | cold ms | warm median ms | p90 ms | device ms |",
            "|---|---|---|---|---|---|",
            *(
                f"| {stage} | {len(times)} | {times[0]:.1f} | "
                + " | ".join(f"{warm[stage][k]:.1f}" for k in ("median", "p90", "device"))
                + " |"
                for stage, times in steps.items()
                if len(times) > 1
            ),
            "",
        ]
        percent = perf["percent_of_peak"]
        lines.append(
            "Percent of the chip's bf16 peak, last stage: "
            + (
                f"{percent:.1f} %."
                if percent is not None
                else "not counted, this profile has no peak."
            )
        )
        if run.memory:
            lines.append(
                "Device memory at most, by core: "
                + ", ".join(f"{core} {gb(used)}" for core, used in run.memory.items())
                + "."
            )
        else:
            untold = "neither the driver's counters nor neuron-monitor tell it"
            why = untold if bench.profile.device == "neuron" else "no Neuron device"
            lines.append(f"Memory per core: not run: {why}.")
        lines.append("")
    return [*lines, "```", table.table(perf), "```"]


def tune(bench: Bench) -> list[str]:
    """Settings tuned for the full model and its size, or for the tiny one where there is none."""
    try:
        model = full(bench)
    except NotRun:
        model = tiny(bench)
    device = bench.device(model)
    common = [*bench._common(model, device), *size_flags(model.size)]
    picture = bench.folder / "tune.png"
    run = bench.run("tune", "-m", "ltx_neuron.tune", *common, "--plot", picture)
    _, _, found = run.output.rstrip().rpartition("\n\n")  # its table and what was chosen
    return [f"Model {model.name}, {run.seconds:.0f} s.", "", "```", found, "```"]


_TINY = "tiny: shard and compile"
_WIDE = "two blocks: shard and compile"
_SHARD = "full: shard"
_COMPILE = "full: compile"
SECTIONS = (
    Section("doctor", doctor),
    Section(_TINY, tiny_compiles),
    Section("tiny: one step against the CPU", lambda bench: one_step(bench, tiny(bench)), (_TINY,)),
    Section("tiny: a video in two stages, against the CPU", tiny_video, (_TINY,)),
    Section(
        "tiny: frames decoded on the ranks",
        lambda bench: decoded_on_ranks(bench, tiny(bench)),
        (_TINY,),
    ),
    Section(_WIDE, wide_compiles),
    Section(
        "two blocks: one step against the CPU", lambda bench: one_step(bench, wide(bench)), (_WIDE,)
    ),
    Section(_SHARD, full_shards),
    Section(_COMPILE, full_compiles),
    Section("full: one step against the CPU", full_step, (_SHARD, _COMPILE)),
    Section("full: a video, models in turn", in_turn, (_SHARD, _COMPILE)),
    Section("full: a video, both models resident", resident, (_SHARD, _COMPILE)),
    Section(
        "full: frames decoded on the ranks",
        lambda bench: decoded_on_ranks(bench, full(bench)),
        (_SHARD, _COMPILE),
    ),
    Section("tune", tune, (_TINY,)),
)


def facts_of(bench: Bench) -> dict[str, str]:
    """What the report says of the run above its table: machine, versions, code, command."""
    names = (
        "torch",
        "neuronx-cc",
        "neuronx-distributed",
        "torch-neuronx",
        "torch-xla",
        "transformers",
        "ltx-core",
    )
    versions = {name: version for name in names if (version := bench.system.version(name))}
    settings = " ".join(bench.profile.settings)
    return {
        "profile": (
            f"{bench.profile.name}{' with ' + settings if settings else ''}, {bench.tp} ranks,"
            f" {bench.profile.backend}, {bench.args.dtype}"
        ),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} CPU cores,"
            f" {gb(bench.system.memory().get('MemTotal', 0))}"
        ),
        "driver": bench.system.driver or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "code": code_digest(bench.profile.backend),
        "command": "python " + " ".join(sys.argv),
    }


def arguments() -> argparse.Namespace:
    parser = flags.parser(
        __doc__,
        "python benchmarks/on_device.py --profile cpu --skip-wide",
        gemma=True,
        required=False,
    )
    parser.add_argument(
        "--spatial-upsampler-path",
        type=Path,
        metavar="FILE",
        help="the full model then runs both stages",
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("outputs/on-device"),
        metavar="DIR",
        help="state.json, table.md, logs and what the runs leave (default: outputs/on-device)",
    )
    parser.add_argument(
        "--skip-wide",
        action="store_true",
        help="leave out the two blocks at full width (a file of 2.9 GB, made in 10 GB of memory)",
    )
    parser.add_argument("--anew", action="store_true", help="forget what is finished")
    _add_bundle(parser)
    flags.add_size(parser)
    return parser.parse_args()


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bug report: runs nothing, packs what is there")
    help = "report, logs, compiler messages, versions and the doctor's findings; no weights"
    group.add_argument("--bundle", type=Path, metavar="FILE.tar.gz", help=help)
    help = "also the logs and JSON of a folder in which a run failed, or a text file; repeatable"
    group.add_argument(
        "--bundle-add", type=Path, action="append", default=[], metavar="PATH", help=help
    )
    help = "leave prompts in the bundle"
    group.add_argument("--with-prompts", action="store_true", help=help)


def write_bundle(args: argparse.Namespace) -> None:
    """Pack what runs have left, whether they ended well or not, and say what was packed."""
    bundle.check_target(args.bundle)
    for path in args.bundle_add:
        if not path.exists():
            raise UserError(f"--bundle-add {path}: no such file or folder")
    system, artifacts = System(), (args.artifacts_dir, args.work_dir / "artifacts")
    asked = {
        "--profile": args.profile,
        "--checkpoint-path": args.checkpoint_path,
        "--gemma-root": args.gemma_root,
        "--tp-degree": args.tp_degree,
        "--artifacts-dir": args.artifacts_dir,
    }
    words = [word for flag, value in asked.items() if value for word in (flag, value)]
    texts = {"doctor.txt": bundle.doctor([*words, *profile_settings(tuple(args.profile_set))])}
    texts |= bundle.facts(system, ROOT, artifacts)
    found = bundle.found(args.work_dir, artifacts, args.bundle_add)
    packed = bundle.pack(args.bundle, texts, found, Redactor(os.environ, args.with_prompts))
    print(*packed.lines(), sep="\n")
    if not (args.work_dir / "state.json").is_file():
        print(
            f"nothing was run in {args.work_dir}: type the --work-dir of your run, if there is one"
        )
    size = args.bundle.stat().st_size
    print(f"bundle: {args.bundle} ({size:,} bytes). Read it before you send it")


def main() -> None:
    args = arguments()
    if args.bundle:
        write_bundle(args)
        return
    paths = ("work_dir", "artifacts_dir", "checkpoint_path", "gemma_root", "spatial_upsampler_path")
    for name in paths:  # scripts run in the repository's folder
        setattr(args, name, getattr(args, name) and getattr(args, name).absolute())
    bench = Bench(args, resolve(args.profile, tuple(args.profile_set)))
    files.check_folder(args.work_dir, "--work-dir DIR")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    chosen_by = {
        name: str(value)
        for name, value in sorted(vars(args).items())
        if name not in ("work_dir", "anew", "bundle", "bundle_add", "with_prompts")
    }
    identity = chosen_by | {
        "profile": bench.profile.name,
        "code": code_digest(bench.profile.backend),
    }
    path, report_path = args.work_dir / "state.json", args.work_dir / "report.md"

    def keep(done: dict) -> None:
        write_json(path, {"identity": identity, "sections": done})
        report_path.write_text(markdown(SECTIONS, done, facts_of(bench)))

    done = run_all(SECTIONS, bench, restored(path, identity, args.anew), keep)
    keep(done)
    failed = [name for name, result in done.items() if result["status"] == "failed"]
    print(f"report: {report_path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    errors.run(main)
