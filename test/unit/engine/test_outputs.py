"""No output of a run lies over a file that is read, or over one that nobody named and that this
toolkit did not make."""

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from fuzz import on_random
from jobs import make_job

from ltx_neuron import batch
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.batch import RESULTS, Line, Results
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.outputs import OutputPaths, is_sidecar, sibling_files, sidecar
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.resume import SUFFIX, state_path, write_run_tensors
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.files import MARK, whole_file, write_json, write_tensors
from ltx_neuron.host.video import write_frames
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.__main__ import main as print_report
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.weights.lora import Lora

SIDECAR = dict.fromkeys(("sigmas", "profile", "tp", "versions", "identity", "prompt"), "")
TWO_FRAMES = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)


def refused(outputs: OutputPaths, **inputs) -> str:
    """What the check says; inputs are flags without dashes."""
    with pytest.raises(UserError) as error:
        outputs.check({f"--{name}": path for name, path in inputs.items()})
    return str(error.value)


def lines_of(count: int) -> list[Line]:
    return [Line(number, make_job("rain"), "") for number in range(1, count + 1)]


def refused_batch(lines: list[Line], folder: Path, **inputs) -> str:
    with pytest.raises(UserError) as error:
        read = {f"--{name}": path for name, path in inputs.items()}
        batch.check_outputs(lines, folder, None, read)
    return str(error.value)


def write_state(path: Path) -> None:
    generator = torch.Generator().get_state()
    write_run_tensors(path, {"s1_video": torch.zeros(1), "generator_state": generator}, {})


# --- an output is an input ------------------------------------------------------------------------


def test_an_output_that_is_linked_with_an_input_is_refused(tmp_path):
    image = tmp_path / "image.png"
    image.write_bytes(b"an image")
    (tmp_path / "out.mp4").symlink_to(image)
    said = refused(OutputPaths(video=tmp_path / "out.mp4"), image=image)
    assert said == (f"--image and --output-path are the same file {tmp_path}/out.mp4; pass another --output-path")
    assert image.read_bytes() == b"an image"


def test_an_output_in_a_folder_that_is_linked_is_refused(tmp_path):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "linked").symlink_to("artifacts")
    for spelled in ("linked/out.mp4", "linked/../artifacts/new/out.mp4"):
        said = refused(OutputPaths(video=tmp_path / spelled), artifacts=tmp_path / "artifacts")
        assert "is in the input folder of --artifacts" in said


def test_an_output_over_a_file_that_a_folder_links_to_is_refused(tmp_path):
    (tmp_path / "gemma").mkdir()
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "gemma" / "model.safetensors").symlink_to(tmp_path / "blob")
    outputs = OutputPaths(video=tmp_path / "out.mp4", tensors=tmp_path / "blob")
    assert "--gemma and --save-tensors are the same file" in refused(outputs, gemma=tmp_path / "gemma")


def test_a_link_in_a_folder_that_is_read_is_not_replaced(tmp_path):
    (tmp_path / "artifacts").mkdir()
    link = tmp_path / "artifacts" / "out.mp4"
    link.symlink_to(tmp_path / "elsewhere.mp4")
    assert "is in the input folder" in refused(OutputPaths(video=link), artifacts=tmp_path / "artifacts")


def test_two_outputs_in_one_file_or_one_in_the_other_are_refused(tmp_path):
    video = tmp_path / "out.mp4"
    same = refused(OutputPaths(video=video, tensors=tmp_path / "out.resume.safetensors"))
    assert "the state of --output-path and --save-tensors are the same file" in same
    for tensors, report in (("new", "new/report.json"), ("new/tensors", "new")):
        outputs = OutputPaths(video=video, tensors=tmp_path / tensors, report=tmp_path / report)
        assert f"{tmp_path}/new is a file for one of " in refused(outputs)
    assert "and a folder for the other" in refused(OutputPaths(video=video, frames=video))
    log = OutputPaths(video=video, report=tmp_path / "out.failure.log")
    assert "the log of --output-path and --perf-dump-path" in refused(log)
    assert os.listdir(tmp_path) == []


