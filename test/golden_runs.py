"""Runs of the recorded jobs (golden_jobs.py), by engines in this process and by the scripts. And a clip of windows with
ltx-core's own loop over them, of which there is no record."""

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from engines import drawn_contexts, give_contexts, opened_engine, opened_workspace, sharing
from golden.patches import numerics
from golden.upstream import Pipeline
from golden_jobs import JOBS, assets_of
from helpers import STREAMS, read_video
from jobs import make_job, replace
from records import Record

from ltx_neuron.artifacts import build
from ltx_neuron.engine.decode import Result
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job, Size

WINDOW, CARRY, BLEND, RATE = 25, 17, 5, 24.0


class Runs:
    """Engines by their model, ranks and settings, and what they make of recorded jobs."""

    def __init__(self, shared: Path, artifacts: Path):
        self.shared, self.artifacts = shared, artifacts
        self.engines: dict[tuple, Engine] = {}
        self.job = cache(lambda name: JOBS[name].open(shared)[1])
        self.generate = cache(self._generate)

    def engine(self, model="tiny", tp: int = 1, blocks: int | None = 1, settings=(), dtype="float32") -> Engine:
        """The same one for the same arguments. Graphs of one block are compiled sooner."""
        key = model, tp, blocks, tuple(settings), dtype
        if key not in self.engines:
            assets = assets_of(model, self.shared)
            workspace = opened_workspace(assets, self.artifacts, blocks, dtype, tp, settings)
            upsampler = getattr(assets, "temporal_upsampler", None)  # the demo has none
            self.engines[key] = opened_engine(workspace, assets, temporal_upsampler_path=upsampler)
        return self.engines[key]

    def _generate(self, name: str, **how) -> dict[str, torch.Tensor]:
        golden = JOBS[name]
        engine = self.engine(golden.model, **how)
        return self.run(engine, self.job(name), golden.encoded, golden.decoded, golden.passes)

    def made(self, job: Job, engine: Engine | None = None, encoded=False, on_stage_end=None, **options) -> Result:
        """What an engine makes of a job, with weights, graphs and contexts that are made where they are missing."""
        engine = engine or self.engine()
        workspace = engine.workspace
        build.make(workspace, workspace.weight_sets("dit", {stage.loras for stage in job.stages}))
        build.make(workspace, workspace.dit_graphs(job.buckets))
        if not encoded:  # contexts that records have, too
            config, dtype = workspace.transformer, workspace.dtype
            give_contexts(engine, job, lambda prompt: [x.to(dtype) for x in drawn_contexts(config, prompt)])
        engine.on_stage_end = on_stage_end
        (result,) = engine.run([job], keep=True, **options)
        return result

    def run(self, engine: Engine, job: Job, encoded=False, decode=False, passes=False) -> dict[str, torch.Tensor]:
        """The tensors of a job. passes: with "step0.<pass>.<stream>" of the first step."""
        engine, first = sharing(engine, compat=job.compat) if job.compat else engine, {}

        def read(stage, step):
            if passes and stage.guided and step == 0:
                name = engine.workspace.dit_program_for(job, stage)[0].name
                for kind in (*job.resolved_guidance.passes(), "guided"):
                    for s in STREAMS:
                        first[f"step0.{kind}.{s}"] = engine.residency.ranks.get(name, f"{kind}_{s}")

        engine.on_step_end = read
        tensors = self.made(job, engine, encoded, decode=decode).tensors
        engine.on_step_end = None
        return tensors | first

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


@pytest.fixture(scope="module")
def runs(shared, artifacts):
    threads, runs = torch.get_num_threads(), Runs(shared, artifacts)
    yield runs
    runs.close()
    torch.set_num_threads(threads)


def by_scripts(scripts, assets, job: Job, tp: int = 4, profile_set: tuple[str, ...] = ()) -> SimpleNamespace:
    """Shard, compile and generate, as far as no earlier test did; the prompt is encoded on the ranks."""
    setup, names = scripts(assets, tp), ("height", "width", "num_frames", "frame_rate", "two_stage")
    size = {name: getattr(job.size, name) for name in names} | {"profile_set": profile_set}
    setup.prepare(**size)
    return setup.generate(**size, prompt=job.prompt, seed=job.seed, neuron_gemma=True)


