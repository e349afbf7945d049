"""The video decoder and encoder on the host against ltx-core's, with the same weights: whole, in tiles, in memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16_ROUNDING, fp32_bound, one_thread, randn, rel  # noqa: F401
from tiny.config import released_config
from torch import nn
from video_vaes import BOTH, OTHER_ORDER, assert_equal, bound, config_of, given_to, ltx_vae

from ltx_neuron import machine
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.host import convolution, dtypes, vae
from ltx_neuron.host.convolution import FeatureMap, Workers, convolve
from ltx_neuron.host.tiles import encode_tiled, parts
from ltx_neuron.host.vae import HostVideoModel, host_decoder, host_encoder
from ltx_neuron.host.vae_memory import decode_bytes, encode_bytes
from ltx_neuron.models.video_decoder import DepthToSpace

# Latent frames, rows and columns: one frame, odd sides.
SIZES = [(1, 1, 1), (2, 3, 1), (3, 3, 5)]


def host_like(side: str, model: nn.Module, dtype: torch.dtype = torch.float32, **changes) -> HostVideoModel:
    """The host's model with the weights of ltx-core's."""
    config, weights = config_of(side, **changes), model.state_dict()
    if side == "decoder":
        return host_decoder(video_decoder_config(config), weights, dtype)
    return host_encoder(video_encoder_config(config), weights, dtype)


@BOTH
@pytest.mark.parametrize("order", [{}, OTHER_ORDER], ids=["the released order", "another order"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_equal_ltx_cores_in_any_order_of_blocks(monkeypatch, side, size, order):
    if order:
        monkeypatch.setattr(vae, "NUMBERS_IN_CACHE", 3000)  # uneven pieces
    changes, given = order.get(side, {}), given_to(side, *size)
    model = ltx_vae(side, **changes)
    ours = host_like(side, model, **changes)(given)
    assert ours.dtype == torch.float32
    assert_equal(ours, model(given), model)


@BOTH
@pytest.mark.parametrize("size", SIZES[1:], ids=str)  # the first has too few numbers to say
def test_bfloat16_is_no_further_from_float32_than_ltx_cores_own(side, size):
    exact, half, given = ltx_vae(side), ltx_vae(side).bfloat16(), given_to(side, *size)
    exact.load_state_dict(half.state_dict())  # weights that bfloat16 holds
    expected, ours = exact(given), host_like(side, half, torch.bfloat16)(given)
    assert ours.dtype == torch.float32 and 0 < rel(ours, expected) <= rel(half(given.bfloat16()), expected)


@BOTH
def test_weights_are_shared_with_the_model_that_they_are_of(side):
    model = ltx_vae(side)
    ours, prefix = host_like(side, model).weights, "encoder." * (side == "encoder")
    given = {prefix + name: weight for name, weight in model.state_dict().items()}
    assert ours.keys() == given.keys()
    assert all(ours[name].data_ptr() == weight.data_ptr() for name, weight in given.items())


def test_bfloat16_weights_are_laid_out_anew_for_bfloat16_and_computed_with_in_float32():
    decoder, latent = ltx_vae("decoder").bfloat16(), randn(1, 128, 2, 2, 2).bfloat16()
    half, laid_out = decoder.state_dict(), host_like("decoder", decoder, torch.bfloat16).weights
    assert all(torch.equal(half[name], laid_out[name]) for name in laid_out)
    frames = host_like("decoder", decoder)(latent)
    assert frames.dtype == torch.float32 and rel(frames, decoder.float()(latent.float())) < bound(decoder)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 4, 4), (2, 5, 7), (4, 8, 4), (5, 9, 6), (9, 3, 13)], ids=str)
def test_a_convolution_equals_torchs_of_the_map_with_its_end_frames_repeated(size, dtype, causal, threads, monkeypatch):
    """Torch's in float64."""
    # Several pieces of several rows, and of several groups of frames.
    monkeypatch.setattr(convolution, "NUMBERS_AT_ONCE", 2 * size[1] * size[2] * 5)
    monkeypatch.setattr(convolution, "NUMBERS_IN_CACHE", 2 * size[2] * 5)
    source, result = FeatureMap((*size, 8), dtype, causal), torch.full((*size, 5), torch.nan)
    source.inner.copy_(randn(*size, 8))
    source.repeat_end_frames()
    weight, bias = randn(5, 8, 3, 3, 3, seed=1).to(dtype), randn(5, seed=2).to(dtype)
    video = source.inner.permute(3, 0, 1, 2)[None].double()
    before, after = (2, 0) if causal else (1, 1)
    video = torch.cat([*[video[:, :, :1]] * before, video, *[video[:, :, -1:]] * after], dim=2)
    expected = F.conv3d(video, weight.double(), bias.double(), padding=(0, 1, 1))[0].permute(1, 2, 3, 0)

    def write(frames, rows, piece):
        assert result[frames, rows].isnan().all(), "written twice"
        result[frames, rows] = piece

    with Workers(threads) as workers:
        convolve(source, weight, bias, write, workers)
    # Of bfloat16 each of the three taps' results is rounded once.
    assert rel(result, expected) < (BF16_ROUNDING if dtype == torch.bfloat16 else fp32_bound(27 * 8))


