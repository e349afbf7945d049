"""The fields of the traced graphs: the named tensors that they take and return.

A graph's module takes a dict of fields and returns one. A field's name means the same tensor in
every graph. A backend therefore calls a graph with the named values of its inputs and stores those
that it returns. Uploads, manifests and tests derive from the tables below. To add an input, add its
row, give new letters a size in the model's program (programs.py), and read it in a module.

A row has a name, a shape, a dtype and a meaning. `*` is video and audio, in a letter v and a: T*
and D* are tokens and width of a stream, C* channels of a latent token, U* distinct timesteps of its
tokens, H* heads of a rank, F* half the size of a head. dtype `run` is the graphs' own. Rows below
"if KIND:" are of such graphs alone. A row of a field that graphs return has the dimension that the
ranks divide, behind `_` for others; a run on meta tensors gives shape and dtype.

Fields of the decoders of video and sound and of the video encoder. Each rank has its own tile, or
its own span of time. A number after a name is the stage's:

  tile_latent               (1, C, f, h, w), a tile's latents
  tile_pixels               (1, 3, 8f - 7, 32h, 32w), about -1 to 1
  features_*                features between graphs: (F, C, H, W) of video, (1, C, T, bins) and
                            (1, C, 1, T) of sound; (T, H, W, C) of the diffusion decoder, before
  upsampled_*               and after an upsampling
  finite                    (1,), a number that is finite if all results are
  latent_frames             (T, h, w, C), latents of a span of the diffusion decoder
  region_*, span_*          (R, H, W, C) and (T, H, W, C): the features that a span reads, and its
                            own
  context, noise, patches   (T, H, W, C): upsampled features, noise and pixels in patches
  timestep                  (1, 256), features of the noise's timestep
  place_*, times_*,
  rows_*, columns_*,
  *_rope_*                  the tensors of diffusion_decoder.Neighbourhood
  span_latent               (1, C, T, bins), a span's audio latents
  span_mel                  (1, 2, T, bins), a span's mel spectrogram
  low_waveform              (1, 2, 1, samples), waveform of the vocoder's first generator
  resampling                (phases, 1, 1, taps), filters from its rate to the final one
  span_waveform             (1, 2, samples), -1 to 1
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from ltx_neuron.config.transformer import STREAMS

# S text tokens, N = max_steps, R = MODULATION_ROWS, B blocks of a graph, P parts of the video's
# tokens. A rank has t* tokens between the layers (of the video a part, with sequence or context
# parallelism), a tensor-parallel group g* (with context parallelism).
DIT = """
step                      1           int32     number of this step
step_numbers              N           int32     the numbers 0, 1, ... for comparison with it: the
                                                only integers of the graphs
sigmas                    N 2 2       fp32      of video and of audio: the sigma each step starts
                                                from and the one it ends with; a frozen stream has
                                                the same one twice
*_modulation              N U* R D*   run       AdaLN rows of every step; audio has U = 1, except in
                                                a retake, which keeps some of its tokens
*_latent                  1 T* C*     run       noisy latents, in and out: the state of the sampler
timestep_mask             tv Uv       run       one-hot: which of the U timesteps a video token has
*_context                 1 S D*      run       the text, from the connectors
*_cos, *_sin              1 H* g* F*  fp32      RoPE of a stream's self-attention
*_cross_cos, *_cross_sin  1 Ha g* Fa  fp32      RoPE of the audio-video attentions, in seconds, with
                                                audio's heads
denoise_mask              Tv 1        fp32      1 denoised freely, 0 kept as in clean_latent
clean_latent              1 Tv Cv     run       latents of images, references and a retake's kept
                                                part
*_rows                    _           returned  (U, R, D), the AdaLN rows of this step
sigma_pairs               _           returned  (2, 2), the sigmas of this step
*_hidden                  _ t*        returned  (1, T, D), the streams between the blocks
finite                    _           returned  (1,), finite if all of a step's latents are
if divided:
rank_one_hot              r P         run       which part of the video's tokens a rank has
if keyframes:
keyframes_mask            tv 1        run       1 for tokens of a single frame that the model
                                                generates (latent frame 0, generated keyframes)
if padded:
padding_bias              1 gv        fp32      added to the scores of attention to the video: 0, or
                                                the lowest number for tokens that context
                                                parallelism adds
if held:
audio_timestep_mask       Ta Ua       run       the same masks of audio tokens
audio_denoise_mask        Ta 1        fp32
audio_clean_latent        1 Ta Ca     run
if biased:
video_bias                gv Tv       run       added to the scores of the video's self-attention:
                                                references with an attention mask
if nag:
nag                       3           fp32      scale, alpha and tau of normalized attention
                                                guidance
negative_*_context        1 S D*      run       its negative prompt
if identity:
audio_bias                1 Ta        run       added to the scores of attention to the audio: 0, or
                                                the lowest number for tokens that a pass leaves out
identity                  1           fp32      the scale of identity guidance
without_audio             1 Ta Ca     run       its pass's audio_x0
if ancestral:
*_noise                   1 T* C*     run       noise that a step of the ancestral sampler adds
ancestral                 2 5         fp32      of video and of audio, this step's ANCESTRAL
                                                coefficients
