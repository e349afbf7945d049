"""ltx-neuron doctor: prints what blocks a generation on this machine, and the remedies."""

import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from ltx_neuron.doctor.finding import Finding, table
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import run
from ltx_neuron.flags import verbs

if TYPE_CHECKING:
    from ltx_neuron.machine import Machine


def main(
    argv: list[str] | None = None, system: System | None = None, machine: "Machine | None" = None
) -> None:
    """Print the findings; exit with 1 if one blocks. system, machine: by default this machine."""
    system, argv = system or System(), sys.argv[1:] if argv is None else argv
    args = verbs.doctor().parse_args(argv)
    if error := system.import_error("torch"):  # without it no other check can run
        fix = "make venv; on a Neuron machine: README, Install"
        show([Finding("torch", "blocks", f"cannot be imported: {error}", fix)], args.json)
    if args.bundle:
        from ltx_neuron.doctor import bundle

        bundle.write(args, argv, system)
        return
    from ltx_neuron.doctor.checks import examine
    from ltx_neuron.machine import probe

    # Lines about files go to stderr, not into the JSON.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        findings = examine(args, system, machine or probe(system.root))
    show(findings, args.json)


def show(findings: list[Finding], as_json: bool) -> None:
    """Print the findings; exit with 1 if one blocks."""
    can_run = all(finding.state != "blocks" for finding in findings)
    listed = [dataclasses.asdict(finding) for finding in findings]
    content = {"can_run": can_run, "findings": listed}
    print(json.dumps(content, indent=1) if as_json else table(findings))
    if not can_run:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
