"""What jobs need on disk: the one list from which weights and graphs are made, found and shown."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path

import torch

from ltx_neuron.artifacts import folder
from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.artifacts.transfer import pull
from ltx_neuron.config.sound import SPAN_LATENTS
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.latents import TIME_SCALE
from ltx_neuron.sampling.upscaling import upscaled
from ltx_neuron.workspace import Need, Workspace


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run.

    neuron_gemma   encode prompts on the ranks, otherwise on the host's CPU
    neuron_vae     decode latents on the ranks, otherwise on the host's CPU; sound on the ranks only
                   with the profile's sound_on_ranks
    compat         a key of sampling.compat.COMPAT, the release whose numerics to follow; None: the
                   later releases
    warmup         a discarded first step per stage
    *_path         of models besides the checkpoint, or None
    cache_prompts  read contexts from the artifacts, and store new ones there
    """

    neuron_gemma: bool = False
    compat: str | None = None
    spatial_upsampler_path: str | Path | None = None
    temporal_upsampler_path: str | Path | None = None
    warmup: bool = False
    cache_prompts: bool = False
    neuron_vae: bool = False
    duration_head_path: str | Path | None = None


def needs(workspace: Workspace, jobs: list[Job], options: RunOptions) -> Iterator[Need]:
    """The weights and graphs of jobs, in the order of their making. A run also takes a stage's
    graph of the DiT for more timesteps (Workspace.dit_program_for)."""
    for loras in dict.fromkeys(stage.loras for job in jobs for stage in job.stages):
        yield workspace.weight_set("dit", loras)
    for buckets, job in {tuple(job.buckets_to_compile): job for job in jobs}.items():
        yield from workspace.dit_graphs(buckets, job)
    if options.neuron_gemma:
        for loras in dict.fromkeys(map(workspace.text_loras, jobs)):
            yield workspace.weight_set("gemma3", loras)
        yield from workspace.text_graphs()
    if options.neuron_vae:
        yield from map(workspace.weight_set, workspace.profile.vae_models)
        seen = (job for job in jobs if not job.sound_only)
        for clip in dict.fromkeys(upscaled(job.latent_shape, job.upscale) for job in seen):
            yield from workspace.decoder_graphs(clip)
        for job in {tuple(workspace.encoder_tiles(job)): job for job in jobs}.values():
            yield from workspace.encoder_graphs(job)
    if sound_on_ranks(workspace, options):
        decoded = [job for job in jobs if not job.sound]  # an input sound is not decoded
        sizes = {job.audio_latents: size for job in decoded if (size := sound_size(job))}
        for latents, size in sizes.items():
            yield from workspace.sound_graphs(latents, size)


def sound_on_ranks(workspace: Workspace, options: RunOptions) -> bool:
    """Whether the ranks decode sound; they do so only in fp32."""
    asked = options.neuron_vae and workspace.profile.sound_on_ranks
    return asked and audio_dtype(workspace, options) == torch.float32


def audio_dtype(workspace: Workspace, options: RunOptions) -> torch.dtype:
    """The dtype in which sound is decoded: a release used that of the transformer."""
    return workspace.dtype if COMPAT[options.compat].vocoder else torch.float32


def sound_size(job: Job) -> Size | None:
    """The size for which the decoders of a job's sound are compiled. None if the host decodes it:
    for an extended video shorter than a span, whose number of latents may be no size's."""
    if not job.extension:
        return job.of(job.stages[0]).size
    if job.audio_latents < SPAN_LATENTS:
        return None
    frames = job.extension.source_frames + job.extension.made_frames
    return replace(job.size, num_frames=TIME_SCALE * ceil(frames / TIME_SCALE) + 1)


def fetch(url: str, workspace: Workspace, options: RunOptions, sets: Iterable[tuple]) -> None:
    """Download the weights and graphs of a workspace that it lacks. If several processes on one
    machine do so at once, one pulls a folder and the others wait.

    sets  weight sets, at least one
    Raises UserError if the store does not answer or is damaged.
    """
    models = ["gemma3"] if options.neuron_gemma else []
    models += workspace.profile.vae_models if options.neuron_vae else ()
    needs = [workspace.weight_set(model, loras) for loras in sets for model in ("dit", *models)]
    wanted = [folder(Path(), need.identity).as_posix() for need in needs]
    tp, dtype = workspace.tp, workspace.dtype_name
    wanted += ["tuned/*", f"graphs/*-tp{tp}-{dtype}-*", f"graphs/sound-*-tp{tp}-float32-*"]
    store = Store(url)
    stored = names_in(store.files())
    names = [name for name in stored if any(fnmatchcase(name, pattern) for pattern in wanted)]
    if names:
        pull(store, workspace.artifacts, names)
