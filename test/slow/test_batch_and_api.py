"""Batches and the Python API where something goes wrong: while a clip is decoded beside the next
one's steps, in a process that is killed, in broken weights; and on another machine's artifacts."""

import json
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from batches import SIZE, TP, children, flags_of, jobs, lines, opened, prepared, undisturbed, videos
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from helpers import allowed, read_video, rewrite, wait_for
from jobs import make_job, replace

from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.__main__ import main as artifacts_main
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.batch import RESULTS, Line
from ltx_neuron.batch import run as run_batch
from ltx_neuron.commands.generate import generate
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.outputs import OutputPaths
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.resume import SUFFIX, save_state
from ltx_neuron.engine.run import JobFailure
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size

ORPHAN_SECONDS = 15  # a rank notices at once that the host is gone; a busy machine is given time
SOON = 10  # seconds until a run with a broken rank has ended, whatever is done beside its ranks
LONG = 60  # seconds for which a clip is decoded where nobody stops it


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    return prepared(scripts, tiny)


@pytest.fixture(scope="module")
def batch(setup, tiny, shared):
    return undisturbed(setup, tiny, shared)


# --- a clip is decoded while the next one is denoised --------------------------------------------
OVERLAP = "overlap_decode=true"  # where ranks have a device of their own, it is so by itself


def threads() -> set[threading.Thread]:
    """All but the one that looks after progress bars, which stays once there was a bar."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


@pytest.fixture
def overlapping(setup, tiny):
    """The API with decoding beside denoising; no thread and no process is left of it, whatever
    happened."""
    before, count = (threads(), children()), torch.get_num_threads()
    with opened(setup, tiny, profile_set=(OVERLAP,), neuron_gemma=False) as pipe:
        yield pipe
    torch.set_num_threads(count)
    assert threads() == before[0] and children() <= before[1]


def broken_decoder(engine, monkeypatch, at: int, error: Exception) -> list[str]:
    """Have the engine's video decoder fail at one of its calls; returns the names of the threads it
    ran in."""
    ran, decode = [], engine.host.decode_video

    def decode_video(latent, *how):
        ran.append(threading.current_thread().name)
        if len(ran) == at:
            raise error
        return decode(latent, *how)

    monkeypatch.setattr(engine.host, "decode_video", decode_video)
    return ran


def test_an_error_while_decoding_is_that_jobs_failure_and_the_next_one_is_made(overlapping, monkeypatch):
    engine = overlapping.engine
    wanted = [result.frames for result in engine.run(jobs(3), keep=True)]
    ran = broken_decoder(engine, monkeypatch, 2, ZeroDivisionError("no"))
    first, second, third = engine.run(jobs(3), keep=True, isolate=True)
    assert torch.equal(first.frames, wanted[0]) and torch.equal(third.frames, wanted[2])
    assert isinstance(second, JobFailure) and isinstance(second.error, ZeroDivisionError) and second.job.seed == 1
    assert {*ran} == {"background_0"} and len(ran) == 3  # while this thread looks after the ranks
    report = engine.recorder.report({}, "cpu", TP, {}, {})
    beside = [phase["name"] for phase in report["phases"] if "overlapped_seconds" in phase]
    # Of the first run all but the last clip, after which nothing is left to denoise.
    assert {*beside} == {"decode_video", "decode_audio"} and beside.count("decode_video") >= 2
    assert sum(phase["seconds"] for phase in report["phases"]) <= report["end_to_end_seconds"]
    assert report["residual_seconds"] >= 0


@pytest.fixture
def decoding_long(overlapping, monkeypatch):
    """The engine, and its video decoder decodes a clip again and again: at a large size a released
    one takes as long."""
    engine = overlapping.engine
    decode = engine.host.decode_video

    def decode_video(latent, *how):
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            chunks = list(decode(latent, *how))
            time.sleep(0.1)  # the machine's other tests go on
        yield from chunks

    monkeypatch.setattr(engine.host, "decode_video", decode_video)
    return engine


def decodes_beside() -> bool:
    return any(thread.name.startswith("background") for thread in threading.enumerate())


def test_a_rank_that_is_killed_while_it_waits_for_the_host_ends_the_run_soon(decoding_long, monkeypatch):
    """No command is under way that could tell: the clip before is decoded, and the next one begins
    after it."""
    engine, sent = decoding_long, []
    decode = engine.host.decode_video

    def breaking(latent, *how):
        engine.residency.ranks._processes[1].kill()
        sent.append(time.monotonic())
        return decode(latent, *how)

    monkeypatch.setattr(engine.host, "decode_video", breaking)
    monkeypatch.setattr(engine.workspace, "profile", replace(engine.workspace.profile, overlap_decode=False))
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*was killed"):
        list(engine.run(jobs(2)))
    assert time.monotonic() - sent[0] < allowed(SOON)


def test_a_clip_that_is_complete_when_a_rank_fails_is_handed_over(overlapping):
    engine, made = overlapping.engine, []

    def kill(stage, step):
        if made and step == 2:
            until = time.monotonic() + allowed(SOON)
            while decodes_beside() and time.monotonic() < until:
                time.sleep(0.01)
            engine.residency.ranks._processes[1].kill()

    engine.on_step_end = kill
    engine.on_stage_end = made.append
    results = []
    with pytest.raises(RankError, match="rank 1 of 2 failed"):
        for result in engine.run(jobs(3)):
            results.append(result)
    assert [result.job.seed for result in results] == [0] and results[0].frames.shape == (9, 64, 64, 3)


def test_a_batch_with_a_broken_rank_ends_soon_and_no_clip_is_denoised_again(
    decoding_long, monkeypatch, tmp_path, capsys
):
    """The rank is killed in the second clip's steps, while the first one is still being decoded."""
    engine, lines = decoding_long, [Line(number, job, "") for number, job in enumerate(jobs(2), 1)]
    killed = []

    def write(clip, path):
        path.write_bytes(torch.cat(list(clip.chunks)).numpy().tobytes())

    def kill(stage, step):
        if step == 2 and decodes_beside() and not killed:
            engine.residency.ranks._processes[1].kill()
            killed.append(time.monotonic())

    engine.on_step_end = kill
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*was killed"):
        run_batch(lines, engine, tmp_path, write, Job.describe)
    assert time.monotonic() - killed[0] < allowed(SOON)
    assert [path.name for path in tmp_path.iterdir()] == ["0001" + SUFFIX]

    monkeypatch.undo()
    steps = []
    engine.on_step_end = lambda stage, step: steps.append(step)
    run_batch(lines, engine, tmp_path, write, Job.describe)
    assert steps == list(range(8))
    assert "resumed: line 1; the decoding is left" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001.mp4", "0002.mp4", RESULTS]
    engine.on_stage_end = None
    wanted = [result.frames.numpy().tobytes() for result in engine.run(jobs(2))]
    assert [(tmp_path / line.file).read_bytes() for line in lines] == wanted


