"""Cut the text encoder's, its projections' and the connectors' weights into one file per rank.

python shards/shard_gemma3_weights.py --gemma-root DIR --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags

EXAMPLE = """python shards/shard_gemma3_weights.py --gemma-root gemma-3-12b \\
    --checkpoint-path CKPT --tp-degree 4"""


def main() -> None:
    description = (
        "Cut the weights of Gemma3, the text projections and the connectors into one file per rank."
    )
    parser = flags.parser(description, EXAMPLE, gemma=True, required=False)
    flags.add_sharding(parser)
    flags.shard("gemma3", parser.parse_args())


if __name__ == "__main__":
    errors.run(main)
