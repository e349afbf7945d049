"""NxD ModelBuilder V2: this one process traces, compiles and drives all ranks of a program on a chip's cores.

The same programs, fields, manifests and rank files as torchdist; a graph is one NEFF in NxD's own file. What cannot run
without Neuron hardware (the compiler behind `compile`, the runtime behind `to_neuron` and the call) is NxD's, one line each.
Written for NxD 0.15 to 0.19 (SDK 2.27 to 2.33, torch 2.9); where it differs from its documentation, from its source.
"""

import gc
import hashlib
import inspect
import math
import os
import shlex
import shutil
import time
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron.artifacts import graph_file, sha256
from ltx_neuron.attention import attention_cte
from ltx_neuron.backends.export import Manifest
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.backends.rank import part_of, whole_shape
from ltx_neuron.backends.torchdist import NotFiniteError
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, write_json
from ltx_neuron.graphs import LATENTS, Field
from ltx_neuron.profiles import Profile
from ltx_neuron.programs import Graph, Program, weight_name
from ltx_neuron.rankfiles import load, rank_file
from ltx_neuron.tensorfile import TensorFile

PACKAGES = ("neuronx-distributed", "torch-neuronx", "neuronx-cc", "libneuronxla", "torch-xla")
_WRAPPED = "module."  # prefix of a graph's parameters in the module that NxD traces


def versions() -> dict[str, str | None]:
    """Installed versions of what makes and reads the graphs: NxD's files fit no other ones."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def set_environment(profile: Profile) -> None:
    """What the compiler and the runtime read from the environment, at their import. The user's own values stay."""
    for name, value in profile.environment:
        os.environ.setdefault(name, value)
    lnc = os.environ.setdefault("NEURON_LOGICAL_NC_CONFIG", str(profile.lnc))
    if lnc != str(profile.lnc):
        raise UserError(f"NEURON_LOGICAL_NC_CONFIG is {lnc}, profile {profile.name} is compiled for {profile.lnc}: graphs and "
                        "runtime must agree. Type: unset NEURON_LOGICAL_NC_CONFIG")  # fmt: skip


class XlaComm:
    """Comm that sums all tensors of a call in one variadic all-reduce: NxD's replica groups, torch_xla's operation."""

    def __init__(self, size: int):
        self.size = size

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.size == 1 or tensors[0].is_meta:
            return tensors
        import torch_xla.core.xla_model as xm
        from neuronx_distributed.parallel_layers import parallel_state

        summed = list(tensors)
        xm.all_reduce(xm.REDUCE_SUM, summed, groups=parallel_state.get_tensor_model_parallel_replica_groups())
        return tuple(summed)


def traceable(graph: Graph) -> nn.Module:
    """A graph's module with one keyword for each of its inputs: NxD reads the signature and refuses **tensors."""

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(graph.inputs(**tensors)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *graph.inputs._fields)])
    module = type("Traceable", (nn.Module,), {"forward": forward})()
    module.module = graph.module
    return module


def use_nki_attention(profile: Profile) -> None:
    """Have graphs that are traced from now on call nkilib's kernel where the models name `attention_cte`."""
    try:
        from nkilib.core.attention.attention_cte import attention_cte as kernel
    except ImportError as error:
        raise UserError(f"profile {profile.name} has attention=nki, and nkilib cannot be imported: {error}\nInstall the SDK's "
                        "nki-library, or type --profile-set attention=matmul") from None  # fmt: skip

    @attention_cte.register_kernel("xla")
    def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = kernel[profile.lnc](query, key, value, scale=1.0, causal_mask=False, tp_q=True, tp_k=True, tp_out=False)
        return out[0] if isinstance(out, list | tuple) else out


