"""How fast a host works: measured on this machine by `--calibrate`, else assumed.

A rate is of one CPU, all of the machine's being busy: a plan for another machine multiplies it by
that one's CPUs.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from ltx_neuron import machine
from ltx_neuron.host import calibration
from ltx_neuron.host.arithmetic import Arithmetic
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.products import AMX, multiplier
from ltx_neuron.host.video import write_video
from ltx_neuron.profiles import Profile

SECTION = "rates"  # of the calibration file
# Two AVX-512 units make 64 FLOPs a cycle in float32, AMX makes 2048 in bfloat16: documented of the
# Intel CPUs beside Trainium2, here at 2 GHz, and of a hyperthread the half.
_PEAKS = {"float32": 64 * 2e9 / 2, "bfloat16": 2048 * 2e9 / 2}
# No more of them than half a core reaches: benchmarks/vae_decode.md and text_encode.md have two
# cores of such a CPU; benchmarks/vae_encode.md has its rate of encoding. FLOPs are those of direct
# convolutions, of which Winograd's save most; a prompt's products are small.
_SHARES = {
    "decode_video float32": 1.0,
    "decode_video bfloat16": 0.2,
    "encode_video float32": 1.0,
    "encode_video bfloat16": 0.17,
    "encode_text float32": 0.8,
    "encode_text bfloat16": 0.08,
}
# Of one CPU, not measured: seconds of sound, pixels and bytes in a second. Sound: half of what a
# core without AMX reached in benchmarks/audio_decode.md, a third of one with it.
_ASSUMED = {"decode_audio": 0.3, "encode_mp4": 10e6, "copy": 2e9}
# Of the instances' documentation; another profile runs where it is planned.
_CPUS = {"trn2.3xlarge": 12, "trn2.48xlarge": 192}
_TILE = (2, 6, 10)  # latents that are decoded, by a decoder with one residual block a stage
_ENCODED = (1, 192, 256)  # pixels that are encoded, by an encoder with as few
_PRODUCT = (128, 3840, 15360)  # tokens of a prompt, Gemma3's channels and feed-forward channels
_SOUND_LATENTS = 126  # five seconds: a short sound takes a second or two, however short it is
_FRAMES = (24, 512, 768)
_COPIED = 2**26


class Rate(NamedTuple):
    """value   units in a second: FLOPs, seconds of sound, pixels or bytes
    source  where it is from, for a person
    """

    value: float
    source: str


def host_rate(rates: dict, kind: str, profile: Profile) -> Rate:
    """A rate of a profile's host. rates: what `read` returned; kind: one of its keys."""
    here = machine.cpus()
    cpus = _CPUS.get(profile.name, here)
    if kind in rates:
        scaled = "" if cpus == here else f", for {cpus} CPUs by {here}"
        return Rate(rates[kind] * cpus, f"measured here{scaled}")
    work, _, dtype = kind.rpartition(" ")
    if work:
        source = f"{_SHARES[kind]:.0%} of a documented peak, not measured"
        return Rate(_PEAKS[dtype] * _SHARES[kind] * cpus, source)
    return Rate(_ASSUMED[kind] * cpus, "assumed, not measured")


def read(artifacts_dir: Path) -> dict[str, float]:
    """What was measured of this machine, by kind; empty where nothing was."""
    stored = calibration.read(artifacts_dir).get(SECTION, {})
    return {kind: value for kind, value in stored.items() if isinstance(value, float)}


def calibrate(artifacts_dir: Path, config: dict, arithmetic: Arithmetic) -> dict[str, float]:
    """Measure this machine in a few seconds, and store and return its rates.

    config      the checkpoint's parsed `config` metadata
    arithmetic  what the host computes with
    """
    dtype = str(arithmetic.dtype).removeprefix("torch.")
    host = _RandomModels("", _shallow(config), arithmetic.dtype, arithmetic=arithmetic)
    timed: dict[str, Callable[[], float]] = {
        f"decode_video {dtype}": partial(_decode_video, host),
        f"encode_video {dtype}": partial(_encode_video, host),
        f"encode_text {dtype}": partial(_multiply, arithmetic),
        "decode_audio": partial(_decode_audio, host),
        "encode_mp4": _encode_mp4,
        "copy": _copy,
    }
    with torch.no_grad():
        rates = {kind: measure() / machine.cpus() for kind, measure in timed.items()}
    calibration.update(artifacts_dir, SECTION, rates)
    return rates


