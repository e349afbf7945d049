"""Each command that docs/recipes.md has for one of Lightricks' adapters, typed with the adapter's name on the Hub. The
first of each kind makes a video; the others are planned."""

import json
import re

import torch
from conftest import QUICK
from helpers import made_film, read_video
from hub_server import Hub, use
from safetensors.torch import load_file, save_file
from unit.project.test_docs import commands, text_of

from ltx_neuron.commands import dispatch
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.weights.sharding import DIFFUSION

PAGE, OWNER = "docs/recipes.md", "Lightricks/"
# A repository -> the versions of its files, if not one, each with the scale in the file's metadata
FILES = {
    "2.3-22b-IC-LoRA-Union-Control": {"ref0.5": 2},
    "2.3-22b-IC-LoRA-Motion-Track-Control": {"ref0.5": 2},
    "2.3-22b-IC-LoRA-Pixel-Spatial-Upscaler": {"x2-0.9": 2, "x4-0.9": 4},
    "2.5-22b-IC-LoRA-Pixel-Spatial-Upscaler": {"x2-1.0": 2},
}
TINY = {"--height": 128, "--width": 128, "--num-frames": 9}
DEV = {"--num-inference-steps": 2, "--video-stg-blocks": 1, "--audio-stg-blocks": 1}
TILE = {"--tile-height": 64, "--tile-width": 96}
# Other tests generate with these: integration/test_hdr_and_matte.py and test_upscaling.py, test_faults.py.
ELSEWHERE = {"--alpha-gen", "--text-embeddings", "--tile", "--reference-video"}


def rows(release: str) -> list[list[str]]:
    """The words of the commands of a release's table."""
    table = text_of(PAGE).partition(f"| LTX-{release} | needs | command |\n")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[2] for line in table.splitlines()[1:]]
    assert {cell for cell in cells if "`" not in cell} <= {"not supported |"}
    # Not DFR's, which is of another section and runs in test_dfr.py.
    named = f"{OWNER}LTX-{release}-22b-"
    of_release = [words for words in commands(PAGE) if "--dfr" not in words and any(named in word for word in words)]
    assert len(of_release) == sum("`ltx-neuron" in cell for cell in cells) > 10
    return of_release


def adapter(words: list[str]) -> str:
    return next(word for word in words if re.match(rf"{OWNER}LTX-2\.\d-22b-", word))


def hub_of(command_lines: dict[str, list[list[str]]], tiny, split, folder) -> Hub:
    """command_lines: by release."""
    loras, repositories = {"2.3": load_file(tiny.lora), "2.5": load_file(split.lora)}, {}
    for release, words in ((release, words) for release, lines in command_lines.items() for words in lines):
        repository = "/".join(adapter(words).split("/")[:2])
        short = repository.removeprefix(f"{OWNER}LTX-")
        files = repositories.setdefault(repository, {"README.md": tiny.image})
        for version, scale in FILES.get(short, {"0.9": None}).items():
            name = f"ltx-{short.lower()}-{version}.safetensors"
            scales = {"reference_downscale_factor": str(scale)} if scale else {}
            save_file(loras[release], folder / name, {"name": name} | scales)  # no two have the same content
            files[name] = folder / name
    names = RELEASE_FILES[f"{OWNER}LTX-2.3"]
    kinds = {"distilled": tiny.checkpoint, "dev": tiny.checkpoint, "lora": tiny.lora, "spatial": tiny.spatial_upsampler}
    repositories[f"{OWNER}LTX-2.3"] = {names[kind]: path for kind, path in kinds.items()}
    gemma = {path.name: path for path in tiny.gemma_root.iterdir()}
    repositories["google/gemma-3-12b-it-qat-q4_0-unquantized"] = gemma
    parts = {str(path.relative_to(split.folder)): path for path in split if path != split.image}
    return Hub(repositories | {f"{OWNER}LTX-2.5": parts})


def small(words: list[str], artifacts) -> list[str]:
    """A command with sizes of its own, and with the host's text encoder."""
    kept = [word for word in words[2:] if word != "--neuron-gemma"]
    sizes = TINY | (TILE if "--tile" in kept else {}) | (DEV if "--recipe" in kept else {})
    if "--reference-video" in kept:
        sizes = {name: sizes[name] for name in ("--height", "--width")}
    if "--video-path" in kept:  # the file's size; its seconds
        sizes, kept[kept.index("5")] = {}, "0.3"
    if "--text-embeddings" in kept:  # its input has the size
        sizes = {}
    for flag in {*TINY, *TILE} & {*kept}:
        del kept[kept.index(flag) : kept.index(flag) + 2]
    machine = ["--profile", "cpu", "--tp-degree", "1", "--dtype", "float32", "--artifacts-dir", artifacts]
    settings = [word for setting in QUICK for word in ("--profile-set", setting)]
    return [str(word) for word in (*kept, *(word for pair in sizes.items() for word in pair), *machine, *settings)]


def test_the_command_of_every_adapter_runs_with_a_file_of_its_name(
    tiny, split, artifacts, tmp_path, monkeypatch, capsys
):
    command_lines, home, kinds = {release: rows(release) for release in ("2.5", "2.3")}, tmp_path / "home", set()
    hub = hub_of(command_lines, tiny, split, tmp_path)
    use(hub, monkeypatch, tmp_path)
    home.mkdir()
    monkeypatch.chdir(home)
    made_film(home / "in.mp4", 17, 128, 128)
    width = load_file(split.distilled)[f"{DIFFUSION}transformer_blocks.0.attn2.to_k.weight"].shape[1]
    save_file({"video_context": torch.zeros(1, 1024, width)}, home / "scene.safetensors")
    for name in ("first.png", "sheet.png"):
        (home / name).symlink_to(tiny.image)
    for words in (words for lines in command_lines.values() for words in lines):
        name, command = adapter(words), small(words, artifacts)
        kind = frozenset(word for word in command if word.startswith("--")) - {"--image", "--motion-speed"}
        capsys.readouterr()
        if kind in kinds or kind & ELSEWHERE:
            dispatch(["prepare", *command, "--dry-run"])
            printed = capsys.readouterr().out
            assert "DiT weights" in printed and "DiT graphs" in printed, command
            continue
        dispatch(["prepare", *command])
        dispatch(["generate", *command])
        video, sidecar = read_video(home / "out.mp4"), json.loads((home / "out.json").read_text())
        assert name.split("/")[1] in json.dumps([sidecar[key] for key in ("loras", "stage_1_loras")])
        assert (video["height"], video["width"]) == (128, 128), name
        (home / "out.mp4").unlink()
        kinds.add(kind)
    assert len(kinds) >= 6
    hub.shutdown()
    hub.server_close()
