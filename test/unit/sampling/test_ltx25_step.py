"""Stage 1 of LTX-2.5's distilled recipe: marked keyframes, the ancestral sampler, generated
keyframes."""

import pytest
import torch
from conftest import ROOT
from helpers import STREAMS, one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace
from ltx25_step import CONFIG, IMAGES, JOB, stage_run
from safetensors.torch import load_file

from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.release import RELEASES, Release
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.job import Job, Size
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling import latents
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
from ltx_neuron.sampling.spec import LoraFile

# Latents after step 1 and after all, by ltx-core and ltx-pipelines 1.2.0 on the same weights,
# images and contexts (fp32).
GOLDEN = ROOT / "test/golden/ltx25_stage_1.safetensors"
BOUND = 1e-6
LTX_2_3, LTX_2_5 = RELEASES


@pytest.mark.parametrize("blocks_per_graph", [0, 1])
def test_a_stage_equals_upstreams(blocks_per_graph):
    golden, run, tensors = load_file(GOLDEN), stage_run(blocks_per_graph), {}
    with torch.no_grad():
        for number in range(8):
            run.step(number)
            if not number:
                tensors |= {f"{stream}_1": run.ranks.get("", f"{stream}_latent") for stream in STREAMS}
    tensors["video"], tensors["audio"] = run.result()
    tensors["generated_keyframes"] = run.generated_keyframes()
    assert tensors.keys() == golden.keys()
    for name, tensor in golden.items():
        assert rel(tensors[name], tensor) < BOUND, name


def test_the_noise_of_a_step_does_not_depend_on_what_was_drawn_before():
    """A resumed stage adds the same noise."""
    first, second = (stage_run(0).ranks._values for _ in range(2))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    # Two steps have different noise, and the last has none.
    assert not torch.equal(first["video_noise@0"], first["video_noise@1"])
    assert first["video_noise@7"].abs().sum() == 0


def test_held_tokens_stay_in_every_step():
    run = stage_run(0, job=replace(JOB, images=tuple(replace(image, strength=1.0) for image in JOB.images)))
    held = run.states[0].denoise_mask.flatten() < 1
    assert held.tolist() == [*[True] * 6, *[False] * 12, *[True] * 6, *[False] * 12]
    with torch.no_grad():
        run.step(0)
    assert torch.equal(run.ranks.get("", "video_latent")[:, held], run.states[0].clean_latent[:, held])


# --- which sampler, which tokens ------------------------------------------------------------------


EARLIER = "ltx-pipelines-1.2.0"
SOUND, CLIP = SoundCondition("sound.wav"), ReferenceVideo("clip.mp4", 1.0, 17)


def job(release: Release | None = LTX_2_5, **inputs) -> Job:
    """A job of two stages, as it is for a release's model."""
    made = make_job("", inputs.pop("size", Size(128, 192, 17, two_stage=True)), **inputs)
    return of_release(made, release) if release else made


def samplers(made) -> list[str]:
    return [stage.sampler for stage in made.stages]


def test_both_distilled_stages_of_a_release_use_its_sampler():
    assert samplers(job(recipe="dev")) == ["euler", "euler"]
    for release, sampler in ((LTX_2_3, "euler"), (LTX_2_5, "ancestral")):
        made = job(release)
        assert samplers(made) == [sampler, sampler] and samplers(replace(made, compat=EARLIER)) == [sampler, "euler"]
        assert [bucket.ancestral for bucket in made.buckets] == [sampler == "ancestral"] * 2
        assert made.describe()["sampler"] == sampler and "ancestral" not in made.describe()
        assert of_release(made, release) is made
        assert "sampler" not in made.to_line() or made.to_line()["sampler"] == "euler"
    # Stage 2 draws its noise from a seed of its own.
    assert [stage.noise for stage in job().stages] == [(10_000, 1.0), (20_000, 1.0)]


