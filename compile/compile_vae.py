"""Trace the decoders of video and sound for the tiles and spans of a generation's size.

python compile/compile_vae.py --checkpoint-path CKPT --height 512 --width 768
"""

from ltx_neuron import errors, flags
from ltx_neuron.sampling.latents import video_latent_shape

EXAMPLE = """python compile/compile_vae.py --checkpoint-path CKPT \\
    --height 384 --width 512 --num-frames 25"""


def main() -> None:
    parser = flags.parser(
        "Trace the video decoder for the tiles in which a clip of this size is decoded on the ranks"
        " (--neuron-vae), one set of graphs for each shape of them, and mel decoder and vocoder for"
        " the spans of its sound.",
        EXAMPLE,
        gemma=False,
    )
    flags.add_size(parser)
    flags.add_tuned(parser)
    args = parser.parse_args()
    size = flags.size(args)
    size.check()
    clip = video_latent_shape(size.height, size.width, size.num_frames)
    workspace = flags.workspace(args)
    shapes = ", ".join("x".join(map(str, shape)) for shape in workspace.tile_shapes(clip))
    print(f"tiles: {shapes} latents (frames x rows x columns)")
    for path in [*workspace.compile_vae(clip), *workspace.compile_sound(size.audio_frames)]:
        print(f"graphs: {path}")


if __name__ == "__main__":
    errors.run(main)
