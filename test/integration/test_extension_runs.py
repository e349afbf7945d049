"""A tiny video made longer by three windows: what is kept is kept bit for bit, the sound has no
seam, and an interrupted or killed run goes on to the same bits.

Ranks sum in another order than one does, so that bits are those of a number of ranks: with four of
them latents are one rank's within the rounding of fp32, and what is kept is the same to the bit.
"""

import argparse
import copy
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import av
import pytest
import torch
from conftest import ROOT, words
from helpers import (
    ended,
    made_film,
    one_thread,  # noqa: F401
    randn,
    read_video,
    rel,
    started,
    tone,
    unhurried,
)
from safetensors.torch import load_file

from ltx_neuron import batch, flags
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.generate import run_identity
from ltx_neuron.host import conditions
from ltx_neuron.host.media import Sound, first_frames, pixels_of, read_sound
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.progress import SUFFIX, restore_state, save_state
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.sampling.extension import joined
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.tiny.weights import QUIET
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

FRAMES, WINDOW, RATE = 30, 25, 24.0
SOUND = 5e-5  # on ranks, from the host's: random layers answer a rounding with ten of it
FP32 = 1e-5  # sums in another order, over ranks and over many steps
FRAME_COUNTS = 1  # frames are cut to whole numbers


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    still = randn(1, 64, 64, 3) * 30 + 128
    pictures = [(still.roll(2 * n, 2)).clamp(0, 255).byte() for n in range(FRAMES)]
    write_video(path, pictures, RATE, lambda: tone(48000, FRAMES / RATE) * 0.5, 48000)
    return path


def longer(film, seconds: float, seed: int = 7) -> Job:
    retake = Retake(film, extend=seconds, source_frames=FRAMES)
    return Job("waves", Size(64, 64, WINDOW, RATE), seed, retake=retake)


@pytest.fixture(scope="module")
def prepared(tiny, film, artifacts):
    """prepared(tp): a workspace with weights and the windows' graphs."""

    @cache
    def prepared(tp: int = 1) -> Workspace:
        settings = resolve("cpu"), artifacts, tp, "float32", tiny.gemma_root
        workspace = Workspace(tiny.checkpoint, *settings)
        workspace.shard("dit", {()})
        workspace.compile_dit(longer(film, 1.0).buckets_to_compile)
        return workspace

    return prepared


@pytest.fixture(scope="module")
def engine(prepared):
    with Engine(prepared(), Recorder(), RunOptions()) as engine:
        engine.progress = False
        yield engine


def give_contexts(engine: Engine, jobs: list[Job]) -> None:
    """Contexts for the jobs' prompts, in the place of an encoder's."""
    config = engine.workspace.transformer
    for prompts in {job.prompts for job in jobs} - engine._contexts.keys():
        engine._contexts[prompts] = [
            Contexts(
                *(
                    randn(1, 1024, stream.inner, seed=len(p))
                    for stream in (config.video, config.audio)
                ),
                torch.ones(1, 1024),
                None,
            )
            for p in prompts
        ]


def made(engine, job, **options):
    engine.on_stage_end = options.pop("on_stage_end", None)
    give_contexts(engine, [job])
    (result,) = engine.run([job], keep=True, **options)
    return result


@pytest.fixture(scope="module")
def after(engine, film):
    return made(engine, longer(film, 1.0))


def source(film) -> torch.Tensor:
    return torch.stack([torch.from_numpy(frame) for frame in first_frames(film, "")])


def test_the_files_frames_are_kept_bit_for_bit_and_new_ones_follow(film, after):
    assert len(longer(film, 1.0).stages) == 3
    assert after.frames.shape == (FRAMES + 24, 64, 64, 3)
    assert torch.equal(after.frames[:FRAMES], source(film))
    assert not torch.equal(after.frames[FRAMES], after.frames[FRAMES - 1])
    assert after.waveform.shape[1] == pytest.approx(54 / RATE * after.sample_rate, rel=0.02)


