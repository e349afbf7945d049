"""From jobs to videos, one model on the ranks at a time.

Gemma3 leaves before the DiT enters. Both stages, and all jobs, share one copy of the DiT's weights;
an engine keeps what is loaded until it is closed, so that the next call finds it there.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ltx_neuron.backends import registry
from ltx_neuron.backends.torchdist import Ranks
from ltx_neuron.config import upsampler_download
from ltx_neuron.decode_queue import Failure, Finishing, Result, outcome_of
from ltx_neuron.denoise import Program, StageRun
from ltx_neuron.errors import UserError, require
from ltx_neuron.host import media
from ltx_neuron.host.background import BackgroundTask
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Stage, refining
from ltx_neuron.profiles import require_runtime
from ltx_neuron.progress import JobRun
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT, Compat
from ltx_neuron.sampling.conditioning import ImageCondition
from ltx_neuron.text import encoders, inputs
from ltx_neuron.text.cache import PromptCache
from ltx_neuron.weights import lora
from ltx_neuron.weights.rankfiles import open_host_file
from ltx_neuron.workspace import Workspace

_REMEMBERED_PROMPTS = 32  # contexts are 13 MB a prompt


class Engine:
    """Runs jobs on one workspace. Everything that can be wrong is checked in `check`, before
    anything loads.

    A context manager: leaving it ends the rank processes and frees the device.
    """

    def __init__(
        self,
        workspace: Workspace,
        recorder: Recorder,
        neuron_gemma: bool = False,
        compat: Compat = COMPAT[None],
        spatial_upsampler_path: Path | None = None,
        temporal_upsampler_path: Path | None = None,
        warmup: bool = False,
    ):
        self.workspace, self.recorder = workspace, recorder
        self.neuron_gemma, self.compat, self.warmup = neuron_gemma, compat, warmup
        self.host = HostModels(
            workspace.checkpoint_path,
            workspace.checkpoint.config,
            workspace.dtype,
            spatial_upsampler_path,
            temporal_upsampler_path,
            audio_dtype=workspace.dtype if compat.vocoder else torch.float32,
        )
        self.caches_prompts = False
        self.on_step_end: Callable[[Stage, int], None] | None = None
        self.on_stage_end: Callable[[JobRun], None] | None = None
        self.progress = True
        self._ranks: Ranks | None = None
        # DiT weights and programs on the ranks
        self._loaded: tuple[Path, frozenset[str]] | None = None
        self._contexts: dict[tuple[str, ...], list[encoders.Contexts]] = {}

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the rank processes and drop the host's models."""
        if self._ranks:
            self._ranks.close()
        self._ranks = self._loaded = None
        self.host.release()

    def check(self, jobs: list[Job]) -> dict[str, Program]:
        """Validate jobs and find every artifact they need; returns the DiT programs by bucket name.

        First what was typed, then the files it names, then what must be made from them.
        """
        workspace, programs = self.workspace, {}
        if self.neuron_gemma and workspace.profile.text_encoder == "host":
            raise UserError(
                f"profile {workspace.profile.name!r} encodes prompts on the host"
                " (text_encoder=host); leave out --neuron-gemma, or type --profile-set"
                " text_encoder=sharded"
            )
        for job in jobs:
            job.check()
            if job.recipe == "dev":
                job.resolved_guidance.check(workspace.transformer.num_layers)
            for kind, why in job.upsamplers.items():
                download = f"Download it: {upsampler_download(kind)}"
                require(self.host.upsampler_paths[kind], f"--{kind}-upsampler-path", why, download)
        refined = any(refining(job, stage) for job in jobs for stage in job.stages)
        if refined and not workspace.distilled_loras:
            raise UserError(
                "--recipe dev --two-stage needs --distilled-lora: stage 2 refines in 3 steps,"
                f" which only the distilled LoRA makes enough\nDownload it: {lora.DOWNLOAD}"
            )
        if workspace.distilled_loras and not refined:
            raise UserError(
                "--distilled-lora is for stage 2 of --recipe dev --two-stage, and nothing here runs"
                " that; a LoRA for every stage is --lora PATH [STRENGTH]"
            )
        require_runtime(workspace.profile, workspace.tp)
        for job in jobs:
            for image in job.images:
                media.check_image(image.path, job.size.height, job.size.width)
        self.host.check(dict.fromkeys(name for job in jobs for name in _host_models(job)))
        _ = workspace.refining_source, workspace.gemma, workspace.gemma_source, self.tokenizer
        if self.neuron_gemma:
            workspace.gemma.check_tensor_parallel(workspace.tp)
        else:
            self._host_encoder().check()
        for size, recipe in dict.fromkeys((job.size, job.recipe) for job in jobs):
            workspace.check_memory(size, recipe, self.neuron_gemma)
        for job in jobs:
            for stage in job.stages:
                bucket, manifest = workspace.dit_program_for(
                    job.size, stage, job.images, job.recipe
                )
                programs[bucket.name] = Program(bucket, manifest)
                workspace.dit_weights(refining(job, stage))
        if self.neuron_gemma:
            workspace.gemma3_weights(), workspace.text_programs(workspace.profile.text_buckets)
        return programs

    @cached_property
    def prompt_cache(self) -> PromptCache | None:
        return self.workspace.prompt_cache(self.neuron_gemma) if self.caches_prompts else None

    @cached_property
    def tokenizer(self):
        return inputs.load_tokenizer(self.workspace.gemma_root)

    def _host_encoder(self) -> encoders.HostTextEncoder:
        workspace = self.workspace
        return encoders.HostTextEncoder(
            workspace.gemma_source, workspace.gemma, workspace.transformer, workspace.dtype
        )

    @torch.no_grad()
    def run(
        self,
        jobs: list[Job],
        keep: bool = False,
        decode: bool = True,
        isolate: bool = False,
        generator: torch.Generator | None = None,
        begun: Callable[[Job], JobRun | None] = lambda job: None,
        hand_over: Callable[[Result], None] | None = None,
    ) -> Iterator[Result | Failure]:
        """Generate every job. Jobs finish in order, those that need a swap of weights after those
        that do not.

        An error that ends the run, as a failed rank's, does so at once: the job before, where it is
        still being decoded beside, is stopped. Its latents were handed to `on_stage_end`.

        keep       leave the DiT on the ranks afterwards; else it leaves before the last job is
                   decoded
        decode     False: latents only
        isolate    a job that fails is a Failure and the others go on; a failed rank still ends the
                   run
        generator  draw noise from it instead of one made from the job's seed
        begun      a job's interrupted run, to be continued; None for one that begins
        hand_over  called with every Result as soon as it is there: where decoding overlaps
                   denoising, that is while the next job is on the ranks, and in another thread. An
                   error of it is the job's
        """
        programs, found = self.check(jobs), [begun(job) for job in jobs]
        # the first call in a thread sets the default, and would undo the next line later
        torch.get_num_threads()
        torch.set_num_threads(self.workspace.profile.host_threads)
        try:
            self._encode([job for job, run in zip(jobs, found, strict=True) if not run])
            runs = [
                run or JobRun(job, self._contexts[job.prompts], generator)
                for job, run in zip(jobs, found, strict=True)
            ]
            if any(run.left for run in runs):
                self._need_dit(programs)
            overlap = self.workspace.profile.overlap_decode
            with Finishing(
                self.host, self.recorder, overlap, decode, isolate, hand_over, self._look
            ) as finishing:
                for refine in (False, True):
                    yield from self._sweep(programs, runs, refine, keep, finishing)
        except BaseException:
            self.close()
            raise
        if not keep:
            self.close()

    def _sweep(
        self, programs: dict, runs: list[JobRun], refine: bool, keep: bool, finishing: Finishing
    ):
        """Run every stage that takes the plain (or the refining) weights, and finish the jobs that
        are then complete."""
        todo = [
            r
            for r in runs
            if not r.failed and any(refining(r.job, stage) == refine for stage in r.job.stages)
        ]
        if not todo:
            return
        adaln = self._weights_for(refine) if any(run.left for run in todo) else {}
        swaps_later = not refine and any(
            refining(r.job, stage) for r in runs for stage in r.job.stages
        )
        for run in todo:
            try:
                failure = outcome_of(
                    run, finishing.isolate, partial(self._stages, programs, adaln, run, refine)
                )
            except (
                Exception
            ):  # the end of all, and soon: a job that is still being decoded is stopped
                yield from finishing.ended(wait=False)
                raise
            if not failure and refining(run.job, run.job.stages[-1]) != refine:
                continue
            if not failure and run is todo[-1] and not swaps_later and not keep and self._ranks:
                with self.recorder.phase("unload_transformer"):
                    self._ranks.close()
                    self._ranks = self._loaded = None
            yield from finishing.ended()
            if failure:
                yield failure
                continue
            finishing.begin(run)
            if not finishing.overlap:
                yield from finishing.ended()
        yield from finishing.ended()

    def _stages(self, programs: dict, adaln: dict, run: JobRun, refine: bool) -> None:
        """A job's stages on the ranks, as far as they take these weights."""
        for stage in run.left:
            if refining(run.job, stage) == refine:
                self._stage(programs, adaln, run, stage)
                if self.on_stage_end:
                    self.on_stage_end(run)

    def _look(self) -> None:
        """Raise the error of a rank that fails though it has nothing to do, while the host
        works."""
        if self._ranks:
            self._ranks.check()

    def _weights_for(self, refine: bool) -> dict[str, Tensor]:
        """Have the plain (or the refining) weights on the ranks; returns the set's host tensors."""
        weights = self.workspace.dit_weights(refine)
        if self._loaded[0] != weights:
            with self.recorder.phase("load_transformer"), _mended_by_deleting(weights):
                self._ranks.replace_weights(weights)
            self._loaded = weights, self._loaded[1]
        host = open_host_file(weights)
        return {name: host.read(name) for name in host.shapes}

    def _encode(self, jobs: list[Job]) -> None:
        """Encode the prompts that were not encoded yet; the text encoder is gone afterwards."""
        if len(self._contexts) > _REMEMBERED_PROMPTS:
            self._contexts.clear()
        phase, todo = (
            self.recorder.phase,
            [job.prompts for job in jobs if job.prompts not in self._contexts],
        )
        ids = {
            prompts: [inputs.tokenize(self.tokenizer, prompt) for prompt in prompts]
            for prompts in todo
        }
        for prompts in list(ids) if self.prompt_cache else ():
            if found := self.prompt_cache.read(ids[prompts]):
                self._contexts[prompts] = found
                del ids[prompts]
        if not ids:
            return
        with phase("load_gemma3"):
            encoder = self._rank_encoder(ids) if self.neuron_gemma else self._host_encoder()
        with phase("encode_text"):
            for prompts, tokens in ids.items():
                self._contexts[prompts] = encoder.encode(tokens)
                if self.prompt_cache:
                    self.prompt_cache.write(tokens, self._contexts[prompts])
        with phase("unload_gemma3"):
            del encoder
            if self.neuron_gemma and not self.workspace.profile.resident:
                self._ranks.unload()

    def _rank_encoder(self, ids: dict) -> encoders.RankTextEncoder:
        workspace = self.workspace
        self._start_ranks()
        if self._loaded and not workspace.profile.resident:
            self._ranks.unload()
            self._loaded = None
        groups = [group for prompts in ids.values() for group in inputs.pack_prompts(prompts)]
        buckets = tuple(
            {inputs.bucket_for(group, workspace.profile.text_buckets) for group in groups}
        )
        weights = workspace.gemma3_weights()
        with _mended_by_deleting(weights):
            self._ranks.load(weights, workspace.text_programs(buckets), workspace.dtype)
        return encoders.RankTextEncoder(
            self._ranks, weights, workspace.gemma, workspace.transformer, buckets, workspace.dtype
        )

    def _start_ranks(self) -> None:
        workspace = self.workspace
        self._ranks = self._ranks or registry.ranks(
            workspace.profile, workspace.tp, workspace.compiler_cache
        )

    def _need_dit(self, programs: dict[str, Program]) -> None:
        """Have the DiT on the ranks with at least these programs."""
        if self._loaded and programs.keys() <= self._loaded[1]:
            return
        weights = self.workspace.dit_weights()
        with self.recorder.phase("load_transformer"):
            self._start_ranks()
            manifests = {name: program.manifest for name, program in programs.items()}
            with _mended_by_deleting(weights):
                self._ranks.load(weights, manifests, self.workspace.dtype)
        self._loaded = weights, frozenset(programs)

    def _stage(self, programs: dict, adaln: dict, run: JobRun, stage: Stage) -> None:
        job, tensors, phase = run.job, run.tensors, f"denoise_{stage.name}"
        if stage.name == "stage_2":
            with (
                self.recorder.phase("upsample"),
                BackgroundTask(partial(self.host.upsample, tensors["s1_video"], "spatial")) as work,
            ):
                tensors["upsampled"] = work.result(self._look)
            video, audio = tensors["upsampled"], tensors["s1_audio"]
        else:
            video, audio = self._empty(job, stage)
        program = programs[
            self.workspace.dit_program_for(job.size, stage, job.images, job.recipe)[0].name
        ]
        on_ranks = StageRun(self._ranks, program.bucket, self.workspace, adaln, self.compat)
        with self.recorder.phase(phase):
            on_ranks.prepare(
                job,
                stage,
                run.contexts,
                video,
                audio,
                run.generator,
                self._encode_images(job, stage),
            )
        if self.warmup:
            with self.recorder.phase("warmup"):
                on_ranks.start()
                on_ranks.step(0)
        with self.recorder.phase(phase):
            on_ranks.start()
            self._steps(on_ranks, stage)
            run.finish(stage, *on_ranks.result(tuple(video.shape[2:])))
        self._count(program, job)

    def _steps(self, on_ranks: StageRun, stage: Stage) -> None:
        counters, ranks = self.recorder.counters, on_ranks.ranks
        for step in tqdm(
            range(len(stage.sigmas) - 1), desc=stage.name, unit="step", disable=not self.progress
        ):
            sent, began = ranks.bytes_sent, time.perf_counter()
            device_ms = on_ranks.step(step)
            total_ms = (time.perf_counter() - began) * 1e3
            self.recorder.step(stage.name, total_ms, min(device_ms, total_ms))
            counters.bytes_to_device_per_step = ranks.bytes_sent - sent
            if self.on_step_end:
                self.on_step_end(stage, step)

    def _count(self, program: Program, job: Job) -> None:
        """Record what the step's graphs hold: the collectives and FLOPs that were counted in the
        files."""
        passes = len(job.resolved_guidance.passes()) if program.bucket.guided else 1
        one = program.manifest.cost("pass" if program.bucket.guided else "main")
        cost, tp = {name: value * passes for name, value in one.items()}, self.workspace.tp
        counters = self.recorder.counters
        counters.collectives_per_step = {
            "count": cost["collectives"],
            "bytes": cost["collective_bytes"],
        }
        counters.flops_per_step = cost["flops"] * tp
        counters.peak_flops = self.workspace.profile.flops(tp)

    def _empty(self, job: Job, stage: Stage) -> tuple[Tensor, Tensor]:
        """Latents of zeros, which the noise of a first stage replaces."""
        shape = latents.video_latent_shape(stage.height, stage.width, job.size.num_frames)
        frames = latents.audio_latent_frames(job.size.num_frames, job.size.frame_rate)
        dtype = self.workspace.dtype
        return (
            torch.zeros(1, latents.VIDEO_CHANNELS, *shape, dtype=dtype),
            torch.zeros(1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS, dtype=dtype),
        )

    def _encode_images(self, job: Job, stage: Stage) -> list[tuple[ImageCondition, Tensor]]:
        """The job's images as latents of a stage's size."""
        found = []
        for image in job.images:
            pixels = media.load_image(
                image.path, stage.height, stage.width, image.crf, self.workspace.dtype
            )
            found.append((image, self.host.encode_image(pixels)))
        return found


@contextmanager
def _mended_by_deleting(weights: Path) -> Iterator[None]:
    """Say what to type where the ranks refuse their files."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{error}\nDelete {weights} and type the same again: it says how to make it"
        ) from None


def _host_models(job: Job) -> list[str]:
    """Names of the host models a job runs."""
    names = [
        "video_decoder",
        "audio_decoder",
        "vocoder",
        *(f"{kind}_upsampler" for kind in job.upsamplers),
    ]
    names += ["video_encoder"] if job.images else []
    return names + (["video_statistics"] if job.upsamplers else [])
