"""The DiT step, from latents to the next latents: Head (select the step, patchify), blocks,
Tail (velocity, Euler or ancestral Euler).

Sources: ltx-core model/transformer/{model,transformer,transformer_args}.py; sampling in
ltx-pipelines utils/samplers.py. Inputs that are constant over the steps are uploaded once:
contexts, RoPE tables, and one modulation table per schedule. AdaLN depends only on the timestep, so
Head looks its rows up by step, and each token selects its row through `timestep_mask`. The blocks
are identical in class and shapes, so one graph serves all of them.

Shapes (the batch is always 1; models/signatures.py lists every input and output):

  Tv, Ta  tokens of the video and audio stream     Dv, Da  widths of the streams (4096, 2048)
  S       text tokens (1024)                       C       channels of a latent token (128)
  U       distinct timesteps of a stream's tokens: 1 if none is held
  steps   rows of the schedule, max_steps of the bucket
  T, D    tokens and width of either stream

Graphs of one stream alone have its parameters only, and no audio-video attention.

With sequence parallelism (`divided`) a rank has Tv / tp of the video's tokens in the residual
stream. Head selects them from the whole latent, attention and feed-forward gather all tokens and
reduce-scatter their sums, and the tail gathers the velocity. Audio is not divided. In the shapes
below, Tv of the stream and of `timestep_mask` is then Tv / tp. With context parallelism a
tensor-parallel group has its own part of the video's tokens in the same way, and of their RoPE and
`video_bias`; only video self-attention needs the other groups'. Attention from audio to the video
merges the groups' results.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ltx_neuron.config.transformer import STREAMS, TransformerConfig
from ltx_neuron.models.attention import Attention, AttentionCall, Kernel, attend
from ltx_neuron.models.modulation import (
    A2V,
    AV_GATE,
    EMBEDDED_TIMESTEP,
    FEED_FORWARD,
    PROMPT,
    SELF_ATTENTION,
    TEXT_ATTENTION,
    V2A,
    AdaLNRows,
    Modulation,
)
from ltx_neuron.models.parallel import ContextParallel, FeedForward, Mesh, rms_norm, sum_partials
from ltx_neuron.models.rope import Rope

Fields = Mapping[str, Tensor]  # of a graph, by the names in signatures.DIT
Streams = dict[str, Tensor]  # by "video" and "audio", or by one of them
Modulations = dict[str, Modulation]
Names = tuple[str, ...]
_PREFIXES = {"video": "", "audio": "audio_"}  # of a stream's parameters and masks


def by_stream(inputs: Fields, name: str, streams: Iterable[str]) -> Streams:
    """The fields `video_{name}` and `audio_{name}`."""
    return {stream: inputs[f"{stream}_{name}"] for stream in streams}


def named(tensors: Streams, name: str) -> Streams:
    """The streams' tensors as fields `video_{name}` and `audio_{name}`."""
    return {f"{stream}_{name}": tensor for stream, tensor in tensors.items()}


def _modulations(inputs: Fields, streams: Iterable[str]) -> Modulations:
    return {
        stream: Modulation(rows, inputs.get(f"{_PREFIXES[stream]}timestep_mask"))
        for stream, rows in by_stream(inputs, "rows", streams).items()
    }


class Perturbations:
    """The parts of one block that a guided pass omits (ltx-core guidance/perturbations.py).

    They are tensors of 0 and 1, not Python flags, so that all passes share one graph and other STG
    blocks or skipped steps need no new one.

    keep     (4,): video and audio self-attention, audio to video, video to audio; 0 is left out
    enabled  (2,) fp32: video, audio; 0 leaves the stream as it entered the block
    """

    def __init__(self, keep: Tensor, enabled: Tensor):
        *self_attention, self.a2v, self.v2a = keep.unbind(0)
        self.self_attention = dict(zip(STREAMS, self_attention, strict=True))
        self.enabled = enabled.to(keep.dtype)

    def where_enabled(self, before: Streams, after: Streams) -> Streams:
        """The streams (1, T, D) after a part of the block if they are enabled, otherwise before
        it."""
        enabled = dict(zip(STREAMS, self.enabled.unbind(0), strict=True))
        return {
            stream: new * enabled[stream] + before[stream] * (1 - enabled[stream])
            for stream, new in after.items()
        }