def test_below_0_they_are_made_before_the_first_one(engine, film):
    result = made(engine, longer(film, -17 / RATE))
    assert len(longer(film, -17 / RATE).stages) == 3
    assert torch.equal(result.frames[17:], source(film)) and len(result.frames) == 17 + FRAMES
    extension = result.job.extension
    audio = result.tensors["s1_audio"][:, :, extension.known_audio]
    assert torch.equal(audio, result.tensors["audio_latent"][:, :, extension.known_audio])


def test_held_latents_are_the_known_ones_and_noise_is_drawn_for_each_window(film, after):
    tensors = after.tensors
    for name, known in (("video", "known_video"), ("audio", "known_audio")):
        held = getattr(after.job.extension, known)
        joined = tensors[f"s1_{name}"]
        assert torch.equal(joined[:, :, held], tensors[f"{name}_latent"][:, :, held])
        assert tensors[f"{name}_latent"][:, :, held].abs().sum() > 0
    new = [tensors[f"window_{n}_video"][:, :, -1] for n in (1, 2, 3)]
    assert torch.equal(tensors["s1_video"][:, :, -3:], torch.stack(new, 2))
    assert not torch.equal(new[0], new[1]) and not torch.equal(new[1], new[2])
    for n in (2, 3):  # what it holds is what the window before it made
        before, window = tensors[f"window_{n - 1}_video"], tensors[f"window_{n}_video"]
        assert torch.equal(window[:, :, :-1], before[:, :, 1:])


def joins(job: Job) -> list[int]:
    """The audio latents before which a window's new ones begin."""
    return [window.audio + window.new_audio[0] for window in job.extension.windows]


@pytest.fixture(scope="module")
def whole(engine, film) -> Job:
    """The same video in one window."""
    job = longer(film, 1.0)
    job = replace(job, size=replace(job.size, num_frames=49))
    assert len(job.stages) == 1
    engine.workspace.compile_dit(job.buckets_to_compile)
    return job


@pytest.fixture(scope="module")
def plain_vocoder(engine):
    """A vocoder that does not saturate, as loud as one that was trained: without biases and on
    small numbers it is a filter, the same everywhere."""
    vocoder = copy.deepcopy(engine.host.vocoder)
    parameters = {
        name: parameter
        for graph in vocoder.graphs
        for name, parameter in graph.module.named_parameters()
    }
    for name, parameter in parameters.items():
        if name.startswith("vocoder.") and name.endswith("bias"):
            parameter.data.zero_()
    parameters["vocoder.conv_pre.weight"].data *= 0.01
    parameters["vocoder.conv_post.weight"].data /= QUIET
    parameters["bwe_generator.conv_post.weight"].data.zero_()
    return vocoder


