"""ltx-neuron generate and ltx-neuron batch: videos with sound from prompts."""

import argparse
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from ltx_neuron import batch, flags, invocation
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.engine.decode import DecodedClip, Result
from ltx_neuron.engine.outputs import (
    JobRun,
    OutputPaths,
    interrupted_run,
    log_path,
    logging_failure,
    run_identity,
    save_state,
    state_path,
    write_run_tensors,
    write_sidecar,
)
from ltx_neuron.engine.run import Engine, lasting, predict, with_durations
from ltx_neuron.files import check_outputs, check_writable
from ltx_neuron.flags import verbs
from ltx_neuron.host.encode_inputs import with_alpha
from ltx_neuron.host.video import write_frames
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder, show


def words_of(
    parser: argparse.ArgumentParser, words: list[str], selects: Callable[[str], bool]
) -> list[str]:
    """The typed words of some flags and their values, without a flag's earlier value that a later
    one replaces. selects: takes a flag's name in a Namespace."""
    typed: list[tuple[argparse.Action, list[str]]] = []
    group: list[str] = []
    for word in words:
        if word.startswith("--"):
            action = parser._option_string_actions[word.partition("=")[0]]
            earlier = [] if isinstance(action.default, list) else typed
            group = next((words for other, words in earlier if other is action), [])
            if not group:
                typed.append((action, group))
            group.clear()
        group.append(word)
    return [word for action, group in typed if selects(action.dest) for word in group]


def arguments(argv: list[str], verb: str = "generate") -> argparse.Namespace:
    """The parsed flags. Their `deciding` holds the typed words of the flags for prepare."""
    parser = getattr(verbs, verb)()
    args = parser.parse_args(argv)
    args.deciding = words_of(parser, parser.words, lambda dest: dest in verbs.DECIDING)
    if verb == "batch":
        if file := args.prompts_path:
            words = [word for word in args.deciding if word != str(file)]
            args.prompts_file, args.deciding = file, ["--prompts-file", str(file), *words]
        elif not args.prompts_file:
            parser.error("which prompts? Type for example prompts.jsonl")
    args.recipe = flags.recipe(args)
    return args


def main(argv: list[str]) -> None:
    run(arguments(argv))


def batch_main(argv: list[str]) -> None:
    run(arguments(argv, "batch"))


def generate(job: Job, workspace: Workspace, options: RunOptions, outputs: OutputPaths) -> None:
    """Make one video. User's mistakes raise UserError before a model loads."""
    job, recorder = workspace.resolved(job), Recorder(outputs.price)
    engine = Engine(workspace, recorder, options)
    outputs.check(engine.preflight.files_read([job]), job)
    assert outputs.video
    state = state_path(outputs.video)
    with logging_failure(log_path(outputs.video), state), engine:
        if job.auto_duration:
            (job,) = with_durations(engine, [job])
        # Called first after `run` has checked the job, so its files exist.
        identity = cache(partial(run_identity, job, workspace, options))
        engine.on_stage_end = lambda run: save_state(state, run, identity())

        def resumed(job: Job) -> JobRun | None:
            return interrupted_run(job, outputs, identity(), workspace.dtype)

        def write(clip: DecodedClip) -> None:
            assert outputs.video
            if outputs.video.suffix.lower() == ".mov":
                clip.chunks = with_alpha(job, clip.chunks)
            # Each file appears under its name only when whole.
            if outputs.frames:
                clip.chunks = write_frames(outputs.frames, clip.chunks)
            clip.write(outputs.video, recorder)

        # Tensors include all frames and are written before the video.
        (result,) = engine.run([job], resume=resumed, write=None if outputs.tensors else write)
        assert isinstance(result, Result)
        if outputs.tensors:
            write_run_tensors(outputs.tensors, result.tensors, identity())
            write(result.clip())
        notes = engine.preflight.notes(job)
        report = write_sidecar(outputs.video, job, recorder, workspace, notes)
        show(report, outputs.report)  # before the state is removed
    print(f"{'sound' if job.sound_only else 'video'}: {outputs.video}")


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


def run(args: argparse.Namespace) -> None:
    flags.check_prediction(args)
    options, outputs = flags.run_options(args), flags.outputs(args)
    flags.check_fleet(args, args.prompts_file)
    if args.prompts_file:
        outputs.check_batch(args.prompt)
        workspace = _workspace(args)
        lines = flags.lines(args, workspace, outputs.folder)
        if args.ray:
            from ltx_neuron.fleet.batch import generate_batch  # Ray is an extra

            generate_batch(lines, args, workspace)
        else:
            batch.generate(lines, args.prompts_file, workspace, options, outputs)
    else:
        job = flags.job(args)
        job.check()
        if getattr(args, "predict_duration", False):
            predict_only(Engine(_workspace(args), Recorder(), options), job, outputs.tensors)
        else:
            generate(job, _workspace(args), options, outputs)


def _workspace(args: argparse.Namespace) -> Workspace:
    workspace = flags.workspace(args, writes=False)
    workspace.prepare_command = invocation.command("prepare", *args.deciding)
    return workspace
