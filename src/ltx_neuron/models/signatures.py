"""Signatures of the traced graphs (a named tuple of inputs and one of outputs each), and the shape
of every field.

A field's name means the same tensor in every graph. A backend therefore calls a graph with the
named values of its inputs and stores those that it returns. Example inputs, uploads, manifests and
tests derive from this module. To add an input, name it in the graph's signature, give it a shape in
its model's function at the end of this file (dit_fields, ...), and describe it in the table below.

Fields of the DiT. Tv, Ta video and audio tokens, S text tokens, Dv, Da widths, C channels of a
latent token, U distinct timesteps of the video tokens, R = MODULATION_ROWS, steps = max_steps:

  step, step_numbers        number of this step (1,), and the numbers 0, 1, ... (steps,) for
                            comparison with it: the only integers of the graphs
  sigmas                    (steps, 2, 2), of video and of audio: the sigma each step starts from
                            and the one it ends with; a frozen stream has the same one twice
  sigma_pairs               (2, 2), those of this step
  *_modulation              (steps, U, R, D), AdaLN rows of every step; audio has U = 1, except in a
                            retake, which keeps some of its tokens
  *_rows                    (U, R, D), the AdaLN rows of this step
  timestep_mask             (Tv, U), one-hot: which of the U timesteps a video token has
  rank_one_hot              (1, parts), sequence and context parallelism: which part of the video's
                            tokens a rank has
  keyframes_mask            (Tv, 1): 1 for tokens of a single frame that the model generates (latent
                            frame 0, generated keyframes), of models that mark them
  denoise_mask              (Tv, 1): 1 denoised freely, 0 kept as in clean_latent
  clean_latent              (1, Tv, C), latents of images, references and a retake's kept part
  audio_timestep_mask,
  audio_denoise_mask,
  audio_clean_latent        the same for the audio's tokens, if U > 1
  video_bias                (Tv, Tv), added to the scores of the video's self-attention: references
                            with an attention mask
  audio_bias                (1, Ta), added to the scores of attention to the audio: 0, or the
                            dtype's lowest number for tokens that a pass leaves out
  padding_bias              (1, Tv'), added to the scores of attention to the video: 0, or fp32's
                            lowest number for tokens that context parallelism adds
  *_latent                  (1, T, C), noisy latents, in and out: the state of the sampler
  *_noise                   (1, T, C), noise that a step of the ancestral sampler adds
  ancestral                 (2, 5), of video and of audio, this step's ANCESTRAL coefficients
  finite                    (1,), a number that is finite if all of a step's latents are
  *_hidden                  (1, T, D), the streams between the blocks
  *_context                 (1, S, D), the text, from the connectors
  negative_*_context        the same of the negative prompt, for normalized attention guidance
  nag                       (3,), its scale, alpha and tau
  *_cos, *_sin              RoPE of a stream's self-attention, (1, heads of a rank, T, half a head)
  *_cross_cos, *_cross_sin  RoPE of the audio-video attentions, in seconds, with audio's heads

Fields of guidance, which runs the model several times per step with different contexts and
perturbations, and combines the predictions:

  *_x0                      (1, T, C), a pass's prediction of the clean latents
  cond_*, uncond_*,
  perturbed_*, isolated_*   `*_x0` of the four PASSES, as inputs of the combination
  guided_*                  the combined prediction, in and out: a skipped step repeats it
  keep                      (blocks, 4), attentions that a pass computes: self-attention of video,
                            of audio, audio to video, video to audio; 0 omits it
  enabled_steps, enabled    (steps, 2) and, of this step, (2,): video, audio; 0 repeats `guided_*`
  guidance                  (2, 4), video and audio: cfg - 1, stg, modality - 1, rescale
  identity, without_audio   (1,), the scale of identity guidance, and its pass's audio_x0

Fields of the text models. B tokens of a bucket:

  embeddings                (1, B, hidden), scaled token embeddings
  attention_mask            (1, 1, B, B), added to the scores: 0 or the dtype's lowest number
  local_*, global_*         RoPE of the sliding and of the full attention layers
  *_features                (1, B, D / tp), projected hidden states, divided over the ranks
  hidden_states             (1, B, hidden, layers + 1), for comparisons
  *_tokens                  (1, S, D), features and registers, inputs of the connectors

Fields of the video decoder; each rank has its own tile:

  tile_latent               (1, 128, f, h, w), a tile's latents
  features_*                (F, C, H, W), features between the graphs, by stage
  tile_pixels               (1, 3, 8f - 7, 32h, 32w), about -1 to 1

Fields of the diffusion decoder of the video; each rank has its own span of frames. A number after
the name is the stage's:

  latent_frames             (T, h, w, 128), latents
  region_*, span_*          (R, H, W, C) and (T, H, W, C): a span's features, and those it reads
  features_*, upsampled_*   the same features before and after upsampling
  context, noise, patches   (T, H, W, C): upsampled features, noise and pixels in patches
  timestep                  (1, 256), features of the noise's timestep
  place_*, times_*,
  rows_*, columns_*,
  *_rope_*                  the tensors of diffusion_decoder.Neighbourhood

Fields of mel decoder and vocoder, float32; each rank has its own span:

  span_latent               (1, 8, T, 16), a span's audio latents
  features_*                (1, C, T, bins) or (1, C, 1, T), the features between their graphs
  span_mel                  (1, 2, T, 64), a span's mel spectrogram
  low_waveform              (1, 2, 1, samples), waveform of the vocoder's first generator
  resampling                (phases, 1, 1, taps), filters from its rate to the final one
  span_waveform             (1, 2, samples), -1 to 1
"""

