"""The demo's video VAE: encoder and decoder trained together on the world's clips.

python tools/train_demo/video_vae.py train --folder DIR     goes on from what DIR holds
python tools/train_demo/video_vae.py freeze --folder DIR    statistics, and the released names
python tools/train_demo/video_vae.py refine --folder DIR    the decoder alone, latents stay
python tools/train_demo/video_vae.py measure --folder DIR   PSNR through both decoders

While both are trained, latents are normalised by running statistics of every channel and some noise
is added: all channels have the same scale, carry something, and small errors of a denoised latent
are not seen.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from config import HEIGHT, NUM_FRAMES, WIDTH, demo_config
from einops import rearrange
from muon import Muon
from safetensors.torch import load_file
from torch import Generator, Tensor, nn
from training import THREADS, fast, save_weights
from world import Scene

from ltx_neuron.host.models import import_ltx_core

import_ltx_core()
from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator  # noqa: E402
from ltx_core.model.video_vae.ops import patchify  # noqa: E402

STEPS, BATCH, FRAMES = 7200, 2, 17
REFINE_STEPS = 1600
LEARNING_RATE = 0.02  # of weights, by Muon
VECTORS = 0.05  # of it for biases, by Adam
IMAGES_FIRST = 400  # steps with mostly single frames, and squared differences alone
NOISE = 0.3  # largest deviation of what is added to normalised latents
REFINE_NOISE = 0.1
NOISE_RISE = 800  # steps until the noise is as large
FOLLOWS = 0.1  # of the way that running statistics go in a step, at the highest rate
AVERAGE = 0.998  # of the weights' running mean, which is what ships
SAVE_SECONDS = 120
FILE = "video_vae.safetensors"


class VideoVae(nn.Module):
    """ltx-core's encoder and decoder, with one set of statistics."""

    def __init__(self):
        super().__init__()
        self.encoder = VideoEncoderConfigurator.from_config(demo_config())
        self.decoder = VideoDecoderConfigurator.from_config(demo_config())
        self.set_statistics(torch.zeros(128), torch.ones(128))
        set_stem(self.encoder)

    def set_statistics(self, mean: Tensor, deviation: Tensor) -> None:
        """Mean and standard deviation (128,) of the encoder's means, channel by channel."""
        for model in (self.encoder, self.decoder):
            statistics = model.per_channel_statistics
            statistics.get_buffer("mean-of-means").copy_(mean)
            statistics.get_buffer("std-of-means").copy_(deviation)

    @torch.no_grad()
    def follow_statistics(self, latents: Tensor, share: float) -> None:
        """Move the encoder's statistics towards those of its normalised latents (B, 128, F, h, w)
        by a share of the way. The decoder takes normalised latents while both are trained."""
        statistics = self.encoder.per_channel_statistics
        deviation = statistics.get_buffer("std-of-means")
        shift = latents.mean((0, 2, 3, 4))
        square = (latents - shift.view(-1, 1, 1, 1)).square().mean((0, 2, 3, 4))
        statistics.get_buffer("mean-of-means").add_(share * deviation * shift)
        deviation.mul_((1 + share * (square - 1)).clamp(min=1e-4).sqrt())

    @torch.no_grad()
    def fold_statistics(self) -> None:
        """Have the encoder's last convolution make what is normalised now, and normalise no
        further."""
        statistics = self.encoder.per_channel_statistics
        mean, deviation = (
            statistics.get_buffer(f"{name}-of-means").clone() for name in ("mean", "std")
        )
        last = self.encoder.conv_out.conv  # its last channel is a variance that nobody uses
        last.weight[:-1] /= deviation.view(-1, 1, 1, 1, 1)
        last.bias[:-1] = (last.bias[:-1] - mean) / deviation
        self.set_statistics(torch.zeros(128), torch.ones(128))


def cosine_basis() -> Tensor:
    """The 16 numbers that the encoder keeps of every 4 x 4 pixels of a frame, as a matrix (16, 48)
    over what ltx-core's `patchify` makes of them: the lowest of a cosine transform, eight of the
    sum of the colours and four of each of two differences."""
    colours = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, -0.5, 0], [0.25, 0.25, -0.5]])
    orders = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1)]
    place = (torch.arange(4) + 0.5) * math.pi / 4
    waves = [
        torch.outer(torch.cos(place * across), torch.cos(place * down))
        / (4 if across + down else 16)
        for across, down in orders
    ]
    return torch.stack(
        [
            (colour[:, None, None] * wave).flatten()
            for colour, count in zip(colours, (8, 4, 4), strict=True)
            for wave in waves[:count]
        ]
    )


