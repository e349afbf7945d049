"""The ComfyUI node and the service's application on a real server; a thread is its worker."""

import base64
import io
import json
import re
import socket
import sys
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from comfy_node import Interrupted, executed, loaded
from conftest import ROOT
from helpers import tone, wait_for
from PIL import Image

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from service_app import Service, listening, opened

from ltx_neuron import __version__
from ltx_neuron.engine import preflight
from ltx_neuron.host.media import read_sound
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO, job_of


@pytest.fixture
def service(tmp_path):
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def node(service, tmp_path, monkeypatch):
    """(module, ComfyUI), with a token for the service."""
    monkeypatch.setenv("LTX_NEURON_TOKEN", service.token.decode())
    with loaded(tmp_path / "temp") as (module, comfy):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
        yield module, comfy


@contextmanager
def working(service: Service, end):
    """A thread that takes the next job, reports steps of it, and ends it by `end(entry)`."""

    def work() -> None:
        wait_for(lambda: service.queue.next_batch_key() is not None)
        (entry,) = service.queue.claim("w", service.queue.next_batch_key(), 1)
        jobs.append(job_of(entry.params, service.queue.folder_of(entry.id)))
        service.queue.report(entry, 40, {"stage": "stage_1"})
        wait_for(lambda: end(entry) is not False)

    jobs, thread = [], threading.Thread(target=work)
    thread.start()
    yield jobs
    thread.join(timeout=60)


def test_the_node_returns_the_video_that_the_service_made(service, node, tmp_path):
    module, comfy = node
    picture = torch.rand(1, 64, 96, 3)
    sound = {"waveform": tone(24000, 6.0)[None], "sample_rate": 24000}
    sent = {}

    def end(entry) -> bool:
        sent["picture"] = Image.open(jobs[0].images[0].path).copy()
        sent["sound"] = read_sound(jobs[0].sound.path, "")
        (service.queue.folder_of(entry.id) / VIDEO).write_bytes(b"a video with sound")
        return comfy.seen[-1:] == [(40, 100)] and service.queue.complete(entry)

    with listening(service) as (host, port), working(service, end) as jobs:
        server = f"http://{host}:{port}/"
        outputs = executed(module, server=server, prompt="waves", seed=2**63, image=picture, audio=sound)
    path = Path(outputs["path"])
    assert path.read_bytes() == b"a video with sound" and path.parent == tmp_path / "temp"
    assert outputs["video"].get_stream_source() == outputs["path"]
    (job,) = jobs
    assert (job.prompt, job.seed, job.size.sides) == ("waves", 2**63, (512, 768))
    pixels = torch.frombuffer(bytearray(sent["picture"].tobytes()), dtype=torch.uint8)
    assert torch.equal(pixels.view(64, 96, 3), picture[0].mul(255).round().byte())
    assert sent["sound"].rate == 24000
    torch.testing.assert_close(sent["sound"].samples, tone(24000, 6.0), atol=1e-4, rtol=0)
    assert comfy.seen[-1] == (100, 100)


def test_refusals_and_failures_of_the_service_are_the_nodes_errors(service, node, monkeypatch):
    module, _ = node

    def raises(message: str, **inputs) -> None:
        with pytest.raises(RuntimeError, match=message):
            executed(module, **{"prompt": "waves"} | inputs)

    def fail(entry) -> bool:
        return service.queue.fail(entry, "internal_error", "the video could not be made")

    with listening(service) as (host, port):
        server = f"http://{host}:{port}"
        with working(service, fail):
            raises("could not be made", server=server)
        raises("Compiled: 512x768", server=server, size=module.TYPED, width=64)
        monkeypatch.delenv("LTX_NEURON_TOKEN")
        raises("send a token", server=server)
        assert service.queue.counts()["queued"] == 0
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        raises("does not answer", server=f"http://127.0.0.1:{unused.getsockname()[1]}", token="x")
    raises("type an address", server="file:///etc/passwd")


def test_an_interrupted_node_cancels_its_job(service, node):
    module, comfy = node

    def end(entry) -> bool:
        comfy.interrupted = True
        return not service.queue.owns(entry)

    with listening(service) as (host, port), working(service, end), pytest.raises(Interrupted):
        executed(module, server=f"http://{host}:{port}", prompt="waves")
    assert service.queue.counts()["in_progress"] == 0


def test_sizes_and_lora_sets_are_those_of_the_service(service, node, monkeypatch):
    module, _ = node

    def choices() -> tuple[list, list]:
        module.listed.cache_clear()
        inputs = module.LTXNeuronVideo.INPUT_TYPES()
        return inputs["required"]["size"][0], inputs["optional"]["lora_set"][0]

    with listening(service) as (host, port):
        monkeypatch.setattr(module, "SERVER", f"http://{host}:{port}")
        sizes, lora_sets = choices()
    assert sizes == [
        module.DEFAULT,
        "512x768, 121 frames, 24 fps, one stage, distilled",
        "768x512, 121 frames, 24 fps, one stage, distilled",
        module.TYPED,
    ]
    assert lora_sets == ["default"]
    assert choices() == ([module.DEFAULT, module.TYPED], ["default"])  # nothing answers now
    monkeypatch.setattr(module, "SERVER", "localhost")
    assert choices()[0] == [module.DEFAULT, module.TYPED]


