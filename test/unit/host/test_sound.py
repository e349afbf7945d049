"""Mel decoder and vocoder against ltx-core's, on the host and on the ranks, whole and in spans; mel spectrograms."""

import json
import math
import re
import time

import numpy as np
import pytest
import torch
from helpers import allowed, one_thread, randn, randomised, rel, run_program  # noqa: F401
from tiny.config import TinySizes, merge, released_config, tiny_config
from tiny.weights import vocoder_weights
from torch.utils._python_dispatch import TorchDispatchMode

from ltx_neuron.config.sound import audio_decoder_config, vocoder_config
from ltx_neuron.demo import ASSETS
from ltx_neuron.errors import UserError
from ltx_neuron.host import sound
from ltx_neuron.host.background import Background, Cancelled
from ltx_neuron.host.input_files import can_resample
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import MelSizes, log_mel, mel_filters, resample
from ltx_neuron.models.programs import spectrogram_program, waveform_program
from ltx_neuron.models.vocoder import MelSpectrogram, Snake, arrangement, resampling_filters
from ltx_neuron.weights.tensorfile import TensorFile

# Random layers answer a rounding with ten of it: ltx-core's float32 is 8e-6 from its float64. A wrong tap leaves 1e-2.
ROUNDING = 5e-5
# Of spectrograms, float32 against float64: the filters' own rounding (measured 2.4e-6), and that of a sum of 1024.
RESAMPLED, SPECTRUM = 5e-6, 1e-5
MEL = MelSizes(rate=16000, bins=64, hop=160, window=1024)


def narrow_config(**changes) -> dict:
    """The released kernels, rates and levels, with few channels."""
    narrow = {"vocoder": {"vocoder": {"upsample_initial_channel": 64}, "bwe": {"upsample_initial_channel": 32}}}
    narrow["audio_vae"] = {"model": {"params": {"ddconfig": {"ch": 128, "ch_mult": [1, 1, 2]}}}}
    return merge(merge(released_config(), narrow), changes)


@pytest.fixture(scope="module", params=["tiny", "released kernels"])
def config(request) -> dict:
    return tiny_config(TinySizes()) if request.param == "tiny" else narrow_config()


@pytest.fixture(scope="module")
def vocoders(config):
    """ltx-core's, nothing of whose waveform is clipped (tiny.weights.QUIET), and ours."""
    from ltx_core.model.audio_vae import VocoderConfigurator

    weights = vocoder_weights(config, torch.Generator().manual_seed(0))
    theirs = VocoderConfigurator.from_config(config).eval().requires_grad_(False)
    theirs.load_state_dict({name.partition(".")[2]: weight for name, weight in weights.items()})
    return theirs, sound.HostVocoder(vocoder_config(config), theirs.state_dict())


@pytest.fixture(scope="module")
def decoders(config):
    from ltx_core.model.audio_vae import AudioDecoderConfigurator

    theirs = randomised(AudioDecoderConfigurator.from_config(config))
    return theirs, sound.HostSpectrogram(audio_decoder_config(config), theirs.state_dict())


def mel(rows: int) -> torch.Tensor:
    return randn(1, 2, rows, 64, seed=rows)


def latent(frames: int) -> torch.Tensor:
    return randn(1, 8, frames, 16, seed=frames)


# Short ones have one span of a graph, long ones many; 150 has windows of its own where they are cut short.
@pytest.mark.parametrize("rows", [1, 30, 150])
def test_a_waveform_that_is_not_clipped_equals_ltx_cores(vocoders, rows, monkeypatch):
    monkeypatch.setattr(sound, "WINDOW", 140)
    theirs, ours = vocoders
    expected, got = theirs(mel(rows)), ours(mel(rows))
    assert got.shape == expected.shape == (1, 2, 480 * rows)
    assert 0 < expected.abs().max() < 1 and rel(got, expected) < ROUNDING


@pytest.mark.parametrize("frames", [1, 9, 61])
def test_a_spectrogram_equals_ltx_cores(decoders, frames, monkeypatch):
    monkeypatch.setattr(sound, "WINDOW", 4 * 45)
    theirs, ours = decoders
    expected, got = theirs(latent(frames)), ours(latent(frames))
    assert got.shape == expected.shape == (1, 2, 4 * frames - 3, 64) and rel(got, expected) < 3e-6
    broken = latent(frames)
    broken[0, 0, 0, 0] = torch.nan
    assert not ours(broken).isfinite().all()


