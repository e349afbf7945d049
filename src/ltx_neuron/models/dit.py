"""The LTX-2.3 DiT step, from latents to next latents: Head (choose the step, patchify), blocks,
Tail (velocity, Euler).

Sources: ltx-core model/transformer/{model,transformer,transformer_args}.py; sampling in
ltx-pipelines utils/samplers.py. Everything that does not change over the steps is an input uploaded
once: contexts, RoPE tables, and one modulation table per schedule. AdaLN depends on the timestep
alone, so its rows are looked up by step and nothing is held per token; a token picks its row
through `timestep_mask`. The blocks are identical in class and shapes: one graph serves any of them.
"""

import torch
from torch import Tensor, nn

from ltx_neuron.config import TransformerConfig
from ltx_neuron.models.attention import Attention, Call, Kernel, attend
from ltx_neuron.models.modulation import (
    A2V,
    AV_GATE,
    EMBEDDED_TIMESTEP,
    FEED_FORWARD,
    PROMPT,
    SELF_ATTENTION,
    TEXT_ATTENTION,
    V2A,
)
from ltx_neuron.models.parallel import Comm, FeedForward, rms_norm
from ltx_neuron.models.rope import Rope
from ltx_neuron.models.signatures import (
    PASSES,
    BlockInputs,
    BlockOutputs,
    GuidedBlockInputs,
    GuidedHeadInputs,
    GuidedHeadOutputs,
    GuidedStepInputs,
    GuideInputs,
    GuideOutputs,
    HeadInputs,
    HeadOutputs,
    StepInputs,
    TailInputs,
    TailOutputs,
    X0Outputs,
)


class Modulation:
    """The AdaLN rows of one stream at one step, (U, 17, D) for U distinct timesteps, with `mask`
    (T, U) one-hot."""

    def __init__(self, rows: Tensor, mask: Tensor):
        self.rows, self.mask = rows, mask

    def __call__(
        self, table: Tensor, row: int, first: int = 0, count: int = 3
    ) -> tuple[Tensor, ...]:
        """Rows row..row+count plus the block's own table entries first..first+count: each (D,), or
        (T, D) for U > 1."""
        values = table[first : first + count] + self.rows[:, row : row + count]
        return tuple(self._choose(values[:, i]) for i in range(count))

    def _choose(self, values: Tensor) -> Tensor:
        if values.shape[0] == 1:
            return values[0]
        return sum(self.mask[:, u, None] * values[u] for u in range(values.shape[0]))

    def of_sigma(self, table: Tensor, row: int, first: int, count: int) -> Tensor:
        """The same rows for the step's own sigma, whatever a token's timestep: (count, D)."""
        return table[first : first + count] + self.rows[0, row : row + count]


