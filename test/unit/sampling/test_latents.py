"""Shapes, patches and positions of both streams are ltx-core's, and so is the state that a stage starts from: the noise
that is drawn, and the images that are held."""

import pytest
import torch
from helpers import FP32_ROUNDING, furthest, generator, randn
from jobs import make_job, replace

from ltx_neuron.job import Size
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import Compat
from ltx_neuron.sampling.conditions import ImageCondition, ReferenceVideo, held_mask
from ltx_neuron.sampling.latent_state import LatentState, initial_states, video_state
from ltx_neuron.sampling.latents import patchify_audio, patchify_video, reference_positions, video_positions
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS
from ltx_neuron.sampling.shapes import audio_latent_frames, video_latent_shape

SHAPE, FPS, AUDIO_FRAMES = (3, 2, 4), 24.0, 18
PER_FRAME = SHAPE[1] * SHAPE[2]
SCALES = 1.0, STAGE_2_SIGMAS[0]
VIDEO, AUDIO = randn(1, 128, *SHAPE, seed=1), randn(1, 8, AUDIO_FRAMES, 16, seed=2)
# Later releases interpolate where 1.0.0 sums two products: four roundings of numbers below 5 each
BLEND = 2 * 4 * 5 * FP32_ROUNDING
SHOWS = 0.1  # noise and latents have unit size: another blend is this far off somewhere


def tools(stream="video", shape=SHAPE, fps=FPS, frames=AUDIO_FRAMES):
    """ltx-core's of a video, or of a sound of so many latents."""
    from ltx_core.components.patchifiers import AudioPatchifier, VideoLatentPatchifier
    from ltx_core.tools import AudioLatentTools, VideoLatentTools
    from ltx_core.types import AudioLatentShape, VideoLatentShape

    if stream == "audio":
        return AudioLatentTools(AudioPatchifier(1), AudioLatentShape(1, 8, frames, 16))
    return VideoLatentTools(VideoLatentPatchifier(1), VideoLatentShape(1, 128, *shape), fps)


def middles(bounds):
    return (bounds[..., 0] + bounds[..., 1]) / 2.0


def ltx_noised(conditions, scale=1.0):
    """ltx-core 1.0.0's state of a stage with these conditions."""
    from ltx_core.components.noisers import GaussianNoiser

    state = tools().create_initial_state("cpu", VIDEO.dtype, VIDEO)
    for condition in conditions:
        state = condition.apply_to(state, tools())
    return GaussianNoiser(generator(10))(state, scale)


def ltx_condition(image, encoded):
    from ltx_core.conditioning import VideoConditionByKeyframeIndex, VideoConditionByLatentIndex

    if image.frame_index == 0:
        return VideoConditionByLatentIndex(encoded, image.strength, 0)
    return VideoConditionByKeyframeIndex(encoded, image.frame_index, image.strength)


def image(frame_index=0, strength=1.0, seed=5):
    return ImageCondition("", frame_index, strength), randn(1, 128, 1, *SHAPE[1:], seed=seed)


@pytest.mark.parametrize("fps", [24.0, 25.0, 23.976])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (16, 3, 2)])  # latent frames, rows, columns
def test_video_positions_and_patches_are_ltx_cores_and_keyframes_behind_them_are_dropped(shape, dtype, fps):
    theirs = tools(shape=shape, fps=fps)
    positions = middles(theirs.create_initial_state("cpu", dtype).positions)
    ours = video_positions(shape, fps, dtype)
    assert ours.dtype == positions.dtype == dtype and torch.equal(ours, positions)
    latent = randn(1, 128, *shape)
    tokens = patchify_video(latent)
    assert torch.equal(tokens, theirs.patchifier.patchify(latent))
    for appended in (tokens[:, :0], tokens[:, :1]):
        assert torch.equal(latents.unpatchify_video(torch.cat([tokens, appended], dim=1), shape), latent)


@pytest.mark.parametrize("frames", [1, 26, 251])
def test_audio_positions_and_patches_are_ltx_cores(frames):
    theirs, positions, latent = tools("audio", frames=frames), latents.audio_positions(frames), randn(1, 8, frames, 16)
    assert positions.dtype == torch.float32
    assert torch.equal(positions, middles(theirs.patchifier.get_patch_grid_bounds(theirs.target_shape)))
    tokens = patchify_audio(latent)
    assert torch.equal(tokens, theirs.patchifier.patchify(latent))
    assert torch.equal(latents.unpatchify_audio(tokens), latent)


