"""A job of each kind, killed (-9) at random moments, its host or one of its ranks: it ends soon, leaves no process and
no shared memory behind, and is resumed to the same bytes."""

import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import warm_python
from conftest import ROOT, SCRIPT_SECONDS, Setup
from helpers import allowed, ended, picture_frames, ranks_of, shared_memories, stress_count, tone, wait_for, write_film
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch

pytestmark = pytest.mark.timeout(8 * SCRIPT_SECONDS)
KILLS, SEED = stress_count(20), 1
SOON = 10  # seconds until nothing of a killed run is there: docs/failures.md
# The share of a run after which it denoises: starting ranks takes most of it, and a tiny model's steps are fast. Every
# second kill comes then.
DENOISING = 0.85
ONE = {"height": 64, "width": 64, "num_frames": 9}
TWO = ONE | {"two_stage": True}
HEARD = {"recipe": "dev", "num_inference_steps": 3, "audio_stg_guidance_scale": 0}
GUIDED = HEARD | {"video_stg_guidance_scale": 0}
DUB = {"height": 64, "width": 64, "two_stage": True}
# Ranks, and the flags of each kind's job, whose film and LoRA are files.
KINDS = {
    "four ranks": (4, lambda film, lora: TWO),
    "context groups": (2, lambda film, lora: ONE | GUIDED | {"profile_set": ("context_parallel=2",)}),
    "guidance groups": (2, lambda film, lora: ONE | GUIDED | {"profile_set": ("guidance_parallel=2",)}),
    "a voice": (2, lambda film, lora: TWO | {"reference_audio": film, "ic_lora": ((lora, 1),)}),
    "a dub": (2, lambda film, lora: DUB | {"reference_video": film, "lora": ((lora, 1),)}),
    "a negative prompt": (2, lambda film, lora: TWO | {"nag_scale": 11, "negative_prompt": "dust"}),
    "sound alone": (2, lambda film, lora: HEARD | {"num_frames": 30, "frame_rate": 30, "sound_only": True}),
    "a longer video": (2, lambda film, lora: {"video_path": film, "extend": 1}),
    "decoding on the ranks": (2, lambda film, lora: TWO | {"neuron_vae": True}),
}


@pytest.fixture(scope="module", params=KINDS)
def run(request, scripts, tiny, tmp_path_factory) -> SimpleNamespace:
    """A kind's job on compiled graphs, what it writes undisturbed, and in how many seconds."""
    folder, (tp, flags_of) = tmp_path_factory.mktemp("undisturbed"), KINDS[request.param]
    film = write_film(folder / "film.mkv", picture_frames(17, 64, 64, 3), 20, sound=tone(48000, 17 / 20))
    flags = {"recipe": "distilled"} | flags_of(film, tiny.lora)
    flags |= {"spatial_upsampler_path": tiny.spatial_upsampler} if "two_stage" in flags else {}
    setup = scripts(tiny, tp)
    dispatch(["prepare", *setup.words(**flags)])
    process, began = begun(setup, flags, folder), time.monotonic()
    assert exit_code(process) == 0, printed(folder)
    seconds = time.monotonic() - began
    return SimpleNamespace(setup=setup, flags=flags, written=written(folder), seconds=seconds, name=request.param)


def begun(setup: Setup, flags: dict, folder: Path, **more):
    name = "out.wav" if "sound_only" in flags else "out.mp4"
    own = {"prompt": "a red fox", "output_path": folder / name, "save_tensors": folder / "out.safetensors"}
    command = setup.command("src/generate_ltx23.py", **flags | own | more)
    with open(folder / "printed", "w") as file:
        return warm_python.begun(command, ROOT, file, file)


def exit_code(process) -> int | None:
    process.join(allowed(SCRIPT_SECONDS))
    return process.exitcode


def printed(folder: Path) -> str:
    return (folder / "printed").read_text()[-2000:]


def written(folder: Path) -> dict[str, bytes]:
    """Video or sound, and the tensors that are made, which a resumed run saves as well: not the text's hidden states,
    and not what is encoded of the files."""
    outputs, tensors = folder.glob("out.[mw]*"), load_file(folder / "out.safetensors")
    kept = {name for name in tensors if re.match(r"s\d_(?!reference)|w\d_|frames|waveform", name)}
    return {path.suffix: path.read_bytes() for path in outputs} | {n: tensors[n].numpy().tobytes() for n in kept}


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_job_leaves_nothing_behind_and_is_resumed_to_the_same_bytes(run, number, tmp_path):
    """Three of four times a rank is killed, if there are ranks then; else the host."""
    chance, before = random.Random(f"{SEED} {number} {run.name}"), shared_memories()
    moment = run.seconds * chance.uniform(DENOISING if number % 2 else 0, 1)
    process = begun(run.setup, run.flags, tmp_path)
    time.sleep(moment)
    try:
        descendants = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        descendants = []
    ranks = ranks_of(process.pid)
    victim = chance.choice(ranks) if number % 4 and ranks else process.pid
    if process.is_alive():
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code = exit_code(process)
    assert time.monotonic() - killed < allowed(SOON) and ended(descendants, SOON)
    wait_for(lambda: shared_memories() <= before, allowed(SOON))
    if code and victim != process.pid:
        assert "failed: the process was killed" in printed(tmp_path)
    if code:  # else it had done its work
        assert exit_code(begun(run.setup, run.flags, tmp_path, resume=True)) == 0, printed(tmp_path)
    assert written(tmp_path) == run.written
    assert {path.suffix for path in tmp_path.iterdir()} & {".partial", ".log"} == set()
    assert not [*tmp_path.glob("*.resume.*")]
