"""Auto duration: the duration head predicts the length of a job from its prompt."""

from pathlib import Path

import torch

from ltx_neuron.engine.resume import JobRun, write_run_tensors
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import require
from ltx_neuron.files import check_outputs, check_writable
from ltx_neuron.host.duration import DOWNLOAD, FLAG, duration_head_spec
from ltx_neuron.job import Job


def with_durations(engine: Engine, jobs: list[Job]) -> list[Job]:
    """Give jobs with auto_duration their predicted length. Returns all jobs. Checks all jobs' files
    before a model loads; raises UserError. The engine keeps the contexts for the jobs' run."""
    waiting = [job for job in jobs if job.auto_duration]
    if not waiting:
        return jobs
    engine.preflight.check_inputs(jobs)
    runs = predict(engine, waiting)
    known = {id(run.job): lasting(run.job, seconds) for run, seconds in runs}
    if command := engine.workspace.prepare_command:  # it makes graphs of known lengths
        lengths = dict.fromkeys(job.size.num_frames for job in known.values())
        engine.workspace.prepare_command = "\n".join(f"{command} --num-frames {n}" for n in lengths)
    return [known.get(id(job), job) for job in jobs]


def lasting(job: Job, seconds: float) -> Job:
    """The job of auto_duration with the number of frames for a prediction in seconds."""
    assert job.auto_duration
    frames = job.auto_duration.num_frames(seconds, job.size.frame_rate)
    return job.replaced(num_frames=frames, auto_duration=None)


@torch.no_grad()
def predict(engine: Engine, jobs: list[Job]) -> list[tuple[JobRun, float]]:
    """Encode the prompts of jobs of auto_duration, and print the predicted lengths. Returns each
    job's run and its predicted seconds."""
    workspace = engine.workspace
    path = engine.options.duration_head_path or workspace.files.find("duration_head")
    path = require(path, FLAG, "--auto-duration", f"Download LTX-2.5's: {DOWNLOAD}")
    head = duration_head_spec(path, workspace.checkpoint, workspace.transformer).load()
    predicted = []
    for run in engine.encode(jobs):
        (prompt, *_) = run.contexts
        seconds = head(prompt.video, prompt.audio).item()
        size = lasting(run.job, seconds).size
        frames = f"{size.num_frames} frames at {size.frame_rate:g} fps"
        print(f"duration head: {seconds:.2f} s; {frames}")
        predicted.append((run, seconds))
    return predicted


def predict_only(engine: Engine, job: Job, tensors: Path | None) -> None:
    """Print the predicted length of a job of auto_duration. Generates nothing.

    tensors  a safetensors file for `seconds`, `num_frames` and the contexts
    """
    if tensors:
        check_writable(tensors, "--save-tensors FILE")
        check_outputs({"--save-tensors": tensors}, engine.preflight.files_read([job]))
    with engine:
        ((run, seconds),) = predict(engine, [job])
    if tensors:
        frames = lasting(run.job, seconds).size.num_frames
        length = {"seconds": torch.tensor([seconds]), "num_frames": torch.tensor([frames])}
        identity = job.identity | {"checkpoint": engine.workspace.checkpoint.fingerprint}
        write_run_tensors(tensors, run.tensors | length, identity)