def test_what_lies_apart_is_accepted_and_nothing_is_made(tmp_path):
    for folder in ("artifacts", "artifacts of mine"):
        (tmp_path / folder).mkdir()
    outputs = OutputPaths(
        video=tmp_path / "artifacts of mine" / "out.mp4",
        frames=tmp_path / "frames",
        tensors=tmp_path / "artifacts.safetensors",
        report=tmp_path / "new" / "out.json",
    )
    outputs.check({"--artifacts-dir": tmp_path / "artifacts", "--lora": tmp_path / "absent"})
    assert sorted(os.listdir(tmp_path)) == ["artifacts", "artifacts of mine"]


def test_the_plot_of_a_report_is_not_drawn_over_it(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="and --plot are the same file"):
        print_report([str(path), "--plot", f"{tmp_path}/../{tmp_path.name}/run.json"])
    assert path.read_text() == "{}"


def test_the_api_writes_its_video_over_no_input(tmp_path, tiny):
    image = Path(shutil.copy(tiny.image, tmp_path / "image.mp4"))
    pipe = LTXPipeline.from_pretrained(
        checkpoint_path=tiny.checkpoint,
        gemma_root=tiny.gemma_root,
        artifacts_dir=tmp_path / "artifacts",
        profile="cpu",
        loras=[(tmp_path / "lora.mp4", 1.0)],
    )

    def said(path: Path) -> str:
        with pytest.raises(UserError) as error:
            pipe("rain", image=image, output_type="mp4", output_path=path)
        return str(error.value)

    assert f"--image {image} and output_path are the same file" in said(image)
    assert "is in the input folder of --artifacts-dir" in said(tmp_path / "artifacts" / "out.mp4")
    assert "is in the input folder of --gemma-root" in said(tiny.gemma_root / "out.mp4")
    assert "lora.mp4 and output_path are the same file" in said(tmp_path / "lora.mp4")
    assert image.read_bytes() == tiny.image.read_bytes()


# --- files that nobody named ----------------------------------------------------------------------


def test_a_sidecar_is_replaced_and_another_file_of_its_name_is_not(tmp_path):
    path = tmp_path / "out.json"
    latency_report = {key: SIDECAR[key] for key in ("profile", "tp", "versions", "identity")}
    for content in ("{}", "[]", "", "my notes", json.dumps(latency_report | {"schema": 1})):
        path.write_text(content)
        said = refused(OutputPaths(video=tmp_path / "out.mp4"))
        assert said == (f"{path} exists and this toolkit did not write it; move it or choose another --output-path")
    path.write_text(json.dumps(SIDECAR))
    OutputPaths(video=tmp_path / "out.mp4").check({})


def test_a_sidecar_that_a_run_writes_is_known_again(tmp_path):
    job, recorder = make_job("rain"), Recorder()
    report = recorder.report(job.describe(), "cpu", 1, {}, {"code": ""})
    write_json(tmp_path / "out.json", sidecar(job, report))
    write_json(tmp_path / "report.json", report)
    assert is_sidecar(tmp_path / "out.json") and not is_sidecar(tmp_path / "report.json")


def test_a_state_is_replaced_and_another_file_of_its_name_is_not(tmp_path):
    path = tmp_path / "out.resume.safetensors"
    path.write_bytes(b"weights of mine")
    assert f"{path} exists and this toolkit did not" in refused(OutputPaths(tmp_path / "out.mp4"))
    write_tensors(path, {"a": torch.zeros(1)}, {})
    assert f"{path} exists and this toolkit did not" in refused(OutputPaths(tmp_path / "out.mp4"))
    write_run_tensors(path, {"a": torch.zeros(1)}, {})  # as --save-tensors does
    assert f"{path} exists and this toolkit did not" in refused(OutputPaths(tmp_path / "out.mp4"))
    write_state(path)
    OutputPaths(tmp_path / "out.mp4").check({})


def test_a_log_is_replaced_and_another_file_of_its_name_is_not(tmp_path):
    path = tmp_path / "out.failure.log"
    for content in (b"", b"ltx-neuronal notes\n", b"notes\nltx-neuron\n", b"\xff\xfe"):
        path.write_bytes(content)
        assert f"{path} exists and this toolkit did not" in refused(OutputPaths(tmp_path / "out.mp4"))
    path.write_text(f"{MARK}\nall was well\n")
    OutputPaths(tmp_path / "out.mp4").check({})


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("absent")])
def test_what_is_no_file_is_not_replaced(tmp_path, make):
    make(tmp_path / "out.json")
    assert "this toolkit did not write it" in refused(OutputPaths(tmp_path / "out.mp4"))


