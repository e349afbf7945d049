"""Cut the text encoder's, its projections' and the connectors' weights into one file per rank.

python shards/shard_gemma3_weights.py --gemma-root DIR --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags
from ltx_neuron.errors import require
from ltx_neuron.shard import shard
from ltx_neuron.workspace import Workspace


def main() -> None:
    parser = flags.parser(
        "Cut the weights of Gemma3, the text projections and the connectors into one file per"
        " rank.",
        "python shards/shard_gemma3_weights.py --gemma-root gemma-3-12b --checkpoint-path CKPT"
        " --tp-degree 4",
        gemma=True,
        required=False,
    )
    flags.add_sharding(parser)
    args = parser.parse_args()
    if args.checkpoint_path:
        require(
            args.gemma_root,
            "--gemma-root",
            "--checkpoint-path",
            "Type for example --gemma-root gemma-3-12b",
        )
    shard(args, "gemma3", lambda w: [w.shard_gemma3(args.num_workers)], Workspace.verify_gemma3)


if __name__ == "__main__":
    errors.run(main)
