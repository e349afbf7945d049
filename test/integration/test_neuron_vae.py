"""The VAEs on the ranks (--neuron-vae): the host's latents, frames and sound, and nothing loaded twice. Other lengths
and faults: test/slow/test_neuron_vae.py."""

import threading
from contextlib import contextmanager
from functools import cache
from itertools import groupby

import pytest
import torch
from helpers import picture_frames, randn, rel, rewrite, write_film
from jobs import replace
from rank_decoding import CLIPS, JOBS, ON_RANKS, SOUND, decoding, frames_of, opened, prepared
from rank_decoding import same_threads as same_threads

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.host.tiles import cut, tiling
from ltx_neuron.plan import CoreMemory
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.conditions import Retake

ON = RunOptions(neuron_vae=True)
ENCODED = 1e-5  # convolutions and norms sum in another order
FRAME_COUNTS = 1  # frames are cut to whole numbers
COLOURS = 10  # the standard deviation of frames that are not all of one colour


def test_frames_are_the_host_decoders(tiny, artifacts):
    workspace = opened(tiny, artifacts, 2)
    with decoding(workspace, *(clip for clip, _ in CLIPS.values())) as made:
        for name, (clip, tiles) in CLIPS.items():
            assert len(cut(clip, tiling(workspace.profile))) == tiles, name
            latent = randn(1, 128, *clip)
            wanted, got = (frames_of(made.host.decode_video(latent, tiles)) for tiles in (None, made.tiles))
            assert got.shape == wanted.shape and got.dtype == torch.uint8, name
            assert (got.int() - wanted.int()).abs().max() <= FRAME_COUNTS, name
            assert wanted.float().std() > COLOURS, name


class Phases(Recorder):
    """A recorder that notes the phases in the order in which they begin."""

    def __init__(self):
        super().__init__()
        self.begun = []

    @contextmanager
    def phase(self, name: str, shown: bool = True):
        self.begun.append(name)
        with super().phase(name, shown):
            yield


DENOISE, DECODE = ["denoise_stage_1"], ["decode_video", "decode_audio"]
ORDER = {
    # The decoder takes the transformer's place once, when all latents are there.
    "resident=false": [*DENOISE, "unload_transformer", "load_vae", *2 * DECODE],
    "resident=true": [*DENOISE, "load_vae", *DECODE, *DENOISE, *DECODE],
}


@pytest.mark.parametrize(("setting", "sound"), [("resident=false", ()), ("resident=true", (ON_RANKS,))])
def test_a_batch_loads_every_model_once_and_decodes_as_the_host_does(tiny, artifacts, setting, sound, monkeypatch):
    """The host decodes sound unless the profile places it on the ranks."""
    workspace, phases, loaded = prepared(tiny, artifacts, setting, *sound), Phases(), []
    call = TorchDistRanks._call

    def seen(ranks, method, **arguments):
        loaded.extend(filter(None, [arguments.get("weights")]))
        return call(ranks, method, **arguments)

    monkeypatch.setattr(TorchDistRanks, "_call", seen)
    with Engine(workspace, phases, ON) as engine:
        engine.progress = False
        results = list(engine.run(JOBS))
    folders = [workspace.dit_weights(), *map(workspace.weights, ("vae", *["sound"] * len(sound)))]
    begun = phases.begun[phases.begun.index("denoise_stage_1") :]
    assert sorted(loaded) == sorted(folders) and [name for name, _ in groupby(begun)] == ORDER[setting]
    for result in results:
        frames = frames_of(engine.host.decode_video(result.tensors["s1_video"]))
        assert (result.frames.int() - frames.int()).abs().max() <= FRAME_COUNTS
        distance = rel(result.waveform, engine.host.decode_audio(result.tensors["s1_audio"]))
        assert distance < SOUND and (distance > 0) == bool(sound)


