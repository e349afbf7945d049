"""The res_2s sampler is ltx-pipelines' own loop, bit for bit, with a predictor made up for it; its
schedule, its run over ranks, and what a job of HQ is."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import BF16_ROUNDING, FP32_ROUNDING, STREAMS, one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.backends.ranks import NotFiniteError
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.errors import RunError
from ltx_neuron.job import Size, Stage
from ltx_neuron.models.dit import next_latents
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.sampling.samplers import Res2s, Stream, evaluation_pairs
from ltx_neuron.sampling.schedules import DISTILLED_MAX_STEPS, STAGE_2_SIGMAS, ltx2_schedule
from ltx_neuron.sampling.shapes import GUIDED_MAX_STEPS

TOKENS = {"video": 12, "audio": 7}
GUIDED = ltx2_schedule(5, tokens=18)
SCHEDULES = {"stage 1": GUIDED, "15 steps": ltx2_schedule(15), "stage 2": STAGE_2_SIGMAS}
MASKS = {
    "nothing held": {"video": torch.ones(12, 1), "audio": torch.ones(7, 1)},
    "guides and a first frame in part": {
        "video": torch.tensor([0.3] * 3 + [1.0] * 6 + [0.0] * 3)[:, None],
        "audio": torch.ones(7, 1),
    },
    "sound in part": {
        "video": torch.linspace(0, 1, 12)[:, None],
        "audio": torch.tensor([0.0, 0.0, 0.4, 1.0, 1.0, 0.9, 1.0])[:, None],
    },
}
SHOWS = 1e-3  # what a wrong formula changes at least


def predicted(video, audio, sigma):
    """A made-up model of both streams, in their dtype: each is moved by the other and by sigma."""
    means = video.float().mean(), audio.float().mean()
    x0 = [
        (torch.tanh(x.float() * (1.2 - sigma) + other) * 0.8 + sigma * 0.1).to(x.dtype)
        for x, other in zip((video, audio), reversed(means), strict=True)
    ]
    return tuple(x0)


def starts(dtype):
    """Latents and clean latents of both streams."""
    return {
        stream: [randn(1, count, 8, seed=seed + count).to(dtype) for seed in (1, 2)] for stream, count in TOKENS.items()
    }


def ours(schedule, masks, dtype, sigmas=None):
    """Both latents at the end, and the sigma of every evaluation. sigmas: the model's, if others
    than the graphs'."""
    rows = evaluation_pairs(schedule, 64)[:, 0] if sigmas is None else sigmas
    streams = [Stream(*starts(dtype)[stream], masks[stream]) for stream in STREAMS]
    sampler, seen = Res2s(schedule, *streams), []

    def predict(video, audio, evaluation):
        assert video.dtype == audio.dtype == dtype
        seen.append(rows[evaluation].item())
        x0 = predicted(video, audio, seen[-1])
        return tuple(stream.held(x) for stream, x in zip(streams, x0, strict=True))

    for number in range(len(schedule) - 1):
        sampler.step(number, predict)
    return [stream.latent for stream in streams], seen


def theirs(schedule, masks, dtype, **options):
    """The same of ltx-pipelines' loop, with the sigmas it calls the model with, in float64, and the
    step numbers."""
    from ltx_core.components.diffusion_steps import Res2sDiffusionStep
    from ltx_core.types import LatentState
    from ltx_pipelines.utils.samplers import res2s_audio_video_denoising_loop

    seen, steps = [], []

    def denoise(video_state, audio_state, sigmas, step_index):
        seen.append(sigmas[step_index].item())
        steps.append(step_index)
        return predicted(video_state.latent, audio_state.latent, seen[-1])

    states = [
        LatentState(latent=latent, clean_latent=clean, denoise_mask=masks[stream][None], positions=None)
        for stream, (latent, clean) in starts(dtype).items()
    ]
    states = res2s_audio_video_denoising_loop(
        torch.tensor(schedule), *states, Res2sDiffusionStep(), denoise, model_dtype=dtype, **options
    )
    return [state.latent for state in states], seen, steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_sampler_is_that_of_ltx_pipelines_bit_for_bit(schedule, masks, dtype):
    wanted, sigmas, _ = theirs(SCHEDULES[schedule], MASKS[masks], dtype)
    got, _ = ours(SCHEDULES[schedule], MASKS[masks], dtype, torch.tensor(sigmas, dtype=torch.float64))
    for stream, ours_, theirs_ in zip(STREAMS, got, wanted, strict=True):
        assert ours_.dtype == theirs_.dtype == dtype
        assert torch.equal(ours_, theirs_), (stream, rel(ours_, theirs_))


