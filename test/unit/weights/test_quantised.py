"""A checkpoint with quantised weights (float8, or int8 with rotations) gives what the file dequantised beforehand
gives, bit for bit; unknown layouts, damaged scales and nvfp4 are refused by name."""

import argparse
import json
import os
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace

import int8_files
import pytest
import torch
from helpers import rewrite
from int8_files import note, rotation
from jobs import make_job, replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron import flags, plan
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import checks
from ltx_neuron.errors import UserError
from ltx_neuron.host.loading import checkpoint_spec
from ltx_neuron.job import Size
from ltx_neuron.plan.table import table
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.lora import Lora, MergedSource
from ltx_neuron.weights.model_files import TextEncoderFile, located
from ltx_neuron.weights.sharder import compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.weight_file import WeightFile

BLOCK = "model.diffusion_model.transformer_blocks.1."  # the released ones keep first and last block
QUERY, KEY = f"{BLOCK}attn1.to_q", f"{BLOCK}attn1.to_k"
CAST = ".to_q", ".to_k", ".to_v", ".to_out.0", "ff.net.0.proj", "ff.net.2"
LAYOUTS = "scaled", "cast", "all", "comfy", "comfy_note"  # of float8
FORMAT = {"format": "float8_e4m3fn"}
INT8 = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


def quantise(layout: str, tensors: dict, metadata: dict) -> dict:
    """Store tensors in float8 as files of that layout do, in place. Returns what they stand for."""
    plain = {}
    linears = [name for name in tensors if name.startswith(BLOCK) and name.endswith(".weight")]
    linears = [name.removesuffix(".weight") for name in linears if tensors[name].ndim == 2]
    assert len(linears) == 34
    if layout in ("cast", "all"):
        parts = [f"{name}.{part}" for name in linears for part in ("weight", "bias")]
        cast = [part for part in parts if part.rpartition(".")[0].endswith(CAST)]
        for name in cast if layout == "cast" else list(tensors):
            if tensors[name].dtype == torch.bfloat16:
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                plain[name] = tensors[name].bfloat16()
        return plain
    for name in linears:
        weight, key = tensors[f"{name}.weight"].float(), f"{name}.weight"
        scale = weight.abs().amax() / 448
        tensors[key] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain[key] = (tensors[key].float() * scale).bfloat16()
        if layout == "comfy":
            tensors |= {f"{name}.scale_weight": scale[None], f"{name}.scale_input": scale.clone()}
        else:
            tensors[f"{name}.weight_scale"] = scale
        if layout == "comfy_note":
            tensors[f"{name}.comfy_quant"] = note(**FORMAT, full_precision_matrix_mult=True)
        if layout == "scaled":
            tensors[f"{name}.input_scale"] = torch.tensor(0.02)
    if layout == "comfy":
        tensors["model.diffusion_model.scaled_fp8"] = torch.ones(2).to(torch.float8_e4m3fn)
    if layout == "scaled":
        listed = {"format_version": "1.0", "layers": dict.fromkeys(linears, FORMAT)}
        metadata["_quantization_metadata"] = json.dumps(listed)
    return plain


def write(tiny, path: Path, layout: str) -> Path:
    """The tiny checkpoint in float8; beside it, as .plain, the tensors that it stands for."""
    tensors = load_file(tiny.checkpoint)
    with safe_open(tiny.checkpoint, "pt") as file:
        metadata = dict(file.metadata())
    whole = dict(tensors)
    save_file(whole | quantise(layout, tensors, metadata), path.with_suffix(".plain"), metadata)
    save_file(tensors, path, metadata)
    return path


@pytest.fixture(scope="module")
def float8(tiny, tmp_path_factory):
    """float8(layout): a checkpoint, and the same one dequantised beforehand."""

    @cache
    def files(layout: str) -> tuple[Checkpoint, Checkpoint]:
        path = tmp_path_factory.mktemp(layout) / "ltx-2.3-dev-fp8.safetensors"
        path = write(tiny, path, layout)
        return Checkpoint(path), Checkpoint(path.with_suffix(".plain"))

    return files


@pytest.fixture(scope="module")
def int8(split, tmp_path_factory):
    """The transformer and the text encoder, each with the same file dequantised beforehand."""
    folders = int8_files.download(split, tmp_path_factory.mktemp("files"))
    dit, gemma = ([located(folder, kind) for folder in folders] for kind in ("distilled", "gemma"))
    return {"dit": [*map(Checkpoint, dit)], "gemma3": [TextEncoderFile(path, "") for path in gemma]}


