"""Decoding on the ranks (--neuron-vae) at other degrees, of more lengths, in bfloat16, and in runs
that something happens to."""

import json
import os
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import randn, rel
from rank_decoding import (
    CLIPS,
    FRAME_COUNTS,
    JOBS,
    ON_RANKS,
    SOUND,
    at_the_first_tiles,
    check_frames,
    check_nothing_is_left,
    check_sound,
    decoding,
    frames_of,
    make,
    opened,
    prepared,
    same_threads,  # noqa: F401
)

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.tiles import RankSound, RankTiles
from ltx_neuron.engine.outputs import LOG_SUFFIX
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.resume import SUFFIX
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import RunError
from ltx_neuron.host.tiles import tiling_for_ranks
from ltx_neuron.report.recorder import Recorder


@pytest.mark.parametrize("tp", [1, 4])
def test_frames_are_the_host_decoders(tiny, artifacts, tp):
    check_frames(opened(tiny, artifacts, tp), *CLIPS)


def test_sound_is_the_hosts_in_float32_whatever_the_dtype(tiny, artifacts):
    """Of one latent, fewer spans than there are ranks; of one more than a span has; and of more
    spans than there are ranks."""
    check_sound(opened(tiny, artifacts, 2, "bfloat16", ON_RANKS), 1, 58, 100)


def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16(tiny, artifacts):
    clip = (4, 3, 3)
    latent = randn(1, 128, *clip).bfloat16()
    with decoding(opened(tiny, artifacts, 2, "bfloat16"), clip) as made:
        tiling = tiling_for_ranks(made.host.profile, clip, made.tiles.tp)
        ours = torch.cat([*made.host._decoded_in_tiles(latent, made.tiles)], dim=2)
        theirs = made.host._spec("video_decoder").load()  # ltx-core's own, as it is stored
    exact = torch.cat([*theirs.float().tiled_decode(latent.float(), tiling)], dim=2)
    theirs = torch.cat([*theirs.bfloat16().tiled_decode(latent, tiling)], dim=2).float()
    assert rel(ours, exact) <= rel(theirs, exact)


def test_sound_and_pictures_are_decoded_side_by_side_on_the_ranks(tiny, artifacts):
    """Whichever thread comes first loads the decoders."""
    workspace = prepared(tiny, artifacts, "overlap_decode=true", ON_RANKS)
    with Engine(workspace, Recorder(), RunOptions(neuron_vae=True)) as engine:
        engine.progress = False
        results = list(engine.run(JOBS))
    for result in results:
        frames = frames_of(engine.host.decode_video(result.tensors["s1_video"]))
        assert (result.frames.int() - frames.int()).abs().max() <= FRAME_COUNTS
        assert rel(result.waveform, engine.host.decode_audio(result.tensors["s1_audio"])) < SOUND


# --- what breaks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tiny, artifacts) -> Workspace:
    return prepared(tiny, artifacts, ON_RANKS)


@pytest.fixture(scope="module")
def stopped(workspace, tmp_path_factory) -> SimpleNamespace:
    """A run whose rank 1 was killed while it decoded: its error, its state, what was left, and the
    frames that --resume makes of it."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError) as error:
        at_the_first_tiles(patch, lambda ranks: ranks._processes[1].kill())
        make(workspace, folder / "fox.mp4")
    left, state = sorted(path.name for path in folder.iterdir()), folder / f"fox{SUFFIX}"
    kept = state.read_bytes()
    make(workspace, folder / "fox.mp4", resume=True)
    return SimpleNamespace(error=str(error.value), left=left, state=kept, video=(folder / "fox.mp4").read_bytes())


@pytest.fixture
def resumed(workspace, stopped, tmp_path):
    """Decode the stopped run's latents again, in a folder of their own."""
    (tmp_path / f"fox{SUFFIX}").write_bytes(stopped.state)
    return lambda: make(workspace, tmp_path / "fox.mp4", resume=True)


def test_a_rank_killed_while_it_decodes_is_named_and_the_latents_are_kept(stopped):
    assert "rank 1 of 2 failed: the process was killed (SIGKILL)" in stopped.error
    assert stopped.left == [f"fox{LOG_SUFFIX}", f"fox{SUFFIX}"]


@pytest.mark.parametrize("decoder", ["spectrogram", "waveform"])
def test_a_rank_killed_in_a_sound_decoder_is_named_and_the_rest_is_decoded_again_to_the_same_bytes(
    resumed, stopped, tmp_path, monkeypatch, decoder
):
    with monkeypatch.context() as patch:
        kill = lambda ranks: ranks._processes[1].kill()  # noqa: E731
        ranks = at_the_first_tiles(patch, kill, RankSound, decoder)
        with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
            resumed()
    check_nothing_is_left(tmp_path, ranks, f"fox{LOG_SUFFIX}")
    resumed()
    assert (tmp_path / "fox.mp4").read_bytes() == stopped.video
    phases = json.loads((tmp_path / "fox.json").read_text())["seconds"]
    assert "load_vae" in phases and "load_transformer" not in phases


def test_nan_in_a_tile_names_the_decoder_and_its_file(resumed, tiny, tmp_path, monkeypatch):
    decode, poisoned = RankTiles.__call__, []

    def broken(tiles, latents):
        poisoned.append(tiles.ranks)
        latents[-1] = latents[-1] * float("nan")
        return decode(tiles, latents)

    monkeypatch.setattr(RankTiles, "__call__", broken)
    with pytest.raises(RunError) as error:
        resumed()
    assert "NaN or Inf in the outputs of the video decoder" in str(error.value)
    assert str(tiny.checkpoint) in str(error.value)
    check_nothing_is_left(tmp_path, poisoned, f"fox{LOG_SUFFIX}")


def test_ctrl_c_while_the_ranks_decode_ends_them_and_keeps_the_latents(resumed, tmp_path, monkeypatch):
    ranks = at_the_first_tiles(monkeypatch, lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        resumed()
    check_nothing_is_left(tmp_path, ranks)


def test_a_disk_that_fills_up_while_the_ranks_decode_keeps_the_latents(workspace, stopped, small_disk, monkeypatch):
    (small_disk / f"fox{SUFFIX}").write_bytes(stopped.state)

    def fill(_) -> None:
        with suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    ranks = at_the_first_tiles(monkeypatch, fill)
    with pytest.raises(OSError, match="No space left"):
        make(workspace, small_disk / "fox.mp4", resume=True)
    check_nothing_is_left(small_disk, ranks, "filler")