@torch.no_grad()
def set_stem(encoder: nn.Module) -> None:
    """Set the encoder's first two convolutions, which would take most of the time, once for all.

    No activation lies between them: together they choose 128 of the 384 numbers of 8 x 8 pixels
    in two frames.
    """
    conv_in, chosen = encoder.conv_in.conv, encoder.down_blocks[0].conv.conv
    for convolution in (conv_in, chosen):
        convolution.weight.zero_()
        convolution.bias.zero_()
        convolution.requires_grad_(False)
    conv_in.weight[:16, :, 2, 1, 1] = cosine_basis()  # the last tap in time is the frame itself
    chosen.weight[:16, :16, 2, 1, 1] = torch.eye(16)


def stem(video: Tensor) -> Tensor:
    """What these two convolutions make of pixels (B, 3, F, H, W), computed without them."""
    kept = torch.einsum("kc,bcfhw->bkfhw", cosine_basis(), patchify(video, 4))
    kept = torch.cat([kept[:, :, :1], kept], 2)
    order = "b k (f p) (h q) (w r) -> b k (p q r) f h w"
    parts = rearrange(kept, order, p=2, q=2, r=2)
    features = parts.flatten(1, 2)
    features[:, :16] += parts.mean(2)  # the block's way around its convolution
    return features


def encode(encoder: nn.Module, video: Tensor) -> Tensor:
    """The encoder's normalised latents, faster."""
    features = stem(video)
    for block in encoder.down_blocks[1:]:
        features = block(features)
    means = encoder.conv_out(F.silu(encoder.conv_norm_out(features)))[:, :-1]
    return encoder.per_channel_statistics.normalize(means.float())


def pixels(frames: Tensor) -> Tensor:
    """Frames (F, H, W, 3) in 0..1 as the encoder takes them: (3, F, H, W) in -1..1."""
    return frames.permute(3, 0, 1, 2) * 2 - 1


def clip(generator: Generator, height: int, width: int, num_frames: int = NUM_FRAMES) -> Tensor:
    """A scene's frames (3, F, height, width) in -1..1, from some time on."""
    start = float(torch.rand((), generator=generator))
    return pixels(Scene.draw(generator).frames(height, width, num_frames, start=start))


def piece(generator: Generator, num_frames: int) -> Tensor:
    """A quarter of a clip at full size, (3, F, HEIGHT / 2, WIDTH / 2), at any place: half of them
    touch the frame's edges."""
    frames = clip(generator, HEIGHT, WIDTH, num_frames)
    ends = []
    for side in (HEIGHT, WIDTH):
        place = torch.rand((), generator=generator) * 2 - 0.5
        ends.append(round(float(place.clamp(0, 1)) * side / 2))
    y, x = ends
    return frames[:, :, y : y + HEIGHT // 2, x : x + WIDTH // 2]


def batch(generator: Generator, size: int, num_frames: int) -> Tensor:
    """(2 * size, 3, F, HEIGHT / 2, WIDTH / 2): so many clips of half size and as many pieces."""
    halves = [clip(generator, HEIGHT // 2, WIDTH // 2, num_frames) for _ in range(size)]
    return torch.stack(halves + [piece(generator, num_frames) for _ in range(size)])


def difference(decoded: Tensor, wanted: Tensor) -> Tensor:
    """What is minimised: absolute and squared differences, of edges too; those where the picture
    differs from its rows' mean, so where the shape is, weigh more."""
    weight = 1 + 4 * (wanted - wanted.mean((2, 4), keepdim=True)).abs().amax(1, keepdim=True)
    error = decoded - wanted
    loss = (weight * error.abs()).mean() + 2 * (weight * error.square()).mean()
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return loss + 0.5 * edges


def psnr(decoded: Tensor, wanted: Tensor) -> float:
    """Of pixels in -1..1, in dB, what lies outside cut off."""
    return -10 * math.log10(float((decoded.clamp(-1, 1) - wanted).square().mean()) / 4)


class Training:
    """A model, its optimiser and the running mean of its weights, kept in a folder."""

    def __init__(self, name: str, model: nn.Module, folder: Path, trained: nn.Module | None = None):
        self.model, self.folder, self.name = model, folder, name
        self.parameters = [p for p in (trained or model).parameters() if p.requires_grad]
        self.optimisers = (
            Muon([p for p in self.parameters if p.ndim > 1]),
            torch.optim.AdamW(
                [p for p in self.parameters if p.ndim == 1], betas=(0.9, 0.98), weight_decay=0.0
            ),
        )
        self.mean = {key: weight.clone() for key, weight in model.state_dict().items()}
        self.step, self.seconds, self.sums = 0, 0.0, {}
        self.saved = self.began = time.monotonic()
        self.resume()

    def resume(self) -> None:
        """Go on from what the folder holds, if anything."""
        path = self.folder / f"{self.name}.training.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimiser, stored in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(stored)
            self.mean, self.step, self.seconds = state["mean"], state["step"], state["seconds"]

    def save(self) -> None:
        """Write the state, so that another run can go on from it."""
        self.seconds += time.monotonic() - self.saved
        self.saved = time.monotonic()
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "mean": self.mean,
            "step": self.step,
            "seconds": self.seconds,
        }
        unfinished = self.folder / f"{self.name}.training.unfinished"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / f"{self.name}.training.pt")

    def update(self, loss: Tensor, rate: float, log: dict) -> None:
        """One step of the optimiser, at a learning rate; every 50 the log's means are written."""
        for optimiser, factor in zip(self.optimisers, (1, VECTORS), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        keep = min(AVERAGE, self.step / (self.step + 10))
        with torch.no_grad():
            for key, weight in self.model.state_dict().items():
                self.mean[key].lerp_(weight, 1 - keep)
        self.step += 1
        for name, value in log.items():
            self.sums.setdefault(name, []).append(value)
        if self.step % 50 == 0:
            means = {name: sum(values) / len(values) for name, values in self.sums.items()}
            seconds = round(self.seconds + time.monotonic() - self.saved, 1)
            line = json.dumps({"step": self.step, "seconds": seconds, "rate": rate} | means)
            self.sums.clear()
            print(line, flush=True)
            with open(self.folder / f"{self.name}.log.jsonl", "a") as file:
                file.write(line + "\n")
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()


def learning_rate(step: int, steps: int, highest: float) -> float:
    """A short rise, then half a cosine down to a fiftieth."""
    rise = min(1.0, (step + 1) / 100)
    return highest * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, step / steps))))


