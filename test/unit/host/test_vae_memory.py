"""The counted peaks of a decode and an encoding, by a video's length and tiles; test/slow measures them."""

import pytest
import torch
from tiny.config import released_config

from ltx_neuron.host.vae_memory import decode_bytes, encode_bytes

THREADS = 2


def test_a_clip_in_tiles_needs_little_more_memory_the_longer_it_is_and_a_whole_one_all_of_it():
    def to_encode(frames: int, whole: bool) -> int:
        return encode_bytes(released_config(), (frames, 512, 768), THREADS, whole=whole)

    # Its pixels, and of a longer one only them, until joining them, which takes them twice, needs
    # more than encoding; a reference's frames are encoded together.
    frame = 4 * 3 * 512 * 768
    more = frame * (481 - 161)
    assert to_encode(481, False) - to_encode(161, False) == pytest.approx(more, rel=0.01)
    assert 0 < to_encode(1921, False) - 2 * frame * 1921 < 2e9  # the weights
    assert to_encode(241, True) > 2.5 * to_encode(81, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_video_of_any_length_needs_the_same_memory(dtype):
    """Tiles in time begin every 7 latent frames: 22 are 169 frames, of which no tile has whole ones
    before and after it; 126 are 1001."""
    config = released_config()
    peaks = [decode_bytes(config, (frames, 16, 24), THREADS, dtype) for frames in (22, 31, 126)]
    assert peaks[1] == peaks[2] <= 1.01 * peaks[0]
