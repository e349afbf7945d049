"""Other trainers' LoRA files are merged as the plain file of the same numbers; files of other
models and methods are refused by their names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import one_thread, randn  # noqa: F401
from jobs import make_job
from safetensors.torch import load_file, save_file

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.job import Job, Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.weights import model_files
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import Lora, MergedSource, _fingerprint, identity_of
from ltx_neuron.weights.sharding import DIFFUSION, SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

STRENGTH = 0.7  # no power of two, so that it matters when it is applied
RANK = 4  # of the tiny LoRA
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
QUERY = "transformer_blocks.0.attn1.to_q"
# Lightricks' names -> diffusers', from diffusers' scripts/convert_ltx2_to_diffusers.py.
DIFFUSERS = (
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_adaln_single", "audio_time_embed"),
    ("adaln_single", "time_embed"),
    ("patchify_proj", "proj_in"),
    ("video_embeddings_connector.transformer_1d", "video_connector.transformer"),
    ("audio_embeddings_connector.transformer_1d", "audio_connector.transformer"),
)


def written(folder: Path, tensors: dict, metadata: dict | None = None) -> Path:
    path = folder / "outside.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


def merged(tiny, path: Path, strength: float = STRENGTH, model: str = "dit") -> MergedSource:
    return MergedSource(SHARDED_MODELS[model], [Checkpoint(tiny.checkpoint)], (Lora(path, strength),))


def differing(a: Source, b: Source) -> list[str]:
    assert a.locations.keys() == b.locations.keys()
    return [name for name in a.locations if not torch.equal(a.tensor(name), b.tensor(name))]


def modules(tensors: dict) -> list[str]:
    """Layers of a plain LoRA, without its prefix."""
    names = (key.removesuffix(DOWN) for key in tensors if key.endswith(DOWN))
    return [name.removeprefix("diffusion_model.") for name in names]


def respelled(layer, down: str = DOWN, up: str = UP, alpha=None, metadata: dict | None = None):
    """A function that writes a plain LoRA with other names. layer: of a layer's name; alpha: the
    tensor of each layer."""

    def change(tensors: dict) -> tuple[dict, dict | None]:
        made = {}
        for name in modules(tensors):
            for old, new in ((DOWN, down), (UP, up)):
                made[layer(name) + new] = tensors[f"diffusion_model.{name}{old}"]
            if alpha is not None:
                made[layer(name) + ".alpha"] = alpha.clone()
        return made, metadata

    return change


def dotted(prefix: str):
    return lambda name: prefix + name


def flat(prefix: str):
    return lambda name: prefix + name.replace(".", "_")


def of_diffusers(name: str, prefix: str = "transformer.") -> str:
    for old, new in DIFFUSERS:
        name = name.replace(old, new)
    return prefix + name


def peft(**settings) -> dict:
    named = {f"transformer.{key}": value for key, value in settings.items()}
    return {"lora_adapter_metadata": json.dumps(named)}


KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight"}
DEFAULT = {"down": ".lora_A.default.weight", "up": ".lora_B.default.weight"}
COMFY = dotted("diffusion_model.")
FULL, HALF = torch.tensor(float(RANK)), torch.tensor(RANK / 2)
SAME = {
    "no prefix": respelled(dotted("")),
    "the checkpoint's prefix": respelled(dotted("model.diffusion_model.")),
    "PEFT": respelled(dotted("base_model.model."), **DEFAULT),
    "PEFT, saved": respelled(dotted("base_model.model.")),
    "PEFT, an adapter's own name": respelled(dotted(""), ".lora_A.my_style.weight", ".lora_B.my_style.weight"),
    "PEFT of a model in a wrapper": respelled(dotted("base_model.model.model."), **DEFAULT),
    "PEFT without .weight": respelled(dotted(""), ".lora_A", ".lora_B"),
    "diffusers": respelled(dotted("transformer.")),
    "diffusers, its layers' names": respelled(of_diffusers),
    "diffusers, with settings": respelled(
        of_diffusers, metadata=peft(r=RANK, lora_alpha=RANK, use_rslora=False, alpha_pattern={})
    ),
    "older diffusers": respelled(of_diffusers, ".lora.down.weight", ".lora.up.weight"),
    "attention processors": respelled(
        dotted("unet."), ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"
    ),
    "ComfyUI, down and up": respelled(COMFY, **KOHYA),
    "ComfyUI, alpha": respelled(COMFY, alpha=FULL.bfloat16()),
    "kohya": respelled(flat("lora_unet_"), **KOHYA, alpha=FULL),
    "kohya without alpha": respelled(flat("lora_unet_"), **KOHYA),
    "musubi": respelled(flat("lora_unet_model_"), **KOHYA, alpha=FULL.half()),
    "OneTrainer": respelled(flat("lora_transformer_"), **KOHYA, alpha=FULL),
    "OneTrainer, diffusers' names": respelled(
        lambda name: "lora_transformer_" + of_diffusers(name, "").replace(".", "_"), **KOHYA
    ),
    "LyCORIS": respelled(flat("lycoris_"), **KOHYA, alpha=FULL[None]),
    "kohya's metadata decides nothing": respelled(
        flat("lora_unet_"), **KOHYA, alpha=FULL, metadata={"ss_network_alpha": "1"}
    ),
}
HALVED = {
    "kohya": respelled(flat("lora_unet_"), **KOHYA, alpha=HALF),
    "musubi": respelled(flat("lora_unet_model_"), **KOHYA, alpha=HALF),
    "ComfyUI": respelled(COMFY, alpha=HALF.bfloat16()),
    "an alpha beside PEFT's settings": respelled(of_diffusers, alpha=HALF, metadata=peft(lora_alpha=RANK)),
    "PEFT's settings": respelled(of_diffusers, metadata=peft(r=RANK, lora_alpha=RANK / 2)),
    "PEFT's settings of layers": respelled(of_diffusers, metadata=peft(lora_alpha=1, alpha_pattern={".*": RANK / 2})),
    "PEFT's settings, rank-stabilised": respelled(
        of_diffusers, metadata=peft(lora_alpha=RANK**0.5 / 2, use_rslora=True)
    ),
}


@pytest.mark.parametrize(
    ("change", "strength"),
    [(each, STRENGTH) for each in SAME.values()] + [(each, STRENGTH / 2) for each in HALVED.values()],
    ids=[*SAME, *(f"{name}, half" for name in HALVED)],
)
def test_every_spelling_of_a_lora_gives_the_plain_files_bytes(tiny, tmp_path, change, strength):
    tensors, metadata = change(load_file(tiny.lora))
    assert tensors.keys() != load_file(tiny.lora).keys() or metadata
    path = written(tmp_path, tensors, metadata)
    expected = merged(tiny, tiny.lora, strength)
    assert len(expected.adapters) == 96
    assert differing(merged(tiny, path), expected) == []
    assert model_files.kind_of(TensorFile(path, "")) == "lora"


def test_a_folder_of_peft_has_alpha_in_its_settings_and_its_identity(tiny, tmp_path):
    """The weights' file does not have it. The error of the folder names the file to type."""
    tensors, _ = SAME["PEFT, saved"](load_file(tiny.lora))
    path, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file(tensors, path, {"format": "pt"})
    identities = []
    for alpha in (RANK, RANK / 2):
        settings.write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": alpha}))
        expected = merged(tiny, tiny.lora, STRENGTH * alpha / RANK)
        assert differing(merged(tiny, path), expected) == []
        _fingerprint.cache_clear()  # a process reads it once
        identities += identity_of((Lora(path),))
    assert identities[0] != identities[1]
    with pytest.raises(UserError, match=f"type its file: --lora {path}"):
        Lora(tmp_path).file()
    settings.write_text("{")
    with pytest.raises(UserError, match="its PEFT settings are damaged"):
        merged(tiny, path)


