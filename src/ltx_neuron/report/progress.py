"""Shows on a terminal what a run does: a line or a bar for each phase from its begin, whose seconds
pass, with the seconds that it took the last time. Nothing is shown where stderr is no terminal."""

import hashlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import TextIO, TypeVar

from tqdm import tqdm

from ltx_neuron import machine
from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.format import format_seconds

# Phase of the latency report, or "check" -> what a user reads
TITLES = {
    "check": "checking the files",
    "load_gemma3": "loading the text encoder",
    "encode_text": "encoding the prompt",
    "unload_gemma3": "unloading the text encoder",
    "load_transformer": "loading the transformer",
    "encode_inputs": "encoding the inputs",
    "warmup": "warming up",
    "denoise_stage_1": "preparing stage 1",
    "upsample": "upsampling",
    "denoise_stage_2": "preparing stage 2",
    "denoise_stage_3": "preparing stage 3",
    "unload_transformer": "unloading the transformer",
    "load_vae": "loading the video VAE",
    "decode_video": "decoding the video",
    "decode_audio": "decoding the sound",
    "encode_mp4": "writing the video",
    "write_wav": "writing the sound",
}
# Their seconds depend on the video's size
_OF_SIZE = ("encode_inputs", "warmup", "denoise", "upsample", "decode", "encode_mp4", "write_wav")
Item = TypeVar("Item")
_TICK_SECONDS = 0.5
_SHORTEST_SECONDS = 0.1  # shorter phases leave no line


@contextmanager
def _ticking(bar: tqdm) -> Iterator[None]:
    """Refresh a bar while the block runs, so that its time passes between its steps."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            bar.refresh()

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident:
            thread.join()


def bar(items: Iterable[Item], title: str, unit: str, shown: bool | None = None) -> Iterator[Item]:
    """The items, with a bar. shown: None: on a terminal alone."""
    disable = None if shown is None else not shown
    with tqdm(items, title, unit=unit, disable=disable) as shown_bar, _ticking(shown_bar):
        yield from shown_bar


@contextmanager
def line(title: str, seconds: float | None = None) -> Iterator[None]:
    """A line on a terminal while the block runs. seconds: of the last time."""
    began = time.monotonic()
    last = f", last time {format_seconds(seconds)}" if seconds else ""
    form = "{desc}: {elapsed}" + last
    with tqdm(desc=title, bar_format=form, leave=False, disable=None) as shown_bar:
        hidden = shown_bar.disable
        with _ticking(shown_bar):
            yield
    took = time.monotonic() - began
    if not hidden and took >= _SHORTEST_SECONDS:
        tqdm.write(f"{title}: {took:.1f} s", file=sys.stderr)


class _AboveBars(io.TextIOBase):
    """Writes whole lines to a terminal, above the lines and bars on stderr."""

    def __init__(self, stream: TextIO):
        self.stream, self.text = stream, ""

    def write(self, text: str) -> int:
        whole, newline, self.text = (self.text + text).rpartition("\n")
        if newline:
            with tqdm.external_write_mode(file=sys.stderr):
                print(whole, file=self.stream, flush=True)
        return len(text)


def printing() -> AbstractContextManager:
    """What the block prints on a terminal stands above the lines and bars."""
    return redirect_stdout(_AboveBars(sys.stdout)) if sys.stdout.isatty() else nullcontext()


def this_machine() -> dict:
    """What the times of a run depend on."""
    return {
        "processor": machine.processor(),
        "instructions": machine.instructions(),
        "cpus": os.cpu_count(),
        "cpus_allowed": machine.cpus(),
        "torch": machine.package_version("torch"),
    }


def times_file(artifacts_dir: Path, kind: str) -> Path:
    """<artifacts-dir>/calibration/<kind>-<digest of this machine>.json"""
    digest = hashlib.sha256(json.dumps(this_machine()).encode()).hexdigest()[:8]
    return artifacts_dir / "calibration" / f"{kind}-{digest}.json"


class PhaseLines:
    """A line for each phase. path: the file of this machine's times, JSON {phase and size: s}."""

    def __init__(self, path: Path):
        self.path, self.size = path, ""
        self._seconds: dict[str, float] = {}
        with suppress(UserError):  # no file, or a damaged one
            self._seconds = read_json(path)
        self._stored = dict(self._seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show one of TITLES while the block runs, and keep its seconds."""
        key = f"{name} {self.size}" if name.startswith(_OF_SIZE) else name
        began = time.monotonic()
        with line(TITLES[name], self._seconds.get(key)):
            yield
        self._seconds[key] = round(time.monotonic() - began, 1)

    def save(self) -> None:
        """Write the times, unless the artifacts folder is absent or cannot be written."""
        if self._seconds != self._stored and self.path.parents[1].is_dir():
            with suppress(OSError):
                write_json(self.path, self._seconds)
            self._stored = dict(self._seconds)
