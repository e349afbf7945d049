"""The demo's audio VAE: log-mel spectrograms as latents, and back.

python tools/train_demo/audio_vae.py [--folder DIR] [--decoder]

Encoder and decoder learn together, through ltx-core's modules, on stretches of the world's sound
that begin at any time: silence, pulses at any phase, and their fading. The decoder sees latents in
units of their standard deviation with noise on them, which makes them smooth. --decoder: goes on
with the decoder alone, whose encoder and statistics stay as they lie in the folder.

Writes audio_vae.safetensors (published names) to the folder.
"""

import argparse
import itertools
from functools import cache
from pathlib import Path

import config
import torch
import training
import world
from torch import Tensor, nn

from ltx_neuron.host.models import import_ltx_core, lay_channels_last
from ltx_neuron.host.spectrogram import log_mel, mel_sizes

STEPS = {"both": 800, "decoder": 300}
BATCH, FRAMES, PEAK = 3, 49, 2e-3  # stretches of a step, and their mel frames
NOISE = 0.3  # at most, of latents whose standard deviation is 1
LEAST_STD = 0.1  # of a channel, as a share of all channels' mean
MEAN, SCALE = -8.0, 0.25  # of log-mels, about: what the encoder begins with
FARTHEST = 4.0  # standard deviations, of all but one in 1000
KEEP = 0.98  # of the running statistics, from a step to the next
SEED = 32
FILE, PREFIX = "audio_vae.safetensors", "audio_vae."
CLIP_FRAMES = 4 * 51 - 3  # of a clip's 51 latents
LENGTH = 3.6  # seconds of a scene that stretches are cut from


@cache
def mel_settings():
    """Of the spectrogram: ltx_neuron.host.spectrogram.MelSizes."""
    return mel_sizes(config.demo_config())


def sound(
    generator: torch.Generator, frames: int, rate: int | None = None, clip: bool = False
) -> Tensor:
    """A stretch (2, samples) of a random scene's sound, which gives so many mel frames.

    clip  whether it begins with the scene. If not, it begins at any mel frame (for there clips
          begin in the phase of a tone), even before the scene: silence comes first
    """
    mel = mel_settings()
    rate = rate or mel.rate
    hop = mel.hop * rate // mel.rate
    wave = world.Scene.draw(generator).waveform(rate, LENGTH)
    before = frames // 2
    wave = nn.functional.pad(wave, (before * hop, 0))
    starts = wave.shape[1] // hop - frames
    start = before if clip else int(torch.randint(starts, (), generator=generator))
    return wave[:, start * hop : (start + frames - 1) * hop]


def mels(generator: torch.Generator, count: int, frames: int, clip: bool = False) -> Tensor:
    """Log-mel spectrograms (count, 2, frames, bins) of as many stretches."""
    sounds = [sound(generator, frames, clip=clip) for _ in range(count)]
    return torch.cat([log_mel(each, mel_settings()) for each in sounds])


class AudioVae(nn.Module):
    """ltx-core's encoder and decoder with one set of statistics.

    Latents are (B, 8, T, 16), their statistics (128,) of channel and bin.
    """

    def __init__(self):
        super().__init__()
        import_ltx_core()
        from ltx_core.model.audio_vae import AudioDecoderConfigurator, AudioEncoderConfigurator

        torch.manual_seed(SEED)
        self.encoder = AudioEncoderConfigurator.from_config(config.demo_config())
        self.decoder = AudioDecoderConfigurator.from_config(config.demo_config())
        self.set_statistics(torch.zeros(128), torch.ones(128))
        set_front(self.encoder)
        nn.init.constant_(self.decoder.conv_out.conv.bias, MEAN)
        lay_channels_last(self)

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        for part in (self.encoder, self.decoder):
            part.per_channel_statistics.get_buffer("mean-of-means").copy_(mean)
            part.per_channel_statistics.get_buffer("std-of-means").copy_(std)

    def published(self) -> dict[str, Tensor]:
        """All weights under their published names; the statistics stand beside both parts."""
        weights = {}
        for part in ("encoder", "decoder"):
            for name, weight in getattr(self, part).state_dict().items():
                shared = name.startswith("per_channel_statistics.")
                weights[PREFIX + (name if shared else f"{part}.{name}")] = weight
        return weights

    def load(self, path: Path) -> "AudioVae":
        """Take the weights of a file of published names."""
        weights = training.load_part(path, PREFIX)
        statistics = {n: w for n, w in weights.items() if n.startswith("per_channel_statistics.")}
        for part in ("encoder", "decoder"):
            own = {
                name.removeprefix(f"{part}."): weight
                for name, weight in weights.items()
                if name.startswith(f"{part}.")
            }
            getattr(self, part).load_state_dict(own | statistics)
        return self


