"""A reference voice: its tokens, its graphs, the fifth pass, and what its flags and requests say.
Whole runs: test/slow/test_golden.py."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Held, call, ltx_model, made_config, randn, rel, step_inputs, step_number
from jobs import make_job, read_voice, replace
from steps import AUDIO_TOKENS, EQUAL, FPS, SHAPE, SHOWS
from typed import parsed, said

from ltx_neuron import flags
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise.guided_passes import prepare_passes
from ltx_neuron.host import encode_inputs
from ltx_neuron.job import Job, Size
from ltx_neuron.models import attention
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.models.signatures import NO_VOICE, PASSES
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ReferenceAudio
from ltx_neuron.sampling.guidance import DEFAULTS, StreamGuidance
from ltx_neuron.sampling.latent_state import audio_state, initial_states, video_state
from ltx_neuron.sampling.latents import reference_audio_positions, unpatchify_audio
from ltx_neuron.sampling.schedules import sigma_pairs
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import Lora

ONE, TWO = Size(128, 192, 17, 25.0), Size(128, 192, 17, 25.0, two_stage=True)
AUDIO, TREF = 17, 26  # latents of 17 frames at 25 a second, and of 1 s
LORAS = (Lora(Path(__file__)),)


def job(size=ONE, recipe="dev", **given) -> Job:
    given = dict(reference_sound=ReferenceAudio(__file__, TREF), stage_1_loras=LORAS) | given
    return make_job("a woman says hello", size, recipe=recipe, **given)


# --- jobs -----------------------------------------------------------------------------------------


def test_stage_1_alone_has_the_voices_tokens_and_only_a_guided_one_above_scale_0_the_bias():
    tokens = AUDIO + TREF
    first, second = job(TWO).buckets
    assert first == Bucket(18, tokens, 1, 64, True, 2, identity=True)
    assert first.name == "v18-a43t2-t1-s64-guided-identity"
    assert second == Bucket(72, AUDIO, 1, 8)  # of every job
    assert job(recipe="distilled").buckets == [Bucket(72, tokens, 1, 8, False, 2)]
    off = job(reference_sound=ReferenceAudio(__file__, TREF, identity_scale=0.0))
    assert off.buckets == [Bucket(72, tokens, 1, 64, True, 2)]
    assert off.passes == PASSES and job().passes == (*PASSES, NO_VOICE)
    assert (off.identity_scale, job().identity_scale) == (0.0, 3.0)


def test_defaults_are_those_of_id_lora_and_scales_are_flags(voice, ic_lora):
    video, audio = job().resolved_guidance.streams
    assert video == StreamGuidance(3.0, 1.0, (29,), 3.0) and audio == replace(video, cfg_scale=7.0)
    assert job().steps == 30 and make_job("rain", recipe="dev").resolved_guidance == DEFAULTS
    words = "--recipe", "dev", "--reference-audio", voice, "--ic-lora", ic_lora().path
    plain = said(*words)
    assert plain.reference_sound == ReferenceAudio(voice, TREF) and plain.identity_scale == 3.0
    scaled = said(*words, "--identity-guidance-scale", 1.5, "--audio-cfg-guidance-scale", 4)
    video, audio = scaled.resolved_guidance.streams
    assert scaled.identity_scale == 1.5
    assert (video.rescale_scale, audio.cfg_scale, audio.stg_blocks) == (0.0, 4.0, (29,))
    hq = said(*words, "--sampler", "res_2s", "--two-stage")
    assert [stream.rescale_scale for stream in hq.resolved_guidance.streams] == [0.0, 0.0]
    for made in (plain, scaled, hq):
        made.check()
    # A shape needs no LoRA, as its graphs do not depend on one.
    shape = flags.shape(parsed("--reference-audio", voice, "--identity-guidance-scale", 0, compiles=True), "dev")
    shape.check_shape()
    assert not shape.buckets[0].identity


def test_a_mono_voice_is_in_both_channels_and_all_of_a_file_or_its_first_seconds(voice, capsys):
    assert read_voice(voice) == ReferenceAudio(voice, TREF)
    assert read_voice(voice, reference_audio_max_duration=0.5) == ReferenceAudio(voice, 13, 0.5)
    heard = []

    def encode_audio(sound):
        heard.append(sound.samples)
        return torch.zeros(1), randn(1, 8, TREF, 16)

    host = SimpleNamespace(encode_audio=encode_audio)
    encoded = encode_inputs.encode(host, job(reference_sound=ReferenceAudio(voice, TREF)))
    assert encoded["audio_reference"].shape == (1, 8, TREF, 16)
    left, right = heard[0]
    assert torch.equal(left, right) and left.any() and len(left) == 16000
    assert f"--reference-audio {voice}: mono sound" in capsys.readouterr().out
    # One that is much shorter or longer than the training's is noted.
    for latents, seconds in ((26, "1.0"), (126, None), (300, "12.0")):
        notes = encode_inputs.notes(make_job("", reference_sound=ReferenceAudio(voice, latents)))
        message = f"{voice} gives {seconds} s of sound; its LoRA was trained on about 5 s"
        assert [message in note for note in notes] == [True] * (seconds is not None)


# --- tokens ---------------------------------------------------------------------------------------


def states(made: Job, stage_2: bool, sound: torch.Tensor, dtype=torch.float32, **tensors):
    """The state of the sound of a stage."""
    size = (4, 6) if stage_2 or made.size == ONE else (2, 3)
    start = torch.zeros(1, 128, 3, *size), sound
    return initial_states(made, stage_2, tensors, start, [], COMPAT[None], dtype)[1]


@pytest.mark.parametrize("recipe", ["dev", "distilled"])
def test_stage_2_keeps_stage_1s_sound_which_is_heard(recipe):
    made, latent = job(TWO, recipe), randn(1, 8, AUDIO, 16, seed=3)
    assert {replace(made, compat=compat).audio_key for compat in COMPAT} == {"s1_audio"}
    sound = states(made, True, latent)
    assert sound.frozen and sound.positions.shape[2] == AUDIO
    assert torch.equal(unpatchify_audio(sound.noised(torch.Generator(), 0.9)), latent)


def test_the_voice_lies_behind_the_clip_and_in_time_before_it():
    """Its middles, by the text of its positions: a grid of 40 ms, less its end, less 40 ms."""
    latents = randn(1, 8, TREF, 16, seed=4)
    silence = torch.zeros(1, 8, AUDIO, 16)
    sound = states(job(), False, silence, audio_reference=latents)
    assert torch.equal(sound.positions[..., AUDIO:], reference_audio_positions(TREF))
    end = 0.01 + 0.04 * (TREF - 1)
    middles = [0.005, *(0.03 + 0.04 * n for n in range(TREF - 1))]
    wanted = torch.tensor(middles) - end - 0.04
    assert (sound.positions[0, 0, AUDIO:] - wanted).abs().max() < 1e-6
    assert sound.positions[0, 0, -1] == pytest.approx(-0.06, abs=1e-6)
    assert sound.denoise_mask[:, 0].tolist() == [1.0] * AUDIO + [0.0] * TREF
    # The clip's noise does not depend on the voice, but all later draws do.
    drawn = [torch.Generator().manual_seed(1) for _ in range(2)]
    with_voice, without = sound.noised(drawn[0], 1.0), audio_state(silence).noised(drawn[1], 1.0)
    assert torch.equal(with_voice[:, :AUDIO], without)
    assert torch.equal(unpatchify_audio(with_voice[:, AUDIO:]), latents)
    assert not torch.equal(drawn[0].get_state(), drawn[1].get_state())


# --- the fifth pass -------------------------------------------------------------------------------

REFERENCE, LAYERS = 7, 2


@cache
def stepped(own: bool, kernel: str = "sdpa", left_out: bool = False):
    """x0 of a guided pass over a clip with REFERENCE held audio tokens behind its own, or, `own`,
    over the clip's own alone. left_out: the bias leaves them out."""
    content, config = made_config()
    weights = ltx_model(content).state_dict()
    tokens = AUDIO_TOKENS if own else AUDIO_TOKENS + REFERENCE
    video = video_state(torch.zeros(1, 128, *SHAPE), FPS, [])
    rows, choice = video.timestep_choice(1, torch.float32)
    held = Held(video.denoise_mask, video.clean_latent, rows, choice)
    values = step_inputs(config, weights, (1.0, 0.6, 0.0), video.positions, AUDIO_TOKENS + REFERENCE, held)
    bucket = Bucket(18, tokens, 1, 2, guided=True, audio_timesteps=2, identity=not own)
    mask = torch.ones(AUDIO_TOKENS + REFERENCE, 1)
    mask[AUDIO_TOKENS:] = 0
    values |= {
        "sigmas": sigma_pairs((1.0, 0.6, 0.0), 2)[:, None].expand(-1, 2, 2),
        "audio_modulation": values["audio_modulation"].repeat(1, 2, 1, 1),
        "audio_timestep_mask": torch.cat([mask, 1 - mask], 1),
        "audio_denoise_mask": mask,
        "audio_clean_latent": values["audio_latent"],
        "enabled_steps": torch.ones(2, 2),
        "keep": torch.ones(1, 4),
        "audio_bias": (1 - mask).T * (torch.finfo(torch.float32).min if left_out else 0),
    }
    for name in ("audio_latent", "audio_clean_latent"):
        values[name] = values[name][:, :tokens]
    for name in ("audio_timestep_mask", "audio_denoise_mask"):
        values[name] = values[name][:tokens]
    for name in ("audio_cos", "audio_sin", "audio_cross_cos", "audio_cross_sin"):
        values[name] = values[name][:, :, :tokens]
    program = dit_program(config, bucket, 1, SingleRank(), torch.float32, 1, kernel)
    values |= step_number(1)
    for name, first in program.runs["pass"]:
        values = values | call(program, name, first, weights, values)
    return values["video_x0"], values["audio_x0"][:, :AUDIO_TOKENS]


