"""A job's own file that is gone or damaged, before and during a run: that job fails alone, in a batch and in the
service."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from engines import drawn, give_contexts, opened_engine, opened_workspace
from jobs import make_job
from typed import parsed

from ltx_neuron import batch, flags
from ltx_neuron.artifacts import build
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.service.queue import NewJob, Queue
from ltx_neuron.service.worker import Worker

SIZE = Size(64, 64, 9)
NAMES = "a", "b", "c"
STATUSES = ["done", "failed", "done"]


@pytest.fixture(scope="module")
def engine(tiny, artifacts):
    workspace = opened_workspace(tiny, artifacts)
    build.make(workspace, workspace.weight_sets("dit"))
    job = workspace.resolved(make_job("a", SIZE, images=(ImageCondition(tiny.image),)))
    build.make(workspace, workspace.dit_graphs([*job.buckets]))
    with opened_engine(workspace, tiny) as engine:
        for name in NAMES:
            give_contexts(engine, make_job(name, SIZE), lambda prompt: drawn(workspace, ord(prompt)))
        yield engine


@pytest.fixture
def pictures(tiny, tmp_path) -> dict[str, Path]:
    return {name: Path(shutil.copy(tiny.image, tmp_path / f"{name}.png")) for name in NAMES}


def at_the_first_step(engine, action) -> None:
    """Do something once while the first job is denoised."""
    before, todo = engine.on_step_end or (lambda stage, number: None), [action]

    def on_step_end(stage, number):
        if todo:
            todo.pop()()
        before(stage, number)

    engine.on_step_end = on_step_end


def test_a_picture_that_vanishes_fails_its_line_alone_and_finished_lines_need_none(engine, pictures, tmp_path, capsys):
    args, out, size = parsed(), tmp_path / "out", {"height": 64, "width": 64, "num_frames": 9}
    lines = [json.dumps({"prompt": name, "image": str(path), **size}) for name, path in pictures.items()]
    args.prompts_file = tmp_path / "jobs.jsonl"
    args.prompts_file.write_text("\n".join(lines))

    def statuses() -> list[str]:
        lines = flags.lines(args, engine.workspace, out)
        identity = lambda job: run_identity(job, engine.workspace, engine.options)  # noqa: E731
        entries = batch.run(lines, engine, out, lambda clip, path: clip.write(path), identity)
        engine.on_step_end = None
        return [entry["status"] for entry in entries]

    at_the_first_step(engine, pictures["b"].unlink)
    assert statuses() == STATUSES
    assert f"line 2 failed: there is no image {pictures['b']}" in capsys.readouterr().out
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    pictures["a"].unlink()  # of a finished line
    pictures["b"].write_bytes(b"damaged")
    assert statuses() == STATUSES
    assert "line 2 failed" in capsys.readouterr().out
    shutil.copy(pictures["c"], pictures["b"])
    assert statuses() == ["done"] * 3
    assert len(finished) == 2 and finished == {path: path.stat().st_mtime_ns for path in finished}


@pytest.mark.parametrize("claimed", [False, True])
def test_the_service_fails_a_job_whose_picture_vanished_and_keeps_its_engine(engine, pictures, tmp_path, claimed):
    with closing(Queue(tmp_path / "queue.sqlite", tmp_path / "jobs")) as queue:
        ids = []
        for name, path in pictures.items():
            ids.append(id := queue.new_id())
            queue.folder_of(id).mkdir()
            shutil.copy(path, queue.folder_of(id) / "image-0.png")
            job = make_job(name, SIZE, images=(ImageCondition("image-0.png"),))
            queue.submit(NewJob(id, "ada", "", "key", job.to_line(), {}))
        worker, lost = Worker(queue, engine, "worker"), queue.folder_of(ids[1]) / "image-0.png"
        worker.batch_key = "key"
        at_the_first_step(engine, lost.unlink) if claimed else lost.unlink()
        worker._run_batch()
        ended = [queue.get("ada", id) for id in ids]
        engine.on_step_end = engine.on_stage_end = None
    assert [job.status for job in ended] == ["completed", "failed", "completed"]
    assert [job.crash_count for job in ended] == [0, 0, 0] and worker._failures == 0
    error = ended[1].error
    assert error and error["code"] == "invalid_value" and "image-0.png" in error["message"]
    assert str(tmp_path) not in error["message"] and "--" not in error["message"]
    assert engine.residency.ranks  # loaded