@pytest.mark.parametrize("length", [1, 60, 61, 1000])
@pytest.mark.parametrize("reach", [(0, 0), (33, 0), (20, 17)])
def test_spans_cover_a_length_without_gaps_and_read_what_they_depend_on(length, reach):
    spans = sound.cut(length, 60, reach)
    assert spans[0].first == 0
    assert [span.last for span in spans] == [*(span.first for span in spans[1:]), length]
    assert {span.stop - span.start for span in spans} == {min(60, length)}
    for span in spans:
        assert span.start <= max(0, span.first - reach[0]) and span.first < span.last
        assert span.stop >= min(length, span.last + reach[1])


class InRange(TorchDispatchMode):
    """Refuses what the sine and the square root of Trainium2 do not evaluate rightly. `turns`: the most half turns
    that were taken off an angle."""

    def __init__(self):
        super().__init__()
        self.turns = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.rstrip("_")
        if name == "sin":
            assert args[0].abs().max() <= math.pi, "a sine outside [-pi, pi]"
        if name == "sqrt":
            assert args[0].min() >= 2**-116, "a square root of less than 2^-116"
        result = function(*args, **kwargs or {})
        if name == "floor":
            self.turns = max(self.turns, result.abs().max().item())
        return result


def test_on_the_ranks_every_sine_is_of_pi_at_most_and_the_sound_is_the_hosts():
    """Of a trained vocoder: the demo's."""
    config = json.loads(TensorFile(ASSETS.checkpoint, "").metadata["config"])
    host, sizes = HostModels(ASSETS.checkpoint, config, torch.float32), vocoder_config(config)
    spectrogram, named = host.audio_decoder(latent(6)), {}
    for name, weight in host._spec("vocoder").load().state_dict().items():
        arrange = arrangement(own := sound.vocoder_name(name), sizes)
        named[own] = arrange(weight) if arrange else weight
    given = {"span_mel": spectrogram, "resampling": resampling_filters(sizes)}
    program = waveform_program(sizes, spectrogram.shape[2])
    assert program.graphs  # from a run on meta tensors, which have no values to check
    with torch.no_grad(), InRange() as angles:
        values = run_program(program, named, given)
    assert angles.turns >= 10 and rel(values["span_waveform"], host.vocoder(spectrogram)) < ROUNDING
    snake, angles = Snake(1), torch.linspace(-40, 40, 100_001).view(1, -1, 1, 1)
    snake.load_state_dict({"alpha": torch.zeros(1), "beta": torch.zeros(1)})
    with torch.no_grad():
        turned = (snake(angles) - angles).double()
    # The rounding of an angle of 40, and of the sum with it, is 1.9e-6 each.
    assert (turned - angles.double().sin().square()).abs().max() < 5e-6


def test_silence_has_no_square_root_of_zero_on_the_ranks_and_its_floor_is_not_heard(config, vocoders):
    spectrum = MelSpectrogram(vocoder_config(config)).requires_grad_(False)
    for parameter in spectrum.parameters():
        parameter.data.uniform_(generator=torch.Generator().manual_seed(0))
    samples = torch.zeros(1, 2, 1, 4 * spectrum.hop)
    with InRange():
        silence = spectrum(samples)
    assert torch.equal(silence, torch.full_like(silence, math.log(1e-5)))
    samples[..., spectrum.hop :] = randn(3 * spectrum.hop)
    floored = spectrum(samples)
    spectrum.least_power = 0
    assert torch.equal(floored, spectrum(samples))
    modules = [module for graph in vocoders[1].graphs for module in graph.module.modules()]
    # The host has no floor: its bits are those of the definition.
    assert [module.least_power for module in modules if isinstance(module, MelSpectrogram)] == [0]


@pytest.mark.parametrize("config", ["released kernels"], indirect=True)  # it takes seconds; tiny has the same layers
def test_the_number_of_threads_does_not_change_the_bits(vocoders, decoders):
    results = []
    for threads in (3, 1):  # the last as one_thread has it
        torch.set_num_threads(threads)
        results.append((decoders[1](latent(40)), vocoders[1](mel(60))))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_a_decode_of_minutes_of_sound_is_cancelled_within_a_graph(vocoders):
    with Background() as thread:
        future = thread.submit(vocoders[1], mel(20_000))
        time.sleep(0.5)
        assert not future.done()
        start = time.perf_counter()
    assert time.perf_counter() - start < allowed(5)
    with pytest.raises(Cancelled):
        future.result()