def test_a_state_that_is_not_the_lines_own_is_not_taken_up(overlapping, tmp_path, capsys):
    engine, (job, other), made = overlapping.engine, jobs(2), []
    state = tmp_path / ("0001" + SUFFIX)

    def take(clip, path) -> None:
        made.extend(clip.chunks)

    (wanted,) = engine.run([job], keep=True)
    engine.on_stage_end = lambda run: save_state(state, run, other.describe())
    list(engine.run([other], keep=True, decode=False))
    for content in (b"", state.read_bytes()):
        state.write_bytes(content)
        run_batch([Line(1, job, "")], engine, tmp_path, take, Job.describe)
        (tmp_path / RESULTS).unlink()
        assert "line 1 starts over" in capsys.readouterr().out and not state.exists()
        assert torch.equal(made.pop(), wanted.frames)


def test_ctrl_c_ends_what_is_decoded_beside_at_once(overlapping, monkeypatch):
    engine, decoding = overlapping.engine, threading.Event()

    def decode_for_ever(latent, *how):
        while True:
            decoding.set()
            check_cancelled()
            time.sleep(0.001)

    def interrupt(stage, step):
        if decoding.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.host, "decode_video", decode_for_ever)
    engine.on_step_end = interrupt
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(engine.run(jobs(2)))
    assert time.monotonic() - began < SCRIPT_SECONDS / 10 and engine.residency.ranks is None