def test_a_name_that_two_weights_share_without_dots_is_refused(tiny, tmp_path):
    """A file with underscores cannot say which of them it changes."""
    weights = load_file(tiny.checkpoint)
    twin = QUERY.replace("attn1.to_q", "attn1_to.q") + ".weight"
    checkpoint = Checkpoint(tiny.checkpoint)
    made = weights | {DIFFUSION + twin: weights[f"{DIFFUSION}{QUERY}.weight"].clone()}
    save_file(made, tmp_path / "twins.safetensors", checkpoint.metadata)
    twins = [Checkpoint(tmp_path / "twins.safetensors")]
    tensors, _ = SAME["kohya"](load_file(tiny.lora))
    path = written(tmp_path, tensors)
    with pytest.raises(UserError, match=r"0_attn1_to_q\.lora_down\.weight: matches no weight"):
        MergedSource(SHARDED_MODELS["dit"], twins, (Lora(path),))


# --- connectors -----------------------------------------------------------------------------------
VIDEO = "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q"
AUDIO = "audio_embeddings_connector.transformer_1d_blocks.1.ff.net.2"
PROJECTION = "text_embedding_projection.video_aggregate_embed"
CONNECTORS = {
    "plain": (COMFY, {}),
    "PEFT": (dotted("base_model.model."), DEFAULT),
    "kohya": (flat("lora_unet_"), KOHYA),
    "musubi": (lambda name: flat("lora_unet_")(name).replace("video_embeddings", "embeddings"), KOHYA),
    "diffusers": (
        lambda name: of_diffusers(
            re.sub("text_embedding_projection.(.*)_aggregate_embed", r"\1_text_proj_in", name), "connectors."
        ),
        {},
    ),
}


