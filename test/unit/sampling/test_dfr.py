"""DFR: its canvas, keyframes, windows and rates, and what a window is given."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import make_job

from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.diffusion import DIFFUSION_VAE, EMBEDDING
from ltx_neuron.config.release import RELEASES
from ltx_neuron.denoise.start import to_upsample
from ltx_neuron.engine.preflight import check_dfr, notes
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling import dfr
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.weights.lora import Lora

LENGTHS = range(9, 530, 8)
DETAIL = (Lora(Path("detail.safetensors"), 0.5),)
OLD, NEW = (
    {"recipe": "dev", "compat": "ltx-pipelines-1.2.0", "stage_2_loras": (Lora(Path("distilled.safetensors"), 1.0),)},
    {"recipe": "distilled", "detailing_loras": DETAIL, "detailing_scale": 2},
)


def job(frames=41, rate=24.0, rounds=1, kind=NEW, **more) -> Job:
    size = Size(64, 64, frames, rate, two_stage=True)
    made = make_job("a fox", size, dfr=True, temporal_upsample_rounds=rounds or None, **kind | more)
    return of_release(made, RELEASES[1])


@pytest.mark.parametrize(
    ("frames", "segment", "canvas"),
    [(9, 24, 25), (17, 24, 25), (33, 32, 33), (89, 32, 97), (121, 24, 121), (241, 24, 241)],
)
def test_the_canvas_is_the_shortest_of_whole_segments(frames, segment, canvas):
    assert (dfr.segment(frames), dfr.canvas(frames)) == (segment, canvas)
    assert dfr.keyframes(frames) == tuple(range(segment, canvas, segment))
    assert dfr.canvas(canvas) == canvas and dfr.keyframes(canvas) == dfr.keyframes(frames)


@pytest.mark.parametrize("holds", [False, True], ids=["1.2.0", "1.4"])
def test_the_windows_of_a_round_own_its_latents_once_and_begin_on_keyframes(holds):
    for frames, number in itertools.product(LENGTHS, (1, 2)):
        half, windows = dfr.segment(frames), dfr.windows(frames, 2, holds)
        mine = [window for window in windows if window.round == number]
        last = (dfr.canvas(frames) - 1) * 2**number
        cells = [w.start // 8 + cell for w in mine for cell in range(w.shared, w.latents)]
        assert cells == [*range(last // 8 + 1)]
        owned = [(w.latents - w.shared) * 8 // (2 * half) for w in mine]
        assert owned == sorted(owned, reverse=True) and owned[0] - owned[-1] <= 1
        assert len(mine) == min(2**number, last // (2 * half))
        # Every second keyframe is made here, in the middle between two given ones.
        seams, known = {*range(2 * half, last + 1, 2 * half)}, set()
        for w in mine:
            given = {w.start + frame for frame in w.given}
            made = {w.start + frame for frame in w.generated}
            assert given <= seams and made <= {x - half for x in seams}
            assert not w.number or w.start in seams | known | {0}
            if holds:  # it starts on the newest keyframe, and needs none that it holds
                first = w.start + (w.shared - 1) * 8 if w.number else 0
                assert min(given | made) > first and (not w.number or w.start == first - half)
            known |= made
        assert known == {x - half for x in seams}
    assert [w.seed for w in windows] == [1000, 1001, 2000, 2001, 2002, 2003]
    assert [w.key for w in windows] == ["s3", "s4", "s5", "s6", "s7", "s8"]


@pytest.mark.parametrize(("rate", "seen"), [(24, 24), (30, 30), (30.5, 60), (50, 60), (120, 60)])
def test_a_rate_above_30_is_seen_as_60(rate, seen):
    made = job(rate=float(rate), rounds=0)
    of = made.of(made.stages[0])
    assert dfr.model_rate(rate) == seen == of.size.frame_rate / of.motion_speed
    assert of.size.audio_frames == round(dfr.canvas(41) / rate * 25)  # as long as it is played
    old = job(rate=float(rate), rounds=0, kind=OLD)
    assert old.of(old.stages[0]).motion_speed == 1
    assert dfr.model_rate(rate, holds=False) == min(rate, 60)


def filled(rendering: dfr.Rendering) -> dict[str, torch.Tensor]:
    """The latents of all stages; each of a clip has its number, +100 after a window, and a
    keyframe has minus its frame of the last round."""
    cells = (dfr.canvas(rendering.size.num_frames) - 1) // 8 + 1

    def clip(values) -> torch.Tensor:
        return torch.tensor([*values], dtype=torch.float32).view(1, 1, -1, 1, 1)

    frames = dfr.keyframes(rendering.size.num_frames)
    tensors = {"s2_video": clip(range(cells)), "s1_audio": clip(range(68))[..., 0]}
    tensors["s2_generated_keyframes"] = clip(-2.0 * x for x in frames)
    tensors["temporal_video"] = clip(range(2 * cells - 1))
    for w in rendering.windows:
        tensors[f"{w.key}_video"] = clip(w.start // 8 + 100 + x for x in range(w.latents))
        tensors[f"{w.key}_generated_keyframes"] = clip(-(w.start + x) for x in w.generated)
    return tensors


def test_a_window_holds_the_result_of_the_one_before_it_after_a_keyframe():
    rendering = job(frames=65, rounds=1).rendering  # two segments of 32
    tensors, (_, second) = filled(rendering), rendering.windows
    made = rendering.start(second, tensors)
    given = {name: x.flatten().tolist() for name, x in made.items()}
    assert (second.start, second.shared, second.latents) == (32, 5, 13)
    assert given["video"] == [-32, 105, 106, 107, 108, *range(9, 17)]
    assert given["given_keyframes"] == [-128] and given["upsampled_keyframes"] == [12]
    assert rendering.final(tensors).flatten().tolist() == [100 + x for x in range(17)]
    # The sound during its 97 frames at 48 fps, of 68 latents in 65 / 24 s, for a clip of 60 fps.
    sound = made["audio"][0, 0, :, 0]
    wanted = (32 + 97 * torch.arange(40) / 40) / 48 * 24 / 65 * 68
    torch.testing.assert_close(sound, wanted.clamp(max=67))


def test_the_clip_of_a_round_is_upsampled_once_from_the_round_before_it():
    made = job(frames=65, rounds=2)
    tensors = filled(made.rendering)
    _, _, first, *_, last = made.stages
    assert to_upsample(made, first, tensors) == {}
    clip = made.rendering.clip(tensors, 1)
    ((name, (latent, kind)),) = to_upsample(made, last, tensors).items()
    assert (name, kind) == ("temporal_video_1", "temporal") and torch.equal(latent, clip)
    del tensors["temporal_video"]
    ((name, (latent, kind)),) = to_upsample(made, first, tensors).items()
    assert (name, kind) == ("temporal_video", "temporal") and latent is tensors["s2_video"]


def test_stage_2_upsamples_the_video_of_stage_1_and_its_keyframes():
    made = job(frames=65, rounds=1)
    tensors = {"s1_video": torch.zeros(1), "s1_generated_keyframes": torch.ones(1)}
    first, second, *_ = made.stages
    assert to_upsample(made, first, tensors) == {}
    assert to_upsample(made, second, tensors) == {
        "upsampled": (tensors["s1_video"], "spatial"),
        "upsampled_keyframes": (tensors["s1_generated_keyframes"], "spatial"),
    }
    plain = make_job("rain", Size(64, 64, 9, two_stage=True))
    assert [*to_upsample(plain, plain.stages[1], tensors)] == ["upsampled"]


@pytest.mark.parametrize(("kind", "told"), [(NEW, True), (OLD, False)])
def test_a_render_says_where_the_diffusion_decoder_reads_the_keyframes(kind, told):
    source, file = SimpleNamespace(notes=[]), SimpleNamespace(shapes=[EMBEDDING])
    files = SimpleNamespace(config={"vae": {}}, source=lambda *_: source)
    files.files = SimpleNamespace(of=lambda section: file)
    assert notes(job(kind=kind), files) == []
    files.config["vae"]["_class_name"] = DIFFUSION_VAE
    assert ["keyframes" in note for note in notes(job(kind=kind), files)] == [True] * told


def test_the_second_round_is_given_the_keyframes_of_the_first_and_begins_on_its_own():
    rendering = job(frames=65, rounds=2).rendering
    tensors, clip = filled(rendering), torch.arange(33.0).view(1, 1, -1, 1, 1)
    for w in rendering.windows[2:]:
        made = rendering.start(w, tensors | {"temporal_video_1": clip})
        given = made["given_keyframes"].flatten().tolist()
        assert given == [-(w.start + frame) / 2 for frame in w.given]  # as numbered in round 1
        assert made["video"].flatten()[0] == (-w.start if w.number else 0)
        assert made["upsampled_keyframes"].flatten().tolist() == [w.start / 8 + x / 8 for x in w.generated]
    assert sorted(rendering.planes(tensors, 2)) == [*range(32, 257, 32)]
    assert rendering.final(tensors).shape[2] == 33


def test_a_padded_clip_ends_with_the_last_frame_that_was_asked_for():
    padded = job(frames=41, rounds=2)
    assert (padded.output_frames, padded.output_frame_rate) == (161, 96)
    assert padded.latent_shape == (21, 2, 2) and padded.audio_latents == round(49 / 24 * 25)
    once = job(frames=41).rendering
    assert once.final(filled(once)).flatten().tolist() == [100 + x for x in range(11)]  # of 13
    last = padded.rendering.windows[-1]
    assert last.start + last.frames == 4 * 48 + 1


def test_images_stay_at_their_moments():
    images = tuple(ImageCondition("", frame, 0.6) for frame in (0, 12, 26, -1))
    made = job(images=images)
    seen = [[x.frame_index for x in made.of(stage).images] for stage in made.stages]
    assert seen == [[0, 12, 26, 40], [0, 12, 26, 40], [0, 24], [28, 56]]  # window 2 starts at 24
    # Release 1.2.0 does not move them, and its first window has all.
    made = job(images=images, kind=OLD, frames=145)
    seen = [[x.frame_index for x in made.of(stage).images] for stage in made.stages[2:]]
    assert seen[0] == [0, 12, 26, 144] and all(x > 0 for x in seen[1])


def test_the_detailing_lora_is_in_stage_2_alone_and_the_distilled_lora_in_all_stages():
    old = {**OLD, "detailing_loras": DETAIL, "detailing_scale": 2}
    for kind, every in ((NEW, ()), (old, OLD["stage_2_loras"])):
        first, second, *windows = job(kind=kind).stages
        assert second.loras == every + DETAIL
        assert {stage.loras for stage in (first, *windows)} == {every}
    stages = [(s.sampler, s.noise) for s in job().stages[:3]]
    assert stages == [("ancestral", (10_000, 1)), ("ancestral", (20_000, 1)), ("ancestral", (1000, 0.5))]
    assert [s.sampler for s in job(kind=OLD).stages[:3]] == ["euler", "euler", "ancestral"]


def test_windows_of_1_2_0_have_no_sound_and_those_of_1_4_hold_and_hear_it():
    old, new = job(kind=OLD), job()
    assert [bucket.name for bucket in old.buckets][2:] == ["v36-t2-s8-ancestral", "v68-t2-s8-ancestral"]
    first, second = (new.of(stage) for stage in new.stages[2:])
    assert (first.timesteps(True), second.timesteps(True)) == (2, 3)
    assert first.freezes_sound(True) and not new.freezes_sound(True)
    assert [bucket.audio_tokens for bucket in new.buckets] == [51, 51, 20, 30]


@pytest.mark.parametrize(
    ("kind", "advice"), [(OLD | {"compat": None}, "without"), (NEW | {"compat": "ltx-pipelines-1.2.0"}, "with")]
)
def test_a_release_has_dfr_for_one_kind_of_checkpoint(kind, advice):
    check_dfr([job(kind=OLD), job(kind=NEW)])
    with pytest.raises(UserError, match=advice):
        check_dfr([job(kind=kind)])


def test_the_graphs_of_a_render_do_not_count_as_those_of_text_to_video():
    """A service would offer the size to requests without inputs."""
    assert job().own_graphs == ["dfr"]