class TransformerBlock(nn.Module):
    """One of the 48 joint blocks: self-attention, text attention, audio-video attention and
    feed-forward of both streams. Parameters have the checkpoint's names. The streams pass through
    each part together, so that their sums form one group (Comm.sum)."""

    def __init__(
        self, config: TransformerConfig, tp: int, mesh: Mesh, kernel: Kernel, streams: Names
    ):
        super().__init__()
        video, audio, eps = config.video, config.audio, config.norm_eps
        self.mesh, self.eps = mesh, eps
        self.comm, self.divided = mesh.tensor, mesh.divided
        self.modulated_prompt, joint = config.use_prompt_adaln_single, streams == STREAMS
        for stream in streams:
            size, prefix = getattr(config, stream), _PREFIXES[stream]
            for name in (f"{prefix}attn1", f"{prefix}attn2"):
                setattr(self, name, Attention(size, size.inner, size.inner, tp, kernel, eps))
            bias = getattr(config, f"{prefix}ff_bias")
            setattr(self, f"{prefix}ff", FeedForward(size.inner, tp, bias))
        if joint:
            # Both directions have the audio's heads, so keys of one match queries of the other.
            self.audio_to_video_attn = Attention(audio, video.inner, audio.inner, tp, kernel, eps)
            self.video_to_audio_attn = Attention(audio, audio.inner, video.inner, tp, kernel, eps)
        # Learned tables: a block's own part of AdaLN (models/modulation.py: AdaLNRows.entry).
        # Without a prompt's table the blocks attend to the unmodulated text context.
        widths = {_PREFIXES[stream]: getattr(config, stream).inner for stream in streams}
        tables = {f"{prefix}scale_shift_table": (9, width) for prefix, width in widths.items()}
        if joint:
            tables["scale_shift_table_a2v_ca_video"] = 5, video.inner
            tables["scale_shift_table_a2v_ca_audio"] = 5, audio.inner
        if self.modulated_prompt:
            tables |= {f"{prefix}prompt_scale_shift_table": (2, w) for prefix, w in widths.items()}
        for name, shape in tables.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))

    def _of(self, stream: str, name: str) -> Any:
        """A stream's module or learned table."""
        return getattr(self, _PREFIXES[stream] + name)

    def _is_divided(self, stream: str) -> bool:
        return self.divided and stream == "video"

    def forward(
        self, hidden: Streams, inputs: Fields, perturbations: Perturbations | None
    ) -> Streams:
        """(1, Tv, Dv), (1, Ta, Da) -> the same, with 3 x (statistics, outputs) + 1 grouped sums; if
        the video is divided, with five gathers and four reduce-scatters of it besides. A guided
        graph has perturbations."""
        modulations, start = _modulations(inputs, hidden), hidden
        hidden = self._self_attention(hidden, modulations, inputs, perturbations)
        hidden = self._text_attention(hidden, modulations, inputs)
        if len(hidden) == len(STREAMS):
            if perturbations is not None:
                # A disabled stream is already restored when the other stream attends to it.
                hidden = perturbations.where_enabled(start, hidden)
            hidden = self._audio_video_attention(hidden, modulations, inputs, perturbations)
        hidden = self._feed_forward(hidden, modulations)
        return hidden if perturbations is None else perturbations.where_enabled(start, hidden)

    def _modulated(
        self, hidden: Streams, modulations: Modulations, rows: AdaLNRows
    ) -> tuple[Streams, Streams]:
        """AdaLN of the streams, (1, T, D), and the gates, (D,) or (T, D), of the result."""
        entries = {
            stream: modulation.per_token(self._of(stream, "scale_shift_table"), rows)
            for stream, modulation in modulations.items()
        }
        normed = {
            stream: rms_norm(hidden[stream], self.eps) * (1 + scale) + shift
            for stream, (shift, scale, _) in entries.items()
        }
        return normed, {stream: gate for stream, (_, _, gate) in entries.items()}

    def _attended(
        self, hidden: Streams, gates: Streams, calls: list[AttentionCall], nag: Tensor | None = None
    ) -> Streams:
        """The streams plus the gated outputs of their attentions. nag: as in `attend`."""
        outputs = zip(hidden.items(), attend(self.comm, *calls, nag=nag), strict=True)
        return {stream: x + output * gates[stream] for (stream, x), output in outputs}

    def _self_attention(
        self,
        hidden: Streams,
        modulations: Modulations,
        inputs: Fields,
        perturbations: Perturbations | None,
    ) -> Streams:
        """Each stream attends to its own tokens: Tv x Tv and Ta x Ta."""
        normed, gates = self._modulated(hidden, modulations, SELF_ATTENTION)
        calls = [
            AttentionCall(
                self._of(stream, "attn1"),
                x,
                x,
                Rope.of(inputs, stream),
                keep=None if perturbations is None else perturbations.self_attention[stream],
                bias=inputs.get(f"{stream}_bias"),
                x_divided=self._is_divided(stream),
                context_parallel=self.mesh.context if stream == "video" else None,
            )
            for stream, x in normed.items()
        ]
        return self._attended(hidden, gates, calls)

    def _text_attention(self, hidden: Streams, modulations: Modulations, inputs: Fields) -> Streams:
        """Each stream attends to its own text context, without RoPE: Tv x S and Ta x S."""
        normed, gates = self._modulated(hidden, modulations, TEXT_ATTENTION)
        contexts = [by_stream(inputs, "context", hidden)]  # (1, S, Dv), (1, S, Da)
        if (nag := inputs.get("nag")) is not None:
            contexts.append({s: inputs[f"negative_{s}_context"] for s in hidden})
        if self.modulated_prompt:
            # By the step's sigma: keys and values change every step and cannot be computed once.
            contexts = [self._modulated_prompt(context, modulations) for context in contexts]
        calls = [
            AttentionCall(
                self._of(stream, "attn2"),
                x,
                contexts[0][stream],
                negative=[other[stream] for other in contexts[1:]],
                x_divided=self._is_divided(stream),
            )
            for stream, x in normed.items()
        ]
        return self._attended(hidden, gates, calls, nag)

    def _modulated_prompt(self, contexts: Streams, modulations: Modulations) -> Streams:
        """(1, S, D) -> the same, by the learned tables (2, D)."""
        modulated = {}
        for stream, context in contexts.items():
            table = self._of(stream, "prompt_scale_shift_table")
            shift, scale = modulations[stream].per_step(table, PROMPT).unbind(0)
            modulated[stream] = context * (1 + scale) + shift
        return modulated

    def _audio_video_attention(
        self,
        hidden: Streams,
        modulations: Modulations,
        inputs: Fields,
        perturbations: Perturbations | None,
    ) -> Streams:
        """Each stream attends to the other, with positions in seconds only: Tv x Ta (a2v) and
        Ta x Tv (v2a)."""
        v_table, a_table = self.scale_shift_table_a2v_ca_video, self.scale_shift_table_a2v_ca_audio
        v_modulation, a_modulation = modulations["video"], modulations["audio"]
        video, audio = hidden["video"], hidden["audio"]
        # Both norms are taken before either attention: no direction sees the other's result.
        v_norm, a_norm = rms_norm(video, self.eps), rms_norm(audio, self.eps)

        def modulated(direction: AdaLNRows) -> tuple[Tensor, Tensor]:
            v_scale, v_shift = v_modulation.per_token(v_table, direction)
            a_scale, a_shift = a_modulation.per_token(a_table, direction)
            return v_norm * (1 + v_scale) + v_shift, a_norm * (1 + a_scale) + a_shift

        v_rope, a_rope = (Rope.of(inputs, f"{stream}_cross") for stream in STREAMS)
        v_query, a_context = modulated(A2V)
        v_context, a_query = modulated(V2A)
        # RoPE of queries uses their own stream's positions, RoPE of keys the other's.
        v, a = attend(
            self.comm,
            AttentionCall(
                self.audio_to_video_attn,
                v_query,
                a_context,
                v_rope,
                a_rope,
                bias=inputs.get("audio_bias"),
                x_divided=self.divided,
            ),
            AttentionCall(
                self.video_to_audio_attn,
                a_query,
                v_context,
                a_rope,
                v_rope,
                bias=inputs.get("padding_bias"),
                context_divided=self.divided,
                context_parallel=self.mesh.context,
            ),
        )
        v_gate = v_modulation.per_step(v_table, AV_GATE)[0]
        a_gate = a_modulation.per_step(a_table, AV_GATE)[0]
        if perturbations is not None:
            # On the gates (D,), which is cheaper than on the attentions' results (1, T, D).
            v_gate, a_gate = v_gate * perturbations.a2v, a_gate * perturbations.v2a
        return {"video": video + v * v_gate, "audio": audio + a * a_gate}

    def _feed_forward(self, hidden: Streams, modulations: Modulations) -> Streams:
        """Feed-forward of each token, D -> 4 D -> D."""
        normed, gates = self._modulated(hidden, modulations, FEED_FORWARD)
        if self.divided:
            normed["video"] = self.comm.all_gather(normed["video"])
        # `finish` adds the biases after the sum, so that they are added once.
        partials = [self._of(stream, "ff").partial(x) for stream, x in normed.items()]
        summed = sum_partials(self.comm, partials, [*map(self._is_divided, normed)])
        return {
            stream: x + self._of(stream, "ff").finish(output) * gates[stream]
            for (stream, x), output in zip(hidden.items(), summed, strict=True)
        }


