"""The ComfyUI node and the service's application on a real server; a thread is its worker."""

import ast
import socket
import sys
import threading
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

from ltx_neuron.host.media import read_sound
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


def test_the_node_hands_on_the_video_that_the_service_made(service, node, tmp_path):
    module, comfy = node
    picture = torch.rand(1, 64, 96, 3)
    sound = {"waveform": tone(24000, 6.0)[None], "sample_rate": 24000}
    given = {}

    def end(entry) -> bool:
        job = jobs[0]
        given["picture"] = Image.open(job.images[0].path).copy()
        given["sound"] = read_sound(job.sound.path, "")
        (service.queue.folder_of(entry.id) / VIDEO).write_bytes(b"a video with sound")
        return comfy.seen[-1:] == [(40, 100)] and service.queue.complete(entry)

    with listening(service) as (host, port), working(service, end) as jobs:
        server = f"http://{host}:{port}/"
        made = executed(
            module, server=server, prompt="waves", seed=2**63, image=picture, audio=sound
        )
    assert Path(made["STRING"]).read_bytes() == b"a video with sound"
    assert made["VIDEO"].get_stream_source() == made["STRING"]
    assert Path(made["STRING"]).parent == tmp_path / "temp"
    (job,) = jobs
    assert (job.prompt, job.seed, job.size.sides) == ("waves", 2**63, (512, 768))
    pixels = torch.frombuffer(bytearray(given["picture"].tobytes()), dtype=torch.uint8)
    assert torch.equal(pixels.view(64, 96, 3), picture[0].mul(255).round().byte())
    assert given["sound"].rate == 24000
    torch.testing.assert_close(given["sound"].samples, tone(24000, 6.0), atol=1e-4, rtol=0)
    assert comfy.seen[-1] == (100, 100)


def test_what_the_service_refuses_is_the_nodes_error(service, node, monkeypatch):
    module, _ = node
    with listening(service) as (host, port):
        asked = {"server": f"http://{host}:{port}", "prompt": "waves"}
        with pytest.raises(RuntimeError, match="Compiled: 512x768"):
            executed(module, **asked, width=64)
        monkeypatch.delenv("LTX_NEURON_TOKEN")
        with pytest.raises(RuntimeError, match="send a token"):
            executed(module, **asked)
        assert service.queue.counts()["queued"] == 0
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RuntimeError, match="does not answer"):
            executed(module, server=server, prompt="waves", token="x")
    with pytest.raises(RuntimeError, match="type an address"):
        executed(module, server="file:///etc/passwd", prompt="waves")


def test_a_video_that_failed_is_the_nodes_error(service, node):
    module, _ = node

    def end(entry) -> bool:
        return service.queue.fail(entry, "internal_error", "the video could not be made")

    with (
        listening(service) as (host, port),
        working(service, end),
        pytest.raises(RuntimeError, match="could not be made"),
    ):
        executed(module, server=f"http://{host}:{port}", prompt="waves")


def test_an_interrupted_node_cancels_its_job(service, node):
    module, comfy = node

    def end(entry) -> bool:
        comfy.interrupted = True
        return not service.queue.owns(entry)

    with listening(service) as (host, port), working(service, end), pytest.raises(Interrupted):
        executed(module, server=f"http://{host}:{port}", prompt="waves")
    assert service.queue.counts()["in_progress"] == 0


def test_the_node_is_one_file_that_imports_comfyui_pillow_and_pythons_own():
    tree = ast.parse((ROOT / "comfyui/ltx_neuron.py").read_text())
    names = set()
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            names |= {alias.name for alias in each.names}
        elif isinstance(each, ast.ImportFrom):
            names.add(each.module)
    packages = {name.partition(".")[0] for name in names}
    assert packages - sys.stdlib_module_names == {"comfy", "folder_paths", "comfy_api", "PIL"}
