"""Print one latency report, compare two, draw them, and guard one with thresholds.

ltx-neuron report run.json
ltx-neuron report before.json after.json --plot steps.png
ltx-neuron report run.json --max warm_step_ms.stage_1.median=300 end_to_end_seconds=20
"""

import argparse
import sys
from pathlib import Path

from ltx_neuron.errors import run
from ltx_neuron.files import check_outputs
from ltx_neuron.invocation import command
from ltx_neuron.report.table import compare, exceeded, load, table


def main(argv: list[str] | None = None) -> None:
    """Print one report or compare two. Exits with 1 where a report exceeds a limit."""
    parser = argparse.ArgumentParser(
        prog=command("report"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("report", help="the JSON file of a run")
    parser.add_argument("other", nargs="?", help="a second run to compare with the first")
    parser.add_argument("--plot", metavar="PNG", help="draw step times into this file")
    parser.add_argument(
        "--max",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help=(
            "dotted names in the report that must not exceed a value, checked in every report given"
        ),
    )
    options = parser.parse_args(argv)
    paths = [path for path in (options.report, options.other) if path]
    if options.plot:
        check_outputs({"--plot": Path(options.plot)}, {path: Path(path) for path in paths})
    runs = [load(path) for path in paths]
    sentences = []
    for path, report in zip(paths, runs, strict=True):
        sentences += exceeded(report, options.max, path)
    texts = [table(report) for report in runs]
    if len(runs) == 2:
        texts.append(compare(*runs))
    print("\n\n".join(texts))
    if options.plot:
        from ltx_neuron.report.plot import plot  # matplotlib, only where it is asked for

        plot(runs, options.plot)
    if sentences:
        print(*sentences, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