def connector_lora(tiny, seed: int = 0) -> dict[str, torch.Tensor]:
    """A plain LoRA on three layers of model gemma3."""
    shapes, made = Checkpoint(tiny.checkpoint).shapes, {}
    for name in (VIDEO, AUDIO, PROJECTION):
        prefix = "" if name == PROJECTION else DIFFUSION
        rows, columns = shapes[f"{prefix}{name}.weight"]
        made[f"diffusion_model.{name}{DOWN}"] = randn(RANK, columns, seed=seed).bfloat16()
        made[f"diffusion_model.{name}{UP}"] = randn(rows, RANK, seed=seed + 1).bfloat16()
    return made


def by_hand_of(tiny, folder: Path, lora: dict | None = None) -> Path:
    """A checkpoint whose weights have a plain LoRA's products added by hand; by default those of
    connector_lora. Its fingerprint may be that of the tiny one: it needs a folder of its own."""
    weights, path = load_file(tiny.checkpoint), folder / "by_hand.safetensors"
    lora = lora or connector_lora(tiny)
    for name in modules(lora):
        key = f"{name}.weight" if name == PROJECTION else f"{DIFFUSION}{name}.weight"
        down, up = (lora[f"diffusion_model.{name}{part}"] for part in (DOWN, UP))
        weights[key] = weights[key] + (up * STRENGTH) @ down
    save_file(weights, path, Checkpoint(tiny.checkpoint).metadata)
    return path


def opened(checkpoint: Path, tiny, artifacts: Path) -> Workspace:
    profile = resolve("cpu", ("text_buckets=128,1024",))
    return Workspace(checkpoint, profile, artifacts, 1, "float32", tiny.gemma_root)


def job_with(*loras: Lora) -> Job:
    return make_job("a red fox by the sea", Size(64, 64, 9), loras=loras)


def encoded(workspace: Workspace, *jobs: Job, cache: bool = True) -> list[torch.Tensor]:
    """The jobs' contexts of video."""
    with Engine(workspace, Recorder(), RunOptions(cache_prompts=cache)) as engine:
        return [run.contexts[0].video for run in engine.encode([*jobs])]


@pytest.mark.parametrize(("layer", "parts"), CONNECTORS.values(), ids=CONNECTORS)
def test_a_lora_on_the_connectors_is_merged_into_the_text_side_alone(tiny, tmp_path, layer, parts):
    plain = connector_lora(tiny)
    tensors, _ = respelled(layer, **parts)(plain)
    path = written(tmp_path, tensors)
    by_hand = by_hand_of(tiny, tmp_path)
    expected = Source(SHARDED_MODELS["gemma3"], [Checkpoint(by_hand)])
    got = merged(tiny, path, model="gemma3")
    assert differing(got, expected) == [] and len(got.adapters) == 3
    assert all(torch.equal(got.read_mapped(n), expected.tensor(n)) for n in got.adapters)
    unmerged = Source(SHARDED_MODELS["gemma3"], [Checkpoint(tiny.checkpoint)])
    assert len(differing(unmerged, expected)) == 3
    dit = merged(tiny, path)
    assert dit.adapters == {} and dit.lora_identity == []  # the plain weight set


def test_prompts_are_encoded_by_connectors_with_the_lora_merged_in(tiny, tmp_path, artifacts):
    """Each job of a batch by its own, and again from the cache."""
    lora = Lora(written(tmp_path, connector_lora(tiny)), STRENGTH)
    expected = [
        *encoded(opened(by_hand_of(tiny, tmp_path), tiny, artifacts), job_with(), cache=False),
        *encoded(opened(tiny.checkpoint, tiny, artifacts), job_with(), cache=False),
    ]
    assert not torch.equal(*expected)
    for _ in ("encoded", "cached"):
        got = encoded(opened(tiny.checkpoint, tiny, artifacts), job_with(lora), job_with())
        assert all(map(torch.equal, got, expected))


