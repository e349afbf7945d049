"""The files that a run writes: their checks, its resume file, the failure log, the sidecar and the
latency report.

Of a file that exists a run replaces only one that another run wrote.

After every stage a run writes its contexts, latents and the noise generator's state beside the
output. --resume continues from there to the same bits. With a --save-tensors file, which has a
finished run's latents, it repeats only the decoding.
"""

import glob
import json
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron import artifacts, machine
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
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
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Stage
from ltx_neuron.report.latency import Recorder
from ltx_neuron.report.price import Price
from ltx_neuron.sampling.chunks import carry
from ltx_neuron.sampling.shapes import AUDIO_CHANNELS, MEL_BINS, VIDEO_CHANNELS, video_latent_shape
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile, write_tensors

LOG_SUFFIX = ".failure.log"
SUFFIX = ".resume.safetensors"
_IDENTITY, _GENERATOR, _WINDOW = "job", "generator_state", "window"
_OF_THE_MACHINE = ("host_dtype",)  # fields of a run's identity that change only rounding
_CONTEXTS = ("video_context", "audio_context")
_LATENTS = ("video", "audio", "generated_keyframes")  # of a stage
# Tensors of a whole chunked clip, not of one window
WHOLE = ("attention_mask", *_CONTEXTS, "hidden_states", "mel", "audio_latent", "audio_reference")
WHOLE += "waveform", "waveform_rate"
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


# --- a running job, and its resume file -----------------------------------------------------------


class JobRun:
    """A running job.

    contexts   of its prompt and, if a pass uses it, of its negative prompt
    generator  draws the noise of all stages in the reference's order
    tensors    the named intermediates so far, as --save-tensors writes them
    error      the error of this job, in a batch
    window     the number of the window of a chunked clip that `tensors` are of
    finished   reads the tensors of a window that an earlier process finished
    """

    window = 0
    finished: Callable[[int], dict[str, Tensor]] | None = None

    def __init__(
        self, job: Job, contexts: Sequence[Contexts] = (), generator: torch.Generator | None = None
    ):
        self.job = job
        self.error: Exception | None = None
        self.generator = generator or torch.Generator().manual_seed(job.seed)
        self.tensors: dict[str, Tensor] = {}
        self.contexts: list[Contexts] = []
        if contexts:
            self.take_contexts(contexts)

    def take_contexts(self, contexts: Sequence[Contexts]) -> None:
        """Store the contexts of the encoded prompts."""
        self.contexts = [*contexts]
        prompt = self.contexts[0]
        names = ("attention_mask", *_CONTEXTS, "hidden_states")
        values = prompt.attention_mask, prompt.video, prompt.audio, prompt.hidden_states
        self.tensors |= {n: x for n, x in zip(names, values, strict=True) if x is not None}

    def contexts_of(self, stage: Stage) -> list[Contexts]:
        """The contexts of a stage's prompt and of the negative prompt."""
        count = len(self.job.texts_of_windows)
        number = stage.chunk.share(count) if stage.chunk else 0
        return [self.contexts[number], *self.contexts[count:]]

    @property
    def stages_left(self) -> list[Stage]:
        """The unfinished stages."""
        last = "audio" if self.job.sound_only else "video"

        def is_left(stage: Stage) -> bool:
            ahead = stage.chunk.number - self.window if stage.chunk else 0
            return ahead > 0 or not ahead and f"{stage.key}_{last}" not in self.tensors

        return [*filter(is_left, self.job.stages)]

    @property
    def left(self) -> str:
        """The unfinished stages as text."""
        stages = self.stages_left
        if len(stages) > 1 and (window := stages[0].window or stages[0].chunk):
            first = window.number + bool(stages[0].chunk)
            return f"windows {first} to {window.count} of {window.count} are left"
        return f"{', '.join(stage.title for stage in stages) or 'the decoding'} is left"

    def finish(
        self, stage: Stage, video: Tensor, audio: Tensor, keyframes: Tensor | None = None
    ) -> None:
        """Store a stage's latents, (1, 128, F, h, w) and (1, 8, Ta, 16), and those of its generated
        keyframes, (1, 128, K, h, w)."""
        if not self.job.sound_only:
            self.tensors[f"{stage.key}_video"] = video
        if not (stage.temporal or self.job.silent):
            self.tensors[f"{stage.key}_audio"] = audio
        if keyframes is not None:
            self.tensors[f"{stage.key}_generated_keyframes"] = keyframes

    @property
    def window_has_ended(self) -> bool:
        """Whether all stages of the window have."""
        return not any(x.chunk and x.chunk.number == self.window for x in self.stages_left)

    def begin_next_window(self) -> None:
        """Keep of the tensors what the next window of a chunked clip has of this one."""
        before, of = self.job.windows[self.window : self.window + 2]
        assert before.chunk
        carried = carry(before.chunk, of.carried_names, of.size.frame_rate, self.tensors)
        kept = {name: self.tensors[name] for name in WHOLE if name in self.tensors}
        self.tensors, self.window = kept | carried, self.window + 1


