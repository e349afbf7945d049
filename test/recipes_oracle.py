"""The oracle's other recipes: guidance, LoRA, the dev checkpoint in two stages, upsampling in time;
both releases' numerics.

Built on oracle.py from the functions of ltx-pipelines 1.0.0, on any tiny assets, in fp32. Besides
what oracle.py patches, later releases keep a skipped stream out of the negative pass as well.
"""

import dataclasses
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import oracle
import torch
from torch import Tensor

CPU = torch.device("cpu")
OFF = {
    "cfg_scale": 1.0,
    "stg_scale": 0.0,
    "stg_blocks": (),
    "modality_scale": 1.0,
    "rescale_scale": 0.0,
    "skip_step": 0,
}
STREAMS = ("video", "audio")


@dataclasses.dataclass(frozen=True)
class Job(oracle.Job):
    """What to generate. video and audio are guidance as (name, value) pairs over OFF; None is the
    distilled recipe.

    LoRAs are (path, strength); `refining_loras` are those of stage 2 only. `release` is "later" or
    "1.0.0". `sampler` "res_2s" is HQ, of which later releases decode s1_audio.
    """

    two_stage: bool = False
    negative_prompt: str = "worst quality"
    steps: int = 4
    video: tuple | None = None
    audio: tuple | None = None
    loras: tuple = ()
    refining_loras: tuple = ()
    release: str = "later"
    sampler: str = "euler"

    @property
    def guidance(self) -> tuple[dict, dict]:
        return OFF | dict(self.video), OFF | dict(self.audio)


@torch.no_grad()
def generate(assets, job: Job) -> dict[str, Tensor]:
    """Latents of every stage, and "step0.<pass>.<stream>" of a guided first step, "guided" being
    what guidance makes of it."""
    with semantics(job.release), oracle.one_thread():
        run = Recipe(assets, job)
        return run.run() if job.video is None else run.run_guided()


def upsampled_in_time(assets, latent: Tensor) -> Tensor:
    """A latent after the temporal upsampler."""
    from ltx_core.loader.single_gpu_model_builder import SingleGPUModelBuilder
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator, upsample_video

    builder = SingleGPUModelBuilder(LatentUpsamplerConfigurator, str(assets.temporal_upsampler))
    with torch.no_grad(), oracle.one_thread():
        upsampler = builder.build(device=CPU, dtype=torch.float32)
        return upsample_video(latent, oracle.ledger(assets, torch.float32).video_encoder(), upsampler)


def fused_state(assets, loras: tuple) -> dict[str, Tensor]:
    """The DiT's tensors as ltx-core's loader fuses them, in the checkpoint's own dtypes, under the
    DiT's names."""
    return {name.removeprefix("velocity_model."): tensor for name, tensor in _fused(assets, loras).state_dict().items()}


def contexts(assets, prompt: str) -> tuple[Tensor, Tensor]:
    encoded = _encoded(assets, prompt)
    return encoded["video_context"], encoded["audio_context"]


@cache
def _encoded(assets, prompt: str) -> dict[str, Tensor]:
    with torch.no_grad(), oracle.one_thread():
        return oracle.encode(assets, prompt, torch.float32)


def _fused(assets, loras: tuple):
    from ltx_core.loader import LTXV_LORA_COMFY_RENAMING_MAP, LoraPathStrengthAndSDOps
    from ltx_core.model.transformer import X0Model

    builder = oracle.ledger(assets, torch.float32).transformer_builder
    named = tuple(
        LoraPathStrengthAndSDOps(str(path), strength, LTXV_LORA_COMFY_RENAMING_MAP) for path, strength in loras
    )
    return X0Model(dataclasses.replace(builder, loras=named).build(device=CPU, dtype=None))