@pytest.mark.parametrize(("frame", "fps"), [(8, 24.0), (40, 25.0), (119, 23.976)])
def test_a_keyframe_lasts_from_its_own_frame_for_one_frame_or_eight_as_in_ltx_core_1_0_0(frame, fps):
    of_clip, keyframe = tools(shape=(16, 2, 3), fps=fps), ImageCondition("", frame)
    condition = ltx_condition(keyframe, torch.zeros(1, 128, 1, 2, 3))
    state = condition.apply_to(of_clip.create_initial_state("cpu", torch.float32), of_clip)
    theirs = middles(state.positions[:, :, -6:])
    assert torch.equal(latents.keyframe_positions(2, 3, frame, fps, duration=8), theirs)
    theirs[:, 0] -= 3.5 / fps
    # One fp32 rounding of a time below 32 s: half of its last bit. A frame too early or late is 4e-2.
    assert furthest(latents.keyframe_positions(2, 3, frame, fps, 1), theirs) < 2**-20


def test_latents_have_the_shapes_that_ltx_core_gives_a_video_and_its_sound():
    from ltx_core.types import AudioLatentShape, VideoLatentShape, VideoPixelShape

    for height, width, frames in (512, 768, 121), (64, 128, 1), (512, 512, 28), (64, 64, 32):
        theirs = VideoLatentShape.from_pixel_shape(VideoPixelShape(1, frames, height, width, 24.0))
        assert video_latent_shape(height, width, frames) == (theirs.frames, theirs.height, theirs.width)
    # The sound is as long as the video. The last three are rounded: up, half to even, half to even.
    wanted = {(25, 24): 26, (97, 24): 101, (121, 25): 121, (17, 24): 18, (33, 30): 28, (9, 50): 4}
    assert {each: audio_latent_frames(*each) for each in wanted} == wanted
    for (frames, rate), count in wanted.items():
        assert AudioLatentShape.from_video_pixel_shape(VideoPixelShape(1, frames, 64, 64, rate)).frames == count


