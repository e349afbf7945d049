"""Cut the DiT's weights into one file per rank.

python shards/shard_backbone_weights.py --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags
from ltx_neuron.workspace import shard

EXAMPLE = """python shards/shard_backbone_weights.py --tp-degree 4 \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors"""


def main() -> None:
    description = "Cut the DiT's weights into one file per rank."
    parser = flags.parser(description, EXAMPLE, gemma=False, required=False)
    flags.add_loras(parser)
    flags.add_sharding(parser)
    args = parser.parse_args()
    request = flags.shard_request(args)
    workspace = flags.workspace(args, writes=False) if args.checkpoint_path else None
    shard("dit", workspace, request)


if __name__ == "__main__":
    errors.run(main)
