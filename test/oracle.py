"""The oracle: ltx-core 1.0.0 and ltx-pipelines 1.0.0 on any tiny assets, as published or with later
releases' numerics.

The package index has 1.0.0 only. What later releases compute differently is patched in, for the
time of a run:

  1.1.0  vocoder and audio decoder in fp32
  1.1.2  a keyframe spans one frame in time, not eight
  1.1.3  positions of video tokens stay fp32
  1.1.4  scale and shift of the audio-video cross attentions follow the modality's own timesteps,
         token by token
  1.1.6  images leave the initial latent alone: the noiser mixes the held tokens in by the denoise
         mask

Weights are loaded by ltx-core's own loaders, Gemma3 by transformers; nothing here comes from
ltx_neuron but the stub that makes ltx_core.model.audio_vae importable without torchaudio.
"""

import dataclasses
import json
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from ltx_neuron.host.models import import_ltx_core

import_ltx_core()
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to generate. Each image is (path, frame index, strength)."""

    prompt: str
    height: int
    width: int
    num_frames: int
    frame_rate: float = 24.0
    seed: int = 10
    two_stage: bool = True
    images: tuple[tuple[str | Path, int, float], ...] = ()


@torch.no_grad()
def generate(assets, job: Job, dtype: torch.dtype = torch.float32, as_published: bool = False) -> dict[str, Tensor]:
    """The tensors of generate_ltx23.py --save-tensors, for assets as tiny.TinyAssets."""
    with nullcontext() if as_published else later_semantics(), one_thread():
        tensors = encode(assets, job.prompt, dtype)
        tensors |= Denoising(assets, job, tensors["video_context"], tensors["audio_context"], dtype).run()
        last = "s2" if job.two_stage else "s1"
        tensors["frames"] = decode_video(assets, tensors[f"{last}_video"])
        tensors["waveform"] = decode_audio(assets, tensors[f"{last}_audio"], dtype if as_published else torch.float32)
    return tensors


def encode(assets, prompt: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every hidden state of Gemma3 over the padded prompt, its mask, and both contexts."""
    from ltx_core.text_encoders.gemma import GemmaTextEncoder
    from ltx_core.text_encoders.gemma.encoders import encoder_configurator
    from ltx_core.text_encoders.gemma.tokenizer import LTXVGemmaTokenizer
    from transformers import Gemma3ForConditionalGeneration

    root = str(assets.gemma_root)
    gemma = Gemma3ForConditionalGeneration.from_pretrained(root, dtype=dtype, local_files_only=True).eval()
    encoder = GemmaTextEncoder(gemma, LTXVGemmaTokenizer(root, 1024), dtype=dtype)
    states, mask = encoder.encode(prompt)
    # The projections' width follows from a configuration of Gemma3-12B written out in ltx-core.
    config = json.loads((assets.gemma_root / "config.json").read_text())
    sizes = SimpleNamespace(text_config=SimpleNamespace(**config["text_config"]))
    with mock.patch.object(encoder_configurator, "GEMMA3_CONFIG_FOR_LTX", sizes):
        processor = ledger(assets, dtype).gemma_embeddings_processor()
    contexts = processor.process_hidden_states(states, mask)
    return {
        "hidden_states": torch.stack(states, dim=-1),
        "attention_mask": mask,
        "video_context": contexts.video_encoding,
        "audio_context": contexts.audio_encoding,
    }