# --- its evaluations -----------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rows_of_a_stage_are_the_sigmas_that_ltx_pipelines_calls_the_model_with(schedule):
    schedule = SCHEDULES[schedule]
    _, sigmas, steps = theirs(schedule, MASKS["nothing held"], torch.float32)
    rows = evaluation_pairs(schedule, 64)
    count = 2 * (len(schedule) - 1) + 1
    assert len(sigmas) == count and rows.shape == (64, 2) and rows.dtype == torch.float32
    assert torch.equal(rows[:count, 0], torch.tensor(sigmas)) and not rows[:, 1].any()
    assert torch.equal(rows[count:], rows[-1:].expand(64 - count, 2))
    assert steps == list(Stage("s", 64, 64, schedule, sampler="res_2s").evaluations)


def test_rounding_a_substeps_sigma_to_fp32_is_seen_in_the_last_digits_alone():
    masks = MASKS["nothing held"]
    wanted, _, _ = theirs(GUIDED, masks, torch.float32)
    got, _ = ours(GUIDED, masks, torch.float32)
    assert max(rel(a, b) for a, b in zip(got, wanted, strict=True)) < 4 * FP32_ROUNDING


def euler_to_zero(latents, x0, sigma):
    """What a plain graph leaves of a prediction: its Euler step to 0."""
    inputs = {"video_latent": latents[0], "audio_latent": latents[1]}
    denoised = dict(zip(STREAMS, x0, strict=True))
    latents = next_latents(inputs, denoised, torch.tensor([[sigma, 0.0]] * 2))
    return [latents[f"{stream}_latent"] for stream in STREAMS]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, FP32_ROUNDING), (torch.bfloat16, BF16_ROUNDING)])
def test_a_prediction_read_off_an_euler_step_to_0_is_off_by_one_rounding_of_the_latents(dtype, rounding):
    for sigma in evaluation_pairs(STAGE_2_SIGMAS, 8)[:7, 0].tolist():
        latents = [starts(dtype)[stream][0] for stream in STREAMS]
        x0 = predicted(*latents, sigma)
        for got, wanted, latent in zip(euler_to_zero(latents, x0, sigma), x0, latents, strict=True):
            furthest = (latent.float() - wanted.float()).abs().max() + wanted.abs().max()
            assert (got.float() - wanted.float()).abs().max() <= 2 * rounding * furthest


# --- its run over ranks --------------------------------------------------------------------------
class Ranks:
    """Stands for the ranks: each evaluation is the made-up model's, as the graphs leave it."""

    def __init__(self, stage, masks, dtype):
        self.rows = evaluation_pairs(stage.sigmas, stage.max_steps)[:, 0].tolist()
        self.stage, self.tensors, self.seen, self.digests = stage, {}, [], ["a", "a"]
        self.streams = {s: Stream(*starts(dtype)[s], masks[s]) for s in STREAMS}

    def put(self, _name, _like=None, **tensors):
        self.tensors |= tensors

    def get(self, _, name):
        return self.tensors[name]

    def hashes(self, *names):
        assert names == ("video_latent", "audio_latent")
        return self.digests

    def run(self, _, sequence, step):
        self.seen.append((sequence, step))
        latents = [self.tensors[f"{stream}_latent"] for stream in STREAMS]
        x0 = predicted(*latents, self.rows[step])
        if self.stage.guided:
            self.tensors |= {f"guided_{s}": x for s, x in zip(STREAMS, x0, strict=True)}
        held = [self.streams[s].held(x) for s, x in zip(STREAMS, x0, strict=True)]
        # Without the Euler step's rounding: whether more is wrong shows bit for bit.
        self.tensors |= {f"{s}_latent": x for s, x in zip(STREAMS, held, strict=True)}
        return 10.0


def stage_run(stage, masks, dtype=torch.float32) -> StageRun:
    """A prepared stage on those ranks."""
    bucket = Bucket(12, 7, 4, stage.max_steps, stage.guided)
    ranks = Ranks(stage, masks, dtype)
    manifest = SimpleNamespace(fields={"video_latent", "audio_latent"})
    run = StageRun(ranks, CompiledStep(bucket, manifest), None, dtype, None, None)
    run.stage, run.sequence = stage, ["guided" if stage.guided else "main"] * 64
    (run.video, *_), (run.audio, *_) = starts(dtype).values()
    run.states = [
        SimpleNamespace(clean_latent=clean, denoise_mask=masks[stream]) for stream, (_, clean) in starts(dtype).items()
    ]
    return run


