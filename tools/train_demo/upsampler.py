"""The demo's spatial latent upsampler: from a scene's latents at half size to those at full size.

python tools/train_demo/upsampler.py train --folder DIR    goes on from what DIR holds
python tools/train_demo/upsampler.py measure --folder DIR

As in the pipeline (ltx_core.model.upsampler.upsample_video), it takes and gives latents that are
not normalised; what is minimised is the squared error of normalised ones.
"""

import argparse
import json
from pathlib import Path

import torch
from config import HEIGHT, NUM_FRAMES, UPSAMPLER, WIDTH
from torch import Generator, Tensor, nn
from training import THREADS, fast, load_part, rounded, save_weights
from video_vae import Training, encode, frozen, learning_rate, pixels, psnr
from world import Scene

from ltx_neuron.host.models import import_ltx_core

import_ltx_core()
from ltx_core.model.upsampler import LatentUpsamplerConfigurator, upsample_video  # noqa: E402

STEPS, BATCH = 1600, 4
PAIRS = 160  # scenes whose latents are kept to draw batches from
RENEWED = 4  # of them, every eighth step
LEARNING_RATE = 0.02
NOISE = 0.15  # largest deviation of what is added to the small latents: denoised ones are not exact
FILE = "upsampler.safetensors"


def pair(encoder: nn.Module, generator: Generator) -> tuple[Tensor, Tensor]:
    """A scene's normalised latents (128, F, h, w) at half and at full size, of a whole clip: the
    norms are over all its latents."""
    scene = Scene.draw(generator)
    start = float(torch.rand((), generator=generator))
    sizes = (HEIGHT // 2, WIDTH // 2), (HEIGHT, WIDTH)
    with torch.no_grad(), fast():
        small, large = (
            encode(encoder, pixels(scene.frames(*size, NUM_FRAMES, start=start))[None])[0]
            for size in sizes
        )
    return small, large


def train(folder: Path, steps: int) -> None:
    """Minimise the squared error of upsampled latents, normalised."""
    torch.manual_seed(0)
    encoder = frozen(folder).encoder
    upsampler = LatentUpsamplerConfigurator.from_config(UPSAMPLER)
    training = Training("upsampler", upsampler, folder)
    generator = Generator().manual_seed(200000 + training.step)
    pairs = [pair(encoder, generator) for _ in range(PAIRS)]
    while training.step < steps:
        if training.step % 8 == 0:
            for _ in range(RENEWED):
                place = int(torch.randint(PAIRS, (), generator=generator))
                pairs[place] = pair(encoder, generator)
        chosen = torch.randint(PAIRS, (BATCH,), generator=generator).tolist()
        small, large = (torch.stack([pairs[c][size] for c in chosen]) for size in (0, 1))
        noise = NOISE * torch.rand(BATCH, 1, 1, 1, 1, generator=generator)
        small = small + noise * torch.randn(small.shape, generator=generator)
        with fast():
            found = upsample_video(small, encoder, upsampler)
        loss = (found.float() - large).square().mean()
        rate = learning_rate(training.step, steps, LEARNING_RATE)
        training.update(loss, rate, {"loss": loss.item()})
        if training.step % 200 == 0:
            write(training.mean, folder)
    training.save()
    write(training.mean, folder)


def write(weights: dict[str, Tensor], folder: Path) -> None:
    """The released file: bfloat16 weights by their bare names, and the config."""
    save_weights(folder / FILE, rounded(weights), {"config": json.dumps(UPSAMPLER)})


@torch.no_grad()
def measure(folder: Path, clips: int) -> dict:
    """Mean squared error of normalised latents, and PSNR of what is decoded from them, in bf16."""
    vae = frozen(folder).bfloat16()
    upsampler = LatentUpsamplerConfigurator.from_config(UPSAMPLER)
    upsampler.load_state_dict(load_part(folder / FILE, ""))
    upsampler.bfloat16()
    generator, errors, pictures = Generator().manual_seed(3), [], []
    for _ in range(clips):
        scene = Scene.draw(generator)
        small, large = (
            pixels(scene.frames(*size, NUM_FRAMES))[None]
            for size in ((HEIGHT // 2, WIDTH // 2), (HEIGHT, WIDTH))
        )
        found = upsample_video(vae.encoder(small.bfloat16()), vae.encoder, upsampler)
        wanted = vae.encoder(large.bfloat16())
        errors.append(float((found.float() - wanted.float()).square().mean()))
        pictures.append(psnr(vae.decoder(found).float(), large))
    return {
        "error of normalised latents": round(sum(errors) / clips, 4),
        "PSNR": round(sum(pictures) / clips, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("--folder", type=Path, required=True, help="of weights and states")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--clips", type=int, default=20, help="to measure")
    parser.add_argument("--threads", type=int, default=THREADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "train":
        train(args.folder, args.steps)
    else:
        print(json.dumps(measure(args.folder, args.clips), indent=1))


if __name__ == "__main__":
    main()
