"""Copy the weights of the decoders of video and sound into one file for all ranks each.

python shards/shard_vae_weights.py --checkpoint-path CKPT --tp-degree 4
"""

from ltx_neuron import errors, flags
from ltx_neuron.workspace import shard

EXAMPLE = """python shards/shard_vae_weights.py --tp-degree 4 \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors"""


def main() -> None:
    description = (
        "Copy the weights of the video decoder, and those of the mel decoder and the vocoder, into"
        " one file for all ranks each, for --neuron-vae."
    )
    parser = flags.parser(description, EXAMPLE, gemma=False, required=False)
    flags.add_sharding(parser)
    args = parser.parse_args()
    request = flags.shard_request(args)
    workspace = flags.workspace(args, writes=False) if args.checkpoint_path else None
    shard("vae", workspace, request)


if __name__ == "__main__":
    errors.run(main)
