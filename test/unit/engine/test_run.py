"""Generations of many jobs, with made-up steps and videos: their order, their errors, and what is kept of them."""

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import allowed
from jobs import make_job

from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.engine import run as module
from ltx_neuron.engine.decode import JobFailure, Result
from ltx_neuron.engine.run import Engine, print_idle_groups, stage_groups
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size

JOBS = [make_job("rain", Size(64, 64, 9, two_stage=True), seed=seed) for seed in range(3)]


class Frames:
    """Stands for a job's frames: what refers to it can be seen."""


@pytest.fixture
def engine_of(monkeypatch):
    """An engine with made-up generations: engine_of(stage, decode), both called with the job."""

    def engine_of(stage=lambda job: None, decode=lambda job: None, overlap=True, **options):
        engine = object.__new__(Engine)
        profile = SimpleNamespace(overlap_decode=overlap, host_threads=torch.get_num_threads())
        engine.workspace = SimpleNamespace(
            resolved=lambda job, compat: job, dit_weights=lambda loras: Path("weights"), artifacts=None, profile=profile
        )
        engine.options, engine.events = RunOptions(**options), []
        engine.lines = SimpleNamespace(save=lambda: None)
        engine.residency = SimpleNamespace(
            weights=None,
            vae_stays=False,
            load_transformer=lambda programs, loras: engine.events.append("load"),
            unload_transformer=lambda: engine.events.append("unload"),
            poll=lambda: None,
        )
        engine.check_process = engine.close = lambda: None
        engine._check = lambda jobs, isolate: (jobs, [], {})
        engine._encode_prompts = lambda runs: None

        def generate(run, compiled, write, decoding):
            for part in run.stages_left:
                stage(run.job)
                run.tensors[f"{part.key}_video"] = torch.zeros(1)
                yield part
            decode(run.job)
            result = Result(run.job, {"frames": Frames()}, 48000)  # which the generation refers to
            yield result

        engine.generate = generate
        return engine

    return engine_of


def fails(seed: int, error: Exception):
    def at(job: Job) -> None:
        if job.seed == seed:
            raise error

    return at


def outcomes(results) -> list:
    return [(r.job.seed, isinstance(r, JobFailure)) for r in results]


@pytest.mark.parametrize("where", ["stage", "decode"])
def test_the_error_of_one_job_leaves_the_others_and_their_order_or_without_isolation_ends_the_run(engine_of, where):
    engine = engine_of(**{where: fails(1, ValueError("broken"))})
    results = list(engine.run(JOBS, isolate=True))
    assert outcomes(results) == [(0, False), (1, True), (2, False)] and str(results[1].error) == "broken"
    with pytest.raises(ValueError, match="broken"):
        list(engine_of(**{where: fails(1, ValueError("broken"))}).run(JOBS))


@pytest.mark.parametrize("where", ["stage", "decode"])
@pytest.mark.parametrize("error", [RankError("dead"), UserError("a wrong folder")])
def test_an_error_that_concerns_all_jobs_ends_the_run_after_what_is_finished(engine_of, where, error):
    engine, results = engine_of(overlap=False, **{where: fails(1, error)}), []
    with pytest.raises(type(error)):
        results.extend(engine.run(JOBS, isolate=True))
    assert outcomes(results) == [(0, False)]


def test_a_job_is_decoded_while_the_next_one_runs_its_stages(engine_of):
    next_runs = threading.Event()

    def stage(job: Job) -> None:
        if job.seed == 1:
            next_runs.set()

    def decode(job: Job) -> None:
        if job.seed == 0:
            assert next_runs.wait(allowed(5))

    assert outcomes(engine_of(stage, decode).run(JOBS[:2])) == [(0, False), (1, False)]


def test_on_the_ranks_all_jobs_are_decoded_after_the_last_stage(engine_of):
    order: list[tuple[str, int]] = []
    engine = engine_of(
        lambda job: order.append(("stage", job.seed)), lambda job: order.append(("decode", job.seed)), neuron_vae=True
    )
    assert len(list(engine.run(JOBS))) == 3
    assert [what for what, _ in order] == ["stage"] * 6 + ["decode"] * 3
    assert "unload" not in engine.events  # the VAEs take its place
    order.clear()
    engine.residency.vae_stays = True  # they fit beside the transformer
    list(engine.run(JOBS))
    assert order.index(("decode", 0)) < order.index(("stage", 2))


def test_nothing_is_kept_of_a_result_that_was_taken(engine_of):
    seen: list[weakref.ref] = []
    for result in engine_of().run(JOBS):
        assert all(frames() is None for frames in seen[:-1])
        seen.append(weakref.ref(result.tensors["frames"]))
        del result


def test_jobs_that_come_meanwhile_join_and_are_resumed(engine_of):
    waiting, resumed = [[JOBS[1]], [JOBS[2]]], []
    engine = engine_of(lambda job: resumed.append(job.seed))

    def more() -> list[Job]:
        return waiting.pop(0) if waiting else []

    def resume(job: Job) -> module.JobRun | None:
        run = module.JobRun(job)
        run.tensors["s1_video"] = torch.zeros(1)  # stage 1 is done
        return run if job.seed == 1 else None

    results = engine.run(JOBS[:1], more=more, resume=resume)
    assert outcomes(results) == [(0, False), (1, False), (2, False)]
    assert resumed == [0, 0, 1, 2, 2] and engine.events.count("load") == 3


def test_guidance_groups_that_wait_in_a_stage_are_said(capsys):
    print_idle_groups(JOBS[0], JOBS[0].stages[1], 2)
    assert capsys.readouterr().out == "stage 2 has one pass a step: 1 of 2 guidance groups wait\n"


class Run(SimpleNamespace):
    """A run, which has an identity of its own."""

    __hash__ = object.__hash__


def test_stages_of_one_weight_set_run_together():
    """A job is the names of its stages' weight sets, in order."""
    for jobs, loaded, expected in (
        (["a", "b", "a"], None, "0a 2a 1b"),  # equal sets together
        (["ab", "ab"], None, "0a 1a 0b 1b"),  # stage 2 after stage 1
        (["a", "b"], "b", "1b 0a"),  # the loaded set first
        (["a", "b"], "c", "0a 1b"),  # the jobs' order
        (["ab", "b"], None, "0a 0b 1b"),
        (["aa", "a"], None, "0a 0a 1a"),
        (["b", "ab"], None, "1a 0b 1b"),  # once, after the job that needs it later
        (["ab", "ba"], None, "0a 0b 1b 1a"),  # one set is loaded twice
        (["a", "", "b"], None, "1 0a 2b"),  # a job without stages left comes first
    ):
        stages = [[SimpleNamespace(loras=name, title=f"{n}{name}") for name in sets] for n, sets in enumerate(jobs)]
        runs = [Run(title=str(number), stages_left=left) for number, left in enumerate(stages)]
        groups = stage_groups(runs, Path, loaded and Path(loaded))
        assert " ".join(stage.title for run, left in groups for stage in left or [run]) == expected
