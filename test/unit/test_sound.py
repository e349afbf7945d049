"""The forwards of vocoder and mel decoder against ltx-core's, and spans of time against the
whole."""

import importlib
import json
import os
import platform
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ltx_neuron.host.arithmetic import FLOAT32
from ltx_neuron.host.background import BackgroundTask, Cancelled
from ltx_neuron.host.models import HostModels, import_ltx_core
from ltx_neuron.tiny.config import TinySizes, released_config, tiny_config
from ltx_neuron.tiny.weights import random_weights, vocoder_weights

import_ltx_core()

from ltx_core.model.audio_vae import AudioDecoder, AudioDecoderConfigurator  # noqa: E402
from ltx_core.model.audio_vae import vocoder as ltx  # noqa: E402
from ltx_core.model.audio_vae.model_configurator import VocoderConfigurator  # noqa: E402

from ltx_neuron.host import (  # noqa: E402
    compiled,
    direct,
    fma,
    lanes,
    snake,
    sound,
    transforms,
    vocoders,
    winograd_maps,
)
from ltx_neuron.host.activation import activate  # noqa: E402
from ltx_neuron.host.audio_decoder import FastAudioDecoder  # noqa: E402
from ltx_neuron.host.audio_decoder import pays as pays_to_decode  # noqa: E402
from ltx_neuron.host.audio_decoder import unknown_modules as unknown_modules_of_mel  # noqa: E402
from ltx_neuron.host.fourier import Convolution, flat  # noqa: E402
from ltx_neuron.host.products import AMX, BLAS, Libraries, has_amx  # noqa: E402
from ltx_neuron.host.sound import FastVocoder  # noqa: E402
from ltx_neuron.host.vocoders import is_small, pays, unknown_modules  # noqa: E402
from ltx_neuron.host.winograd import Workers  # noqa: E402

# Random layers answer a rounding with ten of it: ltx-core's float32 is 8e-6 from its float64. A
# wrong tap leaves 1e-2.
ROUNDING = 5e-5
NEEDS_AMX = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")


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


def cut(monkeypatch, samples: int) -> None:
    """Make spans of about that many samples."""
    monkeypatch.setattr(sound, "SPAN_SAMPLES", samples)
    monkeypatch.setattr(sound, "SPAN_NUMBERS", 1)


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
@pytest.mark.parametrize("samples", [9, 33, 250])
def test_spans_shorter_than_a_margin_and_longer_equal_the_whole(
    vocoder, monkeypatch, frames, samples
):
    cut(monkeypatch, 10**9)
    whole = FastVocoder(vocoder)(spectrogram(frames))
    cut(monkeypatch, samples)
    assert distance(FastVocoder(vocoder)(spectrogram(frames)), whole) < ROUNDING


def test_a_margin_that_is_too_narrow_is_found_by_comparing_with_the_whole(vocoder, monkeypatch):
    whole = FastVocoder(vocoder)(spectrogram(7))
    monkeypatch.setattr(sound, "REACH", 1)
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


def test_the_number_of_threads_does_not_change_the_bits(vocoder, monkeypatch):
    cut(monkeypatch, 100)
    before, waveforms = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            waveforms.append(FastVocoder(vocoder)(spectrogram(9)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*waveforms)


@pytest.mark.parametrize("span", [9, 100, 333, 10**6])
def test_what_memory_held_before_reaches_no_sample(vocoder, monkeypatch, span):
    """Activations read rows around a span, the last of its whole blocks what follows it."""
    cut(monkeypatch, span)
    clean, scratch = FastVocoder(vocoder)(spectrogram(9)), Workers.scratch

    def poisoned(self, *args):
        return scratch(self, *args).fill_(torch.nan)

    monkeypatch.setattr(Workers, "scratch", poisoned)
    monkeypatch.setattr(sound, "fresh", lambda *shape: torch.full(shape, torch.nan))
    assert torch.equal(FastVocoder(vocoder)(spectrogram(9)), clean)


@pytest.mark.parametrize("taps, dilation", [(3, 1), (3, 5), (7, 3), (11, 1), (11, 5)])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (5, 5), (16, 16), (24, 24), (40, 70)])
@pytest.mark.parametrize("length", [1, 64, 1001])
def test_a_convolution_equals_torchs(taps, dilation, inputs, outputs, length):
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(inputs, outputs, taps, dilation=dilation).requires_grad_(False)
    signal, out = torch.randn(length + 400, inputs), torch.empty(length + 400, outputs)
    with Workers() as workers:
        ours = Convolution(conv)
        ours.convolve(signal, length, out, workers)
    wanted = conv.double()(signal.double().T[None])[0].T[:length]
    assert ours.before == (taps - 1) * dilation // 2
    assert (out[:length] - wanted).norm() < 1e-6 * max(1, wanted.norm())


