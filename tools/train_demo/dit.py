"""Train the DiT by flow matching: python tools/train_demo/dit.py --folder FOLDER

Through ltx-core's model, with the released conventions: x = (1 - sigma) * latent + sigma * noise,
the model predicts noise - latent, a clean first frame has timestep 0. It is trained straight on
the sigmas of the distilled pipeline, the only ones at which it is ever asked. Both sizes of the
two-stage pipeline are learnt, and image to video. Goes on from what lies in the folder, with any
--minutes.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from config import FRAME_RATE, HEIGHT, NUM_FRAMES, WIDTH, demo_config
from latents import TEXT_SLOTS, load_latents
from ltx_core.components.patchifiers import AudioPatchifier, VideoLatentPatchifier
from ltx_core.model.transformer import LTXModel, LTXModelConfigurator
from ltx_core.model.transformer.attention import Attention
from ltx_core.model.transformer.modality import Modality
from ltx_core.tools import AudioLatentTools, VideoLatentTools
from ltx_core.types import AudioLatentShape, VideoLatentShape, VideoPixelShape
from muon import Muon
from safetensors.torch import load_file
from tiny.weights import DIFFUSION
from torch import Generator, Tensor
from training import THREADS, LossLog, fast, load_part, save_weights

SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)  # as released
STAGE_2_SIGMAS = (0.909375, 0.725, 0.421875, 0.0)
# How often each is drawn, at both sizes: most often where shape and place are decided.
SHARES = (0.08, 0.03, 0.03, 0.04, 0.16, 0.26, 0.22, 0.18)
STAGE_2_SHARES = (0.45, 0.3, 0.25)
CONTEXT = 1024  # tokens of a context, of which training sees TEXT_SLOTS and some others
AUDIO = 0.25  # weight of the sound's error; most of it is noise that no prompt explains
EMA = 0.998
DECAY = 0.4  # the share of the time, at the end, in which the learning rates fall to nothing


def new_model() -> LTXModel:
    """The DiT with weights to begin from: as torch makes them, gates and outputs small."""
    model = LTXModelConfigurator.from_config(demo_config())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "scale_shift_table" in name:
                weight.normal_(0, 0.02)
                if weight.shape[0] == 9:
                    weight[[2, 5, 8]] += 0.5  # the gates of attention, feed-forward and text
                if weight.shape[0] == 5:
                    weight[4] += 0.5
            elif "adaln_single.linear" in name:
                weight.mul_(0.1)
        for module in model.modules():
            if isinstance(module, Attention):
                module.attention_function = plain_attention
        model.proj_out.weight.mul_(0.1)
        model.audio_proj_out.weight.mul_(0.1)
    return model


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None
) -> Tensor:
    """Attention (B, T, heads * channels) as two products: the backward pass of torch's fused one
    takes ten times as long on a CPU."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    shares = torch.softmax(scores if mask is None else scores + mask, -1, dtype=torch.float32)
    return (shares.to(v.dtype) @ v).transpose(1, 2).flatten(2)


