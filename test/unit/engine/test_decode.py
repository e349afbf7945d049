"""The host models against ltx-core's own, built by its own loader; and where windows of a chunked clip meet."""

import errno
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from clips import first_loud
from engines import opened_workspace
from helpers import made_config, one_thread, rational_upsampler, rel, rewrite, tone  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.backends.tiles import RankSound, RankTiles
from ltx_neuron.config.common import CHECKPOINT_DOWNLOAD
from ltx_neuron.config.profiles import PROFILES
from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.film import Film, JoinedSound, blended
from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.chunks import layout
from ltx_neuron.text.encoders import Contexts

# Long enough (11 latent frames are 81) that the reference's default tiling cuts it into two overlapping pieces.
VIDEO_SHAPE = (1, 128, 11, 2, 3)
AUDIO_SHAPE = (1, 8, 5, 16)
CONFIG = made_config()[0]  # of the tiny checkpoint
RATE, SOUND = 24.0, 48000  # of a chunked clip


def host_models(tiny, dtype=torch.float32, checkpoint=None, **paths):
    upsamplers = dict(spatial_upsampler_path=tiny.spatial_upsampler, temporal_upsampler_path=tiny.temporal_upsampler)
    return HostModels(checkpoint or tiny.checkpoint, CONFIG, dtype, **(upsamplers | paths))


