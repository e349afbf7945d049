"""Runs jobs. `Engine.generate` makes one video, from the prompts' contexts to the frames;
`Engine.run` runs many jobs on the same loaded models."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.artifacts.workspace import RunOptions, Workspace, audio_dtype
from ltx_neuron.denoise import StageRun, starting_states, to_upsample
from ltx_neuron.denoise.tiled import TiledStageRun
from ltx_neuron.engine.decode import DecodedClip, Decoder, Decodes, JobFailure, Result, isolated
from ltx_neuron.engine.film import Film
from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.engine.preflight import Compiled, Failed, Preflight
from ltx_neuron.engine.residency import Residency
from ltx_neuron.errors import UserError, require
from ltx_neuron.host import encode_inputs
from ltx_neuron.host.background import Background, wait_for
from ltx_neuron.host.duration import DOWNLOAD, FLAG, duration_head_spec
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Stage
from ltx_neuron.plan import independent_passes
from ltx_neuron.report.latency import Recorder
from ltx_neuron.report.progress import PhaseLines, bar, printing, times_file
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.text import inputs
from ltx_neuron.text.cache import PromptCache
from ltx_neuron.text.encoders import Contexts, read_contexts
from ltx_neuron.weights.lora import WeightSet

_REMEMBERED_PROMPTS = 32  # contexts have 13 MB per prompt


class Engine:
    """Runs jobs on one workspace, whose models stay loaded until it is closed. A context manager:
    leaving it ends the ranks and frees memory.

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
            audio_dtype=audio_dtype(workspace, options),
            profile=workspace.profile,
            host_dtype=workspace.host_dtype,
            tiles_1_0_0=self.compat.tiles,
            files=workspace.files,
        )
        self.preflight = Preflight(workspace, self.host, options)
        self.residency = Residency(workspace, recorder)
        self.on_step_end: Callable[[Stage, int], None] | None = None
        self.on_stage_end: Callable[[JobRun], None] | None = None
        self.job: Job | None = None  # the job whose steps run
        self.stage_run: StageRun | None = None  # its stage, for on_step_end
        # Bars of steps. None: on a terminal alone, with lines of phases; False: no lines either
        self.progress: bool | None = None
        self.lines = PhaseLines(times_file(workspace.artifacts, "phases"))
        recorder.show = self._show
        self._contexts: dict[tuple[WeightSet, tuple[str, ...]], list[Contexts]] = {}
        self._caches: dict[WeightSet, PromptCache] = {}
        self._process = os.getpid()

    # --- one job ----------------------------------------------------------------------------------

    def generate(
        self,
        run: JobRun,
        compiled: Compiled,
        write: Callable[[DecodedClip], None] | None = None,
        decode: bool = True,
    ) -> Generator[Stage | Result, None, None]:
        """One job, whose prompts are encoded, up to its video. Yields every stage when it has
        ended, and then the result. In between, stages of other jobs may run on the loaded weights.
        What follows the last stage needs no rank, or only the VAEs, and may run in another thread.

        Shapes: video (1, 128, F, h, w), audio (1, 8, Ta, 16).
        """
        how = self.workspace.profile.overlap_decode, self._decode_video, self._decode_audio
        decoder = Decoder(self.host, self.recorder, *how)
        if not run.job.windows:
            yield from self._stages(run, compiled)
            yield decoder.result(run, write, decode)
            return
        # A rank cannot decode while it denoises, nor on a CPU's cores.
        waits = self.options.neuron_vae or not decoder.ahead
        late = self.options.neuron_vae and not self.residency.vae_stays
        with Film(decoder, run, write, decode, waits, late, self.residency.poll) as film:
            for stage in self._stages(run, compiled):
                if run.window_has_ended:
                    film.add_window()
                yield stage
            yield film.result()

    def _stages(self, run: JobRun, compiled: Compiled) -> Iterator[Stage]:
        """Run a job's unfinished stages. Yields each when it has ended."""
        models, host, recorder = self.residency, self.host, self.recorder
        for stage in run.stages_left:
            self.lines.size = str(run.job.size)
            if stage.chunk and stage.chunk.number > run.window:
                run.begin_next_window()
            tensors = run.tensors
            # The weights, the input sounds and videos, and the latents of the stage before.
            job, phase = run.job.of(stage), f"denoise_{stage.name}"
            print_idle_groups(job, stage, self.workspace.profile.guidance_parallel)
            modulation = models.use_weights(stage.loras)
            if job.has_media(stage.upsampled) and "video_latent" not in tensors:
                with recorder.phase("encode_inputs"):
                    tiles = self._encoder_tiles(job)
                    if stage.chunk and not tensors.keys() & encode_inputs.SOUNDS:
                        tensors |= encode_inputs.encode_sounds(host, run.job)
                    tensors |= encode_inputs.encode(host, job, stage.upsampled, tiles)
            for name, latent in to_upsample(run.job, stage, tensors).items():
                tensors[name] = self._upsampled(*latent)
            if job.details(stage.upsampled):
                tensors["s2_reference_latent"] = tensors["s1_video"].clone()

            # The start of the stage. `prepare` adds the noise and uploads what all steps share.
            with recorder.phase(phase):
                images = encode_inputs.encode_images(host, job, stage.height, stage.width)
                states = starting_states(run.job, stage, tensors, images, self.workspace.dtype)
                stage_run = self._new_stage_run(compiled[id(run.job), stage], modulation, job)
                stage_run.prepare(job, stage, run.contexts_of(stage), states, run.generator)
            self.job, self.stage_run = run.job, stage_run
            if self.options.warmup:
                with recorder.phase("warmup"):
                    stage_run.start()
                    stage_run.step(0)

            # The steps, from noise to latents.
            with recorder.phase(phase, shown=False):
                stage_run.start()
                for number in bar(range(stage.steps), stage.title, "step", self.progress):
                    measured_step(stage_run, number, recorder)
                    if self.on_step_end:
                        self.on_step_end(stage, number)
                latents = stage_run.result()
            run.finish(stage, *latents, stage_run.generated_keyframes())
            stage_run.compiled.count(
                run.job, stage, self.workspace.profile, self.workspace.tp, recorder.counters
            )
            stage_run.ranks.moment = f"after {stage.title}"
            self.stage_run = None
            if self.on_stage_end:
                self.on_stage_end(run)
            del stage_run, states, images, latents  # not kept while stages of other jobs run
            yield stage

    # --- its models, on the ranks or on the host --------------------------------------------------

    def _new_stage_run(self, compiled, modulation, job: Job) -> StageRun:
        ranks, workspace = self.residency.ranks, self.workspace
        assert ranks
        kind = TiledStageRun if compiled.tiles else StageRun
        shared = workspace.transformer, workspace.dtype, modulation, COMPAT[job.compat]
        return kind(ranks, compiled, *shared)

    def _encoder_tiles(self, job: Job):
        """What encodes a job's videos in tiles on the ranks; None: the host does."""
        on_ranks = self.preflight.encodes_on_ranks(job)
        return self.residency.video_encoder(self.preflight.vae) if on_ranks else None

    def _upsampled(self, latent: Tensor, kind: str) -> Tensor:
        """A latent (1, 128, F, h, w) after an upsampler, while the ranks are watched."""
        with self.recorder.phase("upsample"), Background() as thread:
            upsampled = thread.submit(self.host.upsample, latent, kind)
            return wait_for(upsampled, self.residency.poll)

    def _decode_video(
        self, latent: Tensor, seed: int, keyframes: dict, exact: bool = False
    ) -> Iterator[Tensor]:
        """A latent (1, 128, F, h, w) to chunks of frames: on the host, or on the ranks in tiles or
        spans. seed, keyframes: the job's. exact: as of HostModels.decode_video."""
        tiles = None
        if self.options.neuron_vae:
            tiles = self.residency.video_decoder(self.preflight.vae)
        return self.host.decode_video(latent, tiles, seed, {} if tiles else keyframes, exact)

    def _decode_audio(self, latent: Tensor) -> Tensor:
        """A latent (1, 8, Ta, 16) to a waveform: on the host, or on the ranks in spans."""
        spans = None
        if self.preflight.decodes_on_ranks(latent.shape[2]):
            spans = self.residency.sound_decoder(self.preflight.vae)
        return self.host.decode_audio(latent, spans)

    # --- many jobs --------------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self,
        jobs: list[Job],
        *,
        keep: bool = False,
        decode: bool = True,
        isolate: bool = False,
        resume: Callable[[Job], JobRun | None] = lambda job: None,
        write: Callable[[DecodedClip], None] | None = None,
        more: Callable[[], list[Job]] = list,
    ) -> Iterator[Result | JobFailure]:
        """Generate every job. Jobs finish in order, except that stages of one weight set run
        together, so that weights are swapped least often.

        An error that concerns all jobs, such as a failed rank's, ends the run at once and cancels
        a running decode. `on_stage_end` has received that job's latents.

        keep     keep the transformer on the ranks; otherwise unload it before the last decode
        decode   False: latents only
        isolate  a job's error becomes a Failure and the other jobs continue; a failed rank ends
                 the run
        resume   returns the state from which a job runs, or None for a new one
        write    called with every Clip while it is decoded; the result has no frames. If decoding
                 overlaps denoising, it runs in another thread. Its errors are the job's
        more     called while the last job is decoded: returns jobs that join the run
        """
        self.check_process()
        resolved = partial(self.workspace.resolved, compat=self.options.compat)
        jobs, failed, compiled = self._check([*map(resolved, jobs)], isolate)
        generations: dict[JobRun, Generator] = {}
        with self._session(keep), ExitStack() as stack, self._decodes(isolate) as decodes:
            stack.callback(lambda: [x.close() for x in generations.values()])  # ends their threads
            while jobs or failed:
                yield from (JobFailure(*pair) for pair in failed)
                runs = [resume(job) or JobRun(job) for job in jobs]
                self._encode_prompts([run for run in runs if not run.contexts])
                generations |= {run: self.generate(run, compiled, write, decode) for run in runs}
                groups = stage_groups(runs, self.workspace.dit_weights, self.residency.weights)
                # Unless every run already has its latents.
                if first := next((stages[0] for _, stages in groups if stages), None):
                    steps = chain.from_iterable(step.programs for step in compiled.values())
                    programs = {step.bucket.name: step.manifest for step in steps}
                    self.residency.load_transformer(programs, first.loras)
                waiting = []  # jobs whose decoding needs the place of the transformer
                for group in groups:
                    run, stages = group
                    if run.error:
                        continue  # an earlier stage failed
                    try:
                        with isolated(run, isolate):
                            for _ in stages:
                                next(generations[run])
                    except Exception:  # all jobs end: finished ones are returned first
                        yield from decodes.outcomes(wait=False)
                        raise
                    if run.stages_left and not run.error:
                        continue
                    if self.options.neuron_vae and not self.residency.vae_stays:
                        waiting.append(run)
                        continue
                    if group is groups[-1] and not (keep or self.options.neuron_vae):
                        self.residency.unload_transformer()
                    yield from decodes.end(run, generations.pop(run))
                for run in waiting:
                    yield from decodes.end(run, generations.pop(run))
                # On the ranks, decoding ends before other jobs join; on the host it overlaps.
                yield from decodes.outcomes(wait=self.options.neuron_vae)
                while not (jobs := [*map(resolved, more())]) and decodes.are_running():
                    pass
                jobs, failed, compiled = self._check(jobs, isolate)
            yield from decodes.outcomes()

    def _check(self, jobs: list[Job], isolate: bool) -> tuple[list[Job], Failed, Compiled]:
        """The jobs that can run, if `isolate` the others with their errors, and compiled steps."""
        failed: Failed = []
        with self._show("check"), printing():
            compiled = self.preflight.check(jobs, failed if isolate else None) if jobs else {}
        self.residency.vae_stays = self.preflight.vae_stays
        unusable = {id(job) for job, _ in failed}
        return [job for job in jobs if id(job) not in unusable], failed, compiled

    def _decodes(self, isolate: bool) -> Decodes:
        if self.options.neuron_vae:  # the decoding thread checks the ranks itself
            return Decodes(isolate, waits=True, poll=lambda: None)
        waits = not self.workspace.profile.overlap_decode
        return Decodes(isolate, waits, self.residency.poll)

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
        self.lines.save()
        if not keep:
            self.close()

    def _show(self, name: str) -> AbstractContextManager:
        return nullcontext() if self.progress is False else self.lines.phase(name)

    # --- the prompts ------------------------------------------------------------------------------

    def encode(self, jobs: list[Job]) -> list[JobRun]:
        """Encode the jobs' prompts. Returns new runs with their contexts, which the engine keeps.
        Checks the text encoder's files before they load."""
        self.check_process()
        self.preflight.check_text(jobs)
        runs = [JobRun(job) for job in jobs]
        with self._session(keep=True):
            self._encode_prompts(runs)
        return runs

    def _encode_prompts(self, runs: list[JobRun]) -> None:
        """Give new runs their contexts. The text encoder is unloaded afterwards."""
        unknown: dict[WeightSet, dict[tuple[str, ...], list]] = {}
        if len(self._contexts) > _REMEMBERED_PROMPTS:
            self._contexts.clear()
        of_model = self.workspace.transformer, self.workspace.dtype
        for run in runs:
            if path := run.job.text_embeddings:
                run.take_contexts([read_contexts(path, *of_model)])
        runs = [run for run in runs if not run.contexts]
        keys = [(self.workspace.text_loras(run.job), run.job.texts) for run in runs]
        for loras, texts in [k for k in dict.fromkeys(keys) if k not in self._contexts]:
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
        for run, key in zip(runs, keys, strict=True):
            run.take_contexts(self._contexts[key])

    def _prompt_cache(self, loras: WeightSet) -> PromptCache | None:
        if self.options.cache_prompts and loras not in self._caches:
            self._caches[loras] = self.workspace.prompt_cache(self.options.neuron_gemma, loras)
        return self._caches.get(loras)

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

    # --- its process ------------------------------------------------------------------------------

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


