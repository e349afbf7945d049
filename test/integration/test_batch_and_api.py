"""Batches and the Python API: models load once, results are those of single runs bit for bit,
nothing is lost or left over."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, SCRIPT_SECONDS, succeeded, words
from helpers import exit_code, forked, read_video, rel, rewrite

from ltx_neuron import errors
from ltx_neuron.artifacts.__main__ import main as artifacts_main
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.torchdist.host import Ranks
from ltx_neuron.batch import RESULTS, Line
from ltx_neuron.batch import run as run_batch
from ltx_neuron.decode_queue import Failure
from ltx_neuron.engine import RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.generate import Outputs, generate
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.profiles import resolve
from ltx_neuron.progress import SUFFIX, save_state
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import DEFAULTS
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

TP = 2
SIZE = {"height": 64, "width": 64, "num_frames": 9}
ORPHAN_SECONDS = 15  # a rank notices at once that the host is gone; a busy machine is given time
SOON = 10  # seconds until a run with a broken rank has ended, whatever is done beside its ranks
LONG = 60  # seconds for which a clip is decoded where nobody stops it
OTHER = 0.1  # another prompt, seed or image changes latents by more than this


def lines(tiny) -> list[dict]:
    """Five jobs that share their graphs; keys spelled both ways."""
    return [
        {"prompt": "waves crash on the shore", **SIZE},
        {"prompt": "« hello » says a man", "seed": 4, **SIZE},
        {"prompt": "a golden retriever", "seed": 5, "image": [str(tiny.image), 0, 0.8], **SIZE},
        {
            "prompt": "waves crash on the shore",
            "seed": 6,
            "num-frames": 9,
            "height": 64,
            "width": 64,
        },
        {"prompt": "birds sing", "image": [[str(tiny.image)]], **SIZE},
    ]


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    """Both models sharded and compiled for all jobs of this file."""
    made = scripts(tiny, TP)
    made.prepare(**SIZE)
    return made


def batch_flags(setup, tiny, folder) -> dict:
    file = folder / "jobs.jsonl"
    file.write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines(tiny)) + "\n\n"
    )
    return dict(
        neuron_gemma=True,
        prompts_file=file,
        output_dir=folder / "out",
        perf_dump_path=folder / "perf.json",
    )


@pytest.fixture(scope="module")
def batch(setup, tiny, tmp_path_factory):
    """The folder of a batch that nothing disturbed."""
    folder = tmp_path_factory.mktemp("batch")
    succeeded(setup.run("src/generate_ltx23.py", **batch_flags(setup, tiny, folder)))
    return folder


def videos(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("*.mp4"))}


def opened(setup, tiny, **more) -> LTXPipeline:
    """The API on the batch's artifacts."""
    pipe = LTXPipeline.from_pretrained(
        checkpoint_path=tiny.checkpoint,
        gemma_root=tiny.gemma_root,
        artifacts_dir=setup.artifacts,
        profile="cpu",
        tp_degree=TP,
        dtype="float32",
        **more,
    )
    pipe.engine.progress = False
    return pipe


def children() -> set[int]:
    """Processes that this one started, but for the two that multiprocessing keeps: they hold no
    model and no device.

    Ranks may be forked from one of them, and then look like it, one generation down.
    """
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            own = child.ppid() == os.getpid() and re.search(
                "multiprocessing.(resource_tracker|forkserver) ", str(child.cmdline())
            )
            if not own and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


@pytest.fixture(scope="module")
def api(setup, tiny):
    """One open pipeline for the tests that only call it; nothing is left of it afterwards."""
    threads, before = torch.get_num_threads(), children()
    with opened(setup, tiny) as pipe:
        yield pipe
    torch.set_num_threads(threads)
    assert children() <= before


# --- batches -------------------------------------------------------------------------------------
def test_a_batch_writes_every_video_in_order_and_says_so(batch, tiny):
    entries = json.loads((batch / "out" / RESULTS).read_text())["lines"]
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["prompt"] for entry in entries] == [line["prompt"] for line in lines(tiny)]
    assert {entry["status"] for entry in entries} == {"done"}
    assert (
        [entry["output"] for entry in entries]
        == list(videos(batch))
        == [f"{n:04d}.mp4" for n in range(1, 6)]
    )
    for name in videos(batch):
        assert (batch / "out" / name).with_suffix(".json").is_file()
        found = read_video(batch / "out" / name)
        assert (found["width"], found["height"], found["frame_count"]) == (64, 64, 9)
    assert len(set(videos(batch).values())) == 5


