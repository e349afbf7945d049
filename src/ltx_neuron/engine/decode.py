"""The end of a job: its latents are upscaled and decoded, and written while they are decoded. Jobs
end one after another, in a thread."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends.neuron_errors import DeviceFailure
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.errors import UserError
from ltx_neuron.host.background import POLL_SECONDS, Background, prefetch, wait_for
from ltx_neuron.host.encode_inputs import with_source
from ltx_neuron.host.hdr import exr_folder
from ltx_neuron.host.masters import write_hlg, write_prores
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.video import cut_frames, cut_sound, write_frames, write_video, write_wav
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.extension import joined
from ltx_neuron.sampling.shapes import UPSCALES

# Latent upsampler -> the name of its output in --save-tensors.
UPSCALED = {"spatial": "upsampled", "temporal": "temporal_video"}


@dataclass
class DecodedClip:
    """One job's video or sound, which is decoded as its chunks are read."""

    job: Job
    # Frames in order of time, each uint8 (N, H, W, 3); of HDR float32 in [0, 1], in ACEScct
    chunks: Iterator[Tensor]
    waveform: Callable[[], Tensor]  # waits for the sound and returns it: float32 (2, samples)
    sample_rate: int
    sound_is_ready: Callable[[], bool] = lambda: True  # whether `waveform` returns at once
    # Of a chunked clip, in place of `waveform`: see write_video
    next_samples: Callable[[int, int], Tensor] | None = None

    def write(self, path: Path, recorder: Recorder | None = None) -> None:
        """Write the MP4 chunk by chunk, with EXR files of HDR, the MOV of chunks with alpha, or the
        WAV of sound alone; as a phase of the recorder."""
        alone, rate, ready = self.job.sound_only, self.job.output_frame_rate, self.sound_is_ready
        with recorder.phase("write_wav" if alone else "encode_mp4") if recorder else nullcontext():
            if alone:
                write_wav(path, self.waveform(), self.sample_rate)
            elif self.job.media.hdr:
                folder = exr_folder(path, space := self.job.exr_colorspace)
                write_hlg(path, write_frames(folder, self.chunks, space), rate)
            elif path.suffix.lower() == ".mov":
                write_prores(path, self.chunks, rate)
            else:
                waveform = None if self.job.silent else self.waveform
                sound = waveform, self.sample_rate, ready, self.next_samples
                write_video(path, self.chunks, rate, *sound)


@dataclass
class Result:
    """One job's video. `tensors` holds every named intermediate, as --save-tensors writes them."""

    job: Job
    tensors: dict[str, Tensor]
    sample_rate: int

    @property
    def frames(self) -> Tensor | None:
        """uint8 (N, H, W, 3); None for latents only, sound alone, or if `write` received them."""
        return self.tensors.get("frames")

    @property
    def waveform(self) -> Tensor | None:
        """float32 (2, samples); None for latents only."""
        return self.tensors.get("waveform")

    def clip(self) -> DecodedClip:
        """The video as a Clip, if its frames were kept."""
        frames, waveform = self.frames, self.waveform
        assert waveform is not None and (frames is not None or self.job.sound_only)
        chunks = iter(() if frames is None else (frames,))
        return DecodedClip(self.job, chunks, lambda: waveform, self.sample_rate)


@dataclass
class JobFailure:
    """The error of one job of a batch."""

    job: Job
    error: Exception


