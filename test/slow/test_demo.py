"""The demo's clips show and sound what their prompts say, and a fault that both sides of a
comparison with oneself would share is seen in them."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import measures
import oracle
import pytest
import torch
from config import FRAME_RATE, HEIGHT, NUM_FRAMES, SAMPLE_RATE, WIDTH
from helpers import one_thread, rel  # noqa: F401
from PIL import Image
from torch import Tensor
from world import BLUEPRINT, Scene

from ltx_neuron import denoise
from ltx_neuron.demo import ASSETS
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.conditioning import LatentState
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latents import TIME_SCALE
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.weights.lora import Lora
from ltx_neuron.weights.rankfiles import rank_file
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

SIZE = Size(HEIGHT, WIDTH, NUM_FRAMES, FRAME_RATE, two_stage=True)
# All shapes, directions, speeds and grounds, said otherwise each.
PROMPTS = {
    "a red circle glides slowly to the right on a navy ground": Scene(
        "red", "circle", "right", "slow", "navy", 0, 0
    ),
    "a slow yellow square moves down across a charcoal ground": Scene(
        "yellow", "square", "down", "slow", "charcoal", 0, 0
    ),
    "on a maroon ground, a fast cyan triangle goes up": Scene(
        "cyan", "triangle", "up", "fast", "maroon", 0, 0
    ),
    "forest ground, a blue cross slides left at high speed": Scene(
        "blue", "cross", "left", "fast", "forest", 0, 0
    ),
}
SEED = 1
STYLE = Lora(ASSETS.style_lora)
FP32 = 1e-5
# As far from the truth as ltx-core's own bf16, twice that where rounding falls out otherwise in
# every rank, and a floor of one rounding.
BF16_FACTOR, BF16_FLOOR = 2, 0.005
# Every whole clip is at least so near to what is asked for, and its sound's latents spread no more
# (those of all scenes have a deviation of 1): measured 25.5 dB, 0.82 and 1.03 at worst. A faulty
# one is beyond one of the three: the least is what positions in bf16 do, a sound of 0.72; a sound
# that is not noised again sounds well, and spreads to 1.37.
PSNR, SOUND, SPREAD = 22.0, 0.77, 1.2
KEPT = 30.0  # dB of the first frame from the image that it begins with
SHARPER = 1.3


class Clip(NamedTuple):
    """frames (F, H, W, 3) in 0..1, the sound (2, samples), and the tensors of --save-tensors."""

    frames: Tensor
    sound: Tensor
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def workspace(folder: Path, tp: int, dtype: str) -> Workspace:
    return Workspace(ASSETS.checkpoint, resolve("cpu"), folder, tp, dtype, ASSETS.gemma_root)


@pytest.fixture(scope="module")
def engines(artifacts):
    """engines(tp, dtype): one on finished artifacts, the same for the same arguments."""
    opened = []

    @cache
    def engine(tp: int, dtype: str, folder: Path = artifacts) -> Engine:
        found = workspace(folder, tp, dtype)
        found.shard("dit", {(), (STYLE,)})
        found.compile_dit(Job("", SIZE).buckets_to_compile)
        options = RunOptions(spatial_upsampler_path=ASSETS.spatial_upsampler)
        opened.append(Engine(found, Recorder(), options))
        opened[-1].progress = False
        return opened[-1]

    yield engine
    for each in opened:
        each.close()


def made(engine: Engine, prompt: str, **more) -> Clip:
    (result,) = engine.run([Job(prompt, SIZE, SEED, **more)], keep=True)
    tensors = result.tensors
    return Clip(tensors["frames"].float() / 255, tensors["waveform"], tensors)


@pytest.fixture(scope="module")
def clips(engines):
    """clips(tp, dtype): of all prompts."""
    return cache(lambda tp, dtype: {p: made(engines(tp, dtype), p) for p in PROMPTS})


def nearest(prompt: str, clip: Clip) -> measures.Nearest:
    return measures.nearest(PROMPTS[prompt], clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)


def is_near(found: measures.Nearest, clip: Clip) -> bool:
    spread = float(clip.tensors["s2_audio"].float().std())
    print(f"{found.psnr:.1f} dB, {found.sound:.2f}, spread {spread:.2f}")
    return found.psnr > PSNR and found.sound > SOUND and spread < SPREAD


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (4, "bfloat16")])
def test_a_clip_shows_and_sounds_what_its_prompt_says(clips, tp, dtype):
    for prompt, clip in clips(tp, dtype).items():
        score = measures.score(PROMPTS[prompt], clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)
        found = nearest(prompt, clip)
        print(prompt, score)
        assert all(score), (prompt, score)
        assert is_near(found, clip), (prompt, found)


def test_an_image_is_kept_and_moves_on(engines, tmp_path):
    prompt = next(iter(PROMPTS))
    course = PROMPTS[prompt].courses()[3]
    drawn = course.frames(HEIGHT, WIDTH, 1)[0]
    path = tmp_path / "image.png"
    Image.fromarray((drawn * 255).round().byte().numpy()).save(path)
    clip = made(engines(1, "float32"), prompt, images=(ImageCondition(str(path), crf=0),))
    kept = float(-10 * (clip.frames[0] - drawn).square().mean().log10())
    found = nearest(prompt, clip)
    print(f"{kept:.1f} dB kept, {found.psnr:.1f} dB in all")
    assert kept > KEPT and found.scene == course and found.psnr > PSNR


def test_stage_2_is_sharper_than_stage_1(engines, clips):
    engine = engines(1, "float32")
    for clip in clips(1, "float32").values():
        first = torch.cat(list(engine.host.decode_video(clip.tensors["s1_video"])))
        larger = torch.nn.functional.interpolate(
            first.float().permute(0, 3, 1, 2) / 255, scale_factor=2, mode="bilinear"
        )
        assert steepness(clip.frames) > SHARPER * steepness(larger.permute(0, 2, 3, 1))


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (4, "bfloat16")])
def test_a_style_changes_the_colours_and_nothing_else(engines, tp, dtype):
    for prompt in list(PROMPTS)[1:4:2]:
        clip = made(engines(tp, dtype), prompt, loras=(STYLE,))
        drawn = replace(PROMPTS[prompt], **BLUEPRINT)
        score = measures.score(drawn, clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)
        found = measures.nearest(drawn, clip.frames, clip.sound, SAMPLE_RATE, FRAME_RATE)
        print(prompt, score)
        assert all(score), (prompt, score)
        assert is_near(found, clip), (prompt, found)


def steepness(frames: Tensor) -> float:
    """How fast a row's colours change where they change most."""
    return float(frames.diff(dim=2).abs().amax((1, 2, 3)).mean())


