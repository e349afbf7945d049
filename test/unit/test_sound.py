"""The vocoder's forward against ltx-core's, and its spans of time against the whole."""

import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ltx_neuron.host.background import BackgroundTask, Cancelled
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.tiny.config import TinySizes, tiny_config
from ltx_neuron.tiny.weights import vocoder_weights

import_ltx_core()

from ltx_core.model.audio_vae import VocoderConfigurator  # noqa: E402

from ltx_neuron.host import sound  # noqa: E402
from ltx_neuron.host.fourier import BLOCKS, Filters, fastest_block, transforms  # noqa: E402
from ltx_neuron.host.sound import FastVocoder, unknown_modules  # noqa: E402
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


def spectrogram(frames: int) -> torch.Tensor:
    return torch.randn(1, 2, frames, 64, generator=torch.Generator().manual_seed(frames))


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 30])
def test_a_waveform_that_is_not_clipped_equals_ltx_cores(vocoder, frames):
    with torch.no_grad():
        wanted = vocoder(spectrogram(frames))
    got = FastVocoder(vocoder)(spectrogram(frames))
    assert got.shape == wanted.shape == (1, 2, 480 * frames)
    assert 0 < wanted.abs().max() < 1
    assert distance(got, wanted) < ROUNDING


@pytest.mark.parametrize("frames", [1, 7])
@pytest.mark.parametrize("samples", [1, 5, 33])
def test_spans_shorter_than_a_margin_and_longer_equal_the_whole(
    vocoder, monkeypatch, frames, samples
):
    monkeypatch.setattr(sound, "SPAN_SAMPLES", 10**9)
    whole = FastVocoder(vocoder)(spectrogram(frames))
    if frames == 7 and samples == 1:
        samples = 3  # thousands of spans of one sample take a while
    monkeypatch.setattr(sound, "SPAN_SAMPLES", samples)
    monkeypatch.setattr(sound, "SPAN_NUMBERS", 1)
    assert distance(FastVocoder(vocoder)(spectrogram(frames)), whole) < ROUNDING


def test_a_margin_that_is_too_narrow_is_found_by_comparing_with_the_whole(vocoder, monkeypatch):
    whole = FastVocoder(vocoder)(spectrogram(7))
    monkeypatch.setattr(sound, "up_margin", lambda taps, stride: 0)
    monkeypatch.setattr(sound, "SPAN_SAMPLES", 33)
    monkeypatch.setattr(sound, "SPAN_NUMBERS", 1)
    assert distance(FastVocoder(vocoder)(spectrogram(7)), whole) > 100 * ROUNDING


def test_spans_cover_a_length_without_gaps():
    for length in (1, 639, 640, 641, 100_001):
        ends = sound.spans(torch.empty(8, 1).expand(8, length))
        starts, stops = zip(*ends, strict=True)
        assert starts == (0, *stops[:-1]) and stops[-1] == length


def test_the_number_of_threads_does_not_change_the_bits(vocoder, monkeypatch):
    monkeypatch.setattr(sound, "SPAN_SAMPLES", 100)
    monkeypatch.setattr(sound, "SPAN_NUMBERS", 1)
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
def test_a_convolution_by_blocks_equals_torchs(taps, dilation, length):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 40, taps, generator=generator), torch.randn(70)
    with Workers() as workers:
        filters = Filters(weight, bias, dilation, length, workers)
        signal = torch.randn(40, filters.room(length), generator=generator)
        got = filters.convolve(signal, length, workers)
    wanted = F.conv1d(signal[None], weight, bias, dilation=dilation)[0, :, :length]
    assert got.shape == (70, length)
    assert distance(got, wanted) < 1e-6


def test_blocks_are_long_where_products_cost_more_than_transforms():
    assert fastest_block((768, 768, 11), 2500) == fastest_block((24, 24, 11), 80000) == 32
    assert fastest_block((768, 768, 3), 2500) == fastest_block((24, 24, 3), 80000) == 16
    for block in BLOCKS:
        assert [len(matrix) for matrix in transforms(block, 7)] == [
            3 * block // 2 - 1,
            3 * block // 2 - 1,
            block - 6,
        ]


@pytest.mark.parametrize(
    "change", [{"use_tanh_at_final": True}, {"upsample_kernel_sizes": [12, 4, 4, 4, 4, 4]}]
)
def test_a_vocoder_unlike_the_released_one_is_refused_by_the_module_that_differs(change):
    config = tiny_config(TinySizes())
    config["vocoder"]["vocoder"].update(change)
    vocoder = VocoderConfigurator.from_config(config)
    name = "vocoder: Vocoder" if "use_tanh_at_final" in change else "vocoder.ups.0: ConvTranspose1d"
    assert [line.startswith(name) for line in unknown_modules(vocoder)] == [True]
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
