"""--prompts-file with --ray: the lines become jobs of a durable queue beside the outputs, and the
cluster's replicas run them. --output-dir gets the same files as from one machine."""

import shutil
from argparse import Namespace
from contextlib import closing

from ltx_neuron import batch, flags
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.batch import Line, Results
from ltx_neuron.engine.outputs import digests_of_inputs
from ltx_neuron.engine.preflight import notes
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import exclusive, read_json, write_json
from ltx_neuron.fleet.pool import Pool
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder
from ltx_neuron.service.jobs import VIDEO, batch_key
from ltx_neuron.service.queue import COMPLETED, FAILED, Entry, NewJob, Queue

FOLDER = ".ltx-fleet"  # in --output-dir: the queue and its jobs' files
OWNER = "batch"
_MAX_FAILURES = 3  # consecutive early failures of replicas before the command fails


def generate_batch(lines: list[Line], args: Namespace, workspace: Workspace) -> None:
    """Generate the videos of a prompts file's lines; exit code 1 if one failed."""
    outputs, options = flags.outputs(args), flags.run_options(args)
    assert outputs.folder  # Outputs.check_batch
    if outputs.report or outputs.price:
        flag = "--perf-dump-path" if outputs.report else "--price-per-hour"
        raise UserError(f"{flag} cannot be combined with --ray: a report covers one machine")
    if any(line.job.auto_duration for line in lines):
        raise UserError(
            "--ray distributes videos by size, and the size of a video with a predicted length is"
            " unknown until its prompt is encoded\nType --num-frames N, and leave out"
            " --duration-head-path and --auto-duration"
        )
    preflight = Engine(workspace, Recorder(), options).preflight
    preflight.title_of = batch.titles(lines)
    read = preflight.files_read([line.job for line in lines])
    batch.check_outputs(lines, outputs.folder, None, read | {"--prompts-file": args.prompts_file})
    folder = outputs.folder.absolute() / FOLDER
    with exclusive(folder, "making"):
        results = Results(outputs.folder, lines)
        left = [line for line in lines if line.number not in results.entries]
        preflight.print_notes([line.job for line in left])
        if left:
            folder.mkdir(exist_ok=True)
            with closing(Queue(folder / "queue.sqlite", folder / "jobs")) as queue:
                _make(left, args, workspace, queue, results)
        shutil.rmtree(folder, ignore_errors=True)  # all lines have ended
    batch.end(outputs.folder, [results.entries[line.number] for line in lines])


def _make(
    lines: list[Line], args: Namespace, workspace: Workspace, queue: Queue, results: Results
) -> None:
    notes_of = {line.number: notes(line.job, workspace) for line in lines}
    left = _submit(lines, queue)
    # As replicas parse them: with absolute paths of LoRAs.
    jobs = [workspace.resolved(Job().updated(line.job.to_line())) for line in lines]
    sets = list({stage.loras for job in jobs for stage in job.stages})
    max_replicas = min(args.replicas or len(lines), len(lines))
    # A job of every size and weight set, without those whose input files a replica lacks.
    plain = {(j.size, j.recipe, j.upscale, j.stages): j for j in jobs if not j.files}
    pool = Pool(queue, args, [*plain.values()], max_replicas, _MAX_FAILURES, sets)

    def take_ended() -> None:
        for id, line in list(left.items()):
            entry = queue.get(OWNER, id)
            assert entry
            if entry.error:
                results.failed(line, RunError(entry.error["message"]))
            elif entry.status == COMPLETED:
                result, video = queue.folder_of(id) / VIDEO, results.path.with_name(line.file)
                # With the user's own paths.
                sidecar = read_json(result.with_suffix(".json")) | line.job.describe()
                sidecar |= {"inputs": digests_of_inputs(line.job), "notes": notes_of[line.number]}
                write_json(video.with_suffix(".json"), sidecar)
                if result.is_file():  # else a killed run has already moved it
                    result.replace(video)
                results.done(line)
            else:
                continue
            del left[id]
            queue.cancel(OWNER, id)  # deletes its files
        if not left:
            pool.stop.set()

    take_ended()
    if left:
        pool.run(take_ended)


def _submit(lines: list[Line], queue: Queue) -> dict[str, Line]:
    """The lines by their jobs' ids: of an interrupted run, new if they failed or changed."""
    by_number, left = {line.number: line for line in lines}, {}
    for entry in queue.page(OWNER, limit=10**9)[0]:
        line = by_number.get(entry.public_fields["line"])
        if line and entry.digest == line.digest and entry.status != FAILED:
            left[entry.id] = by_number.pop(line.number)
        else:
            queue.cancel(OWNER, entry.id)
    return left | {_submit_new(line, queue).id: line for line in by_number.values()}


def _submit_new(line: Line, queue: Queue) -> Entry:
    id, names = queue.new_id(), {}
    folder = queue.folder_of(id)
    folder.mkdir()
    for number, path in enumerate(dict.fromkeys(line.job.files.values())):
        names[path] = f"file-{number}{path.suffix}"
        shutil.copyfile(path, folder / names[path])
    params = line.job.with_paths(names.__getitem__).to_line()
    key = batch_key(line.job, [bucket.name for bucket in line.job.buckets])
    return queue.submit(NewJob(id, OWNER, line.digest, key, params, {"line": line.number}))[0]
