"""A checkpoint with float8 weights gives what the file dequantised beforehand gives, bit for bit;
a layout that is not known and a damaged scale are refused by name."""

import argparse
import json
import os
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import rewrite
from jobs import make_job, replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron import flags, plan
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import checks
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json
from ltx_neuron.host.loading import checkpoint_spec
from ltx_neuron.job import Size
from ltx_neuron.plan.table import table
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.lora import Lora, MergedSource
from ltx_neuron.weights.sharder import compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.weight_file import WeightFile

BLOCK = "model.diffusion_model.transformer_blocks.1."  # the released ones keep first and last block
QUERY, KEY = f"{BLOCK}attn1.to_q", f"{BLOCK}attn1.to_k"
CAST = ".to_q", ".to_k", ".to_v", ".to_out.0", "ff.net.0.proj", "ff.net.2"
LAYOUTS = "scaled", "cast", "all", "comfy", "comfy_note"
FORMAT = {"format": "float8_e4m3fn"}


def note(**fields) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


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
        said = {"format_version": "1.0", "layers": dict.fromkeys(linears, FORMAT)}
        metadata["_quantization_metadata"] = json.dumps(said)
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
def made(tiny, tmp_path_factory):
    """made(layout): a float8 checkpoint, and the same one dequantised beforehand."""

    @cache
    def files(layout: str) -> tuple[Checkpoint, Checkpoint]:
        path = tmp_path_factory.mktemp(layout) / "ltx-2.3-dev-fp8.safetensors"
        path = write(tiny, path, layout)
        return Checkpoint(path), Checkpoint(path.with_suffix(".plain"))

    return files


@pytest.fixture(params=LAYOUTS)
def pair(request, made):
    return made(request.param)


@pytest.fixture
def scaled(made):
    return made("scaled")[0].path