FILES = [(layout, model) for layout in LAYOUTS for model in SHARDED_MODELS] + [("int8", "dit"), ("int8", "gemma3")]


@pytest.fixture
def pairs(float8, int8, tiny):
    """pairs(layout, model): the files of a model, quantised and dequantised beforehand."""

    def files(layout: str, model: str) -> list[list]:
        if layout == "int8":
            return [[file] for file in int8[model]]
        return [[file, *(gemma_files(tiny.gemma_root) if model == "gemma3" else [])] for file in float8(layout)]

    return files


@pytest.fixture
def scaled(float8):
    return float8("scaled")[0].path


def shard(source: Source, folder: Path, tp: int, dtype=torch.bfloat16) -> dict[str, bytes]:
    shard_weights(source, folder, {"tp": tp}, tp, dtype, shard_specs(source, tp, {}))
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


RANKS = {
    "one rank": (1, None, torch.bfloat16),
    "two ranks with a lora": (2, 0.7, torch.bfloat16),
    "four ranks": (4, None, torch.bfloat16),
    "float32": (2, None, torch.float32),
}


@pytest.mark.parametrize(("tp", "strength", "dtype"), RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "int8"])
def test_rank_files_are_those_of_the_file_dequantised_beforehand(
    pairs, tiny, split, tmp_path, monkeypatch, layout, tp, strength, dtype
):
    if layout == "int8":  # pieces of a few rows
        monkeypatch.setattr("ltx_neuron.weights.sharder._PIECE_BYTES", 500)
        monkeypatch.setattr("ltx_neuron.weights.weight_file._PIECE", 100)
    lora = (split if layout == "int8" else tiny).lora
    loras = (Lora(lora, strength),) if strength else ()
    sources = [MergedSource(SHARDED_MODELS["dit"], files, loras) for files in pairs(layout, "dit")]
    quantised, plain = (shard(source, tmp_path / str(n), tp, dtype) for n, source in enumerate(sources))
    assert quantised == plain and len(quantised) == tp + 1


def test_the_matrices_of_an_int8_file_have_scales(int8):
    """28 matrices of each of 2 blocks, and 6 of each of 4 blocks of connectors."""
    assert len(int8["dit"][0].scales) == 80 and not int8["dit"][1].scales


@pytest.mark.parametrize(("layout", "model"), FILES)
def test_every_way_to_read_a_tensor_gives_the_dequantised_one(pairs, layout, model):
    files = pairs(layout, model)
    quantised, plain = (Source(SHARDED_MODELS[model], each) for each in files)
    assert quantised.locations.keys() == plain.locations.keys()
    for name in plain.names:
        tensor = plain.tensor(name)
        assert quantised.nbytes(name) == tensor.nbytes
        for read in (quantised.tensor(name), quantised.read_mapped(name)):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
        if tensor.ndim:
            row = min(1, len(tensor) - 1)
            assert torch.equal(quantised.rows(name, [row]), tensor[row : row + 1])
        quantised.prefetch(name)
    (file, *_), (expected, *_) = files
    in_order = dict(file.tensors())
    assert in_order.keys() >= expected.shapes.keys()
    assert all(torch.equal(in_order[name], expected.read(name)) for name in expected.shapes)


def test_the_host_s_models_are_those_of_the_file_dequantised_beforehand(float8):
    quantised, plain = (
        checkpoint_spec("video_decoder", file.path, file.config, torch.float32).load().state_dict()
        for file in float8("all")
    )
    assert all(torch.equal(quantised[key], tensor) for key, tensor in plain.items())