@torch.no_grad()
def set_front(encoder: nn.Module) -> None:
    """Set the encoder's first three convolutions, which have nothing but each other between them:
    they gather the 2 x 4 x 4 log-mels of a latent's position, scaled, and are not trained."""
    first, *halvings = (encoder.conv_in, *(encoder.down[i].downsample for i in range(2)))
    for layer in (first, *halvings):
        layer.conv.requires_grad_(False)
        layer.conv.weight.zero_()
        layer.conv.bias.zero_()
    for channel, earlier, higher in itertools.product(range(2), range(2), range(2)):
        to = 4 * channel + 2 * earlier + higher
        first.conv.weight[to, channel, 2 - earlier, 1 + higher] = SCALE
        first.conv.bias[to] = -MEAN * SCALE
    for to in range(8):
        halvings[0].conv.weight[to, to, 2, 0] = 1.0
        for earlier, higher in itertools.product(range(2), range(2)):
            halvings[1].conv.weight[16 * earlier + 8 * higher + to, to, 2 - earlier, higher] = 1.0


def encode(encoder: nn.Module, mel: Tensor) -> Tensor:
    """Latents (B, 8, T, 16) of log-mels (B, 2, 4T - 3, 64), equal to the encoder's forward: what
    the convolutions of `set_front` gather is gathered here by a change of shape."""
    from ltx_core.model.audio_vae.audio_vae import run_mid_block

    padded = nn.functional.pad((mel - MEAN) * SCALE, (0, 0, 3, 0))
    padded[:, :, 2] = -MEAN * SCALE  # before the sound: what the first convolution makes of zeros
    frames, bins = padded.shape[2] // 4, padded.shape[3] // 4
    parts = padded.unflatten(2, (frames, 2, 2)).unflatten(5, (bins, 2, 2)).flip(3, 4)
    hidden = parts.permute(0, 3, 6, 1, 4, 7, 2, 5).reshape(len(mel), 32, frames, bins)
    hidden = nn.functional.pad(hidden, (0, 0, 0, 0, 0, encoder.ch - 32))
    hidden = run_mid_block(encoder.mid, hidden.contiguous(memory_format=torch.channels_last))
    return encoder._normalize_latents(encoder._finalize_output(hidden))


