"""Stage 1 of LTX-2.5's distilled recipe: marked keyframes, the ancestral sampler, generated
keyframes."""

import pytest
import torch
from conftest import ROOT
from helpers import one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace
from ltx25_step import CONFIG, IMAGES, JOB, STAGE, stage_run
from safetensors.torch import load_file

from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.release import RELEASES
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.job import Size
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling import latents, samplers
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceAudio,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.latent_state import initial_states
from ltx_neuron.sampling.latents import between_keyframes
from ltx_neuron.sampling.schedules import DISTILLED_SIGMAS
from ltx_neuron.sampling.spec import LoraFile

# Latents after step 1 and after all, by ltx-core and ltx-pipelines 1.2.0 on the same weights,
# images and contexts (fp32).
GOLDEN = ROOT / "test/golden/ltx25_stage_1.safetensors"
BOUND, SHOWS = 1e-6, 1e-3
LTX_2_3, LTX_2_5 = RELEASES


@torch.no_grad()
def made(run, steps: int = 8) -> dict[str, torch.Tensor]:
    """The latents after the first steps of a started stage, by the golden's names."""
    tensors = {}
    for number in range(steps):
        run.step(number)
        if number == 0:
            for stream in ("video", "audio"):
                tensors[f"{stream}_1"] = run.ranks.get("", f"{stream}_latent")
    tensors["video"], tensors["audio"] = run.result()
    return tensors | {"generated_keyframes": run.generated_keyframes()}


@pytest.mark.parametrize("blocks_per_graph", [0, 1])
def test_a_stage_equals_upstreams(blocks_per_graph):
    golden, got = load_file(GOLDEN), made(stage_run(blocks_per_graph))
    assert got.keys() == golden.keys()
    for name, tensor in golden.items():
        assert rel(got[name], tensor) < BOUND, name


def test_a_step_keeps_the_variance_of_a_rectified_flow():
    """The coefficients equal the formula in double precision: sigma_down = end ** 2 / sigma, and
    noise from there up to the end, with the signal scaled by the quotient of both alphas."""
    for row, sigma, end in zip(
        samplers.ancestral_coefficients(DISTILLED_SIGMAS, (False, False)),
        DISTILLED_SIGMAS,
        DISTILLED_SIGMAS[1:],
        strict=False,
    ):
        down = end**2 / sigma
        signal = (1 - end) / (1 - down)
        noise = max(end**2 - (down * signal) ** 2, 0) ** 0.5
        wanted = torch.tensor([down / sigma, 1 - down / sigma, signal, noise, float(end > 0)])
        torch.testing.assert_close(row, wanted.expand(2, 5), rtol=2e-5, atol=1e-6)


def test_the_last_step_returns_the_prediction_and_a_frozen_stream_stays():
    coefficients = samplers.ancestral_coefficients(DISTILLED_SIGMAS, (False, True))
    assert coefficients[-1, 0].tolist() == [0, 1, 1, 0, 0]
    assert {tuple(row) for row in coefficients[:, 1].tolist()} == {(1, 0, 1, 0, 0)}


def test_the_noise_does_not_depend_on_what_was_drawn_before():
    """A resumed stage adds the same noise."""
    first, second = (stage_run(0) for _ in range(2))
    drawn = first.ranks._values
    assert all(torch.equal(drawn[name], x) for name, x in second.ranks._values.items())
    # Two steps have different noise, and the last has none.
    assert not torch.equal(drawn["video_noise@0"], drawn["video_noise@1"])
    assert drawn["video_noise@7"].abs().sum() == 0


@pytest.mark.parametrize("seed", [-5, 2**64 - 1])
def test_every_seed_has_noise(seed):
    empty = [torch.zeros(1, 16, 4)] * 2
    noise, _, _ = next(samplers.ancestral_steps((1.0, 0.5, 0.0), empty, (False, False), seed))
    wanted = torch.Generator().manual_seed(seed % 2**64)
    assert torch.equal(noise, torch.randn(1, 16, 4, generator=wanted))


def test_held_tokens_stay_in_every_step():
    run = stage_run(0)
    held = run.states[0].denoise_mask.flatten() < 1
    assert held.tolist() == [*[True] * 6, *[False] * 12, *[True] * 6, *[False] * 12]
    frozen = replace(JOB, images=tuple(replace(image, strength=1.0) for image in JOB.images))
    run = stage_run(0, job=frozen)
    with torch.no_grad():
        run.step(0)
    latent = run.ranks.get("", "video_latent")
    assert torch.equal(latent[:, held], run.states[0].clean_latent[:, held])


