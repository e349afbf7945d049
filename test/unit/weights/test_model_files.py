"""Files are known by their metadata, found in a download, refused with another release's model, and read in parts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
from jobs import make_job
from lib.random_sources import GEMMA_4_SIZES
from safetensors.torch import load_file, save_file
from tiny import TinySizes
from tiny.gemma import gemma_4_config
from tiny.weights import save

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import GEMMA_3_12B, GEMMA_4_12B, read_config
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.release import identified, parse_release
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.host.loading import upsampler_spec
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.size import Size
from ltx_neuron.text.inputs import embedded_tokenizer, load_tokenizer, tokenize
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora
from ltx_neuron.weights.model_files import ModelFiles, TextEncoderFile, kind_of, located
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

PROMPT = "a golden retriever puppy runs across a sunny green meadow"


def refused(call) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def changed(source: Path, target: Path, **metadata) -> Path:
    """A copy of a file with other metadata."""
    save_file(load_file(source), target, TensorFile(source, "").metadata | metadata)
    return target


def workspace(checkpoint: Path, gemma: Path | None = None, **paths) -> Workspace:
    return Workspace(checkpoint, resolve("cpu"), "artifacts", 1, "float32", gemma, **paths)


def test_the_folder_of_a_download_has_the_transformer_of_each_recipe_and_all_other_files(split, tmp_path):
    assert located(split.folder, "distilled") == split.distilled
    files = ModelFiles(located(split.folder, "dev"))
    assert files.checkpoint.path == split.dev
    assert located(split.folder, "gemma") == files.find("gemma") == split.text_encoder
    for kind in ("audio_vae", "spatial_upsampler", "temporal_upsampler", "duration_head", "lora"):
        assert files.find(kind.removesuffix("_upsampler")) == getattr(split, kind)
    # Of two video VAEs the convolutional one decodes unless the other is typed.
    assert files.describe_decoder() == f"convolutional, from {split.video_vae}"
    typed = ModelFiles(split.dev, video_vae_path=split.diffusion_vae)
    assert typed.describe_decoder() == f"diffusion, from {split.diffusion_vae}"
    # A single transformer is that of any recipe, and of two without a recipe in their names one must be named.
    (tmp_path / "unet").mkdir()
    shutil.copy(split.dev, tmp_path / "unet/model.safetensors")
    assert located(tmp_path, "distilled") == tmp_path / "unet/model.safetensors"
    shutil.copy(split.dev, tmp_path / "unet/other.safetensors")
    message = refused(lambda: located(tmp_path, "distilled"))
    assert "2 files for --checkpoint-path" in message and "other.safetensors" in message


def test_the_parts_have_the_config_and_the_tensors_of_a_whole_checkpoint(split, tiny):
    files, whole = ModelFiles(split.distilled), ModelFiles(tiny.checkpoint)
    assert {*whole.config} == {*files.config}
    for section in ("vae", "audio_vae", "vocoder"):
        assert files.config[section] == whole.config[section]
        names = [{n for n in x if n.startswith(f"{section}.")} for x in (files.of(section).shapes, whole.of("").shapes)]
        assert names[0] == names[1]
    name = "vae.decoder.conv_in.conv.weight"
    assert torch.equal(files.of("vae").read(name), load_file(split.video_vae)[name.removeprefix("vae.")])
    for model in ("dit", "gemma3", "vae"):
        build.check_weights(workspace(split.distilled), model)


# --- mixtures; more of them, with what to type: unit/project/test_download_commands.py -----------


def test_parts_of_another_release_are_refused_by_metadata(split, tiny, tmp_path):
    source = json.dumps({"ltx_version": "2.5.0", "gemma_version": "other"})
    path = changed(split.distilled, tmp_path / "other.safetensors", gemma_source_checkpoint=source)
    message = refused(lambda: workspace(path, split.text_encoder).gemma)
    assert "gemma4-12b-ltx-v1" in message and "trained with other" in message
    folder = shutil.copytree(tiny.gemma_root, tmp_path / "gemma")
    (folder / "config.json").write_text(json.dumps(TextEncoderFile(split.text_encoder, "").gemma_config))
    assert "another Gemma than that of LTX-2.3" in refused(lambda: workspace(tiny.checkpoint, folder).gemma)
    older = changed(split.video_vae, tmp_path / "older.safetensors", model_version="2.3.0")
    message = refused(lambda: workspace(split.distilled, video_vae_path=older).video_decoder)
    assert "is of LTX 2.3.0, but the checkpoint is of LTX-2.5" in message
    # An upsampler's name alone tells its release; this one has another name.
    upsampler_spec("spatial", tiny.spatial_upsampler, torch.float32, workspace(split.distilled).checkpoint.release)


def test_a_lora_of_another_release_is_merged_with_a_note_if_its_layers_fit(split, tmp_path):
    lora, named = tmp_path / "lora.safetensors", tmp_path / "ltx-2.3-22b-distilled-lora-384.safetensors"
    changed(split.lora, lora, model_version="2.3.0")
    save_file(load_file(split.lora), named)
    for path in (lora, named):
        (note,) = workspace(split.dev).source("dit", (Lora(path),)).notes
        assert note.startswith(f"--lora {path} is of LTX-2.3, the model of LTX-2.5: it is merged, as all its layers")
    changed(split.lora, named, model_version="2.5.0")  # metadata count more than a name
    assert workspace(split.dev).source("dit", (Lora(named),)).notes == []


def test_a_missing_part_names_its_flag_and_the_folder(split, tmp_path):
    alone = Path(shutil.copy(split.distilled, tmp_path / "transformer.safetensors"))
    flags = {"gemma": "--gemma-root FILE", "video_vae": "--video-vae-path FILE", "audio_vae": "--audio-vae-path FILE"}
    for kind, flag in flags.items():
        message = refused(lambda kind=kind: ModelFiles(alone).path(kind))
        wanted = "transformer of LTX-2.5 alone", flag, RELEASE_FILES["Lightricks/LTX-2.5"][kind]
        assert [words for words in wanted if words not in message] == []


def test_what_a_release_cannot_do_is_refused_for_its_model_alone(split, tiny):
    keyframes = make_job("rain", Size(64, 64, 9), num_generated_keyframes=2)
    with pytest.raises(FieldError, match="the model of .* LTX 2.3.0, generates no keyframes"):
        workspace(tiny.checkpoint).resolved(keyframes)
    opened = workspace(split.distilled)
    job = opened.resolved(keyframes)
    for compat in ("ltx-core-1.0.0", "ltx-core-1.0.0-conditioning"):
        with pytest.raises(FieldError, match=f"--compat {compat}: that release does not run LTX-2.5"):
            Engine(opened, Recorder(), RunOptions(compat=compat)).preflight.check_inputs([job])


# --- the text encoder -----------------------------------------------------------------------------


def test_released_configs_have_their_digests_and_other_settings_are_refused_by_name():
    config = read_config(gemma_4_config(GEMMA_4_SIZES), Path("text"))
    assert replace(config, replaced_tokens=GEMMA_4_12B.replaced_tokens) == GEMMA_4_12B
    assert GEMMA_3_12B.digest == "1e0d06ee5cfc" != GEMMA_4_12B.digest  # as before Gemma 4
    values = {"enable_moe_block": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 256}
    values |= {"use_double_wide_mlp": True, "use_bidirectional_attention": "all", "sliding_window": 512}
    for name, value in (values | {"global_head_dim": 0.5}).items():
        content = gemma_4_config(TinySizes())
        content["text_config"][name] = value
        with pytest.raises(UserError, match=rf"{name}.* '?{value}"):
            read_config(content, Path("text.safetensors"))
    with pytest.raises(UserError, match=r"model_type is 'llama', wanted 'gemma3' or 'gemma4_unif"):
        read_config({"model_type": "llama", "text_config": {}}, Path("text"))
    content = gemma_4_config(TinySizes())
    content["text_config"]["attention_k_eq_v"] = False  # full layers may have values of their own
    sizes = read_config(content, Path("text")).attention(full=True)
    assert sizes == (16, TinySizes().gemma_kv_heads, False)


def test_a_prompt_begins_with_one_bos_has_no_eos_and_is_cut_at_its_end(split, tiny):
    """Gemma 3's tokenizer adds BOS itself, Gemma 4's does not."""
    ours, theirs = embedded_tokenizer(TextEncoderFile(split.text_encoder, "")), load_tokenizer(tiny.gemma_root)
    assert ours(PROMPT).input_ids[0] != ours.bos_token_id and theirs(PROMPT).input_ids[0] == theirs.bos_token_id
    for one in (ours, theirs):
        ids = tokenize(one, f"  {PROMPT}\n")
        assert ids == tokenize(one, PROMPT) and one.decode(ids[1:]) == PROMPT
        assert ids[0] == one.bos_token_id and one.bos_token_id not in ids[1:] and one.eos_token_id not in ids
    assert tokenize(ours, f"<bos>{PROMPT}") == tokenize(ours, PROMPT)
    ids = tokenize(ours, f"{PROMPT} . " * 200)
    assert len(ids) == TEXT_TOKENS and ids[0] == ours.bos_token_id


@pytest.mark.parametrize("name", ["tokenizer_json", "hf_asset__tokenizer_config.json"])
def test_a_broken_tokenizer_is_refused(split, tmp_path, name):
    tensors = load_file(split.text_encoder)
    tensors[name] = tensors[name][: len(tensors[name]) // 2]
    save(tmp_path / "broken.safetensors", tensors, TextEncoderFile(split.text_encoder, "").metadata)
    with pytest.raises(UserError, match="the tokenizer in .*broken.safetensors cannot be loaded"):
        embedded_tokenizer(TextEncoderFile(tmp_path / "broken.safetensors", ""))


def test_files_with_the_names_of_transformers_and_of_comfyui_give_equal_weights(split, tmp_path):
    def nested(name: str) -> str:
        if name.startswith("model."):
            return name.replace("model.", "model.language_model.", 1)
        return name.replace("vision_model.", "model.vision_embedder.")

    renamed = {nested(name): tensor for name, tensor in load_file(split.text_encoder).items()}
    save(tmp_path / "nested.safetensors", renamed, TextEncoderFile(split.text_encoder, "").metadata)
    paths = split.text_encoder, tmp_path / "nested.safetensors"
    flat, other = (Source(SHARDED_MODELS["gemma3"], [TextEncoderFile(path, "")]) for path in paths)
    assert {"layers.0.layer_scalar", "video_aggregate_embed.bias", "norm.weight"} < set(flat.names)
    assert set(flat.names) == set(other.names)
    assert all(torch.equal(flat.tensor(name), other.tensor(name)) for name in flat.names)


# --- LTX-2.3 as others publish it: relabelled, all in one, in parts -------------------------------

DIT = "model.diffusion_model."


def read(opened: Workspace) -> dict[tuple[str, str], torch.Tensor]:
    sources = {model: opened.source(model) for model in ("dit", "gemma3", "vae", "encoder", "sound")}
    for model in sources:
        build.check_weights(opened, model)
    return {(model, name): source.tensor(name) for model, source in sources.items() for name in source.names}


@pytest.fixture(scope="module")
def expected(tiny) -> dict[tuple[str, str], torch.Tensor]:
    return read(workspace(tiny.checkpoint, tiny.gemma_root))


def assert_same(opened: Workspace, expected: dict) -> None:
    actual = read(opened)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert opened.config["vae"] and opened.config["vocoder"]


def test_the_config_tells_the_release_whatever_the_label(tiny, split):
    config, later = (Checkpoint(path).config["transformer"] for path in (tiny.checkpoint, split.distilled))
    of_2_3 = "", "v2.3.0", "ltx-2.3-dev", "ltx_2_3", "2.3.rc1", " 2.3.0 ", "LTX 2.3 22B", "v1", "sulphur-3.1"
    for labels, content, release in ((of_2_3, config, "2.3"), (("", "v2.5.0", "LTX-2.5", "mine"), later, "2.5")):
        for label in labels:
            found, version = identified(label, content)
            assert found and found.version == release and version, label
    older = {name: value for name, value in config.items() if name != "cross_attention_adaln"}
    first = {name: value for name, value in older.items() if name != "audio_num_attention_heads"}
    of_others = ("1.1", older, "2.0, by its config"), ("", first, "0.9 (LTX-Video), by its")
    for label, content, message in (*of_others, ("v3.0", config, "v3.0"), ("2.30.0", config, "2.30.0")):
        found, version = identified(label, content)
        assert found is None and version.startswith(message)
    assert parse_release("2.30") is None and parse_release("12.3") is None


def test_tensors_of_other_models_are_left_out_with_one_line_of_a_file_without_a_label(tiny, tmp_path, capsys, expected):
    path = tmp_path / "all in one.safetensors"
    # What such files have besides: another VAE, copies, a training's state, and layouts that nobody reads
    names = "language_model.model.norm", "first_stage_model.decoder.conv_in", "model_ema.diffusion_model.patchify_proj"
    names += "diffusion_model.patchify_proj", "patchify_proj"
    others = {f"{name}.weight": torch.ones(4) for name in names} | {
        "text_encoders.rows.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "text_encoders.rows.weight_scale": torch.ones(4),
        "text_encoders.one.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8),
        "text_encoders.damaged.comfy_quant": torch.ones(3).byte(),
    }
    save_file(load_file(tiny.checkpoint) | others, path, {"config": Checkpoint(tiny.checkpoint).metadata["config"]})
    assert_same(workspace(path, tiny.gemma_root), expected)
    workspace(path, tiny.gemma_root)
    workspace(tiny.checkpoint, tiny.gemma_root)  # of which nothing is printed
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"{path}: {len(others)} tensors of other models are not read (" in printed


COMFY = {  # the folders of ComfyUI, and names in use
    "transformer": "diffusion_models/ltx-2.3-22b-distilled_transformer_only_bf16.safetensors",
    "video_vae": "vae/LTX23_video_vae_bf16.safetensors",
    "audio_vae": "vae/LTX23_audio_vae_bf16.safetensors",
    "text_projection": "text_encoders/ltx-2.3_text_projection_bf16.safetensors",
}
UNET = COMFY | {"transformer": "unet/ltx-2.3-22b-distilled.safetensors"}
FLAT = {kind: f"{kind}.safetensors" for kind in COMFY}


def parted(tiny, folder: Path, names: dict[str, str], bare: str | None = None, whole_config: bool = False) -> dict:
    """The checkpoint in four files. bare: prefix of the transformer's names. whole_config: of all, in each file."""
    tensors, metadata = load_file(tiny.checkpoint), Checkpoint(tiny.checkpoint).metadata
    config, paths = json.loads(metadata["config"]), {}
    for kind, prefixes, sections in (
        ("transformer", (DIT,), ("transformer", "scheduler")),
        ("video_vae", ("vae.",), ("vae",)),
        ("audio_vae", ("audio_vae.", "vocoder."), ("audio_vae", "vocoder")),
        ("text_projection", ("text_embedding_projection.",), ()),
    ):
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
        if bare is not None and kind != "audio_vae":
            cut = bare if kind == "transformer" else ""
            own = {cut + name.removeprefix(prefixes[0]): tensor for name, tensor in own.items()}
        kept = config if whole_config else {name: config[name] for name in sections}
        paths[kind] = folder / names[kind]
        paths[kind].parent.mkdir(parents=True, exist_ok=True)
        save_file(own, paths[kind], metadata | {"config": json.dumps(kept)} if kept else None)
    return paths


