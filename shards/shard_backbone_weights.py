"""Cut the DiT's weights into one file per rank.

python shards/shard_backbone_weights.py --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags

EXAMPLE = """python shards/shard_backbone_weights.py --tp-degree 4 \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors"""


def main() -> None:
    description = "Cut the DiT's weights into one file per rank."
    parser = flags.parser(description, EXAMPLE, gemma=False, required=False)
    flags.add_loras(parser)
    flags.add_sharding(parser)
    flags.shard("dit", parser.parse_args())


if __name__ == "__main__":
    errors.run(main)
