"""Videos that a service makes from uploaded videos: extension, references of an IC-LoRA, dubbing.
They have the bytes that the engine makes of the same files where they lie."""

from contextlib import closing
from io import BytesIO
from pathlib import Path

import golden_runs
import pytest
from engines import sharing
from golden_jobs import dubbed, ic_lora
from helpers import one_thread  # noqa: F401

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job
from serving import stop_after
from starlette.datastructures import UploadFile

from ltx_neuron.artifacts import build
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO, JobSubmitter
from ltx_neuron.service.queue import Queue
from ltx_neuron.service.sizes import NO_LORAS, CompiledSize, SizeRegistry
from ltx_neuron.service.worker import Worker

runs = golden_runs.runs  # a fixture


def upload(path) -> UploadFile:
    return UploadFile(BytesIO(path.read_bytes()))


def served(engine: Engine, folder, lora_sets: dict, **fields) -> bytes:
    """The MP4 of a request."""
    with closing(Queue(folder / "queue.sqlite", folder / "jobs")) as queue:
        default = CompiledSize(make_job("").size, "distilled")
        sizes = SizeRegistry(engine.workspace, default, {"spatial"}, lora_sets)
        entry = JobSubmitter(queue, sizes, "tiny").accept(read_request(fields), "ada")
        working = Worker(queue, engine, "w", previews=True)
        watching = stop_after(working, entry)
        working.run()
        watching.join()
        return (queue.folder_of(entry.id) / VIDEO).read_bytes()


def made(engine: Engine, job: Job, path) -> bytes:
    """The MP4 of a job."""
    engine.on_step_end = engine.on_stage_end = None
    outcomes = engine.run([job], keep=True, write=lambda clip: clip.write(path))
    assert len(list(outcomes)) == 1
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["extend", "IC-LoRA", "dubbing"])
def test_a_service_makes_the_bytes_that_the_engine_makes(kind, runs, media, tiny, tmp_path):
    engine, sets = sharing(runs.engine()), dict(NO_LORAS)
    if kind == "IC-LoRA":
        job = ic_lora(tiny, media, images=())
        sets["pose"] = make_job(stage_1_loras=job.stage_1_loras)
        videos = [
            {"video_url": upload(media / Path(each.path).name), "strength": each.strength} for each in job.references
        ]
        mask = {"video_url": upload(media / "mask.mkv"), "strength": 0.8}
        fields = {"lora_set": "pose", "video_conditioning": videos, "size": "128x128", "fps": 25}
        fields |= {"conditioning_attention_mask": mask, "num_frames": 17}
    elif kind == "dubbing":
        job = dubbed(tiny, media, images=())
        sets["dub"] = make_job(loras=job.loras)
        fields = {"reference_video": upload(media / "speech.mkv"), "reference_strength": 0.8}
        fields |= {"lora_set": "dub", "size": "128x64"}
    else:
        job = runs.job("extend")
        fields = {"video_reference": upload(media / "film.mkv"), "extend": 0.4}
    build.make(engine.workspace, engine.workspace.weight_sets("dit", {stage.loras for stage in job.stages}))
    for stage in job.stages:
        buckets = [job.bucket(stage)]
        build.make(engine.workspace, engine.workspace.dit_graphs(buckets, job))
        build.record_size(engine.workspace, job, buckets)
    golden_runs.draw_contexts(engine, job)
    fields |= {"prompt": job.prompt, "seed": job.seed}
    assert served(engine, tmp_path, sets, **fields) == made(engine, job, tmp_path / "wanted.mp4")