# --- which sampler, which tokens ------------------------------------------------------------------


TWO_STAGES = Size(128, 192, 17, two_stage=True)
EARLIER = "ltx-pipelines-1.2.0"


def test_both_distilled_stages_of_a_release_use_its_sampler():
    two_stages = TWO_STAGES
    dev = of_release(make_job("", two_stages, recipe="dev"), LTX_2_5)
    assert [stage.sampler for stage in dev.stages] == ["euler", "euler"]
    for release, sampler in ((LTX_2_3, "euler"), (LTX_2_5, "ancestral")):
        job = of_release(make_job("", two_stages), release)
        assert [stage.sampler for stage in job.stages] == [sampler, sampler]
        assert [bucket.ancestral for bucket in job.buckets] == [sampler == "ancestral"] * 2
        earlier = replace(job, compat=EARLIER)
        assert [stage.sampler for stage in earlier.stages] == [sampler, "euler"]
        assert job.describe()["sampler"] == sampler
        assert "ancestral" not in job.describe()
        assert of_release(job, release) is job
        assert "sampler" not in job.to_line() or job.to_line()["sampler"] == "euler"


SOUND, CLIP = SoundCondition("sound.wav"), ReferenceVideo("clip.mp4", 1.0, 17)


@pytest.mark.parametrize(
    "given",
    [
        {"sound": SOUND},
        {"retake": Retake("film.mp4", 0.0, 0.3), "size": replace(TWO_STAGES, two_stage=False)},
        {"references": (CLIP,)},
        {"reference_sound": ReferenceAudio("voice.wav", 8)},
        {"reference_sound": ReferenceAudio("clip.mp4", 8), "dubbing": CLIP},
    ],
    ids=["a sound", "a retake", "references", "a voice", "dubbing"],
)
def test_other_inputs_than_images_are_sampled_without_noise_as_upstream_does(given):
    job = of_release(make_job("", **{"size": TWO_STAGES} | given), LTX_2_5)
    assert {stage.sampler for stage in job.stages} == {"euler"}
    with_image = of_release(make_job("", TWO_STAGES, images=IMAGES), LTX_2_5)
    assert {stage.sampler for stage in with_image.stages} == {"ancestral"}


def test_stage_2_draws_its_noise_from_a_seed_of_its_own():
    stages = of_release(make_job("", TWO_STAGES), LTX_2_5).stages
    assert [stage.noise for stage in stages] == [(10_000, 1.0), (20_000, 1.0)]


@pytest.mark.parametrize(
    ("changes", "frozen"),
    {
        "guided": ({}, True),
        "guided, as of 1.2.0": ({"compat": EARLIER}, False),
        "guided, as of 1.0.0": ({"compat": "ltx-core-1.0.0"}, False),
        "distilled": ({"recipe": "distilled"}, False),
        "HQ": ({"sampler": "res_2s"}, False),
        "images as guides": ({"images_as_guides": True}, False),
        "references": ({"references": (CLIP,)}, False),
        "an input sound": ({"sound": SOUND, "compat": EARLIER}, True),
    }.values(),
)
def test_stage_2_of_the_guided_recipe_keeps_the_sound_of_stage_1(changes, frozen):
    job = replace(make_job("", TWO_STAGES, recipe="dev"), **changes)
    assert job.freezes_sound(True) is frozen
    assert job.freezes_sound(False) is bool(job.sound)


def test_an_images_crf_is_the_releases_unless_it_is_given():
    job = make_job("", images=(ImageCondition("a.png"), ImageCondition("b.png", crf=0)))
    for release, crf in ((LTX_2_3, 33), (LTX_2_5, 18)):
        assert [image.crf for image in of_release(job, release).images] == [crf, 0]
    assert [len(image) for image in job.to_line()["image"]] == [3, 4]


def test_graphs_take_the_keyframes_mask_if_the_model_has_one_and_noise_if_ancestral():
    other = replace(CONFIG, use_keyframes_abs_pos_embedding=False)
    assert CONFIG.digest != other.digest

    def inputs(config, bucket):
        program = dit_program(config, bucket, 1, SingleRank(), torch.float32, 1)
        return {name: {*graph.inputs} for name, graph in program.graphs.items()}

    plain = Bucket(12, 8, 1, 8)
    marked, noisy = inputs(CONFIG, plain), inputs(CONFIG, replace(plain, ancestral=True))
    unmarked = inputs(other, plain)
    assert marked["head"] - unmarked["head"] == {"keyframes_mask"}
    assert noisy["tail"] - marked["tail"] == {"video_noise", "audio_noise", "ancestral"}
    assert [marked["blocks"], marked["tail"]] == [unmarked["blocks"], unmarked["tail"]]
    assert inputs(CONFIG, Bucket(0, 8, 1, 8)) == inputs(other, Bucket(0, 8, 1, 8))
    assert replace(plain, ancestral=True).name == f"{plain.name}-ancestral"


