"""Generations of many jobs with made-up steps: their order and errors, what is kept, what is resumed, what stays."""

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import allowed
from jobs import make_job

from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.decode import JobFailure, Result
from ltx_neuron.engine.outputs import JobRun, restore_state, write_run_tensors
from ltx_neuron.engine.residency import ModulationTables, Residency
from ltx_neuron.engine.run import Engine, print_idle_groups, stage_groups
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.report.latency import Recorder

JOBS = [make_job("rain", Size(64, 64, 9, two_stage=True), seed=seed) for seed in range(3)]


def engine_of(stage=lambda job: None, decode=lambda job: None, overlap=True, **options) -> Engine:
    """An engine with made-up generations; stage and decode are called with the job."""
    engine = object.__new__(Engine)
    profile = SimpleNamespace(overlap_decode=overlap, host_threads=torch.get_num_threads())
    engine.workspace = SimpleNamespace(resolved=lambda job, compat: job, artifacts=None, profile=profile)
    engine.workspace.dit_weights = lambda loras: Path("weights")
    engine.options, engine.events, engine.lines = RunOptions(**options), [], SimpleNamespace(save=lambda: None)
    engine.residency = SimpleNamespace(weights=None, vae_stays=False, poll=lambda: None)
    engine.residency.load_transformer = lambda programs, loras: engine.events.append("load")
    engine.residency.unload_transformer = lambda: engine.events.append("unload")
    engine.check_process = engine.close = lambda: None
    engine._check = lambda jobs, isolate: (jobs, [], {})
    engine._encode_prompts = lambda runs: None

    def generate(run, compiled, write, decoding):
        for part in run.stages_left:
            stage(run.job)
            run.tensors[f"{part.key}_video"] = torch.zeros(1)
            yield part
        decode(run.job)
        result = Result(run.job, {"frames": torch.zeros(1)}, 48000)  # which the generation refers to
        yield result

    engine.generate = generate
    return engine


def fails(seed: int, error: Exception):
    def at(job: Job) -> None:
        if job.seed == seed:
            raise error

    return at


def outcomes(results) -> list:
    return [(r.job.seed, isinstance(r, JobFailure)) for r in results]


@pytest.mark.parametrize("where", ["stage", "decode"])
def test_the_error_of_one_job_leaves_the_others_in_order_and_one_that_concerns_all_ends_the_run(where):
    engine = engine_of(**{where: fails(1, ValueError("broken"))})
    results = list(engine.run(JOBS, isolate=True))
    assert outcomes(results) == [(0, False), (1, True), (2, False)] and str(results[1].error) == "broken"
    with pytest.raises(ValueError, match="broken"):
        list(engine_of(**{where: fails(1, ValueError("broken"))}).run(JOBS))
    for error in (RankError("dead"), UserError("a wrong folder")):
        engine, results = engine_of(overlap=False, **{where: fails(1, error)}), []
        with pytest.raises(type(error)):
            results.extend(engine.run(JOBS, isolate=True))
        assert outcomes(results) == [(0, False)]


def test_a_job_is_decoded_while_the_next_one_runs_its_stages():
    next_runs = threading.Event()

    def stage(job: Job) -> None:
        if job.seed == 1:
            next_runs.set()

    def decode(job: Job) -> None:
        assert next_runs.wait(allowed(5))

    assert outcomes(engine_of(stage, decode).run(JOBS[:2])) == [(0, False), (1, False)]


def test_on_the_ranks_all_jobs_are_decoded_after_the_last_stage():
    order: list[tuple[str, int]] = []
    noted = {what: lambda job, what=what: order.append((what, job.seed)) for what in ("stage", "decode")}
    engine = engine_of(**noted, neuron_vae=True)
    assert len(list(engine.run(JOBS))) == 3
    assert [what for what, _ in order] == ["stage"] * 6 + ["decode"] * 3
    assert "unload" not in engine.events  # the VAEs take its place
    order.clear()
    engine.residency.vae_stays = True  # they fit beside the transformer
    list(engine.run(JOBS))
    assert order.index(("decode", 0)) < order.index(("stage", 2))


def test_nothing_is_kept_of_a_result_that_was_taken():
    seen: list[weakref.ref] = []
    for result in engine_of().run(JOBS):
        assert all(frames() is None for frames in seen[:-1])
        seen.append(weakref.ref(result.tensors["frames"]))
        del result


