"""NxD's runtime: this one process drives all ranks of a program on a chip's cores. nxd_compile.py
makes the graphs.

Rank files are read with our own strict check and uploaded once. A graph is bound to this one copy,
or, if it serves several groups of blocks, is handed the weights of one of them in each call: lists
of tensors that are on the cores already. What needs the hardware is behind one call each:
NxDModel's load, set_weights, to_neuron and its call, and `to_core`. Not run on hardware by us.
"""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends import environment, ranks
from ltx_neuron.backends.manifest import Manifest, graph_file
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.backends.nxd_compile import WRAPPED, argument_name, set_environment
from ltx_neuron.backends.ranks import NotFiniteError
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import cut_graphs, weight_name
from ltx_neuron.profiles import Profile
from ltx_neuron.weights.rankfiles import RESHARD, load_rank_file, open_rank_file, rank_file
from ltx_neuron.weights.tensorfile import TensorFile


def to_core(tensor: Tensor, rank: int) -> Tensor:
    """A copy of a host tensor on a rank's core."""
    return tensor.to(f"privateuseone:{rank}")


class _WeightSet:
    """One copy of a model's weights on the cores, and the graphs that use it.

    tensors    by rank, then by name; None until the first graph is there
    models     NxDModels by (program, graph)
    arguments  of a graph that takes its weights as inputs, by (program, graph, first block): by
               keyword, one tensor a rank
    """

    def __init__(self, folder: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self.folder, self.wanted, self.dtype = folder, wanted, dtype
        self.tensors: list[dict[str, Tensor]] | None = None
        self.models: dict[tuple[str, str], object] = {}
        self.arguments: dict[tuple[str, str, int], dict[str, list[Tensor]]] = {}
        self.manifests: dict[str, Manifest] = {}

    def read(self, folder: Path, tp: int) -> list[dict[str, Tensor]]:
        """The rank files' tensors. Strict, because set_weights takes whatever it is given."""

        def read_rank(rank: int) -> dict[str, Tensor]:
            return load_rank_file(folder / rank_file(rank), self.wanted, self.dtype)

        with ThreadPoolExecutor() as pool:
            return [*pool.map(read_rank, range(tp))]

    def bind(self, program: str, manifest: Manifest, graph: str, tp: int) -> None:
        """Load a graph and hand it the very tensors that the others have."""
        model = _open(manifest, graph, tp)
        if self.tensors is None:
            model.set_weights(self.read(self.folder, tp))
            self.tensors = model.weights
        firsts = {first for run in manifest.runs.values() for name, first in run if name == graph}
        weights = {first: self._weights(manifest.graphs[graph], first) for first in firsts}
        bound = {}
        if graph in cut_graphs(manifest.runs):
            for first, parts in weights.items():
                named = {argument_name(parameter): each for parameter, each in parts.items()}
                self.arguments[program, graph, first] = named
        else:
            (bound,) = weights.values()
        # Not by set_weights, which would upload another copy for each graph.
        model.weights = [
            {WRAPPED + parameter: parts[rank] for parameter, parts in bound.items()}
            for rank in range(tp)
        ]
        model.to_neuron()
        self.models[program, graph] = model

    def _weights(self, described: dict, first_block: int) -> dict[str, list[Tensor]]:
        """A graph's weights for the blocks from `first_block` on, by parameter: one tensor a rank.
        They are checked here, once, and not in calls."""
        weights = {}
        for parameter, shape in described["parameters"].items():
            name = weight_name(parameter, first_block)
            parts = weights[parameter] = [tensors[name] for tensors in self.tensors]
            _check(name, parts, (tuple(shape), self.dtype))
        return weights

    def release(self, programs: set[str]) -> None:
        """Free programs. NxD has no unload: device memory is free once nothing refers to it."""
        for program in programs:
            self.manifests.pop(program, None)
        for key in [key for key in self.models if key[0] in programs]:
            model = self.models.pop(key)
            model.spmd_models, model.weights, model.states = {}, [], []
        for key in [key for key in self.arguments if key[0] in programs]:
            del self.arguments[key]
        gc.collect()


def _check(name: str, parts: list[Tensor], wanted: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Raise RuntimeError unless what the ranks hold of a tensor has this shape and dtype. NxD
    routes by names and shapes: another dtype would be read as if it were the graph's."""
    for part in parts:
        if (tuple(part.shape), part.dtype) != wanted:
            raise RuntimeError(f"{name}: got {tuple(part.shape)} {part.dtype}, wanted {wanted}")


def _open(manifest: Manifest, graph: str, tp: int):
    """An NxDModel from its file, whose content was compared with its manifest when it was found."""
    from neuronx_distributed import NxDModel

    path = manifest.folder / graph_file(graph, "nxd")
    again = f"delete {manifest.folder} and compile again"
    model = NxDModel.load(str(path))
    if not isinstance(model, NxDModel):
        raise UserError(
            f"{path} was made by another version of NxD than the installed one; {again}"
        )
    if model.world_size != tp:
        raise UserError(f"{path} was compiled for {model.world_size} ranks, wanted {tp}; {again}")
    return model


class Ranks(ranks.Ranks):
    """The ranks of a run, all driven by this process. Failures of the device are DeviceFailure.

    A named tensor is a list of one tensor per rank, which stays on the cores between runs.
    """

    # Ranks of this process: the runtime's communicator cannot change its size.
    _started: int | None = None

    def __init__(self, profile: Profile, tp: int):
        if Ranks._started not in (None, tp):
            raise UserError(
                f"this process already drives {Ranks._started} ranks and cannot drive {tp}; start a"
                " new one"
            )
        Ranks._started = tp
        set_environment(profile)
        environment.set_communicator(profile, tp)
        # The runtime takes every core of the machine otherwise.
        os.environ.setdefault("NEURON_RT_NUM_CORES", str(tp))
        self.tp = tp
        self.bytes_sent = self.command_bytes = 0
        self.programs: dict[str, Manifest] = {}
        self._sets: list[_WeightSet] = []
        self._sequences: dict[tuple[str, str], list] = {}
        self._tensors: dict[str, list[Tensor]] = {}

    def close(self) -> None:
        self.unload()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        """As Ranks.load of ranks.py. What is loaded from the folder already stays, programs of it
        that are not asked for leave, and so does another weight set of the same model."""
        wanted = ranks.weights_of(programs)
        # Two sets of one model would not fit: the old one is freed before the new one is read.
        for other in [*self._sets]:
            if other.folder != weights and other.wanted.keys() & wanted.keys():
                self._drop(other)
        held = next((loaded for loaded in self._sets if loaded.folder == weights), None)
        if held is None:
            held = _WeightSet(weights, wanted, dtype)
            self._sets.append(held)
        self._release(held, {*held.manifests} - {*programs})
        with explained():
            for program, manifest in programs.items():
                self.programs[program] = held.manifests[program] = manifest
                for graph in manifest.graphs:
                    if (program, graph) not in held.models:
                        held.bind(program, manifest, graph, self.tp)

    def replace_weights(self, weights: Path) -> None:
        names = TensorFile(weights / rank_file(0), RESHARD).shapes.keys()
        held = max(self._sets, key=lambda loaded: len(loaded.wanted.keys() & names))
        # Every file is checked before the first tensor is overwritten.
        files = [
            open_rank_file(weights / rank_file(rank), held.wanted, held.dtype)
            for rank in range(self.tp)
        ]
        for rank, file in enumerate(files):
            for name, tensor in file.tensors():
                # In place, tensor by tensor: the graphs hold these, and there is no second copy.
                held.tensors[rank][name].copy_(tensor)
        held.folder = weights

    def unload(self) -> None:
        self._tensors.clear()
        self._sequences.clear()
        for held in [*self._sets]:
            self._drop(held)

    def _drop(self, held: _WeightSet) -> None:
        """Free a weight set with its programs."""
        self._release(held, {*held.manifests})
        held.tensors = None  # the last reference to the device's copy
        self._sets.remove(held)
        gc.collect()

    def _release(self, held: _WeightSet, programs: set[str]) -> None:
        held.release(programs)
        for program in programs:
            del self.programs[program]

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            field = self.programs[program].fields[like or name]
            ranks.check_shape(program, name, field, tensor, self.tp)
            kept = [ranks.kept(field, name, tensor, rank) for rank in range(self.tp)]
            for each in kept[0]:
                self._upload(each, [parts[each].to(field.dtype) for parts in kept])

    def _upload(self, name: str, parts: list[Tensor]) -> None:
        with explained():
            self._tensors[name] = [
                to_core(part.contiguous(), rank)  # a part may be a view
                for rank, part in enumerate(parts)
            ]
        self.bytes_sent += sum(part.nbytes for part in parts)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._sequences[program, sequence] = runs

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        chosen = {name: ranks.at(name, number) for name, number in numbers.items()}
        held = next(loaded for loaded in self._sets if program in loaded.manifests)
        manifest, start = held.manifests[program], time.perf_counter()
        for run, reads, writes in self._sequences.get((program, sequence), [(sequence, {}, {})]):
            for graph, first in manifest.runs[run]:
                self._call(held, program, graph, first, reads | chosen, writes)
        # The ranked mode returns when the last rank is done.
        milliseconds = (time.perf_counter() - start) * 1e3
        outputs = manifest.graphs[graph]["outputs"]
        if broken := ranks.broken_latents(outputs, writes, partial(self.get, program)):
            raise NotFiniteError(broken)
        return milliseconds

    def _call(
        self, held: _WeightSet, program: str, graph: str, first: int, reads: dict, writes: dict
    ) -> None:
        """Launch a graph for the blocks from `first` on."""
        described, fields = held.manifests[program].graphs[graph], held.manifests[program].fields
        values = {}
        for name in described["inputs"]:
            field = fields[name]
            values[name] = self._tensors[reads.get(name, name) + ranks.group(field, first)]
            _check(f"{graph}.{name}", values[name], (field.shape, field.dtype))
        values |= held.arguments.get((program, graph, first), {})
        model = held.models[program, graph]
        with explained():
            # One list per output, with a tensor per rank
            outputs = model(**values, model_name=described["tag"], forward_mode="ranked")
        names = [writes.get(name, name) for name in described["outputs"]]
        self._tensors.update(zip(names, outputs, strict=True))

    def get(self, program: str, name: str) -> Tensor:
        split, parts = self.programs[program].fields[name].split, self._tensors[name]
        with explained():
            if split is None:
                return parts[0].cpu()
            return torch.cat([part.cpu() for part in parts], dim=split)

    def hashes(self, *names: str) -> list[str]:
        return [
            ranks.tensors_digest(self._tensors[name][rank] for name in names)
            for rank in range(self.tp)
        ]

    def check(self) -> None:
        """Nothing: the cores are driven from this process, none fails while it has nothing to
        do."""
