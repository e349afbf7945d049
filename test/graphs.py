"""Exported graphs in tests, and faults to plant into one: what a person may well write, and what no graph may hold on
Trainium2. Each is found in exported graphs (torch alone) and in HLO (torch_xla)."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from helpers import SIZES, made_config
from lint import compare_ranks
from torch import Tensor, nn

from ltx_neuron.backends.export import TorchDistComm, fake_process_group, trace
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models.programs import Program, dit_program
from ltx_neuron.models.signatures import Field


def operations(exported) -> list:
    """The calls of operators in a graph: all but placeholders, the output and python's own unpacking of tuples."""
    called = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    return [node for node in called if getattr(node.target, "__name__", "") != "getitem"]


@cache
def block_graph(kernel):
    _, config = made_config(SIZES["4 heads of 8"])
    with fake_process_group(2):
        program = dit_program(config, Bucket(6, 4, 1, 2), 2, TorchDistComm(2), torch.bfloat16, 1, kernel)
        return trace(program, "blocks", torch.bfloat16)


TP, RANKS = 4, {"tp": [[0, 1, 2, 3]]}
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


RANK = "rank 0 has .* rank 3 has"
FAULTS = {
    "a float64 constant": Fault(lambda x, index: (x.double() * 0.1).to(x.dtype), *["f64 is introduced"] * 2),
    "a value fetched by .item()": Fault(lambda x, index: x * x.float().sum().item(), "only at run time", TOLD),
    "the rank": Fault(lambda x, index: x * (2 + dist.get_rank()), RANK, RANK),
    "a length in the data": Fault(lambda x, i: x.new_ones(int(i.sum())) + x.sum(), "cannot be exported", TOLD),
    "a complex rotation": Fault(_rotated, "c64 is introduced", "c64 is introduced"),
    "a sort": Fault(lambda x, index: x.sort(-1).values, "no sort", "no sort"),
    "int64 arithmetic": Fault(lambda x, i: x * (i.long() * 3).to(x.dtype), "s64 is introduced", "arithmetic on int64"),
    "boolean indexing": Fault(lambda x, index: x[x > 0].sum(), "only at run time", TOLD),
    "a branch on data": Fault(lambda x, index: x if x.sum() > 0 else -x, "cannot be exported", TOLD),
    "a solve": Fault(lambda x, i: torch.triangular_solve(x.float(), x.float()[:, :4])[0], *["NCC_EVRF001"] * 2),
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


def findings_of(reader, function: Callable[[Tensor, Tensor], Tensor]) -> list:
    """What lint finds in a function's graph, traced as the first and as the last rank; reader: lint.fx or lower."""
    readings = {}
    for rank in (0, TP - 1):
        with fake_process_group(TP, rank):
            readings[rank] = reader.read(program(function), "planted", RANKS, torch.bfloat16, "graph")
    return readings[0].check()[1] + compare_ranks("graph", {rank: reading.text for rank, reading in readings.items()})


def text_of(findings) -> str:
    return "\n".join(f"{finding.operation}: {finding.wrong}" for finding in findings)