def shard(source: Source, folder: Path, tp: int, dtype=torch.bfloat16) -> dict[str, bytes]:
    shard_weights(source, folder, {"tp": tp}, tp, dtype, shard_specs(source, tp, {}))
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("strength", [None, 0.7], ids=["plain", "with a lora"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_files_are_those_of_the_file_dequantised_beforehand(pair, tiny, tmp_path, tp, strength):
    loras = (Lora(tiny.lora, strength),) if strength else ()
    found, wanted = (
        shard(MergedSource(SHARDED_MODELS["dit"], [file], loras), tmp_path / file.path.suffix, tp) for file in pair
    )
    assert found == wanted and len(found) == tp + 1


def test_rank_files_in_float32_hold_the_bfloat16_values(pair, tmp_path):
    found, wanted = (
        shard(Source(SHARDED_MODELS["dit"], [file]), tmp_path / file.path.suffix, 2, torch.float32) for file in pair
    )
    assert found == wanted


@pytest.mark.parametrize("model", SHARDED_MODELS)
def test_every_way_to_read_a_tensor_gives_the_dequantised_one(pair, tiny, model):
    files = gemma_files(tiny.gemma_root) if model == "gemma3" else []
    found, wanted = (Source(SHARDED_MODELS[model], [file, *files]) for file in pair)
    assert found.locations.keys() == wanted.locations.keys()
    for name in wanted.names:
        tensor = wanted.tensor(name)
        assert found.nbytes(name) == tensor.nbytes
        for read in (found.tensor(name), found.read_mapped(name)):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
        if tensor.ndim:
            assert torch.equal(found.rows(name, [0]), tensor[:1])
        found.prefetch(name)


def test_all_tensors_of_a_file_in_its_order_are_the_dequantised_ones(pair):
    found, wanted = pair
    read = dict(found.tensors())
    assert read.keys() == wanted.shapes.keys()
    assert all(torch.equal(tensor, wanted.read(name)) for name, tensor in read.items())


def test_the_host_s_models_are_those_of_the_file_dequantised_beforehand(made):
    found, wanted = (
        checkpoint_spec("video_decoder", file.path, file.config, torch.float32).load().state_dict()
        for file in made("all")
    )
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_a_value_is_scaled_in_float32_and_rounded_once(tmp_path):
    """Every one of the 256 codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor(0.0012345678)
    tensors = {"a.weight": codes.reshape(16, 16), "a.weight_scale": scale, "a.bias": codes.clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    file = WeightFile(tmp_path / "a.safetensors", "")
    wanted = (codes.float() * scale).bfloat16().reshape(16, 16)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(file.read("a.weight"), wanted, **exactly)
    torch.testing.assert_close(file.read("a.bias"), codes.bfloat16(), **exactly)
    rounded_before = (codes.bfloat16() * scale.bfloat16()).reshape(16, 16)
    assert not torch.equal(rounded_before.nan_to_num(), wanted.nan_to_num())


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


def test_an_fp8_file_has_its_own_identity_and_is_verified(scaled, tiny, tmp_path):
    workspace = Workspace(scaled, resolve("cpu"), tmp_path, 2, "bfloat16")
    (folder,) = build.make(workspace, workspace.weight_sets("dit"))
    assert workspace.identity["weights"] == "float8, dequantised"
    source = workspace.source("dit")
    specs = shard_specs(source, 2, {})
    assert compare(source, folder, torch.bfloat16, specs) == []
    identity = read_json(folder / MANIFEST)["identity"]
    plain = Workspace(scaled.with_suffix(".plain"), resolve("cpu"), tmp_path, 2, "bfloat16")
    assert plain.weight_set("dit").identity["source"] != identity["source"]
    assert "weights" not in plain.identity
    other = tmp_path / "other.safetensors"
    rewrite(scaled, other, lambda tensors: tensors[f"{QUERY}.weight_scale"].mul_(2))
    damaged = Source(SHARDED_MODELS["dit"], [Checkpoint(other)])
    assert damaged.fingerprint != source.fingerprint
    problems = compare(damaged, folder, torch.bfloat16, specs)
    name = "transformer_blocks.1.attn1.to_q.weight differs from the source"
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


def say(format: str):
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
    "mxfp8": (say("mxfp8"), 'weight is quantised as {"format": "mxfp8"}, not implemented'),
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
    change, said = REFUSED[case]
    path, (tensors, metadata) = tmp_path / "bad.safetensors", layers()
    save_file(tensors, path, metadata)
    assert WeightFile(path, "").scales.keys() == {f"{QUERY}.weight", f"{KEY}.weight"}
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(UserError) as refused:
        WeightFile(path, "DOWNLOAD")
    title, problem, wanted = str(refused.value).splitlines()
    assert title == f"{path} has weights that cannot be read:"
    assert problem.startswith(f"  {QUERY}.") and said in problem
    assert wanted.startswith("Wanted: BF16, or F8_E4M3") and wanted.endswith("DOWNLOAD")


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
    said = f"{QUERY}.weight is stored as {stored}, which is not implemented; wanted.*F8_E4M3"
    with pytest.raises(UserError, match=f"{said}(?s:.*)DOWNLOAD"):
        Source(SHARDED_MODELS["dit"], [WeightFile(path, "DOWNLOAD")])


# --- what is said ---------------------------------------------------------------------------------
LINE = "34 weights in float8 are dequantised while sharding; the sharded set is as large as the bf16 file's"


def test_the_plan_says_it_and_counts_the_bytes_of_the_bfloat16_file(made):
    scaled, plain = made("scaled")
    planned = plan.plan(scaled, resolve("cpu"), make_job("", Size(64, 64, 9)), 2, "bfloat16", None)
    assert LINE in " ".join(table(planned).split())
    assert "float8" not in table(replace(planned, quantised=plain.describe_quantised()))
    wanted = plan._dit_bytes(plain, 2, torch.bfloat16)
    assert plan._dit_bytes(scaled, 2, torch.bfloat16) == wanted


def test_the_doctor_says_it_of_a_file_that_is_whole(scaled, tmp_path):
    workspace = Workspace(scaled, resolve("cpu"), tmp_path, 2, "bfloat16")
    examination = SimpleNamespace(workspace=lambda: workspace, weight_sets=((),))
    assert f"; {LINE} (34 have a scale)" in checks._checkpoint(examination)


@pytest.mark.parametrize(
    ("name", "recipe"), [("ltx-2.3-22b-dev-fp8", "dev"), ("ltx-2.3-22b-distilled-fp8", "distilled")]
)
def test_the_recipe_is_guessed_by_a_name_with_fp8(name, recipe):
    path = Path(f"{name}.safetensors")
    assert flags.recipe(argparse.Namespace(recipe=None, checkpoint_path=path)) == recipe
