"""Runs a job or a batch on an engine for ltx-neuron generate, writes the output files, and prints
the latency table."""

import platform
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from ltx_neuron import batch, progress
from ltx_neuron.artifacts import code_digest
from ltx_neuron.batch import Line
from ltx_neuron.decode_queue import Clip, Result
from ltx_neuron.durations import with_durations
from ltx_neuron.engine import Engine
from ltx_neuron.errors import UserError, require
from ltx_neuron.files import check_folder, check_outputs, check_writable, write_json
from ltx_neuron.host.images import content_digest
from ltx_neuron.host.video import (
    FRAME_NAME,
    check_frames,
    check_output_path,
    frames_in,
    write_frames,
)
from ltx_neuron.job import Job
from ltx_neuron.machine import package_version
from ltx_neuron.preflight import RunOptions
from ltx_neuron.progress import JobRun
from ltx_neuron.report import table
from ltx_neuron.report.price import Price
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.workspace import Workspace

# Packages that affect outputs.
_PACKAGES = ("torch", "ltx-core", "transformers", "safetensors", "av")


@dataclass(frozen=True)
class Outputs:
    """Output files of a generation, and the state to resume from.

    video    the MP4, or the WAV of sound alone; beside it a JSON of the same name and, during the
             run, its resume file
    folder   of a batch: 0001.mp4 and so on, results.json
    frames   a folder for every frame as PNG
    tensors  a safetensors file for every named intermediate
    report   a JSON file for the latency report
    price    of the machine, for the latency report
    resume   True: from the resume file beside `video`; a path: from that file
    """

    video: Path | None = None
    folder: Path | None = None
    frames: Path | None = None
    tensors: Path | None = None
    report: Path | None = None
    price: Price | None = None
    resume: bool | str | None = None

    def check(self, inputs: dict[str, Path], sound_only: bool = False) -> None:
        """Raise UserError unless every output is writable and has a file of its own.

        inputs  files and folders that the job reads, by flag
        """
        require(self.video, "--output-path", "--prompt", "Type for example --output-path out.mp4")
        assert self.video
        check_output_path(self.video, sound_only)
        if sound_only and self.frames:
            raise UserError("--sound-only makes no picture: leave out --save-frames")
        beside = progress.beside(self.video).items()
        named = {
            "--output-path": self.video,
            **{f"the {kind} of --output-path": path for kind, path in beside},
            "--save-tensors": self.tensors,
            "--perf-dump-path": self.report,
        }
        outputs = {name: path for name, path in named.items() if path}
        for name, path in outputs.items():
            check_writable(path, f"{name.split()[-1]} FILE")
        if self.frames:
            check_folder(self.frames, "--save-frames DIR")
            # The number of frames is unknown here: check existing ones, and outputs that are named
            # like one.
            names = {path.name for path in (*frames_in(self.frames), *outputs.values())}
            for name in sorted(filter(FRAME_NAME.fullmatch, {*names, "frame_00000.png"})):
                outputs[f"{name} of --save-frames"] = self.frames / name
        # --resume may name the run's own state.
        resumed = Path(self.resume) if isinstance(self.resume, str) else None
        if resumed and resumed != progress.state_path(self.video):
            inputs = inputs | {"--resume": resumed}
        check_outputs(outputs, inputs)
        progress.check_replaceable(self.video, "--output-path")
        if self.frames:
            check_frames(self.frames)

    def check_batch(self, prompt: str | None) -> None:
        """Raise UserError for outputs that a batch does not have or that are not writable."""
        example = "Type for example --output-dir outputs"
        require(self.folder, "--output-dir", "--prompts-file", example)
        for flag, value in {
            "--prompt": prompt,
            "--output-path": self.video,
            "--save-tensors": self.tensors,
            "--save-frames": self.frames,
            "--resume": self.resume,
        }.items():
            if value:
                raise UserError(f"{flag} is for one video; a --prompts-file writes to --output-dir")
        assert self.folder
        check_folder(self.folder, "--output-dir DIR")
        if self.report:
            check_writable(self.report, "--perf-dump-path FILE")


def generate(job: Job, workspace: Workspace, options: RunOptions, outputs: Outputs) -> None:
    """Make one video. User's mistakes raise UserError before a model loads."""
    job, recorder = workspace.resolved(job), Recorder(outputs.price)
    engine = Engine(workspace, recorder, options)
    outputs.check(engine.preflight.files_read([job]), job.sound_only)
    assert outputs.video
    state = progress.state_path(outputs.video)
    with progress.logging_failure(progress.log_path(outputs.video), state), engine:
        (job,) = with_durations(engine, [job])
        # Called first after `run` has checked the job, so its files exist.
        identity = cache(partial(run_identity, job, workspace, options))
        engine.on_stage_end = lambda run: progress.save_state(state, run, identity())

        def resume(job: Job) -> JobRun | None:
            return interrupted_run(job, outputs, identity(), workspace.dtype)

        def write(clip: Clip) -> None:
            assert outputs.video
            with recorder.phase(clip.phase):
                # Each file appears under its name only when whole.
                if outputs.frames:
                    clip.chunks = write_frames(outputs.frames, clip.chunks)
                clip.write(outputs.video)

        # Tensors include all frames and are written before the video.
        (result,) = engine.run([job], resume=resume, write=None if outputs.tensors else write)
        assert isinstance(result, Result)
        if outputs.tensors:
            progress.write_run_tensors(outputs.tensors, result.tensors, identity())
            write(result.clip())
        show(write_sidecar(outputs.video, job, engine), outputs)  # before the state is removed
    print(f"{'sound' if job.sound_only else 'video'}: {outputs.video}")


