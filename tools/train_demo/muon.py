"""An optimiser that learns from few steps: Muon, for matrices and convolutions."""

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of Jordan et al., "Muon" (2024)


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal, so that all directions of a weight learn alike.

    A weight is taken as a matrix (outputs, all else). Its step has the spectral norm `lr`, times
    the root of outputs / inputs where there are more outputs.
    """

    def __init__(self, weights: list[nn.Parameter], lr: float = 0.02, momentum: float = 0.95):
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take one step along the gradients that the weights have."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(weight)
                mean, momentum = state["mean"], group["momentum"]
                mean.lerp_(weight.grad, 1 - momentum)
                ahead = weight.grad.lerp(mean, momentum).flatten(1)
                shape = max(1.0, ahead.shape[0] / ahead.shape[1]) ** 0.5
                weight.add_(orthogonal(ahead).view_as(weight), alpha=-group["lr"] * shape)


def orthogonal(matrix: Tensor, iterations: int = 5) -> Tensor:
    """About the nearest matrix whose singular values are all 1 (Newton-Schulz, in float32).

    Iterations are on the small square matrix x @ x.T alone: all that they make are polynomials of
    it, which commute.
    """
    a, b, c = _QUINTIC
    upright = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if upright else matrix).float()
    x = x / (x.norm() + 1e-7)
    square, all_steps = x @ x.T, None
    identity = torch.eye(len(square))
    for _ in range(iterations):
        step = a * identity + b * square + c * square @ square
        square = step @ square @ step
        all_steps = step if all_steps is None else step @ all_steps
    x = all_steps @ x
    return (x.T if upright else x).to(matrix.dtype)
