"""A sparse file with the released checkpoint's header: 46 GB long, a few hundred KB on the disk,
made in a second.

    python benchmarks/lib/full_size.py FILE [--blocks N]
"""

import argparse
import gzip
import json
import re
from math import prod
from pathlib import Path

from ltx_neuron.tiny.config import merge, released_config
from ltx_neuron.weights.tensorfile import TORCH_DTYPES

HEADER = Path(__file__).with_name("ltx23_header.json.gz")


def write_sparse_checkpoint(path: Path, blocks: int = 48) -> Path:
    """Write the header of the released checkpoint, with its first `blocks` transformer blocks, and
    a hole in place of the tensors' bytes. Returns the path."""
    config = merge(released_config(), {"transformer": {"num_layers": blocks}})
    header = {"__metadata__": {"config": json.dumps(config), "model_version": "2.3.0"}}
    end = 0
    for name, (dtype, shape) in json.loads(gzip.decompress(HEADER.read_bytes()))["tensors"].items():
        block = re.match(r"model\.diffusion_model\.transformer_blocks\.(\d+)\.", name)
        if block and int(block[1]) >= blocks:
            continue
        begin, end = end, end + prod(shape) * TORCH_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors writes it
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--blocks", type=int, default=48)
    args = parser.parse_args()
    print(f"{write_sparse_checkpoint(args.file, args.blocks).stat().st_size} bytes: {args.file}")


if __name__ == "__main__":
    main()
