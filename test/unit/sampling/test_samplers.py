"""The samplers are ltx-pipelines' own loops, bit for bit, with a predictor made up for it; which stage has which."""

import dataclasses
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from helpers import FP32_ROUNDING, STREAMS, one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.backends.ranks import NotFiniteError
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise import StageRun
from ltx_neuron.errors import RunError
from ltx_neuron.job import Size, Stage
from ltx_neuron.sampling import samplers
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.sampling.samplers import GradientEstimation, Res2s, Stream, ancestral_coefficients, evaluation_pairs
from ltx_neuron.sampling.schedules import DISTILLED_MAX_STEPS, DISTILLED_SIGMAS, STAGE_2_SIGMAS, ltx2_schedule
from ltx_neuron.sampling.shapes import GUIDED_MAX_STEPS
from ltx_neuron.sampling.spec import JobFields

TOKENS = {"video": 12, "audio": 7}
GUIDED = ltx2_schedule(5, tokens=18)
SCHEDULES = {"stage 1": GUIDED, "15 steps": ltx2_schedule(15), "stage 2": STAGE_2_SIGMAS}
FREE = {stream: torch.ones(count, 1) for stream, count in TOKENS.items()}
HELD = {"video": torch.linspace(0, 1, 12)[:, None], "audio": torch.tensor([0.0, 0.0, 0.4, 1.0, 1.0, 0.9, 1.0])[:, None]}


def predicted(video, audio, sigma):
    """A made-up model of both streams, in their dtype: each is moved by the other and by sigma."""
    means = video.float().mean(), audio.float().mean()
    return tuple(
        (torch.tanh(x.float() * (1.2 - sigma) + other) * 0.8 + sigma * 0.1).to(x.dtype)
        for x, other in zip((video, audio), reversed(means), strict=True)
    )


def starts(dtype):
    """Latents and clean latents of both streams."""
    return {stream: [randn(1, n, 8, seed=seed + n).to(dtype) for seed in (1, 2)] for stream, n in TOKENS.items()}


def ours(sampler_of, schedule, masks, dtype, sigmas):
    """Both latents at the end. sigmas: of each evaluation."""
    streams = [Stream(*starts(dtype)[stream], masks[stream]) for stream in STREAMS]
    sampler = sampler_of(schedule, *streams)

    def predict(video, audio, evaluation):
        assert video.dtype == audio.dtype == dtype
        x0 = predicted(video, audio, sigmas[evaluation].item())
        return tuple(stream.held(x) for stream, x in zip(streams, x0, strict=True))

    for number in range(len(schedule) - 1):
        sampler.step(number, predict)
    return [stream.latent for stream in sampler.streams]


def theirs(loop, stepper, schedule, masks, dtype, **options):
    """The same of a loop of ltx-pipelines, with the sigmas it calls the model with, in float64, and the steps."""
    from ltx_core.types import LatentState

    seen, steps = [], []

    def denoise(video_state, audio_state, sigmas, step_index):
        seen.append(sigmas[step_index].item())
        steps.append(step_index)
        return predicted(video_state.latent, audio_state.latent, seen[-1])

    states = [
        LatentState(latent=latent, clean_latent=clean, denoise_mask=masks[stream][None], positions=None)
        for stream, (latent, clean) in starts(dtype).items()
    ]
    states = loop(torch.tensor(schedule), *states, stepper, denoise, **options)
    return [state.latent for state in states], torch.tensor(seen, dtype=torch.float64), steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", [FREE, HELD], ids=["nothing held", "held in part"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_res_2s_is_that_of_ltx_pipelines_bit_for_bit(schedule, masks, dtype):
    from ltx_core.components.diffusion_steps import Res2sDiffusionStep
    from ltx_pipelines.utils.samplers import res2s_audio_video_denoising_loop as loop

    wanted, sigmas, steps = theirs(loop, Res2sDiffusionStep(), schedule, masks, dtype, model_dtype=dtype)
    for got, want in zip(ours(Res2s, schedule, masks, dtype, sigmas), wanted, strict=True):
        assert got.dtype == want.dtype == dtype and torch.equal(got, want), rel(got, want)
    # The rows of a stage are the sigmas that the model is called with.
    rows, count = evaluation_pairs(schedule, 64), 2 * (len(schedule) - 1) + 1
    assert len(sigmas) == count and rows.shape == (64, 2) and rows.dtype == torch.float32
    assert torch.equal(rows[:count, 0], sigmas.float()) and not rows[:, 1].any()
    assert torch.equal(rows[count:], rows[-1:].expand(64 - count, 2))
    assert steps == list(Stage("s", 64, 64, schedule, sampler="res_2s").evaluations)
    if dtype == torch.float32:  # rounding a substep's sigma is seen in the last digits alone
        assert max(map(rel, ours(Res2s, schedule, masks, dtype, rows[:, 0]), wanted)) < 4 * FP32_ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_estimation_is_that_of_ltx_pipelines_bit_for_bit(dtype):
    from ltx_core.components.diffusion_steps import EulerDiffusionStep
    from ltx_pipelines.utils.samplers import gradient_estimating_euler_denoising_loop as loop

    schedule = ltx2_schedule(6, 4096)
    wanted, sigmas, _ = theirs(loop, EulerDiffusionStep(), schedule, HELD, dtype)
    got = ours(GradientEstimation, schedule, HELD, dtype, sigmas)
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(got[0][:, 0], starts(dtype)["video"][1][:, 0])  # held