def test_the_host_decodes_sound_while_the_ranks_decode_pictures(tiny, artifacts, monkeypatch):
    """Each waits for the other to have begun, so that one after the other would never end."""
    workspace, both, recorder = prepared(tiny, artifacts, "overlap_decode=true"), threading.Barrier(2), Recorder()
    run = TorchDistRanks.run

    @cache
    def meet(what: str) -> None:
        both.wait(timeout=60)

    def pictures(ranks, program, *given, **numbers):
        if program.startswith("vae-"):
            meet("pictures on the ranks")
        return run(ranks, program, *given, **numbers)

    monkeypatch.setattr(TorchDistRanks, "run", pictures)
    with Engine(workspace, recorder, ON) as engine:
        engine.progress, decode = False, engine.host.decode_audio

        def sound(latent, on_ranks):
            meet("sound on the host")
            return decode(latent, on_ranks)

        monkeypatch.setattr(engine.host, "decode_audio", sound)
        (result,) = engine.run(JOBS[:1])
    phases = {entry["name"]: entry for entry in recorder.report({}, "cpu", 2, {}, {})["phases"]}
    assert max(phases[name].get("overlapped_seconds", 0) for name in DECODE) > 0
    assert meet.cache_info().currsize == 2 and result.waveform.abs().max() > 0


def test_what_is_missing_or_cannot_be_run_is_refused_before_anything_loads(tiny, artifacts, tmp_path):
    with pytest.raises(UserError, match=r" shard vae --checkpoint-path"):
        opened(tiny, tmp_path, 2).weights("vae")
    workspace = prepared(tiny, artifacts)
    with pytest.raises(UserError, match=r" compile vae --checkpoint-path .* --height 64 --width 96 --num-frames 65"):
        workspace.programs(workspace.decoder_graphs((9, 2, 3)))
    changed = {"vae": workspace.checkpoint.config["vae"] | {"causal_decoder": True}}
    other = rewrite(tiny.checkpoint, tmp_path / "other.safetensors", lambda tensors: None, changed)
    causal = Workspace(other, workspace.profile, artifacts, 2, "float32", tiny.gemma_root)
    for options, message in ((ON, "vae.causal_decoder is True"), (RunOptions(), "shard transformer")):
        with pytest.raises(UserError, match=message):
            Engine(causal, Recorder(), options).preflight.check(JOBS)


def test_a_retake_is_encoded_beside_the_transformer_as_the_host_does(tiny, artifacts, tmp_path, monkeypatch, capsys):
    """Or by the host, where the encoder does not fit there."""
    workspace, latents = prepared(tiny, artifacts, "resident=true"), []
    film = write_film(tmp_path / "film.mkv", picture_frames(9, 64, 96, 3))
    job = replace(JOBS[0], retake=Retake(film, 0.1, 0.2))
    build.make(workspace, workspace.dit_graphs(job.buckets))
    with pytest.raises(UserError, match=r" compile vae .* --video-path .*film\.mkv"):
        Engine(workspace, Recorder(), ON).preflight.check([job])
    build.make(workspace, workspace.encoder_graphs(job))
    for options, second in ((RunOptions(), *DENOISE), (ON, "load_vae")):
        phases = Phases()
        with Engine(workspace, phases, options) as engine:
            engine.progress = False
            (result,) = engine.run([job], keep=True, decode=False)
            assert ("video_encoder" in vars(engine.host)) != options.neuron_vae
        latents.append(result.tensors)
        begun = [name for name in phases.begun if name in ("encode_inputs", "load_vae", *DENOISE)]
        assert begun[:2] == ["encode_inputs", second]
    for name in ("video_latent", "s1_video"):
        theirs, ours = (tensors[name] for tensors in latents)
        assert 0 < rel(ours, theirs) < ENCODED, name

    preflight, needed = Engine(workspace, Recorder(), ON).preflight, []
    preflight.check([job])
    assert preflight.encodes_on_ranks(job) and preflight.vae_stays

    def stays(memory: CoreMemory, profile) -> bool:
        """Only without the encoder, with which the first question comes."""
        needed.append(memory.video_decoder)
        return needed[-1] < max(needed)

    monkeypatch.setattr(CoreMemory, "vae_stays", stays)
    preflight.check([job])
    assert not preflight.encodes_on_ranks(job) and preflight.vae_stays
    assert "the video encoder does not fit beside the transformer" in capsys.readouterr().out
