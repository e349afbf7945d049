"""The measures of quality find in the world's own clips what is there, and not what is not."""

import measures
import world
from torch import Generator

SCENES = [world.Scene.draw(Generator().manual_seed(seed)) for seed in range(8)]


def score(asked: world.Scene, shown: world.Scene, height: int, width: int):
    clip = shown.frames(height, width, 49, 24.0), shown.waveform(48000, 49 / 24)
    return measures.score(asked, *clip, 48000, 24.0)


def test_all_that_a_scene_shows_and_sounds_is_found_at_both_sizes():
    for scene in SCENES:
        assert all(score(scene, scene, 64, 96)) and all(score(scene, scene, 128, 192)), scene


def test_another_scenes_clip_scores_nothing_that_differs():
    for asked, shown in zip(SCENES, SCENES[1:] + SCENES[:1], strict=True):
        found = score(asked, shown, 64, 96)
        for attribute in ("colour", "shape", "ground", "direction"):
            alike = getattr(asked, attribute) == getattr(shown, attribute)
            assert getattr(found, attribute) == alike, (attribute, asked, shown)
        assert found.pitch == (asked.shape == shown.shape)
