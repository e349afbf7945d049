"""The LTX-2.3 DiT step, from latents to the next latents: Head (select the step, patchify), blocks,
Tail (velocity, Euler).

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

With sequence parallelism (`divided`) a rank has Tv / tp of the video's tokens in the residual
stream. Head selects them from the whole latent, attention and feed-forward gather all tokens and
reduce-scatter their sums, and the tail gathers the velocity. Audio is not divided. In the shapes
below, Tv of the stream and of `timestep_mask` is then Tv / tp.
"""

import torch
from torch import Tensor, nn

from ltx_neuron.config.transformer import TransformerConfig
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
from ltx_neuron.models.parallel import Comm, FeedForward, rms_norm, sum_partials
from ltx_neuron.models.rope import Rope
from ltx_neuron.models.signatures import (
    BlockInputs,
    BlockOutputs,
    GuidedHeadOutputs,
    GuideInputs,
    HeadInputs,
    HeadOutputs,
    TailInputs,
    TailOutputs,
    X0Outputs,
    optional,
)

Modulations = tuple[Modulation, Modulation]


def _modulations(inputs: BlockInputs | TailInputs) -> Modulations:
    """Of video and of audio."""
    audio_mask = optional(inputs, "audio_timestep_mask")
    return (
        Modulation(inputs.video_rows, inputs.timestep_mask),
        Modulation(inputs.audio_rows, audio_mask),
    )


