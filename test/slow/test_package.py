"""The sdist and the wheel, built as for a release: what is in them, and the wheel in an environment of its own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from packaging.metadata import Metadata

import ltx_neuron
from ltx_neuron.demo import ASSETS

# In place of the size that the demo's commands name: what is tested is not how long it takes.
SMALL = "--height 64 --width 64 --num-frames 9 --tp-degree 1 --profile cpu --artifacts-dir made"
SMALL += " --profile-set text_buckets=1024"


def run(words: list, folder: Path | None = None) -> subprocess.CompletedProcess:
    """A command in a folder, where nothing leads to this checkout."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = dict(capture_output=True, text=True, cwd=folder, env=own, timeout=SCRIPT_SECONDS)
    return subprocess.run([*map(str, words)], **options)


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("which files belong to the project: git says so, in a clone")
    listed = run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory) -> list[Path]:
    """An sdist of the tracked files, and the wheel that is built from it."""
    clone, built = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    succeeded(run([sys.executable, "-m", "build", "--no-isolation", "--outdir", built, clone]))
    return [next(built.glob(pattern)) for pattern in ("*.tar.gz", "*.whl")]


def test_the_sdist_is_the_clone_and_the_wheel_the_package_without_the_demos_files(built, tracked):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        files = {each.name.partition("/")[2] for each in archive if each.isfile()}
    generated = {name for name in files if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert files - generated == {name for name in tracked if not name.startswith("tools/train_demo/")} - generated
    package = {name for name in tracked if name.startswith("src/ltx_neuron/")}
    demo = {name for name in package if name.startswith("src/ltx_neuron/demo/") and not name.endswith(".py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (facts,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(facts), validate=True)  # as an index does
    assert demo and wheel.stat().st_size < 2e6
    assert {name for name in names if ".dist-info/" not in name} == {n.removeprefix("src/") for n in package - demo}
    assert facts.replace("METADATA", "licenses/LICENSE") in names
    assert (metadata.license_expression, str(metadata.version)) == ("Apache-2.0", ltx_neuron.__version__)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description.strip() == (ROOT / "README.md").read_text().strip()


def test_a_wheel_makes_a_clip_of_the_demo_in_an_empty_folder_and_names_its_own_program(
    built, tmp_path, tmp_path_factory
):
    environment = tmp_path_factory.mktemp("environment")  # with this one's packages but for ltx-neuron
    installed = environment / "bin/ltx-neuron"
    succeeded(run([sys.executable, "-m", "venv", "--without-pip", environment]))
    install = ["install", "--quiet", "--no-deps", "--no-index", built[1]]
    succeeded(run([sys.executable, "-m", "pip", "--python", environment / "bin/python", *install]))
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    printed = succeeded(run([installed, "demo", ASSETS.checkpoint.parent], tmp_path)).stdout.splitlines()
    for line in printed[-2:]:
        program, *words = shlex.split(line)
        assert tmp_path.joinpath(program).resolve() == installed.resolve()
        succeeded(run([installed, *words, *SMALL.split()], tmp_path))
    assert (tmp_path / "demo.mp4").stat().st_size > 1000
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json", "demo.mp4", "made"}
    words = ["--checkpoint-path", ASSETS.checkpoint, "--gemma-root", ASSETS.gemma_root, *SMALL.split()]
    words += ["--neuron-vae", "--prompt", "x", "--output-path", "x.mp4"]
    refused = run([installed, "generate", *words], tmp_path)
    assert refused.returncode == 2 and ".py" not in refused.stderr
    assert re.search(r"Make them: \S*ltx-neuron prepare ", refused.stderr), refused.stderr
    without = run([installed, "demo"], tmp_path)
    assert without.returncode == 2 and "src/ltx_neuron/demo" in without.stderr


@pytest.mark.timeout(1800)
def test_the_containers_cpu_variant_runs_the_doctor():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon: docker build, as the Dockerfile's first lines say")
    tag = ["--tag", "ltx-neuron:test", "--build-arg", "BASE=python:3.11-slim"]
    subprocess.run(["docker", "build", *tag, ROOT], check=True)
    doctor = ["docker", "run", "--rm", "ltx-neuron:test", "doctor"]
    assert "can run here" in subprocess.run(doctor, capture_output=True, text=True).stdout
