"""Our DiT step, run on one rank, is ltx-core's LTXModel, X0Model and Euler loop on the same random
fp32 weights."""

import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from golden.patches import later_semantics
from helpers import (  # noqa: F401
    SIZES,
    STREAMS,
    Held,
    block_summands,
    call,
    fp32_bound,
    generator,
    ltx_model,
    made_config,
    one_thread,
    randn,
    rel,
    run_program,
    step_inputs,
    step_number,
)
from steps import AUDIO_TOKENS, EQUAL, FPS, SHAPE, SHOWS, distance, ltx_loop, ltx_state

from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models import dit
from ltx_neuron.models.modulation import AV_GATE
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latent_state import video_state
from ltx_neuron.sampling.latents import audio_positions
from ltx_neuron.sampling.schedules import DISTILLED_SIGMAS, STAGE_2_SIGMAS

# Images of a stage and so the distinct timesteps of its tokens: 1, 2 or 3
JOBS = {
    "text to video": (),
    "image held": (ImageCondition("", 0, 1.0),),
    "image and keyframe held in part": (ImageCondition("", 0, 0.7), ImageCondition("", 8, 0.4)),
}


class Setting(NamedTuple):
    """A random model in both forms and the state of a stage."""

    model: torch.nn.Module
    config: object
    weights: dict
    positions: torch.Tensor
    held: Held


@cache
def model_of(name):
    content, config = made_config(SIZES[name])
    model = ltx_model(content)
    return model, config, model.state_dict()


def setting(name="4 heads of 8", job="text to video") -> Setting:
    model, config, weights = model_of(name)
    images = [(image, randn(1, 128, 1, *SHAPE[1:], seed=20 + i)) for i, image in enumerate(JOBS[job])]
    state = video_state(torch.zeros(1, 128, *SHAPE), FPS, images)
    rows, choice = state.timestep_choice(len(state.masks), torch.float32)
    return Setting(model, config, weights, state.positions, Held(state.denoise_mask, state.clean_latent, rows, choice))


def step_values(s: Setting, sigmas, **options):
    return step_inputs(s.config, s.weights, sigmas, s.positions, AUDIO_TOKENS, s.held, **options)


def program_of(s: Setting, steps, blocks_per_graph=0):
    bucket = Bucket(s.positions.shape[2], AUDIO_TOKENS, len(s.held.masks), steps)
    return dit_program(s.config, bucket, 1, SingleRank(), torch.float32, blocks_per_graph)


def our_latents(s: Setting, sigmas, **options):
    """The latents after all steps of a schedule, by the whole-step graph."""
    values = step_values(s, sigmas, **options)
    program = program_of(s, len(values["sigmas"]))
    for number in range(len(sigmas) - 1):
        values = run_program(program, s.weights, values | step_number(number))
    return {stream: values[f"{stream}_latent"] for stream in STREAMS}


def ltx_states(s: Setting, values):
    """ltx-core's states of both streams for the values of our step."""
    audio = values["audio_latent"]
    ones = torch.ones(AUDIO_TOKENS, 1)
    return {
        "video_state": ltx_state(values["video_latent"], s.held.denoise_mask, s.positions, s.held.clean_latent),
        "audio_state": ltx_state(audio, ones, audio_positions(AUDIO_TOKENS), torch.zeros_like(audio)),
    }


def ltx_latents(s: Setting, sigmas):
    """The latents after all steps of a schedule, by ltx-pipelines' own loop."""
    from ltx_core.model.transformer import X0Model
    from ltx_pipelines.utils.helpers import simple_denoising_func

    values = step_values(s, sigmas)
    denoise = simple_denoising_func(values["video_context"], values["audio_context"], X0Model(s.model))
    return ltx_loop(sigmas, *ltx_states(s, values).values(), denoise)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("job", JOBS)
