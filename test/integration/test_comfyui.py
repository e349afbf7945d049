"""ComfyUI itself loads the node and makes videos on a service. COMFYUI_PYTHON is its environment's interpreter."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request

import pytest
from conftest import ROOT
from helpers import read_video, wait_for

pytest.importorskip("fastapi", reason="an extra is not installed: pip install -e .[dev,serve]")

import serving

pytestmark = pytest.mark.skipif("COMFYUI" not in os.environ, reason="COMFYUI=FOLDER names no ComfyUI")
openai, setup, service = serving.openai, serving.setup, serving.service
SMALL = "64x64, 9 frames, 24 fps, one stage, distilled"
TWO = "128x128, 9 frames, 24 fps, two stages, distilled"


def ask(url: str, body: dict | None = None):
    """A route's JSON."""
    with urllib.request.urlopen(url, body and json.dumps(body).encode(), timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def comfyui(service, tmp_path_factory):
    """The address and the folder of a ComfyUI."""
    base = tmp_path_factory.mktemp("comfyui")
    shutil.copytree(ROOT / "comfyui", base / "custom_nodes/ltx-neuron")
    for name in ("input", "output", "temp", "user", "models"):
        (base / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ.get("COMFYUI_PYTHON", sys.executable), "main.py", "--cpu", "--disable-api-nodes"]
    command += ["--port", str(port), "--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
    environment = os.environ | {"PYTHONPATH": "", "LTX_NEURON_TOKEN": service.tokens["ada"]}
    environment |= {"LTX_NEURON_SERVER": service.url.removesuffix("/v1")}
    with open(base / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=os.environ["COMFYUI"], env=environment, stdout=log, stderr=log)

    def answers() -> bool:
        assert process.poll() is None, (base / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(answers)
        yield f"http://127.0.0.1:{port}", base
    finally:
        process.terminate()
        process.wait(30)


def test_the_node_lists_the_services_sizes_and_comfyui_the_example(comfyui):
    url, _ = comfyui
    node = ask(f"{url}/object_info/LTXNeuronVideo")["LTXNeuronVideo"]
    sizes, _ = node["input"]["required"]["size"]
    assert sizes[0] == "the service's default" and sizes[-1] == "typed below" and {SMALL, TWO} <= {*sizes[1:-1]}
    assert node["display_name"] == "LTX-2 (ltx-neuron)" and node["category"] == "video"
    assert ask(f"{url}/workflow_templates") == {"ltx-neuron": ["ltx-neuron"]}


@pytest.mark.parametrize(("size", "pixels"), [(SMALL, 64), (TWO, 128)])
def test_a_video_of_the_chosen_size_is_saved(comfyui, service, size, pixels):
    url, base = comfyui
    inputs = {"server": service.url, "prompt": f"rain, {pixels}", "size": size, "seed": 10}
    save = {"video": ["1", 0], "filename_prefix": "video/ltx-neuron", "format": "auto", "codec": "auto"}
    nodes = {"1": {"class_type": "LTXNeuronVideo", "inputs": inputs}, "2": {"class_type": "SaveVideo", "inputs": save}}
    id = ask(f"{url}/prompt", {"prompt": nodes})["prompt_id"]
    wait_for(lambda: ask(f"{url}/history/{id}"))
    entry = ask(f"{url}/history/{id}")[id]
    assert entry["status"]["status_str"] == "success", entry["status"]
    (saved,) = entry["outputs"]["2"]["images"]
    video = read_video(base / "output" / saved["subfolder"] / saved["filename"])
    assert (video["width"], video["height"], video["frame_count"]) == (pixels, pixels, 9)
