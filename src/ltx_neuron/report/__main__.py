"""Print a latency report (of --perf-dump-path), or compare two. Exit code 1 if a value of --max is
exceeded.

ltx-neuron report run.json
ltx-neuron report before.json after.json --plot steps.png
ltx-neuron report run.json --max warm_step_ms.stage_1.median=300 end_to_end_seconds=20
"""

import sys
from itertools import chain
from pathlib import Path

from ltx_neuron.command_line import Parser
from ltx_neuron.errors import run
from ltx_neuron.files import check_outputs
from ltx_neuron.invocation import command
from ltx_neuron.report.latency import compare, exceeded, load, table


def main(argv: list[str] | None = None) -> None:
    """Print one report or compare two. Exits with 1 if a report exceeds a limit."""
    parser = Parser(prog=command("report"), description=__doc__)
    parser.add_argument("report", metavar="FILE", help="latency report of a run, JSON")
    parser.add_argument("other", nargs="?", metavar="FILE", help="a second report to compare with")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the step times")
    limits: dict = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME=VALUE ..."}
    help = "limits of values in each report, by their dotted names"
    parser.add_argument("--max", help=help, **limits)
    options = parser.parse_args(argv)
    paths = [path for path in (options.report, options.other) if path]
    if options.plot:
        check_outputs({"--plot": Path(options.plot)}, {path: Path(path) for path in paths})
    runs = [load(path) for path in paths]
    exceeding = (exceeded(run, options.max, path) for path, run in zip(paths, runs, strict=True))
    sentences, texts = [*chain.from_iterable(exceeding)], [*map(table, runs)]
    if len(runs) == 2:
        texts.append(compare(*runs))
    print("\n\n".join(texts))
    if options.plot:
        from ltx_neuron.report.plot import plot  # imports matplotlib

        plot(runs, options.plot)
    if sentences:
        print(*sentences, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
