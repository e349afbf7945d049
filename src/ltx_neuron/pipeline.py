"""From jobs to videos: encode every prompt, then denoise, then decode, with one model on the ranks at a time.

Gemma3 leaves before the DiT enters; both stages, and all jobs, share one copy of the DiT's weights.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from ltx_neuron import conditioning, latents, media, text
from ltx_neuron.backends.export import Manifest
from ltx_neuron.backends.torchdist import Ranks
from ltx_neuron.checkpoint import HOST_FILE
from ltx_neuron.compat import COMPAT, Compat
from ltx_neuron.config import Bucket
from ltx_neuron.decode import HostModels
from ltx_neuron.graphs import PASSES
from ltx_neuron.job import Job, Stage
from ltx_neuron.modulation import modulation_table
from ltx_neuron.report import Recorder
from ltx_neuron.rope import Rope, split_rope
from ltx_neuron.sampling import sigma_pairs
from ltx_neuron.workspace import Workspace, require

UPSCALED = {"spatial": "upsampled", "temporal": "temporal_video"}  # upsampler -> name of the latents it returns
UPSAMPLERS = {
    "spatial": "hf download Lightricks/LTX-2.3 ltx-2.3-spatial-upscaler-x2-1.0.safetensors --local-dir .",
    "temporal": "hf download Lightricks/LTX-2.3 ltx-2.3-temporal-upscaler-x2-1.0.safetensors --local-dir .",
}


@dataclass
class Result:
    """One job's video. `tensors` holds every named intermediate (interface: --save-tensors)."""

    job: Job
    frames: Tensor  # uint8 (N, H, W, 3)
    frame_rate: float
    waveform: Tensor  # float32 (2, samples)
    sample_rate: int
    tensors: dict[str, Tensor]