class Perturbations:
    """The parts of one block that a guided pass omits (ltx-core guidance/perturbations.py).

    They are tensors of 0 and 1, not Python flags, so that all passes share one graph and other STG
    blocks or skipped steps need no new one.

    keep     (4,): video and audio self-attention, audio to video, video to audio; 0 is left out
    enabled  (2,) fp32: video, audio; 0 leaves the stream as it entered the block
    """

    def __init__(self, keep: Tensor, enabled: Tensor):
        self.video_self, self.audio_self, self.a2v, self.v2a = keep.unbind(0)
        self.enabled = enabled.to(keep.dtype)

    def where_enabled(
        self, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """The streams (1, T, D) after a part of the block if they are enabled, otherwise before
        it."""
        return tuple(
            new * on + old * (1 - on)
            for old, new, on in zip(before, after, self.enabled.unbind(0), strict=True)
        )


class TransformerBlock(nn.Module):
    """One of the 48 joint blocks: self-attention, text attention, audio-video attention and
    feed-forward of both streams.

    Parameters have the checkpoint's names. Both streams pass through each part together, so that
    their sums form one group (Comm.sum).
    """

    def __init__(
        self, config: TransformerConfig, tp: int, comm: Comm, kernel: Kernel, divided: bool
    ):
        super().__init__()
        video, audio, eps = config.video, config.audio, config.norm_eps
        self.comm, self.eps, self.divided = comm, eps, divided
        self.attn1 = Attention(video, video.inner, video.inner, tp, kernel, eps)
        self.attn2 = Attention(video, video.inner, video.inner, tp, kernel, eps)
        self.ff = FeedForward(video.inner, tp, config.ff_bias)
        self.audio_attn1 = Attention(audio, audio.inner, audio.inner, tp, kernel, eps)
        self.audio_attn2 = Attention(audio, audio.inner, audio.inner, tp, kernel, eps)
        self.audio_ff = FeedForward(audio.inner, tp, config.audio_ff_bias)
        # Both directions have the audio's heads, so keys of one stream match queries of the other.
        self.audio_to_video_attn = Attention(audio, video.inner, audio.inner, tp, kernel, eps)
        self.video_to_audio_attn = Attention(audio, audio.inner, video.inner, tp, kernel, eps)
        # Learned tables: a block's own part of AdaLN (models/modulation.py: AdaLNRows.entry).
        self.scale_shift_table = nn.Parameter(torch.empty(9, video.inner))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(9, audio.inner))
        self.scale_shift_table_a2v_ca_video = nn.Parameter(torch.empty(5, video.inner))
        self.scale_shift_table_a2v_ca_audio = nn.Parameter(torch.empty(5, audio.inner))
        # Without these tables the blocks attend to the unmodulated text context.
        if config.use_prompt_adaln_single:
            self.prompt_scale_shift_table = nn.Parameter(torch.empty(2, video.inner))
            self.audio_prompt_scale_shift_table = nn.Parameter(torch.empty(2, audio.inner))
        self.modulated_prompt = config.use_prompt_adaln_single

    def forward(
        self, video: Tensor, audio: Tensor, inputs: BlockInputs, perturbations: Perturbations | None
    ) -> tuple[Tensor, Tensor]:
        """(1, Tv, Dv), (1, Ta, Da) -> the same, with 3 x (statistics, outputs) + 1 grouped sums; if
        the video is divided, with five gathers and four reduce-scatters of it besides.

        A guided graph has perturbations.
        """
        modulations = _modulations(inputs)
        start = video, audio
        video, audio = self._self_attention(video, audio, modulations, inputs, perturbations)
        video, audio = self._text_attention(video, audio, modulations, inputs)
        if perturbations is not None:
            # A disabled stream is already restored when the other stream attends to it.
            video, audio = perturbations.where_enabled(start, (video, audio))
        video, audio = self._audio_video_attention(video, audio, modulations, inputs, perturbations)
        video, audio = self._feed_forward(video, audio, modulations)
        if perturbations is None:
            return video, audio
        return perturbations.where_enabled(start, (video, audio))

    def _modulated(
        self, video: Tensor, audio: Tensor, modulations: Modulations, rows: AdaLNRows
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """AdaLN of both streams, (1, T, D), and the gates, (D,) or (T, D), of the result."""
        tables = self.scale_shift_table, self.audio_scale_shift_table
        (v_shift, v_scale, v_gate), (a_shift, a_scale, a_gate) = (
            modulation.per_token(table, rows)
            for modulation, table in zip(modulations, tables, strict=True)
        )
        v_norm = rms_norm(video, self.eps) * (1 + v_scale) + v_shift
        a_norm = rms_norm(audio, self.eps) * (1 + a_scale) + a_shift
        return v_norm, a_norm, v_gate, a_gate

    def _self_attention(
        self,
        video: Tensor,
        audio: Tensor,
        modulations: Modulations,
        inputs: BlockInputs,
        perturbations: Perturbations | None,
    ) -> tuple[Tensor, Tensor]:
        """Each stream attends to its own tokens: Tv x Tv and Ta x Ta."""
        v_norm, a_norm, v_gate, a_gate = self._modulated(video, audio, modulations, SELF_ATTENTION)
        v_rope = Rope(inputs.video_cos, inputs.video_sin)
        a_rope = Rope(inputs.audio_cos, inputs.audio_sin)
        v_keep = None if perturbations is None else perturbations.video_self
        a_keep = None if perturbations is None else perturbations.audio_self
        bias = optional(inputs, "video_bias")
        v, a = attend(
            self.comm,
            AttentionCall(
                self.attn1, v_norm, v_norm, v_rope, keep=v_keep, bias=bias, x_divided=self.divided
            ),
            AttentionCall(self.audio_attn1, a_norm, a_norm, a_rope, keep=a_keep),
        )
        return video + v * v_gate, audio + a * a_gate

    def _text_attention(
        self, video: Tensor, audio: Tensor, modulations: Modulations, inputs: BlockInputs
    ) -> tuple[Tensor, Tensor]:
        """Each stream attends to its own text context, without RoPE: Tv x S and Ta x S."""
        v_norm, a_norm, v_gate, a_gate = self._modulated(video, audio, modulations, TEXT_ATTENTION)
        contexts = [(inputs.video_context, inputs.audio_context)]  # (1, S, Dv), (1, S, Da)
        if (nag := optional(inputs, "nag")) is not None:
            contexts.append((inputs.negative_video_context, inputs.negative_audio_context))
        if self.modulated_prompt:
            # By the step's sigma: keys and values change every step and cannot be computed once.
            tables = self.prompt_scale_shift_table, self.audio_prompt_scale_shift_table
            contexts = [[*map(self._modulate_prompt, c, modulations, tables)] for c in contexts]
        (v_context, *v_other), (a_context, *a_other) = zip(*contexts, strict=True)
        v, a = attend(
            self.comm,
            AttentionCall(self.attn2, v_norm, v_context, negative=v_other, x_divided=self.divided),
            AttentionCall(self.audio_attn2, a_norm, a_context, negative=a_other),
            nag=nag,
        )
        return video + v * v_gate, audio + a * a_gate

    @staticmethod
    def _modulate_prompt(context: Tensor, modulation: Modulation, table: Tensor) -> Tensor:
        """(1, S, D) -> the same, by the learned table (2, D)."""
        shift, scale = modulation.per_step(table, PROMPT).unbind(0)
        return context * (1 + scale) + shift

    def _audio_video_attention(
        self,
        video: Tensor,
        audio: Tensor,
        modulations: Modulations,
        inputs: BlockInputs,
        perturbations: Perturbations | None,
    ) -> tuple[Tensor, Tensor]:
        """Each stream attends to the other, with positions in seconds only: Tv x Ta (a2v) and
        Ta x Tv (v2a)."""
        v_table, a_table = self.scale_shift_table_a2v_ca_video, self.scale_shift_table_a2v_ca_audio
        v_modulation, a_modulation = modulations
        # Both norms are taken before either attention: no direction sees the other's result.
        v_norm, a_norm = rms_norm(video, self.eps), rms_norm(audio, self.eps)

        def modulated(direction: AdaLNRows) -> tuple[Tensor, Tensor]:
            v_scale, v_shift = v_modulation.per_token(v_table, direction)
            a_scale, a_shift = a_modulation.per_token(a_table, direction)
            return v_norm * (1 + v_scale) + v_shift, a_norm * (1 + a_scale) + a_shift

        v_rope = Rope(inputs.video_cross_cos, inputs.video_cross_sin)
        a_rope = Rope(inputs.audio_cross_cos, inputs.audio_cross_sin)
        v_query, a_context = modulated(A2V)
        v_context, a_query = modulated(V2A)
        # RoPE of queries uses their own stream's positions, RoPE of keys the other's.
        v, a = attend(
            self.comm,
            AttentionCall(
                self.audio_to_video_attn, v_query, a_context, v_rope, a_rope, x_divided=self.divided
            ),
            AttentionCall(
                self.video_to_audio_attn,
                a_query,
                v_context,
                a_rope,
                v_rope,
                context_divided=self.divided,
            ),
        )
        v_gate = v_modulation.per_step(v_table, AV_GATE)[0]
        a_gate = a_modulation.per_step(a_table, AV_GATE)[0]
        if perturbations is not None:
            # On the gates (D,), which is cheaper than on the attentions' results (1, T, D).
            v_gate, a_gate = v_gate * perturbations.a2v, a_gate * perturbations.v2a
        return video + v * v_gate, audio + a * a_gate

    def _feed_forward(
        self, video: Tensor, audio: Tensor, modulations: Modulations
    ) -> tuple[Tensor, Tensor]:
        """Feed-forward of each token, D -> 4 D -> D."""
        v_norm, a_norm, v_gate, a_gate = self._modulated(video, audio, modulations, FEED_FORWARD)
        if self.divided:
            v_norm = self.comm.all_gather(v_norm)
        # `finish` adds the biases after the sum, so that they are added once.
        partials = self.ff.partial(v_norm), self.audio_ff.partial(a_norm)
        v, a = sum_partials(self.comm, partials, (self.divided, False))
        return video + self.ff.finish(v) * v_gate, audio + self.audio_ff.finish(a) * a_gate


def step_one_hot(inputs: HeadInputs | GuideInputs) -> Tensor:
    """(steps,) fp32, one-hot over the schedule's steps: gathers are slow or refused by the
    compilers, and a one-hot sum is as exact."""
    return (inputs.step_numbers == inputs.step).float()


class Head(nn.Module):
    """Look up the step's sigmas and modulation rows, and project the latents to the streams'
    widths.

    The step number is an input, so one graph serves every step. The head of a guided pass also
    returns the streams that the step computes, `enabled` (2,).
    """

    def __init__(self, config: TransformerConfig, divided: bool = False):
        super().__init__()
        self.divided = divided
        # Not split over the ranks: a product of 128 channels is not worth a collective.
        self.patchify_proj = nn.Linear(config.in_channels, config.video.inner)
        self.audio_patchify_proj = nn.Linear(config.audio_in_channels, config.audio.inner)

    def forward(self, inputs: HeadInputs) -> HeadOutputs | GuidedHeadOutputs:
        one_hot = step_one_hot(inputs)
        # (steps, U, MODULATION_ROWS, D) -> (U, MODULATION_ROWS, D)
        rows = [
            (one_hot.to(table.dtype)[:, None, None, None] * table).sum(0)
            for table in (inputs.video_modulation, inputs.audio_modulation)
        ]
        outputs = HeadOutputs(
            video_hidden=self.patchify_proj(
                _own_tokens(inputs) if self.divided else inputs.video_latent
            ),
            audio_hidden=self.audio_patchify_proj(inputs.audio_latent),
            video_rows=rows[0],
            audio_rows=rows[1],
            sigma_pairs=(one_hot[:, None, None] * inputs.sigmas).sum(0),
        )
        enabled_steps = optional(inputs, "enabled_steps")
        if enabled_steps is None:
            return outputs
        return GuidedHeadOutputs(*outputs, (one_hot[:, None] * enabled_steps).sum(0))


def _own_tokens(inputs: HeadInputs) -> Tensor:
    """This rank's tokens of the whole video latent: (1, Tv, C) -> (1, Tv / tp, C)."""
    one_hot = inputs.rank_one_hot.flatten()  # (tp,)
    # (1, tp, Tv / tp, C); a sum over one-hot rows is exact, and the graph has no rank.
    parts = inputs.video_latent.unflatten(1, (one_hot.shape[0], -1))
    return (one_hot[:, None, None] * parts).sum(1)


class Blocks(nn.Module):
    """N consecutive blocks: the graph that is called num_layers / N times with different
    weights."""

    def __init__(
        self,
        config: TransformerConfig,
        tp: int,
        comm: Comm,
        kernel: Kernel,
        count: int,
        divided: bool,
    ):
        super().__init__()
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(config, tp, comm, kernel, divided) for _ in range(count)
        )

    def forward(self, inputs: BlockInputs) -> BlockOutputs:
        video, audio, keep = inputs.video_hidden, inputs.audio_hidden, optional(inputs, "keep")
        perturbations = [None] * len(self.transformer_blocks)
        if keep is not None:
            perturbations = [Perturbations(kept, inputs.enabled) for kept in keep.unbind(0)]
        for block, perturbation in zip(self.transformer_blocks, perturbations, strict=True):
            video, audio = block(video, audio, inputs, perturbation)
        return BlockOutputs(video_hidden=video, audio_hidden=audio)


