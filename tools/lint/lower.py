"""Lowers graphs to HLO, as ModelBuilder does for neuronx-cc: torch_xla traces them on a CPU, for
any number of ranks.

Tracing runs nothing. Inputs and parameters are placeholders, so full-width graphs take no memory.
torch_xla is imported at its first use. NKI is not needed: attention in plain operations replaces
its kernels.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lint.hlo import operations, target
from lint.rules import Finding, Operation, Reading, check
from ltx_neuron.backends.mesh import TENSOR, Groups
from ltx_neuron.backends.nxd.compile import XlaComm
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import Program

TITLE = "HLO (ModelBuilder)"
BACKEND = "nxd"
INSTALL = """torch_xla {problem}.
It needs torch of the same version, so make a separate venv:
  test/xla/make_xla_venv.sh /path/to/venv-xla
  cd tools && PYTHONPATH=../src /path/to/venv-xla/bin/python -m lint
(torch==2.9.* and torch_xla==2.9.* from PyPI)"""


def require() -> None:
    """Import torch_xla for tracing on a CPU. Raises UserError with the packages to install."""
    os.environ["PJRT_DEVICE"] = "CPU"  # on every machine: nothing is run
    # Otherwise torch_xla drops all-reduces of groups without this process.
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    try:
        import torch_xla  # noqa: F401
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch_xla"
        raise UserError(
            INSTALL.format(problem="is not installed" if missing else f"does not load: {error}")
        ) from None


def comm(groups: Groups) -> XlaComm:
    """The Comm of a tensor-parallel group. It does not need NxD."""
    return XlaComm(len(groups[TENSOR][0]), groups[TENSOR])


class Cut(Exception):
    """Tracing needs a value, for which it would have to run the graph. The text names the
    operation."""


_KERNELS = (
    "XLA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


class _Guard(TorchDispatchMode):
    """Raises Cut at operations that torch_xla would run at once: those whose result's shape or
    value depends on data, and those without an XLA kernel."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == "xla" for tensor in tensors):
            dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            depends = dynamic & {*function.tags}
            if function is torch.ops.aten.index.Tensor:  # dynamic only with a mask
                depends = depends and any(tensor.dtype is torch.bool for tensor in tensors)
            known = torch._C._dispatch_has_kernel_for_dispatch_key
            if depends or not any(known(function.name(), key) for key in _KERNELS):
                raise Cut(str(function))
        return function(*args, **kwargs)


def lower(function: Callable[[dict[str, Tensor]], Any], example: dict[str, tuple]) -> str:
    """The HLO of a function of named tensors, given as (shape, dtype). Raises Cut if it is not one
    graph.

    Numbers and tensors that tracing creates are also parameters of the HLO. Comments at its end
    list them.
    """
    require()
    import torch_xla
    from torch_xla.core import xla_builder

    internals = torch_xla._XLAC
    # Otherwise this graph would contain the last one's collectives.
    internals._set_all_reduce_token(str(torch_xla.device()), None)
    tensors = {
        name: xla_builder.create_placeholder_tensor(tuple(shape), dtype)
        for name, (shape, dtype) in example.items()
    }
    with torch.no_grad(), _Guard():
        outputs = [leaf for leaf in tree_leaves(function(tensors)) if isinstance(leaf, Tensor)]
    given = {internals._xla_get_tensor_id(tensor) for tensor in tensors.values()}
    parameters = zip(*internals._get_tensors_xla_device_data_node(outputs), strict=True)
    baked = sorted(
        f"{_BAKED} {_described(tensor)}" for number, tensor in parameters if number not in given
    )
    return "\n".join([internals._get_xla_tensors_hlo(outputs), *baked])


_BAKED = "// made while tracing:"


def _described(tensor: Tensor) -> str:
    """A parameter that tracing created, with its first values on the tracing rank."""
    value = tensor.cpu()
    kind = "number" if value.dim() == 0 else f"tensor {tuple(value.shape)}"
    return f"{kind} {value.flatten()[:4].tolist()} {value.dtype}"


def read(program: Program, name: str, groups: Groups, dtype: torch.dtype, graph: str) -> Reading:
    """The HLO of one graph of a program that was made with XlaComms, for these groups of ranks."""
    module, inputs, _ = program.graphs[name]
    module = module.to(dtype).eval().requires_grad_(False)
    weights = {f"weight {n}": (p.shape, p.dtype) for n, p in module.named_parameters()}
    fields = {field: program.fields[field] for field in inputs}
    example = weights | {field: (like.shape, like.dtype) for field, like in fields.items()}

    def call(tensors: dict[str, Tensor]) -> Any:
        parameters = {n.removeprefix("weight "): tensors[n] for n in weights}
        values = {field: tensors[field] for field in fields}
        return functional_call(module, parameters, (values,), strict=True)

    try:
        text = lower(call, example)
    except Cut as cut:
        wrong = (
            "tracing needs its result: the graph ends here, and the result is a constant of the"
            " next one"
        )
        do = "keep it a tensor of fixed size: no .item(), no if, no mask"
        finding = Finding(graph, str(cut), wrong, do)
        return Reading("", lambda: ([], [finding]))

    def check_text() -> tuple[list[Operation], list[Finding]]:
        read_operations, do = operations(text), "make it an input or a parameter of the model"
        baked = [
            Finding(graph, "parameter", line.removeprefix("// "), do)
            for line in text.splitlines()
            if line.startswith(f"{_BAKED} tensor")  # numbers are as good as constants
        ]
        return read_operations, check(graph, read_operations, target(groups)) + baked

    return Reading(text, check_text)
