"""Normalized attention guidance in our steps, on one rank and on several. Its numbers are those of
test/integration/test_golden.py, "nag", and its equations those of test/unit/models/test_parallel.py."""

from concurrent.futures import ThreadPoolExecutor
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
from steps import AUDIO_TOKENS, FPS, SHOWS, distance

from ltx_neuron.backends.ranks import rank_slice
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling.latents import video_positions
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.weights.sharding import SHARDED_MODELS, rule

TOKENS, STEPS = 24, len(STAGE_2_SIGMAS) - 1
FP32 = 1e-5
NODE = 11.0, 0.25, 2.5  # scale, alpha and tau: the defaults of ComfyUI's node
BUCKET = Bucket(TOKENS, AUDIO_TOKENS, 1, STEPS, nag=True)


@cache
def model():
    content, config = made_config()
    return config, ltx_model(content).state_dict()


@cache
def step_values() -> dict[str, torch.Tensor]:
    """Everything a step takes but its number and NAG's settings."""
    config, weights = model()
    ones = torch.ones(TOKENS, 1)
    held = Held(ones, torch.zeros(1, TOKENS, 128), torch.ones(1), ones)
    values = step_inputs(config, weights, STAGE_2_SIGMAS, video_positions((3, 2, 4), FPS), AUDIO_TOKENS, held)
    for seed, (stream, size) in enumerate(zip(STREAMS, (config.video, config.audio), strict=True), 30):
        values[f"negative_{stream}_context"] = randn(1, TEXT_TOKENS, size.inner, seed=seed)
    return values


def latents(nag=NODE, tp=1, bucket=BUCKET, **changed) -> dict[str, torch.Tensor]:
    """The latents at the end of the schedule, by the graphs of `tp` ranks, which end with the same bits."""
    config, weights = model()
    comm = SingleRank() if tp == 1 else Together(tp)
    whole = step_values() | {"nag": torch.tensor(nag), "rank_one_hot": torch.eye(tp)} | changed

    def part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        split = rule(SHARDED_MODELS["dit"], name)
        return tensor.chunk(tp, dim=split)[rank] if isinstance(split, int) else tensor

    def run(rank: int) -> dict[str, torch.Tensor]:
        if tp > 1:
            comm.join(rank)
        program = dit_program(config, bucket, tp, comm, torch.float32, int(tp > 1), sequence_parallel=tp > 1)
        fields = program.fields
        values = {name: rank_slice(fields[name], x, rank, tp) for name, x in whole.items() if name in fields}
        mine = {name: part(name, tensor, rank) for name, tensor in weights.items()}
        with torch.no_grad():
            for number in range(STEPS):
                values |= step_number(number)
                for name, first in program.runs["main"]:
                    values |= call(program, name, first, mine, values)
        return {stream: values[f"{stream}_latent"] for stream in STREAMS}

    with ThreadPoolExecutor(tp) as pool:
        first, *others = pool.map(run, range(tp))
    assert all(torch.equal(other[stream], first[stream]) for other in others for stream in STREAMS)
    return first


@cache
def one_rank() -> dict[str, torch.Tensor]:
    return latents()


def test_four_ranks_that_divide_heads_and_tokens_end_with_the_latents_of_one():
    assert distance(latents(tp=4), one_rank()) < FP32


def test_a_prompt_that_is_its_own_negative_prompt_changes_nothing():
    """As in the paper, and only because both contexts are modulated."""
    plain = latents(bucket=Bucket(TOKENS, AUDIO_TOKENS, 1, STEPS))
    same = {f"negative_{stream}_context": step_values()[f"{stream}_context"] for stream in STREAMS}
    assert distance(latents(**same), plain) < FP32 and distance(one_rank(), plain) > SHOWS


@pytest.mark.parametrize("nag", [(5.0, 0.25, 2.5), (11.0, 0.5, 2.5), (11.0, 0.25, 1.2)])
def test_scale_alpha_and_tau_are_data_of_one_graph(nag):
    assert distance(latents(nag), one_rank()) > SHOWS


@pytest.mark.parametrize("stream", STREAMS)
def test_the_negative_prompt_is_that_of_both_streams(stream):
    name = f"negative_{stream}_context"
    assert distance(latents(**{name: step_values()[name] * 0.5}), one_rank()) > SHOWS
