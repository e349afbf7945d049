"""The flags of test/device, and its report. Without a Neuron device and --profile all sections are skipped."""

import argparse
import datetime
import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from device import test_device
from device.bench import Bench, doctor_flags
from device.report import Budget, Report
from ltx_neuron import flags
from ltx_neuron.artifacts import code_digest
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import bundle
from ltx_neuron.doctor.public import public
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder
from ltx_neuron.flags import verbs
from ltx_neuron.format import format_bytes
from ltx_neuron.machine import probe
from ltx_neuron.sampling.spec import SizeFields

RUN = "python -m pytest test/device --minutes 10"
REHEARSAL = "python -m pytest test/device --profile cpu --skip-wide"
PLACES = ("work_dir", "artifacts_dir", "checkpoint_path", "gemma_root", "spatial_upsampler_path")
CHOICES = (*PLACES[1:], "profile_set", "tp_degree", "dtype", "skip_wide", *SizeFields.model_fields)
PACKAGES = ("torch", "neuronx-cc", "neuronx-distributed", "torch-neuronx", "torch-xla", "transformers", "ltx-core")
REPORT, BENCH = pytest.StashKey[Report](), pytest.StashKey[Bench]()


def pytest_addoption(parser):
    add = parser.getgroup("device", "test/device: what the sections run on").addoption
    help = "hardware (default: this machine's own); cpu rehearses the run on any machine"
    add("--profile", metavar="NAME", help=help)
    help = "change one value of the profile, as in attention=matmul; repeatable"
    add("--profile-set", action="append", default=[], metavar="KEY=VALUE", help=help)
    help = "end after so many minutes, with what was found until then (default: no end)"
    add("--minutes", type=float, metavar="N", help=help)
    help = "leave out the two blocks at full width (a file of 2.9 GB, made in 10 GB of memory)"
    add("--skip-wide", action="store_true", help=help)
    help = "report, bundle, logs and what the runs leave"
    add("--work-dir", type=Path, default=verbs.WORK_DIR, metavar="DIR", help=help)
    add("--checkpoint-path", type=Path, metavar="FILE", help="run the full model as well")
    add("--gemma-root", type=Path, metavar="DIR", help="of the full model")
    add("--spatial-upsampler-path", type=Path, metavar="FILE", help="the full model then runs both stages")
    help = "weights and graphs of the full model"
    add("--artifacts-dir", type=Path, default=Path("artifacts"), metavar="DIR", help=help)
    add("--tp-degree", type=int, metavar="N", help="ranks (default: the profile's)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the device")
    size = SimpleNamespace(add_argument=add)
    flags.add_job(SimpleNamespace(_action_groups=[], add_argument_group=lambda *_: size), SizeFields.model_fields)


def pytest_configure(config):
    args = config.option
    # Without pytest_addoption: a run of other folders too, which has not asked for a device.
    if not hasattr(args, "skip_wide") or args.collectonly or hasattr(config, "workerinput"):
        return
    if args.profile or probe().neuron_devices:
        try:
            _begin(config, args)
        except UserError as error:
            raise pytest.UsageError(str(error)) from None