import re
from collections import namedtuple
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.diffusion import DiffusionDecoderConfig, cut, volumes
from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.sound import GENERATOR_BINS, AudioDecoderConfig, VocoderConfig
from ltx_neuron.config.transformer import STREAMS, Bucket, TransformerConfig
from ltx_neuron.config.video import Resampling, VideoDecoderConfig, VideoEncoderConfig
from ltx_neuron.models.diffusion_decoder import OF_SPAN, TIMESTEP_FEATURES, Neighbourhood
from ltx_neuron.models.modulation import MODULATION_ROWS

# Selects the step and projects the latents to the streams.
HeadInputs = namedtuple(
    "HeadInputs",
    "step step_numbers sigmas video_modulation audio_modulation video_latent audio_latent",
)
HeadOutputs = namedtuple(
    "HeadOutputs", "video_hidden audio_hidden video_rows audio_rows sigma_pairs"
)
GuidedHeadOutputs = namedtuple("GuidedHeadOutputs", (*HeadOutputs._fields, "enabled"))
# Some consecutive transformer blocks.
BlockInputs = namedtuple(
    "BlockInputs",
    "video_hidden audio_hidden video_rows audio_rows timestep_mask video_context audio_context"
    " video_cos video_sin audio_cos audio_sin"
    " video_cross_cos video_cross_sin audio_cross_cos audio_cross_sin",
)
BlockOutputs = namedtuple("BlockOutputs", "video_hidden audio_hidden")
# From the streams to the next latents, or to a guided pass's prediction.
TailInputs = namedtuple(
    "TailInputs",
    "video_hidden audio_hidden video_rows audio_rows timestep_mask sigma_pairs"
    " video_latent audio_latent denoise_mask clean_latent",
)
TailOutputs = namedtuple("TailOutputs", "video_latent audio_latent finite")
X0Outputs = namedtuple("X0Outputs", "video_x0 audio_x0")
# Combine the predictions of a guided step's passes, and take the Euler step.
GuideInputs = namedtuple(
    "GuideInputs",
    "step step_numbers sigmas enabled_steps guidance denoise_mask clean_latent"
    " video_latent audio_latent cond_video cond_audio uncond_video uncond_audio"
    " perturbed_video perturbed_audio isolated_video isolated_audio guided_video guided_audio",
)
GuideOutputs = namedtuple(
    "GuideOutputs", "video_latent audio_latent finite guided_video guided_audio"
)

# The text encoder and both text connectors.
Gemma3Inputs = namedtuple(
    "Gemma3Inputs", "embeddings attention_mask local_cos local_sin global_cos global_sin"
)
Gemma3Outputs = namedtuple("Gemma3Outputs", "video_features audio_features")
Gemma3OutputsWithStates = namedtuple(
    "Gemma3OutputsWithStates", (*Gemma3Outputs._fields, "hidden_states")
)
ConnectorInputs = namedtuple(
    "ConnectorInputs", "video_tokens audio_tokens video_cos video_sin audio_cos audio_sin"
)
ConnectorOutputs = namedtuple("ConnectorOutputs", "video_context audio_context")

