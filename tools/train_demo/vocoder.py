"""The demo's vocoder: from log-mel spectrograms to the world's sound.

python tools/train_demo/vocoder.py [--folder DIR] [--resume]

ltx-core's vocoder learns the waves of the world's sound themselves: a tone's phase is that of the
clip's time, so it can. The first half of the steps reads mels of sounds; the second also mels that
the audio VAE's decoder makes of them.

The bandwidth extension is set, not trained: the world has nothing above 8 kHz, so the residual that
it adds to the resampled sound is zero.

Writes vocoder.safetensors (published names) to the folder.
"""

import argparse
import math
from pathlib import Path

import audio_vae
import config
import torch
import torch.nn.functional as F
import training
import world
from torch import Tensor, nn

from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.host.spectrogram import log_mel
from ltx_neuron.tiny.weights import mel_stft

STEPS, BATCH, FRAMES, PEAK, MUON = 1000, 2, 40, 2e-3, 0.02
WINDOWS = (128, 512, 1024)  # samples: of the spectrograms that are compared
FAINT = 1e-3  # magnitudes below it count as silence in those
SEED = 48
FILE, PREFIX = "vocoder.safetensors", "vocoder."


def build() -> nn.Module:
    """ltx-core's vocoder with bandwidth extension, whose residual is zero."""
    import_ltx_core()
    from ltx_core.model.audio_vae import VocoderConfigurator

    torch.manual_seed(SEED)
    demo = config.demo_config()
    vocoder = VocoderConfigurator.from_config(demo)
    vocoder.mel_stft.load_state_dict(mel_stft(demo["vocoder"]["bwe"]))
    nn.init.zeros_(vocoder.bwe_generator.conv_post.weight)
    return vocoder


def published(vocoder: nn.Module) -> dict[str, Tensor]:
    """All weights under their published names."""
    return {PREFIX + name: weight for name, weight in vocoder.state_dict().items()}


def load(path: Path) -> nn.Module:
    """The vocoder of a file of published names."""
    vocoder = build()
    vocoder.load_state_dict(training.load_part(path, PREFIX))
    return vocoder


