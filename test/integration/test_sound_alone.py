"""Sound alone on one rank: in a batch with a video, resumed, and by the Python API."""

import wave

import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import one_thread  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.artifacts import build
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance

SOUND = StreamGuidance(cfg_scale=7.0, stg_scale=1.0, stg_blocks=(0,), rescale_scale=0.7)
GUIDANCE = Guidance(StreamGuidance(), SOUND)
VIDEO = make_job("rain", Size(64, 64, 9), 3, 2, recipe="dev", guidance=GUIDANCE)
ALONE = replace(VIDEO, size=Size(0, 0, 30, 30.0), sound_only=True)


@pytest.fixture(scope="module")
def engine_of(tiny, artifacts):
    """engine_of(): the engine, as if it were a new one."""
    workspace = opened_workspace(tiny, artifacts, 1)  # a block per graph is compiled sooner
    build.make(workspace, workspace.weight_sets("dit"))
    with opened_engine(workspace, tiny) as engine:
        for job in (VIDEO, ALONE):
            build.make(workspace, workspace.dit_graphs(job.buckets))
            give_contexts(engine, job, lambda prompt: drawn(workspace, len(prompt)))

        def anew():
            engine.close()
            engine.recorder = engine.residency.recorder = Recorder()
            engine.on_stage_end = None
            return engine

        yield anew


@pytest.fixture(scope="module")
def alone(engine_of):
    (result,) = engine_of().run([ALONE], keep=True)
    return result


def test_a_line_of_it_beside_a_video_is_its_single_run_bit_for_bit(engine_of, alone):
    (video,) = engine_of().run([VIDEO], decode=False)
    batch = engine_of()
    for jobs in ([ALONE], [VIDEO, ALONE], [ALONE, VIDEO]):  # a part of the weights, then all
        for result in batch.run(jobs, keep=True, decode=False):
            single = alone if result.job.sound_only else video
            names = {name for name in single.tensors if name.startswith("s1_")}
            assert names == {name for name in result.tensors if name.startswith("s1_")}
            assert all(torch.equal(result.tensors[name], single.tensors[name]) for name in names)
    assert "s1_video" not in alone.tensors and "frames" not in alone.tensors


def test_a_resumed_run_decodes_the_same_wav(engine_of, alone, tmp_path):
    engine, state = engine_of(), tmp_path / "out.resume.safetensors"
    identity = run_identity(ALONE, engine.workspace, engine.options)
    engine.on_stage_end = lambda run: save_state(state, run, identity)
    first, second = tmp_path / "first.wav", tmp_path / "second.wav"
    list(engine.run([ALONE], write=lambda clip: clip.write(first)))
    run = restore_state(state, ALONE, identity, torch.float32)
    assert run.left == "the decoding is left"
    list(engine_of().run([ALONE], resume=lambda job: run, write=lambda clip: clip.write(second)))
    assert first.read_bytes() == second.read_bytes()
    with wave.open(str(first)) as file:
        assert file.getnframes() == alone.waveform.shape[1]
        assert file.getnframes() / file.getframerate() == pytest.approx(1.0, abs=0.05)
    names = [phase["name"] for phase in engine.recorder.report({}, "cpu", 1, {}, {})["phases"]]
    assert names == ["decode_audio"]


def test_the_python_api_gives_its_waveform_and_writes_it(engine_of, alone, tmp_path):
    pipe = LTXPipeline(engine_of(), "dev")
    call = dict(num_frames=30, frame_rate=30.0, seed=3, num_inference_steps=2, guidance=GUIDANCE, sound_only=True)
    output, latent = pipe("rain", **call), pipe("rain", output_type="latent", **call)
    assert output.frames is latent.video_latent is None
    assert torch.equal(output.audio[0], alone.waveform)
    assert torch.equal(latent.audio_latent, alone.tensors["s1_audio"])
    assert pipe("rain", output_type="wav", output_path=tmp_path / "out.wav", **call).path.is_file()
    with pytest.raises(UserError, match="output_type: unknown 'mp4'; known: pil, np, pt, latent, wav"):
        pipe("rain", output_type="mp4", output_path=tmp_path / "out.mp4", **call)
