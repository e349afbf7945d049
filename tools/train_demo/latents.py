"""The latents and contexts of all scenes that the DiT learns, in an order drawn once.

python tools/train_demo/latents.py --folder FOLDER

Writes FOLDER/latents/0000.safetensors and so on; goes on after those that are there.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import audio_vae
import text
import torch
import video_vae
from config import FRAME_RATE, HEIGHT, MEL_RATE, NUM_FRAMES, WIDTH
from safetensors.torch import load_file
from torch import Generator, Tensor
from training import THREADS, fast, save_weights
from world import Scene

from ltx_neuron.host.spectrogram import log_mel

# Of a context's 1024 vectors: the first, among which all words are, and some of the others.
TEXT_SLOTS, REGISTER_SLOTS = 16, 16
PROMPTS = 2  # of a scene
CHUNK = 128  # scenes in a file
CHUNKS = math.ceil(len(Scene.on_courses()) / CHUNK)
LARGE_EVERY = 2  # every so-many-th chunk has latents at full size, too


class Latents(NamedTuple):
    """In bf16: small (N, 128, 7, 2, 3); large (M, 128, 7, 4, 6), those of the first M scenes; audio
    (N, 8, 51, 16); contexts (N, PROMPTS, slots, D)."""

    small: Tensor
    large: Tensor
    audio: Tensor
    video_context: Tensor
    audio_context: Tensor


def chunk_numbers(folder: Path) -> list[int]:
    """The chunks that lie in a folder, those with large latents first."""
    found = sorted(int(path.stem) for path in (folder / "latents").glob("*.safetensors"))
    return sorted(found, key=lambda number: number % LARGE_EVERY != 0)


def chunk_scenes(number: int) -> list[Scene]:
    """The scenes of a chunk."""
    scenes = Scene.on_courses()
    order = torch.randperm(len(scenes), generator=Generator().manual_seed(0)).tolist()
    return [scenes[place] for place in order[number * CHUNK : (number + 1) * CHUNK]]


def load_latents(folder: Path) -> Latents:
    """All latents that lie in a folder, in the order of `chunk_numbers`."""
    chunks = [load_file(_path(folder, number)) for number in chunk_numbers(folder)]
    return Latents(
        *(torch.cat([chunk[name] for chunk in chunks if name in chunk]) for name in Latents._fields)
    )


class Encoders:
    """The frozen encoders of a folder, which make latents and contexts."""

    def __init__(self, folder: Path):
        self.video = video_vae.frozen(folder).encoder.eval()
        self.audio = audio_vae.frozen(folder).encoder.eval()
        self.text = text.frozen(folder)

    @torch.no_grad()
    def picture(
        self, scene: Scene, height: int, width: int, num_frames: int = NUM_FRAMES
    ) -> Tensor:
        """Normalised latents (128, F, h, w) of a scene."""
        frames = video_vae.pixels(scene.frames(height, width, num_frames, FRAME_RATE))
        with fast():
            return video_vae.encode(self.video, frames[None])[0].float()

    @torch.no_grad()
    def sound(self, scene: Scene) -> Tensor:
        """Normalised latents (8, 51, 16) of a scene's sound."""
        settings = audio_vae.mel_settings()
        samples = (audio_vae.CLIP_FRAMES - 1) * settings.hop
        wave = scene.waveform(MEL_RATE, (samples + 1) / MEL_RATE)[:, :samples]
        return audio_vae.encode(self.audio, log_mel(wave, settings))[0]

    @torch.no_grad()
    def contexts(self, prompts: list[str], generator: Generator) -> tuple[Tensor, Tensor]:
        """Contexts (P, slots, D) of both streams, at the first places and at some drawn ones."""
        others = TEXT_SLOTS + torch.randperm(text.TOKENS - TEXT_SLOTS, generator=generator)
        places = torch.cat([torch.arange(TEXT_SLOTS), others[:REGISTER_SLOTS]])
        return self.text(prompts, places)


def make_chunk(encoders: Encoders, number: int) -> dict[str, Tensor]:
    """The latents of CHUNK scenes; their prompts' wording is drawn from the number."""
    generator, scenes = Generator().manual_seed(number), chunk_scenes(number)
    made = {
        "small": torch.stack([encoders.picture(s, HEIGHT // 2, WIDTH // 2) for s in scenes]),
        "audio": torch.stack([encoders.sound(scene) for scene in scenes]),
    }
    if number % LARGE_EVERY == 0:
        made["large"] = torch.stack([encoders.picture(s, HEIGHT, WIDTH) for s in scenes])
    said = [scene.prompt(generator) for scene in scenes for _ in range(PROMPTS)]
    parts = [encoders.contexts(said[i : i + 16], generator) for i in range(0, len(said), 16)]
    for name, contexts in zip(
        ("video_context", "audio_context"), zip(*parts, strict=True), strict=True
    ):
        made[name] = torch.cat(contexts).unflatten(0, (CHUNK, PROMPTS))
    return {name: latents.bfloat16() for name, latents in made.items()}


def _path(folder: Path, number: int) -> Path:
    return folder / "latents" / f"{number:04}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=CHUNKS, help=f"files of {CHUNK} scenes")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    run(args.folder, args.chunks)


def run(folder: Path, chunks: int) -> None:
    (folder / "latents").mkdir(exist_ok=True)
    encoders = Encoders(folder)
    for number in range(chunks):
        path = _path(folder, number)
        if not path.exists():
            save_weights(path, make_chunk(encoders, number))
            print(path, flush=True)


if __name__ == "__main__":
    main()