@pytest.mark.parametrize(
    "inputs",
    [
        {"sound": SOUND},
        {"retake": Retake("film.mp4", 0.0, 0.3), "size": Size(128, 192, 17)},
        {"references": (CLIP,)},
        {"reference_sound": ReferenceAudio("voice.wav", 8)},
        {"reference_sound": ReferenceAudio("clip.mp4", 8), "dubbing": CLIP},
    ],
    ids=["a sound", "a retake", "references", "a voice", "dubbing"],
)
def test_other_inputs_than_images_are_sampled_without_noise_as_upstream_does(inputs):
    assert {*samplers(job(**inputs))} == {"euler"} and {*samplers(job(images=IMAGES))} == {"ancestral"}


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
    made = replace(job(None, recipe="dev"), **changes)
    assert made.freezes_sound(True) is frozen and made.freezes_sound(False) is bool(made.sound)


def test_an_images_crf_is_the_releases_unless_it_is_given():
    images = ImageCondition("a.png"), ImageCondition("b.png", crf=0)
    for release, crf in ((LTX_2_3, 33), (LTX_2_5, 18)):
        assert [image.crf for image in job(release, images=images).images] == [crf, 0]
    assert [len(image) for image in job(None, images=images).to_line()["image"]] == [3, 4]


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


def marks(video, per_plane: int) -> list[float]:
    """Of each plane of tokens, whether it is a keyframe's."""
    planes = video.keyframes_mask.flatten().unflatten(0, (-1, per_plane))
    assert torch.equal(planes, planes[:, :1].expand_as(planes))
    return planes[:, 0].tolist()


def test_generated_keyframes_follow_the_given_ones_and_last_one_frame():
    video = stage_run(0).states[0]
    seconds = video.positions[0, 0].unflatten(0, (-1, 6))
    assert seconds[-3:, 0].tolist() == pytest.approx([16.5 / 25, 5.5 / 25, 11.5 / 25])
    assert marks(video, 6) == [1, 0, 0, 0, 1, 1] and video.clean_latent[:, -12:].abs().sum() == 0
    # The first latent frame is marked without an image too.
    run = stage_run(0, job=replace(JOB, images=(), num_generated_keyframes=None))
    assert marks(run.states[0], 6) == [1, 0, 0]
    assert torch.equal(run.ranks._values["keyframes_mask"].flatten(), run.states[0].keyframes_mask.flatten())


def test_keyframes_of_stage_2_begin_as_those_of_stage_1_behind_all_other_tokens():
    plain = job(None, num_generated_keyframes=2)
    tokens = [[x.bucket(stage).video_tokens for stage in x.stages] for x in (plain, replace(plain, compat=EARLIER))]
    assert tokens == [[(3 + 2) * 6, (3 + 2) * 24], [(3 + 2) * 6, 3 * 24]]
    made = replace(plain, images=IMAGES)
    planes, start = randn(1, 128, 2, 4, 6, seed=1), latents.zeros(128, 192, 17, 25.0, torch.float32)
    images = [(image, randn(1, 128, 1, 4, 6, seed=2)) for image in IMAGES]
    video, _ = initial_states(made, True, {"upsampled_keyframes": planes}, start, images, COMPAT[None], torch.float32)
    assert torch.equal(video.latent[:, -48:], latents.patchify_video(planes))
    assert video.clean_latent[:, -48:].abs().sum() == 0 and video.denoise_mask[-48:].min() == 1
    assert marks(video, 24)[-2:] == [1, 1]
    assert len(video.denoise_mask) == made.bucket(made.stages[1]).video_tokens


def test_keyframes_are_generated_beside_references_and_a_mask_behind_them():
    made = job(None, num_generated_keyframes=2, references=(CLIP,), attention_mask=AttentionMask("mask.mp4"))
    made.replaced(ic_lora=(LoraFile("ic"),)).check_rules()
    tensors = {"reference_latent": randn(1, 128, 3, 2, 3), "reference_attention": torch.ones(1, 18)}
    start = latents.zeros(64, 96, 17, 25.0, torch.float32)
    video, _ = initial_states(made, False, tensors, start, [], COMPAT[None], torch.float32)
    assert len(video.denoise_mask) == made.bucket(made.stages[0]).video_tokens == 18 + 18 + 12
    assert marks(video, 6) == [1, *[0] * 5, 1, 1]
    # A keyframe and the clip attend to each other; a keyframe and a reference do not.
    assert video.bias.shape == (48, 48) and video.bias[:18].abs().max() == 0
    assert video.bias[-12:, :18].abs().max() == 0 and video.bias[-12:, 18:36].max() < -1e30