def step_one_hot(inputs: Fields) -> Tensor:
    """(steps,) fp32, one-hot over the schedule's steps: gathers are slow or refused by the
    compilers, and a one-hot sum is as exact."""
    return (inputs["step_numbers"] == inputs["step"]).float()


class Head(nn.Module):
    """Look up the step's sigmas and modulation rows, and project the latents to the streams'
    widths. The step number is an input, so one graph serves every step. The head of a guided pass
    also returns the streams that the step computes, `enabled` (2,)."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, streams: Names = STREAMS):
        super().__init__()
        self.mesh, self.streams = mesh, streams
        # Not split over the ranks: a product of 128 channels is not worth a collective.
        if "video" in streams:
            self.patchify_proj = nn.Linear(config.in_channels, config.video.inner)
            if config.use_keyframes_abs_pos_embedding:
                self.keyframes_abs_pos_embedding = nn.Parameter(torch.empty(1, config.video.inner))
        if "audio" in streams:
            self.audio_patchify_proj = nn.Linear(config.audio_in_channels, config.audio.inner)

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        one_hot = step_one_hot(inputs)
        # (steps, U, MODULATION_ROWS, D) -> (U, MODULATION_ROWS, D)
        rows = {
            stream: (one_hot.to(table.dtype)[:, None, None, None] * table).sum(0)
            for stream, table in by_stream(inputs, "modulation", self.streams).items()
        }
        latents = by_stream(inputs, "latent", self.streams)
        if self.mesh.selects:
            latents["video"] = _own_tokens(inputs, self.mesh.context)
        hidden = {
            stream: getattr(self, f"{_PREFIXES[stream]}patchify_proj")(latent)
            for stream, latent in latents.items()
        }
        if "video" in hidden and (marked := inputs.get("keyframes_mask")) is not None:
            # A mask's part is a rank's own, like that of timestep_mask.
            embedding = marked * self.keyframes_abs_pos_embedding
            hidden["video"] = hidden["video"] + embedding
        sigma_pairs = (one_hot[:, None, None] * inputs["sigmas"]).sum(0)
        outputs = {**named(hidden, "hidden"), **named(rows, "rows"), "sigma_pairs": sigma_pairs}
        if (enabled_steps := inputs.get("enabled_steps")) is not None:
            outputs["enabled"] = (one_hot[:, None] * enabled_steps).sum(0)
        return outputs


def _own_tokens(inputs: Fields, context: ContextParallel | None) -> Tensor:
    """This rank's tokens of the whole video latent: (1, Tv, C) -> (1, Tv / parts, C)."""
    one_hot, latent = inputs["rank_one_hot"].flatten(), inputs["video_latent"]  # (parts,)
    if context is not None and context.padding:
        latent = nn.functional.pad(latent, (0, 0, 0, context.padding))
    # (1, parts, Tv / parts, C); a sum over one-hot rows is exact, and the graph has no rank.
    parts = latent.unflatten(1, (one_hot.shape[0], -1))
    return (one_hot[:, None, None] * parts).sum(1)


