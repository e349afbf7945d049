"""Sequence and context parallelism: ranks that share the video's tokens give what one rank gives."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import helpers
import pytest
import torch
from helpers import Together, block_summands, call, fp32_bound, made_config, one_thread, randn, rel  # noqa: F401
from tiny import TinySizes
from tiny.config import released_config

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, trace
from ltx_neuron.backends.mesh import CONTEXT, TENSOR, groups
from ltx_neuron.backends.ranks import pad_tokens, padding_bias, rank_slice
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import STREAMS, Bucket, transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.parallel import ContextParallel, SingleRank
from ltx_neuron.models.programs import dit_program, may_divide
from ltx_neuron.sampling.latents import video_positions
from ltx_neuron.sampling.samplers import ancestral_coefficients
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.weights.sharding import ALL, SHARDED_MODELS, rule

TP, LAYERS, SHAPE, TOKENS, AUDIO_TOKENS = 4, 2, (3, 2, 4), 24, 18
STEPS = len(STAGE_2_SIGMAS) - 1
# Two blocks of a width of 32, whose sums over the ranks have another order
EQUAL = fp32_bound(*block_summands(32) * LAYERS)


@cache
def model(marked: bool = False):
    """marked: whether the model has a keyframe embedding."""
    content, _ = made_config(TinySizes(layers=LAYERS))
    weights = helpers.ltx_model(content).state_dict()
    _, config = made_config(TinySizes(layers=LAYERS), use_keyframes_abs_pos_embedding=marked)
    return config, weights | {"keyframes_abs_pos_embedding": randn(1, config.video.inner, seed=11)}


class Layout(NamedTuple):
    tp: int = TP
    cp: int = 1
    divided: bool = False

    def profile(self):
        return resolve("cpu", (f"context_parallel={self.cp}",))


SEQUENCE = Layout(divided=True)


def values(bucket: Bucket, shape: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Everything a step takes, whole. With two timesteps an image holds the first eight tokens."""
    (config, weights), tokens = model(), math.prod(shape)
    mask = torch.ones(tokens, 1)
    mask[:8] = 0 if bucket.timesteps == 2 else 1
    times = torch.tensor([1.0, 0.0])[: bucket.timesteps]
    of_time = torch.cat([mask, 1 - mask], dim=1)[:, : bucket.timesteps]
    held = helpers.Held(mask, randn(1, tokens, 128, seed=9), times, of_time)
    positions = video_positions(shape, 24.0)
    inputs = helpers.step_inputs(config, weights, STAGE_2_SIGMAS, positions, AUDIO_TOKENS, held)
    inputs |= helpers.step_number(1)
    if bucket.biased:
        inputs["video_bias"] = randn(tokens, tokens, seed=10)
    if bucket.ancestral:
        inputs["keyframes_mask"] = (torch.arange(tokens) % 5 == 0).float()[:, None]
        inputs["ancestral"] = ancestral_coefficients(STAGE_2_SIGMAS, (False, False))[1]
        inputs |= {f"{s}_noise": randn(1, n, 128, seed=12) for s, n in (("video", tokens), ("audio", AUDIO_TOKENS))}
    if bucket.guided:
        inputs["keep"] = torch.tensor([[1.0] * 4, [0.0, 1.0, 0.0, 1.0]])
        inputs["enabled_steps"] = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    return inputs


def cut(weights: dict, rank: int, tp: int) -> dict[str, torch.Tensor]:
    """A rank's weights of the DiT; those of the host are left out by name."""
    parts = {}
    for name, tensor in weights.items():
        split = rule(SHARDED_MODELS["dit"], name)
        if split == ALL:
            parts[name] = tensor
        elif isinstance(split, int):
            parts[name] = tensor.chunk(tp, dim=split)[rank % tp]
    return parts


