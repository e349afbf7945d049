"""Decoding on the ranks (--neuron-vae): the host decoder's frames, and nothing loaded twice."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import randn, rel, rewrite

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.tiles import RankSound, RankTiles
from ltx_neuron.backends.torchdist.host import Ranks
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.generate import Outputs, generate
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.progress import LOG_SUFFIX, SUFFIX
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.residency import Residency
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

# Tiles of 2 x 2 latents, the smallest that ltx-core takes, of 3 frames; they overlap by one.
TILES = ("vae_tile=64", "vae_overlap=32", "vae_tile_frames=24", "vae_overlap_frames=8")


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
    workspace.shard("vae")
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
    "borders in rows, columns and time": ((4, 3, 3), 8),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_frames_are_the_host_decoders(tiny, artifacts, tp):
    from ltx_neuron.host.tiles import cut, tiling

    workspace = opened(tiny, artifacts, tp)
    with decoding(workspace, *(clip for clip, _ in CLIPS.values())) as made:
        for what, (clip, tiles) in CLIPS.items():
            latent = randn(1, 128, *clip)
            assert len(cut(clip, tiling(workspace.profile))) == tiles, what
            wanted = frames_of(made.host.decode_video(latent))
            got = frames_of(made.host.decode_video(latent, made.tiles))
            assert got.shape == wanted.shape and got.dtype == torch.uint8, what
            assert (got.int() - wanted.int()).abs().max() <= 1, what
            assert wanted.float().std() > 10, what  # not one colour


# Latents of sound: of one span, of one that is as long as a rank's, of two, of fewer than four
# ranks, of more than four.
SOUND = 5e-5  # random layers answer a rounding with ten of it
SOUNDS = (1, 2, 13, 57, 58, 131)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "bfloat16"), (4, "float32")])
def test_sound_is_the_hosts_in_float32_whatever_the_dtype(tiny, artifacts, tp, dtype):
    workspace = opened(tiny, artifacts, tp, dtype)
    workspace.shard("vae")
    workspace.compile_vae(CLIP)
    programs = {}
    for latents in SOUNDS:
        workspace.compile_sound(latents)
        programs |= workspace.sound_programs(SIZE, latents)
    recorder = Recorder()
    residency = Residency(workspace, recorder)
    host = HostModels(tiny.checkpoint, workspace.checkpoint.config, workspace.dtype)
    try:
        # As sound's thread does where it comes first: loading is a phase of its own.
        with recorder.phase("decode_audio"):
            on_ranks = residency.sound_decoder(workspace.tile_programs(CLIP), programs)
        for latents in SOUNDS:
            latent = randn(1, 8, latents, 16, seed=latents)
            wanted, got = host.decode_audio(latent), host.decode_audio(latent, on_ranks)
            assert got.shape == wanted.shape == (2, (4 * latents - 3) * 480)
            assert 1e-3 < wanted.abs().max() < 1
            assert rel(got, wanted) < 1e-5, latents
    finally:
        residency.close()
    assert len(workspace.verify("vae")) == 2


def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16(tiny, artifacts):
    clip = (4, 3, 3)
    latent = randn(1, 128, *clip).bfloat16()
    with decoding(opened(tiny, artifacts, 2, "bfloat16"), clip) as made:
        decoder, tiling = made.host._tiled_decoder(clip, made.tiles)
        ours = torch.cat([*decoder.tiled_decode(latent, tiling)], dim=2)
        theirs = made.host._spec("video_decoder").load()  # ltx-core's own, as it is stored
    exact = torch.cat([*theirs.float().tiled_decode(latent.float(), tiling)], dim=2)
    theirs = torch.cat([*theirs.bfloat16().tiled_decode(latent, tiling)], dim=2).float()
    assert rel(ours, exact) <= rel(theirs, exact)


# --- a batch --------------------------------------------------------------------------------------

SIZE = Size(64, 96, 9)  # latents (2, 2, 3): two tiles, one for each of two ranks
CLIP = (2, 2, 3)
JOBS = [Job(prompt, SIZE, seed) for seed, prompt in enumerate(("birds sing", "a red fox"))]


@pytest.fixture(scope="module")
def prepared(tiny, artifacts):
    """A workspace of the batch's, with everything made."""

    def prepare(*settings: str) -> Workspace:
        workspace = opened(tiny, artifacts, 2, "float32", *settings)
        workspace.shard("dit")
        workspace.shard("vae")
        workspace.compile_dit(JOBS[0].buckets)
        workspace.compile_vae(CLIP)
        workspace.compile_sound(SIZE.audio_frames)
        return workspace

    return prepare


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