class Recipe(oracle.Denoising):
    """The stages of ti2vid_one_stage, ti2vid_two_stages and distilled; stage 2 is denoised by other
    weights."""

    def __init__(self, assets, job: Job):
        from ltx_core.components.noisers import GaussianNoiser

        self.assets, self.job, self.dtype = assets, job, torch.float32
        self.models, self.step0 = oracle.ledger(assets, torch.float32), {}
        self.encoder = self.models.video_encoder()
        self.noiser = GaussianNoiser(torch.Generator().manual_seed(job.seed))
        self.predict = self._simple(job.loras)

    def _transformer(self, loras: tuple):
        return _fused(self.assets, loras).float().eval()

    def _simple(self, loras: tuple):
        from ltx_pipelines.utils.helpers import simple_denoising_func

        return simple_denoising_func(*self.contexts(self.job.prompt), self._transformer(loras))

    def contexts(self, prompt: str) -> tuple[Tensor, Tensor]:
        return contexts(self.assets, prompt)

    def negative_contexts(self) -> tuple[Tensor, Tensor | None]:
        return self.contexts(self.job.negative_prompt)

    def _loop(self, sigmas: Tensor, video, audio, _):
        from ltx_core.components.diffusion_steps import Res2sDiffusionStep
        from ltx_pipelines.utils.samplers import res2s_audio_video_denoising_loop as res_2s

        if self.job.sampler == "euler":
            return super()._loop(sigmas, video, audio, _)
        stepper, dtype = Res2sDiffusionStep(), torch.float32
        return res_2s(sigmas, video, audio, stepper, self.predict, model_dtype=dtype)

    def run_guided(self) -> dict[str, Tensor]:
        from ltx_core.components.schedulers import LTX2Scheduler
        from ltx_core.model.upsampler import upsample_video
        from ltx_pipelines.utils.constants import STAGE_2_DISTILLED_SIGMA_VALUES

        job, factor = self.job, 2 if self.job.two_stage else 1
        first = (1, 128, (job.num_frames + 7) // 8, job.height // factor // 32)
        latent = torch.empty(*first, job.width // factor // 32)
        counted = latent if job.sampler == "res_2s" else None  # HQ alone counts the tokens
        sigmas = LTX2Scheduler().execute(steps=job.steps, latent=counted)
        self.predict = self._guided(self.job.loras)
        video, audio = self._stage(job.height // factor, job.width // factor, sigmas)
        tensors = {"s1_video": video, "s1_audio": audio, **self.step0}
        if job.two_stage:
            tensors["upsampled"] = upsample_video(video, self.encoder, self.models.spatial_upsampler())
            self.predict = self._simple(job.loras + job.refining_loras)
            second = torch.tensor(STAGE_2_DISTILLED_SIGMA_VALUES)
            last = self._stage(job.height, job.width, second, tensors["upsampled"], audio)
            tensors["s2_video"], tensors["s2_audio"] = last
        return tensors

    def _guided(self, loras: tuple):
        from ltx_core.components.guiders import MultiModalGuiderParams, create_multimodal_guider_factory
        from ltx_pipelines.utils.helpers import multi_modal_guider_factory_denoising_func

        job, model, calls = self.job, self._transformer(loras), []

        def recorded(**inputs):
            calls.append(model(**inputs))
            return calls[-1]

        negative = self.negative_contexts()
        factories = [
            create_multimodal_guider_factory(MultiModalGuiderParams(**parameters), negative_context=context)
            for parameters, context in zip(job.guidance, negative, strict=True)
        ]
        denoise = multi_modal_guider_factory_denoising_func(*factories, *self.contexts(job.prompt), recorded)
        names = [*passes(*job.guidance), "guided"]

        def first_step_kept(video_state, audio_state, sigmas, step_index):
            guided = denoise(video_state, audio_state, sigmas, step_index)
            if not self.step0:
                for name, predictions in zip(names, [*calls, guided], strict=True):
                    self.step0 |= {f"step0.{name}.{s}": p for s, p in zip(STREAMS, predictions, strict=True)}
            return guided

        return first_step_kept


def passes(video: dict, audio: dict) -> list[str]:
    """The passes that ltx-pipelines runs for two streams' guidance, in its order."""
    needs = {"uncond": ("cfg_scale", 1.0), "perturbed": ("stg_scale", 0.0), "isolated": ("modality_scale", 1.0)}
    return ["cond", *(name for name, (scale, off) in needs.items() if any(s[scale] != off for s in (video, audio)))]


@contextmanager
def semantics(release: str):
    """ltx-core and ltx-pipelines 1.0.0 as they are, or with the numerics of later releases."""
    if release == "1.0.0":
        yield
        return
    from ltx_pipelines.utils import helpers

    with ExitStack() as stack:
        stack.enter_context(oracle.later_semantics())
        stack.enter_context(
            mock.patch.object(helpers, "modality_from_latent_state", _as_enabled(helpers.modality_from_latent_state))
        )
        yield


def _as_enabled(original):
    """The negative pass says nothing of `enabled`: give it what the step's conditional pass said of
    the same state."""
    latest: list[tuple] = []

    def modality_from_latent_state(state, context, sigma, enabled=None):
        if enabled is not None:
            latest[:] = [*latest[-1:], (state, enabled)]
        else:
            enabled = next((value for known, value in latest if known is state), True)
        return original(state, context, sigma, enabled)

    return modality_from_latent_state
