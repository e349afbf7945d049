"""LTX-2.3 as other people publish it: with other labels, with tensors of other models, in several
files, and in folders of links. What is read is what the published file has."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.release import identified, parse_release
from ltx_neuron.errors import UserError
from ltx_neuron.hub import local_path
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.model_files import ModelFiles, kind_of, located
from ltx_neuron.weights.tensorfile import TensorFile

MODELS = "dit", "gemma3", "vae", "encoder", "sound"
DIT, PROJECTION = "model.diffusion_model.", "text_embedding_projection."


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def relabelled(source: Path, target: Path, label: str | None) -> Path:
    message = {key: value for key, value in metadata(source).items() if key != "model_version"}
    save_file(load_file(source), target, message | ({"model_version": label} if label else {}))
    return target


def opened(checkpoint: Path, gemma: Path, **parts: Path) -> Workspace:
    return Workspace(checkpoint, resolve("cpu"), "artifacts", 1, "float32", gemma, **parts)


def read(workspace: Workspace) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of every model, by the model and our name."""
    sources = {model: workspace.source(model) for model in MODELS}
    for model in MODELS:
        build.check_weights(workspace, model)
    return {(m, name): source.tensor(name) for m, source in sources.items() for name in source.names}


@pytest.fixture(scope="module")
def expected(tiny) -> dict[tuple[str, str], torch.Tensor]:
    return read(opened(tiny.checkpoint, tiny.gemma_root))


def assert_same(workspace: Workspace, expected: dict) -> None:
    actual = read(workspace)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert workspace.config["vae"] and workspace.config["vocoder"]


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "label",
    [
        None,
        *("2.3", "2.3.0", "v2.3.0", "V2.3", "LTX-2.3", "ltx-2.3-dev", "LTX2.3", "ltx_2_3"),
        *("2.3.rc1", "2.3.0-fp8", " 2.3.0 ", "LTX 2.3 22B"),
        *("1.0", "2.0.0", "v1", "my merge", "final_v2", "22b-2.3", "sulphur-3.1"),
    ],
)
def test_a_checkpoint_whose_config_is_of_2_3_runs_whatever_its_label(tiny, tmp_path, label):
    checkpoint = Checkpoint(relabelled(tiny.checkpoint, tmp_path / "any.safetensors", label))
    assert checkpoint.release.version == "2.3" and checkpoint.model_version


@pytest.mark.parametrize("label", [None, "v2.5.0", "LTX-2.5", "ltx-2.5-dev", "mine"])
def test_a_transformer_whose_config_is_of_2_5_is_of_2_5_whatever_its_label(split, tmp_path, label):
    checkpoint = Checkpoint(relabelled(split.distilled, tmp_path / "any.safetensors", label))
    assert checkpoint.release.version == "2.5"


@pytest.mark.parametrize(
    ("label", "without", "message"),
    [
        (None, ("cross_attention_adaln",), "2.0, by its config"),
        ("1.1", ("cross_attention_adaln",), "2.0, by its config"),
        (None, ("cross_attention_adaln", "audio_num_attention_heads"), "0.9 (LTX-Video), by its"),
        ("2.6.0", (), "2.6.0"),
        ("v3.0", (), "v3.0"),
        ("2.30.0", (), "2.30.0"),
    ],
)
def test_other_releases_are_named(tiny, label, without, message):
    config = json.loads(metadata(tiny.checkpoint)["config"])["transformer"]
    for name in without:
        del config[name]
    release, version = identified(label or "", config)
    assert release is None and version.startswith(message)


def test_a_label_names_no_release_by_its_beginning_alone():
    assert parse_release("2.30") is None and parse_release("12.3") is None and parse_release("") is None


# --- tensors of other models ----------------------------------------------------------------------


def float8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