# --- frames ---------------------------------------------------------------------------------------


def test_an_image_in_the_folder_of_frames_is_refused(tmp_path):
    list(write_frames(tmp_path / "fr", [TWO_FRAMES]))
    (tmp_path / "soft.png").symlink_to("fr/frame_00001.png")
    for image in ("fr/frame_00001.png", "fr/../fr/frame_00001.png", "soft.png"):
        said = refused(OutputPaths(tmp_path / "out.mp4", frames=tmp_path / "fr"), image=tmp_path / image)
        assert "--image and frame_00001.png of --save-frames are the same file" in said


def test_pictures_of_others_are_neither_written_over_nor_removed(tmp_path):
    folder = tmp_path / "holiday"
    list(write_frames(folder, [TWO_FRAMES]))
    (folder / "frame_00300.png").write_bytes(b"\x89PNG of others")
    (folder / "notes.txt").write_text("kept")
    said = refused(OutputPaths(tmp_path / "out.mp4", frames=folder))
    assert said == (
        f"{folder}/frame_00300.png exists and this toolkit did not write it; pass an empty"
        " folder with --save-frames DIR"
    )
    list(write_frames(folder, [TWO_FRAMES[:1]]))  # frame_00001.png was ours, and is stale
    assert sorted(os.listdir(folder)) == ["frame_00000.png", "frame_00300.png", "notes.txt"]


def test_frames_of_an_earlier_run_are_replaced_beside_files_of_others(tmp_path):
    list(write_frames(tmp_path, [TWO_FRAMES]))
    (tmp_path / "notes.txt").write_text("kept")
    OutputPaths(tmp_path / "out.mp4", frames=tmp_path).check({})


def test_no_other_output_has_the_name_of_a_frame(tmp_path):
    frames = tmp_path / "fr"
    for name in ("tensors", "report"):
        outputs = OutputPaths(tmp_path / "out.mp4", frames=frames, **{name: frames / "frame_00099.png"})
        assert "frame_00099.png of --save-frames are the same file" in refused(outputs)


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0002.json", "0002.mp4", "0001.resume.safetensors", RESULTS])
def test_an_image_that_has_the_name_of_a_batchs_output_is_refused(tmp_path, name):
    lines = lines_of(2)
    (tmp_path / name).write_bytes(b"an image")
    said = refused_batch(lines, tmp_path, image=tmp_path / name)
    assert f"--image and {name} of --output-dir are the same file" in said


def test_a_prompts_file_is_an_input_and_a_batchs_report_an_output(tmp_path):
    lines, file = lines_of(1), tmp_path / "0001.json"
    file.touch()
    assert "--prompts-file and 0001.json of" in refused_batch(lines, tmp_path, **{"prompts-file": file})
    folder = tmp_path / "new"
    with pytest.raises(UserError, match=r"--perf-dump-path and 0001\.json of --output-dir are the"):
        batch.check_outputs(lines, folder, folder / "0001.json", {})


@pytest.mark.parametrize("name", ["0002.json", "0002.mp4", "0002.failure.log", "0002.resume.safetensors"])
def test_files_of_others_in_the_folder_of_a_batch_are_not_replaced(tmp_path, name):
    lines = lines_of(2)
    (tmp_path / name).write_bytes(b"of others")
    said = refused_batch(lines, tmp_path)
    assert f"{name} exists and this toolkit did not write it; move it or choose another" in said


def test_what_an_earlier_batch_made_is_replaced(tmp_path):
    lines = lines_of(3)
    for name in ("0001.mp4", "0002.mp4", "0003.mp4"):
        (tmp_path / name).write_bytes(b"a video")
    (tmp_path / "0001.json").write_text(json.dumps(SIDECAR))
    write_state(tmp_path / "0002.resume.safetensors")  # killed before the JSON was written
    Results(tmp_path, lines).done(lines[2])  # its JSON was removed later
    batch.check_outputs(lines, tmp_path, None, {})