DENOISE = ["denoise_stage_1"]
DECODE = ["decode_video", "decode_audio"]
ORDER = {
    # The decoder takes the transformer's place once, when all latents are there.
    "resident=false": [*DENOISE, "unload_transformer", "load_vae", *2 * DECODE],
    "resident=true": [*DENOISE, "load_vae", *DECODE, *DENOISE, *DECODE],
}


@pytest.mark.parametrize("setting", ORDER)
def test_a_batch_loads_every_model_once_and_its_frames_are_the_host_decoders(
    prepared, setting, monkeypatch
):
    workspace, phases, loaded = prepared(setting), Phases(), []
    call = Ranks._call

    def seen(ranks, patience, method, **arguments):
        loaded.append(arguments.get("weights"))
        return call(ranks, patience, method, **arguments)

    monkeypatch.setattr(Ranks, "_call", seen)
    with Engine(workspace, phases, RunOptions(neuron_vae=True)) as engine:
        engine.progress = False
        results = list(engine.run(JOBS))
        assert not {"video_decoder", "audio_decoder", "vocoder"} & vars(engine.host).keys()
    folders = workspace.dit_weights(), workspace.weights("vae"), workspace.weights("sound")
    assert sorted(folder for folder in loaded if folder) == sorted(folders)
    begun = phases.begun[phases.begun.index("denoise_stage_1") :]
    squeezed = [name for i, name in enumerate(begun) if begun[i - 1 : i] != [name]]
    assert squeezed == ORDER[setting]
    for result in results:
        frames = frames_of(engine.host.decode_video(result.tensors["s1_video"]))
        assert (result.frames.int() - frames.int()).abs().max() <= 1


def test_sound_and_pictures_are_decoded_side_by_side_on_the_ranks(prepared):
    """Whichever thread comes first loads the decoders."""
    workspace = prepared("overlap_decode=true")
    with Engine(workspace, Recorder(), RunOptions(neuron_vae=True)) as engine:
        engine.progress = False
        results = list(engine.run(JOBS))
    for result in results:
        frames = frames_of(engine.host.decode_video(result.tensors["s1_video"]))
        assert (result.frames.int() - frames.int()).abs().max() <= 1
        assert rel(result.waveform, engine.host.decode_audio(result.tensors["s1_audio"])) < SOUND


# --- what is missing, and what breaks -------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(prepared) -> Workspace:
    return prepared()


def make(workspace: Workspace, video: Path, **outputs) -> None:
    """What generate_ltx23.py does for a job, in this process."""
    generate(JOBS[0], workspace, RunOptions(neuron_vae=True), Outputs(video=video, **outputs))


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
    return SimpleNamespace(
        error=str(error.value), left=left, state=kept, video=(folder / "fox.mp4").read_bytes()
    )


def at_the_first_tiles(
    patch: pytest.MonkeyPatch,
    act: Callable[[Ranks], None],
    decoder: type = RankTiles,
    method: str = "__call__",
) -> list[Ranks]:
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


@pytest.fixture
def resumed(workspace, stopped, tmp_path):
    """Decode the stopped run's latents again, in a folder of their own."""
    (tmp_path / f"fox{SUFFIX}").write_bytes(stopped.state)
    return lambda: make(workspace, tmp_path / "fox.mp4", resume=True)


def check_nothing_is_left(folder: Path, ranks: list[Ranks], *more: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"fox{SUFFIX}", *more])
    assert not any(process.is_alive() for process in ranks[0]._processes)


def test_a_rank_killed_while_it_decodes_is_named_and_the_latents_are_kept(stopped):
    assert "rank 1 of 2 failed: the process was killed (SIGKILL)" in stopped.error
    assert stopped.left == [f"fox{LOG_SUFFIX}", f"fox{SUFFIX}"]


