"""Patches of ltx-core and ltx-pipelines 1.0.0, which the package index has, up to the numerics of the
release that ltx-neuron follows (FOLLOWED of sampling/compat.py):

  1.1.2  a keyframe spans one frame in time, not eight
  1.1.3  positions of video tokens stay fp32
  1.1.4  scale and shift of the audio-video cross attentions follow a token's own timestep
  1.1.6  images leave the initial latent alone: the noiser mixes the held tokens in by the denoise mask

In later releases as well

  a skipped stream stays out of the negative pass
  a frozen stream has sigma 0, for its own text and for the stream that attends to it
  a reference has a time scale: it is read and placed in time by that

The vocoder and audio decoder run in fp32 since 1.1.0: here all runs do that are decoded.
"""

import dataclasses
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ltx_neuron.host.models import import_ltx_core

import_ltx_core()  # makes ltx_core.model.audio_vae importable without torchaudio


@contextmanager
def later_semantics():
    """Patch ltx-core 1.0.0, and leave it as it was."""
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


@contextmanager
def numerics(release: str):
    """ltx-core and ltx-pipelines as published for "1.0.0", else as of later releases."""
    if release == "1.0.0":
        yield
        return
    from ltx_core.conditioning import VideoConditionByReferenceLatent as Reference
    from ltx_pipelines.utils import helpers

    patches = (
        (helpers, "modality_from_latent_state", _as_enabled),
        (helpers, "modality_from_latent_state", _frozen_at_zero),
        (Reference, "apply_to", _slowed),
    )
    with ExitStack() as stack:
        stack.enter_context(later_semantics())
        for owner, name, patched in patches:
            stack.enter_context(mock.patch.object(owner, name, patched(getattr(owner, name))))
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


def _frozen_at_zero(original):
    def modality_from_latent_state(state, context, sigma, *enabled, **more):
        sigma = sigma if state.denoise_mask.any() else torch.zeros_like(sigma)
        return original(state, context, sigma, *enabled, **more)

    return modality_from_latent_state


def _slowed(original):
    def apply_to(self, latent_state, latent_tools):
        appended, before = original(self, latent_state, latent_tools), latent_state.latent.shape[1]
        scale, positions = getattr(self, "time_scale", 1), appended.positions.clone()
        shift = (scale - 1) / latent_tools.fps
        positions[:, 0, before:] = (positions[:, 0, before:] * scale - shift).clamp(min=0)
        return dataclasses.replace(appended, positions=positions)

    return apply_to