def test_the_command_of_missing_gemma_weights_has_the_lora(tiny, tmp_path):
    workspace = opened(tiny.checkpoint, tiny, tmp_path / "artifacts")
    lora = Lora(written(tmp_path, connector_lora(tiny)), STRENGTH)
    with pytest.raises(UserError, match=rf"shard gemma3 .*--lora {lora.path} 0\.7"):
        workspace.weights("gemma3", workspace.text_loras(job_with(lora)))
    build.make(workspace, workspace.weight_sets("gemma3"))
    plain = workspace.weights("gemma3", workspace.text_loras(job_with(Lora(tiny.lora))))
    assert plain == workspace.weights("gemma3")  # no layer of the connectors


def test_a_lora_on_the_connectors_for_one_stage_is_refused(tiny, tmp_path):
    workspace = opened(tiny.checkpoint, tiny, tmp_path / "artifacts")
    lora, two = Lora(written(tmp_path, connector_lora(tiny))), Size(64, 64, 9, two_stage=True)
    job = make_job("x", two, stage_1_loras=(lora,))
    with pytest.raises(UserError, match="changes the connectors, which encode the prompt once"):
        workspace.text_loras(job)
    assert workspace.text_loras(make_job("x", two, loras=(lora,))) == (lora,)


# --- other methods --------------------------------------------------------------------------------
def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def _lokr(make) -> tuple[dict, np.ndarray]:
    w1, w2 = make(2, 4), make(16, 8)
    return {"lokr_w1": w1, "lokr_w2": w2, "alpha": HALF}, np.kron(_numpy(w1), _numpy(w2))


def _lokr_of_low_rank(make) -> tuple[dict, np.ndarray]:
    w1, a, b = make(4, 2), make(8, RANK), make(RANK, 16)
    tensors = {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "alpha": HALF}
    return tensors, np.kron(_numpy(w1), _numpy(a) @ _numpy(b)) / 2


def _lokr_of_two_low_ranks(make) -> tuple[dict, np.ndarray]:
    names = "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"
    parts = [make(4, RANK), make(RANK, 2), make(8, RANK), make(RANK, 16)]
    a, b, c, d = map(_numpy, parts)
    return dict(zip(names, parts, strict=True)), np.kron(a @ b, c @ d)


def _loha(make) -> tuple[dict, np.ndarray]:
    names = "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"
    parts = [make(32, RANK), make(RANK, 32), make(32, RANK), make(RANK, 32)]
    a, b, c, d = map(_numpy, parts)
    tensors = dict(zip(names, parts, strict=True)) | {"alpha": HALF}
    return tensors, (a @ b) * (c @ d) / 2


def _diff(make) -> tuple[dict, np.ndarray]:
    difference = make(32, 32)
    return {"diff": difference}, _numpy(difference)


@pytest.mark.parametrize("method", [_lokr, _lokr_of_low_rank, _lokr_of_two_low_ranks, _loha, _diff])
def test_lokr_loha_and_differences_are_merged_by_their_formula(tiny, tmp_path, method):
    """LyCORIS' formulas, in float64: one product may round to the next bf16."""
    seeds = iter(range(9))
    tensors, delta = method(lambda *shape: randn(*shape, seed=next(seeds)).bfloat16() / 4)
    path = written(tmp_path, {f"diffusion_model.{QUERY}.{x}": t for x, t in tensors.items()})
    before = Source(SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)]).tensor(f"{QUERY}.weight")
    added = torch.from_numpy(STRENGTH * delta).bfloat16()
    source = merged(tiny, path)
    assert source.adapters.keys() == {f"{QUERY}.weight"}
    got = source.tensor(f"{QUERY}.weight")
    torch.testing.assert_close(got, before + added, rtol=2**-7, atol=2**-9)
    assert (got == before + added).float().mean() > 0.99


def test_differences_of_biases_and_norms_are_added_beside_products(tiny, tmp_path):
    changes = {
        f"diffusion_model.{QUERY}.diff_b": f"{QUERY}.bias",
        "diffusion_model.transformer_blocks.0.attn1.q_norm.diff": ("transformer_blocks.0.attn1.q_norm.weight"),
        "lora_unet_transformer_blocks_0_attn1_k_norm.w_norm": ("transformer_blocks.0.attn1.k_norm.weight"),
        "transformer.transformer_blocks.0.attn2.norm_k.diff": ("transformer_blocks.0.attn2.k_norm.weight"),
    }
    plain, before = (merged(tiny, tiny.lora), Source(SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)]))
    made = {key: randn(*before.shape(name), seed=seed).bfloat16() for seed, (key, name) in enumerate(changes.items())}
    got = merged(tiny, written(tmp_path, load_file(tiny.lora) | made))
    for key, name in changes.items():
        expected = before.tensor(name) + (made[key].float() * STRENGTH).bfloat16()
        assert torch.equal(got.tensor(name), expected), name
    assert {*differing(got, plain)} == {*changes.values()}