def test_the_streams_are_ltx_cores_after_the_head_and_after_every_block(name, job):
    from ltx_pipelines.utils.helpers import modality_from_latent_state

    s = setting(name, job)
    values = step_values(s, STAGE_2_SIGMAS) | step_number(1)
    program = program_of(s, len(values["sigmas"]), blocks_per_graph=1)
    ours = []
    for graph, first_block in program.runs["main"][:-1]:
        values |= call(program, graph, first_block, s.weights, values)
        ours.append({stream: values[f"{stream}_hidden"] for stream in STREAMS})

    theirs = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: theirs.append({"video": out[0].x, "audio": out[1].x}))
        for block in s.model.transformer_blocks
    ]
    hooks.append(
        s.model.transformer_blocks[0].register_forward_pre_hook(
            lambda _, __, taken: theirs.append({"video": taken["video"].x, "audio": taken["audio"].x}), with_kwargs=True
        )
    )
    states, sigma = ltx_states(s, values), torch.tensor(STAGE_2_SIGMAS[1])
    with later_semantics():
        s.model(
            modality_from_latent_state(states["video_state"], values["video_context"], sigma),
            modality_from_latent_state(states["audio_state"], values["audio_context"], sigma),
            None,
        )
    for hook in hooks:
        hook.remove()
    assert len(ours) == len(theirs) == s.config.num_layers + 1
    for position, (our_streams, their_streams) in enumerate(zip(ours, theirs, strict=True)):
        assert distance(our_streams, their_streams) < EQUAL, position
    assert distance(ours[0], ours[1]) > SHOWS


@pytest.mark.parametrize(("name", "job"), [*zip(SIZES, JOBS, strict=True)])
def test_a_schedule_ends_with_the_latents_of_ltx_cores_model_and_euler_loop(name, job):
    s = setting(name, job)
    with later_semantics():
        theirs = ltx_latents(s, STAGE_2_SIGMAS)
    ours = our_latents(s, STAGE_2_SIGMAS)
    assert distance(ours, theirs) < EQUAL
    start = step_values(s, STAGE_2_SIGMAS)
    assert distance(ours, {stream: start[f"{stream}_latent"] for stream in STREAMS}) > SHOWS


def test_the_distilled_schedule_of_eight_steps_ends_with_ltx_cores_latents():
    s = setting(job="image held")
    with later_semantics():
        theirs = ltx_latents(s, DISTILLED_SIGMAS)
    assert distance(our_latents(s, DISTILLED_SIGMAS), theirs) < EQUAL


def test_text_to_video_is_that_of_1_0_0_without_any_change_to_it():
    s = setting()
    assert distance(our_latents(s, STAGE_2_SIGMAS), ltx_latents(s, STAGE_2_SIGMAS)) < EQUAL


def test_cross_sigma_is_the_audio_video_modulation_of_1_0_0_which_differs_where_an_image_is_held():
    s = setting(job="image held")
    theirs = ltx_latents(s, STAGE_2_SIGMAS)
    assert distance(our_latents(s, STAGE_2_SIGMAS, cross_sigma=True), theirs) < EQUAL
    assert distance(our_latents(s, STAGE_2_SIGMAS), theirs) > SHOWS


def test_tokens_held_at_full_strength_leave_a_step_as_they_are_in_the_clean_latent():
    s = setting(job="image held")
    values = step_values(s, STAGE_2_SIGMAS)
    per_frame = SHAPE[1] * SHAPE[2]
    values["video_latent"][:, :per_frame] = s.held.clean_latent[:, :per_frame]
    after = run_program(program_of(s, 3), s.weights, values | step_number(0))["video_latent"]
    assert torch.equal(after[:, :per_frame], s.held.clean_latent[:, :per_frame])
    assert rel(after[:, per_frame:], values["video_latent"][:, per_frame:]) > SHOWS


def padded(values, name, dim):
    """A table with its first row of `dim` once more: a row that no step and no token chooses."""
    return {name: torch.cat([values[name], values[name].narrow(dim, 0, 1)], dim)}


@pytest.mark.parametrize("job", JOBS)
def test_rows_that_no_step_and_no_token_chooses_change_no_bit(job):
    """A graph compiled for more timesteps and steps than a job has serves it as well as one of its
    own."""
    s = setting(job=job)
    values = step_values(s, STAGE_2_SIGMAS) | step_number(1)
    exact = run_program(program_of(s, 3), s.weights, values)
    values |= padded(values, "video_modulation", 1)
    values |= {"timestep_mask": torch.cat([s.held.timestep_mask, torch.zeros(len(s.held.timestep_mask), 1)], dim=1)}
    values |= (
        padded(values, "sigmas", 0) | padded(values, "video_modulation", 0) | padded(values, "audio_modulation", 0)
    )
    values |= {"step_numbers": torch.arange(4, dtype=torch.int32)}
    one_more = s._replace(held=s.held._replace(masks=torch.ones(len(s.held.masks) + 1)))
    wider = run_program(program_of(one_more, 4), s.weights, values)
    for stream in STREAMS:
        assert torch.equal(exact[f"{stream}_latent"], wider[f"{stream}_latent"])


