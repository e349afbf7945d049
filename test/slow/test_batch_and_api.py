"""Batches and the Python API where something goes wrong: while a clip is decoded beside the next one's steps."""

import json
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from helpers import allowed, ended, read_video, wait_for
from jobs import make_job, replace
from runs import GENERATE, ONE_STAGE, TP, batch_flags, children, opened, undisturbed_batch, videos

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.batch import RESULTS, Line
from ltx_neuron.batch import run as run_batch
from ltx_neuron.engine.outputs import SUFFIX
from ltx_neuron.job import Job, Size

SOON = 10  # seconds until a run with a broken rank has ended, whatever is done beside its ranks
LONG = 60  # seconds for which a clip is decoded where nobody stops it
OVERLAP = "overlap_decode=true"  # where ranks have a device of their own, it is so by itself


def jobs() -> list[Job]:
    return [make_job("birds sing", Size(**ONE_STAGE), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    setup = scripts(tiny, TP)
    setup.prepare(**ONE_STAGE)
    return setup


@pytest.fixture
def engine(setup, tiny, monkeypatch):
    """The API's, with decoding beside denoising, and for long, as a released one does at a large size. No thread and no
    process of it is left, whatever happened."""

    def threads() -> set[threading.Thread]:
        """All but the one that looks after progress bars, which stays once there was a bar."""
        return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}

    def decode_video(latent, *how):
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            chunks = list(decode(latent, *how))
            time.sleep(0.1)  # the machine's other tests go on
        yield from chunks

    before, count = (threads(), children()), torch.get_num_threads()
    with opened(setup, tiny, profile_set=(OVERLAP,), neuron_gemma=False) as pipe:
        decode = pipe.engine.host.decode_video
        monkeypatch.setattr(pipe.engine.host, "decode_video", decode_video)
        yield pipe.engine
    torch.set_num_threads(count)
    assert threads() == before[0] and children() <= before[1]


def kill_a_rank(engine) -> float:
    engine.residency.ranks._processes[1].kill()
    return time.monotonic()


def test_a_rank_that_is_killed_while_it_waits_for_the_host_ends_the_run_soon(engine, monkeypatch):
    """No command is under way that could tell: the clip before is decoded, and the next one begins after it."""
    killed, decode = [], engine.host.decode_video

    def breaking(latent, *how):
        killed.append(kill_a_rank(engine))
        return decode(latent, *how)

    monkeypatch.setattr(engine.host, "decode_video", breaking)
    monkeypatch.setattr(engine.workspace, "profile", replace(engine.workspace.profile, overlap_decode=False))
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*was killed"):
        list(engine.run(jobs()))
    assert time.monotonic() - killed[0] < allowed(SOON)


def test_a_batch_with_a_broken_rank_ends_soon_and_no_clip_is_denoised_again(engine, monkeypatch, tmp_path, capsys):
    """The rank is killed in the second clip's steps, while the first one is still being decoded."""
    lines, killed, steps = [Line(number, job, "") for number, job in enumerate(jobs(), 1)], [], []

    def kill(stage, step):
        decodes_beside = any(thread.name.startswith("background") for thread in threading.enumerate())
        if step == 2 and decodes_beside and not killed:
            killed.append(kill_a_rank(engine))

    def write(clip, path) -> None:
        path.write_bytes(torch.cat(list(clip.chunks)).numpy().tobytes())

    engine.on_step_end = kill
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*was killed"):
        run_batch(lines, engine, tmp_path, write, Job.describe)
    assert time.monotonic() - killed[0] < allowed(SOON)
    assert [path.name for path in tmp_path.iterdir()] == ["0001" + SUFFIX]

    monkeypatch.undo()
    engine.on_step_end = lambda stage, step: steps.append(step)
    run_batch(lines, engine, tmp_path, write, Job.describe)
    assert steps == list(range(8))
    assert "resumed: line 1; the decoding is left" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001.mp4", "0002.mp4", RESULTS]
    engine.on_stage_end = None
    wanted = [result.frames.numpy().tobytes() for result in engine.run(jobs())]
    assert [(tmp_path / line.file).read_bytes() for line in lines] == wanted


def test_a_batch_that_is_killed_resumes_and_loses_nothing(setup, tiny, shared, tmp_path):
    """Its clips are decoded while others are denoised, and those of the undisturbed one were not."""
    wanted, out, log = videos(undisturbed_batch(setup, tiny, shared)), tmp_path / "out", tmp_path / "log.txt"
    flags = batch_flags(tiny, tmp_path) | {"profile_set": OVERLAP}

    def entries() -> list[dict]:
        return json.loads((out / RESULTS).read_text())["lines"]

    with open(log, "wb") as file:
        command = [sys.executable, *setup.command(GENERATE, **flags)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    wait_for(lambda: (out / RESULTS).is_file() or process.poll() is not None)
    assert process.poll() is None, log.read_text()[-2000:]
    started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.wait()
    done = [entry["line"] for entry in entries()]
    assert 1 <= len(done) < 5 and len(started) >= TP, log.read_text()[-2000:]
    assert ended(started, 15)  # a busy machine is given time

    denoised = [path for path in out.glob("*" + SUFFIX) if int(path.name[:4]) not in done]
    stamps = {line: (out / f"{line:04d}.mp4").stat().st_mtime_ns for line in done}
    resumed = succeeded(setup.run(GENERATE, **flags))
    assert f"resumed: {len(done)} of 5 lines were done before" in resumed.stdout
    assert {line: (out / f"{line:04d}.mp4").stat().st_mtime_ns for line in done} == stamps
    assert videos(tmp_path) == wanted and list(out.glob("*partial*")) == []
    assert [(entry["line"], entry["status"]) for entry in entries()] == [(n, "done") for n in range(1, 6)]
    perf = json.loads((tmp_path / "perf.json").read_text())
    assert len(perf["denoise_steps_ms"]["stage_1"]) == (5 - len(done) - len(denoised)) * 8


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
