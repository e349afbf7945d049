"""Guidance is ltx-core's: the predictions of the passes, what is made of them, and the schedule."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import FP32_ROUNDING, STREAMS, randn, rel, step_number
from jobs import make_job, replace
from typed import said

from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise.guided_passes import prepare_passes
from ltx_neuron.errors import UserError
from ltx_neuron.models.guided import Guide
from ltx_neuron.models.signatures import PASSES
from ltx_neuron.sampling import guidance
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import DEFAULTS, NEGATIVE_PROMPT, SHORT_NEGATIVE_PROMPT, Guidance, StreamGuidance
from ltx_neuron.sampling.latent_state import video_state
from ltx_neuron.sampling.schedules import ltx2_schedule, sigma_pairs
from ltx_neuron.sampling.shapes import GUIDED_MAX_STEPS
from ltx_neuron.sampling.spec import GuidanceFields, flag_of

EXACT = 16 * FP32_ROUNDING  # elementwise arithmetic, and sigmas from 0 to 1, of at most sixteen roundings
SHAPE, AUDIO_TOKENS, LAYERS, STEPS, STEP = (2, 2, 3), 9, 3, 5, 2
OFF, FULL = StreamGuidance(), StreamGuidance(3.0, 1.0, (1,), 3.0, 0.7)
VIDEO_AND_AUDIO = {
    "the defaults": (FULL, replace(FULL, cfg_scale=7.0)),
    "no rescale": (replace(FULL, rescale_scale=0.0), replace(FULL, rescale_scale=0.0, modality_scale=1.5)),
    "unlike scales": (replace(FULL, rescale_scale=1.0), replace(FULL, stg_scale=-0.5, rescale_scale=0.25)),
    "cfg of audio alone": (OFF, replace(OFF, cfg_scale=4.0)),
    "stg of video alone": (replace(OFF, stg_scale=2.0, stg_blocks=(0,)), OFF),
    "nothing": (OFF, OFF),
}


@cache
def state():
    """A stage's state with a first frame and a keyframe (appended tokens), both held in part."""
    images = ImageCondition("", 0, 0.7), ImageCondition("", 8, 0.4)
    given = [(image, randn(1, 128, 1, *SHAPE[1:], seed=seed)) for seed, image in enumerate(images, 20)]
    return video_state(torch.zeros(1, 128, *SHAPE), 24.0, given)


@cache
def predictions() -> dict[str, torch.Tensor]:
    """Random predictions that resemble each other; tokens differ in size and none has mean 0."""
    tensors, tokens = {}, {"video": state().latent.shape[1], "audio": AUDIO_TOKENS}
    for s, stream in enumerate(STREAMS):
        size = torch.linspace(0.3, 2.0, tokens[stream])[None, :, None]
        cond = (randn(1, tokens[stream], 128, seed=s) + 0.8) * size
        for i, name in enumerate(PASSES):
            tensors[f"{name}_{stream}"] = cond + (0.4 * i) * randn(1, tokens[stream], 128, seed=10 * i + s)
        tensors[f"{stream}_latent"] = randn(1, tokens[stream], 128, seed=50 + s)
        tensors[f"guided_{stream}"] = randn(1, tokens[stream], 128, seed=60 + s)
    return tensors


def guide(video, audio) -> dict[str, torch.Tensor]:
    """What our graph returns at STEP."""
    values = {
        "step_numbers": torch.arange(GUIDED_MAX_STEPS, dtype=torch.int32),
        "sigmas": sigma_pairs(ltx2_schedule(STEPS), GUIDED_MAX_STEPS)[:, None].expand(-1, 2, 2),
        "enabled_steps": torch.ones(GUIDED_MAX_STEPS, 2),
        "guidance": Guidance(video, audio).weights(),
        "denoise_mask": state().denoise_mask,
        "clean_latent": state().clean_latent,
    }
    return Guide()(predictions() | step_number(STEP) | values)


def guider(stream: StreamGuidance):
    """ltx-core's."""
    from ltx_core.components.guiders import MultiModalGuider, MultiModalGuiderParams

    return MultiModalGuider(MultiModalGuiderParams(**vars(stream)))


