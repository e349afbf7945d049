"""Copy the weights of the decoders of video and sound into one file for all ranks each.

python shards/shard_vae_weights.py --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags

EXAMPLE = """python shards/shard_vae_weights.py --tp-degree 4 \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors"""


def main() -> None:
    description = (
        "Copy the weights of the video decoder, and those of the mel decoder and the vocoder, into"
        " one file for all ranks each, for --neuron-vae."
    )
    parser = flags.parser(description, EXAMPLE, gemma=False, required=False)
    flags.add_sharding(parser)
    flags.shard("vae", parser.parse_args())


if __name__ == "__main__":
    errors.run(main)
