"""What the host does for jobs whose latents are there: upscale, decode, hand over; also beside the
next job's denoising."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ltx_neuron.backends.neuron_errors import DeviceFailure
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.errors import UserError
from ltx_neuron.host.background import BackgroundTask
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job
from ltx_neuron.progress import JobRun
from ltx_neuron.report.recorder import Recorder

UPSCALED = {
    "spatial": "upsampled",
    "temporal": "temporal_video",
}  # upsampler -> name of the latents it returns


@dataclass
class Result:
    """One job's video. `tensors` holds every named intermediate (interface: --save-tensors)."""

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


def outcome_of(run: JobRun, isolate: bool, function: Callable):
    """What the function returns; the job's Failure where it raises what is the job's own, and jobs
    are isolated."""
    try:
        return function()
    except (RankError, DeviceFailure, UserError):
        raise
    except Exception as error:
        if not isolate:
            raise
        run.failed = True
        return Failure(run.job, error)


class Finishing:
    """Finishes jobs, at most one beside what the caller does meanwhile. A context manager: leaving
    it stops that one.

    `look` is called now and then while the caller waits; an error of it is the caller's.
    """

    def __init__(
        self,
        host: HostModels,
        recorder: Recorder,
        overlap: bool,
        decode: bool,
        isolate: bool,
        hand_over: Callable[[Result], None] | None,
        look: Callable[[], None],
    ):
        self.host, self.recorder, self.overlap, self.look = host, recorder, overlap, look
        self.decode, self.isolate, self.hand_over = decode, isolate, hand_over
        self._beside: BackgroundTask | None = None

    def __enter__(self) -> "Finishing":
        return self

    def __exit__(self, *_) -> None:
        if self._beside:
            self._beside.cancel()

    def begin(self, run: JobRun) -> None:
        """Finish a job beside what follows; `ended` waits for it. The one before must have
        ended."""
        self._beside = BackgroundTask(
            partial(outcome_of, run, self.isolate, partial(self._result, run))
        )

    def ended(self, wait: bool = True) -> Iterator[Result | Failure]:
        """The outcome of the job that was begun, if one was; without waiting, if it is there
        already."""
        if self._beside and (wait or self._beside.done):
            outcome = self._beside.result(self.look)
            self._beside = None
            yield outcome

    def _result(self, run: JobRun) -> Result:
        job, tensors, run.tensors = (
            run.job,
            run.tensors,
            {},
        )  # a long batch keeps nothing of the jobs that are done
        last = "s2" if job.size.two_stage else "s1"
        video = tensors[f"{last}_video"]
        if job.upscale:
            with self.recorder.phase("upsample"):
                for kind, name in UPSCALED.items():
                    if job.upscale in (kind, "both"):
                        video = tensors[name] = self.host.upsample(video, kind)
        if self.decode:
            tensors["frames"], tensors["waveform"] = self._decoded(video, tensors[f"{last}_audio"])
        frames, waveform = tensors.get("frames"), tensors.get("waveform")
        result = Result(
            job, frames, job.output_frame_rate, waveform, self.host.sample_rate, tensors
        )
        if self.hand_over:
            self.hand_over(result)
        return result

    def _decoded(self, video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
        """Frames and waveform of a job's latents."""

        def decode_audio() -> Tensor:
            with self.recorder.phase("decode_audio"):
                return self.host.decode_audio(audio)

        with (
            BackgroundTask(decode_audio) if self.overlap else nullcontext() as sound,
            self.recorder.phase("decode_video"),
        ):
            frames = self.host.decode_video(video)
        return frames, sound.result() if self.overlap else decode_audio()