@pytest.mark.parametrize(
    "taken", [f"{m}_{kind}" for m in STREAMS for kind in ("context", "cos", "sin", "cross_cos", "cross_sin")]
)
def test_every_input_of_the_blocks_reaches_the_latents(taken):
    s = setting()
    values = step_values(s, STAGE_2_SIGMAS) | step_number(0)
    program = program_of(s, 3)
    before = run_program(program, s.weights, values)
    after = run_program(program, s.weights, values | {taken: values[taken] * 0.5})
    assert max(rel(after[f"{m}_latent"], before[f"{m}_latent"]) for m in STREAMS) > EQUAL


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_that_move_with_their_positions_and_masks_keep_their_latents(stream, job):
    """The order of a stream's tokens is nowhere in the model but in its positions and masks."""
    s = setting(job=job)
    values = step_values(s, STAGE_2_SIGMAS) | step_number(0)
    program = program_of(s, 3)
    before = run_program(program, s.weights, values)
    order = torch.randperm(values[f"{stream}_latent"].shape[1], generator=generator(5))
    tables = [f"{stream}{cross}_{part}" for cross in ("", "_cross") for part in ("cos", "sin")]
    moved = values | {name: values[name][:, :, order] for name in tables}
    moved |= {f"{stream}_latent": values[f"{stream}_latent"][:, order]}
    if stream == "video":
        moved |= {name: values[name][order] for name in ("timestep_mask", "denoise_mask")}
        moved |= {"clean_latent": values["clean_latent"][:, order]}
    after = run_program(program, s.weights, moved)
    (other,) = set(STREAMS) - {stream}
    assert rel(after[f"{stream}_latent"], before[f"{stream}_latent"][:, order]) < EQUAL
    assert rel(after[f"{other}_latent"], before[f"{other}_latent"]) < EQUAL
    unmoved = run_program(program, s.weights, moved | {name: values[name] for name in tables})
    assert rel(unmoved[f"{stream}_latent"], before[f"{stream}_latent"][:, order]) > SHOWS


@pytest.mark.parametrize("job", JOBS)
def test_a_step_of_no_length_leaves_the_latents_and_a_step_to_zero_ends_at_the_prediction(job):
    s = setting(job=job)
    values = step_values(s, (0.7, 0.7, 0.7, 0.0)) | step_number(0)
    program = program_of(s, 3)
    still, ended = (run_program(program, s.weights, values | step_number(n)) for n in (0, 2))
    half = run_program(program, s.weights, step_values(s, (0.7, 0.35)) | step_number(0))
    for name in ("video_latent", "audio_latent"):
        assert rel(still[name], values[name]) < EQUAL
        # Euler's steps from one state lie on a line: half of the way to zero is the middle.
        assert rel(half[name], (values[name] + ended[name]) / 2) < EQUAL


@pytest.mark.parametrize("gate", ["a2v", "v2a"])
def test_without_its_gate_a_stream_hears_nothing_of_the_other(gate):
    """The gate's row of the modulation table is zero, and its learned entry too."""
    listening, other = {"a2v": ("video", "audio"), "v2a": ("audio", "video")}[gate]
    s = setting()
    table = f"scale_shift_table_a2v_ca_{listening}"
    weights = {name: tensor.clone() for name, tensor in s.weights.items()}
    for name, tensor in weights.items():
        if name.endswith(table):
            tensor[AV_GATE.entry] = 0
    values = step_values(s, STAGE_2_SIGMAS) | step_number(0)
    modulation = values[f"{listening}_modulation"].clone()
    modulation[:, :, AV_GATE.rows] = 0
    values |= {f"{listening}_modulation": modulation}
    program, changed = program_of(s, 3), {f"{other}_latent": 2 * values[f"{other}_latent"]}
    before, after = (run_program(program, weights, values | more) for more in ({}, changed))
    assert torch.equal(after[f"{listening}_latent"], before[f"{listening}_latent"])
    assert rel(after[f"{other}_latent"], before[f"{other}_latent"]) > SHOWS
    with_gate = [run_program(program, s.weights, values | more) for more in ({}, changed)]
    assert rel(*(values[f"{listening}_latent"] for values in with_gate)) > EQUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", STREAMS)
