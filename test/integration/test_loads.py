"""A batch of prompts, and both stages of each, load every model once; between the stages there is
the upsampler alone. The dev recipe: its stages have weights of their own."""

from collections import Counter
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import pytest
import torch
from batches import TP, prepared
from jobs import make_job

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.weights.lora import Lora
from ltx_neuron.weights.tensorfile import TensorFile

SIZE = Size(64, 64, 9, two_stage=True)
PROMPTS = ("birds sing", "waves crash on the shore", "a golden retriever")
GUIDANCE = Guidance(StreamGuidance(cfg_scale=2.0), StreamGuidance())
# The encoder's, the decoder's and the upsampler's own; tables of 128 rows, which are laid behind
# each prompt.
OF_SEVERAL = ("per_channel_statistics.", "learnable_registers")


class Event(NamedTuple):
    """Something that was loaded, in a phase of the run or in none."""

    phase: str | None
    what: str  # the files that ranks load, a tensor that the host reads, or "" for the phase itself


class Watched(Recorder):
    """A recorder that also notes what is loaded in which phase."""

    def __init__(self):
        super().__init__()
        self.events, self.now = [], None

    def note(self, what: object) -> None:
        self.events.append(Event(self.now, str(what)))

    @contextmanager
    def phase(self, name: str, shown: bool = True):
        with super().phase(name, shown):
            self.now = name
            self.note("")
            yield
            self.now = None


@pytest.fixture(scope="module")
def events(scripts, tiny) -> list[Event]:
    """What a batch of two-stage jobs loads, and the phases it goes through, in order."""
    how = {"recipe": "dev", "num_inference_steps": 2, "guidance": GUIDANCE, "stage_2_loras": (Lora(tiny.lora, 0.8),)}
    jobs = [make_job(prompt, SIZE, seed, **how) for seed, prompt in enumerate(PROMPTS)]
    threads, setup = torch.get_num_threads(), prepared(scripts, tiny)
    where = setup.artifacts, TP, "float32", tiny.gemma_root
    workspace = Workspace(tiny.checkpoint, resolve("cpu", setup.settings), *where)
    build.make(workspace, workspace.weight_sets("dit", {stage.loras for stage in jobs[0].stages}))
    build.make(workspace, workspace.dit_graphs(jobs[0].buckets))
    recorder, call, read = Watched(), TorchDistRanks._call, TensorFile.read

    def seen_call(ranks, method, **arguments):
        if "weights" in arguments:
            recorder.note(arguments["weights"])
        return call(ranks, method, **arguments)

    def seen_read(file, name, start=0, stop=None):
        # Reading single rows is looking up a prompt's tokens.
        if stop is None and not any(part in name for part in OF_SEVERAL):
            recorder.note(f"{file.path}: {name}")
        return read(file, name, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDistRanks, "_call", seen_call)
        patch.setattr(TensorFile, "read", seen_read)
        options = RunOptions(neuron_gemma=True, spatial_upsampler_path=tiny.spatial_upsampler)
        with Engine(workspace, recorder, options) as engine:
            engine.progress = False
            assert [len(result.frames) for result in engine.run(jobs)] == [SIZE.num_frames] * len(PROMPTS)
    torch.set_num_threads(threads)
    return recorder.events


def test_every_weight_is_loaded_once_and_the_hosts_in_the_phases_that_use_them(events, tiny):
    counts = Counter(event.what for event in events if event.what)
    assert {what: count for what, count in counts.items() if count != 1} == {}
    read = {what.split(": ")[1].split(".")[0] for what in counts if what.startswith(str(tiny.checkpoint))}
    assert read == {"vae", "audio_vae", "vocoder"}
    assert any(what.startswith(str(tiny.spatial_upsampler)) for what in counts)
    assert sum(": " not in what for what in counts) == 3  # Gemma3, the DiT, the DiT with the distilled LoRA
    files = str(tiny.checkpoint), str(tiny.spatial_upsampler)
    phases = {event.phase for event in events if event.what.startswith(files)}
    assert phases == {"upsample", "decode_video", "decode_audio"}
    decode, stages = ["decode_video", "decode_audio"], ["upsample", "denoise_stage_2"]
    wanted = [
        *("load_gemma3", "encode_text", "unload_gemma3", "load_transformer"),
        "denoise_stage_1",
        # Stage 1 of all, then the weights with the LoRA take the others' place.
        "load_transformer",
        *2 * [*stages, *decode],
        *stages,
        "unload_transformer",
        *decode,
    ]
    assert [phase for phase, _ in groupby(event.phase for event in events)] == wanted
