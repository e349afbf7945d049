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


Shapes = dict[str, tuple[str, list[int]]]  # a tensor's name -> its dtype as stored, its shape


def released_shapes(blocks: int = 48) -> Shapes:
    """The tensors of the released checkpoint, with its first `blocks` transformer blocks."""
    shapes = {}
    for name, (dtype, shape) in json.loads(gzip.decompress(HEADER.read_bytes()))["tensors"].items():
        block = re.match(r"model\.diffusion_model\.transformer_blocks\.(\d+)\.", name)
        if not (block and int(block[1]) >= blocks):
            shapes[name] = dtype, shape
    return shapes


def write_sparse_checkpoint(path: Path, blocks: int = 48) -> Path:
    """Write the header of the released checkpoint, with its first `blocks` transformer blocks, and
    a hole in place of the tensors' bytes. Returns the path."""
    write_sparse(path, checkpoint_metadata(blocks), released_shapes(blocks))
    return path


def checkpoint_metadata(blocks: int = 48) -> dict[str, str]:
    config = merge(released_config(), {"transformer": {"num_layers": blocks}})
    return {"config": json.dumps(config), "model_version": "2.3.0"}


def write_sparse(path: Path, metadata: dict[str, str], shapes: Shapes) -> dict[str, int]:
    """Write a safetensors file with a hole in place of the tensors' bytes. Returns where in the
    file each tensor begins."""
    header, offsets, end = {"__metadata__": metadata}, {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + prod(shape) * TORCH_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        offsets[name] = begin
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors writes it
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + begin for name, begin in offsets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--blocks", type=int, default=48)
    args = parser.parse_args()
    print(f"{write_sparse_checkpoint(args.file, args.blocks).stat().st_size} bytes: {args.file}")


if __name__ == "__main__":
    main()
