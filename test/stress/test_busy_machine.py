"""Generations at TP 4 beside busy loops, and generations that are paused for ten seconds at a random moment: all end
well, with the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import stress_count

pytestmark = pytest.mark.timeout(4 * 3600)  # the slowest seen took one hour, beside a test suite
TP, LOOPS, CLIPS_A_PROCESS, AT_A_TIME, SEED = 4, 8, 5, 8, 1
PROCESSES, PAUSES, PAUSE_SECONDS = stress_count(40), stress_count(20), 10.0
SIZE = {"height": 64, "width": 64, "num_frames": 9}
# A loop ends with this process, however that ends.
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@pytest.fixture(scope="module")
def generate(scripts, tiny, tmp_path_factory):
    """generate(name, pause_after): what a process made of five clips, (exit code, clips), and what it printed. It is
    paused once."""
    setup, folder = scripts(tiny, TP), tmp_path_factory.mktemp("busy")
    setup.prepare(**SIZE)
    lines = [{"prompt": "a red fox", "seed": seed} for seed in range(CLIPS_A_PROCESS)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))

    def run(name: str, pause_after: float | None = None) -> tuple:
        flags = SIZE | {"prompts_file": prompts, "output_dir": folder / name, "no_prompt_cache": True}
        words = setup.command("src/generate_ltx23.py", neuron_gemma=True, **flags)
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen([sys.executable, *words], **streams, start_new_session=True)
        if pause_after is not None:
            threading.Timer(pause_after, pause, (process,)).start()
        printed, _ = process.communicate()
        clips = [path.read_bytes() for path in sorted((folder / name).glob("*.mp4"))]
        return (process.returncode, clips), printed

    return run


@pytest.fixture(scope="module")
def undisturbed(generate) -> tuple:
    began = time.monotonic()
    outcome, printed = generate("undisturbed")
    assert outcome[0] == 0 and len(outcome[1]) == CLIPS_A_PROCESS, printed
    return outcome, time.monotonic() - began


def pause(process: subprocess.Popen) -> None:
    """Stop a process's group, which has its ranks, as Ctrl-Z does, and continue it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        os.killpg(process.pid, signal.SIGCONT)


def test_clips_made_beside_busy_loops_are_the_same(generate, undisturbed):
    """Starting and loading are under load as well: several processes run at a time. The loops have sessions of their
    own: Linux shares CPUs between sessions, and a run has its own as well."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) for _ in range(LOOPS)]
    try:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            results = pool.map(generate, [f"busy-{number}" for number in range(PROCESSES)])
            assert [printed[-3000:] for outcome, printed in results if outcome != undisturbed[0]] == []
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("number", range(PAUSES))
def test_a_run_that_is_paused_at_any_moment_ends_well(generate, undisturbed, number):
    outcome, printed = generate(f"paused-{number}", random.Random(f"{SEED} {number}").uniform(0, undisturbed[1]))
    assert outcome == undisturbed[0], printed[-3000:]
