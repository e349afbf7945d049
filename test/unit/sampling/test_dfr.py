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
from ltx_neuron.denoise import to_upsample
from ltx_neuron.engine.preflight import check_dfr, notes
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling import dfr
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.weights.lora import Lora

DETAIL, DISTILLED = (Lora(Path("detail.safetensors"), 0.5),), (Lora(Path("distilled.safetensors"), 1.0),)
OLD = {"recipe": "dev", "compat": "ltx-pipelines-1.2.0", "stage_2_loras": DISTILLED}
NEW = {"recipe": "distilled", "detailing_loras": DETAIL, "detailing_scale": 2}


def job(frames=41, rate=24.0, rounds=1, kind=NEW, **more) -> Job:
    size = Size(64, 64, frames, rate, two_stage=True)
    made = make_job("a fox", size, dfr=True, temporal_upsample_rounds=rounds or None, **kind | more)
    return of_release(made, RELEASES[1])


def test_the_canvas_is_the_shortest_of_whole_segments():
    for frames, segment, canvas in (9, 24, 25), (17, 24, 25), (33, 32, 33), (89, 32, 97), (121, 24, 121):
        assert (dfr.segment(frames), dfr.canvas(frames)) == (segment, canvas)
        assert dfr.keyframes(frames) == tuple(range(segment, canvas, segment))
        assert dfr.canvas(canvas) == canvas and dfr.keyframes(canvas) == dfr.keyframes(frames)


