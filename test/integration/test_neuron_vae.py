"""Decoding on the ranks (--neuron-vae): the host decoder's frames, and nothing loaded twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers import randn, rel

from ltx_neuron.backends.torchdist import Ranks
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.residency import Residency
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

# Tiles of 2 x 2 latents, the smallest that ltx-core takes, of 3 frames; they overlap by one.
TILES = ("vae_tile=64", "vae_overlap=32", "vae_tile_frames=24", "vae_overlap_frames=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def opened(tiny, folder, tp: int, dtype: str = "float32", *settings: str) -> Workspace:
    profile = resolve("cpu", (*TILES, *settings))
    return Workspace(tiny.checkpoint, profile, folder, tp, dtype, tiny.gemma_root)


@contextmanager
def decoding(workspace: Workspace, *clips: tuple[int, int, int]) -> Iterator[SimpleNamespace]:
    """The video decoder on running ranks for clips of these latents, and the host's models."""
    workspace.shard_vae()
    programs = {}
    for clip in clips:
        workspace.compile_vae(clip)
        programs |= workspace.tile_programs(clip)
    residency = Residency(workspace, Recorder())
    config, profile = workspace.checkpoint.config, workspace.profile
    host = HostModels(workspace.checkpoint_path, config, workspace.dtype, profile=profile)
    try:
        yield SimpleNamespace(host=host, tiles=residency.video_decoder(programs))
    finally:
        residency.close()


def frames_of(chunks: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(chunks))


# By what it is: the clip's latents, and how many tiles they are.
CLIPS = {
    "one tile": ((3, 2, 2), 1),
    "fewer tiles than four ranks": ((3, 3, 2), 2),
    "an odd number of tiles": ((3, 2, 4), 3),
    "borders in rows, columns and time": ((6, 3, 3), 12),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_frames_are_the_host_decoders(tiny, folder, tp):
    from ltx_neuron.host.tiles import cut, tiling

    workspace = opened(tiny, folder, tp)
    with decoding(workspace, *(clip for clip, _ in CLIPS.values())) as made:
        for what, (clip, tiles) in CLIPS.items():
            latent = randn(1, 128, *clip)
            assert len(cut(clip, tiling(workspace.profile))) == tiles, what
            wanted = frames_of(made.host.decode_video(latent))
            got = frames_of(made.host.decode_video(latent, made.tiles))
            assert got.shape == wanted.shape and got.dtype == torch.uint8, what
            assert (got.int() - wanted.int()).abs().max() <= 1, what
            assert wanted.float().std() > 10, what  # not one colour


def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16(tiny, folder):
    clip = (4, 3, 3)
    latent = randn(1, 128, *clip).bfloat16()
    with decoding(opened(tiny, folder, 2, "bfloat16"), clip) as made:
        decoder, tiling = made.host._tiled_decoder(clip, made.tiles)
        ours = torch.cat([*decoder.tiled_decode(latent, tiling)], dim=2)
        theirs = made.host._spec("video_decoder").load()  # ltx-core's own, as it is stored
    exact = torch.cat([*theirs.float().tiled_decode(latent.float(), tiling)], dim=2)
    theirs = torch.cat([*theirs.bfloat16().tiled_decode(latent, tiling)], dim=2).float()
    assert rel(ours, exact) <= rel(theirs, exact)


# --- a batch --------------------------------------------------------------------------------------

SIZE = Size(64, 64, 9, two_stage=True)
JOBS = [Job(prompt, SIZE, seed) for seed, prompt in enumerate(("birds sing", "a red fox", "waves"))]


@pytest.fixture(scope="module")
def prepared(tiny, folder):
    """A workspace of the batch's, with everything made."""

    def prepare(*settings: str) -> Workspace:
        workspace = opened(tiny, folder, 2, "float32", *settings)
        workspace.shard_gemma3()
        workspace.shard_dit()
        workspace.shard_vae()
        workspace.compile_text()
        workspace.compile_dit([SIZE.bucket(stage, ()) for stage in JOBS[0].stages])
        workspace.compile_vae((2, 2, 2))
        return workspace

    return prepare


def options(tiny, **more) -> RunOptions:
    given = {"neuron_gemma": True, "neuron_vae": True}
    return RunOptions(spatial_upsampler_path=tiny.spatial_upsampler, **(given | more))


class Phases(Recorder):
    """A recorder that notes the phases in the order in which they begin."""

    def __init__(self):
        super().__init__()
        self.begun = []

    @contextmanager
    def phase(self, name: str):
        self.begun.append(name)
        with super().phase(name):
            yield


DENOISE = ["denoise_stage_1", "upsample", "denoise_stage_2"]
DECODE = ["decode_video", "decode_audio"]
ORDER = {
    # The decoder takes the transformer's place once, when all latents are there.
    "resident=false": [*3 * DENOISE, "unload_transformer", "load_vae", *3 * DECODE],
    "resident=true": [*DENOISE, "load_vae", *DECODE, *2 * [*DENOISE, *DECODE]],
}


@pytest.mark.parametrize("setting", ORDER)
def test_a_batch_loads_every_model_once_and_its_frames_are_the_host_decoders(
    tiny, prepared, setting, monkeypatch
):
    workspace, phases, loaded = prepared(setting), Phases(), []
    call = Ranks._call

    def seen(ranks, patience, **message):
        loaded.append(message.get("weights"))
        return call(ranks, patience, **message)

    monkeypatch.setattr(Ranks, "_call", seen)
    results = run(workspace, phases, options(tiny))
    loads = [folder for folder in loaded if folder]
    assert sorted(loads) == sorted(set(loads)) and len(loads) == 3
    begun = phases.begun[phases.begun.index("denoise_stage_1") :]
    squeezed = [name for i, name in enumerate(begun) if begun[i - 1 : i] != [name]]
    assert squeezed == ORDER[setting]
    host = run(workspace, Recorder(), options(tiny, neuron_vae=False))
    for got, wanted in zip(results, host, strict=True):
        assert torch.equal(got.tensors["s2_video"], wanted.tensors["s2_video"])
        assert torch.equal(got.waveform, wanted.waveform)
        assert (got.frames.int() - wanted.frames.int()).abs().max() <= 1


def run(workspace: Workspace, recorder: Recorder, options: RunOptions) -> list:
    with Engine(workspace, recorder, options) as engine:
        engine.progress = False
        return list(engine.run(JOBS))