def test_a_batch_loads_each_model_once(batch):
    perf = json.loads((batch / "perf.json").read_text())
    names = [phase["name"] for phase in perf["phases"]]
    loads = (
        "load_gemma3",
        "encode_text",
        "unload_gemma3",
        "load_transformer",
        "unload_transformer",
    )
    assert {name: names.count(name) for name in loads} == dict.fromkeys(loads, 1)
    assert names.count("denoise_stage_1") >= 5 and names.count("encode_mp4") == 5
    assert len(perf["denoise_steps_ms"]["stage_1"]) == 5 * 8


def test_a_batch_makes_the_bits_of_single_runs(batch, api, setup, tiny, tmp_path):
    for number, line in enumerate(lines(tiny), 1):
        if number == 2:
            # In its own process.
            alone = setup.generate(**SIZE, prompt=line["prompt"], seed=4, neuron_gemma=True)
            assert alone.video.read_bytes() == videos(batch)["0002.mp4"]
            continue
        image = (
            {"image": [ImageCondition(*line["image"])]}
            if number == 3
            else {"image": tiny.image}
            if number == 5
            else {}
        )
        path = tmp_path / f"{number:04d}.mp4"
        made = api(
            line["prompt"],
            **SIZE,
            **image,
            seed=line.get("seed", 10),
            output_type="mp4",
            output_path=path,
        )
        assert made.path == path and made.frames is None
        assert path.read_bytes() == videos(batch)[path.name], number


# --- a clip is decoded while the next one is denoised --------------------------------------------
OVERLAP = "overlap_decode=true"  # where ranks have a device of their own, it is so by itself


def test_clips_are_the_same_bits_when_decoding_overlaps_denoising(batch, setup, tiny, tmp_path):
    succeeded(
        setup.run(
            "src/generate_ltx23.py", profile_set=OVERLAP, **batch_flags(setup, tiny, tmp_path)
        )
    )
    assert videos(tmp_path) == videos(batch)
    assert json.loads((tmp_path / "out" / RESULTS).read_text())["lines"][4]["status"] == "done"
    perf, plain = (json.loads((folder / "perf.json").read_text()) for folder in (tmp_path, batch))
    assert all("overlapped_seconds" not in phase for phase in plain["phases"])
    names = ("decode_video", "decode_audio", "encode_mp4")
    beside = [phase["name"] for phase in perf["phases"] if "overlapped_seconds" in phase]
    # All but the last, after which nothing is left.
    assert set(beside) == {*names} and beside.count("decode_video") >= 4
    assert sum(phase["seconds"] for phase in perf["phases"]) <= perf["end_to_end_seconds"]
    assert perf["residual_seconds"] >= 0
    loads = ("load_gemma3", "load_transformer", "unload_transformer")
    assert [[phase["name"] for phase in perf["phases"]].count(name) for name in loads] == [1, 1, 1]


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


def jobs(count: int) -> list[Job]:
    return [Job("birds sing", Size(**SIZE), seed=seed) for seed in range(count)]


def broken_decoder(engine, monkeypatch, at: int, error: Exception) -> list[str]:
    """Have the engine's video decoder fail at one of its calls; returns the names of the threads it
    ran in."""
    ran, decode = [], engine.host.decode_video

    def decode_video(latent, tiles=None):
        ran.append(threading.current_thread().name)
        if len(ran) == at:
            raise error
        return decode(latent, tiles)

    monkeypatch.setattr(engine.host, "decode_video", decode_video)
    return ran


