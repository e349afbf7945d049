"""Put the trained parts together as files of the released format.

python tools/train_demo/assemble.py --folder FOLDER --output src/ltx_neuron/demo
python tools/train_demo/assemble.py --folder FOLDER --split    the shipped files' parts, to go on

A part that is not trained yet has random weights, so that the files can be tried early.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from config import GEMMA, LIMIT, UPSAMPLER, demo_config
from safetensors.torch import load_file
from tiny.gemma import write_gemma_root
from tiny.weights import checkpoint_weights, save, upsampler_weights
from torch import Tensor

from ltx_neuron.demo import ASSETS, assets_in

DIT = "model.diffusion_model."
# Which weights each part's file has; the first prefix that fits counts.
PREFIXES = {
    f"{DIT}video_embeddings_connector.": "text",
    f"{DIT}audio_embeddings_connector.": "text",
    "text_embedding_projection.": "text",
    DIT: "dit",
    "vae.": "video_vae",
    "audio_vae.": "audio_vae",
    "vocoder.": "vocoder",
}
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
    """Write all files that are shipped to `output` from the parts in `folder`."""
    output.mkdir(parents=True, exist_ok=True)
    config, made = demo_config(), assets_in(output)
    checkpoint = trained(folder, checkpoint_weights(config, GEMMA), PARTS)
    metadata = {"config": json.dumps(config), "model_version": "2.3.0"}
    save(made.checkpoint, checkpoint, metadata)
    upsampler = trained(folder, upsampler_weights(UPSAMPLER, 0), ("upsampler",))
    save(made.spatial_upsampler, upsampler, {"config": json.dumps(UPSAMPLER)})
    shutil.rmtree(made.gemma_root, ignore_errors=True)
    if (folder / "gemma/model.safetensors").exists():
        shutil.copytree(folder / "gemma", made.gemma_root)
    else:
        write_gemma_root(made.gemma_root, GEMMA)
    if (style := folder / "style.safetensors").exists():
        shutil.copy(style, made.style_lora)
    written = [path for path in output.rglob("*") if path.is_file() and path.suffix != ".py"]
    total = sum(path.stat().st_size for path in written)
    print(f"{output}: {total / 1e6:.2f} MB in {len(written)} files, at most {LIMIT / 1e6:.0f} MB")


def split(folder: Path) -> None:
    """Write the shipped files' parts to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {part: {} for part in PARTS}
    for name, weight in load_file(ASSETS.checkpoint).items():
        prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
        parts[PREFIXES[prefix]][name] = weight
    for part, weights in parts.items():
        save(folder / f"{part}.safetensors", weights, None)
    shutil.copy(ASSETS.spatial_upsampler, folder / "upsampler.safetensors")
    shutil.copy(ASSETS.style_lora, folder / "style.safetensors")
    shutil.copytree(ASSETS.gemma_root, folder / "gemma", dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the trained parts")
    parser.add_argument("--output", type=Path, default=ASSETS.checkpoint.parent)
    parser.add_argument("--split", action="store_true", help="write the shipped parts instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.split:
        split(args.folder)
    else:
        assemble(args.folder, args.output)


if __name__ == "__main__":
    main()
