"""Model configurations read from file metadata, and Bucket, the shape a DiT graph is compiled for.

Nothing here is a constant of the release: sizes come from the checkpoint's `config` metadata and
Gemma's config.json. Values the code does not implement are refused by name rather than ignored.
"""

import dataclasses
import hashlib
import json
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from ltx_neuron.errors import UserError, reason, refusal
from ltx_neuron.files import check_regular

SUPPORTED_VERSION = "2.3"
CHECKPOINT_DOWNLOAD = (
    "hf download Lightricks/LTX-2.3 ltx-2.3-22b-distilled.safetensors --local-dir ."
)
# the tokenizer pads to this many, and the connectors return this many (ltx-core
# base_encoder.py:182)
TEXT_TOKENS = 1024
# learnable registers per connector; the config key is ignored upstream too
# (embeddings_connector.py)
REGISTERS = 128

# What the transformer code assumes. Same list as ltx-core's LTXModelConfigurator, plus what only
# 2.3 checkpoints have.
_REQUIRED = {
    "dropout": 0.0,
    "attention_bias": True,
    "num_vector_embeds": None,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "use_linear_projection": False,
    "only_cross_attention": False,
    "cross_attention_norm": True,
    "double_self_attention": False,
    "upcast_attention": False,
    "standardization_norm": "rms_norm",
    "norm_elementwise_affine": False,
    "qk_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "use_audio_video_cross_attention": True,
    "share_ff": False,
    "av_cross_ada_norm": True,
    "use_middle_indices_grid": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "connector_apply_gated_attention": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
    "use_embeddings_connector": True,
}
_DEFAULTS = {
    "in_channels": 128,
    "audio_in_channels": 128,
    "norm_eps": 1e-6,
    "positional_embedding_theta": 10000.0,
    # Flags of later releases; a 2.3 checkpoint has none of them and means these values.
    "ff_bias": True,
    "audio_ff_bias": True,
    "connector_ff_bias": True,
    "use_prompt_adaln_single": True,
}
# By attention: the prefix of its keys.
_SIZES = {
    "video": "",
    "audio": "audio_",
    "video_connector": "connector_",
    "audio_connector": "audio_connector_",
}


def gemma_download(root: Path) -> str:
    """The command that fills a Gemma root, and what Google wants first."""
    return (
        "hf download google/gemma-3-12b-it-qat-q4_0-unquantized --local-dir"
        f" {shlex.quote(str(root))}\n(once, before: accept the terms on"
        " https://huggingface.co/google/gemma-3-12b-it-qat-q4_0-unquantized and type hf auth"
        " login)"
    )


def upsampler_download(kind: str) -> str:
    """The command that fetches the "spatial" or "temporal" latent upsampler."""
    return (
        f"hf download Lightricks/LTX-2.3 ltx-2.3-{kind}-upscaler-x2-1.0.safetensors --local-dir ."
    )


@dataclass(frozen=True)
class AttentionSize:
    """Heads and head dimension of one attention; `inner` is their product."""

    heads: int
    head_dim: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


CONST_MAX_HEAD_DIM = 128  # of the heads that attention=nki_const_max has a kernel for


class _Config:
    """What the configurations of all models have."""

    # Counts of heads by name, which a tensor-parallel degree must divide.
    heads: dict[str, int] = {}

    @property
    def digest(self) -> str:
        """Identity of the traced models: equal configs give equal graphs."""
        return digest(dataclasses.asdict(self))

    def check_tensor_parallel(self, tp: int) -> None:
        """Refuse a degree that would cut a head: such a split can divide evenly and still be
        wrong."""
        check_heads(tp, self.heads)


@dataclass(frozen=True)
class TransformerConfig(_Config):
    """The joint audio-video DiT and its two text connectors (transformer section of the
    metadata)."""

    num_layers: int
    video: AttentionSize
    audio: AttentionSize
    in_channels: int
    audio_in_channels: int
    norm_eps: float
    positional_embedding_theta: float
    positional_embedding_max_pos: tuple[int, ...]
    audio_positional_embedding_max_pos: tuple[int, ...]
    timestep_scale_multiplier: float
    av_ca_timestep_scale_multiplier: float
    caption_channels: int
    video_connector: AttentionSize
    audio_connector: AttentionSize
    connector_num_layers: int
    audio_connector_num_layers: int
    connector_positional_embedding_max_pos: tuple[int, ...]
    ff_bias: bool
    audio_ff_bias: bool
    connector_ff_bias: bool
    use_prompt_adaln_single: bool

    @property
    def heads(self) -> dict[str, int]:
        sizes = {
            "num_attention_heads": self.video,
            "audio_num_attention_heads": self.audio,
            "connector_num_attention_heads": self.video_connector,
            "audio_connector_num_attention_heads": self.audio_connector,
        }
        return {name: size.heads for name, size in sizes.items()}


