"""A LoRA merged while the weights are cut gives the very bits of ltx-core's loader; what fits no
weight is refused."""

from pathlib import Path

import pytest
import torch
from helpers import one_thread, randn  # noqa: F401
from recipes_oracle import fused_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron.errors import UserError
from ltx_neuron.profiles import resolve
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource
from ltx_neuron.weights.rankfiles import HOST_FILE, rank_file
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.sharding import COL, HOST, MODELS, ROW, rule
from ltx_neuron.workspace import Workspace

STRENGTH = 0.7  # no power of two, so that it matters when it is applied
# Shares of the elements of all merged weights that a wrong order of rounding changes; measured 0.24
# and 0.17.
FUSED_IN_FP32, STRENGTH_AFTERWARDS = 0.1, 0.05
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@pytest.fixture(scope="module")
def other_lora(tiny, tmp_path_factory):
    """A LoRA of another rank on some of the weights."""
    tensors = load_file(tiny.lora)
    some = sorted(name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN))[::3]
    made = {}
    for seed, name in enumerate(some):
        (_, columns), (rows, _) = tensors[name + DOWN].shape, tensors[name + UP].shape
        made[name + DOWN], made[name + UP] = (
            randn(2, columns, seed=seed).bfloat16(),
            randn(rows, 2, seed=-seed).bfloat16(),
        )
    path = tmp_path_factory.mktemp("lora") / "other.safetensors"
    save_file(made, path)
    return path


def merged(tiny, *loras) -> MergedSource:
    return MergedSource(
        MODELS["dit"],
        [Checkpoint(tiny.checkpoint)],
        tuple(Lora(Path(path), s) for path, s in loras),
    )