class Layouts:
    """Positions of the tokens, by the released tools, and RoPE tables made once for each."""

    def __init__(self, model: LTXModel):
        self.video = {}
        for height, width in ((HEIGHT // 2, WIDTH // 2), (HEIGHT, WIDTH)):
            pixels = VideoPixelShape(1, NUM_FRAMES, height, width, FRAME_RATE)
            shape = VideoLatentShape.from_pixel_shape(pixels)
            tools = VideoLatentTools(VideoLatentPatchifier(1), shape, FRAME_RATE)
            self.video[shape[3:]] = tools.create_initial_state("cpu", torch.float32).positions
        shape = AudioLatentShape.from_video_pixel_shape(pixels)
        tools = AudioLatentTools(AudioPatchifier(1), shape)
        self.audio = tools.create_initial_state("cpu", torch.float32).positions
        for preprocessor in (model.video_args_preprocessor, model.audio_args_preprocessor):
            _remember_tables(preprocessor.simple_preprocessor)
            _own_timesteps(preprocessor)


def _remember_tables(preprocessor) -> None:
    """Make the preprocessor compute RoPE tables for one sample of each layout and keep them."""
    compute, kept = preprocessor._prepare_positional_embeddings, {}

    def tables(positions: Tensor, inner_dim: int, max_pos: list[int], *rest, **named):
        key = (positions.shape[1:], inner_dim, len(max_pos))
        if key not in kept:
            kept[key] = compute(positions[:1], inner_dim, max_pos, *rest, **named)
        return tuple(table.expand(len(positions), -1, -1, -1) for table in kept[key])

    preprocessor._prepare_positional_embeddings = lambda positions, **named: tables(
        positions, named.pop("inner_dim"), named.pop("max_pos"), **named
    )


def _own_timesteps(preprocessor) -> None:
    """Have scale and shift of the audio-video cross attentions follow the stream's own timesteps,
    token by token, as they do from ltx-core 1.1.4 on: here they follow the other stream's sigma."""
    prepare = preprocessor.prepare

    def with_own(modality: Modality, cross_modality: Modality | None = None):
        args = prepare(modality, cross_modality)
        own, _ = preprocessor._prepare_cross_attention_timestep(
            modality.timesteps,
            preprocessor.simple_preprocessor.timestep_scale_multiplier,
            len(args.x),
            modality.latent.dtype,
        )
        return replace(args, cross_scale_shift_timestep=own)

    preprocessor.prepare = with_own


def velocities(
    model: LTXModel,
    layouts: Layouts,
    video: Tensor,
    audio: Tensor,
    contexts: tuple[Tensor, Tensor],
    sigma: Tensor,
    first_frame: bool = False,
) -> tuple[Tensor, Tensor]:
    """The model's velocities of noisy latents, in the latents' shapes (B, 128, F, h, w) and
    (B, 8, T, 16).

    contexts     (B, slots, D) each; slots that stand for several are weighed up
    sigma        (B,)
    first_frame  whether the first latent frame is clean
    """
    batch, channels, frames, *size = video.shape
    tokens = video.flatten(2).transpose(1, 2)
    audio_tokens = audio.permute(0, 2, 1, 3).flatten(2)
    timesteps = sigma[:, None]
    if first_frame:
        timesteps = timesteps.repeat(1, tokens.shape[1])
        timesteps[:, : size[0] * size[1]] = 0
    mask = None
    if (slots := contexts[0].shape[1]) < CONTEXT:
        mask = torch.zeros(1, 1, 1, slots)
        mask[..., TEXT_SLOTS:] = torch.log(
            torch.tensor((CONTEXT - TEXT_SLOTS) / (slots - TEXT_SLOTS))
        )
    positions = layouts.video[tuple(size)].expand(batch, -1, -1, -1)
    audio_positions = layouts.audio.expand(batch, -1, -1, -1)
    sight = Modality(tokens, sigma, timesteps, positions, contexts[0], context_mask=mask)
    sound = Modality(
        audio_tokens, sigma, sigma[:, None], audio_positions, contexts[1], context_mask=mask
    )
    seen, heard = model(sight, sound, None)
    return (
        seen.transpose(1, 2).reshape(video.shape),
        heard.unflatten(2, (8, 16)).permute(0, 2, 1, 3),
    )


def draw_sigmas(count: int, large: bool, generator: Generator) -> Tensor:
    """Sigmas (count,) of the schedule, or of its second stage."""
    sigmas, shares = (STAGE_2_SIGMAS, STAGE_2_SHARES) if large else (SIGMAS, SHARES)
    drawn = torch.multinomial(torch.tensor(shares), count, True, generator=generator)
    return torch.tensor(sigmas)[drawn]


@torch.no_grad()
def sample(
    model: LTXModel,
    layouts: Layouts,
    contexts: tuple[Tensor, Tensor],
    video: Tensor,
    audio: Tensor,
    sigmas: tuple[float, ...] = SIGMAS,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Denoise latents that are noise at the first of the sigmas, by Euler steps.

    first  (B, 128, 1, h, w): the clean first latent frame, for image to video
    """
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        if first is not None:
            video = torch.cat([first, video[:, :, 1:]], 2)
        level = torch.full((len(video),), sigma)
        seen, heard = velocities(model, layouts, video, audio, contexts, level, first is not None)
        video = video + (following - sigma) * seen.float()
        audio = audio + (following - sigma) * heard.float()
    if first is not None:
        video = torch.cat([first, video[:, :, 1:]], 2)
    return video, audio


class Training:
    """The model, its moving average, and the latents that it learns."""

    def __init__(self, folder: Path, seed: int = 0):
        torch.manual_seed(seed)
        self.folder = folder
        self.generator = torch.Generator().manual_seed(seed)
        self.model = new_model()
        self.average = {n: w.detach().clone() for n, w in self.model.state_dict().items()}
        if (path := folder / "dit.safetensors").exists():
            self.average = load_part(path, DIFFUSION)
        path = folder / "dit_training.safetensors"  # not kept where a part is handed on
        self.model.load_state_dict(load_file(path) if path.exists() else self.average)
        self.layouts = Layouts(self.model)
        self.latents = load_latents(folder)
        matrices, others = [], []
        for name, weight in self.model.named_parameters():
            inside = name.startswith("transformer_blocks") and weight.ndim == 2
            matrix = inside and "table" not in name and weight.shape[0] >= 16
            (matrices if matrix else others).append(weight)
        self.optimisers = (
            Muon(matrices),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def losses(self, large: bool, first_frame: bool, count: int) -> dict[str, Tensor]:
        """Mean squared errors of both streams' velocities, for drawn scenes, noise and sigmas."""
        kept, generator = self.latents, self.generator
        video = kept.large if large else kept.small
        index = torch.randint(len(video), (count,), generator=generator)
        video, audio = video[index].float(), kept.audio[index].float()
        contexts = kept.video_context[index].float(), kept.audio_context[index].float()
        said = int(torch.randint(contexts[0].shape[1], (), generator=generator))
        contexts = contexts[0][:, said], contexts[1][:, said]
        sigma = draw_sigmas(count, large, generator)
        noise = torch.randn(video.shape, generator=generator)
        audio_noise = torch.randn(audio.shape, generator=generator)
        wide = sigma[:, None, None, None]
        noisy = video + wide[..., None] * (noise - video)
        if first_frame:
            noisy[:, :, 0] = video[:, :, 0]
        noisy_audio = audio + wide * (audio_noise - audio)
        with fast():
            seen, heard = velocities(
                self.model, self.layouts, noisy, noisy_audio, contexts, sigma, first_frame
            )
        error = (seen.float() - (noise - video)).square()
        if first_frame:
            error = error[:, :, 1:]
        heard_error = (heard.float() - (audio_noise - audio)).square().mean()
        return {"video": error.mean(), "audio": heard_error}

    def step(self, step: int, rates: tuple[float, ...], batch: int) -> dict[str, float]:
        """One step of the optimisers: every second at full size, every fourth with an image, of
        both sizes in turn."""
        large = step % 2 == 1
        found = self.losses(large, step % 8 in (2, 3), batch // 3 if large else batch)
        self.model.zero_grad(set_to_none=True)
        (found["video"] + AUDIO * found["audio"]).backward()
        torch.nn.utils.clip_grad_norm_(self.optimisers[-1].param_groups[0]["params"], 1.0)
        for optimiser, size in zip(self.optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = size
            optimiser.step()
        keep = min(EMA, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, weight in self.model.state_dict().items():
                self.average[name].lerp_(weight, 1 - keep)
        kind = "_large" if large else ""
        return {name + kind: float(loss.detach()) for name, loss in found.items()}

    def save(self) -> None:
        save_weights(self.folder / "dit_training.safetensors", self.model.state_dict())
        shipped = {DIFFUSION + name: weight for name, weight in self.average.items()}
        save_weights(self.folder / "dit.safetensors", shipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=120, help="how long to train")
    parser.add_argument("--batch", type=int, default=32, help="samples at the small size")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--rates", type=float, nargs=2, default=(2e-2, 2e-3))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    training, log = Training(args.folder), LossLog(args.folder, "dit", every=60)
    began = saved = time.monotonic()
    step = 0
    while (done := (time.monotonic() - began) / 60 / args.minutes) < 1:
        course = min(1.0, (step + 1) / 50, (1 - done) / DECAY)
        log.add(step, **training.step(step, tuple(course * r for r in args.rates), args.batch))
        if time.monotonic() - saved > 120:
            training.save()
            saved = time.monotonic()
            training.latents = load_latents(args.folder)  # there may be more by now
        step += 1
    training.save()


if __name__ == "__main__":
    main()