class X0Tail(nn.Module):
    """Prediction of the clean latents of both streams from a pass: x0 = latent - velocity *
    timestep.

    Guidance combines the x0 of passes, so a guided graph ends here, and Guide performs the Euler
    step.
    """

    def __init__(self, config: TransformerConfig, comm: Comm, divided: bool = False):
        super().__init__()
        self.eps, self.comm, self.divided = config.norm_eps, comm, divided
        self.scale_shift_table = nn.Parameter(torch.empty(2, config.video.inner))
        self.proj_out = nn.Linear(config.video.inner, config.in_channels)
        self.audio_scale_shift_table = nn.Parameter(torch.empty(2, config.audio.inner))
        self.audio_proj_out = nn.Linear(config.audio.inner, config.audio_in_channels)

    def forward(self, inputs: TailInputs) -> X0Outputs:
        v_modulation, a_modulation = _modulations(inputs)
        v_velocity = self._velocity(
            inputs.video_hidden, v_modulation, self.scale_shift_table, self.proj_out
        )
        if self.divided:
            # Latents are small: from here on every rank has all of them, as at the step's start.
            v_velocity = self.comm.all_gather(v_velocity)
        a_velocity = self._velocity(
            inputs.audio_hidden, a_modulation, self.audio_scale_shift_table, self.audio_proj_out
        )
        v_sigma, a_sigma = inputs.sigma_pairs[:, 0].unbind(0)
        # If tokens are held, each token has its own timestep, (T, 1).
        v_timestep = v_sigma if inputs.video_rows.shape[0] == 1 else inputs.denoise_mask * v_sigma
        a_mask = optional(inputs, "audio_denoise_mask")
        a_timestep = a_sigma if a_mask is None else a_mask * a_sigma
        return X0Outputs(
            _denoised(inputs.video_latent, v_velocity, v_timestep),
            _denoised(inputs.audio_latent, a_velocity, a_timestep),
        )

    def _velocity(
        self, x: Tensor, modulation: Modulation, table: Tensor, projection: nn.Linear
    ) -> Tensor:
        """(1, T, D) -> (1, T, C), by the learned table (2, D)."""
        entries = table.unsqueeze(1)  # (2, 1, D): shift, scale; both on the one embedded timestep
        (shift,) = modulation.per_token(entries[0], EMBEDDED_TIMESTEP)
        (scale,) = modulation.per_token(entries[1], EMBEDDED_TIMESTEP)
        # In fp32 explicitly: XLA would sum the moments in x's own dtype.
        normed = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)
        return projection(normed * (1 + scale) + shift)


