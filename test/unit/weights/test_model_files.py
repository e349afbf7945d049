"""LTX-2.5 has one file per part. ModelFiles identifies each by its metadata, finds it in the
download, and refuses it with a model of another release."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from jobs import make_job
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.host.loading import upsampler_spec
from ltx_neuron.host.models import HostModels
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.size import Size
from ltx_neuron.weights.lora import Lora
from ltx_neuron.weights.model_files import ModelFiles, TextEncoderFile, kind_of, located
from ltx_neuron.weights.tensorfile import TensorFile


def refused(call) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def changed(source: Path, target: Path, **metadata) -> Path:
    """A copy of a file with other metadata."""
    with safe_open(source, "pt") as file:
        printed = {**file.metadata(), **metadata}
    save_file(load_file(source), target, {k: v for k, v in printed.items() if v is not None})
    return target


def alone(split, folder: Path) -> Path:
    """A copy of the transformer outside of its download."""
    return Path(shutil.copy(split.distilled, folder / "transformer.safetensors"))


def workspace(checkpoint: Path, gemma: Path | None = None, **paths) -> Workspace:
    return Workspace(checkpoint, resolve("cpu"), "artifacts", 1, "float32", gemma, **paths)


# --- what a file is, and where it is --------------------------------------------------------------


def test_metadata_identifies_a_file_whatever_its_name(split, tiny, tmp_path):
    kinds = {
        "distilled": "transformer",
        "dev": "transformer",
        "text_encoder": "gemma",
        "video_vae": "video_vae",
        "diffusion_vae": "video_vae",
        "audio_vae": "audio_vae",
        "spatial_upsampler": "spatial",
        "temporal_upsampler": "temporal",
        "duration_head": "duration_head",
        "lora": "lora",
    }
    for number, (name, kind) in enumerate(kinds.items()):
        renamed = tmp_path / f"{number}.safetensors"
        os.symlink(getattr(split, name), renamed)
        assert kind_of(TensorFile(renamed, "")) == kind
    assert kind_of(TensorFile(tiny.checkpoint, "")) == "transformer"


def test_the_folder_of_a_download_has_the_transformer_of_each_recipe_and_all_other_files(split):
    assert located(split.folder, "distilled") == split.distilled
    files = ModelFiles(located(split.folder, "dev"))
    assert files.checkpoint.path == split.dev
    actual = {kind: files.find(kind) for kind in ("gemma", "audio_vae", "spatial", "temporal")}
    assert actual == {
        "gemma": split.text_encoder,
        "audio_vae": split.audio_vae,
        "spatial": split.spatial_upsampler,
        "temporal": split.temporal_upsampler,
    }
    assert located(split.folder, "gemma") == split.text_encoder


def test_of_two_video_vaes_the_convolutional_one_decodes_unless_the_other_is_typed(split):
    files = ModelFiles(split.distilled)
    assert files.describe_decoder() == f"convolutional, from {split.video_vae}"
    typed = ModelFiles(split.distilled, video_vae_path=split.diffusion_vae)
    assert typed.describe_decoder() == f"diffusion, from {split.diffusion_vae}"


def test_a_single_transformer_is_that_of_any_recipe_and_a_folder_without_one_is_refused(split, tmp_path):
    one = tmp_path / "one" / "diffusion_models"
    one.mkdir(parents=True)
    shutil.copy(split.dev, one / "model.safetensors")
    assert located(one.parent, "distilled") == one / "model.safetensors"
    shutil.copy(split.dev, one / "other.safetensors")
    message = refused(lambda: located(one.parent, "distilled"))
    assert "2 files for --checkpoint-path" in message and "other.safetensors" in message
    assert "is a folder" in refused(lambda: located(split.video_vae.parent, "distilled"))


def test_the_config_of_all_parts_equals_that_of_a_checkpoint(split, tiny):
    config, whole = ModelFiles(split.distilled).config, ModelFiles(tiny.checkpoint).config
    assert {*whole} == {*config}
    assert all(config[name] == whole[name] for name in ("vae", "audio_vae", "vocoder"))


def test_tensors_of_a_part_have_the_names_of_a_checkpoint(split, tiny):
    of, whole = ModelFiles(split.distilled).of, ModelFiles(tiny.checkpoint)
    for section in ("vae", "audio_vae", "vocoder"):
        prefix, part = f"{section}.", of(section)
        expected = {name for name in whole.checkpoint.shapes if name.startswith(prefix)}
        assert {name for name in part.shapes if name.startswith(prefix)} == expected
    name = "vae.decoder.conv_in.conv.weight"
    stored = load_file(split.video_vae)[name.removeprefix("vae.")]
    assert torch.equal(of("vae").read(name), stored)


def test_both_video_vaes_encode_and_both_decoders_have_all_their_tensors(split):
    pixels, encoded = torch.rand(1, 3, 1, 64, 64) * 2 - 1, []
    for path in (split.video_vae, split.diffusion_vae):
        files = ModelFiles(split.distilled, video_vae_path=path)
        host = HostModels(split.distilled, files.config, torch.float32, files=files)
        host.check(["video_decoder", "video_statistics", "audio_decoder", "vocoder"])
        encoded.append(host.encode_image(pixels))
    assert torch.equal(*encoded)  # both files have the same encoder


def test_the_file_of_a_text_encoder_has_config_and_tokenizer_apart_from_its_weights(split):
    file = TextEncoderFile(split.text_encoder, "")
    assert file.gemma_config["text_config"]["num_hidden_layers"] == 4
    assert {"tokenizer.json", "tokenizer_config.json"} <= {*file.assets}
    assert json.loads(file.asset("tokenizer.json"))["model"]["type"] == "BPE"
    assert not any("tokenizer" in name for name in file.shapes)


def test_the_released_repository_has_a_file_of_every_kind():
    kinds = {"distilled", "dev", "gemma", "video_vae", "audio_vae", "lora"}
    kinds |= {"spatial", "temporal", "duration_head"}
    assert RELEASE_FILES["Lightricks/LTX-2.5"].keys() == kinds


def test_the_tiny_files_have_the_weights_of_every_model_of_the_ranks(split):
    opened = workspace(split.distilled)
    for model in ("dit", "gemma3", "vae"):
        for need in opened.weight_sets(model):
            # UserError unless the tensors are the model's
            assert build.weight_bytes(opened, need) > 0
    names = {*opened.source("dit").names}
    assert "keyframes_abs_pos_embedding" in names
    assert "transformer_blocks.0.audio_ff.net.2.bias" in names
    assert "transformer_blocks.0.ff.net.2.bias" not in names


# --- mixtures -------------------------------------------------------------------------------------


def test_a_text_encoder_of_another_release_is_refused(split, tiny, tmp_path):
    message = refused(lambda: workspace(tiny.checkpoint, split.text_encoder).gemma)
    assert "text encoder of a later release" in message and "gemma-3-12b" in message
    message = refused(lambda: workspace(split.distilled, tiny.gemma_root).gemma)
    assert "LTX-2.5 has its text encoder in one file" in message and "text_encoders/" in message
    source = json.dumps({"ltx_version": "2.5.0", "gemma_version": "other"})
    path = changed(split.distilled, tmp_path / "other.safetensors", gemma_source_checkpoint=source)
    message = refused(lambda: workspace(path, split.text_encoder).gemma)
    assert "gemma4-12b-ltx-v1" in message and "trained with other" in message
    assert "got the video VAE" in refused(lambda: workspace(split.dev, split.video_vae).gemma)


def test_a_gemma_4_folder_is_refused_with_an_ltx_2_3_checkpoint(split, tiny, tmp_path):
    folder = shutil.copytree(tiny.gemma_root, tmp_path / "gemma")
    content = TextEncoderFile(split.text_encoder, "").gemma_config
    (folder / "config.json").write_text(json.dumps(content))
    message = refused(lambda: workspace(tiny.checkpoint, folder).gemma)
    assert "another Gemma than that of LTX-2.3" in message


def test_parts_of_another_kind_or_release_are_refused(split, tiny, tmp_path):
    def vae(path: Path) -> str:
        return refused(lambda: workspace(split.distilled, video_vae_path=path).video_decoder)

    assert "wanted the video VAE of LTX-2.5, got the audio VAE" in vae(split.audio_vae)
    older = changed(split.video_vae, tmp_path / "older.safetensors", model_version="2.3.0")
    assert "is of LTX 2.3.0, but the checkpoint is of LTX-2.5" in vae(older)
    message = refused(lambda: workspace(tiny.checkpoint, video_vae_path=split.video_vae))
    assert "has its own video VAE; leave --video-vae-path out" in message
    lora = changed(split.lora, tmp_path / "lora.safetensors", model_version="2.3.0")
    wide = {name: torch.zeros(4, 4).bfloat16() for name in load_file(lora)}
    save_file(wide, tmp_path / "wide.safetensors", {"model_version": "2.3.0"})
    unfit = Lora(tmp_path / "wide.safetensors")
    message = refused(lambda: workspace(split.dev).source("dit", (unfit,)))
    assert message.startswith(f"--lora {unfit.path} is of LTX 2.3.0, but the checkpoint is of")
    (note,) = workspace(split.dev).source("dit", (Lora(lora),)).notes
    assert note.startswith(f"--lora {lora} is of LTX-2.3, the model of LTX-2.5: it is merged")


def test_a_file_without_a_version_is_of_the_release_in_its_name(split, tiny, tmp_path):
    lora = tmp_path / "ltx-2.3-22b-distilled-lora-384.safetensors"
    save_file(load_file(split.lora), lora)
    (note,) = workspace(split.dev).source("dit", (Lora(lora),)).notes
    assert "is of LTX-2.3, the model of LTX-2.5: it is merged, as all its layers fit" in note
    unnamed = tiny.spatial_upsampler
    older = shutil.copy(unnamed, tmp_path / "ltx-2.3-spatial-upscaler-x2-1.0.safetensors")
    release = workspace(split.distilled).checkpoint.release
    message = refused(lambda: upsampler_spec("spatial", older, torch.float32, release))
    assert "is of LTX 2.3 by its name" in message and "rename it" in message
    upsampler_spec("spatial", unnamed, torch.float32, release)


def test_a_missing_part_names_its_flag_and_the_folder(split, tmp_path):
    transformer = alone(split, tmp_path)
    for kind, flag in (
        ("gemma", "--gemma-root FILE"),
        ("video_vae", "--video-vae-path FILE"),
        ("audio_vae", "--audio-vae-path FILE"),
    ):
        message = refused(lambda kind=kind: ModelFiles(transformer).path(kind))
        assert "transformer of LTX-2.5 alone" in message and flag in message
        assert RELEASE_FILES["Lightricks/LTX-2.5"][kind] in message


def test_generated_keyframes_need_a_model_that_has_an_embedding_for_them(split, tiny):
    job = make_job("rain", Size(64, 64, 9), num_generated_keyframes=2)
    with pytest.raises(FieldError, match="the model of .* LTX 2.3.0, generates no keyframes"):
        workspace(tiny.checkpoint).resolved(job)
    workspace(split.distilled).resolved(job)


@pytest.mark.parametrize("compat", ["ltx-core-1.0.0", "ltx-core-1.0.0-conditioning"])
def test_numerics_of_a_release_that_did_not_run_ltx_2_5_are_refused_by_name(split, compat):
    job, opened = make_job("rain", Size(64, 64, 9)), workspace(split.distilled)
    preflight = Engine(opened, Recorder(), RunOptions(compat=compat)).preflight
    with pytest.raises(FieldError, match=f"--compat {compat}: that release does not run LTX-2.5"):
        preflight.check_inputs([job])
    Engine(opened, Recorder(), RunOptions(compat="ltx-pipelines-1.2.0")).preflight.check_inputs([opened.resolved(job)])
