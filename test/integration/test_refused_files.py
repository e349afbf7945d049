"""Commands whose model files, folders, outputs or artifacts do not fit: each ends with a message that says what to
type, with exit code 2, and writes nothing. A job's fields: unit/sampling/test_refusals.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from helpers import rewrite
from tiny.config import merge
from tiny.weights import save
from typed import run

from ltx_neuron import artifacts as places
from ltx_neuron.commands import dispatch
from ltx_neuron.files import MANIFEST
from ltx_neuron.weights.tensorfile import TensorFile

SIZE = "--height 64 --width 64 --num-frames 9 --frame-rate 24 --profile-set blocks_per_graph=0"
COMMON = "--checkpoint-path {ckpt} --artifacts-dir {root}/artifacts --tp-degree 1 --dtype float32 "
GENERATE = "src/generate_ltx23.py"
# The flags of a run in which all is well.
WELL = {
    "shards/shard_backbone_weights.py": COMMON,
    "shards/shard_gemma3_weights.py": COMMON + "--gemma-root {gemma}",
    "compile/compile_transformer.py": COMMON + SIZE,
    "compile/compile_gemma3.py": COMMON + "--gemma-root {gemma}",
    GENERATE: f"{COMMON} --gemma-root {{gemma}} --prompt rain --output-path {{root}}/out/video.mp4 {SIZE}",
}
SHARD_DIT, *_ = WELL


class World:
    """One folder with good files, broken ones, finished artifacts and damaged copies of them."""

    def __init__(self, root: Path, tiny):
        self.root, self.bad, self.tiny = root, root / "bad", tiny

    def words(self, script: str, flags: str = "") -> list[str]:
        """Those of WELL, then `flags`; {names} stand for paths."""
        paths = {"ckpt": self.tiny.checkpoint, "gemma": self.tiny.gemma_root, "root": self.root, "bad": self.bad}
        return [word.format(**paths) for word in shlex.split(f"{WELL[script]} {flags}")]

    def listing(self) -> set:
        facts = [(path, path.lstat()) for path in self.root.rglob("*")]
        return {(str(path), fact.st_size, fact.st_mtime_ns) for path, fact in facts}


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """The artifacts are made as a newcomer makes them: by pasting what the error says. No test writes."""
    world = World(tmp_path_factory.mktemp("world"), tiny)
    for folder in ("out", "bad/folder", "bad/folder.mp4", "bad/folder.json"):
        (world.root / folder).mkdir(parents=True)
    _break_files(world.bad, tiny)
    with redirect_stderr(StringIO()) as errors:
        assert run(GENERATE, world.words(GENERATE)) == 2
    pasted = shlex.split(re.search(r"Make them: (.*)", errors.getvalue())[1])
    dispatch(pasted[pasted.index("prepare") :])
    for name, damage in DAMAGES.items():
        shutil.copytree(world.root / "artifacts", world.bad / name, copy_function=os.link)
        _damage(world.bad / name, *damage)
    before = world.listing()
    yield world
    assert world.listing() == before


def _break_files(bad: Path, tiny) -> None:
    """Checkpoints, Gemma roots and upsamplers, each wrong in one way."""
    (bad / "a file").write_text("")
    negated = lambda tensors: tensors.update({name: -tensor for name, tensor in tensors.items()})  # noqa: E731
    rewrite(tiny.checkpoint, bad / "an other.safetensors", negated)
    config = json.loads(TensorFile(tiny.checkpoint, "").metadata["config"])
    wrong = {"rope_type": "interleaved", "use_keyframes_abs_pos_embedding": True, "num_layers": "two"}
    wrong |= {"attention_head_dim": 0, "positional_embedding_max_pos": 20, "cross_attention_dim": 48}
    configs = {name: merge(config, {"transformer": {name: value}}) for name, value in wrong.items()}
    rest = {name: value for name, value in config["transformer"].items() if name != "num_layers"}
    configs |= {"no-num_layers": config | {"transformer": rest}, "a-list": [1, 2], "no-dit": config, "3.0": config}
    texts = {name: json.dumps(content) for name, content in configs.items()} | {"not-json": "{'transformer': {}}"}
    for name, text in texts.items():
        version = "3.0.0" if name == "3.0" else "2.3.0"
        save(bad / f"{name}.safetensors", {"vae.tensor": torch.zeros(1)}, {"config": text, "model_version": version})
    upsampler = TensorFile(tiny.spatial_upsampler, "").metadata
    save(bad / "empty-upsampler.safetensors", {"other": torch.zeros(1)}, {"config": upsampler["config"]})
    gemma = json.loads((tiny.gemma_root / "config.json").read_text())
    texts = {"broken-config": {}, "no-weights": {}, "deep": {"num_hidden_layers": 6}}
    texts |= {"odd-heads": {"num_key_value_heads": 3}}
    texts |= {"other-heads": {"num_attention_heads": 4, "num_key_value_heads": 2}}
    for name, changes in texts.items():
        shutil.copytree(tiny.gemma_root, bad / name)
        (bad / name / "config.json").write_text(json.dumps(merge(gemma, {"text_config": changes})))
    (bad / "broken-config/config.json").write_text("{")
    (bad / "no-weights/model.safetensors").unlink()


def _damage(folder: Path, pattern: str, change: Callable[[bytes], bytes] | None) -> None:
    """Change files' bytes, or remove them. Graphs of other code lie in the folder of theirs."""
    for path in [*folder.glob(pattern)]:
        content = path.read_bytes()
        path.unlink()  # the link, not what it shares with the whole artifacts
        if change:
            path.write_bytes(change(content))
        if folder.name == "other-code":
            path.parent.rename(places.folder(folder, json.loads(path.read_bytes())["identity"]))


