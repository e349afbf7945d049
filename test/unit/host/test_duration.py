"""Auto duration: the length that the duration head predicts from a prompt's contexts."""

import json

import pytest
import torch
from conftest import ROOT
from helpers import made_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typed import parsed

from ltx_neuron import flags
from ltx_neuron.batch import read_lines
from ltx_neuron.commands import generate, prepare
from ltx_neuron.engine.durations import lasting
from ltx_neuron.errors import UserError
from ltx_neuron.host.duration import duration_head_spec
from ltx_neuron.sampling.size import AutoDuration
from ltx_neuron.weights.checkpoint import Checkpoint

# A head with random weights, contexts, and the seconds that ltx-core 1.2.0's DurationHead predicts.
GOLDEN = ROOT / "test/golden/duration_head.safetensors"
_, TRANSFORMER = made_config()  # of the head's widths


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function that writes a checkpoint of a version. Its tensors do not matter."""
    config, _ = made_config()

    def make(version: str = "2.5.0") -> Checkpoint:
        path = tmp_path_factory.mktemp("checkpoint") / "ltx.safetensors"
        metadata = {"config": json.dumps(config), "model_version": version}
        save_file({"a": torch.zeros(1)}, path, metadata)
        return Checkpoint(path)

    return make


def head_file(path, change=lambda tensors: None, **metadata):
    """A copy of the golden head's file with a change of its tensors and metadata."""
    with safe_open(GOLDEN, "pt") as file:
        metadata = dict(file.metadata()) | metadata
    tensors = load_file(GOLDEN)
    change(tensors)
    save_file(tensors, path, metadata)
    return path


def test_the_head_predicts_the_seconds_of_ltx_core(checkpoint):
    golden = load_file(GOLDEN)
    head = duration_head_spec(GOLDEN, checkpoint(), TRANSFORMER).load()
    seconds = head(golden["video_context"], golden["audio_context"])
    torch.testing.assert_close(seconds, golden["seconds"], rtol=1e-6, atol=0)
    # The seconds depend on both streams.
    assert head(golden["video_context"], golden["audio_context"].flip(2)) != seconds


@pytest.mark.parametrize(
    ("seconds", "rate", "limits", "frames"),
    [
        (1.1954, 24, (), 25),  # 29 frames: the next lower 8k+1
        (5.1, 24, (), 121),
        (0.2, 24, (), 25),  # the minimum, 24 frames: the next higher one
        (99, 24, (), 473),  # the maximum
        (0.5, 30, (), 33),
        (7, 23.976, (), 161),
        (10, 50, (), 497),
        (4.96, 24, (5, 6), 121),
        (1, 24, (1, 1), 17),  # no 8k+1 within the limits
    ],
)
def test_predicted_seconds_become_frames_as_in_ltx_pipelines(seconds, rate, limits, frames):
    assert AutoDuration(*limits).num_frames(seconds, rate) == frames


# --- refusals -------------------------------------------------------------------------------------


def test_a_head_is_refused_with_a_release_that_has_none(checkpoint):
    with pytest.raises(UserError) as error:
        duration_head_spec(GOLDEN, checkpoint("2.3.0"), TRANSFORMER)
    said = str(error.value)
    assert "is a duration head of LTX 2.5.0" in said and "is of LTX-2.3, which has none" in said
    assert "Leave --duration-head-path out, and type --num-frames N" in said


