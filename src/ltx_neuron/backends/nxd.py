"""NxD's runtime: this one process drives all ranks of a program on a chip's cores. nxd_compile.py
makes the graphs.

Rank files are read with our own strict check, and every graph is bound to one copy of the weights.
What needs the hardware is behind one call each: NxDModel's load, set_weights, to_neuron and its
call, and `to_core`. Not run on hardware by us.
"""

import gc
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends.manifest import Manifest, graph_file
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.backends.nxd_compile import WRAPPED, set_environment
from ltx_neuron.backends.ranks import NotFiniteError, finite, part_of, whole_shape
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import weight_name
from ltx_neuron.models.signatures import LATENTS, Field
from ltx_neuron.profiles import Profile
from ltx_neuron.weights.rankfiles import load_rank_file, open_rank_file, rank_file
from ltx_neuron.weights.tensorfile import TensorFile


def to_core(tensor: Tensor, rank: int) -> Tensor:
    """A copy of a host tensor on a rank's core."""
    return tensor.to(f"privateuseone:{rank}")


class _WeightSet:
    """One copy of a model's weights on the cores, and the graphs bound to it."""

    def __init__(self, folder: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self.folder, self.wanted, self.dtype = folder, wanted, dtype
        self.tensors: list[dict[str, Tensor]] | None = None  # by rank
        self.models: dict[tuple[str, str], object] = {}  # (program, graph) -> NxDModel
        self.manifests: dict[str, Manifest] = {}

    def read(self, folder: Path, tp: int) -> list[dict[str, Tensor]]:
        """The rank files' tensors. Strict, because set_weights takes whatever it is given."""
        with ThreadPoolExecutor() as pool:
            return [
                *pool.map(
                    lambda rank: load_rank_file(folder / rank_file(rank), self.wanted, self.dtype),
                    range(tp),
                )
            ]

    def bind(self, program: str, manifest: Manifest, graph: str, tp: int) -> None:
        """Load a graph and hand it the very tensors that the others have."""
        model = _open(manifest, graph, tp)
        if self.tensors is None:
            model.set_weights(self.read(self.folder, tp))
            self.tensors = model.weights
        blocks = {name: first for calls in manifest.runs.values() for name, first in calls}
        names = {p: weight_name(p, blocks[graph]) for p in manifest.graphs[graph]["parameters"]}
        model.weights = [
            {WRAPPED + p: tensors[name] for p, name in names.items()} for tensors in self.tensors
        ]
        model.to_neuron()
        self.models[program, graph] = model

    def release(self, programs: set[str]) -> None:
        """Let go of programs. NxD has no unload: device memory is free once nothing refers to
        it."""
        for program in programs:
            self.manifests.pop(program, None)
        for key in [key for key in self.models if key[0] in programs]:
            model = self.models.pop(key)
            model.spmd_models, model.weights, model.states = {}, [], []
        gc.collect()


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


class Ranks:
    """The ranks of a run, all driven by this process, with the interface of torchdist.Ranks.

    Named tensors are lists of one tensor per rank that stay on the cores between runs.
    """

    # ranks of this process: the runtime's communicator cannot change size
    _started: int | None = None

    def __init__(self, profile: Profile, tp: int):
        if Ranks._started not in (None, tp):
            raise UserError(
                f"this process already drives {Ranks._started} ranks and cannot drive {tp}; start a"
                " new one"
            )
        Ranks._started = tp
        set_environment(profile)
        os.environ.setdefault("NEURON_RT_NUM_CORES", str(tp))
        self.tp, self.bytes_sent = tp, 0
        self.fields: dict[str, dict[str, Field]] = {}
        self.outputs: dict[str, set[str]] = {}
        self._sets: list[_WeightSet] = []
        self._sequences: dict[tuple[str, str], list] = {}
        self._tensors: dict[str, list[Tensor]] = {}

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.unload()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        """Load one weight set and the programs that share it. Strict: each tensor is used, each
        weight is there.

        What is loaded from there already stays; programs that are not asked for leave, and so does
        another weight set of the same model. A set of another model stays beside it: who wants one
        at a time calls `unload`.
        """
        wanted = {
            name: shape
            for manifest in programs.values()
            for name, shape in manifest.weights().items()
        }
        for other in [
            s for s in self._sets if s.folder != weights and s.wanted.keys() & wanted.keys()
        ]:
            self._drop(other)
        held = next((s for s in self._sets if s.folder == weights), None) or _WeightSet(
            weights, wanted, dtype
        )
        self._forget(held, {*held.manifests} - {*programs})
        if held not in self._sets:
            self._sets.append(held)
        with explained():
            for program, manifest in programs.items():
                self.fields[program], held.manifests[program] = manifest.fields, manifest
                self.outputs[program] = {
                    name for graph in manifest.graphs.values() for name in graph["outputs"]
                }
                for graph in manifest.graphs:
                    if (program, graph) not in held.models:
                        held.bind(program, manifest, graph, self.tp)

    def replace_weights(self, weights: Path) -> None:
        """Put another weight set of the same model in the loaded one's place, tensor by tensor: no
        second copy."""
        names = TensorFile(weights / rank_file(0), "run the shard script again").shapes.keys()
        replaced = max(self._sets, key=lambda held: len(held.wanted.keys() & names))
        files = [
            open_rank_file(weights / rank_file(rank), replaced.wanted, replaced.dtype)
            for rank in range(self.tp)
        ]
        for rank, file in enumerate(files):
            for name, tensor in file.tensors():
                replaced.tensors[rank][name].copy_(
                    tensor
                )  # in place: the graphs hold these very tensors
        replaced.folder = weights

    def unload(self) -> None:
        """Free the weights, the graphs and every named tensor."""
        self._tensors.clear()
        self._sequences.clear()
        for held in [*self._sets]:
            self._drop(held)

    def _drop(self, held: _WeightSet) -> None:
        self._forget(held, {*held.manifests})
        held.tensors = None
        self._sets.remove(held)
        gc.collect()

    def _forget(self, held: _WeightSet, programs: set[str]) -> None:
        held.release(programs)
        for program in programs:
            del self.fields[program], self.outputs[program]

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        """Upload named tensors (whole ones: each rank takes its part). Shapes must be the
        program's; dtypes become so.

        `like` is the field that describes them when their own names are none, as those that a
        sequence reads by alias.
        """
        for name, tensor in tensors.items():
            field = self.fields[program][like or name]
            if tuple(tensor.shape) != (wanted := whole_shape(field, self.tp)):
                raise ValueError(
                    f"{program}.{name}: got shape {tuple(tensor.shape)}, wanted {wanted}"
                )
            self._put(
                name, [part_of(field, tensor, rank).to(field.dtype) for rank in range(self.tp)]
            )

    def _put(self, name: str, parts: list[Tensor]) -> None:
        with explained():
            self._tensors[name] = [
                to_core(part.contiguous(), rank) for rank, part in enumerate(parts)
            ]
        self.bytes_sent += sum(part.nbytes for part in parts)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        """Name a sequence of a program's runs. Each is (run, reads, writes): where it takes an
        input or leaves an output under another name than the graph's."""
        self._sequences[program, sequence] = runs

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        """Run a sequence once on the tensors the ranks hold; returns the milliseconds until the
        last rank was done. NotFiniteError where it leaves latents with NaN or Inf.

        Without `define`, a program's runs are sequences of their own names.
        """
        fields = self.fields[program]
        for name, number in numbers.items():
            self._put(
                name, [torch.full(fields[name].shape, number, dtype=fields[name].dtype)] * self.tp
            )
        held = next(held for held in self._sets if program in held.manifests)
        manifest, start = held.manifests[program], time.perf_counter()
        for run, reads, writes in self._sequences.get((program, sequence), [(sequence, {}, {})]):
            for graph, _ in manifest.runs[run]:
                self._call(held.models[program, graph], manifest, graph, reads, writes)
        milliseconds = (
            time.perf_counter() - start
        ) * 1e3  # ranked mode returns when the last rank is done
        written = [
            name
            for name in LATENTS
            if name in {writes.get(name, name) for name in manifest.graphs[graph]["outputs"]}
        ]
        if broken := [name for name in written if not finite(self.get(program, name))]:
            raise NotFiniteError(broken)
        return milliseconds

    def _call(self, model, manifest: Manifest, graph: str, reads: dict, writes: dict) -> None:
        described, fields = manifest.graphs[graph], manifest.fields
        values = {name: self._tensors[reads.get(name, name)] for name in described["inputs"]}
        for (
            name,
            parts,
        ) in (
            values.items()
        ):  # NxD routes by names and shapes: another dtype would be read as this one
            wanted = fields[name].shape, fields[name].dtype
            if any((tuple(part.shape), part.dtype) != wanted for part in parts):
                raise RuntimeError(
                    f"{graph}.{name}: got {tuple(parts[0].shape)} {parts[0].dtype}, wanted {wanted}"
                )
        with explained():
            outputs = model(**values, model_name=described["tag"], forward_mode="ranked")
        names = [writes.get(name, name) for name in described["outputs"]]
        self._tensors.update(zip(names, outputs, strict=True))  # [output][rank]

    def get(self, program: str, name: str) -> Tensor:
        """Download a named tensor: rank 0's, or all parts put together."""
        split, parts = self.fields[program][name].split, self._tensors[name]
        with explained():
            return (
                parts[0].cpu()
                if split is None
                else torch.cat([part.cpu() for part in parts], dim=split)
            )

    def check(self) -> None:
        """Nothing: the cores are driven from this process, none fails while it has nothing to
        do."""

    def returns(self, program: str, name: str) -> bool:
        """Whether a program hands back a tensor of that name."""
        return name in self.outputs[program]

    def hashes(self, *names: str) -> list[str]:
        """Each rank's digest over the bits of its named tensors."""
        hashers = [hashlib.sha256() for _ in range(self.tp)]
        for name in names:
            for hasher, part in zip(hashers, self._tensors[name], strict=True):
                hasher.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return [hasher.hexdigest() for hasher in hashers]
