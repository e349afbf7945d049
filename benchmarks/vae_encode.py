"""Video encode on this machine: our encoder beside ltx-core's own, in float32 and in bfloat16,
released sizes, random weights.

    python benchmarks/vae_encode.py --height 256 --width 384 --num-frames 25

All encode the same clip, whole, in turn, in one process; the medians count, of seconds by the wall
clock and of CPU seconds of all threads, which other work on the machine lengthens less. "ours"
computes in what this machine's CPU is measured to be faster in, as a run with --dtype bfloat16
does. The last lines are distances from ltx-core in float32, and how many times faster ours is.
"""

import argparse
import os
import statistics
import time
from importlib.metadata import version

import torch
from lib.video_vae import MODELS, REFERENCE, computes_in, video_model
from torch import Tensor, nn

from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.machine import processor
from ltx_neuron.tiny.config import merge, released_config


def encoder(which: str, tiny: bool) -> nn.Module:
    """One of MODELS."""
    import_ltx_core()
    from ltx_core.model.video_vae import VideoEncoderConfigurator

    from ltx_neuron.host.vae_encoder import FastVideoEncoder

    config = released_config()
    if tiny:
        config = merge(config, {"vae": {"latent_channels": 16}})
    return video_model(which, VideoEncoderConfigurator, FastVideoEncoder, config)


@torch.no_grad()
def encoded(which: str, model: nn.Module, clip: Tensor) -> tuple[Tensor, float, float]:
    """Latents, and the seconds and CPU seconds that they took."""
    clip = clip.bfloat16() if which == "ltx-core bfloat16" else clip
    start, cpu = time.perf_counter(), time.process_time()
    latent = model(clip)
    return latent, time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--height", type=int, default=256)
    add("--width", type=int, default=384)
    add("--num-frames", type=int, default=25)
    add("--repeats", type=int, default=3, help="timed runs of each (default %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s")
    help = "which to time (default: all)"
    add("--encoders", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help=help)
    add("--tiny", action="store_true", help="tiny widths: shows that this script runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = computes_in("ours").describe()
    print(
        f"{args.height}x{args.width}x{args.num_frames}, {args.threads} threads, torch"
        f" {torch.__version__}, ltx-core {version('ltx-core')}, {processor()}, load average"
        f" {os.getloadavg()[0]:.1f}; ours computes in {found['host_dtype']}, speed"
        f" {found['host_dtype_speed']}"
    )
    time_in_turn(args)


def time_in_turn(args: argparse.Namespace) -> None:
    shape = 1, 3, args.num_frames, args.height, args.width
    clip = torch.randn(shape, generator=torch.Generator().manual_seed(1)).clip(-1, 1)
    clip = clip.bfloat16().float()
    encoders = {which: encoder(which, args.tiny) for which in args.encoders}
    taken, latents = {which: [] for which in args.encoders}, {}
    for repeat in range(args.repeats):
        for which, model in encoders.items():
            latents[which], wall, cpu = encoded(which, model, clip)
            taken[which].append((wall, cpu))
            print(f"{which:17} run {repeat + 1} {wall:8.2f} s, {cpu:8.2f} s of CPU", flush=True)
    if REFERENCE in latents:
        wanted = latents.pop(REFERENCE).double()
        for which, each in latents.items():
            distance = (each.double() - wanted).norm() / wanted.norm()
            print(f"{which:17} {distance:.1e} from {REFERENCE} (relative L2)")
    medians = {
        which: [statistics.median(times) for times in zip(*runs, strict=True)]
        for which, runs in taken.items()
    }
    for ours in [which for which in medians if which.startswith("ours")]:
        for which in medians:
            if which.startswith("ltx-core"):
                wall, cpu = (a / b for a, b in zip(medians[which], medians[ours], strict=True))
                print(
                    f"{ours} is {wall:.2f} times as fast as {which}, {cpu:.2f} times in CPU seconds"
                )


if __name__ == "__main__":
    main()
