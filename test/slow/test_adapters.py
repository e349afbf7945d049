"""Each command that docs/recipes.md has for one of Lightricks' adapters, typed with the adapter's name on the Hub: the
first of a release makes a video, the others are planned. And a video by a spatial upsampler of 1.5."""

import json
import re

import pytest
import torch
from conftest import QUICK, words
from helpers import made_film, rational_upsampler, read_video
from hub_server import released
from safetensors.torch import load_file, save_file
from unit.project.test_docs import commands, text_of

from ltx_neuron.commands import dispatch
from ltx_neuron.errors import UserError
from ltx_neuron.weights.sharding import DIFFUSION
from ltx_neuron.weights.tensorfile import TensorFile

PAGE, OWNER = "docs/recipes.md", "Lightricks/"
# A repository -> the versions of its files, if not one, each with the scale in the file's metadata
FILES = {
    "2.3-22b-IC-LoRA-Union-Control": {"ref0.5": 2},
    "2.3-22b-IC-LoRA-Motion-Track-Control": {"ref0.5": 2},
    "2.3-22b-IC-LoRA-Pixel-Spatial-Upscaler": {"x2-0.9": 2, "x4-0.9": 4},
    "2.5-22b-IC-LoRA-Pixel-Spatial-Upscaler": {"x2-1.0": 2},
}
HOW = {"profile": "cpu", "profile_set": QUICK, "tp_degree": 1, "dtype": "float32"}
TINY = {"height": 128, "width": 128}
DEV = {"num_inference_steps": 2, "video_stg_blocks": 1, "audio_stg_blocks": 1}
TILE = {"tile_height": 64, "tile_width": 96}


def rows(release: str) -> list[list[str]]:
    """The words of the commands of a release's table."""
    table = text_of(PAGE).partition(f"| LTX-{release} | needs | command |\n")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[2] for line in table.splitlines()[1:]]
    assert {cell for cell in cells if "`" not in cell} <= {"not supported |"}
    # Not DFR's, which is of another section and runs in test_split_release.py.
    named = f"{OWNER}LTX-{release}-22b-"
    of_release = [line for line in commands(PAGE) if "--dfr" not in line and any(named in word for word in line)]
    assert len(of_release) == sum("`ltx-neuron" in cell for cell in cells) > 10
    return of_release


def adapter(command: list[str]) -> str:
    return next(word for word in command if re.match(rf"{OWNER}LTX-2\.\d-22b-", word))


def repositories(typed: dict[str, list[list[str]]], tiny, split, folder) -> dict:
    """Those of the adapters, and of LTX-2.5. typed: by release."""
    loras, made = {"2.3": load_file(tiny.lora), "2.5": load_file(split.lora)}, {}
    for release, name in ((release, adapter(command)) for release, lines in typed.items() for command in lines):
        repository = "/".join(name.split("/")[:2])
        short = repository.removeprefix(f"{OWNER}LTX-")
        files = made.setdefault(repository, {"README.md": tiny.image})
        for version, scale in FILES.get(short, {"0.9": None}).items():
            name = f"ltx-{short.lower()}-{version}.safetensors"
            scales = {"reference_downscale_factor": str(scale)} if scale else {}
            save_file(loras[release], folder / name, {"name": name} | scales)  # no two have the same content
            files[name] = folder / name
    parts = {str(path.relative_to(split.folder)): path for path in split if path != split.image}
    return made | {f"{OWNER}LTX-2.5": parts}


def small(command: list[str], artifacts) -> list[str]:
    """A command with sizes of its own, the last ones of a flag, and with the host's text encoder."""
    kept = [word for word in command[2:] if word != "--neuron-gemma"]
    sizes = TINY | (TILE if "--tile" in kept else {}) | (DEV if "--recipe" in kept else {})
    if "--reference-video" not in kept:
        sizes["num_frames"] = 9
    if "--video-path" in kept:  # the file's size; its seconds
        sizes, kept[kept.index("5")] = {}, "0.3"
    if "--text-embeddings" in kept:  # its input has the size
        sizes = {}
    return kept + words(**sizes, **HOW, artifacts_dir=artifacts)


def test_the_command_of_every_adapter_fits_a_file_of_its_name(tiny, split, artifacts, tmp_path, monkeypatch, capsys):
    typed, home = {release: rows(release) for release in ("2.5", "2.3")}, tmp_path / "home"
    with released(tiny, monkeypatch, tmp_path) as hub:
        hub.repos |= repositories(typed, tiny, split, tmp_path)
        made_film(home / "in.mp4", 17, 128, 128)
        width = TensorFile(split.distilled, "").shapes[f"{DIFFUSION}transformer_blocks.0.attn2.to_k.weight"][1]
        save_file({"video_context": torch.zeros(1, 1024, width)}, home / "scene.safetensors")
        for name in ("first.png", "sheet.png"):
            (home / name).symlink_to(tiny.image)
        for first, *others in typed.values():
            command = small(first, artifacts)
            dispatch(["prepare", *command])
            dispatch(["generate", *command])
            video, sidecar = read_video(home / "out.mp4"), json.loads((home / "out.json").read_text())
            assert adapter(first).split("/")[1] in json.dumps([sidecar[key] for key in ("loras", "stage_1_loras")])
            assert (video["height"], video["width"]) == (128, 128)
            for command in others:
                capsys.readouterr()
                dispatch(["prepare", *small(command, artifacts), "--dry-run"])
                printed = capsys.readouterr().out
                assert "DiT weights" in printed and "DiT graphs" in printed, command


def test_stage_2_is_one_and_a_half_times_stage_1_with_the_upsampler_of_that_factor(tiny, artifacts, tmp_path):
    out, tensors = tmp_path / "out.mp4", tmp_path / "out.safetensors"
    flags = HOW | {"checkpoint_path": tiny.checkpoint, "gemma_root": tiny.gemma_root, "artifacts_dir": artifacts}
    flags |= {"recipe": "distilled", "num_frames": 9}
    flags |= {"spatial_upsampler_path": rational_upsampler(tmp_path / "x1.5.safetensors")}
    two = words(**flags, two_stage=True, width=192)
    with pytest.raises(UserError, match="--height 64 is not a multiple of 96 .*; nearest valid: 96"):
        dispatch(["prepare", *two, "--height", "64"])
    dispatch(["prepare", *two, "--height", "96"])
    dispatch(["generate", *two, "--height", "96", *words(prompt="rain", output_path=out, save_tensors=tensors)])
    saved = load_file(tensors)
    assert saved["s1_video"].shape == (1, 128, 2, 2, 4)
    assert saved["upsampled"].shape == saved["s2_video"].shape == (1, 128, 2, 3, 6)
    assert (read_video(out)["height"], read_video(out)["width"]) == (96, 192)
    with pytest.raises(UserError, match="enlarges the sides 1.5 times; --upscale spatial needs"):
        dispatch(["prepare", *words(**flags, height=64, width=64, upscale="spatial")])
