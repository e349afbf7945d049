"""A sparse file with the released checkpoint's header: 46 GB long, a few hundred KB on the disk,
made in a second; or with the layout of the released float8 one, which is 29 GB long.

    python benchmarks/lib/full_size.py FILE [--blocks N] [--float8]
"""

import argparse
import gzip
import json
import re
import struct
from math import prod
from pathlib import Path

from tiny.config import merge, released_config

from ltx_neuron.weights.tensorfile import TORCH_DTYPES

HEADER = Path(__file__).with_name("ltx23_header.json.gz")


_SCALES, _FORMAT = ("weight_scale", "input_scale"), {"format": "float8_e4m3fn"}
Shapes = dict[str, tuple[str, list[int]]]  # a tensor's name -> its dtype as stored, its shape


def released_shapes(blocks: int = 48) -> Shapes:
    """The tensors of the released checkpoint, with its first `blocks` transformer blocks."""
    shapes = {}
    for name, (dtype, shape) in json.loads(gzip.decompress(HEADER.read_bytes()))["tensors"].items():
        block = re.match(r"model\.diffusion_model\.transformer_blocks\.(\d+)\.", name)
        if not (block and int(block[1]) >= blocks):
            shapes[name] = dtype, shape
    return shapes


def write_sparse_checkpoint(path: Path, blocks: int = 48, float8: bool = False) -> Path:
    """Write the header of the released checkpoint, with its first `blocks` transformer blocks, and
    a hole in place of the tensors' bytes. Returns the path.

    float8  as the scaled float8 release is: the linear layers of all blocks but the two first and
            last ones are in float8, each with a scale, whose bytes are there
    """
    metadata, shapes = checkpoint_metadata(blocks), released_shapes(blocks)
    layers = _linears(shapes, range(2, blocks - 2)) if float8 else []
    if float8:
        described = {"format_version": "1.0", "layers": dict.fromkeys(layers, _FORMAT)}
        metadata["_quantization_metadata"] = json.dumps(described)
        shapes |= {f"{layer}.weight": ("F8_E4M3", shapes[f"{layer}.weight"][1]) for layer in layers}
    scales = {f"{layer}.{part}": ("F32", []) for layer in layers for part in _SCALES}
    # As safetensors orders them: float32 first, so that all scales lie together.
    offsets = write_sparse(path, metadata, scales | shapes)
    with open(path, "r+b") as file:
        for name in scales:
            file.seek(offsets[name])
            file.write(struct.pack("<f", 0.001))
    return path


def _linears(shapes: Shapes, blocks: range) -> list[str]:
    """The linear layers of those transformer blocks."""
    pattern = re.compile(r"(model\.diffusion_model\.transformer_blocks\.(\d+)\..+)\.weight")
    found = [(pattern.fullmatch(name), shape) for name, (_, shape) in shapes.items()]
    return [m[1] for m, shape in found if m and int(m[2]) in blocks and len(shape) == 2]


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
    parser.add_argument("--float8", action="store_true")
    args = parser.parse_args()
    path = write_sparse_checkpoint(args.file, args.blocks, args.float8)
    print(f"{path.stat().st_size} bytes: {path}")


if __name__ == "__main__":
    main()