def test_sound_that_windows_are_cut_from_is_heard_as_if_there_were_none(
    engine, film, after, whole, plain_vocoder, monkeypatch
):
    """A clip that has no windows, cut into them as if each had made its part, comes out of them as
    it went in: 0 off its one decode, at the seams as elsewhere. Decoded window by window it is
    off by 150 % there (measured)."""
    extension, clip = after.job.extension, made(engine, whole).tensors["s1_audio"]
    monkeypatch.setitem(vars(engine.host), "vocoder", plain_vocoder)
    known, length = torch.zeros_like(clip), after.tensors["window_1_audio"].shape[2]
    known[:, :, extension.known_audio] = clip[:, :, extension.known_audio]
    tensors = {"video_latent": after.tensors["video_latent"], "audio_latent": known}
    for window in extension.windows:
        tensors[f"{window.key}_video"] = after.tensors[f"{window.key}_video"]
        tensors[f"{window.key}_audio"] = clip[:, :, window.audio : window.audio + length]
    _, audio = joined(extension, tensors)
    heard, wanted = engine.host.decode_audio(audio), engine.host.decode_audio(clip)
    assert torch.equal(heard, wanted)
    assert wanted.std() > 0.1 and (wanted.abs() == 1).float().mean() < 0.001
    bounds = [0, *joins(after.job), clip.shape[2]]
    apart = [clip[:, :, a:b].contiguous() for a, b in zip(bounds, bounds[1:], strict=False)]
    apart = torch.cat([engine.host.decode_audio(part) for part in apart], dim=1)
    near = joins(after.job)[1] * (after.sample_rate // 25)
    cut = slice(near - after.sample_rate // 25, near)
    print(f"decoded window by window: {rel(apart[:, cut], wanted[:, cut]):.2f}")
    assert rel(apart[:, cut], wanted[:, cut]) > 0.1


def test_the_sound_has_no_seam_above_the_vocoders_own(engine, after, plain_vocoder, monkeypatch):
    """It is decoded as a whole, by the vocoder that is loaded. By one that does not saturate, its
    spectrum changes by 0.57 of the largest change elsewhere where windows join (measured); in one
    window by 0.41 at the same places. What a random model makes changes as much as that."""
    audio, rate, waveform = after.tensors["s1_audio"], after.sample_rate, after.waveform
    assert torch.equal(waveform, engine.host.decode_audio(audio)[:, : waveform.shape[1]])
    monkeypatch.setitem(vars(engine.host), "vocoder", plain_vocoder)
    ratio = seam(engine.host.decode_audio(audio), joins(after.job), rate)
    print(f"spectral change at joins: {ratio:.2f} of the largest elsewhere")
    assert ratio < 1


def seam(waveform: torch.Tensor, joins: list[int], rate: int) -> float:
    """The largest change of the spectrum from 10 ms to the next within 20 ms of a join, against
    the largest elsewhere."""
    hop = rate // 100
    window = torch.hann_window(2 * hop)
    spectrum = torch.stft(waveform, 2 * hop, hop, window=window, return_complex=True).abs()
    change = (spectrum + 1e-3 * spectrum.max()).log().diff(dim=2).abs().mean(dim=(0, 1))
    near = torch.zeros(len(change), dtype=torch.bool)
    for join in joins:  # a latent is of 4 hops
        near[4 * join - 5 : 4 * join + 1] = True
    return (change[near].max() / change[~near].max()).item()


def test_the_known_latents_are_of_the_frames_and_the_sound_next_to_the_new_ones(engine, film):
    tail = pixels_of(list(first_frames(film, ""))[-17:], 64, 64)
    known = conditions.encode(engine.host, longer(film, 1.0))
    assert torch.equal(known["video_latent"][:, :, :3], engine.host.encode_video(tail))
    assert known["video_latent"].shape[2] == 3 + 3 and not known["video_latent"][:, :, 3:].any()
    sound = read_sound(film, "")
    _, latent = engine.host.encode_audio(sound._replace(samples=sound.samples[:, :60000]))
    assert torch.equal(known["audio_latent"][:, :, :31], latent[:, :, :31])
    assert known["audio_latent"].shape[2] == 56 and not known["audio_latent"][:, :, 32:].any()


def test_a_film_without_sound_goes_on_from_silence(engine, film, tmp_path, capsys):
    path = tmp_path / "silent.mp4"
    with av.open(str(film)) as source, av.open(str(path), "w") as silent:
        copied = silent.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = copied
                silent.mux(packet)
    known = conditions.encode(engine.host, longer(path, -1.0))["audio_latent"]
    assert "has no sound: what is added goes on from silence" in capsys.readouterr().out
    _, silence = engine.host.encode_audio(Sound(torch.zeros(2, 48000), 16000))
    assert torch.allclose(known[:, :, 30:50], silence[:, :, 30:50], atol=1e-5)


@pytest.mark.parametrize("windows", [1, 3])
def test_an_interrupted_run_goes_on_to_the_same_bits(engine, film, after, tmp_path, windows):
    job, path = longer(film, 1.0), tmp_path / "state.safetensors"
    identity = run_identity(job, engine.workspace, engine.options)
    ended = []

    def stop(run):
        ended.append(run)
        save_state(path, run, identity)
        if len(ended) == windows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(engine, job, on_stage_end=stop)
    run = restore_state(path, job, identity, engine.workspace.dtype)
    assert [stage.window.number for stage in run.stages_left] == [1, 2, 3][windows:]
    result = made(engine, job, resume=lambda job: run)
    assert torch.equal(result.frames, after.frames)
    assert torch.equal(result.waveform, after.waveform)
    other = longer(film, 1.0, seed=8)
    with pytest.raises(UserError, match="seed"):
        restore_state(path, other, run_identity(other, engine.workspace, engine.options), run)


def test_it_is_written_as_it_is_decoded(engine, film, tmp_path):
    path = tmp_path / "longer.mp4"
    made(engine, longer(film, 1.0), write=lambda clip: clip.write_mp4(path))
    assert read_video(path)["video_seconds"] == (FRAMES + 24) / RATE


def test_a_file_that_has_fewer_frames_than_it_says_is_refused(film, engine):
    job = longer(film, 1.0)
    job = replace(job, retake=replace(job.retake, source_frames=FRAMES + 1))
    with pytest.raises(UserError, match="got 30 frames, wanted 31"):
        conditions.check(job)


# --- the dev recipe, --neuron-vae, a batch --------------------------------------------------------


def test_the_dev_recipe_guides_every_window(engine, film, tmp_path):
    guidance = Guidance(StreamGuidance(cfg_scale=2.5), StreamGuidance(cfg_scale=4.0))
    job = replace(longer(film, 1.0), recipe="dev", guidance=guidance, num_inference_steps=2)
    engine.workspace.compile_dit(job.buckets_to_compile)
    path, identity = tmp_path / "state", run_identity(job, engine.workspace, engine.options)
    states = iter([path, tmp_path / "second", tmp_path / "third"])
    result = made(engine, job, on_stage_end=lambda run: save_state(next(states), run, identity))
    assert torch.equal(result.frames[:FRAMES], source(film)) and len(result.frames) == 54
    run = restore_state(path, job, identity, torch.float32)
    assert run.left == "windows 2 to 3 of 3 are left" and len(run.contexts) == 2
    resumed = made(engine, job, resume=lambda job: run)
    assert torch.equal(resumed.frames, result.frames)
    assert torch.equal(resumed.waveform, result.waveform)
    plain = made(engine, replace(job, guidance=Guidance(StreamGuidance(), StreamGuidance())))
    for stage in job.stages:
        for stream in ("video", "audio"):
            new = slice(*getattr(stage.window, f"new_{stream}"))
            name = f"{stage.key}_{stream}"
            assert rel(result.tensors[name][:, :, new], plain.tensors[name][:, :, new]) > 0.001


def test_new_frames_decoded_on_the_ranks_are_the_host_decoders(engine, film, after):
    workspace, options = engine.workspace, replace(engine.options, neuron_vae=True)
    workspace.shard("vae")
    workspace.compile_vae(after.job.latent_shape)
    workspace.compile_sound(after.job.extension.audio_latents)
    with Engine(workspace, Recorder(), options) as on_ranks:
        on_ranks.progress = False
        result = made(on_ranks, after.job)
    assert torch.equal(result.tensors["s1_video"], after.tensors["s1_video"])
    assert torch.equal(result.frames[:FRAMES], source(film))
    assert rel(result.waveform, after.waveform) < SOUND
    assert result.frames.shape == after.frames.shape
    assert (result.frames.int() - after.frames.int()).abs().max() <= FRAME_COUNTS


def test_lines_among_others_equal_their_single_runs(engine, film, tmp_path):
    """Videos made longer at either end, a retake that shares their graph, and text to video."""
    short = str(made_film(tmp_path / "short.mp4", WINDOW, 64, 64))
    extended = dict(prompt="waves", video_path=str(film), num_frames=WINDOW)
    said = [
        extended | dict(extend=1, seed=7),
        dict(prompt="rain on a roof", height=64, width=64, num_frames=9, seed=8),
        dict(prompt="a retake", video_path=short, start_time=0.2, end_time=0.6, seed=9),
        extended | dict(extend=-17 / RATE, seed=10),
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in said))
    parser = argparse.ArgumentParser()
    flags.add_job(parser)
    args = parser.parse_args([])
    args.recipe = "distilled"
    lines = batch.read_lines(prompts, flags.job_of_line(args), {})
    jobs = [line.job for line in lines]
    assert jobs[0] == replace(longer(film, 1.0), retake=replace(jobs[0].retake)) != jobs[3]
    for job in jobs:
        engine.workspace.compile_dit(job.buckets)
    give_contexts(engine, jobs)

    def write(clip, path: Path) -> None:
        clip.write_mp4(path)

    single = tmp_path / "single.mp4"
    wanted = []
    for job in jobs:
        made(engine, job, write=lambda clip: clip.write_mp4(single))
        wanted.append(single.read_bytes())
    folder = tmp_path / "out"
    entries = batch.run(
        lines,
        engine,
        folder,
        write,
        lambda job: run_identity(job, engine.workspace, engine.options),
    )
    assert [entry["status"] for entry in entries] == ["done"] * 4
    assert [(folder / line.file).read_bytes() for line in lines] == wanted
    assert len(set(wanted)) == 4


# --- by the scripts, killed, on one rank and on four ----------------------------------------------


@pytest.fixture(scope="module")
def command(tiny, film, prepared) -> Callable:
    """command(tp, folder, ...): generate_ltx23.py that makes the film longer by three windows."""

    def command(tp: int, folder: Path, *more: str) -> list[str]:
        given = {
            "checkpoint_path": tiny.checkpoint,
            "gemma_root": tiny.gemma_root,
            "artifacts_dir": prepared(tp).artifacts,
            "tp_degree": tp,
            "dtype": "float32",
            "profile": "cpu",
            "prompt": "waves",
            "seed": 7,
            "video_path": film,
            "extend": 1,
            "num_frames": WINDOW,
            "output_path": folder / "longer.mp4",
            "save_tensors": folder / "longer.safetensors",
        }
        script = ROOT / "src/generate_ltx23.py"
        return [*map(str, (sys.executable, script, *words(**given), *more))]

    return command


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory) -> Callable:
    """undisturbed(tp): the folder of a run that nobody interfered with."""

    @cache
    def undisturbed(tp: int) -> Path:
        folder = tmp_path_factory.mktemp(f"tp{tp}")
        run(command(tp, folder))
        return folder

    return undisturbed


