"""A dubbing job that is killed (-9) where each of its files gets its name, before and after that:
first there is a temporary file, then a file that the next run must not trust for more than it is.
test/stress/test_kill_jobs.py kills all kinds of jobs at random moments."""

import re
import signal

import pytest
import warm_python
from conftest import ROOT, SCRIPT_SECONDS
from helpers import allowed, picture_frames, shared_memories, tone, wait_for, write_film
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch

SOON = 10  # seconds until nothing of a killed run is there: docs/failures.md
FILES = ["resume.safetensors", "resume.safetensors", "safetensors", "mp4", "json"]  # in this order


@pytest.mark.timeout(4 * SCRIPT_SECONDS)
def test_a_dub_killed_at_each_file_leaves_nothing_behind_and_is_resumed_to_the_same_bytes(scripts, tiny, tmp_path):
    setup, film = scripts(tiny, 2), tmp_path / "film.mkv"
    write_film(film, picture_frames(17, 64, 64, 3), 20, sound=tone(48000, 17 / 20))
    flags = {"recipe": "distilled", "height": 64, "width": 64, "two_stage": True}
    flags |= {"reference_video": film, "lora": ((tiny.lora, 1),), "prompt": "a red fox says hello"}
    flags |= {"spatial_upsampler_path": tiny.spatial_upsampler}
    dispatch(["prepare", *setup.words(**{k: x for k, x in flags.items() if k != "prompt"})])

    def run(folder, *hook, **more) -> int:
        files = {"output_path": folder / "a.mp4", "save_tensors": folder / "a.safetensors"}
        command = setup.command("src/generate_ltx23.py", **flags, **files, **more)
        command = [str(ROOT / "test/killed.py"), str(folder), *hook, *command] if hook else command
        folder.mkdir(exist_ok=True)
        with open(tmp_path / "said", "w") as file:
            process = warm_python.begun(command, ROOT, file, file)
            process.join(SCRIPT_SECONDS)
        return process.exitcode

    def written(folder) -> dict:
        tensors = load_file(folder / "a.safetensors")
        kept = [n for n in tensors if re.match(r"s\d_(?!reference)|frames|waveform", n)]
        made = {name: tensors[name].numpy().tobytes() for name in kept}
        return made | {"video": (folder / "a.mp4").read_bytes()}

    assert run(tmp_path / "undisturbed") == 0, (tmp_path / "said").read_text()
    folder, before, skip, killed = tmp_path / "out", shared_memories(), 0, []
    while not killed or killed[-1] != ("json", "after"):
        for when in "before", "after":
            code = run(folder, str(skip), when, resume=True)
            assert code == -signal.SIGKILL, (killed, (tmp_path / "said").read_text())
            name = (tmp_path / "out.killed").read_text().removeprefix("a.")
            killed.append((name, when))
        skip += name != "resume.safetensors"  # a resumed run does not write that one again
    assert [name for name, when in killed if when == "after"] == FILES
    assert run(folder, resume=True) == 0
    assert written(folder) == written(tmp_path / "undisturbed")
    assert {path.name for path in folder.iterdir()} == {"a.mp4", "a.json", "a.safetensors"}
    wait_for(lambda: shared_memories() <= before, allowed(SOON))