@pytest.mark.parametrize(
    ("count", "frames", "wanted"),
    [(0, 17, ()), (1, 17, (8,)), (2, 17, (5, 11)), (3, 121, (30, 60, 90)), (3, 5, (1, 2, 3))],
)
def test_generated_keyframes_lie_between_the_first_and_the_last_frame(count, frames, wanted):
    assert between_keyframes(count, frames) == wanted


def test_generated_keyframes_follow_the_given_ones_and_last_one_frame():
    video = stage_run(0).states[0]
    seconds = video.positions[0, 0].unflatten(0, (-1, 6))
    assert seconds[-3:, 0].tolist() == pytest.approx([16.5 / 25, 5.5 / 25, 11.5 / 25])
    assert video.keyframes_mask.flatten().unflatten(0, (-1, 6))[:, 0].tolist() == [1, 0, 0, 0, 1, 1]
    assert video.clean_latent[:, -12:].abs().sum() == 0
    assert STAGE.sampler == "ancestral"


def test_the_first_latent_frame_is_marked_without_an_image_too():
    run = stage_run(0, job=replace(JOB, images=(), num_generated_keyframes=None))
    wanted = [1, 0, 0]
    assert run.states[0].keyframes_mask.flatten().unflatten(0, (-1, 6))[:, 0].tolist() == wanted
    marked = run.ranks._values["keyframes_mask"].flatten().unflatten(0, (-1, 6))
    assert torch.equal(marked, torch.tensor(wanted).float()[:, None].expand(3, 6))


def test_both_stages_have_the_generated_keyframes():
    job = make_job("", TWO_STAGES, num_generated_keyframes=2)
    earlier = replace(job, compat=EARLIER)
    tokens = [[each.bucket(stage).video_tokens for stage in each.stages] for each in (job, earlier)]
    assert tokens == [[(3 + 2) * 6, (3 + 2) * 24], [(3 + 2) * 6, 3 * 24]]


def test_keyframes_of_stage_2_begin_as_those_of_stage_1_behind_all_other_tokens():
    job = make_job("", TWO_STAGES, images=IMAGES, num_generated_keyframes=2)
    planes, start = randn(1, 128, 2, 4, 6, seed=1), latents.zeros(128, 192, 17, 25.0, torch.float32)
    images = [(image, randn(1, 128, 1, 4, 6, seed=2)) for image in IMAGES]
    given = {"upsampled_keyframes": planes}, start, images, COMPAT[None], torch.float32
    video, _ = initial_states(job, True, *given)
    assert torch.equal(video.latent[:, -48:], latents.patchify_video(planes))
    assert video.clean_latent[:, -48:].abs().sum() == 0 and video.denoise_mask[-48:].min() == 1
    assert video.keyframes_mask.flatten().unflatten(0, (-1, 24))[-2:].min() == 1
    assert len(video.denoise_mask) == job.bucket(job.stages[1]).video_tokens


def test_keyframes_are_generated_beside_references_and_a_mask_behind_them():
    given = {"references": (CLIP,), "attention_mask": AttentionMask("mask.mp4")}
    job = replace(make_job("", TWO_STAGES, num_generated_keyframes=2), **given)
    job.replaced(ic_lora=(LoraFile("ic"),)).check_rules()
    tensors = {"reference_latent": randn(1, 128, 3, 2, 3), "reference_attention": torch.ones(1, 18)}
    start = latents.zeros(64, 96, 17, 25.0, torch.float32)
    video, _ = initial_states(job, False, tensors, start, [], COMPAT[None], torch.float32)
    assert len(video.denoise_mask) == job.bucket(job.stages[0]).video_tokens == 18 + 18 + 12
    assert video.keyframes_mask[-12:].min() == 1 and video.keyframes_mask[6:-12].max() == 0
    # A keyframe and the clip attend to each other; a keyframe and a reference do not.
    assert video.bias.shape == (48, 48) and video.bias[:18].abs().max() == 0
    assert video.bias[-12:, :18].abs().max() == 0 and video.bias[-12:, 18:36].max() < -1e30
