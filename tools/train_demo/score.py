"""Make clips of drawn prompts from the trained parts, by ltx-core's modules, and score them.

python tools/train_demo/score.py --folder FOLDER --prompts 32 --sheet sheet.png

--truth decodes the encoded scenes instead: what VAE and vocoder alone would score.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import latents
import measures
import text
import torch
from audio_vae import frozen as frozen_audio_vae
from config import HEIGHT, NUM_FRAMES, SAMPLE_RATE, UPSAMPLER, WIDTH, demo_config
from dit import SIGMAS, STAGE_2_SIGMAS, Layouts, new_model, sample
from ltx_core.model.audio_vae import VocoderConfigurator, decode_audio
from ltx_core.model.upsampler import LatentUpsamplerConfigurator, upsample_video
from PIL import Image
from tiny.weights import DIFFUSION
from torch import Generator, Tensor
from training import THREADS, fast, load_part
from video_vae import frozen as frozen_video_vae
from world import PROMPT_SEED, Scene, draw


class Clip(NamedTuple):
    """frames (F, H, W, 3) in 0..1, sound (2, samples) or None where there is no vocoder yet."""

    frames: Tensor
    sound: Tensor | None


class Decoders:
    """The decoders of a folder."""

    def __init__(self, folder: Path):
        self.video, self.audio = frozen_video_vae(folder).decoder, frozen_audio_vae(folder).decoder
        self.vocoder = None
        if (folder / "vocoder.safetensors").exists():
            self.vocoder = VocoderConfigurator.from_config(demo_config()).eval()
            self.vocoder.load_state_dict(load_part(folder / "vocoder.safetensors", "vocoder."))

    @torch.no_grad()
    def decode(self, video: Tensor, audio: Tensor) -> Clip:
        """The clip of latents (128, F, h, w) and (8, T, 16)."""
        with fast():
            frames = self.video(video[None]).float()[0]
        frames = (frames.permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1)
        if self.vocoder is None:
            return Clip(frames, None)
        return Clip(frames, decode_audio(audio[None].float(), self.audio, self.vocoder).waveform)


class Made(NamedTuple):
    """Normalised latents of both stages, (B, 128, F, h, w), and the sound's (B, 8, T, 16)."""

    stage_1: Tensor
    stage_2: Tensor | None
    audio: Tensor


@torch.no_grad()
def make(folder: Path, prompts: list[str], two_stages: bool, first: tuple | None = None) -> Made:
    """Latents by the distilled pipeline: eight steps, upsampling, three steps.

    first  the clean first latent frames (B, 128, 1, h, w) of both sizes, for image to video
    """
    model = new_model()
    model.load_state_dict(load_part(folder / "dit.safetensors", DIFFUSION))
    model.eval()
    with torch.autocast("cpu", enabled=False):
        layouts, contexts = Layouts(model), text.frozen(folder)(prompts)
    generator = Generator().manual_seed(PROMPT_SEED)
    count, (small, large) = len(prompts), first or (None, None)
    video = torch.randn(count, 128, 7, HEIGHT // 64, WIDTH // 64, generator=generator)
    audio = torch.randn(count, 8, 51, 16, generator=generator)
    video, audio = sample(model, layouts, contexts, video, audio, SIGMAS, small)
    if not two_stages:
        return Made(video, None, audio)
    upsampler = LatentUpsamplerConfigurator.from_config(UPSAMPLER).eval()
    upsampler.load_state_dict(load_part(folder / "upsampler.safetensors", ""))
    larger = upsample_video(video, frozen_video_vae(folder).encoder, upsampler)
    noised = [
        x + STAGE_2_SIGMAS[0] * (torch.randn(x.shape, generator=generator) - x)
        for x in (larger, audio)
    ]
    refined, audio = sample(model, layouts, contexts, *noised, STAGE_2_SIGMAS, large)
    return Made(video, refined, audio)


def scored(scene: Scene, clip: Clip) -> measures.Score:
    """A clip's score; without a sound, what is heard counts as wrong."""
    sound = torch.zeros(2, SAMPLE_RATE) if clip.sound is None else clip.sound
    return measures.score(scene, clip.frames, sound, SAMPLE_RATE)


def truth(folder: Path, scenes: list[Scene], two_stages: bool) -> Made:
    """What the encoders make of the scenes."""
    encoders = latents.Encoders(folder)
    small = torch.stack([encoders.picture(s, HEIGHT // 2, WIDTH // 2) for s in scenes])
    large = torch.stack([encoders.picture(s, HEIGHT, WIDTH) for s in scenes])
    sound = torch.stack([encoders.sound(scene) for scene in scenes])
    return Made(small, large if two_stages else None, sound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--one-stage", action="store_true")
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--sheet", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    scenes, prompts = draw(args.prompts)
    both = not args.one_stage
    with fast():
        made = truth(args.folder, scenes, both) if args.truth else make(args.folder, prompts, both)
    decoders, video = Decoders(args.folder), made.stage_2 if both else made.stage_1
    clips = [decoders.decode(*each) for each in zip(video, made.audio, strict=True)]
    scores = [scored(*each) for each in zip(scenes, clips, strict=True)]
    measures.print_scores(prompts, scores)
    if args.sheet:
        rows = [torch.cat(list(clip.frames[:: NUM_FRAMES // 6]), 1) for clip in clips[:16]]
        Image.fromarray((torch.cat(rows) * 255).byte().numpy()).save(args.sheet)


if __name__ == "__main__":
    main()
