"""Remake the demo's checkpoint: python tools/train_demo/train.py --folder FOLDER [PART ...]

All parts in their order, each in a process of its own, with its own seeds; then the files are put
together. A part that stopped goes on where it was saved. Losses are written to FOLDER/*.jsonl.

To go on from the files that are shipped, take them apart with assemble.py --split and name the
PARTs that are to be trained; latents and DiT depend on all the others, the style on the DiT.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# Large blocks stay with the process: mapped anew in every step, they take half of its time.
ALLOCATOR = {f"MALLOC_{name}_": str(2**32) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
# What makes each part, in this order: later ones need the earlier ones' files.
PARTS = {
    "text": [["text.py"]],
    "audio_vae": [["audio_vae.py"], ["audio_vae.py", "--decoder"]],
    "vocoder": [["vocoder.py"]],
    "video_vae": [["video_vae.py", what] for what in ("train", "freeze", "refine")],
    "upsampler": [["upsampler.py", "train"]],
    "latents": [["latents.py"]],
    "dit": [["dit.py"]],
    "style": [["style.py"]],
    "assemble": [["assemble.py"]],
}


def run(script: str, *arguments: str, folder: Path, threads: int) -> None:
    """Run one script of this folder; raises CalledProcessError if it fails."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / script), *arguments, "--folder", str(folder)]
    paths = f"{HERE.parents[1] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | ALLOCATOR | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, env=environment, check=True)
    print(f"{script} {' '.join(arguments)}: {(time.monotonic() - began) / 60:.1f} min", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=f"some of: {', '.join(PARTS)}; all by default")
    parser.add_argument("--folder", type=Path, required=True, help="of weights and states")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.part) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for part, scripts in PARTS.items():
        if part in (args.part or PARTS):
            for script in scripts:
                run(*script, folder=args.folder, threads=args.threads)


if __name__ == "__main__":
    main()