def test_an_error_while_decoding_is_that_jobs_failure_and_the_next_one_is_made(
    overlapping, monkeypatch
):
    engine = overlapping.engine
    wanted = [result.frames for result in engine.run(jobs(3), keep=True)]
    ran = broken_decoder(engine, monkeypatch, 2, ZeroDivisionError("no"))
    first, second, third = engine.run(jobs(3), keep=True, isolate=True)
    assert torch.equal(first.frames, wanted[0]) and torch.equal(third.frames, wanted[2])
    assert (
        isinstance(second, Failure)
        and isinstance(second.error, ZeroDivisionError)
        and second.job.seed == 1
    )
    assert ran == ["background"] * 3  # while this thread looks after the ranks


@pytest.mark.parametrize(
    "error, isolate", [(UserError("no file"), True), (ZeroDivisionError("no"), False)]
)
def test_an_error_while_decoding_that_ends_the_run_does_so(
    overlapping, monkeypatch, error, isolate
):
    broken_decoder(overlapping.engine, monkeypatch, 1, error)
    with pytest.raises(type(error), match=str(error)):
        list(overlapping.engine.run(jobs(3), isolate=isolate))
    assert overlapping.engine.residency.ranks is None


@pytest.fixture
def decoding_long(overlapping, monkeypatch):
    """The engine, and its video decoder decodes a clip again and again: at a large size a released
    one takes as long."""
    engine = overlapping.engine
    decode = engine.host.decode_video

    def decode_video(latent, tiles=None):
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            chunks = list(decode(latent))
        yield from chunks

    monkeypatch.setattr(engine.host, "decode_video", decode_video)
    return engine


def decodes_beside() -> bool:
    return any(thread.name == "background" for thread in threading.enumerate())


def breaking(engine, number: int) -> list[float]:
    """Have rank 1 get a signal while a clip is decoded beside the next one's steps; returns when
    that was."""
    sent = []

    def send(stage, step):
        if step == 2 and decodes_beside() and not sent:
            os.kill(engine.residency.ranks._processes[1].pid, number)
            sent.append(time.monotonic())

    engine.on_step_end = send
    return sent


@pytest.mark.parametrize(
    "number, said", [(signal.SIGKILL, "was killed"), (signal.SIGSTOP, "no sign of life|it hangs")]
)
def test_a_broken_rank_ends_the_run_soon_though_the_clip_before_is_still_being_decoded(
    decoding_long, number, said
):
    sent, made = breaking(decoding_long, number), []
    with pytest.raises(RankError, match=f"rank 1 of 2 failed: .*({said})"):
        for result in decoding_long.run(jobs(3), hand_over=made.append):
            made.append(result)
    assert time.monotonic() - sent[0] < SOON and made == []


@pytest.mark.parametrize(
    "number, said", [(signal.SIGKILL, "was killed"), (signal.SIGSTOP, "no sign of life")]
)
def test_a_rank_that_fails_while_it_waits_for_the_host_ends_the_run_soon(
    decoding_long, monkeypatch, number, said
):
    """No command is under way that could tell: the clip before is decoded, and the next one begins
    after it."""
    engine, sent = decoding_long, []
    decode = engine.host.decode_video

    def breaking(latent, tiles=None):
        os.kill(engine.residency.ranks._processes[1].pid, number)
        sent.append(time.monotonic())
        return decode(latent, tiles)

    monkeypatch.setattr(engine.host, "decode_video", breaking)
    monkeypatch.setattr(
        engine.workspace,
        "profile",
        dataclasses.replace(engine.workspace.profile, overlap_decode=False),
    )
    with pytest.raises(RankError, match=f"rank 1 of 2 failed: .*({said})"):
        for _ in engine.run(jobs(2)):
            pass
    assert time.monotonic() - sent[0] < SOON


def test_a_clip_that_is_complete_when_a_rank_fails_is_handed_over(overlapping):
    engine, made = overlapping.engine, []

    def kill(stage, step):
        if made and step == 2:
            until = time.monotonic() + SOON
            while decodes_beside() and time.monotonic() < until:
                time.sleep(0.01)
            engine.residency.ranks._processes[1].kill()

    engine.on_step_end = kill
    engine.on_stage_end = made.append
    results = []
    with pytest.raises(RankError, match="rank 1 of 2 failed"):
        for result in engine.run(jobs(3)):
            results.append(result)
    assert [result.job.seed for result in results] == [0] and results[0].frames.shape == (
        9,
        64,
        64,
        3,
    )


