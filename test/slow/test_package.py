"""The sdist and the wheel: built as for a release, and what is in them."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import ltx_neuron

ROOT = Path(__file__).resolve().parents[2]
TRAINING = "tools/train_demo/"
DEMO = "src/ltx_neuron/demo/"


@pytest.fixture(scope="session")
def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("which files belong to the project: git says so, in a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
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


def test_the_wheel_runs_in_an_empty_folder_without_the_clone(wheel, tmp_path):
    site, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    # Before this environment's own installation, if there is one.
    options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(site)}, "text": True}
    where = [sys.executable, "-c", "import ltx_neuron; print(ltx_neuron.__file__)"]
    answer = subprocess.run(where, **options, check=True, stdout=subprocess.PIPE)
    assert Path(answer.stdout.strip()).is_relative_to(site)
    subprocess.run([sys.executable, "-m", "ltx_neuron.tiny", "tiny"], **options, check=True)
    assert any(folder.glob("tiny/*.safetensors"))


@pytest.mark.timeout(1800)
def test_the_containers_cpu_variant_runs_the_doctor():
    if (
        not shutil.which("docker")
        or subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        pytest.skip("no Docker daemon: docker build, as the Dockerfile's first lines say")
    tag = ["--tag", "ltx-neuron:test", "--build-arg", "BASE=python:3.11-slim"]
    subprocess.run(["docker", "build", *tag, ROOT], check=True)
    doctor = ["docker", "run", "--rm", "ltx-neuron:test", "doctor"]
    assert "can run here" in subprocess.run(doctor, capture_output=True, text=True).stdout
