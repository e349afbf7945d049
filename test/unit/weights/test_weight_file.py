"""Files with float8 or int8 weights are read as the file dequantised beforehand; other layouts are refused."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import rewrite
from jobs import make_job
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron import plan
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import checks
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.plan.table import table
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource
from ltx_neuron.weights.model_files import TextEncoderFile
from ltx_neuron.weights.sharder import compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import WeightFile

BLOCK = "model.diffusion_model.transformer_blocks.1."  # the released ones keep first and last block
QUERY, KEY = f"{BLOCK}attn1.to_q", f"{BLOCK}attn1.to_k"
CAST = ".to_q", ".to_k", ".to_v", ".to_out.0", "ff.net.0.proj", "ff.net.2"
FLOAT8, FORMAT = torch.float8_e4m3fn, {"format": "float8_e4m3fn"}
INT8 = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
LAYOUTS = [(layout, "dit") for layout in ("scaled", "cast", "all", "comfy", "comfy_note", "int8")]


def rotation(size: int) -> torch.Tensor:
    """H (size, size): the product, over the digits of row and column to base 4, of -1 where the two digits add up to 3
    and 1 elsewhere, over the root of the size."""
    numbers, result = torch.arange(size), torch.ones(size, size, dtype=torch.float64)
    place = 1
    while place < size:
        digits = numbers // place % 4
        result *= torch.where(digits[:, None] + digits[None] == 3, -1.0, 1.0)
        place *= 4
    return result / size**0.5


def note(**fields) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def matrices(tensors: dict) -> list[str]:
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    return [name for name in names if tensors[f"{name}.weight"].ndim == 2]


def in_int8(tensors: dict, metadata: dict) -> dict:
    """As Lightricks' int8-convrot files: the rotation by its formula, in float64."""
    plain, layers = {}, {}
    for name in matrices(tensors):
        rows, columns = (weight := tensors[f"{name}.weight"]).shape
        group = next((size for size in (256, 64, 16) if columns % size == 0), 4)
        turned = (weight.double().view(rows, -1, group) @ rotation(group).T).view(rows, columns)
        scale = (turned.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30).float()
        values = (turned / scale).round().clamp(-128, 127).to(torch.int8)
        back = (values.double() * scale).view(rows, -1, group) @ rotation(group)
        plain[f"{name}.weight"] = back.view(rows, columns).float().bfloat16()
        layers[name] = INT8 | {"convrot_groupsize": group}
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale}
        tensors[f"{name}.comfy_quant"] = note(**layers[name])
    metadata["_quantization_metadata"] = json.dumps({"layers": layers})
    return plain


def quantise(layout: str, tensors: dict, metadata: dict) -> dict:
    """Store tensors as files of that layout do, in place. Returns what they stand for."""
    if layout == "int8":
        return in_int8(tensors, metadata)
    plain, layers = {}, [name for name in matrices(tensors) if name.startswith(BLOCK)]
    if layout in ("cast", "all"):
        cast = [f"{name}.{part}" for name in layers if name.endswith(CAST) for part in ("weight", "bias")]
        for name in cast if layout == "cast" else list(tensors):
            if tensors[name].dtype == torch.bfloat16:
                tensors[name] = tensors[name].to(FLOAT8)
                plain[name] = tensors[name].bfloat16()
        return plain
    for name in layers:
        key = f"{name}.weight"
        scale = tensors[key].float().abs().amax() / 448
        tensors[key] = (tensors[key].float() / scale).clamp(-448, 448).to(FLOAT8)
        plain[key] = (tensors[key].float() * scale).bfloat16()
        beside = {
            "comfy": {"scale_weight": scale[None], "scale_input": scale.clone()},
            "comfy_note": {"weight_scale": scale, "comfy_quant": note(**FORMAT, full_precision_matrix_mult=True)},
            "scaled": {"weight_scale": scale, "input_scale": torch.tensor(0.02)},
        }
        tensors |= {f"{name}.{part}": tensor for part, tensor in beside[layout].items()}
    if layout == "comfy":
        tensors["model.diffusion_model.scaled_fp8"] = torch.ones(2).to(FLOAT8)
    if layout == "scaled":
        metadata["_quantization_metadata"] = json.dumps({"layers": dict.fromkeys(layers, FORMAT)})
    return plain


