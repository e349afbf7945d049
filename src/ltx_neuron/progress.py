"""What a generation keeps on disk while it runs, so that --resume can go on from there to the same
bits.

After every stage the contexts, the latents so far and the noise generator's state are written
beside the output. A file of --save-tensors says the same of a finished run: with it the decoding
alone can be run again.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron import artifacts
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_tensors
from ltx_neuron.job import Job, Stage, short_name
from ltx_neuron.sampling import latents
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile

SUFFIX = ".resume.safetensors"
_JOB, _GENERATOR = "job", "generator_state"
_KEPT = (
    "attention_mask",
    "video_context",
    "audio_context",
    "s1_video",
    "s1_audio",
    "upsampled",
    "s2_video",
    "s2_audio",
)
_CONTEXTS = (
    ("video_context", "audio_context"),
    ("negative_video_context", "negative_audio_context"),
)


class JobRun:
    """A job on its way: its contexts (prompt first), its noise generator, and its named tensors so
    far."""

    def __init__(
        self, job: Job, contexts: list[Contexts], generator: torch.Generator | None = None
    ):
        self.job, self.contexts, self.failed = job, contexts, False
        # One generator for all stages, drawn from in the reference's order.
        self.generator = generator or torch.Generator().manual_seed(job.seed)
        prompt = contexts[0]
        self.tensors = {
            "attention_mask": prompt.attention_mask,
            "video_context": prompt.video,
            "audio_context": prompt.audio,
        }
        if prompt.hidden_states is not None:
            self.tensors["hidden_states"] = prompt.hidden_states

    @property
    def left(self) -> list[Stage]:
        """The stages that are still to be run."""
        return [
            stage for stage in self.job.stages if f"{short_name(stage)}_video" not in self.tensors
        ]

    def finish(self, stage: Stage, video: Tensor, audio: Tensor) -> None:
        """Keep a stage's latents."""
        self.tensors |= {f"{short_name(stage)}_video": video, f"{short_name(stage)}_audio": audio}


def beside(output_path: Path) -> Path:
    """Where the run that makes `output_path` keeps its state."""
    return output_path.with_suffix(SUFFIX)


def write(path: Path, tensors: dict[str, Tensor], described: dict) -> None:
    """Write named tensors with the job they are of."""
    write_tensors(path, tensors, {_JOB: json.dumps(described)})


def keep(path: Path, run: JobRun, described: dict) -> None:
    """Write what `restore` needs."""
    kept = {name: run.tensors[name] for name in _KEPT if name in run.tensors}
    for names, contexts in zip(_CONTEXTS, run.contexts, strict=False):
        kept |= dict(zip(names, (contexts.video, contexts.audio), strict=True))
    write(path, kept | {_GENERATOR: run.generator.get_state()}, described)


def restore(path: Path, job: Job, described: dict, dtype: torch.dtype) -> JobRun:
    """The run as it was after its last finished stage. UserError for a file of another job, or of
    none."""
    file = TensorFile(path, "leave --resume out to begin anew")
    try:
        got = json.loads(file.metadata[_JOB])
        different = artifacts.differences(json.loads(json.dumps(described)), got)
    except (KeyError, ValueError, AttributeError, TypeError):
        raise UserError(
            f"--resume {path} is not what a run of generate_ltx23.py left; leave it out to begin"
            " anew"
        ) from None
    if different:
        said = "; ".join(f"{key}: got {got}, wanted {wanted}" for key, wanted, got in different)
        raise UserError(
            f"--resume {path} is of another run: {said}.\nType the flags of that run, or leave"
            " --resume out"
        )
    tensors = {
        name: file.read(name) for name in (*_KEPT, *_CONTEXTS[1], _GENERATOR) if name in file.shapes
    }
    _check(path, tensors, job, dtype)
    # A finished run's file lacks what only further steps would take: the negative prompt and the
    # generator.
    contexts = [
        Contexts(tensors[video], tensors[audio], tensors["attention_mask"], None)
        for video, audio in _CONTEXTS
        if video in tensors
    ]
    run = JobRun(job, contexts)
    run.tensors |= {name: tensors[name] for name in _KEPT if name in tensors}
    if _GENERATOR in tensors:
        run.generator.set_state(tensors[_GENERATOR])
    elif run.left:
        raise UserError(
            f"--resume {path} lacks {run.left[0].name} and what is needed to run it; leave it out"
            " to begin anew"
        )
    return run


def _check(path: Path, tensors: dict[str, Tensor], job: Job, dtype: torch.dtype) -> None:
    """Refuse tensors of other shapes or dtypes than the job's: somebody may have changed the
    file."""
    wanted = {}
    for stage in job.stages:
        shape = latents.video_latent_shape(stage.height, stage.width, job.size.num_frames)
        frames = latents.audio_latent_frames(job.size.num_frames, job.size.frame_rate)
        wanted[f"{short_name(stage)}_video"] = (1, latents.VIDEO_CHANNELS, *shape)
        wanted[f"{short_name(stage)}_audio"] = (1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS)
    problems = [
        f"{name}: missing"
        for name in ("attention_mask", *_CONTEXTS[0], "s1_video", "s1_audio")
        if name not in tensors
    ]
    for name, shape in wanted.items():
        if name in tensors and (tuple(tensors[name].shape), tensors[name].dtype) != (shape, dtype):
            problems.append(
                f"{name}: {list(tensors[name].shape)} {tensors[name].dtype}, wanted {list(shape)}"
                f" {dtype}"
            )
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(
            f"--resume {path} does not hold this run's tensors:\n  {listed}\nLeave it out to begin"
            " anew"
        )


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Within it a run keeps its state at `path`: it goes when all is well, and else is spoken
    of."""
    before = path.stat().st_mtime_ns if path.is_file() else None
    try:
        yield
    except BaseException:
        if path.is_file() and path.stat().st_mtime_ns != before:
            print(
                f"kept: {path}; the same command with --resume goes on from there", file=sys.stderr
            )
        raise
    path.unlink(missing_ok=True)