def stage_groups(
    runs: list[JobRun], weights_of: Callable[[WeightSet], Path], loaded: Path | None
) -> list[tuple[JobRun, list[Stage]]]:
    """The order of stages, as each job's next stages on one weight set; none if the job already has
    its latents. All that run on one weight set run together, first those on the loaded one, else
    those on a set that no other job needs later, else those of the next job.

    weights_of  the folder of a weight set
    loaded      the loaded weight set's folder
    """
    left = {run: run.stages_left for run in runs}
    groups: list[tuple[JobRun, list[Stage]]] = [(run, []) for run in runs if not left[run]]
    while needed := [[weights_of(x.loras) for x in stages] for stages in left.values() if stages]:
        next_ones = [sets[0] for sets in needed]
        later = {other for sets in needed for other in sets if other != sets[0]}
        free = [weights for weights in next_ones if weights not in later]
        weights = loaded if loaded in next_ones else (free or next_ones)[0]
        for run, stages in left.items():
            group = []
            while stages and weights_of(stages[0].loras) == weights:
                group.append(stages.pop(0))
            groups += [(run, group)] if group else []
    return groups


def print_idle_groups(job: Job, stage: Stage, groups: int) -> None:
    """Print how many guidance groups have nothing to do in a stage, if there are any."""
    passes = independent_passes(job, stage)
    if passes < groups:
        kind = "passes" if stage.guided else "tiles"
        runs = f"{passes} {kind}" if passes > 1 else "one pass"
        idle = groups - passes
        print(f"{stage.title} has {runs} a step: {idle} of {groups} guidance groups wait")


