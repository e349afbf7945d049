"""Generate a video with sound from a prompt.

python src/generate_ltx23.py --neuron-gemma --checkpoint-path CKPT --gemma-root DIR \\
    --prompt "..." --output-path out.mp4
"""

import argparse

from ltx_neuron import errors, flags
from ltx_neuron.batch import read_lines
from ltx_neuron.generate import generate, generate_batch

EXAMPLE = """python src/generate_ltx23.py --neuron-gemma --gemma-root gemma-3-12b \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors --output-path out.mp4 \\
    --prompt "a golden retriever puppy runs across a sunny green meadow\""""


def arguments() -> argparse.Namespace:
    parser = flags.parser("Generate a video with sound from a prompt.", EXAMPLE, gemma=True)
    flags.add_job(parser)
    flags.add_graph_cut(parser)
    flags.add_tuned(parser)
    flags.add_run(parser)
    flags.add_outputs(parser)
    args = parser.parse_args()
    args.recipe = flags.recipe(args)
    return args


def main() -> None:
    args = arguments()
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


if __name__ == "__main__":
    errors.run(main)