def test_a_file_without_a_head_and_one_of_other_widths_are_refused(checkpoint, tmp_path):
    other = checkpoint().path
    with pytest.raises(UserError, match="wanted a duration head, got a transformer of LTX 2.5.0\nDownload it: hf"):
        duration_head_spec(other, checkpoint(), TRANSFORMER)
    config = json.dumps({"transformer": {}, "duration_head": {}})
    with pytest.raises(UserError, match=r"of widths \(4096, 2048\), but .* have widths \(32, 16\)"):
        wide = head_file(tmp_path / "wide.safetensors", config=config)
        duration_head_spec(wide, checkpoint(), TRANSFORMER)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mlp_out.bias", lambda tensors, name: tensors.pop(name), "missing: {}"),
        ("mlp_more.bias", lambda tensors, name: tensors.update({name: torch.zeros(1)}), "unexpected: {}"),
        ("mlp_out.bias", lambda tensors, name: tensors.update({name: torch.zeros(2)}), r"{}: \(2,\), wanted"),
    ],
)
def test_a_head_with_other_tensors_than_its_config_has_is_refused(checkpoint, tmp_path, name, change, message):
    name = f"duration_head.{name}"
    file = head_file(tmp_path / "head.safetensors", lambda tensors: change(tensors, name))
    with pytest.raises(UserError, match=message.format(name)):
        duration_head_spec(file, checkpoint(), TRANSFORMER).load()


# --- jobs -----------------------------------------------------------------------------------------


def job(*words: str, head: str | None = "head.safetensors"):
    args = parsed("--prompt", "a dog", *words)
    args.duration_head_path = head
    return flags.job(args)


def test_the_length_is_predicted_where_a_head_is_given_and_no_length():
    predicted = job("--tail-frames", "8", "--frame-rate", "25")
    assert predicted.auto_duration == AutoDuration(1, 20)
    assert lasting(predicted, 3.0).size.num_frames == 73 + 8
    assert lasting(predicted, 3.0).auto_duration is None
    assert (
        lasting(predicted, 3.0).identity
        == job(*("--tail-frames", "8", "--frame-rate", "25", "--num-frames", "73")).identity
    )
    assert job("--num-frames", "17").auto_duration is None
    assert job(head=None).auto_duration is None
    assert job("--auto-duration", "2", "3.5", head=None).auto_duration == (2, 3.5)
    assert job("--auto-duration").auto_duration == AutoDuration()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-frames", "17"], "--num-frames cannot be combined with --auto-duration"),
        (["--sound-only", "--recipe", "dev"], "--auto-duration cannot be combined with --sound-o"),
    ],
)
def test_auto_duration_refuses_inputs_that_determine_the_length(words, message):
    with pytest.raises(UserError, match=message):
        job("--auto-duration", *words).check()


def test_the_limits_are_numbers_above_0_the_smaller_one_first():
    with pytest.raises(UserError, match="--auto-duration 3 2: wanted MIN_SECONDS MAX_SECONDS"):
        job("--auto-duration", "3", "2").check()
    with pytest.raises(UserError, match="--auto-duration: got '0', wanted more than 0"):
        job("--auto-duration", "0")


def test_a_lines_length_replaces_the_commands(tmp_path):
    def read(*flags_of_command: str, **line) -> AutoDuration | None:
        (tmp_path / "jobs.jsonl").write_text(json.dumps({"prompt": "a", **line}))
        of_line = flags.job_of_line(parsed(*flags_of_command))
        (read_line,) = read_lines(tmp_path / "jobs.jsonl", of_line, {})
        return read_line.job.auto_duration

    assert read("--auto-duration", "1", "2") == (1, 2)
    assert read("--auto-duration", num_frames=17) is None
    assert read("--num-frames", "17", auto_duration=[]) == AutoDuration()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--output-path", "a.mp4"], "makes no video: leave --output-path out"),
        (["--prompts-file", "jobs.jsonl"], "is for one --prompt and makes no video: leave --prompts-file out"),
    ],
)
def test_a_prediction_makes_no_video(tiny, words, message):
    files = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root]
    with pytest.raises(UserError, match=message):
        generate.main([*map(str, files), "--predict-duration", "--profile", "cpu", *words])


def test_graphs_are_not_prepared_for_an_unknown_length(tiny, tmp_path):
    files = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root]
    place = ["--artifacts-dir", tmp_path, "--profile", "cpu"]
    with pytest.raises(UserError, match="Type --num-frames N, the length that generate --predict"):
        prepare.main([*map(str, files + place), "--auto-duration"])
