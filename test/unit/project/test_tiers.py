"""A test session collects quickly, and says what it did not test and what it cost."""

import subprocess
import sys

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


def test_collecting_tests_imports_nothing_that_takes_seconds_and_is_not_needed(pytestconfig):
    assert pytestconfig.stash[IMPORTED] == set()


def test_a_run_says_what_it_skipped_which_tiers_it_left_out_and_what_it_cost(tmp_path):
    """And the first tier fails above its CPU seconds, which processes without a parent count in."""
    for name, text in SUITE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    plugins = "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"
    # The budget is of a machine that is slower than any.
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "test"), "WORK_SECONDS": "1e9"}
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and not done.stderr, done.stderr
    printed = done.stdout.partition("NOT tested on this machine")[2]
    assert "   2 cases skipped: no a: make a\n   1 file skipped: no b: make b" in printed
    assert "\ntest/slow: make test-all\n" in printed and "test/xla" not in printed
    assert 1 < float(printed.split(" CPU seconds are more than 1 ")[0].split()[-1]) < 30
    assert "was 1.00 times slower than the budget's\n" in printed


def test_every_tier_has_a_command():
    folders = {path.name for path in (ROOT / "test").iterdir() if any(path.glob("test_*.py"))}
    assert folders <= tiers.COMMANDS.keys()
