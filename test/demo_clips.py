"""Clips of the demo's model, and how near they are to what their prompts say. Imported as
`demo_clips`."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import measures
import pytest
from config import FRAME_RATE, HEIGHT, NUM_FRAMES, SAMPLE_RATE, WIDTH
from jobs import make_job
from torch import Tensor
from world import Scene

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.demo import ASSETS
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.weights.lora import Lora

SIZE = Size(HEIGHT, WIDTH, NUM_FRAMES, FRAME_RATE, two_stage=True)
# All shapes, directions, speeds and grounds, said otherwise each.
PROMPTS = {
    "a red circle glides slowly to the right on a navy ground": Scene("red", "circle", "right", "slow", "navy", 0, 0),
    "a slow yellow square moves down across a charcoal ground": Scene(
        "yellow", "square", "down", "slow", "charcoal", 0, 0
    ),
    "on a maroon ground, a fast cyan triangle goes up": Scene("cyan", "triangle", "up", "fast", "maroon", 0, 0),
    "forest ground, a blue cross slides left at high speed": Scene("blue", "cross", "left", "fast", "forest", 0, 0),
}
SEED = 1
STYLE = Lora(ASSETS.style_lora)
# Every whole clip is at least so near to what is asked for, and its sound's latents spread no more
# (those of all scenes have a deviation of 1): measured 25.5 dB, 0.82 and 1.03 at worst. A faulty
# one is beyond one of the three: the least is what positions in bf16 do, a sound of 0.72; a sound
# that is not noised again sounds well, and spreads to 1.37.
PSNR, SOUND, SPREAD = 22.0, 0.77, 1.2


class Clip(NamedTuple):
    """frames (F, H, W, 3) in 0..1, the sound (2, samples), and the tensors of --save-tensors."""

    frames: Tensor
    sound: Tensor
    tensors: dict[str, Tensor]


def workspace(folder: Path, tp: int, dtype: str) -> Workspace:
    profile = resolve("cpu", ("blocks_per_graph=1",))  # compiled soonest
    return Workspace(ASSETS.checkpoint, profile, folder, tp, dtype, ASSETS.gemma_root)


@pytest.fixture(scope="module")
def engines(artifacts):
    """engines(tp, dtype): one on sharded weights, the same for the same arguments."""
    opened = []

    @cache
    def engine(tp: int = 1, dtype: str = "float32", folder: Path = artifacts) -> Engine:
        found = workspace(folder, tp, dtype)
        build.make(found, found.weight_sets("dit"))
        options = RunOptions(spatial_upsampler_path=ASSETS.spatial_upsampler)
        opened.append(Engine(found, Recorder(), options))
        opened[-1].progress = False
        return opened[-1]

    yield engine
    for each in opened:
        each.close()


def made(engine: Engine, prompt: str, **more) -> Clip:
    job = make_job(prompt, SIZE, SEED, **more)
    build.make(engine.workspace, engine.workspace.dit_graphs(job.buckets))
    (result,) = engine.run([job], keep=True)
    tensors = result.tensors
    return Clip(tensors["frames"].float() / 255, tensors["waveform"], tensors)


def nearest(prompt: str, clip: Clip) -> measures.Nearest:
    return measures.nearest(PROMPTS[prompt], clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)


def assert_is_as_asked_for(scene: Scene, clip: Clip) -> None:
    score = measures.score(scene, clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)
    found = measures.nearest(scene, clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)
    assert all(score), (scene, score)
    assert is_near(found, clip), (scene, found)


def is_near(found: measures.Nearest, clip: Clip) -> bool:
    spread = float(clip.tensors["s2_audio"].float().std())
    print(f"{found.psnr:.1f} dB, {found.sound:.2f}, spread {spread:.2f}")
    return found.psnr > PSNR and found.sound > SOUND and spread < SPREAD
