"""Windows of a chunked clip: which frames, images, keyframes and prompts each has, and what is refused."""

import itertools

import pytest
import torch
from helpers import one_thread, randn  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.denoise import starting_states
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.chunks import layout
from ltx_neuron.sampling.conditions import ImageCondition, ReferenceAudio, ReferenceVideo, SoundCondition
from ltx_neuron.sampling.latents import patchify_audio, patchify_video
from ltx_neuron.sampling.shapes import video_latent_shape
from ltx_neuron.weights.lora import Lora

LORAS = (Lora("ic.safetensors", 1.0),)


def job(frames: int = 73, window: int = 41, carry: int = 17, **fields) -> Job:
    lengths = {"chunk_pixel_frames": window, "chunk_carry_frames": carry} | fields
    size = lengths.pop("size", Size(128, 192, frames, 24.0, two_stage=True))
    return make_job(lengths.pop("prompt", "a fox"), size, **lengths)


def test_windows_own_every_frame_once_only_the_last_one_is_shorter_and_those_of_the_golden_run_are_upstreams():
    for total, window, carry in itertools.product(range(9, 400, 8), (41, 97), (17, 25)):
        windows = layout(total, window, carry, 0)
        if total <= window:
            assert not windows
            continue
        assert [w.start + frame for w in windows for frame in range(w.taken, w.frames)] == [*range(total)]
        assert all(w.frames == window for w in windows[:-1]) and carry < windows[-1].frames <= window
        for before, after in itertools.pairwise(windows):
            assert after.start == before.start + before.frames - carry and after.taken == before.given == carry
    windows = layout(73, 41, 17, 8, keyframes=2)
    facts = [(w.frames, w.start, w.taken, w.given) for w in windows]
    assert facts == [(41, 0, 0, 17), (41, 24, 17, 17), (25, 48, 17, 0)]
    assert [w.start + frame for w in windows for frame in w.generated] == [20, 40, 53, 64, 67, 70]
    assert [w.held for w in windows] == [(), (16,), (5, 16)]


def test_images_and_prompts_go_to_the_windows_that_own_their_frames():
    images = [ImageCondition(f"{frame}.png", frame) for frame in (0, 40, 41, 50, -1)]
    windows = job(images=images, prompt="", prompts=("a fox", "a hare")).windows
    assert [[image.frame_index for image in w.image] for w in windows] == [[0, 40], [17, 26], [24]]
    assert [w.prompt for w in windows] == ["a fox", "a fox", "a hare"]
    assert job(prompt="", prompts=("a fox", "a hare")).texts == ("a fox", "a hare")


def test_a_longer_clip_needs_no_other_graph_and_a_window_of_the_default_length_adds_72_frames():
    two, ten = (job(97 + 72 * n, 97, 25) for n in (1, 9))
    assert two.buckets == ten.buckets and len(two.buckets) == 2 and len(ten.windows) == 10
    plain = replace(two, chunk_pixel_frames=None, chunk_carry_frames=None, chunked=False)
    assert job(97, 97, 25).buckets == replace(plain, size=replace(two.size, num_frames=97)).buckets


def test_a_reference_is_read_from_the_first_frame_of_the_window_and_tokens_that_touch_the_carry_are_not_seen():
    for carry, scale, dropped in ((17, 1, 3), (25, 1, 4), (25, 2, 3), (0, 1, 0)):
        video, size = ReferenceVideo("depth.mp4", 1.0, 200, 1, scale, start=24, carry=carry), Size(128, 192, 41)
        frames, *sides = video.latent_shape(size)
        assert video.dropped_latents == dropped and video.seen_shape(size) == (frames - dropped, *sides)
    long, short = (ReferenceVideo("depth.mp4", 1.0, frames) for frames in (73, 65))
    windows = job(references=(long,), stage_1_loras=LORAS).windows
    assert [(w.references[0].start, w.references[0].carry) for w in windows] == [(0, 0), (24, 17), (48, 17)]
    with pytest.raises(UserError, match="got 65 frames, wanted 73.*type --num-frames 65"):
        job(references=(short,), stage_1_loras=LORAS)._check_windows()
    job(65, references=(short,), stage_1_loras=LORAS)._check_windows()


