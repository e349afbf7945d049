"""The measures of quality find in the world's own clips what is there, and not what is not."""

from dataclasses import replace

import measures
import pytest
import world
from torch import Generator

RATE = 48000
FRAMES, FRAME_RATE = 49, 24.0
SECONDS = FRAMES / FRAME_RATE


def scenes(count: int, seed: int = 99) -> list[world.Scene]:
    generator = Generator().manual_seed(seed)
    return [world.Scene.draw(generator) for _ in range(count)]


@pytest.mark.parametrize("size", [(64, 96), (128, 192)])
def test_all_that_a_scene_shows_and_sounds_is_found_at_both_sizes(size):
    for scene in scenes(8):
        clip = scene.frames(*size, FRAMES, FRAME_RATE), scene.waveform(RATE, SECONDS)
        assert all(measures.score(scene, *clip, RATE, FRAME_RATE)), scene


def test_another_scenes_clip_scores_nothing_that_differs():
    for asked, shown in zip(scenes(8, 1), scenes(8, 2), strict=True):
        clip = shown.frames(64, 96, FRAMES, FRAME_RATE), shown.waveform(RATE, SECONDS)
        score = measures.score(asked, *clip, RATE, FRAME_RATE)
        for attribute in ("colour", "shape", "ground", "direction"):
            alike = getattr(asked, attribute) == getattr(shown, attribute)
            assert getattr(score, attribute) == alike, (attribute, asked, shown)
        assert score.pitch == (asked.shape == shown.shape)


def test_a_clip_is_nearest_to_the_course_that_it_takes_and_far_from_other_words():
    for scene in scenes(2):
        for course in scene.courses()[::5]:
            clip = course.frames(64, 96, FRAMES, FRAME_RATE), course.waveform(RATE, SECONDS)
            actual = measures.nearest(scene, *clip, RATE, FRAME_RATE)
            assert actual.scene == course and actual.psnr > 100 and actual.sound > 0.999
    asked, shown = (replace(scene, shape=shape) for shape in ("circle", "cross"))
    clip = shown.courses()[0].frames(64, 96, FRAMES, FRAME_RATE), shown.waveform(RATE, SECONDS)
    actual = measures.nearest(asked, *clip, RATE, FRAME_RATE)
    assert actual.psnr < 25 and actual.sound < 0.2, actual