def requested(module, monkeypatch, **inputs):
    """What the service reads of the node's request."""

    def create(service, fields: dict, files: dict):
        sent.update(fields)
        raise InterruptedError

    sent = {}
    monkeypatch.setattr(module.Service, "create", create)
    with pytest.raises(InterruptedError):
        executed(module, prompt="waves", **inputs)
    return read_request({name: str(value) for name, value in sent.items()})


def test_a_size_is_the_services_default_a_chosen_or_a_typed_one(node, monkeypatch):
    module, _ = node

    def size_of(**inputs) -> tuple:
        request = requested(module, monkeypatch, **inputs)
        size = request.requested_size
        return request.size, size.num_frames, size.frame_rate, size.two_stage, size.recipe

    assert size_of() == size_of(width=64) == (None,) * 5
    chosen = "512x768, 97 frames, 29.97 fps, two stages, dev"
    assert size_of(size=chosen, width=64) == ((512, 768), 97, 29.97, True, "dev")
    typed = dict(width=64, height=96, frames=9, frame_rate=30.0)
    assert size_of(size=module.TYPED, **typed) == ((64, 96), 9, 30.0, False, None)
    assert size_of(size=module.TYPED, **typed, two_stage=True)[3]


def test_last_frame_negative_prompt_and_lora_set_are_requested(node, monkeypatch):
    module, _ = node
    plain = requested(module, monkeypatch)
    assert (plain.images, plain.negative_prompt, plain.nag_scale, plain.lora_set) == ((), *(None,) * 3)
    picture = torch.rand(1, 64, 96, 3)
    inputs = dict(last_image=picture, negative_prompt="blurry", lora_set="style")
    request = requested(module, monkeypatch, **inputs)
    assert (request.negative_prompt, request.nag_scale, request.lora_set) == ("blurry", 11, "style")
    (last,) = request.images
    assert last.frame == -1 and Image.open(io.BytesIO(last.data)).size == (96, 64)
    dev = requested(module, monkeypatch, negative_prompt="blurry", nag_scale=1.0)
    assert (dev.negative_prompt, dev.nag_scale) == ("blurry", None)


def test_previews_and_the_services_notes_are_shown_on_the_node(service, node, monkeypatch):
    module, comfy = node
    monkeypatch.setattr(preflight, "notes", lambda job, workspace: ["the prompt is cut"])
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(jpeg, "JPEG")
    preview = base64.b64encode(jpeg.getvalue()).decode()

    def end(entry) -> bool:
        service.queue.report(entry, 50, {"stage": "stage_1", "preview": preview})
        (service.queue.folder_of(entry.id) / VIDEO).write_bytes(b"a video with sound")
        return bool(comfy.previews) and service.queue.complete(entry)

    with listening(service) as (host, port), working(service, end):
        made = executed(module, server=f"http://{host}:{port}", prompt="waves")
    kind, picture, _ = comfy.previews[0]
    assert kind == "JPEG" and picture.size == (8, 4)
    assert made["notes"] == "the prompt is cut" and comfy.texts == [("7", made["notes"])]


def test_the_folder_is_a_package_of_comfyuis_registry_with_a_workflow_of_the_node(node):
    module, _ = node
    project = tomllib.loads((ROOT / "comfyui/pyproject.toml").read_text())
    assert project["project"]["version"] == __version__
    assert [project["tool"]["comfy"]["DisplayName"]] == [*module.NODE_DISPLAY_NAME_MAPPINGS.values()]
    (workflow,) = (ROOT / "comfyui/example_workflows").glob("*.json")
    nodes = json.loads(workflow.read_text())["nodes"]
    (values,) = (node["widgets_values"] for node in nodes if node["type"] == "LTXNeuronVideo")
    inputs = module.LTXNeuronVideo.INPUT_TYPES()
    defaults = [
        options["default"] if "default" in options else values[1]
        for kind in ("required", "optional")
        for of_type, options in inputs[kind].values()
        if of_type not in ("IMAGE", "AUDIO")
    ]
    seed = defaults.index(10) + 1
    assert values == [*defaults[:seed], "randomize", *defaults[seed:]]
    imports = re.findall(r"^\s*(?:import|from) (\w+)", (ROOT / "comfyui/ltx_neuron.py").read_text(), re.MULTILINE)
    assert {*imports} - sys.stdlib_module_names == {"comfy", "folder_paths", "comfy_api", "server", "PIL"}
