"""One open pipeline of whatever checkout PYTHONPATH names: makes a warm clip for every line on its
standard input, and answers with its seconds, in all and by phase, as a line of JSON.

    python benchmarks/lib/clip_worker.py '{"options": {...}, "size": {...}, "path": "out.mp4"}'
"""

import json
import sys
import time

from ltx_neuron import pipeline as module
from ltx_neuron.pipeline import LTXPipeline


def time_writing(pipeline: LTXPipeline) -> None:
    """Before clips were written while they are decoded, the API wrote them outside of any phase."""
    if write := getattr(module, "write_video", None):

        def timed(*args) -> None:
            with pipeline.engine.recorder.phase("encode_mp4"):
                write(*args)

        module.write_video = timed


def phases(pipeline: LTXPipeline) -> list[dict]:
    return pipeline.engine.recorder.report({}, "", 1, {}, {})["phases"]


def clip(pipeline: LTXPipeline, number: int, size: dict, path: str) -> dict[str, float]:
    """Seconds of a clip of a new prompt."""
    before, began = len(phases(pipeline)), time.perf_counter()
    pipeline(f"birds sing {number}", **size, seed=number, output_type="mp4", output_path=path)
    seconds = {"in all": time.perf_counter() - began}
    for phase in phases(pipeline)[before:]:
        taken = phase["seconds"] + phase.get("overlapped_seconds", 0.0)
        seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + taken
    return seconds


def main() -> None:
    asked = json.loads(sys.argv[1])
    with LTXPipeline.from_pretrained(**asked["options"]) as pipeline:
        pipeline.engine.progress = False
        time_writing(pipeline)
        clip(pipeline, 0, asked["size"], asked["path"])  # the cold one
        print("ready", flush=True)
        for number, _ in enumerate(sys.stdin, 1):
            print(json.dumps(clip(pipeline, number, asked["size"], asked["path"])), flush=True)


if __name__ == "__main__":
    main()
