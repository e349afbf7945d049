"""Normalized attention guidance: our steps beside ltx-core's with the paper's equations in its text
attentions (test/nag_oracle.py), on one rank and on several."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import (
    STREAMS,
    Held,
    Together,
    call,
    ltx_model,
    made_config,
    one_thread,  # noqa: F401
    randn,
    step_inputs,
    step_number,
)
from nag_oracle import Nag, guided
from steps import AUDIO_TOKENS, FPS, SHOWS, distance, ltx_loop, ltx_state

from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, trace
from ltx_neuron.backends.ranks import rank_slice
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling.latents import audio_positions, video_positions
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.weights.sharding import SHARDED_MODELS, rule

TOKENS, STEPS = 24, len(STAGE_2_SIGMAS) - 1
FP32 = 1e-5
# Roundings of bf16 fall out differently in every order of sums: docs/architecture.md, numerics.
BF16_FACTOR, BF16_FLOOR = 2, 0.005
NODE = Nag(11.0)  # ComfyUI's defaults
BUCKET = Bucket(TOKENS, AUDIO_TOKENS, 1, STEPS, nag=True)


@cache
def model():
    content, config = made_config()
    return ltx_model(content), config


@cache
def step_values() -> dict[str, torch.Tensor]:
    """Everything a step takes but its number and NAG's three."""
    ltx, config = model()
    ones = torch.ones(TOKENS, 1)
    held = Held(ones, torch.zeros(1, TOKENS, 128), torch.ones(1), ones)
    positions = video_positions((3, 2, 4), FPS)
    values = step_inputs(config, ltx.state_dict(), STAGE_2_SIGMAS, positions, AUDIO_TOKENS, held)
    widths = config.video.inner, config.audio.inner
    negative = (randn(1, TEXT_TOKENS, width, seed=30 + n) for n, width in enumerate(widths))
    names = (f"negative_{stream}_context" for stream in STREAMS)
    return values | dict(zip(names, negative, strict=True))


def ltx_latents(nag=NODE, dtype=torch.float32, **options) -> dict[str, torch.Tensor]:
    """The latents at the end of the schedule, by ltx-core and ltx-pipelines' own loop."""
    from ltx_core.model.transformer import X0Model
    from ltx_pipelines.utils.helpers import simple_denoising_func

    ltx, ones = model()[0], torch.ones(AUDIO_TOKENS, 1)
    ltx = ltx if dtype == torch.float32 else copy.deepcopy(ltx).to(dtype)
    values = {
        name: value.to(dtype) if name.endswith(("latent", "context")) else value
        for name, value in step_values().items()
    }
    video, audio = values["video_latent"], values["audio_latent"]
    positions = video_positions((3, 2, 4), FPS), audio_positions(AUDIO_TOKENS)
    states = (
        ltx_state(video, values["denoise_mask"], positions[0], torch.zeros_like(video)),
        ltx_state(audio, ones, positions[1], torch.zeros_like(audio)),
    )
    contexts = values["video_context"], values["audio_context"]
    negative = (values[f"negative_{stream}_context"] for stream in STREAMS)
    with guided(nag, *negative, **options):
        denoise = simple_denoising_func(*contexts, X0Model(ltx))
        return ltx_loop(STAGE_2_SIGMAS, *states, denoise)


