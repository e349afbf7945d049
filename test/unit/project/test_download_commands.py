"""The hf commands in errors about model files are run, with a hub on loopback, and what they download is taken."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hub_server import GEMMA, LTX, released
from safetensors import safe_open
from safetensors.torch import save
from tiny import TinyAssets
from tiny.split import SplitAssets
from typed import ended

from ltx_neuron.hub import RELEASE_FILES, NotDownloaded, local_path, no_downloads

LATER, PUBLISHED = "Lightricks/LTX-2.5", RELEASE_FILES[LTX]
CHECKPOINT, ROOT, SPATIAL = "--checkpoint-path", "--gemma-root", "--spatial-upsampler-path"
VIDEO, AUDIO, HEAD = "--video-vae-path", "--audio-vae-path", "--duration-head-path"
SIZE = ["--height", "64", "--width", "64", "--num-frames", "9", "--tp-degree", "1", "--profile", "cpu"]


@pytest.fixture
def home(tiny, split, tmp_path, monkeypatch) -> Path:
    with released(tiny, monkeypatch, tmp_path) as hub:
        hub.repos[LATER] = {str(path.relative_to(split.folder)): path for path in split if path != split.image}
        yield tmp_path / "home"


class Files(NamedTuple):
    """Makes the provoking file of a case in the present folder, and returns its path."""

    tiny: TinyAssets
    split: SplitAssets

    def content(self, name: str, content: bytes) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
        return name

    def cut(self, name: str, source: Path | None = None) -> str:
        return self.content(name, (source or self.tiny.checkpoint).read_bytes()[:-1000])

    def copy(self, name: str, source: Path) -> str:
        return self.content(name, source.read_bytes())

    def tensors(self, name: str, tensors: dict, metadata: dict | None = None) -> str:
        return self.content(name, save(tensors, metadata))

    def part(self, name: str, *without: str) -> str:
        with safe_open(self.tiny.checkpoint, "pt") as file:
            kept = {key: file.get_tensor(key) for key in file.keys() if not key.startswith(without)}
            return self.tensors(name, kept, file.metadata())

    def shards(self, folder: str) -> str:
        for number in (1, 2):
            self.copy(f"{folder}/model-0000{number}-of-00002.safetensors", self.tiny.checkpoint)
        return folder

    def gemma(self, folder: str, without: str = "", renamed: str = "") -> str:
        shutil.copytree(self.tiny.gemma_root, folder)
        for name in without.split():
            Path(folder, name).unlink()
        for name in renamed.split():
            self.copy(f"{folder}/{name}", self.tiny.gemma_root / "model.safetensors")
        return folder

    def smaller(self, folder: str) -> str:
        config = Path(self.gemma(folder), "config.json")
        config.write_text(re.sub('"hidden_size": [0-9]+', '"hidden_size": 8', config.read_text()))
        return folder

    def within(self, name: str) -> str:
        return str(Path(name).parent)


# How files begin that somebody downloaded or saved, and what errors call them
FORMATS = [(b"GGUF\3\0\0\0", "a GGUF file"), (b"\x80\x02}q\0x\0\0", "a pickle"), (b"PK\3\4\0\0\0\1", "zip archive")]
FORMATS += [(b'{"metadata": {}}', "JSON text"), (b"<!DOCTYPE html>", "web page")]
FORMATS += [(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs")]
OLDER = {"config": '{"transformer": {"audio_num_attention_heads": 4}}'}
PLAIN, LORA = {"proj_in.weight": torch.zeros(2)}, {"x.lora_A.weight": torch.zeros(2, 2)}
WEIGHTS, DIFFUSERS = "model.safetensors", "transformer/diffusion_pytorch_model.safetensors"
# The flag, how the file is made that somebody has, and what the error calls it
Case = tuple[str, Callable[[Files], str], str]
CASES: list[Case] = [
    *((CHECKPOINT, lambda f, begin=begin: f.content("a", begin), name) for begin, name in FORMATS),
    (CHECKPOINT, lambda f: f.cut("ltx.safetensors.part"), "an unfinished"),
    (CHECKPOINT, lambda f: f.cut(f"models/{PUBLISHED['dev']}"), "truncated?"),
    (CHECKPOINT, lambda f: PUBLISHED["dev"], "no such file"),
    (CHECKPOINT, lambda f: f.content("a.safetensors", b""), "it is empty"),
    (CHECKPOINT, lambda f: f"{f.shards('mine')}/model-00001-of-00002.safetensors", "one of several parts"),
    (CHECKPOINT, lambda f: f.shards("mine"), "a model in 2 parts"),
    (CHECKPOINT, lambda f: f.within(f.content("mine/model_index.json", b"{}")), "diffusers' layout"),
    (CHECKPOINT, lambda f: f.tensors(DIFFUSERS, PLAIN), "diffusers' layout"),
    (CHECKPOINT, lambda f: f.within(f.part("mine/vae.safetensors", "model.", "text_")), "without a transformer"),
    (CHECKPOINT, lambda f: f.tensors("ltx-2.safetensors", PLAIN, OLDER), "LTX version 2.0"),
    (CHECKPOINT, lambda f: f.copy("a.safetensors", f.tiny.spatial_upsampler), "no '"),
    (CHECKPOINT, lambda f: f.copy("gemma.safetensors", f.tiny.gemma_root / WEIGHTS), "no 'config' metadata"),
    (CHECKPOINT, lambda f: f.part("mine.safetensors", "vae.", "audio_", "vocoder."), "the video VAE is missing"),
    (CHECKPOINT, lambda f: f.part("mine.safetensors", "vae.decoder."), "does not have the VideoDecoder"),
    (ROOT, lambda f: f.content("gemma.gguf", b"GGUF\3\0\0\0"), "a GGUF file"),
    (ROOT, lambda f: f.copy("gemma_3_12B_it.safetensors", f.tiny.gemma_root / WEIGHTS), "is a file"),
    (ROOT, lambda f: f.copy("ltx.safetensors", f.tiny.checkpoint), "is a transformer of LTX 2.3.0"),
    (ROOT, lambda f: f.copy("gemma4.safetensors", f.split.text_encoder), "text encoder of a later release"),
    (ROOT, lambda f: "gemma", "is not a folder"),
    (ROOT, lambda f: f.gemma("gemma", WEIGHTS, "model-00001-of-00005.safetensors"), "has 1 of 5 weight files"),
    (ROOT, lambda f: f.gemma("a", "", "model-00001-of-00001.safetensors x.safetensors"), "1 weight files and 1 of 1"),
    (ROOT, lambda f: f.gemma("gemma", "tokenizer.json"), "no tokenizer"),
    (ROOT, lambda f: f.gemma("gemma", "config.json"), "config.json"),
    (ROOT, lambda f: f.smaller("gemma-3-4b"), "has hidden_size"),
    ("--lora", lambda f: PUBLISHED["lora"], "no such file"),
    ("--lora", lambda f: f.tensors("a", LORA, {"model_version": "2.5.0"}), "is of LTX 2.5.0, but the checkpoint is of"),
    (SPATIAL, lambda f: "upsampler.safetensors", "no such file"),
    (SPATIAL, lambda f: f.copy("a.safetensors", f.tiny.temporal_upsampler), "wanted a spatial latent upsampler"),
    (SPATIAL, lambda f: f.cut(f"models/{PUBLISHED['spatial']}", f.tiny.spatial_upsampler), "truncated?"),
]
CASES_OF_2_5: list[Case] = [
    (CHECKPOINT, lambda f: f.cut(f"ltx/{RELEASE_FILES[LATER]['distilled']}", f.split.distilled), "truncated?"),
    (ROOT, lambda f: f.gemma("gemma"), "in one file"),
    (ROOT, lambda f: f.copy("a.safetensors", f.split.video_vae), "got the"),
    (ROOT, lambda f: f.cut("a.safetensors", f.split.text_encoder), "trunc"),
    (VIDEO, lambda f: "vae.safetensors", "no such file"),
    (VIDEO, lambda f: f.copy("a.safetensors", f.split.audio_vae), "the audio VAE"),
    (AUDIO, lambda f: f.content("vae.pt", b"PK\3\4\0\0\0\1"), "a pickle"),
    (SPATIAL, lambda f: f.copy("ltx-2.3-up.safetensors", f.tiny.spatial_upsampler), "is of LTX 2.3 by its name"),
    (HEAD, lambda f: f.copy("a.safetensors", f.split.video_vae), "wanted a duration head"),
]


def prepared(capsys, values: dict, *words: str) -> tuple[int, str]:
    typed = [str(word) for pair in values.items() for word in pair]
    capsys.readouterr()
    return ended("prepare", "--dry-run", *SIZE, *typed, *words), capsys.readouterr().err


def downloaded(monkeypatch, command: str) -> str:
    """Run an hf command. Returns the path of what it downloads."""
    from huggingface_hub.cli.hf import main

    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words)
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
    if "--local-dir" not in words:  # into the cache
        return ""
    folder = words[words.index("--local-dir") + 1]
    return folder if words[3] == "--local-dir" else str(Path(folder, words[3]))


@pytest.mark.parametrize(
    ("later", "flag", "make", "message"),
    [*((False, *case) for case in CASES), *((True, *case) for case in CASES_OF_2_5)],
)
def test_what_a_printed_command_downloads_is_taken(later, flag, make, message, home, tiny, split, capsys, monkeypatch):
    options = "--recipe", "distilled", "--two-stage"
    values = {CHECKPOINT: tiny.checkpoint, ROOT: tiny.gemma_root, SPATIAL: tiny.spatial_upsampler}
    if later:
        values = {CHECKPOINT: split.distilled, ROOT: split.text_encoder, VIDEO: split.video_vae}
        values |= {AUDIO: split.audio_vae, SPATIAL: split.spatial_upsampler, HEAD: split.duration_head}
    values |= {flag: make(Files(tiny, split))}
    before = {path for path in home.rglob("*") if path.is_file()}
    code, error = prepared(capsys, values, *options)
    assert code == 2 and message in error and f"nearest: {values[flag]})" not in error, error
    assert (commands := re.findall(r"hf download .+", error)), error
    typed = re.search(r"type (--[\w-]+) (?!FILE)([^;\s]+)$", error, re.MULTILINE)
    for command in commands:
        value = downloaded(monkeypatch, command)
        whole = f"{LATER} --local-dir" in command  # the other files are in the folder
        if Path(values[flag]).name in {Path(name).name for name in PUBLISHED.values()}:
            assert Path(value) == Path(values[flag])  # in its place: the very same command
        if typed and not whole:
            assert (typed[1], typed[2]) == (flag, value)
        repaired = {CHECKPOINT: value} if whole else values | {flag: value}
        assert prepared(capsys, repaired, *options) == (0, ""), command
    assert all(path.is_file() for path in before)  # nothing is lost


def test_the_distilled_lora_that_a_printed_command_downloads_is_taken(home, tiny, capsys, monkeypatch):
    values = {SPATIAL: tiny.spatial_upsampler, CHECKPOINT: tiny.checkpoint, ROOT: tiny.gemma_root, "--recipe": "dev"}
    code, error = prepared(capsys, values, "--two-stage")
    assert code == 2 and "needs --distilled-lora" in error, error
    (command,) = re.findall(r"hf download .+", error)
    repaired = values | {"--distilled-lora": downloaded(monkeypatch, command)}
    assert prepared(capsys, repaired, "--two-stage") == (0, "")


@pytest.mark.parametrize(("name", "kind"), [(f"{LTX}/{PUBLISHED['dev']}", "dev"), (GEMMA, "gemma")])
def test_the_command_for_a_machine_without_network_fills_the_cache(home, monkeypatch, name, kind):
    with no_downloads(), pytest.raises(NotDownloaded) as error:
        local_path(name, kind)
    (command,) = re.findall(r"hf download .+", str(error.value))
    downloaded(monkeypatch, command)
    with no_downloads():
        assert local_path(name, kind).exists()