class Pipeline:
    """Runs jobs on one workspace. Everything that can be wrong is checked in `check`, before anything loads."""

    def __init__(
        self, workspace: Workspace, recorder: Recorder, neuron_gemma: bool = False, compat: Compat = COMPAT[None],
        spatial_upsampler_path: Path | None = None, temporal_upsampler_path: Path | None = None, warmup: bool = False,
    ):  # fmt: skip
        self.workspace, self.recorder = workspace, recorder
        self.neuron_gemma, self.compat, self.warmup = neuron_gemma, compat, warmup
        self.host = HostModels(
            workspace.checkpoint_path, workspace.checkpoint.config, workspace.dtype, spatial_upsampler_path,
            temporal_upsampler_path, audio_dtype=workspace.dtype if compat.vocoder else torch.float32,
        )  # fmt: skip

    def check(self, jobs: list[Job]) -> dict[str, "Program"]:
        """Validate jobs and find every artifact they need; returns the DiT programs by bucket name."""
        programs = {}
        for job in jobs:
            job.check()
            if job.recipe == "dev":
                job.resolved_guidance.check(self.workspace.transformer.num_layers)
            for kind, why in job.upsamplers.items():
                require(self.host.upsampler_paths[kind], f"--{kind}-upsampler-path", why, f"Download it: {UPSAMPLERS[kind]}")
                self.host.upsampler_config(kind)
            for image in job.images:
                media.check_image(image.path)
            for stage in job.stages:
                bucket, manifest = self.workspace.dit_program_for(job.size, stage, job.images, job.recipe)
                programs[bucket.name] = Program(bucket, manifest)
                self.workspace.dit_weights(refining(job, stage))
        if self.neuron_gemma:
            self.workspace.gemma3_weights(), self.workspace.text_programs(self.workspace.profile.text_buckets)
        else:
            _ = self.workspace.gemma, self.workspace.gemma_source
        return programs

    @torch.no_grad()
    def run(self, jobs: list[Job]) -> Iterator[Result]:
        """Generate every job, in order."""
        programs = self.check(jobs)
        workspace, phase = self.workspace, self.recorder.phase
        torch.set_num_threads(workspace.profile.host_threads)
        tokenizer = text.tokenizer(workspace.gemma_root)
        prompts = [[text.tokenize(tokenizer, prompt) for prompt in job.prompts] for job in jobs]
        ranks = None
        try:
            with phase("load_gemma3"):
                if self.neuron_gemma:
                    ranks = Ranks(workspace.profile, workspace.tp)
                encoder = self._text_encoder(ranks, prompts)
            with phase("encode_text"):
                runs = [JobRun(job, encoder.encode(ids)) for job, ids in zip(jobs, prompts, strict=True)]
            with phase("unload_gemma3"):
                del encoder
                if ranks:
                    ranks.unload()
            with phase("load_transformer"):
                ranks = ranks or Ranks(workspace.profile, workspace.tp)
                manifests = {name: program.manifest for name, program in programs.items()}
                ranks.load(workspace.dit_weights(), manifests, workspace.dtype)
            self._denoise(ranks, programs, runs)
            with phase("unload_transformer"):
                ranks.close()
        finally:
            if ranks:
                ranks.close()
        for run in runs:
            yield self._decode(run)

    def _text_encoder(self, ranks: Ranks | None, prompts: list[list[list[int]]]):
        workspace = self.workspace
        if ranks is None:
            return text.HostTextEncoder(workspace.gemma_source, workspace.gemma, workspace.transformer, workspace.dtype)
        groups = [group for job in prompts for group in text.passes(job)]
        buckets = tuple({text.bucket_for(group, workspace.profile.text_buckets) for group in groups})
        weights = workspace.gemma3_weights()
        ranks.load(weights, workspace.text_programs(buckets), workspace.dtype)
        return text.RankTextEncoder(ranks, weights, workspace.gemma, workspace.transformer, buckets, workspace.dtype)

    def _denoise(self, ranks: Ranks, programs: dict, runs: list["JobRun"]) -> None:
        """Every stage of every job. Stages that refine with other weights come last: one swap serves all jobs."""
        for refine in (False, True):
            todo = [(run, stage) for run in runs for stage in run.job.stages if refining(run.job, stage) == refine]
            if not todo:
                continue
            weights = self.workspace.dit_weights(refine)
            if refine:
                with self.recorder.phase("load_transformer"):
                    ranks.replace_weights(weights)
            adaln = load_file(weights / HOST_FILE)
            for run, stage in todo:
                self._stage(ranks, programs, adaln, run, stage)

    def _stage(self, ranks: Ranks, programs: dict, adaln: dict, run: "JobRun", stage: Stage) -> None:
        job, tensors, phase = run.job, run.tensors, f"denoise_{stage.name}"
        if stage.name == "stage_2":
            with self.recorder.phase("upsample"):
                tensors["upsampled"] = self.host.upsample(tensors["s1_video"], "spatial")
            video, audio = tensors["upsampled"], tensors["s1_audio"]
        else:
            video, audio = self._empty(job, stage)
        program = programs[self.workspace.dit_program_for(job.size, stage, job.images, job.recipe)[0].name]
        on_ranks = StageRun(ranks, program.bucket, self.workspace, adaln, self.compat)
        with self.recorder.phase(phase):
            on_ranks.prepare(job, stage, run.contexts, video, audio, run.generator, self._encode_images(job, stage))
        if self.warmup:
            with self.recorder.phase("warmup"):
                on_ranks.start()
                on_ranks.step(0)
        with self.recorder.phase(phase):
            on_ranks.start()
            self._steps(on_ranks, stage)
            prefix = stage.name.replace("stage_", "s")
            tensors[f"{prefix}_video"], tensors[f"{prefix}_audio"] = on_ranks.result(tuple(video.shape[2:]))
        self._count(program, job)

    def _empty(self, job: Job, stage: Stage) -> tuple[Tensor, Tensor]:
        """Latents of zeros, which the noise of a first stage replaces."""
        shape = latents.video_latent_shape(stage.height, stage.width, job.size.num_frames)
        frames = latents.audio_latent_frames(job.size.num_frames, job.size.frame_rate)
        dtype = self.workspace.dtype
        return (torch.zeros(1, latents.VIDEO_CHANNELS, *shape, dtype=dtype),
                torch.zeros(1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS, dtype=dtype))  # fmt: skip

    def _decode(self, run: "JobRun") -> Result:
        job, tensors = run.job, run.tensors
        last = "s2" if job.size.two_stage else "s1"
        video = tensors[f"{last}_video"]
        if job.upscale:
            with self.recorder.phase("upsample"):
                for kind, name in UPSCALED.items():
                    if job.upscale in (kind, "both"):
                        video = tensors[name] = self.host.upsample(video, kind)
        with self.recorder.phase("decode_video"):
            tensors["frames"] = self.host.decode_video(video)
        with self.recorder.phase("decode_audio"):
            tensors["waveform"] = self.host.decode_audio(tensors[f"{last}_audio"])
        return Result(job, tensors["frames"], job.output_frame_rate, tensors["waveform"], self.host.sample_rate, tensors)

    def _steps(self, run: "StageRun", stage: Stage) -> None:
        for step in tqdm(range(len(stage.sigmas) - 1), desc=stage.name, unit="step"):
            sent, began = run.ranks.bytes_sent, time.perf_counter()
            device_ms = run.step(step)
            total_ms = (time.perf_counter() - began) * 1e3
            self.recorder.step(stage.name, total_ms, min(device_ms, total_ms))
            self.recorder.counters.bytes_to_device_per_step = run.ranks.bytes_sent - sent

    def _count(self, program: "Program", job: Job) -> None:
        """Record what the step's graphs hold: the collectives and FLOPs that were counted in the files."""
        passes = len(job.resolved_guidance.passes()) if program.bucket.guided else 1
        one = program.manifest.cost("pass" if program.bucket.guided else "main")
        cost, tp = {name: value * passes for name, value in one.items()}, self.workspace.tp
        counters = self.recorder.counters
        counters.collectives_per_step = {"count": cost["collectives"], "bytes": cost["collective_bytes"]}
        counters.flops_per_step = cost["flops"] * tp
        peak = self.workspace.profile.peak_flops
        counters.peak_flops = peak and peak * tp

    def _encode_images(self, job: Job, stage: Stage) -> list[tuple[conditioning.ImageCondition, Tensor]]:
        """The job's images as latents of a stage's size."""
        found = []
        for image in job.images:
            pixels = media.load_image(image.path, stage.height, stage.width, image.crf, self.workspace.dtype)
            found.append((image, self.host.encode_image(pixels)))
        return found


