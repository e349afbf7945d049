"""Cut the text encoder's, its projections' and the connectors' weights into one file per rank.

python shards/shard_gemma3_weights.py --gemma-root DIR --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags
from ltx_neuron.errors import require
from ltx_neuron.workspace import shard

EXAMPLE = """python shards/shard_gemma3_weights.py --gemma-root gemma-3-12b \\
    --checkpoint-path CKPT --tp-degree 4"""


def main() -> None:
    description = (
        "Cut the weights of Gemma3, the text projections and the connectors into one file per rank."
    )
    parser = flags.parser(description, EXAMPLE, gemma=True, required=False)
    flags.add_sharding(parser)
    args = parser.parse_args()
    request = flags.shard_request(args)
    workspace = None
    if args.checkpoint_path:
        example = "Type for example --gemma-root gemma-3-12b"
        require(args.gemma_root, "--gemma-root", "--checkpoint-path", example)
        workspace = flags.workspace(args, writes=False)
    shard("gemma3", workspace, request)


if __name__ == "__main__":
    errors.run(main)
