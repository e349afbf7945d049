"""Commands whose model files, folders, outputs or artifacts do not fit: each ends with a message that says what to
type, with exit code 2, and writes nothing. A job's fields: unit/sampling/test_refusals.py.

A row is the flags that are added to a valid command, and words of the message. The scripts run in this process.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from printed import runs
from tiny.config import merge
from tiny.weights import save
from typed import run

from ltx_neuron import artifacts as places
from ltx_neuron.commands import dispatch
from ltx_neuron.files import MANIFEST
from ltx_neuron.weights.tensorfile import TensorFile

ROOT = Path(__file__).resolve().parents[2]
SHARD_DIT, SHARD_GEMMA = "shards/shard_backbone_weights.py", "shards/shard_gemma3_weights.py"
COMPILE_DIT, COMPILE_GEMMA = "compile/compile_transformer.py", "compile/compile_gemma3.py"
GENERATE = "src/generate_ltx23.py"
SIZE = "--height 64 --width 64 --num-frames 9 --frame-rate 24 --profile-set blocks_per_graph=0"


class World(NamedTuple):
    """One folder with good files, broken ones, finished artifacts and damaged copies of them."""

    root: Path
    assets: object  # TinyAssets
    files: set  # every path with its time and size, as the tests found them

    def words(self, script: str, flags: str = "") -> list[str]:
        """The flags of a run in which all is well, then `flags`; {names} stand for paths."""
        common = "--checkpoint-path {ckpt} --artifacts-dir {root}/artifacts --tp-degree 1 --dtype float32"
        own = {
            COMPILE_DIT: SIZE,
            SHARD_GEMMA: "--gemma-root {gemma}",
            COMPILE_GEMMA: "--gemma-root {gemma}",
            GENERATE: ("--gemma-root {gemma} --prompt rain --output-path {root}/out/video.mp4 " + SIZE),
        }
        paths = {
            "ckpt": self.assets.checkpoint,
            "gemma": self.assets.gemma_root,
            "spatial": self.assets.spatial_upsampler,
            "root": self.root,
            "bad": self.root / "bad",
            "artifacts": self.root / "artifacts",
            "long": "rain" * 60,
        }
        line = f"{common} {own.get(script, '')} {flags}"
        return [word.format(**paths) for word in shlex.split(line)]

    def listing(self) -> set:
        found = [(path, path.lstat()) for path in self.root.rglob("*")]
        return {(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found}

    @contextmanager
    def changed(self) -> Iterator[None]:
        """The block alone may write; what was written before it, or is after it, fails the test."""
        self.check_untouched()
        yield
        self.files.clear()
        self.files.update(self.listing())

    def check_untouched(self) -> None:
        assert self.listing() ^ self.files == set()


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """Once all tests have run, nothing was written."""
    made = World(tmp_path_factory.mktemp("world"), tiny, set())
    with made.changed():
        (made.root / "out").mkdir()
        _break_files(made)
    yield made
    made.check_untouched()


@pytest.fixture(scope="module")
def finished(world):
    """The world with weights and graphs for SIZE, and with damaged copies of them. They are made as
    a newcomer makes them: by pasting what the error says."""
    with world.changed():
        with mock.patch.object(sys, "stderr", StringIO()) as printed:
            assert run(GENERATE, world.words(GENERATE)) == 2
        pasted = shlex.split(re.search(r"Make them: (.*)", printed.getvalue())[1])
        dispatch(pasted[pasted.index("prepare") :])
        _damage_artifacts(world)
    return world


def _break_files(world: World) -> None:
    """bad/: checkpoints, Gemma roots, upsamplers and images, each wrong in one way."""
    bad, tiny = world.root / "bad", world.assets
    bad.mkdir()
    (bad / "folder").mkdir()
    (bad / "folder.mp4").mkdir()
    (bad / "folder.json").mkdir()
    (bad / "text.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (bad / "a file").write_text("")
    (bad / "circle").symlink_to(bad / "circle")
    whole = tiny.checkpoint.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    (bad / "other content.safetensors").write_bytes(
        whole[:data] + whole[data : data + 4096][::-1] + whole[data + 4096 :]
    )

    metadata = TensorFile(tiny.checkpoint, "").metadata
    config = json.loads(metadata["config"])

    def header_only(name: str, config: object, version: str | None = "2.3.0", tensors: dict | None = None) -> None:
        header = {} if config is None else {"config": config if isinstance(config, str) else json.dumps(config)}
        header |= {"model_version": version} if version else {}
        save(bad / f"{name}.safetensors", tensors or {"vae.tensor": torch.zeros(1)}, header or None)

    header_only("no-metadata", None, None)
    header_only("3.0", merge(config, {"transformer": {"use_keyframes_abs_pos_embedding": True}}), "3.0.0")
    header_only("not-json", "{'transformer': {}}")
    header_only("a-list", "[1, 2]")
    header_only("float8", config, tensors={"model.diffusion_model.x": torch.zeros(2).to(torch.float8_e5m2)})
    header_only("no-vae", config)
    wrong = {
        "rope_type": "interleaved",
        "use_keyframes_abs_pos_embedding": True,
        "num_layers": "two",
        "attention_head_dim": 0,
        "positional_embedding_max_pos": 20,
        "cross_attention_dim": 48,
    }
    for name, value in wrong.items():
        header_only(name, merge(config, {"transformer": {name: value}}))
    no_layers = {name: value for name, value in config["transformer"].items() if name != "num_layers"}
    header_only("no-num_layers", {**config, "transformer": no_layers})
    upsampler = json.loads(TensorFile(tiny.spatial_upsampler, "").metadata["config"])
    header_only("empty-upsampler", upsampler, None, {"other": torch.zeros(1)})

    gemma = json.loads((tiny.gemma_root / "config.json").read_text())

    def root(name: str, without: str | None = None, **changes) -> Path:
        made = shutil.copytree(tiny.gemma_root, bad / name)
        if without:
            (made / without).unlink()
        (made / "config.json").exists() and (made / "config.json").write_text(json.dumps(merge(gemma, changes)))
        return made

    (root("broken-tokenizer") / "tokenizer.json").write_text("{")
    (root("broken-config") / "config.json").write_text("{")
    root("no-weights", "model.safetensors")
    root("deep", text_config={"num_hidden_layers": 6})
    root("other-heads", text_config={"num_attention_heads": 4, "num_key_value_heads": 2})
    root("odd-heads", text_config={"num_key_value_heads": 3})
    root("llama", model_type="llama")


def _damage_artifacts(world: World) -> None:
    """bad/<name>: copies of the finished artifacts, each with one thing changed."""

    def copy(name: str) -> Path:
        made = world.root / "bad" / name
        shutil.copytree(world.root / "artifacts", made, copy_function=os.link)
        return made

    def one(folder: Path, pattern: str) -> Path:
        (path,) = folder.glob(pattern)
        return path

    def rewrite(path: Path, content: bytes) -> None:
        path.unlink()  # the link, not what it shares with the whole artifacts
        path.write_bytes(content)

    def flipped(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        rewrite(path, bytes(content))

    def of_another(name: str, kind: str, move: bool = True, **fields) -> None:
        """As if the artifacts of a kind had been made for other values of these fields."""
        for manifest in copy(name).glob(f"{kind}/*/{MANIFEST}"):
            content = json.loads(manifest.read_text())
            content["identity"] |= fields
            rewrite(manifest, json.dumps(content).encode())
            if move:
                manifest.parent.rename(places.folder(world.root / "bad" / name, content["identity"]))

    of_another("other-code", "graphs", code="0123456789ab")
    of_another("other-torch", "graphs", torch="1.0.0")
    of_another("other-config", "graphs", config="0123456789ab")
    of_another("edited-torch", "graphs", move=False, torch="1.0.0")
    of_another("other-source", "weights", source="0123456789ab")
    of_another("other-layout", "weights", layout=0)
    weights, graph = "weights/dit-*", "graphs/dit-*-t1-*"
    one(copy("unfinished"), f"{weights}/manifest.json").unlink()
    rewrite(one(copy("broken-manifest"), f"{weights}/manifest.json"), b"{")
    one(copy("missing-rank"), f"{weights}/rank0.safetensors").unlink()
    flipped(one(copy("flipped-rank"), f"{weights}/rank0.safetensors"))
    path = one(copy("truncated-rank"), f"{weights}/rank0.safetensors")
    rewrite(path, path.read_bytes()[:-1])
    one(copy("missing-graph"), f"{graph}/step.pt2").unlink()
    flipped(one(copy("flipped-graph"), f"{graph}/step.pt2"))
    path = one(copy("other-tensors"), f"{weights}/rank0.safetensors")
    rewrite(path, _other_tensors(path.read_bytes()))


def _other_tensors(content: bytes) -> bytes:
    """A rank file of the same size in which a tensor has another name, one another shape and one
    another type."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    names = {name: entry for name, entry in header.items() if name != "__metadata__"}
    long, flat = (
        next(
            n
            for n, e in names.items()
            if len(e["shape"]) == d and e["shape"][0] != e["shape"][-1] or d == 1 and len(e["shape"]) == 1
        )
        for d in (2, 1)
    )
    header[long]["shape"].reverse()
    header[flat]["dtype"] = "I32"
    renamed = next(name for name in names if name not in (long, flat))
    header["x" + renamed[1:]] = header.pop(renamed)
    text = json.dumps(header, separators=(",", ":")).encode()
    return content[:8] + text.ljust(end - 8) + content[end:]


