"""Convolutions of feature maps on the host against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from helpers import fp32_bound, randn, rel

from ltx_neuron.host import convolution
from ltx_neuron.host.convolution import FeatureMap, Workers, convolve

SIZES = [(1, 1, 1), (1, 4, 4), (2, 5, 7), (4, 8, 4), (5, 9, 6), (9, 3, 13)]
BFLOAT16 = 2.0**-8  # each of the three taps' results is rounded once


def convolved(source: FeatureMap, weight, bias, workers):
    """The whole result, (F, H, W, Cout)."""
    result = torch.full((*source.shape[:3], len(bias)), torch.nan)

    def write(frames, rows, piece):
        assert result[frames, rows].isnan().all(), "written twice"
        result[frames, rows] = piece

    convolve(source, weight, bias, write, workers)
    return result


def random_map(*shape: int, dtype: torch.dtype = torch.float32, causal: bool = False) -> FeatureMap:
    source = FeatureMap(shape, dtype, causal)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_convolution_equals_torchs_of_the_map_with_its_end_frames_repeated(workers, size, dtype, causal, monkeypatch):
    # Several pieces of several rows, and of several groups of frames.
    monkeypatch.setattr(convolution, "NUMBERS_AT_ONCE", 2 * size[1] * size[2] * 5)
    monkeypatch.setattr(convolution, "NUMBERS_IN_CACHE", 2 * size[2] * 5)
    source = random_map(*size, 8, dtype=dtype, causal=causal)
    weight, bias = randn(5, 8, 3, 3, 3, seed=1).to(dtype), randn(5, seed=2).to(dtype)
    video = source.inner.permute(3, 0, 1, 2)[None].double()
    before, after = (2, 0) if causal else (1, 1)
    video = torch.cat([*[video[:, :, :1]] * before, video, *[video[:, :, -1:]] * after], dim=2)
    expected = F.conv3d(video, weight.double(), bias.double(), padding=(0, 1, 1))[0].permute(1, 2, 3, 0)
    result = convolved(source, weight, bias, workers)
    assert result.dtype == torch.float32
    assert rel(result, expected) < (BFLOAT16 if dtype == torch.bfloat16 else fp32_bound(27 * 8))


def test_an_error_in_a_worker_is_raised(workers):
    def write(frames, rows, piece):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        convolve(random_map(4, 4, 4, 2), randn(2, 2, 3, 3, 3), randn(2), write, workers)
