"""LoRAs of every trainer are merged to the bits of ltx-core's loader; what fits no weight is refused by its name."""

import json
import os
import re
from functools import reduce
from pathlib import Path

import pytest
import torch
from golden.upstream import fused_state
from helpers import one_thread, randn  # noqa: F401
from jobs import make_job
from safetensors.torch import load_file, save, save_file

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.report.latency import Recorder
from ltx_neuron.weights import model_files
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource, _fingerprint, identity_of
from ltx_neuron.weights.sharding import DIFFUSION, SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

STRENGTH = 0.7  # no power of two, so that it matters when it is applied
RANK = 4  # of the tiny LoRA
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


def plain(tiny) -> Source:
    return Source(SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)])


def differing(a: Source, b: Source) -> set[str]:
    assert a.locations.keys() == b.locations.keys()
    return {name for name in a.locations if not torch.equal(a.tensor(name), b.tensor(name))}


def layers(tensors: dict) -> list[str]:
    return [name.removeprefix("diffusion_model.").removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]


def factors(path: Path, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, layer = load_file(path), "diffusion_model." + weight.removesuffix(".weight")
    return tensors[layer + DOWN], tensors[layer + UP]


# --- numbers --------------------------------------------------------------------------------------


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


ONE, TWO = ("tiny", STRENGTH), ("other", 0.3)


@pytest.mark.parametrize("loras", [[("tiny", 0.0), TWO], [ONE, TWO, ("tiny", -0.2)], [("float32", STRENGTH)]], ids=str)
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
    assert differing(source, plain(tiny)) == {f"{name}.weight" for name in changed}


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


F8, B16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("down", "up", "scale"), [(F8, F8, 1.0), (F8, B16, 0.5), (F16, F32, 1.0)])
def test_float8_and_factors_of_two_dtypes_are_cast_to_bfloat16(tiny, tmp_path, down, up, scale):
    """As ltx-core 1.2.0's _products_for_sd_key; 1.0.0 fails on them. ltx-core knows no scales."""
    tensors = {key: tensor.to(up if key.endswith(UP) else down) for key, tensor in load_file(tiny.lora).items()}
    small = [key for key in tensors if tensors[key].dtype == F8 and scale != 1]
    cast = {key: tensor.bfloat16() * (scale if key in small else 1) for key, tensor in tensors.items()}
    tensors |= {f"{key}_scale": torch.tensor(scale) for key in small}
    source, before = merged(tiny, (written(tmp_path, tensors), STRENGTH)), plain(tiny)
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
    before = plain(tiny)
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
COMFY, FULL, HALF = dotted("diffusion_model."), torch.tensor(float(RANK)), torch.tensor(RANK / 2)
# A spelling -> its share of the plain file's strength, layer names, names of the factors, alpha and metadata
SPELLINGS = {
    "no prefix": (1, dotted(""), (DOWN, UP), None, None),
    "the checkpoint's prefix": (1, dotted("model.diffusion_model."), (DOWN, UP), None, None),
    "PEFT": (1, dotted("base_model.model."), (".lora_A.default.weight", ".lora_B.default.weight"), None, None),
    "PEFT without .weight": (1, dotted(""), (".lora_A", ".lora_B"), None, None),
    "diffusers": (1, of_diffusers, (DOWN, UP), None, peft(r=RANK, lora_alpha=RANK, use_rslora=False, alpha_pattern={})),
    "older diffusers": (1, of_diffusers, (".lora.down.weight", ".lora.up.weight"), None, None),
    "processors": (1, dotted("unet."), (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"), None, None),
    "ComfyUI, alpha": (1, COMFY, (DOWN, UP), FULL.bfloat16(), None),
    "kohya without alpha": (1, flat("lora_unet_"), KOHYA, None, None),
    "kohya, alpha and metadata": (1, flat("lora_unet_"), KOHYA, FULL, {"ss_network_alpha": "1"}),
    "musubi": (1, flat("lora_unet_model_"), KOHYA, FULL.half(), None),
    "OneTrainer": (1, lambda name: flat("lora_transformer_")(of_diffusers(name, "")), KOHYA, None, None),
    "LyCORIS": (1, flat("lycoris_"), KOHYA, FULL[None], None),
    "kohya, half": (0.5, flat("lora_unet_"), KOHYA, HALF, None),
    "alpha beside PEFT's settings": (0.5, of_diffusers, (DOWN, UP), HALF.bfloat16(), peft(lora_alpha=RANK)),
    "PEFT's settings": (0.5, of_diffusers, (DOWN, UP), None, peft(r=RANK, lora_alpha=RANK / 2)),
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
        _fingerprint.cache_clear()  # a process reads it once
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


def opened(tiny, artifacts: Path) -> Workspace:
    profile = resolve("cpu", ("text_buckets=128,1024",))
    return Workspace(tiny.checkpoint, profile, artifacts, 1, "float32", tiny.gemma_root)


def job_with(*loras: Lora, two_stage: bool = False, **stages) -> Job:
    return make_job("a red fox by the sea", Size(64, 64, 9, two_stage=two_stage), loras=loras, **stages)


@pytest.mark.parametrize("layer", [COMFY, flat("lora_unet_"), lambda name: of_diffusers(name, "connectors.")])
def test_a_lora_on_the_connectors_is_merged_into_the_text_side_alone(tiny, tmp_path, connector_lora, layer):
    path = written(tmp_path, respelled(load_file(connector_lora), layer))
    source, weights = merged(tiny, (path, STRENGTH), model="gemma3"), load_file(tiny.checkpoint)
    assert len(source.adapters) == 2
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
        with Engine(opened(tiny, tmp_path), Recorder(), RunOptions(cache_prompts=cache)) as engine:
            return [run.contexts[0].video for run in engine.encode([*jobs])]

    jobs = job_with(Lora(connector_lora, STRENGTH)), job_with()
    expected = [context for job in jobs for context in encoded(job, cache=False)]
    assert not torch.equal(*expected)
    for _ in ("encoded", "cached"):
        assert all(map(torch.equal, encoded(*jobs, cache=True), expected))


def test_gemmas_weight_set_is_that_of_the_lora_on_the_connectors_for_all_stages(tiny, tmp_path, connector_lora):
    workspace, lora = opened(tiny, tmp_path / "artifacts"), Lora(connector_lora, STRENGTH)
    assert workspace.text_loras(job_with(lora, two_stage=True)) == (lora,)
    assert workspace.text_loras(job_with(Lora(tiny.lora))) == ()  # no layer of the connectors
    with pytest.raises(UserError, match=rf"shard gemma3 .*--lora {lora.path} 0\.7"):
        workspace.weights("gemma3", (lora,))
    with pytest.raises(UserError, match="changes the connectors, which encode the prompt once"):
        workspace.text_loras(job_with(two_stage=True, stage_1_loras=(lora,)))


# --- what is left out, and what is refused --------------------------------------------------------

STRAYS = (
    "text_encoder.layers.0.q_proj.lora_A.weight",
    "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight",  # kohya's
    "text_encoders.gemma3.model.layers.0.q_proj.lora_B.weight",  # ComfyUI's
    f"model_ema.{QUERY}.lora_A.weight",
    "vae.decoder.conv_in.conv.weight",
)


def test_tensors_of_other_models_are_left_out_and_counted(tiny, tmp_path, shares, capsys):
    strays = {name: torch.zeros(4, 32, dtype=torch.bfloat16) for name in STRAYS}
    lora = Lora(written(tmp_path, load_file(tiny.lora) | strays), STRENGTH)
    source = merged(tiny, (lora.path, STRENGTH))
    assert differing(source, shares[1]) == set() and shares[1].notes == []
    (note,) = source.notes
    assert f"{len(strays)} tensors of other models" in note and "are left out" in note
    workspace = opened(tiny, tmp_path)
    build.make(workspace, workspace.weight_sets("dit", ((lora,),)))
    assert capsys.readouterr().out.startswith(f"{note}\n")


def zeros(name: str, *shape: int, dtype=torch.bfloat16) -> dict:
    return {name: torch.zeros(shape or (RANK, 32), dtype=dtype)}


def pair(layer: str, inputs: int = 32, dtype=torch.bfloat16) -> dict:
    return zeros(layer + DOWN, RANK, inputs, dtype=dtype) | zeros(layer + UP, 32, RANK, dtype=dtype)


def older_adaln(tensors: dict) -> dict:
    """LTX-2.0's has 6 rows where LTX-2.3's has 9."""
    key = f"diffusion_model.adaln_single.linear{UP}"
    return tensors | {key: tensors[key][: len(tensors[key]) // 9 * 6]}


OLDER = "is of LTX-2.0 or LTX-Video, wanted one of the checkpoint's release"
BLOCK_99 = "diffusion_model.transformer_blocks.99.attn1.to_q"
MISFIT = f"lora_A of shape [4, 31], lora_B of shape [32, 4] does not fit {QUERY}.weight of shape [32, 32]"
# What is added to the plain LoRA, or what it becomes -> the message
REFUSED = {
    "DoRA": (zeros(f"{COMFY_QUERY}.dora_scale"), "is a DoRA file"),
    "LTX-2.0": (pair("diffusion_model.caption_projection.linear_1"), OLDER),
    "LTX-2.0's projection": (pair("text_embedding_projection.aggregate_embed"), OLDER),
    "LTX-2.0's AdaLN": (older_adaln, OLDER),
    "a whole weight": (zeros(f"{COMFY_QUERY}.weight"), "is not a LoRA's tensor"),
    "a bias of a product": (zeros(f"{COMFY_QUERY}.lora_B.bias"), "is not a LoRA's tensor"),
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


def test_a_lora_that_is_overwritten_while_the_process_runs_is_another_one(tiny, tmp_path):
    path, identities = written(tmp_path, load_file(tiny.lora)), []
    for factor in (1, 2):
        content = save({name: factor * tensor for name, tensor in load_file(tiny.lora).items()})
        with open(path, "r+b") as file:  # the same inode and size
            file.write(content)
        os.utime(path, ns=(0, factor))
        identities.append(identity_of((Lora(path),)))
    assert identities[0] != identities[1]
