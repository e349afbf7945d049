"""A job of each kind, killed (-9) at random moments, its host or one of its ranks: it leaves no
process and no shared memory behind, and is resumed to the same bytes. test_kill_ranks.py kills
every rank of the plain recipes."""

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import warm_python
from conftest import ROOT, SCRIPT_SECONDS, Setup
from helpers import (
    allowed,
    ended,
    picture_frames,
    ranks_of,
    shared_memories,
    stress_count,
    tone,
    wait_for,
    write_film,
    write_sound,
)
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch

pytestmark = pytest.mark.timeout(8 * SCRIPT_SECONDS)
TP, KILLS, SEED = 2, stress_count(10), 1
SOON = 10  # seconds until nothing of a killed run is there: docs/failures.md
ONE = {"height": 64, "width": 64, "num_frames": 9}
TWO = ONE | {"two_stage": True}
HEARD = {"recipe": "dev", "num_inference_steps": 3, "audio_stg_guidance_scale": 0}
GUIDED = HEARD | {"video_stg_guidance_scale": 0}
# The flags of each kind's job. film, speech and lora are files.
KINDS = {
    "a voice": lambda files: TWO | {"reference_audio": files.sound, "ic_lora": ((files.lora, 1),)},
    "a dub": lambda files: (
        {"height": 64, "width": 64, "two_stage": True} | {"reference_video": files.film, "lora": ((files.lora, 1),)}
    ),
    "a negative prompt": lambda _: TWO | {"nag_scale": 11, "negative_prompt": "dust"},
    "sound alone": lambda _: HEARD | {"num_frames": 30, "frame_rate": 30, "sound_only": True},
    "a longer video": lambda files: {"video_path": files.film, "extend": 1},
    "guidance groups": lambda _: ONE | GUIDED | {"profile_set": ("guidance_parallel=2",)},
    "decoding on the ranks": lambda _: TWO | {"neuron_vae": True},
}


class Files(NamedTuple):
    """Of the jobs: a film of 17 frames with its sound, a sound, and a LoRA."""

    film: Path
    sound: Path
    lora: Path


class Run(NamedTuple):
    """A kind's job on compiled graphs, what it writes undisturbed, and in how many seconds."""

    setup: Setup
    flags: dict
    written: dict[str, bytes]
    seconds: float


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    film, sound = folder / "film.mkv", folder / "sound.wav"
    write_film(film, picture_frames(17, 64, 64, 3), 20, sound=tone(48000, 17 / 20))
    stored = (tone(44100, 1.5, 330.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(sound, stored, 44100, "pcm_s16le", "stereo", "s16")
    return Files(film, sound, tiny.lora)


@pytest.fixture(scope="module", params=KINDS)
def run(request, scripts, tiny, files, tmp_path_factory) -> Run:
    setup, flags = scripts(tiny, TP), KINDS[request.param](files)
    flags = {"recipe": "distilled"} | flags
    flags |= {"spatial_upsampler_path": tiny.spatial_upsampler} if "two_stage" in flags else {}
    dispatch(["prepare", *setup.words(**flags)])
    folder = tmp_path_factory.mktemp("undisturbed")
    process, began = begun(setup, flags, folder), time.monotonic()
    assert finished(process) == 0, said(folder)
    return Run(setup, flags, written(folder), time.monotonic() - began)


def begun(setup: Setup, flags: dict, folder: Path, **more):
    """The job's process, whose output is in a file beside its video."""
    name = "out.wav" if "sound_only" in flags else "out.mp4"
    own = {"prompt": "a red fox", "output_path": folder / name}
    own |= {"save_tensors": folder / "out.safetensors"}
    command = setup.command("src/generate_ltx23.py", **flags | own | more)
    with open(folder / "said", "w") as file:
        return warm_python.begun(command, ROOT, file, file)


def finished(process) -> int | None:
    """Its exit code; none where it does not end."""
    process.join(allowed(SCRIPT_SECONDS))
    return process.exitcode


def said(folder: Path) -> str:
    return (folder / "said").read_text()[-2000:]


def written(folder: Path) -> dict[str, bytes]:
    """Video or sound, and the tensors that are made, which a resumed run saves as well: not the
    text's hidden states, and not what is encoded of the files."""
    made = {path.suffix: path.read_bytes() for path in folder.glob("out.[mw]*")}
    tensors = load_file(folder / "out.safetensors")
    kept = {name for name in tensors if re.match(r"s\d_(?!reference)|w\d_|frames|waveform", name)}
    assert made and kept
    return made | {name: tensors[name].numpy().tobytes() for name in kept}


def descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_job_leaves_nothing_behind_and_is_resumed_to_the_same_bytes(run, number, tmp_path):
    """Every second time a rank is killed, if there are ranks then; else the host."""
    chance = random.Random(f"{SEED} {number} {sorted(run.flags)}")
    moment, before = chance.uniform(0, run.seconds), shared_memories()
    process = begun(run.setup, run.flags, tmp_path)
    time.sleep(moment)
    ranks, all_of_it = ranks_of(process.pid), [process.pid, *descendants(process.pid)]
    victim = chance.choice(ranks) if number % 2 and ranks else process.pid
    if process.is_alive():
        os.kill(victim, signal.SIGKILL)
    code = finished(process)
    assert ended(all_of_it[1:], SOON)
    wait_for(lambda: shared_memories() <= before, allowed(SOON))
    what = "the host" if victim == process.pid else "a rank"
    print(f"{what} killed after {moment:.2f} of {run.seconds:.2f} s: exit code {code}")
    if code:  # else it had done its work
        again = begun(run.setup, run.flags, tmp_path, resume=True)
        assert finished(again) == 0, said(tmp_path)
    assert written(tmp_path) == run.written
    left = {path.name for path in tmp_path.iterdir() if path.suffix in (".partial", ".log")}
    assert left == set() and not [*tmp_path.glob("*.resume.*")]