def our_latents(
    nag=NODE, tp=1, divided=False, dtype=torch.float32, blocks=0, bucket=BUCKET, **changed
) -> dict[str, torch.Tensor]:
    """The same by the graphs of `tp` ranks, which end with the same bits."""
    config, weights = model()[1], model()[0].state_dict()
    comm = SingleRank() if tp == 1 else Together(tp)
    given = step_values() | {"nag": torch.tensor(nag), "rank_one_hot": torch.eye(tp)} | changed

    def part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        split = rule(SHARDED_MODELS["dit"], name)
        return tensor.chunk(tp, dim=split)[rank] if isinstance(split, int) else tensor

    def run(rank: int) -> dict[str, torch.Tensor]:
        if tp > 1:
            comm.join(rank)
        program = dit_program(config, bucket, tp, comm, dtype, blocks, sequence_parallel=divided)
        fields = program.fields
        values = {
            name: rank_slice(fields[name], whole, rank, tp).to(fields[name].dtype)
            for name, whole in given.items()
            if name in fields
        }
        mine = {name: part(name, each, rank).to(dtype) for name, each in weights.items()}
        with torch.no_grad():
            for number in range(STEPS):
                values |= step_number(number)
                for name, first in program.runs["main"]:
                    values |= call(program, name, first, mine, values)
        return {stream: values[f"{stream}_latent"] for stream in STREAMS}

    with ThreadPoolExecutor(tp) as pool:
        first, *others = pool.map(run, range(tp))
    assert all(torch.equal(each[s], first[s]) for each in others for s in STREAMS)
    return first


@cache
def wanted(nag=NODE) -> dict[str, torch.Tensor]:
    return ltx_latents(nag)


@pytest.mark.parametrize(("tp", "divided"), [(1, False), (2, False), (4, False), (4, True)])
def test_latents_are_those_of_the_papers_equations_in_ltx_core(tp, divided):
    found = distance(our_latents(tp=tp, divided=divided, blocks=divided), wanted())
    print(f"TP {tp}: {found:.1e}")
    assert found < FP32


@pytest.mark.parametrize("nag", [Nag(5.0), Nag(11.0, alpha=0.5), Nag(11.0, tau=5.0), Nag(11.0, tau=1.2)])
def test_scale_alpha_and_tau_are_data_of_one_graph(nag):
    assert distance(our_latents(nag), wanted(nag)) < FP32
    assert distance(wanted(nag), wanted()) > SHOWS


def test_a_prompt_that_is_its_own_negative_prompt_changes_nothing():
    """As in the paper, and only because both contexts are modulated. ComfyUI's node leaves the
    negative one as it is, which alone changes more than a negative prompt does."""
    plain = our_latents(bucket=Bucket(TOKENS, AUDIO_TOKENS, 1, STEPS))
    same = {f"negative_{stream}_context": step_values()[f"{stream}_context"] for stream in STREAMS}
    assert distance(our_latents(**same), plain) < FP32
    assert distance(wanted(), plain) > SHOWS
    assert distance(ltx_latents(modulated=False), wanted()) > distance(wanted(), plain)


def test_in_bf16_it_is_as_near_to_fp32_as_ltx_core_with_the_equations_in_bf16():
    ours, exact = our_latents(dtype=torch.bfloat16), wanted()
    theirs = ltx_latents(dtype=torch.bfloat16)
    assert distance(ours, exact) < BF16_FACTOR * distance(theirs, exact) + BF16_FLOOR


@pytest.mark.parametrize("stream", STREAMS)
def test_the_negative_prompt_is_that_of_both_streams(stream):
    name = f"negative_{stream}_context"
    assert distance(our_latents(**{name: step_values()[name] * 0.5}), our_latents()) > SHOWS


def costs(bucket: Bucket) -> dict[str, int]:
    """Of a block on four ranks."""
    with fake_process_group(4):
        program = dit_program(model()[1], bucket, 4, TorchDistComm(4), torch.float32, 1)
        return cost(trace(program, "blocks", torch.float32))


def test_it_costs_one_attention_and_one_small_sum_more_in_a_block():
    plain, nag = costs(replace(BUCKET, nag=False)), costs(BUCKET)
    config, tokens = model()[1], TOKENS + AUDIO_TOKENS
    assert nag["collectives"] == plain["collectives"] + 1
    # The statistics of the negative keys, and two norms of each token
    assert nag["collective_bytes"] - plain["collective_bytes"] == 4 * (2 * TEXT_TOKENS + 2 * tokens)
    # Keys and values, and the two products of the attention
    more = sum(
        4 * TEXT_TOKENS * size.inner * (size.inner + count) // 4
        for size, count in ((config.video, TOKENS), (config.audio, AUDIO_TOKENS))
    )
    assert nag["flops"] - plain["flops"] == more
