"""The allowed content of graphs on Trainium2: rules over the operations from both front ends.

Sources in the findings: NCC_* are the compiler's documented error codes (Neuron SDK 2.32,
compiler/error-codes); "TorchNeuron" is its lowering of collectives (torch-neuronx,
neuron_dynamo_backend). For int64: neuronx-cc's release notes for SDK 2.32 (--native-int64 and
--implicit-integer-downcast, with the defaults of the release after it). The rules allow only
operations that the graphs need, and refuse those without documented support.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Kind(NamedTuple):
    """dtype and shape of a tensor. The dtype is in HLO's spelling (bf16, f32, s32, pred, ...), or
    "symbol" for a number that is known only at run time. None is a dynamic dimension."""

    dtype: str
    shape: tuple[int | None, ...]


class Collective(NamedTuple):
    """A collective's form.

    reduction  its name, empty for none
    group      the ranks, in the front end's spelling
    waited     whether its result is awaited before use
    size       the group's number of ranks, if the operation states it
    """

    reduction: str
    group: str
    waited: bool = True
    size: int | None = None


class Operation(NamedTuple):
    """One operation of a graph. `name` is its kind, and `label` its name in the graph."""

    name: str
    label: str
    results: tuple[Kind, ...]
    operands: tuple[Kind, ...] = ()
    collective: Collective | None = None


class Finding(NamedTuple):
    """A fault that the compiler refuses or miscompiles: its place, the fault, and the fix."""

    graph: str
    operation: str
    wrong: str
    do: str


class Reading(NamedTuple):
    """A graph from a front end.

    text   must be the same on all ranks
    check  returns the graph's operations and findings
    """

    text: str
    check: Callable[[], tuple[list[Operation], list[Finding]]]


class Group(NamedTuple):
    """A group of ranks by its name in mesh.groups, and its number of ranks."""

    name: str
    size: int


class Target(NamedTuple):
    """The allowed content of a front end's graphs.

    operations   allowed, besides the collectives
    collectives  allowed, with the maximum number of operands
    reduction    the only reduction
    groups       of ranks over which collectives may be, by the front end's spelling
    may_index    operations that may carry int64. Compilers to 2.27 read it as int32: right for
                 indices, wrong for arithmetic
    """

    operations: frozenset[str]
    collectives: dict[str, int]
    reduction: str
    groups: dict[str, Group]
    may_index: frozenset[str] = frozenset()


DTYPES = {"bf16", "f32", "s32", "pred"}
# The reason for refusing a dtype and the fix, by a pattern of its name. The last matches any.
REFUSED_DTYPES = {
    "^f64": (
        "NCC_ESPP004: float64 is not supported",
        "make the constant or table fp32 (.float(), dtype=torch.float32), or compute it on the host"
        " and make it an input; .item() of a tensor makes a float64 too",
    ),
    "^s64": (
        "neuronx-cc to 2.27 computes it as int32; 2.28 by its own width, and refuses its products"
        " and its sums over ranks",
        "use int32, or do the arithmetic on the host",
    ),
    "^u64": ("NCC_ESFH002: uint64 is not supported", "use int32"),
    "^c": (
        "NCC_EVRF004: complex numbers are not supported",
        "separate real and imaginary parts, as rope.rotate does",
    ),
    "^f8": ("NCC_EVRF005, NCC_EVRF051: this 8-bit float is not supported on trn2", "use bfloat16"),
    "": ("NCC_ESPP004: not a dtype of the checked graphs", "use bfloat16, float32, int32 or bool"),
}

# The reason for refusing an operation and the fix, by a pattern of its name. The last matches any.
REFUSED_OPERATIONS = {
    "sort": ("NCC_EVRF001: no sort", "sort on the host and make the result an input"),
    "topk": (
        "NCC_EVRF013: limited, and a sort in most lowerings",
        "choose on the host and make the result an input",
    ),
    "nonzero": (
        "NCC_EMOD025: its size depends on the data",
        "multiply by a mask of 0 and 1 (boolean indexing is nonzero)",
    ),
    "masked_select": ("NCC_EMOD025: its size depends on the data", "multiply by a mask of 0 and 1"),
    "index|gather": (
        "a gather: slow on the device, or NCC_EVRF056",
        "multiply by a one-hot tensor, as for the step's rows",
    ),
    "scatter": ("NCC_EVRF016, NCC_EVRF060: limited", "add or concatenate instead"),
    "local_scalar_dense|item": (
        "tracing reads the value and makes it a constant",
        "keep it a tensor: no .item(), no if on it",
    ),
    "split_with_sizes.default along": (
        "torch-xla 2.11 reads wrong data, without an error (measured on trn2 by others)",
        "split by one size, use chunk, or slice",
    ),
    "copy_": (
        "the graph writes into one of its inputs",
        "return a fresh tensor; reduce intermediates, never inputs",
    ),
    "rng|rand": (
        "NCC_EVRF006: random numbers of the device are not the host's",
        "draw on the host and make it an input",
    ),
    "arange": ("the graph makes a constant tensor", "make it an input"),
    "while": ("control flow on data", "unroll the loop"),
    "conditional": ("control flow on data", "compute both and choose by a tensor of 0 and 1"),
    "custom-call": (
        "NCC_EHCA005, NCC_EVRF015: a custom call unknown to the compiler",
        "write it with plain operations",
    ),
    "": (
        "NCC_EVRF001, NCC_EUOC002: not an operation of the checked graphs",
        "write it with those in tools/lint, or make sure `neuronx-cc list-operators"
        " --framework XLA` has it and add it",
    ),
}


# Operations with the sums of softmax and LayerNorm. Rounding each step to bf16 gives errors of
# percents on long rows.
SUMMING = {
    "exponential",
    "batch-norm-training",
    "aten.softmax.int",
    "aten._softmax.default",
    "aten.layer_norm.default",
    "aten.native_layer_norm.default",
}


def broken(operation: Operation, target: Target) -> Iterator[tuple[str, str]]:
    """The faults of an operation, and their fixes."""
    taken, is_index = {k.dtype for k in operation.operands}, operation.name in target.may_index
    # A dtype is reported only at the operation that introduces it.
    known = {*DTYPES, *taken, "symbol", *["s64"] * is_index}
    if arising := [kind.dtype for kind in operation.results if kind.dtype not in known]:
        why, do = _first(REFUSED_DTYPES, arising[0])
        yield f"{arising[0]} is introduced here; {why}", do
    if "s64" in taken and not is_index:
        why, do = _first(REFUSED_DTYPES, "s64")
        yield f"arithmetic on int64; {why}", do
    elif taken & {"s32", "u32"} and (operation.collective or operation.name == "dot"):
        why = "NCC_EVRF035, NCC_EVRF061: sums and products of integers are computed in fp32"
        yield why, "cast to float first"
    if any(kind.dtype == "symbol" or None in kind.shape for kind in operation.results):
        why = "NCC_EMOD025: a size or number that is known only at run time"
        yield why, "fix it when compiling, one bucket per size"
    if operation.name == "constant" and {k.shape for k in operation.results} - {(), (1,)}:
        do = "make it an input or a parameter, so that each rank supplies its own"
        yield "the graph holds a constant tensor", do
    if not operation.collective and operation.name not in target.operations:
        yield _first(REFUSED_OPERATIONS, operation.name)
    if operation.name in SUMMING and operation.operands[0].dtype != "f32":
        yield (
            f"computed in {operation.operands[0].dtype}",
            "cast to fp32 before it and back after it",
        )
    if operation.collective:
        yield from _collective(operation, operation.collective, target)


def _collective(
    operation: Operation, form: Collective, target: Target
) -> Iterator[tuple[str, str]]:
    """The first fault of a collective that differs from Comm's."""
    most, count = target.collectives.get(operation.name), len(operation.operands)
    if most is None:
        known = ", ".join(sorted(target.collectives))
        yield f"Comm has only {known}", "sum through Comm"
    elif count > most:
        yield (
            f"{count} tensors in one call; this collective supports {most}",
            "one call each, or concatenate",
        )
    elif form.reduction not in ("", target.reduction):
        yield f"reduces by {form.reduction}; the models only sum", "sum through Comm"
    elif (group := target.groups.get(form.group)) is None:
        ranks = f"ranks {form.group or 'not named'}, wanted {' or '.join(target.groups)}"
        yield f"{ranks}: the other ranks would wait forever", "sum through Comm"
    elif form.size not in (None, group.size):
        yield (
            f"{form.size} ranks of group {group.name}, which has {group.size}",
            "make its Comm with registry.comm or registry.context",
        )
    elif not form.waited:
        yield "its result is read before it is awaited", "wait_tensor first, as Comm does"


