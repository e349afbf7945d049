"""Sound alone: its graphs are the audio half of the model, and its jobs have no picture."""

import wave
from types import SimpleNamespace

import pytest
import torch
from helpers import Held, call, generator, ltx_model, made_config, randn, rel, save_weights, step_inputs, step_number
from jobs import replace
from oracle import later_semantics
from steps import AUDIO_TOKENS, EQUAL, FPS, SHAPE, SHOWS, ltx_state
from tiny.config import TinySizes

from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.batch import Line
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.denoise.start import starting_states
from ltx_neuron.errors import UserError
from ltx_neuron.host.video import check_output_path, write_wav
from ltx_neuron.job import Job, Size
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program, may_divide
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.report.table import table
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.latent_state import video_state
from ltx_neuron.sampling.latents import audio_positions
from ltx_neuron.sampling.schedules import ltx2_schedule
from ltx_neuron.service.api_error import ApiError
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.sizes import _records
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.rankfiles import load_rank_file, rank_file
from ltx_neuron.weights.sharding import SOUND_ALONE

STEPS, STEP = 3, 1
ALONE = Bucket(0, AUDIO_TOKENS, 1, STEPS, guided=True)
JOINT = Bucket(SHAPE[0] * SHAPE[1] * SHAPE[2], AUDIO_TOKENS, 1, STEPS, guided=True)


def job(**given) -> Job:
    return Job(prompt="rain", sound_only=True, **{"recipe": "dev", **given})


# --- graphs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A random model of two blocks in ltx-core's form, its config and its weights."""
    content, config = made_config(TinySizes(layers=2))
    whole = ltx_model(content)
    return whole, config, whole.state_dict()


def program_of(model, bucket: Bucket):
    return dit_program(model[1], bucket, 1, SingleRank(), torch.float32, 0)


def predicted(model, bucket: Bucket, keep: torch.Tensor, video_seed: int = 1, stream: str = "audio") -> torch.Tensor:
    """The clean sound, or the video, that a pass predicts."""
    _, config, weights = model
    state = video_state(torch.zeros(1, 128, *SHAPE), FPS, [])
    rows, choice = state.timestep_choice(1, torch.float32)
    held = Held(state.denoise_mask, state.clean_latent, rows, choice)
    values = step_inputs(config, weights, ltx2_schedule(STEPS), state.positions, AUDIO_TOKENS, held)
    values |= step_number(STEP) | {"keep": keep, "enabled_steps": torch.ones(STEPS, 2)}
    values["video_latent"] = randn(*values["video_latent"].shape, seed=video_seed)
    return call(program_of(model, bucket), "step", 0, weights, values)[f"{stream}_x0"]


def test_it_is_the_sound_of_a_video_whose_streams_do_not_attend_to_each_other(model):
    alone, isolated = torch.ones(2, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2)
    sound = predicted(model, ALONE, alone)
    assert torch.equal(sound, predicted(model, JOINT, isolated))
    assert torch.equal(sound, predicted(model, JOINT, isolated, video_seed=9))
    assert rel(sound, predicted(model, JOINT, alone)) > SHOWS


def test_a_video_alone_is_that_of_a_video_whose_streams_do_not_attend_to_each_other(model):
    alone, isolated = torch.ones(2, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2)
    video = predicted(model, replace(JOINT, audio_tokens=0), alone, stream="video")
    assert torch.equal(video, predicted(model, JOINT, isolated, stream="video"))
    assert rel(video, predicted(model, JOINT, alone, stream="video")) > SHOWS


