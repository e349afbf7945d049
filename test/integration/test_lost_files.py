"""A job's own file that is gone or damaged, before and during a run: that job fails alone, in a
batch and in the service."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from engines import drawn, give_contexts, opened_engine, opened_workspace
from jobs import make_job

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
    before, todo = engine.on_step_end, [action]

    def on_step_end(stage, number):
        if todo:
            todo.pop()()
        if before:
            before(stage, number)

    engine.on_step_end = on_step_end


def lines_of(engine, pictures, folder: Path):
    """The lines of a prompts file with a picture each, as the command reads them."""
    file, parser = folder / "jobs.jsonl", flags.Parser()
    size = {name: getattr(SIZE, name) for name in ("height", "width", "num_frames")}
    file.write_text("\n".join(json.dumps({"prompt": n, "image": str(path), **size}) for n, path in pictures.items()))
    flags.add_job(parser)
    args = parser.parse_args([])
    args.recipe, args.prompts_file = "distilled", file
    return flags.lines(args, engine.workspace, folder / "out")


def statuses(engine, lines, folder: Path) -> list[str]:
    """Of the lines, once they have run."""
    entries = batch.run(
        lines,
        engine,
        folder / "out",
        lambda clip, path: clip.write(path),
        lambda job: run_identity(job, engine.workspace, engine.options),
    )
    engine.on_step_end = None
    return [entry["status"] for entry in entries]


def test_a_picture_that_vanishes_fails_its_line_alone_and_finished_lines_need_none(engine, pictures, tmp_path, capsys):
    lines = lines_of(engine, pictures, tmp_path)
    at_the_first_step(engine, pictures["b"].unlink)
    assert statuses(engine, lines, tmp_path) == STATUSES
    assert f"line 2 failed: there is no image {pictures['b']}" in capsys.readouterr().out

    def again() -> list[str]:
        finished = list((tmp_path / "out").glob("*.mp4"))
        before = [path.stat().st_mtime_ns for path in finished]
        result = statuses(engine, lines_of(engine, pictures, tmp_path), tmp_path)
        assert len(finished) == 2 and before == [path.stat().st_mtime_ns for path in finished]
        return result

    pictures["a"].unlink()  # of a finished line
    pictures["b"].write_bytes(b"damaged")
    assert again() == STATUSES
    assert "line 2 failed" in capsys.readouterr().out
    shutil.copy(pictures["c"], pictures["b"])
    assert again() == ["done"] * 3


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
        if claimed:
            at_the_first_step(engine, lost.unlink)
        else:
            lost.unlink()
        worker._run_batch()
        ended = [queue.get("ada", id) for id in ids]
        engine.on_step_end = engine.on_stage_end = None
    assert [job.status for job in ended] == ["completed", "failed", "completed"]
    assert [job.crash_count for job in ended] == [0, 0, 0] and worker._failures == 0
    error = ended[1].error
    assert error and error["code"] == "invalid_value" and "image-0.png" in error["message"]
    assert str(tmp_path) not in error["message"] and "--" not in error["message"]
    assert engine.residency.ranks  # loaded
