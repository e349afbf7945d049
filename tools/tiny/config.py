"""The config of the released checkpoints, and of tiny checkpoints of any size."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ltx_neuron.errors import UserError

SMALLEST_VOCABULARY = 320  # special and byte tokens, the corpus's letters, a few merges


def _size(default: int, meaning: str):
    """A field of TinySizes; `meaning` is also the help of its flag."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class TinySizes:
    """The variable sizes of a tiny checkpoint, with the released sizes in brackets. All other sizes
    are fixed by the format or as small as possible."""

    layers: int = _size(2, "transformer blocks of the DiT (48 in the release)")
    heads: int = _size(
        4, "attention heads of the DiT and of the connectors, video and audio alike (32)"
    )
    head_dim: int = _size(8, "channels per video head, even (128)")
    audio_head_dim: int = _size(4, "channels per audio head, even (64)")
    connector_layers: int = _size(2, "transformer blocks of each embeddings connector (8)")
    gemma_layers: int = _size(4, "layers of Gemma3 (48)")
    gemma_heads: int = _size(8, "query heads of Gemma3 (16)")
    gemma_kv_heads: int = _size(4, "key and value heads of Gemma3 (8)")
    gemma_head_dim: int = _size(8, "channels per head of Gemma3, even (256)")
    gemma_hidden: int = _size(32, "hidden channels of Gemma3 (3840)")
    gemma_intermediate: int = _size(64, "feed-forward channels of Gemma3 (15360)")
    gemma_vocab: int = _size(
        512, f"rows of Gemma3's embedding table, {SMALLEST_VOCABULARY} or more (262208)"
    )
    gemma_sliding_window_pattern: int = _size(
        2, "every so many-th layer of Gemma3 attends to all tokens (6)"
    )
    seed: int = _size(1234, "seed of all weights")

    @property
    def video_inner(self) -> int:
        """Channels of the video stream."""
        return self.heads * self.head_dim

    @property
    def audio_inner(self) -> int:
        """Channels of the audio stream."""
        return self.heads * self.audio_head_dim


def check(sizes: TinySizes) -> None:
    """Raise UserError for invalid sizes."""
    numbers = {name: number for name, number in asdict(sizes).items() if name != "seed"}
    wanted = {f"{name} >= 1": number >= 1 for name, number in numbers.items()}
    wanted |= {
        f"an even {name}": number % 2 == 0
        for name, number in numbers.items()
        if name.endswith("head_dim")
    }
    wanted[f"gemma_vocab >= {SMALLEST_VOCABULARY}"] = sizes.gemma_vocab >= SMALLEST_VOCABULARY
    if broken := [rule for rule, holds in wanted.items() if not holds]:
        raise UserError(f"tiny sizes need {', '.join(broken)}; got {sizes}")
    for whole, part in (("gemma_hidden", "gemma_heads"), ("gemma_heads", "gemma_kv_heads")):
        if numbers[whole] % numbers[part]:
            raise UserError(
                f"tiny sizes need {whole} divisible by {part}; got {numbers[whole]} and"
                f" {numbers[part]}"
            )


def released_config() -> dict:
    """The config in the metadata of the released LTX-2.3 checkpoints."""
    return json.loads(Path(__file__).with_name("ltx23-config.json").read_text())


def merge(config: dict, overrides: dict) -> dict:
    """A copy of `config` in which the leaves of `overrides` replace its own, at any depth."""
    merged = dict(config)
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(config.get(name), dict)
        merged[name] = merge(config[name], value) if both else value
    return merged


def tiny_config(sizes: TinySizes) -> dict:
    """The released config with smaller sizes of the DiT, both VAEs and the vocoder. The video VAE
    has the released compression of 8 in time and 32 in space."""
    released = released_config()
    residual = ["res_x", {"num_layers": 1}]
    compress = [
        [f"compress_{axes}_res", {"multiplier": 1}] for axes in ("space", "time", "all", "all")
    ]
    vocoder = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
    return merge(
        released,
        {
            "transformer": {
                "num_layers": sizes.layers,
                "num_attention_heads": sizes.heads,
                "attention_head_dim": sizes.head_dim,
                "cross_attention_dim": sizes.video_inner,
                "audio_num_attention_heads": sizes.heads,
                "audio_attention_head_dim": sizes.audio_head_dim,
                "audio_cross_attention_dim": sizes.audio_inner,
                "caption_channels": sizes.gemma_hidden,
                "connector_num_layers": sizes.connector_layers,
                "connector_num_attention_heads": sizes.heads,
                "connector_attention_head_dim": sizes.head_dim,
                "audio_connector_num_attention_heads": sizes.heads,
                "audio_connector_attention_head_dim": sizes.audio_head_dim,
            },
            "vae": {
                "encoder_blocks": [residual, compress[0], residual, *compress[1:], residual],
                "decoder_blocks": [
                    residual if block[0] == "res_x" else block
                    for block in released["vae"]["decoder_blocks"]
                ],
                "decoder_base_channels": 4,
                # The last width must be at least the 128 latent channels.
                "encoder_base_channels": 128,
            },
            "audio_vae": {
                "model": {"params": {"ddconfig": {"ch_mult": [1, 1, 1], "num_res_blocks": 1}}}
            },
            # Each upsampling stage halves the channels: six and five stages need 2 ** 6 and 2 ** 5.
            "vocoder": {
                "vocoder": vocoder | {"upsample_initial_channel": 64},
                "bwe": vocoder | {"upsample_initial_channel": 32},
            },
        },
    )
