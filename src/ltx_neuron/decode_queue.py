"""Upscales, decodes, writes and returns jobs with finished latents, one at a time, also while the
next job is denoised."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends.neuron_errors import DeviceFailure
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.errors import UserError
from ltx_neuron.host.background import BackgroundTask, ahead
from ltx_neuron.host.conditions import with_source
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.video import cut_frames, cut_sound, write_video, write_wav
from ltx_neuron.job import Job
from ltx_neuron.progress import JobRun
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.extension import joined
from ltx_neuron.sampling.upscaling import UPSCALES

# Latent upsampler -> the name of its output in --save-tensors.
UPSCALED = {"spatial": "upsampled", "temporal": "temporal_video"}


@dataclass
class Clip:
    """One job's video or sound, which is decoded as its chunks are read.

    chunks    frames in order of time, each uint8 (N, H, W, 3)
    waveform  waits for the sound and returns it: float32 (2, samples)
    sound_is_ready  whether `waveform` returns at once
    """

    job: Job
    chunks: Iterator[Tensor]
    waveform: Callable[[], Tensor]
    sample_rate: int
    sound_is_ready: Callable[[], bool] = lambda: True

    @property
    def phase(self) -> str:
        """The phase of `write` in a latency report."""
        return "write_wav" if self.job.sound_only else "encode_mp4"

    def write(self, path: Path) -> None:
        """Write the MP4 chunk by chunk, or the WAV of sound alone."""
        if self.job.sound_only:
            write_wav(path, self.waveform(), self.sample_rate)
            return
        rate, ready = self.job.output_frame_rate, self.sound_is_ready
        write_video(path, self.chunks, rate, self.waveform, self.sample_rate, ready)


@dataclass
class Result:
    """One job's video. `tensors` holds every named intermediate, as --save-tensors writes them."""

    job: Job
    # uint8 (N, H, W, 3); None for latents only, sound alone, or if `write` received them
    frames: Tensor | None
    waveform: Tensor | None  # float32 (2, samples)
    sample_rate: int
    tensors: dict[str, Tensor]
    heard: str  # the name of its sound's latents

    def clip(self) -> Clip:
        """The video as a Clip, if its frames were kept."""
        frames, waveform = self.frames, self.waveform
        assert waveform is not None and (frames is not None or self.job.sound_only)
        chunks = iter(() if frames is None else (frames,))
        return Clip(self.job, chunks, lambda: waveform, self.sample_rate)


@dataclass
class Failure:
    """The error of one job of a batch."""

    job: Job
    error: Exception


@contextmanager
def isolated(run: JobRun, isolate: bool) -> Iterator[None]:
    """Store an error of this job in `run.error`, so that the other jobs can continue.

    Errors of a rank or device, and user's mistakes outside of the job's own files, concern all jobs
    and are raised. Without `isolate` every error is raised.
    """
    try:
        yield
    except (RankError, DeviceFailure):
        raise
    except Exception as error:
        if not isolate or isinstance(error, UserError) and not error.of_one_job:
            raise
        run.error = error


