"""One stage on the ranks: its initial latents, upload of shared inputs, steps, download of the
result.

A step runs on the device, from latents to the next latents. With res_2s and gradient estimation the
state is on the host, and the device runs one evaluation at a time. `prepare` uploads the inputs
that all steps share: contexts, RoPE tables, one modulation table per schedule, clean latents of
images, step numbers.

Shapes: Tv video tokens (appended ones included), Ta audio tokens, U distinct timesteps of a step,
`steps` rows of the compiled graph's schedule tables (at least as many as there are steps).

For one stream alone the other has no tokens, draws no noise and is not uploaded: Tv or Ta = 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import NotFiniteError, Ranks, indexed, pad_tokens, padding_bias
from ltx_neuron.config.profiles import Profile
from ltx_neuron.config.transformer import STREAMS, Bucket, TransformerConfig
from ltx_neuron.denoise.guided_passes import prepare_passes
from ltx_neuron.errors import RunError
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.rope import rope_tables
from ltx_neuron.models.signatures import ANCESTRAL_FIELDS, LATENTS
from ltx_neuron.report.latency import Counters
from ltx_neuron.sampling import chunks, latents, shapes
from ltx_neuron.sampling.compat import COMPAT, Compat
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.dfr import CLIPS
from ltx_neuron.sampling.extension import start_of
from ltx_neuron.sampling.latent_state import LatentState, initial_states
from ltx_neuron.sampling.samplers import SAMPLERS, Euler, Res2s, Stream, ancestral_steps
from ltx_neuron.sampling.schedules import stream_sigmas
from ltx_neuron.text.encoders import Contexts


def to_upsample(
    job: Job, stage: Stage, tensors: dict[str, Tensor]
) -> dict[str, tuple[Tensor, str]]:
    """The latents that a stage needs from the upsamplers: by their --save-tensors names, the input
    (1, 128, F, h, w) and "spatial" or "temporal". tensors: of the job so far."""
    if window := stage.temporal:
        name, clip = CLIPS[window.round - 1], job.rendering.clip
        return {} if name in tensors else {name: (clip(tensors, window.round - 1), "temporal")}
    sources = {"upsampled": "s1_video"} if stage.upsampled else {}
    if sources and job.of(stage).generated_keyframes(upsampled=True):  # as one clip of K latents
        sources["upsampled_keyframes"] = "s1_generated_keyframes"
    return {name: (tensors[source], "spatial") for name, source in sources.items()}


def starting_states(
    job: Job,
    stage: Stage,
    tensors: dict[str, Tensor],
    images: list[tuple[ImageCondition, Tensor]],
    dtype: torch.dtype,
) -> tuple[LatentState, LatentState]:
    """Choose the latents from which a stage starts, and make the states of its video and audio.

    tensors  of the job so far, with what to_upsample names
    images   each with its latent (1, 128, 1, h, w) at this stage's size
    """
    stage_job, tensors = job.of(stage), dict(tensors)
    if stage_job.chunk:
        tensors |= chunks.sounds_of(stage_job.chunk, stage_job.size.frame_rate, tensors)
    if stage.temporal:
        tensors |= job.rendering.start(stage.temporal, tensors)
        video, audio = tensors["video"], tensors["audio"]
    elif stage.window:
        assert job.extension
        video, audio = start_of(job.extension, stage.window, tensors)
    elif stage.upsampled:
        video, audio = tensors["upsampled"], tensors["s1_audio"]
    else:
        shape = stage.height, stage.width, stage_job.size.num_frames, stage_job.size.frame_rate
        video, audio = latents.zeros(*shape, dtype)
        video, audio = tensors.get("video_latent", video), tensors.get("audio_latent", audio)
    held = heard = video[:, :, :0]  # what a window begins with
    if stage_job.chunk and stage_job.chunk.taken:
        held, heard = (tensors[f"{chunks.CARRIED}{stage.key}_{kind}"] for kind in STREAMS)
        video = torch.cat([held, video[:, :, held.shape[2] :]], dim=2)
        if not stage_job.freezes_sound(stage.upsampled):
            audio = torch.cat([heard, audio[:, :, heard.shape[2] :]], dim=2)
    inputs = tensors, (video, audio), images, COMPAT[job.compat], dtype
    states = initial_states(stage_job, stage.upsampled, *inputs, stage.window)
    return states[0].with_prefix(held[0, 0].numel()), states[1].with_prefix(heard.shape[2])


@dataclass(frozen=True)
class CompiledStep:
    """A compiled DiT step and its bucket. tiles: of a tiled stage, the step of each tile."""

    bucket: Bucket
    manifest: Manifest
    tiles: tuple["CompiledStep", ...] = ()

    @property
    def programs(self) -> list["CompiledStep"]:
        """The steps that run, one for each tile."""
        return list(self.tiles) or [self]

    def count(self, job: Job, stage: Stage, profile: Profile, tp: int, counters: Counters) -> None:
        """Record the costs of a stage's step, counted when its graphs were compiled."""
        guided, groups = self.bucket.guided, profile.guidance_parallel
        passes = len(job.passes) if guided else 1
        passes *= len(stage.evaluations) // stage.steps
        rounds = math.ceil(passes / groups) if guided else passes
        costs = [step.manifest.cost("pass" if guided else "main") for step in self.programs]
        group_costs = costs[::groups]  # of a rank of the first group, which has the most tiles
        counters.collectives_per_step = {
            "count": sum(cost["collectives"] for cost in group_costs) * rounds,
            "bytes": sum(cost["collective_bytes"] for cost in group_costs) * rounds,
        }
        flops = sum(cost["flops"] for cost in costs)
        counters.flops_per_step = flops * passes * profile.world_size(tp)
        counters.peak_flops = profile.flops(profile.cores_needed(tp))