# A mistake a line: the script, unless it is GENERATE; its flags; and what the message must hold.
NAMES = {
    "CHECKPOINT": "hf download Lightricks/LTX-2.3 ltx-2.3-22b-distilled-1.1.safetensors",
    "GEMMA": "hf download google/gemma-3-12b-it-qat-q4_0-unquantized",
    "SPATIAL": "hf download Lightricks/LTX-2.3 ltx-2.3-spatial-upscaler-x2-1.1.safetensors",
    "TEMPORAL": "hf download Lightricks/LTX-2.3 ltx-2.3-temporal-upscaler-x2-1.0.safetensors",
    "PREPARE": " prepare --checkpoint-path ",
    "SHARD": " shard transformer ",
}
SCRIPTS = {
    "SHARD_DIT": SHARD_DIT,
    "SHARD_GEMMA": SHARD_GEMMA,
    "COMPILE_DIT": COMPILE_DIT,
    "COMPILE_GEMMA": COMPILE_GEMMA,
}


def table(text: str) -> list:
    """A case for every line that is no comment."""
    cases = []
    for line in re.findall(r"^[^#\n].*", text, re.MULTILINE):
        command, words = line.split(" -> ")
        script, _, flags = command.rpartition(": ")
        words = [NAMES.get(word, word) for word in words.split(" | ")]
        id = ascii(command)[1:-1]
        cases.append(pytest.param(SCRIPTS.get(script, GENERATE), flags, words, id=id))
    return cases


