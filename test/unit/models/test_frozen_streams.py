"""Steps of what is given are ltx-core's: audio tokens that are held, a stream that is frozen, a
bias of the video's self-attention; each beside what a step without it would make."""

import dataclasses

import pytest
import torch
from golden.patches import later_semantics
from helpers import STREAMS, Held, ltx_model, made_config, randn, rel, run_program, step_inputs, step_number
from steps import AUDIO_TOKENS, EQUAL, FPS, SHAPE, SHOWS, distance, ltx_loop, ltx_state
from tiny.config import TinySizes

from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models import attention
from ltx_neuron.models.modulation import modulation_table
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling.latent_state import attention_bias, audio_state, video_state
from ltx_neuron.sampling.latents import audio_positions, audio_seconds, unpatchify_audio
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS, sigma_pairs, stream_sigmas

STEPS = len(STAGE_2_SIGMAS) - 1


@pytest.fixture(scope="module")
def model():
    """A random model of two blocks in ltx-core's form, its config and its weights."""
    content, config = made_config(TinySizes(layers=2))
    whole = ltx_model(content)
    return whole, config, whole.state_dict()


def values_of(model, held_audio=None, still=(False, False), bias=None):
    """What the steps take; held_audio is a LatentState of which some tokens are held."""
    _, config, weights = model
    state = video_state(torch.zeros(1, 128, *SHAPE), FPS, [])
    rows, choice = state.timestep_choice(1, torch.float32)
    held = Held(state.denoise_mask, state.clean_latent, rows, choice)
    values = step_inputs(config, weights, STAGE_2_SIGMAS, state.positions, AUDIO_TOKENS, held)
    sigmas = stream_sigmas(sigma_pairs(STAGE_2_SIGMAS, STEPS), still)
    own = [sigmas[:, i, 0] * (not frozen) for i, frozen in enumerate(still)]
    masks = torch.ones(1)
    if held_audio is not None:
        masks, audio_choice = held_audio.timestep_choice(2, torch.float32)
        values |= {
            "audio_timestep_mask": audio_choice,
            "audio_denoise_mask": held_audio.denoise_mask,
            "audio_clean_latent": held_audio.clean_latent,
        }
    if bias is not None:
        values["video_bias"] = bias
    return values | {
        "sigmas": sigmas,
        "video_modulation": modulation_table(weights, config, "video", own[0], torch.ones(1), other_sigmas=own[1]),
        "audio_modulation": modulation_table(weights, config, "audio", own[1], masks, other_sigmas=own[0]),
        "video_positions": state.positions,
    }


def our_latents(model, values, kernel="sdpa"):
    """The latents after all steps."""
    _, config, weights = model
    bucket = Bucket(
        SHAPE[0] * SHAPE[1] * SHAPE[2],
        AUDIO_TOKENS,
        1,
        STEPS,
        audio_timesteps=2 if "audio_denoise_mask" in values else 1,
        biased="video_bias" in values,
    )
    program = dit_program(config, bucket, 1, SingleRank(), torch.float32, 1, kernel)
    for number in range(STEPS):
        values = run_program(program, weights, values | step_number(number))
    return {stream: values[f"{stream}_latent"] for stream in STREAMS}


