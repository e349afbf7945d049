"""Stand-ins for the closed Neuron packages, so that NxD's real source runs on a CPU: a test fixture, never the product.

What is real: NxD (its ModelBuilder, NxDModel, parallel state, routing), torch_xla's tracing to HLO, XLA's CPU compiler
and its collectives. What is stood in for: torch_neuronx's wrapper around the tracing, neuronx-cc (the "NEFF" is the HLO
itself) and the runtime (the HLO runs on as many XLA:CPU devices as there are ranks, each with its own arguments).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import types
from collections import defaultdict
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import List  # TorchScript knows it, not list

import numpy as np
import torch

SOURCE = "LTX_NEURON_NXD_SOURCE"  # environment variable: a checkout of aws-neuron/neuronx-distributed
_CLOSED = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "boto3", "botocore", "s3transfer", "tenacity")


def missing() -> str | None:
    """What this process lacks to run NxD's source, and how to get it; None where it can."""
    lacking = [name for name in ("torch_xla", "jaxlib", "google.protobuf") if not _importable(name)]
    if lacking:
        return f"{', '.join(lacking)} not installed; a venv has them: test/xla/make_xla_venv.sh DIR"
    source = os.environ.get(SOURCE)
    if not source or not (Path(source) / "src/neuronx_distributed").is_dir():
        return f"{SOURCE} is {source!r}; wanted a checkout of github.com/aws-neuron/neuronx-distributed"
    return None


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def install(source: Path, folder: Path) -> torch.library.Library:
    """Make `import neuronx_distributed` work in this process. torch_xla comes first: it looks for libneuronxla. A
    folder takes the metadata by which the packages count as installed. Keep the library: operators go with it."""
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla  # noqa: F401

    sys.meta_path.append(_Anything())
    sys.path[:0] = [str(source / "src"), str(folder)]
    version = runpy.run_path(str(source / "src/neuronx_distributed/_version.py"))["__version__"]
    for package, number in (("neuronx-distributed", version), ("torch-neuronx", "2.9.0+stub")):
        described = folder / f"{package.replace('-', '_')}-{number}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    names = "contexts", "proto.metaneff_pb2", "pyhlo.hlo_pb2", "utils.utils", "xla_impl.structure", "xla_impl.trace"
    torch_neuronx, parts = import_module("torch_neuronx"), [import_module(f"torch_neuronx.{name}") for name in names]
    _, metaneff, hlo, inner, structure, xla_trace = parts
    torch_neuronx.__version__ = "2.9.0.stub"
    for module in (torch_neuronx.utils, inner):
        module.get_platform_target = lambda *_: "trn2"
    metaneff.MetaNeff, metaneff.MetaTensor = MetaNeff, MetaTensor
    hlo.HloModuleProto = hlo_messages()["HloModuleProto"]
    structure.Flattener, structure.Packer = Flattener, Packer
    xla_trace.generate_hlo, xla_trace.get_torch_dtype = generate_hlo, lambda name: getattr(torch, name)
    import_module("nkilib.core.attention.attention_cte").attention_cte = NkiKernel()
    import_module("libneuronxla").neuron_xla_compile = lambda module_bytes, **_: module_bytes
    unused = dict.fromkeys(("LayoutTransformation", "Runtime", "Model"), object)
    torch.classes.neuron = SimpleNamespace(SPMDModel=spmd_model, **unused)
    torch_neuronx.contexts.disable_nrt_load = nullcontext
    # torch.ops.neuron, as far as NxDModel uses it, and the operator that runs a graph.
    library = torch.library.Library("neuron", "DEF")
    library.define("_parallel_load(Dict(str, Tensor)[] ranks) -> Dict(str, Tensor)[]")
    library.define("run_on_xla_cpu(Tensor hlo, str inputs, Tensor[] given, Tensor[] weights, int ranks) -> Tensor[]")
    library.impl("_parallel_load", lambda ranks: [dict(weights) for weights in ranks], "CompositeImplicitAutograd")
    library.impl("run_on_xla_cpu", _run, "CompositeImplicitAutograd")
    torch.jit.script(Cores)
    return library