@pytest.fixture(scope="module")
def pairs(tiny, split, tmp_path_factory):
    """pairs(layout, model): the files of a model, and the same ones dequantised beforehand."""

    @cache
    def files(layout: str, model: str = "dit") -> list[list]:
        path, opened = tmp_path_factory.mktemp(layout) / "ltx.safetensors", Checkpoint
        source = split.distilled if layout == "int8" else tiny.checkpoint
        if model == "gemma3":
            source, opened = split.text_encoder, lambda path: TextEncoderFile(path, "")
        tensors = load_file(source)
        with safe_open(source, "pt") as file:
            whole, metadata = dict(tensors), file.metadata()
        save_file(whole | quantise(layout, tensors, metadata), path.with_suffix(".plain"), metadata)
        save_file(tensors, path, metadata)
        return [[opened(path)], [opened(path.with_suffix(".plain"))]]

    return files


@pytest.mark.parametrize(("layout", "model"), [*LAYOUTS, ("all", "vae"), ("int8", "gemma3")])
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
    (file,), (expected,) = files
    in_order = dict(file.tensors())
    assert in_order.keys() >= expected.shapes.keys()
    assert all(torch.equal(in_order[name], expected.read(name)) for name in expected.shapes)
    assert file.quantised == ("int8" if layout == "int8" else "float8")


@pytest.mark.parametrize("layout", ["scaled", "int8"])
def test_rank_files_are_those_of_the_file_dequantised_beforehand(pairs, tiny, split, tmp_path, monkeypatch, layout):
    # Pieces of a few rows
    monkeypatch.setattr("ltx_neuron.weights.sharder._PIECE_BYTES", 500)
    monkeypatch.setattr("ltx_neuron.weights.tensorfile._PIECE", 100)
    loras, written = (Lora((split if layout == "int8" else tiny).lora, 0.7),), []
    for number, files in enumerate(pairs(layout)):
        source, folder = MergedSource(SHARDED_MODELS["dit"], files, loras), tmp_path / str(number)
        shard_weights(source, folder, {"tp": 2}, 2, torch.bfloat16, shard_specs(source, 2, {}))
        written.append({path.name: path.read_bytes() for path in folder.glob("*.safetensors")})
    assert written[0] == written[1] and len(written[0]) == 3