class Denoising:
    """The stages of ltx_pipelines.distilled, in its order and with its one generator, keeping every
    latent."""

    def __init__(self, assets, job: Job, video_context: Tensor, audio_context: Tensor, dtype: torch.dtype):
        from ltx_core.components.noisers import GaussianNoiser
        from ltx_pipelines.utils.helpers import simple_denoising_func

        self.job, self.dtype, self.models = job, dtype, ledger(assets, dtype)
        self.encoder = self.models.video_encoder()
        self.predict = simple_denoising_func(video_context, audio_context, self.models.transformer())
        self.noiser = GaussianNoiser(torch.Generator().manual_seed(job.seed))

    def run(self) -> dict[str, Tensor]:
        from ltx_core.model.upsampler import upsample_video
        from ltx_pipelines.utils.constants import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES

        job, first = self.job, torch.tensor(DISTILLED_SIGMA_VALUES)
        if not job.two_stage:
            video, audio = self._stage(job.height, job.width, first)
            return {"s1_video": video, "s1_audio": audio}
        video, audio = self._stage(job.height // 2, job.width // 2, first)
        upsampled = upsample_video(video, self.encoder, self.models.spatial_upsampler())
        second = torch.tensor(STAGE_2_DISTILLED_SIGMA_VALUES)
        last = self._stage(job.height, job.width, second, upsampled, audio)
        return {"s1_video": video, "s1_audio": audio, "upsampled": upsampled, "s2_video": last[0], "s2_audio": last[1]}

    def _stage(self, height: int, width: int, sigmas: Tensor, video=None, audio=None) -> tuple[Tensor, Tensor]:
        """From noise, or from latents noised to the first sigma, to the latents at the end of the
        schedule."""
        from ltx_core.types import VideoPixelShape
        from ltx_pipelines.utils.args import ImageConditioningInput
        from ltx_pipelines.utils.helpers import combined_image_conditionings, denoise_audio_video
        from ltx_pipelines.utils.types import PipelineComponents

        images = [ImageConditioningInput(str(path), *placement) for path, *placement in self.job.images]
        states = denoise_audio_video(
            output_shape=VideoPixelShape(1, self.job.num_frames, height, width, self.job.frame_rate),
            conditionings=combined_image_conditionings(images, height, width, self.encoder, self.dtype, CPU),
            noiser=self.noiser,
            sigmas=sigmas,
            stepper=None,  # the loop has its own
            denoising_loop_fn=self._loop,
            components=PipelineComponents(self.dtype, CPU),
            dtype=self.dtype,
            device=CPU,
            noise_scale=1.0 if video is None else sigmas[0],
            initial_video_latent=video,
            initial_audio_latent=audio,
        )
        video, audio = (state.latent for state in states)
        return video, audio

    def _loop(self, sigmas: Tensor, video, audio, _):
        from ltx_core.components.diffusion_steps import EulerDiffusionStep
        from ltx_pipelines.utils import euler_denoising_loop

        return euler_denoising_loop(sigmas, video, audio, EulerDiffusionStep(), self.predict)


@torch.no_grad()
def decode_video(assets, latent: Tensor) -> Tensor:
    """Frames, uint8 (N, H, W, 3), decoded in the latent's dtype and the default tiles."""
    from ltx_core.model.video_vae import TilingConfig
    from ltx_core.model.video_vae import decode_video as decode

    return torch.cat(list(decode(latent, ledger(assets, latent.dtype).video_decoder(), TilingConfig.default())))


@torch.no_grad()
def decode_audio(assets, latent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Waveform, float32 (2, samples), decoded in float32 as later releases do, or in another
    dtype."""
    from ltx_core.model.audio_vae import decode_audio as decode

    models = ledger(assets, dtype)
    return decode(latent.to(dtype), models.audio_decoder(), models.vocoder()).waveform


def ledger(assets, dtype: torch.dtype):
    """The pipelines' model factory; without Gemma, whose loading in 1.0.0 is for transformers 4."""
    from ltx_pipelines.utils import ModelLedger

    paths = dict(checkpoint_path=str(assets.checkpoint), spatial_upsampler_path=str(assets.spatial_upsampler))
    return ModelLedger(dtype=dtype, device=CPU, **paths)


@contextmanager
def threads(count: int):
    """Run with so many threads for an operation: a result's last bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread():
    """Operations this small take no time on one core, and very long on two that others use as
    well."""
    return threads(1)


@contextmanager
def later_semantics():
    """Patch ltx-core 1.0.0 as listed at the top of this file, and leave it as it was."""
    from ltx_core.components.noisers import GaussianNoiser
    from ltx_core.conditioning import VideoConditionByKeyframeIndex, VideoConditionByLatentIndex
    from ltx_core.model.transformer.transformer_args import MultiModalTransformerArgsPreprocessor
    from ltx_core.tools import VideoLatentTools

    patches = (
        (VideoLatentTools, "create_initial_state", _fp32_positions),
        (MultiModalTransformerArgsPreprocessor, "prepare", _own_timesteps),
        (GaussianNoiser, "__call__", _masked_noise),
        (VideoConditionByLatentIndex, "apply_to", _untouched_latent),
        (VideoConditionByKeyframeIndex, "apply_to", _one_frame_keyframe),
    )
    with ExitStack() as stack:
        for owner, name, patched in patches:
            stack.enter_context(mock.patch.object(owner, name, patched(getattr(owner, name))))
        yield


def _fp32_positions(original):
    def create_initial_state(self, device, dtype, initial_latent=None):
        state = original(self, device, torch.float32, initial_latent)
        latents = {name: getattr(state, name).to(dtype) for name in ("latent", "clean_latent")}
        return dataclasses.replace(state, **latents)

    return create_initial_state


def _own_timesteps(original):
    def prepare(self, modality, cross_modality=None):
        args = original(self, modality, cross_modality)
        if cross_modality is None:
            return args
        multiplier, batch = self.simple_preprocessor.timestep_scale_multiplier, args.x.shape[0]
        own, _ = self._prepare_cross_attention_timestep(modality.timesteps, multiplier, batch, modality.latent.dtype)
        return dataclasses.replace(args, cross_scale_shift_timestep=own)

    return prepare


def _masked_noise(_):
    def call(self, latent_state, noise_scale=1.0):
        latent = latent_state.latent
        noise = torch.randn(latent.shape, dtype=latent.dtype, generator=self.generator)
        noised = torch.lerp(latent.float(), noise.float(), noise_scale)
        mixed = torch.lerp(latent_state.clean_latent.float(), noised, latent_state.denoise_mask.float())
        return dataclasses.replace(latent_state, latent=mixed.to(latent.dtype))

    return call


def _untouched_latent(original):
    def apply_to(self, latent_state, latent_tools):
        return dataclasses.replace(original(self, latent_state, latent_tools), latent=latent_state.latent)

    return apply_to


def _one_frame_keyframe(original):
    def apply_to(self, latent_state, latent_tools):
        appended, tokens = original(self, latent_state, latent_tools), latent_state.latent.shape[1]
        latent, positions = appended.latent.clone(), appended.positions.clone()
        latent[:, tokens:] = 0
        positions[:, 0, tokens:, 1] = (self.frame_idx + 1) / latent_tools.fps
        return dataclasses.replace(appended, latent=latent, positions=positions)

    return apply_to