# The decoders of video and sound, and the video encoder.
TileInputs = namedtuple("TileInputs", "tile_latent")
TileOutputs = namedtuple("TileOutputs", "tile_pixels finite")
EncoderInputs = namedtuple("EncoderInputs", "tile_pixels")
EncoderOutputs = namedtuple("EncoderOutputs", "tile_latent finite")
SpectrogramInputs = namedtuple("SpectrogramInputs", "span_latent")
SpectrogramOutputs = namedtuple("SpectrogramOutputs", "span_mel finite")
VocoderInputs = namedtuple("VocoderInputs", "span_mel")
LowWaveform = namedtuple("LowWaveform", "low_waveform")
WaveformOutputs = namedtuple("WaveformOutputs", "span_waveform finite")


LatentsInInputs = namedtuple("LatentsInInputs", "latent_frames")
NoiseInInputs = namedtuple("NoiseInInputs", "noise context")
PatchOutputs = namedtuple("PatchOutputs", "patches finite")


def diffusion_inputs(stage: int, *more: str) -> type:
    """Inputs of a diffusion decoder's block. more: those of the last stage."""
    near = [f"{name}_{stage}" for name in Neighbourhood._fields]
    return namedtuple("DiffusionInputs", (f"region_{stage}", *more, *near))


def span_outputs(stage: int) -> type:
    """The features of a span of frames."""
    return namedtuple("SpanOutputs", f"span_{stage}")


def waveform_inputs(stage: int) -> type:
    """Inputs of the vocoder's last graph: the last stage's features, the low-rate waveform and the
    resampling filters."""
    return namedtuple("WaveformInputs", f"features_{stage} low_waveform resampling")


def stage_features(stage: int) -> type:
    """The features that a decoder's graph passes to the next one in a stage."""
    return namedtuple(f"Features{stage}", f"features_{stage}")


# Of buckets with audio_timesteps > 1: the inputs that hold audio tokens.
AUDIO_MASKS = ("audio_timestep_mask", "audio_denoise_mask", "audio_clean_latent")
# Of a step of the ancestral sampler: the fields that each step has its own tensors of.
ANCESTRAL_FIELDS = ("video_noise", "audio_noise", "ancestral")
# Its coefficients: of the latent and of the prediction in the Euler step, of their sum, of the
# noise, and whether held tokens are restored after the noise.
ANCESTRAL = ("latent", "prediction", "signal", "noise", "restore")
# Further inputs of some kinds of graphs, by the part of the step that reads them: guided passes,
# sequence or context parallelism ("divided"), the latter with padding ("padded"), held audio tokens
# ("masked"), a bias of scores, normalized attention guidance, identity guidance, marked keyframes,
# the ancestral sampler.
_MORE = {
    "head": {
        "guided": ("enabled_steps",),
        "divided": ("rank_one_hot",),
        "keyframes": ("keyframes_mask",),
    },
    "blocks": {
        "guided": ("keep", "enabled"),
        "padded": ("padding_bias",),
        "masked": AUDIO_MASKS[:1],
        "biased": ("video_bias",),
        "nag": ("nag", "negative_video_context", "negative_audio_context"),
        "identity": ("audio_bias",),
    },
    "tail": {"masked": AUDIO_MASKS, "ancestral": ANCESTRAL_FIELDS},
    "guide": {"masked": AUDIO_MASKS[1:], "identity": ("identity", "without_audio")},
}


def extended(signature: type, part: str, kinds: tuple[str, ...]) -> type:
    """The signature of a part of the step, one of _MORE, for graphs of these kinds."""
    more = [field for kind in kinds for field in _MORE[part].get(kind, ())]
    return namedtuple(signature.__name__, (*signature._fields, *more))


# Stream -> the fields that graphs without it lack.
_OF = {
    "video": re.compile(
        r".*video.*|.*_cross_.*|timestep_mask|keyframes_mask|denoise_mask|clean_latent"
    ),
    "audio": re.compile(r".*audio.*|.*_cross_.*|padding_bias"),
}


