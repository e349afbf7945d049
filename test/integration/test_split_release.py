"""A batch, the Python API, the service and a resumed run make the same bytes with LTX-2.5, from a
folder in the layout of the download."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving
import torch
from conftest import QUICK, once
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch
from ltx_neuron.denoise import StageRun
from ltx_neuron.errors import FieldError
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO

SIZE = {"height": 64, "width": 64, "num_frames": 9, "two_stage": True}
LINES = [  # both use one set of graphs; the second has a predicted length
    {"prompt": "a red fox", **SIZE, "num_generated_keyframes": 1},
    {"prompt": "birds sing", **SIZE, "num_frames": None, "num_generated_keyframes": 1},
]
LIMITS = 0.2, 0.4  # seconds of a predicted length: 9 frames


class Runs(SimpleNamespace):
    """folder: the download; artifacts: those of LINES; wanted: the bytes of their videos; settings:
    of the profile."""

    settings = QUICK

    def words(self, verb: str, *more: object) -> list[str]:
        files = ["--checkpoint-path", self.folder, "--artifacts-dir", self.artifacts]
        machine = ["--profile", "cpu", "--tp-degree", serving.TP, "--dtype", "float32"]
        machine += [word for each in QUICK for word in ("--profile-set", each)]
        return [verb, *map(str, [*files, *machine, "--recipe", "distilled", *more])]

    @property
    def flags(self) -> list[object]:
        """The flags of the first line."""
        line = {name: value for name, value in LINES[0].items() if value is not True}
        words = [(f"--{name.replace('_', '-')}", value) for name, value in line.items()]
        return ["--two-stage", *(word for pair in words for word in pair)]


@pytest.fixture(scope="module")
def runs(shared: Path, split) -> Runs:
    runs = Runs(folder=split.folder, artifacts=shared / "split-artifacts")

    def make(folder: Path) -> None:
        folder.mkdir()
        dispatch(runs.words("prepare", *runs.flags))
        (folder / "jobs.jsonl").write_text("\n".join(map(json.dumps, LINES)))
        outputs = ["--output-dir", folder / "out", "--auto-duration", *LIMITS]
        dispatch(runs.words("batch", folder / "jobs.jsonl", *outputs))

    threads = torch.get_num_threads()
    once(shared / "split-batch", make)
    torch.set_num_threads(threads)
    runs.out = shared / "split-batch/out"
    runs.wanted = [path.read_bytes() for path in sorted(runs.out.glob("*.mp4"))]
    return runs


def test_a_batchs_sidecars_have_the_sampler_the_decoder_and_the_files(runs, split):
    assert len(runs.wanted) == len(LINES)
    made = json.loads((runs.out / "0002.json").read_text())
    assert (made["num_frames"], made["num_generated_keyframes"]) == (9, 1)
    assert (made["sampler"], made["identity"]["model_version"]) == ("ancestral", "2.5.0")
    assert made["identity"]["video_decoder"] == "convolutional"
    assert set(made["identity"]["files"]) == {"text_encoder", "video_vae", "audio_vae"}


def test_the_python_api_makes_the_bytes_of_the_batch_and_refuses_an_input_sound(
    runs, split, tmp_path
):
    with LTXPipeline.from_pretrained(
        checkpoint_path=split.distilled,
        gemma_root=split.text_encoder,
        video_vae_path=split.video_vae,
        audio_vae_path=split.audio_vae,
        spatial_upsampler_path=split.spatial_upsampler,
        duration_head_path=split.duration_head,
        artifacts_dir=runs.artifacts,
        profile="cpu",
        profile_set=QUICK,
        tp_degree=serving.TP,
        dtype="float32",
        neuron_gemma=False,
    ) as pipe:
        for line, limits, wanted in zip(LINES, (None, LIMITS), runs.wanted, strict=True):
            path = tmp_path / "out.mp4"
            pipe(**line, auto_duration=limits, output_type="mp4", output_path=path)
            assert path.read_bytes() == wanted
        with pytest.raises(FieldError, match="--audio-path does not run on LTX-2.5 yet"):
            pipe("rain", **SIZE, audio=serving.sound_file(tmp_path))


def test_the_service_makes_the_bytes_of_the_batch(runs, split, tmp_path):
    assets = SimpleNamespace(checkpoint=split.distilled, gemma_root=None, spatial_upsampler=None)
    with serving.worker(runs, assets, tmp_path, neuron_gemma=False) as (working, intake):
        fields = {"prompt": "a red fox", "size": "64x64", "two_stage": True}
        entry = intake.accept(read_request(fields | {"num_generated_keyframes": 1}), "ada")
        stopping = serving.stop_after(working, entry)
        working.run()
        stopping.join()
        assert (working.queue.folder_of(entry.id) / VIDEO).read_bytes() == runs.wanted[0]
        assert intake.sizes.inputs["num_generated_keyframes"]


def test_a_run_that_is_killed_in_its_second_stage_is_resumed_to_the_same_bytes(
    runs, tmp_path, monkeypatch, capsys
):
    step = StageRun.step

    def kill(stage_run, number):
        if stage_run.stage.title == "stage_2" and number == 1:
            os.kill(stage_run.ranks._processes[0].pid, signal.SIGKILL)
        return step(stage_run, number)

    words = runs.words("generate", *runs.flags, "--output-path", tmp_path / "fox.mp4")
    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "step", kill)
        with pytest.raises(Exception, match="the process was killed"):
            dispatch(words)
    dispatch([*words, "--resume"])
    said = capsys.readouterr().out
    assert "is left" in said and "video decoder: convolutional, from " in said
    assert (tmp_path / "fox.mp4").read_bytes() == runs.wanted[0]


def test_the_length_of_a_prompt_is_predicted_without_graphs(runs, split, tmp_path, capsys):
    words = ["--prompt", "birds sing", "--save-tensors", tmp_path / "out.safetensors"]
    dispatch(runs.words("generate", *words, "--predict-duration"))
    predicted = load_file(tmp_path / "out.safetensors")
    frames = f"{predicted['seconds'].item():.2f} s; {predicted['num_frames'].item()} frames"
    assert frames in capsys.readouterr().out
    assert predicted["num_frames"].item() % 8 == 1
