"""Video decode on this machine: our decoder beside ltx-core's own, in float32 and in bfloat16,
released sizes, random weights.

    python benchmarks/vae_decode.py --height 384 --width 512 --num-frames 25

All decode the same latents in the reference's default tiles, in turn, in one process; the medians
count. "ours" computes in what this machine's CPU is measured to be faster in, as a run with --dtype
bfloat16 does. With --memory, the peak memory of a process of its own for each, weights and imports
included. The last lines are distances from ltx-core in float32, and how many times faster ours is.
"""

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

import torch
from lib.video_vae import MODELS, REFERENCE, computes_in, video_model

from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.machine import processor
from ltx_neuron.tiny.config import released_config


def decoder(which: str) -> torch.nn.Module:
    """One of MODELS."""
    import_ltx_core()
    from ltx_core.model.video_vae import VideoDecoderConfigurator

    from ltx_neuron.host.vae import FastVideoDecoder

    return video_model(which, VideoDecoderConfigurator, FastVideoDecoder, released_config())


def latent(size: argparse.Namespace) -> torch.Tensor:
    """Random latents (1, 128, F, h, w) for a video of that height, width and num_frames."""
    shape = (1, 128, (size.num_frames - 1) // 8 + 1, size.height // 32, size.width // 32)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def decoded(which: str, model: torch.nn.Module, video: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Frames (1, 3, F, H, W) in [-1, 1], and the seconds they took."""
    from ltx_core.model.video_vae import TilingConfig

    video = video.bfloat16() if which == "ltx-core bfloat16" else video
    start = time.perf_counter()
    with torch.no_grad():
        frames = torch.cat(list(model.tiled_decode(video, TilingConfig.default())), dim=2)
    return frames, time.perf_counter() - start


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def print_memory(which: str, size: argparse.Namespace) -> None:
    """Decode once and print this process's peak memory."""
    import_ltx_core()
    from ltx_neuron.host.vae_memory import decode_bytes

    imported = peak_gb()
    model = decoder(which)
    loaded = peak_gb()
    video = latent(size)
    decoded(which, model, video)
    by_plan = ""
    if which.startswith("ours"):
        shape = tuple(video.shape[2:])
        planned = decode_bytes(released_config(), shape, size.threads, computes_in(which))
        by_plan = f", {planned / 1e9:.2f} GB of them by the plan"
    print(
        f"{loaded:.2f} GB loaded, {peak_gb():.2f} GB at most, {peak_gb() - imported:.2f} GB"
        f" without the imports{by_plan}"
    )


def print_distances(frames: dict[str, torch.Tensor]) -> None:
    """How far the frames of each are from those of ltx-core in float32."""
    wanted = frames[REFERENCE].double()
    counts = {
        which: ((each + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8).int()
        for which, each in frames.items()
    }
    for which, each in frames.items():
        if which != REFERENCE:
            error = (each.double() - wanted).square().mean().item()
            apart = (counts[which] - counts[REFERENCE]).abs()
            print(
                f"{which:17} {10 * math.log10(4 / error):6.1f} dB from {REFERENCE}; frames differ"
                f" by {apart.double().mean():.2f} of 255 in the mean, {apart.max()} at most"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--height", type=int, default=256)
    add("--width", type=int, default=384)
    add("--num-frames", type=int, default=17)
    add("--repeats", type=int, default=3, help="timed runs of each (default %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s")
    help = "which to time (default: all)"
    add("--decoders", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help=help)
    add("--memory", action="store_true", help="the peak memory of each, and no times")
    help = "decode once with this one and print this process's peak memory"
    add("--memory-of", choices=MODELS, help=help)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print_memory(args.memory_of, args)
        return
    found = computes_in("ours").describe()
    print(
        f"{args.height}x{args.width}x{args.num_frames}, {args.threads} threads, torch"
        f" {torch.__version__}, ltx-core {version('ltx-core')}, {processor()}, load average"
        f" {os.getloadavg()[0]:.1f}; ours computes in {found['host_dtype']}, speed"
        f" {found['host_dtype_speed']}"
    )
    if args.memory:
        for which in args.decoders:
            command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", which]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(f"{which:17} memory {said.strip()}", flush=True)
        return
    time_in_turn(args)


def time_in_turn(args: argparse.Namespace) -> None:
    decoders, video = {which: decoder(which) for which in args.decoders}, latent(args)
    seconds, frames = {which: [] for which in args.decoders}, {}
    for repeat in range(args.repeats):
        for which in args.decoders:
            frames[which], taken = decoded(which, decoders[which], video)
            seconds[which].append(taken)
            print(f"{which:17} run {repeat + 1} {taken:8.2f} s", flush=True)
    if REFERENCE in frames:
        print_distances(frames)
    medians = {which: statistics.median(times) for which, times in seconds.items()}
    print(", ".join(f"{which} {median:.2f} s" for which, median in medians.items()))
    for which in medians if "ours" in medians else ():
        if which != "ours":
            print(f"ours is {medians[which] / medians['ours']:.2f} times as fast as {which}")


if __name__ == "__main__":
    main()