def test_jobs_that_come_meanwhile_join_and_are_resumed():
    waiting, resumed = [[JOBS[1]], [JOBS[2]]], []
    engine = engine_of(lambda job: resumed.append(job.seed))

    def resume(job: Job) -> JobRun | None:
        run = JobRun(job)
        run.tensors["s1_video"] = torch.zeros(1)  # stage 1 is done
        return run if job.seed == 1 else None

    results = engine.run(JOBS[:1], more=lambda: waiting.pop(0) if waiting else [], resume=resume)
    assert outcomes(results) == [(0, False), (1, False), (2, False)]
    assert resumed == [0, 0, 1, 2, 2] and engine.events.count("load") == 3


def test_stages_of_one_weight_set_run_together(capsys):
    """A job is the names of its stages' weight sets, in order. Guidance groups that wait in a stage are said."""
    print_idle_groups(JOBS[0], JOBS[0].stages[1], 2)
    assert capsys.readouterr().out == "stage 2 has one pass a step: 1 of 2 guidance groups wait\n"
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
        runs = [Mock(title=str(number), stages_left=left) for number, left in enumerate(stages)]
        groups = stage_groups(runs, Path, loaded and Path(loaded))
        assert " ".join(stage.title for run, left in groups for stage in left or [run]) == expected


def test_a_run_begun_with_another_host_dtype_is_resumed_with_a_message(tmp_path, capsys):
    path, job = tmp_path / "out.resume.safetensors", make_job("rain", Size(64, 64, 9))
    identity = {"seed": 10, "host_dtype": "bfloat16"}
    tensors = {"attention_mask": torch.ones(1, 1024, dtype=torch.int64), "s1_video": torch.zeros(1, 128, 2, 2, 2)}
    tensors |= {"video_context": torch.zeros(1, 1024, 4), "audio_context": torch.zeros(1, 1024, 2)}
    write_run_tensors(path, tensors | {"s1_audio": torch.zeros(1, 8, 9, 16)}, identity)
    here = identity | {"host_dtype": "float32"}
    assert restore_state(path, job, here, torch.float32).stages_left == []
    assert "host_dtype bfloat16, this machine's is float32" in capsys.readouterr().out
    with pytest.raises(UserError, match="is from another run: seed: got 10, wanted 11"):
        restore_state(path, job, here | {"seed": 11}, torch.float32)
    # A worker's next attempt may be on another machine: it begins anew rather than mix the two.
    with pytest.raises(UserError, match="host_dtype: got bfloat16, wanted float32"):
        restore_state(path, job, here, torch.float32, exact=True)


def test_a_modulation_table_is_made_once_for_a_schedule(monkeypatch):
    made = []
    monkeypatch.setattr("ltx_neuron.engine.residency.modulation_table", lambda *given: made.append(given) or given)
    tables = ModulationTables("weights", "config")
    for sigma in (1.0, 1.0, 0.5):
        tables("video", torch.tensor([sigma]), True)
    assert [sigmas.item() for *_, sigmas, _ in made] == [1.0, 0.5]


def test_torchneurons_graphs_of_other_sizes_stay_and_are_named(tmp_path, monkeypatch, capsys):
    """Of ranks that load anything; NxD's keep no graphs."""
    ranks = SimpleNamespace(load=lambda *_: None, close=lambda: None)
    monkeypatch.setattr("ltx_neuron.engine.residency.registry.ranks", lambda *_: ranks)
    said = []
    for backend in ("nxd", "torchdist"):
        profile = resolve("trn2.3xlarge", (f"backend={backend}",))
        workspace = SimpleNamespace(profile=profile, tp=4, dtype=torch.bfloat16, compiler_cache=None)
        workspace.dit_weights = lambda loras: tmp_path
        models = Residency(workspace, Recorder())
        for size in ("small", "large"):
            models.load_transformer({size: None}, ())
        said.append(capsys.readouterr().out)
    stays = "stay in the device's memory"
    assert stays not in said[0] and f"another size: the graphs of small {stays}" in said[1]
    models.close()  # the processes end, and all that they had
    for _ in range(2):
        models.load_transformer({"small": None}, ())
    assert stays not in capsys.readouterr().out