HELD = MASKS["sound in part"]
STAGES = {
    "stage_1": Stage("stage_1", 64, 64, GUIDED, guided=True, sampler="res_2s"),
    "stage_2": Stage("stage_2", 64, 64, STAGE_2_SIGMAS, sampler="res_2s"),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_on_ranks_ends_where_ltx_pipelines_does_also_after_a_warm_up(name):
    """Held tokens are put back once: the guided graphs leave that to the host, the plain ones not;
    and noise is that of a stage's beginning, whatever ran before."""
    stage = STAGES[name]
    run = stage_run(stage, HELD)
    run.start()
    run.step(0)
    run.start()
    run.ranks.seen.clear()
    times = [run.step(number) for number in range(stage.steps)]
    assert times == [20.0] * (stage.steps - 1) + [30.0]
    assert [row for _, row in run.ranks.seen] == list(range(2 * stage.steps + 1))
    wanted, _ = ours(stage.sigmas, HELD, torch.float32)
    for got, want in zip([s.latent for s in run.sampler.streams], wanted, strict=True):
        assert torch.equal(got, want)


def test_ranks_that_end_with_different_predictions_are_an_error():
    run = stage_run(STAGES["stage_2"], HELD)
    run.start()
    for number in range(3):
        run.step(number)
    run.ranks.digests = ["a", "b"]
    with pytest.raises(RunError, match="the ranks ended with different latents"):
        run.result()


def test_a_prediction_that_is_not_finite_names_the_step_it_is_of():
    run = stage_run(STAGES["stage_2"], HELD)
    run.start()
    run.step(0)

    def fail(*_, **__):
        raise NotFiniteError(["video_latent"])

    run.ranks.run = fail
    with pytest.raises(RunError, match=r"after step 2 of 3 of stage 2 \(sigma 0.725 to 0.4219\)"):
        run.step(1)


# --- a job of HQ ---------------------------------------------------------------------------------
HQ = make_job("a", Size(128, 192, 17, 24.0, two_stage=True), recipe="dev", sampler="res_2s")


@pytest.mark.parametrize("shape", [(3, 2, 3), (16, 17, 30)])
def test_the_schedule_of_hq_follows_the_tokens_of_stage_1_as_ltx_cores_does(shape):
    from ltx_core.components.schedulers import LTX2Scheduler

    frames, rows, columns = shape
    size = Size(64 * rows, 64 * columns, 8 * frames - 7, two_stage=True)
    first, second = replace(HQ, size=size).stages
    wanted = LTX2Scheduler().execute(15, latent=torch.empty(1, 128, *shape))
    assert torch.equal(torch.tensor(first.sigmas), wanted)
    assert second.sigmas == STAGE_2_SIGMAS and first.sampler == second.sampler == "res_2s"
    euler = replace(HQ, size=size, sampler="euler", num_inference_steps=15)
    assert (torch.tensor(euler.stages[0].sigmas) - wanted).abs().max() > SHOWS


def test_defaults_of_hq_are_those_of_ltx_pipelines():
    from ltx_pipelines.utils.constants import LTX_2_3_HQ_PARAMS

    assert HQ.steps == LTX_2_3_HQ_PARAMS.num_inference_steps
    for stream in STREAMS:
        theirs_ = dataclasses.asdict(getattr(LTX_2_3_HQ_PARAMS, f"{stream}_guider_params"))
        ours_ = dataclasses.asdict(getattr(HQ.resolved_guidance, stream))
        assert ours_ | {"stg_blocks": list(ours_["stg_blocks"])} == theirs_


def test_hq_runs_on_the_graphs_of_the_dev_recipe_in_two_stages():
    most = replace(HQ, num_inference_steps=31)
    most.check()
    dev = replace(most, sampler="euler")
    assert [most.bucket(stage) for stage in most.stages] == [dev.bucket(stage) for stage in dev.stages]
    assert [len(stage.evaluations) for stage in most.stages] == [63, 7]
    assert GUIDED_MAX_STEPS >= 63 and DISTILLED_MAX_STEPS >= 7


@pytest.mark.parametrize(
    ("changes", "releases"),
    {
        "the dev recipe": ({"sampler": "euler"}, ("s1_audio", "s2_audio")),
        "HQ": ({}, ("s1_audio", "s1_audio")),
        "keyframes": ({"sampler": "euler", "images_as_guides": True}, ("s2_audio", "s2_audio")),
        "distilled": ({"sampler": "euler", "recipe": "distilled"}, ("s2_audio", "s2_audio")),
    }.values(),
)
def test_the_sound_of_the_dev_recipe_is_stage_1s_as_upstream_decodes_it(changes, releases):
    job = replace(HQ, **changes)
    compats = None, "ltx-core-1.0.0"
    assert tuple(replace(job, compat=each).audio_key for each in compats) == releases


def test_every_substep_is_a_first_step_to_guidance_that_skips():
    """As upstream calls it: a stream that skips every second step computes in all substeps."""
    guidance = Guidance(StreamGuidance(skip_step=1), StreamGuidance(skip_step=2))
    enabled = guidance.enabled_steps(STAGES["stage_1"].evaluations, 64)
    assert enabled[1:10:2].all()
    assert enabled[0:11:2, 0].tolist() == [1, 0, 1, 0, 1, 0]
    assert enabled[0:11:2, 1].tolist() == [1, 0, 0, 1, 0, 0]
