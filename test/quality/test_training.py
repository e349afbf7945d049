"""What the training of the demo's parts shares."""

import torch
import training
from muon import orthogonal


def test_the_faster_dtype_is_also_measured_where_no_gradients_are_kept():
    training.computes_in.cache_clear()
    with torch.no_grad(), training.fast():
        pass
    assert training.computes_in() in (torch.float32, torch.bfloat16)


def test_muons_step_has_singular_values_near_one_for_wide_and_tall_matrices():
    """Newton-Schulz with these coefficients ends between 0.68 and 1.2 (Jordan et al.)."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((48, 648), (648, 48), (32, 32)):
        matrix = torch.randn(shape, generator=generator) + 3  # one direction is much larger
        values = torch.linalg.svdvals(orthogonal(matrix))[: min(shape) - 2]
        assert values.min() > 0.6 and values.max() < 1.25, shape