def test_the_released_model_has_its_reach_and_graphs_and_one_unlike_it_is_refused_by_what_differs():
    decoder, sizes = audio_decoder_config(released_config()), vocoder_config(released_config())
    assert (decoder.reach, sizes.reach) == ((33, 0), (56, 52))
    assert (len(spectrogram_program(decoder, 57).graphs), len(waveform_program(sizes, 208).graphs)) == (5, 15)
    for part, change, message in (
        ("vocoder", {"vocoder": {"use_tanh_at_final": True}}, "vocoder.use_tanh_at_final is True"),
        ("vocoder", {"vocoder": {"upsample_kernel_sizes": [12, 4, 4, 4, 4, 4]}}, "[12, 4, 4"),
        ("vocoder", {"bwe": {"hop_length": 90}}, "rates, upsamplings and hop do not fit"),
        ("vocoder", {"bwe": {"upsample_rates": [6, 5, 2, 2, 4]}}, "rates, upsamplings and hop do not fit"),
        ("vocoder", {"bwe": None}, "does not fit the released vocoder"),
        ("ddconfig", {"norm_type": "group"}, "audio_vae.norm_type is 'group'"),
        ("ddconfig", {"ch_mult": [1, 2]}, "audio_vae.ch_mult"),
        ("ddconfig", {"mel_bins": 96}, "audio_vae.ch is 128"),
        ("ddconfig", {"num_res_blocks": "2"}, "does not fit the released audio_vae"),
    ):
        with pytest.raises(UserError, match=f"(?s)(?=.*{re.escape(message)}).*leave out sound_on_ranks=true"):
            if part == "vocoder":
                vocoder_config(narrow_config(vocoder=change))
            audio_decoder_config(narrow_config(audio_vae={"model": {"params": {part: change}}}))


@pytest.mark.parametrize("rate, samples", [(44100, 4410), (48000, 1001), (8000, 333)])
def test_resampling_is_the_windowed_sinc_of_torchaudio(rate, samples):
    """By its definition, one sample at a time and in float64."""
    divisor = math.gcd(rate, 16000)
    old, new = rate // divisor, 16000 // divisor
    cutoff, sound = 0.99 * min(old, new), randn(1, samples)
    time = torch.arange(math.ceil(new * samples / old), dtype=torch.float64)[:, None] * (old / new)  # in old samples
    t = ((torch.arange(samples, dtype=torch.float64) - time) * (cutoff / old)).clamp(-6, 6)
    kernel = torch.sinc(t) * (math.pi * t / 12).cos() ** 2 * (cutoff / old)
    assert rel(resample(sound, rate, 16000), (kernel @ sound[0].double())[None]) < RESAMPLED
    assert can_resample(rate, 16000) and not can_resample(44999, 16000)


def test_filters_are_slaneys_triangles_of_equal_area():
    filters = mel_filters(MEL)
    assert filters.shape == (513, 64) and (filters >= 0).all()
    centres = torch.linspace(0, 8000, 513)[filters.argmax(0)]
    # 66.7 Hz apart up to 1 kHz, then each 6.4 ** (1 / 27) times the last in steps of one mel.
    mels = torch.where(centres < 1000, centres / (200 / 3), 15 + (centres / 1000).log() * 27 / math.log(6.4))
    top = 15 + 27 * math.log(8) / math.log(6.4)
    assert (mels - torch.arange(1, 65) * top / 65).abs().max() < 0.15  # a bin is 15.6 Hz wide
    assert ((filters[:, 20:].sum(0) * 15.625 - 1).abs() < 0.05).all()  # those that have enough bins to be summed


@pytest.mark.parametrize("samples", [1600, 1601])
def test_the_spectrogram_is_of_magnitudes_around_each_hop_with_reflected_ends(samples):
    sound = randn(2, samples)
    padded = np.pad(sound.double().numpy(), ((0, 0), (512, 512)), mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    frames = [padded[:, i : i + 1024] * window for i in range(0, samples + 1, MEL.hop)]
    magnitudes = np.abs(np.fft.rfft(np.stack(frames, axis=1)))
    expected = np.log(np.maximum(magnitudes @ mel_filters(MEL).double().numpy(), 1e-5))
    assert rel(log_mel(sound, MEL)[0], torch.from_numpy(expected)) < SPECTRUM
    assert (log_mel(torch.zeros(2, 2000), MEL) == math.log(1e-5)).all()
