"""Generations at TP 4 beside busy loops, and generations that are paused for ten seconds at a
random moment: all end well, with the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from helpers import stress_count

HOURS = 4  # the slowest seen took one, beside a test suite
pytestmark = pytest.mark.timeout(HOURS * 3600)
TP, LOOPS, CLIPS_A_PROCESS, AT_A_TIME, SEED = 4, 8, 5, 8, 1
PROCESSES, PAUSES = stress_count(40), stress_count(20)
PAUSE_SECONDS = 10.0
SIZE = {"height": 64, "width": 64, "num_frames": 9}


class Run(NamedTuple):
    """One process: its exit code, its clips, what it printed, and how long it took."""

    code: int
    clips: list[bytes]
    said: str
    seconds: float


@pytest.fixture(scope="module")
def generate(scripts, tiny, tmp_path_factory) -> Callable[..., Run]:
    """generate(name, pause_after) makes five clips in a process, which is paused once."""
    setup, folder = scripts(tiny, TP), tmp_path_factory.mktemp("busy")
    setup.prepare(**SIZE)
    lines = [{"prompt": "a red fox", "seed": seed} for seed in range(CLIPS_A_PROCESS)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))

    def run(name: str, pause_after: float | None = None) -> Run:
        out = folder / name
        flags = SIZE | {"prompts_file": prompts, "output_dir": out, "no_prompt_cache": True}
        words = setup.command("src/generate_ltx23.py", neuron_gemma=True, **flags)
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if pause_after is not None:
            threading.Timer(pause_after, pause, (process,)).start()
        said, _ = process.communicate()
        clips = [path.read_bytes() for path in sorted(out.glob("*.mp4"))]
        return Run(process.returncode, clips, said, time.monotonic() - began)

    return run


@pytest.fixture(scope="module")
def undisturbed(generate) -> Run:
    run = generate("undisturbed")
    assert run.code == 0 and len(run.clips) == CLIPS_A_PROCESS, run.said
    return run


def pause(process: subprocess.Popen) -> None:
    """Stop a process's group, which has its ranks, as Ctrl-Z does, and continue it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        os.killpg(process.pid, signal.SIGCONT)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    # A loop ends with this process, however that ends.
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    command = [sys.executable, "-c", code]
    # Sessions of their own: Linux shares CPUs between sessions, and a run has its own as well.
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def differences(runs: dict[str, Run], wanted: Run) -> dict[str, tuple]:
    """The runs that did not end well, and how."""
    return {
        name: (run.code, run.clips == wanted.clips, run.said[-3000:])
        for name, run in runs.items()
        if run.code or run.clips != wanted.clips
    }


def test_clips_made_beside_busy_loops_are_the_same(generate, undisturbed):
    """Starting and loading are under load as well: several processes run at a time."""
    names = [f"busy-{number}" for number in range(PROCESSES)]
    with busy_loops(LOOPS), ThreadPoolExecutor(AT_A_TIME) as pool:
        runs = dict(zip(names, pool.map(generate, names), strict=True))
    assert differences(runs, undisturbed) == {}


@pytest.mark.parametrize("number", range(PAUSES))
def test_a_run_that_is_paused_at_any_moment_ends_well(generate, undisturbed, number):
    after = random.Random(f"{SEED} {number}").uniform(0, undisturbed.seconds)
    run = generate(f"paused-{number}", after)
    assert differences({f"paused after {after:.1f} s": run}, undisturbed) == {}
