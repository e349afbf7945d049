"""A file with int8-convrot weights gives what the file dequantised beforehand gives, bit for bit;
an unknown layout, a damaged scale and nvfp4 are refused."""

import int8_files
import pytest
import torch
from int8_files import note, rotation
from safetensors.torch import save_file

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import UserError
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource
from ltx_neuron.weights.model_files import TextEncoderFile, located
from ltx_neuron.weights.sharder import compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.weight_file import WeightFile

MIXED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


@pytest.fixture(scope="module")
def files(split, tmp_path_factory):
    """(int8, dequantised) of the transformer and of the text encoder."""
    folders = int8_files.download(split, tmp_path_factory.mktemp("files"))
    paths = [[located(folder, kind) for folder in folders] for kind in ("distilled", "gemma")]
    dit, gemma = map(Checkpoint, paths[0]), (TextEncoderFile(path, "") for path in paths[1])
    return {"dit": tuple(dit), "gemma3": tuple(gemma)}


def shard(source: Source, folder, tp: int) -> dict[str, bytes]:
    shard_weights(source, folder, {"tp": tp}, tp, torch.bfloat16, shard_specs(source, tp, {}))
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize(("model", "tp", "strength"), [("dit", 4, 0), ("dit", 2, 0.7)])
def test_rank_files_of_an_int8_file_are_those_of_the_file_dequantised_beforehand(
    files, split, tmp_path, monkeypatch, model, tp, strength
):
    monkeypatch.setattr("ltx_neuron.weights.sharder._PIECE_BYTES", 500)  # pieces of a few rows
    monkeypatch.setattr("ltx_neuron.weights.weight_file._PIECE", 100)
    loras = (Lora(split.lora, strength),) if strength else ()
    found, wanted = (
        shard(MergedSource(SHARDED_MODELS[model], [file], loras), tmp_path / file.path.stem, tp)
        for file in files[model]
    )
    assert found == wanted and len(found) == tp + 1
    # 28 matrices of each of 2 blocks, and 6 of each of 4 blocks of connectors.
    assert len(files[model][0].scales) == 80 and not files[model][1].scales


@pytest.mark.parametrize("model", ["dit", "gemma3"])
def test_every_way_to_read_an_int8_tensor_gives_the_dequantised_one(files, model):
    found, wanted = (Source(SHARDED_MODELS[model], [file]) for file in files[model])
    assert found.locations.keys() == wanted.locations.keys()
    for name in wanted.names:
        tensor = wanted.tensor(name)
        assert found.nbytes(name) == tensor.nbytes
        for read in (found.tensor(name), found.read_mapped(name)):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
        if tensor.ndim and len(tensor) > 1:
            assert torch.equal(found.rows(name, [1]), tensor[1:2])
    read = dict(files[model][0].tensors())
    assert all(torch.equal(read[key], files[model][1].read(key)) for key in files[model][1].shapes)


def test_an_int8_set_is_verified_and_its_identity_and_lines_say_so(files, tmp_path):
    path = files["dit"][0].path
    workspace = Workspace(path, resolve("cpu"), tmp_path, 2, "bfloat16")
    (folder,) = build.make(workspace, workspace.weight_sets("dit"))
    assert workspace.identity["weights"] == "int8, dequantised"
    source = workspace.source("dit")
    assert compare(source, folder, torch.bfloat16, shard_specs(source, 2, {})) == []
    assert "weights in int8 are dequantised" in workspace.checkpoint.describe_quantised()


@pytest.mark.parametrize(("group", "scales"), [(256, 8), (64, 8), (1, 8), (256, 1)])
def test_every_value_is_scaled_in_float32_and_rounded_once(tmp_path, group, scales):
    """All 256 integers, -128 too, in the released group size; a scale for each row, or one."""
    values = torch.arange(8 * 512).mul(37).remainder(256).sub(128).to(torch.int8).view(8, 512)
    assert len(values.unique()) == 256
    scale = torch.linspace(0.0012345678, 0.02, scales)[:, None]
    rotated = {"convrot": True, "convrot_groupsize": group} if group > 1 else {"convrot": False}
    told = note(format="int8_tensorwise", per_row=True, **rotated)
    tensors = {"a.weight": values, "a.weight_scale": scale, "a.comfy_quant": told}
    save_file(tensors, tmp_path / "a.safetensors")
    file = WeightFile(tmp_path / "a.safetensors", "")
    back = (values.double() * scale.double()).view(8, -1, group) @ rotation(group)
    wanted = back.view(8, 512).float().bfloat16()
    assert torch.equal(file.read("a.weight"), wanted)
    assert torch.equal(file.read("a.weight", 3, 5), wanted[3:5])


def layer() -> dict:
    values = torch.ones(8, 256, dtype=torch.int8)
    return {"a.weight": values, "a.weight_scale": torch.ones(8, 1), "a.comfy_quant": note(**MIXED)}


REFUSED = {
    "a scale of 0": ({"a.weight_scale": torch.zeros(8, 1)}, "not a finite number above 0"),
    "a scale of NaN": ({"a.weight_scale": torch.full((8, 1), torch.nan)}, "not a finite number"),
    "flat scales": ({"a.weight_scale": torch.ones(8)}, r"scale of shape [8], wanted [8, 1] or one"),
    "groups of 32": (
        {"a.comfy_quant": note(**MIXED | {"convrot_groupsize": 32})},
        "'convrot_groupsize': 32} with shape [8, 256], not implemented",
    ),
    "wide groups": (
        {"a.comfy_quant": note(**MIXED | {"convrot_groupsize": 1024})},
        "with shape [8, 256], not implemented",
    ),
    "four bits": ({"a.comfy_quant": note(format="convrot_w4a4")}, '"convrot_w4a4"}, not implemented'),
    "another field": ({"a.comfy_quant": note(**MIXED, zero_point=1)}, "not implemented"),
    "nvfp4": (
        {"a.weight_scale_2": torch.tensor(1.0), "a.comfy_quant": note(format="nvfp4")},
        "has weights in nvfp4, which this toolkit does not read\nDownload the file in bfloat16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_layout_of_integers_or_a_damaged_scale_is_refused(tmp_path, case):
    path, (change, said) = tmp_path / "bad.safetensors", REFUSED[case]
    save_file(layer(), path)
    assert WeightFile(path, "").scales.keys() == {"a.weight"}
    save_file(layer() | change, path)
    with pytest.raises(UserError) as refused:
        WeightFile(path, "DOWNLOAD")
    assert said in str(refused.value) and str(refused.value).endswith("DOWNLOAD")


def test_an_nvfp4_transformer_is_refused_with_the_file_of_its_release(tmp_path):
    path = tmp_path / "ltx-2.5-22b-distilled-transformer-nvfp4.safetensors"
    change, said = REFUSED["nvfp4"]
    save_file(layer() | change, path, {"config": "{}", "model_version": "2.5.0"})
    with pytest.raises(UserError, match="Lightricks/LTX-2.5 diffusion_models/.*-bf16.safetensors"):
        Checkpoint(path)
