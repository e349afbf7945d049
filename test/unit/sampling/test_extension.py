"""A video made longer: the latents, times and frames of its windows, and the flags that ask for it."""

import itertools

import pytest
import torch
from helpers import made_film
from jobs import make_job
from typed import said

from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.plan import weight_sets
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.sampling.extension import OVERLAP, Extension, default_window, joined, start_of
from ltx_neuron.sampling.latent_state import initial_states
from ltx_neuron.sampling.latents import audio_positions, audio_seconds, video_positions, video_seconds
from ltx_neuron.sampling.shapes import audio_latent_frames
from ltx_neuron.service.worker import DENOISED, _percent
from ltx_neuron.text.encoders import Contexts

# Of seconds, files, windows and rates that there are
KINDS = (1.0, -1.0, 0.3, -0.1, 5.1, -12.7), (9, 10, 25, 100, 241), (25, 33, 121), (24.0, 29.97, 8.0, 60.0)
EXTENSIONS = [x for x in itertools.starmap(Extension, itertools.product(*KINDS)) if x.window_latents <= x.video_latents]


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> str:
    return str(made_film(tmp_path_factory.mktemp("film") / "film.mp4", 26, 32, 64))


def test_windows_make_what_is_new_once_and_hold_what_is_there_by_then():
    for extension in EXTENSIONS:
        sound = audio_latent_frames(extension.window_frames, extension.frame_rate)
        made = {"video": torch.zeros(extension.video_latents), "audio": torch.zeros(extension.audio_latents)}
        known = torch.zeros(extension.video_latents)
        known[extension.known_video] = 1
        for number, window in enumerate(extension.windows, 1):
            assert window.number == number
            assert 0 <= window.video <= extension.video_latents - extension.window_latents
            assert 0 <= window.audio <= extension.audio_latents - sound
            for stream in made:
                start, (first, stop) = getattr(window, stream), getattr(window, f"new_{stream}")
                made[stream][start + first : start + stop] += 1
            inside = known[window.video : window.video + extension.window_latents]
            new = slice(*window.new_video)
            held = len(inside) - len(inside[new])
            assert not inside[new].any() and inside.sum() == held >= min(OVERLAP, extension.known_latents)
            inside[:] = 1
            # On the new side sound and picture end together, but for a latent of sound.
            border, heard = window.video, window.audio
            if not extension.before:
                border, heard = border + extension.window_latents, heard + sound
            seen = video_seconds(border, extension.frame_rate)[-1] + window.sound_offset
            assert abs(seen - audio_seconds(heard)[-1]) < 0.06
        assert known.all()
        for stream, counts in made.items():
            wanted = torch.ones(len(counts))
            wanted[getattr(extension, f"known_{stream}")] = 0
            assert torch.equal(counts, wanted) and 0 < wanted.sum() < len(counts)


def test_the_new_frames_are_those_next_to_the_files():
    waveform = torch.arange(48000 * 60, dtype=torch.float64).expand(2, -1)
    for extension in EXTENSIONS:
        assert 8 * (extension.video_latents - 1) + 1 == extension.known_frames + extension.made_frames
        assert extension.known_frames <= extension.source_frames
        assert extension.new_frames == round(abs(extension.seconds) * extension.frame_rate)
        surplus = extension.made_frames - extension.new_frames
        assert 0 <= surplus < 8
        if extension.before:
            assert extension.decoded.stop == extension.made_frames  # up to the file's first
        else:
            assert extension.decoded.start == extension.known_frames  # from behind its last
        heard = extension.heard(waveform, 48000)
        assert heard.shape[1] == pytest.approx(extension.num_frames / extension.frame_rate * 48000, abs=1)
        assert heard[0, 0] == round(surplus * extension.before / extension.frame_rate * 48000)


@pytest.mark.parametrize("extension", [Extension(1.0, 25, 25, 24.0), Extension(-2.0, 50, 33, 25.0)])
def test_windows_have_the_times_of_the_clip_they_are_cut_from(extension):
    """The picture's less the sound's, and those within a stream: attention sees no more."""
    clip = video_positions((extension.video_latents, 2, 3), extension.frame_rate)[0, 0]
    whole = audio_positions(extension.audio_latents)[0, 0]
    plain = video_positions((extension.window_latents, 2, 3), extension.frame_rate)
    size = Size(64, 96, extension.window_frames, extension.frame_rate)
    retake = Retake(__file__, extend=extension.seconds, source_frames=extension.source_frames)
    start = latents.zeros(*size.sides, size.num_frames, size.frame_rate, torch.float32)
    job = make_job("rain", size, retake=retake)
    for window in extension.windows:
        video, audio = initial_states(job, False, {}, start, [], COMPAT[None], torch.float32, window)
        seen = clip[window.video * 6 : (window.video + extension.window_latents) * 6]
        offset = seen[0] - video.positions[0, 0, 0]
        assert torch.allclose(video.positions[0, 0] + offset, seen, atol=1e-5)
        heard = whole[window.audio :][: len(audio.denoise_mask)] - window.sound_offset
        assert torch.allclose(audio.positions[0, 0] + offset, heard, atol=1e-5)
        assert torch.equal(video.positions[:, 1:], plain[:, 1:])


