"""Put the trained parts together as files of the released format.

python tools/train_demo/assemble.py --folder FOLDER --output src/ltx_neuron/demo

A part that is not trained yet has random weights, so that the files can be tried early.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from config import GEMMA, LIMIT, UPSAMPLER, demo_config
from safetensors.torch import load_file
from torch import Tensor

from ltx_neuron.tiny.gemma import write_gemma_root
from ltx_neuron.tiny.weights import checkpoint_weights, save, upsampler_weights

CHECKPOINT, UPSAMPLER_FILE, GEMMA_FOLDER = (
    "ltx-2.3-demo.safetensors",
    "upsampler.safetensors",
    "gemma",
)
PARTS = ("video_vae", "audio_vae", "vocoder", "text", "dit")


def trained(folder: Path, names: dict[str, Tensor], parts: tuple[str, ...]) -> dict[str, Tensor]:
    """`names` with the trained parts' weights in their place, each in the dtype that it had there.

    Raises ValueError for a part that has other names or shapes than the config says.
    """
    weights = dict(names)
    for part in parts:
        path = folder / f"{part}.safetensors"
        if not path.exists():
            print(f"{part}: not trained yet, so its weights are random")
            continue
        for name, weight in load_file(path).items():
            if name not in names or names[name].shape != weight.shape:
                wanted = names[name].shape if name in names else "no such tensor"
                raise ValueError(f"{path}: {name} has {tuple(weight.shape)}, wanted {wanted}")
            weights[name] = weight.to(names[name].dtype).contiguous()
    return weights


def assemble(folder: Path, output: Path) -> None:
    """Write checkpoint, upsampler and Gemma's folder to `output` from the parts in `folder`."""
    output.mkdir(parents=True, exist_ok=True)
    config = demo_config()
    checkpoint = trained(folder, checkpoint_weights(config, GEMMA), PARTS)
    metadata = {"config": json.dumps(config), "model_version": "2.3.0"}
    save(output / CHECKPOINT, checkpoint, metadata)
    upsampler = trained(folder, upsampler_weights(UPSAMPLER, 0), ("upsampler",))
    save(output / UPSAMPLER_FILE, upsampler, {"config": json.dumps(UPSAMPLER)})
    shutil.rmtree(output / GEMMA_FOLDER, ignore_errors=True)
    if (folder / GEMMA_FOLDER / "model.safetensors").exists():
        shutil.copytree(folder / GEMMA_FOLDER, output / GEMMA_FOLDER)
    else:
        write_gemma_root(output / GEMMA_FOLDER, GEMMA)
    written = [path for path in output.rglob("*") if path.is_file() and path.suffix != ".py"]
    total = sum(path.stat().st_size for path in written)
    print(f"{output}: {total / 1e6:.2f} MB in {len(written)} files, at most {LIMIT / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the trained parts")
    parser.add_argument("--output", type=Path, default=Path("src/ltx_neuron/demo"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    assemble(args.folder, args.output)


if __name__ == "__main__":
    main()
