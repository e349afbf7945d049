"""LTX-2.3 as others publish it (relabelled, all in one, in parts, as links) is read as the published file is."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
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
    return dict(TensorFile(path, "").metadata)


def opened(checkpoint: Path, gemma: Path, **parts: Path) -> Workspace:
    return Workspace(checkpoint, resolve("cpu"), "artifacts", 1, "float32", gemma, **parts)


def read(workspace: Workspace) -> dict[tuple[str, str], torch.Tensor]:
    sources = {model: workspace.source(model) for model in MODELS}
    for model in MODELS:
        build.check_weights(workspace, model)
    return {(model, name): source.tensor(name) for model, source in sources.items() for name in source.names}


@pytest.fixture(scope="module")
def expected(tiny) -> dict[tuple[str, str], torch.Tensor]:
    return read(opened(tiny.checkpoint, tiny.gemma_root))


def assert_same(workspace: Workspace, expected: dict) -> None:
    actual = read(workspace)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert workspace.config["vae"] and workspace.config["vocoder"]


# --- labels ---------------------------------------------------------------------------------------

LABELS = "", "v2.3.0", "ltx-2.3-dev", "ltx_2_3", "2.3.rc1", " 2.3.0 ", "LTX 2.3 22B", "v1", "sulphur-3.1"


def test_the_config_tells_the_release_whatever_the_label(tiny, split):
    for path, labels, release in (
        (tiny.checkpoint, LABELS, "2.3"),
        (split.distilled, ("", "v2.5.0", "LTX-2.5", "ltx-2.5-dev", "mine"), "2.5"),
    ):
        config = Checkpoint(path).config["transformer"]
        for label in labels:
            found, version = identified(label, config)
            assert found and found.version == release and version, label
    config = Checkpoint(tiny.checkpoint).config["transformer"]
    older = {name: value for name, value in config.items() if name != "cross_attention_adaln"}
    first = {name: value for name, value in older.items() if name != "audio_num_attention_heads"}
    for label, content, message in (
        ("", older, "2.0, by its config"),
        ("1.1", older, "2.0, by its config"),
        ("", first, "0.9 (LTX-Video), by its"),
        ("2.6.0", config, "2.6.0"),
        ("v3.0", config, "v3.0"),
        ("2.30.0", config, "2.30.0"),
    ):
        found, version = identified(label, content)
        assert found is None and version.startswith(message)
    assert parse_release("2.30") is None and parse_release("12.3") is None


# --- tensors of other models ----------------------------------------------------------------------


# What all-in-one files have besides: another VAE, copies, a training's state, and layouts that nobody reads
OTHERS = {
    "cond_stage_model.transformer.x.weight": torch.ones(4),
    "language_model.model.norm.weight": torch.ones(4),
    "first_stage_model.decoder.conv_in.weight": torch.ones(4),
    "model_ema.diffusion_model.patchify_proj.weight": torch.ones(4),
    "diffusion_model.patchify_proj.weight": torch.ones(4),
    "patchify_proj.weight": torch.ones(4),
    "step": torch.ones(4),
    "text_encoders.rows.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
    "text_encoders.rows.weight_scale": torch.ones(4),
    "text_encoders.one.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8),
    "text_encoders.damaged.comfy_quant": torch.ones(3).byte(),
    "text_encoders.other.weight": torch.ones(4).to(torch.float8_e5m2),
}


def test_tensors_of_other_models_are_left_out_with_one_line_of_a_file_without_a_label(tiny, tmp_path, capsys, expected):
    path = tmp_path / "all in one.safetensors"
    save_file(load_file(tiny.checkpoint) | OTHERS, path, {"config": metadata(tiny.checkpoint)["config"]})
    assert_same(opened(path, tiny.gemma_root), expected)
    opened(path, tiny.gemma_root)
    opened(tiny.checkpoint, tiny.gemma_root)  # of which nothing is printed
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"{path}: {len(OTHERS)} tensors of other models are not read (" in printed


# --- in several files -----------------------------------------------------------------------------

COMFY = {  # the folders of ComfyUI, and names in use
    "transformer": "diffusion_models/ltx-2.3-22b-distilled_transformer_only_bf16.safetensors",
    "video_vae": "vae/LTX23_video_vae_bf16.safetensors",
    "audio_vae": "vae/LTX23_audio_vae_bf16.safetensors",
    "text_projection": "text_encoders/ltx-2.3_text_projection_bf16.safetensors",
}
UNET = COMFY | {"transformer": "unet/ltx-2.3-22b-distilled.safetensors"}
FLAT = {kind: f"{kind}.safetensors" for kind in COMFY}
PARTS = {  # prefixes of tensors, and sections of the config
    "transformer": ((DIT,), ("transformer", "scheduler")),
    "video_vae": (("vae.",), ("vae",)),
    "audio_vae": (("audio_vae.", "vocoder."), ("audio_vae", "vocoder")),
    "text_projection": ((PROJECTION,), ()),
}


def parted(tiny, folder: Path, names: dict[str, str], bare: str | None = None, whole_config: bool = False) -> dict:
    """The checkpoint in four files, by kind. bare: prefix of the transformer's names. whole_config: each file has
    the config of all, otherwise only its sections."""
    tensors, message = load_file(tiny.checkpoint), metadata(tiny.checkpoint)
    config, paths = json.loads(message["config"]), {}
    for kind, (prefixes, sections) in PARTS.items():
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
        if bare is not None and kind != "audio_vae":
            cut = bare if kind == "transformer" else ""
            own = {cut + name.removeprefix(prefixes[0]): tensor for name, tensor in own.items()}
        kept = config if whole_config else {name: config[name] for name in sections}
        paths[kind] = folder / names[kind]
        paths[kind].parent.mkdir(parents=True, exist_ok=True)
        save_file(own, paths[kind], message | {"config": json.dumps(kept)} if kept else None)
    return paths


@pytest.mark.parametrize(
    ("names", "bare", "whole_config"), [(COMFY, None, True), (UNET, "diffusion_model.", True), (FLAT, "", False)]
)
def test_four_files_are_found_and_read_as_the_whole(tiny, tmp_path, expected, names, bare, whole_config):
    paths = parted(tiny, tmp_path / "models", names, bare, whole_config)
    assert {kind: kind_of(TensorFile(path, "")) for kind, path in paths.items()} == {kind: kind for kind in paths}
    assert located(tmp_path / "models", "distilled") == paths["transformer"]
    workspace = opened(paths["transformer"], tiny.gemma_root)
    assert_same(workspace, expected)
    assert {*workspace.identity["files"]} == {"video_vae", "audio_vae", "text_projection"}


def test_four_files_anywhere_are_named_by_their_flags(tiny, tmp_path, expected):
    paths = parted(tiny, tmp_path, {kind: f"{n}/{kind}.safetensors" for n, kind in enumerate(COMFY)})
    transformer, flags = paths["transformer"], {f"{kind}_path": paths[kind] for kind in [*COMFY][1:]}
    assert_same(opened(transformer, tiny.gemma_root, **flags), expected)
    # A whole checkpoint has each part, and needs none.
    whole = dict.fromkeys(flags, tiny.checkpoint)
    assert_same(opened(transformer, tiny.gemma_root, **whole), expected)
    with pytest.raises(UserError, match="the video VAE is missing\nType --video-vae-path FILE"):
        _ = ModelFiles(transformer).config["vae"]
    for kind, title in (("video_vae", "video VAE"), ("audio_vae", "audio VAE"), ("text_projection", "projection")):
        flag = f"{kind}_path"
        with pytest.raises(UserError, match=f"has its own .*{title}; leave"):
            opened(tiny.checkpoint, tiny.gemma_root, **{flag: paths[kind]})
        wrong = paths["video_vae" if kind == "audio_vae" else "audio_vae"]
        with pytest.raises(UserError, match=f"wanted the .*{title} of LTX-2.3, got the"):
            read(opened(transformer, tiny.gemma_root, **flags | {flag: wrong}))


@pytest.mark.parametrize("prefix", [DIT, ""])
def test_connectors_may_be_in_the_file_of_the_projection(tiny, tmp_path, expected, prefix):
    paths = parted(tiny, tmp_path, FLAT)
    transformer, projection = load_file(paths["transformer"]), load_file(paths["text_projection"])
    for name in [name for name in transformer if "embeddings_connector" in name]:
        projection[prefix + name.removeprefix(DIT)] = transformer.pop(name)
    save_file(transformer, paths["transformer"], metadata(paths["transformer"]))
    save_file(projection, paths["text_projection"])
    assert_same(opened(paths["transformer"], tiny.gemma_root), expected)


def test_of_a_folder_with_vaes_of_two_releases_that_of_the_transformer_is_taken(tiny, split, tmp_path, expected):
    paths = parted(tiny, tmp_path, COMFY, whole_config=True)
    for path in (split.video_vae, split.audio_vae):
        shutil.copy(path, tmp_path / "vae" / path.name)
    assert_same(opened(paths["transformer"], tiny.gemma_root), expected)


# --- folders of links -----------------------------------------------------------------------------


def test_a_cache_of_the_hub_is_read_through_its_links_and_a_lost_blob_is_downloaded_again(tiny, tmp_path, expected):
    repositories = {
        "models--Lightricks--LTX-2.3": [tiny.checkpoint, tiny.spatial_upsampler, tiny.lora],
        "models--google--gemma": sorted(tiny.gemma_root.iterdir()),
    }
    for repository, paths in repositories.items():
        snapshot, blobs = tmp_path / repository / "snapshots" / "c0ffee", tmp_path / repository / "blobs"
        for folder in (blobs, snapshot, tmp_path / repository / "refs"):
            folder.mkdir(parents=True)
        (tmp_path / repository / "refs" / "main").write_text("c0ffee")
        for number, path in enumerate(paths):
            os.link(path, blobs / f"{number:064x}")
            (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    model, gemma = (tmp_path / repository for repository in repositories)
    snapshots = model / "snapshots" / "c0ffee", gemma / "snapshots" / "c0ffee"
    path = snapshots[0] / tiny.checkpoint.name
    for typed in ((path, snapshots[1]), snapshots, (model, gemma)):
        assert located(typed[0], "distilled") == path and located(typed[1], "gemma") == snapshots[1]
    workspace = opened(path, snapshots[1])
    assert_same(workspace, expected)
    assert workspace.tokenizer
    (model / "snapshots" / "older").mkdir()
    assert local_path(model, "lora") == snapshots[0]  # the one of main
    path.resolve().unlink()
    with pytest.raises(UserError) as error:
        Checkpoint(path)
    assert "nearest" not in str(error.value)
    assert f"hf download Lightricks/LTX-2.3 {path.name} --force-download" in str(error.value)
