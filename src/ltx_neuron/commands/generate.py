"""ltx-neuron generate and ltx-neuron batch: videos with sound from prompts."""

import argparse
from pathlib import Path

from ltx_neuron import flags, invocation
from ltx_neuron.batch import read_lines
from ltx_neuron.generate import generate, generate_batch

_EXAMPLES = {
    "generate": """ltx-neuron generate --neuron-gemma --gemma-root gemma-3-12b \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors --output-path out.mp4 \\
    --prompt "a golden retriever puppy runs across a sunny green meadow\"""",
    "batch": """ltx-neuron batch prompts.jsonl --neuron-gemma --gemma-root gemma-3-12b \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors --output-dir outputs""",
}


def build_parser(verb: str = "generate") -> argparse.ArgumentParser:
    parser = flags.parser("Generate a video with sound from a prompt.", _EXAMPLES[verb], gemma=True)
    parser.prog = invocation.command(verb)
    flags.add_job(parser)
    flags.add_graph_cut(parser)
    flags.add_tuned(parser)
    flags.add_run(parser)
    flags.add_outputs(parser)
    if verb == "batch":
        parser.description = "Generate the videos of a prompts file. Models are loaded once."
        parser.add_argument("prompts", nargs="?", type=Path, metavar="PROMPTS_FILE")
    return parser


def arguments(argv: list[str], verb: str = "generate") -> argparse.Namespace:
    parser = build_parser(verb)
    args = parser.parse_args(argv)
    if verb == "batch":
        args.prompts_file = args.prompts or args.prompts_file
        if not args.prompts_file:
            parser.error("which prompts? Type for example prompts.jsonl")
    args.recipe = flags.recipe(args)
    return args


def main(argv: list[str]) -> None:
    run(arguments(argv))


def batch(argv: list[str]) -> None:
    run(arguments(argv, "batch"))


def run(args: argparse.Namespace) -> None:
    options, outputs = flags.run_options(args), flags.outputs(args)
    flags.check_fleet(args, args.prompts_file)
    if args.prompts_file:
        outputs.check_batch(args.prompt)
        workspace = flags.workspace(args, writes=False)
        lines = read_lines(args.prompts_file, flags.job_of_line(args), workspace.identity)
        if args.ray:
            from ltx_neuron.fleet import batch  # Ray is an extra

            batch.generate_batch(lines, args, workspace)
        else:
            generate_batch(lines, args.prompts_file, workspace, options, outputs)
    else:
        job = flags.job(args)
        job.check()
        generate(job, flags.workspace(args, writes=False), options, outputs)
