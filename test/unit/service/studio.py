"""A service with graphs for each kind of job."""

from contextlib import contextmanager

import torch
from jobs import make_job, read_clip
from safetensors.torch import save_file
from service_app import SMALL, Compiled
from service_app import opened as opened_service

from ltx_neuron.config.release import RELEASES
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceAudio, ReferenceVideo, Retake
from ltx_neuron.weights.lora import Lora

EXAMPLE_FILES = {"wav": "sound.wav", "mp4": "film.mp4", "mkv": "heard.mkv", "png": "picture.png"}
FILM = Size(64, 96, 57)  # of the videos that are sent: longer than the parts that examples name
WINDOW = Size(64, 96, 105)  # that makes it two seconds longer
PAIR, WIDE = Size(128, 192, 57, two_stage=True), Size(128, 256, 57, two_stage=True)  # made with references
WITH_TAIL = Size(*SMALL.sides, SMALL.num_frames + 8)
LONG = Size(*SMALL.sides, 121 + 96)  # in two windows
TILES = {"tile_height": 64, "tile_width": 96}  # six of PAIR's second stage
VOICES = 51, 126  # latents: 2 and 5 s


def with_files(fields: dict, files: dict[str, bytes]) -> dict:
    """Fields with the files that they name, and those of the kind that an example names."""
    kinds = {name: EXAMPLE_FILES.get(str(value).rpartition(".")[2], value) for name, value in fields.items()}
    return {name: files.get(fields[name], files.get(kind, fields[name])) for name, kind in kinds.items()}


@contextmanager
def opened(folder, files: dict[str, bytes], release=RELEASES[0]):
    loras = {name: (Lora(folder / f"{name}.safetensors"),) for name in ("pose", "half", "dub")}
    for name, (lora,) in loras.items():
        save_file({"x": torch.zeros(2)}, lora.path, {"reference_downscale_factor": "2"} if name == "half" else None)
    (folder / "heard.mkv").write_bytes(files["heard.mkv"])
    reference, half = (ReferenceVideo("x", 1.0, FILM.num_frames, scale) for scale in (1, 2))
    posed = {"references": (reference,)}
    with opened_service(folder) as service:
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
            sizes.workspace.recorded |= Compiled(*of, release=release, **inputs).recorded
        yield service