def state_path(output_path: Path) -> Path:
    """The resume file of a video's run."""
    return output_path.with_suffix(SUFFIX)


def write_run_tensors(path: Path, tensors: dict[str, Tensor], identity: dict) -> None:
    """Write named tensors with their run's identity."""
    write_tensors(path, tensors, {_IDENTITY: json.dumps(identity)})


def _latent_shapes(job: Job, window: int = 0) -> dict[str, tuple[int, ...]]:
    """Shapes of the latents in a resume file, by their --save-tensors names. window: of a chunked
    clip, the number of that which runs."""
    shapes = {}
    for stage in job.clips[window].stages:
        of = job.of(stage)
        clip = video_latent_shape(stage.height, stage.width, of.size.num_frames)
        sound = (1, AUDIO_CHANNELS, of.size.audio_frames, MEL_BINS)
        if not job.sound_only:
            shapes[f"{stage.key}_video"] = (1, VIDEO_CHANNELS, *clip)
        if not (stage.temporal or job.silent):
            shapes[f"{stage.key}_audio"] = sound
        if count := len(of.generated_keyframes(stage.upsampled)):
            keyframes = (1, VIDEO_CHANNELS, count, *clip[1:])
            shapes[f"{stage.key}_generated_keyframes"] = keyframes
    if job.extension:  # its windows need the known latents
        shapes["video_latent"] = (1, VIDEO_CHANNELS, *job.latent_shape)
    if job.extension or job.sound:
        latents = job.size.audio_frames if job.windows else job.audio_latents
        shapes["audio_latent"] = (1, AUDIO_CHANNELS, latents, MEL_BINS)
    return shapes


def _kept(job: Job, window: int = 0) -> tuple[str, ...]:
    """Names of a job's tensors in its resume file."""
    sound = ("waveform", "waveform_rate") if job.sound else ()  # for its MP4
    latents = *_latent_shapes(job, window), *job.clips[window].carried_names, "upsampled"
    return "attention_mask", *_CONTEXTS, *sound, *latents


def _further_contexts(job: Job) -> list[tuple[str, str]]:
    """Names of the contexts of the other prompts in a resume file."""
    count = len(job.texts_of_windows)
    prefixes = [f"prompt_{number}_" for number in range(1, count)]
    prefixes += ["negative_"] * (len(job.texts) > count)
    return [(prefix + _CONTEXTS[0], prefix + _CONTEXTS[1]) for prefix in prefixes]


def save_state(path: Path, run: JobRun, identity: dict) -> None:
    """Write a resume file for `restore_state` and, of a window that has ended, one with what its
    decoding needs."""
    tensors = {n: run.tensors[n] for n in _kept(run.job, run.window) if n in run.tensors}
    generator = {_GENERATOR: run.generator.get_state()}
    if run.job.windows and run.window_has_ended:
        ended = {name: x for name, x in tensors.items() if name not in WHOLE}
        write_run_tensors(window_path(path, run.window), ended | generator, identity)
    for names, other in zip(_further_contexts(run.job), run.contexts[1:], strict=True):
        tensors |= dict(zip(names, (other.video, other.audio), strict=True))
    generator |= {_WINDOW: torch.tensor(run.window)} if run.job.windows else {}
    write_run_tensors(path, tensors | generator, identity)


def window_path(state: Path, number: int) -> Path:
    """The file of an ended window beside a chunked clip's resume file."""
    return state.with_name(f"{state.name.removesuffix(SUFFIX)}.window_{number}{SUFFIX}")


def state_files(state: Path) -> list[Path]:
    """A run's resume file, and those of its windows."""
    pattern = glob.escape(state.name.removesuffix(SUFFIX)) + f".window_*{SUFFIX}"
    return [state, *state.parent.glob(pattern)]


def remove_state(state: Path) -> None:
    """Delete a finished run's resume file and those of its windows."""
    for path in state_files(state):
        path.unlink(missing_ok=True)


def interrupted_run(
    job: Job, outputs: OutputPaths, identity: dict, dtype: torch.dtype
) -> JobRun | None:
    """The run that --resume selects; None for a new one."""
    assert outputs.video
    state = state_path(outputs.video)
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
    run = restore_state(path, job, identity, dtype)
    print(f"resuming from {path}: {run.left}")
    return run