@pytest.mark.parametrize("holds", [False, True], ids=["1.2.0", "1.4"])
def test_the_windows_of_a_round_own_its_latents_once_and_begin_on_keyframes(holds):
    for frames, number in itertools.product(range(9, 530, 8), (1, 2)):
        half, windows = dfr.segment(frames), dfr.windows(frames, 2, holds)
        mine, last = [w for w in windows if w.round == number], (dfr.canvas(frames) - 1) * 2**number
        assert [w.start // 8 + cell for w in mine for cell in range(w.shared, w.latents)] == [*range(last // 8 + 1)]
        owned = [(w.latents - w.shared) * 8 // (2 * half) for w in mine]
        assert owned == sorted(owned, reverse=True) and owned[0] - owned[-1] <= 1
        assert len(mine) == min(2**number, last // (2 * half))
        # Every second keyframe is made here, in the middle between two given ones.
        seams, known = {*range(2 * half, last + 1, 2 * half)}, set()
        for w in mine:
            given, made = ({w.start + frame for frame in numbers} for numbers in (w.given, w.generated))
            assert given <= seams and made <= {x - half for x in seams}
            assert not w.number or w.start in seams | known | {0}
            if holds:  # it starts on the newest keyframe, and needs none that it holds
                first = w.start + (w.shared - 1) * 8 if w.number else 0
                assert min(given | made) > first and (not w.number or w.start == first - half)
            known |= made
        assert known == {x - half for x in seams}
    seeds = [1000, 1001, 2000, 2001, 2002, 2003]
    assert [(w.seed, w.key) for w in windows] == [(seed, f"s{n}") for n, seed in enumerate(seeds, 3)]


@pytest.mark.parametrize(("rate", "seen"), [(24, 24), (30, 30), (30.5, 60), (120, 60)])
def test_a_rate_above_30_is_seen_as_60(rate, seen):
    made, old = (job(rate=float(rate), rounds=0, kind=kind) for kind in (NEW, OLD))
    stage = made.of(made.stages[0])
    assert dfr.model_rate(rate) == seen == stage.size.frame_rate / stage.motion_speed
    assert stage.size.audio_frames == round(dfr.canvas(41) / rate * 25)  # as long as it is played
    assert old.of(old.stages[0]).motion_speed == 1 and dfr.model_rate(rate, holds=False) == min(rate, 60)


def clip(values) -> torch.Tensor:
    return torch.tensor([*values], dtype=torch.float32).view(1, 1, -1, 1, 1)


def filled(rendering: dfr.Rendering) -> dict[str, torch.Tensor]:
    """The latents of all stages; each of a clip has its number, +100 after a window, and a keyframe has minus its
    frame of the last round."""
    cells = (dfr.canvas(rendering.size.num_frames) - 1) // 8 + 1
    keyframes = clip(-2.0 * frame for frame in dfr.keyframes(rendering.size.num_frames))
    tensors = {"s2_video": clip(range(cells)), "s1_audio": clip(range(68))[..., 0]}
    tensors |= {"s2_generated_keyframes": keyframes, "temporal_video": clip(range(2 * cells - 1))}
    for w in rendering.windows:
        tensors[f"{w.key}_video"] = clip(w.start // 8 + 100 + x for x in range(w.latents))
        tensors[f"{w.key}_generated_keyframes"] = clip(-(w.start + x) for x in w.generated)
    return tensors


def test_a_window_holds_the_result_of_the_one_before_it_after_a_keyframe():
    rendering = job(frames=65).rendering  # two segments of 32
    tensors, (_, second) = filled(rendering), rendering.windows
    start = rendering.start(second, tensors)
    numbers = {name: tensor.flatten().tolist() for name, tensor in start.items()}
    assert (second.start, second.shared, second.latents) == (32, 5, 13)
    assert numbers["video"] == [-32, 105, 106, 107, 108, *range(9, 17)]
    assert numbers["given_keyframes"] == [-128] and numbers["upsampled_keyframes"] == [12]
    assert rendering.final(tensors).flatten().tolist() == [100 + x for x in range(17)]
    # The sound during its 97 frames at 48 fps, of 68 latents in 65 / 24 s, for a clip of 60 fps.
    wanted = (32 + 97 * torch.arange(40) / 40) / 48 * 24 / 65 * 68
    torch.testing.assert_close(start["audio"][0, 0, :, 0], wanted.clamp(max=67))
    # A padded clip ends with the last frame that was asked for.
    padded, once = job(rounds=2), job().rendering
    assert (padded.output_frames, padded.output_frame_rate) == (161, 96)
    assert padded.latent_shape == (21, 2, 2) and padded.audio_latents == round(49 / 24 * 25)
    assert once.final(filled(once)).flatten().tolist() == [100 + x for x in range(11)]  # of 13
    last = padded.rendering.windows[-1]
    assert last.start + last.frames == 4 * 48 + 1


def test_the_second_round_is_given_the_keyframes_of_the_first_and_begins_on_its_own():
    rendering = job(frames=65, rounds=2).rendering
    tensors = filled(rendering)
    for w in rendering.windows[2:]:
        start = rendering.start(w, tensors | {"temporal_video_1": clip(range(33))})
        given = start["given_keyframes"].flatten().tolist()
        assert given == [-(w.start + frame) / 2 for frame in w.given]  # as numbered in round 1
        assert start["video"].flatten()[0] == (-w.start if w.number else 0)
        assert start["upsampled_keyframes"].flatten().tolist() == [w.start / 8 + x / 8 for x in w.generated]
    assert sorted(rendering.planes(tensors, 2)) == [*range(32, 257, 32)]
    assert rendering.final(tensors).shape[2] == 33


def test_each_stage_upsamples_what_the_one_before_it_made_once():
    made = job(frames=65, rounds=2)
    tensors, (stage_1, stage_2, first, *_, last) = filled(made.rendering), made.stages
    tensors |= {"s1_video": torch.zeros(1), "s1_generated_keyframes": torch.ones(1)}
    assert to_upsample(made, stage_1, tensors) == to_upsample(made, first, tensors) == {}
    assert to_upsample(made, stage_2, tensors) == {
        "upsampled": (tensors["s1_video"], "spatial"),
        "upsampled_keyframes": (tensors["s1_generated_keyframes"], "spatial"),
    }
    plain = make_job("rain", Size(64, 64, 9, two_stage=True))
    assert [*to_upsample(plain, plain.stages[1], tensors)] == ["upsampled"]
    without = {name: tensor for name, tensor in tensors.items() if name != "temporal_video"}
    wanted = {"temporal_video_1": (last, tensors, made.rendering.clip(tensors, 1))}
    wanted["temporal_video"] = (first, without, tensors["s2_video"])
    for name, (stage, given, clip) in wanted.items():
        ((got, (latent, kind)),) = to_upsample(made, stage, given).items()
        assert (got, kind) == (name, "temporal") and torch.equal(latent, clip)


def test_images_stay_at_their_moments():
    images = tuple(ImageCondition("", frame, 0.6) for frame in (0, 12, 26, -1))
    for kind, length, wanted in (
        (NEW, 41, [[0, 12, 26, 40], [0, 12, 26, 40], [0, 24], [28, 56]]),  # the second window starts at 24
        # Release 1.2.0 does not move them, and its first window has all.
        (OLD, 145, [[0, 12, 26, 144], [0, 12, 26, 144], [0, 12, 26, 144], [48]]),
    ):
        made = job(images=images, kind=kind, frames=length)
        assert [[image.frame_index for image in made.of(stage).images] for stage in made.stages] == wanted


def test_stages_have_the_loras_samplers_and_sound_of_their_release():
    for kind, loras in ((NEW, ()), ({**OLD, "detailing_loras": DETAIL, "detailing_scale": 2}, DISTILLED)):
        first, second, *windows = job(kind=kind).stages
        assert second.loras == loras + DETAIL and {stage.loras for stage in (first, *windows)} == {loras}
    old, new = job(kind=OLD), job()
    noise = [(10_000, 1), (20_000, 1), (1000, 0.5)]
    assert [(stage.sampler, stage.noise) for stage in new.stages[:3]] == [("ancestral", each) for each in noise]
    assert [stage.sampler for stage in old.stages[:3]] == ["euler", "euler", "ancestral"]
    # Windows of 1.2.0 have no sound, and those of 1.4 hold and hear it.
    assert [bucket.name for bucket in old.buckets][2:] == ["v36-t2-s8-ancestral", "v68-t2-s8-ancestral"]
    first, second = (new.of(stage) for stage in new.stages[2:])
    assert (first.timesteps(True), second.timesteps(True)) == (2, 3)
    assert first.freezes_sound(True) and not new.freezes_sound(True)
    assert [bucket.audio_tokens for bucket in new.buckets] == [51, 51, 20, 30]
    assert new.own_graphs == ["dfr"]  # a service must not offer the size to requests without inputs


def test_a_release_has_dfr_for_one_kind_of_checkpoint_and_of_decoder():
    check_dfr([job(kind=OLD), job(kind=NEW)])
    for kind, advice in ((OLD | {"compat": None}, "without"), (NEW | {"compat": "ltx-pipelines-1.2.0"}, "with")):
        with pytest.raises(UserError, match=advice):
            check_dfr([job(kind=kind)])
    source, file = SimpleNamespace(notes=[]), SimpleNamespace(shapes=[EMBEDDING])
    files = SimpleNamespace(source=lambda *_: source, files=SimpleNamespace(of=lambda section: file))
    for vae, kinds in (({}, ()), ({"_class_name": DIFFUSION_VAE}, (NEW,))):  # which reads the keyframes of 1.4
        files.config = {"vae": vae}
        for kind in (NEW, OLD):
            assert ["keyframes" in note for note in notes(job(kind=kind), files)] == [True] * (kind in kinds)
