"""LoRAs of every trainer are merged to the bits of ltx-core's loader, refused by name, and found by their content."""

import json
import os
import re
import shlex
from functools import reduce
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import QUICK
from engines import opened_workspace
from golden.upstream import fused_state
from helpers import one_thread, randn  # noqa: F401
from jobs import make_job, replace
from safetensors.torch import load_file, save, save_file
from typed import parsed

from ltx_neuron import flags
from ltx_neuron.artifacts import build, finished_weights
from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.commands import dispatch
from ltx_neuron.engine.preflight import check_distilled_loras
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.latency import Recorder
from ltx_neuron.weights import lora as lora_files
from ltx_neuron.weights import model_files
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource, identity_of, reference_scale
from ltx_neuron.weights.sharding import DIFFUSION, SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

ONE, TWO = Size(64, 64, 9), Size(64, 64, 9, two_stage=True)
STRENGTH = 0.7  # no power of two, so that it matters when it is applied
RANK, OTHER = 4, ("other", 0.3)  # of the tiny LoRA, and another one of `files`
F8, B16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
QUERY = "transformer_blocks.0.attn1.to_q"
COMFY_QUERY = f"diffusion_model.{QUERY}"


def written(folder: Path, tensors: dict, metadata: dict | None = None, name: str = "lora") -> Path:
    path = folder / f"{name}.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata)
    return path


def merged(tiny, *loras: tuple[Path, float], model: str = "dit", checkpoint: Path | None = None) -> MergedSource:
    files = [Checkpoint(checkpoint or tiny.checkpoint)]
    return MergedSource(SHARDED_MODELS[model], files, tuple(Lora(Path(path), s) for path, s in loras))


def differing(a: Source, b: Source) -> set[str]:
    assert a.locations.keys() == b.locations.keys()
    return {name for name in a.locations if not torch.equal(a.tensor(name), b.tensor(name))}


def layers(tensors: dict) -> list[str]:
    return [name.removeprefix("diffusion_model.").removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]


def factors(path: Path, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, layer = load_file(path), "diffusion_model." + weight.removesuffix(".weight")
    return tensors[layer + DOWN], tensors[layer + UP]


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory) -> dict[str, Path]:
    """The tiny LoRA, one in float32, and one of another rank on some of the weights."""
    folder, tensors, some = tmp_path_factory.mktemp("loras"), load_file(tiny.lora), {}
    for seed, layer in enumerate(sorted(layers(tensors))[::3]):
        down, up = (f"diffusion_model.{layer}{part}" for part in (DOWN, UP))
        some[down] = randn(2, tensors[down].shape[1], seed=seed).bfloat16()
        some[up] = randn(len(tensors[up]), 2, seed=-seed).bfloat16()
    wide = {name: tensor.float() + 1e-4 for name, tensor in tensors.items()}
    return {"tiny": tiny.lora, "float32": written(folder, wide, name="wide"), "other": written(folder, some)}


