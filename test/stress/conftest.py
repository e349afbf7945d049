"""Jobs of every kind on compiled graphs, which tests kill, pause and starve."""

import re
import time
from types import SimpleNamespace

import pytest
import warm_python
from conftest import ROOT, SCRIPT_SECONDS
from helpers import allowed, made_film
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch

ONE = {"height": 64, "width": 64, "num_frames": 9}
TWO = ONE | {"two_stage": True}
HEARD = {"recipe": "dev", "num_inference_steps": 3, "audio_stg_guidance_scale": 0}
GUIDED = ONE | HEARD | {"video_stg_guidance_scale": 0}
DUB = {"height": 64, "width": 64, "two_stage": True}
# Ranks, and the flags of each kind's job, whose film and LoRA are files.
KINDS = {
    "four ranks": (4, lambda film, lora: TWO),
    "context groups": (2, lambda film, lora: GUIDED | {"profile_set": ("context_parallel=2",)}),
    "guidance groups": (2, lambda film, lora: GUIDED | {"profile_set": ("guidance_parallel=2",)}),
    "a voice": (2, lambda film, lora: TWO | {"reference_audio": film, "ic_lora": ((lora, 1),)}),
    "a dub": (2, lambda film, lora: DUB | {"reference_video": film, "lora": ((lora, 1),)}),
    "a negative prompt": (2, lambda film, lora: TWO | {"nag_scale": 11, "negative_prompt": "dust"}),
    "sound alone": (2, lambda film, lora: HEARD | {"num_frames": 30, "frame_rate": 30, "sound_only": True}),
    "a longer video": (2, lambda film, lora: {"video_path": film, "extend": 1}),
    "decoding on the ranks": (2, lambda film, lora: TWO | {"neuron_vae": True}),
}


@pytest.fixture(scope="module", params=KINDS)
def run(request, scripts, tiny, tmp_path_factory) -> SimpleNamespace:
    """A kind's job: `begun` starts it in a folder, `finish` waits for its end and returns the video or sound and the
    tensors that a resumed run makes as well. `written` is that of an undisturbed run, which takes so many seconds."""
    folder, (tp, flags_of) = tmp_path_factory.mktemp("undisturbed"), KINDS[request.param]
    film = made_film(folder / "film.mp4", 17, 64, 64)
    flags = {"recipe": "distilled", "prompt": "a red fox"} | flags_of(film, tiny.lora)
    flags |= {"spatial_upsampler_path": tiny.spatial_upsampler} if "two_stage" in flags else {}
    setup, name = scripts(tiny, tp), "out.wav" if "sound_only" in flags else "out.mp4"
    dispatch(["prepare", *map(str, setup.words(**flags))])

    def begun(folder, **more):
        files = {"output_path": folder / name, "save_tensors": folder / "out.safetensors"}
        command = setup.command("src/generate_ltx23.py", **flags, **files, **more)
        with open(folder / "printed", "w") as file:
            return warm_python.begun(command, ROOT, file, file)

    def finish(folder, process) -> dict[str, bytes]:
        process.join(allowed(SCRIPT_SECONDS))
        assert process.exitcode == 0, (folder / "printed").read_text()[-2000:]
        tensors = load_file(folder / "out.safetensors")
        made = [key for key in tensors if re.match(r"s\d_(?!reference)|w\d_|frames|waveform", key)]
        return {name: (folder / name).read_bytes()} | {key: tensors[key].numpy().tobytes() for key in made}

    began = time.monotonic()
    written = finish(folder, begun(folder))
    seconds = time.monotonic() - began
    return SimpleNamespace(begun=begun, finish=finish, written=written, seconds=seconds, name=request.param)
