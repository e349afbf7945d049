"""The demo's clips show and sound what their prompts say, and a fault that both sides of a
comparison with oneself would share is seen in them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import demo_clips
import pytest
import torch
from config import HEIGHT, WIDTH
from demo_clips import PROMPTS, PSNR, STYLE, assert_is_as_asked_for, is_near, made, nearest, workspace
from helpers import one_thread, rel  # noqa: F401
from PIL import Image
from records import Record
from torch import Tensor
from world import BLUEPRINT

from ltx_neuron import denoise
from ltx_neuron.artifacts import build
from ltx_neuron.engine.residency import ModulationTables
from ltx_neuron.engine.run import Engine
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latent_state import LatentState
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.sampling.shapes import TIME_SCALE
from ltx_neuron.weights.rankfiles import rank_file

engines = demo_clips.engines  # a fixture

FP32 = 1e-5
KEPT = 30.0  # dB of the first frame from the image that it begins with
SHARPER = 1.3


BF16 = 2, "bfloat16"  # ranks and dtype of the runs in it
FIRST, *OTHERS = PROMPTS


@pytest.fixture(scope="module")
def clips(engines):
    """clips(prompt, tp, dtype)"""
    return cache(lambda prompt, *how: made(engines(*how), prompt))


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", OTHERS[:2])
def test_a_clip_shows_and_sounds_what_its_prompt_says(clips, prompt):
    assert_is_as_asked_for(PROMPTS[prompt], clips(prompt))


def test_two_ranks_in_bfloat16_make_what_a_prompt_says(clips):
    assert_is_as_asked_for(PROMPTS[FIRST], clips(FIRST, *BF16))


def test_an_image_is_kept_and_moves_on(engines, tmp_path):
    prompt = FIRST
    course = PROMPTS[prompt].courses()[3]
    drawn = course.frames(HEIGHT, WIDTH, 1)[0]
    path = tmp_path / "image.png"
    Image.fromarray((drawn * 255).round().byte().numpy()).save(path)
    clip = made(engines(), prompt, images=(ImageCondition(str(path), crf=0),))
    kept = float(-10 * (clip.frames[0] - drawn).square().mean().log10())
    found = nearest(prompt, clip)
    print(f"{kept:.1f} dB kept, {found.psnr:.1f} dB in all")
    assert kept > KEPT and found.scene == course and found.psnr > PSNR


def test_stage_2_is_sharper_than_stage_1(engines, clips):
    engine = engines()
    for clip in map(clips, OTHERS[:2]):
        first = torch.cat(list(engine.host.decode_video(clip.tensors["s1_video"])))
        larger = torch.nn.functional.interpolate(
            first.float().permute(0, 3, 1, 2) / 255, scale_factor=2, mode="bilinear"
        )
        assert steepness(clip.frames) > SHARPER * steepness(larger.permute(0, 2, 3, 1))


def test_a_style_changes_the_colours_and_nothing_else(engines):
    prompt, engine = OTHERS[2], engines()
    build.make(engine.workspace, engine.workspace.weight_sets("dit", {(STYLE,)}))
    clip = made(engine, prompt, loras=(STYLE,))
    assert_is_as_asked_for(replace(PROMPTS[prompt], **BLUEPRINT), clip)


def steepness(frames: Tensor) -> float:
    """How fast a row's colours change where they change most."""
    return float(frames.diff(dim=2).abs().amax((1, 2, 3)).mean())


# --- the reference --------------------------------------------------------------------------------


def test_ltx_pipelines_makes_the_same_clips_from_the_file(clips):
    record = Record("demo")
    record.assert_equal(clips(FIRST).tensors, FP32)
    record.assert_as_near_as_upstreams_bfloat16(clips(FIRST, *BF16).tensors)


# --- faults ---------------------------------------------------------------------------------------


def another_base(monkeypatch):
    tables = denoise.rope_tables
    monkeypatch.setattr(
        denoise,
        "rope_tables",
        lambda config, *positions: tables(replace(config, positional_embedding_theta=1000.0), *positions),
    )


def rounded_positions(monkeypatch):
    tables = denoise.rope_tables
    monkeypatch.setattr(
        denoise, "rope_tables", lambda config, *positions: tables(config, *(p.bfloat16().float() for p in positions))
    )


def sound_not_noised_again(monkeypatch):
    noised = LatentState.noised

    def kept(state, generator, scale, *compat):
        made = noised(state, generator, scale, *compat)
        is_sound, stage_2 = state.positions.shape[1] == 1, scale == STAGE_2_SIGMAS[0]
        return state.latent if is_sound and stage_2 else made

    monkeypatch.setattr(LatentState, "noised", kept)


def first_frame_of_eight(monkeypatch):
    monkeypatch.setattr(latents, "video_seconds", lambda frames, rate: torch.arange(frames + 1) * TIME_SCALE / rate)


def rows_off_by_one(monkeypatch):
    call = ModulationTables.__call__
    monkeypatch.setattr(ModulationTables, "__call__", lambda *given: call(*given).roll(1, dims=2))


FAULTS = another_base, rounded_positions, sound_not_noised_again
FAULTS += first_frame_of_eight, rows_off_by_one


def assert_seen(engine: Engine) -> None:
    """Of the clips, one at least is far from what was asked for; none is made after it."""
    faulty = ((prompt, made(engine, prompt)) for prompt in OTHERS[:2])
    assert not all(is_near(nearest(prompt, clip), clip) for prompt, clip in faulty)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(engines, monkeypatch, fault):
    fault(monkeypatch)
    assert_seen(engines())


def test_two_ranks_exchanged_heads_are_seen(engines, artifacts, tmp_path):
    (artifacts / "graphs").mkdir(parents=True, exist_ok=True)
    (tmp_path / "graphs").symlink_to(artifacts / "graphs")
    opened = workspace(tmp_path, *BF16)
    folder = build.make(opened, opened.weight_sets("dit"))[0]
    files = [folder / rank_file(rank) for rank in range(2)]
    for name in headers(files[0]):
        if ".attn1.to_out.0.weight" in name:
            exchange(files, name)
    assert_seen(engines(*BF16, tmp_path))


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