def latent(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def reference(configurator, path, key_filter=None, dtype=torch.float32):
    """ltx-core's module, by ltx-core's loader."""
    from ltx_core.loader.single_gpu_model_builder import SingleGPUModelBuilder

    return SingleGPUModelBuilder(configurator, str(path), key_filter).build(torch.device("cpu"), dtype).eval()


def test_ltx_core_is_imported_without_torchaudio():
    code = (
        "import sys, importlib.util; sys.modules['torchaudio'] = None\n"
        "from ltx_neuron.host.models import import_ltx_core\n"
        "import_ltx_core(); stub = sys.modules['torchaudio']; import_ltx_core()\n"
        "import ltx_core.model.audio_vae\n"
        "assert sys.modules['torchaudio'] is stub and importlib.util.find_spec('torchaudio')\n"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_a_latent_is_upsampled_as_ltx_core_does(tiny, tmp_path):
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator, upsample_video
    from ltx_core.model.video_vae import VAE_ENCODER_COMFY_KEYS_FILTER, VideoEncoderConfigurator

    encoder = reference(VideoEncoderConfigurator, tiny.checkpoint, VAE_ENCODER_COMFY_KEYS_FILTER)
    small, rational = latent((1, 128, 3, 2, 4)), rational_upsampler(tmp_path / "x1.5.safetensors")
    for kind, path, shape in (
        ("spatial", tiny.spatial_upsampler, (1, 128, 3, 4, 8)),
        ("temporal", tiny.temporal_upsampler, (1, 128, 5, 2, 4)),
        ("spatial", rational, (1, 128, 3, 3, 6)),
    ):
        with torch.no_grad():
            expected = upsample_video(small, encoder, reference(LatentUpsamplerConfigurator, path))
        got = host_models(tiny, **{f"{kind}_upsampler_path": path}).upsample(small, kind)
        assert got.shape == shape and torch.equal(got, expected)


def decoded_by_ltx_core(path, shape, tiles="none"):
    """Frames of a latent in the default tiles of a release, or in one piece."""
    from ltx_core.model import video_vae as vae

    decoder = reference(vae.VideoDecoderConfigurator, path, vae.VAE_DECODER_COMFY_KEYS_FILTER)
    spatial, temporal = vae.SpatialTilingConfig(768, 64), vae.TemporalTilingConfig(80, 24)
    config = {"1.2.0": vae.TilingConfig(spatial, temporal), "1.0.0": vae.TilingConfig.default()}.get(tiles)
    with torch.no_grad():
        return torch.cat(list(vae.decode_video(latent(shape), decoder, config)))


def test_frames_are_decoded_in_the_references_default_tiles(tiny):
    expected = [decoded_by_ltx_core(tiny.checkpoint, VIDEO_SHAPE, tiles).int() for tiles in ("1.2.0", "1.0.0", "none")]
    for number, release in enumerate(("1.2.0", "1.0.0")):
        got = torch.cat([*host_models(tiny, tiles_1_0_0=release == "1.0.0").decode_video(latent(VIDEO_SHAPE))])
        assert got.shape == (81, 64, 96, 3) and got.dtype == torch.uint8
        # Sums in another order move a value by about 1e-6, and frames are cut to whole numbers.
        near = [(got.int() - frames).abs().max() <= 1 for frames in expected]
        assert near == [which == number for which in range(3)]


def test_the_host_decodes_in_the_profiles_dtype_which_is_recorded(tiny, tmp_path):
    for host, of_the_run in (("float32", "bfloat16"), ("bfloat16", "float32")):
        workspace = opened_workspace(tiny, tmp_path, dtype=of_the_run, settings=[f"host_dtype={host}"])
        assert workspace.identity["host_dtype"] == host
        assert Engine(workspace, Recorder()).host.video_decoder.dtype == getattr(torch, host)
    assert host_models(tiny).video_decoder.dtype == torch.float32


@pytest.mark.parametrize("chosen", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_in_bfloat16_encodes_and_upsamples_in_what_is_faster_here(tiny, chosen):
    exact, theirs, ours = host_models(tiny), *(host_models(tiny, torch.bfloat16, host_dtype=a) for a in (None, chosen))
    picture, video = latent((1, 3, 1, 64, 96)).clip(-1, 1).bfloat16(), latent(VIDEO_SHAPE).bfloat16()
    for method, value in (("encode_image", picture), ("upsample", video)):
        expected, other, got = (getattr(models, method)(value.to(models.dtype)) for models in (exact, theirs, ours))
        assert got.dtype == torch.bfloat16 and rel(got, expected) <= 1.2 * rel(other, expected)
        if chosen == torch.float32:
            # To the bit a run in float32, rounded; that one is ltx-core's to float32's rounding.
            same = getattr(host_models(tiny, host_dtype=chosen), method)(value.float())
            assert torch.equal(got, same.bfloat16()) and rel(same, expected) < 1e-5
    weights = [p for p in ours.spatial_upsampler.parameters() if p.ndim == 5 and p.shape[1] > 1]
    assert {p.is_contiguous(memory_format=torch.channels_last_3d) for p in weights} == {chosen != torch.float32}


def test_an_encoder_and_a_decoder_unlike_the_released_ones_are_ltx_cores_own(tiny, tmp_path):
    vae = CONFIG["vae"] | {"causal_decoder": True}
    path = rewrite(tiny.checkpoint, tmp_path / "causal.safetensors", lambda _: None, {"vae": vae})
    models = HostModels(path, {"vae": vae}, torch.float32)
    (frames,) = models.decode_video(latent((1, 128, 2, 2, 3)))
    assert torch.equal(frames, decoded_by_ltx_core(path, (1, 128, 2, 2, 3)))
    assert type(models.video_decoder).__name__ == "VideoDecoder"
    vae = CONFIG["vae"] | {"spatial_padding_mode": "reflect"}
    path = rewrite(tiny.checkpoint, tmp_path / "reflect.safetensors", lambda _: None, {"vae": vae})
    clip = latent((1, 3, 9, 64, 64)).clip(-1, 1)
    exact, host = (HostModels(path, {"vae": vae}, torch.float32, host_dtype=chosen) for chosen in (None, torch.float32))
    assert type(host.video_encoder).__name__ == "VideoEncoder"
    assert torch.equal(host.encode_video(clip), exact.encode_video(clip))


TILES = replace(PROFILES["cpu"], vae_tile_frames=64)
LONG_SHAPE = (1, 128, 26, 1, 2)  # 201 frames: groups of tiles begin every 5 latent frames
CHUNKS = [32, 40, 40, 40, 49]


@pytest.fixture(params=[True, False], ids=["ahead", "in turn"])
def decoding(tiny, request):
    """What decodes the latents of a job, by what writes it; nothing of it is left. Its `calls` has the tiles so far."""
    threads, host = set(threading.enumerate()), host_models(tiny, profile=TILES)
    calls, forward = [], host.video_decoder.forward

    def decode(video, write):
        host.video_decoder.forward = lambda tile, *more: calls.append(1) or forward(tile, *more)
        run = JobRun(make_job("rain"), [Contexts(*4 * [None])])
        run.finish(run.job.stages[-1], video, latent(AUDIO_SHAPE))
        decode.recorder = recorder = Recorder()
        return Decoder(host, recorder, request.param).result(run, write)

    decode.calls, decode.ahead = calls, request.param
    yield decode
    assert set(threading.enumerate()) == threads


def test_a_clip_is_written_as_it_is_decoded_and_has_the_bytes_of_the_whole_one(decoding, tmp_path):
    seen = []

    def write(clip):
        chunks, clip.chunks = clip.chunks, None
        clip.chunks = (seen.append((len(c), len(decoding.calls))) or c for c in chunks)
        clip.write(tmp_path / "streamed.mp4")

    result = decoding(latent(LONG_SHAPE), write)
    assert result.frames is None and result.waveform.shape[0] == 2
    assert [length for length, _ in seen] == CHUNKS
    if not decoding.ahead:  # a chunk is there before the tiles after it, which do not change it
        assert [tiles for _, tiles in seen] == [1, 2, 3, 4, 5]
    whole = decoding(latent(LONG_SHAPE), None)
    assert len(whole.frames) == sum(CHUNKS) and torch.equal(whole.waveform, result.waveform)
    whole.clip().write(tmp_path / "whole.mp4")
    assert (tmp_path / "whole.mp4").read_bytes() == (tmp_path / "streamed.mp4").read_bytes()


def test_of_a_clip_that_is_written_few_chunks_are_held(decoding, tmp_path, monkeypatch):
    from ltx_neuron.host import models

    held, most, to_bytes = [], [], models.to_bytes

    def noted(frames):
        chunk = to_bytes(frames)
        held.append(weakref.ref(chunk))
        most.append(sum(chunk_of() is not None for chunk_of in held))
        return chunk

    monkeypatch.setattr(models, "to_bytes", noted)
    decoding(latent(LONG_SHAPE), lambda clip: clip.write(tmp_path / "out.mp4"))
    # Made, waiting for room, waiting, encoded; in turn only the one that is made.
    assert len(most) == len(CHUNKS) and max(most) <= (3 if decoding.ahead else 1)


def test_a_writer_that_fails_ends_the_decoding_of_its_clip(decoding):
    def write(clip):
        next(clip.chunks)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        decoding(latent((1, 128, 126, 1, 2)), write)
    assert len(decoding.calls) <= 6 < 25
    assert decoding.recorder.report({}, "cpu", 1, {}, {})["clips"] == 0


def test_nan_in_a_late_tile_leaves_no_video_and_the_decoder_is_not_blamed_for_it(decoding, tmp_path):
    video = latent(LONG_SHAPE)
    video[:, :, -1] = float("nan")
    with pytest.raises(RunError, match="in the inputs of the video decoder: .*not its weights"):
        decoding(video, lambda clip: clip.write(tmp_path / "out.mp4"))
    assert len(decoding.calls) == 5 and list(tmp_path.iterdir()) == []


RUNS = {  # the start of a model's tensors in the checkpoint, and what runs it
    "video decoder": ("vae.decoder.", lambda host: list(host.decode_video(latent((1, 128, 2, 2, 3))))),
    "audio decoder": ("audio_vae.decoder.", lambda host: host.decode_audio(latent(AUDIO_SHAPE))),
    "vocoder": ("vocoder.", lambda host: host.decode_audio(latent(AUDIO_SHAPE))),
    "video encoder": ("vae.encoder.", lambda host: host.encode_image(latent((1, 3, 1, 64, 64)))),
    "fast video encoder": ("vae.encoder.", lambda host: host.encode_image(latent((1, 3, 1, 64, 64)))),
    "spatial upsampler": ("", lambda host: host.upsample(latent((1, 128, 1, 2, 3)))),
    "temporal upsampler": ("", lambda host: host.upsample(latent((1, 128, 2, 2, 3)), "temporal")),
}


@pytest.mark.parametrize(("model", "value"), [*((model, "nan") for model in RUNS), ("vocoder", "inf")])
def test_a_model_whose_weights_are_broken_is_named_with_their_file(tiny, tmp_path, model, value):
    """One number of its last layer, which would show as black frames, silence or noise."""
    prefix, run = RUNS[model]
    path = "checkpoint" if prefix else f"{model.replace(' ', '_')}_path"
    broken = tmp_path / "broken.safetensors"

    def damage(tensors: dict) -> None:
        last = [name for name in tensors if name.startswith(prefix) and name.endswith("bias")][-1]
        tensors[last].flatten()[0] = float(value)

    rewrite(getattr(tiny, path.removesuffix("_path")), broken, damage)
    host = host_models(tiny, host_dtype=torch.float32 if model.startswith("fast ") else None, **{path: broken})
    with pytest.raises(RunError, match=f"NaN or Inf in the outputs of the {model.removeprefix('fast ')}") as error:
        run(host)
    assert str(broken) in str(error.value) and "Download the file again: " in str(error.value)
    assert (CHECKPOINT_DOWNLOAD in str(error.value)) == (path == "checkpoint")


def test_a_model_is_built_once_until_it_is_released_and_those_of_hdr_compute_in_float32(tiny):
    models = host_models(tiny, torch.bfloat16, host_dtype=torch.bfloat16)
    first, exact = models.video_statistics, models.exact
    assert models.video_statistics is first and models.exact is exact
    assert exact.dtype == exact.latent_dtype == exact.host_dtype == torch.float32
    assert models.dtype == models.latent_dtype == torch.bfloat16
    models.release()
    assert models.video_statistics is not first and "exact" not in vars(models)


def test_every_wrong_tensor_is_listed_in_one_error_but_those_that_nobody_reads(tiny, tmp_path):
    def damage(tensors):
        del tensors["vae.decoder.conv_in.conv.bias"]
        tensors["vae.decoder.surplus"] = torch.zeros(1)
        tensors["vae.per_channel_statistics.std-of-means"] = torch.zeros(3)

    damaged = host_models(tiny, checkpoint=rewrite(tiny.checkpoint, tmp_path / "damaged.safetensors", damage))
    with pytest.raises(UserError) as error:
        next(damaged.decode_video(latent((1, 128, 1, 2, 2))))
    wrong = "missing: vae.decoder.conv_in.conv.bias", "unexpected: vae.decoder.surplus", "--checkpoint-path"
    assert all(text in str(error.value) for text in (*wrong, "std-of-means: (3,), wanted (128,)"))
    unread = {"vae.per_channel_statistics.mean-of-stds": torch.zeros(128)}
    older = rewrite(tiny.checkpoint, tmp_path / "older.safetensors", lambda tensors: tensors.update(unread))
    (frames,) = host_models(tiny, checkpoint=older).decode_video(latent((1, 128, 1, 2, 2)))
    assert frames.shape == (1, 64, 64, 3)


def test_a_file_that_is_no_such_upsampler_is_refused_by_its_flag(tiny, tmp_path):
    of_four = rewrite(tiny.spatial_upsampler, tmp_path / "x4.safetensors", lambda _: None, {"spatial_scale": 4.0})
    kind = "--{}-upsampler-path: wanted a {} .* got a {} upsampler"
    for name, path, message in (
        ("spatial", tiny.temporal_upsampler, kind.format("spatial", "spatial", "temporal")),
        ("temporal", tiny.spatial_upsampler, kind.format("temporal", "temporal", "spatial")),
        ("spatial", of_four, "factor 2.*spatial scale 4.0"),
        ("spatial", tiny.checkpoint, "got a transformer of LTX 2.3"),
        ("temporal", None, "--temporal-upsampler-path FILE"),
        ("spatial", tmp_path / "absent", "(?s)no such file.*--spatial-upsampler-path FILE"),
    ):
        with pytest.raises(UserError, match=message):
            host_models(tiny, **{f"{name}_upsampler_path": path}).upsample(latent((1, 128, 3, 2, 3)), name)


def test_ranks_that_decode_picture_and_sound_in_two_threads_do_one_at_a_time():
    ranks, running, most = SimpleNamespace(tp=1, at_once=1, size=1), [], []

    def share(calls: list) -> list:
        running.append(1)
        time.sleep(0.05)
        most.append(len(running))
        running.pop()
        return [[torch.zeros(1)] for _ in calls]

    ranks.share, lock = share, threading.Lock()
    decoders = [RankTiles(ranks, lock), RankSound(ranks, {}, lock)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(decoder._run, "vae", "frames", [{}]) for decoder in decoders]:
            done.result()
    assert most == [1, 1]


def test_frames_of_the_carry_are_mixed_into_the_end_of_the_window_before():
    windows, values = layout(73, 41, 17, 3), (0.0, 0.8, 0.4)

    def shown(windows, size: int) -> list[int]:
        parts = ((w, torch.full((w.frames, 1, 2, 3), x).split(size)) for w, x in zip(windows, values, strict=True))
        return torch.cat([*blended(parts)])[:, 0, 0, 0].tolist()

    for size in (1, 5, 41):  # frames decoded at a time
        mixed = [(a + (b - a) * k / 4) * 255 for a, b in ((0.0, 0.8), (0.8, 0.4)) for k in (1, 2, 3)]
        wanted = [0] * 38 + mixed[:3] + [204] * 21 + mixed[3:] + [102] * 8
        assert shown(windows, size) == pytest.approx(wanted, abs=1)
    assert shown(layout(73, 41, 17, 0), 5) == [0] * 41 + [204] * 24 + [102] * 8


def test_sounds_cross_in_40_ms_without_a_step_and_as_many_samples_are_taken_as_will_not_change():
    windows, whole, parts = layout(73, 41, 17, 17), JoinedSound(SOUND, RATE), JoinedSound(SOUND, RATE)
    sound, taken = tone(SOUND, 73 / RATE), []
    for window in windows:
        first = round(window.start / RATE * SOUND)
        piece = sound[:, first : first + round(window.frames / RATE * SOUND)]
        whole.add(window, piece)
        parts.add(window, piece)
        taken.append(parts.take(sum(x.shape[1] for x in taken), 10**9))
    assert torch.equal(torch.cat(taken, 1), whole.samples) and parts.samples.shape[1] == 0
    # cos and sin of one sound: at most its square root of two, and the same one everywhere else
    assert whole.samples.shape == sound.shape
    crossed = slice(round(41 / RATE * SOUND) - 1920, round(41 / RATE * SOUND))
    assert torch.equal(whole.samples[:, : crossed.start], sound[:, : crossed.start])
    assert (whole.samples[:, crossed] - sound[:, crossed]).abs().max() < 0.25


# Whether the sound is a file's, windows are decoded ahead, and all are shown at the end
@pytest.mark.parametrize(("given", "ahead", "late"), [(False, False, False), (True, True, False), (False, False, True)])
def test_flash_and_click_of_every_second_stay_within_a_frame_over_the_whole_clip(given, ahead, late, tmp_path):
    """The windows' decoders are stand-ins that show a flash and sound a click at each second of the clip."""
    fields = {"chunk_pixel_frames": 41, "chunk_carry_frames": 17} | ({"audio_path": "song.wav"} if given else {})
    job = Job.validated({"prompt": "a storm", "height": 64, "width": 64, "num_frames": 41 + 24 * 7, **fields})
    chunks = [window.chunk for window in job.windows]

    def clicks(start: float, seconds: float) -> torch.Tensor:
        sound = torch.zeros(2, round(seconds * SOUND))
        for second in range(1, 9):
            at = round((second - start) * SOUND)
            if 0 <= at < sound.shape[1]:
                sound[:, at : at + 300] = 0.8
        return sound

    def pictures(latent, seed, keyframes, exact):
        chunk = chunks[seed - job.seed]
        times = torch.arange(chunk.start, chunk.start + chunk.frames)
        yield (times % 24 == 0)[:, None, None, None].float().expand(-1, 64, 64, 3).clone()

    def sound(latent):  # as long as the vocoder's: less than the window
        rows = 4 * round(41 / RATE * 25) - 3  # a hundredth of a second each
        return clicks(chunks[int(latent)].start / RATE, rows / 100)

    decoder, run = Decoder(SimpleNamespace(sample_rate=SOUND), Recorder(), ahead, pictures, sound), JobRun(job)
    path, heard = tmp_path / "storm.mp4", []
    whole = {"waveform": clicks(0, 9), "waveform_rate": torch.tensor(SOUND)}
    with Film(decoder, run, lambda clip: clip.write(path), True, not ahead, late, lambda: None) as film:
        for chunk in chunks:
            run.window = chunk.number
            run.tensors = {"s1_video": torch.zeros(1), "s1_audio": torch.tensor(chunk.number)} | whole
            film.add_window()
        film.result()
    with av.open(str(path)) as file:
        seen = [frame.time for frame in file.decode(video=0) if frame.to_ndarray(format="gray").mean() > 100]
    with av.open(str(path)) as file:
        samples = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], 1)
    while (at := first_loud(samples[:, (skipped := int(heard[-1] * SOUND) + 4800 if heard else 0) :])) is not None:
        heard.append((skipped + at) / SOUND)
    assert len(seen) == len(heard) + 1 == 9 and seen[0] == 0  # the first picture is a flash too
    assert max(abs(a - b) for a, b in zip(seen[1:], heard, strict=True)) < 1 / RATE
