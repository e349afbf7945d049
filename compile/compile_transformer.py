"""Trace the DiT step for the size of a generation; --two-stage traces both stages' sizes.

python compile/compile_transformer.py --checkpoint-path CKPT --height 512 --width 768
"""

from ltx_neuron import errors, flags
from ltx_neuron.weights.lora import reference_scale

EXAMPLE = """python compile/compile_transformer.py --checkpoint-path CKPT \\
    --height 384 --width 512 --num-frames 25"""


def main() -> None:
    parser = flags.parser(
        "Trace the DiT step for the size of a generation. Without --image the graphs serve text to"
        " video and an image at frame 0; with --image, exactly those images.",
        EXAMPLE,
        gemma=False,
    )
    flags.add_size(parser)
    flags.add_ic_loras(parser)
    flags.add_graph_cut(parser)
    flags.add_tuned(parser)
    args = parser.parse_args()
    size, images = flags.size(args), flags.images(args)
    size.check()
    size.check_images(images)
    reference_scale(flags.loras(args.ic_lora, "--ic-lora"))
    workspace = flags.workspace(args)
    recipe = flags.recipe(args)
    workspace.check_plan_fits(size, recipe, neuron_gemma=False)
    # Text to video has one timestep per step, an image at frame 0 a second one; either is its own,
    # faster graph.
    timesteps = [None] if images else [1, 2]
    stages = size.stages(recipe)
    buckets = [size.bucket(stage, images, count) for stage in stages for count in timesteps]
    workspace.say_tuned(buckets)
    for path in workspace.compile_dit(buckets):
        print(f"graphs: {path}")


if __name__ == "__main__":
    errors.run(main)
