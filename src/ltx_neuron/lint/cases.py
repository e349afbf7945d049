"""The graphs that lint reads: all of the toolkit, at tiny and released width, with one and two
blocks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ltx_neuron.config.gemma import GEMMA_3_12B, GemmaConfig
from ltx_neuron.config.sound import audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    dit_program,
    gemma3_program,
    may_divide,
    spectrogram_program,
    tile_program,
    waveform_program,
)
from ltx_neuron.profiles import Profile
from ltx_neuron.tiny import TinySizes
from ltx_neuron.tiny.config import released_config, tiny_config

FLOAT32 = "float32"  # suffix of programs that are float32 in every run
BLOCKS = (1, 2)  # graphs of more blocks repeat these


class Width(NamedTuple):
    """A checkpoint's config, the DiT's tokens, the video decoder's tile and the latents of sound,
    for a small clip or for 512x768 with 121 frames."""

    config: dict
    gemma: GemmaConfig
    video_tokens: int
    audio_tokens: int
    tile: tuple[int, int, int]
    sound: int


def widths(tp: int) -> dict[str, Width]:
    """The sizes to check by name, with enough heads for tp ranks."""
    sizes = TinySizes(heads=max(4, tp), gemma_heads=max(8, tp))
    gemma = replace(
        GEMMA_3_12B,
        hidden_size=sizes.gemma_hidden,
        intermediate_size=sizes.gemma_intermediate,
        num_attention_heads=sizes.gemma_heads,
        num_key_value_heads=sizes.gemma_kv_heads,
        head_dim=sizes.gemma_head_dim,
    )
    return {
        "tiny": Width(tiny_config(sizes), gemma, 24, 18, (2, 2, 2), 3),
        "full": Width(released_config(), GEMMA_3_12B, 6144, 126, (16, 9, 13), 126),
    }


def dtype_of(case: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype for tracing a program, in a run in `dtype`."""
    return torch.float32 if case.endswith(FLOAT32) else dtype


def programs(
    profile: Profile, tp: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[..., Program]]]:
    """Every program by name, with a function of `comm=` that makes it. Modules are on the meta
    device and take no memory. Raises UserError for a tp that does not divide the heads."""
    common = dict(tp=tp, dtype=dtype)
    kernel, other = profile.attention, profile.connector_attention
    for name, width in widths(tp).items():
        transformer = transformer_config(width.config)
        transformer.check_tensor_parallel(tp)
        width.gemma.check_tensor_parallel(tp)
        for decoder, make in _decoders(width, dtype).items():
            yield f"{name}: {decoder}", lambda comm, make=make: make()
        for blocks in BLOCKS:
            config = replace(
                transformer,
                num_layers=blocks,
                connector_num_layers=blocks,
                audio_connector_num_layers=blocks,
            )
            # Layer 0 with the local RoPE base, layer 1 with the global one
            gemma = replace(width.gemma, num_hidden_layers=blocks, full_attention_layers=(1,))
            label = f"{name}, {blocks} block{'s' * (blocks > 1)}"
            for kind, bucket in _buckets(width, blocks).items():
                dit = f"{label}: DiT, {kind}"
                make = partial(dit_program, config, bucket, **common, attention=kernel)
                yield f"{dit}, cut", partial(make, blocks_per_graph=blocks)
                yield f"{dit}, whole", partial(make, blocks_per_graph=0)
                if may_divide(bucket, tp):
                    divided = partial(make, sequence_parallel=True)
                    yield f"{dit}, divided, cut", partial(divided, blocks_per_graph=blocks)
                    yield f"{dit}, divided, whole", partial(divided, blocks_per_graph=0)
            for tokens in profile.text_buckets:
                for states in (False, True):
                    text = f"{label}: Gemma3, {tokens} tokens{', all states' * states}"
                    yield (
                        text,
                        partial(gemma3_program, gemma, config, tokens, states=states, **common),
                    )
            yield (
                f"{label}: connectors",
                partial(connector_program, config, **common, attention=other),
            )


def _buckets(width: Width, blocks: int) -> dict[str, Bucket]:
    """Every kind of the DiT's buckets. Buckets of retakes, masked references, NAG and a reference
    voice only change the inputs of a block, the head and the tail, and sound alone leaves out a
    part of these, so they are read with one block only."""
    own = Bucket(width.video_tokens, width.audio_tokens, timesteps=1, max_steps=8)
    images = replace(own, timesteps=2)
    buckets = {"text to video": own, "image to video": images}
    if blocks == BLOCKS[0]:
        buckets["retake"] = replace(images, audio_timesteps=2)
    buckets |= {f"{kind}, guided": replace(each, guided=True) for kind, each in buckets.items()}
    if blocks == BLOCKS[0]:
        # Stage 1 of an IC-LoRA, with a reference as large as the clip.
        tokens = 2 * width.video_tokens
        biased = replace(images, video_tokens=tokens, biased=True)
        guided = replace(biased, guided=True)
        buckets |= {"masked reference": biased, "masked reference, guided": guided}
        buckets["negative prompt"] = replace(own, nag=True)
        buckets["sound alone"] = replace(own, video_tokens=0, guided=True)
        # Stage 1 of a reference voice as long as the clip.
        kept = replace(images, audio_tokens=2 * width.audio_tokens, audio_timesteps=2)
        buckets["reference voice, guided"] = replace(kept, guided=True, identity=True)
    return buckets


def _decoders(width: Width, dtype: torch.dtype) -> dict[str, Callable[[], Program]]:
    """The decoders, which have no collectives. Sound is float32 in every run."""
    config, (span, rows) = width.config, span_sizes(width.sound)
    return {
        "video decoder": partial(tile_program, video_decoder_config(config), width.tile, dtype),
        f"mel decoder, {FLOAT32}": partial(spectrogram_program, audio_decoder_config(config), span),
        f"vocoder, {FLOAT32}": partial(waveform_program, vocoder_config(config), rows),
    }
