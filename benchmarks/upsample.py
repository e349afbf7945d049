"""The latent upsampler and the image encoder on this machine's CPU: ours beside ltx-core's,
released sizes, random weights.

    python benchmarks/upsample.py

Ours compute in what this CPU is measured to be faster in. Our upsampler is ltx-core's module too,
in bfloat16 with its weights laid out as oneDNN is fastest with. All take the same input in turn, in
one process; the least seconds count. The last line of each model says how many times faster ours
is.
"""

import argparse
import os
import time
from copy import deepcopy
from importlib.metadata import version

import torch
from lib.random_sources import UPSAMPLER
from torch import Tensor, nn

from ltx_neuron.host.arithmetic import arithmetic
from ltx_neuron.host.models import import_ltx_core, lay_channels_last
from ltx_neuron.machine import processor
from ltx_neuron.tiny import SPATIAL_UPSAMPLER, TinySizes
from ltx_neuron.tiny.config import released_config, tiny_config
from ltx_neuron.tiny.weights import random_weight


def random_module(configurator, config: dict) -> nn.Module:
    """A module with random weights that bfloat16 holds exactly."""
    with torch.device("meta"):
        module = configurator.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        weight = random_weight(name, torch.empty(tensor.shape), generator).bfloat16().float()
        module.load_state_dict({name: weight}, strict=False, assign=True)
    return module.eval().requires_grad_(False)


def models(tiny: bool) -> dict[str, tuple[nn.Module, Tensor]]:
    """The modules, each with an input: the latents of stage 1 of a video of 512 x 768 x 25, and an
    image of 256 x 384."""
    import_ltx_core()
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator
    from ltx_core.model.video_vae import VideoEncoderConfigurator

    generator = torch.Generator().manual_seed(1)
    latent, image = (1, 128, 4, 8, 12), (1, 3, 1, 256, 384)
    if tiny:
        latent, image = (1, 128, 2, 2, 3), (1, 3, 1, 64, 96)
    upsampler = SPATIAL_UPSAMPLER if tiny else UPSAMPLER
    encoder = tiny_config(TinySizes()) if tiny else released_config()
    return {
        "spatial upsampler": (
            random_module(LatentUpsamplerConfigurator, upsampler),
            torch.randn(latent, generator=generator),
        ),
        "image encoder": (
            random_module(VideoEncoderConfigurator, encoder),
            torch.randn(image, generator=generator).clip(-1, 1),
        ),
    }


def variants(module: nn.Module) -> dict[str, nn.Module]:
    """ltx-core's module in either dtype, and ours for a run in bfloat16."""
    computes = arithmetic("auto", torch.bfloat16)
    if hasattr(module, "down_blocks"):  # the encoder
        from ltx_neuron.host.vae_encoder import FastVideoEncoder

        ours = FastVideoEncoder(deepcopy(module).bfloat16(), computes)
    else:
        ours = deepcopy(module).to(computes.dtype)
        if computes.dtype == torch.bfloat16:
            lay_channels_last(ours)
    return {
        "ltx-core float32": module,
        "ltx-core bfloat16": deepcopy(module).bfloat16(),
        "ours": ours,
    }


@torch.no_grad()
def measure(name: str, module: nn.Module, given: Tensor, repeats: int) -> None:
    seconds, results = {}, {}
    variant = variants(module)
    for _ in range(repeats + 1):  # the first run prepares
        for which, each in variant.items():
            like = given.to(next(each.parameters()).dtype)
            began = time.perf_counter()
            results[which] = each(like)
            seconds.setdefault(which, []).append(time.perf_counter() - began)
    least = {which: min(times[1:]) for which, times in seconds.items()}
    exact = results.pop("ltx-core float32").double()
    for which, result in results.items():
        distance = (result.double() - exact).norm() / exact.norm()
        print(f"{name}: {which} is {distance:.1e} from ltx-core float32 (relative L2)")
    print(f"{name}: " + ", ".join(f"{which} {time:.3f} s" for which, time in least.items()))
    ratios = (f"{least[w] / least['ours']:.2f} times as fast as {w}" for w in list(least)[:2])
    print(f"{name}: ours is {' and '.join(ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (default %(default)s)")
    help = "default: all cores, %(default)s"
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help=help)
    help = "tiny widths: shows that this script runs"
    parser.add_argument("--tiny", action="store_true", help=help)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = arithmetic("auto", torch.bfloat16).describe()
    print(
        f"{args.threads} threads, torch {torch.__version__}, ltx-core {version('ltx-core')},"
        f" {processor()}, load average {os.getloadavg()[0]:.1f}; ours computes in"
        f" {found['host_dtype']}, speed {found['host_dtype_speed']}"
    )
    for name, (module, given) in models(args.tiny).items():
        measure(name, module, given, args.repeats)


if __name__ == "__main__":
    main()