@pytest.mark.parametrize("loras", [[("tiny", 0), OTHER], [("tiny", 0.7), OTHER, ("tiny", -0.2)], [("float32", 0.7)]])
def test_every_merged_weight_is_ltx_cores_bit_for_bit(tiny, files, loras):
    """Products are taken in the LoRA's dtype; several are rounded as 1.0.0 rounds them."""
    chosen = tuple((files[name], strength) for name, strength in loras)
    source, expected = merged(tiny, *chosen), fused_state(tiny, chosen)
    assert expected.keys() == source.locations.keys()
    for name, tensor in expected.items():
        rows = len(tensor)
        joined = torch.cat([*source.pieces(name, [(0, rows // 3), (rows // 3, rows)])])
        for read in (source.tensor(name), source.read_mapped(name), joined):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
    changed = {name for path, strength in chosen if strength for name in layers(load_file(path))}
    assert differing(source, merged(tiny)) == {f"{name}.weight" for name in changed}


def test_several_loras_of_ltx_2_5_are_added_as_1_2_0_rounds_them(tiny, files):
    source = merged(tiny, (files["tiny"], STRENGTH), (files["other"], 0.3))
    before = {name: source.tensor(name) for name in source.adapters}
    assert not source.rounds_once  # LTX-2.3
    source.rounds_once = True
    for name, (first, *others) in source.adapters.items():
        down, up = factors(first.file.path, name)
        total = (up * STRENGTH) @ down
        for adapter in others:
            down, up = factors(adapter.file.path, name)
            total.addmm_(up, down, alpha=0.3)  # rounded once
        assert torch.equal(source.tensor(name), total + Source.tensor(source, name)), name
    assert any(not torch.equal(source.tensor(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("down", "up", "scale"), [(F8, F8, 1.0), (F8, B16, 0.5), (F16, F32, 1.0)])
def test_float8_and_factors_of_two_dtypes_are_cast_to_bfloat16(tiny, tmp_path, down, up, scale):
    """As ltx-core 1.2.0's _products_for_sd_key; 1.0.0 fails on them. ltx-core knows no scales."""
    tensors = {key: tensor.to(up if key.endswith(UP) else down) for key, tensor in load_file(tiny.lora).items()}
    small = [key for key in tensors if tensors[key].dtype == F8 and scale != 1]
    cast = {key: tensor.bfloat16() * (scale if key in small else 1) for key, tensor in tensors.items()}
    tensors |= {f"{key}_scale": torch.tensor(scale) for key in small}
    source, before = merged(tiny, (written(tmp_path, tensors), STRENGTH)), merged(tiny)
    for name in source.adapters:
        layer = f"diffusion_model.{name.removesuffix('.weight')}"
        delta = torch.matmul(cast[layer + UP] * STRENGTH, cast[layer + DOWN])
        assert torch.equal(source.tensor(name), delta + before.tensor(name)), name


# A method -> shapes of its parts and its formula by LyCORIS; products are times alpha / rank, which is 1/2.
METHODS = {
    "LoKr": ({"lokr_w1": (2, 4), "lokr_w2": (16, 8)}, lambda a, b: 2 * torch.kron(a, b)),
    "LoHa": (
        {"hada_w1_a": (32, RANK), "hada_w1_b": (RANK, 32), "hada_w2_a": (32, RANK), "hada_w2_b": (RANK, 32)},
        lambda a, b, c, d: (a @ b) * (c @ d),
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_lokr_loha_and_differences_are_merged_by_their_formula(tiny, tmp_path, method):
    """In float64: one product may round to the next bf16."""
    shapes, formula = METHODS[method]
    parts = {part: randn(*shape, seed=seed).bfloat16() / 4 for seed, (part, shape) in enumerate(shapes.items())}
    delta = formula(*(tensor.double() for tensor in parts.values())) / 2
    parts["alpha"] = torch.tensor(RANK / 2)
    source = merged(tiny, (written(tmp_path, {f"{COMFY_QUERY}.{x}": t for x, t in parts.items()}), STRENGTH))
    assert source.adapters.keys() == {f"{QUERY}.weight"}
    got, wanted = source.tensor(f"{QUERY}.weight"), Source.tensor(source, f"{QUERY}.weight")
    wanted = wanted + (STRENGTH * delta).bfloat16()
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-9)
    assert (got == wanted).float().mean() > 0.99


def test_differences_of_biases_and_norms_are_added_beside_products(tiny, tmp_path):
    changes = {
        f"{COMFY_QUERY}.diff_b": f"{QUERY}.bias",
        "lora_unet_transformer_blocks_0_attn1_k_norm.w_norm": "transformer_blocks.0.attn1.k_norm.weight",
        "transformer.transformer_blocks.0.attn2.norm_k.diff": "transformer_blocks.0.attn2.k_norm.weight",
    }
    before = merged(tiny)
    added = {key: randn(*before.shape(name), seed=seed).bfloat16() for seed, (key, name) in enumerate(changes.items())}
    source = merged(tiny, (written(tmp_path, load_file(tiny.lora) | added), STRENGTH))
    for key, name in changes.items():
        assert torch.equal(source.tensor(name), before.tensor(name) + (added[key].float() * STRENGTH).bfloat16()), name
    assert differing(source, merged(tiny, (tiny.lora, STRENGTH))) == {*changes.values()}


# --- spellings ------------------------------------------------------------------------------------

# Lightricks' names -> diffusers', from diffusers' scripts/convert_ltx2_to_diffusers.py.
DIFFUSERS = (
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_adaln_single", "audio_time_embed"),
    ("adaln_single", "time_embed"),
    ("patchify_proj", "proj_in"),
    ("embeddings_connector.transformer_1d", "connector.transformer"),
)


def dotted(prefix: str):
    return lambda name: prefix + name


def flat(prefix: str):
    return lambda name: prefix + name.replace(".", "_")


def of_diffusers(name: str, prefix: str = "transformer.") -> str:
    name = re.sub("text_embedding_projection.(.*)_aggregate_embed", r"\1_text_proj_in", name)
    return prefix + reduce(lambda text, names: text.replace(*names), DIFFUSERS, name)


def respelled(tensors: dict, layer, parts=(DOWN, UP), alpha=None) -> dict:
    """A plain LoRA with other names. layer: of a layer's name; parts: of its factors; alpha: each layer's, if any."""
    renamed = {}
    for name in layers(tensors):
        for old, new in zip((DOWN, UP), parts, strict=True):
            renamed[layer(name) + new] = tensors[f"diffusion_model.{name}{old}"]
        if alpha is not None:
            renamed[layer(name) + ".alpha"] = alpha.clone()
    return renamed


def peft(**settings) -> dict:
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": x for key, x in settings.items()})}


KOHYA = ".lora_down.weight", ".lora_up.weight"
FULL, HALF = torch.tensor(float(RANK)), torch.tensor(RANK / 2)
# A spelling -> its share of the plain file's strength, layer names, names of the factors, alpha and metadata
SPELLINGS = {
    "no prefix": (1, dotted(""), (DOWN, UP), None, None),
    "the checkpoint's prefix": (1, dotted("model.diffusion_model."), (DOWN, UP), None, None),
    "PEFT": (1, dotted("base_model.model."), (".lora_A.default.weight", ".lora_B.default.weight"), None, None),
    "PEFT without .weight": (1, dotted(""), (".lora_A", ".lora_B"), None, None),
    "older diffusers": (1, of_diffusers, (".lora.down.weight", ".lora.up.weight"), None, None),
    "processors": (1, dotted("unet."), (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"), None, None),
    "musubi": (1, flat("lora_unet_model_"), KOHYA, FULL.half(), None),
    "OneTrainer": (1, lambda name: flat("lora_transformer_")(of_diffusers(name, "")), KOHYA, None, None),
    "LyCORIS": (1, flat("lycoris_"), KOHYA, FULL[None], None),
    "kohya, half": (0.5, flat("lora_unet_"), KOHYA, HALF, {"ss_network_alpha": "1"}),
    "alpha beside PEFT's settings": (0.5, of_diffusers, (DOWN, UP), HALF.bfloat16(), peft(lora_alpha=RANK)),
    "PEFT's settings": (0.5, of_diffusers, (DOWN, UP), None, peft(r=RANK, lora_alpha=RANK / 2, alpha_pattern={})),
    "of layers": (0.5, of_diffusers, (DOWN, UP), None, peft(lora_alpha=1, alpha_pattern={".*": RANK / 2})),
    "stabilised": (0.5, of_diffusers, (DOWN, UP), None, peft(lora_alpha=RANK**0.5 / 2, use_rslora=True)),
}


@pytest.fixture(scope="module")
def shares(tiny) -> dict[float, MergedSource]:
    return {share: merged(tiny, (tiny.lora, STRENGTH * share)) for share in (1, 0.5)}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_lora_gives_the_plain_files_bits(tiny, tmp_path, shares, spelling):
    share, layer, parts, alpha, metadata = SPELLINGS[spelling]
    path = written(tmp_path, respelled(load_file(tiny.lora), layer, parts, alpha), metadata)
    source = merged(tiny, (path, STRENGTH))
    assert len(source.adapters) == 96 and differing(source, shares[share]) == set()
    assert model_files.kind_of(TensorFile(path, "")) == "lora"


def test_a_folder_of_peft_has_alpha_in_its_settings_and_its_identity(tiny, tmp_path, shares):
    path, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file(respelled(load_file(tiny.lora), dotted("base_model.model.")), path)
    identities = []
    for share, source in shares.items():
        settings.write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * share}))
        assert differing(merged(tiny, (path, STRENGTH)), source) == set()
        lora_files._fingerprint.cache_clear()  # a process reads it once
        identities += identity_of((Lora(path),))
    assert identities[0] != identities[1]
    settings.write_text("{")
    with pytest.raises(UserError, match="its PEFT settings are damaged"):
        merged(tiny, (path, STRENGTH))


# --- connectors -----------------------------------------------------------------------------------

PROJECTION = "text_embedding_projection.video_aggregate_embed"
QUERIES = "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q"
CONNECTED = {f"{DIFFUSION}{QUERIES}.weight": QUERIES, f"{PROJECTION}.weight": PROJECTION}


@pytest.fixture
def connector_lora(tiny, tmp_path) -> Path:
    """A plain LoRA on two layers of model gemma3."""
    tensors, shapes = {}, Checkpoint(tiny.checkpoint).shapes
    for key, layer in CONNECTED.items():
        rows, columns = shapes[key]
        tensors[f"diffusion_model.{layer}{DOWN}"] = randn(RANK, columns, seed=0).bfloat16()
        tensors[f"diffusion_model.{layer}{UP}"] = randn(rows, RANK, seed=1).bfloat16()
    return written(tmp_path, tensors, name="connectors")


@pytest.mark.parametrize("layer", [dotted(""), flat("lora_unet_"), lambda name: of_diffusers(name, "connectors.")])
def test_a_lora_on_the_connectors_is_merged_into_the_text_side_alone(tiny, tmp_path, connector_lora, layer):
    path = written(tmp_path, respelled(load_file(connector_lora), layer))
    source, weights = merged(tiny, (path, STRENGTH), model="gemma3"), load_file(tiny.checkpoint)
    for name, (_, key) in source.locations.items():
        wanted = weights[key]
        if key in CONNECTED:
            down, up = factors(connector_lora, CONNECTED[key])
            wanted = wanted + (up * STRENGTH) @ down
        assert torch.equal(source.tensor(name), wanted), name
    assert merged(tiny, (path, STRENGTH)).lora_identity == []  # the DiT's plain weight set


def test_prompts_are_encoded_by_the_connectors_of_their_jobs_lora(tiny, tmp_path, connector_lora):
    """Whether that is the merged model's context: slow/test_weight_sets.py, on the ranks."""

    def encoded(*jobs: Job, cache: bool) -> list[torch.Tensor]:
        workspace = opened_workspace(tiny, tmp_path, settings=QUICK)
        with Engine(workspace, Recorder(), RunOptions(cache_prompts=cache)) as engine:
            return [run.contexts[0].video for run in engine.encode([*jobs])]

    jobs = [make_job("a red fox", ONE, loras=loras) for loras in ((Lora(connector_lora, STRENGTH),), ())]
    expected = [context for job in jobs for context in encoded(job, cache=False)]
    assert not torch.equal(*expected)
    for _ in ("encoded", "cached"):
        assert all(map(torch.equal, encoded(*jobs, cache=True), expected))


def test_gemmas_weight_set_is_that_of_the_lora_on_the_connectors_for_all_stages(tiny, tmp_path, connector_lora):
    workspace, lora = opened_workspace(tiny, tmp_path / "artifacts"), Lora(connector_lora, STRENGTH)
    assert workspace.text_loras(make_job("fox", TWO, loras=(lora,))) == (lora,)
    assert workspace.text_loras(make_job("fox", ONE, loras=(Lora(tiny.lora),))) == ()  # no layer of the connectors
    with pytest.raises(UserError, match=rf"shard gemma3 .*--lora {lora.path} 0\.7"):
        workspace.weights("gemma3", (lora,))
    with pytest.raises(UserError, match="changes the connectors, which encode the prompt once"):
        workspace.text_loras(make_job("fox", TWO, stage_1_loras=(lora,)))


# --- what is left out, and what is refused --------------------------------------------------------


def test_tensors_of_other_models_are_left_out_and_counted(tiny, tmp_path, shares, capsys):
    strays = (
        "text_encoder.layers.0.q_proj.lora_A.weight",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight",  # kohya's
        "text_encoders.gemma3.model.layers.0.q_proj.lora_B.weight",  # ComfyUI's
        f"model_ema.{QUERY}.lora_A.weight",
        "vae.decoder.conv_in.conv.weight",
    )
    tensors = load_file(tiny.lora) | {name: torch.zeros(4, 32, dtype=torch.bfloat16) for name in strays}
    lora = Lora(written(tmp_path, tensors), STRENGTH)
    source = merged(tiny, (lora.path, STRENGTH))
    assert differing(source, shares[1]) == set() and shares[1].notes == []
    (note,) = source.notes
    assert f"{len(strays)} tensors of other models" in note and "are left out" in note
    workspace = opened_workspace(tiny, tmp_path)
    build.make(workspace, workspace.weight_sets("dit", ((lora,),)))
    assert capsys.readouterr().out.startswith(f"{note}\n")


def zeros(name: str, *shape: int, dtype=torch.bfloat16) -> dict:
    return {name: torch.zeros(shape or (RANK, 32), dtype=dtype)}


def pair(layer: str, inputs: int = 32, dtype=torch.bfloat16) -> dict:
    return zeros(layer + DOWN, RANK, inputs, dtype=dtype) | zeros(layer + UP, 32, RANK, dtype=dtype)


OLDER = "is of LTX-2.0 or LTX-Video, wanted one of the checkpoint's release"
ADALN = f"diffusion_model.adaln_single.linear{UP}"  # LTX-2.0's has 6 rows where LTX-2.3's has 9
BLOCK_99 = "diffusion_model.transformer_blocks.99.attn1.to_q"
MISFIT = f"lora_A of shape [4, 31], lora_B of shape [32, 4] does not fit {QUERY}.weight of shape [32, 32]"
# What is added to the plain LoRA, or what it becomes -> the message
REFUSED = {
    "DoRA": (zeros(f"{COMFY_QUERY}.dora_scale"), "is a DoRA file"),
    "LTX-2.0": (pair("diffusion_model.caption_projection.linear_1"), OLDER),
    "LTX-2.0's projection": (pair("text_embedding_projection.aggregate_embed"), OLDER),
    "LTX-2.0's AdaLN": (lambda plain: plain | {ADALN: plain[ADALN][: len(plain[ADALN]) // 9 * 6]}, OLDER),
    "a whole weight": (zeros(f"{COMFY_QUERY}.weight"), "is not a LoRA's tensor"),
    "a layer that is not there": (pair(BLOCK_99), f"{BLOCK_99}{DOWN}: matches no weight of the model"),
    "two adapters": (zeros(f"{COMFY_QUERY}.lora_A.second.weight"), "same weight as"),
    "half a LoKr": (zeros(f"{COMFY_QUERY}.lokr_w1"), "its lokr_w2 is missing"),
    "other inputs": (pair(COMFY_QUERY, 31), f"{COMFY_QUERY}{DOWN}: {MISFIT}"),
    "another rank": (zeros(f"{COMFY_QUERY}{DOWN}", 3, 32), "lora_A of shape [3, 32], lora_B of shape [32, 4]"),
    "alpha": (zeros(f"{COMFY_QUERY}.alpha", 2), f"{COMFY_QUERY}.alpha: shape [2], wanted one number"),
    "float8": (pair(COMFY_QUERY, dtype=torch.float8_e5m2), f"{DOWN}: stored as F8_E5M2, which is not implemented;"),
    "another model's": (lambda _: pair("lora_unet_blocks_0_attn"), "is not a LoRA of this model:"),
    "nothing": (lambda _: {}, "it has no lora_A / lora_B tensors"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_merged_is_refused_by_its_name(tiny, tmp_path, change, message):
    tensors = load_file(tiny.lora)
    path = written(tmp_path, tensors | change if isinstance(change, dict) else change(tensors))
    with pytest.raises(UserError) as error:
        merged(tiny, (path, 1.0))
    assert message in str(error.value) and f"--lora {path}" in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


def test_weights_that_a_lora_cannot_be_added_to_without_doubt_are_refused(tiny, tmp_path):
    weights, metadata = load_file(tiny.checkpoint), Checkpoint(tiny.checkpoint).metadata
    key = f"{DIFFUSION}{QUERY}.weight"
    path = written(tmp_path, weights | {key: weights[key].float()}, metadata, "checkpoint")
    with pytest.raises(UserError, match=r"attn1\.to_q\.weight is not stored in BF16"):
        merged(tiny, (tiny.lora, 1.0), checkpoint=path)
    # A file with underscores cannot say which of two names it changes.
    written(tmp_path, weights | {key.replace("attn1.to_q", "attn1_to.q"): weights[key].clone()}, metadata, "checkpoint")
    kohya = written(tmp_path, respelled(load_file(tiny.lora), flat("lora_unet_"), KOHYA))
    with pytest.raises(UserError, match=r"0_attn1_to_q\.lora_down\.weight: matches no weight"):
        merged(tiny, (kohya, 1.0), checkpoint=path)


# --- weight sets: named by flags, lines and calls, and found by their content ---------------------


def named(sets) -> list[list[tuple[str, float]]]:
    return [[(str(lora.path), lora.strength) for lora in loras] for loras in sets]


def test_flags_name_the_weight_sets_of_both_stages():
    hq = "--distilled-lora d --distilled-lora-strength-stage-"
    for words, sets in (
        ("", [[]]),
        ("--lora style .8", [[("style", 0.8)]]),
        ("--distilled-lora d", [[], [("d", 1.0)]]),
        ("--distilled-lora d --lora style .8", [[("style", 0.8)], [("style", 0.8), ("d", 1.0)]]),
        ("--lora style .8 --ic-lora ic .9", [[("style", 0.8), ("ic", 0.9)], [("style", 0.8)]]),
        (hq + "1 .25", [[("d", 0.25)], [("d", 0.5)]]),
        (hq + "1 0", [[("d", 0.0)], [("d", 0.5)]]),
        (hq + "2 .75 --lora s", [[("s", 1.0), ("d", 0.25)], [("s", 1.0), ("d", 0.75)]]),
    ):
        assert named(flags.spec(parsed(*words.split())).weight_sets) == sets


def test_a_lines_loras_take_the_place_of_the_commands():
    typed = flags.spec(parsed("--two-stage", "--lora", "a", ".5", "--ic-lora", "i"))

    def sets(**line) -> list[list]:
        return named(stage.loras for stage in typed.updated({"prompt": "x"} | line).stages)

    assert sets() == sets(lora=None) == [[("a", 0.5), ("i", 1.0)], [("a", 0.5)]]
    assert sets(lora=["b", 2]) == [[("b", 2.0), ("i", 1.0)], [("b", 2.0)]]
    assert sets(lora=[["b"], ["c", 0.1]], ic_lora=[]) == [[("b", 1.0), ("c", 0.1)]] * 2
    distilled = {"distilled-lora-strength-stage-1": 0.2, "distilled-lora": "d", "ic-lora": [], "lora": []}
    assert sets(**distilled) == [[("d", 0.2)], [("d", 0.5)]]


def test_a_call_of_the_api_may_have_loras_of_its_own(tiny, tmp_path, monkeypatch):
    paths = {"checkpoint_path": tiny.checkpoint, "gemma_root": tiny.gemma_root, "artifacts_dir": tmp_path}
    loras = {"loras": [("a", 1)], "distilled_loras": [("d", 1)]}
    pipe = LTXPipeline.from_pretrained(**paths, **loras, profile="cpu", recipe="dev")
    monkeypatch.setattr(pipe.engine, "run", run := Mock(side_effect=LookupError))

    def sets(**call) -> list[list]:
        with pytest.raises(LookupError):
            pipe("x", **call)
        return named(stage.loras for stage in run.call_args.args[0][-1].stages)

    a, b, c = ("a", 1.0), ("b", 0.5), ("c", 2.0)
    assert sets(two_stage=True) == [[a], [a, ("d", 1.0)]] and sets(loras=[b]) == [[b]] and sets(loras=()) == [[]]
    assert sets(two_stage=True, ic_loras=[c], distilled_loras=[b]) == [[a, c], [a, b]]


def test_a_file_of_named_sets_takes_the_place_of_the_commands_loras(tmp_path):
    args = parsed("--lora", "a", "--distilled-lora", "d")
    args.lora_sets = tmp_path / "sets.json"
    args.lora_sets.write_text('{"anime": {"lora": ["b", 0.5]}}')
    sets = flags.lora_sets(args)
    assert named([sets["default"].loras, sets["anime"].loras]) == [[("a", 1.0)], [("b", 0.5)]]
    assert sets["anime"].stage_2_loras == sets["default"].stage_2_loras != ()
    for wrong in ('{"seed": 3}', '["b"]'):
        args.lora_sets.write_text(f'{{"anime": {wrong}}}')
        with pytest.raises(UserError, match="'anime': wanted an object with the keys lora, ic-lora, distilled-lora"):
            flags.lora_sets(args)


def test_the_distilled_lora_is_for_stage_2_of_dev_and_that_stage_needs_it():
    lora = (Lora(Path("d")),)
    refining, one_stage = (make_job("x", size, recipe="dev", stage_2_loras=lora) for size in (TWO, ONE))
    check_distilled_loras([refining, one_stage])  # the command's flags, of lines of both kinds
    check_distilled_loras([replace(refining, stage_2_loras=(), skip_stage_2=True)])
    with pytest.raises(UserError, match="needs --distilled-lora: .*\n.*hf download"):
        check_distilled_loras([refining, replace(refining, stage_2_loras=())])
    for jobs in ([one_stage], [refining, replace(refining, recipe="distilled")]):
        with pytest.raises(UserError, match="--distilled-lora is for stage 2 of --recipe dev"):
            check_distilled_loras(jobs)


def test_a_missing_set_names_the_command_that_makes_what_is_missing_and_no_more(tiny, tmp_path):
    lora, workspace = Lora(tiny.lora, 0.5), opened_workspace(tiny, tmp_path / "artifacts")
    jobs = [
        make_job("plain", ONE),
        make_job("hq", TWO, recipe="dev", stage_1_loras=(lora,), stage_2_loras=(Lora(tiny.lora, 2),)),
        make_job("style", ONE, loras=(lora,)),  # stage 1 of hq is that set
    ]
    build.make(workspace, workspace.weight_sets("dit"))
    sets = [workspace.weight_set("dit", stage.loras) for job in jobs for stage in job.stages]
    with pytest.raises(UserError) as error:
        workspace.find_all(sets)
    program = command("shard transformer")
    commands = [line.partition(program)[2] for line in str(error.value).splitlines() if program in line]
    assert len(commands) == 2
    for typed in commands:
        dispatch(["shard", "transformer", *shlex.split(typed)])
    workspace.find_all(sets)
    assert len(finished_weights(workspace.artifacts, "dit")) == 3


def test_weight_sets_are_told_apart_by_content_strength_and_order(tiny, tmp_path):
    path, tensors = written(tmp_path, load_file(tiny.lora)), load_file(tiny.lora)
    a, b = Lora(path, 0.7), Lora(written(tmp_path, {"a.lora_A.weight": torch.zeros(1)}, name="b"), 0.7)
    sets = (), (a,), (Lora(path, 0.8),), (b,), (a, b), (b, a)
    before = [str(identity_of(loras)) for loras in sets]
    assert len({*before}) == len(sets) and identity_of((Lora(path, 1),)) == identity_of((Lora(path, 1.0),))
    assert str(identity_of((Lora(written(tmp_path, tensors, name="copy"), 0.7),))) == before[1]
    # Overwritten while the process runs: the same inode and size
    with open(path, "r+b") as file:
        file.write(save({name: 2 * tensor for name, tensor in tensors.items()}))
    os.utime(path, ns=(0, 1))
    assert str(identity_of((a,))) not in before


def test_a_files_metadata_have_the_scale_of_references_and_its_names_layers_of_sound(tmp_path, capsys):
    def lora(name: str, *factors: str) -> Lora:
        keys = "reference_downscale_factor", "reference_temporal_scale_factor"
        save_file({"a": torch.zeros(1)}, tmp_path / name, dict(zip(keys, factors, strict=False)))
        return Lora(tmp_path / name)

    silent, one, two, both = lora("silent"), lora("one", "1"), lora("two", "2"), lora("both", "2", "4")
    scales = [reference_scale(loras) for loras in ((), (one,), (silent, two), (one, two), (both, two))]
    assert scales == [(1, 1), (1, 1), (2, 1), (2, 1), (2, 4)]
    assert [lora_files.detailing_scale(loras) for loras in ((silent,), (one,), (both,), ())] == [2, 1, 2, None]
    assert capsys.readouterr().out == ""  # one that has a scale decides for all
    assert reference_scale((silent,)) == reference_scale((silent,)) == (1, 1)
    printed = f"IC-LoRA {silent.path} has no reference scale: references get the size of stage 1 (factor 1)"
    assert capsys.readouterr().out.splitlines() == [printed]
    with pytest.raises(UserError, match="2 of .*two.*, 3 of .*three"):
        reference_scale((two, lora("three", "3")))
    for factor in ("0", "-1", "1.5", "", "\u00b2"):
        message = f"odd.*: its metadata has reference_temporal_scale_factor '{factor}', wanted a whole number from 1"
        with pytest.raises(UserError, match=message):
            reference_scale((lora("odd", "1", factor),))
    # A LoRA for dubbing needs layers of the sound.
    silent, voiced = (Lora(tmp_path / layer) for layer in ("attn1", "audio_attn1"))
    for lora in (silent, voiced):
        save_file({f"blocks.0.{lora.path.name}.to_q.lora_A.weight": torch.zeros(1)}, lora.path)
    assert lora_files.are_silent((silent,)) and not lora_files.are_silent((silent, voiced))


def test_a_missing_lora_is_offered_no_other_file(tmp_path):
    published, style = Path(RELEASE_FILES["Lightricks/LTX-2.3"]["lora"]).name, tmp_path / "style.safetensors"
    style.touch()
    for name, message in {
        "9": "no such file; type a .safetensors file",
        "styl.safetensors": f"(nearest: {style})",
        "style.safetensors:0.8": f"a word of its own: --lora {style} 0.8",
        ".": f"type its file: --lora {style}",
        published: f"hf download Lightricks/LTX-2.3 {published}",
    }.items():
        with pytest.raises(UserError) as error:
            Lora(tmp_path / name).file()
        text = str(error.value)
        assert text.startswith(f"--lora {tmp_path / name}: ") and message in text
        assert ("hf download" in text) == (name == published)