def _made_for(**fields) -> Callable[[bytes], bytes]:
    def other(content: bytes) -> bytes:
        manifest = json.loads(content)
        return json.dumps(manifest | {"identity": manifest["identity"] | fields}).encode()

    return other


def _flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


RANK, GRAPH = "weights/dit-*/rank0.safetensors", "graphs/dit-*-t1-*/step.pt2"
OF_WEIGHTS, OF_GRAPHS = f"weights/dit-*/{MANIFEST}", f"graphs/*/{MANIFEST}"
DAMAGES = {
    "other-code": (OF_GRAPHS, _made_for(code="0123456789ab")),
    "edited-torch": (OF_GRAPHS, _made_for(torch="1.0.0")),
    "unfinished": (OF_WEIGHTS, None),
    "broken-manifest": (OF_WEIGHTS, lambda _: b"{"),
    "missing-rank": (RANK, None),
    "flipped-rank": (RANK, _flip),
    "truncated-rank": (RANK, lambda content: content[:-1]),
    "missing-graph": (GRAPH, None),
    "flipped-graph": (GRAPH, _flip),
    "other-tensors": (RANK, lambda content: content.replace(b'"proj_out.bias"', b'"xroj_out.bias"')),
}

NAMES = {
    "CHECKPOINT": "hf download Lightricks/LTX-2.3 ltx-2.3-22b-distilled-1.1.safetensors",
    "GEMMA": "hf download google/gemma-3-12b-it-qat-q4_0-unquantized",
    "SPATIAL": "hf download Lightricks/LTX-2.3 ltx-2.3-spatial-upscaler-x2-1.1.safetensors",
    "TEMPORAL": "hf download Lightricks/LTX-2.3 ltx-2.3-temporal-upscaler-x2-1.0.safetensors",
    "PREPARE": " prepare --checkpoint-path ",
    "SHARD": " shard transformer ",
}
SCRIPTS = dict(zip(("SHARD_DIT", "SHARD_GEMMA", "COMPILE_DIT", "COMPILE_GEMMA"), WELL, strict=False))


def table(text: str) -> list:
    """Of every line that is no comment the script, unless it is GENERATE; its flags; and what the message must hold."""
    cases = []
    for line in re.findall(r"^[^#\n].*", text, re.MULTILINE):
        command, words = line.split(" -> ")
        script, _, flags = command.rpartition(": ")
        words = [NAMES.get(word, word) for word in words.split(" | ")]
        cases.append(pytest.param(SCRIPTS.get(script, GENERATE), flags, words, id=ascii(command)[1:-1]))
    return cases