def test_lengths_and_fields_that_cannot_be_are_refused_with_what_to_type():
    for fields, message in (
        ({"window": 40}, "wanted 8k.1, 25 to .*type --chunk-pixel-frames 41"),
        ({"carry": 9}, "type --chunk-carry-frames 17"),
        ({"window": 25, "carry": 25}, "type --chunk-pixel-frames 33"),
        ({"chunk_blend_frames": 18}, "wanted 0 to 17"),
        ({"num_generated_keyframes": 23}, "wanted 0 to 22 .* with a carry of 17"),
        ({"prompt": "", "prompts": ("a", "b", "c", "d")}, "got 4 for 3 windows"),
    ):
        with pytest.raises(UserError, match=message):
            job(**fields).check()


def tensors_of(window: Job, stage) -> dict[str, torch.Tensor]:
    """What a stage of a window begins with, of random latents."""
    shape = video_latent_shape(stage.height, stage.width, window.size.num_frames)
    sides, chunk, carried = shape[1:], window.chunk, f"carried_{stage.key}_"
    shapes = {f"{carried}video": (128, 3, *sides), f"{carried}audio": (8, round(17 / 24 * 25), 16)}
    shapes |= {f"{carried}generated_keyframes": (128, len(chunk.held), *sides), "upsampled": (128, *shape)}
    shapes |= {"upsampled_keyframes": (128, len(chunk.generated), *sides), "audio_reference": (8, 75, 16)}
    shapes |= {"s1_audio": (8, window.size.audio_frames, 16)}
    shapes |= {"audio_latent": (8, 75, 16)} if window.sound else {}
    for reference in window.appended_references(False):
        for name, upsampled in (("reference_latent", False), ("s2_reference_latent", True)):
            shapes[name] = 128, *reference.latent_shape(window.stage_size(upsampled))
    return {name: randn(1, *sizes, seed=n) for n, (name, sizes) in enumerate(shapes.items())}


VIDEO = ReferenceVideo("clip.mp4", 1.0, 73)
KINDS = {
    "slots": {"num_generated_keyframes": 2},
    "references": {"references": (VIDEO,), "stage_1_loras": LORAS},
    "a sound": {"sound": SoundCondition("song.wav")},
    "dubbing": {"dubbing": VIDEO, "loras": LORAS, "reference_sound": ReferenceAudio("clip.mp4", 75)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_has_the_tokens_of_its_graph_and_the_carry_is_pinned_as_it_is(kind):
    whole = job(**KINDS[kind])
    for stage in whole.stages:
        window, bucket = whole.of(stage), whole.bucket(stage)
        tensors = tensors_of(window, stage)
        video, audio = starting_states(whole, stage, tensors, [], torch.float32)
        for state, tokens in ((video, bucket.video_tokens), (audio, bucket.audio_tokens)):
            assert state.latent.shape[1] == state.positions.shape[2] == tokens
        assert len(video.masks) <= bucket.timesteps
        if window.chunk.taken:
            held = patchify_video(tensors[f"carried_{stage.key}_video"])
            count = held.shape[1]
            assert torch.equal(video.clean_latent[:, :count], held) and not video.denoise_mask[:count].any()
            assert video.denoise_mask[count] == 1 and len(audio.masks) <= 2
        if kind == "a sound":  # as long as the clip: 76 latents, of which the file has 75
            first = round(window.chunk.start / 24 * 25)
            sound = patchify_audio(tensors["audio_latent"][:, :, first : first + window.size.audio_frames])
            known = sound.shape[1] if not stage.upsampled else 0
            assert torch.equal(audio.latent[:, :known], sound[:, :known]) and audio.frozen
