"""Plan a generation before compiling: memory, FLOPs, collectives, the ideal step time, and whether
it fits. Exit code 1 where it does not.

python -m ltx_neuron.plan --checkpoint-path CKPT --profile trn2.3xlarge --height 512 --width 768
"""

import dataclasses
import json
import sys
from pathlib import Path

from ltx_neuron import errors, flags
from ltx_neuron.config import GEMMA_3_12B, gemma_config
from ltx_neuron.plan import plan
from ltx_neuron.plan.table import table
from ltx_neuron.profiles import resolve
from ltx_neuron.weights.checkpoint import Checkpoint

EXAMPLE = """python -m ltx_neuron.plan --checkpoint-path CKPT --profile trn2.3xlarge \\
    --height 512 --width 768 --num-frames 121"""


def main(argv: list[str] | None = None) -> None:
    parser = flags.parser(__doc__.partition("\n\n")[0], EXAMPLE, gemma=False)
    parser.prog = "python -m ltx_neuron.plan"
    flags.add_size(parser)
    add = parser.add_argument
    help = "its config.json is read (default: Gemma3-12B's sizes)"
    add("--gemma-root", type=Path, metavar="DIR", help=help)
    add("--num-inference-steps", type=int, default=30, metavar="N", help="dev recipe only")
    add("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args(argv)
    profile = resolve(args.profile, tuple(args.profile_set))
    result = plan(
        Checkpoint(args.checkpoint_path),
        profile,
        flags.size(args),
        profile.degree(args.tp_degree),
        args.dtype,
        gemma_config(args.gemma_root) if args.gemma_root else GEMMA_3_12B,
        args.recipe or "distilled",
        args.num_inference_steps,
    )
    print(json.dumps(dataclasses.asdict(result)) if args.json else table(result))
    if result.fits is False:
        sys.exit(1)


if __name__ == "__main__":
    errors.run(main)
