"""A worker: one process that keeps an engine open and runs the queue's jobs, grouped by batch key.

A heartbeat renews the leases of its jobs. At every step it reports progress or checks that it still
owns the job. A cancelled job ends at that step, and the next job begins.
"""

import base64
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from PIL import Image
from torch import Tensor

from ltx_neuron.engine import outputs
from ltx_neuron.engine.decode import DecodedClip, JobFailure
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import whole_file
from ltx_neuron.job import Job, Stage
from ltx_neuron.report.latency import Recorder
from ltx_neuron.service.api_error import field_of
from ltx_neuron.service.database import StorageError
from ltx_neuron.service.jobs import PREVIEW, THUMBNAIL, VIDEO, folder_bytes, job_of, public
from ltx_neuron.service.periodic import run_periodically
from ltx_neuron.service.preview import previews_of
from ltx_neuron.service.queue import Entry, Queue

PROMPT_BATCH_SIZE = 4  # jobs claimed at a time: their prompts are encoded in one batch
MAX_JOBS_PER_RUN = 32  # jobs after which the engine's records are collected and cleared
POLL_SECONDS = 0.1  # how often an idle worker looks for jobs
_STORAGE_SECONDS = 1.0  # before it tries again to use the queue's database
REPORT_SECONDS = 0.25  # between two progress reports; ownership is checked at every step
MAX_SWITCH_DELAY_S = 60.0  # maximum wait of other jobs for those with the loaded batch key
DENOISED = 90  # percent of progress, when only decoding remains
_FAILURES = 3  # consecutive failed runs before the process restarts
_TILE = 512  # maximum side of a thumbnail
TIMES = "denoise_steps_ms"  # in a job's detail, as in the latency report


class Gone(Exception):
    """A job that this worker no longer owns: it was cancelled, or assigned to another."""


