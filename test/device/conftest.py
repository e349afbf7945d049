"""The flags of test/device, and the page of what its sections found. Without a Neuron device and --profile all skip."""

import argparse
import datetime
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from device.bench import Bench, doctor_flags
from ltx_neuron import flags
from ltx_neuron.artifacts import code_digest
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import bundle
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder, read_json, write_json
from ltx_neuron.flags import verbs
from ltx_neuron.machine import probe
from ltx_neuron.sampling.spec import SizeFields

RUN = "python -m pytest test/device --minutes 10"
REHEARSAL = "python -m pytest test/device --profile cpu --skip-wide"
PLACES = ("work_dir", "artifacts_dir", "checkpoint_path", "gemma_root", "spatial_upsampler_path")
CHOICES = (*PLACES[1:], "profile", "profile_set", "tp_degree", "dtype", "skip_wide", *SizeFields.model_fields)
BENCH = pytest.StashKey[Bench]()


def pytest_addoption(parser):
    add = parser.getgroup("device", "test/device: what the sections run on").addoption
    add("--profile", metavar="NAME", help="hardware (default: this machine's own); cpu rehearses the run anywhere")
    help = "change one value of the profile, as in attention=matmul; repeatable"
    add("--profile-set", action="append", default=[], metavar="KEY=VALUE", help=help)
    add("--minutes", type=float, metavar="N", help="end after so many minutes, with what was found until then")
    add("--skip-wide", action="store_true", help="leave out the two blocks at full width (10 GB of memory)")
    path = dict(type=Path, metavar="PATH")
    add("--work-dir", **path, default=verbs.WORK_DIR, help="report, bundle, logs and what the runs leave")
    add("--checkpoint-path", **path, help="run the full model as well")
    add("--gemma-root", **path, help="of the full model")
    add("--spatial-upsampler-path", **path, help="the full model then runs both stages")
    add("--artifacts-dir", **path, default=Path("artifacts"), help="weights and graphs of the full model")
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
            config.stash[BENCH] = begun(args)
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        args.verbose = 1  # a line when a section begins, and how it ended
        if failed := config.pluginmanager.get_plugin("lfplugin"):  # it does not know what was not reached
            config.pluginmanager.unregister(failed)
        # A connection that is lost ends the run as Ctrl-C does: nothing stays on the chip.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)


def begun(args) -> Bench:
    """A bench whose page goes on, with --lf, where that of an earlier run of the same code and choices ended."""
    own = argparse.Namespace(**{name: getattr(args, name, None) for name in ("minutes", "work_dir", *CHOICES)})
    own.video_path = None
    for name in PLACES:  # scripts run in the repository's folder
        setattr(own, name, getattr(own, name) and getattr(own, name).absolute())
    bench = Bench(own, resolve(own.profile, tuple(own.profile_set)))
    check_folder(own.work_dir, "--work-dir DIR")
    own.work_dir.mkdir(parents=True, exist_ok=True)
    bench.identity = {name: str(getattr(own, name)) for name in CHOICES}
    bench.identity |= {"profile": bench.profile.name, "code": code_digest(bench.profile.backend)}
    state, again = own.work_dir / "report.json", getattr(args, "lf", False)
    before = read_json(state) if again and state.is_file() else {"identity": None}
    if before["identity"] == bench.identity:
        bench.done.update(before["done"])
    elif again:
        raise UserError(f"{state} is not of a run of this code with these flags: leave --lf out")
    else:
        bench.page.unlink(missing_ok=True)
        profile = " ".join([bench.profile.name, *bench.profile.settings])
        bench.say("# ltx-neuron on a device", "")
        bench.say(f"- profile: {profile}, {bench.tp} ranks, {bench.profile.backend}, {own.dtype}")
        bench.say(f"- commit: {bundle.commit(System())}", f"- code: {bench.identity['code']}")
    bench.say(f"- command: {shlex.join(['python', '-m', 'pytest', *sys.argv[1:]])}")
    bench.say(f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}")
    keep(bench)
    return bench


def keep(bench: Bench) -> None:
    write_json(bench.folder / "report.json", {"identity": bench.identity, "done": sorted(bench.done)})


@pytest.fixture
def bench(pytestconfig) -> Bench:
    return pytestconfig.stash[BENCH]


def pytest_collection_modifyitems(config, items):
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    if bench := config.stash.get(BENCH, None):
        done = [item for item in own if item.callspec.id in bench.done]
        items[:] = [item for item in items if item not in done]
        config.hook.pytest_deselected(items=done)
        return
    reason = f"no Neuron device; with one: {RUN}; a rehearsal on this machine: {REHEARSAL}"
    for item in own:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and item.path.parent == Path(__file__).parent:
        bench, error = item.config.stash[BENCH], call.excinfo
        why = "" if error is None else error.value.args[0] if report.skipped else report.longreprtext
        why = f":\n\n```\n{why}\n```" if "\n" in why else f": {why}" * bool(why)
        bench.say("", f"{item.callspec.params['section'].title}: {report.outcome} after {call.duration:.1f} s{why}")
        if report.passed:
            bench.done.add(item.callspec.id)
            keep(bench)
    return report


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if bench := config.stash.get(BENCH, None):
        say = terminalreporter.write_line
        say(f"\n{bench.page.read_text()}")
        say(f"This page, without names and secrets, is {bench.page}: please paste it into an issue.")
        say("The same command with --lf runs what it can of the sections that are not done.")
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        # The bundle beside the report takes the place of an earlier one.
        folder = bench.args.work_dir
        (target := folder / "bundle.tar.gz").unlink(missing_ok=True)
        command = [sys.executable, "-m", "ltx_neuron.doctor", "--bundle", target, "--work-dir", folder]
        words = [str(word) for word in (*command, *doctor_flags(bench.args))]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
        where = (done.stdout if target.exists() else done.stderr).strip().rpartition("\n")[2]
        say(f"with the logs: {where}")
