"""Every file that a job reads is checked before anything is made, by each verb with the same sentence."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import one_thread  # noqa: F401
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typed import ended


def without(*prefixes: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        path.unlink()
        save_file({name: x for name, x in tensors.items() if not name.startswith(prefixes)}, path, metadata)

    return change


def text(path: Path) -> None:
    path.unlink()
    path.write_text("no such format")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-100])


TWO_STAGE = "--two-stage --spatial-upsampler-path {spatial}"
DEV = f"--recipe dev {TWO_STAGE} --distilled-lora {{lora}}"
UPSCALED = "--upscale temporal --temporal-upsampler-path {temporal}"
REFERENCE = "--ic-lora {lora} --video-conditioning {spatial} 1"
DIT, GEMMA = "model.diffusion_model.", "gemma/model.safetensors"
# The broken file, how it is broken, words of the error, and flags of the job that reads it
BROKEN = [
    ("checkpoint", cut, "truncated?", ""),
    ("checkpoint", without("audio_vae.decoder."), "the AudioDecoder", ""),
    ("checkpoint", without(f"{DIT}transformer_blocks.1."), "the files do not have", ""),
    ("checkpoint", without(f"{DIT}video_embeddings_connector."), "the text enc", ""),
    ("checkpoint", without("text_embedding_projection."), "the text projection is missing", ""),
    ("checkpoint", without("vae.encoder."), "the VideoEncoder", "--image {image}"),
    ("gemma/tokenizer.json", text, "cannot be loaded", ""),
    (GEMMA, without("language_model.model.layers.1."), "the text encoder's", ""),
    ("lora", Path.unlink, "lora.safetensors", DEV),
    ("temporal", Path.unlink, "no such file", UPSCALED),
    ("image", text, "image.png", "--image {image}"),
    ("image", text, "--audio-path", "--audio-path {image}"),
    ("image", Path.unlink, "--video-path", "--video-path {image} 0 1"),
    ("spatial", text, "cannot be read", REFERENCE),
    ("temporal", Path.unlink, "no such file", "--duration-head-path {temporal}"),
]


@pytest.fixture
def files(tiny, tmp_path) -> dict[str, Path]:
    """Links to the tiny assets, whose content a test must not change in place."""
    assets = {"checkpoint": tiny.checkpoint, "lora": tiny.lora, "image": tiny.image}
    assets |= {"spatial": tiny.spatial_upsampler, "temporal": tiny.temporal_upsampler, "gemma": tiny.gemma_root}
    folder = tmp_path / "set"
    shutil.copytree(tiny.gemma_root, folder / tiny.gemma_root.name, copy_function=os.link)
    for path in assets.values():
        if path.is_file():
            os.link(path, folder / path.name)
    return {name: folder / path.name for name, path in assets.items()}


def words(verb: str, files: dict[str, Path], flags: str, folder: Path) -> list[str]:
    typed = "--checkpoint-path {checkpoint} --profile cpu --tp-degree 1 --dtype float32 " + flags
    typed += "" if "--recipe" in flags else " --recipe distilled"
    typed += "" if "--video-path" in flags else " --height 64 --width 64 --num-frames 9"
    typed += {"generate": " --prompt rain --output-path out.mp4", "doctor": " --json"}.get(verb, "")
    return [verb, *(word.format(**files) for word in typed.split()), "--artifacts-dir", str(folder)]


def told(capsys, *words: str) -> tuple[int, str]:
    """The exit code, and the first line of the error: of the doctor, of all that blocks."""
    capsys.readouterr()
    code = ended(*words)
    printed = capsys.readouterr()
    if words[0] == "doctor":
        findings = json.loads(printed.out)["findings"]
        return code, "\n".join(finding["text"] for finding in findings if finding["state"] == "blocks")
    return code, re.search(r"(?m)^error: (.*)|\Z", printed.err)[1] or ""


@pytest.mark.parametrize(("file", "breaks", "message", "flags"), BROKEN)
def test_a_broken_file_is_refused_by_every_verb_with_the_same_sentence(
    files, tmp_path, capsys, file, breaks, message, flags
):
    folder, (member, _, rest) = tmp_path / "artifacts", file.partition("/")
    breaks(files[member] / rest if rest else files[member])
    typed = f"--gemma-root {files['gemma']} {flags}"
    code, sentence = told(capsys, *words("generate", files, typed, folder))
    assert code == 2 and message in sentence
    # A plan and a preparation go the same way; parts that a file lacks are found by the same check.
    for verb in ("prepare", "plan") if breaks in (cut, text, Path.unlink) else ():
        assert told(capsys, *words(verb, files, typed, folder)) == (2, sentence)
    code, findings = told(capsys, *words("doctor", files, typed, folder))
    assert code == 1 and sentence in findings
    assert not folder.exists()


def test_a_whole_set_of_files_is_taken(files, tmp_path, capsys):
    for verb, flags in (
        ("prepare", f"{DEV} --image {{image}} --gemma-root {{gemma}} --dry-run"),
        ("plan", f"{DEV} --image {{image}} --gemma-root {{gemma}}"),
        ("plan", "--two-stage"),  # which needs neither Gemma nor an upsampler
    ):
        assert told(capsys, *words(verb, files, flags, tmp_path / "artifacts")) == (0, "")