@pytest.mark.parametrize("perturbed", [False, True])
def test_it_is_ltx_cores_without_a_video(model, perturbed):
    from ltx_core.guidance.perturbations import (
        BatchedPerturbationConfig,
        Perturbation,
        PerturbationConfig,
        PerturbationType,
    )
    from ltx_core.model.transformer import X0Model
    from ltx_pipelines.utils.helpers import modality_from_latent_state

    keep, skipped = torch.ones(2, 4), []
    if perturbed:
        keep[1, 1] = 0
        skipped = [Perturbation(PerturbationType.SKIP_AUDIO_SELF_ATTN, [1])]
    _, config, _ = model
    noise = randn(1, AUDIO_TOKENS, config.audio_in_channels, seed=2)
    mask = torch.ones(AUDIO_TOKENS, 1)
    state = ltx_state(noise, mask, audio_positions(AUDIO_TOKENS), torch.zeros_like(noise))
    context = randn(1, 1024, config.audio.inner, seed=4)
    sigma = torch.tensor(ltx2_schedule(STEPS)[STEP])
    with later_semantics(), torch.no_grad():
        _, theirs = X0Model(model[0])(
            None,
            modality_from_latent_state(state, context, sigma),
            BatchedPerturbationConfig([PerturbationConfig(skipped)]),
        )
    assert rel(predicted(model, ALONE, keep), theirs) < EQUAL


def test_its_graphs_use_the_weights_of_the_audio_and_no_field_of_the_video(model):
    alone, joint = program_of(model, ALONE), program_of(model, JOINT)
    names = {name for name in joint.weights() if SOUND_ALONE.fullmatch(name)}
    assert alone.weights().keys() == names
    assert names and not any("video" in name for name in names)
    inputs = {field for graph in alone.graphs.values() for field in graph.inputs}
    assert inputs <= alone.fields.keys()
    assert not any("video" in field or "cross" in field for field in alone.fields)
    assert ALONE.name == f"a{AUDIO_TOKENS}-t1-s{STEPS}-guided"
    assert not may_divide(ALONE, 4)


# --- a stage --------------------------------------------------------------------------------------


def test_nothing_is_drawn_for_a_video_and_none_of_it_is_uploaded(model):
    _, config, _ = model
    alone, uploads = job(num_frames=17, audio_stg_blocks=[1]), {}
    (stage,), (bucket,) = alone.stages, alone.buckets
    ranks = SimpleNamespace(
        tp=1,
        cp=1,
        put=lambda program, like=None, **tensors: uploads.update(tensors),
        put_numbers=lambda *_: None,
        define=lambda *_: None,
    )
    compiled = CompiledStep(bucket, program_of(model, bucket))
    run = StageRun(ranks, compiled, config, torch.float32, lambda *_: torch.zeros(1), COMPAT[None])
    contexts = [Contexts(*[torch.zeros(1)] * 3, None)] * 2
    drawing = generator(5)
    run.prepare(alone, stage, contexts, starting_states(alone, stage, {}, [], torch.float32), drawing)
    run.start()
    own = generator(5)
    noise = torch.randn(1, 18, 128, generator=own)
    assert rel(uploads["audio_latent"], noise) < EQUAL  # the first sigma is almost 1
    assert torch.equal(drawing.get_state(), own.get_state())
    assert not any("video" in name or "cross" in name for name in uploads)


# --- weights --------------------------------------------------------------------------------------


def test_ranks_load_a_part_of_the_weights_and_later_the_rest_once(tmp_path):
    names = ("audio_proj_out.bias", "transformer_blocks.0.audio_ff.net.2.bias")
    others = ("proj_out.bias", "transformer_blocks.0.audio_to_video_attn.to_q.bias")
    weights = {name: torch.full((4,), 1.0) for name in (*names, *others)}
    part, whole = (dict.fromkeys(each, (4,)) for each in (names, (*names, *others)))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, factor in ((first, 1), (second, 2)):
        folder.mkdir()
        save_weights(folder, {name: factor * tensor for name, tensor in weights.items()})
    rank = SimpleNamespace(weights={}, weight_file=0, device=torch.device("cpu"))

    def load(folder, wanted) -> dict[str, torch.Tensor]:
        return Rank._load_weights(rank, folder, wanted, torch.float32)

    held = dict(load(first, part))
    assert held.keys() == set(names)
    assert load(first, whole).keys() == weights.keys()
    assert all(load(first, part)[name] is held[name] for name in names)
    replaced = load(second, part)
    assert replaced.keys() == weights.keys() and len(rank.weights) == 1
    assert all(tensor.sum() == 8 for tensor in replaced.values())
    assert load_rank_file(first / rank_file(0), part, torch.float32).keys() == set(names)
    with pytest.raises(UserError, match=r"missing: audio_proj_out.weight"):
        load_rank_file(first / rank_file(0), part | {"audio_proj_out.weight": (4,)}, torch.float32)
    with pytest.raises(UserError, match=r"unexpected: transformer_blocks.0.audio_ff"):
        load_rank_file(first / rank_file(0), {names[0]: (4,)}, torch.float32)


