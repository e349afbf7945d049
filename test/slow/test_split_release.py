"""The service and a resumed run make the bytes of a batch with LTX-2.5; a run with the int8 files
makes those of the files that they stand for."""

from types import SimpleNamespace

import int8_files
import serving
import split_runs

from ltx_neuron.commands import dispatch
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO

runs = split_runs.runs  # a fixture


def test_the_service_makes_the_bytes_of_the_batch(runs, split, tmp_path):
    assets = SimpleNamespace(checkpoint=split.distilled, gemma_root=None, spatial_upsampler=None)
    with serving.worker(runs, assets, tmp_path, neuron_gemma=False) as (working, intake):
        fields = {"prompt": "a red fox", "size": "128x64", "two_stage": True, "num_generated_keyframes": 1}
        entry = intake.accept(read_request(fields), "ada")
        stopping = serving.stop_after(working, entry)
        working.run()
        stopping.join()
        assert (working.queue.folder_of(entry.id) / VIDEO).read_bytes() == runs.wanted[0]
        assert intake.sizes.inputs["num_generated_keyframes"]


def test_a_run_with_the_int8_files_makes_the_bytes_of_the_bfloat16_files_they_stand_for(runs, split, tmp_path):
    videos = []
    for folder in int8_files.download(split, tmp_path):
        of = split_runs.Runs(folder=folder, artifacts=runs.artifacts)
        dispatch(of.words("prepare", *runs.flags))
        dispatch(of.words("generate", *runs.flags, "--output-path", folder / "fox.mp4"))
        videos.append((folder / "fox.mp4").read_bytes())
    assert videos[0] == videos[1] != runs.wanted[0]
