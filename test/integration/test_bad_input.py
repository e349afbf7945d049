"""What users type wrong: every mistake ends in a message that says what to do, exit code 2, and
nothing written.

The scripts run in this process, because a new one spends its two seconds on imports. The mistakes
are data: flags that are added to those of a run in which all is well, and words that the message
must hold.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers import made_film, picture_frames, tone, write_film, write_sound
from typed import run

from ltx_neuron import artifacts as places
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST
from ltx_neuron.tiny.config import merge
from ltx_neuron.tiny.weights import save
from ltx_neuron.weights.rankfiles import load_rank_file
from ltx_neuron.weights.tensorfile import TensorFile

ROOT = Path(__file__).resolve().parents[2]
SHARD_DIT, SHARD_GEMMA = "shards/shard_backbone_weights.py", "shards/shard_gemma3_weights.py"
COMPILE_DIT, COMPILE_GEMMA = "compile/compile_transformer.py", "compile/compile_gemma3.py"
GENERATE = "src/generate_ltx23.py"
CHECKPOINT_DOWNLOAD = "hf download Lightricks/LTX-2.3 ltx-2.3-22b-distilled.safetensors"
GEMMA_DOWNLOAD = "hf download google/gemma-3-12b-it-qat-q4_0-unquantized"
SPATIAL_DOWNLOAD = "hf download Lightricks/LTX-2.3 ltx-2.3-spatial-upscaler-x2-1.0.safetensors"
TEMPORAL_DOWNLOAD = "hf download Lightricks/LTX-2.3 ltx-2.3-temporal-upscaler-x2-1.0.safetensors"
SIZE = "--height 64 --width 64 --num-frames 9 --frame-rate 24 --blocks-per-graph 0"


class World(NamedTuple):
    """One folder with good files, broken ones, finished artifacts and damaged copies of them."""

    root: Path
    assets: object  # TinyAssets

    def words(self, script: str, flags: str = "", size: str = SIZE) -> list[str]:
        """The flags of a run in which all is well, then `flags`; {names} stand for paths."""
        common = (
            "--checkpoint-path {ckpt} --artifacts-dir {root}/artifacts --tp-degree 1 --dtype"
            " float32"
        )
        own = {
            COMPILE_DIT: size,
            SHARD_GEMMA: "--gemma-root {gemma}",
            COMPILE_GEMMA: "--gemma-root {gemma}",
            GENERATE: (
                "--gemma-root {gemma} --prompt rain --output-path {root}/out/video.mp4 " + size
            ),
        }
        paths = {
            "ckpt": self.assets.checkpoint,
            "gemma": self.assets.gemma_root,
            "image": self.assets.image,
            "lora": self.assets.lora,
            "spatial": self.assets.spatial_upsampler,
            "temporal": self.assets.temporal_upsampler,
            "root": self.root,
            "bad": self.root / "bad",
            "artifacts": self.root / "artifacts",
        }
        return [
            word.format(**paths) for word in shlex.split(f"{common} {own.get(script, '')} {flags}")
        ]

    def listing(self) -> list:
        """Every path with its time and size: equal before and after when nothing was written."""
        found = [(path, path.lstat()) for path in self.root.rglob("*")]
        return sorted((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """Finished artifacts are made as a newcomer makes them: by pasting what the error says."""
    made = World(tmp_path_factory.mktemp("world"), tiny)
    (made.root / "out").mkdir()
    _break_files(made)
    return made


@pytest.fixture(scope="module")
def finished(world):
    """The world with weights and graphs for SIZE, and with damaged copies of them."""
    from io import StringIO

    for script in (COMPILE_DIT, SHARD_DIT):
        with mock.patch.object(sys, "stderr", StringIO()) as said:
            assert run(GENERATE, world.words(GENERATE)) == 2
        pasted = shlex.split(re.search(r"Make them: (.*)", said.getvalue())[1])
        assert pasted[1].endswith(script), said.getvalue()
        assert run(script, pasted[2:]) == 0
    _damage_artifacts(world)
    return world


def _break_files(world: World) -> None:
    """bad/: checkpoints, Gemma roots, upsamplers and images, each wrong in one way."""
    bad, tiny = world.root / "bad", world.assets
    bad.mkdir()
    (bad / "folder").mkdir()
    (bad / "folder.mp4").mkdir()
    (bad / "folder.json").mkdir()
    (bad / "empty.safetensors").write_bytes(b"")
    (bad / "text.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    (bad / "text.png").write_text("no image")
    (bad / "a file").write_text("")
    for name, count, height in (("film", 30, 64), ("odd", 26, 48), ("nine", 9, 64)):
        made_film(bad / f"{name}.mp4", count, height, 64)
    film = (bad / "film.mp4").read_bytes()
    (bad / "half.mp4").write_bytes(film[: len(film) // 2])
    write_film(bad / "mute.mkv", picture_frames(9, 64, 64, 3))
    stored = (tone(48000, 0.5) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(bad / "sound.wav", stored, 48000, "pcm_s16le", "stereo", "s16")
    shutil.copy(tiny.image, bad / "image.json")
    (bad / "frames").mkdir()
    shutil.copy(tiny.image, bad / "frames/frame_00020.png")
    (bad / "notes.json").write_text('{"profile": "cpu"}')
    (bad / "circle").symlink_to(bad / "circle")
    os.mkfifo(bad / "pipe")
    whole = tiny.checkpoint.read_bytes()
    (bad / "truncated.safetensors").write_bytes(whole[:-1000])
    (bad / "truncated-upsampler.safetensors").write_bytes(
        tiny.spatial_upsampler.read_bytes()[:-1000]
    )
    data = 8 + int.from_bytes(whole[:8], "little")
    (bad / "other content.safetensors").write_bytes(
        whole[:data] + whole[data : data + 4096][::-1] + whole[data + 4096 :]
    )

    metadata = TensorFile(tiny.checkpoint, "").metadata
    config = json.loads(metadata["config"])

    def header_only(
        name: str, config: object, version: str | None = "2.3.0", tensors: dict | None = None
    ) -> None:
        said = (
            {}
            if config is None
            else {"config": config if isinstance(config, str) else json.dumps(config)}
        )
        said |= {"model_version": version} if version else {}
        save(bad / f"{name}.safetensors", tensors or {"vae.tensor": torch.zeros(1)}, said or None)

    older = dict(config["transformer"])
    for key in ("cross_attention_adaln", "apply_gated_attention", "caption_proj_before_connector"):
        del older[key]
    header_only("no-metadata", None, None)
    header_only("2.0", {**config, "transformer": older}, None)
    header_only(
        "2.5", merge(config, {"transformer": {"use_keyframes_abs_pos_embedding": True}}), "2.5.0"
    )
    header_only("not-json", "{'transformer': {}}")
    header_only("a-list", "[1, 2]")
    header_only(
        "float8",
        config,
        tensors={"model.diffusion_model.x": torch.zeros(2).to(torch.float8_e4m3fn)},
    )
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
    no_layers = {
        name: value for name, value in config["transformer"].items() if name != "num_layers"
    }
    header_only("no-num_layers", {**config, "transformer": no_layers})
    upsampler = json.loads(TensorFile(tiny.spatial_upsampler, "").metadata["config"])
    header_only("empty-upsampler", upsampler, None, {"other": torch.zeros(1)})
    header_only("not-json-upsampler", "{", None)

    gemma = json.loads((tiny.gemma_root / "config.json").read_text())

    def root(name: str, without: str | None = None, **changes) -> Path:
        made = shutil.copytree(tiny.gemma_root, bad / name)
        if without:
            (made / without).unlink()
        (made / "config.json").exists() and (made / "config.json").write_text(
            json.dumps(merge(gemma, changes))
        )
        return made

    root("no-tokenizer", "tokenizer.json")
    (root("broken-tokenizer") / "tokenizer.json").write_text("{")
    root("no-config", "config.json")
    (root("broken-config") / "config.json").write_text("{")
    root("no-weights", "model.safetensors")
    part = root("one-of-five")
    (part / "model.safetensors").rename(part / "model-00001-of-00005.safetensors")
    root("wide", text_config={"hidden_size": 64})
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
                manifest.parent.rename(
                    places.folder(world.root / "bad" / name, content["identity"])
                )

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
            if len(e["shape"]) == d
            and e["shape"][0] != e["shape"][-1]
            or d == 1
            and len(e["shape"]) == 1
        )
        for d in (2, 1)
    )
    header[long]["shape"].reverse()
    header[flat]["dtype"] = "I32"
    renamed = next(name for name in names if name not in (long, flat))
    header["x" + renamed[1:]] = header.pop(renamed)
    text = json.dumps(header, separators=(",", ":")).encode()
    return content[:8] + text.ljust(end - 8) + content[end:]


def case(name: str, flags: str, *words: str, script: str = GENERATE):
    return pytest.param(script, flags, words, id=name)


CHECKPOINTS = [
    case(
        "missing", "--checkpoint-path {bad}/absent.safetensors", "no such file", CHECKPOINT_DOWNLOAD
    ),
    case(
        "folder",
        "--checkpoint-path {bad}/folder",
        "is a folder",
        "one .safetensors file",
        CHECKPOINT_DOWNLOAD,
    ),
    case("device", "--checkpoint-path /dev/zero", "/dev/zero: that is a device", "regular file"),
    case(
        "links in a circle",
        "--checkpoint-path {bad}/circle",
        "circle: its links lead in a circle",
        script=COMPILE_DIT,
    ),
    case("empty", "--checkpoint-path {bad}/empty.safetensors", "empty", CHECKPOINT_DOWNLOAD),
    case(
        "not safetensors",
        "--checkpoint-path {bad}/text.safetensors",
        "not a whole safetensors",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "truncated",
        "--checkpoint-path {bad}/truncated.safetensors",
        "truncated",
        "bytes",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "no metadata",
        "--checkpoint-path {bad}/no-metadata.safetensors",
        "no 'config' metadata",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "config is no JSON",
        "--checkpoint-path {bad}/not-json.safetensors",
        "not JSON",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "config is a list",
        "--checkpoint-path {bad}/a-list.safetensors",
        "no 'transformer' section",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "an upsampler",
        "--checkpoint-path {spatial}",
        "no 'transformer' section",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "LTX-2.0", "--checkpoint-path {bad}/2.0.safetensors", "2.0", "runs 2.3", CHECKPOINT_DOWNLOAD
    ),
    case(
        "LTX-2.5",
        "--checkpoint-path {bad}/2.5.safetensors",
        "2.5.0",
        "runs 2.3",
        CHECKPOINT_DOWNLOAD,
    ),
    case(
        "RoPE",
        "--checkpoint-path {bad}/rope_type.safetensors",
        "rope_type",
        "'interleaved'",
        "'split'",
    ),
    case(
        "keyframes",
        "--checkpoint-path {bad}/use_keyframes_abs_pos_embedding.safetensors",
        "use_keyframes_abs_pos_embedding",
    ),
    case("no layers", "--checkpoint-path {bad}/no-num_layers.safetensors", "num_layers is absent"),
    case(
        "layers in letters",
        "--checkpoint-path {bad}/num_layers.safetensors",
        "num_layers is 'two'",
        "whole number",
    ),
    case(
        "heads of nothing",
        "--checkpoint-path {bad}/attention_head_dim.safetensors",
        "head_dim is 0",
        "above 0",
    ),
    case(
        "a number for a list",
        "--checkpoint-path {bad}/positional_embedding_max_pos.safetensors",
        "checkpoint config",
    ),
    case(
        "widths",
        "--checkpoint-path {bad}/cross_attention_dim.safetensors",
        "cross_attention_dim is 48",
        "32",
    ),
    case(
        "float8",
        "--checkpoint-path {bad}/float8.safetensors",
        "F8_E4M3",
        "BF16",
        CHECKPOINT_DOWNLOAD,
        script=SHARD_DIT,
    ),
    case(
        "no transformer weights",
        "--checkpoint-path {bad}/no-vae.safetensors",
        "no tensor",
        CHECKPOINT_DOWNLOAD,
        script=SHARD_DIT,
    ),
    case(
        "sharder without file",
        "--checkpoint-path absent.safetensors",
        "no such file",
        CHECKPOINT_DOWNLOAD,
        script=SHARD_DIT,
    ),
    case(
        "compiler without file",
        "--checkpoint-path absent.safetensors",
        "no such file",
        CHECKPOINT_DOWNLOAD,
        script=COMPILE_DIT,
    ),
]
GEMMA = [
    case("missing", "--gemma-root {bad}/absent", "absent", "not a folder", GEMMA_DOWNLOAD),
    case("a file", "--gemma-root {ckpt}", "not a folder", GEMMA_DOWNLOAD),
    case("no config", "--gemma-root {bad}/no-config", "config.json", GEMMA_DOWNLOAD),
    case("broken config", "--gemma-root {bad}/broken-config", "config.json is not JSON"),
    case("another model", "--gemma-root {bad}/llama", "'llama'", "'gemma3'"),
    case("no weights", "--gemma-root {bad}/no-weights", "model*.safetensors", GEMMA_DOWNLOAD),
    case("unfinished download", "--gemma-root {bad}/one-of-five", "1 of 5", GEMMA_DOWNLOAD),
    case("no tokenizer", "--gemma-root {bad}/no-tokenizer", "tokenizer.json", GEMMA_DOWNLOAD),
    case(
        "broken tokenizer", "--gemma-root {bad}/broken-tokenizer", "tokenizer.json", GEMMA_DOWNLOAD
    ),
    case("another width", "--gemma-root {bad}/wide", "hidden_size 64", "take 32", GEMMA_DOWNLOAD),
    case(
        "another depth",
        "--gemma-root {bad}/deep",
        "num_hidden_layers 6",
        "take 4 layers",
        GEMMA_DOWNLOAD,
    ),
    case(
        "another depth, sharded",
        "--gemma-root {bad}/deep",
        "num_hidden_layers 6",
        GEMMA_DOWNLOAD,
        script=SHARD_GEMMA,
    ),
    case(
        "weights of other sizes",
        "--gemma-root {bad}/other-heads",
        "q_proj",
        "wanted",
        GEMMA_DOWNLOAD,
    ),
    case(
        "KV heads",
        "--gemma-root {bad}/odd-heads --tp-degree 2",
        "num_key_value_heads=3",
        "one of 1",
        script=SHARD_GEMMA,
    ),
    case(
        "KV heads, compiled",
        "--gemma-root {bad}/odd-heads --tp-degree 2",
        "num_key_value_heads=3",
        script=COMPILE_GEMMA,
    ),
    case(
        "KV heads, generated",
        "--gemma-root {bad}/odd-heads --tp-degree 2 --neuron-gemma",
        "num_key_value_heads=3",
    ),
    case(
        "sharder",
        "--gemma-root {bad}/no-weights",
        "model*.safetensors",
        GEMMA_DOWNLOAD,
        script=SHARD_GEMMA,
    ),
    case(
        "compiler",
        "--gemma-root {bad}/absent",
        "not a folder",
        GEMMA_DOWNLOAD,
        script=COMPILE_GEMMA,
    ),
]
FLAGS = [
    case("height", "--height 100", "--height 100", "multiple of 32", "96 or 128"),
    case("width", "--width 31", "--width 31", "multiple of 32", "nearest legal: 32"),
    case("no height", "--height 0", "--height: got '0', wanted at least 1"),
    case("negative width", "--width -64", "--width: got '-64', wanted at least 1"),
    case(
        "two stages",
        "--two-stage --height 96 --spatial-upsampler-path {spatial}",
        "multiple of 64",
        "64 or 128",
    ),
    case("letters", "--height tall", "--height", "'tall'"),
    case("frames", "--num-frames 24", "8k+1", "17 or 25"),
    case("no frames", "--num-frames 0", "--num-frames: got '0'", "at least 1"),
    case("no rate", "--frame-rate 0", "--frame-rate: got '0'", "at least 1"),
    case("negative rate", "--fps -24", "--frame-rate: got '-24'", "at least 1"),
    case("nan rate", "--frame-rate nan", "--frame-rate: got 'nan'", "finite"),
    case("inf rate", "--frame-rate inf", "--frame-rate: got 'inf'", "finite"),
    case("denormal rate", "--frame-rate 1e-320", "--frame-rate: got '1e-320'"),
    case(
        "no time for sound",
        "--num-frames 1 --frame-rate 60",
        "1 frames at --frame-rate 60",
        "raise --num-frames",
    ),
    case("prompt", "--prompt ''", "--prompt is empty"),
    case("blank prompt", "--prompt '  '", "--prompt is empty"),
    case("prompt of another encoding", "--prompt 'caf\udce9'", "--prompt is not UTF-8"),
    case(
        "seed",
        "--seed 99999999999999999999",
        "--seed: got '99999999999999999999'",
        "less than 18446744073709551616",
    ),
    case("graphs of blocks", "--blocks-per-graph -1", "--blocks-per-graph -1 is negative"),
    case("heads", "--tp-degree 3", "degree 3", "num_attention_heads=4", "one of 1, 2, 4"),
    case("no ranks", "--tp-degree 0", "degree 0", "one of 1, 2, 4"),
    case("negative ranks", "--tp-degree -2", "degree -2", "one of 1, 2, 4"),
    case("heads, sharded", "--tp-degree 3", "degree 3", "one of 1, 2, 4", script=SHARD_DIT),
    case("heads, compiled", "--tp-degree 8", "degree 8", "one of 1, 2, 4", script=COMPILE_DIT),
    case("size, compiled", "--height 100", "multiple of 32", "96 or 128", script=COMPILE_DIT),
    case("profile", "--profile gpu", "'gpu'", "known: cpu"),
    case("dtype", "--dtype float16", "--dtype", "float16", "bfloat16"),
    case("host dtype", "--host-dtype float16", "--host-dtype", "float16", "auto", "bfloat16"),
    case("recipe", "--recipe turbo", "turbo", "distilled"),
    case("compat", "--compat 2.0", "--compat", "ltx-core-1.0.0"),
    case("unknown", "--heigth 64", "--heigth", "did you mean --height?", "--help"),
    case("unknown and far", "--qqq", "--qqq", "--help"),
    case("stray word", "rain", "rain", "--help"),
    case("abbreviation", "--prom rain", "--prom", "did you mean --prompt?"),
    case(
        "abbreviation, sharded",
        "--checkpoint x",
        "--checkpoint",
        "did you mean --checkpoint-path?",
        script=SHARD_DIT,
    ),
    case("another script's flag", "--height 64", "--height", script=SHARD_DIT),
    case(
        "steps", "--num-inference-steps 20", "--num-inference-steps 20", "8 steps", "--recipe dev"
    ),
    case("no steps", "--num-steps 0", "--num-inference-steps: got '0'", "at least 1"),
    case("too many steps", "--recipe dev --num-steps 65", "--num-inference-steps: got '65'", "64"),
    case(
        "negative prompt",
        "--negative-prompt blurry",
        "--negative-prompt",
        "without guidance",
        "--recipe dev",
    ),
    *[
        case(
            f"{flag} {value}", f"--{flag} {value}", f"--{flag}", "without guidance", "--recipe dev"
        )
        for flag, value in [
            (f"{stream}-{name}", value)
            for stream in ("video", "audio")
            for name, value in (
                ("cfg-guidance-scale", 3),
                ("stg-guidance-scale", 1),
                ("stg-blocks", 1),
                ("stg-blocks", ""),
                ("rescale-scale", 0.7),
                ("skip-step", 1),
            )
        ]
        + [("a2v-guidance-scale", 3), ("v2a-guidance-scale", 3)]
    ],
    case(
        "blocks",
        "--recipe dev --video-stg-blocks 28",
        "video STG block 28",
        "blocks 0..1",
        "--video-stg-blocks",
    ),
]
IMAGES = [
    case("missing", "--image {bad}/absent.png", "absent.png", "no such file", "--image FILE"),
    case("folder", "--image {bad}/folder", "folder", "--image FILE"),
    case("named pipe", "--image {bad}/pipe", "pipe: that is a named pipe", "--image FILE"),
    case("long path", f"--image {'x' * 5000}", "(5000 characters)", "longer than the system"),
    case("no image", "--image {bad}/text.png", "cannot be read as an image", "--image FILE"),
    case("strength above", "--image {image} 0 1.5", "strength '1.5'", "at most 1"),
    case("strength below", "--image {image} 0 -0.5", "strength '-0.5'", "at least 0"),
    case("strength nan", "--image {image} 0 nan", "strength 'nan'", "--image PATH ["),
    case("frame", "--image {image} 9", "frame 9", "0..8"),
    case("negative frame", "--image {image} -1", "frame index '-1'", "at least 0"),
    case("crf", "--image {image} 0 1 52", "crf '52'", "at most 51"),
    case(
        "values",
        "--image {image} 0 1 33 4",
        ": got '4'",
        "type --image PATH [FRAME_IDX [STRENGTH [CRF]]]",
    ),
    case("two files", "--image {image} {image}", "type --image PATH [FRAME_IDX [STRENGTH [CRF]]]"),
    case(
        "letters",
        "--image {image} 0 strong",
        "strength 'strong', wanted a valid number",
        "type --image PATH",
    ),
    case("no file", "--image", "--image", "expected at least one argument"),
    case("frame, compiled", "--image {image} 9", "frame 9", "0..8", script=COMPILE_DIT),
]
UPSAMPLERS = [
    case("none", "--two-stage", "--two-stage", "--spatial-upsampler-path", SPATIAL_DOWNLOAD),
    case(
        "missing", "--two-stage --spatial-upsampler-path {bad}/absent", "absent", SPATIAL_DOWNLOAD
    ),
    case("folder", "--two-stage --spatial-upsampler-path {bad}/folder", "folder", SPATIAL_DOWNLOAD),
    case(
        "temporal",
        "--two-stage --spatial-upsampler-path {temporal}",
        "got a temporal one",
        SPATIAL_DOWNLOAD,
    ),
    case(
        "a checkpoint",
        "--two-stage --spatial-upsampler-path {ckpt}",
        "describes none",
        SPATIAL_DOWNLOAD,
    ),
    case(
        "truncated",
        "--two-stage --spatial-upsampler-path {bad}/truncated-upsampler.safetensors",
        SPATIAL_DOWNLOAD,
    ),
    case(
        "no JSON",
        "--two-stage --spatial-upsampler-path {bad}/not-json-upsampler.safetensors",
        "JSON",
        SPATIAL_DOWNLOAD,
    ),
    case(
        "no weights",
        "--two-stage --spatial-upsampler-path {bad}/empty-upsampler.safetensors",
        "LatentUpsampler",
        "none of its",
        SPATIAL_DOWNLOAD,
    ),
    case(
        "upscale without",
        "--upscale temporal",
        "--upscale temporal",
        "--temporal-upsampler-path",
        TEMPORAL_DOWNLOAD,
    ),
    case(
        "upscale twice",
        "--upscale spatial --two-stage --spatial-upsampler-path {spatial}",
        "--upscale",
        "--two-stage",
    ),
    case(
        "no VAE", "--checkpoint-path {bad}/no-vae.safetensors", "VideoDecoder", CHECKPOINT_DOWNLOAD
    ),
]
OUTPUTS = [
    case(
        "not MP4",
        "--output-path {root}/out/video.avi",
        "MP4",
        "video.avi",
        "--output-path FILE.mp4",
    ),
    case("no suffix", "--output-path {root}/out/video", "MP4", "--output-path FILE.mp4"),
    case("folder", "--output-path {bad}/folder.mp4", "is a folder", "--output-path FILE.mp4"),
    case(
        "under a file",
        "--output-path '{bad}/a file/video.mp4'",
        "not a folder you may write to",
        "--output-path",
    ),
    case("long name", f"--output-path {{root}}/{'rain' * 60}.mp4", "this long", "--output-path"),
    case(
        "JSON is a folder",
        "--output-path {bad}/folder.mp4 --output-path {bad}/folder.MP4",
        "folder.json is a folder",
    ),
    case("frames into a file", "--save-frames '{bad}/a file'", "not a folder", "--save-frames DIR"),
    case(
        "tensors into a folder", "--save-tensors {bad}/folder", "is a folder", "--save-tensors FILE"
    ),
    case(
        "report into a folder",
        "--perf-dump-path {bad}/folder",
        "is a folder",
        "--perf-dump-path FILE",
    ),
    case(
        "report over the JSON",
        "--perf-dump-path {root}/out/video.json",
        "the JSON of --output-path",
        "--perf-dump-path",
    ),
    case(
        "tensors over the checkpoint",
        "--save-tensors {ckpt}",
        "--checkpoint-path",
        "--save-tensors",
        "same file",
    ),
    case(
        "JSON over an image",
        "--image {bad}/image.json --output-path {bad}/image.mp4",
        "image.json and the JSON of --output-path are the same file",
        "pass another --output-path",
    ),
    case(
        "frames over an image",
        "--image {bad}/frames/frame_00020.png --save-frames {bad}/frames",
        "frame_00020.png and frame_00020.png of --save-frames are the same file",
        "pass another --save-frames",
    ),
    case(
        "frames over other pictures",
        "--save-frames {bad}/frames",
        "frame_00020.png exists and is not a frame that this toolkit wrote",
        "an empty folder with --save-frames DIR",
    ),
    case(
        "tensors over a rank file",
        "--save-tensors {artifacts}/dit/rank_00.safetensors",
        "rank_00.safetensors lies in the folder of --artifacts-dir",
        "pass another --save-tensors",
    ),
    case(
        "tensors over Gemma's tokenizer",
        "--save-tensors {gemma}/tokenizer.json",
        "lies in the folder of --gemma-root",
        "pass another --save-tensors",
    ),
    case(
        "report over a LoRA",
        "--lora {lora} --perf-dump-path {lora}",
        "--perf-dump-path are the same file",
        "pass another --perf-dump-path",
    ),
    case(
        "tensors over what is resumed from",
        "--resume {bad}/text.safetensors --save-tensors {bad}/text.safetensors",
        "--resume and --save-tensors are the same file",
    ),
    case(
        "JSON over another file",
        "--output-path {bad}/notes.mp4",
        "notes.json exists and is not a file of this toolkit",
        "move it or choose another --output-path",
    ),
    case(
        "artifacts in a file, sharded",
        "--artifacts-dir '{bad}/a file'",
        "--artifacts-dir DIR",
        script=SHARD_DIT,
    ),
    case(
        "artifacts in a file, compiled",
        "--artifacts-dir '{bad}/a file/x'",
        "--artifacts-dir DIR",
        script=COMPILE_DIT,
    ),
    case("artifacts in a file", "--artifacts-dir '{bad}/a file'", "no dit graphs", "Make them: "),
]
ARTIFACTS = [
    case(
        "none",
        "--artifacts-dir {root}/none",
        "no dit graphs",
        "Make them: ",
        COMPILE_DIT,
        "--height 64",
        "--tp-degree 1",
    ),
    case(
        "no Gemma",
        "--neuron-gemma",
        "no gemma3 weights",
        "Make them: ",
        SHARD_GEMMA,
        "--gemma-root",
    ),
    case(
        "other size",
        "--height 96",
        "bucket",
        "got v8-a9-t1-s8, wanted v12-a9-t1-s8",
        COMPILE_DIT,
        "--height 96",
    ),
    case("other degree", "--tp-degree 2", "tp: got 1, wanted 2", COMPILE_DIT, "--tp-degree 2"),
    case(
        "other dtype",
        "--dtype bfloat16",
        "dtype: got float32, wanted bfloat16",
        COMPILE_DIT,
        "--dtype bfloat16",
    ),
    case(
        "other cut",
        "--blocks-per-graph 1",
        "blocks_per_graph: got 0, wanted 1",
        COMPILE_DIT,
        "--blocks-per-graph 1",
    ),
    case(
        "other checkpoint",
        "--checkpoint-path '{bad}/other content.safetensors'",
        "source (the checkpoint's content): got",
        SHARD_DIT,
        "other content.safetensors'",
    ),
    case(
        "other code",
        "--artifacts-dir {bad}/other-code",
        "code (this toolkit's code): got 0123456789ab",
        COMPILE_DIT,
    ),
    case(
        "other torch",
        "--artifacts-dir {bad}/other-torch",
        "torch (the version of PyTorch): got 1.0.0",
        COMPILE_DIT,
    ),
    case(
        "other config",
        "--artifacts-dir {bad}/other-config",
        "config (the model's sizes): got",
        COMPILE_DIT,
    ),
    case(
        "edited", "--artifacts-dir {bad}/edited-torch", "torch", "got 1.0.0", "rm -r", COMPILE_DIT
    ),
    case(
        "other source",
        "--artifacts-dir {bad}/other-source",
        "source",
        "got 0123456789ab",
        SHARD_DIT,
    ),
    case("other layout", "--artifacts-dir {bad}/other-layout", "layout: got 0, wanted", SHARD_DIT),
    case(
        "killed sharder",
        "--artifacts-dir {bad}/unfinished",
        "never finished",
        "Make them again: ",
        SHARD_DIT,
    ),
    case(
        "killed sharder, verified",
        "--artifacts-dir {bad}/unfinished --verify",
        "never finished",
        script=SHARD_DIT,
    ),
    case(
        "broken manifest",
        "--artifacts-dir {bad}/broken-manifest",
        "manifest.json cannot be read",
        "rm -r",
        SHARD_DIT,
    ),
    case(
        "missing rank file",
        "--artifacts-dir {bad}/missing-rank",
        "rank0.safetensors: missing",
        "rm -r",
        SHARD_DIT,
    ),
    case(
        "truncated rank file",
        "--artifacts-dir {bad}/truncated-rank",
        "rank0.safetensors:",
        "bytes, wanted",
        "rm -r",
    ),
    case(
        "missing graph",
        "--artifacts-dir {bad}/missing-graph",
        "step.pt2: missing",
        "rm -r",
        COMPILE_DIT,
    ),
    case(
        "flipped graph",
        "--artifacts-dir {bad}/flipped-graph",
        "step.pt2: content differs",
        "rm -r",
        COMPILE_DIT,
    ),
    case(
        "verify nothing",
        "--artifacts-dir {root}/none --verify",
        "no dit weights",
        SHARD_DIT,
        script=SHARD_DIT,
    ),
    case(
        "verify flipped",
        "--artifacts-dir {bad}/flipped-rank --verify",
        "rank0.safetensors: content differs from its blake3",
        "rm -r",
        script=SHARD_DIT,
    ),
    case(
        "verify truncated",
        "--artifacts-dir {bad}/truncated-rank --verify",
        "bytes, wanted",
        "rm -r",
        script=SHARD_DIT,
    ),
    case(
        "verify missing",
        "--artifacts-dir {bad}/missing-rank --verify",
        "rank0.safetensors: missing",
        script=SHARD_DIT,
    ),
]
VIDEO, CUT = "--video-path {bad}/film.mp4", "--start-time 0 --end-time 0.2"
# Sound and videos, whose size is the file's.
MEDIA = [
    case("extend nothing", "--extend 1", "--extend goes with --video-path FILE"),
    case(
        "extend in words", f"{VIDEO} --extend much", "--extend: got 'much', wanted a valid number"
    ),
    case("extend by 0", f"{VIDEO} --extend 0", "seconds of a frame or more", script=COMPILE_DIT),
    case("extend by no frame", f"{VIDEO} --extend 0.01", "seconds of a frame or more"),
    case("extend by years", f"{VIDEO} --extend 1e9", "at most 3600"),
    case("extend a part", f"{VIDEO} --extend 1 --end-time 3", "leave out --end-time"),
    case(
        "windows of no frames",
        f"{VIDEO} --extend 1 --num-frames 0",
        "--num-frames: got '0', wanted at least 1",
    ),
    case(
        "windows too long",
        f"{VIDEO} --extend 1 --num-frames 121",
        "25 to 49 frames here",
        "Type --num-frames 49",
        script=COMPILE_DIT,
    ),
    *(
        case(
            f"extend with {flag.split()[0]}",
            f"{VIDEO} --extend 1 {flag}",
            f"--video-path does not go with {flag.split(' {')[0]}",
            "leave one of them out",
        )
        for flag in (
            "--skip-stage-2",
            "--sampler res_2s",
            "--images-as-guides",
            "--ic-lora {lora}",
            "--image {image}",
            "--conditioning-attention-mask {bad}/film.mp4 1",
            "--audio-path {bad}/sound.wav",
        )
    ),
    case("extend with a rate", f"{VIDEO} --extend 1 --fps 24", "leave out --frame-rate"),
    case(
        "extend a picture",
        "--video-path {image} --extend 1",
        "a video of 9 frames or more, and --video-path has 1",
        "pass a longer one",
    ),
    case(
        "extend odd sides",
        "--video-path {bad}/odd.mp4 --extend 1",
        "has 26 frames of 48x64; wanted sides that are multiples of 32.",
        "Type: ffmpeg",
        "-frames:v 26",
    ),
    case("extend text", "--video-path {bad}/text.png --extend 1", "pass another file with"),
    case("extend a sound", "--video-path {bad}/sound.wav --extend 1", "has no video"),
    case("extend half a file", "--video-path {bad}/half.mp4 --extend 1", "the file is cut off"),
    case(
        "resume without the video",
        "--video-path {bad}/gone.mp4 --extend 1 --resume",
        "--resume needs --video-path",
        "where that file lies now",
    ),
    case(
        "resume without the sound",
        f"{SIZE} --audio-path {{bad}}/gone.wav --resume",
        "--resume needs --audio-path",
    ),
    case("retake no seconds", "--video-path {bad}/nine.mp4", "--video-path needs --start-time"),
    case("retake no end", "--video-path {bad}/nine.mp4 --start-time 0", "needs --end-time"),
    case("retake too far", "--video-path {bad}/nine.mp4 --start-time 0 --end-time 9", "at most"),
    case(
        "retake taste",
        f"--video-path {{bad}}/nine.mp4 {CUT} --regenerate smell",
        "choose from 'both', 'video', 'audio'",
    ),
    case(
        "a sound too short",
        f"{SIZE} --num-frames 25 --audio-path {{bad}}/sound.wav",
        "type --num-frames 9",
    ),
    case("a video as sound", f"{SIZE} --audio-path {{bad}}/mute.mkv", "has no sound"),
    case(
        "no sound there", f"{SIZE} --audio-path {{bad}}/sound.wav --audio-start-time 5", "smaller"
    ),
    case(
        "guided sound",
        f"{SIZE} --recipe dev --audio-path {{bad}}/sound.wav --audio-skip-step 1",
        "is given",
    ),
]
WITHOUT_ARTIFACTS = [*CHECKPOINTS, *FLAGS, *IMAGES, *OUTPUTS, *GEMMA, *UPSAMPLERS]


@pytest.fixture
def check(world, capsys, monkeypatch):
    """Run a case and check exit code, message and that nothing was written."""
    monkeypatch.chdir(world.root / "out")

    def check(script: str, flags: str, words: tuple[str, ...], size: str = SIZE) -> None:
        before = world.listing()
        code = run(script, world.words(script, flags, size))
        said = capsys.readouterr().err
        _judge(code, said, words)
        assert world.listing() == before

    return check


def _judge(code: int, said: str, words: tuple[str, ...]) -> None:
    assert code == 2, said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert not [word for word in words if word not in said], said


@pytest.mark.parametrize("script, flags, words", CHECKPOINTS)
def test_a_wrong_checkpoint(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", FLAGS)
def test_a_wrong_flag(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", IMAGES)
def test_a_wrong_image(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", MEDIA)
def test_a_wrong_sound_or_video(check, script, flags, words):
    check(script, flags, words, size="")


@pytest.mark.parametrize("script, flags, words", OUTPUTS)
def test_an_output_that_cannot_be_written(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", UPSAMPLERS)
def test_a_wrong_upsampler(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", GEMMA)
def test_a_wrong_text_encoder(check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize("script, flags, words", ARTIFACTS)
def test_artifacts_that_do_not_fit(finished, check, script, flags, words):
    check(script, flags, words)


@pytest.mark.parametrize(
    "without, words",
    [
        ("--checkpoint-path", ("--checkpoint-path", "required", "--help")),
        ("--gemma-root", ("--gemma-root", "required", "--help")),
        ("--prompt", ("--prompt is empty", "type for example")),
        ("--output-path", ("--output-path", "out.mp4")),
    ],
)
def test_a_missing_flag(world, capsys, without, words):
    said = world.words(GENERATE)
    at = said.index(without)
    code = run(GENERATE, said[:at] + said[at + 2 :])
    _judge(code, capsys.readouterr().err, words)


def test_a_rank_file_of_other_tensors_is_one_error_that_lists_them_all(tmp_path):
    tensors = {name: torch.zeros(2, 3) for name in ("kept", "misshapen", "extra")}
    save(tmp_path / "rank0.safetensors", tensors | {"recast": torch.zeros(4).bfloat16()})
    wanted = {"kept": (2, 3), "misshapen": (3, 2), "missing": (5,), "recast": (4,)}
    with pytest.raises(UserError) as error:
        load_rank_file(tmp_path / "rank0.safetensors", wanted, torch.float32)
    for line in (
        "missing: missing",
        "unexpected: extra",
        "misshapen: (2, 3) F32, wanted (3, 2) F32",
        "recast: (4,) BF16, wanted (4,) F32",
    ):
        assert line in str(error.value)
    assert "kept" not in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--heigth 64", ("did you mean --height?",)),
        ("--checkpoint-path {bad}/2.5.safetensors", ("2.5.0", CHECKPOINT_DOWNLOAD)),
        (
            "--artifacts-dir {bad}/other-tensors --no-prompt-cache",
            ("rank0.safetensors", "missing: ", "unexpected: x", "I32, wanted", "Delete "),
        ),
    ],
)
def test_a_user_in_a_terminal(finished, flags, words):
    before = finished.listing()
    done = subprocess.run(
        [sys.executable, ROOT / GENERATE, *finished.words(GENERATE, flags)],
        cwd=finished.root / "out",
        capture_output=True,
        text=True,
        timeout=100,
    )
    _judge(done.returncode, done.stderr, words)
    assert finished.listing() == before


def test_the_command_for_damaged_weights_works_when_pasted(finished, tmp_path, capsys):
    shutil.copytree(finished.root / "bad/missing-rank", tmp_path / "its artifacts")
    words = finished.words(SHARD_DIT, f"--artifacts-dir '{tmp_path}/its artifacts' --verify")
    assert run(SHARD_DIT, words) == 2
    command = re.search(r"Make it again: (.*)", capsys.readouterr().err)[1]
    subprocess.run(command, shell=True, check=True, timeout=100)
    assert run(SHARD_DIT, words) == 0