def test_one_element_that_is_not_finite_shows_in_the_one_number_of_a_step(stream, dtype):
    """Wherever it lies, and +Inf beside -Inf too."""
    tokens = {"video_latent": 24, "audio_latent": 18}
    pair = {name: randn(1, count, 128).to(dtype) for name, count in tokens.items()}
    sigmas = torch.tensor([[0.7, 0.5], [0.7, 0.5]])

    def number(**planted: str):
        latents = {s: pair[f"{s}_latent"].clone() for s in STREAMS}
        for place, value in planted.items():
            latents[stream].view(-1)[int(place[1:])] = float(value)
        video, audio, finite = dit.next_latents(pair, latents, sigmas).values()
        assert finite.dtype == torch.float32 and finite.shape == (1,)
        assert all(t.isfinite().all() for t in (video, audio)) != bool(planted)
        return finite.item()

    assert math.isfinite(number())
    last = pair[f"{stream}_latent"].numel() - 1
    for place in (0, 1000, last):
        for value in ("nan", "inf", "-inf"):
            assert not math.isfinite(number(**{f"_{place}": value})), (place, value)
    assert not math.isfinite(number(**{"_0": "inf", f"_{last}": "-inf"}))


FF_BIAS = {"ff_bias": False}
PROMPT = {"use_prompt_adaln_single": False}


@pytest.mark.parametrize(
    ("flags", "absent", "count"),
    [
        (FF_BIAS, r"transformer_blocks.0.ff.net.", 2),
        ({"audio_ff_bias": False}, r"transformer_blocks.0.audio_ff.net.", 2),
        (PROMPT, r"transformer_blocks.0.", 2),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_without_a_part_builds_without_its_parameters(flags, absent, count):
    def parameters(**flags):
        program = dit_program(made_config(**flags)[1], Bucket(6, 4, 1, 3), 1, SingleRank(), torch.float32, 1)
        return {name for name, _ in program.graphs["blocks"].module.named_parameters()}

    missing = parameters() - parameters(**flags)
    assert len(missing) == count
    assert all(name.startswith(absent) and name.endswith(("bias", "prompt_scale_shift_table")) for name in missing)
    assert parameters(**flags) < parameters()


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (FF_BIAS, lambda name: ".ff.net." in name and name.endswith("bias")),
        ({"audio_ff_bias": False}, lambda name: ".audio_ff.net." in name and name.endswith("bias")),
        (PROMPT, lambda name: "prompt_adaln" in name or "prompt_scale_shift" in name),
    ],
    ids=["ff_bias", "audio_ff_bias", "use_prompt_adaln_single"],
)
def test_a_config_without_a_part_computes_what_ltx_core_does_where_that_part_is_zero(flags, gone):
    zeroed, _, _ = model_of.__wrapped__("4 heads of 8")
    names = [name for name in zeroed.state_dict() if gone(name)]
    assert names
    whole = ltx_latents(setting(), STAGE_2_SIGMAS)
    for name in names:
        zeroed.get_parameter(name).zero_()
    _, config = made_config(**flags)
    weights = {name: weight for name, weight in zeroed.state_dict().items() if name not in names}
    s = setting()._replace(model=zeroed, config=config, weights=weights)
    theirs = ltx_latents(s, STAGE_2_SIGMAS)
    assert distance(our_latents(s, STAGE_2_SIGMAS), theirs) < EQUAL
    assert distance(theirs, whole) > SHOWS


def test_a_gelu_computed_step_by_step_in_bf16_is_hardly_worse():
    """As a compiler may do it: 1.2 times the rounding of PyTorch's own, which is in fp32. It is
    left to the compiler: in fp32 it might be a pass over the widest activations."""
    x = (2 * randn(256, 1024)).bfloat16()
    own, exact = (F.gelu(value, approximate="tanh") for value in (x, x.double()))
    stepwise = 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))
    assert stepwise.dtype == torch.bfloat16
    assert rel(own, exact) < rel(stepwise, exact) < 1.5 * rel(own, exact)