def test_killed_in_its_second_window_it_is_resumed_to_the_same_bits(command, undisturbed, tmp_path):
    tp = 4
    process, ranks = started(unhurried(command(tp, tmp_path), "window 2"), r"window 2 of 3:\s+38%")
    assert len(ranks) == tp
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and ended(ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["longer" + SUFFIX]
    resumed = run(command(tp, tmp_path, "--resume"))
    assert "windows 2 to 3 of 3 are left" in resumed.stdout and "window 1" not in resumed.stderr
    wanted = undisturbed(tp)
    assert (tmp_path / "longer.mp4").read_bytes() == (wanted / "longer.mp4").read_bytes()
    got, tensors = (load_file(path / "longer.safetensors") for path in (tmp_path, wanted))
    assert {"s1_video", "s1_audio", "window_3_video", "frames", "waveform"} <= got.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in got)
    assert not (tmp_path / ("longer" + SUFFIX)).exists()


def test_four_ranks_keep_the_same_bits_and_make_the_same_within_rounding(undisturbed, film):
    one, four = (load_file(undisturbed(tp) / "longer.safetensors") for tp in (1, 4))
    known = longer(film, 1.0).extension
    for stream, kept in (("video", known.known_video), ("audio", known.known_audio)):
        name = f"s1_{stream}"
        assert torch.equal(one[name][:, :, kept], four[name][:, :, kept])
        off = rel(four[name], one[name])
        print(f"{name}: {off:.1e}")
        assert 0 < off <= FP32
    for made in (one, four):
        assert torch.equal(made["frames"][:FRAMES], source(film))
    assert (one["frames"].int() - four["frames"].int()).abs().max() <= FRAME_COUNTS