def test_a_batch_with_a_broken_rank_is_resumed_without_denoising_a_clip_again(
    decoding_long, monkeypatch, tmp_path, capsys
):
    engine, lines = decoding_long, [Line(number, job, "") for number, job in enumerate(jobs(2), 1)]

    def write(clip, path):
        path.write_bytes(torch.cat(list(clip.chunks)).numpy().tobytes())

    sent = breaking(engine, signal.SIGKILL)
    with pytest.raises(RankError):
        run_batch(lines, engine, tmp_path, write, Job.describe)
    assert sent and [path.name for path in tmp_path.iterdir()] == ["0001" + SUFFIX]

    monkeypatch.undo()
    steps = []
    engine.on_step_end = lambda stage, step: steps.append(step)
    run_batch(lines, engine, tmp_path, write, Job.describe)
    assert (
        steps == list(range(8))
        and "resumed: line 1; the decoding is left" in capsys.readouterr().out
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001.mp4", "0002.mp4", RESULTS]
    engine.on_stage_end = None
    wanted = [result.frames.numpy().tobytes() for result in engine.run(jobs(2))]
    assert [(tmp_path / line.file).read_bytes() for line in lines] == wanted


@pytest.mark.parametrize("content", [b"", "another job's"])
def test_a_state_that_is_not_the_lines_own_is_not_taken_up(overlapping, tmp_path, capsys, content):
    engine, (job, other), made = overlapping.engine, jobs(2), []
    state = tmp_path / ("0001" + SUFFIX)
    if content:
        engine.on_stage_end = lambda run: save_state(state, run, other.describe())
        list(engine.run([other], keep=True, decode=False))
    else:
        state.write_bytes(content)
    run_batch(
        [Line(1, job, "")],
        engine,
        tmp_path,
        lambda clip, path: made.extend(clip.chunks),
        Job.describe,
    )
    assert "line 1 begins anew" in capsys.readouterr().out and not state.exists()
    engine.on_stage_end = None
    (wanted,) = engine.run([job])
    assert torch.equal(made[0], wanted.frames)


def test_ctrl_c_ends_what_is_decoded_beside_at_once(overlapping, monkeypatch):
    engine, decoding = overlapping.engine, threading.Event()

    def decode_for_ever(latent, tiles=None):
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
    flags = batch_flags(setup, tiny, tmp_path)
    common = dict(
        checkpoint_path=tiny.checkpoint, artifacts_dir=setup.artifacts, gemma_root=tiny.gemma_root
    )
    said = words(**flags, **common, tp_degree=TP, dtype="float32")
    results, log = tmp_path / "out" / RESULTS, tmp_path / "log.txt"
    with open(log, "wb") as out:
        command = [sys.executable, ROOT / "src/generate_ltx23.py", *said]
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=out, stderr=out)
    deadline = time.monotonic() + SCRIPT_SECONDS
    while not results.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
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

    denoised = [
        path for path in (tmp_path / "out").glob("*" + SUFFIX) if int(path.name[:4]) not in done
    ]
    stamps = {line: (tmp_path / "out" / f"{line:04d}.mp4").stat().st_mtime_ns for line in done}
    resumed = succeeded(setup.run("src/generate_ltx23.py", **flags))
    assert f"resumed: {len(done)} of 5 lines were done before" in resumed.stdout
    assert {
        line: (tmp_path / "out" / f"{line:04d}.mp4").stat().st_mtime_ns for line in done
    } == stamps
    assert videos(tmp_path) == videos(batch)
    entries = json.loads(results.read_text())["lines"]
    assert [(entry["line"], entry["status"]) for entry in entries] == [
        (n, "done") for n in range(1, 6)
    ]
    perf = json.loads((tmp_path / "perf.json").read_text())
    assert len(perf["denoise_steps_ms"]["stage_1"]) == (5 - len(done) - len(denoised)) * 8
    assert list((tmp_path / "out").glob("*partial*")) == []


