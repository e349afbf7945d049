"""The host's models beside ltx-core's own on this machine's CPU: released sizes, random weights.

    python benchmarks/host_models.py video-decoder --height 384 --width 512 --num-frames 25
    python benchmarks/host_models.py sound --seconds 5
    python benchmarks/host_models.py video-encoder | image-encoder | upsampler

Ours run as in a generation (host.models.HostModels): "ours" as one with --dtype bfloat16, whose
dtype is the host's, "ours float32" as one in float32.
ltx-core's modules have the same weights, in float32 and in bfloat16; sound is float32 in all. All
ways take the same input in turn, in one process; medians count. The lines before the last are
distances from ltx-core in float32 and ratios to it; the last one is JSON. With --memory each way
runs once in a process of its own, and its peak memory is what is printed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from lib.harness import finish, print_conditions, print_ratios, take_turns
from lib.harness import parser as harness_parser
from lib.random_sources import UPSAMPLER
from tiny import SPATIAL_UPSAMPLER, TinySizes
from tiny.config import released_config, tiny_config
from tiny.weights import checkpoint_weights, save, upsampler_weights
from torch import Tensor, nn

from ltx_neuron.host import dtypes
from ltx_neuron.host.models import HostModels, import_ltx_core
from ltx_neuron.sampling.shapes import (
    AUDIO_CHANNELS,
    MEL_BINS,
    VIDEO_CHANNELS,
    audio_latent_frames,
    video_latent_shape,
)
from ltx_neuron.tune.variant import rel_l2
from ltx_neuron.weights.tensorfile import TensorFile

REFERENCE = "ltx-core float32"
WAYS = {
    REFERENCE: torch.float32,
    "ltx-core bfloat16": torch.bfloat16,
    "ours float32": torch.float32,
    "ours": torch.bfloat16,
}
MODELS = ("video-decoder", "video-encoder", "image-encoder", "upsampler", "sound")
VOLUME = 1e-3  # of the vocoder's last weights: random ones clip, and then a rounding is loud
Way = Callable[[Tensor], Tensor]


class Files:
    """A checkpoint with random weights of the VAEs and the vocoder at the released sizes, and the
    spatial upsampler; its transformer and text part are tiny."""

    def __init__(self, folder: Path, tiny: bool):
        self.checkpoint = folder / "checkpoint.safetensors"
        self.upsampler = folder / "upsampler.safetensors"
        small = tiny_config(TinySizes())
        self.config = small
        if not tiny:
            self.config = released_config() | {"transformer": small["transformer"]}
        if self.checkpoint.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        weights = checkpoint_weights(self.config, TinySizes())
        for name, weight in weights.items():
            if name.startswith("vocoder.") and "conv_post.weight" in name:
                weight.mul_(VOLUME)
        metadata = {"config": json.dumps(self.config), "model_version": "2.3.0"}
        save(self.checkpoint, weights, metadata)
        upsampler = SPATIAL_UPSAMPLER if tiny else UPSAMPLER
        weights = upsampler_weights(upsampler, seed=2)
        save(self.upsampler, weights, {"config": json.dumps(upsampler)})

    def ours(self, dtype: torch.dtype) -> HostModels:
        host_dtype = dtypes.of_video("auto" if dtype == torch.bfloat16 else "float32", dtype)
        upsampler = {"spatial_upsampler_path": self.upsampler}
        return HostModels(self.checkpoint, self.config, dtype, **upsampler, host_dtype=host_dtype)

    def theirs(self, configurator, prefix: str, dtype: torch.dtype) -> nn.Module:
        """ltx-core's module with the weights whose names begin with a prefix; the upsampler's,
        whose names have none, are in its own file."""
        file = TensorFile(self.checkpoint if prefix else self.upsampler, "made by this script")
        config = self.config if prefix else json.loads(file.metadata["config"])
        with torch.device("meta"):
            module = configurator.from_config(config)
        family = prefix.partition(".")[0]

        def stored(name: str) -> str:
            shared = prefix and name.startswith("per_channel_statistics.")
            return f"{family}.{name}" if shared else prefix + name

        weights = {name: file.read(stored(name)).to(dtype) for name in module.state_dict()}
        module.load_state_dict(weights, assign=True)
        return module.eval().requires_grad_(False)


def ways(model: str, files: Files, names: list[str]) -> dict[str, Way]:
    """How each way runs a model, given its input in float32."""
    made = {}
    for name in names:
        of = _ours(model, files.ours(WAYS[name])) if name.startswith("ours") else None
        made[name] = of or _theirs(model, files, WAYS[name])
    return made


def _ours(model: str, host: HostModels) -> Way:
    return {
        "video-decoder": lambda x: torch.cat([chunk.clone() for chunk in host.decode_video(x)]),
        "video-encoder": lambda x: host.encode_video(x, whole=True),
        "image-encoder": host.encode_image,
        "upsampler": host.upsample,
        "sound": host.decode_audio,
    }[model]


def _theirs(model: str, files: Files, dtype: torch.dtype) -> Way:
    import_ltx_core()
    from ltx_core.model import audio_vae, video_vae
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator
    from ltx_core.model.video_vae.ops import PerChannelStatistics

    if model == "sound":
        decoder = files.theirs(audio_vae.AudioDecoderConfigurator, "audio_vae.decoder.", dtype)
        vocoder = files.theirs(audio_vae.VocoderConfigurator, "vocoder.", dtype)
        return lambda x: vocoder(decoder(x))[0]
    if model == "video-decoder":
        decoder = files.theirs(video_vae.VideoDecoderConfigurator, "vae.decoder.", dtype)
        tiling = video_vae.TilingConfig.default()

        def decode(x: Tensor) -> Tensor:
            frames = torch.cat(list(decoder.tiled_decode(x.to(dtype), tiling)), dim=2)
            return ((frames + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8)[0].permute(1, 2, 3, 0)

        return decode
    if model == "upsampler":
        upsampler = files.theirs(LatentUpsamplerConfigurator, "", dtype)
        statistics = PerChannelStatistics(VIDEO_CHANNELS)
        file = TensorFile(files.checkpoint, "made by this script")
        stored = {n: file.read(f"vae.per_channel_statistics.{n}") for n in statistics.state_dict()}
        statistics.load_state_dict({name: tensor.to(dtype) for name, tensor in stored.items()})
        return lambda x: statistics.normalize(upsampler(statistics.un_normalize(x.to(dtype))))
    encoder = files.theirs(video_vae.VideoEncoderConfigurator, "vae.encoder.", dtype)
    return lambda x: encoder(x.to(dtype))


def given(model: str, args: argparse.Namespace) -> Tensor:
    """The input, in numbers that bfloat16 holds exactly."""
    latent = (1, VIDEO_CHANNELS, *video_latent_shape(args.height, args.width, args.num_frames))
    frames = 1 if model == "image-encoder" else args.num_frames
    pixels = (1, 3, frames, args.height, args.width)
    sound = (1, AUDIO_CHANNELS, audio_latent_frames(round(args.seconds * 24) + 1, 24), MEL_BINS)
    shapes = {"video-decoder": latent, "upsampler": latent, "sound": sound}
    x = torch.randn(shapes.get(model, pixels), generator=torch.Generator().manual_seed(1))
    return (x if model in shapes else x.clip(-1, 1)).bfloat16().float()


def main(argv: list[str] | None = None) -> None:
    parser = harness_parser(__doc__)
    add = parser.add_argument
    add("model", choices=MODELS)
    add("--height", type=int, default=256)
    add("--width", type=int, default=384)
    add("--num-frames", type=int, default=25)
    add("--seconds", type=float, default=5.0, help="of sound (default %(default)s)")
    add("--repeats", type=int, default=3, help="timed runs of each (default %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s")
    help = "which to run (default: all)"
    add("--ways", nargs="+", choices=WAYS, metavar="NAME", help=help)
    add("--memory", action="store_true", help="the peak memory of each way, and no times")
    add("--folder", type=Path, help="where the weights are kept for another run")
    add("--tiny", action="store_true", help="tiny widths: shows that this script runs")
    args = parser.parse_args(argv)
    names = args.ways or [*WAYS]
    if args.model == "sound":
        names = [name for name in names if name in (REFERENCE, "ours")]
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        files = Files(folder, args.tiny)
        print_conditions(f"{args.model}, input {tuple(given(args.model, args).shape)}")
        if args.memory:
            finish(args, model=args.model, peak_bytes={name: _peak(name, folder) for name in names})
            return
        measure(args, files, names)


def measure(args: argparse.Namespace, files: Files, names: list[str]) -> None:
    x = given(args.model, args)
    runs = {name: (lambda way=way: way(x)) for name, way in ways(args.model, files, names).items()}
    turns = take_turns(runs, args.repeats)
    distances = {}
    if REFERENCE in turns:
        reference = turns[REFERENCE].result.float()
        for name in (name for name in names if name != REFERENCE):
            distances[name] = rel_l2(turns[name].result.float(), reference)
            print(f"{name:17} {distances[name]:.1e} from {REFERENCE} (relative L2)")
        print_ratios(turns, REFERENCE)
    summaries = {name: taken.summary() for name, taken in turns.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    finish(args, model=args.model, ways=summaries, rel_l2=distances, peak_bytes=peak)


def _peak(name: str, folder: Path) -> int:
    """Peak memory of a process that runs one way once, weights and imports included."""
    words = [word for word in sys.argv[1:] if word not in ("--memory", "--record")]
    words += ["--folder", str(folder), "--repeats", "1", "--ways", name]
    command = [sys.executable, __file__, *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])["peak_bytes"]


if __name__ == "__main__":
    main()
