"""What generate_ltx23.py does once its flags are parsed: flags -> Job -> Engine -> files and the
latency table."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ltx_neuron import batch, flags, progress
from ltx_neuron.artifacts import code_digest
from ltx_neuron.config import SUPPORTED_VERSION
from ltx_neuron.decode_queue import Result
from ltx_neuron.engine import Engine
from ltx_neuron.errors import UserError, require
from ltx_neuron.files import check_folder, check_writable, write_json
from ltx_neuron.host.images import content_digest
from ltx_neuron.host.video import check_output_path, write_frames, write_video
from ltx_neuron.job import Job
from ltx_neuron.progress import JobRun
from ltx_neuron.report import table
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.workspace import Workspace

_PACKAGES = ("torch", "ltx-core", "transformers", "safetensors", "av")


def generate(args: argparse.Namespace) -> None:
    """Make the video or the batch that is asked for; raises UserError before anything loads where
    something does not fit."""
    recorder = Recorder()
    args.recipe = flags.recipe(args)
    if args.prompts_file:
        batch_of(args, recorder)
        return
    job = job_of(args)
    job.check()
    require(args.output_path, "--output-path", "--prompt", "Type for example --output-path out.mp4")
    check_outputs(args)
    state = progress.beside(args.output_path)
    with progress.kept(state), engine_of(args, recorder) as engine:
        engine.check([job])
        described = what_decides(args, job, engine.workspace)
        engine.on_stage_end = lambda run: progress.keep(state, run, described)
        (result,) = engine.run(
            [job], begun=lambda job: begun_run(args, job, described, engine.workspace)
        )
        with recorder.phase("encode_mp4"):
            write(result, args, described)
    said = report_of(recorder, engine.workspace, job.describe())
    write_json(args.output_path.with_suffix(".json"), sidecar(job, said))
    if args.perf_dump_path:
        recorder.write(args.perf_dump_path)
    print(table.table(said))
    print(f"video: {args.output_path}")


def batch_of(args: argparse.Namespace, recorder: Recorder) -> None:
    """Every line of --prompts-file, into --output-dir."""
    folder = require(
        args.output_dir, "--output-dir", "--prompts-file", "Type for example --output-dir outputs"
    )
    for flag in ("prompt", "output_path", "save_tensors", "save_frames", "resume"):
        if getattr(args, flag):
            raise UserError(
                f"--{flag.replace('_', '-')} is for one video; a --prompts-file writes to"
                " --output-dir"
            )
    check_folder(folder, "--output-dir DIR")
    if args.perf_dump_path:
        check_writable(args.perf_dump_path, "--perf-dump-path FILE")
    engine = engine_of(args, recorder)
    parser = batch.LineParser(add_help=False, allow_abbrev=False)
    flags.add_job(parser)
    lines = batch.read_lines(args.prompts_file, parser, args, job_of, engine.workspace.identity)

    def save(result: Result, path: Path) -> None:
        with recorder.phase("encode_mp4"):
            write_video(path, result.frames, result.frame_rate, result.waveform, result.sample_rate)
        said = report_of(recorder, engine.workspace, result.job.describe())
        write_json(path.with_suffix(".json"), sidecar(result.job, said))

    with engine:
        entries = batch.run(
            lines, engine, folder, save, lambda job: what_decides(args, job, engine.workspace)
        )
    said = report_of(
        recorder, engine.workspace, {"prompts_file": str(args.prompts_file), "lines": len(lines)}
    )
    if args.perf_dump_path:
        recorder.write(args.perf_dump_path)
    print(table.table(said))
    failed = [entry["line"] for entry in entries if entry["status"] != "done"]
    print(
        f"videos: {folder} ({len(entries) - len(failed)} done, {len(failed)} failed;"
        f" {batch.RESULTS})"
    )
    if failed:
        raise SystemExit(1)


def engine_of(args: argparse.Namespace, recorder: Recorder) -> Engine:
    engine = Engine(
        flags.workspace(args, writes=False),
        recorder,
        neuron_gemma=args.neuron_gemma,
        compat=COMPAT[args.compat],
        spatial_upsampler_path=args.spatial_upsampler_path,
        temporal_upsampler_path=args.temporal_upsampler_path,
        warmup=args.warmup,
    )
    engine.caches_prompts = not (
        args.no_prompt_cache or args.save_tensors
    )  # hidden states are not kept
    return engine


def what_decides(args: argparse.Namespace, job: Job, workspace: Workspace) -> dict:
    """Everything that the latents depend on: a run may be resumed only where all of it is the
    same."""
    images = [content_digest(image.path) for image in job.images]
    how = {
        "profile": workspace.profile.name,
        "tp": workspace.tp,
        "blocks_per_graph": workspace.blocks_per_graph,
        "neuron_gemma": args.neuron_gemma,
        "compat": args.compat,
    }
    return {**job.describe(), "images_sha256": images, **how, **identity_of(workspace)}


def begun_run(
    args: argparse.Namespace, job: Job, described: dict, workspace: Workspace
) -> JobRun | None:
    """The run that --resume names; None where there is none to continue."""
    state = progress.beside(args.output_path)
    if args.resume is None:
        if state.is_file():
            print(
                f"{state} is of an interrupted run; this one begins anew (--resume continues that"
                " one)"
            )
        return None
    path = state if args.resume is True else Path(args.resume)
    if args.resume is True and not path.is_file():
        print(f"nothing to resume: there is no {path}; beginning anew")
        return None
    run = progress.restore(path, job, described, workspace.dtype)
    print(
        f"resuming from {path}: {', '.join(stage.name for stage in run.left) or 'the decoding'} is"
        " left"
    )
    return run


def identity_of(workspace: Workspace) -> dict:
    return workspace.identity | {"code": code_digest(workspace.profile.backend)}


def report_of(recorder: Recorder, workspace: Workspace, job: dict) -> dict:
    identity = identity_of(workspace)
    return recorder.report(job, workspace.profile.name, workspace.tp, versions(), identity)


def job_of(args: argparse.Namespace) -> Job:
    """The job the flags, or a line's keys, describe."""
    return Job(
        prompt=args.prompt or "",
        size=flags.size(args),
        seed=args.seed,
        images=flags.images(args),
        num_inference_steps=args.num_inference_steps,
        negative_prompt=args.negative_prompt,
        recipe=args.recipe,
        guidance=flags.guidance(args, SUPPORTED_VERSION, args.recipe),
        upscale=args.upscale,
    )


