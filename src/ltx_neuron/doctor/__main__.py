"""Check this machine for problems that block a generation, and print a remedy for each. The doctor
changes nothing.

  ltx-neuron doctor
  ltx-neuron doctor --checkpoint-path CKPT --gemma-root DIR --height 512 --width 768

Without files it checks the machine. With files it also checks them, the weights and graphs made
from them, and whether the video's size fits into memory. Exit code 0: nothing blocks (commands for
missing weights and graphs are listed); 1: something blocks; 2: a wrong flag.

  ltx-neuron doctor --bundle report.tar.gz --bundle-add outputs

writes a bug report: these findings, logs and reports of earlier runs.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from ltx_neuron.doctor.finding import Finding, table
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import run

if TYPE_CHECKING:
    from ltx_neuron.machine import Machine


EXAMPLE = """ltx-neuron doctor --checkpoint-path ltx-2.3-22b-distilled.safetensors \\
    --gemma-root gemma-3-12b"""


def build_parser() -> argparse.ArgumentParser:
    from ltx_neuron import flags
    from ltx_neuron.doctor import bundle

    parser = flags.parser(__doc__, EXAMPLE, gemma=True, required=False, verb="doctor")
    flags.add_models(parser)
    flags.add_duration_head(parser)
    flags.add_job(parser, "size", "loras", "conditions")
    flags.add_fields(parser, "video", ["upscale"])
    bundle.add_flags(parser)
    help = "print one JSON object instead of the table"
    parser.add_argument("--json", action="store_true", help=help)
    return parser


def main(
    argv: list[str] | None = None, system: System | None = None, machine: "Machine | None" = None
) -> None:
    """Print the findings; exit with 1 if one blocks. system, machine: by default this machine."""
    system, argv = system or System(), sys.argv[1:] if argv is None else argv
    # Without torch no other check can run: the flags' module imports it.
    if error := system.import_error("torch"):
        fix = "make venv; on a Neuron machine: README, Install"
        show([Finding("torch", "blocks", f"cannot be imported: {error}", fix)], "--json" in argv)
    args = build_parser().parse_args(argv)
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
