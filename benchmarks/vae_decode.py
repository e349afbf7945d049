"""Video decode on this machine: our decoder beside ltx-core's own, released sizes, random weights,
float32.

    python benchmarks/vae_decode.py --height 384 --width 512 --num-frames 25

Both decode the same latents in the reference's default tiles, in turn, in one process; the medians
count. Peak memory is that of a process of its own for each, weights and imports included. The last
line is how many times faster ours is.
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

from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.tiny.config import released_config
from ltx_neuron.tiny.weights import random_weight

DECODERS = ("ltx-core", "ours")


def decoder(which: str) -> torch.nn.Module:
    """The released decoder with random weights that bfloat16 holds exactly. Ours keeps them so,
    ltx-core's as float32."""
    import_ltx_core()
    from ltx_core.model.video_vae import VideoDecoderConfigurator

    from ltx_neuron.host.vae import FastVideoDecoder

    with torch.device("meta"):
        model = VideoDecoderConfigurator.from_config(released_config())
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if which == "ltx-core" else torch.bfloat16
    for name, tensor in model.state_dict().items():
        weight = random_weight(name, torch.empty(tensor.shape), generator).bfloat16().to(dtype)
        model.load_state_dict({name: weight}, strict=False, assign=True)
    model.eval().requires_grad_(False)
    return model if which == "ltx-core" else FastVideoDecoder(model)


def latent(size: argparse.Namespace) -> torch.Tensor:
    """Random latents (1, 128, F, h, w) for a video of that height, width and num_frames."""
    shape = (1, 128, (size.num_frames - 1) // 8 + 1, size.height // 32, size.width // 32)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def decoded(model: torch.nn.Module, video: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Frames (1, 3, F, H, W) in [-1, 1], and the seconds they took."""
    from ltx_core.model.video_vae import TilingConfig

    start = time.perf_counter()
    with torch.no_grad():
        frames = torch.cat(list(model.tiled_decode(video, TilingConfig.default())), dim=2)
    return frames, time.perf_counter() - start


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--num-frames", type=int, default=17)
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of each (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s"
    )
    parser.add_argument(
        "--memory-of",
        choices=DECODERS,
        help="decode once with this one and print this process's peak memory",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        import_ltx_core()
        from ltx_neuron.host.vae_memory import decode_bytes

        imported = peak_gb()
        model = decoder(args.memory_of)
        loaded = peak_gb()
        video = latent(args)
        decoded(model, video)
        planned = decode_bytes(released_config(), tuple(video.shape[2:]), args.threads) / 1e9
        by_plan = f", {planned:.2f} GB of them by the plan" if args.memory_of == "ours" else ""
        print(
            f"{loaded:.2f} GB loaded, {peak_gb():.2f} GB at most, {peak_gb() - imported:.2f} GB"
            f" without the imports{by_plan}"
        )
        return

    print(
        f"{args.height}x{args.width}x{args.num_frames}, {args.threads} threads, torch"
        f" {torch.__version__}, ltx-core {version('ltx-core')}, load average"
        f" {os.getloadavg()[0]:.1f}"
    )
    for which in DECODERS:
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", which]
        print(
            f"{which:9} memory"
            f" {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"
        )
    made, video = {which: decoder(which) for which in DECODERS}, latent(args)
    seconds, frames = {which: [] for which in DECODERS}, {}
    for repeat in range(args.repeats):
        for which in DECODERS:
            frames[which], taken = decoded(made[which], video)
            seconds[which].append(taken)
            print(f"{which:9} run {repeat + 1} {taken:8.2f} s", flush=True)
    error = (frames["ours"].double() - frames["ltx-core"]).square().mean().item()
    counts = [
        ((frames[which] + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8).int() for which in DECODERS
    ]
    print(
        f"PSNR {10 * math.log10(4 / error):.1f} dB; frames differ by at most"
        f" {(counts[0] - counts[1]).abs().max()} of 255"
    )
    medians = {which: statistics.median(times) for which, times in seconds.items()}
    print(", ".join(f"{which} {median:.2f} s" for which, median in medians.items()))
    print(f"{medians['ltx-core'] / medians['ours']:.2f} times as fast as ltx-core")


if __name__ == "__main__":
    main()
