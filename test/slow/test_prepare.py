"""ltx-neuron prepare, killed and continued: it makes what the scripts make, to the same bits."""

import os
import re
import shlex
import signal
import subprocess
import sys

from conftest import QUICK
from helpers import wait_for
from printed import runs
from runs import SIZE, TP

from ltx_neuron.backends.manifest import sha256
from ltx_neuron.commands import VERBS, dispatch
from ltx_neuron.files import MANIFEST, read_json


def content(folder) -> dict[str, object]:
    """Digests of the files of weights and graphs, by their paths; of a manifest, its values. The
    session's tests record their sizes in the manifests that they share: a checksum changes."""
    files = [path for kind in ("weights", "graphs") for path in folder.glob(f"{kind}/*/*")]
    return {
        str(path.relative_to(folder)): {**read_json(path), "sizes": None, "checksum": None}
        if path.name == MANIFEST
        else sha256(path)
        for path in files
    }


def test_a_killed_preparation_goes_on_and_the_next_one_does_nothing(
    scripts, tiny, tmp_path, capsys
):
    setup = scripts(tiny, TP)
    words = [*setup.words(**SIZE), "--artifacts-dir", str(tmp_path)]
    words += ["--spatial-upsampler-path", str(tiny.spatial_upsampler)]
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


@runs("finished.py:*: *")
def test_what_doctor_says_to_type_makes_all_that_it_lacks(tiny, tmp_path, capsys):
    """For a job with two weight sets, whose videos are decoded on the ranks."""
    words = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root]
    words += ["--artifacts-dir", tmp_path, "--profile", "cpu", "--tp-degree", 1]
    words += ["--dtype", "float32", "--recipe", "dev", "--two-stage", "--neuron-vae"]
    words += ["--distilled-lora", tiny.lora, 1, "--spatial-upsampler-path", tiny.spatial_upsampler]
    words += ["--height", 64, "--width", 64, "--num-frames", 9, "--profile-set", QUICK[0]]
    typed: list[str] = []
    for _ in range(4):  # a command may make what another one needs
        dispatch(["doctor", *map(str, words)])
        found = re.findall(r"Make them: (.*(?:\n +ltx-neuron .*)*)", capsys.readouterr().out)
        lines = [line.strip() for text in found for line in text.splitlines()]
        if not lines:
            break
        for line in dict.fromkeys(lines):
            typed.append(line)
            parts = shlex.split(line)
            dispatch(parts[next(at for at, word in enumerate(parts) if word in VERBS) :])
        capsys.readouterr()
    assert not lines, lines
    made = {" ".join(re.findall(r"(?:shard|compile) \w+", line)) for line in typed}
    assert {"shard transformer", "compile transformer", "compile gemma3", "compile vae"} <= made
