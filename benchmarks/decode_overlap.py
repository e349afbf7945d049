"""Sound and pictures decoded at the same time, as profiles with their own device do, against one
after the other.

    python benchmarks/decode_overlap.py --height 256 --width 384 --num-frames 25

Released sizes, random weights, float32, in one process and in turn; the medians count, and the bits
must be the same. The last line is how many times faster both are at the same time.
"""

import argparse
import os
import statistics
import sys
import time

import torch
from vae_decode import decoder, latent

from ltx_neuron.host.background import BackgroundTask
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.sampling.latents import AUDIO_CHANNELS, MEL_BINS, audio_latent_frames
from ltx_neuron.tiny.config import released_config
from ltx_neuron.tiny.weights import random_weights

FRAME_RATE = 24


def audio_models() -> list[torch.nn.Module]:
    """The released audio decoder and vocoder, with random weights."""
    import_ltx_core()
    from ltx_core.model.audio_vae import AudioDecoderConfigurator, VocoderConfigurator

    models = []
    for configurator in (AudioDecoderConfigurator, VocoderConfigurator):
        model = configurator.from_config(released_config())
        weights = random_weights(model.state_dict(), torch.Generator().manual_seed(0))
        model.load_state_dict(
            {name: weight.float() for name, weight in weights.items()}, assign=True
        )
        models.append(model.eval().requires_grad_(False))
    return models


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--num-frames", type=int, default=25)
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of each (default %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    video_decoder, (audio_decoder, vocoder) = decoder("ours"), audio_models()
    video, frames = latent(args), audio_latent_frames(args.num_frames, FRAME_RATE)
    audio = torch.randn(
        1, AUDIO_CHANNELS, frames, MEL_BINS, generator=torch.Generator().manual_seed(2)
    )

    def pictures() -> torch.Tensor:
        from ltx_core.model.video_vae import TilingConfig

        with torch.no_grad():
            return torch.cat(list(video_decoder.tiled_decode(video, TilingConfig.default())), dim=2)

    def sound() -> torch.Tensor:
        from ltx_core.model.audio_vae import decode_audio

        with torch.no_grad():
            return decode_audio(audio, audio_decoder, vocoder).waveform

    def in_turn() -> tuple:
        return pictures(), sound()

    def beside() -> tuple:
        with BackgroundTask(sound) as task:
            frames = pictures()
        return frames, task.result()

    print(
        f"{args.height}x{args.width}x{args.num_frames}, {os.cpu_count()} cores, torch"
        f" {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    )
    sound()
    seconds = {in_turn: [], beside: []}
    results = {}
    for _ in range(args.repeats):
        for way, times in seconds.items():
            began = time.perf_counter()
            results[way] = way()
            times.append(time.perf_counter() - began)
    if not all(torch.equal(a, b) for a, b in zip(results[in_turn], results[beside], strict=True)):
        sys.exit("the bits differ")
    medians = [statistics.median(times) for times in seconds.values()]
    for way, times in seconds.items():
        print(
            f"{way.__name__:8} {statistics.median(times):7.2f} s  "
            + " ".join(f"{value:.2f}" for value in times)
        )
    print(f"the same bits; {medians[0] / medians[1]:.2f} times as fast beside each other")


if __name__ == "__main__":
    main()
