"""Cut the DiT's weights into one file per rank.

python shards/shard_backbone_weights.py --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags
from ltx_neuron.shard import shard
from ltx_neuron.workspace import Workspace


def main() -> None:
    parser = flags.parser(
        "Cut the DiT's weights into one file per rank.",
        "python shards/shard_backbone_weights.py --checkpoint-path"
        " ltx-2.3-22b-distilled.safetensors --tp-degree 4",
        gemma=False,
        required=False,
    )
    flags.add_loras(parser)
    flags.add_sharding(parser)
    args = parser.parse_args()
    shard(args, "dit", lambda w: w.shard_dit(args.num_workers), Workspace.verify_dit)


if __name__ == "__main__":
    errors.run(main)
