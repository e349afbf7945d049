"""The files that a run writes: their checks, the sidecar, the latency report and the failure log.

Of a file that exists a run replaces only one that another run wrote.
"""

import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ltx_neuron import machine
from ltx_neuron.artifacts import code_digest
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.resume import is_state, remove_state, state_files, state_path
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError, require
from ltx_neuron.files import (
    FRAME_NAME,
    MARK,
    check_folder,
    check_frames,
    check_outputs,
    check_writable,
    content_digest,
    first_bytes,
    frames_in,
    has_keys,
    whole_file,
    write_json,
)
from ltx_neuron.host.hdr import exr_folder
from ltx_neuron.job import Job
from ltx_neuron.report import table
from ltx_neuron.report.price import Price
from ltx_neuron.report.recorder import Recorder

LOG_SUFFIX = ".failure.log"
_SIDECAR_KEYS = {"sigmas", "profile", "tp", "versions", "identity"}  # they identify a sidecar
# Packages that affect outputs.
_PACKAGES = ("torch", "ltx-core", "transformers", "safetensors", "av")


@dataclass(frozen=True)
class OutputPaths:
    """Output files of a generation, and the state to resume from."""

    # The MP4, or the WAV of sound alone; beside it a JSON of the same name and, during the run, its
    # resume file
    video: Path | None = None
    folder: Path | None = None  # of a batch: 0001.mp4 and so on, results.json
    frames: Path | None = None  # a folder for every frame as PNG
    tensors: Path | None = None  # a safetensors file for every named intermediate
    report: Path | None = None  # a JSON file for the latency report
    price: Price | None = None  # of the machine, for the latency report
    # True: from the resume file beside `video`; a path: from that file
    resume: bool | str | None = None

    def check(self, inputs: dict[str, Path], job: Job | None = None) -> None:
        """Raise UserError unless every output is writable and has a file of its own.

        inputs  files and folders that the job reads, by flag
        """
        job = job or Job()
        require(self.video, "--output-path", "--prompt", "Type for example --output-path out.mp4")
        assert self.video
        check_output_path(self.video, job.sound_only, job.alpha_gen)
        if (job.sound_only or job.media.hdr) and self.frames:
            why = "--sound-only makes no picture" if job.sound_only else "HDR writes EXR files"
            raise UserError(f"{why}: leave out --save-frames")
        siblings = sibling_files(self.video).items()
        named = {
            "--output-path": self.video,
            **{f"the {kind} of --output-path": path for kind, path in siblings},
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
        if resumed and resumed != state_path(self.video):
            inputs = inputs | {"--resume": resumed}
        check_outputs(outputs, inputs)
        check_replaceable(self.video, "--output-path", job)
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


def check_output_path(path: str | Path, sound_only: bool = False, alpha: bool = False) -> None:
    """Raise UserError unless an MP4, a sound's WAV, or a matte's MOV can be written to `path`."""
    suffix, path = ".wav" if sound_only else ".mp4", Path(path)
    if path.is_dir():
        raise UserError(
            f"--output-path {path} is a folder; type --output-path {path / f'video{suffix}'}"
        )
    if path.suffix.lower() not in (suffix, ".mov" if alpha else suffix):
        if sound_only:
            raise UserError(
                f"--sound-only makes no picture, got --output-path {path}: a sound is written as"
                f" .wav; type --output-path {path.with_suffix(suffix)}"
            )
        alone = ", or type --sound-only for a sound" if path.suffix.lower() == ".wav" else ""
        raise UserError(
            f'the output is an MP4 file, got "{path}"; pass --output-path FILE.mp4{alone}'
        )
    check_writable(path, f"--output-path FILE{suffix}")


# --- files beside the video ----------------------------------------------------------------------


def log_path(video: Path) -> Path:
    """The failure log of a video's run."""
    return video.with_suffix(LOG_SUFFIX)


def sibling_files(video: Path) -> dict[str, Path]:
    """The files that a run always writes beside its video, by kind."""
    return {"JSON": video.with_suffix(".json"), "state": state_path(video), "log": log_path(video)}


def check_replaceable(video: Path, flag: str, job: Job) -> None:
    """Raise UserError if a run would replace a file beside the video that no run wrote."""
    for kind, path in sibling_files(video).items():
        if os.path.lexists(path) and not (path.is_file() and _IS_OURS[kind](path)):
            raise not_ours(path, flag)
    if job.media.hdr:
        check_frames(exr_folder(video, job.exr_colorspace), flag)
    for path in state_files(state_path(video))[1:]:
        if not is_state(path):
            raise not_ours(path, flag)


def is_sidecar(path: Path) -> bool:
    """Whether a file is a run's sidecar JSON, not for example a latency report."""
    return has_keys(path, _SIDECAR_KEYS)


def is_log(path: Path) -> bool:
    """Whether a file is a run's failure log."""
    return first_bytes(path, 100).partition(b"\n")[0].rstrip() == MARK.encode()


_IS_OURS = {"JSON": is_sidecar, "state": is_state, "log": is_log}


def not_ours(path: Path, flag: str) -> UserError:
    return UserError(
        f"{path} exists and this toolkit did not write it; move it or choose another {flag}"
    )


# --- the failure log ------------------------------------------------------------------------------


@contextmanager
def logging_failure(log: Path, state: Path | None = None) -> Iterator[None]:
    """Write `log`, with the error and the machine's load, if the block fails other than by a user's
    mistake. Print how to resume if the block wrote `state`. After a success delete both files."""

    def written() -> int | None:
        return state.stat().st_mtime_ns if state and state.is_file() else None

    before = written()
    try:
        yield
    except BaseException as error:
        if written() not in (None, before):
            message = f"kept: {state}; type the same command with --resume to continue"
            print(message, file=sys.stderr)
        # The user must fix a full disk as well.
        if isinstance(error, Exception) and not isinstance(error, UserError | OSError):
            with suppress(OSError):  # the error itself is still raised
                _write_log(log, error)
                print(f"log: {log}", file=sys.stderr)
        raise
    log.unlink(missing_ok=True)
    if state:
        remove_state(state)


def _write_log(path: Path, error: Exception) -> None:
    lines = [
        MARK,
        time.strftime("%Y-%m-%d %H:%M:%S %z"),
        f"command: {shlex.join(sys.argv)}",
        f"error: {type(error).__name__}: {error}",
        *filter(None, [getattr(error, "details", "")]),
        *machine.load(),
        "".join(traceback.format_exception(error)),
    ]
    with whole_file(path) as partial:
        partial.write_text("\n".join(lines))


# --- the sidecar and the report -------------------------------------------------------------------


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


def make_report(recorder: Recorder, workspace: Workspace, job: dict) -> dict:
    """The latency report of all recorded phases so far."""
    packages = {package: machine.package_version(package) or "absent" for package in _PACKAGES}
    versions = {"python": platform.python_version(), **packages}
    identity = code_identity(workspace)
    identity["video_decoder"] = workspace.files.decoder
    identity["tuned"] = workspace.tuned_settings and workspace.tuned_settings.describe()
    return recorder.report(job, workspace.profile.name, workspace.tp, versions, identity)


def show(report: dict, outputs: OutputPaths) -> None:
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
