"""A chunked clip: its windows are decoded and written one after another while the next ones run.

Pictures are blended and sounds are faded where windows meet, so that of a window only its last
frames wait for the next one.

Source: ltx-pipelines 1.4, chunks/export.py.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from queue import Empty, Queue
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.engine.decode import DecodedClip, Decoder, Result
from ltx_neuron.engine.resume import WHOLE, JobRun
from ltx_neuron.host.background import POLL_SECONDS, Background, check_cancelled, prefetch, wait_for
from ltx_neuron.host.models import to_bytes
from ltx_neuron.job import Job
from ltx_neuron.sampling.chunks import Chunk

FADE_SECONDS = 0.04  # in which the sounds of two windows cross


class _Ended(NamedTuple):
    """A window without stages left. decoded: is done when its frames were taken."""

    job: Job
    read: Callable[[], dict[str, Tensor]]
    decoded: Future


class Film:
    """The clip of a run with windows. A context manager: leaving it ends its thread.

    write, decode  as of Engine.generate
    waits          the next window's stages begin when this one is decoded
    late           decoding begins when all windows have ended: it needs their place
    poll           called regularly during a wait; its error ends the waiting
    """

    def __init__(
        self,
        decoder: Decoder,
        run: JobRun,
        write: Callable[[DecodedClip], None] | None,
        decode: bool,
        waits: bool,
        late: bool,
        poll: Callable[[], None],
    ):
        self.decoder, self.run, self.write, self.decode = decoder, run, write, decode
        self.waits, self.late, self._poll = waits, late, poll
        self.tensors: dict[str, Tensor] = {}  # of all windows, unless they are written
        self.rate, self._given = decoder.host.sample_rate, None  # of an input sound
        self._windows, self._thread = Queue[_Ended](), Background("film")
        self._last = self._written = None

    def __enter__(self) -> "Film":
        """Begin with the windows that an earlier process finished."""
        run = self.run
        for number in range(run.window):
            assert run.finished
            self._add(number, partial(run.finished, number))
        if run.window_has_ended:
            self.add_window()
        return self

    def __exit__(self, *error) -> None:
        self._thread.__exit__(*error)

    def add_window(self) -> None:
        """Decode the run's window, whose stages have ended."""
        tensors = dict(self.run.tensors)
        self._add(self.run.window, lambda: tensors)

    def _add(self, number: int, read: Callable[[], dict[str, Tensor]]) -> None:
        job, before = self.run.job.windows[number], self._last
        if self.run.job.sound and self._given is None:
            self._given = self.run.tensors["waveform"]
            self.rate = int(self.run.tensors["waveform_rate"])
        if not self.write:
            kept = {n: x for n, x in read().items() if n not in WHOLE}
            self.tensors |= {f"w{number}_{n}": x for n, x in kept.items() if "carried" not in n}
        if not self.decode:
            return
        self._windows.put(ended := _Ended(job, read, Future()))
        self._last = ended.decoded
        if self.late:
            return
        if not self._written:
            self._written = self._thread.submit(self._make)
        last = number + 1 == len(self.run.job.windows)
        waited = ended.decoded if self.waits and not last else before
        if waited:
            wait_for(waited, self._check)

    def _check(self) -> None:
        """Raise the writer's error, or a rank's."""
        if self._written and self._written.done():
            self._written.result()
        self._poll()

    def result(self) -> Result:
        """Wait for the last window."""
        run = self.run
        tensors = {name: run.tensors[name] for name in WHOLE if name in run.tensors}
        run.tensors = {}
        if self.decode:
            wait_for(self._written or self._thread.submit(self._make), self._poll)
            self.decoder.recorder.finished(run.job.output_frames / run.job.output_frame_rate)
        return Result(run.job, tensors | self.tensors, self.rate)

    # --- in the thread ----------------------------------------------------------------------------

    def _make(self) -> None:
        """Decode all windows, and write them."""
        job = self.run.job
        sound = None if job.sound else JoinedSound(self.rate, job.size.frame_rate)
        chunks = blended(self._decoded(sound))
        if self.decoder.ahead:
            chunks = prefetch(chunks)
        with closing(chunks):
            clip = DecodedClip(job, self.decoder.awaited(chunks), self._waveform, self.rate)
            if sound:
                clip.waveform, clip.next_samples = sound.whole, sound.take
            if self.write:
                self.write(clip)
            else:
                self.tensors["frames"] = torch.cat([*clip.chunks])
                self.tensors["waveform"] = clip.waveform()

    def _waveform(self) -> Tensor:
        assert self._given is not None
        return self._given

    def _decoded(self, sound: "JoinedSound | None") -> Iterator[tuple[Chunk, Iterable[Tensor]]]:
        """Each window's frames, (N, H, W, 3) in [0, 1], when its sound is joined."""
        for _ in self.run.job.windows:
            job, read, decoded = self._next()
            tensors, decoder = read(), self.decoder
            assert job.chunk
            if sound:
                sound.add(job.chunk, decoder.sound(job, tensors))
            seed, keyframes = job.seed + job.chunk.number, job.decoded_keyframes(tensors)
            pictures = decoder.pictures(tensors[job.video_key], seed, keyframes, exact=True)
            del tensors, read
            with closing(pictures):
                yield job.chunk, pictures
            decoded.set_result(None)

    def _next(self) -> _Ended:
        while True:
            try:
                return self._windows.get(timeout=POLL_SECONDS)
            except Empty:
                check_cancelled()