# --- runs of any names ----------------------------------------------------------------------------

INPUTS = (
    "in/model.safetensors",
    "in/gemma/config.json",
    "in/gemma/model.safetensors",
    "in/artifacts/dit/rank_00.safetensors",
    "in/up.safetensors",
    "in/lora.safetensors",
    "in/photo.png",
    "in/photo.json",
    "in/jobs.jsonl",
    "out/0002.json",
    "out/saved.safetensors",
)
OF_OTHERS = (
    "out/notes.txt",
    "out/theirs.json",
    "out/stated.resume.safetensors",
    "out/logged.failure.log",
    "theirs/frame_00001.png",
    "theirs/0001.mp4",
    "theirs/" + RESULTS,
    "films/0001.mp4",
    "blob",
    "fr/notes.txt",
)
OURS = ("out/ours.json", "out/ours.resume.safetensors", "out/ours.failure.log")
OUR_FRAMES = tuple(f"fr/frame_{number:05d}.png" for number in range(4))
LINKS = {"linked": "in", "soft.png": "in/photo.png", "in/gemma/blob.json": "../../blob", "fr2": "fr"}
HARD = {"hard.png": "in/photo.png", "out/hard.json": "in/lora.safetensors"}
FOLDERS = ("", "out", "out", "out", "new", "new/a", "fr", "fr2", "films", "theirs", "in", "linked")
FOLDERS += ("out/../in", "in/gemma", "linked/gemma", "in/artifacts/dit", "linked/artifacts", "OUT")
STEMS = ("a", "b", "ours", "ours", "theirs", "stated", "logged", "photo", "hard", "PHOTO")
NAMES = ("a.safetensors", "b.json", "photo.json", "Photo.JSON", "frame_00001.png", "ours.mp4")
NAMES += ("frame_00070.png", "ours.failure.log", "a.failure.log", "new", "0001.json", "0002.mp4")
IMAGES = ("in/photo.png", "in/photo.json", "soft.png", "hard.png", "fr/frame_00002.png")
IMAGES += ("fr2/frame_00003.png", "linked/photo.png", "out/0002.json", "out/hard.json")


def plant(root: Path, checkpoint: Path) -> None:
    """Files that are read, files of others, files of ours, and links."""
    for name in (*INPUTS, *OF_OTHERS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"this is {name}")
    (root / INPUTS[0]).unlink()
    os.link(checkpoint, root / INPUTS[0])
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    for name, target in HARD.items():
        os.link(root / target, root / name)
    list(write_frames(root / "fr", [TWO_FRAMES.repeat(2, 1, 1, 1)]))
    for path in sibling_files(root / "out" / "ours.mp4").values():
        write_one(path)


def write_one(path: Path) -> None:
    """What a run writes to a path, by its suffix."""
    if path.name == RESULTS:
        return  # Results has written it
    if path.suffix == ".json":
        write_json(path, SIDECAR)
    elif path.name.endswith(SUFFIX):
        write_state(path)
    else:
        with whole_file(path) as partial:
            partial.write_text(f"{MARK}\nwritten by the test")


def content(root: Path) -> dict[str, object]:
    """Every file and link under its path; the checkpoint by its number and time."""
    found = {}
    for path in root.rglob("*"):
        if path.is_symlink():
            found[place(path)] = os.readlink(path)
        elif path.is_file():
            status = path.stat()
            unchanged = status.st_ino, status.st_mtime_ns
            found[place(path)] = unchanged if status.st_size > 2**20 else path.read_bytes()
    return found


def place(path: Path) -> str:
    """The one path of a file, or of a link to one, whatever links lead to its folder."""
    return f"{os.path.realpath(path.parent)}/{path.name}"


@cache
def opened(folder: Path, artifacts: Path) -> Workspace:
    """A workspace of these paths; it reads the checkpoint, which is always the same."""
    model, gemma = folder / "model.safetensors", folder / "gemma"
    return Workspace(model, resolve("cpu"), artifacts, 1, "float32", gemma)


