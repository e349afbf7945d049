"""Decoding on the ranks (--neuron-vae) at other degrees, of more lengths, in bfloat16, and in runs
that something happens to."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import randn, rel
from rank_decoding import (
    CLIP,
    JOBS,
    ON_RANKS,
    SIZE,
    decoding,
    opened,
    prepared,
    same_threads,  # noqa: F401
)

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.tiles import RankSound, RankTiles
from ltx_neuron.commands.generate import generate
from ltx_neuron.engine.outputs import LOG_SUFFIX, OutputPaths
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.residency import Residency
from ltx_neuron.engine.resume import SUFFIX
from ltx_neuron.errors import RunError
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.tiles import tiling_for_ranks
from ltx_neuron.report.recorder import Recorder

SOUND_OF_NOISE = 1e-5


def test_sound_is_the_hosts_in_float32_whatever_the_dtype(tiny, artifacts):
    """Of one latent, fewer spans than there are ranks; of one more than a span has; and of more
    spans than there are ranks."""
    workspace, programs, recorder = opened(tiny, artifacts, 2, "bfloat16", ON_RANKS), {}, Recorder()
    build.make(workspace, workspace.weight_sets("vae"))
    build.make(workspace, workspace.decoder_graphs(CLIP))
    for latents in (lengths := (1, 58, 100)):
        build.make(workspace, workspace.sound_graphs(latents, SIZE))
        programs |= workspace.programs(workspace.sound_graphs(latents, SIZE))
    residency = Residency(workspace, recorder)
    host = HostModels(workspace.checkpoint_path, workspace.checkpoint.config, workspace.dtype)
    try:
        # As sound's thread does where it comes first: loading is a phase of its own.
        with recorder.phase("decode_audio"):
            pictures = workspace.programs(workspace.decoder_graphs(CLIP))
            on_ranks = residency.sound_decoder({"vae": pictures, "sound": programs})
        for latents in lengths:
            latent = randn(1, 8, latents, 16, seed=latents)
            wanted, got = host.decode_audio(latent), host.decode_audio(latent, on_ranks)
            assert got.shape == wanted.shape == (2, (4 * latents - 3) * 480)
            assert 1e-3 < wanted.abs().max() < 1
            assert rel(got, wanted) < SOUND_OF_NOISE, latents
    finally:
        residency.close()
    assert len(build.check_bytes(workspace, workspace.weight_sets("vae"))) == 3


def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16(tiny, artifacts):
    clip = (4, 3, 3)
    latent = randn(1, 128, *clip).bfloat16()
    with decoding(opened(tiny, artifacts, 2, "bfloat16"), clip) as on_ranks:
        tiling = tiling_for_ranks(on_ranks.host.profile, clip, on_ranks.tiles.tp)
        ours = torch.cat([*on_ranks.host._decoded_in_tiles(latent, on_ranks.tiles)], dim=2)
        theirs = on_ranks.host._spec("video_decoder").load()  # ltx-core's own, as it is stored
    exact = torch.cat([*theirs.float().tiled_decode(latent.float(), tiling)], dim=2)
    theirs = torch.cat([*theirs.bfloat16().tiled_decode(latent, tiling)], dim=2).float()
    assert rel(ours, exact) <= rel(theirs, exact)


# --- what breaks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tiny, artifacts) -> Workspace:
    return prepared(tiny, artifacts, ON_RANKS)


def make(workspace: Workspace, folder, **outputs) -> bytes:
    """What generate_ltx23.py does for a job, in this process."""
    video = folder / "fox.mp4"
    generate(JOBS[0], workspace, RunOptions(neuron_vae=True), OutputPaths(video=video, **outputs))
    return video.read_bytes()


def at_the_first_tiles(patch: pytest.MonkeyPatch, act, decoder: type = RankTiles, method: str = "__call__") -> list:
    """Have something happen to the ranks before they get their first tiles, or their first spans of
    sound. Returns them, once they are there."""
    decode, seen = getattr(decoder, method), []

    def disturbed(on_ranks, parts):
        if not seen:
            seen.append(on_ranks.ranks)
            act(on_ranks.ranks)
        return decode(on_ranks, parts)

    patch.setattr(decoder, method, disturbed)
    return seen


def kill(ranks) -> None:
    ranks._processes[1].kill()


@pytest.fixture(scope="module")
def stopped(workspace, tmp_path_factory) -> SimpleNamespace:
    """A run whose rank 1 was killed while it decoded: its state, and the video that --resume makes of
    it."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        at_the_first_tiles(patch, kill)
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: the process was killed \(SIGKILL\)"):
            make(workspace, folder)
    assert sorted(path.name for path in folder.iterdir()) == [f"fox{LOG_SUFFIX}", f"fox{SUFFIX}"]
    state = (folder / f"fox{SUFFIX}").read_bytes()
    return SimpleNamespace(state=state, video=make(workspace, folder, resume=True))


def test_a_stopped_run_whose_sound_decoder_loses_a_rank_too_is_decoded_again_to_the_same_bytes(
    workspace, stopped, tmp_path, monkeypatch
):
    for decoder in ("spectrogram", "waveform"):
        (tmp_path / f"fox{SUFFIX}").write_bytes(stopped.state)
        with monkeypatch.context() as patch:
            ranks = at_the_first_tiles(patch, kill, RankSound, decoder)
            with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
                make(workspace, tmp_path, resume=True)
        check_nothing_is_left(tmp_path, ranks, f"fox{LOG_SUFFIX}")
    assert make(workspace, tmp_path, resume=True) == stopped.video
    phases = json.loads((tmp_path / "fox.json").read_text())["seconds"]
    assert "load_vae" in phases and "load_transformer" not in phases


def poison(patch: pytest.MonkeyPatch) -> list:
    decode, ranks = RankTiles.__call__, []

    def broken(tiles, latents):
        ranks.append(tiles.ranks)
        latents[-1] = latents[-1] * float("nan")
        return decode(tiles, latents)

    patch.setattr(RankTiles, "__call__", broken)
    return ranks


def interrupt(patch: pytest.MonkeyPatch) -> list:
    return at_the_first_tiles(patch, lambda _: os.kill(os.getpid(), signal.SIGINT))


@pytest.mark.parametrize(
    ("disturb", "error", "message", "log"),
    [
        (poison, RunError, "NaN or Inf in the outputs of the video decoder", [f"fox{LOG_SUFFIX}"]),
        (interrupt, KeyboardInterrupt, "", []),
    ],
    ids=["NaN in a tile", "Ctrl-C"],
)
def test_a_decoding_that_breaks_off_ends_the_ranks_and_keeps_the_latents(
    workspace, stopped, tiny, tmp_path, monkeypatch, disturb, error, message, log
):
    (tmp_path / f"fox{SUFFIX}").write_bytes(stopped.state)
    ranks = disturb(monkeypatch)
    with pytest.raises(error, match=message) as caught:
        make(workspace, tmp_path, resume=True)
    assert error is KeyboardInterrupt or str(tiny.checkpoint) in str(caught.value)
    check_nothing_is_left(tmp_path, ranks, *log)


def check_nothing_is_left(folder, ranks: list, *more: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"fox{SUFFIX}", *more])
    assert not any(process.is_alive() for process in ranks[0]._processes)
