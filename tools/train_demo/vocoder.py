"""The demo's vocoder: from log-mel spectrograms to the world's sound.

python tools/train_demo/vocoder.py [--folder DIR]

ltx-core's vocoder with weights that are set and solved for, not trained by descent. It does what
suits its layers and this world, whose tones all repeat with a mel frame and keep the clip's phase:

conv_pre            the logarithm of each frequency's loudness in each fifth of a frame, as a linear
                    function of the mels around; fitted
first two residual  loudness from its logarithm, by sines of it (Snake's); solved by least squares
third residual      loudness times carriers, by sin2(a + b) - sin2(a - b) = sin 2a sin 2b, and from
                    these a frame's 32 samples (500 frames a second); solved by least squares
what follows        lays the samples out in time, with residual blocks that add nothing; set

The bandwidth extension is set, too: the world has nothing above 8 kHz, so the residual that it adds
to the resampled sound is zero.

Writes vocoder.safetensors (published names) to the folder.
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import audio_vae
import config
import torch
import torch.nn.functional as F
import training
import world
from tiny.weights import mel_stft
from torch import Tensor, nn

from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.host.spectrogram import log_mel, mel_filters

SOUNDS, FRAMES = 160, 64  # stretches that are fitted to, half of them by way of the audio VAE
FREQUENCIES = tuple(sorted({order * p for p in world.PITCHES.values() for order in (1, 2, 3)}))
PHASES = 5  # fifths of a mel frame: what the first upsampling makes of it
TAPS, BINS = 7, 3  # mel frames and bins that a loudness is read from
FIT_STEPS, FIT_RATE = 100, 0.02
# Channels after the first upsampling: a frame's samples; of each frequency the logarithm of its
# loudness and the loudness; cosine and sine of 100 and of 200 Hz.
LOGARITHMS, LOUDNESSES, CARRIERS = 32, 40, 48
SPEEDS = (tuple(0.15 * n for n in range(1, 5)), tuple(0.15 * n for n in range(5, 9)))
SIGNS = ((1, 1), (1, -1), (-1, -1), (-1, 1))  # of loudness and carrier, in the sums of a product
LOUD, WAVE = 0.25, 0.5  # the largest of both in those
NOTHING = 8.0  # logarithms of a Snake that leaves what it gets: sin(x / 3000) ** 2 / 3000
RIDGE = 1e-6
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
    set_layout(vocoder.vocoder)
    return vocoder


def published(vocoder: nn.Module) -> dict[str, Tensor]:
    """All weights under their published names."""
    return {PREFIX + name: weight for name, weight in vocoder.state_dict().items()}


def load(path: Path) -> nn.Module:
    """The vocoder of a file of published names."""
    vocoder = build()
    vocoder.load_state_dict(training.load_part(path, PREFIX))
    return vocoder


@torch.no_grad()
def set_layout(vocoder: nn.Module) -> None:
    """Set what follows the first stage, and nothing in that.

    Channels 0..2n-1 of a stage's 4n are a frame's samples in their order; the next stage's 2n have
    the first n of them in one frame and the last n in the next.
    """
    for part in (vocoder.conv_pre, *vocoder.ups, *vocoder.resblocks, vocoder.act_post):
        for name, weight in part.named_parameters():
            weight.fill_(-NOTHING if "alpha" in name else NOTHING if "beta" in name else 0.0)
    for up in vocoder.ups[1:]:
        half = up.in_channels // 4
        for sample in range(2 * half):
            later, to = divmod(sample, half)
            up.weight[sample, to, up.padding[0] + later] = 1.0
    vocoder.conv_post.weight.zero_()
    vocoder.conv_post.weight[:, 0, vocoder.conv_post.padding[0]] = 1.0


class Sounds(NamedTuple):
    """What is fitted to.

    mels      (N, 2, FRAMES, 64), as they are or by way of the audio VAE
    waves     (N, 5 FRAMES, 32): one channel's samples, by frames of 2 ms
    loudness  (N, 5 FRAMES, frequencies): of each frequency, in the middle of those
    """

    mels: Tensor
    waves: Tensor
    loudness: Tensor


@torch.no_grad()
def draw_sounds(folder: Path) -> Sounds:
    """Stretches of random scenes that begin at any mel frame, or up to half a second before."""
    generator = torch.Generator().manual_seed(SEED + 1)
    mel, mels, waves, loudness = audio_vae.mel_settings(), [], [], []
    step, samples = mel.hop // PHASES, FRAMES * mel.hop
    for _ in range(SOUNDS):
        scene = world.Scene.draw(generator)
        start = int(torch.randint(-50, 200, (), generator=generator)) * mel.hop
        wave = scene.waveform(mel.rate, (start + samples) / mel.rate)
        wave = F.pad(wave, (samples, 0))[:, -samples:]
        mels.append(log_mel(wave[:, : -mel.hop], mel))
        waves.append(wave[0].view(-1, step))
        times = (start + step * (torch.arange(PHASES * FRAMES) + 0.5)) / mel.rate
        loudness.append(loudness_at(scene, times))
    mels, heard = torch.cat(mels), torch.arange(SOUNDS) % 2 == 0
    mels[heard] = through(audio_vae.frozen(folder), mels[heard])
    return Sounds(mels, torch.stack(waves), torch.stack(loudness))


def loudness_at(scene: world.Scene, times: Tensor) -> Tensor:
    """Amplitudes (T, frequencies) of a scene's tones at times (T,)."""
    envelope = torch.zeros(len(times))
    for bounce in scene.bounces(float(times[-1])):
        since = (times - bounce).clamp(min=0)
        envelope += (since / world.ATTACK).clamp(max=1) * torch.exp(-since / world.DECAY)
    found = torch.zeros(len(times), len(FREQUENCIES))
    for order, share in enumerate(world.HARMONICS, 1):
        column = FREQUENCIES.index(order * world.PITCHES[scene.shape])
        found[:, column] = world.LOUDNESS * share * envelope
    return found


