"""Normalized attention guidance: our steps beside ltx-core's with the paper's equations in its text
attentions (test/nag_oracle.py), on one rank and on several."""

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
    rel,
    step_inputs,
    step_number,
)
from nag_oracle import Nag, guided
from steps import AUDIO_TOKENS, EQUAL, FPS, SHOWS, distance, ltx_loop, ltx_state

from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, trace
from ltx_neuron.backends.ranks import part_of
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling.latents import audio_positions, video_positions
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.weights.sharding import ALL, MODELS, rule

TOKENS, STEPS = 24, len(STAGE_2_SIGMAS) - 1
FP32 = 1e-5
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
    values = step_inputs(
        config, ltx.state_dict(), STAGE_2_SIGMAS, positions, AUDIO_TOKENS, held
    )
    widths = config.video.inner, config.audio.inner
    negative = (randn(1, TEXT_TOKENS, width, seed=30 + n) for n, width in enumerate(widths))
    names = (f"negative_{stream}_context" for stream in STREAMS)
    return values | dict(zip(names, negative, strict=True))


def ltx_latents(nag=NODE, **options) -> dict[str, torch.Tensor]:
    """The latents at the end of the schedule, by ltx-core and ltx-pipelines' own loop."""
    from ltx_core.model.transformer import X0Model
    from ltx_pipelines.utils.helpers import simple_denoising_func

    values, ones = step_values(), torch.ones(AUDIO_TOKENS, 1)
    video, audio = values["video_latent"], values["audio_latent"]
    positions = video_positions((3, 2, 4), FPS), audio_positions(AUDIO_TOKENS)
    states = (
        ltx_state(video, values["denoise_mask"], positions[0], torch.zeros_like(video)),
        ltx_state(audio, ones, positions[1], torch.zeros_like(audio)),
    )
    contexts = values["video_context"], values["audio_context"]
    negative = (values[f"negative_{stream}_context"] for stream in STREAMS)
    with guided(nag, *negative, **options):
        denoise = simple_denoising_func(*contexts, X0Model(model()[0]))
        return ltx_loop(STAGE_2_SIGMAS, *states, denoise)


def our_latents(
    nag=NODE, tp=1, divided=False, dtype=torch.float32, blocks=0, bucket=BUCKET, **changed
) -> dict[str, torch.Tensor]:
    """The same by the graphs of `tp` ranks, which end with the same bits."""
    config, weights = model()[1], model()[0].state_dict()
    comm = SingleRank() if tp == 1 else Together(tp)
    given = step_values() | {"nag": torch.tensor(nag), "rank_one_hot": torch.eye(tp)} | changed

    def part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        split = rule(MODELS["dit"], name)
        return tensor.chunk(tp, dim=split)[rank] if isinstance(split, int) else tensor

    def run(rank: int) -> dict[str, torch.Tensor]:
        if tp > 1:
            comm.join(rank)
        program = dit_program(config, bucket, tp, comm, dtype, blocks, sequence_parallel=divided)
        fields = program.fields
        values = {
            name: part_of(fields[name], whole, rank).to(fields[name].dtype)
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


def test_tmp():
    plain = our_latents(bucket=Bucket(TOKENS, AUDIO_TOKENS, 1, STEPS))
    print("nag vs off", distance(wanted(), plain))
    print("unmodulated", distance(ltx_latents(modulated=False), wanted()))
    for nag in (Nag(5.0), Nag(11.0, 0.5), Nag(11.0, 0.25, 5.0), Nag(11, .25, 1.2), Nag(2.0, 0.25, 10.0)):
        print(nag, distance(ltx_latents(nag), our_latents(nag)), distance(ltx_latents(nag), wanted()))
    same = {f"negative_{s}_context": step_values()[f"{s}_context"] for s in STREAMS}
    print("same", distance(our_latents(**same), plain))