def test_a_token_of_a_half_size_reference_is_at_the_middle_of_the_four_that_it_stands_for():
    whole, half = reference_positions((2, 4, 6), 24.0), reference_positions((2, 2, 3), 24.0, space_scale=2)
    assert torch.allclose(half, whole.unflatten(2, (2, 2, 2, 3, 2)).mean((4, 6)).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compat", [True, False])
def test_two_stages_draw_video_then_audio_from_one_generator_as_ltx_core_does(dtype, compat):
    from ltx_core.components.noisers import GaussianNoiser

    ours, noiser, seen = generator(10), GaussianNoiser(generator(10)), []
    for scale in SCALES:
        for stream, latent, patchify in (("video", VIDEO, patchify_video), ("audio", AUDIO, patchify_audio)):
            theirs = noiser(tools(stream).create_initial_state("cpu", dtype, latent.to(dtype)), scale).latent
            tokens = patchify(latent.to(dtype))
            free = LatentState(tokens, tokens, torch.ones(tokens.shape[1], 1), torch.empty(0))
            got = free.noised(ours, scale, compat)
            assert got.dtype == theirs.dtype == dtype
            # bf16: where fp32 sums lie at the edge of two values the blends may round apart, by one ulp of 2..4
            assert furthest(got, theirs) <= (0 if compat or scale == 1 else BLEND if dtype == torch.float32 else 2**-6)
            seen.append(got)
    assert furthest(seen[0], seen[2]) > SHOWS  # each draw is another
    noise = torch.randn(seen[0].shape, generator=generator(10), dtype=dtype)
    assert torch.equal(seen[0], noise)  # the first stage starts from noise alone
    assert STAGE_2_SIGMAS[0] == 0.909375


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("frames", [(0,), (0, 8, 16)], ids=["first frame", "keyframes"])
def test_with_compat_images_of_any_strength_are_held_exactly_as_1_0_0_does(frames, strength, scale):
    images = [image(frame, strength, seed=5 + n) for n, frame in enumerate(frames)]
    theirs = ltx_noised([ltx_condition(*each) for each in images], scale)
    state = video_state(VIDEO, FPS, images, compat_1_0_0=True)
    size = Size(SHAPE[1] * 32, SHAPE[2] * 32, 8 * SHAPE[0] - 7)
    (bucket,) = make_job("", size, images=tuple(condition for condition, _ in images)).buckets
    assert state.latent.shape[1] == bucket.video_tokens == (SHAPE[0] + len(frames) - 1) * PER_FRAME
    assert torch.equal(state.clean_latent, theirs.clean_latent)
    assert torch.equal(state.denoise_mask, theirs.denoise_mask[0])
    assert torch.equal(state.positions, middles(theirs.positions))
    assert torch.equal(state.noised(generator(10), scale, True), theirs.latent)


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_with_compat_a_reference_starts_from_itself_as_in_1_0_0(strength):
    from ltx_core.conditioning import VideoConditionByReferenceLatent

    reference = randn(1, 128, *SHAPE, seed=5)
    theirs = ltx_noised([VideoConditionByReferenceLatent(reference, 1, strength)])
    job = make_job("", Size(SHAPE[1] * 32, SHAPE[2] * 32, 17), references=(ReferenceVideo("", strength, 17),))
    inputs = {"reference_latent": reference}, (VIDEO, AUDIO), []
    ours, later = (
        initial_states(job, False, *inputs, Compat(conditioning=old), torch.float32)[0] for old in (True, False)
    )
    assert torch.equal(ours.noised(generator(10), 1.0, True), theirs.latent)
    assert not later.latent[:, len(ours.denoise_mask) // 2 :].any() and torch.equal(later.positions, ours.positions)


def test_later_releases_blend_images_with_what_the_stage_would_start_from():
    """1.1.6: clean + mask * (unconditioned start - clean), where 1.0.0 noises the image itself."""
    scale, images = SCALES[1], [image(strength=0.7), image(8, 0.6, seed=6)]
    first, keyframe = (patchify_video(encoded) for _, encoded in images)
    got = video_state(VIDEO, FPS, images).noised(generator(10), scale, False)
    noise = torch.randn(got.shape, generator=generator(10))
    start = scale * noise[:, :PER_FRAME] + (1 - scale) * patchify_video(VIDEO)[:, :PER_FRAME]
    assert furthest(got[:, :PER_FRAME], first + 0.3 * (start - first)) < BLEND
    # A keyframe has no latent of the stage's.
    wanted = keyframe + 0.4 * (scale * noise[:, -PER_FRAME:] - keyframe)
    assert furthest(got[:, -PER_FRAME:], wanted) < BLEND
    compat = video_state(VIDEO, FPS, images, compat_1_0_0=True).noised(generator(10), scale, True)
    assert furthest(got[:, :PER_FRAME], compat[:, :PER_FRAME]) > SHOWS


@pytest.mark.parametrize("timesteps", [3, 5])
def test_masks_start_with_1_hold_each_strength_once_and_every_token_chooses_its_own(timesteps):
    images = [image(*held) for held in ((0, 1.0), (8, 0.7), (16, 0.7), (24, 0.0))]
    assert make_job("").timesteps(False) == 1
    assert make_job("", images=tuple(condition for condition, _ in images)).timesteps(True) == 3
    assert video_state(VIDEO, FPS, []).masks == (1.0,)
    state = video_state(VIDEO, FPS, images)
    assert state.masks == (1.0, 0.0, held_mask(0.7)) and held_mask(0.7) == torch.tensor(0.3).item()
    rows, choice = state.timestep_choice(timesteps, torch.bfloat16)
    assert rows.shape == (timesteps,) and rows[0] == 1
    assert choice.dtype == torch.bfloat16 and choice.shape == (len(state.denoise_mask), timesteps)
    assert torch.equal(choice.sum(1), torch.ones(len(choice))) and {*choice.flatten().tolist()} == {0.0, 1.0}
    assert torch.equal((choice.float() @ rows)[:, None], state.denoise_mask)


def test_motion_speed_scales_the_time_of_all_video_tokens_and_nothing_else():
    job = make_job("", Size(64, 128, 17), images=(image(8)[0],), references=(ReferenceVideo("guide.mp4", 1.0, 17),))
    inputs = {"reference_latent": randn(1, 128, *SHAPE, seed=4)}, (VIDEO, AUDIO), [image(8)]

    def positions(speed: float):
        states = initial_states(replace(job, motion_speed=speed), False, *inputs, Compat(), torch.float32)
        return [state.positions for state in states]

    (video, audio), (slow, heard) = positions(1.0), positions(0.25)
    assert furthest(slow[:, 0], video[:, 0] / 4) < 1e-6
    assert torch.equal(slow[:, 1:], video[:, 1:]) and torch.equal(heard, audio)


def test_every_generated_keyframe_starts_stage_2_as_its_own_plane_of_stage_1():
    condition = image(8)[0]
    job = make_job("rain", Size(128, 256, 17, two_stage=True), num_generated_keyframes=2, images=[condition])
    start = torch.zeros(1, 128, 3, 4, 8), torch.zeros(1, 8, AUDIO_FRAMES, 16)
    planes, images = randn(1, 128, 2, 4, 8), [(condition, randn(1, 128, 1, 4, 8))]
    video, _ = initial_states(job, True, {"upsampled_keyframes": planes}, start, images, Compat(), torch.float32)
    assert len(video.denoise_mask) == job.bucket(job.stages[1]).video_tokens
    assert video.clean_latent[:, -64:].abs().sum() == 0
    assert video.denoise_mask[-64:].min() == video.keyframes_mask[-64:].min() == 1
    for number, tokens in enumerate(video.latent[:, -64:].split(32, dim=1)):
        assert torch.equal(tokens, patchify_video(planes[:, :, number : number + 1])), number