@pytest.mark.parametrize("length", [1, 10, 11, 17, 18, 24, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_of_tiles_add_up_to_one_and_each_tile_has_its_size(length, causal):
    tiles, total = parts(length, 10, 3, causal), torch.zeros(length)
    for tile in tiles:
        assert len(tile.weights) == tile.stop - tile.start
        total[tile.start : tile.stop] += tile.weights
    assert (total - 1).abs().max() < 1e-6
    assert tiles[0].start == 0 and tiles[-1].stop == length
    assert [tile.start for tile in tiles[1:]] == [7 * i - causal for i in range(1, len(tiles))]


def test_a_clip_of_eighty_frames_is_encoded_whole_and_a_longer_or_wider_one_in_tiles():
    def encode(pixels):  # a mean over each latent's pixels
        shapes.append(tuple(pixels.shape[2:]))
        spaces = F.avg_pool3d(pixels, (1, 32, 32))
        return torch.cat([spaces[:, :, :1], spaces[:, :, 1:].unflatten(2, (-1, 8)).mean(3)], 2)

    for *tiles, clip in (
        ((73, 32, 64), (73, 32, 64)),
        ((73, 32, 64), (49, 32, 64), (97, 32, 64)),
        ((9, 32, 768), (9, 32, 320), (9, 32, 1024)),
    ):
        pixels, shapes = randn(1, 3, *clip), []
        assert rel(encode_tiled(partial(map, encode), pixels), encode(pixels)) < 1e-6 and shapes == [*tiles, clip]


def test_a_bfloat16_run_decodes_in_it_where_the_cpu_multiplies_it(monkeypatch):
    for instructions, fast in ((["avx512f"], False), (["avx512_bf16"], True), (["amx_tile", "amx_bf16"], True)):
        monkeypatch.setattr(machine, "instructions", lambda names=instructions: names)
        assert dtypes.of_video("auto", torch.bfloat16) == (torch.bfloat16 if fast else torch.float32)
        assert dtypes.of_video("auto", torch.float32) == dtypes.of_video("float32", torch.bfloat16) == torch.float32
        assert dtypes.of_video("bfloat16", torch.float32) == torch.bfloat16


def resident() -> int:
    """Bytes of memory of this process that are no file's."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def free_between(in_use: list) -> int:
    """Take 131 MB in blocks of 64 KB and free all but every eighth: glibc keeps what lies between used blocks."""
    blocks = [torch.zeros(2**14) for _ in range(2000)]
    in_use += blocks[::8]
    del blocks
    return resident()


def test_memory_that_earlier_tiles_and_stages_freed_is_given_back_before_the_next(monkeypatch):
    decoder, latent = ltx_vae("decoder"), randn(1, 128, 1, 1, 1)
    before = free_between(in_use := [])
    host_like("decoder", decoder)(latent)
    assert resident() < before - 80e6
    freed, given_back, upsampled, last = [], [], vae.FUNCTIONS[DepthToSpace], vae.last

    def upsample_and_free(module, features):
        given_back.extend(each - resident() for each in freed[-1:])
        following = upsampled(module, features)
        freed.append(free_between(in_use))
        return following

    def at_last(module, features):
        given_back.append(freed[-1] - resident())
        return last(module, features)

    monkeypatch.setitem(vae.FUNCTIONS, DepthToSpace, upsample_and_free)
    monkeypatch.setattr(vae, "last", at_last)
    host_like("decoder", decoder)(latent)
    assert len(given_back) == 4 and min(given_back) > 80e6


def test_the_counted_memory_of_a_clip_in_tiles_does_not_grow_with_its_length_and_of_a_whole_one_all_does():
    """test/slow measures it."""
    config, frame = released_config(), 4 * 3 * 512 * 768
    short, long, longest = (encode_bytes(config, (frames, 512, 768), 2, whole=False) for frames in (161, 481, 1921))
    assert long - short == pytest.approx(frame * (481 - 161), rel=0.01)  # its pixels
    # Joining them, which takes them twice, then needs more than encoding, with the weights.
    assert 0 < longest - 2 * frame * 1921 < 2e9
    few, more = (encode_bytes(config, (frames, 512, 768), 2, whole=True) for frames in (81, 241))
    assert more > 2.5 * few
    # Tiles in time begin every 7 latent frames: of 22 no tile has whole ones before and after it; 126 are 1001 frames.
    for dtype in (torch.float32, torch.bfloat16):
        peaks = [decode_bytes(config, (frames, 16, 24), 2, dtype) for frames in (22, 31, 126)]
        assert peaks[1] == peaks[2] <= 1.01 * peaks[0]