def example_inputs(graph: Graph, fields: dict[str, Field]) -> dict[str, Tensor]:
    """Distinct, non-constant tensors: NxD merges inputs that are one object, and a constant may be folded."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.rand(fields[name].shape, generator=generator) + 0.5 for name in graph.inputs._fields}
    return {name: (value * 4).to(fields[name].dtype) for name, value in drawn.items()}


def trace(program: Program, name: str, tag: str):
    """A ModelBuilder that has traced one graph for all ranks. Call inside NxDParallelState."""
    from neuronx_distributed import ModelBuilder

    graph = program.graphs[name]
    module = traceable(graph).to_empty(device="cpu")
    builder = ModelBuilder(module).trace(kwargs=example_inputs(graph, program.fields), tag=tag)
    traced = builder.trace_artifacts_collection[tag].weight_name_to_idx
    if lost := sorted({parameter for parameter, _ in module.named_parameters()} - {*traced}):
        raise RuntimeError(f"{name}: weights that became constants or are not used: {', '.join(lost)}")
    return builder


def compiler_flags(profile: Profile, model: str) -> str:
    """neuronx-cc's flags for a model, which must say the --lnc that the runtime has."""
    flags = profile.flags(model)
    said = {word.partition("=")[2] for word in shlex.split(flags) if word.startswith("--lnc")}
    if said != {str(profile.lnc)}:
        raise UserError(f"profile {profile.name}: compiler flags of {model} are {flags!r}, wanted --lnc={profile.lnc} alone")
    return flags


def compile_program(make, folder: Path, identity: dict, dtype: torch.dtype, profile: Profile, tp: int) -> None:
    """Trace and compile every graph of the program that `make()` returns into `folder` and, last, write the manifest.

    ModelBuilder V2 never looks into the compile cache: a folder that has its manifest is not compiled again by the caller.
    """
    set_environment(profile)
    from neuronx_distributed import NxDParallelState

    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    flags, graphs = compiler_flags(profile, identity["model"]), {}
    if profile.attention == "nki":
        use_nki_attention(profile)
    with explained(), NxDParallelState(world_size=tp, tensor_model_parallel_size=tp, lnc_size=profile.lnc):
        program = make()
        _check_calls(program)
        for name, graph in program.graphs.items():
            tag, file = f"{identity['model']}-{identity['bucket']}-{name}", graph_file(name, "nxd")
            graph.module.to(dtype).eval().requires_grad_(False)
            spent = flops(graph, program.fields)  # while it is on meta
            builder = trace(program, name, tag)
            _compile(builder, folder / file, flags)
            graphs[name] = {
                "file": file,
                "sha256": sha256(folder / file),
                "tag": tag,
                "parameters": {parameter: list(t.shape) for parameter, t in graph.module.named_parameters()},
                "inputs": list(graph.inputs._fields),
                "outputs": list(graph.outputs._fields),
                "cost": {**collectives(builder.trace_artifacts_collection[tag].hlo), "flops": spent},
            }
    fields = {
        name: {**field._asdict(), "dtype": str(field.dtype).removeprefix("torch.")} for name, field in program.fields.items()
    }
    content = {"identity": identity, "graphs": graphs, "runs": program.runs, "fields": fields, "compiler_flags": flags}
    write_json(folder / MANIFEST, content)


def _check_calls(program: Program) -> None:
    """A graph's weights are bound when it is loaded, so one that stands for several groups of blocks would load as often."""
    called = [name for calls in program.runs.values() for name, _ in calls]
    if len(called) != len({*called}):
        raise UserError("NxD runs a step as one graph, this program cuts it into groups of blocks. Type --blocks-per-graph 0")


def _compile(builder, path: Path, flags: str) -> None:
    """Run the compiler and save its result. Its working files stay where they are if it fails, with its log."""
    workdir = path.parent / "neuronx-cc"
    compiled = builder.compile(compiler_workdir=str(workdir), compiler_args=flags)
    temporary = path.with_name(path.name + ".partial")
    compiled.save(str(temporary))
    temporary.replace(path)
    shutil.rmtree(workdir)


_DTYPE_BYTES = {2: 1, 3: 2, 4: 4, 5: 8, 10: 2, 11: 4, 12: 8, 16: 2}  # XLA's numbers of S8 S16 S32 S64 F16 F32 F64 BF16


