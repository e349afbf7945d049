"""Whether the demo's clips show and sound what their prompts ask for: clips made by the scripts, as
a user makes them, and looked at and listened to as MP4 files.

    python benchmarks/demo_quality.py --folder DIR --tp-degree 4 --dtype bfloat16

Prompts are drawn from the grammar of tools/train_demo/world.py, from a seed that training does not
use. FOLDER keeps the clips; a second call goes on where the first one was stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from lib.scripts import ROOT, Scripts
from torch import Generator

from ltx_neuron.demo import assets_in
from ltx_neuron.errors import run
from ltx_neuron.host.media import first_frames, read_sound

sys.path.append(str(ROOT / "tools/train_demo"))
import measures  # noqa: E402
from config import FRAME_RATE, HEIGHT, NUM_FRAMES, WIDTH  # noqa: E402
from world import Scene  # noqa: E402

SEED = 1_000_000  # of the scenes; training's are the numbers of its chunks
SIZE = [
    *("--height", str(HEIGHT), "--width", str(WIDTH), "--num-frames", str(NUM_FRAMES)),
    *("--frame-rate", str(FRAME_RATE), "--two-stage"),
]


def draw(count: int) -> tuple[list[Scene], list[str]]:
    """Scenes, and a prompt for each."""
    generator = Generator().manual_seed(SEED)
    scenes = [Scene.draw(generator) for _ in range(count)]
    return scenes, [scene.prompt(generator) for scene in scenes]


def score(scene: Scene, clip: Path) -> measures.Score:
    """What of a scene is found in an MP4 file."""
    frames = torch.stack([torch.from_numpy(frame) for frame in first_frames(clip, "CLIP")])
    sound = read_sound(clip, "CLIP")
    return measures.score(scene, frames / 255, sound.samples, sound.rate, FRAME_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of artifacts and clips")
    parser.add_argument(
        "--assets",
        type=Path,
        default=ROOT / "src/ltx_neuron/demo",
        help="folder of the trained files (default: those in the package)",
    )
    parser.add_argument("--prompts", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--tp-degree", type=int, default=4, help="%(default)s")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="%(default)s"
    )
    args = parser.parse_args()
    scripts = Scripts(assets_in(args.assets), args.folder, args.tp_degree, SIZE, args.dtype)
    scripts.prepare()
    scenes, prompts = draw(args.prompts)
    lines, clips = args.folder / "prompts.jsonl", args.folder / "clips"
    lines.write_text(
        "".join(json.dumps({"prompt": p, "seed": s}) + "\n" for s, p in enumerate(prompts))
    )
    command = scripts.generate("--prompts-file", lines, "--output-dir", clips)
    subprocess.run([sys.executable, *command], check=True, env=scripts.env)
    files = sorted(clips.glob("*.mp4"))
    scores = [score(*each) for each in zip(scenes, files, strict=True)]
    for file, prompt, found in zip(files, prompts, scores, strict=True):
        wrong = [name for name, right in found._asdict().items() if not right]
        print(f"{file.name}  {prompt}: {', '.join(wrong) or 'right'}")
    right = zip(measures.Score._fields, map(sum, zip(*scores, strict=True)), strict=True)
    print(f"right of {len(scores)}: {', '.join(f'{name} {count}' for name, count in right)}")


if __name__ == "__main__":
    run(main)
