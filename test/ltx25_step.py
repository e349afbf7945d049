"""Stage 1 of LTX-2.5's distilled recipe with all its inputs: an image at frame 0 and a keyframe, both held in part, and
generated keyframes. The weights are random."""

from functools import cache, partial

import torch
from helpers import generator, made_config, randn
from jobs import make_job
from tiny.weights import random_weights
from torch import Tensor

from ltx_neuron.backends.ranks import HostRanks
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.job import Job, Size
from ltx_neuron.models.modulation import host_weights, modulation_table
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latent_state import initial_states
from ltx_neuron.text.encoders import Contexts

_, CONFIG = made_config(ff_bias=False, use_keyframes_abs_pos_embedding=True)
SEED = 7
IMAGES = ImageCondition("", 0, 0.7, 18), ImageCondition("", 16, 0.4, 18)
JOB = make_job("", Size(64, 96, 17, 25.0), SEED, images=IMAGES, num_generated_keyframes=2, ancestral=True)
(STAGE,) = JOB.stages


def images(job: Job = JOB) -> list[tuple[ImageCondition, Tensor]]:
    """The job's images, each with a random latent (1, 128, 1, 2, 3)."""
    return [(image, randn(1, 128, 1, 2, 3, seed=20 + n)) for n, image in enumerate(job.images)]


def contexts() -> tuple[Tensor, Tensor]:
    """Random contexts (1, 1024, Dv) and (1, 1024, Da)."""
    widths = CONFIG.video.inner, CONFIG.audio.inner
    video, audio = (randn(1, 1024, width, seed=30 + n) for n, width in enumerate(widths))
    return video, audio


@cache
def weights() -> dict[str, Tensor]:
    """Random weights of the DiT in the order of their names."""
    program = dit_program(CONFIG, JOB.bucket(STAGE), 1, SingleRank(), torch.float32, 1)
    shapes = program.weights() | host_weights(CONFIG)
    like = {name: torch.empty(shapes[name]) for name in sorted(shapes)}
    return random_weights(like, generator())


def opened_run(bucket: Bucket, blocks_per_graph: int = 0, config=CONFIG) -> StageRun:
    program = dit_program(config, bucket, 1, SingleRank(), torch.float32, blocks_per_graph)
    ranks = HostRanks(bucket.name, program, weights().__getitem__)
    modulation = partial(modulation_table, weights(), config)
    return StageRun(ranks, CompiledStep(bucket, program), config, torch.float32, modulation, COMPAT[None])


def texts() -> list[Contexts]:
    """Those of one prompt."""
    return [Contexts(*contexts(), torch.ones(1, 1024), None)]


@torch.no_grad()
def stage_run(blocks_per_graph: int = 1, config=CONFIG, job: Job = JOB) -> StageRun:
    """The stage of a job, prepared and started."""
    (stage,) = job.stages
    run = opened_run(job.bucket(stage), blocks_per_graph, config)
    start = latents.zeros(stage.height, stage.width, job.size.num_frames, job.size.frame_rate, torch.float32)
    states = initial_states(job, False, {}, start, images(job), COMPAT[None], torch.float32)
    run.prepare(job, stage, texts(), states, generator(SEED))
    run.start()
    return run
