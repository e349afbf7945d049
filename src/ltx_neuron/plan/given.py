"""What the host encodes of a job's videos and images, and its memory for that."""

from collections import Counter
from typing import NamedTuple

import torch

from ltx_neuron.host import encoding
from ltx_neuron.host.arithmetic import Arithmetic
from ltx_neuron.job import Job
from ltx_neuron.sampling.latents import TIME_SCALE

Pixels = tuple[int, int, int]  # frames, rows and columns


class GivenClip(NamedTuple):
    """A video as it is encoded: 8k+1 frames of a size, `whole` or in tiles."""

    pixels: Pixels
    whole: bool = False

    @property
    def tiles(self) -> Counter[Pixels]:
        """How many tiles of which frames, rows and columns it is encoded in."""
        return Counter([self.pixels]) if self.whole else encoding.tile_counts(self.pixels)


def given_clips(job: Job) -> list[GivenClip]:
    """The videos that are encoded before the first stage, see host.conditions."""
    clips, size, sides = [], job.size, job.size.first.sides
    if job.retake:
        frames = size.num_frames
        if longer := job.extension:  # what windows see, and a frame where they are before it
            frames = TIME_SCALE * (longer.known_latents + longer.before - 1) + 1
        clips.append(GivenClip((frames, *sides)))
    for reference in job.references:
        frames = reference.taken_frames(size.num_frames)
        clips.append(GivenClip((frames, *reference.sides(*sides)), whole=True))
    return clips


def encode_bytes(
    config: dict, job: Job, threads: int, arithmetic: Arithmetic, dtype: torch.dtype
) -> int:
    """Peak bytes of the host while it encodes what a job is given; 0 where that is nothing. Images
    are encoded one at a time, at the size of their stage.

    config  the checkpoint's parsed `config` metadata
    dtype   of the run
    """
    from ltx_neuron.host import vae_memory  # imports ltx-core: not needed for flags

    clips = given_clips(job)
    if job.images:
        clips += [GivenClip((1, stage.height, stage.width)) for stage in job.stages]
    return max(
        (
            vae_memory.encode_bytes(
                config, clip.pixels, threads, arithmetic.of_latents(dtype), dtype, clip.whole
            )
            for clip in clips
        ),
        default=0,
    )