class Worker:
    """Runs the queue's jobs on an engine, until `stop` is set. queue: a Queue; on other machines a
    RemoteQueue. name: of this process in the queue. previews: whether to make preview pictures
    between steps."""

    def __init__(self, queue: Queue, engine: Engine, name: str, previews: bool = False):
        self.queue, self.engine, self.name = queue, engine, name
        self.previews = previews_of(engine) if previews else None
        self.stop = threading.Event()
        self.batch_key: str | None = None
        self._taken: dict[int, tuple[Job, Entry]] = {}  # by id(job), of the current run
        self._details: dict[int, dict] = {}  # of each job: its steps' times, a preview
        self._count, self._reported, self._failures = 0, 0.0, 0
        self._state = {"pid": os.getpid(), "batch_key": None, "videos": 0, "steps": 0, "phases": {}}
        self._state |= {"step_seconds": 0.0, "busy_seconds": 0.0, "video_seconds": 0.0}
        self._state |= {"lost_groups": engine.recorder.lost_groups}
        engine.on_step_end, engine.on_stage_end = self._step, self._stage

    def run(self) -> None:
        """Run jobs until `stop` is set. Then unfinished jobs wait again."""
        workspace = self.engine.workspace
        self._state["identity"] = outputs.code_identity(workspace)
        try:
            with run_periodically(self._beat, min(self.queue.lease / 4, 5.0), "heartbeat"):
                print("ready: the worker takes jobs; the first one loads the model", flush=True)
                while not self.stop.is_set():
                    key = self.queue.next_batch_key(self.batch_key, MAX_SWITCH_DELAY_S)
                    self.batch_key = key
                    if key is None:
                        self.stop.wait(POLL_SECONDS)
                    else:
                        self._run_batch()
        finally:
            self.queue.release_worker(self.name)

    def _run_batch(self) -> None:
        """Run the engine once, over jobs with one batch key that are claimed meanwhile."""
        self._count, self._state["batch_key"] = 0, self.batch_key
        if not (jobs := self._take()):
            return
        outcomes = self.engine.run(
            jobs, keep=True, isolate=True, resume=self._resume, write=self._write, more=self._take
        )
        try:
            for outcome in outcomes:
                if isinstance(outcome, JobFailure):
                    self._failed(outcome)
            self._failures = 0
        except Exception:
            # A rank or the device has failed: the engine closed itself, and will open again.
            traceback.print_exc()
            self.queue.release_worker(self.name, crashed=True)
            self._failures += 1
            if self._failures == _FAILURES:
                raise
        finally:
            self._taken.clear()
            self._details.clear()
            self._keep_records()

    # --- taking jobs ------------------------------------------------------------------------------

    def _take(self) -> list[Job]:
        """Claim further jobs with the loaded batch key; none if another key is next."""
        if self.stop.is_set() or self._count >= MAX_JOBS_PER_RUN:
            return []
        key = self.batch_key
        if key is None or self.queue.next_batch_key(key, MAX_SWITCH_DELAY_S) != key:
            return []
        jobs = []
        try:
            self._beat()  # else it would claim its own jobs, if their leases ended meanwhile
            entries = self.queue.claim(self.name, key, PROMPT_BATCH_SIZE)
        except StorageError:
            self.stop.wait(_STORAGE_SECONDS)
            return []
        for entry in entries:
            try:
                job = job_of(entry.params, self._folder(entry).absolute())
                job = self.engine.workspace.resolved(job)
                self.engine.preflight.check([job])
            except UserError as error:  # a file was removed after the job was accepted
                print(f"{entry.id}: {error}", flush=True)
                self._fail(entry, error)
                continue
            self._taken[id(job)] = job, entry
            times = (entry.detail or {}).get(TIMES, {})  # of stages that earlier workers finished
            self._details[id(job)] = {TIMES: times}
            jobs.append(job)
        self._count += len(jobs)
        return jobs

    def _folder(self, entry: Entry) -> Path:
        return self.queue.folder_of(entry.id)

    def _entry(self, job: Job) -> Entry:
        return self._taken[id(job)][1]

    def _state_path(self, job: Job) -> Path:
        return outputs.state_path(self._folder(self._entry(job)) / VIDEO)

    def _identity(self, job: Job) -> dict:
        return outputs.run_identity(job, self.engine.workspace, self.engine.options)

    def _resume(self, job: Job) -> outputs.JobRun | None:
        """Resume a dead worker's run of this job after its last finished stage."""
        path = self._state_path(job)
        if not path.is_file():
            return None
        try:
            dtype = self.engine.workspace.dtype
            run = outputs.restore_state(path, job, self._identity(job), dtype, exact=True)
        except UserError:  # saved by another version, or with another host dtype
            return None
        print(f"{self._entry(job).id}: resumed, {len(run.stages_left)} stages left", flush=True)
        return run

    # --- while it runs ----------------------------------------------------------------------------

    def _step(self, stage: Stage, number: int) -> None:
        """Report a step. Raises Gone if this worker no longer owns the job."""
        job, now = self.engine.job, time.monotonic()
        assert job
        entry, last = self._entry(job), number + 1 == stage.steps
        self._record_step(job, stage, number)
        if not last and now - self._reported < REPORT_SECONDS:
            owned = self.queue.owns(entry)
        else:
            self._reported = now
            detail = {"stage": stage.name, "step": number + 1, "steps": stage.steps}
            detail |= self._details[id(job)]
            owned = self.queue.report(entry, _percent(job, stage, number + 1), detail)
        if not owned:
            raise Gone(entry.id)

    def _record_step(self, job: Job, stage: Stage, number: int) -> None:
        detail = self._details[id(job)]
        before = detail[TIMES].get(stage.name, [])[:number]
        ms = round(self.engine.recorder.last_step(stage.name), 3)
        detail[TIMES] = detail[TIMES] | {stage.name: [*before, ms]}
        if self.previews and (picture := self.previews.after_step(stage, number)):
            detail[PREVIEW] = base64.b64encode(picture).decode()

    def _stage(self, run: outputs.JobRun) -> None:
        """Save a finished stage's latents, from which another worker could resume."""
        entry = self._entry(run.job)
        with suppress(OSError):  # the disk is full: nobody can resume
            outputs.save_state(path := self._state_path(run.job), run, self._identity(run.job))
            self.queue.keep(entry, path.name)
        left = run.stages_left
        percent = _percent(run.job, left[0], 0) if left else DENOISED
        detail = ({} if left else {"stage": "decode"}) | self._details[id(run.job)]
        self.queue.report(entry, percent, detail, stage_ended=True)

    def _write(self, clip: DecodedClip) -> None:
        """Write a video while it is decoded, in another thread if that overlaps denoising, and
        complete its job."""
        entry, recorder = self._entry(clip.job), self.engine.recorder
        folder, chunks = self._folder(entry), self._while_owned(entry, clip.chunks)
        clip.chunks = with_thumbnail(chunks, clip.job, folder / THUMBNAIL)
        clip.write(folder / VIDEO, recorder)
        notes = self.engine.preflight.notes(clip.job)
        outputs.write_sidecar(folder / VIDEO, clip.job, recorder, self.engine.workspace, notes)
        state = self._state_path(clip.job)
        saved = sum(path.stat().st_size for path in outputs.state_files(state) if path.is_file())
        detail = {TIMES: self._details[id(clip.job)][TIMES]}
        if not self.queue.complete(entry, folder_bytes(folder) - saved, detail):
            raise Gone(entry.id)
        outputs.remove_state(state)
        self._state["videos"] += 1

    def _while_owned(self, entry: Entry, chunks: Iterator[Tensor]) -> Iterator[Tensor]:
        """A clip's chunks. Raises Gone once this worker no longer owns the job."""
        for chunk in chunks:
            if not self.queue.owns(entry):
                raise Gone(entry.id)
            yield chunk
            del chunk

    def _failed(self, failure: JobFailure) -> None:
        """Fail a job that failed alone, or release one that this worker no longer owns."""
        entry, error = self._entry(failure.job), failure.error
        if isinstance(error, Gone):
            self.queue.release_job(entry)
            return
        if isinstance(error, StorageError):  # the queue's, not the job's
            raise error
        print(f"{entry.id} failed", flush=True)
        traceback.print_exception(error)
        self._fail(entry, error)

    def _fail(self, entry: Entry, error: Exception) -> None:
        """Fail a job. The texts of most errors may name private things of this machine."""
        code, message = "internal_error", f"the video could not be made: {type(error).__name__}"
        if isinstance(error, UserError) and error.of_one_job:
            code = "invalid_value"
            message = public(error.render(field_of), self._folder(entry))
        elif isinstance(error, UserError):
            code, message = "profile_mismatch", "files that this job needs are missing"
        elif isinstance(error, RunError):
            message = f"the video could not be made: {error}"
        elif isinstance(error, OSError):
            code = "storage_full"
        self.queue.fail(entry, code, message)

    # --- state for the queue ----------------------------------------------------------------------

    def _keep_records(self) -> None:
        """Add the engine's records to this worker's totals, and clear them: they grow."""
        report = outputs.make_report(self.engine.recorder, self.engine.workspace, {})
        phases = self._state["phases"]
        for phase in report["phases"]:
            seconds = phase["seconds"] + phase.get("overlapped_seconds", 0.0)
            phases[phase["name"]] = phases.get(phase["name"], 0.0) + seconds
            self._state["busy_seconds"] += phase["seconds"]
        self._state["video_seconds"] += report["video_seconds"]
        steps = [ms for stage in report["denoise_steps_ms"].values() for ms in stage]
        self._state["steps"] += len(steps)
        self._state["step_seconds"] += sum(steps) / 1e3
        recorder = Recorder()
        recorder.lost_groups = self.engine.recorder.lost_groups  # of ranks that stay
        recorder.show = self.engine.recorder.show
        self.engine.recorder = self.engine.residency.recorder = recorder

    def _beat(self) -> None:
        self.queue.renew(self.name, dict(self._state))


def _percent(job: Job, stage: Stage, done: int) -> int:
    stages = job.stages
    steps = [planned.steps for planned in stages]
    before = sum(steps[: stages.index(stage)])
    return DENOISED * (before + done) // sum(steps)


def with_thumbnail(chunks: Iterator[Tensor], job: Job, path: Path) -> Iterator[Tensor]:
    """A clip's chunks. Writes the middle frame as a JPEG when it passes."""
    index = job.output_frames // 2
    for chunk in chunks:
        if 0 <= index < len(chunk):
            picture = Image.fromarray(chunk[index].numpy())
            picture.thumbnail((_TILE, _TILE))
            with whole_file(path) as partial:
                picture.save(partial, format="JPEG", quality=85)
        index -= len(chunk)
        yield chunk
        del chunk