class JobRun:
    """A job on its way: its contexts (prompt first), its noise generator, and its named tensors so far."""

    def __init__(self, job: Job, contexts: list[text.Contexts]):
        self.job, self.contexts = job, contexts
        self.generator = torch.Generator().manual_seed(job.seed)  # one for all stages, drawn in the reference's order
        prompt = contexts[0]
        self.tensors = {
            "attention_mask": prompt.attention_mask, "video_context": prompt.video, "audio_context": prompt.audio,
        }  # fmt: skip
        if prompt.hidden_states is not None:
            self.tensors["hidden_states"] = prompt.hidden_states


def refining(job: Job, stage: Stage) -> bool:
    """Whether a stage runs on the weights with the distilled LoRA: stage 2 of the dev recipe."""
    return job.recipe == "dev" and stage.name == "stage_2"


@dataclass(frozen=True)
class Program:
    """A compiled DiT step and the bucket it was compiled for."""

    bucket: Bucket
    manifest: Manifest


class StageRun:
    """One stage on the ranks: uploads what stays the same, then sends a step number per step."""

    def __init__(self, ranks: Ranks, bucket: Bucket, workspace: Workspace, adaln: dict, compat: Compat):
        self.ranks, self.bucket, self.config, self.dtype = ranks, bucket, workspace.transformer, workspace.dtype
        self.adaln, self.compat = adaln, compat

    def prepare(self, job: Job, stage: Stage, contexts: list, video: Tensor, audio: Tensor, generator, images) -> None:
        """Noise initial latents (1, 128, F, h, w) and (1, 8, Ta, 16) and upload all that the steps share."""
        self.sequence = ["main"] * self.bucket.max_steps
        first = self.compat.conditioning
        positions_dtype = self.dtype if self.compat.positions else torch.float32
        state = conditioning.video_state(video, job.size.frame_rate, images, first, positions_dtype)
        scale = stage.sigmas[0]
        self.video = conditioning.noised(state.latent, generator, scale, state.clean, state.denoise_mask, first)
        self.audio = conditioning.noised(latents.patchify_audio(audio), generator, scale, compat_1_0_0=first)
        masks = conditioning.distinct_masks(job.images)
        rows, choice = conditioning.timestep_choice(state.denoise_mask, masks, self.bucket.timesteps, self.dtype)
        self.ranks.put(
            self.bucket.name,
            **self._schedule(stage, rows), **self._ropes(state.positions, audio.shape[2]),
            timestep_mask=choice, denoise_mask=state.denoise_mask, clean_latent=state.clean,
            video_context=contexts[0].video, audio_context=contexts[0].audio,
        )  # fmt: skip
        if self.bucket.guided:
            self._guide(job, stage, contexts)

    def _guide(self, job: Job, stage: Stage, contexts: list[text.Contexts]) -> None:
        """Upload what guidance needs and name the step's passes; a pass that is not run is read from "cond"."""
        guidance, name, steps = job.resolved_guidance, self.bucket.name, len(stage.sigmas) - 1
        enabled, always = guidance.enabled_steps(steps, self.bucket.max_steps), torch.ones(self.bucket.max_steps, 2)
        self.ranks.put(name, guidance=guidance.weights(), enabled_steps=enabled)
        runs, unread = [], {}
        for kind in PASSES:
            if kind not in guidance.passes():
                unread |= {f"{kind}_{stream}": f"cond_{stream}" for stream in ("video", "audio")}
                continue
            reads = {"keep": f"keep_{kind}"}
            self.ranks.put(name, "keep", **{f"keep_{kind}": guidance.keep(kind, self.config.num_layers, self.dtype)})
            if kind == "uncond":
                for stream, context in (("video", contexts[1].video), ("audio", contexts[1].audio)):
                    reads[f"{stream}_context"] = f"negative_{stream}_context"
                    self.ranks.put(name, f"{stream}_context", **{f"negative_{stream}_context": context})
                if self.compat.conditioning:  # the first release computes a skipped stream in this pass all the same
                    reads["enabled_steps"] = "enabled_always"
                    self.ranks.put(name, "enabled_steps", enabled_always=always)
            runs.append(("pass", reads, {f"{stream}_x0": f"{kind}_{stream}" for stream in ("video", "audio")}))
        self.ranks.put(name, guided_video=torch.zeros_like(self.video), guided_audio=torch.zeros_like(self.audio))
        self.ranks.define(name, "guided", [*runs, ("guide", unread, {})])
        self.ranks.define(name, "repeat", [("guide", unread, {})])
        computed = [any(stream.computes(step) for stream in guidance.streams) for step in range(steps)]
        self.sequence = ["guided" if any_stream else "repeat" for any_stream in computed]

    def _schedule(self, stage: Stage, rows: Tensor) -> dict[str, Tensor]:
        pairs = sigma_pairs(stage.sigmas, self.bucket.max_steps)
        tables = {
            f"{stream}_modulation": modulation_table(
                self.adaln, self.config, stream, pairs[:, 0], masks, self.compat.cross_sigma
            )
            for stream, masks in (("video", rows), ("audio", torch.ones(1)))
        }
        return {"sigmas": pairs, "step_numbers": torch.arange(self.bucket.max_steps, dtype=torch.int32), **tables}

    def _ropes(self, video_positions: Tensor, audio_tokens: int) -> dict[str, Tensor]:
        config, audio_positions = self.config, latents.audio_positions(audio_tokens)
        video_max, audio_max = config.positional_embedding_max_pos, config.audio_positional_embedding_max_pos
        cross_max = (max(video_max[0], audio_max[0]),)
        heads, theta = config.video.heads, config.positional_embedding_theta
        tables = {
            "video": split_rope(video_positions, video_max, config.video.inner, heads, theta),
            "audio": split_rope(audio_positions, audio_max, config.audio.inner, heads, theta),
            "video_cross": split_rope(video_positions[:, :1], cross_max, config.audio.inner, heads, theta),
            "audio_cross": split_rope(audio_positions, cross_max, config.audio.inner, heads, theta),
        }
        return {f"{name}_{part}": getattr(rope, part) for name, rope in tables.items() for part in Rope._fields}

    def start(self) -> None:
        """Put the noised latents where the steps find them."""
        self.ranks.put(self.bucket.name, video_latent=self.video, audio_latent=self.audio)

    def step(self, number: int) -> float:
        """One step, latents to next latents on the ranks; returns the device's milliseconds."""
        return self.ranks.run(self.bucket.name, self.sequence[number], step=number)

    def result(self, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """The latents (1, 128, F, h, w) and (1, 8, Ta, 16), which every rank must hold bit for bit alike."""
        names = ("video_latent", "audio_latent")
        hashes = self.ranks.hashes(*names)
        if len(set(hashes)) != 1:
            raise RuntimeError(f"the ranks ended with different latents: {hashes}")
        video, audio = (self.ranks.get(self.bucket.name, name) for name in names)
        if not (video.isfinite().all() and audio.isfinite().all()):
            raise RuntimeError("the latents hold NaN or Inf")
        return latents.unpatchify_video(video, shape), latents.unpatchify_audio(audio)
