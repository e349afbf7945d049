"""The hf commands in errors about a model's files: each is run on the file that provokes it, with a
hub on loopback, and what it downloads is taken by the same command."""

import json
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hub_server import Hub, use
from printed import runs
from safetensors.torch import load_file, save_file

from ltx_neuron import errors
from ltx_neuron.commands import dispatch
from ltx_neuron.hub import RELEASE_FILES, NotDownloaded, local_path, nearest, no_downloads

LTX, LATER = "Lightricks/LTX-2.3", "Lightricks/LTX-2.5"
GEMMA = "google/gemma-3-12b-it-qat-q4_0-unquantized"
PUBLISHED = RELEASE_FILES[LTX]


@pytest.fixture
def home(tiny, split, tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, and a hub with the released repositories of tiny files."""
    files = {
        PUBLISHED["distilled"]: tiny.checkpoint,
        PUBLISHED["dev"]: tiny.checkpoint,
        PUBLISHED["spatial"]: tiny.spatial_upsampler,
        PUBLISHED["temporal"]: tiny.temporal_upsampler,
        PUBLISHED["lora"]: tiny.lora,
    }
    later = {str(path.relative_to(split.folder)): path for path in split if path != split.image}
    gemma = {path.name: path for path in tiny.gemma_root.iterdir()}
    hub = Hub({LTX: files, LATER: later, GEMMA: gemma})
    use(hub, monkeypatch, tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    yield tmp_path / "home"
    hub.shutdown()
    hub.server_close()


class Files:
    """Makes the provoking file of a case in the present folder."""

    def __init__(self, tiny, split):
        self.tiny, self.split = tiny, split

    def content(self, name: str, begin: bytes) -> str:
        Path(name).write_bytes(begin.ljust(4000, b"x"))
        return name

    def empty(self, name: str) -> str:
        Path(name).touch()
        return name

    def pickle(self, name: str) -> str:
        torch.save({"weight": torch.zeros(3)}, name)
        return name

    def zip(self, name: str) -> str:
        with zipfile.ZipFile(name, "w") as file:
            file.writestr("model.safetensors", "x" * 4000)
        return name

    def json(self, name: str) -> str:
        Path(name).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "b"}}))
        return name

    def cut(self, name: str, source: Path | None = None) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes((source or self.tiny.checkpoint).read_bytes()[:-1000])
        return name

    def copy(self, name: str, source: Path) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, name)
        return name

    def part(self, name: str, *without: str) -> str:
        """The checkpoint without some of its tensors."""
        tensors = load_file(self.tiny.checkpoint)
        kept = {key: t for key, t in tensors.items() if not key.startswith(without)}
        save_file(kept, name, self.metadata)
        return name

    @property
    def metadata(self) -> dict[str, str]:
        from safetensors import safe_open

        with safe_open(self.tiny.checkpoint, "pt") as file:
            return file.metadata()

    def shards(self, folder: str) -> str:
        Path(folder).mkdir()
        tensors, metadata = load_file(self.tiny.checkpoint), self.metadata
        for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
            part = {name: tensors[name] for name in names}
            save_file(part, f"{folder}/model-0000{number}-of-00002.safetensors", metadata)
        self.json(f"{folder}/model.safetensors.index.json")
        return folder

    def diffusers(self, folder: str) -> str:
        Path(folder, "transformer").mkdir(parents=True)
        Path(folder, "model_index.json").write_text('{"_class_name": "LTX2Pipeline"}')
        weights = f"{folder}/transformer/diffusion_pytorch_model-0000{{}}-of-00002.safetensors"
        for number in (1, 2):
            save_file({f"proj_in.{number}": torch.zeros(2)}, weights.format(number))
        return folder

    def older(self, name: str) -> str:
        metadata = self.metadata
        config = json.loads(metadata.pop("config"))
        del config["transformer"]["cross_attention_adaln"], metadata["model_version"]
        save_file({"a": torch.zeros(1)}, name, {"config": json.dumps(config)})
        return name

    def nvfp4(self, name: str) -> str:
        note = torch.tensor([*b'{"format": "nvfp4"}'], dtype=torch.uint8)
        layer = {"weight": torch.zeros(8, 8, dtype=torch.uint8), "weight_scale": torch.ones(8, 1)}
        layer |= {"weight_scale_2": torch.tensor(1.0), "comfy_quant": note}
        tensors = {f"patchify_proj.{key}": tensor for key, tensor in layer.items()}
        save_file(tensors, name, {"config": "{}", "model_version": "2.5.0"})
        return name

    def gemma(self, folder: str, without: str = "", renamed: str = "") -> str:
        shutil.copytree(self.tiny.gemma_root, folder)
        for name in without.split():
            Path(folder, name).unlink()
        for name in renamed.split():
            shutil.copy(self.tiny.gemma_root / "model.safetensors", Path(folder, name))
        return folder

    def smaller(self, folder: str) -> str:
        self.gemma(folder)
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        config["text_config"]["hidden_size"] //= 2
        path.write_text(json.dumps(config))
        return folder


CHECKPOINT, ROOT = "--checkpoint-path", "--gemma-root"
SPATIAL = "--spatial-upsampler-path"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 46000000000\n"
# What somebody has -> the flag, how it is made, and what the error calls it.
CASES: dict[str, tuple[str, Callable[[Files], str], str]] = {
    # as checkpoint
    "GGUF": (CHECKPOINT, lambda f: f.content("ltx-2.3-Q4_K_M.gguf", b"GGUF\3\0\0\0"), "a GGUF file"),
    "a pickle": (CHECKPOINT, lambda f: f.pickle("ltx.pt"), "a pickle"),
    "an old pickle": (CHECKPOINT, lambda f: f.content("ltx.ckpt", b"\x80\x02}q\0"), "a pickle"),
    "a zip": (CHECKPOINT, lambda f: f.zip("ltx.zip"), "zip archive"),
    "an index": (CHECKPOINT, lambda f: f.json("model.safetensors.index.json"), "JSON text"),
    "a pointer": (CHECKPOINT, lambda f: f.content(PUBLISHED["dev"], LFS), "git-lfs"),
    "a web page": (CHECKPOINT, lambda f: f.content("a.safetensors", b"<!DOCTYPE html>"), "web page"),
    "an unfinished one": (CHECKPOINT, lambda f: f.cut("ltx.safetensors.part"), "an unfinished"),
    "an incomplete one": (CHECKPOINT, lambda f: f.cut("ltx.incomplete"), "an unfinished"),
    "cut": (CHECKPOINT, lambda f: f.cut("mine.safetensors"), "truncated?"),
    "published, cut": (CHECKPOINT, lambda f: f.cut(f"models/{PUBLISHED['dev']}"), "truncated?"),
    "published, missing": (CHECKPOINT, lambda f: PUBLISHED["dev"], "no such file"),
    "missing": (CHECKPOINT, lambda f: "mine.safetensors", "no such file"),
    "empty": (CHECKPOINT, lambda f: f.empty("a.safetensors"), "it is empty"),
    "a part": (CHECKPOINT, lambda f: f"{f.shards('mine')}/model-00001-of-00002.safetensors", "one of several parts"),
    "a folder of parts": (CHECKPOINT, lambda f: f.shards("mine"), "a model in 2 parts"),
    "diffusers' layout": (CHECKPOINT, lambda f: f.diffusers("mine"), "diffusers' layout"),
    "diffusers' file": (
        CHECKPOINT,
        lambda f: f.copy("transformer/diffusion_pytorch_model.safetensors", _plain()),
        "diffusers' layout",
    ),
    "a folder of other files": (CHECKPOINT, lambda f: _folder("mine"), "without a transformer"),
    "a folder with a VAE": (
        CHECKPOINT,
        lambda f: f.part(f"{_folder('mine')}/vae.safetensors", "model.", "text_")[:4],
        "without a transformer",
    ),
    "LTX-2.0": (CHECKPOINT, lambda f: f.older("ltx-2.safetensors"), "LTX version 2.0"),
    "an upsampler": (CHECKPOINT, lambda f: f.copy("a.safetensors", f.tiny.spatial_upsampler), "no '"),
    "Gemma": (
        CHECKPOINT,
        lambda f: f.copy("gemma.safetensors", f.tiny.gemma_root / "model.safetensors"),
        "no 'config' metadata",
    ),
    "the transformer alone": (
        CHECKPOINT,
        lambda f: f.part("mine.safetensors", "vae.", "audio_vae.", "vocoder."),
        "the video VAE is missing",
    ),
    "no decoder": (CHECKPOINT, lambda f: f.part("mine.safetensors", "vae.decoder."), "does not have the VideoDecoder"),
    # as Gemma
    "Gemma as GGUF": (ROOT, lambda f: f.content("gemma.gguf", b"GGUF\3\0\0\0"), "a GGUF file"),
    "Gemma as one file": (
        ROOT,
        lambda f: f.copy("gemma_3_12B_it.safetensors", f.tiny.gemma_root / "model.safetensors"),
        "is a file",
    ),
    "the checkpoint as Gemma": (
        ROOT,
        lambda f: f.copy("ltx.safetensors", f.tiny.checkpoint),
        "is a transformer of LTX 2.3.0",
    ),
    "Gemma 4": (ROOT, lambda f: f.copy("gemma4.safetensors", f.split.text_encoder), "text encoder of a later release"),
    "Gemma as index": (ROOT, lambda f: f.json("model.safetensors.index.json"), "JSON text"),
    "no Gemma": (ROOT, lambda f: "gemma", "is not a folder"),
    "Gemma's part": (
        ROOT,
        lambda f: f.gemma("gemma", "model.safetensors", "model-00001-of-00005.safetensors"),
        "has 1 of 5 weight files",
    ),
    "Gemma twice": (
        ROOT,
        lambda f: f.gemma("gemma-3-12b", "", "model-00001-of-00001.safetensors x.safetensors"),
        "has 1 of 1 weight files and 1 of 1 weight files",
    ),
    "Gemma without tokenizer": (ROOT, lambda f: f.gemma("gemma", "tokenizer.json"), "no tokenizer"),
    "Gemma without config": (ROOT, lambda f: f.gemma("gemma", "config.json"), "config.json"),
    "a folder of GGUF": (
        ROOT,
        lambda f: str(Path(f.content(f"{_folder('gemma')}/gemma.gguf", b"GGUF")).parent),
        "config.json",
    ),
    "a smaller Gemma": (ROOT, lambda f: f.smaller("gemma-3-4b"), "has hidden_size"),
    # as upsampler
    "no upsampler": (SPATIAL, lambda f: "upsampler.safetensors", "no such file"),
    "upsampler as pickle": (SPATIAL, lambda f: f.pickle("upsampler.pth"), "a pickle"),
    "another upsampler": (
        SPATIAL,
        lambda f: f.copy("a.safetensors", f.tiny.temporal_upsampler),
        "wanted a spatial latent upsampler",
    ),
    "published upsampler, cut": (
        SPATIAL,
        lambda f: f.cut(f"models/{PUBLISHED['spatial']}", f.tiny.spatial_upsampler),
        "truncated?",
    ),
}


def _plain() -> Path:
    save_file({"proj_in.weight": torch.zeros(2)}, "plain.safetensors")
    return Path("plain.safetensors")


def _folder(name: str) -> str:
    Path(name).mkdir()
    Path(name, "README.md").write_text("weights")
    return name


def ran(capsys, words: list[str]) -> tuple[int, str]:
    capsys.readouterr()
    try:
        errors.run(lambda: dispatch(words))
    except SystemExit as end:
        return end.code or 0, capsys.readouterr().err
    return 0, ""


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


def check(capsys, monkeypatch, home: Path, values: dict, flag: str, said: str, words: list) -> None:
    """Run a command that errs, then what its error prints, then the command again."""

    def ran_with(values: dict[str, object]) -> tuple[int, str]:
        typed = [word for pair in values.items() for word in map(str, pair)]
        size = "--height 64 --width 64 --num-frames 9 --recipe distilled --tp-degree 1"
        return ran(capsys, ["prepare", "--profile", "cpu", "--dry-run", *typed, *size.split(), *words])

    before = {path for path in home.rglob("*") if path.is_file()}
    code, error = ran_with(values)
    assert code == 2 and said in error, error
    assert f"nearest: {values[flag]})" not in error
    commands = re.findall(r"hf download .+", error)
    assert commands, error
    typed = re.search(r"type (--[\w-]+) (?!FILE)([^;\s]+)$", error, re.MULTILINE)
    for command in commands:
        value = downloaded(monkeypatch, command)
        whole = f"{LATER} --local-dir" in command  # the other files are in the folder
        if Path(values[flag]).name in {Path(name).name for name in PUBLISHED.values()}:
            assert Path(value) == Path(values[flag])  # in its place: the very same command
        if typed and not whole:
            assert (typed[1], typed[2]) == (flag, value)
        code, error_after = ran_with({CHECKPOINT: value} if whole else values | {flag: value})
        assert code == 0, (command, error_after)
    assert all(path.is_file() for path in before)  # nothing is lost


@runs(
    "config/common.py:gemma_download: --gemma-root",
    "weights/checkpoint.py:-: --checkpoint-path",
    "config/common.py:-: hf download",
    "config/common.py:gemma_download: hf download",
    "config/gemma.py:check_gemma_fits: hf download",
    "config/gemma.py:gemma_config: hf download",
    "config/release.py:download: hf download",
    "host/duration.py:-: hf download",
    "host/loading.py:upsampler_spec: hf download",
    "hub.py:download: hf download",
    "hub.py:download_again: hf download",
    "hub.py:download_released: hf download",
    "engine/preflight.py:_check_upsampler: hf download",
    "text/inputs.py:load_tokenizer: hf download",
    "weights/checkpoint.py:__init__: hf download",
    "weights/checkpoint.py:gemma_files: hf download",
    "weights/model_files.py:__init__: hf download",
    "weights/model_files.py:_check_folder: hf download",
    "weights/model_files.py:_transformer_in: hf download",
    "weights/model_files.py:path: hf download",
    "weights/model_files.py:text_encoder: hf download",
    "weights/tensorfile.py:__init__: hf download",
)
@pytest.mark.parametrize("name", CASES)
def test_what_a_printed_command_downloads_is_taken(name, home, tiny, split, capsys, monkeypatch):
    flag, make, said = CASES[name]
    values = {CHECKPOINT: tiny.checkpoint, ROOT: tiny.gemma_root, SPATIAL: tiny.spatial_upsampler}
    values[flag] = make(Files(tiny, split))
    check(capsys, monkeypatch, home, values, flag, said, ["--two-stage"])


VIDEO, AUDIO, HEAD = "--video-vae-path", "--audio-vae-path", "--duration-head-path"
VAE = RELEASE_FILES[LATER]["video_vae"]
CASES_OF_2_5: dict[str, tuple[str, Callable[[Files], str], str]] = {
    "the transformer, cut": (
        CHECKPOINT,
        lambda f: f.cut(f"ltx/{RELEASE_FILES[LATER]['distilled']}", f.split.distilled),
        "truncated?",
    ),
    "the transformer in nvfp4": (
        CHECKPOINT,
        lambda f: f.nvfp4("ltx-2.5-22b-distilled-transformer-nvfp4.safetensors"),
        "weights in nvfp4, which this toolkit does not read",
    ),
    "Gemma 3's folder": (ROOT, lambda f: f.gemma("gemma"), "in one file"),
    "a VAE as text encoder": (ROOT, lambda f: f.copy("a.safetensors", f.split.video_vae), "got the"),
    "the text encoder, cut": (ROOT, lambda f: f.cut("a.safetensors", f.split.text_encoder), "trunc"),
    "no video VAE": (VIDEO, lambda f: "vae.safetensors", "no such file"),
    "the video VAE, cut": (VIDEO, lambda f: f.cut(VAE, f.split.video_vae), "truncated?"),
    "the other VAE": (VIDEO, lambda f: f.copy("a.safetensors", f.split.audio_vae), "the audio VAE"),
    "the VAE as pickle": (AUDIO, lambda f: f.pickle("vae.pt"), "a pickle"),
    "LTX-2.3's upsampler": (
        SPATIAL,
        lambda f: f.copy("ltx-2.3-up.safetensors", f.tiny.spatial_upsampler),
        "is of LTX 2.3 by its name",
    ),
    "no duration head": (HEAD, lambda f: "head.safetensors", "no such file"),
    "a VAE as duration head": (HEAD, lambda f: f.copy("a.safetensors", f.split.video_vae), "wanted a duration head"),
}


@runs("weights/checkpoint.py:_parse: hf download")
@pytest.mark.parametrize("name", CASES_OF_2_5)
def test_of_ltx_2_5_what_a_printed_command_downloads_is_taken(name, home, tiny, split, capsys, monkeypatch):
    flag, make, said = CASES_OF_2_5[name]
    values = {CHECKPOINT: split.distilled, ROOT: split.text_encoder, VIDEO: split.video_vae}
    values |= {AUDIO: split.audio_vae, SPATIAL: split.spatial_upsampler, HEAD: split.duration_head}
    values[flag] = make(Files(tiny, split))
    check(capsys, monkeypatch, home, values, flag, said, ["--two-stage"])


@pytest.mark.parametrize("kind", [VIDEO, AUDIO, ROOT])
def test_a_transformer_of_2_5_alone_names_the_download_of_its_parts(kind, home, tiny, split, capsys, monkeypatch):
    values = {CHECKPOINT: Files(tiny, split).copy("mine.safetensors", split.distilled)}
    values |= {ROOT: split.text_encoder, VIDEO: split.video_vae, AUDIO: split.audio_vae}
    del values[kind]
    typed = [word for pair in values.items() for word in map(str, pair)]
    size = "--height 64 --width 64 --num-frames 9 --recipe distilled --tp-degree 1 --profile cpu"
    words = ["prepare", "--dry-run", *size.split(), *typed]
    code, error = ran(capsys, words)
    assert code == 2 and f"Type {kind} FILE" in error, error
    (command,) = re.findall(r"hf download .+", error)
    assert ran(capsys, [*words, kind, downloaded(monkeypatch, command)]) == (0, "")


@runs(
    "artifacts/workspace.py:_merged: hf download",
    "engine/preflight.py:check_distilled_loras: hf download",
    "weights/lora.py:_missing: hf download",
)
@pytest.mark.parametrize(
    "recipe, flag, said",
    [
        ("distilled", "--lora", "no such file"),
        ("dev", "--distilled-lora", "needs --distilled-lora"),
        ("distilled", "--lora", "is of LTX 2.5.0, but the checkpoint is of LTX-2.3"),
    ],
    ids=["a published one, missing", "none for stage 2", "of another release"],
)
def test_the_lora_that_a_printed_command_downloads_is_taken(recipe, flag, said, home, tiny, capsys, monkeypatch):
    size = "--height 64 --width 64 --num-frames 9 --two-stage --tp-degree 1 --profile cpu"
    words = ["prepare", "--dry-run", *size.split(), "--recipe", recipe, SPATIAL]
    words += [*map(str, (tiny.spatial_upsampler, CHECKPOINT, tiny.checkpoint))]
    words += [ROOT, str(tiny.gemma_root)]
    if "2.5.0" in said:
        save_file({"x.lora_A.weight": torch.zeros(2, 2)}, "a.safetensors", {"model_version": "2.5.0"})
    typed = {"no such file": [flag, PUBLISHED["lora"]], "needs --distilled-lora": []}
    code, error = ran(capsys, [*words, *typed.get(said, [flag, "a.safetensors"])])
    assert code == 2 and said in error, error
    (command,) = re.findall(r"hf download .+", error)
    assert ran(capsys, [*words, flag, downloaded(monkeypatch, command)]) == (0, "")


@runs("hub.py:_download: hf download", "hub.py:local_path: hf download")
@pytest.mark.parametrize(("name", "kind"), [(f"{LTX}/{PUBLISHED['dev']}", "dev"), (GEMMA, "gemma")])
def test_the_command_for_a_machine_without_network_fills_the_cache(home, monkeypatch, name, kind):
    with no_downloads(), pytest.raises(NotDownloaded) as error:
        local_path(name, kind)
    (command,) = re.findall(r"hf download .+", str(error.value))
    downloaded(monkeypatch, command)
    with no_downloads():
        assert local_path(name, kind).exists()


def test_the_nearest_path_is_another_one(tmp_path):
    (tmp_path / "gemma").write_text("")
    (tmp_path / "gemma-3").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "absent")
    assert nearest(tmp_path / "gemm") == f" (nearest: {tmp_path}/gemma)"
    assert nearest(tmp_path / "gemma") == ""
    assert nearest(tmp_path / "link.safetensors") == ""