MISTAKES = table("""
# the checkpoint
--checkpoint-path {bad}/not-json.safetensors -> not JSON | CHECKPOINT
--checkpoint-path {bad}/a-list.safetensors -> no 'transformer' section | CHECKPOINT
--checkpoint-path {bad}/3.0.safetensors -> 3.0.0 | runs 2.3 and 2.5 | CHECKPOINT
--checkpoint-path {bad}/rope_type.safetensors -> rope_type | 'interleaved' | 'split'
--checkpoint-path {bad}/use_keyframes_abs_pos_embedding.safetensors -> use_keyframes_abs_pos_embedding
--checkpoint-path {bad}/no-num_layers.safetensors -> num_layers is absent
--checkpoint-path {bad}/num_layers.safetensors -> num_layers is 'two' | whole number
--checkpoint-path {bad}/attention_head_dim.safetensors -> head_dim is 0 | above 0
--checkpoint-path {bad}/positional_embedding_max_pos.safetensors -> checkpoint config
--checkpoint-path {bad}/cross_attention_dim.safetensors -> cross_attention_dim is 48 | 32
--checkpoint-path {bad}/no-dit.safetensors -> no tensors of dit | CHECKPOINT
SHARD_DIT: --checkpoint-path {bad}/no-dit.safetensors -> no tensor | CHECKPOINT
# flags
--tp-degree 3 -> degree 3 | num_attention_heads=4 | one of 1, 2, 4
--recipe dev --video-stg-blocks 28 -> video STG block 28 | blocks 0..1 | --video-stg-blocks
# outputs
--output-path {root}/out/video.avi -> MP4 | video.avi | --output-path FILE.mp4
--output-path '{bad}/a file/video.mp4' -> not a folder you may write to | --output-path
--output-path {bad}/folder.mp4 --output-path {bad}/folder.MP4 -> folder.json is a folder
--save-frames '{bad}/a file' -> not a folder | --save-frames DIR
--save-tensors {bad}/folder -> is a folder | --save-tensors FILE
--perf-dump-path {root}/out/video.json -> the JSON of --output-path | --perf-dump-path
--audio-path {bad}/gone.wav --resume -> --resume needs --audio-path | present path of this file
SHARD_DIT: --artifacts-dir '{bad}/a file' -> --artifacts-dir DIR
COMPILE_DIT: --artifacts-dir '{bad}/a file/x' -> --artifacts-dir DIR
--artifacts-dir '{bad}/a file' -> no dit graphs | Make them:
# the text encoder
--gemma-root {bad}/broken-config -> config.json is not JSON
--gemma-root {bad}/no-weights -> model*.safetensors | GEMMA
--gemma-root {bad}/deep -> num_hidden_layers 6 | take 4 layers | GEMMA
--gemma-root {bad}/other-heads -> q_proj | wanted | GEMMA
SHARD_GEMMA: --gemma-root {bad}/odd-heads --tp-degree 2 -> num_key_value_heads=3 | one of 1
--gemma-root {bad}/odd-heads --tp-degree 2 --neuron-gemma -> num_key_value_heads=3
COMPILE_GEMMA: --gemma-root {bad}/absent -> not a folder | GEMMA
# upsamplers
--two-stage -> --two-stage | --spatial-upsampler-path | SPATIAL
--two-stage --spatial-upsampler-path {bad}/empty-upsampler.safetensors -> LatentUpsampler | none of its | SPATIAL
--upscale temporal -> --upscale temporal | --temporal-upsampler-path | TEMPORAL
# artifacts that do not fit
--artifacts-dir {root}/none -> no dit graphs | Make them: | PREPARE | --tp-degree 1
--neuron-gemma -> no gemma3 weights | Make them: | PREPARE | --gemma-root
--height 96 -> needed: 64x96 (width x height) | compiled: 64x64 | PREPARE | --height 96
--tp-degree 2 -> tp: got 1, wanted 2 | PREPARE | --tp-degree 2
--checkpoint-path '{bad}/an other.safetensors' -> source (the checkpoint's content): got | an other.safetensors'
--artifacts-dir {bad}/other-code -> code (this toolkit's code): got 0123456789ab | PREPARE
--artifacts-dir {bad}/edited-torch -> torch | got 1.0.0 | rm -r | PREPARE
--artifacts-dir {bad}/unfinished -> not finished | Make them again: | PREPARE
SHARD_DIT: --artifacts-dir {bad}/unfinished --verify -> not finished
--artifacts-dir {bad}/broken-manifest -> manifest.json cannot be read | rm -r | PREPARE
--artifacts-dir {bad}/missing-rank -> rank0.safetensors: missing | rm -r | PREPARE
--artifacts-dir {bad}/truncated-rank -> rank0.safetensors: | bytes, wanted | rm -r
--artifacts-dir {bad}/missing-graph -> step.pt2: missing | rm -r | PREPARE
--artifacts-dir {bad}/flipped-graph -> step.pt2: content differs | rm -r | PREPARE
SHARD_DIT: --artifacts-dir {root}/none --verify -> no dit weights | SHARD
SHARD_DIT: --artifacts-dir {bad}/flipped-rank --verify -> rank0.safetensors: content differs from its blake3 | rm -r
# a rank that refuses its file writes to the same terminal
--artifacts-dir {bad}/other-tensors --no-prompt-cache -> missing: proj_out.bias | unexpected: xroj_out.bias | Delete
""")


@pytest.mark.parametrize("script, flags, words", MISTAKES)
def test_a_command_is_refused_with_what_to_type(world, monkeypatch, capfd, script, flags, words):
    monkeypatch.chdir(world.root / "out")  # also what is written beside no path of a flag is seen
    code, printed = run(script, world.words(script, flags)), capfd.readouterr().err
    assert code == 2, printed
    assert printed.count("error: ") == 1 and "Traceback" not in printed, printed
    assert not [word for word in words if word not in printed], printed


def test_the_command_for_damaged_weights_works_when_pasted(world, tmp_path, capsys):
    shutil.copytree(world.bad / "missing-rank", tmp_path / "its artifacts")
    words = world.words(SHARD_DIT, f"--artifacts-dir '{tmp_path}/its artifacts' --verify")
    assert run(SHARD_DIT, words) == 2
    command = re.search(r"Make it again: (.*)", capsys.readouterr().err)[1]
    remove, make = command.split(" && ")
    subprocess.run(remove, shell=True, check=True, timeout=100)
    assert run(SHARD_DIT, shlex.split(make.partition(" shard transformer ")[2])) == 0
    assert run(SHARD_DIT, words) == 0