# What all-in-one files have besides, by whose it is.
OTHERS = {
    "a text encoder": {"text_encoders.gemma3_12b.transformer.model.norm.weight": torch.ones(4)},
    "a text encoder of old": {"cond_stage_model.transformer.x.weight": torch.ones(4)},
    "a text encoder's name": {"conditioner.embedders.0.x.weight": torch.ones(4)},
    "Gemma's own names": {"language_model.model.norm.weight": torch.ones(4)},
    "another VAE": {"first_stage_model.decoder.conv_in.weight": torch.ones(4)},
    "an EMA copy": {"model_ema.diffusion_model.patchify_proj.weight": torch.ones(4)},
    "another EMA copy": {"ema.model.diffusion_model.proj_out.weight": torch.ones(4)},
    "a copy without prefix": {"diffusion_model.patchify_proj.weight": torch.ones(4)},
    "a copy of bare names": {"patchify_proj.weight": torch.ones(4)},
    "training state": {"optimizer.state.0": torch.ones(4), "step": torch.tensor(7)},
    "float8 in rows": {"text_encoders.x.weight": float8(4, 4), "text_encoders.x.weight_scale": torch.ones(4)},
    "float8 with a scale": {
        "text_encoders.x.weight": float8(4, 4),
        "text_encoders.x.weight_scale": torch.tensor(0.5),
        "text_encoders.x.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8),
    },
    "another float8": {"text_encoders.x.weight": torch.ones(4).to(torch.float8_e5m2)},
    "a damaged note": {"text_encoders.x.comfy_quant": torch.ones(3, dtype=torch.uint8)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_of_other_models_are_left_out_with_one_line(tiny, tmp_path, capsys, expected, name):
    path, others = tmp_path / "all in one.safetensors", OTHERS[name]
    save_file(load_file(tiny.checkpoint) | others, path, metadata(tiny.checkpoint))
    assert_same(opened(path, tiny.gemma_root), expected)
    opened(path, tiny.gemma_root)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"{path}: {len(others)} tensors of other models are not read (" in printed
    assert all(key.split(".")[0] in printed for key in others)


def test_of_the_published_file_nothing_is_said(tiny, capsys):
    opened(tiny.checkpoint, tiny.gemma_root)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["patchify_proj.weight_copy", "transformer_blocks.0.lora_A.weight"])
def test_an_unknown_tensor_of_the_transformer_itself_is_refused(tiny, tmp_path, name):
    path = tmp_path / "odd.safetensors"
    tensors = load_file(tiny.checkpoint) | {f"{DIT}{name}": torch.ones(4)}
    save_file(tensors, path, metadata(tiny.checkpoint))
    with pytest.raises(UserError, match=f"{name}.*matches 0 rows"):
        build.check_weights(opened(path, tiny.gemma_root), "dit")


# --- in several files -----------------------------------------------------------------------------


def parted(tiny, folder: Path, names: dict[str, str], whole_config: bool, bare: str | None) -> dict:
    """The checkpoint in four files. names: of the files by kind. whole_config: whether each file
    has the config of all, otherwise only its sections. bare: prefix of the transformer's names."""
    tensors, message = load_file(tiny.checkpoint), metadata(tiny.checkpoint)
    config = json.loads(message["config"])
    parts = {
        "transformer": ((DIT,), ("transformer", "scheduler")),
        "video_vae": (("vae.",), ("vae",)),
        "audio_vae": (("audio_vae.", "vocoder."), ("audio_vae", "vocoder")),
        "text_projection": ((PROJECTION,), ()),
    }
    made = {}
    for kind, (prefixes, sections) in parts.items():
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
        if bare is not None and kind != "audio_vae":
            cut = {"transformer": bare}.get(kind, "")
            own = {cut + name.removeprefix(prefixes[0]): tensor for name, tensor in own.items()}
        kept = config if whole_config else {name: config[name] for name in sections}
        labels = message | {"config": json.dumps(kept)} if kept else None
        made[kind] = folder / names.get(kind, f"{kind}.safetensors")
        made[kind].parent.mkdir(parents=True, exist_ok=True)
        save_file(own, made[kind], labels)
    return made


COMFY = {  # the folders of ComfyUI, and names in use
    "transformer": "diffusion_models/ltx-2.3-22b-distilled_transformer_only_bf16.safetensors",
    "video_vae": "vae/LTX23_video_vae_bf16.safetensors",
    "audio_vae": "vae/LTX23_audio_vae_bf16.safetensors",
    "text_projection": "text_encoders/ltx-2.3_text_projection_bf16.safetensors",
}
UNET = COMFY | {"transformer": "unet/ltx-2.3-22b-distilled.safetensors"}


@pytest.mark.parametrize("bare", [None, "", "diffusion_model."], ids=["full", "bare", "half"])
@pytest.mark.parametrize("whole_config", [True, False], ids=["whole config", "own config"])
@pytest.mark.parametrize("names", [COMFY, UNET, {}], ids=["comfy", "unet", "flat"])
def test_four_files_are_found_and_read_as_the_whole(tiny, tmp_path, expected, names, whole_config, bare):
    made = parted(tiny, tmp_path / "models", names, whole_config, bare)
    kinds = {kind: kind_of(TensorFile(path, "")) for kind, path in made.items()}
    assert kinds == {kind: kind for kind in made}
    assert located(tmp_path / "models", "distilled") == made["transformer"]
    workspace = opened(made["transformer"], tiny.gemma_root)
    assert_same(workspace, expected)
    assert {*workspace.identity["files"]} == {"video_vae", "audio_vae", "text_projection"}


def test_four_files_anywhere_are_named_by_their_flags(tiny, tmp_path, expected):
    names = {kind: f"{n}/{kind}.safetensors" for n, kind in enumerate(COMFY)}
    made = parted(tiny, tmp_path, names, False, None)
    flags = {f"{kind}_path": path for kind, path in made.items() if kind != "transformer"}
    assert_same(opened(made["transformer"], tiny.gemma_root, **flags), expected)
    with pytest.raises(UserError, match="the video VAE is missing\nType --video-vae-path FILE"):
        _ = ModelFiles(made["transformer"]).config["vae"]
    for kind, path in flags.items():  # a whole checkpoint has each part, and needs none
        assert_same(opened(made["transformer"], tiny.gemma_root, **flags | {kind: tiny.checkpoint}), expected)
        title = kind.removesuffix("_path").split("_")[-1].replace("vae", "VAE")
        with pytest.raises(UserError, match=f"has its own .*{title}; leave"):
            opened(tiny.checkpoint, tiny.gemma_root, **{kind: path})
        wrong = flags["audio_vae_path" if kind != "audio_vae_path" else "video_vae_path"]
        with pytest.raises(UserError, match=f"wanted the .*{title} of LTX-2.3, got the"):
            read(opened(made["transformer"], tiny.gemma_root, **flags | {kind: wrong}))


def test_connectors_may_be_in_the_file_of_the_projection(tiny, tmp_path, expected):
    made = parted(tiny, tmp_path, {}, False, None)
    transformer = load_file(made["transformer"])
    moved = {name: t for name, t in transformer.items() if "embeddings_connector" in name}
    rest = {name: t for name, t in transformer.items() if name not in moved}
    save_file(rest, made["transformer"], metadata(made["transformer"]))
    projection = load_file(made["text_projection"])
    for prefix in (DIT, ""):
        own = {prefix + name.removeprefix(DIT): tensor for name, tensor in moved.items()}
        save_file(projection | own, made["text_projection"])
        assert_same(opened(made["transformer"], tiny.gemma_root), expected)


def test_of_a_folder_with_vaes_of_two_releases_that_of_the_transformer_is_taken(tiny, split, tmp_path, expected):
    made = parted(tiny, tmp_path, COMFY, True, None)
    for path in (split.video_vae, split.audio_vae):
        shutil.copy(path, tmp_path / "vae" / path.name)
    assert_same(opened(made["transformer"], tiny.gemma_root), expected)


# --- folders of links -----------------------------------------------------------------------------


@pytest.fixture
def cache(tiny, tmp_path) -> dict[str, Path]:
    """The checkpoint's and Gemma's snapshots in a cache of the Hub: links to blobs."""
    files = {
        "models--Lightricks--LTX-2.3": [tiny.checkpoint, tiny.spatial_upsampler, tiny.lora],
        "models--google--gemma": sorted(tiny.gemma_root.iterdir()),
    }
    for repository, paths in files.items():
        folder = tmp_path / repository
        snapshot = folder / "snapshots" / "c0ffee"
        for made in (folder / "blobs", snapshot, folder / "refs"):
            made.mkdir(parents=True)
        (folder / "refs" / "main").write_text("c0ffee")
        for number, path in enumerate(paths):
            os.link(path, folder / "blobs" / f"{number:064x}")
            (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    return {name: tmp_path / name for name in files}


def test_a_folder_of_links_is_read_as_files_are(tiny, cache, expected):
    model, gemma = cache.values()
    snapshots = model / "snapshots" / "c0ffee", gemma / "snapshots" / "c0ffee"
    for checkpoint, root in ((snapshots[0] / tiny.checkpoint.name, snapshots[1]), snapshots, (model, gemma)):
        checkpoint, root = located(checkpoint, "distilled"), located(root, "gemma")
        assert checkpoint == snapshots[0] / tiny.checkpoint.name and root == snapshots[1]
        workspace = opened(checkpoint, root)
        assert_same(workspace, expected)
        assert workspace.tokenizer


def test_a_link_whose_blob_is_gone_is_downloaded_again(tiny, cache):
    model, _ = cache.values()
    path = model / "snapshots" / "c0ffee" / tiny.checkpoint.name
    path.resolve().unlink()
    with pytest.raises(UserError) as error:
        Checkpoint(path)
    assert "nearest" not in str(error.value)
    assert f"hf download Lightricks/LTX-2.3 {path.name} --force-download" in str(error.value)


def test_the_newest_snapshot_is_that_of_main(cache):
    model, _ = cache.values()
    (model / "snapshots" / "older").mkdir()
    assert local_path(model, "lora") == model / "snapshots" / "c0ffee"