def restore_state(
    path: Path, job: Job, identity: dict, dtype: torch.dtype, exact: bool = False
) -> JobRun:
    """The run after its last finished stage.

    Raises UserError for a file of another job, a modified file and any other file. exact: also if
    the host dtype differs, so that frames may differ in rounding; otherwise this prints a warning.
    """
    file = TensorFile(path, "leave --resume out to start over")
    _check_identity(path, file, identity, () if exact else _OF_THE_MACHINE)
    window = int(file.read(_WINDOW)) if job.windows and _WINDOW in file.shapes else 0
    others = _further_contexts(job)
    names = (*_kept(job, window), *chain(*others), _GENERATOR)
    tensors = {name: file.read(name) for name in names if name in file.shapes}
    _check_tensors(path, tensors, job, dtype, window)
    # --save-tensors files lack the negative prompt and the generator, which only steps need.
    contexts = [
        Contexts(tensors[video], tensors[audio], tensors["attention_mask"], None)
        for video, audio in (_CONTEXTS, *others)
        if video in tensors
    ]
    run = JobRun(job, contexts)
    run.tensors |= {name: tensors[name] for name in _kept(job, window) if name in tensors}
    if job.windows:
        run.window, run.finished = window, partial(_read_window, path, identity)
        for number in range(window):
            run.finished(number)
    if _GENERATOR in tensors:
        run.generator.set_state(tensors[_GENERATOR])
    elif run.stages_left:
        raise UserError(
            f"--resume {path} lacks {run.stages_left[0].title} and the state to run it; leave it"
            " out to start over"
        )
    return run


def _read_window(state: Path, identity: dict, number: int) -> dict[str, Tensor]:
    """The tensors of an ended window. Raises UserError as `restore_state`."""
    path = window_path(state, number)
    file = TensorFile(path, "leave --resume out to start over")
    _check_identity(path, file, identity, _OF_THE_MACHINE)
    return {name: file.read(name) for name in file.shapes if name != _GENERATOR}


def _check_identity(path: Path, file: TensorFile, identity: dict, may_differ: tuple) -> None:
    try:
        stored = json.loads(file.metadata[_IDENTITY])
        # Through JSON, so that tuples and lists compare as equal.
        differences = artifacts.differences(json.loads(json.dumps(identity)), stored)
    except (KeyError, ValueError, AttributeError, TypeError):
        raise UserError(
            f"--resume {path} is not a resume file of {command('generate')}; leave it out to start"
            " over"
        ) from None
    listed = [
        f"{k}: got {got}, wanted {want}" for k, want, got in differences if k not in may_differ
    ]
    for key, here, there in differences:
        if key in may_differ:
            print(
                f"--resume {path} is from a run with {key} {there}, this machine's is {here}:"
                " its frames may differ in rounding"
            )
    if listed:
        raise UserError(
            f"--resume {path} is from another run: {'; '.join(listed)}.\nType that run's flags, or"
            " leave --resume out"
        )


def _check_tensors(
    path: Path, tensors: dict[str, Tensor], job: Job, dtype: torch.dtype, window: int
) -> None:
    """Raise UserError for missing tensors, and for latents or sound with another shape or dtype."""
    stages = job.clips[window].stages
    later = {f"{stage.key}_{kind}" for stage in stages[1:] for kind in _LATENTS}
    needed = [name for name in _kept(job, window) if name not in {*later, "upsampled"}]
    expected = {name: (shape, dtype) for name, shape in _latent_shapes(job, window).items()}
    if job.sound and "waveform" in tensors:
        expected["waveform"] = (2, tensors["waveform"].numel() // 2), torch.float32
        expected["waveform_rate"] = (), torch.int64
    problems = [f"{name}: missing" for name in needed if name not in tensors]
    for name, (shape, kind) in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (shape, kind):
            problems.append(
                f"{name}: {list(tensor.shape)} {tensor.dtype}, wanted {list(shape)} {kind}"
            )
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(
            f"--resume {path} does not have this run's tensors:\n  {listed}\nLeave it out to start"
            " over"
        )


def is_state(path: Path) -> bool:
    """Whether `save_state` wrote a file; a run may replace and delete those. A --save-tensors file
    has no generator state."""
    try:
        file = TensorFile(path, "")
    except UserError:
        return False
    return _IDENTITY in file.metadata and _GENERATOR in file.shapes


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


def write_sidecar(
    video: Path, job: Job, recorder: Recorder, workspace: Workspace, notes: list[str]
) -> dict:
    """Write the JSON beside a video; returns the latency report so far."""
    report = make_report(recorder, workspace, job.describe())
    write_json(video.with_suffix(".json"), sidecar(job, report, notes))
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
    return workspace.identity | {"code": artifacts.code_digest(workspace.profile.backend)}
