"""ltx-neuron prepare makes what the scripts make, to the same bits; what commands say to type makes what they lack."""

import os
import re
import subprocess
import sys

import pytest
from conftest import QUICK
from helpers import picture_frames, wait_for, write_film
from jobs import make_job
from runs import SIZE, TP
from typed import typed_in

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.manifest import sha256
from ltx_neuron.commands import dispatch
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.weights.lora import Lora


def content(folder) -> dict[str, object]:
    """Digests of the files of weights and graphs, by their paths; of a manifest, its values but for those that the
    session's tests change in the ones that they share."""
    return {
        str(path.relative_to(folder)): {**read_json(path), "sizes": None, "checksum": None}
        if path.name == MANIFEST
        else sha256(path)
        for kind in ("weights", "graphs")
        for path in folder.glob(f"{kind}/*/*")
    }


def test_a_killed_preparation_goes_on_and_the_next_one_does_nothing(scripts, tiny, tmp_path, capsys, monkeypatch):
    setup, artifacts = scripts(tiny, TP), tmp_path / "artifacts"
    typed = [*setup.words(**SIZE, spatial_upsampler_path=tiny.spatial_upsampler), "--artifacts-dir", str(artifacts)]
    command = [sys.executable, "-m", "ltx_neuron", "prepare", *typed]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len([*artifacts.glob(f"graphs/*/{MANIFEST}")]) == 1)
    process.kill()
    process.wait()
    dispatch(["prepare", *typed])
    printed = capsys.readouterr().out
    assert "1 of 1: DiT graphs, 64x64, 9 frames, two stages" in printed  # the weights were finished
    prepared, times = content(artifacts), {path: path.stat().st_mtime_ns for path in artifacts.rglob("*")}
    dispatch(["prepare", *typed])
    assert "nothing to do" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in artifacts.rglob("*")}

    setup.prepare(**SIZE)
    theirs = content(setup.artifacts)
    assert len(prepared) > 9 and {name: theirs[name] for name in prepared} == prepared
    assert os.listdir(artifacts / "calibration")
    monkeypatch.chdir(tmp_path)
    typed_in(printed.strip().splitlines()[-1])  # to make a video
    assert (tmp_path / "out.mp4").stat().st_size > 1000


def test_what_doctor_says_to_type_makes_all_that_it_lacks(scripts, tiny, tmp_path, capsys):
    """For a job with two weight sets, whose videos are decoded on the ranks."""
    flags = dict(recipe="dev", neuron_vae=True, distilled_lora=((tiny.lora, 1),), **SIZE)
    typed = scripts(tiny, 1).words(**flags, spatial_upsampler_path=tiny.spatial_upsampler)
    kinds: set[str] = set()
    for _ in range(4):  # a command may make what another one needs
        dispatch(["doctor", *typed, "--artifacts-dir", str(tmp_path)])
        texts = re.findall(r"Make them: (.*(?:\n +ltx-neuron .*)*)", capsys.readouterr().out)
        lines = dict.fromkeys(line.strip() for text in texts for line in text.splitlines())
        if not lines:
            break
        for line in lines:
            kinds |= {" ".join(re.findall(r"(?:shard|compile) \w+", line))}
            typed_in(line)
        capsys.readouterr()
    assert not lines, lines
    assert {"shard transformer", "compile transformer", "compile gemma3", "compile vae"} <= kinds


def test_what_the_python_api_says_to_type_makes_what_is_missing(tiny, tmp_path):
    """Weights with a LoRA, and graphs that encode a retake's video and decode its sound."""
    settings = QUICK[0], "sound_on_ranks=true", "resident=true"
    workspace = Workspace(tiny.checkpoint, resolve("cpu", settings), tmp_path, 1, "float32", tiny.gemma_root)
    size, film = Size(64, 64, 9), write_film(tmp_path / "film.mkv", picture_frames(9, 64, 64, 3))
    job = workspace.resolved(make_job("rain", size, loras=(Lora(tiny.lora),), retake=Retake(film, 0, 0.2)))
    for needed in (
        lambda: workspace.weights("dit", job.loras),
        lambda: workspace.programs(workspace.sound_graphs(job.audio_latents, size)),
        lambda: workspace.programs(workspace.encoder_graphs(job)),
    ):
        with pytest.raises(UserError) as refused:
            needed()
        typed_in(str(refused.value).rpartition("Make them: ")[2])
        needed()
