"""Engines in this process, most of one rank, whose prompts need no text encoder: their contexts are drawn."""

import zlib
from collections.abc import Callable

import torch
from helpers import randn
from jobs import replace
from torch import Tensor

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.text.encoders import Contexts


def opened_workspace(tiny, artifacts, blocks_per_graph=None, dtype="float32", tp=1, settings=()) -> Workspace:
    cut = () if blocks_per_graph is None else (f"blocks_per_graph={blocks_per_graph}",)
    return Workspace(tiny.checkpoint, resolve("cpu", (*settings, *cut)), artifacts, tp, dtype, tiny.gemma_root)


def opened_engine(workspace: Workspace, tiny, **options) -> Engine:
    engine = Engine(workspace, Recorder(), RunOptions(spatial_upsampler_path=tiny.spatial_upsampler, **options))
    engine.progress = False
    return engine


def sharing(engine: Engine, **options) -> Engine:
    """An engine of other options on the ranks and the host's models of one."""
    other = Engine(engine.workspace, Recorder(), replace(engine.options, **options))
    other.host, other.preflight, other.residency = engine.host, engine.preflight, engine.residency
    other.progress = False
    return other


def drawn(workspace: Workspace, seed: int) -> list[Tensor]:
    """Contexts of video and audio (1, 1024, D); a model reads them as it would an encoder's."""
    return _drawn(workspace.transformer, seed)


def drawn_contexts(config: TransformerConfig, prompt: str) -> list[Tensor]:
    return _drawn(config, zlib.crc32(prompt.encode()))


def _drawn(config: TransformerConfig, seed: int) -> list[Tensor]:
    return [randn(1, TEXT_TOKENS, each.inner, seed=seed + n) for n, each in enumerate((config.video, config.audio))]


def give_contexts(engine: Engine, job: Job, draw: Callable[[str], list[Tensor]]) -> None:
    """Have the engine take a job's prompts as encoded."""
    prompts = replace(job, compat=engine.options.compat).texts
    engine._contexts[engine.workspace.text_loras(job), prompts] = [
        Contexts(*draw(prompt), torch.ones(1, TEXT_TOKENS), None) for prompt in prompts
    ]
