"""A batch and the Python API make the same bytes with LTX-2.5, from a folder in the layout of the
download. The service and resumed runs: test/slow/test_split_release.py."""

import json

import serving
import split_runs
from safetensors.torch import load_file
from split_runs import LIMITS, LINES

from ltx_neuron.commands import dispatch
from ltx_neuron.pipeline import LTXPipeline

runs = split_runs.runs  # a fixture


def test_a_batchs_sidecars_have_the_sampler_the_decoder_and_the_files(runs):
    assert len(runs.wanted) == len(LINES)
    sidecar = json.loads((runs.out / "0002.json").read_text())
    identity = sidecar["identity"]
    assert (sidecar["num_frames"], sidecar["num_generated_keyframes"], sidecar["sampler"]) == (9, 1, "ancestral")
    assert (identity["model_version"], identity["video_decoder"]) == ("2.5.0", "convolutional")
    assert set(identity["files"]) == {"text_encoder", "video_vae", "audio_vae"}


def test_the_python_api_makes_the_bytes_of_the_batch(runs, split, tmp_path):
    names = ("video_vae", "audio_vae", "spatial_upsampler", "duration_head")
    files = {f"{name}_path": getattr(split, name) for name in names} | {"gemma_root": split.text_encoder}
    how = dict(profile="cpu", profile_set=runs.settings, tp_degree=serving.TP, dtype="float32")
    with LTXPipeline.from_pretrained(split.distilled, **files, artifacts_dir=runs.artifacts, **how) as pipe:
        for line, limits, wanted in zip(LINES, (None, LIMITS), runs.wanted, strict=True):
            path = tmp_path / "out.mp4"
            pipe(**line, auto_duration=limits, output_type="mp4", output_path=path)
            assert path.read_bytes() == wanted


def test_the_length_of_a_prompt_is_predicted_without_graphs(runs, tmp_path, capsys):
    words = ["--prompt", "birds sing", "--save-tensors", tmp_path / "out.safetensors"]
    dispatch(runs.words("generate", *words, "--predict-duration"))
    predicted = load_file(tmp_path / "out.safetensors")
    seconds, frames = predicted["seconds"].item(), predicted["num_frames"].item()
    assert f"{seconds:.2f} s; {frames} frames" in capsys.readouterr().out and frames % 8 == 1
