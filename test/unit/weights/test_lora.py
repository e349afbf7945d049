"""A LoRA merged while the weights are cut gives the very bits of ltx-core's loader; what fits no
weight is refused."""

import argparse
import json
import shlex
from pathlib import Path

import pytest
import torch
from helpers import one_thread, randn  # noqa: F401
from jobs import make_job, replace
from recipes_oracle import fused_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_neuron import flags
from ltx_neuron.artifacts import build, finished_weights
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.commands import dispatch
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import check_distilled_loras
from ltx_neuron.errors import UserError
from ltx_neuron.invocation import command
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.sampling.spec import JobFields
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource, detailing_scale, reference_scale
from ltx_neuron.weights.rankfiles import HOST_FILE, rank_file
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.sharding import COL, HOST, ROW, SHARDED_MODELS, rule

STRENGTH = 0.7  # no power of two, so that it matters when it is applied
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
        SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)], tuple(Lora(Path(path), s) for path, s in loras)
    )


def plain(tiny) -> Source:
    return Source(SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def changed(tiny, source: Source) -> set[str]:
    before = plain(tiny)
    return {name for name in source.locations if not torch.equal(source.tensor(name), before.tensor(name))}


@pytest.fixture(scope="module")
def lora_files(tiny, other_lora, tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "float32.safetensors"
    save_file({name: tensor.float() + 1e-4 for name, tensor in load_file(tiny.lora).items()}, path)
    return {"bfloat16": tiny.lora, "float32": path, "other": other_lora}


@pytest.mark.parametrize(
    "loras",
    [
        [("bfloat16", STRENGTH)],
        [("bfloat16", -1.3)],
        [("bfloat16", 0.0)],
        [("bfloat16", 0.0), ("other", STRENGTH)],
        [("bfloat16", STRENGTH), ("other", 0.3), ("bfloat16", -0.2)],
        [("float32", STRENGTH)],
    ],
    ids=str,
)
def test_every_merged_weight_is_ltx_cores_bit_for_bit(tiny, lora_files, loras):
    """Products are taken in the LoRA's dtype; several are rounded as 1.0.0 rounds them."""
    chosen = tuple((lora_files[name], strength) for name, strength in loras)
    source, expected = merged(tiny, *chosen), fused_state(tiny, chosen)
    assert expected.keys() == source.locations.keys()
    assert [name for name in expected if not same_bits(source.tensor(name), expected[name].contiguous())] == []
    assert (changed(tiny, source) == set()) == (loras == [("bfloat16", 0.0)])


def test_several_loras_of_ltx_2_5_are_added_as_1_2_0_rounds_them(tiny, other_lora):
    source = merged(tiny, (tiny.lora, STRENGTH), (other_lora, 0.3))
    before = {name: source.tensor(name) for name in source.adapters}
    assert not source.rounds_once  # LTX-2.3
    source.rounds_once = True
    for name, adapters in source.adapters.items():
        total, *others = (tensors_of(adapter.file, name) for adapter in adapters)
        total = product(total, adapters[0].strength)
        for (a, b), adapter in zip(others, adapters[1:], strict=True):
            total.addmm_(b, a, alpha=adapter.strength)  # rounded once
        assert same_bits(source.tensor(name), total + plain(tiny).tensor(name))
    assert any(not same_bits(source.tensor(name), x) for name, x in before.items())


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (4, torch.bfloat16)])
def test_rank_files_hold_slices_of_the_merged_weights(tiny, tp, dtype, tmp_path):
    """Weights are merged in bf16, whatever the rank files' dtype."""
    source = merged(tiny, (tiny.lora, STRENGTH))
    shard_weights(source, tmp_path, {"tp": tp}, tp, dtype, shard_specs(source, tp, {}))
    expected = {name: weight.to(dtype) for name, weight in fused_state(tiny, ((tiny.lora, STRENGTH),)).items()}
    host = load_file(tmp_path / HOST_FILE)
    checked = set(host)
    assert [name for name, weight in host.items() if not same_bits(weight, expected[name])] == []
    for rank in range(tp):
        stored = load_file(tmp_path / rank_file(rank))
        checked |= stored.keys()
        for name, weight in stored.items():
            split, whole = rule(SHARDED_MODELS["dit"], name), expected[name]
            part = whole.chunk(tp, dim=split)[rank] if split in (COL, ROW) else whole
            assert same_bits(weight, part.contiguous()), (name, rank)
    assert checked == expected.keys()