# --- the reference --------------------------------------------------------------------------------


def test_ltx_core_makes_the_same_clips_from_the_file(clips):
    prompt = next(iter(PROMPTS))
    job = oracle.Job(prompt, HEIGHT, WIDTH, NUM_FRAMES, FRAME_RATE, SEED)
    truth, theirs = (by_ltx_core(job, dtype) for dtype in (torch.float32, torch.bfloat16))
    exact, ours = (clips(*kind)[prompt].tensors for kind in ((1, "float32"), (4, "bfloat16")))
    for name, wanted in truth.items():
        off = {"fp32": rel(exact[name], wanted)}
        off |= {"ours": rel(ours[name], wanted), "theirs": rel(theirs[name], wanted)}
        print(name, {kind: f"{distance:.1e}" for kind, distance in off.items()})
        assert off["fp32"] <= FP32 and off["ours"] <= BF16_FACTOR * off["theirs"] + BF16_FLOOR


@torch.no_grad()
def by_ltx_core(job: oracle.Job, dtype: torch.dtype) -> dict[str, Tensor]:
    with oracle.later_semantics(), oracle.one_thread():
        contexts = oracle.encode(ASSETS, job.prompt, dtype)
        both = contexts["video_context"], contexts["audio_context"]
        return oracle.Denoising(ASSETS, job, *both, dtype).run()


# --- faults ---------------------------------------------------------------------------------------


def another_base(monkeypatch):
    tables = denoise.rope_tables
    monkeypatch.setattr(
        denoise,
        "rope_tables",
        lambda config, *positions: tables(
            replace(config, positional_embedding_theta=1000.0), *positions
        ),
    )


def rounded_positions(monkeypatch):
    tables = denoise.rope_tables
    monkeypatch.setattr(
        denoise,
        "rope_tables",
        lambda config, *positions: tables(config, *(p.bfloat16().float() for p in positions)),
    )


def sound_not_noised_again(monkeypatch):
    noised = LatentState.noised

    def kept(state, generator, scale, *compat):
        made = noised(state, generator, scale, *compat)
        is_sound, stage_2 = state.positions.shape[1] == 1, scale == STAGE_2_SIGMAS[0]
        return state.latent if is_sound and stage_2 else made

    monkeypatch.setattr(LatentState, "noised", kept)


def first_frame_of_eight(monkeypatch):
    monkeypatch.setattr(
        latents, "video_seconds", lambda frames, rate: torch.arange(frames + 1) * TIME_SCALE / rate
    )


def rows_off_by_one(monkeypatch):
    table = denoise.modulation_table
    monkeypatch.setattr(denoise, "modulation_table", lambda *given: table(*given).roll(1, dims=2))


FAULTS = another_base, rounded_positions, sound_not_noised_again
FAULTS += first_frame_of_eight, rows_off_by_one


def assert_seen(engine: Engine) -> None:
    """Of the clips, one at least is far from what was asked for."""
    faulty = {prompt: made(engine, prompt) for prompt in list(PROMPTS)[1:3]}
    assert not all(is_near(nearest(prompt, clip), clip) for prompt, clip in faulty.items())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(engines, monkeypatch, fault):
    fault(monkeypatch)
    assert_seen(engines(1, "float32"))


def test_two_ranks_exchanged_heads_are_seen(engines, artifacts, tmp_path):
    shutil.copytree(artifacts, tmp_path / "artifacts")
    folder = workspace(tmp_path / "artifacts", 4, "bfloat16").shard("dit", {()})[0]
    files = [folder / rank_file(rank) for rank in (1, 2)]
    for name in headers(files[0]):
        if ".attn1.to_out.0.weight" in name:
            exchange(files, name)
    assert_seen(engines(4, "bfloat16", tmp_path / "artifacts"))


def headers(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    entries.pop("__metadata__", None)
    start = 8 + length
    return {n: tuple(start + at for at in entry["data_offsets"]) for n, entry in entries.items()}


def exchange(files: list[Path], name: str) -> None:
    """Exchange a tensor of two files of one layout."""
    contents = [bytearray(path.read_bytes()) for path in files]
    part = slice(*headers(files[0])[name])
    contents[0][part], contents[1][part] = contents[1][part], contents[0][part]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
