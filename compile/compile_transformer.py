"""Trace the DiT step for the size of a generation; --two-stage traces both stages' sizes.

python compile/compile_transformer.py --checkpoint-path CKPT --height 512 --width 768
"""

from ltx_neuron import errors, flags

EXAMPLE = """python compile/compile_transformer.py --checkpoint-path CKPT \\
    --height 384 --width 512 --num-frames 25"""


def main() -> None:
    parser = flags.parser(
        "Trace the DiT step for the size of a generation. Without --image the graphs serve text to"
        " video and an image at frame 0; with --image, exactly those images. A sound needs none of"
        " its own.",
        EXAMPLE,
        gemma=False,
    )
    flags.add_size(parser)
    flags.add_conditions(parser, shape_only=True)
    flags.add_graph_cut(parser)
    flags.add_tuned(parser)
    args = parser.parse_args()
    job = flags.shape(args, flags.recipe(args))
    job.check_shape()
    workspace = flags.workspace(args)
    workspace.check_plan_fits(job, neuron_gemma=False)
    workspace.say_tuned(job.buckets_to_compile)
    for path in workspace.compile_dit(job.buckets_to_compile, job):
        print(f"graphs: {path}")


if __name__ == "__main__":
    errors.run(main)
