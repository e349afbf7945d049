"""What is wrong with this machine, these files and these artifacts, each with the command that
mends it. Changes nothing.

  python -m ltx_neuron.doctor
  python -m ltx_neuron.doctor --checkpoint-path CKPT --gemma-root DIR --height 512 --width 768 --num-frames 121

What is asked is the whole way to a video on the profile; with files, from those files. Exit code 0
when nothing stands in its way (what is still to be sharded or compiled is listed with its command),
1 when something blocks it, 2 for a wrong flag.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from ltx_neuron.doctor.finding import Finding, table
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import run


def parser() -> argparse.ArgumentParser:
    from ltx_neuron import flags

    made = flags.parser(
        __doc__,
        "python -m ltx_neuron.doctor --checkpoint-path ltx-2.3-22b-distilled.safetensors"
        " --gemma-root gemma-3-12b",
        gemma=True,
        required=False,
    )
    made.prog = "python -m ltx_neuron.doctor"
    for kind in ("spatial", "temporal"):
        made.add_argument(f"--{kind}-upsampler-path", type=Path, metavar="FILE")
    flags.add_size(made)
    flags.add_loras(made)
    made.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return made


def main(argv: list[str] | None = None, system: System | None = None, machine=None) -> None:
    """`system` and `machine` (machine.Machine) are this one's where they are not given."""
    system, argv = system or System(), sys.argv[1:] if argv is None else argv
    if error := system.import_error(
        "torch"
    ):  # without it nothing else here can be looked at, flags included
        fix = "make venv; on a Neuron machine: README, On Trainium"
        show([Finding("torch", "blocks", f"cannot be imported: {error}", fix)], "--json" in argv)
    args = parser().parse_args(argv)
    from ltx_neuron.doctor.checks import examine
    from ltx_neuron.machine import probe

    show(examine(args, system, machine or probe(system.root)), args.json)


def show(findings: list[Finding], as_json: bool) -> None:
    """Print the findings; exit with 1 where one blocks."""
    can_run = all(finding.state != "blocks" for finding in findings)
    content = {
        "can_run": can_run,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    print(json.dumps(content, indent=1) if as_json else table(findings))
    if not can_run:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
