"""Convolutions in the Winograd domain against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from helpers import fp32_bound, randn, rel

from ltx_neuron.host import winograd
from ltx_neuron.host.arithmetic import BLAS
from ltx_neuron.host.winograd import (
    FeatureMap,
    Workers,
    convolve,
    convolve_bfloat16,
    convolve_direct,
    convolve_winograd,
    winograd_is_faster,
)

# What F(4,3) multiplies roundings by along one axis: with the rows of its transforms of inputs (B),
# filters (G) and outputs (A), the root of sum(A**2 * |B|**2 * |G|**2) / 3, averaged over a tile's
# outputs. Its sums have up to 8 input channels between transforms of 6 summands along three axes,
# there and back. A wrong constant leaves 1e-1.
AMPLIFICATION = 3.3**3
FP32 = AMPLIFICATION * fp32_bound(8, *[6] * 6)
SIZES = [(1, 1, 1), (1, 4, 4), (2, 5, 7), (4, 8, 4), (5, 9, 6), (9, 3, 13)]


def border(video):
    """(1, C, F, H, W) with its first and last frame once more."""
    return torch.cat([video[:, :, :1], video, video[:, :, -1:]], dim=2)


def convolved(source: FeatureMap, weight, bias, method, workers):
    """A whole result, (F, H, W, Cout); what no piece wrote is not a number."""
    result = torch.full((*source.shape[:3], len(bias)), torch.nan)

    def write(frames, rows, piece):
        assert result[frames, rows].isnan().all(), "written twice"
        result[frames, rows] = piece

    method(source, weight, bias, write, workers)
    return result


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> FeatureMap:
    source = FeatureMap(shape, dtype)
    source.inner.copy_(randn(*shape))
    source.repeat_end_frames()
    return source


@pytest.fixture(params=[1, 3], ids=["one worker", "three workers"])
def workers(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with Workers() as workers:
        yield workers
    torch.set_num_threads(threads)


def winograd_by_blas(*args):
    convolve_winograd(*args, BLAS)


def by_torch(source: FeatureMap, weight, bias):
    """The same in float64."""
    video = border(source.inner.permute(3, 0, 1, 2)[None]).double()
    whole = F.conv3d(video, weight.double(), bias.double(), padding=(0, 1, 1))
    return whole[0].permute(1, 2, 3, 0)


@pytest.mark.parametrize("method", [convolve_winograd, winograd_by_blas, convolve_direct])
def test_a_convolution_equals_torchs(workers, method, monkeypatch):
    # Several pieces of several rows, and of several groups of frames.
    monkeypatch.setattr(winograd, "TILES_AT_ONCE", 5)
    for size, (inputs, outputs) in zip(SIZES, [(3, 5), (8, 4)] * 3, strict=True):
        source = filled(*size, inputs)
        weight, bias = randn(outputs, inputs, 3, 3, 3, seed=1), randn(outputs, seed=2)
        result = convolved(source, weight, bias, method, workers)
        assert rel(result, by_torch(source, weight, bias)) < FP32, size


@pytest.mark.parametrize("method", [convolve_bfloat16, convolve_winograd])
def test_a_map_in_bfloat16_is_convolved_as_torch_does_in_float64(workers, method, monkeypatch):
    """Of the three results of a tap in time each is rounded once; by tiles only float32 is."""
    monkeypatch.setattr(winograd, "TILES_AT_ONCE", 5)
    for size in SIZES:
        # Several pieces of several rows, and of several groups of frames.
        monkeypatch.setattr(winograd, "NUMBERS_AT_ONCE", 2 * size[1] * size[2] * 5)
        monkeypatch.setattr(winograd, "NUMBERS_IN_CACHE", 2 * size[2] * 5)
        source = filled(*size, 8, dtype=torch.bfloat16)
        weight, bias = randn(5, 8, 3, 3, 3, seed=1).bfloat16(), randn(5, seed=2).bfloat16()
        result = convolved(source, weight, bias, method, workers)
        assert result.dtype == torch.float32
        bound = FP32 if method is convolve_winograd else 2.0**-8
        assert rel(result, by_torch(source, weight, bias)) < bound, size


def test_the_same_convolution_gives_the_same_bits(workers):
    source, weight, bias = filled(9, 12, 20, 32), randn(16, 32, 3, 3, 3, seed=1), randn(16, seed=2)
    first, second = (convolved(source, weight, bias, convolve_winograd, workers) for _ in range(2))
    assert torch.equal(first, second)


def test_bfloat16_weights_are_taken_as_the_float32_numbers_they_are(workers):
    source, weight, bias = (
        *(filled(4, 8, 8, 32), randn(32, 32, 3, 3, 3, seed=1).bfloat16(), randn(32, seed=2).bfloat16()),
    )
    result, expected = (
        convolved(source, w, b, convolve, workers) for w, b in ((weight, bias), (weight.float(), bias.float()))
    )
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("shape", "outputs", "speed", "faster"),
    [
        ((25, 96, 128, 128), 128, 1, True),
        ((13, 48, 64, 512), 512, 1, True),
        ((1, 4, 4, 512), 512, 1, False),  # the filters' transform costs more than it saves
        ((25, 96, 128, 8), 8, 1, False),  # the map's transforms cost more than they save
        ((25, 48, 64, 1024), 1024, 1, False),  # 0.9 GB of transformed filters
        ((13, 48, 64, 512), 512, 2, True),  # dot products in bfloat16
        ((13, 48, 64, 512), 512, 8, False),  # AMX
        ((25, 96, 128, 128), 128, 8, False),
    ],
)
def test_winograd_is_used_where_it_is_faster_than_a_direct_convolution(shape, outputs, speed, faster):
    assert winograd_is_faster(shape, outputs, speed=speed) == faster


def test_a_map_repeats_its_ends_and_has_zeros_around_every_frame():
    source = filled(3, 5, 6, 2)
    assert source.padded.shape == (6, 10, 10, 2)
    assert torch.equal(source.padded[0], source.padded[1])
    assert torch.equal(source.padded[4], source.padded[3])
    inner = source.inner.clone()
    source.inner.zero_()
    assert not source.padded[1:4].any()
    assert inner.all()


def test_an_error_in_a_worker_is_raised(workers):
    def write(frames, rows, piece):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        convolve_winograd(filled(4, 4, 4, 2), randn(2, 2, 3, 3, 3), randn(2), write, workers)


def test_workers_leave_torchs_threads_as_they_were():
    from concurrent.futures import ThreadPoolExecutor

    threads = torch.get_num_threads()
    with Workers() as workers:
        counts = []
        workers.map(lambda _: counts.append(torch.get_num_threads()), range(10))
        assert set(counts) == {1}
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == threads