def test_every_tensor_of_the_lora_is_used_gates_adaln_and_projections_too(tiny):
    source = merged(tiny, (tiny.lora, STRENGTH))
    with safe_open(tiny.lora, "pt") as file:
        expected = {
            key.removeprefix("diffusion_model.").removesuffix(DOWN) + ".weight" for key in file.keys() if DOWN in key
        }
        assert len(file.keys()) == 2 * len(expected) == 2 * len(source.adapters)
    assert changed(tiny, source) == expected == source.adapters.keys()
    for part in ("to_gate_logits", "adaln_single", "patchify_proj", "proj_out", "audio_ff.net", "av_ca_a2v_gate"):
        assert any(part in name for name in expected), part
    assert {rule(SHARDED_MODELS["dit"], name) for name in expected} == {COL, ROW, None, HOST}


def tensors_of(file, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with safe_open(file.path, "pt") as opened:
        module = "diffusion_model." + name.removesuffix(".weight")
        return opened.get_tensor(module + DOWN), opened.get_tensor(module + UP)


def product(tensors, strength: float) -> torch.Tensor:
    down, up = tensors
    return (up * strength) @ down


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
        tensors["diffusion_model.transformer_blocks.99.attn1.to_q" + DOWN] = torch.zeros(4, 32, dtype=torch.bfloat16)
        tensors[f"{BLOCK}attn1.to_k.alpha"] = torch.ones(2)

    message = refused(tiny, tmp_path, change)
    expected = (
        f"{BLOCK}attn1.to_q{DOWN}: its lora_B is missing",
        (
            f"{BLOCK}attn2.to_q{DOWN}: lora_A of shape [4, 31], lora_B of shape [32, 4] does not"
            " fit transformer_blocks.0.attn2.to_q.weight of shape [32, 32]"
        ),
        f"{BLOCK}attn2.to_k{DOWN}: lora_A of shape [3, 32], lora_B of shape [32, 4] does not fit",
        f"{BLOCK}attn1.to_k.alpha: shape [2], wanted one number",
        f"diffusion_model.transformer_blocks.99.attn1.to_q{DOWN}: matches no weight of the model",
    )
    assert [line for line in expected if line not in message] == []
    assert len(message.splitlines()) == 1 + len(expected)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8")])
def test_a_dtype_that_no_product_is_taken_in_is_refused_by_name(tiny, tmp_path, dtype, stored):
    def change(tensors):
        for part in (UP, DOWN):
            tensors[f"{BLOCK}attn1.to_q{part}"] = tensors[f"{BLOCK}attn1.to_q{part}"].to(dtype)

    message = refused(tiny, tmp_path, change)
    expected = f"{BLOCK}attn1.to_q{DOWN}: stored as {stored}, which is not implemented; wanted one of"
    assert expected in message and "BF16" in message and len(message.splitlines()) == 2


def test_a_file_without_lora_tensors_is_refused(tiny, tmp_path):
    assert "no lora_A / lora_B tensors" in refused(tiny, tmp_path, lambda tensors: tensors.clear())


def test_a_base_weight_that_is_not_bf16_is_refused(tiny, tmp_path):
    name = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    weights = load_file(tiny.checkpoint)
    weights[name] = weights[name].float()
    with safe_open(tiny.checkpoint, "pt") as file:
        save_file(weights, tmp_path / "wide.safetensors", file.metadata())
    with pytest.raises(UserError, match=r"attn1\.to_q\.weight is not stored in BF16"):
        MergedSource(SHARDED_MODELS["dit"], [Checkpoint(tmp_path / "wide.safetensors")], (Lora(tiny.lora),))


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_a_strength_that_is_no_number_is_refused(strength):
    with pytest.raises(UserError, match="strength"):
        JobFields.validated({"lora": [["lora.safetensors", strength]]})


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
    def workspace() -> Workspace:
        artifacts = tmp_path / "artifacts"
        return Workspace(tiny.checkpoint, resolve("cpu"), artifacts, 2, "bfloat16")

    def sets(path) -> list[tuple[Lora, ...]]:
        return [(Lora(path, 0.5),), (Lora(path, 0.5), Lora(path, 0.25))]

    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(tiny.lora.read_bytes())
    made = build.make(workspace(), workspace().weight_sets("dit", sets(tiny.lora)))
    assert len(set(made)) == 2
    assert [workspace().dit_weights(loras) for loras in sets(copy)] == made
    with pytest.raises(UserError, match=r"shard transformer .*--lora .* 0\.75 .*--tp-degree 2"):
        workspace().dit_weights((Lora(tiny.lora, 0.75),))


# --- what a command or a job names ----------------------------------------------------------------
def weight_sets(words: str) -> list[list]:
    """The sets that flags name, each LoRA as its file's name and strength."""
    parser = argparse.ArgumentParser()
    flags.add_job(parser, flags.WEIGHTS)
    sets = flags.spec(parser.parse_args(words.split())).weight_sets
    return [[(lora.path.name, lora.strength) for lora in loras] for loras in sets]


def test_flags_name_the_weight_sets_of_both_stages():
    style, distilled, ic = ("style", 0.8), ("distilled", 1.0), ("ic", 0.9)
    assert weight_sets("") == [[]]
    assert weight_sets("--lora style .8") == [[style]]
    assert weight_sets("--distilled-lora distilled") == [[], [distilled]]
    assert weight_sets("--distilled-lora distilled --lora style .8") == [[style], [style, distilled]]
    assert weight_sets("--lora style .8 --ic-lora ic .9") == [[style, ic], [style]]


def test_either_strength_of_hq_makes_its_two_sets():
    def hq(words: str) -> list[list]:
        return weight_sets(f"--distilled-lora d --distilled-lora-strength-stage-{words}")

    assert hq("1 .25") == hq("2 .5") == [[("d", 0.25)], [("d", 0.5)]]
    assert hq("1 0") == [[("d", 0.0)], [("d", 0.5)]]
    assert hq("1 .3 --distilled-lora-strength-stage-2 .6") == [[("d", 0.3)], [("d", 0.6)]]
    assert hq("2 .75 --lora s") == [[("s", 1.0), ("d", 0.25)], [("s", 1.0), ("d", 0.75)]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--distilled-lora d .5 --distilled-lora-strength-stage-1 .3", "replaces the strength of --distilled-lora"),
        ("--distilled-lora-strength-stage-2 .3", "stage-2 needs --distilled-lora"),
        ("--distilled-lora d --distilled-lora-strength-stage-2 nan", "wanted a finite number"),
        ("--ic-lora ic much", r"ic: strength .much., wanted a valid number.* --ic-lora PATH \[STRENGTH\]"),
    ],
)
def test_strengths_that_cannot_be_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        weight_sets(words)