def ltx_latents(model, values, audio_mask=None, attention_mask=None, frozen_audio=False):
    """The same by ltx-pipelines' Euler loop and ltx-core's model."""
    from ltx_core.model.transformer import X0Model
    from ltx_pipelines.utils.helpers import modality_from_latent_state

    mask = torch.ones(AUDIO_TOKENS, 1) if audio_mask is None else audio_mask
    mask = torch.zeros(AUDIO_TOKENS, 1) if frozen_audio else mask
    clean = values.get("audio_clean_latent", values["audio_latent"])
    video = ltx_state(
        values["video_latent"],
        values["denoise_mask"],
        values["video_positions"],
        values["clean_latent"],
        attention_mask,
    )
    audio = ltx_state(values["audio_latent"], mask, audio_positions(AUDIO_TOKENS), clean)
    predict = X0Model(model[0])

    def denoise(video_state, audio_state, sigmas, step_index):
        sigma = sigmas[step_index]
        sound = modality_from_latent_state(audio_state, values["audio_context"], sigma)
        if frozen_audio:  # what ltx-pipelines 1.2.0 says of a frozen stream
            sound = dataclasses.replace(sound, sigma=torch.zeros_like(sound.sigma))
        pictures = modality_from_latent_state(video_state, values["video_context"], sigma)
        return predict(video=pictures, audio=sound, perturbations=None)

    with later_semantics():
        return ltx_loop(STAGE_2_SIGMAS, video, audio, denoise)


def retaken():
    """Sound of which the tokens about 0.2 to 0.4 s are made anew."""
    state = audio_state(unpatchify_audio(randn(1, AUDIO_TOKENS, 128, seed=9)))
    return state.retake(audio_seconds(AUDIO_TOKENS), 0.2, 0.4)


def test_audio_tokens_that_are_held_are_ltx_cores_and_stay_what_they_are(model):
    held = retaken()
    values = values_of(model, held_audio=held)
    start = torch.where(held.denoise_mask > 0, values["audio_latent"], held.clean_latent)
    values["audio_latent"] = start
    ours = our_latents(model, values)
    assert distance(ours, ltx_latents(model, values, held.denoise_mask)) < EQUAL
    kept = held.denoise_mask[:, 0] == 0
    assert 0 < kept.sum() < AUDIO_TOKENS
    assert torch.equal(ours["audio"][:, kept], held.clean_latent[:, kept])
    free = our_latents(model, values_of(model) | {"audio_latent": start})
    assert rel(ours["video"], free["video"]) > SHOWS


def test_a_frozen_stream_keeps_every_bit_and_is_clean_to_the_one_that_listens_to_it(model):
    values = values_of(model, still=(False, True))
    ours = our_latents(model, values)
    assert torch.equal(ours["audio"], values["audio_latent"])
    theirs = ltx_latents(model, values, frozen_audio=True)
    assert rel(ours["video"], theirs["video"]) < EQUAL
    # With the step's sigma for the frozen stream, as ltx-pipelines 1.0.0 has it:
    tables = values_of(model)
    sigma_of_step = values | {f"{s}_modulation": tables[f"{s}_modulation"] for s in STREAMS}
    assert rel(our_latents(model, sigma_of_step)["video"], theirs["video"]) > SHOWS


@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_a_bias_of_the_videos_self_attention_is_ltx_cores_attention_mask(model, kernel):
    tokens = SHAPE[0] * SHAPE[1] * SHAPE[2]
    weights = torch.linspace(0, 1, 6)  # of the last six tokens, as if they were a reference's
    target = tokens - len(weights)
    bias = attention_bias(target, [(len(weights), weights)], torch.float32)
    mask = torch.ones(1, tokens, tokens)
    mask[:, :target, target:], mask[:, target:, :target] = weights, weights[:, None]
    values = values_of(model, bias=bias)
    ours = our_latents(model, values, kernel)
    assert distance(ours, ltx_latents(model, values, attention_mask=mask)) < EQUAL
    assert rel(ours["video"], our_latents(model, values_of(model))["video"]) > SHOWS


def test_text_to_video_takes_no_input_of_what_it_is_not_given(model):
    """A step of it computes nothing that was not there before streams could be given."""
    bucket = Bucket(SHAPE[0] * SHAPE[1] * SHAPE[2], AUDIO_TOKENS, 1, STEPS)
    program = dit_program(model[1], bucket, 1, SingleRank(), torch.float32, 1)
    counts = {name: len(graph.inputs) for name, graph in program.graphs.items()}
    assert counts == {"head": 7, "blocks": 15, "tail": 10}
