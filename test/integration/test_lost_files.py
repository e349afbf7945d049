"""A job's own file that is gone or damaged, before and during a run: that job fails alone, in a
batch and in the service."""

import json
import shutil
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from engines import drawn, give_contexts, opened_engine, opened_workspace
from jobs import make_job

from ltx_neuron import batch, flags
from ltx_neuron.artifacts import build
from ltx_neuron.batch import RESULTS
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.errors import UserError
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
            named = make_job(name, SIZE)
            give_contexts(engine, named, lambda prompt: drawn(workspace, ord(prompt)))
        yield engine


@pytest.fixture
def pictures(tiny, tmp_path) -> dict[str, Path]:
    return {name: Path(shutil.copy(tiny.image, tmp_path / f"{name}.png")) for name in NAMES}


@contextmanager
def at_the_first_step(engine, action):
    """Does something once while the first job is denoised."""
    before, todo = engine.on_step_end, [action]

    def on_step_end(stage, number):
        if todo:
            todo.pop()()
        if before:
            before(stage, number)

    engine.on_step_end = on_step_end
    yield
    engine.on_step_end = before


def lines_of(engine, pictures, folder: Path):
    """The lines of a prompts file with a picture each, as the command reads them."""
    file = folder / "jobs.jsonl"
    size = {name: getattr(SIZE, name) for name in ("height", "width", "num_frames")}
    lines = [{"prompt": name, "image": str(path), **size} for name, path in pictures.items()]
    file.write_text("\n".join(map(json.dumps, lines)))
    parser = flags.Parser()
    flags.add_job(parser)
    args = parser.parse_args([])
    args.recipe, args.prompts_file = "distilled", file
    return flags.lines(args, engine.workspace, folder / "out")


def ran(engine, lines, folder: Path) -> list[dict]:
    return batch.run(
        lines,
        engine,
        folder / "out",
        lambda clip, path: clip.write(path),
        lambda job: run_identity(job, engine.workspace, engine.options),
    )


def test_a_picture_that_vanishes_fails_its_line_alone_and_finished_lines_need_none(engine, pictures, tmp_path, capsys):
    lines = lines_of(engine, pictures, tmp_path)
    with at_the_first_step(engine, pictures["b"].unlink):
        entries = ran(engine, lines, tmp_path)
    assert [entry["status"] for entry in entries] == STATUSES
    assert f"line 2 failed: there is no image {pictures['b']}" in capsys.readouterr().out

    def again() -> list[str]:
        made = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").glob("*.mp4"))]
        entries = ran(engine, lines_of(engine, pictures, tmp_path), tmp_path)
        assert made == [
            path.stat().st_mtime_ns for path in sorted((tmp_path / "out").glob("*.mp4")) if path.name != "0002.mp4"
        ]
        return [entry["status"] for entry in entries]

    pictures["a"].unlink()  # of a finished line
    pictures["b"].write_bytes(b"damaged")
    assert again() == STATUSES
    assert "line 2 failed" in capsys.readouterr().out
    shutil.copy(pictures["c"], pictures["b"])
    assert again() == ["done"] * 3


def test_a_finished_line_whose_text_changed_needs_its_picture(engine, pictures, tmp_path):
    (tmp_path / "out").mkdir()
    done = lines_of(engine, pictures, tmp_path)
    entries = [
        {"line": n, "digest": each.digest, "typed": each.typed, "status": "done"} for n, each in enumerate(done, 1)
    ]
    (tmp_path / "out" / RESULTS).write_text(json.dumps({"lines": entries}))
    for each in done:
        (tmp_path / "out" / each.file).write_bytes(b"")
    pictures["a"].unlink()
    results = batch.Results(tmp_path / "out", lines_of(engine, pictures, tmp_path))
    assert [entry["status"] for entry in results.entries.values()] == ["done"] * 3
    changed = {"aa": pictures["a"], "b": pictures["b"], "c": pictures["c"]}
    results = batch.Results(tmp_path / "out", lines_of(engine, changed, tmp_path))
    assert results.entries[1]["status"] == "failed" and "a.png" in results.entries[1]["error"]


def test_before_a_batch_begins_every_bad_line_is_said_by_its_number(engine, pictures, tmp_path):
    pictures["a"].write_bytes(b"damaged")
    pictures["c"].unlink()
    with pytest.raises(UserError) as error:
        lines_of(engine, pictures, tmp_path)
    said = str(error.value).splitlines()
    assert said[0].endswith("nothing was run.")
    assert said[1].startswith(f"line 1: {pictures['a']} cannot be read as an image")
    assert any(line.startswith(f"line 3: --image {pictures['c']}: no such file") for line in said)
    assert not (tmp_path / "out").exists()


def submitted(queue: Queue, engine, pictures) -> list[str]:
    ids = []
    for name, path in pictures.items():
        id = queue.new_id()
        queue.folder_of(id).mkdir()
        shutil.copy(path, queue.folder_of(id) / "image-0.png")
        job = make_job(name, SIZE, images=(ImageCondition("image-0.png"),))
        queue.submit(NewJob(id, "ada", "", "key", job.to_line(), {}))
        ids.append(id)
    return ids


@pytest.mark.parametrize("claimed", [False, True])
def test_the_service_fails_a_job_whose_picture_vanished_and_keeps_its_engine(engine, pictures, tmp_path, claimed):
    with closing(Queue(tmp_path / "queue.sqlite", tmp_path / "jobs")) as queue:
        ids = submitted(queue, engine, pictures)
        worker, lost = Worker(queue, engine, "worker"), queue.folder_of(ids[1]) / "image-0.png"
        worker.batch_key = "key"
        if claimed:
            with at_the_first_step(engine, lost.unlink):
                worker._run_batch()
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