# --- dtypes ---------------------------------------------------------------------------------------
F8 = torch.float8_e4m3fn
DTYPES = {
    "float8": ((F8, F8), {}),
    "float8 and bfloat16": ((F8, torch.bfloat16), {}),
    "float8 with a scale": ((F8, F8), {"scale": 0.5}),
    "float32 and bfloat16": ((torch.float32, torch.bfloat16), {}),
    "float16 and float32": ((torch.float16, torch.float32), {}),
}


@pytest.mark.parametrize(("dtypes", "more"), DTYPES.values(), ids=DTYPES)
def test_float8_and_factors_of_two_dtypes_are_cast_to_bfloat16(tiny, tmp_path, dtypes, more):
    """As ltx-core 1.2.0's _products_for_sd_key; 1.0.0 fails on them. ltx-core knows no scales."""
    scale = more.get("scale")
    tensors = {key: tensor.to(dtypes[key.endswith(UP)]) for key, tensor in load_file(tiny.lora).items()}
    cast = {key: tensor.bfloat16() * (scale or 1) for key, tensor in tensors.items()}
    if scale:
        tensors |= {f"{key}_scale": torch.tensor(scale) for key in cast}
    got, before = merged(tiny, written(tmp_path, tensors)), merged(tiny, tiny.lora, 0.0)
    for name in got.adapters:
        layer = f"diffusion_model.{name.removesuffix('.weight')}"
        delta = torch.matmul(cast[layer + UP] * STRENGTH, cast[layer + DOWN])
        assert torch.equal(got.tensor(name), delta.add_(before.tensor(name))), name


# --- what is left out, and what is refused --------------------------------------------------------
STRAYS = {
    "a text encoder's LoRA": "text_encoder.layers.0.q_proj.lora_A.weight",
    "kohya's text encoder": "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight",
    "ComfyUI's text encoder": "text_encoders.gemma3.model.layers.0.q_proj.lora_B.weight",
    "a moving average": f"ema.{QUERY}.lora_A.weight",
    "a model's moving average": f"model_ema.{QUERY}.lora_A.weight",
    "a counter": "step",
    "another model's weight": "vae.decoder.conv_in.conv.weight",
}


def test_tensors_of_other_models_are_left_out_as_upstream_does_and_counted(tiny, tmp_path, capsys):
    plain = load_file(tiny.lora)
    strays = {name: torch.zeros(4, 32, dtype=torch.bfloat16) for name in STRAYS.values()}
    source = merged(tiny, written(tmp_path, plain | strays))
    assert differing(source, merged(tiny, tiny.lora)) == []
    (note,) = source.notes
    assert f"{len(strays)} tensors of other models" in note and "are left out" in note
    assert merged(tiny, tiny.lora).notes == []
    loras = (Lora(tmp_path / "outside.safetensors"),)
    build.make(
        opened(tiny.checkpoint, tiny, tmp_path), opened(tiny.checkpoint, tiny, tmp_path).weight_sets("dit", (loras,))
    )
    assert capsys.readouterr().out.startswith(f"{note}\n")


def zeros(*names: str, shape=(RANK, 32)) -> dict:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name in names}


def pair(layer: str, inputs: int, outputs: int) -> dict:
    return zeros(layer + DOWN, shape=(RANK, inputs)) | zeros(layer + UP, shape=(outputs, RANK))