@pytest.mark.parametrize("seconds", [1.0, -1.0])
def test_a_window_goes_on_from_those_before_it(seconds):
    with pytest.raises(UserError, match="length, 25 to 49 frames"):
        _ = Extension(seconds, 25, 17, 24.0).windows  # no longer than the overlap: there would be no end
    extension = Extension(seconds, 25, 25, 24.0)
    video, audio = torch.zeros(1, 128, extension.video_latents, 2, 2), torch.zeros(1, 8, extension.audio_latents, 16)
    video[:, :, extension.known_video] = -1
    audio[:, :, extension.known_audio] = -1
    tensors = {"video_latent": video, "audio_latent": audio}
    for window in extension.windows:
        start = start_of(extension, window, tensors)
        for name, latent, new in zip(("video", "audio"), start, (window.new_video, window.new_audio), strict=True):
            held = torch.ones(latent.shape[2], dtype=torch.bool)
            held[slice(*new)] = False
            assert (latent[:, :, held] != 0).all() and not latent[:, :, ~held].any()
            # What it makes of held ones is not looked at.
            tensors[f"{window.key}_{name}"] = torch.full_like(latent, window.number)
    for clip, known in zip(joined(extension, tensors), (extension.known_video, extension.known_audio), strict=True):
        assert (clip[:, :, known] == -1).all()
        numbers = clip[0, 0, :, 0].flatten(1)[:, 0] if clip.dim() > 4 else clip[0, 0, :, 0]
        made = numbers[numbers != -1]
        assert len(set(made.tolist())) == len(extension.windows) > 2
        assert made.tolist() == sorted(made.tolist(), reverse=extension.before)
    assert not video[:, :, extension.known_latents :].any() or extension.before  # left as it was


def test_windows_are_as_long_as_any_clip_or_as_all_that_there_is_and_share_the_graph_of_a_retake(film):
    extended = said("--video-path", film, "--extend", 1.5)
    assert extended.retake == Retake(film, extend=1.5, source_frames=26)
    # 4 latents of the file and 5 new ones.
    assert extended.size == Size(32, 64, 65, 24.0) and len(extended.stages) == 1
    assert said("--video-path", film, "--extend", 60).size.num_frames == 121
    assert default_window(-1.5, 26, 24.0) == 65  # 3 and 6, of which the first is of one frame
    extended.check()
    for recipe, kind in (("distilled", (False, 8)), ("dev", (True, 40))):
        windows = said("--video-path", film, "--extend", 3, "--num-frames", 25, "--recipe", recipe)
        windows.check()
        retake = make_job("rain", Size(32, 64, 25), retake=Retake(film, 0.1, 0.2), recipe=recipe)
        assert windows.buckets == windows.buckets_to_compile == retake.buckets
        assert [stage.window.number for stage in windows.stages] == [*range(1, 10)]
        assert {stage.name for stage in windows.stages} == {"stage_1"}  # none of them is a second stage
        assert {(stage.guided, stage.steps) for stage in windows.stages} == {kind}
        assert weight_sets(windows) == 1
        assert (windows.video_key, windows.audio_key) == ("s1_video", "s1_audio")  # joined
        assert windows.audio_latents == windows.extension.audio_latents  # which the ranks' decoder is compiled for


def test_what_is_left_names_the_windows_and_each_brings_the_job_forward():
    job = make_job("rain", Size(32, 64, 25), retake=Retake(__file__, extend=1, source_frames=26))
    run, left = JobRun(job, [Contexts(*torch.zeros(3, 1), None)]), []
    for stage in job.stages:
        left.append(run.left)
        run.finish(stage, torch.zeros(1), torch.zeros(1))
    assert left == ["windows 1 to 3 of 3 are left", "windows 2 to 3 of 3 are left", "window 3 of 3 is left"]
    assert run.left == "the decoding is left"
    percents = [_percent(job, stage, step) for stage in job.stages for step in (0, 4, 8)]
    assert percents == [DENOISED * done // 24 for done in (0, 4, 8, 8, 12, 16, 16, 20, 24)]
