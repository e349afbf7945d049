"""Decoding on the ranks (--neuron-vae), for the tests of it: workspaces, and clips with their numbers of tiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from jobs import make_job

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.residency import Residency
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.report.latency import Recorder

# Tiles of 2 x 2 latents, the smallest that ltx-core takes, of 3 frames; they overlap by one.
TILES = ("vae_tile=64", "vae_overlap=32", "vae_tile_frames=24", "vae_overlap_frames=8")
# By what it is: the clip's latents, and how many tiles they are.
CLIPS = {
    "one tile": ((3, 2, 2), 1),
    "an odd number of tiles": ((3, 2, 4), 3),
    "borders in rows, columns and time": ((4, 3, 3), 8),
}
SIZE = Size(64, 96, 9)
CLIP = (2, 2, 3)  # its latents: two tiles, one for each of two ranks
JOBS = [make_job(prompt, SIZE, seed) for seed, prompt in enumerate(("birds sing", "a red fox"))]
SOUND = 5e-5  # from the latents of a run: random layers answer a rounding with ten of it
ON_RANKS = "sound_on_ranks=true"


@pytest.fixture(autouse=True)
def same_threads():
    """Import it: engines set the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def opened(tiny, folder, tp: int, dtype: str = "float32", *settings: str) -> Workspace:
    profile = resolve("cpu", (*TILES, "blocks_per_graph=1", *settings))
    return Workspace(tiny.checkpoint, profile, folder, tp, dtype, tiny.gemma_root)


def prepared(tiny, artifacts, *settings: str) -> Workspace:
    """A workspace of two ranks with all that JOBS need."""
    workspace = opened(tiny, artifacts, 2, "float32", *settings)
    needs = [workspace.weight_sets("dit"), workspace.weight_sets("vae")]
    needs += [workspace.dit_graphs(JOBS[0].buckets), workspace.decoder_graphs(CLIP)]
    needs += [workspace.sound_graphs(SIZE.audio_frames, SIZE)] if workspace.profile.sound_on_ranks else []
    for need in needs:
        build.make(workspace, need)
    return workspace


@contextmanager
def decoding(workspace: Workspace, *clips: tuple[int, int, int]) -> Iterator[SimpleNamespace]:
    """The video decoder on running ranks for clips of these latents, and the host's models."""
    build.make(workspace, workspace.weight_sets("vae"))
    programs = {}
    for clip in clips:
        build.make(workspace, workspace.decoder_graphs(clip))
        programs |= workspace.programs(workspace.decoder_graphs(clip))
    residency, checkpoint = Residency(workspace, Recorder()), workspace.checkpoint
    host = HostModels(workspace.checkpoint_path, checkpoint.config, workspace.dtype, profile=workspace.profile)
    try:
        yield SimpleNamespace(host=host, tiles=residency.video_decoder({"vae": programs}))
    finally:
        residency.close()


def frames_of(chunks: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(chunks))