def _first(refused: dict[str, tuple[str, str]], name: str) -> tuple[str, str]:
    """The first entry whose pattern matches a name; the last one matches always."""
    return next(entry for pattern, entry in refused.items() if re.search(pattern, name))


def check(graph: str, operations: Iterable[Operation], target: Target) -> list[Finding]:
    """The findings in a graph, in its order. The same fault of the same kind of operation is
    reported once."""
    findings: dict[tuple, Finding] = {}
    for operation in operations:
        for fault in broken(operation, target):
            finding = Finding(graph, f"{operation.label} ({operation.name})", *fault)
            findings.setdefault((operation.name, *fault), finding)
    return list(findings.values())


def compare_ranks(graph: str, texts: dict[int, str]) -> list[Finding]:
    """A finding if a graph's text differs between ranks, which would then run different programs.
    texts: by rank."""
    (first, expected), *others = texts.items()
    for rank, text in others:
        if text == expected:
            continue
        lines = zip(expected.splitlines(), text.splitlines(), strict=False)
        pairs = (pair for pair in lines if pair[0] != pair[1])
        here, there = next(pairs, ("a shorter graph", "a longer one"))
        wrong = f"rank {first} has {here.strip()!r}, rank {rank} has {there.strip()!r}"
        do = "no rank in the model: cut weights and inputs before they load"
        return [Finding(graph, "the whole graph", wrong, do)]
    return []
