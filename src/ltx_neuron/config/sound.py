"""Sizes of the mel decoder (latents to spectrogram) and the vocoder (to a waveform)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ltx_neuron.config.common import ModelConfig, check_numbers, check_values
from ltx_neuron.errors import UserError

_HOST_DECODES = "; leave out sound_on_ranks=true: the host decodes it"
AUDIO_SCALE = 4  # spectrogram rows per latent (1 for the first one), and bins per latent bin
# Sizes of a rank's spans: four of them cover the sound of 121 frames at 24 per second.
SPAN_LATENTS, SPAN_ROWS = 57, 208
GENERATOR_BINS = 64  # of each of the two spectrograms that ltx-core's generators read
RESAMPLING_REACH = 7  # input samples before and after one on which resampling depends
ACTIVATION_REACH = 5  # samples before and after one that its activation depends on


def span_sizes(latents: int) -> tuple[int, int]:
    """Latents and spectrogram rows that a rank decodes at a time, for a sound of `latents`."""
    rows = AUDIO_SCALE * latents - (AUDIO_SCALE - 1)
    return min(latents, SPAN_LATENTS), min(rows, SPAN_ROWS)


@dataclass(frozen=True)
class AudioDecoderConfig(ModelConfig):
    """The mel decoder (audio_vae section of the metadata)."""

    latent_channels: int
    base_channels: int
    out_channels: int
    mel_bins: int
    blocks: int  # residual blocks per level
    # Channels of each level in units of base_channels, the finest level first
    multipliers: tuple[int, ...]

    @property
    def latent_bins(self) -> int:
        return self.mel_bins // AUDIO_SCALE

    @property
    def reach(self) -> tuple[int, int]:
        """Latents before and after one on which its spectrogram depends: 33, 0 (release)."""
        rows = 2  # of conv_out
        for level in range(len(self.multipliers)):
            rows += 4 * self.blocks
            if level < len(self.multipliers) - 1:
                rows = -(-(rows + 2) // 2)  # of the enlarged map's
        return rows + 8 + 2, 0  # of the middle blocks and of conv_in


def audio_decoder_config(metadata: Mapping[str, Any]) -> AudioDecoderConfig:
    """Parse the checkpoint's `config` metadata. Raises UserError for a mel decoder with another
    structure than the released one; ltx-core may still run it."""
    # ltx-core's defaults of absent values.
    released = {"norm_type": "pixel", "causality_axis": "height", "mid_block_add_attention": False}
    defaults = {"norm_type": "pixel", "causality_axis": "height", "mid_block_add_attention": True}
    try:
        values = metadata["audio_vae"]["model"]["params"]["ddconfig"]
        _check_values("audio_vae", defaults | values, released | {"attn_resolutions": []})
        config = AudioDecoderConfig(
            latent_channels=values.get("z_channels", 8),
            base_channels=values.get("ch", 128),
            out_channels=values.get("out_ch", 2),
            mel_bins=values["mel_bins"],
            blocks=values.get("num_res_blocks", 2) + 1,
            multipliers=tuple(values.get("ch_mult", (1, 2, 4))),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise _no_sound("audio_vae", error) from None
    check_numbers(config, "checkpoint config: audio_vae.")
    sizes = {"ch_mult": 2 ** (len(config.multipliers) - 1), "ch": config.base_channels}
    # A statistic for every channel and bin of a latent.
    statistics = config.latent_channels * config.latent_bins
    _check_values("audio_vae", sizes, {"ch_mult": AUDIO_SCALE, "ch": statistics})
    return config


@dataclass(frozen=True)
class GeneratorConfig:
    """One of the vocoder's two generators: mel spectrogram to waveform."""

    channels: int  # after the first convolution; every upsampling halves them
    rates: tuple[int, ...]  # output samples per input sample of each upsampling
    kernels: tuple[int, ...]  # taps of the upsamplings
    # Taps and dilations of the residual blocks after each upsampling
    blocks: tuple[tuple[int, tuple[int, ...]], ...]
    clamped: bool  # whether the waveform is clamped to [-1, 1]

    def reads(self, first: int, last: int) -> tuple[int, int]:
        """The first and last spectrogram rows on which samples `first` to `last` depend."""
        around = 3 + ACTIVATION_REACH  # of the last activation and convolution
        first, last = first - around, last + around
        for number in reversed(range(len(self.rates))):
            first, last = self.stage_reads(number, first, last)
        return first - 3, last + 3

    def stage_reads(self, number: int, first: int, last: int) -> tuple[int, int]:
        """The same for one upsampling with its residual blocks."""
        rate, taps = self.rates[number], self.kernels[number]
        around = max(
            sum((taps // 2) * (dilation + 1) + 2 * ACTIVATION_REACH for dilation in dilations)
            for taps, dilations in self.blocks
        )
        first, last = (sample + (taps - rate) // 2 for sample in (first - around, last + around))
        return first // rate - (-(-taps // rate) - 1), last // rate


@dataclass(frozen=True)
class VocoderConfig(ModelConfig):
    """The vocoder with bandwidth extension (vocoder section of the metadata): a generator of
    samples at `low_rate`, and one that computes samples at `rate` from these."""

    vocoder: GeneratorConfig
    bwe: GeneratorConfig
    low_rate: int
    rate: int
    mel_bins: int  # of the second generator's spectrogram
    window: int  # samples at low_rate per row of it
    hop: int  # samples from one row to the next

    @property
    def low_samples(self) -> int:
        """Samples at low_rate per row of the mel spectrogram."""
        return math.prod(self.vocoder.rates)

    @property
    def samples(self) -> int:
        """Samples per row of the mel spectrogram."""
        return self.low_samples * self.rate // self.low_rate

    @property
    def resampling(self) -> tuple[int, ...]:
        """The shape of the filters from low_rate to rate: 7 samples to both sides."""
        return self.rate // self.low_rate, 1, 1, 2 * RESAMPLING_REACH + 1

    @property
    def reach(self) -> tuple[int, int]:
        """Spectrogram rows before and after one on which its samples depend: 56, 52 (release)."""
        first, last = self.bwe.reads(0, self.samples - 1)
        first, last = (first + 1) * self.hop - self.window, (last + 1) * self.hop - 1
        first, last = self.vocoder.reads(first, last)
        return -first, last


def vocoder_config(metadata: Mapping[str, Any]) -> VocoderConfig:
    """Parse the checkpoint's `config` metadata. Raises UserError for a vocoder with another
    structure than the released one; ltx-core may still run it."""
    try:
        vocoder, bwe = metadata["vocoder"]["vocoder"], metadata["vocoder"]["bwe"]
        config = VocoderConfig(
            vocoder=_generator(vocoder, "vocoder.vocoder", clamped=True),
            bwe=_generator(bwe, "vocoder.bwe", clamped=False),
            low_rate=bwe["input_sampling_rate"],
            rate=bwe["output_sampling_rate"],
            mel_bins=bwe["num_mels"],
            window=bwe["n_fft"],
            hop=bwe["hop_length"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_sound("vocoder", error) from None
    check_numbers(config, "checkpoint config: vocoder.bwe.")
    _check_values("vocoder.bwe", {"num_mels": config.mel_bins}, {"num_mels": GENERATOR_BINS})
    samples = math.prod(config.bwe.rates) * config.low_samples / config.hop
    if samples * config.low_rate != config.low_samples * config.rate or (
        config.low_samples % config.hop or config.rate % config.low_rate
    ):
        raise _no_sound("vocoder", ValueError("rates, upsamplings and hop do not fit"))
    return config


def _generator(values: dict, where: str, clamped: bool) -> GeneratorConfig:
    released = {"resblock": "AMP1", "activation": "snakebeta", "stereo": True}
    released |= {"use_tanh_at_final": False, "use_bias_at_final": False}
    _check_values(where, values, released)
    blocks = zip(values["resblock_kernel_sizes"], values["resblock_dilation_sizes"], strict=True)
    config = GeneratorConfig(
        channels=values["upsample_initial_channel"],
        rates=tuple(values["upsample_rates"]),
        kernels=tuple(values["upsample_kernel_sizes"]),
        blocks=tuple((taps, tuple(dilations)) for taps, dilations in blocks),
        clamped=clamped,
    )
    upsamplings = zip(config.rates, config.kernels, strict=True)
    right = {
        "resblock_kernel_sizes": all(taps % 2 for taps, _ in config.blocks),
        "upsample_kernel_sizes": all((taps - rate) % 2 == 0 for rate, taps in upsamplings),
        "upsample_initial_channel": config.channels % 2 ** len(config.rates) == 0,
    }
    for name in right:
        if not right[name]:
            raise ValueError(f"{where}.{name} is {values[name]!r}")
    return config


_check_values = partial(check_values, by="decoding sound on the ranks", advice=_HOST_DECODES)


def _no_sound(section: str, error: Exception) -> UserError:
    return UserError(
        f"the checkpoint's config metadata does not fit the released {section}:"
        f" {type(error).__name__}: {error}{_HOST_DECODES}"
    )