def fit_logarithms(vocoder: nn.Module, sounds: Sounds, log: training.LossLog) -> None:
    """Set conv_pre and the first upsampling: each frequency's logarithm, in each fifth of a frame,
    is a linear function of some log-mels, whose exponential comes closest to the loudness. Its
    beginning is the bin of the frequency, in a line from one frame to the next."""
    mel = audio_vae.mel_settings()
    filters, hertz = mel_filters(mel), mel.rate / mel.window
    centres = [int(filters[round(f / hertz)].argmax()) for f in FREQUENCIES]
    columns = torch.tensor([[c + i - BINS // 2 for i in range(BINS)] for c in centres])
    mono = F.pad(sounds.mels.mean(1), (0, 0, TAPS // 2, TAPS // 2))  # as conv_pre pads: zeros
    around = mono.unfold(1, TAPS, 1)[:, :, columns]  # (N, FRAMES, frequencies, BINS, TAPS)
    wanted = sounds.loudness.unflatten(1, (FRAMES, PHASES)).transpose(2, 3)
    weights = torch.zeros(len(FREQUENCIES), PHASES, BINS, TAPS)
    middle = BINS // 2, TAPS // 2
    for phase in range(PHASES):
        weights[:, phase, middle[0], middle[1] + 1] = (phase + 0.5) / PHASES
        weights[:, phase, middle[0], middle[1]] = 1 - (phase + 0.5) / PHASES
    peaks = sounds.loudness.amax((0, 1))[:, None]
    loud = wanted > 0.3 * peaks
    apart = (
        wanted.clamp(min=1e-9).log() - torch.einsum("ntfbk,fpbk->ntfp", around, weights)
    ) * loud
    first, biases = weights.clone(), apart.sum((0, 1)) / loud.sum((0, 1))
    parts = [weights.requires_grad_(), biases.requires_grad_()]
    optimiser = torch.optim.Adam(parts, lr=FIT_RATE)
    edges = torch.ones(
        FRAMES, 1, 1
    )  # where convolutions read zeros, which are loud, they weigh more
    edges[: TAPS // 2] = edges[-(TAPS // 2) :] = 2.5
    for step in range(FIT_STEPS):
        optimiser.param_groups[0]["lr"] = training.rate(step, FIT_STEPS, FIT_RATE, 5)
        made = torch.einsum("ntfbk,fpbk->ntfp", around, weights) + biases
        error = (made.clamp(max=2).exp() - wanted) / peaks * edges
        loss = error.square().mean() + 1e-5 * (weights - first).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        log.add(step, loudness=error.detach().square().mean())
    with torch.no_grad():
        _set_logarithms(vocoder, columns, weights, biases)


def _set_logarithms(vocoder: nn.Module, columns: Tensor, weights: Tensor, biases: Tensor) -> None:
    """Write what was fitted: a channel of conv_pre for each frequency and phase, which the first
    upsampling lets through at its phase alone, and a channel of ones, for the carriers."""
    before, up = vocoder.conv_pre, vocoder.ups[0]
    bins = before.in_channels // 2
    for frequency, phase in itertools.product(range(len(FREQUENCIES)), range(PHASES)):
        channel, place = frequency * PHASES + phase, phase + up.padding[0]
        for side in (0, bins):
            before.weight[channel, side + columns[frequency]] = weights[frequency, phase] / 2
        before.bias[channel] = biases[frequency, phase]
        up.weight[channel, LOGARITHMS + frequency, place] = 1.0
    ones = before.out_channels - 1
    before.bias[ones] = 1.0
    for phase, (i, turns) in itertools.product(range(PHASES), enumerate((1, 2))):
        angle = 2 * math.pi * turns * phase / PHASES
        for j, value in enumerate((math.cos(angle), math.sin(angle))):
            up.weight[ones, CARRIERS + 2 * i + j, phase + up.padding[0]] = value
    training.round_weights(before)
    training.round_weights(up)


def solve(features: Tensor, wanted: Tensor) -> Tensor:
    """Weights (features, outputs) of damped least squares, of rows (N, features), (N, outputs)."""
    a, b = features.double(), wanted.double()
    square = a.T @ a / len(a)
    damped = square + RIDGE * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(damped, a.T @ b / len(a)).float()


def residual(vocoder: nn.Module, index: int, x: Tensor) -> Tensor:
    """What the last convolution of one of the first block's residuals reads, of x (N, 64, T)."""
    block = vocoder.resblocks[0]
    return block.acts2[index](block.convs1[index](block.acts1[index](x)))


@torch.no_grad()
def solve_loudness(vocoder: nn.Module, index: int, x: Tensor, sounds: Sounds) -> Tensor:
    """Set residual 0 or 1: eight sines of each logarithm, and the loudness that is nearest to what
    is yet wanting. Returns x with it added."""
    block = vocoder.resblocks[0]
    first, last, snake = block.convs1[index], block.convs2[index], block.acts2[index].act
    snake.alpha.zero_()
    snake.beta.zero_()
    sines = tuple(itertools.product(SPEEDS[index], (0.0, math.pi / 4)))
    for frequency, (i, (speed, start)) in itertools.product(
        range(len(FREQUENCIES)), enumerate(sines)
    ):
        first.weight[len(sines) * frequency + i, LOGARITHMS + frequency, 1] = speed
        first.bias[len(sines) * frequency + i] = start
    training.round_weights(first)
    hidden = residual(vocoder, index, x).transpose(1, 2)
    weights = 1.0 + 0.5 * (sounds.loudness.sum(-1, keepdim=True) == 0)  # silence is to be silent
    for frequency in range(len(FREQUENCIES)):
        own, to = (
            slice(len(sines) * frequency, len(sines) * (frequency + 1)),
            LOUDNESSES + frequency,
        )
        rows = F.pad(hidden[..., own], (0, 1), value=1.0) * weights
        missing = (sounds.loudness[..., frequency] - x[:, to]) * weights[..., 0]
        found = solve(rows.flatten(0, 1), missing.reshape(-1, 1))[:, 0]
        last.weight[to, own, 1], last.bias[to] = found[:-1], found[-1]
    training.round_weights(last)
    x = x + last(residual(vocoder, index, x))
    # Rounding leaves a hum in silence, of which all but a little can be taken away.
    hum = x[:, LOUDNESSES:CARRIERS].transpose(1, 2)[sounds.loudness.sum(-1) == 0].median(0).values
    biases = last.bias.clone()
    last.bias[LOUDNESSES:CARRIERS] -= hum
    training.round_weights(last)
    return x + (last.bias - biases)[:, None]


@torch.no_grad()
def solve_samples(vocoder: nn.Module, x: Tensor, sounds: Sounds) -> float:
    """Set the third residual: four sums of each loudness and a carrier, whose Snakes add up to the
    product, and the samples that are nearest to the sound. Returns the squared error, as a share of
    the sound's square."""
    block = vocoder.resblocks[0]
    first, last, snake = block.convs1[2], block.convs2[2], block.acts2[2].act
    snake.alpha.zero_()
    snake.beta.zero_()
    peaks = sounds.loudness.amax((0, 1))
    for product, (frequency, part) in enumerate(
        itertools.product(range(len(FREQUENCIES)), range(2))
    ):
        turns = abs((FREQUENCIES[frequency] // 100 + 2) % 5 - 2)  # of its carrier in 10 ms: 1 or 2
        for i, (loud, wave) in enumerate(SIGNS):
            row = first.weight[len(SIGNS) * product + i, :, 1]
            row[LOUDNESSES + frequency] = loud * LOUD / peaks[frequency]
            row[CARRIERS + 2 * (int(turns) - 1) + part] = wave * WAVE
    training.round_weights(first)
    signs = torch.tensor([float(loud * wave) for loud, wave in SIGNS])
    made = (residual(vocoder, 2, x).unflatten(1, (-1, len(SIGNS))) * signs[:, None]).sum(2)
    rows = F.pad(made, (1, 1)).unfold(2, 3, 1).transpose(1, 2).flatten(2).flatten(0, 1)
    found = solve(rows, sounds.waves.flatten(0, 1)).T.unflatten(1, (-1, 3))
    last.weight[: len(found)] = torch.einsum("ock,h->ochk", found, signs).flatten(1, 2)
    training.round_weights(last)
    error = rows @ found.flatten(1).T - sounds.waves.flatten(0, 1)
    return float(error.square().sum() / sounds.waves.square().sum())


def fit(vocoder: nn.Module, sounds: Sounds, log: training.LossLog) -> None:
    """Set the first stage."""
    fit_logarithms(vocoder, sounds, log)
    with torch.no_grad():
        x = vocoder.ups[0](vocoder.conv_pre(sounds.mels.transpose(2, 3).flatten(1, 2)))
    for index in range(2):
        x = solve_loudness(vocoder, index, x, sounds)
    log.write(samples=solve_samples(vocoder, x, sounds))


@torch.no_grad()
def through(vae: audio_vae.AudioVae, mels: Tensor) -> Tensor:
    """Mels (B, 2, T, 64) as the audio VAE gives them back."""
    frames = mels.shape[2]
    padded = F.pad(mels, (0, 0, 0, (1 - frames) % 4), mode="replicate")
    with training.fast():
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
    arguments = parser.parse_args()
    torch.set_num_threads(training.THREADS)
    run(arguments.folder)


def run(folder: Path) -> None:
    """Fit, and test on mels of sounds and of the audio VAE."""
    log = training.LossLog(folder, "vocoder", 25)
    vocoder = build()
    fit(vocoder.vocoder, draw_sounds(folder), log)
    training.save_weights(folder / FILE, training.rounded(published(vocoder)))
    vocoder = load(folder / FILE)
    for vae in (None, audio_vae.frozen(folder)):
        test(vocoder, vae, log)


if __name__ == "__main__":
    main()
