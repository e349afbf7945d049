"""A tiny video made longer by three windows: guided, decoded on the ranks, and interrupted or
killed, also all of it together, from where it goes on to the same bits.

Ranks sum in another order than one does, so that bits are those of a number of ranks: with more of
them latents are one rank's within the rounding of fp32, and what is kept is the same to the bit.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import longer_film
import pytest
import torch
from conftest import ROOT, words
from engines import opened_engine
from helpers import ended, one_thread, read_video, rel, started, unhurried  # noqa: F401
from jobs import replace
from longer_film import FRAMES, WINDOW, longer, made, source
from safetensors.torch import load_file

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.resume import SUFFIX, restore_state, save_state
from ltx_neuron.job import Job
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance

film, prepared, engine = longer_film.film, longer_film.prepared, longer_film.engine  # fixtures
after = longer_film.after

TP = 2
SOUND = 5e-5  # on ranks, from the host's: random layers answer a rounding with ten of it
FP32 = 1e-5  # sums in another order, over ranks and over many steps
STEPS = 4
# only its scales are on: the others' defaults name a block that the tiny model has not
GUIDANCE = (
    ("video_cfg=2.5", "audio_cfg=4"),
    ("video_stg=0", "audio_stg=0", "a2v=1", "v2a=1", "video_rescale=0", "audio_rescale=0"),
)
FRAME_COUNTS = 1  # frames are cut to whole numbers


def test_a_run_interrupted_before_it_is_decoded_goes_on_to_the_same_bits(engine, film, after, tmp_path):
    job, path = longer(film, 1.0), tmp_path / "state.safetensors"
    identity = run_identity(job, engine.workspace, engine.options)

    def stop(run):
        save_state(path, run, identity)
        if not run.stages_left:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(engine, job, on_stage_end=stop)
    run = restore_state(path, job, identity, engine.workspace.dtype)
    assert run.stages_left == []
    result = made(engine, job, resume=lambda job: run)
    assert torch.equal(result.frames, after.frames)
    assert torch.equal(result.waveform, after.waveform)


# --- the dev recipe, --neuron-vae -----------------------------------------------------------------


def guided(film, steps: int) -> Job:
    guidance = Guidance(StreamGuidance(cfg_scale=2.5), StreamGuidance(cfg_scale=4.0))
    return replace(longer(film, 1.0), recipe="dev", guidance=guidance, num_inference_steps=steps)


def test_the_dev_recipe_guides_every_window(engine, film, tmp_path):
    job = guided(film, steps=2)
    build.make(engine.workspace, engine.workspace.dit_graphs(job.buckets_to_compile))
    path, identity = tmp_path / "state", run_identity(job, engine.workspace, engine.options)
    states = iter([path, tmp_path / "second", tmp_path / "third"])
    result = made(engine, job, on_stage_end=lambda run: save_state(next(states), run, identity))
    assert torch.equal(result.frames[:FRAMES], source(film)) and len(result.frames) == 54
    run = restore_state(path, job, identity, torch.float32)
    assert run.left == "windows 2 to 3 of 3 are left" and len(run.contexts) == 2
    resumed = made(engine, job, resume=lambda job: run)
    assert torch.equal(resumed.frames, result.frames)
    assert torch.equal(resumed.waveform, result.waveform)


def compile_decoders(workspace: Workspace, job: Job) -> None:
    """Of pictures and of sound, which the ranks decode then."""
    assert job.extension
    workspace.profile = replace(workspace.profile, sound_on_ranks=True)
    build.make(workspace, workspace.weight_sets("vae"))
    build.make(workspace, workspace.decoder_graphs(job.latent_shape))
    build.make(workspace, workspace.sound_graphs(job.extension.audio_latents, job.size))


def test_new_frames_decoded_on_the_ranks_are_the_host_decoders(tiny, engine, film, after):
    compile_decoders(engine.workspace, after.job)
    with opened_engine(engine.workspace, tiny, neuron_vae=True) as on_ranks:
        result = made(on_ranks, after.job)
    assert torch.equal(result.tensors["s1_video"], after.tensors["s1_video"])
    assert torch.equal(result.frames[:FRAMES], source(film))
    assert rel(result.waveform, after.waveform) < SOUND
    assert result.frames.shape == after.frames.shape
    assert (result.frames.int() - after.frames.int()).abs().max() <= FRAME_COUNTS


# --- by the script, killed, and on more ranks -----------------------------------------------------


@pytest.fixture(scope="module")
def encoded(prepared, tiny, film) -> Callable:
    """encoded(tp): what an engine makes of the film and a prompt that is encoded, guided and
    decoded on the ranks."""

    @cache
    def encoded(tp: int) -> dict[str, torch.Tensor]:
        job, workspace = guided(film, STEPS), prepared(tp)
        build.make(workspace, workspace.dit_graphs(job.buckets_to_compile))
        compile_decoders(workspace, job)
        with opened_engine(workspace, tiny, neuron_vae=True) as engine:
            (result,) = engine.run([job])
        return result.tensors

    return encoded


@pytest.fixture(scope="module")
def command(tiny, film, prepared) -> Callable:
    """command(folder, ...): generate_ltx23.py that makes the film longer by three windows."""

    def command(folder: Path, *more: str) -> list[str]:
        given = {
            "checkpoint_path": tiny.checkpoint,
            "gemma_root": tiny.gemma_root,
            "artifacts_dir": prepared(TP).artifacts,
            "tp_degree": TP,
            "dtype": "float32",
            "profile": "cpu",
            "profile_set": "blocks_per_graph=1",
            "prompt": "waves",
            "seed": 7,
            "video_path": film,
            "extend": 1,
            "num_frames": WINDOW,
            "recipe": "dev",
            "num_inference_steps": STEPS,
            "guidance": GUIDANCE,
            "neuron_vae": True,
            "output_path": folder / "longer.mp4",
            "save_tensors": folder / "longer.safetensors",
        }
        script, sound = ROOT / "src/generate_ltx23.py", ("--profile-set", "sound_on_ranks=true")
        return [*map(str, (sys.executable, script, *words(**given), *sound, *more))]

    return command


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_killed_in_its_second_window_it_is_resumed_to_the_same_bits(command, encoded, tmp_path):
    encoded(TP)  # compiles
    process, ranks = started(unhurried(command(tmp_path), "window 2"), r"window 2 of 3:\s+50%")
    assert len(ranks) == TP
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and ended(ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["longer" + SUFFIX]
    resumed = run(command(tmp_path, "--resume"))
    assert "windows 2 to 3 of 3 are left" in resumed.stdout and "window 1" not in resumed.stderr
    got, wanted = load_file(tmp_path / "longer.safetensors"), encoded(TP)
    assert {"s1_video", "s1_audio", "window_3_video", "frames", "waveform"} <= got.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in got)
    assert read_video(tmp_path / "longer.mp4")["frame_count"] == FRAMES + 24
    assert not (tmp_path / ("longer" + SUFFIX)).exists()


def test_more_ranks_keep_the_same_bits_and_make_the_same_within_rounding(encoded, film):
    one, more = encoded(1), encoded(TP)
    known = longer(film, 1.0).extension
    for stream, kept in (("video", known.known_video), ("audio", known.known_audio)):
        name = f"s1_{stream}"
        assert torch.equal(one[name][:, :, kept], more[name][:, :, kept])
        off = rel(more[name], one[name])
        print(f"{name}: {off:.1e}")
        assert 0 < off <= FP32
    for tensors in (one, more):
        assert torch.equal(tensors["frames"][:FRAMES], source(film))
    assert (one["frames"].int() - more["frames"].int()).abs().max() <= FRAME_COUNTS