@pytest.mark.parametrize("name", VIDEO_AND_AUDIO)
def test_the_guided_prediction_and_the_next_latents_are_ltx_cores(name):
    from ltx_core.components.diffusion_steps import EulerDiffusionStep
    from ltx_pipelines.utils.helpers import post_process_latent

    ours, sigmas = guide(*VIDEO_AND_AUDIO[name]), torch.tensor(ltx2_schedule(STEPS))
    assert ours["finite"].isfinite().all()
    for stream, parameters in zip(STREAMS, VIDEO_AND_AUDIO[name], strict=True):
        theirs = guider(parameters).calculate(*(predictions()[f"{name}_{stream}"] for name in PASSES))
        assert rel(ours[f"guided_{stream}"], theirs) < EXACT
        if stream == "video":
            theirs = post_process_latent(theirs, state().denoise_mask, state().clean_latent)
        after = EulerDiffusionStep().step(predictions()[f"{stream}_latent"], theirs, sigmas, STEP)
        assert rel(ours[f"{stream}_latent"], after) < EXACT


def stg(blocks, scale=1.0) -> StreamGuidance:
    return replace(OFF, stg_scale=scale, stg_blocks=blocks)


def test_what_is_kept_in_each_block_is_ltx_cores_mask():
    """Predictions of the passes that keep so much: test/integration/test_golden.py, "guided"."""
    from ltx_core.guidance import perturbations as ltx

    kinds = [ltx.PerturbationType[f"SKIP_{x}_ATTN"] for x in ("VIDEO_SELF", "AUDIO_SELF", "A2V_CROSS", "V2A_CROSS")]

    def theirs(*perturbed) -> torch.Tensor:
        skipped = [ltx.Perturbation(kinds[kind], blocks) for kind, blocks in perturbed]
        batched = ltx.BatchedPerturbationConfig([ltx.PerturbationConfig(skipped)])
        masks = [[batched.mask(kind, block, "cpu", torch.float32) for kind in kinds] for block in range(4)]
        return torch.stack([torch.cat(row) for row in masks])

    for video, audio, name, perturbed in (
        (OFF, OFF, "cond", ()),
        (stg((0, 3)), stg((2,)), "perturbed", ((0, [0, 3]), (1, [2]))),
        (stg((0,), 0.0), stg((2,)), "perturbed", ((1, [2]),)),
        (OFF, OFF, "isolated", ((2, None), (3, None))),
    ):
        assert torch.equal(Guidance(video, audio).keep(name, 4, torch.float32), theirs(*perturbed))


@pytest.fixture
def ranks() -> SimpleNamespace:
    """Keeps what would be uploaded and defined."""
    kept = SimpleNamespace(tp=1, cp=1, tensors={}, sequences={}, put_numbers=lambda *_: None)
    kept.put = lambda _, like=None, **tensors: kept.tensors.update(tensors)
    kept.define = lambda _, sequence, runs: kept.sequences.update({sequence: runs})
    return kept


def defined(ranks, guidance: Guidance, compat_1_0_0: bool = False) -> list[str]:
    """The sequence of every step of a stage with that guidance."""
    bucket = Bucket(2, 3, 1, max_steps=8, guided=True)
    contexts = [SimpleNamespace(video=torch.full((1,), i), audio=torch.full((1,), -i)) for i in (1, 2)]
    return prepare_passes(ranks, bucket, guidance, range(6), contexts, LAYERS, torch.float32, compat_1_0_0)


NEEDED = {
    "nothing": (OFF, OFF, ("cond",)),
    "cfg 1 to the last digit but one": (replace(OFF, cfg_scale=1 + 1e-10), OFF, ("cond",)),
    "cfg of one stream": (OFF, replace(OFF, cfg_scale=0.0), ("cond", "uncond")),
    "stg": (stg((1,), -1.0), OFF, ("cond", "perturbed")),
    "modality": (OFF, replace(OFF, modality_scale=2.0), ("cond", "isolated")),
    "all": (FULL, OFF, ("cond", "uncond", "perturbed", "isolated")),
}


@pytest.mark.parametrize(("video", "audio", "needed"), NEEDED.values(), ids=NEEDED)
def test_a_step_runs_the_passes_that_a_stream_needs_and_no_other(ranks, video, audio, needed):
    guidance = Guidance(video, audio)
    assert guidance.passes() == needed and defined(ranks, guidance) == ["guided"] * 6
    *passes, (last, unread, _) = ranks.sequences["guided"]
    assert [writes["video_x0"] for _, _, writes in passes] == [f"{kind}_video" for kind in needed]
    assert (last, unread) == ("guide", {f"{k}_{s}": f"cond_{s}" for k in PASSES if k not in needed for s in STREAMS})
    assert len(make_job("a", recipe="dev", guidance=guidance).texts) == (2 if "uncond" in needed else 1)
    for _, reads, writes in passes:  # the negative pass reads both negative contexts
        if writes["video_x0"] == "uncond_video":
            assert [ranks.tensors[reads[f"{stream}_context"]].item() for stream in STREAMS] == [2, -2]