def test_a_bad_line_stops_a_batch_before_anything_runs(setup, tiny, tmp_path):
    flags = batch_flags(setup, tiny, tmp_path)
    flags["prompts_file"].write_text(
        '{"prompt": "a"}\n{"prompt": "b", "sead": 3}\n{"prompt": "c", "num_frames": 10}\n'
    )
    process = setup.run("src/generate_ltx23.py", **flags)
    assert process.returncode != 0
    said = process.stdout + process.stderr
    assert (
        "nothing was run" in said
        and "line 2: unknown key 'sead'" in said
        and "line 3: --num-frames 10" in said
    )
    assert "Traceback" not in said and not (tmp_path / "out" / RESULTS).exists()


# --- broken host models --------------------------------------------------------------------------
@pytest.mark.parametrize("model, prefix", [("video decoder", "vae.decoder."), ("vocoder",) * 2])
def test_nan_after_the_latents_fails_the_run_which_keeps_them(
    setup, tiny, tmp_path, monkeypatch, capsys, model, prefix
):
    """The weights of a model on the host are broken after the ranks' were cut, as on a bad disk."""

    def damage(tensors: dict) -> None:
        for name in tensors:
            if name.startswith(prefix) and name.endswith("bias"):
                tensors[name].fill_(float("nan"))

    broken, video = tmp_path / "broken.safetensors", tmp_path / "out" / "video.mp4"
    rewrite(tiny.checkpoint, broken, damage)
    workspace = Workspace(
        tiny.checkpoint, resolve("cpu"), setup.artifacts, TP, "float32", tiny.gemma_root
    )
    job, spec = Job("birds sing", Size(**SIZE)), HostModels._spec

    def run(**how) -> None:
        errors.run(lambda: generate(job, workspace, RunOptions(), Outputs(video=video, **how)))

    with monkeypatch.context() as patch:
        patch.setattr(HostModels, "_spec", lambda *args: spec(*args)._replace(path=broken))
        with pytest.raises(SystemExit) as end:
            run()
    said = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in said
    assert f"error: NaN or Inf in what the {model} returned" in said
    assert "the same command with --resume" in said
    kept = sorted(path.name for path in video.parent.iterdir())
    assert kept == ["video.failure.log", "video.resume.safetensors"]
    run(resume=True)
    assert "the decoding is left" in capsys.readouterr().out and video.is_file()


# --- artifacts of another machine ----------------------------------------------------------------
def test_pulled_artifacts_verify_and_make_the_bits_of_those_that_were_pushed(
    batch, setup, tiny, tmp_path
):
    store, here = str(tmp_path / "store"), tmp_path / "here"
    artifacts_main(["push", store, "--artifacts-dir", str(setup.artifacts)])
    artifacts_main(["pull", store, "--artifacts-dir", str(here)])
    assert sorted(path.name for path in here.iterdir()) == ["graphs", "weights"]
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), here, TP, "float32", tiny.gemma_root)
    assert len(workspace.verify("dit") + workspace.verify("gemma3")) == 2  # against the checkpoint
    line, video = lines(tiny)[0], tmp_path / "out" / "video.mp4"
    generate(
        Job(line["prompt"], Size(**SIZE)),
        workspace,
        RunOptions(neuron_gemma=True),
        Outputs(video=video),
    )
    assert video.read_bytes() == videos(batch)["0001.mp4"]


# --- Python API ----------------------------------------------------------------------------------
def test_latents_follow_from_the_seed_or_the_generator(api):
    call = dict(prompt="birds sing", **SIZE, output_type="latent")
    first, again = api(**call, seed=5), api(**call, seed=5)
    assert first.video_latent.shape == (1, 128, 2, 2, 2) and first.audio_latent.shape == (
        1,
        8,
        9,
        16,
    )
    assert first.frames is first.audio is first.path is None
    drawn = api(**call, generator=torch.Generator().manual_seed(5), seed=99)
    for other in (again, drawn):
        assert torch.equal(first.video_latent, other.video_latent)
        assert torch.equal(first.audio_latent, other.audio_latent)
    assert rel(api(**call, seed=6).video_latent, first.video_latent) > OTHER
    generator = torch.Generator().manual_seed(5)
    # Drawn on from, not started anew.
    kept = [api(**call, generator=generator).video_latent for _ in range(2)]
    assert torch.equal(kept[0], first.video_latent) and not torch.equal(kept[1], first.video_latent)


