"""Every file that a job reads is checked before anything is made: by prepare, plan and doctor as by
generate, with the same sentence."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import one_thread  # noqa: F401
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron import errors
from ltx_neuron.commands import dispatch

TWO_STAGE = ["--two-stage", "--spatial-upsampler-path", "{spatial}"]
DEV = ["--recipe", "dev", *TWO_STAGE, "--distilled-lora", "{lora}"]
DISTILLED = ["--recipe", "distilled"]
LORA, IMAGE = [*DISTILLED, "--lora", "{lora}"], [*DISTILLED, "--image", "{image}"]
SOUND = [*DISTILLED, "--audio-path", "{image}"]


def without(*prefixes: str) -> Callable[[Path], None]:
    """Take tensors out of a file."""

    def change(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        kept = {name: t for name, t in tensors.items() if not name.startswith(prefixes)}
        assert len(kept) < len(tensors)
        path.unlink()
        save_file(kept, path, metadata)

    return change


def text(path: Path) -> None:
    path.unlink()
    path.write_text("no such format")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) - 100])


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


class Broken(NamedTuple):
    """file: the member of the set that is broken; flags: of the job that reads it; said: part of
    the error."""

    file: str
    how: Callable[[Path], None]
    said: str
    flags: list[str] = DISTILLED


# What is broken -> how, and which job finds it.
BROKEN = {
    "the checkpoint is cut": Broken("checkpoint", cut, "truncated?"),
    "no video decoder": Broken("checkpoint", without("vae.decoder."), "the VideoDecoder"),
    "no audio decoder": Broken("checkpoint", without("audio_vae.decoder."), "the AudioDecoder"),
    "a block of the transformer is missing": Broken(
        "checkpoint", without("model.diffusion_model.transformer_blocks.1."), "the files do not have"
    ),
    "no connectors": Broken("checkpoint", without("model.diffusion_model.video_embeddings_connector."), "the text enc"),
    "no text projection": Broken("checkpoint", without("text_embedding_projection."), "the text projection is missing"),
    "no video encoder, for an image": Broken("checkpoint", without("vae.encoder."), "the VideoEncoder", IMAGE),
    "Gemma's tokenizer is damaged": Broken("gemma/tokenizer.json", text, "cannot be loaded"),
    "Gemma is cut": Broken("gemma/model.safetensors", cut, "truncated?"),
    "Gemma lacks a layer": Broken(
        "gemma/model.safetensors", without("language_model.model.layers.1."), "the text encoder's"
    ),
    "the LoRA is no LoRA": Broken("lora", text, "lora.safetensors", LORA),
    "the distilled LoRA is missing": Broken("lora", remove, "lora.safetensors", DEV),
    "the upsampler is cut": Broken("spatial", cut, "truncated?", [*DISTILLED, *TWO_STAGE]),
    "the temporal upsampler is missing": Broken(
        "temporal",
        remove,
        "no such file",
        [*DISTILLED, "--upscale", "temporal", "--temporal-upsampler-path", "{temporal}"],
    ),
    "the image is no image": Broken("image", text, "image.png", IMAGE),
    "the sound is no sound": Broken("image", text, "--audio-path", SOUND),
    "the film is missing": Broken("image", remove, "--video-path", [*DISTILLED, "--video-path", "{image}", "0", "1"]),
    "the reference is no film": Broken(
        "spatial", text, "cannot be read", [*DISTILLED, "--ic-lora", "{lora}", "--video-conditioning", "{spatial}", "1"]
    ),
    "the duration head is missing": Broken(
        "temporal", remove, "no such file", [*DISTILLED, "--duration-head-path", "{temporal}"]
    ),
}


@pytest.fixture
def files(tiny, tmp_path) -> dict[str, Path]:
    """A valid set of files of this test's own."""
    files = {
        "checkpoint": tiny.checkpoint,
        "gemma": tiny.gemma_root,
        "lora": tiny.lora,
        "spatial": tiny.spatial_upsampler,
        "temporal": tiny.temporal_upsampler,
        "image": tiny.image,
    }
    made = {}
    for name, path in files.items():
        made[name] = tmp_path / "set" / path.name
        made[name].parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, made[name], copy_function=os.link)
        else:
            os.link(path, made[name])
    return made


def words(verb: str, files: dict[str, Path], own: list[str], folder: Path) -> list[str]:
    typed = ["--checkpoint-path", "{checkpoint}", "--gemma-root", "{gemma}", "--profile", "cpu"]
    typed += ["--tp-degree", "1", "--dtype", "float32", "--artifacts-dir", str(folder), *own]
    if "--video-path" not in own:
        typed += ["--height", "64", "--width", "64", "--num-frames", "9"]
    if verb == "generate":
        typed += ["--prompt", "rain", "--output-path", str(folder.with_name("out.mp4"))]
    if verb == "doctor":
        typed += ["--json"]
    return [verb, *(word.format(**files) for word in typed)]


def ran(capsys, *words: str) -> tuple[int, str]:
    """The exit code, and the first line of the error: of the doctor, of all that blocks."""
    capsys.readouterr()
    code = 0
    try:
        errors.run(lambda: dispatch([*words]))
    except SystemExit as end:
        code = end.code or 0
    said = capsys.readouterr()
    if words[0] == "doctor" and code != 2:
        found = [each for each in json.loads(said.out)["findings"] if each["state"] == "blocks"]
        return code, "\n".join(each["text"] for each in found)
    lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
    return code, lines[0].removeprefix("error: ") if lines else ""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_every_verb_with_the_same_sentence(files, tmp_path, capsys, name):
    broken, folder = BROKEN[name], tmp_path / "artifacts"
    member, _, rest = broken.file.partition("/")
    broken.how(files[member] / rest if rest else files[member])
    said = {}
    for verb in ("generate", "prepare", "plan", "doctor"):
        code, said[verb] = ran(capsys, *words(verb, files, broken.flags, folder))
        assert code == (1 if verb == "doctor" else 2), (verb, said)
    sentence = said["generate"]
    assert sentence and said["prepare"] == said["plan"] == sentence
    assert sentence in said["doctor"] and broken.said in sentence
    assert not folder.exists()


@pytest.mark.parametrize("verb", ["prepare", "plan"])
def test_the_whole_set_is_taken(files, tmp_path, capsys, verb):
    own = [*DEV, "--image", "{image}", *(["--dry-run"] if verb == "prepare" else [])]
    assert ran(capsys, *words(verb, files, own, tmp_path / "artifacts"))[0] == 0


def test_a_plan_needs_neither_gemma_nor_upsampler(files, tmp_path, capsys):
    typed = words("plan", files, [*DISTILLED, "--two-stage"], tmp_path / "artifacts")
    at = typed.index("--gemma-root")
    assert ran(capsys, *typed[:at], *typed[at + 2 :])[0] == 0
