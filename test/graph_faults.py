"""Faults to plant into a graph: what a person may well write, and what no graph may hold on Trainium2. Each is found in
exported graphs (torch alone) and in HLO (torch_xla)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ltx_neuron.models.programs import Program
from ltx_neuron.models.signatures import Field

TOLD = "tracing needs its result"  # lint's words where a graph would end in the middle
OWN = "(makes|holds) a constant tensor"


class Fault(NamedTuple):
    """A function of x (4, 8) bf16 and index (8,) int32, and what findings say of it (regular expressions)."""

    function: Callable[[Tensor, Tensor], Tensor]
    exported: str
    hlo: str


def _rotated(x: Tensor, index: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * 1j).flatten(-2)


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _counted(x: Tensor, index: Tensor) -> Tensor:
    return torch.arange(int(index.sum()), device=x.device) + x.sum()


def _solved(x: Tensor, index: Tensor) -> Tensor:
    return torch.triangular_solve(x.float(), x.float()[:, :4])[0]


RANK = "rank 0 has .* rank 3 has"
FAULTS = {
    "a float64 constant": Fault(lambda x, index: (x.double() * 0.1).to(x.dtype), *["f64 is introduced"] * 2),
    "a value fetched by .item()": Fault(lambda x, index: x * x.float().sum().item(), "only at run time", TOLD),
    "the rank": Fault(lambda x, index: x * (2 + dist.get_rank()), RANK, RANK),
    "an arange as long as the data says": Fault(_counted, "cannot be exported", TOLD),
    "a complex rotation": Fault(_rotated, "c64 is introduced", "c64 is introduced"),
    "a sort": Fault(lambda x, index: x.sort(-1).values, "no sort", "no sort"),
    "int64 arithmetic": Fault(lambda x, i: x * (i.long() * 3).to(x.dtype), "s64 is introduced", "arithmetic on int64"),
    "boolean indexing": Fault(lambda x, index: x[x > 0].sum(), "only at run time", TOLD),
    "a branch on data": Fault(_chosen, "cannot be exported", TOLD),
    "an operation the compiler lacks": Fault(_solved, "NCC_EVRF001", "NCC_EVRF001"),
    "a table made in the graph": Fault(lambda x, index: x * torch.arange(8, device=x.device).float(), OWN, OWN),
    "random numbers": Fault(lambda x, index: x + torch.rand_like(x), "random numbers|" + OWN, "random numbers"),
    "a gather": Fault(lambda x, index: x[:, index], "a gather", "a gather"),
    "LayerNorm in bf16": Fault(lambda x, index: nn.functional.layer_norm(x, (8,)), *["computed in bf16"] * 2),
}


class _Module(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.function(inputs["x"], inputs["index"])}


def program(function: Callable[[Tensor, Tensor], Tensor]) -> Program:
    """A program whose one graph is the function."""
    x, module = Field((4, 8), torch.bfloat16), _Module(lambda x, index: x)
    inputs, runs = {"x": x, "index": Field((8,), torch.int32)}, {"main": (("planted", 0),)}
    made = Program({"planted": module}, runs, inputs, {"y": x})
    assert made.fields  # derived without the fault, which only tracing is to find
    module.function = function
    return made
