"""Whether the demo's clips show and sound what their prompts ask for: clips made by the scripts, as
a user makes them, and looked at and listened to as MP4 files.

    python tools/train_demo/quality.py --folder DIR --tp-degree 4 --dtype bfloat16

Prompts are drawn from the grammar of world.py, with a seed that training does not use. DIR keeps
artifacts and clips; a second call makes what is missing and scores all again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import measures
import torch
from config import FRAME_RATE, HEIGHT, NUM_FRAMES, WIDTH
from world import Scene, draw

from ltx_neuron.demo import ASSETS, DemoAssets, assets_in
from ltx_neuron.errors import run
from ltx_neuron.host.input_files import first_frames, read_sound

ROOT = Path(__file__).resolve().parents[2]
SIZE = ["--height", HEIGHT, "--width", WIDTH, "--num-frames", NUM_FRAMES]
SIZE += ["--frame-rate", FRAME_RATE, "--two-stage"]


def score(scene: Scene, clip: Path) -> measures.Score:
    """What of a scene is found in an MP4 file."""
    frames = torch.stack([torch.from_numpy(frame) for frame in first_frames(clip, "CLIP")])
    sound = read_sound(clip, "CLIP")
    return measures.score(scene, frames / 255, sound.samples, sound.rate, FRAME_RATE)


def make(assets: DemoAssets, folder: Path, prompts: list[str], tp: int, dtype: str) -> list[Path]:
    """Shard, compile and generate in a folder; the clips in the prompts' order."""
    common = ["--checkpoint-path", assets.checkpoint, "--artifacts-dir", folder / "artifacts"]
    common += ["--profile", "cpu", "--tp-degree", tp, "--dtype", dtype]
    gemma = ["--gemma-root", assets.gemma_root]
    lines, clips = folder / "prompts.jsonl", folder / f"clips-tp{tp}-{dtype}"
    lines.write_text(
        "".join(json.dumps({"prompt": p, "seed": s}) + "\n" for s, p in enumerate(prompts))
    )
    generate = [*gemma, *SIZE, "--neuron-gemma", "--prompts-file", lines, "--output-dir", clips]
    generate += ["--spatial-upsampler-path", assets.spatial_upsampler]
    for script, flags in {
        "shards/shard_backbone_weights.py": [],
        "shards/shard_gemma3_weights.py": gemma,
        "compile/compile_transformer.py": SIZE,
        "compile/compile_gemma3.py": gemma,
        "src/generate_ltx23.py": generate,
    }.items():
        began = time.monotonic()
        command = [sys.executable, ROOT / script, *common, *flags]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        subprocess.run(list(map(str, command)), check=True, env=environment)
        print(f"{script}: {time.monotonic() - began:.0f} s", flush=True)
    return sorted(clips.glob("*.mp4"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of artifacts and clips")
    parser.add_argument("--assets", type=Path, help="folder of the trained files (the package's)")
    parser.add_argument("--prompts", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--tp-degree", type=int, default=4, help="%(default)s")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    assets = assets_in(args.assets) if args.assets else ASSETS
    scenes, prompts = draw(args.prompts)
    clips = make(assets, args.folder, prompts, args.tp_degree, args.dtype)
    scores = [score(*each) for each in zip(scenes, clips, strict=True)]
    names = [f"{clip.name}  {prompt}" for clip, prompt in zip(clips, prompts, strict=True)]
    measures.print_scores(names, scores)


if __name__ == "__main__":
    run(main)
