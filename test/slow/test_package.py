"""The sdist and the wheel: built as for a release, and what is in them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from packaging.metadata import Metadata
from printed import runs

import ltx_neuron
from ltx_neuron.commands import VERBS
from ltx_neuron.demo import ASSETS

TRAINING = "tools/train_demo/"
DEMO = "src/ltx_neuron/demo/"


@pytest.fixture(scope="session")
def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("which files belong to the project: git says so, in a clone")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    return {name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="session")
def built(tracked, tmp_path_factory) -> Path:
    """The folder of an sdist of the tracked files and of the wheel that is built from it."""
    clone, built = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, clone]
    subprocess.run(build, check=True, capture_output=True)
    return built


@pytest.fixture(scope="session")
def wheel(built) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_sdist_is_the_clone_without_the_demos_training(built, tracked):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {each.name.partition("/")[2] for each in archive if each.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    assert {name for name in files - made if ".egg-info/" not in name} == {
        name for name in tracked if not name.startswith(TRAINING)
    }


def test_the_wheel_is_the_package_without_the_demos_files(wheel, tracked):
    package = {name for name in tracked if name.startswith("src/ltx_neuron/")}
    demo = {name for name in package if name.startswith(DEMO) and not name.endswith(".py")}
    assert demo
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == {name.removeprefix("src/") for name in package - demo}
    assert wheel.stat().st_size < 2e6


def test_an_index_takes_the_wheels_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=True)
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert metadata.license_expression == "Apache-2.0"
    assert str(metadata.version) == ltx_neuron.__version__
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description.strip() == (ROOT / "README.md").read_text().strip()


# --- in an environment of its own: from an empty folder, without the clone -----------------------

# In place of the size that the demo's commands name: what is tested is not how long it takes.
SMALL = "--height 64 --width 64 --num-frames 9 --tp-degree 1 --profile cpu --artifacts-dir made"
SMALL += " --profile-set text_buckets=1024"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The program, in a new environment that has this one's packages but for ltx-neuron."""
    environment = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    run([sys.executable, "-m", "pip", "--python", environment / "bin/python", *install])
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


@runs(
    "commands/demo.py:main: ltx-neuron demo",
    "commands/demo.py:main: ltx-neuron generate",
    "commands/demo.py:main: ltx-neuron prepare",
)
def test_a_wheel_makes_a_clip_of_the_demo_in_an_empty_folder(clip, installed):
    assert (clip / "demo.mp4").stat().st_size > 1000
    assert {path.name for path in clip.iterdir()} == {"demo.json", "demo.mp4", "made"}


def test_a_wheel_names_its_program_and_no_script(clip, installed):
    words = ["prepare", "--checkpoint-path", ASSETS.checkpoint, "--gemma-root", ASSETS.gemma_root]
    absent = run([installed, *words, *SMALL.split(), "--neuron-vae", "--dry-run"], clip)
    assert "missing" in absent.stdout
    generate = ["generate", *words[1:], *SMALL.split(), "--neuron-vae"]
    generate += ["--prompt", "x", "--output-path", "x.mp4"]
    process = subprocess.run(
        [*map(str, [installed, *generate])], capture_output=True, text=True, cwd=clip, env=without_checkout()
    )
    assert process.returncode == 2
    assert re.search(r"Make them: \S*ltx-neuron prepare ", process.stderr), process.stderr
    assert ".py" not in process.stderr


# In one process: importing torch for each of them would be all that takes time.
EVERY_HELP = """
import contextlib
from ltx_neuron.commands import VERBS, dispatch
for verb in VERBS:
    with contextlib.suppress(SystemExit):
        dispatch([verb, "--help"])
"""


def test_every_verb_of_a_wheel_has_help(installed, tmp_path):
    printed = run([installed.with_name("python"), "-c", EVERY_HELP], tmp_path).stdout
    words = " ".join(printed.split())  # lines are broken behind a long path
    assert {verb for verb in VERBS if f"ltx-neuron {verb} " not in words} == set()


def test_a_wheel_serves(clip, installed):
    files = ["--checkpoint-path", ASSETS.checkpoint, "--gemma-root", ASSETS.gemma_root]
    files += ["--spatial-upsampler-path", ASSETS.spatial_upsampler, "--neuron-gemma"]
    words = [installed, "serve", *files, *SMALL.split(), "--two-stage", "--port", "0"]
    process = subprocess.Popen([*map(str, words)], cwd=clip, env=without_checkout(), stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.split()[1] for line in process.stdout if line.startswith("serving: "))
        assert urllib.request.urlopen(f"{url[:-3]}/health").status == 200
    finally:
        process.terminate()
    assert process.wait(SCRIPT_SECONDS) in (0, 143)


def test_the_demos_files_are_not_in_a_wheel_which_says_where_they_are(installed, tmp_path):
    options = {"capture_output": True, "text": True, "env": without_checkout()}
    process = subprocess.run([installed, "demo"], cwd=tmp_path, **options)
    assert process.returncode == 2 and "src/ltx_neuron/demo" in process.stderr


@pytest.mark.timeout(1800)
def test_the_containers_cpu_variant_runs_the_doctor():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon: docker build, as the Dockerfile's first lines say")
    tag = ["--tag", "ltx-neuron:test", "--build-arg", "BASE=python:3.11-slim"]
    subprocess.run(["docker", "build", *tag, ROOT], check=True)
    doctor = ["docker", "run", "--rm", "ltx-neuron:test", "doctor"]
    assert "can run here" in subprocess.run(doctor, capture_output=True, text=True).stdout