def train(folder: Path, steps: int) -> None:
    """Encoder and decoder together, on clips and single frames."""
    torch.manual_seed(0)
    vae = VideoVae()
    training = Training("video_vae", vae, folder)
    generator = Generator().manual_seed(training.step)
    while training.step < steps:
        early = training.step < IMAGES_FIRST
        single = training.step % 4 > 0 if early else training.step % 4 == 1
        size, frames = (8 * BATCH, 1) if single else (BATCH, FRAMES)
        wanted = batch(generator, size, frames)
        with fast():
            latents = encode(vae.encoder, wanted)
            highest = NOISE * min(1.0, training.step / NOISE_RISE)
            noise = highest * torch.rand(len(latents), 1, 1, 1, 1, generator=generator)
            noise = noise * torch.randn(latents.shape, generator=generator)
            decoded = vae.decoder(latents.float() + noise).float()
        latents = latents.float()
        scale = latents.square().mean()
        rate = learning_rate(training.step, steps, LEARNING_RATE)
        kind = "image" if single else "clip"
        error = (decoded - wanted).square().mean()
        loss = error if early else difference(decoded, wanted)
        log = {"scale": scale.item(), f"{kind} loss": loss.item(), f"{kind} error": error.item()}
        training.update(loss, rate, log)
        # Weights move fast at first, and statistics with them.
        share = FOLLOWS * (1 if early else rate / LEARNING_RATE)
        vae.follow_statistics(latents.detach(), max(share, 1 / (training.step + 1)))
    training.save()


def frozen(folder: Path) -> VideoVae:
    """The VAE as `freeze` or `refine` left it."""
    vae = VideoVae()
    weights = {
        name.removeprefix("vae."): weight.float()
        for name, weight in load_file(folder / FILE).items()
        if "per_channel_statistics" not in name
    }
    vae.load_state_dict(weights, strict=False)
    stored = load_file(folder / FILE)
    statistics = (f"vae.per_channel_statistics.{name}-of-means" for name in ("mean", "std"))
    vae.set_statistics(*(stored[name].float() for name in statistics))
    return vae.eval()


def write(vae: VideoVae, folder: Path) -> None:
    """Encoder, decoder and statistics in bfloat16, by the released names."""
    weights = {}
    for name, weight in vae.state_dict().items():
        if ".per_channel_statistics." in name:
            name = name.partition(".")[2]  # encoder and decoder share them
        weights[f"vae.{name}"] = weight.bfloat16().contiguous()
    save_weights(folder / FILE, weights)