# --- jobs -----------------------------------------------------------------------------------------


def test_any_number_of_frames_gives_the_length_and_the_passes_are_the_sounds():
    alone = job(num_frames=30, frame_rate=25.0)
    alone.check()
    (bucket,) = alone.buckets_to_compile
    assert bucket.name == "a30-t1-s64-guided"
    assert alone.resolved_guidance.passes() == ("cond", "uncond", "perturbed")
    assert alone.steps == 30 and len(alone.stages) == 1
    assert alone.resolved_guidance.audio.weights() == pytest.approx([6, 1, 0, 0.7])
    # A job of it is one again, as a line or as a queue's job.
    assert Job.validated(alone.to_line()).describe() == alone.describe()


def test_a_report_of_sound_alone_says_no_height_and_only_what_is_set():
    report = Recorder().report(job(num_frames=30).describe(), "cpu", 1, {}, {"code": ""})
    assert not {"height", "width"} & report["job"].keys()
    header, _, _ = table(report).partition("\n\n")
    assert header.startswith("profile cpu, tp 1  num_frames 30, ") and "None" not in header
    assert "sound_only True" in header and "seed 10" in header and "[]" not in header


def test_a_line_of_a_prompts_file_makes_a_wav(tmp_path):
    job = Job(recipe="dev").updated({"prompt": "rain", "sound-only": True, "num-frames": 30})
    assert Line(3, job, "").file == "0003.wav"


def test_a_line_does_not_take_the_picture_of_the_command():
    command = Job(recipe="dev", height=64, width=96, two_stage=True, num_frames=17)
    command = command.replaced(video_stg_blocks=(1,), audio_stg_blocks=(0,))
    alone = command.updated({"prompt": "rain", "sound_only": True})
    alone.check()
    assert alone.size == Size(0, 0, 17) and alone.resolved_guidance.audio.stg_blocks == (0,)


def test_the_service_makes_videos_only():
    with pytest.raises(ApiError, match="sound_only is not supported here") as error:
        read_request({"prompt": "rain", "sound_only": True})
    assert error.value.code == "feature_not_supported"
    read_request({"prompt": "rain", "sound_only": False})
    record = {"num_frames": 9, "frame_rate": 24.0, "two_stage": False, "recipe": "dev"}
    assert [*_records({"bucket": [record | {"height": 64, "width": 64}]})]
    assert not [*_records({"bucket": [record | {"height": 0, "width": 0}]})]


# --- the file -------------------------------------------------------------------------------------


def test_the_sound_is_written_as_16_bit_stereo_at_its_own_rate_and_length(tmp_path):
    path = tmp_path / "out.wav"
    write_wav(path, torch.tensor([[0.0, 0.5, 1.5], [-2.0, -0.5, 1 / 32767]]), 48_000)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 48_000)
        stored = torch.frombuffer(bytearray(file.readframes(9)), dtype=torch.int16)
    assert stored.view(3, 2).T.tolist() == [[0, 16383, 32767], [-32767, -16383, 1]]
    assert [each.name for each in tmp_path.iterdir()] == ["out.wav"]


def test_a_sound_goes_to_a_wav_and_a_video_to_an_mp4(tmp_path):
    check_output_path(tmp_path / "out.WAV", sound_only=True)
    message = r"got --output-path .*out\.mp4: a sound is written as \.wav; type .*out\.wav"
    with pytest.raises(UserError, match=message):
        check_output_path(tmp_path / "out.mp4", sound_only=True)
    message = 'the output is an MP4 file, got ".*out.wav"; .* or type --sound-only for a sound'
    with pytest.raises(UserError, match=message):
        check_output_path(tmp_path / "out.wav")
