"""Engines in this process, most of one rank, whose prompts need no text encoder: their contexts are drawn. And jobs of
several weight sets on one engine."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers import made_film, randn
from jobs import make_job, replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job, Size
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.conditions import AttentionMask, ReferenceVideo
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import Lora

ONE, TWO = Size(64, 64, 9), Size(64, 64, 9, two_stage=True)


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


def jobs_of_three_sets(tiny, folder: Path) -> list[Job]:
    """In an order that swaps five times if it is kept."""
    # A reference, without which an IC-LoRA is none, and its attention mask.
    film, mask = (made_film(folder / f"{n}.mp4", 9, 64, 64, seed=n) for n in (1, 2))
    masked = {"references": (ReferenceVideo(film, 0.7, 9),), "attention_mask": AttentionMask(mask, 0.6)}
    other = folder / "other.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(tiny.lora).items()}, other)
    style, ic = (Lora(tiny.lora, 0.8),), (Lora(other, 0.6),)
    return [
        make_job("style", ONE, 1, loras=style),
        make_job("guided by a reference", TWO, 2, stage_1_loras=ic, **masked),
        make_job("plain", ONE, 3),
        make_job("style again", TWO, 4, loras=style),
        make_job("guided again", TWO, 5, stage_1_loras=ic, **masked),
    ]


@contextmanager
def opened(jobs: list[Job], tiny, artifacts: Path) -> Iterator[Callable[[], Engine]]:
    """opened(): the engine, as if it were a new one; it is given the contexts of the jobs."""
    workspace = opened_workspace(tiny, artifacts, 1)
    build.make(workspace, workspace.weight_sets("dit", {stage.loras for job in jobs for stage in job.stages}))
    build.make(workspace, workspace.dit_graphs(list({bucket for job in jobs for bucket in job.buckets})))
    engine = opened_engine(workspace, tiny)
    for job in jobs:
        give_contexts(engine, job, lambda prompt: drawn_contexts(workspace.transformer, prompt))

    def anew() -> Engine:
        engine.close()
        engine.recorder = engine.residency.recorder = Recorder()
        engine.on_stage_end = None
        return engine

    yield anew
    engine.close()


def swaps(engine: Engine) -> int:
    return engine.recorder.counters.weight_swaps


def latents(engine: Engine, jobs: list[Job], **options) -> dict[int, dict[str, torch.Tensor]]:
    results = engine.run(jobs, keep=True, decode=False, **options)
    return {result.job.seed: {k: v for k, v in result.tensors.items() if k[:3] in ("s1_", "s2_")} for result in results}


def each_alone(engine: Engine, jobs: list[Job]) -> dict:
    return {seed: tensors for job in jobs for seed, tensors in latents(engine, [job]).items()}


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for seed, tensors in wanted.items():
        assert got[seed].keys() == tensors.keys()
        assert all(torch.equal(got[seed][name], tensors[name]) for name in tensors), seed