def test_a_lines_loras_take_the_place_of_the_commands(tmp_path):
    parser = argparse.ArgumentParser()
    flags.add_job(parser)
    command = "--recipe distilled --two-stage --lora a .5 --ic-lora i"
    command = flags.spec(parser.parse_args(command.split()))

    def names(**line) -> list[list]:
        job = command.updated({"prompt": "x"} | line)
        return [[(str(lora.path), lora.strength) for lora in s.loras] for s in job.stages]

    assert names() == [[("a", 0.5), ("i", 1.0)], [("a", 0.5)]]
    assert names(lora=["b", 2]) == [[("b", 2.0), ("i", 1.0)], [("b", 2.0)]]
    assert names(lora=[["b"], ["c", 0.1]], ic_lora=[]) == [[("b", 1.0), ("c", 0.1)]] * 2
    assert names(lora=None) == names()
    two = {"distilled-lora-strength-stage-1": 0.2, "distilled-lora": "d", "ic-lora": [], "lora": []}
    assert names(**two) == [[("d", 0.2)], [("d", 0.5)]]


def test_a_file_of_named_sets_says_them_as_a_line_does(tmp_path):
    def sets(content) -> dict:
        path = tmp_path / "sets.json"
        path.write_text(json.dumps(content))
        parser = argparse.ArgumentParser()
        flags.add_job(parser)
        parser.add_argument("--lora-sets", type=Path)
        args = parser.parse_args(["--lora", "a", "--distilled-lora", "d", "--lora-sets", str(path)])
        return flags.lora_sets(args)

    actual = sets({"anime": {"lora": ["b", 0.5]}})
    assert [lora.path.name for lora in actual["default"].loras] == ["a"]
    assert actual["anime"].loras == (Lora(Path("b"), 0.5),)
    assert actual["anime"].stage_2_loras == actual["default"].stage_2_loras != ()
    for wrong in ({"anime": {"seed": 3}}, {"anime": ["b"]}):
        with pytest.raises(UserError, match="'anime': wanted an object with the keys lora, ic-lora, distilled-lora"):
            sets(wrong)


def test_a_missing_set_names_the_command_that_makes_what_is_missing(tiny, tmp_path):
    """Typed as it is said, it makes the missing sets and no other."""
    lora = Lora(tiny.lora, 0.5)
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), tmp_path / "artifacts", 1, "bfloat16")
    two = Size(64, 64, 9, two_stage=True)
    jobs = [
        make_job("plain", Size(64, 64, 9)),
        make_job("hq", two, recipe="dev", stage_1_loras=(lora,), stage_2_loras=(Lora(tiny.lora, 2),)),
        make_job("ic", two, stage_1_loras=(Lora(tiny.lora, 0.75),)),
        make_job("style", Size(64, 64, 9), loras=(lora,)),  # stage 1 of hq is that set
    ]
    build.make(workspace, workspace.weight_sets("dit"))
    sets = [workspace.weight_set("dit", stage.loras) for job in jobs for stage in job.stages]
    with pytest.raises(UserError) as error:
        workspace.find_all(sets)
    program = command("shard transformer")
    commands = [line for line in str(error.value).splitlines() if program in line]
    assert len(commands) == 3
    for typed in commands:
        dispatch(["shard", "transformer", *shlex.split(typed.partition(program)[2])])
    workspace.find_all(sets)
    assert len(finished_weights(workspace.artifacts, "dit")) == 4


