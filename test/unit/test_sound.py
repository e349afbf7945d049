"""The vocoder's forward against ltx-core's, and its spans of time against the whole."""

import time
from functools import partial

import pytest
import torch

from ltx_neuron.host.background import BackgroundTask, Cancelled
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.tiny.config import TinySizes, released_config, tiny_config
from ltx_neuron.tiny.weights import vocoder_weights

import_ltx_core()

from ltx_core.model.audio_vae import VocoderConfigurator  # noqa: E402

from ltx_neuron.host import fourier, sound  # noqa: E402
from ltx_neuron.host.sound import FastVocoder, pays, unknown_modules  # noqa: E402
from ltx_neuron.host.winograd import Workers  # noqa: E402

# Random layers answer a rounding with ten of it: ltx-core's float32 is 8e-6 from its float64. A
# wrong tap leaves 1e-2.
ROUNDING = 5e-5


def ltx_core_vocoder():
    """A tiny one, so quiet that nothing is clipped: a clipped waveform of random weights answers a
    rounding with a thousand."""
    config = tiny_config(TinySizes())
    weights = vocoder_weights(config, torch.Generator().manual_seed(0))
    vocoder = VocoderConfigurator.from_config(config).eval().requires_grad_(False)
    vocoder.load_state_dict({name.partition(".")[2]: weight for name, weight in weights.items()})
    for generator in (vocoder.vocoder, vocoder.bwe_generator):
        generator.conv_post.weight.mul_(1e-4)
    return vocoder


@pytest.fixture(scope="module")
def vocoder():
    return ltx_core_vocoder()


@pytest.fixture(params=["direct", "fourier"])
def method(request, monkeypatch):
    """How all convolutions of an activation are computed."""
    monkeypatch.setattr(fourier, "DIRECT", {"direct": 10**9, "fourier": 0}[request.param])


def cut(monkeypatch, samples: int) -> None:
    """Make spans of about that many samples."""
    monkeypatch.setattr(sound, "SPAN_SAMPLES", samples)
    monkeypatch.setattr(sound, "SPAN_NUMBERS", 1)


def spectrogram(frames: int) -> torch.Tensor:
    return torch.randn(1, 2, frames, 64, generator=torch.Generator().manual_seed(frames))


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 30])
def test_a_waveform_that_is_not_clipped_equals_ltx_cores(vocoder, method, frames):
    with torch.no_grad():
        wanted = vocoder(spectrogram(frames))
    got = FastVocoder(vocoder)(spectrogram(frames))
    assert got.shape == wanted.shape == (1, 2, 480 * frames)
    assert 0 < wanted.abs().max() < 1
    assert distance(got, wanted) < ROUNDING


@pytest.mark.parametrize("frames", [1, 7])
@pytest.mark.parametrize("samples", [9, 33, 250])
def test_spans_shorter_than_a_margin_and_longer_equal_the_whole(
    vocoder, method, monkeypatch, frames, samples
):
    cut(monkeypatch, 10**9)
    whole = FastVocoder(vocoder)(spectrogram(frames))
    cut(monkeypatch, samples)
    assert distance(FastVocoder(vocoder)(spectrogram(frames)), whole) < ROUNDING


def test_a_margin_that_is_too_narrow_is_found_by_comparing_with_the_whole(vocoder, monkeypatch):
    whole = FastVocoder(vocoder)(spectrogram(7))
    monkeypatch.setattr(sound, "REACH", 5)
    cut(monkeypatch, 33)
    with pytest.raises(AssertionError):
        assert distance(FastVocoder(vocoder)(spectrogram(7)), whole) < 2 * ROUNDING


def test_spans_cover_a_length_without_gaps_and_read_their_margins():
    for length in (1, 2047, 2048, 2049, 100_001):
        parts = sound.spans(length, 16, 40)
        assert [part.stop for part in parts] == [*(part.start for part in parts[1:]), length]
        assert parts[0].start == 0
        for part in parts:
            assert part.first == max(0, part.start - 40)
            assert part.last == min(length, part.stop + 40)


def test_the_number_of_threads_does_not_change_the_bits(vocoder, method, monkeypatch):
    cut(monkeypatch, 100)
    before, waveforms = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            waveforms.append(FastVocoder(vocoder)(spectrogram(9)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*waveforms)


@pytest.mark.parametrize("taps, dilation", [(3, 1), (7, 3), (11, 5)])
@pytest.mark.parametrize("length", [1, 64, 1001])
def test_a_convolution_equals_torchs_with_its_inputs_and_outputs_scaled(
    method, taps, dilation, length
):
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(40, 70, taps, dilation=dilation).requires_grad_(False)
    signal, scale, new_scale = torch.randn(length + 200, 40), torch.rand(40) + 0.5, torch.rand(70)
    out = torch.empty(length + 200, 70)
    with Workers() as workers:
        ours = fourier.prepare(conv, scale, new_scale, workers, "points")
        ours.convolve(signal * scale, length, out, workers)
    wanted = conv(signal.T[None])[0].T[:length] * new_scale
    assert ours.before == (taps - 1) * dilation // 2
    assert distance(out[:length], wanted) < 1e-6


def test_few_channels_and_taps_are_convolved_directly():
    scale = torch.ones(64)
    with Workers() as workers:
        for channels, taps, wanted in (
            (16, 11, fourier.Direct),
            (24, 11, fourier.Fourier),
            (48, 3, fourier.Direct),
            (64, 3, fourier.Fourier),
        ):
            conv = torch.nn.Conv1d(channels, channels, taps).requires_grad_(False)
            ones = scale[:channels]
            assert type(fourier.prepare(conv, ones, ones, workers, "points")) is wanted


def test_the_released_vocoder_is_run_fast_and_a_small_one_keeps_ltx_cores_bits(vocoder):
    assert pays(VocoderConfigurator.from_config(released_config()))
    assert not pays(vocoder) and not unknown_modules(vocoder)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"use_tanh_at_final": True}, "vocoder: Vocoder"),
        ({"upsample_kernel_sizes": [12, 4, 4, 4, 4, 4]}, "vocoder.ups.0: ConvTranspose1d"),
    ],
)
def test_a_vocoder_unlike_the_released_one_is_refused_by_the_module_that_differs(change, name):
    config = tiny_config(TinySizes())
    config["vocoder"]["vocoder"].update(change)
    vocoder = VocoderConfigurator.from_config(config)
    assert [line.startswith(name) for line in unknown_modules(vocoder)] == [True]
    assert not pays(vocoder)
    with pytest.raises(ValueError, match="not the released vocoder"):
        FastVocoder(vocoder)


def test_a_vocoder_in_bfloat16_is_not_run_in_float32(vocoder):
    assert unknown_modules(vocoder) == []
    assert unknown_modules(ltx_core_vocoder().bfloat16())


def test_a_decode_of_minutes_of_sound_is_cancelled_within_a_layer(vocoder):
    task = BackgroundTask(partial(FastVocoder(vocoder), spectrogram(20_000)))
    time.sleep(0.5)
    assert not task.done
    start = time.perf_counter()
    task.cancel()
    assert time.perf_counter() - start < 5
    with pytest.raises(Cancelled):
        task.result()
