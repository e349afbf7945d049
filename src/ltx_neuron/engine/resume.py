"""A running job, and its resume file on disk, from which --resume continues to the same bits.

After every stage a run writes its contexts, latents and the noise generator's state beside the
output. --resume with a --save-tensors file, which has a finished run's latents, repeats only the
decoding.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron import artifacts
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_tensors
from ltx_neuron.host.arithmetic import CHOSEN_FIELDS
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Stage
from ltx_neuron.sampling.shapes import AUDIO_CHANNELS, MEL_BINS, VIDEO_CHANNELS, video_latent_shape
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile

SUFFIX = ".resume.safetensors"
_IDENTITY, _GENERATOR = "job", "generator_state"
_CONTEXTS = ("video_context", "audio_context")
_NEGATIVE_CONTEXTS = ("negative_video_context", "negative_audio_context")
_LATENTS = ("video", "audio", "generated_keyframes")  # of a stage


class JobRun:
    """A running job.

    contexts   of its prompt and, if a pass uses it, of its negative prompt
    generator  draws the noise of all stages in the reference's order
    tensors    the named intermediates so far, as --save-tensors writes them
    error      the error of this job, in a batch
    """

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
        if not (stage.temporal or self.job.silent):
            self.tensors[f"{stage.key}_audio"] = audio
        if keyframes is not None:
            self.tensors[f"{stage.key}_generated_keyframes"] = keyframes


def state_path(output_path: Path) -> Path:
    """The resume file of a video's run."""
    return output_path.with_suffix(SUFFIX)


def write_run_tensors(path: Path, tensors: dict[str, Tensor], identity: dict) -> None:
    """Write named tensors with their run's identity."""
    write_tensors(path, tensors, {_IDENTITY: json.dumps(identity)})


def _latent_shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Shapes of the latents in a resume file, by their --save-tensors names."""
    shapes = {}
    for stage in job.stages:
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
        shapes["audio_latent"] = (1, AUDIO_CHANNELS, job.audio_latents, MEL_BINS)
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


def _check_tensors(path: Path, tensors: dict[str, Tensor], job: Job, dtype: torch.dtype) -> None:
    """Raise UserError for missing tensors, and for latents or sound with another shape or dtype."""
    later = {f"{stage.key}_{kind}" for stage in job.stages[1:] for kind in _LATENTS}
    needed = [name for name in _kept(job) if name not in {*later, "upsampled"}]
    problems = [f"{name}: missing" for name in needed if name not in tensors]
    expected = {name: (shape, dtype) for name, shape in _latent_shapes(job).items()}
    if job.sound and "waveform" in tensors:
        expected["waveform"] = (2, tensors["waveform"].numel() // 2), torch.float32
        expected["waveform_rate"] = (), torch.int64
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