MISTAKES = table("""
# the checkpoint
COMPILE_DIT: --checkpoint-path {bad}/circle -> circle: its symbolic links form a loop
--checkpoint-path {bad}/no-metadata.safetensors -> no 'config' metadata | CHECKPOINT
--checkpoint-path {bad}/not-json.safetensors -> not JSON | CHECKPOINT
--checkpoint-path {bad}/a-list.safetensors -> no 'transformer' section | CHECKPOINT
--checkpoint-path {bad}/3.0.safetensors -> 3.0.0 | runs 2.3 and 2.5 | CHECKPOINT
--checkpoint-path {bad}/rope_type.safetensors -> rope_type | 'interleaved' | 'split'
--checkpoint-path {bad}/use_keyframes_abs_pos_embedding.safetensors -> \
use_keyframes_abs_pos_embedding
--checkpoint-path {bad}/no-num_layers.safetensors -> num_layers is absent
--checkpoint-path {bad}/num_layers.safetensors -> num_layers is 'two' | whole number
--checkpoint-path {bad}/attention_head_dim.safetensors -> head_dim is 0 | above 0
--checkpoint-path {bad}/positional_embedding_max_pos.safetensors -> checkpoint config
--checkpoint-path {bad}/cross_attention_dim.safetensors -> cross_attention_dim is 48 | 32
SHARD_DIT: --checkpoint-path {bad}/float8.safetensors -> F8_E5M2 | BF16 | CHECKPOINT
SHARD_DIT: --checkpoint-path {bad}/no-vae.safetensors -> no tensor | CHECKPOINT
# flags
--tp-degree 3 -> degree 3 | num_attention_heads=4 | one of 1, 2, 4
SHARD_DIT: --tp-degree 3 -> degree 3 | one of 1, 2, 4
COMPILE_DIT: --tp-degree 8 -> degree 8 | one of 1, 2, 4
--dtype float16 -> --dtype | float16 | bfloat16
--compat 2.0 -> --compat | ltx-core-1.0.0
SHARD_DIT: --checkpoint x -> --checkpoint | did you mean --checkpoint-path FILE?
--recipe dev --video-stg-blocks 28 -> video STG block 28 | blocks 0..1 | --video-stg-blocks
# outputs
--output-path {root}/out/video.avi -> MP4 | video.avi | --output-path FILE.mp4
--output-path {root}/out/video -> MP4 | --output-path FILE.mp4
--output-path {bad}/folder.mp4 -> is a folder | folder.mp4/video.mp4
--output-path '{bad}/a file/video.mp4' -> not a folder you may write to | --output-path
--output-path {root}/{long}.mp4 -> this long | --output-path
--output-path {bad}/folder.mp4 --output-path {bad}/folder.MP4 -> folder.json is a folder
--save-frames '{bad}/a file' -> not a folder | --save-frames DIR
--save-tensors {bad}/folder -> is a folder | --save-tensors FILE
--perf-dump-path {bad}/folder -> is a folder | --perf-dump-path FILE
--perf-dump-path {root}/out/video.json -> the JSON of --output-path | --perf-dump-path
--save-tensors {ckpt} -> --checkpoint-path | --save-tensors | same file
--save-tensors {artifacts}/dit/rank_00.safetensors -> 00.safetensors is in the input folder of \
--artifacts-dir | pass another --save-tensors
--audio-path {bad}/gone.wav --resume -> --resume needs --audio-path | present path of this file
--resume {bad}/text.safetensors --save-tensors {bad}/text.safetensors -> --resume and \
--save-tensors are the same file
SHARD_DIT: --artifacts-dir '{bad}/a file' -> --artifacts-dir DIR
COMPILE_DIT: --artifacts-dir '{bad}/a file/x' -> --artifacts-dir DIR
--artifacts-dir '{bad}/a file' -> no dit graphs | Make them:
# the text encoder
--gemma-root {bad}/broken-config -> config.json is not JSON
--gemma-root {bad}/llama -> 'llama' | 'gemma3'
--gemma-root {bad}/no-weights -> model*.safetensors | GEMMA
--gemma-root {bad}/broken-tokenizer -> tokenizer.json | GEMMA
--gemma-root {bad}/deep -> num_hidden_layers 6 | take 4 layers | GEMMA
--gemma-root {bad}/other-heads -> q_proj | wanted | GEMMA
SHARD_GEMMA: --gemma-root {bad}/odd-heads --tp-degree 2 -> num_key_value_heads=3 | one of 1
COMPILE_GEMMA: --gemma-root {bad}/odd-heads --tp-degree 2 -> num_key_value_heads=3
--gemma-root {bad}/odd-heads --tp-degree 2 --neuron-gemma -> num_key_value_heads=3
COMPILE_GEMMA: --gemma-root {bad}/absent -> not a folder | GEMMA
# upsamplers
--two-stage -> --two-stage | --spatial-upsampler-path | SPATIAL
--two-stage --spatial-upsampler-path {bad}/folder -> folder | SPATIAL
--two-stage --spatial-upsampler-path {bad}/empty-upsampler.safetensors -> LatentUpsampler | \
none of its | SPATIAL
--upscale temporal -> --upscale temporal | --temporal-upsampler-path | TEMPORAL
--checkpoint-path {bad}/no-vae.safetensors -> no tensors of dit | CHECKPOINT
""")
# Artifacts that do not fit.
ARTIFACTS = table("""
--artifacts-dir {root}/none -> no dit graphs | Make them: | PREPARE | --tp-degree 1
--neuron-gemma -> no gemma3 weights | Make them: | PREPARE | --gemma-root
--height 96 -> needed: 64x96 (width x height) | compiled: 64x64 | PREPARE | --height 96
--tp-degree 2 -> tp: got 1, wanted 2 | PREPARE | --tp-degree 2
--dtype bfloat16 -> dtype: got float32, wanted bfloat16 | PREPARE | --dtype bfloat16
--profile-set blocks_per_graph=1 -> blocks_per_graph: got 0, wanted 1 | PREPARE
--checkpoint-path '{bad}/other content.safetensors' -> source (the checkpoint's content): got | \
PREPARE | other content.safetensors'
--artifacts-dir {bad}/other-code -> code (this toolkit's code): got 0123456789ab | PREPARE
--artifacts-dir {bad}/other-torch -> torch (the version of PyTorch): got 1.0.0 | PREPARE
--artifacts-dir {bad}/other-config -> config (the model's sizes): got | PREPARE
--artifacts-dir {bad}/edited-torch -> torch | got 1.0.0 | rm -r | PREPARE
--artifacts-dir {bad}/other-source -> source | got 0123456789ab | PREPARE
--artifacts-dir {bad}/other-layout -> layout: got 0, wanted | PREPARE
--artifacts-dir {bad}/unfinished -> not finished | Make them again: | PREPARE
SHARD_DIT: --artifacts-dir {bad}/unfinished --verify -> not finished
--artifacts-dir {bad}/broken-manifest -> manifest.json cannot be read | rm -r | PREPARE
--artifacts-dir {bad}/missing-rank -> rank0.safetensors: missing | rm -r | PREPARE
--artifacts-dir {bad}/truncated-rank -> rank0.safetensors: | bytes, wanted | rm -r
--artifacts-dir {bad}/missing-graph -> step.pt2: missing | rm -r | PREPARE
--artifacts-dir {bad}/flipped-graph -> step.pt2: content differs | rm -r | PREPARE
SHARD_DIT: --artifacts-dir {root}/none --verify -> no dit weights | SHARD
SHARD_DIT: --artifacts-dir {bad}/flipped-rank --verify -> rank0.safetensors: content differs from \
its blake3 | rm -r
SHARD_DIT: --artifacts-dir {bad}/truncated-rank --verify -> bytes, wanted | rm -r
SHARD_DIT: --artifacts-dir {bad}/missing-rank --verify -> rank0.safetensors: missing
""")