class Statistics:
    """Running means and standard deviations of latents, of channel and bin."""

    def __init__(self):
        self.weight, self.mean, self.square = 0.0, torch.zeros(128), torch.zeros(128)

    def take(self, latents: Tensor) -> None:
        rows = latents.detach().float().permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        self.weight = KEEP * self.weight + 1 - KEEP
        self.mean = KEEP * self.mean + (1 - KEEP) * rows.mean(0)
        self.square = KEEP * self.square + (1 - KEEP) * rows.square().mean(0)

    def now(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (128,); none is much smaller than the others."""
        mean = self.mean / self.weight
        std = (self.square / self.weight - mean.square()).clamp(min=1e-8).sqrt()
        return mean, std.clamp(min=LEAST_STD * float(std.mean()))


def frozen(folder: Path) -> AudioVae:
    """The VAE that lies in a folder."""
    return AudioVae().load(folder / FILE).eval().requires_grad_(False)


def train_both(vae: AudioVae, folder: Path, log: training.LossLog) -> None:
    """Encoder and decoder; then the statistics of 64 long stretches."""
    generator = torch.Generator().manual_seed(SEED + 1)
    running = Statistics()

    def losses(step: int) -> dict[str, Tensor]:
        wanted = mels(generator, BATCH, FRAMES)
        with training.fast():
            latents = encode(vae.encoder, wanted).float()
            running.take(latents)
            mean, std = (each.view(1, 8, 1, 16) for each in running.now())
            noise = torch.randn(latents.shape, generator=generator)
            noise = noise * NOISE * torch.rand(BATCH, 1, 1, 1, generator=generator)
            made = vae.decoder(latents + noise * std).float()
        # A scale of about 1 all the same, lest it drifts.
        spread = latents.std((0, 2)).clamp(min=1e-3).log().square().mean()
        size = 1e-3 * (spread + latents.mean((0, 2)).square().mean())
        return {"mel": (made - wanted).abs().mean(), "size": size}

    def keep() -> None:
        training.save_weights(folder / "audio_vae.state", vae.published())

    training.train([vae], losses, STEPS["both"], PEAK, log, keep)
    set_statistics(vae)
    round_weights(vae)
    training.save_weights(folder / FILE, vae.published())


@torch.no_grad()
def set_statistics(vae: AudioVae) -> None:
    """Measure the latents' statistics on clips, and set them. Most of a clip is quiet: where the
    standard deviation leaves a pulse's beginning far out, it is taken larger."""
    generator = torch.Generator().manual_seed(SEED + 2)
    vae.set_statistics(torch.zeros(128), torch.ones(128))
    clips = [mels(generator, 1, CLIP_FRAMES, clip=True) for _ in range(64)]
    latents = torch.cat([encode(vae.encoder, clip) for clip in clips])
    rows = latents.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    mean, std = rows.mean(0), rows.std(0)
    far = (rows - mean).abs().quantile(0.999, dim=0)
    least = LEAST_STD * float(std.mean())
    vae.set_statistics(mean, torch.maximum(std, far / FARTHEST).clamp(min=least))


def round_weights(module: nn.Module) -> None:
    """Round weights and statistics to bf16, as they are shipped."""
    for weight in (*module.parameters(), *module.buffers()):
        weight.data = weight.data.bfloat16().float()


def train_decoder(vae: AudioVae, folder: Path, log: training.LossLog) -> None:
    """The decoder alone, with little noise."""
    generator = torch.Generator().manual_seed(SEED + 3)
    vae.encoder.requires_grad_(False)

    def losses(step: int) -> dict[str, Tensor]:
        wanted = mels(generator, BATCH, FRAMES)
        with training.fast():
            with torch.no_grad():
                latents = encode(vae.encoder, wanted).float()
            noise = torch.randn(latents.shape, generator=generator)
            noise = noise * NOISE / 2 * torch.rand(BATCH, 1, 1, 1, generator=generator)
            made = vae.decoder(latents + noise).float()
        return {"mel": (made - wanted).abs().mean()}

    def keep() -> None:
        training.save_weights(folder / FILE, training.rounded(vae.published()))

    training.train([vae.decoder], losses, STEPS["decoder"], PEAK / 2, log, keep)


@torch.no_grad()
def test(vae: AudioVae, log: training.LossLog) -> None:
    """The mean distance of log-mels (natural logarithms) on 16 new clips: clean, with noise of 0.1
    and of 0.3 on the latents; the latents' largest size; how much a latent predicts the next."""
    generator = torch.Generator().manual_seed(SEED + 4)
    wanted = mels(generator, 16, CLIP_FRAMES, clip=True)
    latents = vae.encoder(wanted)
    noise = torch.randn(latents.shape, generator=generator)
    found = {
        f"mel at noise {level}": float((vae.decoder(latents + level * noise) - wanted).abs().mean())
        for level in (0.0, 0.1, 0.3)
    }
    change = (latents[:, :, 1:] - latents[:, :, :-1]).square().mean() / latents.square().mean()
    log.write(**found, largest=float(latents.abs().max()), change=float(change))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo16"))
    parser.add_argument("--decoder", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(training.THREADS)
    run(arguments.folder, arguments.decoder)


def run(folder: Path, decoder_only: bool = False) -> None:
    """Train, and test."""
    log = training.LossLog(folder, "audio_vae")
    vae = AudioVae()
    if decoder_only:
        train_decoder(vae.load(folder / FILE), folder, log)
        round_weights(vae)
    else:
        train_both(vae, folder, log)
    test(vae, log)


if __name__ == "__main__":
    main()
