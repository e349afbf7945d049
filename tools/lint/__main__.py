"""Check every graph against the documented limits of the compiler neuronx-cc.

The first part checks exported graphs, the input of TorchNeuron; it needs torch. The second part
checks HLO, the input of ModelBuilder; it needs torch 2.9 and torch_xla 2.9. Exit code 1: a graph
breaks a rule; 2: torch_xla is missing, and the message names the packages to install.
"""

import collections
import sys
from pathlib import Path
from types import ModuleType

import torch

from lint import fx, lower
from lint.cases import Case, dtype_of, programs
from lint.rules import Finding, Group, Operation, Reading, compare_ranks
from ltx_neuron.backends import mesh
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.command_line import Parser
from ltx_neuron.config.profiles import PROFILES, Profile, resolve
from ltx_neuron.errors import UserError, run

# The front ends. Each has a TITLE, its BACKEND and functions: `comm` returns the Comm of
# tensor-parallel groups, `require` raises UserError if a package is missing, and `read` maps
# (program, name of its graph, groups, dtype, title) to a Reading.
PARTS = (fx, lower)


def survey(
    part: ModuleType,
    profile: Profile,
    tp: int,
    dtype: torch.dtype,
    only: str = "",
    dump_dir: Path | None = None,
) -> list[Finding]:
    """Read every graph of the programs whose name contains `only`, as the first and the last rank,
    and print a line for each. Returns the findings.

    dump_dir  folder for the text of every graph
    Raises UserError if no name contains `only`.
    """
    all_findings, cases = [], [*programs(profile, tp, dtype)]
    selected = [case for case in cases if only in case.name]
    if not selected:
        known = "; ".join(case.name for case in cases)
        raise UserError(f"--only {only!r}: no program's name contains it; known: {known}")
    print(
        f"\n{part.TITLE}: {profile.name}, TP={tp}, attention {profile.attention}, traced as the"
        f" first and the last rank\n{_LINE.format(*_HEAD)}"
    )
    for case in selected:
        last, groups = case.profile.world_size(tp) - 1, part.target(case.groups(tp)).groups
        readings = {rank: _read(part, case, rank, tp, dtype) for rank in (0, last)}
        for graph, reading in readings[0].items():
            operations, findings = reading.check()
            texts = {rank: of[graph].text for rank, of in readings.items()}
            findings += compare_ranks(graph, texts)
            print(_LINE.format(*_row(graph, operations, findings, groups)), flush=True)
            all_findings += findings
            if dump_dir:
                dump_dir.mkdir(parents=True, exist_ok=True)
                name = f"{part.__name__.rpartition('.')[2]} {graph}.txt"
                (dump_dir / name.translate(_IN_A_FILE_NAME)).write_text(reading.text)
    return all_findings


_IN_A_FILE_NAME = str.maketrans({" ": "_", ":": None, ",": None})


def _read(
    part: ModuleType, case: Case, rank: int, tp: int, dtype: torch.dtype
) -> dict[str, Reading]:
    """Every graph of a program by title, traced by one rank in a run in `dtype`."""
    groups, dtype = case.groups(tp), dtype_of(case.name, dtype)
    named = mesh.groups(case.profile, tp)
    with fake_process_group(case.profile.world_size(tp), rank, named):
        program = case.program(part, tp)
        names = {f"{case.name}: {name}": name for name in program.graphs}
        return {
            graph: part.read(program, name, groups, dtype, graph) for graph, name in names.items()
        }


_PRODUCTS = (
    *("dot", "aten.mm.default", "aten.addmm.default", "aten.bmm.default"),
    *("convolution", "aten.convolution.default"),
)
# Each line is printed as soon as its graph is read, so the widths are fixed.
_LINE = "{:>10}  {:<27} {:<20}{:<15}{:<9}{:<10}{}"
_HEAD = (*("operations", "collectives", "dtypes", "fp32 products", "dynamic", "findings"), "graph")


def _row(
    graph: str, operations: list[Operation], findings: list[Finding], groups: dict[str, Group]
) -> tuple:
    """A graph's cells of the table. It counts fp32 products because they are several times slower
    than in bf16.

    groups  as in Target
    """
    spelled = [o.collective.group for o in operations if o.collective]
    names = [groups[text].name if text in groups else text for text in spelled]
    forms = collections.Counter(f"over {name}" for name in names)
    reductions = ", ".join(f"{count} {form}" for form, count in forms.items()) or "-"
    kinds = [kind for operation in operations for kind in operation.results]
    products = sum(
        o.name in _PRODUCTS and "f32" in {kind.dtype for kind in o.operands} for o in operations
    )
    dynamic = sum(None in kind.shape for kind in kinds)
    dtypes = " ".join(sorted({kind.dtype for kind in kinds}))
    return len(operations), reductions, dtypes, products, dynamic, len(findings), graph


def table(findings: list[Finding]) -> str:
    """The findings as text. A fault of several graphs is listed once, with all of them."""
    shared: dict[tuple, list[Finding]] = {}
    for finding in findings:
        kind = finding.operation.rpartition("(")[2]
        shared.setdefault((kind, finding.wrong, finding.do), []).append(finding)
    rows = []
    for (_, wrong, do), same in shared.items():
        others = [f"             {finding.graph}" for finding in same[1:]]
        first = [f"\ngraph        {same[0].graph}", *others, f"  operation  {same[0].operation}"]
        rows += [*first, f"  wrong      {wrong}", f"  do         {do}"]
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m lint", description=__doc__)
    add = parser.add_argument
    neuron = [name for name, profile in PROFILES.items() if profile.device == "neuron"]
    help = f"hardware to check for, one of {', '.join(neuron)} (default: %(default)s)"
    add("--profile", choices=neuron, default=neuron[0], metavar="NAME", help=help)
    help = "change a value of the profile, as in attention=matmul; repeatable"
    add("--profile-set", action="append", default=[], metavar="KEY=VALUE", help=help)
    help = "number of tensor-parallel ranks (default: the profile's)"
    add("--tp-degree", type=int, metavar="N", help=help)
    help = "data type of weights and activations (default: %(default)s)"
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=help)
    help = "check only programs whose name contains this text, such as 'tiny, 1 block'"
    add("--only", default="", metavar="TEXT", help=help)
    help = "write the text of every graph into this folder"
    add("--dump-dir", type=Path, metavar="DIR", help=help)
    options = parser.parse_args(argv)
    profile = resolve(options.profile, tuple(options.profile_set))
    tp, dtype = profile.degree(options.tp_degree), getattr(torch, options.dtype)
    findings, missing = [], None
    for part in PARTS:
        try:
            part.require()
        except UserError as error:
            missing = f"{part.TITLE} was NOT checked: {error}"
            continue
        findings += survey(part, profile, tp, dtype, options.only, options.dump_dir)
    print(f"\n{len(findings)} findings")
    if findings:
        print(table(findings), f"\n{missing or ''}")
        sys.exit(1)
    if missing:
        raise UserError(missing)


if __name__ == "__main__":
    run(main)