def _shallow(config: dict) -> dict:
    """A config whose video encoder and decoder have one residual block a stage, at their own
    widths."""
    blocks = {
        of: [
            [name, settings | {"num_layers": 1} if "num_layers" in settings else settings]
            for name, settings in config["vae"][of]
        ]
        for of in ("encoder_blocks", "decoder_blocks")
    }
    return config | {"vae": config["vae"] | blocks}


class _RandomModels(HostModels):
    """The host's models with weights that nobody reads from a file: only their time counts."""

    def _spec(self, name: str) -> SimpleNamespace:
        spec = super()._spec(name)

        def load() -> torch.nn.Module:
            if name not in ("video_decoder", "video_encoder"):
                module = spec.from_config(self.config)
            else:  # large: not initialised; in bfloat16, as a checkpoint stores them
                with torch.device("meta"):
                    module = spec.from_config(self.config)
                weights = module.state_dict().items()
                module.load_state_dict(
                    {each: torch.full(w.shape, 0.01, dtype=torch.bfloat16) for each, w in weights},
                    assign=True,
                )
            return module.eval().requires_grad_(False)

        return SimpleNamespace(load=load, check_output=lambda *_: None)


def _seconds(
    work: Callable[[], object], repeats: int, prepare: Callable[[], object] | None = None
) -> float:
    """The least seconds of some runs, after one that prepares."""
    (prepare or work)()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _decode_video(host: HostModels) -> float:
    """FLOP/s of the video decoder, counted as direct convolutions."""
    from ltx_neuron.plan.host_flops import video_decoder_flops

    latent = torch.randn(1, 128, *_TILE)
    seconds = _seconds(lambda: host.video_decoder(latent), 1)
    return video_decoder_flops(host.config, _TILE) / seconds


def _encode_video(host: HostModels) -> float:
    """FLOP/s of the video encoder, as that."""
    from ltx_neuron.plan.host_flops import video_encoder_flops

    pixels = torch.randn(1, 3, *_ENCODED)
    seconds = _seconds(lambda: host.encode_image(pixels), 1)
    return video_encoder_flops(host.config, _ENCODED) / seconds


def _multiply(arithmetic: Arithmetic) -> float:
    """FLOP/s of the product that text encoding consists of."""
    rows, inputs, outputs = _PRODUCT
    x = torch.ones(rows, inputs, dtype=arithmetic.dtype)
    library = arithmetic.libraries.of(rows)
    in_float32 = arithmetic.dtype == torch.float32 and library != AMX
    weight = torch.ones(outputs, inputs, dtype=torch.float32 if in_float32 else torch.bfloat16)
    product = partial(torch.nn.functional.linear, x, weight)
    if arithmetic.dtype == torch.float32:
        product = partial(multiplier(library), x, weight, torch.ones(rows, outputs))
    return 2 * rows * inputs * outputs / _seconds(product, 3)


def _decode_audio(host: HostModels) -> float:
    """Seconds of sound in a second."""
    latent = torch.randn(1, 8, _SOUND_LATENTS, 16)
    made = []
    prepare = partial(host.decode_audio, latent[:, :, :1])
    seconds = _seconds(lambda: made.append(host.decode_audio(latent)), 1, prepare)
    return made[-1].shape[1] / host.sample_rate / seconds


def _encode_mp4() -> float:
    """Pixels in a second, of frames that move."""
    count, height, width = _FRAMES
    noise = torch.rand(1, 3, count // 4, height // 64, width // 64)
    smooth = torch.nn.functional.interpolate(noise, (count, height, width), mode="trilinear")
    frames = (255 * smooth[0]).to(torch.uint8).permute(1, 2, 3, 0).contiguous()
    with tempfile.TemporaryDirectory() as folder:
        write = partial(write_video, Path(folder) / "frames.mp4", [frames], 24.0)
        return frames[..., 0].numel() / _seconds(lambda: write(lambda: torch.zeros(2, 1), 48000), 1)


def _copy() -> float:
    """Bytes in a second that are copied to memory shared with another process."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    shared = torch.empty_like(source).share_memory_()
    return _COPIED / _seconds(lambda: shared.copy_(source), 3)