def test_the_distilled_lora_is_for_stage_2_of_dev_and_that_stage_needs_it():
    two, lora = Size(64, 64, 9, two_stage=True), (Lora(Path("d")),)
    refining = make_job("x", two, recipe="dev", stage_2_loras=lora)
    one_stage = make_job("x", Size(64, 64, 9), recipe="dev", stage_2_loras=lora)
    check_distilled_loras([refining, one_stage])  # the command's flags, of lines of both kinds
    half = replace(refining, stage_2_loras=(), skip_stage_2=True)
    check_distilled_loras([half])  # no stage 2 is run
    for jobs in ([refining, replace(refining, stage_2_loras=())], [make_job("x", two, recipe="dev")]):
        with pytest.raises(UserError, match="needs --distilled-lora: .*\n.*hf download"):
            check_distilled_loras(jobs)
    for jobs in ([one_stage], [refining, replace(refining, recipe="distilled")]):
        with pytest.raises(UserError, match="--distilled-lora is for stage 2 of --recipe dev"):
            check_distilled_loras(jobs)


def test_a_call_of_the_api_may_have_its_own_loras(tiny, tmp_path):
    pipe = LTXPipeline.from_pretrained(
        checkpoint_path=tiny.checkpoint,
        gemma_root=tiny.gemma_root,
        artifacts_dir=tmp_path / "artifacts",
        profile="cpu",
        recipe="dev",
        loras=[("a", 1)],
        distilled_loras=[("d", 1)],
    )
    asked = []

    def run(jobs, **_):
        asked.extend(jobs)
        raise UserError("enough")

    pipe.engine.run = run

    def stages(**call) -> list[list]:
        with pytest.raises(UserError, match="enough"):
            pipe("x", **call)
        return [[(str(lora.path), lora.strength) for lora in s.loras] for s in asked[-1].stages]

    a, b, c, d = (("a", 1.0), ("b", 0.5), ("c", 2.0), ("d", 1.0))
    assert stages() == [[a]]
    assert stages(two_stage=True) == [[a], [a, d]]
    assert stages(loras=[b]) == [[b]] and stages(loras=()) == [[]]
    assert stages(two_stage=True, ic_loras=[c], distilled_loras=[b]) == [[a, c], [a, b]]


# --- references of IC-LoRAs -----------------------------------------------------------------------
def ic_lora(tiny, folder, name: str, **metadata: str) -> Lora:
    save_file(load_file(tiny.lora), folder / name, metadata)
    return Lora(folder / name)


def test_the_scale_of_references_is_of_the_files_metadata(tiny, tmp_path):
    space = ic_lora(tiny, tmp_path, "space", reference_downscale_factor="2")
    both = ic_lora(tiny, tmp_path, "both", reference_downscale_factor="2", reference_temporal_scale_factor="4")
    one = ic_lora(tiny, tmp_path, "one", reference_downscale_factor="1")
    plain = Lora(tiny.lora)
    assert reference_scale(()) == reference_scale((plain, one)) == (1, 1)
    assert reference_scale((plain, space)) == reference_scale((one, space)) == (2, 1)
    assert reference_scale((both, space)) == (2, 4)
    scales = detailing_scale(()), detailing_scale((plain,)), detailing_scale((one,)), detailing_scale((both,))
    assert scales == (None, 2, 1, 2)


@pytest.mark.parametrize("factor", ["0", "-2", "1.5", "two", "", "\u00b2"])
def test_a_scale_that_is_no_whole_number_is_refused_with_its_file(tiny, tmp_path, factor):
    lora = ic_lora(tiny, tmp_path, "odd", reference_temporal_scale_factor=factor)
    with pytest.raises(UserError, match="odd: its metadata has reference_temporal_scale_factor"):
        reference_scale((lora,))


def test_two_different_scales_are_refused(tiny, tmp_path):
    two = ic_lora(tiny, tmp_path, "half", reference_downscale_factor="2")
    three = ic_lora(tiny, tmp_path, "third", reference_downscale_factor="3")
    with pytest.raises(UserError, match="2 of .*half, 3 of .*third"):
        reference_scale((two, three))
