"""Train a style: python tools/train_demo/style.py --folder FOLDER

A LoRA for the trained DiT, under which a clip is a blueprint: its shape is cyan on a navy ground,
whatever colours the prompt names, and all else is as the prompt says. The DiT's own weights stay.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from config import HEIGHT, WIDTH
from dit import Training
from latents import Encoders, Latents, chunk_numbers, chunk_scenes
from ltx_core.model.transformer.attention import Attention
from ltx_core.model.transformer.feed_forward import FeedForward
from torch import Tensor, nn
from training import THREADS, LossLog, rounded, save_weights
from world import BLUEPRINT, Scene

RANK = 4
PREFIX = "diffusion_model."  # of the names in published LoRA files
RATE = 3e-3


class Adapted(nn.Module):
    """A linear layer whose weight is W + B @ A, of which W stays as it is."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)  # to begin with, W alone

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.lora_B(self.lora_A(x))


def adapt(model: nn.Module) -> list[nn.Parameter]:
    """Freeze a DiT, and put LoRAs on the picture's cross attention to the text and its feed-forward
    layers. Returns what can be trained."""
    model.requires_grad_(False)
    for block in model.transformer_blocks:
        for part in (block.attn2, block.ff):
            _adapt_linears(part)
    return [weight for weight in model.parameters() if weight.requires_grad]


def _adapt_linears(part: Attention | FeedForward) -> None:
    for name, module in list(part.named_modules()):
        gate = name.endswith("to_gate_logits")  # one number a head
        if isinstance(module, nn.Linear) and not gate:
            parent, _, last = name.rpartition(".")
            setattr(part.get_submodule(parent), last, Adapted(module, RANK))


class StyleTraining(Training):
    """The DiT with a LoRA, and latents whose pictures have the style while their prompts do not."""

    def __init__(self, folder: Path, seed: int = 0):
        super().__init__(folder, seed)
        self.model.load_state_dict(self.average)
        trained = adapt(self.model)
        self.average = {name: w.detach().clone() for name, w in self.model.state_dict().items()}
        self.optimisers = (torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0.0),)
        self.latents = in_style(folder, self.latents)

    def save(self) -> None:
        weights = {PREFIX + n: w for n, w in self.average.items() if ".lora_" in n}
        save_weights(self.folder / "style.safetensors", rounded(weights))


@torch.no_grad()
def in_style(folder: Path, kept: Latents) -> Latents:
    """The latents of a folder, `kept`, with pictures that are encoded from blueprints."""
    encoders, made = Encoders(folder), {}

    def picture(scene: Scene, height: int, width: int) -> Tensor:
        blueprint = replace(scene, **BLUEPRINT), height
        if blueprint not in made:
            made[blueprint] = encoders.picture(blueprint[0], height, width).bfloat16()
        return made[blueprint]

    scenes = [scene for number in chunk_numbers(folder) for scene in chunk_scenes(number)]
    return kept._replace(
        small=torch.stack([picture(scene, HEIGHT // 2, WIDTH // 2) for scene in scenes]),
        large=torch.stack([picture(scene, HEIGHT, WIDTH) for scene in scenes[: len(kept.large)]]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32, help="samples at the small size")
    parser.add_argument("--threads", type=int, default=THREADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    training, log = StyleTraining(args.folder), LossLog(args.folder, "style", every=60)
    for step in range(args.steps):
        course = min(1.0, (step + 1) / 50, 2 * (1 - step / args.steps))
        log.add(step, **training.step(step, (course * RATE,), args.batch))
    training.save()


if __name__ == "__main__":
    main()
