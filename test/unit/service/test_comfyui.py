"""The ComfyUI node and the service's application on a real server; a thread is its worker."""

import base64
import importlib.util
import io
import json
import re
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from conftest import ROOT
from helpers import tone, wait_for
from PIL import Image
from service_app import Service, listening

from ltx_neuron import __version__
from ltx_neuron.engine import preflight
from ltx_neuron.host.input_files import read_sound
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO, job_of

IMPORTED = "comfy", "comfy.utils", "comfy.model_management", "folder_paths", "server", "comfy_api", "comfy_api.latest"
OBJECTS = "utils", "model_management", "latest", "PromptServer", "instance", "InputImpl"
FUNCTIONS = "get_temp_directory", "VideoFromFile", "ProgressBar", "update_absolute", "send_progress_text"
INTERRUPTS = "throw_exception_if_processing_interrupted"


@pytest.fixture
def node(service, tmp_path, monkeypatch):
    """The node's module, as ComfyUI loads a file of custom_nodes, and all modules of ComfyUI that it imports."""
    comfy = Mock(spec_set=[*OBJECTS, *FUNCTIONS, INTERRUPTS])
    for name in OBJECTS:
        setattr(comfy, name, comfy)
    comfy.get_temp_directory.return_value, comfy.ProgressBar.return_value = str(tmp_path / "temp"), comfy
    for name in IMPORTED:
        monkeypatch.setitem(sys.modules, name, comfy)
    spec = importlib.util.spec_from_file_location("comfyui_ltx_neuron", ROOT / "comfyui/ltx_neuron.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("LTX_NEURON_TOKEN", service.token.decode())
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    return module, comfy


def executed(module, **inputs):
    """What ComfyUI does with a node of its first interface, with widgets' defaults for what is not connected."""
    kinds = (node := module.NODE_CLASS_MAPPINGS["LTXNeuronVideo"]).INPUT_TYPES()
    widgets = kinds["required"] | kinds["optional"]
    values = {name: more[0]["default"] for name, (_, *more) in widgets.items() if more and "default" in more[0]}
    values |= dict.fromkeys(kinds["hidden"], "7")
    assert inputs.keys() <= {name for names in kinds.values() for name in names}
    return dict(zip(node.RETURN_NAMES, getattr(node(), node.FUNCTION)(**values | inputs)["result"], strict=True))


@contextmanager
def working(service: Service, end):
    """The address of a service, and a thread that takes the next job and ends it by `end(entry)`."""

    def work() -> None:
        wait_for(lambda: service.queue.next_batch_key() is not None)
        entry = service.claimed()
        service.queue.report(entry, 40, {"stage": "stage_1"})
        wait_for(lambda: end(entry) is not False)

    with listening(service) as (host, port), ThreadPoolExecutor(1) as pool:
        ended = pool.submit(work)
        yield f"http://{host}:{port}/"
        ended.result(60)


def test_the_node_shows_previews_and_notes_and_returns_the_video_of_its_picture_and_sound(service, node, monkeypatch):
    module, comfy = node
    monkeypatch.setattr(preflight, "notes", lambda job, workspace: ["the prompt is cut"])
    pixels, sound, jpeg, sent = torch.rand(1, 64, 96, 3), tone(24000, 6.0), io.BytesIO(), {}
    progress = comfy.update_absolute.call_args_list
    Image.new("RGB", (8, 4), "red").save(jpeg, "JPEG")

    def end(entry) -> bool:
        if not sent:
            sent["job"] = job = job_of(entry.params, service.queue.folder_of(entry.id))
            sent["picture"] = Image.open(job.images[0].path).copy()
            sent["sound"] = read_sound(job.sound.path, "")
            (service.queue.folder_of(entry.id) / VIDEO).write_bytes(b"a video with sound")
        if progress[-1:] == [call(40, 100, None)]:
            service.queue.report(entry, 50, {"preview": base64.b64encode(jpeg.getvalue()).decode()})
        return any(shown.args[2] for shown in progress) and service.queue.complete(entry)

    with working(service, end) as server:
        audio = {"waveform": sound[None], "sample_rate": 24000}
        outputs = executed(module, server=server, prompt="waves", seed=2**63, image=pixels, audio=audio)
    path, job = Path(outputs["path"]), sent["job"]
    assert path.read_bytes() == b"a video with sound" and str(path.parent) == comfy.get_temp_directory()
    comfy.VideoFromFile.assert_called_once_with(outputs["path"])
    assert (job.prompt, job.seed, job.size.sides) == ("waves", 2**63, (512, 768))
    received = torch.frombuffer(bytearray(sent["picture"].tobytes()), dtype=torch.uint8)
    assert torch.equal(received.view(64, 96, 3), pixels[0].mul(255).round().byte())
    assert sent["sound"].rate == 24000
    torch.testing.assert_close(sent["sound"].samples, sound, atol=1e-4, rtol=0)
    kind, picture, _ = next(shown.args[2] for shown in progress if shown.args[2])
    assert (kind, picture.size, progress[-1]) == ("JPEG", (8, 4), call(100, 100, None))
    assert outputs["notes"] == "the prompt is cut"
    comfy.send_progress_text.assert_called_once_with(outputs["notes"], "7")


def test_refusals_and_failures_of_the_service_are_the_nodes_errors(service, node, monkeypatch):
    module, comfy = node

    def raises(message: str | None, error=RuntimeError, **inputs) -> None:
        with pytest.raises(error, match=message):
            executed(module, **{"prompt": "waves"} | inputs)

    interruption = type("InterruptProcessingException", (Exception,), {})

    def interrupt(entry) -> bool:
        getattr(comfy, INTERRUPTS).side_effect = interruption
        return not service.queue.owns(entry)

    with working(service, lambda entry: service.queue.fail(entry, "x", "the video could not be made")) as server:
        raises("could not be made", server=server)
        raises("Compiled: 512x768", server=server, size=module.TYPED, width=64)
    with working(service, interrupt) as server:
        raises(None, interruption, server=server)
        assert service.queue.counts()["in_progress"] == 0  # its job is cancelled
        monkeypatch.delenv("LTX_NEURON_TOKEN")
        raises("send a token", server=server)
    raises("type an address", server="file:///etc/passwd")


def test_a_request_that_is_sent_again_has_the_same_key(node, monkeypatch):
    module, urlopen = node[0], Mock(side_effect=ConnectionResetError)
    monkeypatch.setattr(module.urllib.request, "urlopen", urlopen)
    with pytest.raises(RuntimeError, match="does not answer"):
        executed(module, prompt="waves", server="http://127.0.0.1:1")
    requests = [asked.args[0] for asked in urlopen.call_args_list]  # with those of the list of sizes
    keys = [request.get_header("Idempotency-key") for request in requests if request.get_method() == "POST"]
    assert keys[0] and keys == [keys[0]] * module.ATTEMPTS


def test_sizes_and_lora_sets_are_those_of_the_service(service, node, monkeypatch):
    module, _ = node

    def choices() -> tuple[list, list]:
        module.listed.cache_clear()
        inputs = module.LTXNeuronVideo.INPUT_TYPES()
        return inputs["required"]["size"][0], inputs["optional"]["lora_set"][0]

    with listening(service) as (host, port):
        monkeypatch.setattr(module, "SERVER", f"http://{host}:{port}")
        sizes = [f"{sides}, 121 frames, 24 fps, one stage, distilled" for sides in ("512x768", "768x512")]
        assert choices() == ([module.DEFAULT, *sizes, module.TYPED], ["default"])
    assert choices() == ([module.DEFAULT, module.TYPED], ["default"])  # nothing answers now


def test_the_nodes_inputs_are_the_fields_of_its_request(node, monkeypatch):
    module, _ = node

    def requested(**inputs):
        sent = {}
        monkeypatch.setattr(module.Service, "create", lambda service, fields, files: sent.update(fields) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executed(module, prompt="waves", **inputs)
        return read_request({name: str(value) for name, value in sent.items()})

    def size_of(**inputs) -> tuple:
        size = requested(**inputs).requested_size
        return size.width, size.height, size.num_frames, size.frame_rate, size.two_stage, size.recipe

    assert size_of() == size_of(width=64) == (None,) * 6
    chosen = "512x768, 97 frames, 29.97 fps, two stages, dev"
    assert size_of(size=chosen, width=64) == (512, 768, 97, 29.97, True, "dev")
    typed = dict(size=module.TYPED, width=64, height=96, frames=9, frame_rate=30.0)
    assert size_of(**typed) == (64, 96, 9, 30.0, False, None) and size_of(**typed, two_stage=True)[4]
    request = requested(last_image=torch.rand(1, 64, 96, 3), negative_prompt="blurry", lora_set="style")
    assert (request.negative_prompt, request.nag_scale, request.lora_set) == ("blurry", 11, "style")
    (last,) = request.images
    assert last.frame == -1 and Image.open(io.BytesIO(last.data)).size == (96, 64)
    assert requested().model_fields_set <= {"prompt", "seed"}
    assert requested(negative_prompt="blurry", nag_scale=1.0).nag_scale is None  # of the dev recipe


def test_the_folder_is_a_package_of_comfyuis_registry_with_a_workflow_of_the_node(node):
    module, _ = node
    project = tomllib.loads((ROOT / "comfyui/pyproject.toml").read_text())
    assert project["project"]["version"] == __version__
    assert [project["tool"]["comfy"]["DisplayName"]] == [*module.NODE_DISPLAY_NAME_MAPPINGS.values()]
    (workflow,) = (ROOT / "comfyui/example_workflows").glob("*.json")
    nodes = json.loads(workflow.read_text())["nodes"]
    (values,) = (node["widgets_values"] for node in nodes if node["type"] == "LTXNeuronVideo")
    inputs = module.LTXNeuronVideo.INPUT_TYPES()
    widgets = [kind for kind, _ in (inputs["required"] | inputs["optional"]).values() if kind not in ("IMAGE", "AUDIO")]
    del values[widgets.index("INT") + 1]  # a seed has two
    types = {"INT": int, "FLOAT": float, "BOOLEAN": bool}  # others are texts
    assert [type(value) for value in values] == [types.get(str(kind), str) for kind in widgets]
    imports = re.findall(r"^\s*(?:import|from) (\w+)", (ROOT / "comfyui/ltx_neuron.py").read_text(), re.MULTILINE)
    assert {*imports} - sys.stdlib_module_names == {name.partition(".")[0] for name in IMPORTED} | {"PIL"}
