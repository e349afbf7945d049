"""Whether the tests find what they are for: plants faults one at a time, and runs tests on each.

  python test/planted/run.py [NAME ...]    the tests that faults.toml names for each fault
  python test/planted/run.py --list        where each fault is planted, and what finds it

Faults are planted in a copy of the tree, never in the tree itself. With PYTEST_ADDOPTS="-n 2" two
processes test. Exit code 1 where a fault is not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
PACKAGE, TEST = "src/ltx_neuron", ROOT / "test"
FAILED = r"^(?:FAILED|ERROR) (\S+)"  # a line at the end of what pytest prints


class Fault(NamedTuple):
    """A mistake that a colleague could make, as faults.toml describes it."""

    name: str
    file: str  # from src/ltx_neuron, or from the root if it is in tools/
    before: str
    after: str
    first: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.file if self.file.startswith("tools/") else f"{PACKAGE}/{self.file}"

    @property
    def place(self) -> str:
        """File and line. SystemExit unless it can be planted in just one place."""
        text = (ROOT / self.path).read_text()
        if (count := text.count(self.before)) != 1:
            raise SystemExit(f"{self.name}: {self.before!r} is {count} times in {self.file}")
        line = text[: text.index(self.before)].count("\n") + 1
        return f"{self.path}:{line}"

    @property
    def tests(self) -> list[str]:
        """The tests that find it, as pytest names them. Only file and function count: a file may move elsewhere."""
        found = []
        for names, folders in ((self.first, "unit integration"), (self.slow, "unit integration slow")):
            for file, function in (name.split("::") for name in names):
                paths = (path for each in folders.split() for path in TEST.glob(f"{each}/**/{file}.py"))
                defined = rf"^def {function}\("
                found += [f"{p}::{function}" for p in paths if re.search(defined, p.read_text(), re.M)]
        if len(found) != len(self.first) + len(self.slow):
            raise SystemExit(f"{self.name}: its tests that are there: {found}")
        return [os.path.relpath(test, ROOT) for test in found]


def read_faults(names: list[str]) -> list[Fault]:
    faults = [Fault(**entry) for entry in tomllib.loads(FAULTS.read_text())["fault"]]
    if unknown := {*names} - {fault.name for fault in faults}:
        raise SystemExit(f"no fault has the name {', '.join(sorted(unknown))}")
    return [fault for fault in faults if fault.name in names or not names]


def copy_tree(target: Path) -> None:
    """Copy what git has or would add: no caches, no environment."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in (name for name in listed.split("\0") if (ROOT / name).is_file()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: list[str]) -> str:
    """What pytest prints where a test fails; "" where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # It compares the list with the tree, where a fault stands now.
    command.append("--ignore-glob=*/test_planted.py")
    # No bytecode is kept: a file with a fault may have the size and the time of the one without.
    own = os.environ | {"PYTHONPATH": f"{tree}/src:{tree}/tools", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=tree, env=own, capture_output=True, text=True)
    if run.returncode > 2:  # neither that a test failed nor that one could not be imported
        raise SystemExit(f"tests could not be run\n{run.stdout[-4000:]}{run.stderr[-4000:]}")
    # A session may fail for its CPU seconds, too.
    return run.stdout if re.search(FAILED, run.stdout, re.M) else ""


def is_found(fault: Fault, tree: Path, tests: list[str]) -> bool:
    """Plant a fault in the tree, run tests, and take it out again."""
    file = tree / fault.path
    original = file.read_text()
    file.write_text(original.replace(fault.before, fault.after))
    began = time.monotonic()
    output = run_tests(tree, tests)
    file.write_text(original)
    failed = re.search(FAILED, output, re.M)
    verdict = f"found by {failed[1]}" if failed else "NOT FOUND"
    print(f"{time.monotonic() - began:4.0f} s  {fault.name}: {verdict}", flush=True)
    return bool(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults (default: all)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    faults = read_faults(args.names)
    if args.list:
        for fault in faults:
            print(f"{fault.place}: {fault.name} ({' '.join(fault.tests)})")
        return
    chosen = [(fault, fault.tests) for fault in faults if fault.place]
    with tempfile.TemporaryDirectory(prefix="planted-") as tree:
        copy_tree(Path(tree))
        every = list(dict.fromkeys(test for _, tests in chosen for test in tests))
        if output := run_tests(Path(tree), every):
            raise SystemExit(f"tests fail without a fault\n{output[-4000:]}")
        found = [is_found(fault, Path(tree), tests) for fault, tests in chosen]
    print(f"{sum(found)} of {len(found)} faults are found")
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
