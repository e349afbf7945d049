"""The HLO front end: reads the HLO text of torch_xla's traces, which ModelBuilder passes to
neuronx-cc."""

import re

from lint.rules import Collective, Finding, Group, Kind, Operation, Target, check
from ltx_neuron.backends.mesh import Groups

# The operations of the lowered graphs. The compiler's published list of XLA operators has all but
# logistic, which every SiLU uses (Neuron docs, neuron-cc-ops-xla).
_PLAIN = """
    parameter constant tuple get-tuple-element convert broadcast reshape transpose slice concatenate
    pad add subtract multiply divide abs floor maximum clamp exponential tanh logistic sqrt rsqrt
    power compare select log sine dot convolution reduce batch-norm-training
"""
# torch_xla orders an all-gather or reduce-scatter before the next collective by gathering one
# number of its result, as in every sequence-parallel model of NxD.
OPERATIONS = {*_PLAIN.split(), "gather of one number"}
_INDICES = "parameter constant convert reshape broadcast tuple get-tuple-element"
MAY_INDEX = {*_INDICES.split()}
# Maximum operands of the allowed collectives, with the scalar by which torch_xla orders them.
MOST_TENSORS = {"all-reduce": 16, "all-gather": 2, "reduce-scatter": 2}
COLLECTIVES = {*MOST_TENSORS, "all-to-all", "collective-permute", "collective-broadcast"}

_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<label>[\w.\-]+) = (?P<kinds>.+?)"
    r" (?P<name>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_KIND = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([^\]]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)$")


def target(groups: Groups) -> Target:
    """The allowed content of an HLO graph for these groups of ranks."""
    return Target(
        operations=frozenset(OPERATIONS),
        collectives=MOST_TENSORS,
        reduction="add",
        groups={_spelled(part): Group(name, len(part[0])) for name, part in groups.items()},
        may_index=frozenset(MAY_INDEX),
    )


def _spelled(groups: list[list[int]]) -> str:
    """Replica groups as {{0,1},{2,3}}."""
    return "{" + ",".join("{" + ",".join(map(str, ranks)) + "}" for ranks in groups) + "}"


def check_hlo(text: str, groups: Groups, graph: str = "graph") -> list[Finding]:
    """Findings in a graph's HLO text, for these groups of ranks."""
    return check(graph, operations(text), target(groups))


def operations(text: str) -> list[Operation]:
    """Every instruction of every computation. Raises ValueError for a text without any."""
    parsed, kinds, roots, computation = [], {}, {}, ""
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            computation = opened["name"]
        instruction = None if opened else _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if instruction:
            kinds[computation, instruction["label"]] = _kinds(instruction["kinds"])
            parsed.append((computation, instruction))
            if instruction["root"]:
                roots[computation] = instruction["name"]
    if not parsed:
        raise ValueError("no HLO instruction in this text")
    return [_operation(where, instruction, kinds, roots) for where, instruction in parsed]


def _operation(computation: str, instruction: re.Match, kinds: dict, roots: dict) -> Operation:
    """An instruction of a computation.

    kinds  of every instruction's results, by (computation, label)
    roots  name of every computation's last operation, which is a reduction's operator
    """
    arguments, attributes = _split(instruction["rest"])
    name, label = instruction["name"].removesuffix("-start"), instruction["label"]
    if name == "gather" and [kind.shape for kind in kinds[computation, label]] == [()]:
        name = "gather of one number"
    names = [_NAME.search(argument.strip()) for argument in arguments]
    operands = tuple(k for n in names if n for k in kinds.get((computation, n[1]), ()))
    collective = (
        Collective(_reduction(attributes, roots), _group(attributes))
        if name in COLLECTIVES
        else None
    )
    return Operation(name, label, kinds[computation, label], operands, collective)


def _split(rest: str) -> tuple[list[str], str]:
    """The comma-separated arguments of an instruction, and the attributes after them. `rest` begins
    after the opening parenthesis."""
    parts, depth, start = [], 1, 0
    for index, letter in enumerate(rest):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 or depth == 1 and letter == ",":
            parts.append(rest[start:index])
            start = index + 1
        if depth == 0:
            return [part for part in parts if part.strip()], rest[start:]
    raise ValueError(f"unbalanced parentheses in HLO: {rest[:80]}")


def _kinds(text: str) -> tuple[Kind, ...]:
    return tuple(Kind(dtype, _shape(dims)) for dtype, dims in _KIND.findall(text))


def _shape(dims: str) -> tuple[int | None, ...]:
    """2,3 is static; <=3 is bounded and ? is not: both are dynamic."""
    return tuple(
        int(size) if size.strip().isdigit() else None for size in dims.split(",") if size.strip()
    )


def _reduction(attributes: str, roots: dict) -> str:
    called = re.search(r"to_apply=%?([\w.\-]+)", attributes)
    return roots.get(called[1], "an unknown computation") if called else ""


def _group(attributes: str) -> str:
    """The replica groups as {{0,1},{2,3}}, also of the form [2,2]<=[4]; empty if there are none."""
    short = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[\d+\](?!T)", attributes)
    if short:
        count, size = int(short[1]), int(short[2])
        return _spelled([[first * size + i for i in range(size)] for first in range(count)])
    written = re.search(r"replica_groups=(\{\{[\d,{}]*\}\}|\{\})", attributes)
    return written[1] if written else ""
