"""A tiny video that is made longer by three windows, for the tests of that."""

from functools import cache
from pathlib import Path

import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import randn, tone
from jobs import make_job

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.engine.run import Engine
from ltx_neuron.host.media import first_frames
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import Retake

FRAMES, WINDOW, RATE = 30, 25, 24.0


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    path, still = tmp_path_factory.mktemp("film") / "film.mp4", randn(1, 64, 64, 3) * 30 + 128
    pictures = [still.roll(2 * n, 2).clamp(0, 255).byte() for n in range(FRAMES)]
    write_video(path, pictures, RATE, lambda: tone(48000, FRAMES / RATE) * 0.5, 48000)
    return path


def source(film) -> torch.Tensor:
    return torch.stack([torch.from_numpy(frame) for frame in first_frames(film, "")])


def longer(film, seconds: float) -> Job:
    retake = Retake(film, extend=seconds, source_frames=FRAMES)
    return make_job("waves", Size(64, 64, WINDOW, RATE), 7, retake=retake)


@pytest.fixture(scope="module")
def prepared(tiny, film, artifacts):
    @cache
    def prepared(tp: int = 1) -> Workspace:
        workspace = opened_workspace(tiny, artifacts, 1, tp=tp)
        build.make(workspace, workspace.weight_sets("dit", {()}))
        build.make(workspace, workspace.dit_graphs(longer(film, 1.0).buckets_to_compile))
        return workspace

    return prepared


@pytest.fixture(scope="module")
def engine(prepared, tiny):
    with opened_engine(prepared(), tiny) as engine:
        yield engine


def made(engine: Engine, job: Job, **options):
    engine.on_stage_end = options.pop("on_stage_end", None)
    give_contexts(engine, job, lambda prompt: drawn(engine.workspace, seed=len(prompt)))
    (result,) = engine.run([job], keep=True, **options)
    return result


@pytest.fixture(scope="module")
def after(engine, film):
    return made(engine, longer(film, 1.0))
