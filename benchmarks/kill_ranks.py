"""Kill -9 of each rank at random moments of a generation at TP=4: how soon the run ends with an
error, what is left behind, and whether --resume gives the same bytes.

    python benchmarks/kill_ranks.py --folder DIR [--kills 10] [--ranks 0 1 2 3] [--seed 1]

Tiny assets are made, sharded and compiled in the folder. Prints one line a kill and the verdict
last; exits 1 if a run took more than 10 s to end, left a process or shared memory, or was resumed
to other bytes.
"""

import argparse
import io
import os
import random
import runpy
import signal
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from lib.scripts import tiny_scripts
from safetensors.torch import load_file

TP, LIMIT_SECONDS = 4, 10
# The share of the ranks' life after which they denoise: starting them takes most of it, and a tiny
# model's steps are fast.
DENOISING = 0.85
SIZE = ["--height", "64", "--width", "64", "--num-frames", "9", "--two-stage"]


def ranks() -> dict[str, int]:
    """The pids of this process's rank processes, by rank; empty unless all of them run.

    They are the grandchildren of this process, started in the order of their ranks.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.name))
    grandchildren = sorted(
        pid for child in children.get(os.getpid(), []) for pid in children.get(child, [])
    )
    return dict(enumerate(grandchildren)) if len(grandchildren) == TP else {}


class Watch(threading.Thread):
    """Measures how long a run's ranks exist."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seconds = 0.0

    def run(self) -> None:
        while not ranks():
            time.sleep(0.02)
        began = time.monotonic()
        while ranks():
            time.sleep(0.02)
        self.seconds = time.monotonic() - began


class Killer(threading.Thread):
    """Kills one rank `after` seconds after all four have started."""

    def __init__(self, rank: int, after: float):
        super().__init__(daemon=True)
        self.rank, self.after, self.killed_at = rank, after, None

    def run(self) -> None:
        began = time.monotonic()
        while not ranks() and time.monotonic() - began < 60:
            time.sleep(0.02)
        time.sleep(self.after)
        pids = ranks()
        if pids:
            os.kill(pids[self.rank], signal.SIGKILL)
            self.killed_at = time.monotonic()


class Run(NamedTuple):
    """One generation: the bytes of its video and tensors, or the first line of its error."""

    video: bytes | None
    tensors: dict[str, bytes] | None
    error: str | None


class Generator:
    """Runs generate_ltx23.py on tiny assets, in this process: its ranks are then grandchildren."""

    def __init__(self, folder: Path):
        self.folder, self.scripts = folder, tiny_scripts(folder, TP, SIZE)
        self.scripts.prepare()

    def run(self, name: str, *more: str) -> Run:
        """Generate into the folder `name`. Without hidden_states among the tensors: a run's kept
        state has none, so a resumed run does not save them."""
        folder = self.folder / name
        flags = ["--prompt", "a red fox", "--output-path", folder / "fox.mp4"]
        flags += ["--save-tensors", folder / "fox.safetensors"]
        sys.argv = self.scripts.command("generate", *flags, *more)
        printed = io.StringIO()
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(printed):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                *_, message = printed.getvalue().rpartition("error: ")
                return Run(None, None, message.splitlines()[0])
        tensors = load_file(folder / "fox.safetensors")
        tensors.pop("hidden_states", None)
        return Run(
            (folder / "fox.mp4").read_bytes(),
            {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
            None,
        )


class Verdict:
    """What all kills together showed."""

    def __init__(self):
        self.kills, self.slowest, self.bad = 0, 0.0, []

    def __str__(self) -> str:
        return f"{self.kills} kills, slowest error {self.slowest:.2f} s, bad: {self.bad or 'none'}"


def kill_once(
    generator: Generator, name: str, killer: Killer, wanted: Run, verdict: Verdict
) -> bool:
    """Run once with that killer, then resume; prints a line. False where the kill came too late:
    the ranks had ended."""
    shared = set(os.listdir("/dev/shm"))
    killer.start()
    run = generator.run(name)
    ended = time.monotonic()
    killer.join()
    if killer.killed_at is None:
        print(f"{name}: {killer.after:.2f} s, no rank left to kill; once more")
        verdict.bad += [name] if run != wanted else []
        return False
    seconds, orphans = ended - killer.killed_at, ranks()
    has_state = (generator.folder / name / "fox.resume.safetensors").is_file()
    resumed = generator.run(name, "--resume") if run.error else run
    left = set(os.listdir("/dev/shm")) - shared
    print(
        f"{name}: killed after {killer.after:.2f} s; {run.error or 'had done its part'}; said after"
        f" {seconds:.2f} s; {len(orphans)} processes and {len(left)} shared memories left; resumed"
        f" from {'its state' if has_state else 'the beginning'} to"
        f" {'the same bytes' if resumed == wanted else 'OTHER BYTES'}",
        flush=True,
    )
    verdict.kills += 1
    late = False
    if run.error:
        verdict.slowest = max(verdict.slowest, seconds)
        late = seconds > LIMIT_SECONDS
    if resumed != wanted or orphans or left or late:
        verdict.bad.append(name)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10, help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", choices=range(TP), default=list(range(TP)))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = Generator(options.folder)
    generator.run("warm-up")
    watch = Watch()
    watch.start()
    wanted = generator.run("undisturbed")
    watch.join()
    random_moment = random.Random(options.seed).uniform
    print(f"in an undisturbed run the ranks are there for {watch.seconds:.1f} s")
    verdict = Verdict()
    for rank in options.ranks:
        number = 0
        while number < options.kills:
            # Every second kill comes while the ranks denoise.
            begin = watch.seconds * (DENOISING if number % 2 else 0)
            killer = Killer(rank, random_moment(begin, watch.seconds))
            number += kill_once(generator, f"rank{rank}-{number}", killer, wanted, verdict)
    print(verdict)
    raise SystemExit(bool(verdict.bad))


if __name__ == "__main__":
    main()