def run(program, weights: dict, inputs: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    fields = program.fields
    held = {name: value.to(fields[name].dtype) for name, value in inputs.items() if name in fields}
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    with torch.no_grad():
        for name, first in next(iter(program.runs.values())):
            rows = {"keep": held["keep"][first:][: fields["keep"].shape[0]]} if "keep" in held else {}
            held |= call(program, name, first, weights, held | rows)
    return held


def on_ranks(bucket: Bucket, inputs: dict, dtype=torch.float32, blocks: int = 0, layout=SEQUENCE):
    (config, weights), tp, cp = model(bucket.ancestral), layout.tp, layout.cp
    everyone = [[*range(cp * tp)]]
    comms = {
        name: [(members, Together(len(members))) for members in partition]
        for name, partition in (groups(layout.profile(), tp) or {TENSOR: everyone}).items()
    }

    def rank_run(rank: int) -> dict[str, torch.Tensor]:
        def of(name: str) -> Together | None:
            mine = [comm for members, comm in comms.get(name, ()) if rank in members]
            for comm in mine:
                comm.join(rank)
            return mine[0] if mine else None

        own, every = of(TENSOR), of(CONTEXT)
        context = ContextParallel(every) if cp > 1 else None
        how = config, bucket, tp, own if tp > 1 else SingleRank(), dtype, blocks
        program = dit_program(*how, sequence_parallel=layout.divided, context=context)
        fields, given = program.fields, dict(inputs)
        if "rank_one_hot" in fields:
            given["rank_one_hot"] = torch.eye(fields["rank_one_hot"].shape[1])
        if padding := fields.get("padding_bias"):
            given["padding_bias"] = padding_bias(padding, bucket.video_tokens, tp, cp)
        mine = {
            name: rank_slice(fields[name], pad_tokens(fields[name], whole, tp, cp), rank, tp)
            for name, whole in given.items()
            if name in fields
        }
        return run(program, cut(weights, rank, tp), mine, dtype)

    with ThreadPoolExecutor(cp * tp) as pool:
        return list(pool.map(rank_run, range(cp * tp)))


def alone(bucket: Bucket, inputs: dict, dtype=torch.float32) -> dict[str, torch.Tensor]:
    config, weights = model(bucket.ancestral)
    return run(dit_program(config, bucket, 1, SingleRank(), dtype, 0), weights, inputs, dtype)


# Ranks, timesteps (an image has a second one), what the pass has besides, and blocks per graph: one in each, where the
# streams leave it in parts, and the whole step with most inputs.
@pytest.mark.parametrize(
    ("layout", "timesteps", "kind", "blocks"),
    [
        (SEQUENCE, 1, "", 1),
        (SEQUENCE, 1, "guided", 1),
        (SEQUENCE, 2, "guided", 0),
        (SEQUENCE, 2, "ancestral", 1),
        (Layout(2, 2), 2, "guided", 1),
        (Layout(2, 2, divided=True), 2, "guided", 1),
        (Layout(1, 16), 2, "guided", 1),  # five groups have only padding
        (Layout(2, 2), 2, "biased", 1),
        (Layout(1, 5), 2, "biased", 1),
        (Layout(2, 2, divided=True), 2, "ancestral", 1),
        (Layout(1, 5), 2, "ancestral", 1),
    ],
)
def test_ranks_that_share_the_tokens_give_what_one_rank_gives(layout, timesteps, kind, blocks):
    shape = SHAPE if layout == SEQUENCE else (3, 7, 1)  # 21 tokens, which no number of groups divides
    bucket = Bucket(math.prod(shape), AUDIO_TOKENS, timesteps, STEPS, **({kind: True} if kind else {}))
    inputs = values(bucket, shape)
    expected, got = alone(bucket, inputs), on_ranks(bucket, inputs, blocks=blocks, layout=layout)
    for stream in STREAMS:
        name = f"{stream}_{'x0' if bucket.guided else 'latent'}"
        assert all(torch.equal(rank[name], got[0][name]) for rank in got)
        assert rel(got[0][name], expected[name]) < EQUAL
    if kind == "ancestral":  # marks in a wrong order show
        other = alone(bucket, inputs | {"keyframes_mask": inputs["keyframes_mask"].roll(1, 0)})
        assert rel(other["video_latent"], expected["video_latent"]) > 1e-3


def test_in_bf16_the_ranks_are_as_near_to_fp32_as_without_it():
    bucket = Bucket(TOKENS, AUDIO_TOKENS, 2, STEPS)
    inputs = values(bucket, SHAPE)
    exact = alone(bucket, inputs)
    divided, whole = (on_ranks(bucket, inputs, torch.bfloat16, layout=layout)[0] for layout in (SEQUENCE, Layout()))
    for name in ("video_latent", "audio_latent"):
        # Roundings of bf16 fall out differently in every order of sums: docs/architecture.md, numerics.
        assert 0 < rel(divided[name], exact[name]) < 2 * rel(whole[name], exact[name]) + 0.005


def costs(config, tokens: int, audio: int, layout: Layout) -> list[dict]:
    """Those of a group of blocks and of the tail in bf16."""
    profile, bucket = layout.profile(), Bucket(tokens, audio, 1, 8)
    with fake_process_group(layout.cp * layout.tp, groups=groups(profile, layout.tp)):
        context = registry.context(profile, layout.tp) if layout.cp > 1 else None
        comm, how = TorchDistComm(layout.tp), {"sequence_parallel": layout.divided, "context": context}
        program = dit_program(config, bucket, layout.tp, comm, torch.bfloat16, 1, **how)
        return [cost(trace(program, name, torch.bfloat16)) for name in ("blocks", "tail")]


def test_a_block_scatters_what_it_reduced_and_gathers_what_its_products_take():
    """At sizes where what is not divided (text, sound) is small."""
    config = model()[0]
    (whole, _), (divided, _) = (costs(config, 4096, 16, layout) for layout in (Layout(), SEQUENCE))
    stream = 4096 * config.video.inner * 2
    assert (whole["collectives"], divided["collectives"]) == (11, 16)
    assert (whole["reduce_scatter_bytes"], whole["all_gather_bytes"]) == (0, 0)
    # Outputs of self, text and audio-to-video attention and the feed-forward are scattered; inputs of these four, and
    # keys and values of video-to-audio, are gathered from a quarter each.
    assert divided["reduce_scatter_bytes"] == 4 * stream
    assert divided["all_gather_bytes"] == 5 * stream // TP
    assert divided["flops"] == whole["flops"]
    # q/k norms, RoPE and gates go by heads and are divided already.
    assert divided["elementwise_bytes"] < 0.7 * whole["elementwise_bytes"]


# GB that a rank receives from other groups in a step of 48 blocks, in bf16 at TP 4, of 512x768 and 121 frames, for
# video self-attention (32 heads of 128). Video-to-audio attention (32 heads of 64) receives other groups' results
# besides.
@pytest.mark.parametrize(("cp", "self_attention"), [(2, 0.60), (8, 1.06)])
def test_groups_exchange_as_many_bytes_as_the_design_says(cp, self_attention):
    tokens = 6144
    block, tail = costs(transformer_config(released_config()), tokens, 126, Layout(4, cp))
    # Keys and values are gathered; two collectives merge the sound's attention to the video.
    assert block["context_collectives"] == 3
    # In fp32, for 126 queries and 8 heads: gathered maxima, and summed results and weights.
    to_audio = 126 * 8 * 4 * (cp - 1 + 2 * 65 * (cp - 1) / cp)
    assert (block["context_bytes"] - to_audio) * 48 / 1e9 == pytest.approx(self_attention, abs=0.005)
    assert tail["context_bytes"] == tokens * 128 * 2 * (cp - 1) // cp


def test_tokens_that_do_not_divide_are_compiled_whole_with_a_message(tiny, tmp_path, capsys, monkeypatch):
    assert not may_divide(Bucket(TOKENS, AUDIO_TOKENS, 1, 8), 1)
    profile = resolve("cpu", ("sequence_parallel=true", "blocks_per_graph=1"))
    workspace = Workspace(tiny.checkpoint, profile, tmp_path, TP, "float32")
    programs = []
    monkeypatch.setattr(registry, "compile_program", lambda make, *_: programs.append(make()))
    for tokens in (18, TOKENS):
        with suppress(UserError, OSError):  # nothing was written
            build.make(workspace, workspace.dit_graphs([Bucket(tokens, AUDIO_TOKENS, 1, 8)]))
    text = "18 video tokens are not divisible by 4 ranks: compiled without sequence parallelism\n"
    assert capsys.readouterr().out == text
    assert ["rank_one_hot" in program.graphs["head"].inputs for program in programs] == [False, True]
