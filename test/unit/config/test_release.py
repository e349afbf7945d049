"""What a release says besides its code: which artifacts stay valid; the container's steps."""

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

import ltx_neuron
from ltx_neuron import artifacts
from ltx_neuron.doctor import checks, sdk

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def arguments(instruction: str) -> list[str]:
    """Of a Dockerfile's instructions of one kind."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.partition(" ") for line in text.replace("\\\n", " ").splitlines()]
    return [rest for name, _, rest in lines if name == instruction]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="digests of CHANGELOG.md: Python 3.11")
def test_the_changelog_begins_with_this_versions_layout_and_traced_code():
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    version, weights, graphs = rows[1]
    assert version == ltx_neuron.__version__
    assert f"layout {artifacts.LAYOUT}" in weights
    assert artifacts.code_digest("torchdist") in graphs and artifacts.code_digest("nxd") in graphs


def test_the_images_steps_name_files_extras_and_a_program_that_it_has():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {source for rest in arguments("COPY") for source in shlex.split(rest)[:-1]}
    assert "*" in ignored and copied
    for source in copied:
        assert (ROOT / source).exists() and f"!{source}" in ignored
    for script in arguments("RUN"):
        subprocess.run(["sh", "-n", "-c", script], check=True)
        words = [word.rstrip(";") for word in shlex.split(script)]
        assert {words[i + 1] for i, word in enumerate(words) if word in ("-c", "-r")} <= copied
        extras = re.findall(r"\.\[(.*?)\]", script)
        assert extras and {name for names in extras for name in names.split(",")} <= EXTRAS.keys()
    (entry,) = (json.loads(rest) for rest in arguments("ENTRYPOINT"))
    assert entry[0] in PROJECT.get("scripts", {})


def test_the_image_and_the_doctor_have_the_sdk_the_torch_and_the_ltx_core_of_the_package():
    (base,) = arguments("ARG")
    match = re.search(r":(\d+\.\d+)\.\d+-neuronx-py(\d)(\d+)-sdk(\d+\.\d+)", base)
    torch, python, release = match[1], (int(match[2]), int(match[3])), match[4]
    assert f"torch=={torch}.*" in EXTRAS["neuron"]
    (compiler,) = (package for package in EXTRAS["neuron"] if package.startswith("neuronx-cc"))
    assert sdk.dotted(sdk.release_of("compiler", compiler.partition("==")[2])) == release
    low, high = sdk.PYTHON["nxd"]
    assert low <= python < high
    _, install = checks._PACKAGES["ltx-core"]
    assert install.split()[-1] in (ROOT / "constraints.txt").read_text().splitlines()
    low, high = map(sdk.dotted, sdk.TORCH)
    assert f"torch>={low},<{high}" in PROJECT["dependencies"]