KEY_VALUE_HEADS = (  # the name of a count of heads that several ranks may share
    "Gemma num_key_value_heads"
)


def check_heads(tp: int, heads: dict[str, int]) -> None:
    """Raise UserError unless every rank gets whole heads. Ranks may share a key-value head, each
    with a copy of it."""

    def whole(name: str, count: int, degree: int) -> bool:
        return count % degree == 0 or name == KEY_VALUE_HEADS and degree % count == 0

    for name, count in heads.items():
        if tp < 1 or not whole(name, count, tp):
            degrees = [
                d
                for d in range(1, max(heads.values()) + 1)
                if all(whole(n, h, d) for n, h in heads.items())
            ]
            raise UserError(
                f"tensor-parallel degree {tp} does not divide {name}={count}; a rank must hold"
                f" whole heads.\nType --tp-degree with one of {', '.join(map(str, degrees))}"
            )


def transformer_config(metadata: dict) -> TransformerConfig:
    """Parse the checkpoint's `config` metadata (a dict). Raises UserError naming the first value
    not implemented."""
    values = metadata.get("transformer")
    if not isinstance(values, dict):
        raise UserError(
            "the checkpoint's config metadata has no 'transformer' section; is this an LTX-2.3"
            " checkpoint?"
        )
    for name, wanted in _REQUIRED.items():
        if name not in values and wanted is not None or values.get(name) != wanted:
            got = repr(values[name]) if name in values else "absent"
            raise UserError(
                f"checkpoint config: transformer.{name} is {got}, this code implements only"
                f" {wanted!r}"
            )
    if values.get("use_keyframes_abs_pos_embedding", False):
        raise UserError(
            "checkpoint config: transformer.use_keyframes_abs_pos_embedding is True (LTX-2.5), not"
            " implemented"
        )
    values = {
        **_DEFAULTS,
        "audio_connector_num_layers": values.get("connector_num_layers"),
        **values,
    }
    try:
        sizes = {
            name: AttentionSize(
                values[f"{prefix}num_attention_heads"], values[f"{prefix}attention_head_dim"]
            )
            for name, prefix in _SIZES.items()
        }
        convert = {tuple[int, ...]: tuple, bool: bool}
        others = {
            field.name: convert.get(field.type, lambda value: value)(values[field.name])
            for field in dataclasses.fields(TransformerConfig)
            if field.name not in sizes
        }
        config = TransformerConfig(**sizes, **others)
    except KeyError as missing:
        raise UserError(f"checkpoint config: transformer.{missing.args[0]} is absent") from None
    except TypeError as error:
        raise UserError(
            f"checkpoint config: a list of the transformer section is none: {error}"
        ) from None
    _check_numbers(config, "checkpoint config: transformer.")
    _check_widths(values, config)
    return config