def draw(chance: random.Random, root: Path) -> tuple[OutputPaths, dict[str, Path]]:
    """Outputs, and the inputs of a run as the real run lists them."""

    def path() -> Path:
        known = chance.choice((*INPUTS, *OF_OTHERS, *LINKS, *HARD))
        return root / chance.choice((f"{chance.choice(FOLDERS)}/{chance.choice(NAMES)}", known))

    def sometimes(value, often=0.2):
        return value if chance.random() < often else None

    spelled = chance.choice(("in", "linked", "out/../in", "./in"))
    artifacts = root / chance.choice(("in", "linked")) / "artifacts"
    lora = root / chance.choice(("in/lora.safetensors", "out/hard.json"))
    workspace = opened(root / spelled, artifacts)
    options = RunOptions(spatial_upsampler_path=sometimes(root / "in" / "up.safetensors", 0.5))
    images = tuple(ImageCondition(str(root / chance.choice(IMAGES))) for _ in range(2))
    preflight = Engine(workspace, Recorder(), options).preflight
    held = images[: chance.randrange(3)]
    read = preflight.files_read([make_job("rain", images=held, loras=(Lora(lora, 1.0),))])
    if chance.random() < 0.2:
        folder = root / chance.choice(FOLDERS)
        return OutputPaths(folder=folder, report=sometimes(path())), read | {
            "--prompts-file": root / spelled / "jobs.jsonl"
        }
    outputs = OutputPaths(
        video=root / chance.choice(FOLDERS) / f"{chance.choice(STEMS)}.mp4",
        frames=sometimes(root / chance.choice(FOLDERS), 0.4),
        tensors=sometimes(path()),
        report=sometimes(path()),
        resume=sometimes(str(root / "out" / "saved.safetensors"), 0.3),
    )
    return outputs, read


def run_of(outputs: OutputPaths, read: dict[str, Path]) -> None:
    """Check and write as a run does. Raises UserError where it refuses."""
    written = [path for path in (outputs.tensors, outputs.report) if path]
    if outputs.folder:
        lines = lines_of(2)
        videos = [outputs.folder / line.file for line in lines]
        outputs.check_batch(None)
        batch.check_outputs(lines, outputs.folder, outputs.report, read)
        Results(outputs.folder, lines).done(lines[0])
    else:
        videos = [outputs.video]
        outputs.check(read)
    for video in videos:
        written += [video, *sibling_files(video).values()]
    for path in written:
        write_one(path)
    if outputs.frames:
        list(write_frames(outputs.frames, [TWO_FRAMES]))
    for video in videos:
        state_path(video).unlink()


def test_runs_with_names_drawn_at_random_change_nothing_that_they_read_or_did_not_name(tmp_path, tiny, monkeypatch):
    """Inputs and outputs are drawn, checked by what checks a run and, where that accepts them,
    written as a run writes them."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # the disk's speed is not what is tested
    checkpoint, before = Path(shutil.copy(tiny.checkpoint, tmp_path / "checkpoint")), {}
    accepted, root = [], tmp_path / "tree"
    plant(tmp_path / "planted", checkpoint)

    def check(chance: random.Random) -> None:
        if not root.exists():  # of links, which is fast; a file written in place would be seen
            shutil.copytree(tmp_path / "planted", root, symlinks=True, copy_function=os.link)
            before.update(before or content(root))
        outputs, read = draw(chance, root)
        try:
            run_of(outputs, read)
        except UserError:
            return  # had it written anything, it would be seen after the next accepted run
        accepted.append(outputs)
        after = content(root)
        named = [path for path in (outputs.video, outputs.tensors, outputs.report) if path]
        ours = [root / name for name in (*OURS, *OUR_FRAMES)]
        inputs = [file for path in read.values() for file in (path, *path.rglob("*"))]
        kept = before.keys() - set(map(place, (*named, *ours)))
        kept |= before.keys() & {place(file) for path in inputs for file in (path, path.resolve())}
        new = [Path(name) for name in after.keys() - before.keys()]
        read_folders = (root / "in" / "gemma", root / "in" / "artifacts")
        strays = [path for path in new if any(map(path.is_relative_to, read_folders))]
        shutil.rmtree(root)
        assert [name for name in sorted(kept) if after.get(name) != before[name]] == [], outputs
        assert strays == [], outputs

    on_random(check)
    assert len(accepted) > 5