class Switches:
    """What a guided pass leaves out of one block: tensors of 0 and 1, so that choosing compiles
    nothing."""

    def __init__(self, keep: Tensor, enabled: Tensor):
        self.video_self, self.audio_self, self.a2v, self.v2a = keep.unbind(0)
        self.enabled = enabled.to(keep.dtype)

    def enabled_or(
        self, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """The streams after, where they are enabled, else before."""
        return tuple(
            new * on + old * (1 - on)
            for old, new, on in zip(before, after, self.enabled.unbind(0), strict=True)
        )


class TransformerBlock(nn.Module):
    """One of the 48 joint blocks: self, text and audio-video attention and feed-forward of both
    streams, side by side."""

    def __init__(self, config: TransformerConfig, tp: int, kernel: Kernel):
        super().__init__()
        video, audio, eps = config.video, config.audio, config.norm_eps
        self.eps = eps
        self.attn1 = Attention(video, video.inner, video.inner, tp, kernel, eps)
        self.attn2 = Attention(video, video.inner, video.inner, tp, kernel, eps)
        self.ff = FeedForward(video.inner, tp, config.ff_bias)
        self.audio_attn1 = Attention(audio, audio.inner, audio.inner, tp, kernel, eps)
        self.audio_attn2 = Attention(audio, audio.inner, audio.inner, tp, kernel, eps)
        self.audio_ff = FeedForward(audio.inner, tp, config.audio_ff_bias)
        self.audio_to_video_attn = Attention(
            audio, video.inner, audio.inner, tp, kernel, eps
        )  # audio's heads for both
        self.video_to_audio_attn = Attention(audio, audio.inner, video.inner, tp, kernel, eps)
        self.scale_shift_table = nn.Parameter(torch.empty(9, video.inner))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(9, audio.inner))
        self.scale_shift_table_a2v_ca_video = nn.Parameter(torch.empty(5, video.inner))
        self.scale_shift_table_a2v_ca_audio = nn.Parameter(torch.empty(5, audio.inner))
        if config.use_prompt_adaln_single:
            self.prompt_scale_shift_table = nn.Parameter(torch.empty(2, video.inner))
            self.audio_prompt_scale_shift_table = nn.Parameter(torch.empty(2, audio.inner))
        self.modulated_prompt = config.use_prompt_adaln_single

    def forward(
        self,
        comm: Comm,
        video: Tensor,
        audio: Tensor,
        inputs: BlockInputs,
        switches: "Switches | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """(1, Tv, Dv), (1, Ta, Da) -> the same, with 3 x (statistics, outputs) + 1 grouped sums.

        switches are those of a guided graph, which is another graph than one without.
        """
        v_rows = Modulation(inputs.video_rows, inputs.timestep_mask)
        a_rows = Modulation(
            inputs.audio_rows, inputs.timestep_mask
        )  # audio has one timestep: its mask is never read
        start = video, audio
        video, audio = self._self_attention(comm, video, audio, v_rows, a_rows, inputs, switches)
        video, audio = self._text_attention(comm, video, audio, v_rows, a_rows, inputs)
        if (
            switches is not None
        ):  # a disabled stream stays as it was, also for the other stream's attention to it
            video, audio = switches.enabled_or(start, (video, audio))
        video, audio = self._audio_video_attention(
            comm, video, audio, v_rows, a_rows, inputs, switches
        )
        video, audio = self._feed_forward(comm, video, audio, v_rows, a_rows)
        return (video, audio) if switches is None else switches.enabled_or(start, (video, audio))

    def _norm(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return rms_norm(x, self.eps) * (1 + scale) + shift

    def _self_attention(self, comm, video, audio, v_rows, a_rows, inputs, switches):
        v_shift, v_scale, v_gate = v_rows(self.scale_shift_table, SELF_ATTENTION, SELF_ATTENTION)
        a_shift, a_scale, a_gate = a_rows(
            self.audio_scale_shift_table, SELF_ATTENTION, SELF_ATTENTION
        )
        v, a = self._norm(video, v_scale, v_shift), self._norm(audio, a_scale, a_shift)
        v, a = attend(
            comm,
            Call(
                self.attn1,
                v,
                v,
                Rope(inputs.video_cos, inputs.video_sin),
                keep=switches and switches.video_self,
            ),
            Call(
                self.audio_attn1,
                a,
                a,
                Rope(inputs.audio_cos, inputs.audio_sin),
                keep=switches and switches.audio_self,
            ),
        )
        return video + v * v_gate, audio + a * a_gate

    def _text_attention(self, comm, video, audio, v_rows, a_rows, inputs):
        v_shift, v_scale, v_gate = v_rows(self.scale_shift_table, TEXT_ATTENTION, TEXT_ATTENTION)
        a_shift, a_scale, a_gate = a_rows(
            self.audio_scale_shift_table, TEXT_ATTENTION, TEXT_ATTENTION
        )
        v_context, a_context = inputs.video_context, inputs.audio_context
        if self.modulated_prompt:  # by the step's sigma, so the keys and values change every step
            v_context = self._modulate_prompt(v_context, v_rows, self.prompt_scale_shift_table)
            a_context = self._modulate_prompt(
                a_context, a_rows, self.audio_prompt_scale_shift_table
            )
        v, a = attend(
            comm,
            Call(self.attn2, self._norm(video, v_scale, v_shift), v_context),
            Call(self.audio_attn2, self._norm(audio, a_scale, a_shift), a_context),
        )
        return video + v * v_gate, audio + a * a_gate

    @staticmethod
    def _modulate_prompt(context: Tensor, rows: Modulation, table: Tensor) -> Tensor:
        shift, scale = rows.of_sigma(table, PROMPT, 0, 2).unbind(0)
        return context * (1 + scale) + shift

    def _audio_video_attention(self, comm, video, audio, v_rows, a_rows, inputs, switches):
        v_table, a_table = self.scale_shift_table_a2v_ca_video, self.scale_shift_table_a2v_ca_audio
        v_norm, a_norm = (
            rms_norm(video, self.eps),
            rms_norm(audio, self.eps),
        )  # both from before either attention

        def modulated(row: int) -> tuple[Tensor, Tensor]:
            v_scale, v_shift = v_rows(v_table, row, row - A2V, 2)
            a_scale, a_shift = a_rows(a_table, row, row - A2V, 2)
            return v_norm * (1 + v_scale) + v_shift, a_norm * (1 + a_scale) + a_shift

        v_rope = Rope(inputs.video_cross_cos, inputs.video_cross_sin)
        a_rope = Rope(inputs.audio_cross_cos, inputs.audio_cross_sin)
        (v_query, a_context), (v_context, a_query) = modulated(A2V), modulated(V2A)
        v, a = attend(
            comm,
            Call(self.audio_to_video_attn, v_query, a_context, v_rope, a_rope),
            Call(self.video_to_audio_attn, a_query, v_context, a_rope, v_rope),
        )
        v_gate, a_gate = (
            v_rows.of_sigma(v_table, AV_GATE, 4, 1)[0],
            a_rows.of_sigma(a_table, AV_GATE, 4, 1)[0],
        )
        if switches is not None:
            v_gate, a_gate = v_gate * switches.a2v, a_gate * switches.v2a
        return video + v * v_gate, audio + a * a_gate

    def _feed_forward(self, comm, video, audio, v_rows, a_rows):
        v_shift, v_scale, v_gate = v_rows(self.scale_shift_table, FEED_FORWARD, FEED_FORWARD)
        a_shift, a_scale, a_gate = a_rows(self.audio_scale_shift_table, FEED_FORWARD, FEED_FORWARD)
        v, a = comm.sum(
            self.ff.partial(self._norm(video, v_scale, v_shift)),
            self.audio_ff.partial(self._norm(audio, a_scale, a_shift)),
        )
        return video + self.ff.finish(v) * v_gate, audio + self.audio_ff.finish(a) * a_gate


def _chosen(inputs) -> Tensor:
    """One-hot over the schedule's steps: gathers are slow or refused by the compilers, and a
    one-hot sum is as exact."""
    return (inputs.step_numbers == inputs.step).float()


class Head(nn.Module):
    """Look up the step's sigmas and modulation rows, and project the latents to the streams'
    widths."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.patchify_proj = nn.Linear(config.in_channels, config.video.inner)
        self.audio_patchify_proj = nn.Linear(config.audio_in_channels, config.audio.inner)

    def forward(self, inputs: HeadInputs) -> HeadOutputs:
        chosen = _chosen(inputs)
        rows = [
            (chosen.to(table.dtype)[:, None, None, None] * table).sum(0)
            for table in (inputs.video_modulation, inputs.audio_modulation)
        ]
        return HeadOutputs(
            video_hidden=self.patchify_proj(inputs.video_latent),
            audio_hidden=self.audio_patchify_proj(inputs.audio_latent),
            video_rows=rows[0],
            audio_rows=rows[1],
            sigma_pair=(chosen[:, None] * inputs.sigmas).sum(0),
        )


class GuidedHead(Head):
    """Head of a guided pass: says as well which streams the step computes."""

    def forward(self, inputs: GuidedHeadInputs) -> GuidedHeadOutputs:
        enabled = (_chosen(inputs)[:, None] * inputs.enabled_steps).sum(0)
        return GuidedHeadOutputs(*super().forward(inputs), enabled)


class Blocks(nn.Module):
    """N consecutive blocks: the graph that is called num_layers / N times with other weights."""

    def __init__(self, config: TransformerConfig, tp: int, comm: Comm, kernel: Kernel, count: int):
        super().__init__()
        self.comm = comm
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(config, tp, kernel) for _ in range(count)
        )

    def forward(self, inputs: BlockInputs) -> BlockOutputs:
        video, audio = inputs.video_hidden, inputs.audio_hidden
        for block in self.transformer_blocks:
            video, audio = block(self.comm, video, audio, inputs)
        return BlockOutputs(video_hidden=video, audio_hidden=audio)