@pytest.fixture
def check(world, capsys, monkeypatch):
    """Run a case and check exit code and message."""
    monkeypatch.chdir(world.root / "out")

    def check(script: str, flags: str, words: list[str]) -> None:
        code = run(script, world.words(script, flags))
        _judge(code, capsys.readouterr().err, words)

    return check


def _judge(code: int, printed: str, words: list[str]) -> None:
    assert code == 2, printed
    assert printed.count("error: ") == 1 and "Traceback" not in printed, printed
    assert not [word for word in words if word not in printed], printed


@pytest.mark.parametrize("script, flags, words", MISTAKES)
def test_a_command_is_refused_with_what_to_type(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", ARTIFACTS)
def test_artifacts_that_do_not_fit_are_refused(finished, check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize(
    "without, words",
    [
        ("--checkpoint-path", ("--checkpoint-path", "required", "--help")),
        ("--gemma-root", ("needs --gemma-root", "--gemma-root gemma-3-12b")),
        ("--prompt", ("--prompt is empty", "type for example")),
        ("--output-path", ("--output-path", "out.mp4")),
    ],
)
def test_a_missing_flag(world, capsys, without, words):
    typed = world.words(GENERATE)
    at = typed.index(without)
    code = run(GENERATE, typed[:at] + typed[at + 2 :])
    _judge(code, capsys.readouterr().err, words)


def test_a_rank_that_refuses_its_file_prints_no_traceback(finished, capfd):
    """A rank writes to the same terminal."""
    flags = "--artifacts-dir {bad}/other-tensors --no-prompt-cache"
    code = run(GENERATE, finished.words(GENERATE, flags))
    words = ["rank0.safetensors", "missing: ", "unexpected: x", "I32, wanted", "Delete "]
    _judge(code, capfd.readouterr().err, words)


@runs("weights/rankfiles.py:check_whole: rm")
def test_the_command_for_damaged_weights_works_when_pasted(finished, tmp_path, capsys):
    shutil.copytree(finished.root / "bad/missing-rank", tmp_path / "its artifacts")
    words = finished.words(SHARD_DIT, f"--artifacts-dir '{tmp_path}/its artifacts' --verify")
    assert run(SHARD_DIT, words) == 2
    command = re.search(r"Make it again: (.*)", capsys.readouterr().err)[1]
    remove, make = command.split(" && ")
    subprocess.run(remove, shell=True, check=True, timeout=100)
    assert run(SHARD_DIT, shlex.split(make.partition(" shard transformer ")[2])) == 0
    assert run(SHARD_DIT, words) == 0
