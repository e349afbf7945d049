"""What a test session itself does: it collects quickly, and says what it did not test and what it
cost."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiers
from conftest import ROOT
from tiers import IMPORTED

# A suite of this one's layout. Two cases of one reason, a file that is skipped as a whole, and a
# process whose parent dies before it has worked.
SUITE = {
    "pytest.ini": "[pytest]\ntestpaths = test/unit test/integration\n",
    "test/conftest.py": """
import os, tiers
tiers.CPU_SECONDS, pytest_plugins = {tiers.FIRST: 0.9}, ["tiers"]
tiers.WORK_SECONDS = float(os.environ["WORK_SECONDS"])
""",
    "test/slow/test_c.py": "",
    "test/integration/test_b.py": """
import pytest
pytest.skip("no b: make b", allow_module_level=True)
""",
    "test/unit/test_a.py": """
import os, time, pytest
@pytest.mark.parametrize("case", range(3))
def test_a(case):
    if case: pytest.skip("no a: make a")
    done, busy = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            while time.process_time() < 1: pass
        os._exit(0)
    os.close(busy)
    os.read(done, 1)
""",
}


def run(folder, *words: str, work_seconds: float = 1e9) -> tuple[int, str]:
    """The exit code of a run of SUITE, and what is printed at its end. Its budget is of a machine
    whose work() takes `work_seconds`, so any machine is faster than that of the default."""
    for name, text in SUITE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    plugins = "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2", *words]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "test")}
    env["WORK_SECONDS"] = str(work_seconds)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.partition("NOT tested on this machine")[2]


def test_collecting_tests_imports_nothing_that_takes_seconds_and_is_not_needed(pytestconfig):
    assert pytestconfig.stash[IMPORTED] == set()


def test_a_run_says_what_it_skipped_which_tiers_it_left_out_and_what_it_cost(tmp_path):
    """And the first tier fails above its CPU seconds, which processes without a parent count in."""
    code, said = run(tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "   2 cases skipped: no a: make a\n   1 file skipped: no b: make b" in said
    assert "\ntest/slow: make test-all\n" in said and "test/xla" not in said
    assert 1 < float(said.split(" CPU seconds are more than 1 ")[0].split()[-1]) < 30
    assert "was 1.00 times slower than the budget's\n" in said


def test_a_budget_grows_on_a_machine_that_is_slower_than_that_where_it_was_measured(tmp_path):
    """Whose work() takes a microsecond, so that this machine is thousands of times slower."""
    code, said = run(tmp_path, work_seconds=1e-6)
    assert code == 0 and " CPU seconds; this machine was " in said


def test_slowness_is_the_mean_over_a_run_and_never_less_than_1():
    def slowdown(*works: float) -> float:
        return tiers.slowdown(SimpleNamespace(stash={tiers.WORKS: list(works)}))

    usual = tiers.WORK_SECONDS
    assert slowdown(usual, 2 * usual) == pytest.approx(1.5)
    assert slowdown(usual / 2) == 1


def test_a_part_of_the_first_tier_may_cost_what_it_will_and_says_nothing_of_other_tiers(tmp_path):
    code, said = run(tmp_path, "test/unit/test_a.py")
    assert code == 0 and "2 cases skipped" in said
    assert "are more" not in said and "test/slow" not in said


def test_every_tier_has_a_command():
    folders = {path.name for path in (ROOT / "test").iterdir() if any(path.glob("test_*.py"))}
    assert folders <= tiers.COMMANDS.keys()
