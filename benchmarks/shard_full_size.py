"""Cut the released checkpoint's size for four ranks, and `cp` as many bytes to the same disk, in
turn in the same run.

    python benchmarks/shard_full_size.py --folder DIR [--blocks N] [--tp-degree 4] [--rounds 3]
        [--memory as-it-is] [--content random] [--float8]

The source is sparse (lib/full_size.py), so both read zeros from memory and write real bytes; both
end when these are on the disk. With --content random both sources are on the disk too, and are read
from there. Both begin with the memory full of cached pages. On a virtual machine that matters:
deleted files give memory back to the host, and who is the first to touch it again pays for it, more
than for the work. With --memory as-it-is both begin ten seconds after the files before them were
deleted and both pay, which hides most of the difference between them. Needs room for one copy: 38
GB for all 48 blocks; with --content random for the source (46 GB) and one more copy. With --float8
the source is as the released float8 checkpoint, 29 GB. Prints its ratio last.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from lib.full_size import write_sparse_checkpoint
from lib.harness import finish
from lib.harness import parser as harness_parser
from lib.scripts import ROOT, Scripts
from tqdm import tqdm

from ltx_neuron.weights.tensorfile import TensorFile

IMPORTS = "import ltx_neuron.flags, ltx_neuron.artifacts.workspace"  # what the shard script imports


def timed(command: list) -> tuple[float, float]:
    """Seconds and peak resident memory (GB) of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(
            f"{' '.join(map(str, command))} failed: {os.waitstatus_to_exitcode(status)}"
        )
    return time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e9


def fill_memory(folder: Path) -> None:
    """Leave the memory full of pages of a file that nobody needs."""
    filler = folder / "filler"
    with open(filler, "wb") as file:
        file.truncate(psutil.virtual_memory().total)
    block = memoryview(bytearray(2**20))
    with open(filler, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def wait_for_host(_: Path) -> None:
    """Wait until the memory of deleted files has gone back to the virtual machine's host."""
    time.sleep(10)


def fill(path: Path, start: int) -> None:
    """Overwrite a sparse file from `start` to its end with random bytes, and drop them from the
    page cache."""
    block = memoryview(os.urandom(64 * 2**20))
    with open(path, "r+b", buffering=0) as file:
        left = file.seek(0, os.SEEK_END) - start
        file.seek(start)
        while left:
            left -= file.write(block[:left])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copied(folder: Path, size: int, content: str, prepare: Callable[[Path], None]) -> float:
    """Seconds that `cp` and `sync` take for `size` bytes."""
    source, copy = folder / "source", folder / "copy"
    with open(source, "wb") as file:
        file.truncate(size)
    if content == "random":
        fill(source, 0)
    prepare(folder)
    seconds = timed(["cp", "--sparse=never", source, copy])[0] + timed(["sync", copy])[0]
    source.unlink()
    copy.unlink()
    return seconds


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="an empty folder on the disk to measure"
    )
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--tp-degree", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory",
        choices=("full", "as-it-is"),
        default="full",
        help="what each of them begins with",
    )
    parser.add_argument(
        "--content", choices=("sparse", "random"), default="sparse", help="of the sources"
    )
    parser.add_argument("--float8", action="store_true", help="the source, of sparse content")
    args = parser.parse_args()
    if args.float8 and args.content == "random":
        parser.error("--float8 has scales, which random bytes are not: leave out --content random")
    args.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    path = args.folder / "ltx-2.3-sparse.safetensors"
    checkpoint = write_sparse_checkpoint(path, args.blocks, args.float8)
    if args.content == "random":
        fill(checkpoint, 8 + len(TensorFile(checkpoint, "").header))
    size = checkpoint.stat().st_size
    seconds = time.perf_counter() - began
    print(f"{args.content} checkpoint: {size} bytes, {args.blocks} blocks, {seconds:.1f} s")

    _, imports_gb = timed([sys.executable, "-c", IMPORTS])
    artifacts = args.folder / "artifacts"
    run = ["--tp-degree", args.tp_degree, "--profile", "cpu"]
    command = Scripts(checkpoint, artifacts, run, []).command("shard_dit")
    prepare = fill_memory if args.memory == "full" else wait_for_host
    sharding, copying = [], []  # seconds of each round
    peak, written = 0.0, 0
    for _ in tqdm(range(args.rounds), unit="round"):
        prepare(args.folder)
        seconds, memory = timed([sys.executable, *command])
        files = {
            path.name: path.stat().st_size
            for path in sorted(artifacts.glob("weights/*/*.safetensors"))
        }
        shutil.rmtree(artifacts)
        peak, written = max(peak, memory), sum(files.values())
        sharding.append(seconds)
        copying.append(copied(args.folder, written, args.content, prepare))
    for path in (checkpoint, args.folder / "filler"):
        path.unlink(missing_ok=True)
    for name, size in files.items():
        print(f"  {name}: {size / 1e9:.3f} GB")
    for name, times in (("shard", sharding), ("cp and sync", copying)):
        rate = written / 1e9 / statistics.median(times)
        print(
            f"{name}: {', '.join(f'{seconds:.1f}' for seconds in times)} s, median {rate:.3f} GB/s"
        )
    print(
        f"peak memory {peak:.2f} GB; imports alone {imports_gb:.2f} GB, so"
        f" {peak - imports_gb:.2f} GB of its own"
    )
    ratios = [shard / copy for shard, copy in zip(sharding, copying, strict=True)]
    print(
        f"{args.content} source, memory {args.memory}: shard / (cp and sync) ="
        f" {statistics.median(ratios):.2f} (median of {args.rounds})"
    )
    finish(args, ratio=statistics.median(ratios), own_memory_gb=peak - imports_gb)


if __name__ == "__main__":
    main()