def _check_numbers(config, where: str) -> None:
    """Refuse a size or scale that is no number above 0."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is AttentionSize:
            _check_numbers(value, f"{where}{field.name} ")
        elif field.type in (int, float):
            right = isinstance(
                value, int if field.type is int else (int, float)
            ) and not isinstance(value, bool)
            if not right or not 0 < value < float("inf"):
                wanted = "a whole number" if field.type is int else "a number"
                raise UserError(f"{where}{field.name} is {value!r}, wanted {wanted} above 0")


def _check_widths(values: dict, config: TransformerConfig) -> None:
    wanted = {
        "cross_attention_dim": config.video.inner,
        "audio_cross_attention_dim": config.audio.inner,
        "out_channels": config.in_channels,
        "audio_out_channels": config.audio_in_channels,
        "connector width": config.video.inner,
        "audio connector width": config.audio.inner,
        "audio_num_attention_heads": config.video.heads,
    }
    got = {
        **values,
        "connector width": config.video_connector.inner,
        "audio connector width": config.audio_connector.inner,
    }
    for name, width in wanted.items():
        if got.get(name, width) != width:
            raise UserError(f"checkpoint config: {name} is {got[name]}, this code needs {width}")


@dataclass(frozen=True)
class Upsampling:
    """Part of the video decoder: a convolution whose channels become positions.

    stride      frames, rows and columns that take the place of one
    multiplier  by which the channels shrink
    """

    stride: tuple[int, int, int]
    multiplier: int


@dataclass(frozen=True)
class VideoDecoderConfig(_Config):
    """The video decoder (vae section of the metadata), in the order in which it computes.

    up_blocks  an Upsampling, or the number of residual blocks of a stage
    """

    latent_channels: int
    base_channels: int
    out_channels: int
    patch_size: int
    up_blocks: tuple[int | Upsampling, ...]


# What the released video decoder is. Defaults of an absent value are ltx-core's, which differ.
_REQUIRED_VAE = {
    "dims": 3,
    "norm_layer": "pixel_norm",
    "causal_decoder": False,
    "timestep_conditioning": False,
    "spatial_padding_mode": "zeros",
}
_VAE_DEFAULTS = {"dims": 3, "norm_layer": "pixel_norm", "causal_decoder": False}
_STRIDES = {"compress_time": (2, 1, 1), "compress_space": (1, 2, 2), "compress_all": (2, 2, 2)}
_HOST_DECODES = "leave out --neuron-vae: the host decodes it"


def video_decoder_config(metadata: dict) -> VideoDecoderConfig:
    """Parse the checkpoint's `config` metadata (a dict). Raises UserError for a decoder that is not
    built as the released one; the host's may decode it still."""
    values = metadata.get("vae")
    if not isinstance(values, dict):
        raise UserError("the checkpoint's config metadata has no 'vae' section")
    for name, wanted in _REQUIRED_VAE.items():
        if (got := values.get(name, _VAE_DEFAULTS.get(name))) != wanted:
            raise UserError(
                f"checkpoint config: vae.{name} is {got!r}, decoding on the ranks implements only"
                f" {wanted!r}; {_HOST_DECODES}"
            )
    config = VideoDecoderConfig(
        latent_channels=values.get("latent_channels", 128),
        base_channels=values.get("decoder_base_channels", 128),
        out_channels=values.get("out_channels", 3),
        patch_size=values.get("patch_size", 4),
        up_blocks=tuple(map(_up_block, reversed(values.get("decoder_blocks", [])))),
    )
    _check_numbers(config, "checkpoint config: vae.")
    strides = [block.stride for block in config.up_blocks if isinstance(block, Upsampling)]
    factors = [math.prod(axis) for axis in zip((1, 1, 1), *strides, strict=True)]
    got = (factors[0], *(factor * config.patch_size for factor in factors[1:]))
    if got != (8, 32, 32):
        raise UserError(
            f"checkpoint config: vae.decoder_blocks make {got} positions of one in time, height and"
            f" width, wanted (8, 32, 32); {_HOST_DECODES}"
        )
    return config


def _up_block(described: object) -> int | Upsampling:
    """An entry of the config's decoder_blocks: [name, number or settings]."""
    try:
        name, settings = described
        settings = {"num_layers": settings} if isinstance(settings, int) else {**settings}
        if name == "res_x" and not settings.get("inject_noise", False):
            return settings["num_layers"]
        if name in _STRIDES and not settings.get("residual", False):
            return Upsampling(_STRIDES[name], settings.get("multiplier", 1))
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(
        f"checkpoint config: vae.decoder_blocks has {described!r}, decoding on the ranks implements"
        f" only res_x, {', '.join(_STRIDES)}, without noise and residuals; {_HOST_DECODES}"
    )


