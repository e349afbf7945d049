"""The list of planted faults fits this tree; test/planted/run.py plants them."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from conftest import ROOT


def test_sixty_faults_can_be_planted_two_in_each_room_and_have_tests_that_find_them():
    listed = subprocess.run([sys.executable, ROOT / "test/planted/run.py", "--list"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    files = [Path(line.partition(":")[0]) for line in listed.stdout.splitlines()]
    assert len(files) >= 60
    rooms = {path.parent.name for path in (ROOT / "src/ltx_neuron").glob("*/*.py")}
    planted = Counter(path.parts[2] for path in files if path.is_relative_to("src/ltx_neuron"))
    assert [room for room in sorted(rooms) if planted[room] < 2] == []