def check_outputs(args: argparse.Namespace) -> None:
    """Raise UserError unless all that is asked for can be written, each to a file of its own."""
    check_output_path(args.output_path)
    inputs = {
        "--checkpoint-path": args.checkpoint_path,
        "--spatial-upsampler-path": args.spatial_upsampler_path,
        "--temporal-upsampler-path": args.temporal_upsampler_path,
    }
    outputs = {
        "--output-path": args.output_path,
        "the JSON of --output-path": args.output_path.with_suffix(".json"),
        "the state of --output-path": progress.beside(args.output_path),
        "--save-tensors": args.save_tensors,
        "--perf-dump-path": args.perf_dump_path,
    }
    taken = {path.resolve(): flag for flag, path in inputs.items() if path}
    for flag, path in outputs.items():
        if path is None:
            continue
        check_writable(path, f"{flag.split()[-1]} FILE")
        if path.resolve() in taken:
            raise UserError(
                f"{taken[path.resolve()]} and {flag} are the same file {path}; pass another name"
            )
        taken[path.resolve()] = flag
    if args.save_frames:
        check_folder(args.save_frames, "--save-frames DIR")


def write(result: Result, args: argparse.Namespace, described: dict) -> None:
    """The MP4 and what else was asked for; each appears under its name only when whole."""
    args.output_path.parent.mkdir(parents=True, exist_ok=True)
    if args.save_tensors:
        progress.write(args.save_tensors, result.tensors, described)
    write_video(
        args.output_path, result.frames, result.frame_rate, result.waveform, result.sample_rate
    )
    if args.save_frames:
        write_frames(args.save_frames, result.frames)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def sidecar(job: Job, said: dict) -> dict:
    """What made this video: enough to make it again."""
    sigmas = {stage.name: list(stage.sigmas) for stage in job.stages}
    timings = {phase["name"]: 0.0 for phase in said["phases"]}
    for phase in said["phases"]:
        timings[phase["name"]] += phase["seconds"] + phase.get("overlapped_seconds", 0.0)
    keys = ("profile", "tp", "versions", "identity")
    return {
        **said["job"],
        "sigmas": sigmas,
        **{key: said[key] for key in keys},
        "seconds": timings,
        "torch_threads": torch.get_num_threads(),
    }
