"""No output of a run lies over a file that it reads, or over one that nobody named and that no run wrote."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from jobs import make_job, replace

from ltx_neuron import batch
from ltx_neuron.batch import RESULTS, Line, Results
from ltx_neuron.engine.outputs import OutputPaths, is_log, logging_failure, sibling_files, sidecar, write_run_tensors
from ltx_neuron.errors import UserError
from ltx_neuron.files import MARK
from ltx_neuron.host.video import write_frames
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.__main__ import main as print_report
from ltx_neuron.report.latency import Recorder
from ltx_neuron.weights.tensorfile import write_tensors

REPORT = Recorder().report(make_job("rain").describe(), "cpu", 1, {}, {"code": ""})
SIDECAR = sidecar(make_job("rain"), REPORT)


def refusal(outputs: OutputPaths, **inputs) -> str:
    """The message of the check; inputs are flags without dashes."""
    with pytest.raises(UserError) as error:
        outputs.check({f"--{name}": path for name, path in inputs.items()})
    return str(error.value)


def lines_of(count: int) -> list[Line]:
    return [Line(number, make_job("rain"), "") for number in range(1, count + 1)]


def write_state(path: Path) -> None:
    write_run_tensors(path, {"s1_video": torch.zeros(1), "generator_state": torch.Generator().get_state()}, {})


def test_an_output_over_an_input_or_another_output_is_refused_one_apart_accepted_and_nothing_made(tmp_path):
    for folder in ("artifacts", "artifacts of mine", "gemma"):
        (tmp_path / folder).mkdir()
    for name in ("image.png", "blob"):
        (tmp_path / name).write_bytes(b"content")
    links = {"out.mp4": "image.png", "linked": "artifacts", "gemma/model.safetensors": tmp_path / "blob"}
    for link, target in (links | {"artifacts/out.mp4": tmp_path / "absent.mp4"}).items():
        (tmp_path / link).symlink_to(target)
    found = tmp_path.rglob  # compared without the times of their reading
    before = {path: (path.lstat()[:7], path.lstat().st_mtime_ns) for path in found("*")}
    a, in_folder, artifacts = {"video": "a.mp4"}, "is in the input folder of --artifacts", {"artifacts": "artifacts"}
    for outputs, inputs, message in (
        ({"video": "out.mp4"}, {"image": "image.png"}, "--image and --output-path are the same file {}/out.mp4; pass "),
        ({"video": "linked/out.mp4"}, artifacts, in_folder),
        ({"video": "linked/../artifacts/new/out.mp4"}, artifacts, in_folder),
        (a | {"tensors": "blob"}, {"gemma": "gemma"}, "--gemma and --save-tensors are the same file"),
        (a | {"tensors": "a.resume.safetensors"}, {}, "the state of --output-path and --save-tensors are the same"),
        (a | {"tensors": "new", "report": "new/report.json"}, {}, "{}/new is a file for one of "),
        (a | {"tensors": "new/tensors", "report": "new"}, {}, "{}/new is a file for one of "),
        (a | {"frames": "a.mp4"}, {}, "and a folder for the other"),
        (a | {"report": "a.failure.log"}, {}, "the log of --output-path and --perf-dump-path"),
    ):
        outputs, inputs = ({name: tmp_path / path for name, path in paths.items()} for paths in (outputs, inputs))
        assert message.format(tmp_path) in refusal(OutputPaths(**outputs), **inputs)
    tensors, report = tmp_path / "artifacts.safetensors", tmp_path / "new" / "out.json"
    video, frames = tmp_path / "artifacts of mine/out.mp4", tmp_path / "frames"
    outputs = OutputPaths(video, frames=frames, tensors=tensors, report=report)
    outputs.check({"--artifacts-dir": tmp_path / "artifacts", "--lora": tmp_path / "absent"})
    assert "--resume and --save-tensors are the same file" in refusal(replace(outputs, resume=str(tensors)))
    assert {path: (path.lstat()[:7], path.lstat().st_mtime_ns) for path in found("*")} == before


def test_neither_the_plot_of_a_report_nor_the_video_of_the_api_is_written_over_an_input(tmp_path, tiny):
    path = tmp_path / "run.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="and --plot are the same file"):
        print_report([str(path), "--plot", f"{tmp_path}/../{tmp_path.name}/run.json"])
    image, artifacts = Path(shutil.copy(tiny.image, tmp_path / "image.mp4")), tmp_path / "artifacts"
    files = dict(checkpoint_path=tiny.checkpoint, gemma_root=tiny.gemma_root, artifacts_dir=artifacts)
    pipe = LTXPipeline.from_pretrained(**files, profile="cpu", loras=[(tmp_path / "lora.mp4", 1.0)])
    for video, message in {
        image: f"--image {image} and output_path are the same file",
        artifacts / "out.mp4": "is in the input folder of --artifacts-dir",
        tiny.gemma_root / "out.mp4": "is in the input folder of --gemma-root",
        tmp_path / "lora.mp4": "lora.mp4 and output_path are the same file",
    }.items():
        with pytest.raises(UserError, match=message):
            pipe("rain", image=image, output_type="mp4", output_path=video)
    assert path.read_text() == "{}" and image.read_bytes() == tiny.image.read_bytes()


# What an earlier run wrote, and other files of that name: texts, or what writes them
REPLACED = {
    "out.json": [json.dumps(SIDECAR), "{}", "[]", "my notes", json.dumps(REPORT)],
    "out.resume.safetensors": [
        write_state,
        "weights of mine",
        lambda path: write_tensors(path, {"a": torch.zeros(1)}, {}),
        lambda path: write_run_tensors(path, {"a": torch.zeros(1)}, {}),  # as --save-tensors
    ],
    "out.failure.log": [f"{MARK}\nall was well\n", "", "ltx-neuronal notes\n", "\xff\xfe"],
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_runs_own_files_are_replaced_and_other_files_of_their_names_are_not(tmp_path, name):
    path, outputs = tmp_path / name, OutputPaths(video=tmp_path / "out.mp4")

    def write(content) -> None:
        path.unlink(missing_ok=True)
        content(path) if callable(content) else path.write_text(content)

    ours, *others = REPLACED[name]
    for content in (*others, os.mkfifo, lambda path: path.symlink_to("absent")):
        write(content)
        wanted = f"{path} exists and this toolkit did not write it; move it or choose another --output-path"
        assert refusal(outputs) == wanted
    write(ours)
    outputs.check({})


def test_a_run_that_fails_leaves_a_log_and_its_state_and_a_finished_one_neither(tmp_path, capsys):
    log, state = (sibling_files(tmp_path / "out.mp4")[kind] for kind in ("log", "state"))
    with pytest.raises(ValueError, match="broken"), logging_failure(log, state):
        write_state(state)
        raise ValueError("broken")
    assert is_log(log) and "ValueError: broken" in log.read_text()
    printed = capsys.readouterr().err
    assert f"kept: {state}; type the same command with --resume" in printed and f"log: {log}" in printed
    log.unlink()
    for error in (UserError("a typing mistake"), OSError("the disk is full")):  # of an earlier run's state
        with pytest.raises(type(error)), logging_failure(log, state):
            raise error
    assert not log.exists() and state.exists() and capsys.readouterr().err == ""
    log.touch()
    for _ in range(2):
        with logging_failure(log, state):
            pass
    assert not log.exists() and not state.exists()


def test_frames_of_an_earlier_run_are_replaced_but_not_other_files_with_the_name_of_a_frame(tmp_path):
    folder, frames = tmp_path / "fr", torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    outputs = OutputPaths(tmp_path / "out.mp4", frames=folder)
    list(write_frames(folder, [frames]))
    (tmp_path / "soft.png").symlink_to("fr/frame_00001.png")
    for image in ("fr/../fr/frame_00001.png", "soft.png"):
        assert "--image and frame_00001.png of --save-frames are the same" in refusal(outputs, image=tmp_path / image)
    for name in ("tensors", "report"):
        message = refusal(replace(outputs, **{name: folder / "frame_00099.png"}))
        assert "frame_00099.png of --save-frames are the same file" in message
    (folder / "notes.txt").write_text("kept")
    outputs.check({})
    (folder / "frame_00300.png").write_bytes(b"\x89PNG of others")
    others = f"{folder}/frame_00300.png exists and this toolkit did not write it; pass an empty folder with"
    assert refusal(outputs) == f"{others} --save-frames DIR"
    list(write_frames(folder, [frames[:1]]))  # frame_00001.png was ours, and is stale
    assert sorted(os.listdir(folder)) == ["frame_00000.png", "frame_00300.png", "notes.txt"]


@pytest.mark.parametrize("name", ["0002.json", "0002.mp4", "0002.failure.log", "0002.resume.safetensors", RESULTS])
def test_inputs_and_files_of_others_in_the_folder_of_a_batch_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_bytes(b"of others")
    with pytest.raises(UserError, match=f"--image and {name} of --output-dir are the same file"):
        batch.check_outputs(lines_of(2), tmp_path, None, {"--image": tmp_path / name})
    if name != RESULTS:
        with pytest.raises(UserError, match=f"{name} exists and this toolkit did not write it; move it or choose"):
            batch.check_outputs(lines_of(2), tmp_path, None, {})
    with pytest.raises(UserError, match=r"--perf-dump-path and 0001\.json of --output-dir are the"):
        batch.check_outputs(lines_of(1), tmp_path / "new", tmp_path / "new/0001.json", {})


def test_what_an_earlier_batch_made_is_replaced(tmp_path):
    lines = lines_of(3)
    for name in ("0001.mp4", "0002.mp4", "0003.mp4"):
        (tmp_path / name).write_bytes(b"a video")
    (tmp_path / "0001.json").write_text(json.dumps(SIDECAR))
    write_state(tmp_path / "0002.resume.safetensors")  # killed before the JSON was written
    Results(tmp_path, lines).done(lines[2])  # its JSON was removed later
    batch.check_outputs(lines, tmp_path, None, {})