class Blocks(nn.Module):
    """N consecutive blocks: the graph that is called num_layers / N times with different
    weights."""

    def __init__(
        self,
        config: TransformerConfig,
        tp: int,
        mesh: Mesh,
        kernel: Kernel,
        count: int,
        streams: Names,
    ):
        super().__init__()
        self.streams = streams
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(config, tp, mesh, kernel, streams) for _ in range(count)
        )

    def forward(self, inputs: Fields) -> Streams:
        hidden, keep = by_stream(inputs, "hidden", self.streams), inputs.get("keep")
        perturbations = [None] * len(self.transformer_blocks)
        if keep is not None:
            perturbations = [Perturbations(row, inputs["enabled"]) for row in keep.unbind(0)]
        for block, perturbation in zip(self.transformer_blocks, perturbations, strict=True):
            hidden = block(hidden, inputs, perturbation)
        return named(hidden, "hidden")


class X0Tail(nn.Module):
    """Prediction of the clean latents of both streams from a pass: x0 = latent - velocity *
    timestep. Guidance combines the x0 of passes, so a guided graph ends here, and Guide performs
    the Euler step."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, streams: Names = STREAMS):
        super().__init__()
        self.eps, self.mesh, self.streams = config.norm_eps, mesh, streams
        if "video" in streams:
            self.scale_shift_table = nn.Parameter(torch.empty(2, config.video.inner))
            self.proj_out = nn.Linear(config.video.inner, config.in_channels)
        if "audio" in streams:
            self.audio_scale_shift_table = nn.Parameter(torch.empty(2, config.audio.inner))
            self.audio_proj_out = nn.Linear(config.audio.inner, config.audio_in_channels)

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        return named(self.predictions(inputs), "x0")

    def predictions(self, inputs: Fields) -> Streams:
        """x0 of each stream, (1, T, C)."""
        modulations, velocities = _modulations(inputs, self.streams), {}
        for stream, x in by_stream(inputs, "hidden", self.streams).items():
            velocities[stream] = self._velocity(x, modulations[stream], _PREFIXES[stream])
            # Latents are small: from here on every rank has all, as at the step's start.
            if self.mesh.divided and stream == "video":
                velocities[stream] = self.mesh.tensor.all_gather(velocities[stream])
            if self.mesh.context and stream == "video":
                velocities[stream] = self.mesh.context.joined(velocities[stream])
        timesteps = dict(zip(STREAMS, inputs["sigma_pairs"][:, 0].unbind(0), strict=True))
        # If tokens are held, each token has its own timestep, (T, 1).
        for stream, (mask, _) in held(inputs, self.streams).items():
            timesteps[stream] = mask * timesteps[stream]
        # ltx-core to_denoised; a timestep is () or (T, 1).
        return {
            stream: (x.float() - velocities[stream].float() * timesteps[stream]).to(x.dtype)
            for stream, x in by_stream(inputs, "latent", self.streams).items()
        }

    def _velocity(self, x: Tensor, modulation: Modulation, prefix: str) -> Tensor:
        """(1, T, D) -> (1, T, C), by the stream's learned table (2, D)."""
        table, projection = (
            getattr(self, prefix + name) for name in ("scale_shift_table", "proj_out")
        )
        entries = table.unsqueeze(1)  # (2, 1, D): shift, scale; both on the one embedded timestep
        (shift,) = modulation.per_token(entries[0], EMBEDDED_TIMESTEP)
        (scale,) = modulation.per_token(entries[1], EMBEDDED_TIMESTEP)
        # In fp32 explicitly: XLA would sum the moments in x's own dtype.
        normed = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)
        return projection(normed * (1 + scale) + shift)


