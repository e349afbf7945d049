"""Auto duration: the length that the duration head predicts from a prompt's contexts."""

import json

import pytest
import torch
from conftest import ROOT
from helpers import made_config, rewrite
from safetensors.torch import load_file, save_file
from typed import parsed

from ltx_neuron import flags
from ltx_neuron.commands import generate, prepare
from ltx_neuron.engine.run import lasting
from ltx_neuron.errors import UserError
from ltx_neuron.host.duration import duration_head_spec
from ltx_neuron.sampling.size import AutoDuration
from ltx_neuron.weights.checkpoint import Checkpoint

# A head with random weights, contexts, and the seconds that ltx-core 1.2.0's DurationHead predicts.
GOLDEN = ROOT / "test/golden/duration_head.safetensors"
CONFIG, TRANSFORMER = made_config()  # of the head's widths


def checkpoint(folder, version: str = "2.5.0") -> Checkpoint:
    """A checkpoint of a version, whose tensors do not matter."""
    metadata = {"config": json.dumps(CONFIG), "model_version": version}
    save_file({"a": torch.zeros(1)}, folder / "ltx.safetensors", metadata)
    return Checkpoint(folder / "ltx.safetensors")


def test_the_head_predicts_the_seconds_of_ltx_core_from_both_streams(tmp_path):
    golden, head = load_file(GOLDEN), duration_head_spec(GOLDEN, checkpoint(tmp_path), TRANSFORMER).load()
    seconds = head(golden["video_context"], golden["audio_context"])
    torch.testing.assert_close(seconds, golden["seconds"], rtol=1e-6, atol=0)


def test_predicted_seconds_become_frames_as_in_ltx_pipelines():
    for seconds, rate, limits, frames in (
        (1.1954, 24, (), 25),  # 29 frames: the next lower 8k+1
        (0.2, 24, (), 25),  # the minimum, 24 frames: the next higher one
        (99, 24, (), 473),  # the maximum
        (7, 23.976, (), 161),
        (4.96, 24, (5, 6), 121),
        (1, 24, (1, 1), 17),  # no 8k+1 within the limits
    ):
        assert AutoDuration(*limits).num_frames(seconds, rate) == frames


def test_a_head_of_another_release_of_other_widths_or_with_other_tensors_is_refused(tmp_path):
    message = "is a duration head of LTX 2.5.0.* is of LTX-2.3, which has none\nLeave .*, and type --num-frames N"
    with pytest.raises(UserError, match=message):
        duration_head_spec(GOLDEN, checkpoint(tmp_path, "2.3.0"), TRANSFORMER)
    fitting = checkpoint(tmp_path)
    with pytest.raises(UserError, match="wanted a duration head, got a transformer of LTX 2.5.0\nDownload it: hf"):
        duration_head_spec(fitting.path, fitting, TRANSFORMER)
    wide = rewrite(GOLDEN, tmp_path / "wide.safetensors", lambda _: None, {"transformer": {}, "duration_head": {}})
    with pytest.raises(UserError, match=r"of widths \(4096, 2048\), but .* have widths \(32, 16\)"):
        duration_head_spec(wide, fitting, TRANSFORMER)
    surplus = {"duration_head.mlp_more.bias": torch.zeros(1)}
    more = rewrite(GOLDEN, tmp_path / "more.safetensors", lambda tensors: tensors.update(surplus))
    with pytest.raises(UserError, match="unexpected: duration_head.mlp_more.bias"):
        duration_head_spec(more, fitting, TRANSFORMER).load()


def job(*words: str, head: str | None = "head.safetensors"):
    args = parsed("--prompt", "a dog", *words)
    args.duration_head_path = head
    return flags.job(args)


def test_the_length_is_predicted_where_a_head_is_given_and_no_length_in_the_command_or_a_line():
    more = ("--tail-frames", "8", "--frame-rate", "25")
    predicted, typed = job(*more), job(*more, "--num-frames", "73")
    assert predicted.auto_duration == AutoDuration(1, 20)
    lasts = lasting(predicted, 3.0)
    assert (lasts.size.num_frames, lasts.auto_duration, lasts.identity) == (73 + 8, None, typed.identity)
    assert typed.auto_duration is None and job(head=None).auto_duration is None
    assert job("--auto-duration", "2", "3.5", head=None).auto_duration == (2, 3.5)
    assert job("--auto-duration").auto_duration == AutoDuration()
    with pytest.raises(UserError, match="--auto-duration cannot be combined with --sound-o"):
        job("--auto-duration", "--sound-only", "--recipe", "dev").check()
    for words, line, read in (
        ("--auto-duration 1 2", {}, (1, 2)),
        ("--auto-duration", {"num_frames": 17}, None),
        ("--num-frames 17", {"auto_duration": []}, AutoDuration()),
    ):
        assert flags.job_of_line(parsed(*words.split()))({"prompt": "a"} | line).auto_duration == read


def test_a_prediction_makes_no_video_and_graphs_are_not_prepared_for_it(tiny, tmp_path):
    files = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root, "--artifacts-dir", tmp_path]
    one, several = "--predict-duration --prompt a --output-path a.mp4", "--predict-duration --prompts-file jobs.jsonl"
    for command, words, message in (
        (generate, one, "makes no video: leave --output-path out"),
        (generate, several, "is for one --prompt and .*leave --prompts-file out"),
        (prepare, "--auto-duration", "Type --num-frames N, the length that generate --predict"),
    ):
        with pytest.raises(UserError, match=message):
            command.main([*map(str, files), "--profile", "cpu", *words.split()])
