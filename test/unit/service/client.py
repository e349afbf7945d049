"""What a client and a worker of a service in this process do. Imported as `unit.service.client`."""

import json
from contextlib import contextmanager

import torch
from jobs import make_job, read_clip
from safetensors.torch import save_file
from service_app import FORM, MOST_BODY, SIZE, SMALL, Got, Sent, Service, Workspace, form, get, listening, opened  # noqa: F401 - tests import them from here

from ltx_neuron.config.release import RELEASES
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceAudio, ReferenceVideo, Retake
from ltx_neuron.service.jobs import job_of
from ltx_neuron.service.queue import Entry
from ltx_neuron.weights.lora import Lora

VIDEOS = "/v1/videos"
EXAMPLE_FILES = {"wav": "sound.wav", "mp4": "film.mp4", "mkv": "heard.mkv", "png": "picture.png"}


def send(service: Service, method: str, path: str, **headers) -> Got:
    return service.ask(Sent(method, path, b"", service.headers(**headers)))


def post_json(service: Service, path: str = VIDEOS, **fields) -> Got:
    """Fields as JSON, `waves` in the compiled size unless they say otherwise."""
    body = json.dumps({"prompt": "waves", "size": SIZE} | fields).encode()
    return service.ask(Sent("POST", path, b"", service.headers(), body))


def post_form(service: Service, **fields) -> Got:
    """Fields as a form; bytes are files."""
    return service.ask(Sent("POST", VIDEOS, b"", service.headers(FORM), form({"prompt": "waves"} | fields)))


def accepted(service: Service, **fields) -> str:
    got = post_json(service, **fields)
    assert got.status == 200, got.body
    return json.loads(got.body)["id"]


def answer_of(service: Service, path: str, **headers) -> dict:
    return json.loads(get(service, path, **headers).body)


def video_of(service: Service, id: str) -> dict:
    return answer_of(service, f"{VIDEOS}/{id}")


def claimed(service: Service) -> Entry:
    (entry,) = service.queue.claim("w", service.queue.next_batch_key(), 1)
    return entry


def job_sent(service: Service, **fields) -> tuple[Job, dict]:
    """The job of a form, as a worker reads it, and the object that its client got."""
    got = post_form(service, **fields)
    assert got.status == 200, got.body
    video = json.loads(got.body)
    entry, folder = service.queue.get("ada", video["id"]), service.queue.folder_of(video["id"])
    assert entry.bytes == sum(path.stat().st_size for path in folder.iterdir())
    return job_of(entry.params, folder), video


def refusal_of(service: Service, status: int = 400, **fields) -> dict:
    """The error of a form; nothing of it is left, and its words name fields and no flag or folder."""
    before = {*service.queue.folder.iterdir()}
    got = post_form(service, **fields)
    assert got.status == status, got.body
    assert {*service.queue.folder.iterdir()} == before
    assert str(service.queue.folder) not in got.body.decode() and "--" not in got.error["message"]
    return got.error


def with_files(fields: dict, files: dict[str, bytes]) -> dict:
    """Fields with the files that they name, and those of the kind that an example names."""
    kinds = {name: EXAMPLE_FILES.get(str(value).rpartition(".")[2], value) for name, value in fields.items()}
    return {name: files.get(fields[name], files.get(kind, fields[name])) for name, kind in kinds.items()}


FILM = Size(64, 96, 57)  # of the videos that are sent: longer than the parts that examples name
WINDOW = Size(64, 96, 105)  # that makes it two seconds longer
PAIR, WIDE = Size(128, 192, 57, two_stage=True), Size(128, 256, 57, two_stage=True)  # made with references
WITH_TAIL = Size(*SMALL.sides, SMALL.num_frames + 8)
LONG = Size(*SMALL.sides, 121 + 96)  # in two windows
TILES = {"tile_height": 64, "tile_width": 96}  # six of PAIR's second stage
VOICES = 51, 126  # latents: 2 and 5 s


@contextmanager
def studio(folder, files: dict[str, bytes], release=RELEASES[0]):
    loras = {name: (Lora(folder / f"{name}.safetensors"),) for name in ("pose", "half", "dub")}
    for name, (lora,) in loras.items():
        save_file({"x": torch.zeros(2)}, lora.path, {"reference_downscale_factor": "2"} if name == "half" else None)
    (folder / "heard.mkv").write_bytes(files["heard.mkv"])
    reference, half = (ReferenceVideo("x", 1.0, FILM.num_frames, scale) for scale in (1, 2))
    posed = {"references": (reference,)}
    with opened(folder) as service:
        sizes = service.sizes
        sizes.workspace.release = release
        sizes.lora_sets = {name: make_job(stage_1_loras=loras[name]) for name in ("pose", "half")}
        # A LoRA of both stages is no voice's.
        sizes.lora_sets["both"] = make_job(stage_1_loras=loras["pose"], stage_2_loras=loras["pose"])
        sizes.lora_sets |= {"default": make_job(), "dub": make_job(loras=loras["dub"])}
        sizes.upsamplers = {"spatial"}
        for of, inputs in (
            ((SMALL, WITH_TAIL), {}),
            ((LONG,), {"chunked": True, "chunk_pixel_frames": 121}),
            ((SMALL,), {"images": (ImageCondition("x"),)}),
            ((SMALL,), {"images": (ImageCondition("x"), ImageCondition("x", 120, 0.8))}),
            ((SMALL,), {"recipe": "dev"}),
            ((FILM, WINDOW), {"retake": Retake("x")}),
            ((PAIR,), posed),
            ((PAIR,), posed | {"attention_mask": AttentionMask("x")}),
            ((PAIR,), posed | {"stage_2_ic_lora": True}),
            ((PAIR,), posed | TILES | {"tile": True, "stage_2_ic_lora": True}),
            ((WIDE,), {"references": (half,)}),
            *(((PAIR,), {"reference_sound": ReferenceAudio("x", count)}) for count in VOICES),
            ((PAIR,), read_clip(folder / "heard.mkv", loras["dub"])),
        ):
            sizes.workspace.recorded |= Workspace(*of, release=release, **inputs).recorded
        yield service
