"""A running job, and its resume file on disk, from which --resume continues to the same bits.

After every stage a run writes its contexts, latents and the noise generator's state beside the
output. --resume with a --save-tensors file, which has a finished run's latents, repeats only the
decoding. A failed run also writes a log with the cause.
"""

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron import artifacts, machine
from ltx_neuron.errors import UserError
from ltx_neuron.files import MARK, first_bytes, has_keys, whole_file, write_tensors
from ltx_neuron.host.arithmetic import CHOSEN_FIELDS
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Stage
from ltx_neuron.sampling import latents
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.tensorfile import TensorFile

SUFFIX, LOG_SUFFIX = ".resume.safetensors", ".failure.log"
_SIDECAR_KEYS = {"sigmas", "profile", "tp", "versions", "identity"}  # they identify a sidecar
_IDENTITY, _GENERATOR = "job", "generator_state"
_CONTEXTS = ("video_context", "audio_context")
_NEGATIVE_CONTEXTS = ("negative_video_context", "negative_audio_context")


class JobRun:
    """A running job.

    contexts   of its prompt and, if a pass uses it, of its negative prompt
    generator  draws the noise of all stages in the reference's order
    tensors    the named intermediates so far, as --save-tensors writes them
    error      the error of this job, in a batch
    """

    def __init__(
        self, job: Job, contexts: list[Contexts], generator: torch.Generator | None = None
    ):
        self.job, self.contexts = job, contexts
        self.generator = generator or torch.Generator().manual_seed(job.seed)
        self.error: Exception | None = None
        prompt = contexts[0]
        self.tensors: dict[str, Tensor] = {
            "attention_mask": prompt.attention_mask,
            "video_context": prompt.video,
            "audio_context": prompt.audio,
        }
        if prompt.hidden_states is not None:
            self.tensors["hidden_states"] = prompt.hidden_states

    @property
    def stages_left(self) -> list[Stage]:
        """The unfinished stages."""
        last = "audio" if self.job.sound_only else "video"
        return [stage for stage in self.job.stages if f"{stage.key}_{last}" not in self.tensors]

    @property
    def left(self) -> str:
        """The unfinished stages as text."""
        stages = self.stages_left
        if len(stages) > 1 and (window := stages[0].window):
            return f"windows {window.number} to {window.count} of {window.count} are left"
        return f"{', '.join(stage.title for stage in stages) or 'the decoding'} is left"

    def finish(
        self, stage: Stage, video: Tensor, audio: Tensor, keyframes: Tensor | None = None
    ) -> None:
        """Store a stage's latents, (1, 128, F, h, w) and (1, 8, Ta, 16), and those of its generated
        keyframes, (1, 128, K, h, w)."""
        if not self.job.sound_only:
            self.tensors[f"{stage.key}_video"] = video
        if not stage.temporal:
            self.tensors[f"{stage.key}_audio"] = audio
        if keyframes is not None:
            self.tensors[f"{stage.key}_generated_keyframes"] = keyframes


class StageGroup(NamedTuple):
    """Consecutive stages of a job on one weight set; empty if the job already has its latents."""

    run: JobRun
    stages: list[Stage]


def stage_groups(
    runs: list[JobRun], weights_of: Callable[[WeightSet], Path], loaded: Path | None
) -> list[StageGroup]:
    """The order of stages: all that run on one weight set run together, first those on the loaded
    one, else those on a set that no other job needs later, else those of the next job.

    weights_of  the folder of a weight set
    loaded      the loaded weight set's folder
    """
    left = {run: run.stages_left for run in runs}
    groups = [StageGroup(run, []) for run in runs if not left[run]]
    while needed := [[weights_of(x.loras) for x in stages] for stages in left.values() if stages]:
        next_ones = [sets[0] for sets in needed]
        later = {other for sets in needed for other in sets if other != sets[0]}
        free = [weights for weights in next_ones if weights not in later]
        weights = loaded if loaded in next_ones else (free or next_ones)[0]
        for run, stages in left.items():
            group = StageGroup(run, [])
            while stages and weights_of(stages[0].loras) == weights:
                group.stages.append(stages.pop(0))
            groups += [group] if group.stages else []
    return groups


def state_path(output_path: Path) -> Path:
    """The resume file of a video's run."""
    return output_path.with_suffix(SUFFIX)


def log_path(video: Path) -> Path:
    """The failure log of a video's run."""
    return video.with_suffix(LOG_SUFFIX)


def beside(video: Path) -> dict[str, Path]:
    """The files that a run always writes beside its video, by kind."""
    return {"JSON": video.with_suffix(".json"), "state": state_path(video), "log": log_path(video)}


def check_replaceable(video: Path, flag: str) -> None:
    """Raise UserError if a run would replace a file beside the video that no run wrote."""
    for kind, path in beside(video).items():
        if os.path.lexists(path) and not (path.is_file() and _IS_OURS[kind](path)):
            raise not_ours(path, flag)


