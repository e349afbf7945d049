"""The wheel in a new environment: from an empty folder, without a clone, it makes a clip."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT_SECONDS, succeeded

from ltx_neuron.commands import VERBS
from ltx_neuron.demo import ASSETS

# In place of the size that the demo's commands name: what is tested is not how long it takes.
SMALL = "--height 64 --width 64 --num-frames 9 --tp-degree 1 --profile cpu --artifacts-dir made"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The program, in a new environment that has this one's packages but for ltx-neuron."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    pip = [sys.executable, "-m", "pip"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "wheel", *offline, "-w", folder / "dist", folder])
    environment = folder / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    (wheel,) = (folder / "dist").glob("*.whl")
    run([*pip, "--python", environment / "bin/python", "install", *offline[:2], wheel])
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin/ltx-neuron"


def run(words: list, folder: Path | None = None) -> subprocess.CompletedProcess:
    """A command in a folder, where nothing leads to this checkout."""
    return succeeded(
        subprocess.run(
            [*map(str, words)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=without_checkout(),
            timeout=SCRIPT_SECONDS,
        )
    )


def without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def clip(installed, tmp_path_factory) -> Path:
    """The folder in which the demo's two commands were typed, of a smaller size."""
    folder = tmp_path_factory.mktemp("empty")
    printed = run([installed, "demo", ASSETS.checkpoint.parent], folder).stdout.splitlines()
    for line in printed[-2:]:
        program, *words = shlex.split(line)
        assert folder.joinpath(program).resolve() == installed.resolve()
        print(run([installed, *words, *SMALL.split()], folder).stdout)
    return folder


def test_a_wheel_makes_a_clip_of_the_demo_in_an_empty_folder(clip, installed):
    assert (clip / "demo.mp4").stat().st_size > 1000
    assert {path.name for path in clip.iterdir()} == {"demo.json", "demo.mp4", "made"}


def test_a_wheel_names_its_program_and_no_script(clip, installed):
    words = ["prepare", "--checkpoint-path", ASSETS.checkpoint, "--gemma-root", ASSETS.gemma_root]
    absent = run([installed, *words, *SMALL.split(), "--neuron-vae", "--dry-run"], clip)
    assert "to make" in absent.stdout
    generate = ["generate", *words[1:], *SMALL.split(), "--neuron-vae"]
    generate += ["--prompt", "x", "--output-path", "x.mp4"]
    process = subprocess.run(
        [*map(str, [installed, *generate])],
        capture_output=True,
        text=True,
        cwd=clip,
        env=without_checkout(),
    )
    assert process.returncode == 2
    assert re.search(r"Make them: \S*ltx-neuron prepare ", process.stderr), process.stderr
    assert ".py" not in process.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_a_wheel_has_help(installed, verb, tmp_path):
    assert f"ltx-neuron {verb}" in run([installed, verb, "--help"], tmp_path).stdout


def test_a_wheel_serves(clip, installed):
    files = ["--checkpoint-path", ASSETS.checkpoint, "--gemma-root", ASSETS.gemma_root]
    files += ["--spatial-upsampler-path", ASSETS.spatial_upsampler, "--neuron-gemma"]
    words = [installed, "serve", *files, *SMALL.split(), "--two-stage", "--port", "0"]
    process = subprocess.Popen(
        [*map(str, words)], cwd=clip, env=without_checkout(), stdout=subprocess.PIPE, text=True
    )
    try:
        url = next(line.split()[1] for line in process.stdout if line.startswith("serving: "))
        assert urllib.request.urlopen(f"{url[:-3]}/health").status == 200
    finally:
        process.terminate()
    assert process.wait(SCRIPT_SECONDS) in (0, 143)
