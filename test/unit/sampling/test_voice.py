"""A reference voice: its graphs, and what its flags and requests say. What it computes:
test/integration/test_golden.py."""

from pathlib import Path
from unittest.mock import Mock

import torch
from helpers import randn
from jobs import make_job, read_voice, replace
from typed import parsed, said

from ltx_neuron import flags
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.host import encode_inputs
from ltx_neuron.job import Job, Size
from ltx_neuron.models.signatures import NO_VOICE, PASSES
from ltx_neuron.sampling.conditions import ReferenceAudio
from ltx_neuron.sampling.guidance import DEFAULTS, StreamGuidance
from ltx_neuron.weights.lora import Lora

ONE, TWO = Size(128, 192, 17, 25.0), Size(128, 192, 17, 25.0, two_stage=True)
AUDIO, TREF = 17, 26  # latents of 17 frames at 25 a second, and of 1 s
LORAS = (Lora(Path(__file__)),)


def job(size=ONE, recipe="dev", **given) -> Job:
    given = dict(reference_sound=ReferenceAudio(__file__, TREF), stage_1_loras=LORAS) | given
    return make_job("a woman says hello", size, recipe=recipe, **given)


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
    scales = "--identity-guidance-scale", 1.5, "--audio-cfg-guidance-scale", 4
    plain, scaled, hq = (said(*words, *more) for more in ((), scales, ("--sampler", "res_2s", "--two-stage")))
    for made in (plain, scaled, hq):
        made.check()
        assert made.resolved_guidance.video.rescale_scale == 0.0
    assert plain.reference_sound == ReferenceAudio(voice, TREF) and plain.identity_scale == 3.0
    audio = scaled.resolved_guidance.audio
    assert (scaled.identity_scale, audio.cfg_scale, audio.stg_blocks) == (1.5, 4.0, (29,))
    assert hq.resolved_guidance.audio.rescale_scale == 0.0
    # A shape needs no LoRA, as its graphs do not depend on one.
    shape = flags.shape(parsed("--reference-audio", voice, "--identity-guidance-scale", 0, compiles=True), "dev")
    shape.check_shape()
    assert not shape.buckets[0].identity


def test_a_mono_voice_is_in_both_channels_and_all_of_a_file_or_its_first_seconds(voice, capsys):
    assert read_voice(voice) == ReferenceAudio(voice, TREF)
    assert read_voice(voice, reference_audio_max_duration=0.5) == ReferenceAudio(voice, 13, 0.5)
    host = Mock(encode_audio=Mock(return_value=(torch.zeros(1), randn(1, 8, TREF, 16))))
    encoded = encode_inputs.encode(host, job(reference_sound=ReferenceAudio(voice, TREF)))
    assert encoded["audio_reference"].shape == (1, 8, TREF, 16)
    left, right = host.encode_audio.call_args.args[0].samples
    assert torch.equal(left, right) and left.any() and len(left) == 16000
    assert f"--reference-audio {voice}: mono sound" in capsys.readouterr().out
    # One that is much shorter or longer than the training's is noted.
    for latents, seconds in ((26, "1.0"), (126, None), (300, "12.0")):
        notes = encode_inputs.notes(make_job("", reference_sound=ReferenceAudio(voice, latents)))
        message = f"{voice} gives {seconds} s of sound; its LoRA was trained on about 5 s"
        assert [message in note for note in notes] == [True] * (seconds is not None)