class Decoder:
    """Decodes finished jobs.

    ahead         while a chunk is written, the next one is decoded, and the sound in parallel
    decode_video  latents (1, 128, F, h, w), the job's seed and keyframes to chunks of frames, uint8
                  (N, H, W, 3); decode_audio: latents (1, 8, Ta, 16) to a waveform (2, samples).
                  Without them the host's
    """

    def __init__(
        self,
        host: HostModels,
        recorder: Recorder,
        ahead: bool,
        decode_video: Callable[..., Iterator[Tensor]] | None = None,
        decode_audio: Callable[[Tensor], Tensor] | None = None,
    ):
        self.host, self.recorder, self.ahead = host, recorder, ahead
        self.decode_video = decode_video or host.decode_video
        self.decode_audio = decode_audio or host.decode_audio

    def result(
        self, run: JobRun, write: Callable[[DecodedClip], None] | None = None, decode: bool = True
    ) -> Result:
        """The result of a run with all latents.

        write   called with the Clip while it is decoded; frames are then not kept
        decode  False: latents only
        """
        job, tensors = run.job, run.tensors
        run.tensors = {}  # frees the memory of finished jobs in a long batch
        if job.extension:
            tensors["s1_video"], tensors["s1_audio"] = joined(job.extension, tensors)
        if job.dfr:
            tensors[job.video_key] = job.rendering.final(tensors)
        video = tensors.get(job.video_key)
        if job.upscale:
            assert video is not None  # sound alone is not upscaled
            with self.recorder.phase("upsample"):
                for kind in UPSCALES[job.upscale]:
                    video = tensors[UPSCALED[kind]] = self.host.upsample(video, kind)
        if job.audio_key != f"{job.stages[-1].key}_audio" and not (job.extension or job.sound):
            tensors["final_audio"] = tensors[job.audio_key].clone()
        # An input sound is muxed unchanged.
        rate = int(tensors["waveform_rate"]) if job.sound else self.host.sample_rate
        if decode:
            with self._clip(job, video, tensors, rate) as clip:
                if write:
                    write(clip)
                elif not job.sound_only:
                    tensors["frames"] = torch.cat(list(clip.chunks))
                tensors["waveform"] = clip.waveform()
            self.recorder.finished(job.output_frames / job.output_frame_rate)
        return Result(job, tensors, rate)

    @contextmanager
    def _clip(
        self, job: Job, video: Tensor | None, tensors: dict[str, Tensor], rate: int
    ) -> Iterator[DecodedClip]:
        """A job's clip. If cores are free, pictures are decoded ahead, and sound in parallel."""
        hdr, known = job.media.hdr, (job.seed, job.decoded_keyframes(tensors))
        if hdr and video is not None:
            chunks = self.pictures(video.float(), *known, self.host.exact.decode_video, exact=True)
        else:
            chunks = self.pictures(video, *known)
        sound = cache(partial(self.sound, job, tensors))
        if job.extension:
            chunks = with_source(job, chunks)
        elif hdr:
            chunks = cut_frames(chunks, job.size.num_frames, (1 + job.high_quality, *hdr.sides))
        elif job.tail_frames or job.dfr:
            frames = job.output_frames
            chunks = cut_frames(chunks, frames)
            sound = partial(cut_sound, sound, frames, job.output_frame_rate, rate)
        with ExitStack() as stack:
            future = None
            if self.ahead:
                future = stack.enter_context(Background()).submit(sound)
                chunks = prefetch(chunks)
            stack.enter_context(closing(chunks))

            def waveform() -> Tensor:
                with self.recorder.paused():
                    return wait_for(future) if future else sound()

            ready = future.done if future else lambda: False
            yield DecodedClip(job, self.awaited(chunks), waveform, rate, ready)

    def pictures(
        self,
        video: Tensor | None,
        seed: int,
        keyframes: dict[int, Tensor],
        decode_video: Callable[..., Iterator[Tensor]] | None = None,  # None: the decoder's own
        **exact: bool,  # as of HostModels.decode_video
    ) -> Generator[Tensor, None, None]:
        """The frames of a video's latents."""
        if video is None:
            return
        decode_video = decode_video or self.decode_video
        chunks = decode_video(video, seed=seed, keyframes=keyframes, **exact)
        with self.recorder.phase("decode_video"):
            for chunk in chunks:
                with self.recorder.paused():
                    yield chunk
                del chunk  # freed while the next one is decoded

    def awaited(self, chunks: Iterator[Tensor]) -> Iterator[Tensor]:
        """The chunks. Waiting for one does not count towards the caller's phase."""
        while True:
            with self.recorder.paused():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
            del chunk

    def sound(self, job: Job, tensors: dict[str, Tensor]) -> Tensor:
        """The waveform (2, samples) of a job's latents, its input sound, or no samples."""
        if job.sound or job.silent:
            return tensors["waveform"] if job.sound else torch.zeros(2, 0)
        with self.recorder.phase("decode_audio"):
            waveform = self.decode_audio(tensors[job.audio_key])
        return job.extension.heard(waveform, self.host.sample_rate) if job.extension else waveform


# --- many jobs ------------------------------------------------------------------------------------


class Decodes(Background):
    """Decodes jobs in its thread, one after another.

    isolate  see Engine.run
    waits    `end` waits for the result
    poll     called regularly during a wait; its error ends the waiting
    """

    def __init__(self, isolate: bool, waits: bool, poll: Callable[[], None]) -> None:
        super().__init__("decode")
        self.isolate, self.waits, self.poll = isolate, waits, poll
        self._future: Future | None = None

    def end(self, run: JobRun, generation: Iterator) -> Iterator[Result | JobFailure]:
        """End a job's generation. Yields the outcomes that are ready, in their order."""
        yield from self.outcomes()
        self._future = self.submit(_outcome, run, generation, self.isolate)
        if self.waits or run.error:
            yield from self.outcomes()

    def outcomes(self, wait: bool = True) -> Iterator[Result | JobFailure]:
        """The last job's outcome; without `wait`, only if it is ready."""
        if self._future and (wait or self._future.done()):
            future, self._future = self._future, None
            yield wait_for(future, self.poll)

    def are_running(self) -> bool:
        """Wait briefly for the running decode. Returns whether it still runs."""
        self.poll()
        return bool(self._future) and bool(wait([self._future], POLL_SECONDS).not_done)


def _outcome(run: JobRun, generation: Iterator, isolate: bool) -> Result | JobFailure:
    if not run.error:
        with isolated(run, isolate):
            return next(generation)
    assert run.error
    return JobFailure(run.job, run.error)


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
