"""The service makes the bytes of a batch with LTX-2.5."""

from types import SimpleNamespace

import serving
import split_runs

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
