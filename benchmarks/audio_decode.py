"""Sound decoded on this machine: our mel decoder and vocoder beside ltx-core's own, released sizes,
random weights of bf16, float32.

    python benchmarks/audio_decode.py --seconds 5

Both decode the same latents in turn, in one process; the medians count. Weights of the two last
convolutions are scaled so that no sample is clipped: random weights that clip answer a rounding
with a thousand of it. The last lines are how many times faster each part is, and sound in all.
"""

import argparse
import os
import statistics
import time
from importlib.metadata import version

import torch

from ltx_neuron.config import audio_decoder_config, vocoder_config
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.sampling.latents import AUDIO_CHANNELS, MEL_BINS, audio_latent_frames
from ltx_neuron.tiny.config import released_config
from ltx_neuron.tiny.weights import random_weights, vocoder_weights

PARTS = "mel", "vocoder"
VOLUME = 1e-3  # of a last convolution's weights


def audio_decoder() -> torch.nn.Module:
    """The released audio decoder, which makes mel spectrograms, with random weights."""
    from ltx_core.model.audio_vae import AudioDecoderConfigurator

    model = AudioDecoderConfigurator.from_config(released_config())
    weights = random_weights(model.state_dict(), torch.Generator().manual_seed(0))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    return model.eval().requires_grad_(False)


def vocoder() -> torch.nn.Module:
    """The released vocoder with random weights, ltx-core's own."""
    from ltx_core.model.audio_vae import VocoderConfigurator

    config = released_config()
    model = VocoderConfigurator.from_config(config)
    weights = vocoder_weights(config, torch.Generator().manual_seed(0))
    # Published names begin with "vocoder.", a vocoder's own do not.
    model.load_state_dict(
        {name.partition(".")[2]: weight.float() for name, weight in weights.items()}
    )
    model.eval().requires_grad_(False)
    for generator in (model.vocoder, model.bwe_generator):
        generator.conv_post.weight.mul_(VOLUME)
    return model


def decoders() -> dict[str, tuple[torch.nn.Module, torch.nn.Module]]:
    """Mel decoder and vocoder, ltx-core's and ours, of the same weights: those of bf16, as the
    checkpoint stores them."""
    from ltx_neuron.host.sound import HostSpectrogram, HostVocoder

    config = released_config()
    theirs = audio_decoder(), vocoder()
    for model in theirs:
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    weights = [model.state_dict() for model in theirs]
    ours = (
        HostSpectrogram(audio_decoder_config(config), weights[0]),
        HostVocoder(vocoder_config(config), weights[1]),
    )
    return {"ltx-core": theirs, "ours": ours}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of sound (%(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of each (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import_ltx_core()
    print(
        f"{args.seconds:g} s of sound, {args.threads} threads, torch {torch.__version__}, ltx-core"
        f" {version('ltx-core')}, load average {os.getloadavg()[0]:.1f}"
    )
    models = decoders()
    frames = audio_latent_frames(round(args.seconds * 24) + 1, 24)
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(1, AUDIO_CHANNELS, frames, MEL_BINS, generator=generator)
    times = {name: {part: [] for part in PARTS} for name in models}
    waveforms = {}
    for repeat in range(args.repeats):
        for name, (decoder, model) in models.items():
            mel = timed(decoder, latent, times[name]["mel"])
            waveforms[name] = timed(model, mel, times[name]["vocoder"])
        row = "; ".join(
            f"{name} " + ", ".join(f"{part} {shown(parts[part][-1])}" for part in PARTS)
            for name, parts in times.items()
        )
        print(f"run {repeat + 1}: {row}", flush=True)
    report(waveforms, times)


def timed(model: torch.nn.Module, given: torch.Tensor, times: list) -> torch.Tensor:
    """What the model returns; notes its time by the clock, and that of the CPU's cores."""
    start, start_cores = time.perf_counter(), time.process_time()
    with torch.no_grad():
        result = model(given)
    times.append((time.perf_counter() - start, time.process_time() - start_cores))
    return result


def shown(time: tuple[float, float]) -> str:
    return f"{time[0]:.2f} s (CPU {time[1]:.2f})"


def report(waveforms: dict, times: dict) -> None:
    got, wanted = waveforms["ours"], waveforms["ltx-core"]
    clipped = (wanted.abs() >= 1).float().mean().item()
    distance = ((got - wanted).norm() / wanted.norm()).item()
    print(f"relative L2 {distance:.1e}, {clipped:.0%} of the samples clipped")
    for unit, label in enumerate(("by the clock", "in CPU time")):
        median = {
            name: {part: statistics.median(time[unit] for time in parts[part]) for part in PARTS}
            for name, parts in times.items()
        }
        for parts in median.values():
            parts["in all"] = sum(parts.values())
        row = "; ".join(
            f"{part} {theirs:.2f} s and {median['ours'][part]:.2f} s,"
            f" {theirs / median['ours'][part]:.2f} times as fast"
            for part, theirs in median["ltx-core"].items()
        )
        print(f"{label}: {row}")


if __name__ == "__main__":
    main()