def test_a_value_is_scaled_in_float32_and_rounded_once(tmp_path):
    """Every one of the 256 codes of float8."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor(0.0012345678)
    tensors = {"a.weight": codes.reshape(16, 16), "a.weight_scale": scale, "a.bias": codes.clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    file = WeightFile(tmp_path / "a.safetensors", "")
    expected = (codes.float() * scale).bfloat16().reshape(16, 16)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(file.read("a.weight"), expected, **exactly)
    torch.testing.assert_close(file.read("a.bias"), codes.bfloat16(), **exactly)
    rounded_before = (codes.bfloat16() * scale.bfloat16()).reshape(16, 16)
    assert not torch.equal(rounded_before.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("group", "scales"), [(256, 8), (64, 8), (1, 8), (256, 1)])
def test_an_int8_value_is_rotated_and_scaled_in_float32_and_rounded_once(tmp_path, group, scales):
    """All 256 integers, -128 too, in the released group size; a scale for each row, or one."""
    values = torch.arange(8 * 512).mul(37).remainder(256).sub(128).to(torch.int8).view(8, 512)
    assert len(values.unique()) == 256
    scale = torch.linspace(0.0012345678, 0.02, scales)[:, None]
    rotated = {"convrot": True, "convrot_groupsize": group} if group > 1 else {"convrot": False}
    described = note(format="int8_tensorwise", per_row=True, **rotated)
    tensors = {"a.weight": values, "a.weight_scale": scale, "a.comfy_quant": described}
    save_file(tensors, tmp_path / "a.safetensors")
    file = WeightFile(tmp_path / "a.safetensors", "")
    back = (values.double() * scale.double()).view(8, -1, group) @ rotation(group)
    expected = back.view(8, 512).float().bfloat16()
    assert torch.equal(file.read("a.weight"), expected)
    assert torch.equal(file.read("a.weight", 3, 5), expected[3:5])


def test_half_the_bytes_of_a_weight_are_read_and_never_more_than_a_piece(scaled, tmp_path, monkeypatch):
    monkeypatch.setattr("ltx_neuron.weights.sharder._PIECE_BYTES", 500)
    read, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    file = Checkpoint(scaled)
    source = Source(SHARDED_MODELS["dit"], [file])
    monkeypatch.setattr(os, "preadv", counted)
    shard(source, tmp_path, 4)
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    names = [key for _, key in source.locations.values()]
    assert sum(read) == sum(prod(file.shapes[key]) * sizes[file.dtypes[key]] for key in names)
    weights = [f"{QUERY}.weight", f"{BLOCK}ff.net.0.proj.weight"]
    assert all(file.dtypes[key] == "F8_E4M3" for key in weights)
    row = max(prod(file.shapes[key][1:]) * sizes[file.dtypes[key]] for key in names)
    assert max(read) <= max(500, row)


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_a_quantised_file_has_its_own_identity_and_is_verified(kind, scaled, float8, int8, tmp_path):
    quantised, plain = float8("scaled") if kind == "float8" else int8["dit"]
    workspace = Workspace(quantised.path, resolve("cpu"), tmp_path, 2, "bfloat16")
    (folder,) = build.make(workspace, workspace.weight_sets("dit"))
    assert workspace.identity["weights"] == f"{kind}, dequantised"
    assert f"weights in {kind} are dequantised" in workspace.checkpoint.describe_quantised()
    source = workspace.source("dit")
    specs = shard_specs(source, 2, {})
    assert compare(source, folder, torch.bfloat16, specs) == []
    other = Workspace(plain.path, resolve("cpu"), tmp_path, 2, "bfloat16")
    assert other.weight_set("dit").identity["source"] != workspace.weight_set("dit").identity["source"]
    assert "weights" not in other.identity
    if kind == "float8":
        path = rewrite(scaled, tmp_path / "other.safetensors", lambda tensors: tensors[f"{QUERY}.weight_scale"].mul_(2))
        damaged = Source(SHARDED_MODELS["dit"], [Checkpoint(path)])
        assert damaged.fingerprint != source.fingerprint
        name = "transformer_blocks.1.attn1.to_q.weight differs from the source"
        problems = compare(damaged, folder, torch.bfloat16, specs)
        assert problems == [f"rank{rank}.safetensors: {name}" for rank in range(2)]


# --- what is refused ------------------------------------------------------------------------------
def layers() -> tuple[dict, dict]:
    """Two scaled layers, and the metadata that lists them."""
    tensors = {}
    for name in (QUERY, KEY):
        tensors[f"{name}.weight"] = torch.ones(8, 4).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.bias": torch.ones(8).bfloat16()}
        tensors |= {f"{name}.{part}": torch.tensor(0.02) for part in ("weight_scale", "input_scale")}
    listed = json.dumps({"layers": dict.fromkeys((QUERY, KEY), FORMAT)})
    return tensors, {"_quantization_metadata": listed}


def put(part: str, tensor: torch.Tensor):
    return lambda tensors, metadata: tensors.update({f"{QUERY}.{part}": tensor})


def leave_out(*parts: str, listed: bool = True):
    def change(tensors, metadata):
        if not listed:
            metadata.clear()
        for part in parts:
            del tensors[f"{QUERY}.{part}"]

    return change


def described_as(format: str):
    def change(tensors, metadata):
        listed = json.dumps({"layers": {QUERY: {"format": format}, KEY: FORMAT}})
        metadata["_quantization_metadata"] = listed

    return change


BAD = "weight_scale is {}, wanted a finite number above 0"
STORED = "weight is stored as F8_E4M3"
MISSING = f"{STORED}, but its weight_scale is missing"
REFUSED = {
    "NaN": (put("weight_scale", torch.tensor(float("nan"))), BAD.format("nan")),
    "infinite": (put("weight_scale", torch.tensor(float("inf"))), BAD.format("inf")),
    "zero": (put("weight_scale", torch.tensor(0.0)), BAD.format("0.0")),
    "negative": (put("weight_scale", torch.tensor(-0.5)), BAD.format("-0.5")),
    "one a row": (put("weight_scale", torch.ones(8)), f"{STORED} with a weight_scale of shape [8], wanted one number"),
    "whole numbers": (put("weight_scale", torch.tensor(1)), "weight_scale is stored as I64, which"),
    "missing": (leave_out("weight_scale"), MISSING),
    "missing, as metadata say": (leave_out("weight_scale", "input_scale"), MISSING),
    "missing, as input_scale says": (leave_out("weight_scale", listed=False), MISSING),
    "missing, as others say": (leave_out("weight_scale", "input_scale", listed=False), MISSING),
    "without a weight": (leave_out("weight"), f"exists, but {QUERY}.weight is missing"),
    "beside bfloat16": (put("weight", torch.ones(8, 4).bfloat16()), f"weight_scale exists, but {QUERY}.weight is BF16"),
    "two scales": (put("scale_weight", torch.tensor(1.0)), "both a weight_scale and a scale_weight"),
    "mxfp8": (described_as("mxfp8"), 'weight is quantised as {"format": "mxfp8"}, not implemented'),
    "rotated": (put("comfy_quant", note(**FORMAT, convrot=True)), "true}, not implemented"),
    # LTX-2.5's int8-convrot files, as ComfyUI and its converters describe them.
    "int8, rotated": (
        put("comfy_quant", note(format="int8_tensorwise", convrot=True, convrot_groupsize=256)),
        '"int8_tensorwise", "convrot": true, "convrot_groupsize": 256}, not implemented',
    ),
    "nvfp4": (put("comfy_quant", note(format="nvfp4")), '{"format": "nvfp4"}, not implemented'),
    "a damaged note": (put("comfy_quant", note(**FORMAT)[:-1]), "comfy_quant is not a JSON object"),
    "blocks": (put("weight_scale_inv", torch.ones(1, 1)), "is of an unknown layout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_layout_or_a_damaged_scale_is_refused_by_tensor(tmp_path, case):
    change, message = REFUSED[case]
    path, (tensors, metadata) = tmp_path / "bad.safetensors", layers()
    save_file(tensors, path, metadata)
    assert WeightFile(path, "").scales.keys() == {f"{QUERY}.weight", f"{KEY}.weight"}
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(UserError) as refused:
        WeightFile(path, "DOWNLOAD")
    title, problem, reference = str(refused.value).splitlines()
    assert title == f"{path} has weights that cannot be read:"
    assert problem.startswith(f"  {QUERY}.") and message in problem
    assert reference.startswith("Wanted: BF16, or F8_E4M3") and reference.endswith("DOWNLOAD")


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": ["attn1"]}'])
def test_metadata_that_are_no_list_of_layers_are_refused(tmp_path, text):
    path, (tensors, _) = tmp_path / "bad.safetensors", layers()
    save_file(tensors, path, {"_quantization_metadata": text})
    with pytest.raises(UserError, match="_quantization_metadata is damaged"):
        WeightFile(path, "")


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float8_e5m2, "F8_E5M2"), (torch.uint8, "U8"), (torch.int8, "I8")])
def test_weights_in_another_small_dtype_are_refused_by_name(tmp_path, dtype, stored):
    path = tmp_path / "bad.safetensors"
    save_file({f"{QUERY}.weight": torch.ones(8, 4).to(dtype)}, path)
    message = f"{QUERY}.weight is stored as {stored}, which is not implemented; wanted.*F8_E4M3"
    with pytest.raises(UserError, match=f"{message}(?s:.*)DOWNLOAD"):
        Source(SHARDED_MODELS["dit"], [WeightFile(path, "DOWNLOAD")])


def int8_layer() -> dict:
    values = torch.ones(8, 256, dtype=torch.int8)
    return {"a.weight": values, "a.weight_scale": torch.ones(8, 1), "a.comfy_quant": note(**INT8)}


REFUSED_INT8 = {
    "a scale of 0": ({"a.weight_scale": torch.zeros(8, 1)}, "not a finite number above 0"),
    "a scale of NaN": ({"a.weight_scale": torch.full((8, 1), torch.nan)}, "not a finite number"),
    "flat scales": ({"a.weight_scale": torch.ones(8)}, r"scale of shape [8], wanted [8, 1] or one"),
    "groups of 32": (
        {"a.comfy_quant": note(**INT8 | {"convrot_groupsize": 32})},
        "'convrot_groupsize': 32} with shape [8, 256], not implemented",
    ),
    "wide groups": (
        {"a.comfy_quant": note(**INT8 | {"convrot_groupsize": 1024})},
        "with shape [8, 256], not implemented",
    ),
    "four bits": ({"a.comfy_quant": note(format="convrot_w4a4")}, '"convrot_w4a4"}, not implemented'),
    "another field": ({"a.comfy_quant": note(**INT8, zero_point=1)}, "not implemented"),
    "nvfp4": (
        {"a.weight_scale_2": torch.tensor(1.0), "a.comfy_quant": note(format="nvfp4")},
        "has weights in nvfp4, which this toolkit does not read\nDownload the file in bfloat16",
    ),
}


@pytest.mark.parametrize("case", REFUSED_INT8)
def test_another_layout_of_integers_or_a_damaged_scale_is_refused(tmp_path, case):
    path, (change, message) = tmp_path / "bad.safetensors", REFUSED_INT8[case]
    save_file(int8_layer(), path)
    assert WeightFile(path, "").scales.keys() == {"a.weight"}
    save_file(int8_layer() | change, path)
    with pytest.raises(UserError) as refused:
        WeightFile(path, "DOWNLOAD")
    assert message in str(refused.value) and str(refused.value).endswith("DOWNLOAD")


def test_an_nvfp4_transformer_is_refused_with_the_file_of_its_release(tmp_path):
    path = tmp_path / "ltx-2.5-22b-distilled-transformer-nvfp4.safetensors"
    change, _ = REFUSED_INT8["nvfp4"]
    save_file(int8_layer() | change, path, {"config": "{}", "model_version": "2.5.0"})
    with pytest.raises(UserError, match="Lightricks/LTX-2.5 diffusion_models/.*-bf16.safetensors"):
        Checkpoint(path)


# --- what is printed ---------------------------------------------------------------------------------
LINE = "34 weights in float8 are dequantised while sharding; the sharded set is as large as the bf16 file's"


def test_the_plan_prints_it_and_counts_the_bytes_of_the_bfloat16_file(float8):
    scaled, plain = float8("scaled")
    planned = plan.plan(scaled, resolve("cpu"), make_job("", Size(64, 64, 9)), 2, "bfloat16", None)
    assert LINE in " ".join(table(planned).split())
    assert "float8" not in table(replace(planned, quantised=plain.describe_quantised()))
    reference = plan._dit_bytes(plain, 2, torch.bfloat16)
    assert plan._dit_bytes(scaled, 2, torch.bfloat16) == reference


def test_the_doctor_prints_it_of_a_file_that_is_whole(scaled, tmp_path):
    workspace = Workspace(scaled, resolve("cpu"), tmp_path, 2, "bfloat16")
    examination = SimpleNamespace(workspace=lambda: workspace, weight_sets=((),))
    assert f"; {LINE} (34 have a scale)" in checks._checkpoint(examination)


@pytest.mark.parametrize(
    ("name", "recipe"), [("ltx-2.3-22b-dev-fp8", "dev"), ("ltx-2.3-22b-distilled-fp8", "distilled")]
)
def test_the_recipe_is_guessed_by_a_name_with_fp8(name, recipe):
    path = Path(f"{name}.safetensors")
    assert flags.recipe(argparse.Namespace(recipe=None, checkpoint_path=path)) == recipe
