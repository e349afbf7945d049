"""ltx-neuron prepare, killed and continued: it makes what the scripts make, to the same bits."""

import os
import signal
import subprocess
import sys

from helpers import wait_for
from runs import SIZE, TP

from ltx_neuron.backends.manifest import sha256
from ltx_neuron.commands import dispatch
from ltx_neuron.files import MANIFEST, read_json


def content(folder) -> dict[str, object]:
    """Digests of the files of weights and graphs, by their paths; of a manifest, its values. The
    session's tests record their sizes in the manifests of the folder that they share."""
    files = [path for kind in ("weights", "graphs") for path in folder.glob(f"{kind}/*/*")]
    return {
        str(path.relative_to(folder)): {**read_json(path), "sizes": None}
        if path.name == MANIFEST
        else sha256(path)
        for path in files
    }


def test_a_killed_preparation_goes_on_and_the_next_one_does_nothing(
    scripts, tiny, tmp_path, capsys
):
    setup = scripts(tiny, TP)
    words = [*setup.words(**SIZE), "--artifacts-dir", str(tmp_path)]
    command = [sys.executable, "-m", "ltx_neuron", "prepare", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len([*tmp_path.glob(f"graphs/*/{MANIFEST}")]) == 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    dispatch(["prepare", *words])
    said = capsys.readouterr().out
    assert "1 of 1: DiT graphs, 64x64, 9 frames, two stages" in said  # the weights were finished
    made = content(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    dispatch(["prepare", *words])
    assert "nothing to do" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    setup.prepare(**SIZE)
    theirs = content(setup.artifacts)
    assert len(made) > 9 and {name: theirs[name] for name in made} == made
    assert os.listdir(tmp_path / "calibration")