def fields_of(streams: tuple[str, ...], fields: Iterable[str]) -> list[str]:
    """The fields that graphs with these streams have."""
    absent = [_OF[stream] for stream in STREAMS if stream not in streams]
    return [field for field in fields if not any(each.fullmatch(field) for each in absent)]


def of_streams(signature: type, streams: tuple[str, ...]) -> type:
    """The signature for graphs with these streams."""
    if streams == STREAMS:
        return signature
    return namedtuple(signature.__name__, fields_of(streams, signature._fields))


def by_stream(values: tuple, name: str) -> dict[str, Tensor]:
    """A graph's fields `video_{name}` and `audio_{name}` by stream."""
    fields = {stream: optional(values, f"{stream}_{name}") for stream in STREAMS}
    return {stream: value for stream, value in fields.items() if value is not None}


def step_inputs(parts: tuple[type, ...], head_outputs: type) -> type:
    """The inputs of the whole step in one graph: those of its parts that no part returns."""
    fields = dict.fromkeys(field for part in parts for field in part._fields)
    return namedtuple("StepInputs", [f for f in fields if f not in head_outputs._fields])


def optional(inputs: tuple, field: str) -> Tensor | None:
    """A field that only some kinds of graphs have, or None."""
    return getattr(inputs, field, None)


# The state between steps, which the host reads at a stage's end.
LATENTS = ("video_latent", "audio_latent")
FINITE = "finite"  # finite if they are
RESULTS = (
    *LATENTS,
    "tile_pixels",
    "patches",
    "span_mel",
    "span_waveform",
)  # outputs that must be finite
# Of a guided step: with the prompt, with the negative prompt, without self-attention in the STG
# blocks, and without attention between video and audio.
PASSES = ("cond", "uncond", "perturbed", "isolated")
# Of identity guidance: with the prompt, without the tokens of the reference's sound.
WITHOUT = "without"


