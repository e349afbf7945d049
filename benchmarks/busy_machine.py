"""Generations at TP=4 beside busy loops, and generations that are paused for 10 s at a random
moment: whether all end well, with the same bytes.

    python benchmarks/busy_machine.py --folder DIR [--clips 200] [--loops 8] [--pauses 20]

Tiny assets are made, sharded and compiled in the folder. A process makes five clips, and eight
processes run at a time, so that starting and loading are under load as well. A pause stops every
process of a run (SIGSTOP to its group, as Ctrl-Z does) and continues it. Prints a line for what
does not end well and the verdict last; exits 1 unless all did.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lib.scripts import tiny_scripts

TP, PAUSE_SECONDS, CLIPS_A_PROCESS, AT_A_TIME = 4, 10.0, 5, 8
SIZE = ["--height", "64", "--width", "64", "--num-frames", "9"]


class Run(NamedTuple):
    """One process: its exit code, the bytes of its clips, what it printed, and how long it took."""

    code: int
    clips: list[bytes]
    said: str
    seconds: float


class Generations:
    """Starts runs, each in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.scripts = folder, tiny_scripts(folder, TP, SIZE)
        self.scripts.prepare()
        self.prompts = folder / "prompts.jsonl"
        lines = [{"prompt": "a red fox", "seed": seed} for seed in range(CLIPS_A_PROCESS)]
        self.prompts.write_text("\n".join(map(json.dumps, lines)))

    def run(self, name: str, pause_after: float | None = None) -> Run:
        """Make the clips in the folder `name`; pause all processes once, after so many seconds."""
        out = self.folder / name
        flags = ["--prompts-file", self.prompts, "--output-dir", out, "--no-prompt-cache"]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *self.scripts.command("generate", *flags)],
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


def pause(process: subprocess.Popen) -> None:
    """Stop a process's group, which has its ranks, and continue it."""
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


def bad(name: str, run: Run, wanted: Run) -> bool:
    """Whether a run did not end well; then it says how."""
    if run.code == 0 and run.clips == wanted.clips:
        return False
    same = "the same" if run.clips == wanted.clips else "OTHER"
    print(f"{name}: exit {run.code}, {same} bytes\n{run.said[-3000:]}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--pauses", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generations = Generations(options.folder)
    wanted = generations.run("undisturbed")
    if wanted.code:
        raise SystemExit(f"the undisturbed run failed:\n{wanted.said}")
    print(f"undisturbed: {wanted.seconds:.1f} s a process", flush=True)
    failed = 0
    with busy_loops(options.loops), ThreadPoolExecutor(AT_A_TIME) as pool:
        names = [f"busy-{number}" for number in range(options.clips // CLIPS_A_PROCESS)]
        seconds = []
        for name, run in zip(names, pool.map(generations.run, names), strict=True):
            failed += bad(name, run, wanted)
            seconds.append(run.seconds)
    if seconds:
        print(
            f"{len(seconds)} processes of {CLIPS_A_PROCESS} clips beside {options.loops} loops,"
            f" {AT_A_TIME} at a time: {failed} did not end well; {min(seconds):.1f} to"
            f" {max(seconds):.1f} s a process",
            flush=True,
        )
    moment, paused = random.Random(options.seed).uniform, 0
    for number in range(options.pauses):
        after = moment(0, wanted.seconds)
        run = generations.run(f"paused-{number}", after)
        paused += bad(f"paused after {after:.1f} s", run, wanted)
        print(f"paused after {after:.1f} s: ended after {run.seconds:.1f} s", flush=True)
    print(f"{options.pauses} processes paused for {PAUSE_SECONDS:.0f} s: {paused} did not end well")
    raise SystemExit(bool(failed or paused))


if __name__ == "__main__":
    main()