class GuidedBlocks(Blocks):
    """N consecutive blocks of a guided pass."""

    def forward(self, inputs: GuidedBlockInputs) -> BlockOutputs:
        video, audio = inputs.video_hidden, inputs.audio_hidden
        for block, keep in zip(self.transformer_blocks, inputs.keep.unbind(0), strict=True):
            video, audio = block(self.comm, video, audio, inputs, Switches(keep, inputs.enabled))
        return BlockOutputs(video_hidden=video, audio_hidden=audio)


class X0Tail(nn.Module):
    """Prediction of the clean latents of both streams from a pass: x0 = latent - velocity *
    timestep."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.scale_shift_table = nn.Parameter(torch.empty(2, config.video.inner))
        self.proj_out = nn.Linear(config.video.inner, config.in_channels)
        self.audio_scale_shift_table = nn.Parameter(torch.empty(2, config.audio.inner))
        self.audio_proj_out = nn.Linear(config.audio.inner, config.audio_in_channels)

    def forward(self, inputs: TailInputs) -> X0Outputs:
        v_rows = Modulation(inputs.video_rows, inputs.timestep_mask)
        a_rows = Modulation(inputs.audio_rows, inputs.timestep_mask)
        v = self._velocity(inputs.video_hidden, v_rows, self.scale_shift_table, self.proj_out)
        a = self._velocity(
            inputs.audio_hidden, a_rows, self.audio_scale_shift_table, self.audio_proj_out
        )
        sigma = inputs.sigma_pair[0]
        timestep = sigma if inputs.video_rows.shape[0] == 1 else inputs.denoise_mask * sigma
        return X0Outputs(
            _denoised(inputs.video_latent, v, timestep), _denoised(inputs.audio_latent, a, sigma)
        )

    def _velocity(
        self, x: Tensor, rows: Modulation, table: Tensor, projection: nn.Linear
    ) -> Tensor:
        own = table.unsqueeze(1)  # (shift, scale), both added to the one embedded timestep
        (shift,), (scale,) = (
            rows(own[0], EMBEDDED_TIMESTEP, 0, 1),
            rows(own[1], EMBEDDED_TIMESTEP, 0, 1),
        )
        x = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(
            x.dtype
        )  # XLA would sum in x's own dtype
        return projection(x * (1 + scale) + shift)


class Tail(X0Tail):
    """x0, image blend and Euler update: the next latents, rounded where the reference rounds."""

    def forward(self, inputs: TailInputs) -> TailOutputs:
        video, audio = super().forward(inputs)
        if inputs.video_rows.shape[0] > 1:
            video = _blend(video, inputs)
        return TailOutputs(*_next_latents(inputs, video, audio, inputs.sigma_pair))


class Guide(nn.Module):
    """Combine the predictions of a step's passes in x0 space and take the Euler step. Source:
    ltx-core guiders.py.

    A pass that was not run has weight 0 and is fed any finite tensor. A stream that the step skips
    repeats `guided_*`.
    """

    def forward(self, inputs: GuideInputs) -> GuideOutputs:
        chosen = _chosen(inputs)[:, None]
        sigma_pair, enabled = (
            (chosen * inputs.sigmas).sum(0),
            (chosen * inputs.enabled_steps).sum(0),
        )
        guided = []
        for index, stream in enumerate(("video", "audio")):
            cond, uncond, perturbed, isolated = (
                getattr(inputs, f"{name}_{stream}").float() for name in PASSES
            )
            cfg, stg, modality, rescale = inputs.guidance[index].unbind(0)
            # Every term leans on the conditional prediction; chained, they would be another
            # guidance.
            x0 = (
                cond
                + cfg * (cond - uncond)
                + stg * (cond - perturbed)
                + modality * (cond - isolated)
            )
            x0 = x0 * (rescale * (_std(cond) / _std(x0).clamp_min(_SMALLEST_STD)) + (1 - rescale))
            last, on = getattr(inputs, f"guided_{stream}"), enabled[index]
            guided.append((x0 * on + last.float() * (1 - on)).to(last.dtype))
        video = _blend(guided[0], inputs)
        return GuideOutputs(*_next_latents(inputs, video, guided[1], sigma_pair), *guided)


_SMALLEST_STD = 1e-12


def _std(x: Tensor) -> Tensor:
    """Unbiased standard deviation over the whole tensor, keyframe tokens included, fp32."""
    return ((x - x.mean()).square().sum() / (x.numel() - 1)).sqrt()


def _blend(x0: Tensor, inputs: TailInputs | GuideInputs) -> Tensor:
    """Put back what images hold (ltx-pipelines post_process_latent)."""
    mask = inputs.denoise_mask
    return (x0 * mask + inputs.clean_latent.float() * (1 - mask)).to(x0.dtype)


def _next_latents(
    inputs: TailInputs | GuideInputs, video: Tensor, audio: Tensor, sigma_pair: Tensor
) -> tuple[Tensor, Tensor]:
    sigmas = sigma_pair.unbind(0)
    return _euler(inputs.video_latent, video, *sigmas), _euler(inputs.audio_latent, audio, *sigmas)


def _denoised(x: Tensor, velocity: Tensor, timestep: Tensor) -> Tensor:
    """x0 = x - velocity * timestep (ltx-core to_denoised)."""
    return (x.float() - velocity.float() * timestep).to(x.dtype)


def _euler(x: Tensor, denoised: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step (ltx-core EulerDiffusionStep)."""
    velocity = ((x.float() - denoised.float()) / sigma).to(x.dtype)
    return (x.float() + velocity.float() * (sigma_next - sigma)).to(x.dtype)


class Step(nn.Module):
    """The whole step, or the whole guided pass, as one graph: head, all blocks, tail."""

    def __init__(
        self, head: nn.Module, blocks: nn.Module, tail: nn.Module, kinds: tuple[type, type, type]
    ):
        super().__init__()
        self.head, self.blocks, self.tail, self.kinds = head, blocks, tail, kinds

    def forward(self, inputs: StepInputs | GuidedStepInputs) -> TailOutputs | X0Outputs:
        values = inputs._asdict()
        for module, kind in zip((self.head, self.blocks, self.tail), self.kinds, strict=True):
            outputs = module(kind(*(values[name] for name in kind._fields)))
            values |= outputs._asdict()
        return outputs
