"""The service as a process of its own, and its worker in this process. Test files take the fixtures by assignment."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SCRIPT_SECONDS, once, succeeded
from helpers import tone, wait_for, write_sound
from lib.service import Service as LoggedService

from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Size
from ltx_neuron.report.latency import Recorder
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import JobSubmitter
from ltx_neuron.service.queue import Queue
from ltx_neuron.service.sizes import CompiledSize, SizeRegistry
from ltx_neuron.service.tokens import new_token
from ltx_neuron.service.worker import Worker

TP = 2  # as the batches of runs.py, whose weights and text encoder it takes
SIZE = {"height": 128, "width": 128, "num_frames": 9, "two_stage": True}  # and its half, in one
SMALL = {"height": 64, "width": 64, "num_frames": 9}
# What a client says of a job, and the line of a prompts file that says the same.
ASKED = [
    ({"prompt": "waves crash on the shore", "size": "64x64"}, SMALL),
    ({"prompt": "birds sing", "size": "128x128", "extra_body": {"two_stage": True}}, SIZE),
    ({"prompt": "« hello » says a man", "size": "64x64", "extra_body": {"seed": 4}}, SMALL | {"seed": 4}),
]


@pytest.fixture(scope="module")
def openai():
    """Not when tests are collected: importing it takes seconds."""
    return pytest.importorskip("openai", reason="an extra is not installed: pip install -e .[dev,serve]")


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    setup = scripts(tiny, TP)
    setup.prepare(**SIZE, image=((tiny.image, 0, 1.0),))
    return setup


@pytest.fixture(scope="module")
def wanted(setup, tiny, shared: Path) -> list[bytes]:
    """The videos of ASKED, of one with an image and of one for a sound, as generate_ltx23.py makes them."""
    lines = [{"seed": 10, "prompt": fields["prompt"], **line} for fields, line in ASKED]
    lines += [{"prompt": "a golden retriever", "image": [str(tiny.image), 0], **SMALL}]
    lines += [{"prompt": "a man says hello", "audio_path": str(sound_file(shared)), **SMALL}]

    def make(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
        flags = dict(neuron_gemma=True, spatial_upsampler_path=tiny.spatial_upsampler)
        files = dict(prompts_file=folder / "jobs.jsonl", output_dir=folder / "out")
        succeeded(setup.run("src/generate_ltx23.py", **flags, **files))

    once(shared / "served", make)
    return [path.read_bytes() for path in sorted((shared / "served/out").glob("*.mp4"))]


def sound_file(shared: Path) -> Path:
    """A second of sound."""
    path, own = shared / "hello.wav", shared / f"{os.getpid()}.wav"  # other processes read it
    samples = (tone(24000, 1.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    return write_sound(own, samples, 24000, "pcm_s16le", "stereo", "s16").rename(path)


class Service(LoggedService):
    """python -m ltx_neuron.serve for two owners, on a data folder, which outlives it."""

    def __init__(self, setup, tiny, folder):
        self.folder, tokens = folder, folder / "tokens.json"
        self.tokens = {name: new_token(tokens, name) for name in ("ada", "bob")}
        flags = dict(neuron_gemma=True, spatial_upsampler_path=tiny.spatial_upsampler)
        super().__init__(setup.words(**flags, tokens_file=tokens), folder, jobs=1000)
        self.log.reconfigure(line_buffering=True)  # tests read it

    def start(self) -> None:
        super().start()
        wait_for(lambda: self.client()._client.get(self.url[:-3] + "/ready").status_code == 200)

    def client(self, owner: str = "ada", **more):
        import openai

        return openai.OpenAI(base_url=self.url, api_key=self.tokens[owner], **more)

    def queue(self) -> Queue:
        return Queue(self.folder / "data/queue.sqlite", self.folder / "data/jobs")

    @property
    def worker(self) -> psutil.Process:
        return next(child for child in psutil.Process(self.process.pid).children() if "--role" in child.cmdline())

    def stop(self, kind: int = signal.SIGTERM) -> int:
        self.process.send_signal(kind)
        return self.process.wait(SCRIPT_SECONDS)


@pytest.fixture(scope="module")
def service(openai, setup, tiny, tmp_path_factory):
    service = Service(setup, tiny, tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.stop()


@contextmanager
def worker(setup, tiny, folder, *settings: str, previews: bool = False, neuron_gemma: bool = True):
    """A worker with its queue and what fills it. settings: of the profile."""
    profile, threads = resolve("cpu", (*setup.settings, *settings)), torch.get_num_threads()
    workspace = Workspace(tiny.checkpoint, profile, setup.artifacts, TP, "float32", tiny.gemma_root)
    options = RunOptions(neuron_gemma, spatial_upsampler_path=tiny.spatial_upsampler, cache_prompts=True)
    queue = Queue(folder / "queue.sqlite", folder / "jobs")
    with closing(queue), Engine(workspace, Recorder(), options) as engine:
        sizes = SizeRegistry(workspace, CompiledSize(Size(), "distilled"), upsamplers={"spatial"})
        yield Worker(queue, engine, "w1", previews), JobSubmitter(queue, sizes, "tiny")
    torch.set_num_threads(threads)


def ask(intake, index: int):
    fields = dict(ASKED[index][0])
    return intake.accept(read_request(fields | fields.pop("extra_body", {})), "ada")


def run_until(working, *entries) -> None:
    """Let a worker run until entries are completed."""

    def watch() -> None:
        wait_for(lambda: all(working.queue.get("ada", e.id).status == "completed" for e in entries))
        working.stop.set()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        working.run()
        watching.result()