OLDER = "is of LTX-2.0 or LTX-Video, wanted one of the checkpoint's release"
COMFY_QUERY = f"diffusion_model.{QUERY}"
# What is added to the plain LoRA -> what is said.
REFUSED = {
    "DoRA": (zeros(f"{COMFY_QUERY}.dora_scale"), "is a DoRA file"),
    "PEFT's DoRA": (zeros(f"base_model.model.{QUERY}.lora_magnitude_vector"), "is a DoRA file"),
    "musubi's DoRA": (
        zeros(f"lora_unet_model_{QUERY.replace('.', '_')}.lora_magnitude_vector.weight"),
        "is a DoRA file",
    ),
    "OFT": (zeros(f"{COMFY_QUERY}.oft_blocks"), "is a OFT file"),
    "LTX-2.0": (pair("diffusion_model.caption_projection.linear_1", 32, 32), OLDER),
    "LTX-2.0 of diffusers": (pair("transformer.caption_projection.linear_1", 32, 32), OLDER),
    "LTX-2.0's sound": (pair("diffusion_model.audio_caption_projection.linear_2", 8, 8), OLDER),
    "LTX-2.0's projection": (pair("text_embedding_projection.aggregate_embed", 96, 32), OLDER),
    "LTX-2.0's connector": (pair(f"transformer.{VIDEO}", 24, 24), OLDER),
    "a whole weight": (zeros(f"{COMFY_QUERY}.weight"), "is not a LoRA's tensor"),
    "a bias of a product": (zeros(f"{COMFY_QUERY}.lora_B.bias"), "is not a LoRA's tensor"),
    "a layer that is not there": (
        pair("diffusion_model.transformer_blocks.99.attn1.to_q", 32, 32),
        "transformer_blocks.99.attn1.to_q.lora_A.weight: matches no weight of the model",
    ),
    "two adapters": (zeros(f"{COMFY_QUERY}.lora_A.second.weight"), "same weight as"),
    "two prefixes": (zeros(f"transformer.{QUERY}.lora_A.weight"), "same weight as"),
    "half a LoKr": (zeros(f"{COMFY_QUERY}.lokr_w1"), "its lokr_w2 is missing"),
}


@pytest.mark.parametrize(("added", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_merged_is_refused_by_its_name(tiny, tmp_path, added, message):
    path = written(tmp_path, load_file(tiny.lora) | added)
    with pytest.raises(UserError) as error:
        merged(tiny, path)
    assert message in str(error.value) and f"--lora {path}" in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


def test_an_older_models_adaln_is_told_by_its_size(tiny, tmp_path):
    """LTX-2.0's has 6 rows where LTX-2.3's has 9."""
    plain = load_file(tiny.lora)
    key = f"diffusion_model.adaln_single.linear{UP}"
    plain[key] = plain[key][: len(plain[key]) // 9 * 6]
    with pytest.raises(UserError, match=OLDER):
        merged(tiny, written(tmp_path, plain))


OTHERS = {
    "Wan": "diffusion_model.blocks.{}.self_attn.q",
    "Wan of musubi": "lora_unet_blocks_{}_self_attn_q",
    "Flux": "transformer.single_transformer_blocks.{}.attn.to_q",
    "Hunyuan": "diffusion_model.double_blocks.{}.img_attn.proj",
    "LTX-Video of another size": "diffusion_model.transformer_blocks.{}.attn1.to_q",
}


@pytest.mark.parametrize("layer", OTHERS.values(), ids=OTHERS)
def test_another_models_lora_is_refused_in_a_few_lines(tiny, tmp_path, layer):
    tensors = {k: t for n in range(40) for k, t in pair(layer.format(n), 48, 48).items()}
    with pytest.raises(UserError) as error:
        merged(tiny, written(tmp_path, tensors))
    title, first, more = str(error.value).splitlines()
    assert title.endswith("is not a LoRA of this model:") and layer.partition("{}")[0] in first
    assert "wanted layers such as " in more


def missing(folder: Path) -> dict[str, tuple[Path, str]]:
    released = Path(RELEASE_FILES["Lightricks/LTX-2.3"]["lora"]).name
    (folder / "style.safetensors").touch()
    return {
        "any": (folder / "9", "no such file; type a .safetensors file"),
        "near": (folder / "styl.safetensors", f"(nearest: {folder}/style.safetensors)"),
        "strength": (folder / "style.safetensors:0.8", f"a word of its own: --lora {folder}/style.safetensors 0.8"),
        "folder": (folder, f"type its file: --lora {folder}/style.safetensors"),
        "released": (folder / released, f"hf download Lightricks/LTX-2.3 {released}"),
    }


@pytest.mark.parametrize("name", ["any", "near", "strength", "folder", "released"])
def test_a_missing_lora_is_offered_no_other_file(tmp_path, name):
    path, message = missing(tmp_path)[name]
    with pytest.raises(UserError) as error:
        Lora(path).file()
    assert str(error.value).startswith(f"--lora {path}: ") and message in str(error.value)
    assert ("hf download" in str(error.value)) == (name == "released")