def test_each_of_the_256_codes_of_float8_is_scaled_in_float32_and_rounded_once(tmp_path):
    codes, scale = torch.arange(256, dtype=torch.uint8).view(FLOAT8), torch.tensor(0.0012345678)
    tensors = {"a.weight": codes.reshape(16, 16), "a.weight_scale": scale, "a.bias": codes.clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    file, expected = WeightFile(tmp_path / "a.safetensors", ""), (codes.float() * scale).bfloat16().reshape(16, 16)
    for name, tensor in {"a.weight": expected, "a.bias": codes.bfloat16()}.items():
        torch.testing.assert_close(file.read(name), tensor, rtol=0, atol=0, equal_nan=True)
    rounded_before = (codes.bfloat16() * scale.bfloat16()).reshape(16, 16)
    assert not torch.equal(rounded_before.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("group", "scales"), [(256, 8), (64, 8), (1, 8), (256, 1)])
def test_an_int8_value_is_rotated_and_scaled_in_float32_and_rounded_once(tmp_path, group, scales):
    """All 256 integers, -128 too, in the released group size; a scale for each row, or one."""
    values = torch.arange(8 * 512).mul(37).remainder(256).sub(128).to(torch.int8).view(8, 512)
    scale = torch.linspace(0.0012345678, 0.02, scales)[:, None]
    rotated = {"convrot": True, "convrot_groupsize": group} if group > 1 else {"convrot": False}
    described = note(format="int8_tensorwise", per_row=True, **rotated)
    save_file({"a.weight": values, "a.weight_scale": scale, "a.comfy_quant": described}, tmp_path / "a.safetensors")
    file = WeightFile(tmp_path / "a.safetensors", "")
    back = (values.double() * scale.double()).view(8, -1, group) @ rotation(group)
    expected = back.view(8, 512).float().bfloat16()
    assert torch.equal(file.read("a.weight"), expected) and torch.equal(file.read("a.weight", 3, 5), expected[3:5])


def test_a_quantised_file_has_its_own_identity_verified_scales_and_a_line_in_plans(pairs, tmp_path):
    (scaled,), (plain,) = pairs("scaled")
    workspace, other = (Workspace(file.path, resolve("cpu"), tmp_path, 2, "bfloat16") for file in (scaled, plain))
    (folder,) = build.make(workspace, workspace.weight_sets("dit"))
    assert workspace.identity["weights"] == "float8, dequantised" and "weights" not in other.identity
    assert other.weight_set("dit").identity["source"] != workspace.weight_set("dit").identity["source"]
    specs = shard_specs(source := workspace.source("dit"), 2, {})
    assert compare(source, folder, torch.bfloat16, specs) == []
    path = rewrite(scaled.path, tmp_path / "other", lambda tensors: tensors[f"{QUERY}.weight_scale"].mul_(2))
    damaged = Source(SHARDED_MODELS["dit"], [Checkpoint(path)])
    assert damaged.fingerprint != source.fingerprint
    problem = "transformer_blocks.1.attn1.to_q.weight differs from the source"
    assert compare(damaged, folder, torch.bfloat16, specs) == [f"rank{n}.safetensors: {problem}" for n in (0, 1)]
    # The plan and the doctor print it.
    line = "34 weights in float8 are dequantised while sharding; the sharded set is as large as the bf16 file's"
    planned = plan.plan(scaled, resolve("cpu"), make_job("", Size(64, 64, 9)), 2, "bfloat16", None)
    assert line in " ".join(table(planned).split())
    assert plan._dit_bytes(scaled, 2, torch.bfloat16) == plan._dit_bytes(plain, 2, torch.bfloat16)
    examination = SimpleNamespace(workspace=lambda: workspace, weight_sets=((),))
    assert f"; {line} (34 have a scale)" in checks._checkpoint(examination)


PARTS = {"weight": torch.ones(8, 4).to(FLOAT8), "bias": torch.ones(8).bfloat16()}
PARTS |= {"weight_scale": torch.tensor(0.02), "input_scale": torch.tensor(0.02)}
SCALED = {f"{name}.{part}": tensor.clone() for name in (QUERY, KEY) for part, tensor in PARTS.items()}
INTEGERS = {f"{QUERY}.weight": torch.ones(8, 256, dtype=torch.int8), f"{QUERY}.weight_scale": torch.ones(8, 1)}
INTEGERS[f"{QUERY}.comfy_quant"] = note(**INT8)
STORED = "weight is stored as F8_E4M3"
MISSING = f"{STORED}, but its weight_scale is missing"
BOTH = json.dumps({"layers": dict.fromkeys((QUERY, KEY), FORMAT)})
MXFP8 = json.dumps({"layers": {QUERY: {"format": "mxfp8"}, KEY: FORMAT}})
# The file, changed parts of a layer (None: left out), the metadata's list, and the problem
REFUSED = [
    (SCALED, {"weight_scale": torch.tensor(torch.nan)}, BOTH, "weight_scale is nan, wanted a finite number above 0"),
    (SCALED, {"weight_scale": torch.tensor(0.0)}, BOTH, "weight_scale is 0.0, wanted a finite number above 0"),
    (SCALED, {"weight_scale": torch.ones(8)}, BOTH, f"{STORED} with a weight_scale of shape [8], wanted one"),
    (SCALED, {"weight_scale": torch.tensor(1)}, BOTH, "weight_scale is stored as I64, which"),
    (SCALED, {"weight_scale": None}, "", MISSING),  # as input_scale says
    (SCALED, {"weight_scale": None, "input_scale": None}, "", MISSING),  # as others say
    (SCALED, {"weight": None}, BOTH, f"exists, but {QUERY}.weight is missing"),
    (SCALED, {"weight": torch.ones(8, 4).bfloat16()}, BOTH, f"exists, but {QUERY}.weight is BF16"),
    (SCALED, {"scale_weight": torch.tensor(1.0)}, BOTH, "both a weight_scale and a scale_weight"),
    (SCALED, {}, MXFP8, 'weight is quantised as {"format": "mxfp8"}, not implemented'),
    (SCALED, {"comfy_quant": note(**FORMAT, convrot=True)}, BOTH, "true}, not implemented"),
    (SCALED, {"comfy_quant": note(**FORMAT)[:-1]}, BOTH, "comfy_quant is not a JSON object"),
    (SCALED, {"weight_scale_inv": torch.ones(1, 1)}, BOTH, "is of an unknown layout"),
    (INTEGERS, {"weight_scale": torch.zeros(8, 1)}, "", "not a finite number above 0"),
    (INTEGERS, {"weight_scale": torch.ones(8)}, "", "scale of shape [8], wanted [8, 1] or one"),
    (INTEGERS, {"comfy_quant": note(**INT8 | {"convrot_groupsize": 1024})}, "", "with shape [8, 256], not implemented"),
    (INTEGERS, {"comfy_quant": note(**INT8, zero_point=1)}, "", "not implemented"),
]


@pytest.mark.parametrize(("whole", "changes", "layers", "message"), REFUSED)
def test_an_unknown_layout_or_a_damaged_scale_is_refused_by_its_tensor(tmp_path, whole, changes, layers, message):
    path = tmp_path / "bad.safetensors"
    save_file(whole, path)
    assert f"{QUERY}.weight" in WeightFile(path, "").scales
    changed = whole | {f"{QUERY}.{part}": tensor for part, tensor in changes.items()}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, path, {"_quantization_metadata": layers} if layers else None)
    with pytest.raises(UserError) as error:
        WeightFile(path, "DOWNLOAD")
    title, problem, reference = str(error.value).splitlines()
    assert title == f"{path} has weights that cannot be read:"
    assert problem.startswith(f"  {QUERY}.") and message in problem
    assert reference.startswith("Wanted: BF16, or F8_E4M3") and reference.endswith("DOWNLOAD")


def test_damaged_metadata_and_weights_in_another_small_dtype_are_refused_by_name(tmp_path):
    path = tmp_path / "bad.safetensors"
    for text in ("{", "[]", '{"layers": ["attn1"]}'):
        save_file(SCALED, path, {"_quantization_metadata": text})
        with pytest.raises(UserError, match="_quantization_metadata is damaged"):
            WeightFile(path, "")
    for dtype, stored in ((torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8")):
        save_file({f"{QUERY}.weight": torch.ones(8, 4).to(dtype)}, path)
        message = f"{QUERY}.weight is stored as {stored}, which is not implemented; wanted.*F8_E4M3(?s:.*)DOWNLOAD"
        with pytest.raises(UserError, match=message):
            Source(SHARDED_MODELS["dit"], [WeightFile(path, "DOWNLOAD")])
    save_file(SCALED | {f"{QUERY}.weight_scale_2": torch.ones(1)}, path)
    with pytest.raises(UserError, match="has weights in nvfp4, .*(?s:.*)in bfloat16.*DOWNLOAD"):
        WeightFile(path, "DOWNLOAD")