def test_a_batch_that_is_killed_resumes_and_loses_nothing(batch, setup, tiny, tmp_path):
    """Its clips are decoded while others are denoised, and those of `batch` were not."""
    flags = flags_of(tiny, tmp_path) | {"profile_set": OVERLAP}
    results, log = tmp_path / "out" / RESULTS, tmp_path / "log.txt"
    with open(log, "wb") as out:
        command = [sys.executable, ROOT / "src/generate_ltx23.py", *setup.words(**flags)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    wait_for(lambda: results.is_file() or process.poll() is not None)
    assert process.poll() is None, log.read_text()[-2000:]
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    done = [entry["line"] for entry in json.loads(results.read_text())["lines"]]
    assert 1 <= len(done) < 5, log.read_text()[-2000:]
    assert len(started) >= TP
    _, alive = psutil.wait_procs(started, timeout=ORPHAN_SECONDS)
    for orphan in alive:
        orphan.kill()
    assert [orphan.name() for orphan in alive] == []

    denoised = [path for path in (tmp_path / "out").glob("*" + SUFFIX) if int(path.name[:4]) not in done]
    stamps = {line: (tmp_path / "out" / f"{line:04d}.mp4").stat().st_mtime_ns for line in done}
    resumed = succeeded(setup.run("src/generate_ltx23.py", **flags))
    assert f"resumed: {len(done)} of 5 lines were done before" in resumed.stdout
    assert {line: (tmp_path / "out" / f"{line:04d}.mp4").stat().st_mtime_ns for line in done} == stamps
    assert videos(tmp_path) == videos(batch)
    entries = json.loads(results.read_text())["lines"]
    assert [(entry["line"], entry["status"]) for entry in entries] == [(n, "done") for n in range(1, 6)]
    perf = json.loads((tmp_path / "perf.json").read_text())
    assert len(perf["denoise_steps_ms"]["stage_1"]) == (5 - len(done) - len(denoised)) * 8
    assert list((tmp_path / "out").glob("*partial*")) == []


# --- broken host models --------------------------------------------------------------------------
def test_nan_after_the_latents_fails_the_run_which_keeps_them(setup, tiny, tmp_path, monkeypatch, capsys):
    """The weights of a model on the host are broken after the ranks' were cut, as on a bad disk."""

    def damage(tensors: dict) -> None:
        for name in tensors:
            if name.startswith("vocoder") and name.endswith("bias"):
                tensors[name].fill_(float("nan"))

    broken, video = tmp_path / "broken.safetensors", tmp_path / "out" / "video.mp4"
    rewrite(tiny.checkpoint, broken, damage)
    profile = resolve("cpu", setup.settings)
    workspace = Workspace(tiny.checkpoint, profile, setup.artifacts, TP, "float32", tiny.gemma_root)
    job, spec = make_job("birds sing", Size(**SIZE)), HostModels._spec

    def run(**how) -> None:
        errors.run(lambda: generate(job, workspace, RunOptions(), OutputPaths(video=video, **how)))

    with monkeypatch.context() as patch:
        patch.setattr(HostModels, "_spec", lambda *args: spec(*args)._replace(path=broken, file=None))
        with pytest.raises(SystemExit) as end:
            run()
    said = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in said
    assert "error: NaN or Inf in the outputs of the vocoder" in said
    assert "the same command with --resume" in said
    kept = sorted(path.name for path in video.parent.iterdir())
    assert kept == ["video.failure.log", "video.resume.safetensors"]
    run(resume=True)
    assert "the decoding is left" in capsys.readouterr().out and video.is_file()


# --- artifacts of another machine ----------------------------------------------------------------
def test_pulled_artifacts_verify_and_make_the_bits_of_those_that_were_pushed(batch, setup, tiny, tmp_path):
    store, here = str(tmp_path / "store"), tmp_path / "here"
    artifacts_main(["push", store, "--artifacts-dir", str(setup.artifacts)])
    artifacts_main(["pull", store, "--artifacts-dir", str(here)])
    assert sorted(path.name for path in here.iterdir()) == ["graphs", "weights"]
    profile = resolve("cpu", setup.settings)
    workspace = Workspace(tiny.checkpoint, profile, here, TP, "float32", tiny.gemma_root)
    assert (
        len(
            build.check_bytes(workspace, workspace.weight_sets("dit"))
            + build.check_bytes(workspace, workspace.weight_sets("gemma3"))
        )
        == 2
    )  # against the checkpoint
    line, video = lines(tiny)[0], tmp_path / "out" / "video.mp4"
    generate(make_job(line["prompt"], Size(**SIZE)), workspace, RunOptions(neuron_gemma=True), OutputPaths(video=video))
    assert video.read_bytes() == videos(batch)["0001.mp4"]


def test_the_readmes_example_runs(tmp_path):
    text = (ROOT / "README.md").read_text().split("## From Python")[1].split("## ")[0]
    (command,) = re.findall(r"```\n(ltx-neuron .*?)```", text, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "example.py").write_text(code)  # with no guard for the main module
    command = command.replace("ltx-neuron", f"{sys.executable} -m ltx_neuron")
    for words in (["bash", "-c", command], [sys.executable, "example.py"]):
        process = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=SCRIPT_SECONDS)
        assert process.returncode == 0, process.stderr[-3000:]
    video = read_video(tmp_path / "circle.mp4")
    assert (video["frame_count"], video["height"], video["width"]) == (49, 128, 192)