def plain(tiny) -> Source:
    return Source(MODELS["dit"], [Checkpoint(tiny.checkpoint)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def assert_same_bits(source: Source, wanted: dict) -> None:
    assert wanted.keys() == source.locations.keys()
    assert [
        name for name in wanted if not same_bits(source.tensor(name), wanted[name].contiguous())
    ] == []


def changed(tiny, source: Source) -> set[str]:
    before = plain(tiny)
    return {
        name
        for name in source.locations
        if not torch.equal(source.tensor(name), before.tensor(name))
    }


@pytest.mark.parametrize("strength", [STRENGTH, -1.3])
def test_every_merged_weight_is_ltx_cores_bit_for_bit(tiny, strength):
    assert_same_bits(
        merged(tiny, (tiny.lora, strength)), fused_state(tiny, ((tiny.lora, strength),))
    )


def test_several_loras_are_merged_as_1_0_0_rounds_them(tiny, other_lora):
    loras = (tiny.lora, STRENGTH), (other_lora, 0.3), (tiny.lora, -0.2)
    source = merged(tiny, *loras)
    assert_same_bits(source, fused_state(tiny, loras))
    one_after_the_other = {}
    for name in source.locations:
        weight = plain(tiny).tensor(name)
        for file, strength in source.adapters.get(name, []):
            weight = weight + product(tensors_of(file, name), strength)
        one_after_the_other[name] = weight
    assert share_of_others(source, one_after_the_other) > 0  # so the order of rounding shows


@pytest.mark.parametrize("loras", [((0.0,)), ((0.0, STRENGTH))], ids=["alone", "beside another"])
def test_strength_0_changes_no_weight(tiny, other_lora, loras):
    chosen = tuple(zip((tiny.lora, other_lora), loras, strict=False))
    source = merged(tiny, *chosen)
    wanted = fused_state(tiny, chosen)
    assert all(torch.equal(source.tensor(name), wanted[name]) for name in source.locations)
    if len(loras) == 1:
        assert changed(tiny, source) == set()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_files_hold_slices_of_the_merged_weights(tiny, tp, tmp_path):
    source = merged(tiny, (tiny.lora, STRENGTH))
    shard_weights(source, tmp_path, {"tp": tp}, tp, torch.bfloat16, shard_specs(source, tp, {}))
    wanted = {
        name: weight.bfloat16()
        for name, weight in fused_state(tiny, ((tiny.lora, STRENGTH),)).items()
    }
    host = load_file(tmp_path / HOST_FILE)
    checked = set(host)
    assert [name for name, weight in host.items() if not same_bits(weight, wanted[name])] == []
    for rank in range(tp):
        held = load_file(tmp_path / rank_file(rank))
        checked |= held.keys()
        for name, weight in held.items():
            split, whole = rule(MODELS["dit"], name), wanted[name]
            part = whole.chunk(tp, dim=split)[rank] if split in (COL, ROW) else whole
            assert same_bits(weight, part.contiguous()), (name, rank)
    assert checked == wanted.keys()


def test_in_fp32_the_rank_files_hold_the_weights_that_were_merged_in_bf16(tiny, tmp_path):
    source = merged(tiny, (tiny.lora, STRENGTH))
    shard_weights(source, tmp_path, {"tp": 1}, 1, torch.float32, shard_specs(source, 1, {}))
    wanted = fused_state(tiny, ((tiny.lora, STRENGTH),))
    held = load_file(tmp_path / rank_file(0)) | load_file(tmp_path / HOST_FILE)
    assert [name for name in wanted if not same_bits(held[name], wanted[name].float())] == []


def test_every_tensor_of_the_lora_is_used_gates_adaln_and_projections_too(tiny):
    source = merged(tiny, (tiny.lora, STRENGTH))
    with safe_open(tiny.lora, "pt") as file:
        wanted = {
            key.removeprefix("diffusion_model.").removesuffix(DOWN) + ".weight"
            for key in file.keys()
            if DOWN in key
        }
        assert len(file.keys()) == 2 * len(wanted) == 2 * len(source.adapters)
    assert changed(tiny, source) == wanted == source.adapters.keys()
    for part in (
        "to_gate_logits",
        "adaln_single",
        "patchify_proj",
        "proj_out",
        "audio_ff.net",
        "av_ca_a2v_gate",
    ):
        assert any(part in name for name in wanted), part
    assert {rule(MODELS["dit"], name) for name in wanted} == {COL, ROW, None, HOST}


def tensors_of(file, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with safe_open(file.path, "pt") as opened:
        module = "diffusion_model." + name.removesuffix(".weight")
        return opened.get_tensor(module + DOWN), opened.get_tensor(module + UP)


def product(tensors, strength: float) -> torch.Tensor:
    down, up = tensors
    return (up * strength) @ down


def in_fp32(weight, down, up):
    return (weight.float() + (up.float() * STRENGTH) @ down.float()).bfloat16()


def strength_afterwards(weight, down, up):
    return weight + (up @ down) * STRENGTH


def share_of_others(source: Source, other: dict) -> float:
    """The share of the elements of merged weights that differ."""
    names = source.adapters.keys()
    differing = sum((source.tensor(name) != other[name]).sum().item() for name in names)
    return differing / sum(other[name].numel() for name in names)


@pytest.mark.parametrize(
    ("wrong", "share"), [(in_fp32, FUSED_IN_FP32), (strength_afterwards, STRENGTH_AFTERWARDS)]
)
def test_another_order_of_rounding_is_not_ours(tiny, wrong, share):
    source = merged(tiny, (tiny.lora, STRENGTH))
    other = {
        name: wrong(plain(tiny).tensor(name), *tensors_of(adapters[0][0], name))
        for name, adapters in source.adapters.items()
    }
    assert share_of_others(source, other) > share


def test_products_are_taken_in_the_loras_dtype(tiny, tmp_path):
    wide = {name: tensor.float() + 1e-4 for name, tensor in load_file(tiny.lora).items()}
    save_file(wide, tmp_path / "wide.safetensors")
    loras = ((tmp_path / "wide.safetensors", STRENGTH),)
    assert_same_bits(merged(tiny, *loras), fused_state(tiny, loras))


def test_names_without_the_prefix_mean_the_same(tiny, tmp_path):
    bare = {
        name.removeprefix("diffusion_model."): tensor
        for name, tensor in load_file(tiny.lora).items()
    }
    save_file(bare, tmp_path / "bare.safetensors")
    wanted = merged(tiny, (tiny.lora, STRENGTH))
    got = merged(tiny, (tmp_path / "bare.safetensors", STRENGTH))
    assert [
        name for name in wanted.locations if not same_bits(wanted.tensor(name), got.tensor(name))
    ] == []


# --- what is refused -----------------------------------------------------------------------------
BLOCK = "diffusion_model.transformer_blocks.0."


def refused(tiny, tmp_path, change) -> str:
    """What is said of the tiny LoRA after `change`."""
    tensors = load_file(tiny.lora)
    change(tensors)
    path = tmp_path / "wrong.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(UserError) as error:
        merged(tiny, (path, 1.0))
    assert str(path) in str(error.value)
    return str(error.value)


def test_everything_that_does_not_fit_is_listed_in_one_error(tiny, tmp_path):
    def change(tensors):
        del tensors[f"{BLOCK}attn1.to_q{UP}"]
        tensors[f"{BLOCK}attn2.to_q{DOWN}"] = tensors[f"{BLOCK}attn2.to_q{DOWN}"][:, :-1]
        tensors[f"{BLOCK}attn2.to_k{DOWN}"] = tensors[f"{BLOCK}attn2.to_k{DOWN}"][:-1]
        tensors["diffusion_model.transformer_blocks.99.attn1.to_q" + DOWN] = torch.zeros(
            4, 32, dtype=torch.bfloat16
        )
        tensors["text_encoder.layers.0.q_proj" + DOWN] = torch.zeros(4, 32, dtype=torch.bfloat16)
        tensors[f"{BLOCK}attn1.to_q.alpha"] = torch.ones(1)

    said = refused(tiny, tmp_path, change)
    wanted = (
        f"{BLOCK}attn1.to_q{DOWN}: {BLOCK}attn1.to_q{UP} is missing",
        (
            f"{BLOCK}attn2.to_q{DOWN}: shape [4, 31] does not fit"
            " transformer_blocks.0.attn2.to_q.weight of shape [32, 32]"
        ),
        f"{BLOCK}attn2.to_k{DOWN}: rank 3, but {BLOCK}attn2.to_k{UP} has 4",
        f"diffusion_model.transformer_blocks.99.attn1.to_q{DOWN}: matches no weight of the model",
        f"text_encoder.layers.0.q_proj{DOWN}: matches no weight of the model",
        f"{BLOCK}attn1.to_q.alpha: matches no weight of the model",
    )
    assert [line for line in wanted if line not in said] == []
    assert len(said.splitlines()) == 1 + len(wanted)


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")]
)
def test_a_dtype_that_no_product_is_taken_in_is_refused_by_name(tiny, tmp_path, dtype, stored):
    def change(tensors):
        for part in (UP, DOWN):
            tensors[f"{BLOCK}attn1.to_q{part}"] = tensors[f"{BLOCK}attn1.to_q{part}"].to(dtype)

    said = refused(tiny, tmp_path, change)
    for part in (UP, DOWN):
        wanted = f"{BLOCK}attn1.to_q{part}: stored as {stored}, which is not implemented; wanted"
        assert wanted in said
    assert "BF16" in said and len(said.splitlines()) == 3


def test_two_factors_of_different_dtypes_are_refused(tiny, tmp_path):
    def change(tensors):
        tensors[f"{BLOCK}attn1.to_q{UP}"] = tensors[f"{BLOCK}attn1.to_q{UP}"].float()

    wanted = f"attn1.to_q{DOWN}: stored as BF16, but {BLOCK}attn1.to_q{UP} as F32: convert both"
    assert wanted in refused(tiny, tmp_path, change)


def test_a_module_with_and_without_the_prefix_is_refused(tiny, tmp_path):
    """Else one of its products would be added twice and the other one never."""

    def change(tensors):
        for part in (UP, DOWN):
            key = f"{BLOCK}attn1.to_q{part}"
            tensors[key.removeprefix("diffusion_model.")] = tensors[key] * 2

    said = refused(tiny, tmp_path, change)
    bare = BLOCK.removeprefix("diffusion_model.")
    assert f"{BLOCK}attn1.to_q{DOWN}" in said and f"{bare}attn1.to_q{DOWN}" in said
    assert "is of the same weight; leave one out" in said and len(said.splitlines()) == 2


def test_a_lora_of_another_model_is_refused_with_a_short_list(tiny, tmp_path):
    def change(tensors):
        for name in list(tensors):
            tensors["unet." + name] = tensors.pop(name)

    said = refused(tiny, tmp_path, change)
    assert "is not a LoRA of this model" in said
    assert len(said.splitlines()) <= 22 and "and " in said.splitlines()[-1]


def test_a_file_without_lora_tensors_is_refused(tiny, tmp_path):
    assert "no lora_A / lora_B tensors" in refused(tiny, tmp_path, lambda tensors: tensors.clear())


def test_a_base_weight_that_is_not_bf16_is_refused(tiny, tmp_path):
    name = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    weights = load_file(tiny.checkpoint)
    weights[name] = weights[name].float()
    with safe_open(tiny.checkpoint, "pt") as file:
        save_file(weights, tmp_path / "wide.safetensors", file.metadata())
    with pytest.raises(UserError, match=r"attn1\.to_q\.weight is not stored in BF16"):
        MergedSource(MODELS["dit"], [Checkpoint(tmp_path / "wide.safetensors")], (Lora(tiny.lora),))


def test_a_strength_that_is_no_number_is_refused():
    for strength in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="strength"):
            Lora(Path("lora.safetensors"), strength)


def test_a_lora_that_is_not_there_is_refused_with_a_download(tiny, tmp_path):
    with pytest.raises(
        UserError, match=r"no such file: .*absent\.safetensors\nDownload it: hf download"
    ):
        merged(tiny, (tmp_path / "absent.safetensors", 1.0))


# --- identities ----------------------------------------------------------------------------------
def test_weight_sets_are_told_apart_by_file_strength_and_order(tiny, other_lora):
    chosen = (
        (),
        ((tiny.lora, 0.7),),
        ((tiny.lora, 0.8),),
        ((other_lora, 0.7),),
        ((tiny.lora, 0.7), (other_lora, 0.7)),
        ((other_lora, 0.7), (tiny.lora, 0.7)),
    )
    identities = [str(merged(tiny, *loras).lora_identity) for loras in chosen]
    assert len(set(identities)) == len(chosen)


def test_a_set_is_found_by_the_loras_content_and_missing_ones_name_the_command(tiny, tmp_path):
    def workspace(*loras, refining=()):
        given = (
            tuple(Lora(Path(path), strength) for path, strength in each)
            for each in (loras, refining)
        )
        return Workspace(
            tiny.checkpoint,
            resolve("cpu"),
            tmp_path / "artifacts",
            2,
            "bfloat16",
            None,
            None,
            *given,
        )

    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(tiny.lora.read_bytes())
    made = workspace((tiny.lora, 0.5), refining=((tiny.lora, 0.25),)).shard_dit()
    assert len(set(made)) == 2
    found = workspace((copy, 0.5), refining=((copy, 0.25),))
    assert [found.dit_weights(), found.dit_weights(refines=True)] == made
    with pytest.raises(
        UserError, match=r"shard_backbone_weights\.py .*--lora .* 0\.75 .*--tp-degree 2"
    ):
        workspace((tiny.lora, 0.75)).dit_weights()