class NkiKernel:
    """nkilib's attention_cte by its documented signature and limits: kernel[cores](...), by its torch reference."""

    launched = 0

    def __getitem__(self, cores: int):
        assert cores == 2, "a logical core has two physical ones"
        return self.run

    def run(self, q, k, v, scale=1.0, causal_mask=True, tp_q=True, tp_k=False, tp_out=False) -> torch.Tensor:
        assert not causal_mask and tp_q and tp_k and not tp_out, "layouts (B*H, S, D), no mask"
        assert scale == q.shape[-1] ** -0.5, "the kernel scales the query, in fp32"
        assert q.shape[0] == k.shape[0] == v.shape[0] <= 512 and q.shape[-1] <= 128
        NkiKernel.launched += 1
        scores = torch.bmm(q.float(), k.float().transpose(1, 2)) * scale
        return torch.bmm(scores.softmax(-1), v.float()).to(q.dtype)


class _Anything(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves every module of the closed packages; whatever is asked of one is a class that takes anything."""

    def find_spec(self, name, path=None, target=None):
        closed = name.split(".")[0] in _CLOSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if closed else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Harmless,), {})


class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Harmless(metaclass=_Kind):
    def __init__(self, *args, **kwargs):
        self.rank_src_tgt_pairs = defaultdict(list)

    def __init_subclass__(cls, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else self


# The part of XLA's hlo.proto that NxD reads: of each message the fields, their numbers and their types.
HLO = {
    "ShapeProto": "element_type 2 int64, dimensions 3 int64*, tuple_shapes 4 ShapeProto*",
    "ReplicaGroup": "replica_ids 1 int64*",
    "HloInstructionProto": "name 1 string, opcode 2 string, shape 3 ShapeProto, parameter_number 9 int64,"
    " custom_call_target 28 string, id 35 int64, operand_ids 36 int64*, called_computation_ids 38 int64*,"
    " replica_groups 49 ReplicaGroup*",
    "HloComputationProto": "name 1 string, instructions 2 HloInstructionProto*, id 5 int64, root_id 6 int64",
    "HloModuleProto": "name 1 string, entry_computation_name 2 string, computations 3 HloComputationProto*, id 5 int64,"
    " entry_computation_id 6 int64",
}


@cache
def hlo_messages() -> dict:
    """Classes of the messages of HLO; what is not described there is kept as it is."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="ltx_neuron_test.proto", package="ltxneurontest", syntax="proto3")
    for message, fields in HLO.items():
        added = file.message_type.add(name=message)
        for name, number, of in (field.split() for field in fields.split(", ")):
            label = kind.LABEL_REPEATED if of.endswith("*") else kind.LABEL_OPTIONAL
            field, of = added.field.add(name=name, number=int(number), label=label), of.rstrip("*")
            if of in HLO:
                field.type, field.type_name = kind.TYPE_MESSAGE, f".ltxneurontest.{of}"
            else:
                field.type = {"string": kind.TYPE_STRING, "int64": kind.TYPE_INT64}[of]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {m: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ltxneurontest.{m}")) for m in HLO}


class MetaTensor:
    """One input or output of a graph. `parameter` is its number in the HLO; a constant carries its value."""

    Type = SimpleNamespace(USER_INPUT=1, INPUT_WEIGHT=2, INPUT_STATE=3, CONSTANT=4)

    def __init__(self, tensor, type=0, checkpoint_key=b"", parameter=0, user_input_key=b"", value=None):
        self.shape, self.data_type = [*tensor.shape], str(tensor.dtype).removeprefix("torch.")
        self.type, self.checkpoint_key, self.user_input_key = type, checkpoint_key, user_input_key
        self.parameter, self.value = parameter, value


class MetaNeff:
    """Inputs in the order user inputs, weights, constants: NxD counts on user inputs being first."""

    def __init__(self, inputs=(), outputs=(), graph=b""):
        self.input_tensors, self.output_tensors, self.output_aliases_to = [*inputs], [*outputs], {}
        self.serialized_graph_def = graph

    def SerializeToString(self) -> bytes:
        told, tensors = ("shape", "data_type", "type", "parameter", "value"), self.input_tensors
        described = [{n: getattr(t, n) for n in told} | {"weight": t.checkpoint_key.decode()} for t in tensors]
        return json.dumps(described).encode()


class Flattener:
    """The given inputs in the graph's order, without those it does not use."""

    def __init__(self, layout, exclude):
        self.layout, self.exclude = layout, exclude

    def __call__(self, inputs):
        return [inputs[i] for i in self.layout if i not in (self.exclude or ())]


class Packer:
    def __init__(self, layout, identifiers, constants):
        self.layout, self.identifiers, self.constants = layout, identifiers, constants

    def __call__(self, outputs):
        return tuple(outputs)


def generate_hlo(module, example_inputs, **options) -> SimpleNamespace:
    """Trace a module on XLA's lazy device, without running it, as torch_neuronx does."""
    import torch_xla

    wanted = dict(inline_weights_to_neff=False, cpu_backend=True, preserve_parameters=True, treat_inputs_as_kwargs=True)
    assert options.items() >= wanted.items(), options
    xla, device = torch_xla._XLAC, torch_xla.device()
    seen, inputs = {}, {}
    for name, tensor in example_inputs.items():  # an object given twice is one input, as it is on Neuron
        inputs[name] = seen.setdefault(id(tensor), None) if id(tensor) in seen else tensor.to(device)
        seen[id(tensor)] = inputs[name]
    weights = {name: parameter.to(device) for name, parameter in module.named_parameters()}
    with torch.no_grad():
        outputs = torch.func.functional_call(module, weights, (), inputs, strict=True)
    ids, values = xla._get_tensors_xla_device_data_node(list(outputs))
    number = {tensor_id: parameter for parameter, tensor_id in enumerate(ids)}
    taken = {name: number.get(xla._xla_get_tensor_id(t)) for name, t in inputs.items()}
    held = {name: number.get(xla._xla_get_tensor_id(t)) for name, t in weights.items()}
    kinds = MetaTensor.Type
    metas = [MetaTensor(inputs[n], kinds.USER_INPUT, parameter=p) for n, p in taken.items() if p is not None]
    used = {name: parameter for name, parameter in held.items() if parameter is not None}
    metas += [MetaTensor(weights[n], kinds.INPUT_WEIGHT, n.encode(), p) for n, p in used.items()]
    # Scalars of the code: they have no tensor, so no id.
    constants = {*range(len(ids))} - {*taken.values(), *held.values()}
    metas += [MetaTensor(values[p], kinds.CONSTANT, parameter=p, value=values[p].cpu().tolist()) for p in constants]
    hlo = hlo_messages()["HloModuleProto"].FromString(xla._get_xla_tensors_hlo_proto(list(outputs)))
    xla._clear_pending_irs(str(device))  # the next trace starts afresh: nothing here is ever run,
    xla._set_all_reduce_token(str(device), None)  # and its collectives do not follow on these
    unused = [i for i, parameter in enumerate(taken.values()) if parameter is None]
    return SimpleNamespace(
        hlo_module=hlo,
        metaneff=MetaNeff(metas, [MetaTensor(t) for t in outputs], hlo.SerializeToString()),
        flattener=Flattener(tuple(range(len(taken))), unused or None),
        packer=Packer(None, None, None),
        weight_name_to_idx=used,
    )


class Cores:
    """A compiled graph on its cores, with the interface of the runtime's SPMDModel. TorchScript, as NxD saves it so.

    As strict as the runtime is: outputs are buffers of this object, which its next run overwrites
    (ltx_neuron/backends/nxd/buffers.py has the source), and from the beginning of a run they hold nothing of use, since
    a compiler may assume that inputs and outputs do not overlap.
    """

    def __init__(self, hlo: torch.Tensor, inputs: str, weight_names: list[str], ranks: int):
        self.hlo, self.inputs, self.ranks = hlo, inputs, ranks
        self.weight_names: List[str] = weight_names
        self.weights: List[torch.Tensor] = [hlo]
        self.buffers: List[torch.Tensor] = []

    def initialize(
        self, states: list[dict[str, torch.Tensor]], weights: list[dict[str, torch.Tensor]], start_rank: int
    ):
        bound: List[torch.Tensor] = []
        for rank in weights:
            bound += [rank[name] for name in self.weight_names]
        self.weights = bound

    def forward(self, given: List[torch.Tensor]) -> List[torch.Tensor]:
        return self.forward_ranked([given for _ in range(self.ranks)])[0]

    def forward_ranked(self, given: List[List[torch.Tensor]]) -> List[List[torch.Tensor]]:
        flat: List[torch.Tensor] = []
        for tensors in given:
            flat += tensors
        for buffer in self.buffers:
            buffer.fill_(float("nan") if buffer.is_floating_point() else -1.0)
        outputs = torch.ops.neuron.run_on_xla_cpu(self.hlo, self.inputs, flat, self.weights, self.ranks)
        if len(self.buffers) == 0:
            self.buffers = outputs
        for number in range(len(outputs)):
            self.buffers[number].copy_(outputs[number])
        outputs = self.buffers
        each = len(outputs) // self.ranks
        return [outputs[rank * each : (rank + 1) * each] for rank in range(self.ranks)]

    def forward_async(self, given: List[List[torch.Tensor]]) -> List[List[torch.Tensor]]:
        return self.forward_ranked(given)


def spmd_model(neff: bytes, metaneff: bytes, local_ranks: int, world_size: int) -> Cores:
    names = [t["weight"] for t in json.loads(metaneff) if t["type"] == MetaTensor.Type.INPUT_WEIGHT]
    return Cores(torch.frombuffer(bytearray(neff), dtype=torch.uint8), metaneff.decode(), names, local_ranks)


def _run(hlo: torch.Tensor, inputs: str, given: list[torch.Tensor], weights: list[torch.Tensor], ranks: int) -> list:
    described, program, arguments = json.loads(inputs), Replicated(hlo.numpy().tobytes(), ranks), []
    for rank in range(ranks):
        own = (iter(x[rank * len(x) // ranks : (rank + 1) * len(x) // ranks]) for x in (given, weights))
        arguments.append(_arguments(described, *own))
    return [tensor for outputs in program(arguments) for tensor in outputs]


def _arguments(described: list[dict], given, weights) -> list[torch.Tensor]:
    """A rank's tensors by their number in the HLO. Like the runtime it takes no other shape or dtype."""
    arguments = {}
    for tensor in described:
        if tensor["type"] == MetaTensor.Type.CONSTANT:
            value = torch.tensor(tensor["value"], dtype=getattr(torch, tensor["data_type"]))
        else:
            value = next(given if tensor["type"] == MetaTensor.Type.USER_INPUT else weights)
        if [*value.shape] != tensor["shape"] or str(value.dtype) != f"torch.{tensor['data_type']}":
            raise RuntimeError(f"status=2 message=Invalid: {tensor} given {tuple(value.shape)} {value.dtype}")
        arguments[tensor["parameter"]] = value
    return [arguments[number] for number in sorted(arguments)]


@cache
class Replicated:
    """One HLO program compiled for n XLA:CPU devices that hold different arguments: SPMD, as the cores of a chip."""

    def __init__(self, hlo: bytes, ranks: int):
        from jaxlib import _jax as xla

        self.devices = _client(ranks).devices()
        options = xla.CompileOptions()
        options.num_replicas = ranks
        computation = xla.mlir.hlo_to_stablehlo(hlo)
        self.program = _client(ranks).compile_and_load(computation, xla.DeviceList(tuple(self.devices)), options)

    def __call__(self, arguments: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """arguments[rank][parameter] -> outputs[rank][output]"""
        results = self.program.execute_sharded([self._spread(parts) for parts in zip(*arguments, strict=True)])
        outputs = results.disassemble_into_single_device_arrays()
        return [[_to_torch(output[rank]) for output in outputs] for rank in range(len(self.devices))]

    def _spread(self, parts: tuple[torch.Tensor, ...]):
        """One array whose parts lie on the devices. "Replicated" says only that the parts have the whole's shape."""
        from jaxlib import _hlo
        from jaxlib import _jax as xla

        def sharding(devices):
            return xla.GSPMDSharding(xla.DeviceList(tuple(devices)), _hlo.HloSharding.replicate())

        arrays = [_to_numpy(part) for part in parts]
        aval = _Described(arrays[0])
        placed = [
            xla.batched_device_put(aval, sharding([device]), [array], [device], enable_x64=False)
            for array, device in zip(arrays, self.devices, strict=True)
        ]
        return xla.ArrayImpl(aval, sharding(self.devices), placed, True, _skip_checks=True)


class _Described:
    weak_type = False

    def __init__(self, array: np.ndarray):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim


@cache
def _client(ranks: int):
    from jaxlib import _jax as xla

    return xla.get_tfrt_cpu_client(num_devices=ranks)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def _to_torch(array) -> torch.Tensor:
    values, _ = array._single_device_array_to_np_array_did_copy()
    values = np.array(values)  # a copy that outlives the device's buffer
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
