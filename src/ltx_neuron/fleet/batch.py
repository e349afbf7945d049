"""--prompts-file with --ray: the lines become jobs of a durable queue beside the outputs, and the
cluster's replicas make them. What lands in --output-dir is what one machine writes."""

import shutil
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from ltx_neuron import batch, flags
from ltx_neuron.batch import Line, Results
from ltx_neuron.config import digest
from ltx_neuron.engine import Engine
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import exclusive, read_json, write_json
from ltx_neuron.fleet.pool import Pool
from ltx_neuron.generate import Outputs
from ltx_neuron.job import Job
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.service.jobs import VIDEO
from ltx_neuron.service.queue import COMPLETED, FAILED, Entry, KeyUsed, NewJob, Queue
from ltx_neuron.workspace import Workspace

FOLDER = ".ltx-fleet"  # of --output-dir: the queue and the files of its jobs
OWNER = "batch"
_PATIENCE = 3  # replicas that end at once, until the command does


def generate_batch(lines: list[Line], args: Namespace, workspace: Workspace) -> None:
    """Make the videos of a prompts file's lines; exit code 1 where one failed."""
    outputs, options = flags.outputs(args), flags.run_options(args)
    if outputs.report:
        raise UserError("--perf-dump-path is of one machine; it does not go with --ray")
    read = Engine(workspace, Recorder(), options).preflight.inputs([line.job for line in lines])
    batch.check_outputs(lines, outputs.folder, None, read | {"--prompts-file": args.prompts_file})
    with exclusive(outputs.folder.absolute() / FOLDER, "making"):
        entries = _run(lines, args, outputs)
    failed = sum(entry["status"] != "done" for entry in entries)
    counts = f"{len(entries) - failed} done, {failed} failed"
    print(f"videos: {outputs.folder} ({counts}; {batch.RESULTS})")
    if failed:
        raise SystemExit(1)


def _run(lines: list[Line], args: Namespace, outputs: Outputs) -> list[dict]:
    """Run the lines that are not done yet; returns every line's entry, in the file's order."""
    results = Results(outputs.folder, lines)
    left = {line.number: line for line in lines if line.number not in results.entries}
    folder = outputs.folder.absolute() / FOLDER
    if left:
        folder.mkdir(exist_ok=True)
        with closing(Queue(folder / "queue.sqlite", folder / "jobs")) as queue:
            work = _Work(queue, outputs.folder, results, left)
            most = min(args.replicas or len(left), len(left))
            # As replicas read them: LoRAs are found from every folder.
            jobs = [flags.job_of(line.job.spec) for line in left.values()]
            sets = list({stage.loras for job in jobs for stage in job.stages})
            pool = Pool(queue, args, _probe(jobs), most, _PATIENCE, sets)
            work.run(pool)
    shutil.rmtree(folder, ignore_errors=True)  # all lines have ended
    return [results.entries[line.number] for line in lines]


def _probe(jobs: list[Job]) -> list[Job]:
    """A job of every size and weight set, with whose making a replica begins. Files are not there
    yet."""
    plain = [job for job in jobs if not job.files]
    return list({(job.size, job.recipe, job.upscale, job.stages): job for job in plain}.values())


class _Work:
    """A batch under way: its lines in the queue, and what comes out of it."""

    def __init__(self, queue: Queue, folder: Path, results: Results, lines: dict[int, Line]):
        self.queue, self.folder, self.results = queue, folder, results
        self.left = {self._submitted(line).id: line for line in lines.values()}

    def run(self, pool: Pool) -> None:
        def look() -> None:
            self._take_ended()
            if not self.left:
                pool.stop.set()

        look()
        if self.left:
            pool.run(look)

    def _submitted(self, line: Line) -> Entry:
        """A line's job: the one of an interrupted run, unless that failed or says another thing."""
        try:
            before = self.queue.of_key(OWNER, str(line.number), line.digest)
        except KeyUsed:
            before = self._of_number(line.number)
            self.queue.cancel(OWNER, before.id)
            before = None
        if before and before.status == FAILED:
            self.queue.cancel(OWNER, before.id)
            before = None
        return before or self._submit(line)

    def _of_number(self, number: int) -> Entry:
        """The job that another line of this number left."""
        entries, _ = self.queue.page(OWNER, limit=batch.MAX_LINES)
        return next(entry for entry in entries if entry.key == str(number))

    def _submit(self, line: Line) -> Entry:
        id, names = self.queue.new_id(), {}
        folder = self.queue.folder_of(id)
        folder.mkdir()
        for number, path in enumerate(dict.fromkeys(line.job.files.values())):
            names[path] = f"file-{number}{path.suffix}"
            shutil.copyfile(path, folder / names[path])
        said = line.job.with_paths(names.__getitem__).spec.line()
        shown = {"line": line.number}
        new = NewJob(id, OWNER, line.digest, kind(line.job), said, shown, str(line.number))
        entry, _ = self.queue.submit(new)
        return entry

    def _take_ended(self) -> None:
        """Record the lines that have ended since the last look, their videos under their names."""
        for id, line in list(self.left.items()):
            entry = self.queue.get(OWNER, id)
            if entry.status == FAILED:
                self.results.failed(line, RunError(entry.error["message"]))
            elif entry.status == COMPLETED:
                self._take(entry, line)
            if entry.status in (COMPLETED, FAILED):
                del self.left[id]
                self.queue.cancel(OWNER, id)  # with its files

    def _take(self, entry: Entry, line: Line) -> None:
        made, video = self.queue.folder_of(entry.id) / VIDEO, self.folder / line.file
        # The JSON names the files as the user did.
        described = read_json(made.with_suffix(".json")) | line.job.describe()
        write_json(video.with_suffix(".json"), described)
        if made.is_file():  # else it was taken just before a kill
            made.replace(video)
        self.results.done(line)


def kind(job: Job) -> str:
    """What jobs have in common that run on the same loaded graphs and weights."""
    loras = f"{digest(job.identity['loras'])[:8]} " if job.all_loras else ""
    return f"{job.recipe} {loras}{' '.join(bucket.name for bucket in job.buckets)}"[:255]
