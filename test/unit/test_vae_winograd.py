"""Convolutions in the Winograd domain against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from helpers import randn, rel

from ltx_neuron.host import winograd
from ltx_neuron.host.winograd import (
    FeatureMap,
    Workers,
    convolve,
    convolve_direct,
    convolve_winograd,
    winograd_is_faster,
)

# float32 rounds at 6e-8; F(4,3) along three axes multiplies that by its constants, to 1e-6 here. A
# wrong constant leaves 1e-1.
FP32 = 1e-5
SIZES = [(1, 1, 1), (1, 4, 4), (2, 5, 7), (4, 8, 4), (5, 9, 6), (9, 3, 13)]


def border(video):
    """(1, C, F, H, W) with its first and last frame once more."""
    return torch.cat([video[:, :, :1], video, video[:, :, -1:]], dim=2)


def of_map(source: FeatureMap, weight, bias, method, workers):
    """A whole result, (F, H, W, Cout); what no piece wrote is not a number."""
    found = torch.full((*source.shape[:3], len(bias)), torch.nan)

    def write(frames, rows, piece):
        assert found[frames, rows].isnan().all(), "written twice"
        found[frames, rows] = piece

    method(source, weight, bias, write, workers)
    return found


def filled(*shape: int) -> FeatureMap:
    source = FeatureMap(*shape)
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


@pytest.mark.parametrize("method", [convolve_winograd, convolve_direct])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (8, 4)])
def test_a_convolution_equals_torchs(workers, method, size, inputs, outputs, monkeypatch):
    monkeypatch.setattr(
        winograd, "TILES_AT_ONCE", 5
    )  # several pieces of several rows, and of several groups of frames
    source = filled(*size, inputs)
    weight, bias = randn(outputs, inputs, 3, 3, 3, seed=1), randn(outputs, seed=2)
    video = border(source.inner.permute(3, 0, 1, 2)[None]).double()
    wanted = F.conv3d(video, weight.double(), bias.double(), padding=(0, 1, 1))[0].permute(
        1, 2, 3, 0
    )
    assert rel(of_map(source, weight, bias, method, workers), wanted) < FP32


def test_the_same_convolution_gives_the_same_bits(workers):
    source, weight, bias = filled(9, 12, 20, 32), randn(16, 32, 3, 3, 3, seed=1), randn(16, seed=2)
    first, second = (of_map(source, weight, bias, convolve_winograd, workers) for _ in range(2))
    assert torch.equal(first, second)


def test_bfloat16_weights_are_taken_as_the_float32_numbers_they_are(workers):
    source, weight, bias = (
        filled(4, 8, 8, 32),
        randn(32, 32, 3, 3, 3, seed=1).bfloat16(),
        randn(32, seed=2).bfloat16(),
    )
    found, wanted = (
        of_map(source, w, b, convolve, workers)
        for w, b in ((weight, bias), (weight.float(), bias.float()))
    )
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_winograd_is_used_for_wide_channels_over_many_positions():
    assert winograd_is_faster((25, 96, 128, 128), 128)
    assert winograd_is_faster((13, 48, 64, 512), 512)
    assert not winograd_is_faster((1, 4, 4, 512), 512), (
        "the filters' transform costs more than it saves"
    )
    assert not winograd_is_faster((25, 96, 128, 8), 8), (
        "the map's transforms cost more than they save"
    )
    assert not winograd_is_faster((25, 48, 64, 1024), 1024), "0.9 GB of transformed filters"


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
        found = []
        workers.run(lambda _: found.append(torch.get_num_threads()), range(10))
        assert set(found) == {1}
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == threads
