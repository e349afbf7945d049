"""Decoding on the ranks (--neuron-vae): sound of more lengths, bfloat16, and runs that something happens to."""

import json
import os
import signal
from contextlib import closing
from unittest import mock

import pytest
import torch
from helpers import randn, rel
from rank_decoding import CLIP, JOBS, ON_RANKS, SIZE, decoding, opened, prepared, same_threads  # noqa: F401

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.tiles import RankSound, RankTiles
from ltx_neuron.commands.generate import generate
from ltx_neuron.engine.outputs import LOG_SUFFIX, SUFFIX, OutputPaths
from ltx_neuron.engine.residency import Residency
from ltx_neuron.errors import RunError
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.tiles import tiling_for_ranks
from ltx_neuron.report.latency import Recorder


def test_sound_is_the_hosts_in_float32_whatever_the_dtype(tiny, artifacts):
    """Of one latent, fewer spans than there are ranks; of one more than a span has; of more spans than ranks."""
    workspace, recorder, lengths = opened(tiny, artifacts, 2, "bfloat16", ON_RANKS), Recorder(), (1, 58, 100)
    graphs = [graph for latents in lengths for graph in workspace.sound_graphs(latents, SIZE)]
    for needs in (workspace.weight_sets("vae"), pictures := workspace.decoder_graphs(CLIP), graphs):
        build.make(workspace, needs)
    host = HostModels(workspace.checkpoint_path, workspace.checkpoint.config, workspace.dtype)
    with closing(Residency(workspace, recorder)) as residency:
        # As sound's thread does where it comes first: loading is a phase of its own.
        with recorder.phase("decode_audio"):
            programs = {"vae": workspace.programs(pictures), "sound": workspace.programs(graphs)}
            on_ranks = residency.sound_decoder(programs)
        for latents in lengths:
            latent = randn(1, 8, latents, 16, seed=latents)
            wanted, got = host.decode_audio(latent), host.decode_audio(latent, on_ranks)
            assert got.shape == wanted.shape == (2, (4 * latents - 3) * 480)
            assert 1e-3 < wanted.abs().max() < 1
            assert rel(got, wanted) < 1e-5, latents  # of noise
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


# How a run ends -> its message, and what happens before the ranks get their first parts
ENDS = {
    KeyboardInterrupt: (None, lambda ranks, parts: os.kill(os.getpid(), signal.SIGINT)),
    RankError: (r"rank 1 of 2 failed: the process was killed \(SIGKILL\)", lambda ranks, _: ranks._processes[1].kill()),
    RunError: ("NaN or Inf in the outputs of the video decoder", lambda _, got: got.append(got.pop() * torch.nan)),
}
# And of which decoder they are
BREAKS = [(end, RankTiles, "__call__") for end in ENDS]
BREAKS += [(RankError, RankSound, part) for part in ("spectrogram", "waveform")]


def test_a_run_that_breaks_off_while_it_decodes_is_decoded_again_to_the_same_bytes(tiny, artifacts, tmp_path):
    """It ends its ranks, and keeps the latents."""
    workspace, ranks, folder = prepared(tiny, artifacts, ON_RANKS), [], tmp_path / "broken"
    folder.mkdir()

    def make(video, **outputs) -> bytes:
        generate(JOBS[0], workspace, RunOptions(neuron_vae=True), OutputPaths(video=video, **outputs))
        return video.read_bytes()

    whole = make(tmp_path / "fox.mp4")
    for error, decoder, method in BREAKS:
        (message, act), decode = ENDS[error], getattr(decoder, method)

        def disturbed(on_ranks, parts, act=act, decode=decode):
            if on_ranks.ranks not in ranks:
                ranks.append(on_ranks.ranks)
                act(on_ranks.ranks, parts)
            return decode(on_ranks, parts)

        with mock.patch.object(decoder, method, disturbed), pytest.raises(error, match=message) as caught:
            make(folder / "fox.mp4", resume=True)
        assert error is not RunError or str(tiny.checkpoint) in str(caught.value)
        log = [] if error is KeyboardInterrupt else [f"fox{LOG_SUFFIX}"]
        assert sorted(path.name for path in folder.iterdir()) == [*log, f"fox{SUFFIX}"]
        assert not any(process.is_alive() for process in ranks[-1]._processes)
    assert len(ranks) == len(BREAKS) and make(folder / "fox.mp4", resume=True) == whole
    phases = json.loads((folder / "fox.json").read_text())["seconds"]
    assert "load_vae" in phases and "load_transformer" not in phases
