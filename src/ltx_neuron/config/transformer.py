"""Sizes of the joint audio-video DiT and its text connectors; Bucket, a shape of its graphs."""

import dataclasses
from dataclasses import dataclass

from ltx_neuron.config.common import AttentionSize, ModelConfig, check_numbers, check_values
from ltx_neuron.errors import UserError

# Learnable registers per connector; upstream ignores the config's key, too.
REGISTERS = 128
STREAMS: tuple[str, ...] = "video", "audio"

# Values that the code assumes: those of ltx-core's LTXModelConfigurator and of 2.3 files.
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
    # Flags of later releases; a 2.3 checkpoint lacks them, which means these values.
    "ff_bias": True,
    "audio_ff_bias": True,
    "connector_ff_bias": True,
    "use_prompt_adaln_single": True,
    "use_keyframes_abs_pos_embedding": False,
}
# Attention -> prefix of its keys.
_SIZES = {
    "video": "",
    "audio": "audio_",
    "video_connector": "connector_",
    "audio_connector": "audio_connector_",
}


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The DiT and its two text connectors (transformer section of the metadata)."""

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
    use_keyframes_abs_pos_embedding: bool

    added = {"use_keyframes_abs_pos_embedding": False}

    @property
    def heads(self) -> dict[str, int]:
        return {
            f"{prefix}num_attention_heads": getattr(self, name).heads
            for name, prefix in _SIZES.items()
        }


def transformer_config(metadata: dict) -> TransformerConfig:
    """Parse the checkpoint's `config` metadata. UserError names the first unknown value."""
    values = metadata.get("transformer")
    if not isinstance(values, dict):
        raise UserError(
            "the checkpoint's config metadata has no 'transformer' section; is this an LTX-2.3"
            " checkpoint?"
        )
    check_values("transformer", values, _REQUIRED, "this code")
    values = {
        **_DEFAULTS,
        "audio_connector_num_layers": values.get("connector_num_layers"),
        **values,
    }
    convert = {tuple[int, ...]: tuple, bool: bool}
    try:
        sizes = {
            name: AttentionSize(
                values[f"{prefix}num_attention_heads"], values[f"{prefix}attention_head_dim"]
            )
            for name, prefix in _SIZES.items()
        }
        others = {
            field.name: convert.get(field.type, lambda value: value)(values[field.name])
            for field in dataclasses.fields(TransformerConfig)
            if field.name not in sizes
        }
    except KeyError as missing:
        raise UserError(f"checkpoint config: transformer.{missing.args[0]} is absent") from None
    except TypeError as error:
        raise UserError(
            f"checkpoint config: wanted a list in the transformer section: {error}"
        ) from None
    config = TransformerConfig(**sizes, **others)
    check_numbers(config, "checkpoint config: transformer.")
    widths = {
        "cross_attention_dim": config.video.inner,
        "audio_cross_attention_dim": config.audio.inner,
        "out_channels": config.in_channels,
        "audio_out_channels": config.audio_in_channels,
        "connector width": config.video.inner,
        "audio connector width": config.audio.inner,
        "audio_num_attention_heads": config.video.heads,
    }
    connectors = {
        "connector width": config.video_connector.inner,
        "audio connector width": config.audio_connector.inner,
    }
    # A width that the file omits is the one that the code needs.
    check_values("transformer", widths | values | connectors, widths, "this code")
    return config


BUCKET_KINDS = ("guided", "biased", "nag", "identity", "ancestral")  # fields of a Bucket


@dataclass(frozen=True)
class Bucket:
    """The shape for which a DiT step is compiled. Height and width matter only through their number
    of tokens, so portrait and landscape share a bucket."""

    # Tokens of the video latent, appended ones included; 0 for sound alone: no video stream
    video_tokens: int
    audio_tokens: int  # tokens of the audio latent; 0 for a video alone
    # Distinct timesteps of the video's tokens in a step: 1, and one more per image strength
    timesteps: int
    # Rows of the schedule's modulation table; a shorter schedule fills the first ones
    max_steps: int
    # A pass that predicts x0 and a graph that combines passes, instead of the plain step
    guided: bool = False
    # Distinct timesteps among the audio tokens: 1, or 2 where some are kept (retake)
    audio_timesteps: int = 1
    # The video's self-attention takes a bias (a reference with an attention mask)
    biased: bool = False
    nag: bool = False  # the text attentions take a negative prompt (normalized attention guidance)
    # Attention to the audio takes a bias, by which a guided pass leaves out the tokens of a
    # reference's sound (identity guidance)
    identity: bool = False
    ancestral: bool = False  # the step of the ancestral Euler sampler, which adds noise

    @property
    def streams(self) -> tuple[str, ...]:
        counts = self.video_tokens, self.audio_tokens
        return tuple(stream for stream, count in zip(STREAMS, counts, strict=True) if count)

    @property
    def name(self) -> str:
        """The name of its folder and programs, without values that are those of text to video."""
        audio = f"a{self.audio_tokens}" + (
            f"t{self.audio_timesteps}" if self.audio_timesteps > 1 else ""
        )
        named = {"video": f"v{self.video_tokens}-", "audio": f"{audio}-"}
        shape = "".join(named[s] for s in self.streams) + f"t{self.timesteps}-s{self.max_steps}"
        return shape + "".join(f"-{kind}" for kind in BUCKET_KINDS if getattr(self, kind))
