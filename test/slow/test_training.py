"""What the training of the demo's parts shares."""

import torch
import training
from muon import Muon, orthogonal


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


def test_muon_steps_weights_that_are_alike_together_as_one_by_one():
    generator = torch.Generator().manual_seed(1)
    shapes = [(8, 24), (24, 8), (8, 24), (8, 2, 12), (24, 8)]  # alike as matrices: two and three
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    stepped = []
    for groups in ([range(5)], [[i] for i in range(5)]):
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in groups:
            Muon([parameters[i] for i in group], lr=0.1).step()
        stepped.append(parameters)
    for together, alone, before in zip(*stepped, weights, strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
        assert (together - before).abs().max() > 1e-3