class Tail(X0Tail):
    """x0, blend with held tokens, Euler update: the next latents, rounded where the reference
    rounds."""

    def forward(self, inputs: TailInputs) -> TailOutputs:
        video, audio = super().forward(inputs)
        # With one timestep no video token is held, so there is nothing to blend.
        if inputs.video_rows.shape[0] > 1:
            video = blend(video, inputs.denoise_mask, inputs.clean_latent)
        audio = blend_audio(audio, inputs)
        return TailOutputs(*next_latents(inputs, video, audio, inputs.sigma_pairs))


class Step(nn.ModuleDict):
    """The whole step, or the whole guided pass, as one graph: head, all blocks, tail."""

    def __init__(self, parts: dict[str, nn.Module], signatures: tuple[type, ...]):
        super().__init__(parts)
        self.signatures = signatures

    def forward(self, inputs: tuple) -> TailOutputs | X0Outputs:
        values = inputs._asdict()
        # As a backend runs the cut program: each part reads its fields by name.
        for module, signature in zip(self.values(), self.signatures, strict=True):
            outputs = module(signature(*(values[name] for name in signature._fields)))
            values |= outputs._asdict()
        return outputs


def blend(x0: Tensor, denoise_mask: Tensor, clean_latent: Tensor) -> Tensor:
    """Restore held tokens by the denoise mask (ltx-pipelines post_process_latent): (1, T, C)."""
    return (x0 * denoise_mask + clean_latent.float() * (1 - denoise_mask)).to(x0.dtype)


