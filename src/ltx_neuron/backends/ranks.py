"""The interface of both backends to the ranks of a run, with its errors and helpers.
torchdist/host.py has a process per rank; nxd/runtime.py drives all cores from the host's process.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.models.programs import Program
from ltx_neuron.models.signatures import FINITE, RESULTS, Field
from ltx_neuron.weights.tensorfile import finite

T = TypeVar("T")


class Ranks(ABC):
    """The ranks of one run. A context manager: leaving it closes them. There are cp groups of tp
    tensor-parallel ranks, in this order. Each rank holds weights, the graphs of programs, and named
    tensors on its device: uploads and outputs of graphs. Every method raises RankError or
    DeviceFailure if a rank fails; the ranks cannot be used after that."""

    def __init__(self, tp: int, cp: int = 1):
        self.tp, self.cp, self.size = tp, cp, tp * cp
        # Total bytes of tensors uploaded so far, without weights. torchdist counts a tensor once,
        # since the ranks share its memory; nxd counts each rank's part.
        self.bytes_sent = 0
        # Graphs that one rank has launched so far, and the host's time for them: for asynchronous
        # launches until the last one returned, otherwise the time between graphs.
        self.launches, self.launch_ms = 0, 0.0
        self.programs: dict[str, Manifest] = {}  # the loaded ones by name
        # Of guidance groups (teams.py).
        self.moment = ""  # what the host does, such as "at step 3 of stage 1", for messages
        self.lost: list[str] = []  # a line for every lost group
        # (group, pass, milliseconds) of all runs of guided sequences so far.
        self.pass_ms: list[tuple[int, str, float]] = []

    @property
    def at_once(self) -> int:
        """Ranks that can work at once on graphs without collectives."""
        return self.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @abstractmethod
    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        """Load a weight set and the programs that share it. Other models stay loaded.

        weights  a folder of rank files, in `dtype`
        Raises UserError unless the files contain exactly the weights of the programs.
        """

    @abstractmethod
    def replace_weights(self, weights: Path) -> None:
        """Replace a model's weights by those of a folder; programs and tensors stay."""

    @abstractmethod
    def unload(self) -> None:
        """Free every weight, program and named tensor."""

    @abstractmethod
    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        """Upload whole tensors; each rank keeps its part, in the dtype of the program's field.

        like  the field of tensors that a sequence reads under another name
        Raises KeyError for an unknown field, and ValueError unless the shape is the field's, times
        tp and cp in the dimensions that they divide. For a field per block, dimension 0 is a
        multiple.
        """

    def put_numbers(self, program: str, name: str, count: int) -> None:
        """Upload the numbers 0 to count - 1, which `run` can then select for an input."""
        shape = self.programs[program].fields[name].shape
        self.put(program, name, **{indexed(name, n): torch.full(shape, n) for n in range(count)})

    @abstractmethod
    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        """Name a sequence of a program's runs, so that a step is one short command.

        runs  (run, reads, writes): `reads` maps an input to the tensor from which it is read,
              `writes` an output to the tensor to which it is stored, if the names differ
        """

    @abstractmethod
    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        """Run a sequence once on the tensors that the ranks hold. Returns the milliseconds until
        the last rank was done. Without `define`, each run is a sequence with the run's name.

        numbers  inputs whose value is a number of put_numbers, as in step=3
        Raises NotFiniteError if the last graph returns latents or pixels with NaN or Inf.
        """

    def share(self, work: Sequence[Callable[["Ranks"], T]]) -> list[T]:
        """Results of independent work on programs, each with uploads of its own. Guidance groups
        do it at the same time: the text's encoding, the tiles of a stage."""
        return [call(self) for call in work]

    @abstractmethod
    def get(self, program: str, name: str) -> Tensor:
        """Download a whole named tensor: rank 0's, or the joined parts of all ranks."""

    @abstractmethod
    def hashes(self, *names: str) -> list[str]:
        """Each rank's SHA-256 over the bits of its named tensors, in the order of the names."""

    @abstractmethod
    def check(self) -> None:
        """Raise RankError if a rank failed while it was idle."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks and free their memory. Closing twice is allowed."""


class RankError(RunError):
    """A rank failed; the text is that rank's own error."""


class RankRefusal(RankError, UserError):
    """A rank refused its files: a mistake that the user can correct."""


class NotFiniteError(RankError):
    """Latents or pixels with NaN or Inf, whose names are `names`."""

    def __init__(self, names: list[str]):
        super().__init__(f"NaN or Inf in {', '.join(names)}")
        self.names = names


def whole_shape(field: Field, tp: int, cp: int = 1) -> tuple[int, ...]:
    """Shape of a field's tensor with the parts of all ranks joined."""
    shape = [*field.shape]
    for dim, parts in ((field.split, tp), (field.context_split, cp)):
        if dim is not None:
            shape[dim] *= parts
    return tuple(shape)