def test_resume_decodes_again_on_the_ranks_to_the_same_bytes(stopped, resumed, tmp_path):
    resumed()
    assert (tmp_path / "fox.mp4").read_bytes() == stopped.video
    phases = json.loads((tmp_path / "fox.json").read_text())["seconds"]
    assert "load_vae" in phases and "load_transformer" not in phases


def test_a_rank_frozen_while_it_decodes_is_named_within_ten_seconds(resumed, tmp_path, monkeypatch):
    frozen = []

    def freeze(ranks: Ranks) -> None:
        os.kill(ranks._processes[0].pid, signal.SIGSTOP)
        frozen.append(time.monotonic())

    ranks = at_the_first_tiles(monkeypatch, freeze)
    with pytest.raises(RankError, match="rank 0 of 2 failed"):
        resumed()
    assert time.monotonic() - frozen[0] < 15
    check_nothing_is_left(tmp_path, ranks, f"fox{LOG_SUFFIX}")


@pytest.mark.parametrize("method", ["spectrogram", "waveform"])
def test_a_rank_killed_while_it_decodes_sound_is_named_and_the_rest_is_decoded_again(
    resumed, stopped, tmp_path, monkeypatch, method
):
    def kill(ranks: Ranks) -> None:
        ranks._processes[1].kill()

    with monkeypatch.context() as patch:
        ranks = at_the_first_tiles(patch, kill, RankSound, method)
        with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
            resumed()
    check_nothing_is_left(tmp_path, ranks, f"fox{LOG_SUFFIX}")
    resumed()
    assert (tmp_path / "fox.mp4").read_bytes() == stopped.video


def test_nan_in_a_tile_names_the_decoder_and_its_file(resumed, tiny, tmp_path, monkeypatch):
    decode, poisoned = RankTiles.__call__, []

    def broken(tiles, latents):
        poisoned.append(tiles.ranks)
        latents[-1] = latents[-1] * float("nan")
        return decode(tiles, latents)

    monkeypatch.setattr(RankTiles, "__call__", broken)
    with pytest.raises(RunError) as error:
        resumed()
    assert "NaN or Inf in what the video decoder returned" in str(error.value)
    assert str(tiny.checkpoint) in str(error.value)
    check_nothing_is_left(tmp_path, poisoned, f"fox{LOG_SUFFIX}")


def test_ctrl_c_while_the_ranks_decode_ends_them_and_keeps_the_latents(
    resumed, tmp_path, monkeypatch
):
    ranks = at_the_first_tiles(monkeypatch, lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        resumed()
    check_nothing_is_left(tmp_path, ranks)


def test_a_disk_that_fills_up_while_the_ranks_decode_keeps_the_latents(
    workspace, stopped, small_disk, monkeypatch
):
    (small_disk / f"fox{SUFFIX}").write_bytes(stopped.state)

    def fill(_) -> None:
        with suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    ranks = at_the_first_tiles(monkeypatch, fill)
    with pytest.raises(OSError, match="No space left"):
        make(workspace, small_disk / "fox.mp4", resume=True)
    check_nothing_is_left(small_disk, ranks, "filler")


def test_what_is_missing_is_named_with_the_command_that_makes_it(tiny, tmp_path, prepared):
    with pytest.raises(UserError, match=r"shards/shard_vae_weights.py --checkpoint-path"):
        opened(tiny, tmp_path, 2).weights("vae")
    wanted = r"compile/compile_vae.py --checkpoint-path .* --height 64 --width 96 --num-frames 65"
    with pytest.raises(UserError, match=wanted):
        prepared().tile_programs((9, 2, 3))


def test_a_decoder_that_the_ranks_cannot_run_is_refused_before_anything_loads(
    tiny, artifacts, workspace, tmp_path
):
    """And nothing refuses it without --neuron-vae."""
    changed = workspace.checkpoint.config["vae"] | {"causal_decoder": True}
    path = tmp_path / "other.safetensors"
    other = rewrite(tiny.checkpoint, path, lambda tensors: None, {"vae": changed})
    causal = Workspace(other, workspace.profile, artifacts, 2, "float32", tiny.gemma_root)
    for neuron_vae, said in ((True, "vae.causal_decoder is True"), (False, "shard_backbone")):
        with pytest.raises(UserError, match=said):
            Engine(causal, Recorder(), RunOptions(neuron_vae=neuron_vae)).preflight.check(JOBS)