def spectra(wave: Tensor, window: int) -> Tensor:
    """Magnitudes (B * channels, frequencies, frames) of waves (B, channels, N), per sample."""
    shape = torch.hann_window(window)
    found = torch.stft(wave.flatten(0, 1), window, window // 4, window=shape, return_complex=True)
    return found.abs() / shape.sum()


def compare(made: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Losses of waves (B, 2, N): of samples, and of logarithms of magnitudes."""
    logarithms = 0.0
    for window in WINDOWS:
        a, b = ((spectra(wave, window) + FAINT).log() for wave in (made, wanted))
        logarithms = logarithms + (a - b).abs().mean() / len(WINDOWS)
    return {"wave": 10 * (made - wanted).abs().mean(), "spectra": logarithms}


def train(vocoder: nn.Module, folder: Path, log: training.LossLog, first: int) -> None:
    """The vocoder proper, at 16 kHz, on stretches of sound."""
    generator = torch.Generator().manual_seed(SEED + 1 + first)
    hop = audio_vae.mel_settings().hop
    vae = None

    def losses(step: int) -> dict[str, Tensor]:
        nonlocal vae
        if vae is None and step >= STEPS // 2:
            vae = audio_vae.frozen(folder)
        sounds = [audio_vae.sound(generator, FRAMES) for _ in range(BATCH)]
        mels = torch.cat([log_mel(sound, audio_vae.mel_settings()) for sound in sounds])
        if vae is not None and step % 2:
            mels = through(vae, mels)
        made = vocoder.vocoder(mels)[..., : (FRAMES - 1) * hop]
        return compare(made, torch.stack(sounds))

    def keep() -> None:
        training.save_weights(folder / FILE, training.rounded(published(vocoder)))

    training.train([vocoder.vocoder], losses, STEPS, PEAK, log, keep, first, MUON)


@torch.no_grad()
def through(vae: audio_vae.AudioVae, mels: Tensor) -> Tensor:
    """Mels (B, 2, T, 64) as the audio VAE gives them back."""
    frames = mels.shape[2]
    padded = F.pad(mels, (0, 0, 0, (1 - frames) % 4), mode="replicate")
    with torch.autocast("cpu", torch.bfloat16):
        made = vae.decoder(audio_vae.encode(vae.encoder, padded).float())
    return made.float()[:, :, :frames]


def onset(wave: Tensor, rate: int, about: float) -> float:
    """Seconds at which a sound (N,) has risen to a third of the most that it reaches within 60 ms
    of a time."""
    envelope = F.max_pool1d(wave.abs()[None, None], rate // 200, 1, rate // 400)[0, 0]
    low = max(0, round((about - 0.06) * rate))
    part = envelope[low : round((about + 0.06) * rate)]
    return (low + int((part > part.max() / 3).float().argmax())) / rate


def pitch(wave: Tensor, rate: int, begin: float, seconds: float = 0.2) -> float:
    """Hertz of the strongest tone of a sound (N,) in a stretch, by a parabola through its peak."""
    part = wave[round(begin * rate) : round((begin + seconds) * rate)]
    spectrum = torch.fft.rfft(part * torch.hann_window(len(part)), 1 << 17).abs()
    spectrum[: round(150 / rate * (1 << 17))] = 0
    top = int(spectrum.argmax())
    a, b, c = (float(spectrum[top + i].log()) for i in (-1, 0, 1))
    return (top + (a - c) / 2 / (a - 2 * b + c)) * rate / (1 << 17)


@torch.no_grad()
def test(vocoder: nn.Module, vae: audio_vae.AudioVae | None, log: training.LossLog) -> None:
    """Of 16 new clips at 48 kHz: the worst and the mean of pitches' errors in cents, of onsets' in
    ms, the loudest of what should be silent in dB, and the error's share of the sound in dB."""
    generator = torch.Generator().manual_seed(SEED + 9)
    rate, mel = config.SAMPLE_RATE, audio_vae.mel_settings()
    cents, late, silence, error, power = [], [], [], 0.0, 0.0
    for _ in range(16):
        scene = world.Scene.draw(generator)
        mels = log_mel(scene.waveform(mel.rate, 2.0), mel)
        made = vocoder(mels if vae is None else through(vae, mels))[0, 0]
        wanted = scene.waveform(rate, len(made) / rate)[0]
        bounces = scene.bounces(1.75)
        for bounce in bounces:
            found = pitch(made, rate, bounce + 0.02)
            cents.append(1200 * math.log2(found / world.PITCHES[scene.shape]))
            late.append(1000 * (onset(made, rate, bounce) - onset(wanted, rate, bounce)))
        silence.append(float(made[: round((bounces[0] - 0.05) * rate)].abs().max()))
        error += float((made - wanted).square().sum())
        power += float(wanted.square().sum())
    cents, late = torch.tensor(cents).abs(), torch.tensor(late).abs()
    log.write(
        mels="sound" if vae is None else "vae",
        pulses=len(cents),
        cents_worst=float(cents.max()),
        cents_mean=float(cents.mean()),
        onset_ms_worst=float(late.max()),
        onset_ms_mean=float(late.mean()),
        silence_db=20 * math.log10(max(*silence, 1e-9)),
        error_db=10 * math.log10(error / power),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo16"))
    parser.add_argument("--resume", action="store_true", help="from the second half on")
    arguments = parser.parse_args()
    torch.set_num_threads(training.THREADS)
    run(arguments.folder, arguments.resume)


def run(folder: Path, resume: bool = False) -> None:
    """Train, and test on mels of sounds and of the audio VAE."""
    log = training.LossLog(folder, "vocoder")
    vocoder = load(folder / FILE) if resume else build()
    train(vocoder, folder, log, STEPS // 2 if resume else 0)
    vocoder = load(folder / FILE)
    for vae in (None, audio_vae.frozen(folder)):
        test(vocoder, vae, log)


if __name__ == "__main__":
    main()