def rank_slice(field: Field, whole: Tensor, rank: int, tp: int) -> Tensor:
    """A rank's part of a whole tensor: a view."""
    # The tokens of a context-parallel group follow each other, those of its ranks within them.
    if (dim := field.context_split) is not None:
        size = field.shape[dim] * (tp if dim == field.split else 1)
        whole = whole.narrow(dim, size * (rank // tp), size)
    if (dim := field.split) is not None:
        whole = whole.narrow(dim, field.shape[dim] * (rank % tp), field.shape[dim])
    return whole


def pad_tokens(field: Field | None, tensor: Tensor, tp: int, cp: int) -> Tensor:
    """A tensor with zeros after its tokens, as many as context parallelism needs to divide them."""
    if field is None or (dim := field.context_split) is None:
        return tensor
    missing = whole_shape(field, tp, cp)[dim] - tensor.shape[dim]
    zeros = [0, 0] * (tensor.ndim - 1 - dim) + [0, missing]
    return torch.nn.functional.pad(tensor, zeros) if missing > 0 else tensor


def padding_bias(field: Field, tokens: int, tp: int, cp: int) -> Tensor:
    """The padding_bias of all ranks for a clip with this number of video tokens: 0 at its tokens,
    the dtype's lowest number at the padding."""
    positions = torch.arange(whole_shape(field, tp, cp)[1])
    return torch.where(positions < tokens, 0.0, torch.finfo(field.dtype).min).unsqueeze(0)


def indexed(name: str, number: int) -> str:
    """The name of one of an input's tensors: of a step, or of the blocks from `number` on."""
    return f"{name}@{number}"


class Call(NamedTuple):
    """One launch of a graph for the blocks from `first` on."""

    graph: str
    first: int
    reads: dict[str, str]  # input -> name of the tensor from which it is read
    writes: dict[str, str]  # output -> name of the tensor to which it is stored


def calls_of(
    manifest: Manifest, runs: list[tuple[str, dict, dict]], numbers: dict[str, int]
) -> list[Call]:
    """The launches of a sequence of runs, as in Ranks.define, with the numbers of Ranks.run."""
    numbered, calls = {name: indexed(name, number) for name, number in numbers.items()}, []
    for run, reads, writes in runs:
        named = reads | numbered
        for graph, first in manifest.runs[run]:
            sources = {name: named.get(name, name) for name in manifest.graphs[graph]["inputs"]}
            for name in sources:
                if manifest.fields[name].per_block:  # named as by `rank_parts`
                    sources[name] = indexed(sources[name], first)
            stored = {name: writes.get(name, name) for name in manifest.graphs[graph]["outputs"]}
            calls.append(Call(graph, first, sources, stored))
    return calls


def rank_parts(field: Field, name: str, whole: Tensor, rank: int, tp: int) -> dict[str, Tensor]:
    """A rank's parts of an uploaded tensor by name, as views: one for each group of blocks."""
    if not field.per_block:
        return {name: rank_slice(field, whole, rank, tp)}
    groups = enumerate(whole.split(rows := field.shape[0]))
    return {indexed(name, number * rows): group for number, group in groups}


def check_shape(
    program: str, name: str, field: Field, tensor: Tensor, tp: int, cp: int = 1
) -> None:
    """Raise ValueError unless an upload has its field's whole shape."""
    shape = whole_shape(field, tp, cp)
    if field.per_block:  # a call of a graph of several blocks reads as many rows
        shape = (max(1, len(tensor) // shape[0]) * shape[0], *shape[1:])
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{program}.{name}: got shape {tuple(tensor.shape)}, wanted {shape}")


def weights_of(programs: dict[str, Manifest]) -> dict[str, tuple[int, ...]]:
    """Name and one rank's shape of every weight that the programs' calls use."""
    return {
        name: shape for manifest in programs.values() for name, shape in manifest.weights().items()
    }


def broken_latents(stored: Iterable[str], download: Callable[[str], Tensor]) -> list[str]:
    """Names of latents or pixels with NaN or Inf among the outputs of a run's last graph. If there
    are none, only one number is downloaded."""
    stored = {*stored}
    if FINITE not in stored or finite(download(FINITE)):
        return []
    results = [name for name in RESULTS if name in stored]
    # Finite numbers whose sum overflows count as broken too.
    return [name for name in results if not finite(download(name))] or results


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        # as bytes, because numpy has no bfloat16
        hasher.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


class HostRanks:
    """The methods of Ranks that a stage calls, for a world of one rank and one program: a rank in
    this process, which calls the modules of a program directly. weight: returns a weight by its
    name."""

    def __init__(self, name: str, program: Program, weight: Callable[[str], Tensor]):
        self.tp, self.cp, self.programs = 1, 1, {name: program}
        self._program, self._weight = program, weight
        self._values: dict[str, Tensor] = {}
        self._sequences: dict[str, list] = {}

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self._values[name] = tensor.to(self._program.fields[like or name].dtype)

    put_numbers = Ranks.put_numbers

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._sequences[sequence] = runs

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        for name, number in numbers.items():
            self._values[name] = self._values[indexed(name, number)]
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
        return [tensors_digest(self._values[name] for name in names)]