@torch.no_grad()
def freeze(folder: Path, clips: int) -> None:
    """Write the running mean of the weights, with exact statistics of the means over clips of both
    sizes. From here on the latents stay as they are."""
    vae = VideoVae()
    vae.load_state_dict(torch.load(folder / "video_vae.training.pt", weights_only=True)["mean"])
    vae.fold_statistics()
    for weight in vae.parameters():  # as they are stored
        weight.copy_(weight.bfloat16())
    generator, sums = Generator().manual_seed(1), torch.zeros(2, 128, dtype=torch.float64)
    for _ in range(clips):
        for height, width in ((HEIGHT, WIDTH), (HEIGHT // 2, WIDTH // 2)):
            means = vae.encoder(clip(generator, height, width)[None])
            sums += torch.stack([means, means.square()]).double().mean((1, 3, 4, 5)) / 2 / clips
    mean, square = sums
    vae.set_statistics(mean.float(), (square - mean.square()).sqrt().float())
    write(vae, folder)


def refine(folder: Path, steps: int) -> None:
    """Train the decoder on for the frozen encoder's latents, on whole pictures of both sizes."""
    vae = frozen(folder)
    vae.encoder.requires_grad_(False)
    training = Training("video_decoder", vae, folder, vae.decoder)
    generator = Generator().manual_seed(100000 + training.step)
    half = HEIGHT // 2, WIDTH // 2
    while training.step < steps:
        # Long clips at last: the decoder sees both neighbours of a latent.
        frames = FRAMES if training.step < 0.95 * steps else NUM_FRAMES
        name, count, *size = (
            ("half clip", 4 if frames == FRAMES else 2, *half, frames),
            ("clip", 1, HEIGHT, WIDTH, frames),
            ("half clip", 4 if frames == FRAMES else 2, *half, frames),
            ("image", 8, HEIGHT, WIDTH, 1),
        )[training.step % 4]
        wanted = torch.stack([clip(generator, *size) for _ in range(count)])
        with fast():
            with torch.no_grad():
                latents = encode(vae.encoder, wanted)
            noise = REFINE_NOISE * torch.rand(count, 1, 1, 1, 1, generator=generator)
            noise = noise * torch.randn(latents.shape, generator=generator)
            decoded = vae.decoder(latents + noise).float()
        error = decoded - wanted
        square = error.square().mean()
        loss = 4 * square + 0.5 * error.abs().mean()
        rate = learning_rate(training.step, steps, LEARNING_RATE)
        training.update(loss, rate, {f"{name} error": square.item()})
        if training.step % 400 == 0 or training.step == steps:
            shipped = VideoVae()
            shipped.load_state_dict(training.mean)
            write(shipped, folder)
    training.save()


@torch.no_grad()
def measure(folder: Path, clips: int, sheet: Path | None) -> dict:
    """Mean and least PSNR of clips and single frames, by size and decoder, in bfloat16."""
    from ltx_neuron.config.video import video_decoder_config
    from ltx_neuron.host.vae import host_decoder

    vae = frozen(folder).bfloat16()
    weights = frozen(folder).decoder.bfloat16().state_dict()
    fast = host_decoder(video_decoder_config(demo_config()), weights, torch.bfloat16)
    found, rows = {}, []
    for height, width, frames in (
        (HEIGHT, WIDTH, NUM_FRAMES),
        (HEIGHT // 2, WIDTH // 2, NUM_FRAMES),
        (HEIGHT, WIDTH, 1),
        (HEIGHT // 2, WIDTH // 2, 1),
    ):
        generator = Generator().manual_seed(2)
        for number in range(clips):
            wanted = clip(generator, height, width, frames)[None]
            latents = vae.encoder(wanted.bfloat16())
            for name, decoder in (("ltx_core", vae.decoder), ("ours", fast)):
                decoded = decoder(latents).float()
                key = f"{name} {height}x{width}x{frames}"
                found.setdefault(key, []).append(psnr(decoded, wanted))
            if number < 4 and frames > 1:
                rows.append(torch.cat([wanted, decoded], 3)[0, :, ::8])
    if sheet:
        write_sheet(rows, sheet)
    return {
        key: {"mean": round(sum(each) / len(each), 2), "least": round(min(each), 2)}
        for key, each in found.items()
    }


def write_sheet(rows: list[Tensor], path: Path) -> None:
    """A picture of clips (3, F, H, W) in -1..1, one a row."""
    from PIL import Image

    lines = [torch.cat(list(row.permute(1, 2, 3, 0)), 1) for row in rows]
    width = max(line.shape[1] for line in lines)
    lines = [F.pad(line, (0, 0, 0, width - line.shape[1]), value=-1.0) for line in lines]
    values = ((torch.cat(lines) + 1) * 127.5).round().clamp(0, 255).byte()
    Image.fromarray(values.numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("train", "freeze", "refine", "measure"))
    parser.add_argument("--folder", type=Path, required=True, help="of weights and states")
    parser.add_argument("--steps", type=int, help=f"{STEPS} to train, {REFINE_STEPS} to refine")
    parser.add_argument("--clips", type=int, default=40, help="to measure or take statistics of")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="of clips and what was decoded")
    parser.add_argument("--threads", type=int, default=THREADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "train":
        train(args.folder, args.steps or STEPS)
    elif args.what == "refine":
        refine(args.folder, args.steps or REFINE_STEPS)
    elif args.what == "freeze":
        freeze(args.folder, args.clips)
    else:
        print(json.dumps(measure(args.folder, args.clips, args.sheet), indent=1))


if __name__ == "__main__":
    main()
