"""Sound decoded on this machine: our vocoder beside ltx-core's own, released sizes, random weights,
float32.

    python benchmarks/audio_decode.py --seconds 5

Both decode the same latents in turn, in one process; the medians count. Weights of the two last
convolutions are scaled so that no sample is clipped: random weights that clip answer a rounding
with a thousand of it. The last line is how many times faster the vocoder is, and sound in all.
"""

import argparse
import os
import statistics
import time
from importlib.metadata import version

import torch

from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.sampling.latents import AUDIO_CHANNELS, MEL_BINS, audio_latent_frames
from ltx_neuron.tiny.config import released_config
from ltx_neuron.tiny.weights import random_weights, vocoder_weights

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
    from ltx_neuron.host.sound import FastVocoder

    print(
        f"{args.seconds:g} s of sound, {args.threads} threads, torch {torch.__version__}, ltx-core"
        f" {version('ltx-core')}, load average {os.getloadavg()[0]:.1f}"
    )
    decoder, theirs = audio_decoder(), vocoder()
    vocoders = {"ltx-core": theirs, "ours": FastVocoder(theirs)}
    frames = audio_latent_frames(round(args.seconds * 24) + 1, 24)
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(1, AUDIO_CHANNELS, frames, MEL_BINS, generator=generator)
    seconds = {name: [] for name in ("mel", *vocoders)}
    cores, waveforms = {name: [] for name in seconds}, {}
    for repeat in range(args.repeats):
        mel = timed(decoder, latent, "mel", seconds, cores)
        for name, model in vocoders.items():
            waveforms[name] = timed(model, mel, name, seconds, cores)
        row = ", ".join(
            f"{name} {wall[-1]:.2f} s (CPU {cores[name][-1]:.2f})" for name, wall in seconds.items()
        )
        print(f"run {repeat + 1}: {row}", flush=True)
    report(waveforms, seconds, cores)


def timed(
    model: torch.nn.Module, given: torch.Tensor, name: str, seconds: dict, cores: dict
) -> torch.Tensor:
    """What the model returns; notes its time by the clock, and that of the CPU's cores."""
    start, start_cores = time.perf_counter(), time.process_time()
    with torch.no_grad():
        result = model(given)
    seconds[name].append(time.perf_counter() - start)
    cores[name].append(time.process_time() - start_cores)
    return result


def report(waveforms: dict, seconds: dict, cores: dict) -> None:
    got, wanted = waveforms["ours"], waveforms["ltx-core"]
    clipped = (wanted.abs() >= 1).float().mean().item()
    distance = ((got - wanted).norm() / wanted.norm()).item()
    print(f"relative L2 {distance:.1e}, {clipped:.0%} of the samples clipped")
    for unit, times in (("by the clock", seconds), ("in CPU time", cores)):
        median = {name: statistics.median(values) for name, values in times.items()}
        in_all = (median["mel"] + median["ltx-core"]) / (median["mel"] + median["ours"])
        print(
            f"{unit}: mel {median['mel']:.2f} s for both, vocoder {median['ltx-core']:.2f} s and"
            f" {median['ours']:.2f} s, {median['ltx-core'] / median['ours']:.2f} times as fast;"
            f" sound in all {in_all:.2f} times"
        )


if __name__ == "__main__":
    main()