def test_an_ancestral_step_keeps_the_variance_of_a_rectified_flow():
    """The formula in double precision: sigma_down = end ** 2 / sigma, and noise from there up to the end, with the
    signal scaled by the quotient of both alphas."""
    rows = ancestral_coefficients(DISTILLED_SIGMAS, (False, True))
    for row, sigma, end in zip(rows, DISTILLED_SIGMAS, DISTILLED_SIGMAS[1:], strict=False):
        down = end**2 / sigma
        signal = (1 - end) / (1 - down)
        noise = max(end**2 - (down * signal) ** 2, 0) ** 0.5
        wanted = torch.tensor([down / sigma, 1 - down / sigma, signal, noise, float(end > 0)])
        torch.testing.assert_close(row[0], wanted, rtol=2e-5, atol=1e-6)
    assert rows[-1, 0].tolist() == [0, 1, 1, 0, 0]  # the prediction
    assert {tuple(row) for row in rows[:, 1].tolist()} == {(1, 0, 1, 0, 0)}  # a frozen stream stays
    empty = [torch.zeros(1, 16, 4)] * 2
    for seed in (-5, 2**64 - 1):  # every seed has noise
        noise, _, _ = next(samplers.ancestral_steps((1.0, 0.5, 0.0), empty, (False, False), seed))
        wanted = torch.Generator().manual_seed(seed % 2**64)
        assert torch.equal(noise, torch.randn(1, 16, 4, generator=wanted))


def test_ranks_that_differ_and_predictions_that_are_not_finite_are_errors():
    def fail(*_, **__):
        raise NotFiniteError(["video_latent"])

    ranks = SimpleNamespace(hashes=lambda *names: ["a", "a", "b", "a"], get=lambda *_: torch.zeros(1, 1, 128), run=fail)
    compiled = SimpleNamespace(bucket=Bucket(1, 1, timesteps=1, max_steps=3))
    run = StageRun(ranks, compiled, None, torch.float32, None, None)
    run.latent_shape, run.audio_frames, run.video, run.audio = (1, 1, 1), 1, None, None
    with pytest.raises(RunError, match="the ranks ended with different latents"):
        run.result()
    ranks.hashes = lambda *names: ["a"] * 4
    run.result()
    run.stage, run.sequence = Stage("stage_2", 64, 64, STAGE_2_SIGMAS), ["main"] * 3
    with pytest.raises(RunError, match=r"after step 2 of 3 of stage 2 \(sigma 0.725 to 0.4219\)"):
        run.step(1)


def test_every_sampler_is_a_choice_of_the_flag_or_the_ancestral_one_of_a_release():
    assert {*get_args(JobFields.model_fields["sampler"].annotation), "ancestral"} == {*samplers.SAMPLERS}


def test_hq_has_the_schedule_and_defaults_of_ltx_core_and_the_graphs_of_the_dev_recipe():
    from ltx_core.components.schedulers import LTX2Scheduler
    from ltx_pipelines.utils.constants import LTX_2_3_HQ_PARAMS

    hq = make_job("a", Size(128, 192, 17, 24.0, two_stage=True), recipe="dev", sampler="res_2s")
    for size, latent in ((hq.size, (3, 2, 3)), (Size(1088, 1920, 121, two_stage=True), (16, 17, 30))):
        first, second = replace(hq, size=size).stages
        wanted = LTX2Scheduler().execute(15, latent=torch.empty(1, 128, *latent))  # by the tokens of stage 1
        assert torch.equal(torch.tensor(first.sigmas), wanted)
        assert second.sigmas == STAGE_2_SIGMAS and first.sampler == second.sampler == "res_2s"
        euler = replace(hq, size=size, sampler="euler", num_inference_steps=15)
        assert (torch.tensor(euler.stages[0].sigmas) - wanted).abs().max() > 1e-3  # what a wrong one changes
    assert hq.steps == LTX_2_3_HQ_PARAMS.num_inference_steps
    for stream in STREAMS:
        wanted = dataclasses.asdict(getattr(LTX_2_3_HQ_PARAMS, f"{stream}_guider_params"))
        guidance = dataclasses.asdict(getattr(hq.resolved_guidance, stream))
        assert guidance | {"stg_blocks": list(guidance["stg_blocks"])} == wanted
    most = replace(hq, num_inference_steps=31)
    dev, estimating = replace(most, sampler="euler"), replace(hq, sampler="gradient_estimation")
    for job in (most, estimating):
        job.check()
    assert most.buckets == dev.buckets
    assert [len(stage.evaluations) for stage in most.stages] == [63, 7]
    assert GUIDED_MAX_STEPS >= 63 and DISTILLED_MAX_STEPS >= 7
    assert [stage.sampler for stage in estimating.stages] == ["gradient_estimation", "euler"]
    # Every substep is a first step to guidance that skips, as upstream calls it.
    evaluations = Stage("stage_1", 64, 64, GUIDED, guided=True, sampler="res_2s").evaluations
    enabled = Guidance(StreamGuidance(skip_step=1), StreamGuidance(skip_step=2)).enabled_steps(evaluations, 64)
    assert enabled[1:10:2].all() and enabled[0:11:2].T.tolist() == [[1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0]]
