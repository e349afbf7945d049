"""Stage 1 of LTX-2.5's distilled recipe: marked keyframes, the ancestral sampler, generated keyframes."""

import pytest
import torch
from conftest import ROOT
from helpers import STREAMS, one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace
from ltx25_step import CONFIG, IMAGES, stage_run
from safetensors.torch import load_file

from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.release import RELEASES, Release
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.job import Job, Size
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling import conditions, latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ImageCondition, ReferenceAudio, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.latent_state import initial_states
from ltx_neuron.sampling.latents import between_keyframes
from ltx_neuron.sampling.spec import LoraFile

LTX_2_3, LTX_2_5 = RELEASES
EARLIER = "ltx-pipelines-1.2.0"
SOUND, CLIP = SoundCondition("sound.wav"), ReferenceVideo("clip.mp4", 1.0, 17)


@pytest.mark.parametrize("blocks_per_graph", [0, 1])
def test_a_stage_equals_upstreams(blocks_per_graph):
    """The latents after step 1 and after all, on the same weights, images and contexts in fp32."""
    golden, run, tensors = load_file(ROOT / "test/golden/ltx25_stage_1.safetensors"), stage_run(blocks_per_graph), {}
    with torch.no_grad():
        for number in range(8):
            run.step(number)
            if not number:
                tensors |= {f"{stream}_1": run.ranks.get("", f"{stream}_latent") for stream in STREAMS}
    tensors["video"], tensors["audio"] = run.result()
    tensors["generated_keyframes"] = run.generated_keyframes()
    assert tensors.keys() == golden.keys()
    for name, tensor in golden.items():
        assert rel(tensors[name], tensor) < 1e-6, name


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
    # Other inputs than images are sampled without noise, as upstream does.
    retake = {"retake": Retake("film.mp4", 0.0, 0.3), "size": Size(128, 192, 17)}
    voice = {"reference_sound": ReferenceAudio("voice.wav", 8)}
    for inputs in ({"sound": SOUND}, {"references": (CLIP,)}, voice, retake):
        assert {*samplers(job(**inputs))} == {"euler"}
    assert {*samplers(job(images=IMAGES))} == {"ancestral"}


def test_stage_2_of_the_guided_recipe_keeps_the_sound_of_stage_1_which_is_decoded():
    # What a job of the dev recipe has -> whether stage 2 keeps stage 1's sound, and the stage whose sound is decoded
    for changes, frozen, decoded in (
        ({}, True, 1),
        ({"compat": EARLIER}, False, 1),
        ({"compat": "ltx-core-1.0.0"}, False, 2),
        ({"recipe": "distilled"}, False, 2),
        ({"sampler": "res_2s"}, False, 1),
        ({"images_as_guides": True}, False, 2),
        ({"references": (CLIP,)}, False, 1),
        ({"sound": SOUND, "compat": EARLIER}, True, 1),
    ):
        made = replace(job(None, recipe="dev"), **changes)
        assert made.freezes_sound(True) is frozen and made.freezes_sound(False) is bool(made.sound)
        assert made.audio_key == f"s{decoded}_audio"


def test_an_images_crf_is_the_releases_unless_it_is_given():
    images = ImageCondition("a.png"), ImageCondition("b.png", crf=0)
    for release, crf in ((LTX_2_3, 33), (LTX_2_5, 18)):
        assert [image.crf for image in job(release, images=images).images] == [crf, 0]
    assert [len(image) for image in job(None, images=images).to_line()["image"]] == [3, 4]


def inputs_of(config, bucket) -> dict[str, set[str]]:
    program = dit_program(config, bucket, 1, SingleRank(), torch.float32, 1)
    return {name: {*graph.inputs} for name, graph in program.graphs.items()}


def test_graphs_take_the_keyframes_mask_if_the_model_has_one_and_noise_if_ancestral():
    other, plain = replace(CONFIG, use_keyframes_abs_pos_embedding=False), Bucket(12, 8, 1, 8)
    ancestral = replace(plain, ancestral=True)
    assert CONFIG.digest != other.digest and ancestral.name == f"{plain.name}-ancestral"
    marked, noisy, unmarked = inputs_of(CONFIG, plain), inputs_of(CONFIG, ancestral), inputs_of(other, plain)
    assert marked["head"] - unmarked["head"] == {"keyframes_mask"}
    assert noisy["tail"] - marked["tail"] == {"video_noise", "audio_noise", "ancestral"}
    assert [marked["blocks"], marked["tail"]] == [unmarked["blocks"], unmarked["tail"]]
    assert inputs_of(CONFIG, Bucket(0, 8, 1, 8)) == inputs_of(other, Bucket(0, 8, 1, 8))


def test_keyframes_are_generated_beside_references_and_a_mask_behind_them_but_not_in_stage_2_of_1_2_0():
    wanted = {(0, 17): (), (1, 17): (8,), (2, 17): (5, 11), (3, 121): (30, 60, 90), (3, 5): (1, 2, 3)}
    assert {each: between_keyframes(*each) for each in wanted} == wanted  # the frames where they are
    plain = job(None, num_generated_keyframes=2)
    tokens = [[x.bucket(stage).video_tokens for stage in x.stages] for x in (plain, replace(plain, compat=EARLIER))]
    assert tokens == [[(3 + 2) * 6, (3 + 2) * 24], [(3 + 2) * 6, 3 * 24]]
    made = job(None, num_generated_keyframes=2, references=(CLIP,), attention_mask=conditions.AttentionMask("mask.mp4"))
    made.replaced(ic_lora=(LoraFile("ic"),)).check_rules()
    tensors = {"reference_latent": randn(1, 128, 3, 2, 3), "reference_attention": torch.ones(1, 18)}
    start = latents.zeros(64, 96, 17, 25.0, torch.float32)
    video, _ = initial_states(made, False, tensors, start, [], COMPAT[None], torch.float32)
    assert len(video.denoise_mask) == made.bucket(made.stages[0]).video_tokens == 18 + 18 + 12
    planes = video.keyframes_mask.flatten().unflatten(0, (-1, 6))  # the first frame and keyframes are marked
    assert torch.equal(planes, torch.tensor([1, *[0] * 5, 1, 1])[:, None].expand_as(planes))
    # A keyframe and the clip attend to each other; a keyframe and a reference do not.
    assert video.bias.shape == (48, 48) and video.bias[:18].abs().max() == 0
    assert video.bias[-12:, :18].abs().max() == 0 and video.bias[-12:, 18:36].max() < -1e30
