"""A whole warm clip, every phase of it, from a new prompt to the MP4, on this CPU.

    python benchmarks/clip.py --folder DIR [--before CHECKOUT] [--wide]

Each way has an open LTXPipeline in a process of its own; their clips are made in turn, and medians
count: with decoding overlapped and without, by this checkout and, with --before, by another one.
Weights are random. --wide: the released widths with one block of the transformer and of each stage
of the video decoder, for which the text encoder stays tiny; else all models are tiny.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from lib.harness import finish, print_ratios, take_turns
from lib.harness import parser as harness_parser
from lib.scripts import ROOT, Scripts, size_flags, tiny_scripts
from lib.sizes import parse_size
from tiny.config import TinySizes, released_config

from ltx_neuron.errors import run
from ltx_neuron.job import Size

WORKER = ROOT / "benchmarks/lib/clip_worker.py"
WIDE = TinySizes(layers=1, heads=32, head_dim=128, audio_head_dim=64, connector_layers=1)


def wide_config() -> dict:
    """What of the released config is not shrunk: the decoders' widths, and the vocoder."""
    released = released_config()
    blocks = [
        [name, settings | {"num_layers": 1} if "num_layers" in settings else settings]
        for name, settings in released["vae"]["decoder_blocks"]
    ]
    base = released["vae"]["decoder_base_channels"]
    return {
        "vae": {"decoder_blocks": blocks, "decoder_base_channels": base},
        "audio_vae": released["audio_vae"],
        "vocoder": released["vocoder"],
    }


class Way:
    """One checkout, with decoding overlapped or not, ready to make clips."""

    def __init__(self, name: str, scripts: Scripts, size: Size, overlap: bool):
        self.name, self.clips = f"{name}, {'overlapped' if overlap else 'in turn'}", []
        folder = scripts.artifacts.parent
        options = {
            "checkpoint_path": str(scripts.checkpoint),
            "gemma_root": str(scripts.gemma_root),
            "artifacts_dir": str(scripts.artifacts),
            "profile": "cpu",
            "tp_degree": 1,
            "profile_set": [f"overlap_decode={str(overlap).lower()}"],
        }
        asked = {
            "options": options,
            "size": {"height": size.height, "width": size.width, "num_frames": size.num_frames},
            "path": str(folder / f"{overlap}.mp4"),
        }
        command = [sys.executable, str(WORKER), json.dumps(asked)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=scripts.env, **pipes)
        for line in self.process.stdout:
            if line == "ready\n":
                return
        sys.exit(f"{self.name}: the worker ended with exit code {self.process.wait()}")

    def make(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.clips.append(json.loads(self.process.stdout.readline()))

    def median(self, phase: str) -> float:
        return statistics.median(clip.get(phase, 0.0) for clip in self.clips)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def print_table(ways: list[Way]) -> None:
    """Medians of every phase, a column for each way."""
    names = [name for name in ways[-1].clips[0] if name != "in all"]
    print(f"{'seconds':20}" + "".join(f"{way.name:>20}" for way in ways))
    for name in [*names, "in all"]:
        medians = (way.median(name) for way in ways)
        print(f"{name:20}" + "".join(f"{seconds:20.2f}" for seconds in medians))


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for all that is made")
    parser.add_argument("--before", type=Path, help="another checkout of the project")
    parser.add_argument("--wide", action="store_true", help="released widths, fewer blocks")
    parser.add_argument("--size", default="256x384x25", metavar="HxWxF")
    parser.add_argument("--repeats", type=int, default=3, help="clips of each (default 3)")
    help = "shard and compile only, for a timed run that finds all of it"
    parser.add_argument("--prepare", action="store_true", help=help)
    args = parser.parse_args()
    size = parse_size(args.size)
    checkouts = {"before": args.before.resolve()} if args.before else {}
    ways = []
    for name, checkout in {**checkouts, "after": ROOT}.items():
        sizes, config = (WIDE, wide_config()) if args.wide else (TinySizes(), None)
        folder = args.folder / ("wide" if args.wide else "tiny") / name
        scripts = tiny_scripts(folder, 1, size_flags(size), "bfloat16", sizes, config, checkout)
        scripts.prepare()
        if not args.prepare:
            ways += [Way(name, scripts, size, overlap) for overlap in (False, True)]
    turns = take_turns({way.name: way.make for way in ways}, args.repeats, cold=0)
    for way in ways:
        way.close()
    if ways:
        print(f"{args.size}, {'released widths' if args.wide else 'tiny'}")
        print_table(ways)
        print_ratios(turns, ways[0].name, cpu=False)  # other processes make the clips
        finish(args, seconds={way.name: way.median("in all") for way in ways})


if __name__ == "__main__":
    run(main)
