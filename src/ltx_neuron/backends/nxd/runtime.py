"""NxD's runtime: this process drives all ranks of a program. compile.py makes the graphs.

Rank files are read strictly and uploaded once. A graph is bound to these weights. A graph that
serves several groups of blocks instead receives the weights of one group with each call, as lists
of tensors that are already on the cores (GraphInputs). buffers.py decides how often a graph is
loaded and which copy runs next. Only five calls need hardware: NxDModel's load, set_weights and
to_neuron, its runtime object's forward_ranked, and `to_core`. We did not run them on hardware.
"""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import is_
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends import environment, ranks
from ltx_neuron.backends.manifest import Manifest, graph_file
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.backends.nxd.buffers import Buffers, copies_needed
from ltx_neuron.backends.nxd.compile import WRAPPED, argument_name, set_environment
from ltx_neuron.backends.ranks import Call, NotFiniteError, calls_of
from ltx_neuron.config.profiles import Profile
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import cut_graphs, weight_name
from ltx_neuron.models.signatures import Field
from ltx_neuron.weights.rankfiles import RESHARD, load_rank_file, open_rank_file, rank_path
from ltx_neuron.weights.tensorfile import TensorFile


def to_core(tensor: Tensor, rank: int) -> Tensor:
    """A copy of a host tensor on a rank's core."""
    return tensor.to(f"privateuseone:{rank}")


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a core's tensor, which a later run may overwrite."""
    return tensor.to("cpu", copy=True)


