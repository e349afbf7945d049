"""Train an upscaler's IC-LoRA: python tools/train_demo/upscaler_lora.py --output FILE

For the shipped DiT and VAE, to upscale clips of the demo's world by two in tiles: --upscale-video.
Scenes are encoded at twice the demo's size, and at its size as references. A sample is a window of
both, with the reference's tokens clean beside it at twice their positions, the scene's sound as
given, and the context of an empty prompt. The DiT's own weights stay.
"""

import argparse
import math
import random
from pathlib import Path

import style
import torch
from config import FRAME_RATE, HEIGHT, WIDTH
from dit import CONTEXT, SHARES, SIGMAS, Layouts, new_model
from ltx_core.model.transformer.modality import Modality
from safetensors.torch import load_file
from tiny.weights import DIFFUSION
from torch import Tensor
from training import THREADS, LossLog, load_part, rounded, save_weights
from world import Scene

from ltx_neuron.demo import ASSETS
from ltx_neuron.host.input_files import Sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.weights.model_files import ModelFiles

RANK, RATE, KEEP = 8, 3e-3, 0.99
FRAMES, LATENTS, ROWS, COLUMNS = 25, 4, 4, 6  # of a window; 25 frames take a third of 49's time
TOKENS = LATENTS * ROWS * COLUMNS
SCALE = {"reference_downscale_factor": "2"}


@torch.no_grad()
def encoded(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents of `count` scenes: (N, 128, F, 8, 12), half as large, and of sound (N, 8, T, 16)."""
    host = HostModels(ASSETS.checkpoint, ModelFiles(ASSETS.checkpoint).config, torch.float32)
    scenes, made = Scene.on_courses(), []
    random.Random(1).shuffle(scenes)
    for scene in scenes[:count]:
        pictures = []
        for scale in (2, 1):
            frames = scene.frames(scale * HEIGHT, scale * WIDTH, FRAMES, FRAME_RATE)
            pictures.append(host.encode_video(2 * frames.permute(3, 0, 1, 2)[None] - 1, whole=True))
        sound = Sound(scene.waveform(48000, FRAMES / FRAME_RATE), 48000)
        made.append((*pictures, host.encode_audio(sound)[1]))
    large, small, audio = (torch.cat(tensors) for tensors in zip(*made, strict=True))
    return large, small, audio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--contexts", type=Path, required=True, help="--save-tensors of prompt ''")
    parser.add_argument("--scenes", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1450)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    large, small, audio = encoded(args.scenes)
    model = new_model()
    weights = load_part(ASSETS.checkpoint, DIFFUSION)
    model.load_state_dict({n: w for n, w in weights.items() if "connector" not in n})
    layouts, style.RANK = Layouts(model), RANK
    model.requires_grad_(False)
    for block in model.transformer_blocks:
        for part in (block.attn1, block.ff):
            style._adapt_linears(part)
    trained = {n: w for n, w in model.named_parameters() if w.requires_grad}
    average = {n: w.detach().clone() for n, w in trained.items()}
    places = torch.cat([torch.arange(16), torch.arange(500, 516)])  # the text's, some registers
    saved = load_file(args.contexts)
    contexts = [saved[f"{name}_context"][:, places].float() for name in ("video", "audio")]
    mask = torch.zeros(1, 1, 1, len(places))
    mask[..., 16:] = math.log((CONTEXT - 16) / 16)
    reference = layouts.video[ROWS // 2, COLUMNS // 2][:, :, : TOKENS // 4].clone()
    reference[:, 1:] *= 2
    positions = torch.cat([layouts.video[ROWS, COLUMNS][:, :, :TOKENS], reference], 2)
    heard = layouts.audio[:, :, : audio.shape[2]]
    optimiser = torch.optim.AdamW(trained.values(), betas=(0.9, 0.98), weight_decay=0.0)
    log = LossLog(args.output.parent, "upscaler_lora", every=50)
    for step in range(args.steps):
        index = torch.randint(len(large), (args.batch,))
        row, column = 2 * random.randrange(3), 2 * random.randrange(4)
        clean = large[index, :, :, row : row + ROWS, column : column + COLUMNS]
        half = small[index, :, :, row // 2 :, column // 2 :][..., : ROWS // 2, : COLUMNS // 2]
        drawn = torch.multinomial(torch.tensor(SHARES), args.batch, True)
        sigma, noise = torch.tensor(SIGMAS)[drawn], torch.randn_like(clean)
        noisy = clean + sigma[:, None, None, None, None] * (noise - clean)
        tokens = torch.cat([noisy.flatten(2), half.flatten(2)], 2).transpose(1, 2)
        timesteps = torch.zeros(tokens.shape[:2])
        timesteps[:, :TOKENS] = sigma[:, None]
        sound = audio[index].permute(0, 2, 1, 3).flatten(2)
        still = torch.zeros(sound.shape[:2])
        streams = (
            (tokens, sigma, timesteps, positions, contexts[0]),
            (sound, still[:, 0], still, heard, contexts[1]),
        )
        size = (args.batch, -1, -1)
        video, given = (
            Modality(*x, place.expand(*size, -1), text.expand(*size), context_mask=mask)
            for *x, place, text in streams
        )
        seen, _ = model(video, given, None)
        error = seen[:, :TOKENS].float() - (noise - clean).flatten(2).transpose(1, 2)
        loss = error.square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        rate = RATE * min(1.0, (step + 1) / 30, 1.5 * (1 - step / args.steps))
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()
        for name, weight in trained.items():
            average[name].lerp_(weight.detach(), 1 - min(KEEP, (step + 1) / (step + 10)))
        log.add(step, video=loss.detach())
    named = {style.PREFIX + name: weight for name, weight in rounded(average).items()}
    save_weights(args.output, named, SCALE)


if __name__ == "__main__":
    main()