@pytest.mark.parametrize("size", [2, 4, 16, 32])
def test_the_transform_of_a_block_equals_torchs_and_is_inverted(size):
    x = torch.randn(size, 3, dtype=torch.float64)
    cos, sin = transforms.spectrum(list(x))
    wanted = torch.fft.rfft(x, dim=0)
    torch.testing.assert_close(torch.stack(cos), wanted.real, rtol=0, atol=1e-14)
    for number, expected in zip(sin[1:-1], wanted.imag[1:-1], strict=True):
        torch.testing.assert_close(number, -expected, rtol=0, atol=1e-14)
    # The sums from 0 to N / 2 are half of those from 0 to N - 1, but for the ends.
    ends = [cos[0] / 2, *cos[1:-1], cos[-1] / 2]
    again = torch.stack(transforms.samples(ends, sin)) * 2 / size
    torch.testing.assert_close(again, x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("channels", [1, 2, 16, 24, 40])
@pytest.mark.parametrize("length", [1, 2, 7, 100, 1001])
def test_an_activation_equals_ltx_cores_also_at_the_ends_of_a_signal(channels, length):
    torch.manual_seed(length)
    activation = ltx.Activation1d(ltx.SnakeBeta(channels)).requires_grad_(False)
    activation.act.alpha.copy_(torch.randn(channels))
    activation.act.beta.copy_(torch.randn(channels))
    signal = torch.randn(sound.BEFORE + length + sound.AFTER, channels)
    x = signal[sound.BEFORE : sound.BEFORE + length].clone()
    with Workers() as workers:
        span, whole = sound.Span(0, length, 0, length), signal[sound.BEFORE : -sound.AFTER]
        sound._repeat_ends(whole)
        got = sound._Activation(activation).apply(whole, span, workers, length + 9)
    wanted = activation.double()(x.double().T[None])[0].T
    error = got[sound.BEFORE : sound.BEFORE + length] - wanted
    assert error.norm() < 3e-7 * max(1, wanted.norm())
    assert not got[: sound.BEFORE].any()
    assert not got[sound.BEFORE + length : sound.BEFORE + length + 9].any()


def through_snake(x: torch.Tensor, rows: int) -> torch.Tensor:
    """y = x + sin(x)^2 of these numbers after the first 8, by filters that change nothing."""
    out, ones = torch.empty(rows + lanes.LANES), np.ones(lanes.LANES, np.float32)
    # A sample's two are itself, and of its two the first one is taken.
    up, down = (tuple(float(i in taps) for i in range(12)) for taps in ((5, 6), (5,)))
    high = np.empty(2 * (rows + 32), np.float32)
    snake.activate(flat(x), 8, 1, rows, up, down, ones, ones, high, flat(out), 0)
    return out[:rows]


@pytest.mark.parametrize("largest", [1, 100, 2e4, 1e6])
def test_the_sine_of_a_large_number_is_as_near_as_the_number_is(largest):
    rows = 4096
    x = torch.zeros(rows + 16)
    x[8 : 8 + rows] = torch.linspace(-largest, largest, rows)
    given = x[8 : 8 + rows].double()
    got = through_snake(x, rows).double()
    spacing = given.abs() * 2**-23
    assert ((got - given - given.sin().square()).abs() <= 3e-7 + spacing).all()


def test_the_sine_of_any_number_is_at_most_1():
    x = torch.tensor([0.0] * 8 + [1e7, 1e8, 1e20, 3e38] * 4 + [0.0] * 8)
    assert torch.equal(through_snake(x, 16), x[8:24])  # to which 1 is nothing


def test_a_kernel_is_compiled_where_no_folder_for_what_is_compiled_can_be_written():
    functions = {}  # of no file, so that numba finds no folder
    exec("def double(x):\n    x[0] = 2 * x[0]", functions)
    x = np.ones(1, np.float32)
    lanes.kernel(lanes.ARRAY)(functions["double"])(x)
    assert x[0] == 2


def test_what_was_compiled_is_not_taken_after_the_source_of_any_kernel_changed(
    monkeypatch, tmp_path
):
    """numba looks at the file of the kernel alone, not at those that it inlines functions from."""
    names = []
    for text in ("import numba\n", "import numba\nSTEPS = 8\n", "STEPS = 8\n"):
        (tmp_path / "products.py").write_text(text)
        monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
        compiled.sources_digest.cache_clear()
        names.append(compiled.compile_or_load(lambda **_: lambda f: f.__qualname__, main()))
    compiled.sources_digest.cache_clear()
    assert len({*names}) == 3 and all(name.startswith("main.<locals>.kernel_") for name in names)


def main():
    def kernel():
        pass

    return kernel


def test_a_processor_without_the_vectors_of_this_one_computes_the_same(tmp_path):
    """The oldest of its family, in a process of its own, as numba compiles for one processor."""
    if platform.machine() != "x86_64":
        pytest.skip("a test of x86-64 processors")
    code = (
        "import torch; from ltx_neuron.host.fourier import Convolution\n"
        "from ltx_neuron.host.winograd import Workers; torch.manual_seed(0)\n"
        "conv = torch.nn.Conv1d(24, 24, 11).requires_grad_(False)\n"
        "x, out = torch.randn(500, 24), torch.empty(500, 24)\n"
        "with Workers(1) as w: Convolution(conv).convolve(x, 100, out, w)\n"
        "print((out[:100] - conv(x.T[None])[0].T[:100]).abs().max().item())"
    )
    changed = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": tmp_path}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | changed
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < 3e-6


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


def as_stored(module: torch.nn.Module) -> torch.nn.Module:
    """The module with weights of bf16, as a checkpoint has them."""
    for weight in module.parameters():
        weight.data = weight.data.bfloat16().float()
    return module.requires_grad_(False)


def garbage(workers: Workers) -> None:
    """Fill the calling thread's scratch memory with what a result must not depend on."""
    workers.scratch("parts", 2**18).fill_(torch.nan)
    workers.scratch("sums", 2**18).fill_(torch.nan)


# Each with its distance from a convolution in float64, for numbers of the size of 1.
UNITS = pytest.mark.parametrize(
    "unit, rounding",
    [("fma_convolution", 4e-7), pytest.param("amx_convolution", 2e-7, marks=NEEDS_AMX)],
)


def direct_convolution(conv: torch.nn.Module, unit: str) -> direct.Convolution:
    return direct.Convolution(conv, importlib.import_module(f"ltx_neuron.host.{unit}"))


@UNITS
@pytest.mark.parametrize("taps, dilation", [(3, 1), (7, 3), (11, 5)])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (5, 5), (16, 24), (32, 32), (40, 70)])
@pytest.mark.parametrize("length", [1, 64, 1001])
def test_a_product_for_every_tap_gives_torchs_convolution(
    unit, rounding, taps, dilation, inputs, outputs, length
):
    torch.manual_seed(0)
    conv = as_stored(torch.nn.Conv1d(inputs, outputs, taps, dilation=dilation, padding="same"))
    conv.padding = ((taps - 1) * dilation // 2,)
    signal, x = torch.randn(length + 400, inputs), torch.randn(length, outputs)
    out, total = torch.empty(length, outputs), torch.ones(length, outputs)
    ours = direct_convolution(conv, unit)
    with Workers(1) as workers:
        garbage(workers)
        ours.convolve(signal, length, out, workers)
        ours.add(signal, length, x, total, True, workers)
    wanted = conv.double()(signal.double().T[None])[0].T[ours.before :][:length]
    assert ours.before == ours.after == (taps - 1) * dilation // 2
    assert (out - wanted).norm() < rounding * max(1, wanted.norm())
    assert (total - (1 + x + wanted)).norm() < rounding * max(1, (1 + x + wanted).norm())


@UNITS
@pytest.mark.parametrize("taps, stride, dilation", [(7, 1, 1), (4, 2, 1), (11, 5, 1), (12, 6, 1)])
def test_a_transposed_convolution_in_parts_equals_torchs(unit, rounding, taps, stride, dilation):
    torch.manual_seed(0)
    if stride == 1:
        conv = as_stored(torch.nn.Conv1d(40, 20, taps, padding=taps // 2))
    else:
        conv = torch.nn.ConvTranspose1d(40, 20, taps, stride, padding=(taps - stride) // 2)
        conv = as_stored(conv)
    x, out = torch.randn(150, 40), torch.empty(150 * stride, 20)
    ours = direct_convolution(conv, unit)
    with Workers(1) as workers:
        garbage(workers)
        for start, stop in ((0, 1), (1, 2), (2, 137), (137, 150)):
            ours.convolve_part(x, start, stop, out, workers)
    wanted = conv.double()(x.double().T[None])[0].T
    assert (out - wanted).norm() < rounding * max(1, wanted.norm())


# --- by the matrix unit ---------------------------------------------------------------------------
def by_amx(convolution) -> bool:
    unit = getattr(convolution, "unit", None)
    return unit is not None and unit.__name__.endswith("amx_convolution")


@NEEDS_AMX
@pytest.mark.parametrize("frames", [1, 7, 30])
def test_a_vocoder_by_the_matrix_unit_is_nearer_to_float64_than_ltx_cores(frames):
    vocoder, mel = as_stored(ltx_core_vocoder()), spectrogram(frames)
    fast = FastVocoder(vocoder, has_amx=True)
    kinds = torch.nn.Conv1d, torch.nn.ConvTranspose1d
    assert {*fast.convolutions} == {each for each in vocoder.modules() if isinstance(each, kinds)}
    assert all(by_amx(convolution) for convolution in fast.convolutions.values())
    with torch.no_grad():
        got, by_fourier, theirs = fast(mel), FastVocoder(vocoder)(mel), vocoder(mel)
        exact = vocoder.double()(mel.double())
    assert distance(got, exact) < min(distance(theirs, exact), distance(by_fourier, exact))


@NEEDS_AMX
def test_weights_that_are_not_those_of_bf16_are_not_rounded_for_the_matrix_unit(vocoder):
    fast = FastVocoder(vocoder, has_amx=True)
    assert not any(by_amx(convolution) for convolution in fast.convolutions.values())
    assert torch.equal(fast(spectrogram(3)), FastVocoder(vocoder)(spectrogram(3)))


def mel_decoder(released: bool = False) -> AudioDecoder:
    config = released_config() if released else tiny_config(TinySizes())
    if not released:
        # A stage with fewer channels than the one before it has, as the released decoder does.
        config["audio_vae"]["model"]["params"]["ddconfig"]["ch_mult"] = [1, 1, 2]
    decoder = AudioDecoderConfigurator.from_config(config).eval()
    weights = random_weights(decoder.state_dict(), torch.Generator().manual_seed(0))
    decoder.load_state_dict(weights)
    return as_stored(decoder)


def audio_latent(frames: int, bins: int = 16) -> torch.Tensor:
    return torch.randn(2, 8, frames, bins, generator=torch.Generator().manual_seed(frames))


# A mel decoder's spectrogram, by AMX or not, with its distance from one in float64.
MEL_DECODERS = pytest.mark.parametrize(
    "has_amx, rounding", [(False, 1.5e-6), pytest.param(True, 1e-6, marks=NEEDS_AMX)]
)


@MEL_DECODERS
@pytest.mark.parametrize("frames", [1, 2, 9])
def test_a_mel_decoder_is_as_near_to_float64_as_float32_allows(
    has_amx, rounding, frames, monkeypatch
):
    # Several parts, with one line of bins or more.
    monkeypatch.setattr(winograd_maps, "TILES", 40)
    if has_amx:
        monkeypatch.setattr(importlib.import_module("ltx_neuron.host.amx_maps"), "ROWS", 100)
    decoder, latent = mel_decoder(), audio_latent(frames)
    with torch.no_grad():
        got, theirs = FastAudioDecoder(decoder, has_amx)(latent), decoder(latent)
        exact = decoder.double()(latent.double())
    assert got.shape == theirs.shape == (2, 2, 4 * frames - 3, 64)
    assert distance(got, exact) < rounding
    assert not has_amx or distance(got, exact) < distance(theirs, exact)


@pytest.mark.parametrize("inputs, outputs", [(8, 40), (32, 16), (48, 2)])
@pytest.mark.parametrize("lines, width", [(1, 1), (1, 16), (5, 7), (20, 33)])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_convolution_of_a_map_by_winograds_transform_equals_torchs(
    inputs, outputs, lines, width, scale
):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(inputs, outputs, 3, padding=(0, 1)).requires_grad_(False)
    source = torch.randn(lines, width, inputs)
    x = torch.randn(scale * lines, scale * width, outputs)
    memory = torch.full((x.numel() + 64,), 7.0)
    out = memory[: x.numel()].view(x.shape)
    with Workers(2) as workers:
        ours = winograd_maps.Convolution(conv)
        ours.convolve(source, workers, scale=scale, x=x, out=out)
        without_x = ours.convolve(source, workers, scale=scale)
    large = source.double().permute(2, 0, 1)[None]
    large = large.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    wanted = conv.double()(torch.nn.functional.pad(large, (0, 0, 2, 0)))[0].permute(1, 2, 0)
    assert distance(without_x, wanted) < 1e-6
    assert distance(out, wanted + x) < 1e-6
    assert (memory[x.numel() :] == 7).all()  # nothing is written after the map


@MEL_DECODERS
def test_threads_decide_on_no_bit_of_a_sound(has_amx, rounding, monkeypatch):
    cut(monkeypatch, 100)
    decoder = FastAudioDecoder(mel_decoder(), has_amx)
    vocoder = FastVocoder(as_stored(ltx_core_vocoder()), has_amx)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append((decoder(audio_latent(5)), vocoder(spectrogram(9))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@MEL_DECODERS
def test_what_is_not_finite_stays_visible_in_a_mel_spectrogram(has_amx, rounding):
    for broken in (torch.nan, torch.inf):
        latent = audio_latent(3)
        latent[0, 0, 0, 0] = broken
        one, other = FastAudioDecoder(mel_decoder(), has_amx)(latent)
        assert not one.isfinite().all() and other.isfinite().all()


def test_the_norm_and_silu_of_a_row_are_exact_to_rounding_for_all_sizes_of_numbers():
    rows = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    rows[:100] *= torch.logspace(-8, 15, 100)[:, None]
    rows[:50, 7] *= 1000  # alone nearly the whole norm: 22 of the others' sizes, or -22
    out = torch.empty(512)
    for row in rows:
        activate(row.numpy(), 0, 512, out.numpy(), 0)
        normed = row.double() / (row.double().square().mean() + 1e-6).sqrt()
        wanted = torch.nn.functional.silu(normed)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-12)


def test_the_released_mel_decoder_is_run_fast_and_one_unlike_it_keeps_ltx_cores_forward():
    released, other = mel_decoder(released=True), mel_decoder().bfloat16()
    assert pays_to_decode(released, has_amx=True) and not is_small(released)
    assert pays_to_decode(released, has_amx=False) == fma.WIDE
    assert is_small(AudioDecoderConfigurator.from_config(tiny_config(TinySizes())))
    assert unknown_modules_of_mel(other)
    with pytest.raises(ValueError, match="not the released audio decoder"):
        FastAudioDecoder(other)


@NEEDS_AMX
def test_weights_that_are_not_those_of_bf16_are_not_rounded_in_a_mel_decoder():
    decoder, latent = mel_decoder(), audio_latent(2)
    decoder.conv_in.conv.weight.add_(1e-4)
    both = [FastAudioDecoder(decoder, has_amx)(latent) for has_amx in (True, False)]
    assert torch.equal(*both)


@NEEDS_AMX
def test_sound_is_computed_by_the_matrix_unit_where_products_are_and_by_no_other(tiny, monkeypatch):
    monkeypatch.setattr(vocoders, "SMALL", 0)
    monkeypatch.setattr(fma, "WIDE", False)
    with safe_open(tiny.checkpoint, "pt") as file:
        config = json.loads(file.metadata()["config"])

    def models(library: str) -> HostModels:
        chosen = FLOAT32._replace(libraries=Libraries(many=library))
        return HostModels(tiny.checkpoint, config, torch.float32, arithmetic=chosen)

    with_amx, without = models(AMX), models(BLAS)
    assert type(with_amx.audio_decoder) is FastAudioDecoder
    assert type(without.audio_decoder) is AudioDecoder
    assert any(by_amx(convolution) for convolution in with_amx.vocoder.convolutions.values())
    assert not any(by_amx(convolution) for convolution in without.vocoder.convolutions.values())
    got, wanted = (model.decode_audio(audio_latent(2)[:1]) for model in (with_amx, without))
    assert got.shape == wanted.shape == (2, 5 * 480)
    # The tiny vocoder's waveform is clipped, which answers a rounding with a thousand.
    assert distance(got, wanted) < 1e-3