@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_a_bias_leaves_the_voices_tokens_out_exactly(kernel):
    cut, left_out, heard = stepped(True), stepped(False, kernel, True), stepped(False, kernel)
    assert max(map(rel, left_out, cut)) < EQUAL
    assert min(map(rel, heard, cut)) > SHOWS


def test_every_pass_but_the_fifth_hears_the_voice(ranks):
    made, dtype = job(), torch.bfloat16
    (bucket,) = made.buckets
    sound = states(made, False, torch.zeros(1, 8, AUDIO, 16), dtype, audio_reference=randn(1, 8, TREF, 16))
    contexts = [Contexts(torch.zeros(1), torch.zeros(1), torch.zeros(1), None)] * 2
    more = contexts, 48, dtype, False, made.identity_scale, sound
    prepare_passes(ranks, bucket, made.resolved_guidance, range(2), *more)
    *passes, (last, _, _) = ranks.sequences["guided"]
    assert last == "guide"
    assert [writes["audio_x0"] for _, _, writes in passes] == [f"{n}_audio" for n in made.passes]
    biases = [reads.get("audio_bias", "audio_bias") for _, reads, _ in passes]
    assert biases[:4] == ["audio_bias"] * 4 and not ranks.tensors["audio_bias"].any()
    left_out = ranks.tensors[biases[4]].to(dtype)
    assert (left_out[0, :AUDIO] == 0).all() and (left_out[0, AUDIO:] == torch.finfo(dtype).min).all()
    fifth = passes[4][1]
    assert not {"video_context", "audio_context"} & fifth.keys() and fifth["keep"] == "keep_cond"
    assert ranks.tensors["identity"].item() == 3.0
