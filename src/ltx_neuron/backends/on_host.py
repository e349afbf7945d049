"""A rank in this process, which calls the modules of a program directly."""

from collections.abc import Callable

from torch import Tensor

from ltx_neuron.backends import ranks
from ltx_neuron.models.programs import Program


class HostRanks:
    """The methods of Ranks that a stage calls, for a world of one rank and one program. weight:
    returns a weight by its name."""

    def __init__(self, name: str, program: Program, weight: Callable[[str], Tensor]):
        self.tp, self.cp, self.programs = 1, 1, {name: program}
        self._program, self._weight = program, weight
        self._values: dict[str, Tensor] = {}
        self._sequences: dict[str, list] = {}

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self._values[name] = tensor.to(self._program.fields[like or name].dtype)

    put_numbers = ranks.Ranks.put_numbers

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._sequences[sequence] = runs

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        for name, number in numbers.items():
            self._values[name] = self._values[ranks.indexed(name, number)]
        for run, reads, writes in self._sequences.get(sequence, [(sequence, {}, {})]):
            for graph, first in self._program.runs[run]:
                names = self._program.graphs[graph].inputs
                inputs = {name: self._input(name, reads.get(name, name), first) for name in names}
                outputs = self._program.call(graph, first, self._weight, inputs)
                self._values |= {writes.get(name, name): x for name, x in outputs.items()}
        return 0.0

    def _input(self, field: str, name: str, first: int) -> Tensor:
        described, value = self._program.fields[field], self._values[name]
        return value[first : first + described.shape[0]] if described.per_block else value

    def get(self, program: str, name: str) -> Tensor:
        return self._values[name]

    def hashes(self, *names: str) -> list[str]:
        return [ranks.tensors_digest(self._values[name] for name in names)]
