"""The measures of quality find in the world's own clips what is there, and not what is not."""

import measures
import world
from torch import Generator

SCENES = [world.Scene.draw(Generator().manual_seed(seed)) for seed in range(8)]


def score(asked: world.Scene, shown: world.Scene, height: int = 64, width: int = 96):
    clip = shown.frames(height, width, 49, 24.0), shown.waveform(48000, 49 / 24)
    return measures.score(asked, *clip, 48000, 24.0)


def test_a_scenes_clip_scores_all_at_both_sizes_and_anothers_nothing_that_differs():
    for asked, shown in zip(SCENES, SCENES[1:] + SCENES[:1], strict=True):
        assert all(score(asked, asked)) and all(score(asked, asked, 128, 192)), asked
        found = score(asked, shown)
        for attribute in ("colour", "shape", "ground", "direction"):
            alike = getattr(asked, attribute) == getattr(shown, attribute)
            assert getattr(found, attribute) == alike, (attribute, asked, shown)
        assert found.pitch == (asked.shape == shown.shape)