class StageRun:
    """One stage on the ranks: `prepare`, `start`, a `step` for each number, `result`.

    modulation  returns a stream's modulation table of the weight set
    sampler     the stage's on the host; None: the graphs step
    step_inputs  names of inputs that have a tensor for each step
    """

    sampler: Res2s | Euler | None = None
    step_inputs: tuple[str, ...] = ("step",)

    def __init__(
        self,
        ranks: Ranks,
        compiled: CompiledStep,
        config: TransformerConfig,
        dtype: torch.dtype,
        modulation: Callable[..., Tensor],
        compat: Compat,
    ):
        self.ranks, self.compiled, self.bucket = ranks, compiled, compiled.bucket
        self.config, self.dtype, self.compat = config, dtype, compat
        self.modulation = modulation

    def prepare(
        self,
        job: Job,
        stage: Stage,
        contexts: list[Contexts],
        states: tuple[LatentState, LatentState],
        generator: torch.Generator,
    ) -> None:
        """Add noise to the streams and upload the inputs that all steps share.

        job     as its stage sees it: Job.of
        states  initial ones, of video and audio: starting_states
        """
        self.stage, self.states = stage, states
        video_state, audio_state = states
        frames = job.size.num_frames
        self.latent_shape = shapes.video_latent_shape(stage.height, stage.width, frames)
        appended = job.appended_audio(stage.upsampled)
        self.audio_frames = audio_state.latent.shape[1] - appended
        if job.sound:  # an input sound attends to the prompt in the negative pass as well
            contexts = [context._replace(audio=contexts[0].audio) for context in contexts]
        self._generated = job.generated_keyframes(stage.upsampled)
        # The sequence of each step; guidance replaces them.
        self.sequence = ["main"] * self.bucket.max_steps
        marked, count = video_state.keyframes_mask, math.prod(self.latent_shape)
        self._marked = None if marked is None else marked[count:, 0] > 0
        # The noise of video is drawn first.
        noise = generator, stage.sigmas[0], self.compat.conditioning
        self.video, self.audio = (state.noised(*noise) for state in states)
        rows, choice = video_state.timestep_choice(self.bucket.timesteps, self.dtype)
        audio_rows, audio_choice = audio_state.timestep_choice(
            self.bucket.audio_timesteps, self.dtype
        )
        fields = self.compiled.manifest.fields
        inputs = {
            **self._schedule(stage, (rows, audio_rows)),
            "video_context": contexts[0].video,  # (1, 1024, Dv)
            "audio_context": contexts[0].audio,  # (1, 1024, Da)
            "negative_video_context": contexts[-1].video,  # with NAG
            "negative_audio_context": contexts[-1].audio,
            "nag": job.nag,
            "audio_timestep_mask": audio_choice,
            "audio_denoise_mask": audio_state.denoise_mask,
            "audio_clean_latent": audio_state.clean_latent,
        }
        if field := fields.get("rank_one_hot"):
            inputs["rank_one_hot"] = torch.eye(field.shape[1])
        self.ranks.put(self.bucket.name, None, **{n: inputs[n] for n in inputs if n in fields})
        self._put_tokens(job, video_state, choice)
        self.ranks.put_numbers(self.bucket.name, "step", len(stage.evaluations))
        if self.bucket.ancestral:
            self._put_noise(generator)
        if self.bucket.guided:
            # Repeated by skipped steps; the first step overwrites it.
            self._put_streams(
                "guided_{}", torch.zeros_like(self.video), torch.zeros_like(self.audio)
            )
            evaluations = job.resolved_guidance, stage.evaluations, contexts
            model = self.config.num_layers, self.dtype, self.compat.skipped_uncond
            self.sequence = prepare_passes(
                self.ranks, self.bucket, *evaluations, *model, job.identity_scale, audio_state
            )

    def _put_tokens(self, job: Job, video: LatentState, choice: Tensor) -> None:
        """Upload the inputs of the video's tokens. choice: (Tv, U), their timesteps."""
        inputs = self._of_tokens(self.compiled, video, choice)
        self.ranks.put(self.bucket.name, None, **inputs)

    def _of_tokens(
        self, compiled: CompiledStep, video: LatentState, choice: Tensor
    ) -> dict[str, Tensor]:
        """The inputs of the tokens that a program sees."""
        fields, ranks = compiled.manifest.fields, (self.ranks.tp, self.ranks.cp)
        inputs: dict[str, Any] = {
            **rope_tables(self.config, video.positions, self.states[1].positions),
            "timestep_mask": choice,  # one-hot
            "denoise_mask": video.denoise_mask,  # (Tv, 1)
            "clean_latent": video.clean_latent,  # (1, Tv, 128)
            "video_bias": video.bias,  # of references with a mask
            "keyframes_mask": video.keyframes_mask,  # (Tv, 1)
        }
        if field := fields.get("padding_bias"):
            inputs["padding_bias"] = padding_bias(field, compiled.bucket.video_tokens, *ranks)
        return {n: pad_tokens(fields[n], x, *ranks) for n, x in inputs.items() if n in fields}

    def _put_noise(self, generator: torch.Generator) -> None:
        """Upload the noise and the coefficients of every step of the ancestral sampler."""
        names = [n for n in ANCESTRAL_FIELDS if n in self.compiled.manifest.fields]
        self.step_inputs = ("step", *names)
        streams, frozen = zip(*((state.latent, state.frozen) for state in self.states), strict=True)
        inputs, (seed, eta) = (self.stage.sigmas, streams, frozen), self.stage.noise
        steps = ancestral_steps(*inputs, generator.initial_seed() + seed, eta)
        for number, tensors in enumerate(steps):
            for name, tensor in zip(ANCESTRAL_FIELDS, tensors, strict=True):
                if name in names:
                    self.ranks.put(self.bucket.name, name, **{indexed(name, number): tensor})

    def _put_streams(self, name: str, *tensors: Tensor) -> None:
        """Upload a tensor of each stream that the graphs have. name: with {} for the stream."""
        named = {s: x for s, x in zip(STREAMS, tensors, strict=True) if s in self.bucket.streams}
        self.ranks.put(self.bucket.name, None, **{name.format(s): x for s, x in named.items()})

    def _schedule(self, stage: Stage, masks: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The sigmas (steps, 2, 2) and the modulation tables, (steps, U, 17, D) of each stream."""
        max_steps, states = self.bucket.max_steps, self.states
        frozen = tuple(state.frozen and not state.frozen_noise for state in states)
        pairs = stream_sigmas(self._pairs(stage.sigmas, max_steps), frozen)
        # A frozen stream has sigma 0, in its own layers and in those of the other stream.
        sigmas = [pairs[:, i, 0] * (not state.frozen) for i, state in enumerate(states)]
        tables = {"sigmas": pairs, "step_numbers": torch.arange(max_steps, dtype=torch.int32)}
        for i, stream in enumerate(STREAMS):
            rows = sigmas[i], masks[i], self.compat.cross_sigma, sigmas[1 - i]
            tables[f"{stream}_modulation"] = self.modulation(stream, *rows)
        return tables

    def _pairs(self, sigmas: tuple[float, ...], max_steps: int) -> Tensor:
        """(max_steps, 2): the sigmas of each evaluation."""
        return SAMPLERS[self.stage.sampler].pairs(sigmas, max_steps)

    def start(self) -> None:
        """Upload the noised latents."""
        self._upload(self.video, self.audio)
        if sampler := self._host_sampler():
            noised = zip((self.video, self.audio), self.states, strict=True)
            streams = [Stream(x, held.clean_latent, held.denoise_mask) for x, held in noised]
            self.sampler = sampler(self.stage.sigmas, *streams)

    def _host_sampler(self) -> type[Euler | Res2s] | None:
        return SAMPLERS[self.stage.sampler].host

    def _upload(self, video: Tensor, audio: Tensor) -> None:
        self._put_streams("{}_latent", video, audio)

    def step(self, number: int) -> float:
        """Run one step, from latents to the next latents. Returns the device's milliseconds."""
        take = self._host_step if self.sampler else self._run
        try:
            return take(number)
        except NotFiniteError as error:
            sigma, sigma_next = self.stage.sigmas[number : number + 2]
            dtype = str(self.dtype).removeprefix("torch.")
            raise RunError(
                f"{error} after step {number + 1} of {self.stage.steps} of {self.stage.title}"
                f" (sigma {sigma:.4g} to {sigma_next:.4g}): the weights or the inputs are broken,"
                f" or {dtype} is too narrow for them"
            ) from None

    def _run(self, number: int) -> float:
        numbers = dict.fromkeys(self.step_inputs, number)
        return self.ranks.run(self.bucket.name, self.sequence[number], **numbers)

    def _host_step(self, number: int) -> float:
        """A step of the host's sampler: each evaluation uploads the host's latents and reads a
        prediction."""
        assert self.sampler
        self._times: list[float] = []  # of the evaluations
        self.sampler.step(number, self._predict)
        return sum(self._times)

    def _predict(self, video: Tensor, audio: Tensor, evaluation: int) -> tuple[Tensor, Tensor]:
        """The predictions of both streams, with held tokens restored."""
        assert self.sampler
        self._upload(video, audio)
        self._times.append(self._run(evaluation))
        if not self.bucket.guided:
            # The graph's Euler step to sigma 0 returns the prediction, with held tokens restored.
            # A second restoration would be wrong for partly held tokens.
            video, audio = self._read(*LATENTS)
            return video, audio
        predictions = self._read(*(f"guided_{stream}" for stream in STREAMS))
        held = zip(self.sampler.streams, predictions, strict=True)
        video, audio = (stream.held(prediction) for stream, prediction in held)
        return video, audio

    def _read(self, *names: str) -> tuple[Tensor, ...]:
        return tuple(self.ranks.get(self.bucket.name, name) for name in names)

    def video_latent(self) -> Tensor:
        """The video's latents between two Euler steps, (1, 128, F, h, w), downloaded."""
        (video,) = self._read(LATENTS[0])
        return latents.unpatchify_video(video, self.latent_shape)

    def predicted_video(self) -> Tensor | None:
        """The last prediction of the host's sampler, (1, 128, F, h, w), as the latents of res_2s
        contain new noise; None for Euler."""
        if not self.sampler:
            return None
        return latents.unpatchify_video(self.sampler.streams[0].denoised, self.latent_shape)

    def result(self) -> tuple[Tensor, Tensor]:
        """The latents (1, 128, F, h, w) and (1, 8, Ta, 16).

        Raises RunError unless every rank holds the same bits.
        """
        names = [f"{stream}_latent" for stream in self.bucket.streams]
        digests = self.ranks.hashes(*names)
        if len(set(digests)) != 1:
            raise RunError(f"the ranks ended with different latents: {digests}")
        if self.sampler:
            video, audio = (stream.latent for stream in self.sampler.streams)
        else:
            read = dict(zip(names, self._read(*names), strict=True))
            # An absent stream has no tokens.
            video, audio = map(read.get, LATENTS, (self.video, self.audio))
        self._tokens = video
        audio = audio[:, : self.audio_frames]  # without a reference's tokens
        return latents.unpatchify_video(video, self.latent_shape), latents.unpatchify_audio(audio)

    def generated_keyframes(self) -> Tensor | None:
        """The latents of the generated keyframes, (1, 128, K, h, w), or None. Call it after
        `result`. Their tokens are the marked ones among those appended."""
        if not (count := len(self._generated)):
            return None
        tokens = self._tokens[:, math.prod(self.latent_shape) :][:, self._marked]
        return latents.unpatchify_video(tokens, (count, *self.latent_shape[1:]))
