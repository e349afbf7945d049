"""A running job, and its resume file on disk, from which --resume continues to the same bits.

After every stage a run writes its contexts, latents and the noise generator's state beside the
output. --resume with a --save-tensors file, which has a finished run's latents, repeats only the
decoding.
"""

import glob
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron import artifacts
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_tensors
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Stage
from ltx_neuron.sampling.chunks import carry
from ltx_neuron.sampling.shapes import AUDIO_CHANNELS, MEL_BINS, VIDEO_CHANNELS, video_latent_shape
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile

SUFFIX = ".resume.safetensors"
_IDENTITY, _GENERATOR, _WINDOW = "job", "generator_state", "window"
_OF_THE_MACHINE = ("host_dtype",)  # fields of a run's identity that change only rounding
_CONTEXTS = ("video_context", "audio_context")
_LATENTS = ("video", "audio", "generated_keyframes")  # of a stage
# Tensors of a whole chunked clip, not of one window
WHOLE = ("attention_mask", *_CONTEXTS, "hidden_states", "mel", "audio_latent", "audio_reference")
WHOLE += "waveform", "waveform_rate"


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
