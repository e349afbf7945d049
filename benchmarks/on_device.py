"""Check and measure this toolkit on the machine at hand: one command, one Markdown report.

    python benchmarks/on_device.py --minutes 60

Doctor; what the runtime does with a graph's outputs; a tiny model compiled, run and compared with
the CPU; two blocks at full width, compared, timed graph by graph, and tuned; every collective
alone; and, where the checkpoint is given, the full model: sharded, compiled, one step compared and
timed, whole videos, models in turn and resident, and with frames that the ranks decode. Every
section drives the real scripts in processes of their own.

Sections come in the order of their worth. With --minutes, a section that takes longer than what is
left, by an estimate, is left out, and one that runs when the time is over is stopped. A section
that fails is recorded with its error, and those that do not need it go on. Typed again, the same
command runs what is not finished; report and state lie in --work-dir. With --profile cpu everything
but the device itself runs on any machine.

The report is without names, secrets and prompts. When something went wrong, `--bundle FILE.tar.gz`
packs it with what runs have left for a bug report.

"Compared" is the three-way rule: rel_L2(device, fp32) <= 2 * rel_L2(CPU in bf16, fp32) + 0.005,
from equal noise and contexts. The fp32 reference of the full model wants its weights in host memory
and on the disk once more, as fp32 (74 GB).
"""

import argparse
import datetime
import json
import os
import platform
import signal
import sys
from pathlib import Path

from lib import bundle
from lib import comparisons as compared
from lib import measurements as measured
from lib.bench import ROOT, Bench, full, profile_settings, tiny, wide
from lib.redact import Redactor
from lib.sections import Budget, Failed, Section, cell, markdown, restored, run_all

from ltx_neuron import errors, files, flags
from ltx_neuron.artifacts import code_digest
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.format import format_bytes
from ltx_neuron.profiles import resolve


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


_TINY = "tiny: shard and compile"
_WIDE = "two blocks: shard and compile"
_SHARD = "full: shard"
_COMPILE = "full: compile"
_FULL = (_SHARD, _COMPILE)
# The most telling ones first: what is wrong, then what is slow; what a whole checkpoint is wanted
# for comes last. The minutes are guesses from compile times that others published: not measured.
SECTIONS = (
    Section("doctor", doctor, minutes=1),
    Section("a graph's outputs after its next run", measured.outputs, minutes=3),
    Section(_TINY, compared.tiny_compiles, minutes=4),
    Section(
        "tiny: one step against the CPU",
        lambda bench: compared.one_step(bench, tiny(bench)),
        (_TINY,),
        minutes=3,
    ),
    Section(_WIDE, compared.wide_compiles, minutes=5),
    Section(
        "two blocks: one step against the CPU",
        lambda bench: compared.one_step(bench, wide(bench)),
        (_WIDE,),
        minutes=4,
    ),
    Section("two blocks: a step by its graphs", measured.wide_step_times, (_WIDE,), minutes=6),
    Section("collectives", measured.collectives, minutes=4),
    Section("groups of ranks on a torus", measured.groups, minutes=8),
    Section(
        "two blocks: tune",
        lambda bench: measured.tune(bench, measured.timed_blocks(bench)),
        (_WIDE,),
        minutes=10,
    ),
    Section(
        "tiny: a video in two stages, against the CPU", compared.tiny_video, (_TINY,), minutes=7
    ),
    Section(
        "tiny: frames decoded on the ranks",
        lambda bench: compared.decoded_on_ranks(bench, tiny(bench)),
        (_TINY,),
        minutes=6,
    ),
    Section(_SHARD, compared.full_shards, minutes=10),
    Section(_COMPILE, compared.full_compiles, minutes=30),
    Section(
        "full: a step by its graphs",
        lambda bench: measured.step_times(bench, full(bench)),
        _FULL,
        minutes=5,
    ),
    Section("full: a video, models in turn", measured.in_turn, _FULL, minutes=10),
    Section("full: a video, both models resident", measured.resident, _FULL, minutes=10),
    Section("full: one step against the CPU", compared.full_step, _FULL, minutes=30),
    Section(
        "full: frames decoded on the ranks",
        lambda bench: compared.decoded_on_ranks(bench, full(bench)),
        _FULL,
        minutes=60,
    ),
    Section("full: tune", lambda bench: measured.tune(bench, full(bench)), _FULL, minutes=60),
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
            f" {format_bytes(bench.system.memory().get('MemTotal', 0))}"
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
    help = "end after so many minutes, with what was found until then (default: no end)"
    parser.add_argument("--minutes", type=float, metavar="N", help=help)
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
    # A connection that is lost ends the run as SIGTERM does: nothing stays on the chip.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    args = arguments()
    if args.bundle:
        write_bundle(args)
        return
    paths = ("work_dir", "artifacts_dir", "checkpoint_path", "gemma_root", "spatial_upsampler_path")
    for name in paths:  # scripts run in the repository's folder
        setattr(args, name, getattr(args, name) and getattr(args, name).absolute())
    if args.minutes is not None and not 0 < args.minutes < float("inf"):
        raise UserError(f"--minutes {args.minutes:g}: wanted minutes above 0, as in --minutes 60")
    profile = resolve(args.profile, tuple(args.profile_set))
    bench = Bench(args, profile, budget=Budget(args.minutes))
    files.check_folder(args.work_dir, "--work-dir DIR")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    chosen_by = {
        name: str(value)
        for name, value in sorted(vars(args).items())
        if name not in ("work_dir", "anew", "minutes", "bundle", "bundle_add", "with_prompts")
    }
    identity = chosen_by | {
        "profile": bench.profile.name,
        "code": code_digest(bench.profile.backend),
    }
    path, report_path = args.work_dir / "state.json", args.work_dir / "report.md"

    def keep(done: dict) -> None:
        write_json(path, {"identity": identity, "sections": done})
        report = markdown(SECTIONS, done, facts_of(bench))
        with files.whole_file(report_path) as partial:
            partial.write_text(Redactor(os.environ)(report))

    done = restored(path, identity, args.anew)
    keep(done)
    run_all(SECTIONS, bench, done, keep, bench.budget)
    failed = [name for name, result in done.items() if result["status"] == "failed"]
    print(f"report: {report_path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    print(
        "The report is without names and secrets. With the logs: python benchmarks/on_device.py"
        f" --work-dir {args.work_dir} --bundle report.tar.gz"
    )
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    errors.run(main)
