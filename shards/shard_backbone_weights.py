"""Cut the DiT's weights into one file per rank.

python shards/shard_backbone_weights.py --checkpoint-path CKPT --tp-degree 4
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from ltx_neuron import cli, errors  # noqa: E402


def main() -> None:
    parser = cli.parser(
        "Cut the DiT's weights into one file per rank.",
        "python shards/shard_backbone_weights.py --checkpoint-path ltx-2.3-22b-distilled.safetensors --tp-degree 4",
        gemma=False,
    )
    cli.add_loras(parser)
    cli.add_verify(parser)
    args = parser.parse_args()
    workspace = cli.workspace(args)
    if args.verify:
        for refining in (False, True) if workspace.distilled_loras else (False,):
            cli.verify(workspace.dit_weights(refining))
    else:
        for path in workspace.shard_dit():
            print(f"weights: {path}")


if __name__ == "__main__":
    errors.run(main)
