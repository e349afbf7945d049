"""What a test session says at its end: what this machine did not test, and what it cost. A plugin of conftest's. CPU
seconds are those of all processes: pytest's first one is their reaper (PR_SET_CHILD_SUBREAPER), so that ranks whose
script has died, and fork servers, count too."""

import ctypes
import math
import os
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

FIRST = frozenset({"unit", "integration"})
# What runs of these tiers may cost: make test, and make test-all, which CI runs. Two idle cores of an AMD EPYC take 940
# and 2620, with AVX2 alone 990 and 3090, mostly for bfloat16. CI ends after 35 minutes of two cores, 4200 seconds.
CPU_SECONDS = {FIRST: 1140, FIRST | {"slow"}: 4200}
# The mean CPU seconds of work() on that EPYC in its fast hours. In slow ones, as virtual machines have them, tests and
# work() cost up to 1.4 times more, both alike.
WORK_SECONDS = 0.021
# What runs each tier.
COMMANDS = {
    **dict.fromkeys(sorted(FIRST), "make test"),
    "slow": "make test-all",
    "stress": "python -m pytest test/stress",
    "device": "python -m pytest test/device, on a machine with a Neuron device",
    "xla": "DIR/bin/python -m pytest test/xla, in a venv of test/xla/make_xla_venv.sh DIR",
}
# Instructions for which there is code, or that oneDNN chooses its own by.
CPU_FLAGS = {"avx512f": "AVX-512", "amx_tile": "AMX"}
SLOW_IMPORTS = {"ray", "openai", "playwright"}  # seconds each

IMPORTED = pytest.StashKey[set[str]]()  # of SLOW_IMPORTS, once the tests are collected
SPENT, WORKS = pytest.StashKey[float](), pytest.StashKey[list[float]]()  # WORKS: what each work() of this run took
_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def has_workers(config) -> bool:
    """Whether this is pytest's first process, and others run the tests."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config) -> None:
    if has_workers(config):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        config.stash[WORKS] = []
        for watch in (_reap, partial(_measure, config.stash[WORKS])):
            threading.Thread(target=watch, daemon=True).start()


def _measure(works: list[float]) -> None:
    while True:
        works.append(work())
        time.sleep(5)


def work() -> float:
    """CPU seconds of work like that of the tests: objects are made, and read in an order that caches do not foresee."""
    start = time.thread_time()
    texts = {number: str(number) for number in range(50_000)}
    sum(len(texts[number * 7919 % len(texts)]) for number in texts)
    return time.thread_time() - start


def _reap() -> None:
    """Wait for each child as it ends: this process starts only workers, whose exit codes nobody reads."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.05)


def pytest_collection_finish(session) -> None:
    session.config.stash[IMPORTED] = SLOW_IMPORTS & sys.modules.keys()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session) -> None:
    """After the workers have ended, and what they started: a worker's fork server ends shortly after it, and only then
    counts. Without workers, fork servers live on, and would not count."""
    config, end = session.config, time.monotonic() + 5
    if not has_workers(config):
        return
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            time.sleep(0.01)
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    config.stash[SPENT] = sum(each.ru_utime + each.ru_stime for each in used)
    if config.stash[SPENT] > budget(config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def budget(config) -> float:
    """CPU seconds that this run may cost on this machine."""
    return CPU_SECONDS.get(whole_tiers(config), math.inf) * slowdown(config)


def slowdown(config) -> float:
    """How many times longer work() took than where the budgets were measured; at least 1, as not all is faster."""
    return max(1.0, statistics.fmean(config.stash[WORKS]) / WORK_SECONDS)


def whole_tiers(config) -> frozenset[str]:
    """The tiers of which this run has every test; none where it has a part of one."""
    paths = [(config.invocation_params.dir / arg).resolve() for arg in config.args]
    chosen = (config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect"))
    if any(chosen) or any(path.parent != config.rootpath / "test" or not path.is_dir() for path in paths):
        return frozenset()
    return frozenset(path.name for path in paths)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    yield
    config = terminalreporter.config
    lines = skipped(terminalreporter.stats.get("skipped", []))
    if tiers := whole_tiers(config):
        others = [tier for tier in COMMANDS if tier not in tiers and (config.rootpath / "test" / tier).is_dir()]
        lines += [f"test/{tier}: {COMMANDS[tier]}" for tier in others] + other_cpus()
    if lines:
        terminalreporter.section("NOT tested on this machine")
        terminalreporter.line("\n".join(lines))
    if SPENT in config.stash:
        spent, most = config.stash[SPENT], budget(config)
        too_many = f" are more than {most:.0f} (CPU_SECONDS in test/tiers.py)" if spent > most else ""
        slower = f"; this machine was {slowdown(config):.2f} times slower than the budget's"
        terminalreporter.line(f"{spent:.0f} CPU seconds{too_many}{slower}")


def skipped(reports: list) -> list[str]:
    """Reasons say how to test what was not."""
    counts = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    return [f"{count:4} skipped: {reason}" for reason, count in counts.most_common()]


def other_cpus() -> list[str]:
    """Kernels are chosen by the CPU: the tests ran on this one's."""
    cpu, older = Path("/proc/cpuinfo").read_text().split(), os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2")
    lacking = [name for flag, name in CPU_FLAGS.items() if older or flag not in cpu]
    lines = [f"kernels for {' and '.join(lacking)}: the same command on such a CPU"] if lacking else []
    if "AVX-512" not in lacking:
        lines.append("kernels for AVX2 alone: ATEN_CPU_CAPABILITY=avx2 make test")
    return lines
