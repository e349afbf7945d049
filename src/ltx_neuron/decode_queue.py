"""Jobs whose latents are there: upscaled, decoded and handed over, one at a time, also while the
next job is denoised."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ltx_neuron.backends.neuron_errors import DeviceFailure
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.errors import UserError
from ltx_neuron.host.background import BackgroundTask
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import UPSCALES, Job
from ltx_neuron.progress import JobRun
from ltx_neuron.report.recorder import Recorder

# Latent upsampler -> the name of the latents it returns, as --save-tensors has it.
UPSCALED = {"spatial": "upsampled", "temporal": "temporal_video"}


@dataclass
class Result:
    """One job's video. `tensors` holds every named intermediate (see docs: --save-tensors)."""

    job: Job
    frames: Tensor | None  # uint8 (N, H, W, 3); None where only latents were asked for
    frame_rate: float
    waveform: Tensor | None  # float32 (2, samples)
    sample_rate: int
    tensors: dict[str, Tensor]


@dataclass
class Failure:
    """A job of a batch that failed alone."""

    job: Job
    error: Exception


@contextmanager
def isolated(run: JobRun, isolate: bool) -> Iterator[None]:
    """Note an error of this job alone in `run.error`, so that the other jobs can go on.

    A failed rank or device, and a user's mistake, are raised: they concern all jobs. So is
    everything where jobs are not isolated.
    """
    try:
        yield
    except (RankError, DeviceFailure, UserError):
        raise
    except Exception as error:
        if not isolate:
            raise
        run.error = error


class DecodeQueue:
    """Decodes the job that was submitted last; a job submitted after it waits for it.

    A context manager: leaving it cancels what is still being decoded.

    overlap    decode in the background: `submit` returns at once
    decode     False: results have latents only
    isolate    a job that fails is a Failure, and the others go on
    hand_over  called with every Result as soon as it is there, in the thread that decoded it
    poll       called now and then while `drain` waits; an error of it ends the waiting
    """

    def __init__(
        self,
        host: HostModels,
        recorder: Recorder,
        *,
        overlap: bool,
        decode: bool,
        isolate: bool,
        hand_over: Callable[[Result], None] | None,
        poll: Callable[[], None],
    ):
        self.host, self.recorder, self.overlap, self.poll = host, recorder, overlap, poll
        self.decode, self.isolate, self.hand_over = decode, isolate, hand_over
        self._task: BackgroundTask | None = None

    def __enter__(self) -> "DecodeQueue":
        return self

    def __exit__(self, *_) -> None:
        if self._task:
            self._task.cancel()

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done

    def submit(self, run: JobRun) -> list[Result | Failure]:
        """Decode a job; returns the outcomes that are there by now, in the order of submission."""
        outcomes = self.drain()
        if run.error:
            return [*outcomes, Failure(run.job, run.error)]
        self._task = BackgroundTask(partial(self._outcome, run))
        return outcomes if self.overlap else [*outcomes, *self.drain()]

    def drain(self, wait: bool = True) -> list[Result | Failure]:
        """The outcome of the job under way; without waiting, only if it is there already."""
        if not self._task or not (wait or self._task.done):
            return []
        outcome = self._task.result(self.poll)
        self._task = None
        return [outcome]

    def _outcome(self, run: JobRun) -> Result | Failure:
        with isolated(run, self.isolate):
            return self._result(run)
        return Failure(run.job, run.error)

    def _result(self, run: JobRun) -> Result:
        job, tensors = run.job, run.tensors
        run.tensors = {}  # a long batch keeps nothing of the jobs that are done
        last = job.stages[-1].key
        video = tensors[f"{last}_video"]
        if job.upscale:
            with self.recorder.phase("upsample"):
                for kind in UPSCALES[job.upscale]:
                    video = tensors[UPSCALED[kind]] = self.host.upsample(video, kind)
        if self.decode:
            audio = tensors[f"{last}_audio"]
            tensors["frames"], tensors["waveform"] = self._decode(video, audio)
        result = Result(
            job,
            tensors.get("frames"),
            job.output_frame_rate,
            tensors.get("waveform"),
            self.host.sample_rate,
            tensors,
        )
        if self.hand_over:
            self.hand_over(result)
        return result

    def _decode(self, video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
        """Frames and waveform; sound beside pictures where cores are free for it."""

        def decode_audio() -> Tensor:
            with self.recorder.phase("decode_audio"):
                return self.host.decode_audio(audio)

        sound = BackgroundTask(decode_audio) if self.overlap else nullcontext()
        with sound, self.recorder.phase("decode_video"):
            frames = self.host.decode_video(video)
        return frames, sound.result() if self.overlap else decode_audio()