def generate_batch(
    lines: list[Line],
    prompts_file: Path,
    workspace: Workspace,
    options: RunOptions,
    outputs: Outputs,
) -> None:
    """Make the videos of a prompts file's lines. Exits with 1 if one failed."""
    recorder = Recorder(outputs.price)

    def save(clip: Clip, path: Path) -> None:
        with recorder.phase(clip.phase):
            clip.write(path)
        write_sidecar(path, clip.job, engine)

    assert outputs.folder
    log = progress.log_path(outputs.folder / batch.RESULTS)
    with progress.logging_failure(log), Engine(workspace, recorder, options) as engine:
        lines = batch.with_lengths(lines, engine, partial(with_durations, engine))
        read = engine.preflight.files_read([line.job for line in lines])
        read["--prompts-file"] = prompts_file
        batch.check_outputs(lines, outputs.folder, outputs.report, read)
        entries = batch.run(
            lines, engine, outputs.folder, save, lambda job: run_identity(job, workspace, options)
        )
    described = {"prompts_file": str(prompts_file), "lines": len(lines)}
    show(make_report(recorder, workspace, described), outputs)
    batch.end(outputs.folder, entries)


def run_identity(job: Job, workspace: Workspace, options: RunOptions) -> dict:
    """Everything on which the latents depend, which must be equal to resume a run. Files count by
    content, not by path."""
    return {
        **job.with_paths(content_digest).identity,
        "profile": workspace.profile.name,
        "tp": workspace.tp,
        **workspace.graphs_of(job),
        "neuron_gemma": options.neuron_gemma,
        "compat": options.compat,
        **code_identity(workspace),
    }


def interrupted_run(
    job: Job, outputs: Outputs, identity: dict, dtype: torch.dtype
) -> JobRun | None:
    """The run that --resume selects; None for a new one."""
    assert outputs.video
    state = progress.state_path(outputs.video)
    if outputs.resume is None:
        if state.is_file():
            print(
                f"starting over; {state} is from an interrupted run, which --resume would continue"
            )
        return None
    path = Path(outputs.resume) if isinstance(outputs.resume, str) else state
    if outputs.resume is True and not path.is_file():
        print(f"nothing to resume: no such file {path}; starting over")
        return None
    run = progress.restore_state(path, job, identity, dtype)
    print(f"resuming from {path}: {run.left}")
    return run


def make_report(recorder: Recorder, workspace: Workspace, job: dict) -> dict:
    """The latency report of all recorded phases so far."""
    packages = {package: package_version(package) or "absent" for package in _PACKAGES}
    versions = {"python": platform.python_version(), **packages}
    identity = code_identity(workspace)
    identity["video_decoder"] = workspace.files.decoder
    identity["tuned"] = workspace.tuned_settings and workspace.tuned_settings.describe()
    return recorder.report(job, workspace.profile.name, workspace.tp, versions, identity)


def show(report: dict, outputs: Outputs) -> None:
    """Print the latency table, and write the report if requested."""
    if outputs.report:
        write_json(outputs.report, report)
    print(table.table(report))


def write_sidecar(video: Path, job: Job, engine: Engine) -> dict:
    """Write the JSON beside a video; returns the latency report so far."""
    report = make_report(engine.recorder, engine.workspace, job.describe())
    write_json(video.with_suffix(".json"), sidecar(job, report, engine.preflight.notes(job)))
    return report


def sidecar(job: Job, report: dict, notes: list[str] | None = None) -> dict:
    """Everything needed to reproduce a video."""
    seconds = {phase["name"]: 0.0 for phase in report["phases"]}
    for phase in report["phases"]:
        seconds[phase["name"]] += phase["seconds"] + phase.get("overlapped_seconds", 0.0)
    return {
        **report["job"],
        "notes": notes or [],
        "sigmas": {stage.name: list(stage.sigmas) for stage in job.stages},
        "weight_sets": job.identity["loras"],
        "inputs": digests_of_inputs(job),
        **{key: report[key] for key in ("profile", "tp", "versions", "identity")},
        "seconds": seconds,
        "torch_threads": torch.get_num_threads(),
    }


def digests_of_inputs(job: Job) -> dict[str, str]:
    """The digest of each input file, by flag and path."""
    return {flag: content_digest(path) for flag, path in job.files.items()}


def code_identity(workspace: Workspace) -> dict:
    """What a run's outputs depend on besides the job, with the digest of the graphs' code."""
    return workspace.identity | {"code": code_digest(workspace.profile.backend)}
