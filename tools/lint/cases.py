"""The graphs that lint reads: all of the toolkit, at tiny and released width, with one and two
blocks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import NamedTuple

import torch
from tiny import TinySizes
from tiny.config import merge, released_config, tiny_config
from tiny.split import DECODER, TINY_DECODER, TRANSFORMER

from ltx_neuron.backends import mesh, registry
from ltx_neuron.config.diffusion import diffusion_decoder_config
from ltx_neuron.config.gemma import GEMMA_3_12B, GEMMA_4_12B, GemmaConfig
from ltx_neuron.config.profiles import Profile
from ltx_neuron.config.sound import audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    diffusion_program,
    dit_program,
    encoder_program,
    gemma3_program,
    may_divide,
    spectrogram_program,
    tile_program,
    waveform_program,
    with_convolution,
)

FLOAT32 = "float32"  # suffix of programs that are float32 in every run
LTX_25 = "LTX-2.5"  # begins the names of its kinds of buckets; the others are LTX-2.3's
BLOCKS = (1, 2)  # graphs of more blocks repeat these


class Width(NamedTuple):
    """A checkpoint's config, its diffusion decoder's, the DiT's tokens, the video decoder's tile,
    the video encoder's in pixels, the diffusion decoder's latents and those of sound, for a small
    clip or for 512x768 with 121 frames."""

    config: dict
    diffusion: dict
    gemmas: dict[str, GemmaConfig]
    video_tokens: int
    audio_tokens: int
    tile: tuple[int, int, int]
    pixels: tuple[int, int, int]
    clip: tuple[int, int, int]
    sound: int


def widths(tp: int) -> dict[str, Width]:
    """The sizes to check by name, with enough heads for tp ranks."""
    sizes = TinySizes(heads=max(4, 2 * tp), gemma_heads=max(8, tp))
    released = {"Gemma3": GEMMA_3_12B, "Gemma4": GEMMA_4_12B}
    smaller = dict(
        hidden_size=sizes.gemma_hidden,
        intermediate_size=sizes.gemma_intermediate,
        num_attention_heads=sizes.gemma_heads,
        num_key_value_heads=sizes.gemma_kv_heads,
        head_dim=sizes.gemma_head_dim,
    )
    tiny = {name: replace(gemma, **smaller) for name, gemma in released.items()}
    tiny["Gemma4"] = replace(tiny["Gemma4"], global_head_dim=2 * sizes.gemma_head_dim)
    tiny_tiles, tiles = ((2, 2, 2), (9, 64, 64)), ((16, 9, 13), (73, 512, 768))
    return {
        "tiny": Width(tiny_config(sizes), TINY_DECODER, tiny, 24, 18, *tiny_tiles, (4, 3, 3), 3),
        "full": Width(released_config(), DECODER, released, 6144, 126, *tiles, (16, 16, 24), 126),
    }


class Case(NamedTuple):
    """A program to check.

    make     makes it with its collectives: `comm=`, and `context=` if its profile has context
             parallelism
    profile  the given one, with the program's layout of ranks
    """

    name: str
    make: Callable[..., Program]
    profile: Profile

    def groups(self, tp: int) -> mesh.Groups:
        """Every group of ranks over which the program may have collectives."""
        return mesh.compiled(self.profile, tp)

    def program(self, part: ModuleType, tp: int) -> Program:
        """The program with the collectives of a front end."""
        context = registry.context(replace(self.profile, backend=part.BACKEND), tp)
        more = {"context": context} if context else {}
        return self.make(comm=part.comm(self.groups(tp)), **more)


def dtype_of(case: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype for tracing a program, in a run in `dtype`."""
    return torch.float32 if case.endswith(FLOAT32) else dtype