class DecodeQueue:
    """Decodes one job at a time; the next submitted job waits for it.

    A context manager: leaving it cancels a running decode.

    decode_video  latents (1, 128, F, h, w), the job's seed and its keyframes to chunks of frames,
                  uint8 (N, H, W, 3)
    decode_audio  latents (1, 8, Ta, 16) to a waveform (2, samples)
    overlap    decode in the background: `submit` returns at once
    on_ranks   if the ranks decode: "each" (`submit` waits) or "last" (`drain` decodes all); "" for
               the host
    decode, isolate, write, hand_over: as in Engine.run
    poll       called regularly while `drain` waits; its error ends the waiting
    """

    def __init__(
        self,
        host: HostModels,
        recorder: Recorder,
        *,
        overlap: bool,
        decode: bool = True,
        isolate: bool = False,
        write: Callable[[Clip], None] | None = None,
        hand_over: Callable[[Result], None] | None = None,
        poll: Callable[[], None] = lambda: None,
        decode_video: Callable[..., Iterator[Tensor]] | None = None,
        decode_audio: Callable[[Tensor], Tensor] | None = None,
        on_ranks: str = "",
    ):
        self.host, self.recorder, self.overlap, self.poll = host, recorder, overlap, poll
        self.decode, self.isolate, self.write, self.hand_over = decode, isolate, write, hand_over
        self.decode_video, self.on_ranks = decode_video or host.decode_video, on_ranks
        self.decode_audio = decode_audio or host.decode_audio
        self._task: BackgroundTask | None = None
        self._waiting: list[JobRun] = []

    def __enter__(self) -> "DecodeQueue":
        return self

    def __exit__(self, *_) -> None:
        if self._task:
            self._task.cancel()

    def pause(self) -> bool:
        """Wait briefly for the running decode. Returns whether it still runs."""
        self.poll()
        return bool(self._task) and not self._task.wait()

    def submit(self, run: JobRun) -> Iterator[Result | Failure]:
        """Decode a job. Yields the outcomes that are ready, in the order of submission."""
        if self.on_ranks == "last":
            self._waiting.append(run)
            return
        yield from self.drain()
        self._task = BackgroundTask(partial(self._outcome, run))
        if self.on_ranks or not self.overlap or run.error:
            yield from self.drain()

    def drain(self, wait: bool = True) -> Iterator[Result | Failure]:
        """The outcomes of the remaining jobs; without `wait`, only those that are ready."""
        while True:
            if self._task and (wait or self._task.done):
                outcome = self._task.result(self.poll)
                self._task = None
                yield outcome
            elif wait and self._waiting:
                self._task = BackgroundTask(partial(self._outcome, self._waiting.pop(0)))
            else:
                return

    def _outcome(self, run: JobRun) -> Result | Failure:
        if not run.error:
            with isolated(run, self.isolate):
                return self._result(run)
        return Failure(run.job, run.error)

    def _result(self, run: JobRun) -> Result:
        job, tensors = run.job, run.tensors
        run.tensors = {}  # frees the memory of finished jobs in a long batch
        if job.extension:
            tensors["s1_video"], tensors["s1_audio"] = joined(job.extension, tensors)
        if job.dfr:
            tensors[job.seen] = job.rendering.final(tensors)
        video, heard = tensors.get(job.seen), job.heard
        if job.upscale:
            assert video is not None  # sound alone is not upscaled
            with self.recorder.phase("upsample"):
                for kind in UPSCALES[job.upscale]:
                    video = tensors[UPSCALED[kind]] = self.host.upsample(video, kind)
        if heard != f"{job.stages[-1].key}_audio" and not (job.extension or job.sound):
            tensors["final_audio"] = tensors[heard].clone()
        if job.sound:  # the input sound is muxed unchanged
            given = tensors["waveform"]
            sound, rate = lambda: given, int(tensors["waveform_rate"])
        else:
            sound, rate = partial(self._sound, job, tensors[heard]), self.host.sample_rate
        if self.decode:
            chunks = self._pictures(video, job.seed, job.decoded_keyframes(tensors))
            with self._decoding(job, chunks, sound, rate) as clip:
                if self.write:
                    self.write(clip)
                elif not job.sound_only:
                    tensors["frames"] = torch.cat(list(clip.chunks))
                tensors["waveform"] = clip.waveform()
            self.recorder.finished(job.output_frames / job.output_frame_rate)
        frames, waveform = tensors.get("frames"), tensors.get("waveform")
        result = Result(job, frames, waveform, rate, tensors, heard)
        if self.hand_over:
            self.hand_over(result)
        return result

    @contextmanager
    def _decoding(
        self, job: Job, chunks: Generator[Tensor], sound: Callable[[], Tensor], rate: int
    ) -> Iterator[Clip]:
        """A job's clip. If cores are free, pictures are decoded ahead, and sound in parallel."""
        sound, task = cache(sound), None
        if job.extension:
            chunks = with_source(job, chunks)
        elif job.tail_frames or job.dfr:
            frames = job.output_frames
            chunks = cut_frames(chunks, frames)
            sound = partial(cut_sound, sound, frames, job.output_frame_rate, rate)
        with ExitStack() as ending:
            ending.enter_context(closing(chunks))
            if self.overlap:
                task = ending.enter_context(BackgroundTask(sound))
                chunks = ending.enter_context(ahead(chunks))

            def waveform() -> Tensor:
                with self.recorder.paused():
                    return task.result() if task else sound()

            yield Clip(job, self._awaited(chunks), waveform, rate, lambda: bool(task) and task.done)

    def _pictures(
        self, video: Tensor | None, seed: int, keyframes: dict[int, Tensor]
    ) -> Generator[Tensor, None, None]:
        if video is None:
            return
        chunks = self.decode_video(video, seed=seed, keyframes=keyframes)
        with self.recorder.phase("decode_video"):
            for chunk in chunks:
                with self.recorder.paused():
                    yield chunk
                del chunk  # freed while the next one is decoded

    def _awaited(self, chunks: Iterator[Tensor]) -> Iterator[Tensor]:
        """The chunks. Waiting for one does not count towards the caller's phase."""
        while True:
            with self.recorder.paused():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
            del chunk

    def _sound(self, job: Job, audio: Tensor) -> Tensor:
        with self.recorder.phase("decode_audio"):
            waveform = self.decode_audio(audio)
        return job.extension.heard(waveform, self.host.sample_rate) if job.extension else waveform
