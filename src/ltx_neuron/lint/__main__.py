"""python -m ltx_neuron.lint: every graph against what neuronx-cc documents that it takes. Exit 1 on a finding.

Two parts: exported graphs, as TorchNeuron is given them, which needs torch alone; and HLO, as ModelBuilder is given it, which
needs torch 2.9 and torch_xla 2.9. Without torch_xla the second part says what to install, and the exit code is 2.
"""

import argparse
import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ltx_neuron.backends.export import TorchDistComm, fake_process_group
from ltx_neuron.errors import UserError, run
from ltx_neuron.lint import fx, lower
from ltx_neuron.lint.cases import programs
from ltx_neuron.lint.rules import Finding, Reading, compare_ranks
from ltx_neuron.profiles import PROFILES


class Part(NamedTuple):
    """A front end: the Comm it traces with, what must be there, and how a graph of a program is read."""

    title: str
    comm: type
    require: Callable[[], None]
    read: Callable[..., Reading]


PARTS = (
    Part("exported graphs (TorchNeuron)", TorchDistComm, lambda: None, fx.read),
    Part("HLO (ModelBuilder)", lower.GroupedComm, lower.require_torch_xla, lower.read),
)


def survey(part: Part, tp: int, dtype: torch.dtype, only: str = "", keep: Path | None = None) -> list[Finding]:
    """Read every graph whose name contains `only` as the first and as the last rank; print a line for each."""
    found = []
    print(f"\n{part.title}: TP={tp}, traced as rank 0 and as rank {tp - 1}\n{_HEAD}")
    for case, make in programs(PROFILES["cpu"], tp, dtype):
        readings = {rank: _read(part, case, make, rank, tp, dtype, only) for rank in (0, tp - 1)}
        for graph, reading in readings[0].items():
            texts = {rank: of_rank[graph].text for rank, of_rank in readings.items()}
            findings = reading.findings + compare_ranks(graph, texts)
            print(_row(graph, reading, findings), flush=True)
            found += findings
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{graph}.txt".replace("/", "-").replace(" ", "_")).write_text(reading.text)
    return found


def _read(part: Part, case: str, make: Callable, rank: int, tp: int, dtype: torch.dtype, only: str) -> dict[str, Reading]:
    with fake_process_group(tp, rank):
        program = make(comm=part.comm(tp))
        names = {f"{case}: {name}": name for name in program.graphs}
        return {graph: part.read(program, name, tp, dtype, graph) for graph, name in names.items() if only in graph}


_HEAD = f"{'operations':>10}  {'collectives':<28}{'dtypes':<22}{'dynamic':<9}{'findings':<10}graph"


def _row(graph: str, reading: Reading, findings: list[Finding]) -> str:
    forms = collections.Counter(f"over {o.collective.group}" for o in reading.operations if o.collective)
    collectives = ", ".join(f"{count} {form}" for form, count in forms.items()) or "-"
    kinds = [kind for operation in reading.operations for kind in operation.results]
    dynamic = sum(None in kind.shape for kind in kinds)
    dtypes = " ".join(sorted({kind.dtype for kind in kinds}))
    return f"{len(reading.operations):>10}  {collectives:<28}{dtypes:<22}{dynamic:<9}{len(findings):<10}{graph}"


def table(findings: list[Finding]) -> str:
    """The findings as a person reads them: a fault that several graphs share once, with the graphs that have it."""
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
    parser = argparse.ArgumentParser(
        prog="python -m ltx_neuron.lint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp-degree", type=int, default=4, metavar="N", help="ranks of the group (default 4)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", default="", metavar="TEXT", help="graphs whose name contains this, e.g. 'tiny, 1 block'")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the text of every graph here")
    options = parser.parse_args(argv)
    findings, missing = [], None
    for part in PARTS:
        try:
            part.require()
        except UserError as error:
            missing = f"{part.title} was NOT checked: {error}"
            continue
        findings += survey(part, options.tp_degree, getattr(torch, options.dtype), options.only, options.keep)
    print(f"\n{len(findings)} findings")
    if findings:
        print(table(findings))
        sys.exit(1)
    if missing:
        raise UserError(missing)


if __name__ == "__main__":
    run(main)
