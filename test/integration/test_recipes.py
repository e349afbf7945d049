"""The dev recipe, LoRAs, images, upscaling and HQ against ltx-core (test/recipes_oracle.py), latent
for latent, through the engine that the scripts call. By the scripts, and more of each:
test/slow/test_recipes.py."""

import oracle
import pytest
import recipe_runs
import recipes_oracle
import torch
from jobs import replace
from nag_oracle import Nag, guided
from recipe_runs import GUIDED, NIGHT, assert_equals_the_oracle, generate, hq_job, image_job, told, told_hq

from ltx_neuron.artifacts import build
from ltx_neuron.errors import UserError

assets, opened, wanted = recipe_runs.assets, recipe_runs.opened, recipe_runs.wanted  # fixtures


@pytest.mark.parametrize(("tp", "blocks", "settings"), [(1, 1, ()), (2, 2, ("sequence_parallel=true",))])
def test_a_guided_stage_equals_ltx_core_pass_by_pass(opened, wanted, tp, blocks, settings):
    engine = opened(tp, blocks, settings)
    got, want = generate(engine, told(GUIDED)), wanted(GUIDED)
    assert {name.split(".")[1] for name in want if "step0" in name} == {
        *("cond", "uncond", "perturbed", "isolated", "guided")
    }
    assert_equals_the_oracle(got, want)
    if tp > 1:
        engine.close()


def test_two_guidance_groups_make_the_bits_of_one_and_go_on_as_one(opened, capfd):
    """What each pass predicts too, which the groups send each other."""
    one, two = opened(), opened(settings=("guidance_parallel=2",))
    want = generate(one, told(GUIDED))
    for dies in (True, False):
        got = generate(two, told(GUIDED))
        assert {name for name in want if not torch.equal(got[name], want[name])} == set()
        if dies:
            two.residency.ranks.groups[2]._processes[0].kill()
    assert "group 2 lost after stage 1 (rank 0 of 1 failed: the process" in capfd.readouterr().err
    two.close()


def test_guidance_of_other_terms_blocks_and_scales_runs_on_the_same_graphs(opened, wanted):
    stg, cfg = (("stg_scale", 1.5), ("stg_blocks", (2,))), (("cfg_scale", 3.5),)
    job, engine = replace(GUIDED, video=stg, audio=cfg, steps=2), opened()
    graphs = [build.make(engine.workspace, engine.workspace.dit_graphs(told(each).buckets)) for each in (GUIDED, job)]
    assert graphs[0] == graphs[1]
    assert_equals_the_oracle(generate(engine, told(job)), wanted(job))


def test_the_model_versions_guidance_is_used_where_none_is_said(opened):
    job = replace(told(GUIDED), guidance=None)
    with pytest.raises(UserError, match="28: this model has blocks 0..3"):  # its STG block, of 48
        generate(opened(), job)


def test_latents_upscaled_in_space_and_in_time_equal_ltx_cores(opened, wanted, assets):
    from ltx_core.model.upsampler import upsample_video

    got, latent = generate(opened(), told(GUIDED, upscale="both")), wanted(GUIDED)["s1_video"]
    models = oracle.ledger(assets, torch.float32)
    with torch.no_grad():
        latent = upsample_video(latent, models.video_encoder(), models.spatial_upsampler())
    in_time = recipes_oracle.upsampled_in_time(assets, latent)
    assert in_time.shape[2] == 2 * latent.shape[2] - 1
    assert_equals_the_oracle(got, {"upsampled": latent, "temporal_video": in_time})


def test_a_lora_images_and_a_keyframe_in_two_stages_equal_ltx_core(opened, wanted, assets):
    job = image_job(assets, (0, 0.8), (9, 0.3), loras=((assets.lora, 0.45),))
    assert_equals_the_oracle(generate(opened(), told(job)), wanted(job))


def test_hq_equals_ltx_pipelines_and_sounds_as_stage_1(opened, wanted, assets):
    engine = opened()
    got = generate(engine, told_hq(assets), decode=True)
    want = wanted(hq_job(assets))
    want = {name: tensor for name, tensor in want.items() if "step0" not in name}
    assert_equals_the_oracle(got, want | {"final_audio": want["s1_audio"]})
    assert torch.equal(got["waveform"], engine.host.decode_audio(got["s1_audio"]))


def test_a_negative_prompt_in_both_distilled_stages_equals_the_papers_equations(opened, assets):
    job = image_job(assets, (0, 0.8))
    with guided(Nag(11.0), *recipes_oracle.contexts(assets, NIGHT)):
        want = recipes_oracle.generate(assets, job)
    got = generate(opened(), told(job, nag_scale=11.0, negative_prompt=NIGHT))
    assert_equals_the_oracle(got, want)
