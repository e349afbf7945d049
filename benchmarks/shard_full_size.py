"""Cut the released checkpoint's size for four ranks, beside `cp` of as many bytes to the same disk in the same run.

python benchmarks/shard_full_size.py --folder DIR [--blocks N] [--tp-degree 4]

The source is sparse (full_size.py), so both read zeros from memory and write real bytes; both end when these are on the
disk. Needs room for one copy: 38 GB for all 48 blocks. Prints its ratio last.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from full_size import make

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import sys; sys.path.insert(0, 'src'); import ltx_neuron.cli, ltx_neuron.workspace"


def timed(command: list) -> tuple[float, float]:
    """Seconds and peak resident memory (GB) of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} failed: {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder on the disk to measure")
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--tp-degree", type=int, default=4)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    checkpoint = make(args.folder / "ltx-2.3-sparse.safetensors", args.blocks)
    print(f"sparse checkpoint: {checkpoint.stat().st_size} bytes, {args.blocks} blocks, {time.perf_counter() - began:.1f} s")

    _, own = timed([sys.executable, "-c", IMPORTS])
    artifacts = args.folder / "artifacts"
    script = ROOT / "shards/shard_backbone_weights.py"
    flags = ["--checkpoint-path", checkpoint, "--artifacts-dir", artifacts, "--tp-degree", args.tp_degree, "--profile", "cpu"]
    seconds, peak = timed([sys.executable, script, *flags])
    files = {path.name: path.stat().st_size for path in sorted(artifacts.glob("weights/*/*.safetensors"))}
    written = sum(files.values())
    for name, size in files.items():
        print(f"  {name}: {size / 1e9:.3f} GB")
    print(f"shard: {seconds:.1f} s, {written / 1e9 / seconds:.3f} GB/s, peak memory {peak:.2f} GB; imports alone {own:.2f} GB, "
          f"so {peak - own:.2f} GB of its own")  # fmt: skip
    shutil.rmtree(artifacts)

    source, copy = args.folder / "source", args.folder / "copy"
    with open(source, "wb") as file:
        file.truncate(written)
    copied, _ = timed(["cp", "--sparse=never", source, copy])
    synced, _ = timed(["sync", copy])
    print(f"cp of {written} bytes: {copied:.1f} s, and {synced:.1f} s until they are on the disk")
    for path in (copy, source, checkpoint):
        path.unlink()
    print(f"shard / (cp and sync) = {seconds / (copied + synced):.2f}; shard / cp alone = {seconds / copied:.2f}")


if __name__ == "__main__":
    main()