class Tail(X0Tail):
    """x0, blend with held tokens, Euler update: the next latents, rounded where the reference
    rounds."""

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        denoised = self.predictions(inputs)
        for stream, masks in held(inputs, self.streams).items():
            denoised[stream] = blend(denoised[stream], *masks)
        return next_latents(inputs, denoised, inputs["sigma_pairs"])


class AncestralTail(X0Tail):
    """x0, blend with held tokens, a step below the step's end, noise up to it, and the blend once
    more: the next latents, in fp32 until they are rounded. The coefficients are data, so that all
    steps share a graph: those of the last step return the prediction, those of a frozen stream its
    latent. Sources: ltx-core 1.2.0 EulerAncestralDiffusionStep, ltx-pipelines 1.2.0
    utils/samplers.py."""

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        masks, latents = held(inputs, self.streams), {}
        for stream, x0 in self.predictions(inputs).items():
            x, noise = inputs[f"{stream}_latent"], inputs[f"{stream}_noise"]
            coefficients = inputs["ancestral"][STREAMS.index(stream)]
            of_x, of_x0, signal, of_noise, restore = coefficients.unbind(0)
            x0 = blend(x0.float(), *masks[stream]) if stream in masks else x0.float()
            after = signal * (of_x * x.float() + of_x0 * x0) + noise.float() * of_noise
            if stream in masks:
                # The noise is of all tokens. The prediction of the last step is restored already.
                after = restore * blend(after, *masks[stream]) + (1 - restore) * after
            latents[stream] = after.to(x.dtype)
        return finished(latents)


