"""ComfyUI itself loads the project's node and runs the example workflow on a service."""

import json
import os

import comfyui_server
import pytest
from comfyui_server import WORKFLOW, ComfyUI
from helpers import read_video

pytest.importorskip("fastapi", reason="an extra is not installed: pip install -e .[dev,serve]")

import serving

pytestmark = pytest.mark.skipif("COMFYUI" not in os.environ, reason="COMFYUI=FOLDER names no ComfyUI")
openai, setup, service = serving.openai, serving.setup, serving.service
SMALL = "64x64, 9 frames, 24 fps, one stage, distilled"
TWO = "128x128, 9 frames, 24 fps, two stages, distilled"


@pytest.fixture(scope="module")
def comfyui(service, tmp_path_factory):
    environment = {"LTX_NEURON_SERVER": service.url.removesuffix("/v1"), "LTX_NEURON_TOKEN": service.tokens["ada"]}
    with comfyui_server.started(tmp_path_factory.mktemp("comfyui"), **environment) as comfyui:
        yield comfyui


def prompt_on(comfyui: ComfyUI, service, **inputs) -> dict:
    """The example workflow's prompt on the service."""
    prompt = comfyui.prompt_of(json.loads(WORKFLOW.read_text()))
    prompt["1"]["inputs"] |= {"server": service.url, "size": SMALL, **inputs}
    return prompt


def test_the_node_lists_the_services_sizes_and_comfyui_the_example(comfyui):
    node = comfyui.ask("/object_info/LTXNeuronVideo")["LTXNeuronVideo"]
    sizes, _ = node["input"]["required"]["size"]
    assert sizes[0] == "the service's default" and sizes[-1] == "typed below"
    assert {SMALL, TWO} <= {*sizes[1:-1]}
    assert node["display_name"] == "LTX-2 (ltx-neuron)" and node["category"] == "video"
    assert comfyui.ask("/workflow_templates") == {"ltx-neuron": [WORKFLOW.stem]}


@pytest.mark.parametrize(("size", "pixels"), [(SMALL, 64), (TWO, 128)])
def test_the_example_saves_a_video_of_the_chosen_size(comfyui, service, size, pixels):
    entry = comfyui.run(prompt_on(comfyui, service, size=size, prompt=f"rain, {pixels}"))
    assert entry["status"]["status_str"] == "success", entry["status"]
    (saved,) = entry["outputs"]["2"]["images"]
    video = read_video(comfyui.base / "output" / saved["subfolder"] / saved["filename"])
    assert (video["width"], video["height"], video["frame_count"]) == (pixels, pixels, 9)


def test_the_services_notes_are_shown(comfyui, service):
    entry = comfyui.run(prompt_on(comfyui, service, prompt="waves " * 1100))
    (notes,) = entry["outputs"]["1"]["text"]
    assert "is cut to 1,024" in notes
    assert notes in entry["outputs"]["3"]["text"][0]


def test_a_refusal_is_the_nodes_error(comfyui, service):
    entry = comfyui.run(prompt_on(comfyui, service, size="typed below"))
    assert entry["status"]["status_str"] == "error"
    (message,) = (m["exception_message"] for kind, m in entry["status"]["messages"] if "error" in kind)
    assert "Compiled: " in message and "128x128" in message
