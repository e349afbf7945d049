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
        """Take one step along the gradients that the weights have. Weights that are alike as
        matrices are computed together: hundreds of small products take longer one by one."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(weight)
                mean, momentum = state["mean"], group["momentum"]
                mean.lerp_(weight.grad, 1 - momentum)
                ahead = weight.grad.lerp(mean, momentum).flatten(1)
                alike.setdefault(ahead.shape, []).append((weight, ahead))
            for (rows, columns), pairs in alike.items():
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                steps = orthogonal(torch.stack([ahead for _, ahead in pairs]))
                for (weight, _), step in zip(pairs, steps, strict=True):
                    weight.add_(step.view_as(weight), alpha=-rate)


def orthogonal(matrices: Tensor, iterations: int = 5) -> Tensor:
    """About the nearest matrices (..., M, N) whose singular values are all 1 (Newton-Schulz, in
    float32).

    Iterations are on the small square matrices x @ x.T alone: all that they make are polynomials of
    them, which commute.
    """
    a, b, c = _QUINTIC
    upright = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if upright else matrices).float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    square, all_steps = x @ x.mT, None
    identity = torch.eye(square.shape[-1])
    for _ in range(iterations):
        step = a * identity + b * square + c * square @ square
        square = step @ square @ step
        all_steps = step if all_steps is None else step @ all_steps
    x = all_steps @ x
    return (x.mT if upright else x).to(matrices.dtype)
