"""Generate a video with sound from a prompt.

python src/generate_ltx23.py --neuron-gemma --checkpoint-path CKPT --gemma-root DIR --prompt "..." --output-path out.mp4
"""

import argparse
from pathlib import Path

from ltx_neuron import errors, flags

EXAMPLE = """python src/generate_ltx23.py --neuron-gemma --checkpoint-path ltx-2.3-22b-distilled.safetensors \\
    --gemma-root gemma-3-12b --prompt "a golden retriever puppy runs across a sunny green meadow" --output-path out.mp4"""


def arguments() -> argparse.Namespace:
    parser = flags.parser("Generate a video with sound from a prompt.", EXAMPLE, gemma=True)
    flags.add_job(parser)
    parser.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE.jsonl",
        help="one JSON object per line, flags as keys; models are loaded once for all",
    )
    parser.add_argument(
        "--spatial-upsampler-path",
        type=Path,
        metavar="FILE",
        help="needed by --two-stage and --upscale",
    )
    parser.add_argument(
        "--temporal-upsampler-path",
        type=Path,
        metavar="FILE",
        help="needed by --upscale temporal|both",
    )
    parser.add_argument(
        "--neuron-gemma",
        action="store_true",
        help="encode the prompt on the profile's device, sharded; without it, on the host CPU",
    )
    parser.add_argument(
        "--no-prompt-cache",
        action="store_true",
        help="encode the prompt even if an earlier run left its contexts in the artifacts",
    )
    parser.add_argument(
        "--compat",
        choices=["ltx-core-1.0.0", "ltx-core-1.0.0-conditioning"],
        help="the first release's numerics; or only how it holds images",
    )
    parser.add_argument("--warmup", action="store_true", help="a discarded first step per stage")
    flags.add_loras(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--output-path", type=Path, metavar="FILE.mp4")
    output.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="of a --prompts-file: 0001.mp4 and so on, results.json",
    )
    output.add_argument(
        "--save-frames", type=Path, metavar="DIR", help="every frame as PNG as well"
    )
    output.add_argument(
        "--save-tensors", type=Path, metavar="FILE.safetensors", help="every named intermediate"
    )
    output.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="FILE",
        help=(
            "continue an interrupted run from the latents it kept beside --output-path, or decode"
            " those of a --save-tensors FILE again"
        ),
    )
    output.add_argument(
        "--perf-dump-path", type=Path, metavar="FILE.json", help="the latency report"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    from ltx_neuron.generate import generate  # torch and all: only once the flags are understood

    generate(args)


if __name__ == "__main__":
    errors.run(main)