class Step(nn.ModuleDict):
    """The whole step, or the whole guided pass, as one graph: head, all blocks, tail."""

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        # As a backend runs the cut program: each part reads its fields by name.
        values = ChainMap(outputs, inputs)
        for part in self.values():
            values.update(made := part(values))
        return made


def blend(x0: Tensor, denoise_mask: Tensor, clean_latent: Tensor) -> Tensor:
    """Restore held tokens by the denoise mask (ltx-pipelines post_process_latent): (1, T, C)."""
    return (x0 * denoise_mask + clean_latent.float() * (1 - denoise_mask)).to(x0.dtype)


def held_tokens(inputs: Fields, streams: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The arguments of `blend` for each stream of which a graph may hold tokens."""
    prefixes = {stream: _PREFIXES[stream] for stream in streams}
    return {
        stream: (inputs[f"{prefix}denoise_mask"], inputs[f"{prefix}clean_latent"])
        for stream, prefix in prefixes.items()
        if f"{prefix}denoise_mask" in inputs
    }


def held(inputs: Fields, streams: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """`held_tokens` of streams with several timesteps. Those with one hold none."""
    masks = held_tokens(inputs, streams)
    return {stream: masks[stream] for stream in masks if len(inputs[f"{stream}_rows"]) > 1}


def next_latents(inputs: Fields, denoised: Streams, sigma_pairs: Tensor) -> dict[str, Tensor]:
    """The Euler step of each stream, from clean latents (1, T, C): the next latents, and
    `finite`."""
    latents = {
        stream: _euler(latent, denoised[stream], *sigma_pairs[STREAMS.index(stream)].unbind(0))
        for stream, latent in by_stream(inputs, "latent", denoised).items()
    }
    return finished(latents)


def finished(latents: Streams) -> dict[str, Tensor]:
    """Latents (1, T, C) as fields, and `finite` (1,), which is finite if all of them are."""
    # NaN and Inf propagate through a sum on every device. Some devices ignore NaN in a maximum, and
    # a compiler may fold a product by 0.
    finite = reduce(torch.add, (latent.float().mean((1, 2)) for latent in latents.values()))
    return {**named(latents, "latent"), "finite": finite}


def _euler(x: Tensor, denoised: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step (ltx-core EulerDiffusionStep)."""
    # The velocity is rounded to x's dtype, as in the reference: simplified, bf16 results differ.
    velocity = ((x.float() - denoised.float()) / sigma).to(x.dtype)
    return (x.float() + velocity.float() * (sigma_next - sigma)).to(x.dtype)