def test_frames_and_waveform_come_as_arrays(api):
    made = api("birds sing", **SIZE)
    assert made.frames.dtype == np.uint8 and made.frames.shape == (9, 64, 64, 3)
    # 4 * 9 - 3 mel frames.
    assert made.audio.dtype == np.float32 and made.audio.shape == (2, 33 * 480)
    assert (made.frame_rate, made.sample_rate) == (24.0, 48000)
    assert np.isfinite(made.audio).all() and made.frames.std() > 0


def test_the_callback_hears_of_every_step(api):
    heard = []
    api(
        "birds sing",
        **SIZE,
        output_type="latent",
        callback_on_step_end=lambda *said: heard.append(said),
    )
    sigmas = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
    assert [(pipe is api, step, sigma, info) for pipe, step, sigma, info in heard] == [
        (True, step, sigma, {"stage": "stage_1"}) for step, sigma in enumerate(sigmas)
    ]
    count = len(heard)
    api("birds sing", **SIZE, output_type="latent")
    assert len(heard) == count  # not of the next call's


def test_models_stay_loaded_between_calls_and_the_prompt_encoded(api, monkeypatch):
    api("birds sing", **SIZE, output_type="latent")
    loaded, load = [], Ranks.load
    monkeypatch.setattr(
        Ranks,
        "load",
        lambda ranks, weights, *how: loaded.append(weights) or load(ranks, weights, *how),
    )
    before = children()
    api("birds sing", **SIZE, output_type="latent", seed=8)
    assert (loaded, children()) == ([], before)
    # The spy would have seen: this one has to be encoded.
    api("another prompt", **SIZE, output_type="latent")
    assert len(loaded) == 2 and children() == before


class OfAGpu(torch.Generator):
    """Stands for a GPU's: without one, none can be made."""

    device = torch.device("cuda")


MISTAKES = {
    "output_type": (
        dict(output_type="gif"),
        "output_type 'gif' is not known; known: np, latent, mp4",
    ),
    "no path": (dict(output_type="mp4"), "output_path"),
    "size": (dict(height=65), "--height 65 is not a multiple of 32"),
    "guidance": (dict(guidance=DEFAULTS), "--recipe dev"),
    "image": (dict(image="absent.png"), "absent.png: no such file"),
    "image of another type": (dict(image=5), "image=5 is of type int; wanted text or a path or"),
    "images": (dict(image=["a.png"]), "images[0]='a.png' is of type str; wanted ImageCondition"),
    "prompt": (dict(prompt=None), "prompt=None is of type NoneType; wanted text"),
    "seed": (dict(seed=1.5), "seed=1.5 is of type float; wanted a whole number, as in seed=10"),
    "upscale": (dict(upscale="foo"), "--upscale: got 'foo', wanted 'spatial'"),
    "generator": (dict(generator=5), "generator=5 is of type int; wanted Generator or None"),
    "generator's device": (dict(generator=OfAGpu()), "generator is on cuda; wanted one on the CPU"),
    "callback": (dict(callback_on_step_end=5), "callback_on_step_end=5 is of type int; wanted Cal"),
    "output_path": (dict(output_path=5), "output_path=5 is of type int; wanted text or a path or"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_plain_words_and_leave_the_models_loaded(api, mistake):
    wrong, said = MISTAKES[mistake]
    before = children()
    with pytest.raises(UserError) as error:
        api(**{"prompt": "birds sing"} | SIZE | wrong)
    assert said in str(error.value)
    assert children() == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(dtype="float16"), "dtype 'float16' is not known; known: bfloat16, float32"),
        (dict(recipe="slow"), "recipe 'slow' is not known; known: distilled, dev"),
        (dict(compat="1.0"), "compat '1.0' is not known; known: None, ltx-core-1.0.0"),
        (dict(tp_degree="2"), "tp_degree='2' is of type str; wanted a whole number or None"),
    ],
)
def test_a_pipeline_is_opened_with_known_values_only(tiny, wrong, said):
    with pytest.raises(UserError) as error:
        LTXPipeline.from_pretrained(
            checkpoint_path=tiny.checkpoint, gemma_root=tiny.gemma_root, **wrong
        )
    assert said in str(error.value)


