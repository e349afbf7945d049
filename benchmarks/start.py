"""Time from the start of `ltx-neuron generate` to the end of its first step, on the tiny model.

    python benchmarks/start.py --folder DIR [--before SRC] [--runs 5]

DIR gets the model, its weights and graphs at the first call. SRC is the src folder of another
commit with the same graphs; both take turns. Every run has a new prompt, so Gemma runs too. CPU
seconds are those of the host and of all its processes. The last line is JSON.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

import psutil
from lib.harness import finish, print_conditions
from lib.harness import parser as harness_parser

FLAGS = (  # noqa: SIM905
    "--profile cpu --neuron-gemma --checkpoint-path ltx-2.3-tiny.safetensors --gemma-root gemma"
    " --height 64 --width 64 --num-frames 9"
).split()
STEP = "first step after"


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--before", type=Path, metavar="SRC")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    sources = {"now": Path(__file__).parents[1] / "src"}
    if args.before:
        sources = {"before": args.before.absolute(), **sources}
    folder = args.folder.absolute()
    if not (folder / "artifacts").exists():
        folder.mkdir(exist_ok=True)
        python(folder, sources["now"], "-m", "tiny", ".")
        python(folder, sources["now"], "-m", "ltx_neuron", "prepare", *FLAGS)
    print_conditions("seconds to the end of the first step, and CPU seconds")
    taken = {name: [] for name in sources}
    for number in range(args.runs + 1):
        for name, source in sources.items():
            words = [*FLAGS, "--output-path", "out.mp4", "--prompt", f"waves {time.time()}"]
            said = python(folder, source, __file__, STEP, *words)
            seconds, cpu = map(float, said.rpartition(STEP)[2].split()[:2])
            print(f"{name:6} run {number} {seconds:6.2f} s, CPU {cpu:6.2f} s", flush=True)
            if number:  # the first ones read files from the disk
                taken[name].append((seconds, cpu))
    columns = {
        name: [median(column) for column in zip(*runs, strict=True)] for name, runs in taken.items()
    }
    finish(args, **{name: dict(seconds=s, cpu=c) for name, (s, c) in columns.items()})


def python(folder: Path, source: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, *words]
    return subprocess.check_output(command, cwd=folder, env=environment, text=True)


def generate(words: list[str]) -> None:
    """Run ltx-neuron generate to the end of its first step, and print the seconds."""
    from ltx_neuron.commands.generate import main
    from ltx_neuron.engine import run

    step = run.measured_step

    def first_step(*arguments) -> None:
        step(*arguments)
        this = psutil.Process()
        children = this.children(recursive=True)
        spent = [each.cpu_times() for each in (this, *children)]
        cpu = sum(times.user + times.system for times in spent)
        print(STEP, time.time() - this.create_time(), cpu, flush=True)
        for each in children:
            each.kill()
        os._exit(0)

    mock.patch.object(run, "measured_step", first_step).start()
    main(words)


if __name__ == "__main__":
    if sys.argv[1:2] == [STEP]:
        generate(sys.argv[2:])
    else:
        main()
