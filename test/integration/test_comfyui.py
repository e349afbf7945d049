"""ComfyUI itself, a process with the project's folder in its custom_nodes, loads the node and runs the example workflow
on a service. COMFYUI names ComfyUI's folder, COMFYUI_PYTHON the interpreter of its environment."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import read_video, wait_for

pytest.importorskip("fastapi", reason="an extra is not installed: pip install -e .[dev,serve]")

import serving

pytestmark = pytest.mark.skipif("COMFYUI" not in os.environ, reason="COMFYUI=FOLDER names no ComfyUI")
openai, setup, service = serving.openai, serving.setup, serving.service
SMALL = "64x64, 9 frames, 24 fps, one stage, distilled"
TWO = "128x128, 9 frames, 24 fps, two stages, distilled"
WORKFLOW = ROOT / "comfyui/example_workflows/ltx-neuron.json"
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")  # inputs that a page shows as fields
BYPASSED = 4  # a node's mode
STATED = "control_after_generate"  # a seed has a second field on the page


class ComfyUI:
    def __init__(self, url: str, base: Path):
        self.url, self.base = url, base

    def ask(self, path: str, body: dict | None = None):
        """A route's JSON."""
        request = urllib.request.Request(self.url + path, body and json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def run(self, prompt: dict) -> dict:
        """The finished history entry of a prompt."""
        id = self.ask("/prompt", {"prompt": prompt})["prompt_id"]
        wait_for(lambda: self.ask(f"/history/{id}"))
        return self.ask(f"/history/{id}")[id]

    def prompt_of(self, workflow: dict) -> dict:
        """What ComfyUI's page sends for a saved workflow: a node's fields by name, links of nodes that are not
        bypassed."""
        nodes = {node["id"]: node for node in workflow["nodes"] if node["mode"] != BYPASSED}
        links = {link[0]: link[1:3] for link in workflow["links"]}
        prompt = {}
        for id, node in nodes.items():
            (info,) = self.ask(f"/object_info/{node['type']}").values()
            values, inputs = iter(node["widgets_values"]), {}
            for kind, names in info["input_order"].items():
                for name in names if kind != "hidden" else ():
                    of_type, more = [*info["input"][kind][name], {}][:2]
                    if isinstance(of_type, list) or of_type in WIDGETS:
                        inputs[name] = next(values)
                        if more.get(STATED):
                            next(values)
            assert not [*values], f"{node['type']}: fields that the node does not have"
            for entry in node["inputs"]:
                if entry["link"] is not None and (source := links[entry["link"]])[0] in nodes:
                    inputs[entry["name"]] = [str(source[0]), source[1]]
            prompt[str(id)] = {"class_type": node["type"], "inputs": inputs}
        return prompt


@pytest.fixture(scope="module")
def comfyui(service, tmp_path_factory):
    """ComfyUI on a folder of its own."""
    base = tmp_path_factory.mktemp("comfyui")
    shutil.copytree(ROOT / "comfyui", base / "custom_nodes/ltx-neuron")
    for name in ("input", "output", "temp", "user", "models"):
        (base / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ.get("COMFYUI_PYTHON", sys.executable), "main.py", "--cpu", "--disable-api-nodes"]
    command += ["--port", str(port), "--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
    environment = {"LTX_NEURON_SERVER": service.url.removesuffix("/v1"), "LTX_NEURON_TOKEN": service.tokens["ada"]}
    environment = {**os.environ, "PYTHONPATH": "", **environment}
    with open(base / "log", "wb") as log:
        started = {"cwd": os.environ["COMFYUI"], "env": environment, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **started)

    def answers() -> bool:
        assert process.poll() is None, (base / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(answers)
        yield ComfyUI(f"http://127.0.0.1:{port}", base)
    finally:
        process.terminate()
        process.wait(30)


def test_the_node_lists_the_services_sizes_and_comfyui_the_example(comfyui):
    node = comfyui.ask("/object_info/LTXNeuronVideo")["LTXNeuronVideo"]
    sizes, _ = node["input"]["required"]["size"]
    assert sizes[0] == "the service's default" and sizes[-1] == "typed below" and {SMALL, TWO} <= {*sizes[1:-1]}
    assert node["display_name"] == "LTX-2 (ltx-neuron)" and node["category"] == "video"
    assert comfyui.ask("/workflow_templates") == {"ltx-neuron": [WORKFLOW.stem]}


@pytest.mark.parametrize(("size", "pixels"), [(SMALL, 64), (TWO, 128)])
def test_the_example_saves_a_video_of_the_chosen_size(comfyui, service, size, pixels):
    prompt = comfyui.prompt_of(json.loads(WORKFLOW.read_text()))
    prompt["1"]["inputs"] |= {"server": service.url, "size": size, "prompt": f"rain, {pixels}"}
    entry = comfyui.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]
    (saved,) = entry["outputs"]["2"]["images"]
    video = read_video(comfyui.base / "output" / saved["subfolder"] / saved["filename"])
    assert (video["width"], video["height"], video["frame_count"]) == (pixels, pixels, 9)