def collectives(hlo) -> dict[str, int]:
    """All-reduces of a graph and the bytes a rank puts into them, counted in its HLO."""
    operations = [i for computation in hlo.computations for i in computation.instructions if i.opcode == "all-reduce"]
    shapes = [shape for i in operations for shape in (i.shape.tuple_shapes or [i.shape])]
    # XLA keeps all-reduces in order by a scalar that travels with them and is no part of the model.
    sent = sum(math.prod(s.dimensions) * _DTYPE_BYTES[s.element_type] for s in shapes if s.dimensions)
    return {"collectives": len(operations), "collective_bytes": sent}


def flops(graph: Graph, fields: dict[str, Field]) -> int:
    """FLOPs of one call of a graph on a rank. Counted in the model: the HLO does not show what is inside a kernel."""
    example = {name: torch.empty(fields[name].shape, dtype=fields[name].dtype, device="meta") for name in graph.inputs._fields}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        graph.module(graph.inputs(**example))
    return counter.get_total_flops()


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
        return [load(folder / rank_file(rank), self.wanted, self.dtype) for rank in range(tp)]

    def bind(self, program: str, manifest: Manifest, graph: str, tp: int) -> None:
        """Load a graph and hand it the very tensors that the others have."""
        model = _open(manifest, graph, tp)
        if self.tensors is None:
            model.set_weights(self.read(self.folder, tp))
            self.tensors = model.weights
        blocks = {name: first for calls in manifest.runs.values() for name, first in calls}
        names = {p: weight_name(p, blocks[graph]) for p in manifest.graphs[graph]["parameters"]}
        model.weights = [{_WRAPPED + p: tensors[name] for p, name in names.items()} for tensors in self.tensors]
        model.to_neuron()
        self.models[program, graph] = model

    def release(self, programs: set[str]) -> None:
        """Let go of programs. NxD has no unload: device memory is free once nothing refers to it."""
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
        raise UserError(f"{path} was made by another version of NxD than the installed one; {again}")
    if model.world_size != tp:
        raise UserError(f"{path} was compiled for {model.world_size} ranks, wanted {tp}; {again}")
    return model


