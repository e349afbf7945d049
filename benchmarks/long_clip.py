"""The memory of a long clip beside a short one's, from prompt to MP4, by the scripts on this CPU.

    python benchmarks/long_clip.py --folder DIR [--before CHECKOUT]

The transformer and the text encoder are tiny, with two blocks: ranks' memory grows with the tokens
of a size and is counted apart. The video decoder has the released blocks, all or fewer, with the
released channels or fewer; the vocoder is tiny. Both clips are made with the same flags, in
bfloat16, with decoding overlapped; with --before also by another checkout of the project. The last
line compares their peaks.
"""

import sys
from pathlib import Path

from lib.harness import finish
from lib.harness import parser as harness_parser
from lib.scripts import ROOT, size_flags, tiny_scripts
from lib.sizes import parse_size
from lib.watch import Watched, run_watched
from tiny.config import released_config

from ltx_neuron.errors import run
from ltx_neuron.job import Size
from ltx_neuron.report.latency import load

SIZES = ["512x768x121", "512x768x1001"]
PROMPT = "a golden retriever puppy runs across a sunny green meadow"


def decoder_of(channels: int, blocks: int | None) -> dict:
    """What the config says of the released decoder, with other channels, and with no more residual
    blocks between two changes of resolution than so many."""
    stages = [[name, dict(sizes)] for name, sizes in released_config()["vae"]["decoder_blocks"]]
    for _, sizes in stages:
        if blocks and "num_layers" in sizes:
            sizes["num_layers"] = min(blocks, sizes["num_layers"])
    return {"vae": {"decoder_blocks": stages, "decoder_base_channels": channels}}


def made(folder: Path, size: Size, decoder: dict, checkout: Path) -> tuple[Watched, dict]:
    """A clip of a size, watched while it is made, and its latency report."""
    flags, made = size_flags(size), {"config": decoder, "checkout": checkout}
    scripts = tiny_scripts(folder, 1, flags, "bfloat16", **made)
    scripts.prepare()
    video, report = folder / f"{size.num_frames}.mp4", folder / f"{size.num_frames}.report.json"
    more = ["--prompt", PROMPT, "--output-path", video, "--perf-dump-path", report]
    more += ["--profile-set", "overlap_decode=true"]
    command = [sys.executable, *scripts.command("generate", *more)]
    log = folder / f"{size.num_frames}.log"
    watched = run_watched(command, log, env=scripts.env)
    if watched.exit_code:
        sys.exit(f"exit code {watched.exit_code}: {log}\n{log.read_text()[-2000:]}")
    return watched, load(report)


def print_row(name: str, size: Size, watched: Watched, report: dict) -> float:
    """The clip's figures in a line; returns the peak of the process that decodes."""
    seconds = {}
    for phase in report["phases"]:
        taken = phase["seconds"] + phase.get("overlapped_seconds", 0.0)
        seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + taken
    own = watched.peak("own_bytes")
    ranks = max(sample.anonymous_bytes - sample.own_bytes for sample in watched.samples)
    parts = ", ".join(
        f"{name} {seconds[name]:.1f} s" for name in ("decode_video", "decode_audio", "encode_mp4")
    )
    print(
        f"{name:7} {size.height}x{size.width}x{size.num_frames:<5} {own / 1e9:6.2f} GB to decode"
        f" and write, ranks {ranks / 1e9:.2f} GB; {parts}, in all {watched.seconds:.1f} s",
        flush=True,
    )
    return own


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for all that is made")
    parser.add_argument("--before", type=Path, help="another checkout, made with first")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="HxWxF")
    help = "decoder_base_channels (default %(default)s; 128 in the release)"
    parser.add_argument("--channels", type=int, default=32, help=help)
    help = "residual blocks of the decoder between two changes of resolution, at most (default all)"
    parser.add_argument("--blocks", type=int, help=help)
    args = parser.parse_args()
    decoder = decoder_of(args.channels, args.blocks)
    checkouts = {"before": args.before.resolve()} if args.before else {}
    ratios = {}
    for name, checkout in {**checkouts, "after": ROOT}.items():
        peaks = []
        for size in map(parse_size, args.sizes):
            clip = made(args.folder / name, size, decoder, checkout)
            peaks.append(print_row(name, size, *clip))
        ratios[name] = max(peaks) / peaks[0]
        print(f"{name}: the largest peak is {ratios[name]:.3f} times the first clip's")
    finish(args, largest_peak_over_first=ratios)


if __name__ == "__main__":
    run(main)