def programs(profile: Profile, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every program. Modules are on the meta device and take no memory. Raises UserError for a tp
    that does not divide the heads."""
    one = replace(profile, context_parallel=1)
    common = dict(tp=tp, dtype=dtype)
    kernel = profile.attention
    for name, width in widths(tp).items():
        later = merge(width.config, {"transformer": TRANSFORMER})
        configs = [transformer_config(each) for each in (width.config, later)]
        configs[0].check_tensor_parallel(tp)
        for gemma in width.gemmas.values():
            gemma.check_tensor_parallel(tp)
        for model, make in _vaes(width, dtype).items():
            yield Case(f"{name}: {model}", lambda comm, make=make: make(), one)
        for blocks in BLOCKS:
            depths = "num_layers", "connector_num_layers", "audio_connector_num_layers"
            config, marked = (replace(each, **dict.fromkeys(depths, blocks)) for each in configs)
            # Layer 0 with the local RoPE base, layer 1 with the global one
            gemmas = {
                name: replace(gemma, num_hidden_layers=blocks, full_attention_layers=(1,))
                for name, gemma in width.gemmas.items()
            }
            label = f"{name}, {blocks} block{'s' * (blocks > 1)}"
            buckets = _buckets(width, blocks)
            models = {kind: marked if LTX_25 in kind else config for kind in buckets}
            for kind, bucket in buckets.items():
                dit = f"{label}: DiT, {kind}"
                make = partial(dit_program, models[kind], bucket, **common, attention=kernel)
                yield Case(f"{dit}, cut", partial(make, blocks_per_graph=blocks), one)
                yield Case(f"{dit}, whole", partial(make, blocks_per_graph=0), one)
                if may_divide(bucket, tp):
                    divided = partial(make, sequence_parallel=True)
                    cut = partial(divided, blocks_per_graph=blocks)
                    yield Case(f"{dit}, divided, cut", cut, one)
                    yield Case(f"{dit}, divided, whole", partial(divided, blocks_per_graph=0), one)
            for layout, (own, kinds) in _layouts(profile, name, blocks).items():
                for kind in kinds or buckets:
                    more = dict(blocks_per_graph=own.blocks_per_graph, attention=kernel)
                    more["sequence_parallel"] = own.sequence_parallel
                    make = partial(dit_program, models[kind], buckets[kind], **common, **more)
                    if buckets[kind].video_tokens:
                        yield Case(f"{label}: DiT, {kind}, {layout}", make, own)
            for (encoder, gemma), tokens in product(gemmas.items(), profile.text_buckets):
                # Both encoders stack their states in the same way.
                for states in (False, True) if encoder == "Gemma3" else (False,):
                    text = f"{label}: {encoder}, {tokens} tokens{', all states' * states}"
                    make = partial(gemma3_program, gemma, config, tokens, states=states, **common)
                    yield Case(text, make, one)
            make = partial(connector_program, config, **common, attention=kernel)
            yield Case(f"{label}: connectors", make, one)


# Layouts with context parallelism: of the widths, the settings, and the kinds of buckets. What the
# ranks are given differs between these kinds; others differ from them as without it.
_KINDS = ("text to video", "text to video, guided", "image to video", "masked reference")
_LATER = f"{LTX_25}, image to video", f"{LTX_25}, guided"
_LAYOUTS = {
    "context 2": (
        ("tiny",),
        dict(context_parallel=2),
        (*_KINDS, "reference voice, guided", *_LATER),
    ),
    "context 2, cut": (("tiny",), dict(context_parallel=2, blocks_per_graph=1), _KINDS[:1]),
    # With padding at tiny size.
    "context 4, divided": (
        ("tiny", "full"),
        dict(context_parallel=4, sequence_parallel=True),
        (_KINDS[0], _LATER[0]),
    ),
}


def _layouts(
    profile: Profile, width: str, blocks: int
) -> dict[str, tuple[Profile, tuple[str, ...]]]:
    """The layouts of a width with context parallelism, with the kinds of buckets to check in each:
    a profile's own, with every kind, if it has one. One block has all their collectives."""
    if blocks != BLOCKS[0]:
        return {}
    if profile.context_parallel > 1:
        return {f"context {profile.context_parallel}": (replace(profile, blocks_per_graph=0), ())}
    whole = replace(profile, blocks_per_graph=0, sequence_parallel=False)
    return {
        layout: (replace(whole, **settings), kinds)
        for layout, (of_widths, settings, kinds) in _LAYOUTS.items()
        if width in of_widths
    }


def _buckets(width: Width, blocks: int) -> dict[str, Bucket]:
    """Every kind of the DiT's buckets. Buckets of retakes, masked references, NAG and a reference
    voice only change the inputs of a block, the head and the tail, and one stream alone leaves out
    a part of these, so they are read with one block only."""
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
        # LTX-2.5's stage 2, stage 1 without and with images, and its recipe with guidance.
        buckets[f"{LTX_25}, text to video"] = own
        buckets[f"{LTX_25}, ancestral"] = replace(own, ancestral=True)
        buckets[f"{LTX_25}, image to video"] = replace(images, ancestral=True)
        buckets[f"{LTX_25}, guided"] = replace(own, guided=True)
        buckets["sound alone"] = replace(own, video_tokens=0, guided=True)
        buckets["video alone"] = replace(images, audio_tokens=0, ancestral=True)
        # Stage 1 of a reference voice as long as the clip.
        kept = replace(images, audio_tokens=2 * width.audio_tokens, audio_timesteps=2)
        buckets["reference voice, guided"] = replace(kept, guided=True, identity=True)
    return buckets


def _vaes(width: Width, dtype: torch.dtype) -> dict[str, Callable[[], Program]]:
    """The VAEs, which have no collectives. Sound is float32 in every run."""
    config, (span, rows) = width.config, span_sizes(width.sound)
    encoder = video_encoder_config(config)
    vae = {"model_output_type": "x0", "decoder": width.diffusion}
    diffusion = diffusion_decoder_config({"vae": vae})
    decode = partial(tile_program, video_decoder_config(config), width.tile, dtype)
    encode = partial(encoder_program, encoder, width.pixels, dtype)
    return {
        "video decoder": decode,
        "video decoder, conv3d": lambda: with_convolution(decode(), "conv3d"),
        "video encoder": encode,
        "video encoder, conv3d": lambda: with_convolution(encode(), "conv3d"),
        "diffusion decoder": partial(diffusion_program, diffusion, width.clip, dtype),
        f"mel decoder, {FLOAT32}": partial(spectrogram_program, audio_decoder_config(config), span),
        f"vocoder, {FLOAT32}": partial(waveform_program, vocoder_config(config), rows),
    }