def _begin(config, args) -> None:
    names = ("profile", "minutes", "work_dir", "video_path", *CHOICES)
    args = argparse.Namespace(**{name: getattr(args, name, None) for name in names})
    for name in PLACES:  # scripts run in the repository's folder
        setattr(args, name, getattr(args, name) and getattr(args, name).absolute())
    bench = Bench(args, resolve(args.profile, tuple(args.profile_set)), budget=Budget(args.minutes))
    check_folder(args.work_dir, "--work-dir DIR")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    identity = {name: str(getattr(args, name)) for name in CHOICES}
    identity |= {"profile": bench.profile.name, "code": code_digest(bench.profile.backend)}
    sections = {section.name: section for section in test_device.SECTIONS}
    report = Report(args.work_dir, sections, bench.budget, identity, facts_of(bench), public)
    report.restore(wanted=config.getoption("lf", False))
    report.keep()
    config.stash[REPORT], config.stash[BENCH] = report, bench
    config.pluginmanager.register(Sections(report, args))
    if failed := config.pluginmanager.get_plugin("lfplugin"):  # it does not know what was not reached
        config.pluginmanager.unregister(failed)
    # A connection that is lost ends the run as Ctrl-C does: nothing stays on the chip.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def facts_of(bench: Bench) -> dict[str, str]:
    profile, system = bench.profile, bench.system
    settings = f" with {' '.join(profile.settings)}" if profile.settings else ""
    versions = [f"{name} {version}" for name in PACKAGES if (version := system.version(name))]
    memory = format_bytes(system.memory().get("MemTotal", 0))
    return {
        "profile": f"{profile.name}{settings}, {bench.tp} ranks, {profile.backend}, {bench.args.dtype}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {memory}",
        "driver": system.driver or "none",
        "versions": ", ".join(versions),
        "commit": bundle.commit(system),
        "code": code_digest(profile.backend),
        "command": shlex.join(["python", "-m", "pytest", *sys.argv[1:]]),
    }


@pytest.fixture
def bench(pytestconfig) -> Bench:
    return pytestconfig.stash[BENCH]


@pytest.fixture
def lines(pytestconfig) -> list[str]:
    """The section's lines of the report, which has them however the section ends."""
    return pytestconfig.stash[REPORT].lines


def pytest_collection_modifyitems(config, items):
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    if report := config.stash.get(REPORT, None):
        if config.getoption("lf", False):
            done = [item for item in own if report.is_done(name_of(item.name))]
            items[:] = [item for item in items if item not in done]
            config.hook.pytest_deselected(items=done)
        return
    reason = f"no Neuron device; with one: {RUN}; a rehearsal on this machine: {REHEARSAL}"
    for item in own:
        item.add_marker(pytest.mark.skip(reason=reason))


def name_of(test: str) -> str:
    """A section's name by its test's, such as test_section[doctor]."""
    return test.partition("[")[2].removesuffix("]")


class Sections:
    """Runs tests as sections of a report. The terminal has a line when one begins, and one when it ends, in place of
    a dot."""

    def __init__(self, report: Report, args: argparse.Namespace):
        self.report, self.args = report, args

    def pytest_runtest_logstart(self, nodeid, location):
        if section := self.report.sections.get(name_of(location[2])):
            print(f"{section.title} ...", flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if (name := name_of(item.name)) not in self.report.sections:
            return (yield)
        with self.report.running(name):
            return (yield)

    def pytest_report_teststatus(self, report):
        if name_of(report.location[2]) in self.report.sections and (report.when == "call" or report.failed):
            return report.outcome, "", ""
        return None

    def pytest_runtest_logfinish(self, nodeid, location):
        if (name := name_of(location[2])) in self.report.sections:
            print(f"  {self.report.how(name)} ({self.report.result(name)['seconds']:.1f} s)", flush=True)

    def pytest_terminal_summary(self, terminalreporter, exitstatus):
        say, page = terminalreporter.write_line, self.args.work_dir / "report.md"
        say(f"\n{page.read_text()}")
        say(f"This page, without names and secrets, is {page}: please paste it into an issue.")
        if left := sum(not self.report.is_done(name) for name in self.report.sections):
            say(f"{left} sections are not done: the same command with --lf runs what it can of them")
        if exitstatus != pytest.ExitCode.INTERRUPTED:
            say(f"with the logs: {packed(self.args)}")


def packed(args: argparse.Namespace) -> str:
    """Pack the bundle beside the report, in place of an earlier one; where it is, or why it is not."""
    target = args.work_dir / "bundle.tar.gz"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ltx_neuron.doctor", "--bundle", target, "--work-dir", args.work_dir]
    words = [str(word) for word in (*command, *doctor_flags(args))]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    return (done.stdout if target.exists() else done.stderr).strip().rpartition("\n")[2]