def is_state(path: Path) -> bool:
    """Whether `save_state` wrote a file; a run may replace and delete those. A --save-tensors file
    has no generator state."""
    try:
        file = TensorFile(path, "")
    except UserError:
        return False
    return _IDENTITY in file.metadata and _GENERATOR in file.shapes


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


def write_run_tensors(path: Path, tensors: dict[str, Tensor], identity: dict) -> None:
    """Write named tensors with their run's identity."""
    write_tensors(path, tensors, {_IDENTITY: json.dumps(identity)})


def _latent_shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Shapes of the latents in a resume file, by their --save-tensors names."""
    shapes = {}
    for stage in job.stages:
        of = job.of(stage)
        clip = latents.video_latent_shape(stage.height, stage.width, of.size.num_frames)
        sound = (1, latents.AUDIO_CHANNELS, of.size.audio_frames, latents.MEL_BINS)
        if not job.sound_only:
            shapes[f"{stage.key}_video"] = (1, latents.VIDEO_CHANNELS, *clip)
        if not stage.temporal:
            shapes[f"{stage.key}_audio"] = sound
        if made := of.generated_keyframes(stage.upsampled):
            keyframes = (1, latents.VIDEO_CHANNELS, len(made), *clip[1:])
            shapes[f"{stage.key}_generated_keyframes"] = keyframes
    if job.extension:  # its windows need the known latents
        shapes["video_latent"] = (1, latents.VIDEO_CHANNELS, *job.latent_shape)
    if job.extension or job.sound:
        shapes["audio_latent"] = (1, latents.AUDIO_CHANNELS, job.audio_latents, latents.MEL_BINS)
    return shapes


def _kept(job: Job) -> tuple[str, ...]:
    """Names of a job's tensors in its resume file."""
    sound = ("waveform", "waveform_rate") if job.sound else ()  # for its MP4
    return ("attention_mask", *_CONTEXTS, *sound, *_latent_shapes(job), "upsampled")


def save_state(path: Path, run: JobRun, identity: dict) -> None:
    """Write a resume file for `restore_state`."""
    tensors = {name: run.tensors[name] for name in _kept(run.job) if name in run.tensors}
    for negative in run.contexts[1:]:
        tensors |= dict(zip(_NEGATIVE_CONTEXTS, (negative.video, negative.audio), strict=True))
    write_run_tensors(path, tensors | {_GENERATOR: run.generator.get_state()}, identity)


def restore_state(
    path: Path, job: Job, identity: dict, dtype: torch.dtype, exact: bool = False
) -> JobRun:
    """The run after its last finished stage.

    Raises UserError for a file of another job, a modified file and any other file. exact: also if
    host arithmetic differs, so that frames may differ in rounding; otherwise this prints a warning.
    """
    file = TensorFile(path, "leave --resume out to start over")
    _check_identity(path, file, identity, () if exact else CHOSEN_FIELDS)
    names = (*_kept(job), *_NEGATIVE_CONTEXTS, _GENERATOR)
    tensors = {name: file.read(name) for name in names if name in file.shapes}
    _check_tensors(path, tensors, job, dtype)
    # --save-tensors files lack the negative prompt and the generator, which only steps need.
    contexts = [
        Contexts(tensors[video], tensors[audio], tensors["attention_mask"], None)
        for video, audio in (_CONTEXTS, _NEGATIVE_CONTEXTS)
        if video in tensors
    ]
    run = JobRun(job, contexts)
    run.tensors |= {name: tensors[name] for name in _kept(job) if name in tensors}
    if _GENERATOR in tensors:
        run.generator.set_state(tensors[_GENERATOR])
    elif run.stages_left:
        raise UserError(
            f"--resume {path} lacks {run.stages_left[0].title} and the state to run it; leave it"
            " out to start over"
        )
    return run


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
    for key, here, there in (each for each in differences if each[0] in may_differ):
        print(
            f"--resume {path} is from a run with {key} {there}, this machine's is {here}:"
            " its frames may differ in rounding"
        )
    if differences := [each for each in differences if each[0] not in may_differ]:
        listed = "; ".join(f"{key}: got {got}, wanted {want}" for key, want, got in differences)
        raise UserError(
            f"--resume {path} is from another run: {listed}.\nType that run's flags, or leave"
            " --resume out"
        )


def _check_tensors(path: Path, tensors: dict[str, Tensor], job: Job, dtype: torch.dtype) -> None:
    """Raise UserError for missing tensors, and for latents or sound with another shape or dtype."""
    made = "video", "audio", "generated_keyframes"
    later = {f"{stage.key}_{name}" for stage in job.stages[1:] for name in made}
    needed = [name for name in _kept(job) if name not in {*later, "upsampled"}]
    problems = [f"{name}: missing" for name in needed if name not in tensors]
    wanted = {name: (shape, dtype) for name, shape in _latent_shapes(job).items()}
    if job.sound and "waveform" in tensors:
        wanted["waveform"] = (2, tensors["waveform"].numel() // 2), torch.float32
        wanted["waveform_rate"] = (), torch.int64
    for name, (shape, kind) in wanted.items():
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
    for path in filter(None, (log, state)):
        path.unlink(missing_ok=True)


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