class _WeightSet:
    """One copy of a model's weights on the cores, and the graphs that use it."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self.folder, self.shapes, self.dtype = folder, shapes, dtype
        # By rank, then by name; None until the first graph is loaded.
        self.tensors: list[dict[str, Tensor]] | None = None
        self.models: dict[tuple[str, str], list] = {}  # (program, graph) -> its loaded NxDModels
        self.inputs: dict[
            tuple[str, str, int], GraphInputs
        ] = {}  # (program, graph, first block) -> ...
        self.manifests: dict[str, Manifest] = {}

    def bind(self, program: str, graph: str, copies: int, tp: int, size: int) -> None:
        """Load a graph on `size` ranks until it has `copies` copies with shared weights."""
        manifest = self.manifests[program]
        loaded = self.models.setdefault((program, graph), [])
        if len(loaded) >= copies:
            return
        models = [_open(manifest, graph, size) for _ in range(copies - len(loaded))]
        if self.tensors is None:
            # Read strictly, because set_weights does not check.
            paths = [rank_path(self.folder, rank) for rank in range(tp)]
            read = partial(load_rank_file, shapes=self.shapes, dtype=self.dtype)
            with ThreadPoolExecutor() as pool:
                files = [*pool.map(read, paths)]
            # Ranks with the same heads have the same weights, and share the host's tensors.
            models[0].set_weights(files * (size // tp))
            self.tensors = models[0].weights
        described = manifest.graphs[graph]
        firsts = {first for run in manifest.runs.values() for name, first in run if name == graph}
        weights = {first: self._weights(described, first) for first in firsts}
        bound, passed = {}, dict.fromkeys(firsts, {})
        if graph in cut_graphs(manifest.runs):
            for first, parts in weights.items():
                passed[first] = {argument_name(name): x for name, x in parts.items()}
        else:
            (bound,) = weights.values()
        if not loaded:  # a further copy has the same inputs
            fields = {name: manifest.fields[name] for name in described["inputs"]}
            for first, parts in passed.items():
                inputs = GraphInputs(models[0], described["tag"], fields, parts)
                self.inputs[program, graph, first] = inputs
        for model in models:
            # Without set_weights, which would upload the weights again.
            model.weights = [
                {WRAPPED + parameter: parts[rank] for parameter, parts in bound.items()}
                for rank in range(size)
            ]
            model.to_neuron()
            loaded.append(model)

    def _weights(self, described: dict, first_block: int) -> dict[str, list[Tensor]]:
        """A graph's weights for the blocks from `first_block` on, by parameter: one tensor per
        rank. They are checked here once, not in every call."""
        weights = {}
        for parameter, shape in described["parameters"].items():
            name = weight_name(parameter, first_block)
            weights[parameter] = [tensors[name] for tensors in self.tensors or ()]
            check(name, weights[parameter], (tuple(shape), self.dtype))
        return weights

    def release(self, programs: set[str]) -> None:
        """Free programs. NxD has no unload: dropping the last reference frees device memory."""
        for program in programs:
            self.manifests.pop(program, None)
        for key in [key for key in self.models if key[0] in programs]:
            for model in self.models.pop(key):
                model.spmd_models, model.weights, model.states = {}, [], []
        for key in [key for key in self.inputs if key[0] in programs]:
            del self.inputs[key]
        gc.collect()


def _open(manifest: Manifest, graph: str, size: int):
    from neuronx_distributed import NxDModel

    path = manifest.folder / graph_file(graph, "nxd")
    again = f"delete {manifest.folder} and compile again"
    model = NxDModel.load(str(path))
    if not isinstance(model, NxDModel):
        raise UserError(
            f"{path} was made by another version of NxD than the installed one; {again}"
        )
    if model.world_size != size:
        raise UserError(f"{path} was compiled for {model.world_size} ranks, wanted {size}; {again}")
    return model


class NxdRanks(ranks.Ranks):
    """The ranks of a run, driven by this process. Failures of the device raise DeviceFailure."""

    # Ranks of this process; the runtime's communicator cannot change its size.
    _started: int | None = None

    def __init__(self, profile: Profile, tp: int):
        super().__init__(tp, profile.context_parallel)
        if NxdRanks._started not in (None, self.size):
            raise UserError(
                f"this process already drives {NxdRanks._started} ranks and cannot drive"
                f" {self.size}; start a new one"
            )
        NxdRanks._started = self.size
        set_environment(profile)
        environment.set_launch(profile, tp)
        self._sets: list[_WeightSet] = []
        self._sequences: dict[tuple[str, str], list] = {}
        self._buffers = Buffers()

    def close(self) -> None:
        self.unload()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        """Keeps what is already loaded from the folder. Unloads its programs that are not in
        `programs`, and any other weight set of the same model."""
        shapes = ranks.weights_of(programs)
        # Two sets of one model would not fit: the old one is freed before the new one is read.
        for other in [*self._sets]:
            shared = other.shapes.keys() & shapes.keys()
            # Of the same folder only a part may be there: the weights of sound alone.
            if shared and (other.folder != weights or shared < shapes.keys()):
                self._drop(other)
        held = next((loaded for loaded in self._sets if loaded.folder == weights), None)
        if held is None:
            held = _WeightSet(weights, shapes, dtype)
            self._sets.append(held)
        self._release(held, {*held.manifests} - {*programs})
        with explained():
            for program, manifest in programs.items():
                self.programs[program] = held.manifests[program] = manifest
                for run in manifest.runs:
                    self._load_copies(held, program, [(run, {}, {})])

    def _load_copies(self, held: _WeightSet, program: str, runs: list) -> None:
        calls = calls_of(held.manifests[program], runs, {})
        for graph, copies in copies_needed(program, calls).items():
            held.bind(program, graph, copies, self.tp, self.size)

    def replace_weights(self, weights: Path) -> None:
        names = TensorFile(rank_path(weights, 0), RESHARD).shapes.keys()
        held = max(self._sets, key=lambda loaded: len(loaded.shapes.keys() & names))
        # Every file is checked before the first tensor is overwritten.
        files = [
            open_rank_file(rank_path(weights, rank), held.shapes, held.dtype)
            for rank in range(self.tp)
        ]
        assert held.tensors is not None  # a set is of loaded programs
        for weight_file, file in enumerate(files):
            for name, tensor in file.tensors(held.shapes):
                # In place: the graphs refer to these tensors, and there is no second copy.
                for tensors in held.tensors[weight_file :: self.tp]:
                    tensors[name].copy_(tensor)
        held.folder = weights

    def unload(self) -> None:
        self._buffers = Buffers()
        self._sequences.clear()
        for held in [*self._sets]:
            self._drop(held)

    def _drop(self, held: _WeightSet) -> None:
        self._release(held, {*held.manifests})
        held.tensors = None  # the last reference to the device's copy
        self._sets.remove(held)
        gc.collect()

    def _release(self, held: _WeightSet, programs: set[str]) -> None:
        self._buffers.release(programs)
        held.release(programs)
        for program in programs:
            del self.programs[program]

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            field = self.programs[program].fields[like or name]
            ranks.check_shape(program, name, field, tensor, self.tp, self.cp)
            whole = field, name, tensor
            ranks_parts = [ranks.rank_parts(*whole, rank, self.tp) for rank in range(self.size)]
            for part in ranks_parts[0]:
                self._upload(part, [parts[part].to(field.dtype) for parts in ranks_parts])

    def _upload(self, name: str, parts: list[Tensor]) -> None:
        with explained():
            # A part may be a view.
            on_cores = [to_core(part.contiguous(), rank) for rank, part in enumerate(parts)]
        self._buffers.upload(name, on_cores)
        self.bytes_sent += sum(part.nbytes for part in parts)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._sequences[program, sequence] = runs
        with explained():
            self._load_copies(self._set_of(program), program, runs)

    def _set_of(self, program: str) -> _WeightSet:
        return next(loaded for loaded in self._sets if program in loaded.manifests)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        held, start = self._set_of(program), time.perf_counter()
        runs = self._sequences.get((program, sequence), [(sequence, {}, {})])
        in_graphs = 0.0
        for call in calls_of(held.manifests[program], runs, numbers):
            in_graphs += self._launch(held, program, call)
            self.launches += 1
        # The ranked mode returns when the last rank is done.
        milliseconds = (time.perf_counter() - start) * 1e3
        self.launch_ms += milliseconds - in_graphs
        if broken := ranks.broken_latents(call.writes.values(), partial(self.get, program)):
            raise NotFiniteError(broken)
        return milliseconds

    def _launch(self, held: _WeightSet, program: str, call: Call) -> float:
        inputs = held.inputs[program, call.graph, call.first]
        for name, source in call.reads.items():
            inputs.take(name, self._buffers.tensors[source])
        number = self._buffers.claim(program, call)
        with explained():
            # A sequence in another order than defined may need another copy.
            held.bind(program, call.graph, number + 1, self.tp, self.size)
            model = held.models[program, call.graph][number]
            called = time.perf_counter()
            outputs = inputs.launch(model)
            milliseconds = (time.perf_counter() - called) * 1e3
        self._buffers.tensors.update(zip(call.writes.values(), outputs, strict=True))
        return milliseconds

    def get(self, program: str, name: str) -> Tensor:
        field, parts = self.programs[program].fields[name], self._buffers.tensors[name]
        if field.split is None and field.context_split is None:
            with explained():
                return to_host(parts[0])
        whole = torch.empty(ranks.whole_shape(field, self.tp, self.cp), dtype=field.dtype)
        with explained():
            for rank, part in enumerate(parts):
                ranks.rank_slice(field, whole, rank, self.tp).copy_(to_host(part))
        return whole

    def hashes(self, *names: str) -> list[str]:
        return [
            ranks.tensors_digest(self._buffers.tensors[name][rank] for name in names)
            for rank in range(self.size)
        ]

    def check(self) -> None:
        """Do nothing: cores that this process drives cannot fail while idle."""


class GraphInputs:
    """A graph's inputs for one group of blocks, in the compiled graph's order, for all its copies.

    NxDModel.forward sorts, routes and transposes every input of every rank at each call. This does
    so once, with NxD's own methods. `launch` then calls the runtime's object, as forward does. Its
    lists are TorchScript's (torch.jit.script), which the runtime gets by reference. A Python list
    would be converted, tensor by tensor, at each call.

    model    a loaded NxDModel; it must route these names and shapes to the graph `tag`
    fields   of the inputs that calls set
    weights  of the group, by keyword: one tensor per rank
    """

    def __init__(self, model, tag: str, fields: dict[str, Field], weights: dict[str, list[Tensor]]):
        self.tag, self.fields = tag, fields
        self._held: dict[str, list[Tensor]] = {}  # the tensors of the last call
        shapes = {name: field.shape for name, field in fields.items()}
        shapes |= {name: parts[0].shape for name, parts in weights.items()}
        marks = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        ordered, names = model.convert_dict_to_ordered_list(marks, 0)
        if tag not in (routes := model.router(ordered, names)):
            raise RuntimeError(f"NxD routes the inputs of {tag} to {', '.join(routes)}")
        # Without inputs that the graph does not use.
        flat = model.flattener_map[tag](ordered)
        name_of = {id(mark): name for name, mark in marks.items()}
        if not all(id(mark) in name_of for mark in flat):
            raise RuntimeError(f"{tag}: NxD's flattener returns other tensors than it was given")
        self._places = {name_of[id(mark)]: place for place, mark in enumerate(flat)}
        size = model.local_ranks_size
        self._of_ranks = [torch.jit.script([torch.empty(0)] * len(flat)) for _ in range(size)]
        self._ranked = torch.jit.script([[torch.empty(0)]] * size)
        for rank, tensors in enumerate(self._of_ranks):
            self._ranked[rank] = tensors  # by reference
        for name, parts in weights.items():
            self._set(name, parts)

    def take(self, name: str, parts: list[Tensor]) -> None:
        """Use these tensors, one per rank, as an input from now on. RuntimeError unless they have
        the field's shape and dtype: NxD would misread another dtype."""
        held = self._held.get(name, ())
        if len(held) == len(parts) and all(map(is_, held, parts)):
            return
        check(f"{self.tag}.{name}", parts, (self.fields[name].shape, self.fields[name].dtype))
        self._set(name, parts)
        self._held[name] = [*parts]

    def _set(self, name: str, parts: list[Tensor]) -> None:
        if (place := self._places.get(name)) is not None:
            for tensors, part in zip(self._of_ranks, parts, strict=True):
                tensors[place] = part

    def launch(self, model) -> list[list[Tensor]]:
        """Run a copy of the graph. Returns one list per output, with a tensor per rank."""
        outputs = model.spmd_models[self.tag].forward_ranked(self._ranked)
        return [[*parts] for parts in zip(*outputs, strict=True)]


def check(name: str, parts: list[Tensor], expected: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Raise RuntimeError unless the ranks' parts of a tensor have this shape and dtype."""
    for part in parts:
        if (tuple(part.shape), part.dtype) != expected:
            raise RuntimeError(f"{name}: got {tuple(part.shape)} {part.dtype}, wanted {expected}")