@pytest.mark.parametrize("compat", [False, True])
def test_a_step_that_both_streams_skip_runs_no_pass(ranks, compat):
    """Only the first release computes a skipped stream in the negative pass."""
    sequence = defined(ranks, Guidance(replace(FULL, skip_step=1), replace(FULL, skip_step=2)), compat)
    assert sequence == ["guided", "repeat", "guided", "guided", "guided", "repeat"]
    assert [run for run, _, _ in ranks.sequences["repeat"]] == ["guide"]
    assert ranks.tensors["enabled_steps"][:6].tolist() == [[1, 1], [0, 0], [1, 0], [0, 1], [1, 0], [0, 0]]
    reads = {writes["video_x0"]: reads for _, reads, writes in ranks.sequences["guided"][:-1]}
    assert [name for name, read in reads.items() if "enabled_steps" in read] == (["uncond_video"] if compat else [])
    assert not compat or ranks.tensors["enabled_always"].all()


def test_the_schedule_and_the_skipped_steps_are_ltx_cores():
    from ltx_core.components.schedulers import LTX2Scheduler

    for steps in (*range(1, 41), GUIDED_MAX_STEPS):
        ours, theirs = torch.tensor(ltx2_schedule(steps)), LTX2Scheduler().execute(steps)
        assert ours.shape == theirs.shape == (steps + 1,)
        assert (ours - theirs).abs().max() <= EXACT, steps
        assert ours[-2] == pytest.approx(0.1) and ours[-1] == 0
    for skip in range(4):
        ours = replace(OFF, skip_step=skip)
        assert [ours.computes(n) for n in range(12)] == [not guider(ours).should_skip_step(n) for n in range(12)]


def test_flags_and_defaults_are_those_of_ltx_pipelines():
    from ltx_pipelines.utils.args import default_1_stage_arg_parser
    from ltx_pipelines.utils.constants import DEFAULT_NEGATIVE_PROMPT, LTX_2_3_PARAMS

    assert LTX_2_3_PARAMS.num_inference_steps == guidance.DEFAULT_STEPS
    # 1.2.0 added words before those of the installed release.
    assert SHORT_NEGATIVE_PROMPT == DEFAULT_NEGATIVE_PROMPT
    assert NEGATIVE_PROMPT.endswith(f"speech_ending_short, {DEFAULT_NEGATIVE_PROMPT}")
    for compat, wanted in ((None, NEGATIVE_PROMPT), ("ltx-core-1.0.0", SHORT_NEGATIVE_PROMPT)):
        assert make_job("rain", recipe="dev", compat=compat).texts == ("rain", wanted)
    for stream in STREAMS:
        ours = dataclasses.asdict(getattr(DEFAULTS, stream))
        theirs = dataclasses.asdict(getattr(LTX_2_3_PARAMS, f"{stream}_guider_params"))
        assert ours | {"stg_blocks": list(ours["stg_blocks"])} == theirs
    theirs = default_1_stage_arg_parser(params=LTX_2_3_PARAMS)._option_string_actions
    assert {*map(flag_of, GuidanceFields.model_fields)} <= theirs.keys()
    words = "--a2v-guidance-scale", 2, "--audio-stg-blocks", 1, 2, "--video-stg-blocks", "--video-skip-step", 1
    # a2v is video's.
    wanted = replace(DEFAULTS.video, modality_scale=2.0, stg_blocks=(), skip_step=1)
    assert said("--recipe", "dev", *words).guidance == Guidance(wanted, replace(DEFAULTS.audio, stg_blocks=(1, 2)))
    assert said("--recipe", "dev").guidance is None


def test_blocks_that_the_model_lacks_are_named_unless_nothing_reads_them():
    with pytest.raises(UserError, match=r"(?s)audio.* 28: this model has blocks 0\.\.2"):
        Guidance(stg((1,)), stg((2, 28))).check(LAYERS)
    Guidance(stg((28,), 0.0), OFF).check(LAYERS)
