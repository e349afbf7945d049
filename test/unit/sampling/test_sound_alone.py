"""Sound alone: its graphs are the audio half of the model, and its jobs have no picture."""

import wave
from types import SimpleNamespace

import pytest
import torch
from helpers import made_config, one_thread, save_weights  # noqa: F401

from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.batch import Line
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.engine.outputs import check_output_path
from ltx_neuron.errors import UserError
from ltx_neuron.host.video import write_wav
from ltx_neuron.job import Job, Size
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program, may_divide
from ltx_neuron.report.latency import Recorder, table
from ltx_neuron.service.api_error import ApiError
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.sizes import _records
from ltx_neuron.weights import sharding


def test_its_graphs_use_the_weights_of_the_audio_and_no_field_of_the_video():
    buckets = [Bucket(video_tokens, audio_tokens=18, timesteps=1, max_steps=3, guided=True) for video_tokens in (0, 18)]
    alone, joint = (dit_program(made_config()[1], bucket, 1, SingleRank(), torch.float32, 0) for bucket in buckets)
    names = {name for name in joint.weights() if sharding.ALONE[0].fullmatch(name)}
    assert names == alone.weights().keys() and names and not any("video" in name for name in names)
    assert {field for graph in alone.graphs.values() for field in graph.inputs} <= alone.fields.keys()
    assert not any("video" in field or "cross" in field for field in alone.fields)
    assert buckets[0].name == "a18-t1-s3-guided" and not may_divide(buckets[0], 4)


def test_ranks_load_a_part_of_the_weights_and_later_the_rest_once(tmp_path):
    names = ("audio_proj_out.bias", "transformer_blocks.0.audio_ff.net.2.bias")
    others = ("proj_out.bias", "transformer_blocks.0.audio_to_video_attn.to_q.bias")
    part, whole = dict.fromkeys(names, (4,)), dict.fromkeys((*names, *others), (4,))
    for folder, factor in (("first", 1.0), ("second", 2.0)):
        save_weights(tmp_path / folder, {name: torch.full((4,), factor) for name in whole})
    rank = SimpleNamespace(weights={}, weight_file=0, device=torch.device("cpu"))

    def load(folder, wanted) -> dict[str, torch.Tensor]:
        return Rank._load_weights(rank, tmp_path / folder, wanted, torch.float32)

    held = dict(load("first", part))
    assert held.keys() == set(names)
    assert load("first", whole).keys() == whole.keys()
    assert all(load("first", part)[name] is held[name] for name in names)
    replaced = load("second", part)
    assert replaced.keys() == whole.keys() and len(rank.weights) == 1
    assert all(tensor.sum() == 8 for tensor in replaced.values())


def test_a_job_has_no_picture_and_any_number_of_frames_gives_its_length():
    alone = Job(prompt="rain", sound_only=True, recipe="dev", num_frames=30, frame_rate=25.0)
    alone.check()
    (bucket,) = alone.buckets_to_compile
    assert bucket.name == "a30-t1-s64-guided" and alone.steps == 30 and len(alone.stages) == 1
    assert alone.resolved_guidance.passes() == ("cond", "uncond", "perturbed")
    assert alone.resolved_guidance.audio.weights() == pytest.approx([6, 1, 0, 0.7])
    report = Recorder().report(alone.describe(), "cpu", 1, {}, {"code": ""})
    assert not {"height", "width"} & report["job"].keys()
    header, _, _ = table(report).partition("\n\n")
    assert header.startswith("profile cpu, tp 1  num_frames 30, ") and "sound_only True" in header
    assert "seed 10" in header and "None" not in header and "[]" not in header
    # A line of a prompts file does not take the picture of the command.
    command = Job(recipe="dev", height=64, width=96, two_stage=True, num_frames=17)
    command = command.replaced(video_stg_blocks=(1,), audio_stg_blocks=(0,))
    alone = command.updated({"prompt": "rain", "sound-only": True})
    alone.check()
    assert alone.size == Size(0, 0, 17) and alone.resolved_guidance.audio.stg_blocks == (0,)
    assert Line(3, alone, "").file == "0003.wav"
    # A service refuses it and does not offer its sizes.
    with pytest.raises(ApiError, match="sound_only is not supported here"):
        read_request({"prompt": "rain", "sound_only": True})
    read_request({"prompt": "rain", "sound_only": False})
    record = {"num_frames": 9, "frame_rate": 24.0, "two_stage": False, "recipe": "dev"}
    counts = [len([*_records({"bucket": [record | {"height": side, "width": side}]})]) for side in (64, 0)]
    assert counts == [1, 0]


def test_a_sound_is_written_as_16_bit_stereo_at_its_own_rate_to_a_wav_alone(tmp_path):
    path = tmp_path / "out.wav"
    write_wav(path, torch.tensor([[0.0, 0.5, 1.5], [-2.0, -0.5, 1 / 32767]]), 48_000)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 48_000)
        stored = torch.frombuffer(bytearray(file.readframes(9)), dtype=torch.int16)
    assert stored.view(3, 2).T.tolist() == [[0, 16383, 32767], [-32767, -16383, 1]]
    assert [*tmp_path.iterdir()] == [path]
    check_output_path(tmp_path / "out.WAV", sound_only=True)
    for name, sound_only, message in (
        ("out.mp4", True, r"got --output-path .*out\.mp4: a sound is written as \.wav; type .*out\.wav"),
        ("out.wav", False, 'the output is an MP4 file, got ".*out.wav"; .* or type --sound-only for a sound'),
    ):
        with pytest.raises(UserError, match=message):
            check_output_path(tmp_path / name, sound_only)