@pytest.mark.parametrize(
    ("names", "bare", "whole_config"), [(COMFY, None, True), (UNET, "diffusion_model.", True), (FLAT, "", False)]
)
def test_four_files_beside_others_are_read_as_the_whole(tiny, split, tmp_path, expected, names, bare, whole_config):
    paths = parted(tiny, tmp_path / "models", names, bare, whole_config)
    for path in (split.video_vae, split.audio_vae):  # of another release
        shutil.copy(path, paths["video_vae"].parent)
    assert {kind: kind_of(TensorFile(path, "")) for kind, path in paths.items()} == {kind: kind for kind in paths}
    assert located(tmp_path / "models", "distilled") == paths["transformer"]
    opened = workspace(paths["transformer"], tiny.gemma_root)
    assert_same(opened, expected)
    assert {*opened.identity["files"]} == {"video_vae", "audio_vae", "text_projection"}


def test_four_files_anywhere_are_named_by_their_flags(tiny, tmp_path, expected):
    paths = parted(tiny, tmp_path, {kind: f"{n}/{kind}.safetensors" for n, kind in enumerate(COMFY)})
    transformer, flags = paths["transformer"], {f"{kind}_path": paths[kind] for kind in [*COMFY][1:]}
    assert_same(workspace(transformer, tiny.gemma_root, **flags), expected)
    # A whole checkpoint has each part, and needs none.
    whole = dict.fromkeys(flags, tiny.checkpoint)
    assert_same(workspace(transformer, tiny.gemma_root, **whole), expected)
    with pytest.raises(UserError, match="the video VAE is missing\nType --video-vae-path FILE"):
        _ = ModelFiles(transformer).config["vae"]
    for kind, title in (("video_vae", "video VAE"), ("audio_vae", "audio VAE"), ("text_projection", "projection")):
        flag = f"{kind}_path"
        with pytest.raises(UserError, match=f"has its own .*{title}; leave"):
            workspace(tiny.checkpoint, tiny.gemma_root, **{flag: paths[kind]})
        wrong = paths["video_vae" if kind == "audio_vae" else "audio_vae"]
        with pytest.raises(UserError, match=f"wanted the .*{title} of LTX-2.3, got the"):
            read(workspace(transformer, tiny.gemma_root, **flags | {flag: wrong}))


@pytest.mark.parametrize("prefix", [DIT, ""])
def test_connectors_may_be_in_the_file_of_the_projection(tiny, tmp_path, expected, prefix):
    paths = parted(tiny, tmp_path, FLAT)
    transformer, projection = load_file(paths["transformer"]), load_file(paths["text_projection"])
    for name in [name for name in transformer if "embeddings_connector" in name]:
        projection[prefix + name.removeprefix(DIT)] = transformer.pop(name)
    save_file(transformer, paths["transformer"], TensorFile(paths["transformer"], "").metadata)
    save_file(projection, paths["text_projection"])
    assert_same(workspace(paths["transformer"], tiny.gemma_root), expected)
