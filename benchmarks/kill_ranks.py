"""Kill -9 of each rank at random moments of a generation at TP=4: how soon it is said, what is
left, and what --resume makes.

python benchmarks/kill_ranks.py --folder DIR [--kills 10] [--ranks 0 1 2 3] [--seed 1]

Tiny assets are made, sharded and compiled in the folder. Prints one line a kill and the verdict
last; exits 1 if a run took more than 10 s to end, left a process or shared memory, or was resumed
to other bytes.
"""

import argparse
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

TP, LIMIT_SECONDS = 4, 10
# of the ranks' life has passed when they denoise: they start slowly, and a tiny model steps fast
_DENOISING = 0.85
SIZE = ["--height", "64", "--width", "64", "--num-frames", "9", "--two-stage"]
PREPARE = {
    "shards/shard_backbone_weights.py": [],
    "shards/shard_gemma3_weights.py": ["--gemma-root"],
    "compile/compile_transformer.py": SIZE,
    "compile/compile_gemma3.py": ["--gemma-root"],
}


def ranks() -> dict[str, int]:
    """The rank processes of this process, by name (ltx-rank0 and so on are in the order of their
    pids)."""
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
    """How long a run's ranks are there."""

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
    """Kills one rank some time after all four have started."""

    def __init__(self, rank: int, after: float):
        super().__init__(daemon=True)
        self.rank, self.after, self.killed_at = rank, after, None

    def run(self) -> None:
        began = time.monotonic()
        while not (found := ranks()) and time.monotonic() - began < 60:
            time.sleep(0.02)
        time.sleep(self.after)
        found = ranks()
        if found:
            os.kill(found[self.rank], signal.SIGKILL)
            self.killed_at = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10, help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", choices=range(TP), default=list(range(TP)))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    from safetensors.torch import load_file

    from ltx_neuron.errors import RunError
    from ltx_neuron.tiny import make_tiny

    assets = make_tiny(options.folder / "assets")
    common = [
        "--checkpoint-path",
        assets.checkpoint,
        "--artifacts-dir",
        options.folder / "artifacts",
        "--tp-degree",
        TP,
        "--dtype",
        "float32",
        "--profile",
        "cpu",
    ]
    for script, more in PREPARE.items():
        gemma = [assets.gemma_root] if more == ["--gemma-root"] else []
        command = [sys.executable, ROOT / script, *common, *more, *gemma]
        subprocess.run(
            list(map(str, command)),
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    sys.path.insert(0, str(ROOT / "src"))
    import generate_ltx23
    from ltx_neuron.generate import generate

    def run(name: str, *more: str) -> tuple[bytes, dict[str, bytes]]:
        """One generation in this process; returns the bytes of its video and of its tensors.

        Without hidden_states: they are not part of a run's kept state, so a resumed one does not
        save them.
        """
        folder = options.folder / name
        flags = [
            "--gemma-root",
            assets.gemma_root,
            "--spatial-upsampler-path",
            assets.spatial_upsampler,
            "--neuron-gemma",
            "--prompt",
            "a red fox",
            "--output-path",
            folder / "fox.mp4",
            "--save-tensors",
            folder / "fox.safetensors",
        ]
        sys.argv = list(map(str, ["generate_ltx23.py", *common, *SIZE, *flags, *more]))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            generate(generate_ltx23.arguments())
        tensors = load_file(folder / "fox.safetensors")
        bits = {name: t.numpy().tobytes() for name, t in tensors.items() if name != "hidden_states"}
        return (folder / "fox.mp4").read_bytes(), bits

    run("warm-up")
    watch = Watch()
    watch.start()
    wanted = run("undisturbed")
    watch.join()
    choose = random.Random(options.seed)
    print(f"in an undisturbed run the ranks are there for {watch.seconds:.1f} s")
    slowest, bad, count = 0.0, [], 0
    for rank in options.ranks:
        number = 0
        while number < options.kills:
            begin = watch.seconds * (_DENOISING if number % 2 else 0)  # every second kill
            name, killer = (
                f"rank{rank}-{number}",
                Killer(rank, choose.uniform(begin, watch.seconds)),
            )
            shm = set(os.listdir("/dev/shm"))
            killer.start()
            try:
                got, error = run(name), None
            except RunError as caught:
                got, error = None, str(caught).splitlines()[0]
            ended = time.monotonic()
            killer.join()
            if killer.killed_at is None:  # it was too late: the ranks had done their part
                print(f"{name}: {killer.after:.2f} s, no rank left to kill; once more")
                bad += [name] if got != wanted else []
                continue
            count, number = count + 1, number + 1
            seconds, orphans = ended - killer.killed_at, ranks()
            state = (options.folder / name / "fox.resume.safetensors").is_file()
            same = run(name, "--resume") == wanted if got is None else got == wanted
            left = set(os.listdir("/dev/shm")) - shm
            slowest = max(slowest, seconds) if got is None else slowest
            start, end = (
                "its state" if state else "the beginning",
                ("the same bytes" if same else "OTHER BYTES"),
            )
            print(
                f"{name}: killed after {killer.after:.2f} s; {error or 'had done its part'}; said"
                f" after {seconds:.2f} s; {len(orphans)} processes and {len(left)} shared memories"
                f" left; resumed from {start} to {end}",
                flush=True,
            )
            if not same or orphans or left or (got is None and seconds > LIMIT_SECONDS):
                bad.append(name)
    print(f"{count} kills, slowest error {slowest:.2f} s, bad: {bad or 'none'}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
