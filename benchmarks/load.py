"""How fast ranks load their files, beside plain reads of the same files in the same run, with cold
and with warm page cache.

    python benchmarks/load.py --folder DIR [--blocks 5] [--tp-degree 4] [--repeats 5]

Makes rank files of the released DiT's tensor sizes and of random bytes (1 GB a rank) on the disk of
DIR, and deletes them. Three ways take turns, by one process and by all of them at once, each with a
file of its own:

    plain        reads into one buffer that is used again: what the disk, or the page cache, gives
    ours         what a rank of the cpu profile runs: the file mapped and fetched, header and names
                 checked
    safetensors  safetensors.torch.load_file, which maps the file

Of what is mapped one byte of every page is looked at, in the time that is measured.

Cold: the file's pages were dropped; how much came from the disk is checked, cold and warm. Rates
are of medians, the ratios ours / plain; the last one is that of all ranks together with a cold
cache.
"""

import mmap
import os
import re
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch
from lib.full_size import write_sparse_checkpoint
from lib.harness import finish
from lib.harness import parser as harness_parser

from ltx_neuron.artifacts import LAYOUT
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import open_rank_file, rank_file
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

BUFFER_BYTES = 16 * 2**20
# of a file may come from the disk when warm, or not from it when cold; the header and readahead do
TOLERANCE = 0.05


class RandomSource(Source):
    """The names and shapes of a checkpoint with other content: a disk may store zeros without
    writing them."""

    def pieces(self, name: str, bounds: list[tuple[int, int]]):
        row, generator = self.shape(name)[1:], torch.Generator().manual_seed(len(name))
        for start, stop in bounds:
            bits = torch.randint(
                -(2**15), 2**15, (stop - start, *row), dtype=torch.int16, generator=generator
            )
            yield bits.view(torch.bfloat16) if self.shape(name) else bits.view(torch.bfloat16)[0]


def rank_files(folder: Path, blocks: int, tp: int) -> list[Path]:
    """Write the rank files of a DiT of so many blocks, with random bytes; returns their paths."""
    checkpoint = write_sparse_checkpoint(folder / "sparse.safetensors", blocks)
    source = RandomSource(SHARDED_MODELS["dit"], [TensorFile(checkpoint, "")])
    identity = {"kind": "weights", "model": "dit", "tp": tp, "dtype": "bfloat16", "layout": LAYOUT}
    shard_weights(
        source, folder / "weights", identity, tp, torch.bfloat16, shard_specs(source, tp, {})
    )
    return [folder / "weights" / rank_file(rank) for rank in range(tp)]


def plain(path: Path, buffer: mmap.mmap) -> None:
    """Read the file into one buffer, again and again the same."""
    file = os.open(path, os.O_RDONLY)
    offset = 0
    while count := os.preadv(file, [buffer], offset):
        offset += count
    os.close(file)


def ours(path: Path, wanted: dict) -> dict[str, torch.Tensor]:
    """The tensors of a rank file as a rank of the cpu profile loads them; `wanted` has their
    shapes."""
    return touched(
        {
            name: tensor.to("cpu")
            for name, tensor in open_rank_file(path, wanted, torch.bfloat16).tensors()
        }
    )


def safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return touched(load_file(path))


def touched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mapped tensors, after a byte of every page was read: all pages are in memory."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).flatten()[:: mmap.PAGESIZE].sum()
    return tensors


def serve(pipe, path: Path) -> None:
    """Run as a process for each rank: read the file in the way received from the pipe, and send
    when the read began and ended and how many bytes came from the disk."""
    torch.set_num_threads(1)
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    wanted = TensorFile(path, "").shapes
    plain(path, buffer)  # gives the buffer its memory
    pipe.send("ready")
    ways = {
        "plain": lambda: plain(path, buffer),
        "ours": lambda: ours(path, wanted),
        "safetensors": lambda: safetensors(path),
    }
    while True:
        try:
            way = pipe.recv()
        except EOFError:  # the benchmark has ended
            return
        before, began = fetched(), time.perf_counter()
        tensors = ways[way]()
        pipe.send((began, time.perf_counter(), fetched() - before))
        del tensors  # not in the time: unmapping


def drop(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def fetched() -> int:
    """Bytes that this process made the system fetch from the disk so far."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def rate(pipes: list, way: str, cache: str, size: int) -> float:
    """GB/s of these processes together, from the first one's start to the last one's end."""
    for pipe in pipes:
        pipe.send(way)
    starts, ends, from_disk = zip(*(pipe.recv() for pipe in pipes), strict=True)
    share = sum(from_disk) / size / len(pipes)
    if abs(share - (cache == "cold")) > TOLERANCE:
        sys.exit(
            f"{way}: {100 * share:.0f} % of the bytes came from the disk, which is not {cache}: is"
            " the machine short of memory, or is this a disk whose cache cannot be dropped?"
        )
    return len(pipes) * size / (max(ends) - min(starts)) / 1e9


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="a folder on the disk to measure"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=5,
        help="transformer blocks, 0.2 GB a rank each (default %(default)s)",
    )
    parser.add_argument("--tp-degree", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="load-") as folder:
        paths = rank_files(Path(folder), args.blocks, args.tp_degree)
        finish(args, ratios=measure(paths, args.repeats))


def measure(paths: list[Path], repeats: int) -> dict[str, float]:
    """Rates of all ways, printed; returns what ours has of plain reads'."""
    size, context = paths[0].stat().st_size, get_context("spawn")
    print(
        f"{len(paths)} rank files of {size / 1e9:.2f} GB, {len(TensorFile(paths[0], '').shapes)}"
        f" tensors; {os.cpu_count()} cores, torch {torch.__version__}, safetensors"
        f" {version('safetensors')}, load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    pipes = []
    for path in paths:
        here, there = context.Pipe()
        context.Process(target=serve, args=(there, path), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    ways = ["plain", "ours", "safetensors"]
    rates: dict[tuple[int, str, str], list[float]] = {}  # of processes, cache and way
    for _ in range(repeats):
        ways = [*ways[1:], ways[0]]
        for ranks in dict.fromkeys((1, len(paths))):
            for way in ways:
                for path in paths[:ranks]:
                    drop(path)
                for cache in ("cold", "warm"):
                    rates.setdefault((ranks, cache, way), []).append(
                        rate(pipes[:ranks], way, cache, size)
                    )
    print("processes  cache  way            GB/s  every run")
    for (ranks, cache, way), measured in sorted(rates.items()):
        runs = " ".join(f"{value:.2f}" for value in measured)
        print(f"{ranks:9}  {cache:5}  {way:11}  {statistics.median(measured):6.2f}  {runs}")
    ratios = {}
    for cache in ("warm", "cold"):
        for ranks in dict.fromkeys((1, len(paths))):
            medians = {way: statistics.median(rates[ranks, cache, way]) for way in ways}
            case = f"{cache}, {ranks} at once"
            for other in ("plain", "safetensors"):
                ratios[f"{case}: ours / {other}"] = medians["ours"] / medians[other]
    for case, ratio in ratios.items():
        print(f"{case} = {ratio:.2f}")
    return ratios


if __name__ == "__main__":
    main()
