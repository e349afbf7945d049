"""Cut the DiT's weights into one file per rank.

python shards/shard_backbone_weights.py --checkpoint-path CKPT --tp-degree 4
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from ltx_neuron import cli, errors  # noqa: E402
from ltx_neuron.workspace import Workspace  # noqa: E402


def main() -> None:
    parser = cli.parser(
        "Cut the DiT's weights into one file per rank.",
        "python shards/shard_backbone_weights.py --checkpoint-path ltx-2.3-22b-distilled.safetensors --tp-degree 4",
        gemma=False, required=False,
    )  # fmt: skip
    cli.add_loras(parser)
    cli.add_sharding(parser)
    args = parser.parse_args()
    cli.shard(args, "dit", lambda w: w.shard_dit(args.num_workers), Workspace.verify_dit)


if __name__ == "__main__":
    errors.run(main)