@pytest.fixture(scope="session")
def text_to_video(scripts, tiny, shared) -> SimpleNamespace:
    """By the scripts at TP 4, from graphs for text alone."""
    return by_scripts(scripts, tiny, JOBS["text_to_video"].open(shared)[1])


def assert_has_the_size_of_the_job(video: Path, job: Job) -> None:
    """Codecs, size, frame rate, and length of an MP4 file."""
    facts, size = read_video(video), job.size
    assert (facts["video_codec"], facts["audio_codec"]) == ("h264", "aac")
    assert (facts["width"], facts["height"], facts["frame_count"]) == (size.width, size.height, size.num_frames)
    assert (facts["frame_rate"], facts["channels"], facts["sample_rate"]) == (size.frame_rate, 2, 48000)
    assert facts["video_seconds"] == pytest.approx(size.seconds, abs=1e-3)
    assert facts["audio_seconds"] == pytest.approx(size.seconds, abs=1 / size.frame_rate)


def assert_is_recorded(name: str, got: dict[str, torch.Tensor]) -> None:
    Record(name).assert_equal(got, JOBS[name].bound)


def assert_tail_is_cut(runs: Runs, engine: Engine, job: Job) -> None:
    """The last 8 frames of a job as a tail: the others, their sound and all latents stay, bit for bit."""
    whole, shorter = (runs.run(engine, each, decode=True) for each in (job, replace(job, tail_frames=8)))
    frames = len(shorter["frames"])
    assert len(whole["frames"]) - frames == 8 * job.output_frame_rate / job.size.frame_rate
    samples = round(frames / job.output_frame_rate * engine.host.sample_rate)
    assert shorter["waveform"].shape == (2, samples) and {*whole} == {*shorter}
    kept = whole | {"frames": whole["frames"][:frames], "waveform": whole["waveform"][:, :samples]}
    assert {name for name in kept if not torch.equal(shorter[name], kept[name])} == set()


def clip(frames: int = 33, prompt: str = "waves", **fields) -> Job:
    windows = {"chunk_pixel_frames": WINDOW, "chunk_carry_frames": CARRY, "chunk_blend_frames": BLEND}
    return make_job(prompt, Size(64, 64, frames, RATE, two_stage=True), 7, **windows | fields)


class Held(NamedTuple):
    """Sound at the beginning of a window that is there already."""

    latent: torch.Tensor

    def apply_to(self, latent_state, latent_tools):
        tokens = latent_tools.patchifier.patchify(self.latent)
        clean, mask = latent_state.clean_latent.clone(), latent_state.denoise_mask.clone()
        clean[:, : tokens.shape[1]], mask[:, : tokens.shape[1]] = tokens, 0
        return dataclasses.replace(latent_state, clean_latent=clean, denoise_mask=mask)


class InWindows(Pipeline):
    """Window after window through both stages, by the functions of ltx-pipelines and one generator."""

    def run(self):
        tensors, self.ends = {}, {}
        for number, prompt in enumerate(self.job.texts_of_windows):
            self.job, self.num_frames = self.job.replaced(prompt=prompt), WINDOW
            tensors |= {f"w{number}_{name}": x for name, x in super().run().items()}
        return tensors

    def _stage(self, height, width, sigmas, video=None, audio=None):
        ended = super()._stage(height, width, sigmas, video, audio)
        sound = round(CARRY / RATE * 25)
        self.ends[height] = ended[0][:, :, -(CARRY // 8 + 1) :], ended[1][:, :, -sound:]
        return ended

    def _streams(self, height, width, *begin):
        from ltx_core.conditioning import VideoConditionByLatentIndex

        streams = super()._streams(height, width, *begin)
        if height not in self.ends:
            return streams
        video, audio = self.ends[height]
        items = VideoConditionByLatentIndex(latent=video, strength=1.0, latent_idx=0), Held(audio)
        return tuple(s._replace(items=(*s.items, item)) for s, item in zip(streams, items, strict=True))


@torch.no_grad()
def by_ltx_core(tiny, job: Job, draw) -> dict[str, torch.Tensor]:
    with numerics("later"):
        return InWindows(tiny, job, draw).run()