def blend_audio(x0: Tensor, inputs: TailInputs | GuideInputs) -> Tensor:
    """`blend` of the audio, (1, Ta, C), in graphs that hold audio tokens."""
    mask = optional(inputs, "audio_denoise_mask")
    return x0 if mask is None else blend(x0, mask, inputs.audio_clean_latent)


def next_latents(
    inputs: TailInputs | GuideInputs, video: Tensor, audio: Tensor, sigma_pairs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The Euler step of both streams, from clean latents (1, T, C), and `finite`."""
    video = _euler(inputs.video_latent, video, *sigma_pairs[0].unbind(0))
    audio = _euler(inputs.audio_latent, audio, *sigma_pairs[1].unbind(0))
    # NaN and Inf propagate through a sum on every device. Some devices ignore NaN in a maximum, and
    # a compiler may fold a product by 0.
    return video, audio, video.float().mean((1, 2)) + audio.float().mean((1, 2))


def _denoised(x: Tensor, velocity: Tensor, timestep: Tensor) -> Tensor:
    """x0 = x - velocity * timestep (ltx-core to_denoised), timestep () or (T, 1)."""
    return (x.float() - velocity.float() * timestep).to(x.dtype)


def _euler(x: Tensor, denoised: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step (ltx-core EulerDiffusionStep)."""
    # The velocity is rounded to x's dtype, as in the reference: simplified, bf16 results differ.
    velocity = ((x.float() - denoised.float()) / sigma).to(x.dtype)
    return (x.float() + velocity.float() * (sigma_next - sigma)).to(x.dtype)