class Ranks:
    """The ranks of a run, all driven by this process, with the interface of torchdist.Ranks.

    Named tensors are lists of one tensor per rank that stay on the cores between runs.
    """

    _started: int | None = None  # ranks of this process: the runtime's communicator cannot change size

    def __init__(self, profile: Profile, tp: int):
        if Ranks._started not in (None, tp):
            raise UserError(f"this process already drives {Ranks._started} ranks and cannot drive {tp}; start a new one")
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
        """Load one weight set and the programs that share it. Strict: each tensor is used, each weight is there.

        What is loaded from there already stays; programs that are not asked for leave, and so does another weight set of the
        same model. A set of another model stays beside it: who wants one at a time calls `unload`.
        """
        wanted = {name: shape for manifest in programs.values() for name, shape in manifest.weights().items()}
        for other in [s for s in self._sets if s.folder != weights and s.wanted.keys() & wanted.keys()]:
            self._drop(other)
        held = next((s for s in self._sets if s.folder == weights), None) or _WeightSet(weights, wanted, dtype)
        held.release({program for program, _ in held.models} - {*programs})
        if held not in self._sets:
            self._sets.append(held)
        with explained():
            for program, manifest in programs.items():
                self.fields[program], held.manifests[program] = manifest.fields, manifest
                self.outputs[program] = {name for graph in manifest.graphs.values() for name in graph["outputs"]}
                for graph in manifest.graphs:
                    if (program, graph) not in held.models:
                        held.bind(program, manifest, graph, self.tp)

    def replace_weights(self, weights: Path) -> None:
        """Put another weight set of the same model in the loaded one's place, tensor by tensor: no second copy."""
        names = TensorFile(weights / rank_file(0), "run the shard script again").shapes.keys()
        replaced = max(self._sets, key=lambda held: len(held.wanted.keys() & names))
        for rank, tensors in enumerate(replaced.read(weights, self.tp)):
            for name, tensor in tensors.items():
                replaced.tensors[rank][name].copy_(tensor)  # in place: the graphs hold these very tensors
        replaced.folder = weights

    def unload(self) -> None:
        """Free the weights, the graphs and every named tensor."""
        self._tensors.clear()
        self._sequences.clear()
        for held in [*self._sets]:
            self._drop(held)

    def _drop(self, held: _WeightSet) -> None:
        for program in held.manifests:
            self.fields.pop(program, None)
            self.outputs.pop(program, None)
        held.release({*held.manifests})
        held.tensors = None
        self._sets.remove(held)
        gc.collect()

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        """Upload named tensors (whole ones: each rank takes its part). Shapes must be the program's; dtypes become so.

        `like` is the field that describes them when their own names are none, as those that a sequence reads by alias.
        """
        for name, tensor in tensors.items():
            field = self.fields[program][like or name]
            if tuple(tensor.shape) != (wanted := whole_shape(field, self.tp)):
                raise ValueError(f"{program}.{name}: got shape {tuple(tensor.shape)}, wanted {wanted}")
            self._put(name, [part_of(field, tensor, rank).to(field.dtype) for rank in range(self.tp)])

    def _put(self, name: str, parts: list[Tensor]) -> None:
        with explained():
            self._tensors[name] = [to_core(part.contiguous(), rank) for rank, part in enumerate(parts)]
        self.bytes_sent += sum(part.nbytes for part in parts)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        """Name a sequence of a program's runs. Each is (run, reads, writes): where it takes an input or leaves an output
        under another name than the graph's."""
        self._sequences[program, sequence] = runs

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        """Run a sequence once on the tensors the ranks hold; returns the milliseconds until the last rank was done.
        NotFiniteError where it leaves latents with NaN or Inf.

        Without `define`, a program's runs are sequences of their own names.
        """
        fields = self.fields[program]
        for name, number in numbers.items():
            self._put(name, [torch.full(fields[name].shape, number, dtype=fields[name].dtype)] * self.tp)
        held = next(held for held in self._sets if program in held.manifests)
        manifest, start = held.manifests[program], time.perf_counter()
        for run, reads, writes in self._sequences.get((program, sequence), [(sequence, {}, {})]):
            for graph, _ in manifest.runs[run]:
                self._call(held.models[program, graph], manifest, graph, reads, writes)
        milliseconds = (time.perf_counter() - start) * 1e3  # ranked mode returns when the last rank is done
        written = [name for name in LATENTS if name in {writes.get(name, name) for name in manifest.graphs[graph]["outputs"]}]
        if broken := [name for name in written if not self.get(program, name).isfinite().all()]:
            raise NotFiniteError(broken)
        return milliseconds

    def _call(self, model, manifest: Manifest, graph: str, reads: dict, writes: dict) -> None:
        described, fields = manifest.graphs[graph], manifest.fields
        values = {name: self._tensors[reads.get(name, name)] for name in described["inputs"]}
        for name, parts in values.items():  # NxD routes by names and shapes: another dtype would be read as this one
            wanted = fields[name].shape, fields[name].dtype
            if any((tuple(part.shape), part.dtype) != wanted for part in parts):
                raise RuntimeError(f"{graph}.{name}: got {tuple(parts[0].shape)} {parts[0].dtype}, wanted {wanted}")
        with explained():
            outputs = model(**values, model_name=described["tag"], forward_mode="ranked")
        names = [writes.get(name, name) for name in described["outputs"]]
        self._tensors.update(zip(names, outputs, strict=True))  # [output][rank]

    def get(self, program: str, name: str) -> Tensor:
        """Download a named tensor: rank 0's, or all parts put together."""
        split, parts = self.fields[program][name].split, self._tensors[name]
        with explained():
            return parts[0].cpu() if split is None else torch.cat([part.cpu() for part in parts], dim=split)

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
