"""Runs jobs: `Engine.run` encodes the prompts, denoises the stages and decodes.

An engine keeps models loaded between calls until it is closed.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from tqdm import tqdm

from ltx_neuron.decode_queue import Clip, DecodeQueue, Failure, Result, isolated
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.denoise.tiled import TiledStageRun
from ltx_neuron.errors import UserError
from ltx_neuron.host import conditions
from ltx_neuron.host.arithmetic import store_choices
from ltx_neuron.host.background import BackgroundTask
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Stage
from ltx_neuron.preflight import Compiled, Failed, Preflight, RunOptions, say_idle_groups
from ltx_neuron.progress import JobRun, StageGroup, stage_groups
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.residency import Residency
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.extension import start_of
from ltx_neuron.text import inputs
from ltx_neuron.text.cache import PromptCache
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.workspace import Workspace

_REMEMBERED_PROMPTS = 32  # contexts have 13 MB per prompt


class Engine:
    """Runs jobs on one workspace. A context manager: leaving it ends the ranks and frees memory.

    on_step_end   called with (stage, step number) after every step
    on_stage_end  called with the JobRun after every stage
    """

    def __init__(self, workspace: Workspace, recorder: Recorder, options: RunOptions | None = None):
        options = options or RunOptions()
        self.workspace, self.recorder, self.options = workspace, recorder, options
        self.compat = COMPAT[options.compat]
        self.host = HostModels(
            workspace.checkpoint_path,
            workspace.config,
            workspace.dtype,
            options.spatial_upsampler_path or workspace.files.beside("spatial"),
            options.temporal_upsampler_path or workspace.files.beside("temporal"),
            audio_dtype=workspace.dtype if self.compat.vocoder else torch.float32,
            profile=workspace.profile,
            arithmetic=workspace.arithmetic,
            tiles_1_0_0=self.compat.tiles,
            files=workspace.files,
        )
        self.preflight = Preflight(workspace, self.host, options)
        self.residency = Residency(workspace, recorder)
        self.on_step_end: Callable[[Stage, int], None] | None = None
        self.on_stage_end: Callable[[JobRun], None] | None = None
        self.job: Job | None = None  # the job whose steps run
        self.stage_run: StageRun | None = None  # its stage, for on_step_end
        self.progress = True
        self._contexts: dict[tuple[WeightSet, tuple[str, ...]], list[Contexts]] = {}
        self._caches: dict[WeightSet, PromptCache] = {}
        self._process = os.getpid()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks and free the host's models. Does nothing in a forked process, whose parent
        owns them."""
        if not self.forked:
            self.residency.close()
            self.host.release()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the engine."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise UserError in a forked process, where a run would hang: threads are not forked, and
        ranks answer only one process."""
        if self.forked:
            raise UserError(
                f"process {os.getpid()} was forked from process {self._process}, which opened this"
                " pipeline and whose ranks answer only it. Start processes with"
                ' multiprocessing.get_context("spawn"), and open a pipeline in each'
            )

    @torch.no_grad()
    def run(
        self,
        jobs: list[Job],
        *,
        keep: bool = False,
        decode: bool = True,
        isolate: bool = False,
        generator: torch.Generator | None = None,
        resume: Callable[[Job], JobRun | None] = lambda job: None,
        write: Callable[[Clip], None] | None = None,
        hand_over: Callable[[Result], None] | None = None,
        more: Callable[[], list[Job]] = list,
    ) -> Iterator[Result | Failure]:
        """Generate every job. Jobs finish in order, except that stages of one weight set run
        together, so that weights are swapped least often.

        An error that concerns all jobs, such as a failed rank's, ends the run at once and cancels
        a running decode. `on_stage_end` has received that job's latents.

        keep       keep the transformer on the ranks; otherwise unload it before the last decode
        decode     False: latents only
        isolate    a job's error becomes a Failure and the other jobs continue; a failed rank ends
                   the run
        generator  draws the noise, instead of one made from the job's seed
        resume     returns a job's interrupted run, or None for a new one
        write      called with every Clip while it is decoded; frames are then not kept
        hand_over  called with every Result as soon as it is ready. If decoding overlaps denoising,
                   `write` and `hand_over` run in another thread. Their errors are the job's
        more       called while the last job is decoded: returns jobs that join the run
        """
        self.check_process()
        resolved = partial(self.workspace.resolved, compat=self.options.compat)
        jobs, failed, compiled = self._check([*map(resolved, jobs)], isolate)
        options = {"decode": decode, "isolate": isolate, "write": write, "hand_over": hand_over}
        with self._session(keep), self._decode_queue(**options) as queue:
            while jobs or failed:
                yield from (Failure(*each) for each in failed)
                runs = self._encode_prompts(jobs, resume, generator)
                groups = stage_groups(runs, self.workspace.dit_weights, self.residency.weights)
                # Unless every run already has its latents.
                if first := next((group.stages[0] for group in groups if group.stages), None):
                    steps = chain.from_iterable(step.programs for step in compiled.values())
                    programs = {step.bucket.name: step.manifest for step in steps}
                    self.residency.load_transformer(programs, first.loras)
                # Not earlier, so that a refused run does not change the folder.
                store_choices(self.workspace.artifacts)
                yield from self._denoise(groups, compiled, queue, isolate, keep)
                # On the ranks, decoding ends before other jobs join; on the host it overlaps.
                yield from queue.drain(wait=bool(queue.on_ranks))
                while not (jobs := [*map(resolved, more())]) and queue.pause():
                    pass
                jobs, failed, compiled = self._check(jobs, isolate)
            yield from queue.drain()

    def _check(self, jobs: list[Job], isolate: bool) -> tuple[list[Job], Failed, Compiled]:
        checked = self.preflight.check_apart(jobs, isolate)
        self.residency.vae_stays = self.preflight.vae_stays
        return checked

    def _denoise(
        self,
        groups: list[StageGroup],
        compiled: Compiled,
        queue: DecodeQueue,
        isolate: bool,
        keep: bool,
    ) -> Iterator[Result | Failure]:
        """Run the stages of all jobs, and pass each job to the queue after its last stage."""
        for group in groups:
            run, self.job = group.run, group.run.job
            if run.error:
                continue  # an earlier stage failed
            try:
                with isolated(run, isolate):
                    for stage in group.stages:
                        stage_run = self._prepare(run, stage, compiled[id(run.job), stage])
                        result = self._steps(stage_run)
                        run.finish(stage, *result, stage_run.generated_keyframes())
                        self._finish(run, stage_run)
            except Exception:  # all jobs end: finished ones are returned first
                yield from queue.drain(wait=False)
                raise
            if run.error or not run.stages_left:
                if group is groups[-1] and not (keep or self.options.neuron_vae):
                    self.residency.unload_transformer()
                yield from queue.submit(run)

    @contextmanager
    def _session(self, keep: bool) -> Iterator[None]:
        """Close the engine at the end, unless `keep`, and on an error."""
        # The number of threads changes bits. The first call in a thread sets its default, which
        # would undo the next line later.
        torch.get_num_threads()
        torch.set_num_threads(self.workspace.profile.host_threads)
        try:
            yield
        except BaseException:
            self.close()
            raise
        if not keep:
            self.close()

    def _decode_queue(self, **options) -> DecodeQueue:
        """The queue of a run. options: arguments that DecodeQueue shares with `run`."""
        on_ranks = "each" if self.residency.vae_stays else "last"
        return DecodeQueue(
            self.host,
            self.recorder,
            overlap=self.workspace.profile.overlap_decode,
            # The decoding thread checks the ranks itself while it drives them.
            poll=(lambda: None) if self.options.neuron_vae else self.residency.poll,
            decode_video=self._decode_video,
            decode_audio=self._decode_audio,
            on_ranks=on_ranks if self.options.neuron_vae else "",
            **options,
        )

    def _decode_video(self, latent: Tensor, seed: int, keyframes: dict) -> Iterator[Tensor]:
        """A latent (1, 128, F, h, w) to chunks of frames: on the host, or on the ranks in tiles or
        spans. seed, keyframes: the job's."""
        tiles = None
        if self.options.neuron_vae:
            tiles = self.residency.video_decoder(self.preflight.vae)
        return self.host.decode_video(latent, tiles, seed, {} if tiles else keyframes)

    def _decode_audio(self, latent: Tensor) -> Tensor:
        """A latent (1, 8, Ta, 16) to a waveform: on the host, or on the ranks in spans."""
        spans = None
        if self.preflight.decodes_on_ranks(latent.shape[2]):
            spans = self.residency.sound_decoder(self.preflight.vae)
        return self.host.decode_audio(latent, spans)

    # --- encode the prompts -----------------------------------------------------------------------

    def _prompt_cache(self, loras: WeightSet) -> PromptCache | None:
        if self.options.cache_prompts and loras not in self._caches:
            self._caches[loras] = self.workspace.prompt_cache(self.options.neuron_gemma, loras)
        return self._caches.get(loras)

    def encode(self, jobs: list[Job]) -> list[JobRun]:
        """Encode the jobs' prompts. Returns new runs with their contexts, which the engine keeps.
        Checks the text encoder's files before they load."""
        self.check_process()
        self.preflight.check_text(jobs)
        with self._session(keep=True):
            return self._encode_prompts(jobs, lambda job: None, None)

    def _encode_prompts(
        self,
        jobs: list[Job],
        resume: Callable[[Job], JobRun | None],
        generator: torch.Generator | None,
    ) -> list[JobRun]:
        """The runs of the jobs, with contexts. The text encoder is unloaded afterwards."""
        unknown, runs = {}, [(job, resume(job)) for job in jobs]
        if len(self._contexts) > _REMEMBERED_PROMPTS:
            self._contexts.clear()
        text_loras, new = self.workspace.text_loras, [job for job, state in runs if not state]
        keys = {id(job): (text_loras(job), job.prompts) for job in new}
        for loras, texts in [k for k in dict.fromkeys(keys.values()) if k not in self._contexts]:
            tokens = [inputs.tokenize(self.workspace.tokenizer, text) for text in texts]
            if contexts := (cache := self._prompt_cache(loras)) and cache.read(tokens):
                self._contexts[loras, texts] = contexts
            else:
                unknown.setdefault(loras, {})[texts] = tokens
        for loras, prompts in unknown.items():
            encoding = self._text_encoder([*prompts.values()], loras)
            with encoding as encoder, self.recorder.phase("encode_text"):
                for texts, tokens in prompts.items():
                    self._contexts[loras, texts] = encoder.encode(tokens)
                    if cache := self._prompt_cache(loras):
                        cache.write(tokens, self._contexts[loras, texts])
        return [
            interrupted or JobRun(job, self._contexts[keys[id(job)]], generator)
            for job, interrupted in runs
        ]

    @contextmanager
    def _text_encoder(self, prompts: list[list[list[int]]], loras: WeightSet) -> Iterator:
        """The text encoder, on the ranks or on the host, while the block runs."""
        if self.options.neuron_gemma:
            with self.residency.text_encoder(prompts, loras) as encoder:
                yield encoder
            return
        with self.recorder.phase("load_gemma3"):
            encoder = self.workspace.host_text_encoder(loras)
        yield encoder
        with self.recorder.phase("unload_gemma3"):
            del encoder  # frees gigabytes of mapped pages

    # --- prepare, steps, finish -------------------------------------------------------------------

    def _prepare(self, run: JobRun, stage: Stage, compiled: CompiledStep) -> StageRun:
        """A stage with the shared inputs of its steps uploaded."""
        job, workspace = run.job.of(stage), self.workspace
        say_idle_groups(job, stage, workspace.profile.guidance_parallel)
        modulation = self.residency.use_weights(stage.loras)
        if job.has_media(stage.upsampled) and "video_latent" not in run.tensors:
            with self.recorder.phase("encode_inputs"):
                tiles = None
                if self.preflight.encodes_on_ranks(job):
                    tiles = self.residency.video_encoder(self.preflight.vae)
                run.tensors |= conditions.encode(self.host, job, stage.upsampled, tiles)
        ranks, given = self.residency.ranks, run.tensors | self._initial_latents(run, stage)
        shared = workspace.transformer, workspace.dtype, modulation, self.compat
        with self.recorder.phase(f"denoise_{stage.name}"):
            images = conditions.encode_images(self.host, job, stage.height, stage.width)
            assert ranks
            kind = TiledStageRun if compiled.tiles else StageRun
            stage_run = kind(ranks, compiled, *shared)
            start = given["video"], given["audio"]
            stage_run.prepare(job, stage, run.contexts, *start, run.generator, images, given)
        return stage_run

    def _initial_latents(self, run: JobRun, stage: Stage) -> dict[str, Tensor]:
        """A stage's initial latents by stream, (1, 128, F, h, w) and (1, 8, Ta, 16)."""
        job, tensors = run.job.of(stage), run.tensors
        if stage.temporal:
            return run.job.rendering.start(stage.temporal, tensors, self._upsampled)
        if stage.window:
            assert job.extension
            video, audio = start_of(job.extension, stage.window, tensors)
        elif stage.upsampled:
            video = tensors["upsampled"] = self._upsampled(tensors["s1_video"], "spatial")
            if job.generated_keyframes(upsampled=True):  # as one clip of K latents
                planes = self._upsampled(tensors["s1_generated_keyframes"], "spatial")
                tensors["upsampled_keyframes"] = planes
            if job.details(upsampled=True):
                tensors["s2_reference_latent"] = tensors["s1_video"].clone()
            audio = tensors["s1_audio"]
        else:
            shape = stage.height, stage.width, job.size.num_frames, job.size.frame_rate
            video, audio = latents.zeros(*shape, self.workspace.dtype)
            video = tensors.get("video_latent", video)
            audio = tensors.get("audio_latent", audio)
        return {"video": video, "audio": audio}

    def _upsampled(self, latent: Tensor, kind: str) -> Tensor:
        """A latent (1, 128, F, h, w) after an upsampler, while the ranks are watched."""
        upsample = partial(self.host.upsample, latent, kind)
        with self.recorder.phase("upsample"), BackgroundTask(upsample) as task:
            return task.result(self.residency.poll)

    def _steps(self, stage_run: StageRun) -> tuple[Tensor, Tensor]:
        """Run a stage's steps; returns its latents, (1, 128, F, h, w) and (1, 8, Ta, 16)."""
        stage, recorder, self.stage_run = stage_run.stage, self.recorder, stage_run
        if self.options.warmup:
            with recorder.phase("warmup"):
                stage_run.start()
                stage_run.step(0)
        with recorder.phase(f"denoise_{stage.name}"):
            stage_run.start()
            numbers = range(stage.steps)
            for number in tqdm(numbers, desc=stage.title, unit="step", disable=not self.progress):
                self._step(stage_run, number)
            return stage_run.result()

    def _step(self, stage_run: StageRun, number: int) -> None:
        """Run one step and record its times."""
        ranks, stage = stage_run.ranks, stage_run.stage
        ranks.moment, ranks.pass_ms = f"at step {number + 1} of {stage.title}", []
        sent, launches, launch_ms = ranks.bytes_sent, ranks.launches, ranks.launch_ms
        began = time.perf_counter()
        device_ms = stage_run.step(number)
        total_ms = (time.perf_counter() - began) * 1e3
        self.recorder.step(stage.name, total_ms, min(device_ms, total_ms), ranks.pass_ms)
        self.recorder.counters.bytes_to_device_per_step = ranks.bytes_sent - sent
        self.recorder.counters.launches_per_step = {
            "count": ranks.launches - launches,
            "host_ms": ranks.launch_ms - launch_ms,
        }
        if self.on_step_end:
            self.on_step_end(stage, number)

    def _finish(self, run: JobRun, stage_run: StageRun) -> None:
        """Record the costs of a stage's steps, which were counted when its graphs were compiled."""
        compiled, stage, self.stage_run = stage_run.compiled, stage_run.stage, None
        stage_run.ranks.moment = f"after {stage.title}"
        passes = len(run.job.passes) if compiled.bucket.guided else 1
        passes *= len(stage.evaluations) // stage.steps
        compiled.count(passes, self.workspace.profile, self.workspace.tp, self.recorder.counters)
        if self.on_stage_end:
            self.on_stage_end(run)