def test_numbers_of_numpy_make_the_same_video(api, tmp_path):
    call = dict(prompt="birds sing", output_type="mp4")
    wanted = api(**call, **SIZE, seed=5, output_path=tmp_path / "plain.mp4").path
    numbers = {name: np.int64(value) for name, value in SIZE.items()}
    numbers |= {"seed": np.uint8(5), "frame_rate": np.float32(24)}
    got = api(**call, **numbers, output_path=tmp_path / "numpy.mp4").path
    assert got.read_bytes() == wanted.read_bytes()


def latents_of(api, seed: int, **more) -> list[torch.Tensor]:
    made = api("birds sing", **SIZE, output_type="latent", seed=seed, **more)
    return [made.video_latent, made.audio_latent]


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_two_threads_get_their_own_answers(api):
    seeds = (5, 6, 7)
    wanted = [latents_of(api, seed) for seed in seeds]
    heard = {seed: [] for seed in seeds}

    def call(seed: int) -> list[torch.Tensor]:
        def hear(pipe, step, *_):
            heard[seed].append(step)

        return latents_of(api, seed, callback_on_step_end=hear)

    with ThreadPoolExecutor(len(seeds)) as pool:
        got = list(pool.map(call, seeds))
    assert all(map(equal, got, wanted))
    assert heard == {seed: [*range(8)] for seed in seeds}


def test_a_pipeline_refuses_its_own_callback_and_the_call_goes_on(api):
    refused = []

    def call_again(pipe, *_):
        for again in (lambda: latents_of(pipe, 6), pipe.close):
            with pytest.raises(UserError) as error:
                again()
            refused.append(str(error.value))

    assert equal(latents_of(api, 5, callback_on_step_end=call_again), latents_of(api, 5))
    call, close = refused[:2]
    assert call.startswith("call inside a call of the same pipeline")
    assert close.startswith("close inside a call of the same pipeline")


def test_close_in_another_thread_waits_for_the_call_and_the_next_one_loads_again(api):
    closing, wanted, before = [], latents_of(api, 5), children()

    def close(pipe, step, *_):
        if step == 0:
            closing.append(threading.Thread(target=pipe.close))
            closing[0].start()
        assert closing[0].is_alive()

    assert equal(latents_of(api, 5, callback_on_step_end=close), wanted)
    closing[0].join()
    assert len(before - children()) == TP
    assert equal(latents_of(api, 5), wanted)


def test_a_forked_process_is_told_to_be_spawned_and_leaves_the_ranks_alone(api, capfd):
    """It would wait for ever for ranks that answer its parent."""
    wanted, before = latents_of(api, 5), children()

    def use() -> None:
        with pytest.raises(UserError, match="was forked from process .* Start the process with"):
            latents_of(api, 5)
        api.close()

    assert exit_code(forked(use)) == 0, capfd.readouterr().err
    assert children() == before and equal(latents_of(api, 5), wanted)


def test_an_error_in_a_callback_ends_the_ranks_and_the_next_call_loads_again(setup, tiny):
    before, threads = children(), torch.get_num_threads()

    def stop(*_):
        raise KeyboardInterrupt

    with opened(setup, tiny, neuron_gemma=False) as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe("birds sing", **SIZE, output_type="latent", callback_on_step_end=stop)
        assert children() <= before
        assert pipe("birds sing", **SIZE, output_type="latent").video_latent.isfinite().all()
        assert len(children() - before) == TP
    assert children() <= before
    torch.set_num_threads(threads)


def test_the_readmes_example_runs(scripts, tiny, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    setup = scripts(tiny, 4, "bfloat16")
    setup.prepare(**SIZE)
    for name, target in (
        ("gemma", tiny.gemma_root),
        ("artifacts", setup.artifacts),
        (tiny.checkpoint.name, tiny.checkpoint),
    ):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "example.py").write_text(code)  # with no guard for the main module
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip().splitlines()[-1] == "(9, 64, 64, 3) (2, 15840) 48000"
