"""A chunked clip: its windows are decoded and written one after another while the next ones run.

Pictures are blended and sounds cross where windows meet, so of a window only its end waits for the
next one.

Source: ltx-pipelines 1.4, chunks/export.py.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import chain
from queue import Empty, Queue

import torch
from torch import Tensor

from ltx_neuron.engine.decode import DecodedClip, Decoder, Result
from ltx_neuron.engine.outputs import WHOLE, JobRun
from ltx_neuron.host.background import POLL_SECONDS, Background, check_cancelled, prefetch, wait_for
from ltx_neuron.host.models import to_bytes
from ltx_neuron.job import Job
from ltx_neuron.sampling.chunks import CARRIED, Chunk

FADE_SECONDS = 0.04  # in which the sounds of two windows cross
_Window = tuple[Job, Callable[[], dict[str, Tensor]], Future]  # what reads its tensors; decoded


class Film(Background):
    """The clip of a run with windows. A context manager: leaving it ends its thread.

    write, decode  as of Engine.generate
    waits          the next window's stages begin when this one is decoded
    late           all windows are decoded at the end, in the place of the transformer
    poll           called regularly during a wait; its error ends the waiting
    """

    def __init__(self, decoder: Decoder, run: JobRun, write, decode, waits, late, poll):
        super().__init__("film")
        self.decoder, self.run, self.write, self.decode = decoder, run, write, decode
        self.waits, self.late, self.poll = waits, late, poll
        self.rate, self._waveform = decoder.host.sample_rate, torch.zeros(2, 0)
        self._tensors: dict[str, Tensor] = {}  # of all windows, unless they are written
        self._windows, self._made = Queue[_Window](), Future()
        self._before: Future | None = None  # of the window before

    def __enter__(self) -> "Film":
        """Begin with the windows that an earlier process finished."""
        for number in range(self.run.window):
            assert self.run.finished
            self._add(number, partial(self.run.finished, number))
        if self.run.window_has_ended:
            self.add_window()
        return self

    def add_window(self) -> None:
        """Decode the run's window, whose stages have ended."""
        tensors = dict(self.run.tensors)
        self._add(self.run.window, lambda: tensors)

    def _add(self, number: int, read: Callable[[], dict[str, Tensor]]) -> None:
        job, before = self.run.job.windows[number], self._before
        if not self.write:
            kept = {n: x for n, x in read().items() if not (n in WHOLE or n.startswith(CARRIED))}
            self._tensors |= {f"w{number}_{name}": x for name, x in kept.items()}
        if not self.decode:
            return
        self._before = Future()
        self._windows.put((job, read, self._before))
        if not number and job.sound:  # the clip's sound is the given one
            self._waveform = self.run.tensors["waveform"]
            self.rate = int(self.run.tensors["waveform_rate"])
        if not (number or self.late):
            self._made = self.submit(self._make)
        last = number + 1 == len(self.run.job.windows)
        if not self.late and (waited := self._before if self.waits and not last else before):
            wait_for(waited, self._check)

    def _check(self) -> None:
        """Raise the thread's error, or a rank's."""
        if self._made.done():
            self._made.result()
        self.poll()

    def result(self) -> Result:
        """Wait for the last window."""
        job, tensors, self.run.tensors = self.run.job, self.run.tensors, {}
        if self.decode:
            wait_for(self.submit(self._make) if self.late else self._made, self.poll)
            self.decoder.recorder.finished(job.output_frames / job.output_frame_rate)
        whole = {name: tensors[name] for name in WHOLE if name in tensors}
        return Result(job, whole | self._tensors, self.rate)

    # --- in the thread ----------------------------------------------------------------------------

    def _make(self) -> None:
        """Decode all windows, and write them."""
        job = self.run.job
        sound = None if job.sound else JoinedSound(self.rate, job.size.frame_rate)
        chunks = blended(self._decoded(sound))
        with closing(prefetch(chunks) if self.decoder.ahead else chunks) as chunks:
            frames, take = self.decoder.awaited(chunks), sound.take if sound else None
            whole = lambda: sound.samples if sound else self._waveform  # noqa: E731
            clip = DecodedClip(job, frames, whole, self.rate, next_samples=take)
            if self.write:
                self.write(clip)
            else:
                self._tensors["frames"] = torch.cat([*clip.chunks])
                self._tensors["waveform"] = clip.waveform()

    def _decoded(self, sound: "JoinedSound | None") -> Iterator[tuple[Chunk, Iterable[Tensor]]]:
        """Each window's frames, (N, H, W, 3) in [0, 1], when its sound is joined."""
        for _ in self.run.job.windows:
            job, read, decoded = self._next()
            tensors = read()
            assert job.chunk
            if sound:
                sound.add(job.chunk, self.decoder.sound(job, tensors))
            seed, keyframes = job.seed + job.chunk.number, job.decoded_keyframes(tensors)
            pictures = self.decoder.pictures(tensors[job.video_key], seed, keyframes, exact=True)
            del tensors, read
            with closing(pictures):
                yield job.chunk, pictures
            decoded.set_result(None)

    def _next(self) -> _Window:
        while True:
            try:
                return self._windows.get(timeout=POLL_SECONDS)
            except Empty:
                check_cancelled()


# --- where windows meet ---------------------------------------------------------------------------


def blended(windows: Iterable[tuple[Chunk, Iterable[Tensor]]]) -> Generator[Tensor, None, None]:
    """The frames of a clip, each uint8 (1, H, W, 3). windows: the frames of each, (N, H, W, 3) in
    [0, 1], in chunks. Those of its carry are mixed into the end of the window before."""
    held: deque[Tensor] = deque()  # the last frames so far
    for chunk, pictures in windows:
        count = len(held)
        for number, frame in enumerate(chain.from_iterable(pictures), -chunk.taken):
            if -count <= number < 0:
                before, weight = held.popleft(), (number + count + 1) / (count + 1)
                yield to_bytes(before + (frame - before) * weight)[None]
            elif number >= 0:
                held.append(frame)
                if len(held) > chunk.blend:
                    yield to_bytes(held.popleft())[None]


class JoinedSound:
    """The sounds of windows as one that grows; what was taken is dropped."""

    def __init__(self, rate: int, frame_rate: float):
        self.rate, self.frame_rate = rate, frame_rate
        self.samples = torch.zeros(2, 0)  # that were not taken
        self._fade = 0  # the last samples, which cross with the next window's

    def add(self, chunk: Chunk, waveform: Tensor) -> None:
        """Append the end of a window's waveform (2, n), as long as its own frames, and cross it
        with the end so far."""
        own = min(waveform.shape[1], self._count(chunk.frames - chunk.taken))
        kept = waveform[:, max(0, waveform.shape[1] - own - self._fade) :]
        if fade := kept.shape[1] - own:
            turn = torch.linspace(0, 1, fade) * torch.pi / 2
            end = self.samples[:, -fade:]
            end.copy_(end * turn.cos() + kept[:, :fade] * turn.sin())
        self.samples = torch.cat([self.samples, kept[:, fade:]], 1)
        self._fade = min(round(FADE_SECONDS * self.rate), self._count(chunk.blend))

    def _count(self, frames: int) -> int:
        return round(frames / self.frame_rate * self.rate)

    def take(self, start: int, end: int) -> Tensor:
        """The samples from `start`, where the last ones ended, to `end`, or as many as will not
        change."""
        ready = self.samples.shape[1] - self._fade
        block, rest = self.samples.tensor_split([max(0, min(end - start, ready))], 1)
        self.samples = rest.clone()
        return block