def measured_step(stage_run: StageRun, number: int, recorder: Recorder) -> None:
    """Run one step and record its times."""
    ranks, stage, counters = stage_run.ranks, stage_run.stage, recorder.counters
    ranks.moment, ranks.pass_ms = f"at step {number + 1} of {stage.title}", []
    sent, launches, launch_ms = ranks.bytes_sent, ranks.launches, ranks.launch_ms
    start = time.perf_counter()
    device_ms = stage_run.step(number)
    total_ms = (time.perf_counter() - start) * 1e3
    recorder.step(stage.name, total_ms, min(device_ms, total_ms), ranks.pass_ms)
    counters.bytes_to_device_per_step = ranks.bytes_sent - sent
    counters.launches_per_step = {
        "count": ranks.launches - launches,
        "host_ms": ranks.launch_ms - launch_ms,
    }


# --- auto duration: the duration head predicts the length of a job from its prompt ----------------


def with_durations(engine: Engine, jobs: list[Job]) -> list[Job]:
    """Give jobs with auto_duration their predicted length. Returns all jobs. Checks all jobs' files
    before a model loads; raises UserError. The engine keeps the contexts for the jobs' run."""
    waiting = [job for job in jobs if job.auto_duration]
    if not waiting:
        return jobs
    engine.preflight.check_inputs(jobs)
    runs = predict(engine, waiting)
    known = {id(run.job): lasting(run.job, seconds) for run, seconds in runs}
    if command := engine.workspace.prepare_command:  # it makes graphs of known lengths
        lengths = dict.fromkeys(job.size.num_frames for job in known.values())
        engine.workspace.prepare_command = "\n".join(f"{command} --num-frames {n}" for n in lengths)
    return [known.get(id(job), job) for job in jobs]


def lasting(job: Job, seconds: float) -> Job:
    """The job of auto_duration with the number of frames for a prediction in seconds."""
    assert job.auto_duration
    frames = job.auto_duration.num_frames(seconds, job.size.frame_rate)
    return job.replaced(num_frames=frames, auto_duration=None)


@torch.no_grad()
def predict(engine: Engine, jobs: list[Job]) -> list[tuple[JobRun, float]]:
    """Encode the prompts of jobs of auto_duration, and print the predicted lengths. Returns each
    job's run and its predicted seconds."""
    workspace = engine.workspace
    path = engine.options.duration_head_path or workspace.files.find("duration_head")
    path = require(path, FLAG, "--auto-duration", f"Download LTX-2.5's: {DOWNLOAD}")
    head = duration_head_spec(path, workspace.checkpoint, workspace.transformer).load()
    predicted = []
    for run in engine.encode(jobs):
        (prompt, *_) = run.contexts
        seconds = head(prompt.video, prompt.audio).item()
        size = lasting(run.job, seconds).size
        frames = f"{size.num_frames} frames at {size.frame_rate:g} fps"
        print(f"duration head: {seconds:.2f} s; {frames}")
        predicted.append((run, seconds))
    return predicted