@dataclass(frozen=True)
class AudioDecoderConfig(_Config):
    """The mel decoder (audio_vae section of the metadata).

    multipliers  channels of each level by base_channels, the level of the finest map first
    blocks       residual blocks of a level
    """

    latent_channels: int
    base_channels: int
    out_channels: int
    mel_bins: int
    blocks: int
    multipliers: tuple[int, ...]

    @property
    def latent_bins(self) -> int:
        return self.mel_bins // AUDIO_SCALE

    @property
    def reach(self) -> tuple[int, int]:
        """Latents before and after one that its spectrogram depends on: 33 and 0 in the release.
        Every 3 x 3 convolution looks two rows back."""
        rows = 2  # of conv_out
        for level in range(len(self.multipliers)):
            rows += 4 * self.blocks
            if level < len(self.multipliers) - 1:
                rows = -(-(rows + 2) // 2)  # of the enlarged map's
        return rows + 8 + 2, 0  # of the middle blocks and of conv_in


# What a rank decodes at a time: those windows of which four make the sound of 121 frames at 24 per
# second.
SPAN_LATENTS, SPAN_ROWS = 57, 208
AUDIO_SCALE = 4  # rows of a spectrogram for a latent, but for the first, and bins


def span_sizes(latents: int) -> tuple[int, int]:
    """Latents, and rows of a spectrogram, that a rank decodes at a time of so many latents of
    sound."""
    rows = AUDIO_SCALE * latents - (AUDIO_SCALE - 1)
    return min(latents, SPAN_LATENTS), min(rows, SPAN_ROWS)


# What the released mel decoder is. Defaults of an absent value are ltx-core's.
_REQUIRED_AUDIO_VAE = {
    "norm_type": ("pixel", "pixel"),
    "causality_axis": ("height", "height"),
    "mid_block_add_attention": (False, True),
    "attn_resolutions": ([], None),
}


def audio_decoder_config(metadata: dict) -> AudioDecoderConfig:
    """Parse the checkpoint's `config` metadata (a dict). Raises UserError for a mel decoder that is
    not built as the released one; ltx-core's may decode it still."""
    try:
        values = metadata["audio_vae"]["model"]["params"]["ddconfig"]
        for name, (wanted, default) in _REQUIRED_AUDIO_VAE.items():
            _require_sound("audio_vae", name, values.get(name, default), wanted)
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
    _check_numbers(config, "checkpoint config: audio_vae.")
    _require_sound("audio_vae", "ch_mult", 2 ** (len(config.multipliers) - 1), AUDIO_SCALE)
    # A statistic for every channel and bin of a latent.
    statistics = config.latent_channels * config.latent_bins
    _require_sound("audio_vae", "ch", config.base_channels, statistics)
    return config


@dataclass(frozen=True)
class GeneratorConfig:
    """One of the vocoder's two generators: from a mel spectrogram to a waveform.

    channels   after the first convolution; every upsampling halves them
    rates      samples that take the place of one, by upsampling
    kernels    taps of the upsamplings
    blocks     taps and dilations of the residual blocks after each upsampling
    clamped    whether the waveform is kept in [-1, 1]
    """

    channels: int
    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    blocks: tuple[tuple[int, tuple[int, ...]], ...]
    clamped: bool

    def reads(self, first: int, last: int) -> tuple[int, int]:
        """The first and the last row of the spectrogram on which samples `first` to `last`
        depend."""
        around = 3 + ACTIVATION_REACH  # of the last activation and convolution
        first, last = first - around, last + around
        for number in reversed(range(len(self.rates))):
            first, last = self.stage_reads(number, first, last)
        return first - 3, last + 3

    def stage_reads(self, number: int, first: int, last: int) -> tuple[int, int]:
        """The same of one upsampling with its residual blocks."""
        rate, taps = self.rates[number], self.kernels[number]
        around = max(
            sum((taps // 2) * (dilation + 1) + 2 * ACTIVATION_REACH for dilation in dilations)
            for taps, dilations in self.blocks
        )
        first, last = (sample + (taps - rate) // 2 for sample in (first - around, last + around))
        return first // rate - (-(-taps // rate) - 1), last // rate


RESAMPLING_REACH = 7  # samples before and after one of what a waveform is resampled from
ACTIVATION_REACH = 5  # samples before and after one that its activation depends on


@dataclass(frozen=True)
class VocoderConfig(_Config):
    """The vocoder with bandwidth extension (vocoder section of the metadata): a generator of
    samples at `low_rate`, and one that makes samples at `rate` of these.

    mel_bins   of the second generator's spectrogram
    window     samples at low_rate of a row of it
    hop        samples from a row to the next
    """

    vocoder: GeneratorConfig
    bwe: GeneratorConfig
    low_rate: int
    rate: int
    mel_bins: int
    window: int
    hop: int

    @property
    def low_samples(self) -> int:
        """Samples at low_rate for a row of the mel spectrogram."""
        return math.prod(self.vocoder.rates)

    @property
    def samples(self) -> int:
        """Samples for a row of the mel spectrogram."""
        return self.low_samples * self.rate // self.low_rate

    @property
    def resampling(self) -> tuple[int, ...]:
        """The shape of the filters from low_rate to rate: 7 samples to both sides."""
        return self.rate // self.low_rate, 1, 1, 2 * RESAMPLING_REACH + 1

    @property
    def reach(self) -> tuple[int, int]:
        """Rows of a mel spectrogram before and after one that its samples depend on: 56 and 52
        in the release."""
        first, last = self.bwe.reads(0, self.samples - 1)
        first, last = (first + 1) * self.hop - self.window, (last + 1) * self.hop - 1
        first, last = self.vocoder.reads(first, last)
        return -first, last


def vocoder_config(metadata: dict) -> VocoderConfig:
    """Parse the checkpoint's `config` metadata (a dict). Raises UserError for a vocoder that is not
    built as the released one; ltx-core's may run it still."""
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
    _check_numbers(config, "checkpoint config: vocoder.bwe.")
    _require_sound("vocoder.bwe", "num_mels", config.mel_bins, GENERATOR_BINS)
    samples = math.prod(config.bwe.rates) * config.low_samples / config.hop
    if samples * config.low_rate != config.low_samples * config.rate or (
        config.low_samples % config.hop or config.rate % config.low_rate
    ):
        raise _no_sound("vocoder", ValueError("rates, upsamplings and hop do not fit"))
    return config


GENERATOR_BINS = 64  # ltx-core's generators read two spectrograms of so many


def _generator(values: dict, where: str, clamped: bool) -> GeneratorConfig:
    required = {
        "resblock": "AMP1",
        "activation": "snakebeta",
        "stereo": True,
        "use_tanh_at_final": False,
        "use_bias_at_final": False,
    }
    for name, wanted in required.items():
        _require_sound(where, name, values.get(name), wanted)
    blocks = zip(values["resblock_kernel_sizes"], values["resblock_dilation_sizes"], strict=True)
    config = GeneratorConfig(
        channels=values["upsample_initial_channel"],
        rates=tuple(values["upsample_rates"]),
        kernels=tuple(values["upsample_kernel_sizes"]),
        blocks=tuple((taps, tuple(dilations)) for taps, dilations in blocks),
        clamped=clamped,
    )
    odd = all(taps % 2 for taps, _ in config.blocks)
    even = not any(
        (taps - rate) % 2 for rate, taps in zip(config.rates, config.kernels, strict=True)
    )
    halved = config.channels % 2 ** len(config.rates) == 0
    for name, right in (
        ("resblock_kernel_sizes", odd),
        ("upsample_kernel_sizes", even),
        ("upsample_initial_channel", halved),
    ):
        if not right:
            raise ValueError(f"{where}.{name} is {values[name]!r}")
    return config


def _require_sound(where: str, name: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise UserError(
            f"checkpoint config: {where}.{name} is {got!r}, decoding sound on the ranks implements"
            f" only {wanted!r}; {_HOST_DECODES}"
        )


def _no_sound(section: str, error: Exception) -> UserError:
    return UserError(
        f"the checkpoint's config metadata describes no released {section}:"
        f" {type(error).__name__}: {error}; {_HOST_DECODES}"
    )


@dataclass(frozen=True)
class GemmaConfig(_Config):
    """Gemma3's text model (text_config of gemma_root/config.json, in the spelling of transformers 4
    or 5)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    query_pre_attn_scalar: float
    vocab_size: int
    rms_norm_eps: float
    sliding_window: int
    # Every 6th; the others are sliding and use the local RoPE base.
    full_attention_layers: tuple[int, ...]
    rope_theta: float
    rope_factor: float
    rope_local_base_freq: float

    @property
    def heads(self) -> dict[str, int]:
        """A degree divides these, or is a multiple of the second."""
        return {
            "Gemma num_attention_heads": self.num_attention_heads,
            KEY_VALUE_HEADS: self.num_key_value_heads,
        }


GEMMA_3_12B = GemmaConfig(
    hidden_size=3840,
    intermediate_size=15360,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    query_pre_attn_scalar=256,
    vocab_size=262208,
    rms_norm_eps=1e-6,
    sliding_window=1024,
    full_attention_layers=tuple(range(5, 48, 6)),
    rope_theta=1e6,
    rope_factor=8.0,
    rope_local_base_freq=1e4,
)


def gemma_config(root: Path) -> GemmaConfig:
    """Read gemma_root/config.json. Defaults are google/gemma-3-12b-it's, whose published file
    leaves most out."""
    path = Path(root) / "config.json"
    try:
        check_regular(path)
        content = json.loads(path.read_text())
    except PermissionError as error:
        raise refusal(error, "--gemma-root") from None
    except OSError as error:
        what = (
            f"--gemma-root {root} is not a folder"
            if not os.path.isdir(root)
            else f"{path}: {reason(error)}"
        )
        raise UserError(
            f"{what}; wanted Gemma3-12B's folder.\nDownload it: {gemma_download(root)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    text = content.get("text_config") if isinstance(content, dict) else None
    if not isinstance(text, dict) or content.get("model_type") != "gemma3":
        got = content.get("model_type") if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"{path}: model_type is {got!r}, wanted 'gemma3' with a text_config (LTX-2.3 uses"
            " Gemma3-12B)"
        )
    for name in ("attn_logit_softcapping", "attention_bias", "use_bidirectional_attention"):
        if text.get(name):
            raise UserError(
                f"{path}: text_config.{name} is {text[name]!r}, which is not implemented"
            )
    sizes = {name: text.get(name, own) for name, own in dataclasses.asdict(GEMMA_3_12B).items()}
    pattern = text.get("sliding_window_pattern", 6)
    types = text.get("layer_types") or [
        "sliding" if (i + 1) % pattern else "full_attention"
        for i in range(sizes["num_hidden_layers"])
    ]
    rope = text.get("rope_parameters") or {}
    full, local = rope.get("full_attention", {}), rope.get("sliding_attention", {})
    scaling = text.get("rope_scaling") or full or {"factor": 8.0, "rope_type": "linear"}
    if scaling.get("rope_type", "linear") not in ("linear", "default"):
        raise UserError(
            f"{path}: rope_type {scaling['rope_type']!r} is not implemented, only 'linear'"
        )
    sizes |= {
        "full_attention_layers": tuple(i for i, t in enumerate(types) if t == "full_attention"),
        "rope_theta": full.get("rope_theta", sizes["rope_theta"]),
        "rope_factor": scaling.get("factor", 1.0),
        "rope_local_base_freq": local.get("rope_theta", sizes["rope_local_base_freq"]),
    }
    config = GemmaConfig(**sizes)
    _check_numbers(config, f"{path}: text_config.")
    if config.sliding_window < TEXT_TOKENS:
        raise UserError(
            f"{path}: sliding_window {config.sliding_window} is below the {TEXT_TOKENS} tokens"
            " LTX-2.3 encodes"
        )
    return config


def check_gemma_fits(
    gemma: GemmaConfig,
    transformer: TransformerConfig,
    gemma_root: Path,
    features: int | None = None,
) -> None:
    """Refuse a text encoder whose hidden states the checkpoint's projections do not take.

    `features` is what a projection takes: the hidden states of the embedding and of every layer,
    side by side.
    """
    if gemma.hidden_size != transformer.caption_channels:
        got = f"hidden_size {gemma.hidden_size}"
        wanted = f"{transformer.caption_channels} (caption_channels)"
    elif features in (None, gemma.hidden_size * (gemma.num_hidden_layers + 1)):
        return
    else:
        got = f"num_hidden_layers {gemma.num_hidden_layers}"
        wanted = f"{features // gemma.hidden_size - 1} layers"
    raise UserError(
        f"--gemma-root {gemma_root} has {got}, but the checkpoint's text projections take"
        f" {wanted}.\nLTX-2.3 needs Gemma3-12B: {gemma_download(gemma_root)}"
    )


@dataclass(frozen=True)
class Bucket:
    """The shape a DiT step is compiled for. Height and width only count through their tokens:
    portrait and landscape share.

    video_tokens   tokens of the video latent, appended keyframe tokens included
    audio_tokens   tokens of the audio latent
    timesteps      distinct timesteps among the video tokens of one step: 1 for text to video, one
                   more per image strength
    max_steps      rows of the schedule's modulation table; a shorter schedule fills the first ones
    guided         a pass that predicts x0 and a graph that combines passes, instead of the plain
                   step
    audio_timesteps  distinct timesteps among the audio tokens: 1, or 2 where some are kept (retake)
    biased         the video's self-attention takes a bias (a reference with an attention mask)
    """

    video_tokens: int
    audio_tokens: int
    timesteps: int
    max_steps: int
    guided: bool = False
    audio_timesteps: int = 1
    biased: bool = False

    @property
    def name(self) -> str:
        """Its folder's and its programs' name: what is as in text to video is not named."""
        audio = f"a{self.audio_tokens}" + (
            f"t{self.audio_timesteps}" if self.audio_timesteps > 1 else ""
        )
        shape = f"v{self.video_tokens}-{audio}-t{self.timesteps}-s{self.max_steps}"
        kinds = {"-guided": self.guided, "-biased": self.biased}
        return shape + "".join(kind for kind, applies in kinds.items() if applies)


def digest(value: object) -> str:
    """Twelve hex digits over a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