# --- where windows meet ---------------------------------------------------------------------------


def blended(windows: Iterable[tuple[Chunk, Iterable[Tensor]]]) -> Generator[Tensor, None, None]:
    """The frames of a clip, uint8 (N, H, W, 3), in chunks. windows: the frames of each, (N, H, W,
    3) in [0, 1], in chunks. Those of its carry are mixed into the end of the window before."""
    end: Tensor | None = None  # the last frames of the window before
    for chunk, pictures in windows:
        first, held = -chunk.taken, []  # of the next frame, counted from the window's own
        for frames in pictures:
            if end is not None:
                number = first + len(end)  # of the first frame in `end`
                taken = range(max(0, number), min(len(end), number + len(frames)))
                if taken:
                    yield _mixed(end, frames[taken.start - number :], taken)
            own = frames[max(0, -first) :]
            first += len(frames)
            held.append(own)
            count = sum(map(len, held))
            if count > chunk.blend:
                ready = torch.cat(held)
                held = [ready[count - chunk.blend :].clone()]
                yield to_bytes(ready[: count - chunk.blend].contiguous())
                del ready
            del frames, own
        end = torch.cat(held) if chunk.blend else None


def _mixed(end: Tensor, frames: Tensor, taken: range) -> Tensor:
    """Frames of a window's end with those that the next window has of it."""
    weights = (torch.arange(taken.start, taken.stop) + 1.0) / (len(end) + 1)
    mixed = end[taken.start : taken.stop]
    frames = frames[: len(taken)]
    return to_bytes(mixed + (frames - mixed) * weights[:, None, None, None])


class JoinedSound:
    """The sounds of windows, as one that grows; what was taken is dropped."""

    def __init__(self, rate: int, frame_rate: float):
        self.rate, self.frame_rate = rate, frame_rate
        self._samples, self._start = torch.zeros(2, 0), 0  # those at hand, and where they begin
        self._blend = self._held = 0  # frames, and samples at the end that may still change

    def add(self, chunk: Chunk, waveform: Tensor) -> None:
        """Append the end of a window's waveform (2, n), as long as its own frames, and cross it
        with the end so far."""
        own = round(chunk.new_frames / self.frame_rate * self.rate)
        fade, here = self._fade(self._blend), self._samples
        fade = min(fade, self._start + here.shape[1])
        kept = waveform[:, max(0, waveform.shape[1] - own - fade) :]
        fade = max(0, kept.shape[1] - min(waveform.shape[1], own))
        if fade:
            turn = torch.linspace(0, 1, fade) * torch.pi / 2
            crossed = here[:, -fade:] * turn.cos() + kept[:, :fade] * turn.sin()
            here, kept = torch.cat([here[:, :-fade], crossed], 1), kept[:, fade:]
        self._blend = chunk.blend
        self._held = self._fade(chunk.blend)
        self._samples = torch.cat([here, kept], 1)

    def _fade(self, blend: int) -> int:
        return min(round(FADE_SECONDS * self.rate), round(blend / self.frame_rate * self.rate))

    def take(self, start: int, end: int) -> Tensor:
        """The samples from `start` to `end`, or as many as will not change."""
        ready = self._samples.shape[1] - self._held
        block = self._samples[:, : max(0, min(end - self._start, ready))]
        block = block[:, max(0, start - self._start) :]
        taken = max(0, start + block.shape[1] - self._start)
        self._samples, self._start = self._samples[:, taken:].clone(), self._start + taken
        return block

    def whole(self) -> Tensor:
        """All samples that were not taken."""
        return self._samples