class Field(NamedTuple):
    """Shape and dtype of a graph's tensor on one rank.

    split      the dimension that the ranks of a tensor-parallel group divide; None: all have the
               same
    per_block  one row per block of the graph: each call receives the rows of its own blocks
    context_split  the dimension that context-parallel groups divide, before `split`
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: int | None = None
    per_block: bool = False
    context_split: int | None = None


def dit_fields(
    config: TransformerConfig,
    bucket: Bucket,
    tp: int,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    cp: int = 1,
) -> dict[str, Field]:
    """Every input and output tensor of a DiT graph. With sequence and context parallelism the
    video's residual stream and its timestep mask have a rank's own tokens; with `cp` groups, its
    RoPE and bias have the group's own."""
    video, audio = config.video, config.audio
    t_video, t_audio = bucket.video_tokens, bucket.audio_tokens
    steps, timesteps = bucket.max_steps, bucket.timesteps
    audio_timesteps = bucket.audio_timesteps
    # Sigmas, masks and RoPE stay fp32 in a bf16 graph: the sampler's arithmetic is fp32 upstream.
    fp32 = torch.float32
    # Only the streams' RoPE is split. Every rank has all of the latents, streams, rows and
    # contexts.
    fields = {
        "step": Field((1,), torch.int32),
        "step_numbers": Field((steps,), torch.int32),
        "sigmas": Field((steps, 2, 2), fp32),
        "sigma_pairs": Field((2, 2), fp32),
        "video_modulation": Field((steps, timesteps, MODULATION_ROWS, video.inner), dtype),
        "audio_modulation": Field((steps, audio_timesteps, MODULATION_ROWS, audio.inner), dtype),
        "video_rows": Field((timesteps, MODULATION_ROWS, video.inner), dtype),
        "audio_rows": Field((audio_timesteps, MODULATION_ROWS, audio.inner), dtype),
        "timestep_mask": Field((t_video, timesteps), dtype),
        "denoise_mask": Field((t_video, 1), fp32),
        "clean_latent": Field((1, t_video, config.in_channels), dtype),
        "video_latent": Field((1, t_video, config.in_channels), dtype),
        "audio_latent": Field((1, t_audio, config.audio_in_channels), dtype),
        "finite": Field((1,), fp32),
        "video_hidden": Field((1, t_video, video.inner), dtype),
        "audio_hidden": Field((1, t_audio, audio.inner), dtype),
        "video_context": Field((1, TEXT_TOKENS, video.inner), dtype),
        "audio_context": Field((1, TEXT_TOKENS, audio.inner), dtype),
    }
    # The audio-video attentions have the audio's heads on both sides.
    ropes = {
        "video": (t_video, video),
        "audio": (t_audio, audio),
        "video_cross": (t_video, audio),
        "audio_cross": (t_audio, audio),
    }
    for name, (tokens, size) in ropes.items():
        table = Field((1, size.heads // tp, tokens, size.head_dim // 2), fp32, split=1)
        fields |= {f"{name}_cos": table, f"{name}_sin": table}
    if audio_timesteps > 1:
        fields |= {
            "audio_timestep_mask": Field((t_audio, audio_timesteps), dtype),
            "audio_denoise_mask": Field((t_audio, 1), fp32),
            "audio_clean_latent": Field((1, t_audio, config.audio_in_channels), dtype),
        }
    if bucket.biased:
        fields["video_bias"] = Field((t_video, t_video), dtype)
    if bucket.nag:
        negative = {f"negative_{s}_context": fields[f"{s}_context"] for s in ("video", "audio")}
        fields |= negative | {"nag": Field((3,), fp32)}
    if bucket.identity:
        fields["audio_bias"] = Field((1, t_audio), dtype)
    if config.use_keyframes_abs_pos_embedding:
        fields["keyframes_mask"] = Field((t_video, 1), dtype)
    if bucket.ancestral:
        fields |= {f"{s}_noise": fields[f"{s}_latent"] for s in STREAMS}
        fields["ancestral"] = Field((len(STREAMS), len(ANCESTRAL)), fp32)
    return _divided(fields, t_video, tp if sequence_parallel else 1, cp)


def _divided(fields: dict[str, Field], tokens: int, tp: int, cp: int) -> dict[str, Field]:
    """The fields if each of cp groups has its own part of the video's tokens, of which its tp ranks
    divide those between the layers (1: they do not)."""
    if tp == cp == 1:
        return fields
    parts = tp * cp
    own = own_tokens(tokens, parts)
    group, split, context = own * tp, tp > 1, cp > 1
    one_hot = Field((1, parts), fields["timestep_mask"].dtype)
    # Name -> dimension of the tokens, and how many of them a rank has.
    of_rank = {"rank_one_hot": (0, 1), "timestep_mask": (0, own), "video_hidden": (1, own)}
    of_rank["keyframes_mask"] = 0, own
    ropes = ("video_cos", "video_sin", "video_cross_cos", "video_cross_sin")
    of_group = {"video_bias": (0, group)} | dict.fromkeys(ropes, (2, group))
    divided = fields | {"rank_one_hot": one_hot}
    if group * cp > tokens:
        divided["padding_bias"] = Field((1, group), torch.float32, context_split=1)
    for name, (dim, size) in (of_rank | (of_group if context else {})).items():
        if (field := divided.get(name)) is None:
            continue
        shape = *field.shape[:dim], size, *field.shape[dim + 1 :]
        by_ranks = dim if split and name in of_rank else field.split
        divided[name] = Field(shape, field.dtype, by_ranks, False, dim if context else None)
    return divided


def own_tokens(tokens: int, parts: int) -> int:
    """The tokens of one of several equal parts, the last of which may have padding."""
    return -(-tokens // parts)


def guided_fields(
    config: TransformerConfig, bucket: Bucket, tp: int, dtype: torch.dtype, blocks: int
) -> dict[str, Field]:
    """The fields of guidance beyond dit_fields, for graphs of `blocks` blocks."""
    # A pass's prediction has the shape and dtype of the latents.
    streams = {
        "video": Field((1, bucket.video_tokens, config.in_channels), dtype),
        "audio": Field((1, bucket.audio_tokens, config.audio_in_channels), dtype),
    }
    predictions = {
        f"{name}_{stream}": field
        for name in (*PASSES, "guided")
        for stream, field in streams.items()
    }
    if bucket.identity:
        predictions |= {f"{WITHOUT}_audio": streams["audio"]}
        predictions |= {"identity": Field((1,), torch.float32)}
    return {
        **predictions,
        **{f"{stream}_x0": field for stream, field in streams.items()},
        "keep": Field((blocks, 4), dtype, per_block=True),
        "enabled_steps": Field((bucket.max_steps, 2), torch.float32),
        "enabled": Field((2,), torch.float32),
        "guidance": Field((2, 4), torch.float32),
    }


def gemma3_fields(
    gemma: GemmaConfig, config: TransformerConfig, tokens: int, tp: int, dtype: torch.dtype
) -> dict[str, Field]:
    """Every tensor of a text encoder graph for a bucket of `tokens`."""
    # Every head has the same frequencies, so every rank has one table for all heads.
    tables = {
        kind: Field((1, 1, tokens, gemma.attention(full).head_dim // 2), torch.float32)
        for kind, full in (("local", False), ("global", True))
    }
    return {
        "embeddings": Field((1, tokens, gemma.hidden_size), dtype),
        "attention_mask": Field((1, 1, tokens, tokens), dtype),
        **{f"{kind}_{part}": table for kind, table in tables.items() for part in ("cos", "sin")},
        "video_features": Field((1, tokens, config.video.inner // tp), dtype, split=2),
        "audio_features": Field((1, tokens, config.audio.inner // tp), dtype, split=2),
        "hidden_states": Field((1, tokens, gemma.hidden_size, gemma.num_hidden_layers + 1), dtype),
    }


def tile_fields(
    config: VideoDecoderConfig, tile: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Field]:
    """Every tensor of the video decoder's graphs for a tile of latents (f, h, w). The ranks'
    different tiles form a batch."""
    (frames, height, width), channels = tile, 8 * config.base_channels
    stages = [(frames, channels, height, width)]
    for block in config.up_blocks:
        if isinstance(block, Resampling):
            time, down, across = block.stride
            frames, channels = frames * time - (time - 1), channels // block.multiplier
            height, width = height * down, width * across
            stages.append((frames, channels, height, width))
    patch = config.patch_size
    pixels = (frames, height * patch, width * patch)
    return _vae_fields(
        (config.latent_channels, *tile), stages, (config.out_channels, *pixels), dtype
    )


def encoder_fields(
    config: VideoEncoderConfig, tile: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Field]:
    """The same of the video encoder's graphs, for a tile of 8f - 7 frames, rows and columns."""
    frames, height, width = tile
    channels = config.latent_channels
    height, width = height // config.patch_size, width // config.patch_size
    stages = [(frames, channels, height, width)]
    for block in config.down_blocks:
        if isinstance(block, Resampling):
            time, down, across = block.stride
            frames, channels = -(-frames // time), channels * block.multiplier
            height, width = height // down, width // across
            stages.append((frames, channels, height, width))
    latent = (config.latent_channels, frames, height, width)
    return _vae_fields(latent, stages, (config.in_channels, *tile), dtype)


def _vae_fields(
    latent: tuple[int, ...],
    stages: list[tuple[int, ...]],
    pixels: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[str, Field]:
    """The fields of shapes of a tile's latent, features by stage, and pixels."""
    return {
        "tile_latent": _each(Field((1, *latent), dtype)),
        **{f"features_{stage}": Field(shape, dtype) for stage, shape in enumerate(stages)},
        "tile_pixels": _each(Field((1, *pixels), dtype)),
        FINITE: _each(Field((1,), torch.float32)),
    }


def diffusion_fields(
    config: DiffusionDecoderConfig, clip: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Field]:
    """Every tensor of the diffusion decoder's graphs for a clip of latents (F, h, w). The ranks'
    different spans form a batch."""
    sizes, last = volumes(config, clip), len(config.channels) - 1
    fields, near = {}, {}
    for stage, (volume, channels) in enumerate(zip(sizes, config.channels, strict=True)):
        frames, *picture = volume
        kernel = config.kernels[stage]
        times = cut(frames, config.span, kernel[0])
        span = Field((times.size, *picture, channels), dtype)
        fields[f"region_{stage}"] = Field((times.window, *picture, channels), dtype)
        fields[f"span_{stage}"] = span
        if stage < last:
            time, down, across = config.upsamplings[stage].stride
            height, width = picture[0] * down, picture[1] * across
            larger = times.size * time, height, width, config.channels[stage + 1]
            fields |= {f"features_{stage}": span, f"upsampled_{stage}": Field(larger, dtype)}
        else:
            patches = Field((times.size, *picture, config.patch_channels), dtype)
            fields |= {"context": span, "noise": patches, "patches": patches}
        sides = [cut(n, config.tile, k) for n, k in zip(picture, kernel[1:], strict=True)]
        shapes = [(times.size, times.window)] * 2
        shapes += [(len(side.starts), side.size, side.window) for side in sides]
        turned = zip((times.window, *picture), config.rope_split, strict=True)
        shapes += [(2, positions, channels // 2) for positions, channels in turned]
        for name, shape in zip(Neighbourhood._fields, shapes, strict=True):
            field = Field(shape, torch.float32)
            near[f"{name}_{stage}"] = _each(field) if name in OF_SPAN else field
    frames = fields["span_0"].shape[0]
    fields["latent_frames"] = Field((frames, *sizes[0][1:], config.latent_channels), dtype)
    fields = {name: _each(field) for name, field in fields.items()}
    fields["timestep"] = Field((1, TIMESTEP_FEATURES), dtype)
    return fields | near | {FINITE: _each(Field((1,), torch.float32))}


def spectrogram_fields(config: AudioDecoderConfig, latents: int) -> dict[str, Field]:
    """Every tensor of the mel decoder's graphs for a span of `latents` latents. The ranks'
    different spans form a batch."""
    rows, bins = latents, config.latent_bins
    levels = [config.base_channels * multiplier for multiplier in reversed(config.multipliers)]
    features = [(1, levels[0], rows, bins)]
    for number, channels in enumerate(levels, 1):
        if number < len(levels):
            rows, bins = 2 * rows - 1, 2 * bins
        features.append((1, channels, rows, bins))
    return _float_fields(
        span_latent=(1, config.latent_channels, latents, config.latent_bins),
        span_mel=(1, config.out_channels, rows, bins),
        **{f"features_{stage}": shape for stage, shape in enumerate(features)},
    )


def waveform_fields(config: VocoderConfig, rows: int) -> dict[str, Field]:
    """Every tensor of the vocoder's graphs for a span of `rows` mel spectrogram rows. The ranks'
    different spans form a batch."""
    features, samples = [], rows
    for generator in (config.vocoder, config.bwe):
        channels = generator.channels
        features.append((1, channels, 1, samples))
        for rate in generator.rates:
            channels, samples = channels // 2, samples * rate
            features.append((1, channels, 1, samples))
        if generator is config.vocoder:
            low, samples = samples, samples // config.hop
    return _float_fields(
        span_mel=(1, 2, rows, GENERATOR_BINS),
        low_waveform=(1, 2, 1, low),
        resampling=config.resampling,
        span_waveform=(1, 2, samples),
        **{f"features_{stage}": shape for stage, shape in enumerate(features)},
    )


def _float_fields(**shapes: tuple[int, ...]) -> dict[str, Field]:
    """Fields of the audio decoders: float32, split over the ranks by span."""
    fields = {name: Field(shape, torch.float32) for name, shape in shapes.items()}
    spans = {name: _each(field) for name, field in fields.items() if name.startswith("span")}
    return fields | spans | {FINITE: _each(Field((1,), torch.float32))}


def _each(field: Field) -> Field:
    """A field of which every rank of the world has its own, along dimension 0."""
    return field._replace(split=0, context_split=0)


def connector_fields(config: TransformerConfig, tp: int, dtype: torch.dtype) -> dict[str, Field]:
    """Every tensor of the connectors' graph."""
    fields = {}
    for name, size in (("video", config.video_connector), ("audio", config.audio_connector)):
        table = Field(
            (1, size.heads // tp, TEXT_TOKENS, size.head_dim // 2), torch.float32, split=1
        )
        tokens = Field((1, TEXT_TOKENS, size.inner), dtype)
        fields |= {
            f"{name}_tokens": tokens,
            f"{name}_context": tokens,
            f"{name}_cos": table,
            f"{name}_sin": table,
        }
    return fields
