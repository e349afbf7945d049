"""Videos that a service makes from uploaded videos: extension, references of an IC-LoRA, dubbing.
They have the bytes that the engine makes of the same files where they lie."""

from contextlib import closing
from io import BytesIO
from pathlib import Path

import golden_runs
import pytest
from conftest import needs
from engines import sharing
from golden_jobs import dubbed, ic_lora
from helpers import one_thread  # noqa: F401
from jobs import make_job

needs("fastapi", extras="serve")

from serving import stop_after  # noqa: E402
from starlette.datastructures import UploadFile  # noqa: E402

from ltx_neuron.artifacts import build  # noqa: E402
from ltx_neuron.service.fields import read_request  # noqa: E402
from ltx_neuron.service.jobs import VIDEO, JobSubmitter  # noqa: E402
from ltx_neuron.service.queue import Queue  # noqa: E402
from ltx_neuron.service.sizes import NO_LORAS, CompiledSize, SizeRegistry  # noqa: E402
from ltx_neuron.service.worker import Worker  # noqa: E402

runs = golden_runs.runs  # a fixture


def upload(path) -> UploadFile:
    return UploadFile(BytesIO(path.read_bytes()))


def longer(runs, tiny, media):
    return runs.job("extend"), {}, {"video_reference": upload(media / "film.mkv"), "extend": 0.4}


def guided_by_references(runs, tiny, media):
    job = ic_lora(tiny, media, images=())
    files = [(media / Path(reference.path).name, reference.strength) for reference in job.references]
    videos = [{"video_url": upload(path), "strength": strength} for path, strength in files]
    mask = {"video_url": upload(media / "mask.mkv"), "strength": 0.8}
    fields = {"video_conditioning": videos, "conditioning_attention_mask": mask, "num_frames": 17}
    sets = {"pose": make_job(stage_1_loras=job.stage_1_loras)}
    return job, sets, fields | {"lora_set": "pose", "size": "128x128", "fps": 25}


def dub(runs, tiny, media):
    job = dubbed(tiny, media, images=())
    fields = {"reference_video": upload(media / "speech.mkv"), "reference_strength": 0.8}
    return job, {"dub": make_job(loras=job.loras)}, fields | {"lora_set": "dub", "size": "128x64"}


@pytest.mark.parametrize("kind", [longer, guided_by_references, dub])
def test_a_service_makes_the_bytes_that_the_engine_makes(kind, runs, media, tiny, tmp_path):
    job, lora_sets, fields = kind(runs, tiny, media)
    engine, default = sharing(runs.engine()), CompiledSize(make_job("").size, "distilled")
    workspace, wanted = engine.workspace, tmp_path / "wanted.mp4"
    build.make(workspace, workspace.weight_sets("dit", {stage.loras for stage in job.stages}))
    for stage in job.stages:
        buckets = [job.bucket(stage)]
        build.make(workspace, workspace.dit_graphs(buckets, job))
        build.record_size(workspace, job, buckets)
    golden_runs.draw_contexts(engine, job)
    with closing(Queue(tmp_path / "queue.sqlite", tmp_path / "jobs")) as queue:
        sizes = SizeRegistry(workspace, default, {"spatial"}, NO_LORAS | lora_sets)
        request = read_request(fields | {"prompt": job.prompt, "seed": job.seed})
        entry = JobSubmitter(queue, sizes, "tiny").accept(request, "ada")
        working = Worker(queue, engine, "w", previews=True)
        watching = stop_after(working, entry)
        working.run()
        watching.join()
        served = (queue.folder_of(entry.id) / VIDEO).read_bytes()
    engine.on_step_end = engine.on_stage_end = None
    [*engine.run([job], keep=True, write=lambda clip: clip.write(wanted))]
    assert served == wanted.read_bytes()
