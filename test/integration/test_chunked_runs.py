"""A tiny clip of two windows: what its windows share, and how it goes on when it was killed. Its memory, and a clip of
one window: test/slow/test_chunked_runs.py."""

import chunked_clips
import pytest
import torch
from chunked_clips import by_ltx_core, clip, made
from engines import drawn_contexts
from helpers import one_thread, rel  # noqa: F401

from ltx_neuron.denoise import StageRun
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.resume import restore_state, save_state, state_files
from ltx_neuron.host.models import HostModels

engine_of = chunked_clips.engine_of  # fixture
FP32 = 1e-6  # the same model by other sums, over eleven steps of two windows
PROMPTS = "waves", "a storm"
PHASES = ("window 2 of 2, stage 1", "upsample", "window 2 of 2, stage 2", "decode")


@pytest.fixture(scope="module")
def two(engine_of):
    return made(engine_of, clip(prompt="", prompts=PROMPTS))


def test_two_windows_are_ltx_cores_with_their_prompts_and_one_generator(two, tiny, engine_of):
    config = engine_of(two.job).workspace.transformer
    wanted = by_ltx_core(tiny, two.job, lambda prompt: drawn_contexts(config, prompt))
    for number, stage, stream in [(n, s, x) for n in (0, 1) for s in (1, 2) for x in ("video", "audio")]:
        name = f"w{number}_s{stage}_{stream}"
        assert rel(two.tensors[name], wanted[name]) < FP32, name
    held = two.tensors["w0_s2_video"][:, :, -3:]
    assert torch.equal(two.tensors["w1_s2_video"][:, :, :3], held)
    assert two.frames.shape == (33, 64, 64, 3)


@pytest.fixture(scope="module")
def undisturbed(engine_of, two, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("undisturbed") / "clip.mp4"
    made(engine_of, two.job, write=lambda clip: clip.write(path))
    return path.read_bytes()


class Killed(Exception):
    pass


@pytest.mark.parametrize("phase", PHASES)
def test_it_goes_on_from_every_phase_of_a_window_to_the_same_bytes(
    engine_of, two, undisturbed, tmp_path, monkeypatch, phase
):
    engine, job, path = engine_of(two.job), two.job, tmp_path / "clip.resume.safetensors"
    identity = run_identity(job, engine.workspace, engine.options)
    write = {"write": lambda clip: clip.write(tmp_path / "clip.mp4")}
    calls = {"upsample": 0, "decode": 0}

    def killing(owner, name: str, kind: str):
        method = getattr(owner, name)

        def call(*args, **options):
            calls[kind] = calls.get(kind, 0) + 1
            if kind == phase and calls[kind] == 2 or kind == "step" and args[0].stage.title == phase:
                raise Killed
            return method(*args, **options)

        monkeypatch.setattr(owner, name, call)

    with pytest.raises(Killed):
        killing(StageRun, "step", "step")
        killing(HostModels, "upsample", "upsample")
        killing(HostModels, "decode_video", "decode")
        made(engine_of, job, on_stage_end=lambda run: save_state(path, run, identity), **write)
    monkeypatch.undo()
    assert not (tmp_path / "clip.mp4").exists()
    state = {"resume": lambda job: restore_state(path, job, identity, torch.float32)}
    made(engine_of, job, **state, **write)
    assert (tmp_path / "clip.mp4").read_bytes() == undisturbed
    assert len(state_files(path)) == 2 + (phase == "decode")
