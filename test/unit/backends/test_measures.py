"""The measures of quality find in the world's own clips what is there, and not what is not."""

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