if guided:
enabled_steps             N 2         fp32      video, audio: 0 repeats guided_*
keep                      B 4         run       attentions that a pass computes: self-attention of
                                                video, of audio, audio to video, video to audio; 0
                                                omits it
guidance                  2 4         fp32      video, audio: cfg - 1, stg, modality - 1, rescale
cond_*, uncond_*          1 T* C*     run       *_x0 of the four PASSES
perturbed_*, isolated_*   1 T* C*     run
guided_*                  1 T* C*     run       the combined prediction, in and out: a skipped step
                                                repeats it
enabled                   _           returned  (2,), enabled_steps of this step
*_x0                      _           returned  (1, T, C), a pass's prediction of the clean latents
"""

# S tokens of a bucket, W hidden width, O output width of a rank. Every head has the same
# frequencies, so every rank has one RoPE table for all heads.
GEMMA = """
embeddings                1 S W       run       scaled token embeddings
attention_mask            1 1 S S     run       added to the scores: 0 or the lowest number
local_cos, local_sin      1 1 S F     fp32      RoPE of the sliding attention layers
global_cos, global_sin    1 1 S G     fp32      RoPE of the full attention layers
*_features                _ _ O       returned  (1, S, O), projected hidden states
hidden_states             _           returned  (1, S, W, layers + 1), for comparisons
"""

CONNECTORS = """
*_tokens                  1 S D*      run       features and registers
*_cos, *_sin              1 H* S F*   fp32      RoPE
*_context                 _           returned  (1, S, D), the text
"""

# Of a step of the ancestral sampler: the fields that each step has its own tensors of.
ANCESTRAL_FIELDS = ("video_noise", "audio_noise", "ancestral")
# Its coefficients: of the latent and of the prediction in the Euler step, of their sum, of the
# noise, and whether held tokens are restored after the noise.
ANCESTRAL = ("latent", "prediction", "signal", "noise", "restore")
# The state between steps, which the host reads at a stage's end.
LATENTS = ("video_latent", "audio_latent")
FINITE = "finite"  # finite if they are
# Outputs that must be finite.
RESULTS = (*LATENTS, "tile_pixels", "patches", "span_mel", "span_waveform")
# Of a guided step: with the prompt, with the negative prompt, without self-attention in the STG
# blocks, and without attention between video and audio.
PASSES = ("cond", "uncond", "perturbed", "isolated")
# Of identity guidance: with the prompt, without the tokens of the reference's sound.
NO_VOICE = "without"


class Field(NamedTuple):
    """Shape and dtype of a graph's tensor on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # The dimension that the ranks of a tensor-parallel group divide; None: all have the same
    split: int | None = None
    # One row per block of the graph: each call receives the rows of its own blocks
    per_block: bool = False
    # The dimension that context-parallel groups divide, before `split`
    context_split: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of_ranks(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "Field":
        """A field of which every rank of the world has its own, along dimension 0."""
        return cls(shape, dtype, split=0, context_split=0)


def upload_bytes(
    fields: Mapping[str, Field], inputs: set[str], outputs: set[str], only: Collection[str] = ()
) -> int:
    """Bytes that a stage uploads to one rank: inputs that no graph returns, and the first latents.
    only: the inputs to count; none: all of these."""
    uploaded = inputs - (outputs - {*LATENTS})
    return sum(fields[name].nbytes for name in (uploaded.intersection(only) if only else uploaded))


class Dim(NamedTuple):
    """The size of a dimension on one rank, and what divides it: the ranks of a tensor-parallel
    group, context-parallel groups, the calls of a graph for different blocks."""

    size: int
    split: bool = False
    context_split: bool = False
    per_block: bool = False


_ROW = re.compile(r"(\S.*?) {2,}(\S.*?) {2,}(\w+)")


def fields(
    table: str, sizes: Mapping[str, int | Dim], dtype: torch.dtype, kinds: Mapping[str, bool]
) -> tuple[dict[str, Field], dict[str, Field]]:
    """The rows of a table: inputs, and fields that graphs return, whose shape is not known yet.
    sizes: of the shapes' letters; kinds: whether the graphs are of a kind."""
    sizes = {"_": 0, **sizes}
    inputs, returned, applies = {}, {}, True
    dtypes = {"int32": torch.int32, "fp32": torch.float32, "run": dtype, "returned": dtype}
    for line in table.splitlines():
        if line.startswith("if "):
            applies = kinds[line[3:-1]]
        elif applies and (row := _ROW.match(line)):
            names, shape, kind = row.groups()
            for stream in STREAMS if "*" in names else ("",):
                letters = shape.replace("*", stream[:1]).split()
                dims = (int(letter) if letter.isdecimal() else sizes[letter] for letter in letters)
                dims = [dim if isinstance(dim, Dim) else Dim(dim) for dim in dims]
                field = _field(dims, dtypes[kind])
                rows = returned if kind == "returned" else inputs
                rows |= {name.replace("*", stream): field for name in names.split(", ")}
    return inputs, returned


def _field(dims: list[Dim], dtype: torch.dtype) -> Field:
    def divided(by: str) -> int | None:
        return next((index for index, dim in enumerate(dims) if getattr(dim, by)), None)

    shape, per_block = tuple(dim.size for dim in dims), any(dim.per_block for dim in dims)
    return Field(shape, dtype, divided("split"), per_block, divided("context_split"))
