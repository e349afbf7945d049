"""A DiT step on one rank is ltx-core's model and Euler loop, also where tokens are held, frozen or biased."""

import dataclasses
import math
import re
from typing import NamedTuple

import helpers
import pytest
import torch
from golden.patches import later_semantics
from helpers import SIZES, STREAMS, Held, made_config, randn, rel, run_program, step_inputs, step_number
from helpers import one_thread as one_thread
from steps import AUDIO_TOKENS, EQUAL, FPS, SHAPE, SHOWS, distance, ltx_loop, ltx_state, model_of

from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models import attention, dit
from ltx_neuron.models.modulation import AV_GATE, modulation_table
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latent_state import attention_bias, audio_state, video_state
from ltx_neuron.sampling.latents import audio_positions, audio_seconds, unpatchify_audio
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS, sigma_pairs, stream_sigmas

TOKENS, PER_FRAME = math.prod(SHAPE), SHAPE[1] * SHAPE[2]
OTHER = dict(zip(STREAMS, STREAMS[::-1], strict=True))
LATENTS = "video_latent", "audio_latent"
# Images of a stage and so the distinct timesteps of its tokens: 1, 2 or 3
JOBS = {
    "text to video": (),
    "image held": (ImageCondition("", 0, 1.0),),
    "image and keyframe held in part": (ImageCondition("", 0, 0.7), ImageCondition("", 8, 0.4)),
}


class Setting(NamedTuple):
    model: torch.nn.Module
    config: object
    weights: dict
    positions: torch.Tensor
    held: Held


def setting(name="4 heads of 8", job="text to video") -> Setting:
    images = [(image, randn(1, 128, 1, *SHAPE[1:], seed=20 + i)) for i, image in enumerate(JOBS[job])]
    state = video_state(torch.zeros(1, 128, *SHAPE), FPS, images)
    rows, choice = state.timestep_choice(len(state.masks), torch.float32)
    return Setting(*model_of(name), state.positions, Held(state.denoise_mask, state.clean_latent, rows, choice))


def step_values(s: Setting, sigmas=STAGE_2_SIGMAS, **options):
    return step_inputs(s.config, s.weights, sigmas, s.positions, AUDIO_TOKENS, s.held, **options)


def first_step(s: Setting, number: int = 0):
    return step_values(s) | step_number(number)


def program_of(s: Setting, values, blocks_per_graph=0, kernel="sdpa"):
    kinds = {"audio_timesteps": 1 + ("audio_denoise_mask" in values)}
    kinds |= {"biased": "video_bias" in values, "ancestral": "ancestral" in values}
    timesteps = values["timestep_mask"].shape[1]
    bucket = Bucket(s.positions.shape[2], AUDIO_TOKENS, timesteps, len(values["sigmas"]), **kinds)
    return dit_program(s.config, bucket, 1, SingleRank(), torch.float32, blocks_per_graph, kernel)


def after_step(s: Setting, values, weights=None):
    return run_program(program_of(s, values), weights or s.weights, values)


def our_latents(s: Setting, values, kernel="sdpa"):
    program = program_of(s, values, kernel=kernel)
    for number in range(len(values["sigmas"])):
        values = run_program(program, s.weights, values | step_number(number))
    return {stream: values[f"{stream}_latent"] for stream in STREAMS}


def ltx_states(s: Setting, values, attention_mask=None, audio_mask=None):
    audio, mask = values["audio_latent"], torch.ones(AUDIO_TOKENS, 1) if audio_mask is None else audio_mask
    video = ltx_state(values["video_latent"], s.held.denoise_mask, s.positions, s.held.clean_latent, attention_mask)
    return video, ltx_state(audio, mask, audio_positions(AUDIO_TOKENS), values.get("audio_clean_latent", audio))


def ltx_latents(s: Setting, values, frozen_audio=False, **masks):
    """The latents after all steps of stage 2, by ltx-pipelines' own loop."""
    from ltx_core.model.transformer import X0Model
    from ltx_pipelines.utils.helpers import modality_from_latent_state

    predict = X0Model(s.model)

    def denoise(video_state, audio_state, sigmas, step_index):
        sigma = sigmas[step_index]
        sound = modality_from_latent_state(audio_state, values["audio_context"], sigma)
        if frozen_audio:  # what ltx-pipelines 1.2.0 says of a frozen stream
            sound = dataclasses.replace(sound, sigma=torch.zeros_like(sound.sigma))
        pictures = modality_from_latent_state(video_state, values["video_context"], sigma)
        return predict(video=pictures, audio=sound, perturbations=None)

    return ltx_loop(STAGE_2_SIGMAS, *ltx_states(s, values, **masks), denoise)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("job", JOBS)
def test_the_streams_are_ltx_cores_after_the_head_and_after_every_block(name, job):
    from ltx_pipelines.utils.helpers import modality_from_latent_state

    values = first_step(s := setting(name, job), 1)
    program = program_of(s, values, blocks_per_graph=1)
    ours, theirs = [], []
    for graph, first_block in program.runs["main"][:-1]:
        values |= helpers.call(program, graph, first_block, s.weights, values)
        ours.append({stream: values[f"{stream}_hidden"] for stream in STREAMS})

    def note(video, audio):
        theirs.append({"video": video.x, "audio": audio.x})

    blocks = s.model.transformer_blocks
    hooks = [block.register_forward_hook(lambda _, __, out: note(*out)) for block in blocks]
    hooks.append(blocks[0].register_forward_pre_hook(lambda _, __, x: note(x["video"], x["audio"]), with_kwargs=True))
    sigma = torch.tensor(STAGE_2_SIGMAS[1])
    contexts = values["video_context"], values["audio_context"]
    with later_semantics():
        modalities = zip(ltx_states(s, values), contexts, strict=True)
        s.model(*(modality_from_latent_state(state, context, sigma) for state, context in modalities), None)
    for hook in hooks:
        hook.remove()
    assert len(ours) == len(theirs) == s.config.num_layers + 1
    for position, pair in enumerate(zip(ours, theirs, strict=True)):
        assert distance(*pair) < EQUAL, position
    assert distance(ours[0], ours[1]) > SHOWS


@pytest.mark.parametrize(("name", "job"), [*zip(SIZES, JOBS, strict=True)])
def test_a_schedule_ends_with_the_latents_of_ltx_cores_model_and_euler_loop(name, job):
    values = step_values(s := setting(name, job))
    with later_semantics():
        theirs = ltx_latents(s, values)
    ours = our_latents(s, values)
    assert distance(ours, theirs) < EQUAL
    assert distance(ours, {stream: values[f"{stream}_latent"] for stream in STREAMS}) > SHOWS


def test_cross_sigma_is_the_audio_video_modulation_of_1_0_0_which_differs_where_an_image_is_held():
    for job, as_now in (("text to video", True), ("image held", False)):
        s = setting(job=job)
        theirs = ltx_latents(s, step_values(s))
        assert distance(our_latents(s, step_values(s, cross_sigma=True)), theirs) < EQUAL
        apart = distance(our_latents(s, step_values(s)), theirs)
        assert apart < EQUAL if as_now else apart > SHOWS


@pytest.mark.parametrize(
    "taken", [f"{m}_{kind}" for m in STREAMS for kind in ("context", "cos", "sin", "cross_cos", "cross_sin")]
)
def test_every_input_of_the_blocks_reaches_the_latents(taken):
    s = setting()
    values = first_step(s)
    before, after = after_step(s, values), after_step(s, values | {taken: values[taken] * 0.5})
    assert max(rel(after[f"{m}_latent"], before[f"{m}_latent"]) for m in STREAMS) > EQUAL


@pytest.mark.parametrize("job", ["text to video", "image held"])
def test_a_step_of_no_length_leaves_the_latents_and_half_a_step_to_zero_is_half_of_the_way(job):
    s = setting(job=job)
    values = step_values(s, (0.7, 0.7, 0.7, 0.0))
    still, ended = (after_step(s, values | step_number(n)) for n in (0, 2))
    half = after_step(s, step_values(s, (0.7, 0.35)) | step_number(0))
    for name in ("video_latent", "audio_latent"):
        assert rel(still[name], values[name]) < EQUAL
        assert rel(half[name], (values[name] + ended[name]) / 2) < EQUAL


@pytest.mark.parametrize("stream", STREAMS)
def test_without_its_gate_a_stream_hears_nothing_of_the_other(stream):
    """The gate's row of the modulation table is zero, and its learned entry too."""
    s = setting()
    weights = {name: tensor.clone() for name, tensor in s.weights.items()}
    for name, tensor in weights.items():
        if name.endswith(f"scale_shift_table_a2v_ca_{stream}"):
            tensor[AV_GATE.entry] = 0
    values = first_step(s)
    other = f"{OTHER[stream]}_latent"
    changed = {other: 2 * values[other]}
    with_gate = [after_step(s, values | more)[f"{stream}_latent"] for more in ({}, changed)]
    assert rel(*with_gate) > EQUAL
    values[f"{stream}_modulation"][:, :, AV_GATE.rows] = 0
    before, after = (after_step(s, values | more, weights) for more in ({}, changed))
    assert torch.equal(after[f"{stream}_latent"], before[f"{stream}_latent"])
    assert rel(after[other], before[other]) > SHOWS


# A flag of the config, and a part of the names of the weights that it leaves out
@pytest.mark.parametrize(
    ("flag", "gone"),
    [("ff_bias", r"\.ff\.net\..*bias$"), ("audio_ff_bias", r"\.audio_ff\.net\..*bias$")]
    + [("use_prompt_adaln_single", "prompt_adaln|prompt_scale_shift")],
)
def test_a_config_without_a_part_computes_what_ltx_core_does_where_that_part_is_zero(flag, gone):
    s = setting()
    whole = ltx_latents(s, step_values(s))
    zeroed, _, weights = model_of.__wrapped__()
    for name in [name for name in weights if re.search(gone, name)]:
        zeroed.get_parameter(name).zero_()
        del weights[name]
    s = s._replace(model=zeroed, config=made_config(**{flag: False})[1], weights=weights)
    theirs = ltx_latents(s, step_values(s))
    assert distance(our_latents(s, step_values(s)), theirs) < EQUAL
    assert distance(theirs, whole) > SHOWS


def with_modulation(s: Setting, values, still=(False, False), audio_masks=None):
    """The values with the sigmas of streams of which some are frozen, and audio tokens of these masks."""
    sigmas = stream_sigmas(sigma_pairs(STAGE_2_SIGMAS, len(STAGE_2_SIGMAS) - 1), still)
    own = {name: sigmas[:, i, 0] * (not still[i]) for i, name in enumerate(STREAMS)}
    values = values | {"sigmas": sigmas}
    for name, masks in zip(STREAMS, (None, audio_masks), strict=True):
        masks, other = torch.ones(1) if masks is None else masks, own[OTHER[name]]
        table = modulation_table(s.weights, s.config, name, own[name], masks, other_sigmas=other)
        values[f"{name}_modulation"] = table
    return values


def test_tokens_held_at_full_strength_leave_a_step_as_they_are_in_the_clean_latent():
    s = setting(job="image held")
    values = first_step(s)
    values["video_latent"][:, :PER_FRAME] = s.held.clean_latent[:, :PER_FRAME]
    after = after_step(s, values)["video_latent"]
    assert torch.equal(after[:, :PER_FRAME], s.held.clean_latent[:, :PER_FRAME])
    assert rel(after[:, PER_FRAME:], values["video_latent"][:, PER_FRAME:]) > SHOWS


def test_audio_tokens_that_are_held_are_ltx_cores_and_stay_what_they_are():
    s = setting()
    state = audio_state(unpatchify_audio(randn(1, AUDIO_TOKENS, 128, seed=9)))
    held = state.retake(audio_seconds(AUDIO_TOKENS), 0.2, 0.4)
    masks, choice = held.timestep_choice(2, torch.float32)
    values = step_values(s)
    values["audio_latent"] = torch.where(held.denoise_mask > 0, values["audio_latent"], held.clean_latent)
    retaken = with_modulation(s, values, audio_masks=masks) | {
        "audio_timestep_mask": choice,
        "audio_denoise_mask": held.denoise_mask,
        "audio_clean_latent": held.clean_latent,
    }
    ours = our_latents(s, retaken)
    with later_semantics():
        theirs = ltx_latents(s, retaken, audio_mask=held.denoise_mask)
    assert distance(ours, theirs) < EQUAL
    kept = held.denoise_mask[:, 0] == 0
    assert 0 < kept.sum() < AUDIO_TOKENS
    assert torch.equal(ours["audio"][:, kept], held.clean_latent[:, kept])
    assert rel(ours["video"], our_latents(s, values)["video"]) > SHOWS


def test_a_frozen_stream_keeps_every_bit_and_is_clean_to_the_one_that_listens_to_it():
    s = setting()
    values, moving = with_modulation(s, step_values(s), (False, True)), with_modulation(s, step_values(s))
    ours = our_latents(s, values)
    assert torch.equal(ours["audio"], values["audio_latent"])
    with later_semantics():
        theirs = ltx_latents(s, values, frozen_audio=True, audio_mask=torch.zeros(AUDIO_TOKENS, 1))
    assert rel(ours["video"], theirs["video"]) < EQUAL
    # With the step's sigma for the frozen stream, as ltx-pipelines 1.0.0 has it:
    sigma_of_step = values | {f"{stream}_modulation": moving[f"{stream}_modulation"] for stream in STREAMS}
    assert rel(our_latents(s, sigma_of_step)["video"], theirs["video"]) > SHOWS


@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_a_bias_of_the_videos_self_attention_is_ltx_cores_attention_mask(kernel):
    s, weights = setting(), torch.linspace(0, 1, 6)  # of the last six tokens, as if they were a reference's
    target, mask = TOKENS - len(weights), torch.ones(1, TOKENS, TOKENS)
    mask[:, :target, target:], mask[:, target:, :target] = weights, weights[:, None]
    values = step_values(s)
    bias = {"video_bias": attention_bias(target, [(len(weights), weights)], torch.float32)}
    ours = our_latents(s, values | bias, kernel)
    with later_semantics():
        assert distance(ours, ltx_latents(s, values, attention_mask=mask)) < EQUAL
    plain = our_latents(s, values, kernel)
    assert rel(ours["video"], plain["video"]) > SHOWS
    assert distance(plain, our_latents(s, values)) < EQUAL


def test_rows_that_no_step_and_no_token_chooses_change_no_bit():
    """A graph compiled for more timesteps and steps than a job has serves it as well as one of its own."""
    values = first_step(s := setting(job="image held"), 1)
    exact = after_step(s, values)
    for name, dim in (("video_modulation", 1), ("sigmas", 0), ("video_modulation", 0), ("audio_modulation", 0)):
        values[name] = torch.cat([values[name], values[name].narrow(dim, 0, 1)], dim)
    values["timestep_mask"] = torch.nn.functional.pad(s.held.timestep_mask, (0, 1))
    values["step_numbers"] = torch.arange(4, dtype=torch.int32)
    wider = after_step(s, values)
    assert all(torch.equal(exact[name], wider[name]) for name in LATENTS)


@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_that_move_with_their_positions_and_masks_keep_their_latents(stream):
    """The order of a stream's tokens is nowhere in the model but in its positions and masks."""
    values = first_step(s := setting(job="image and keyframe held in part"))
    before = after_step(s, values)
    order = torch.randperm(values[f"{stream}_latent"].shape[1], generator=helpers.generator(5))
    tables = [f"{stream}{cross}_{part}" for cross in ("", "_cross") for part in ("cos", "sin")]
    moved = values | {name: values[name][:, :, order] for name in tables}
    moved |= {f"{stream}_latent": values[f"{stream}_latent"][:, order]}
    if stream == "video":
        moved |= {name: values[name][order] for name in ("timestep_mask", "denoise_mask")}
        moved |= {"clean_latent": values["clean_latent"][:, order]}
    own, other = f"{stream}_latent", f"{OTHER[stream]}_latent"
    after = after_step(s, moved)
    assert rel(after[own], before[own][:, order]) < EQUAL and rel(after[other], before[other]) < EQUAL
    unmoved = after_step(s, moved | {name: values[name] for name in tables})
    assert rel(unmoved[own], before[own][:, order]) > SHOWS


def test_an_ancestral_step_without_noise_is_eulers_and_noise_is_added_to_what_is_not_held():
    s = setting(job="image held")
    values, ratio = first_step(s), STAGE_2_SIGMAS[1] / STAGE_2_SIGMAS[0]
    values["video_latent"][:, :PER_FRAME] = s.held.clean_latent[:, :PER_FRAME]
    euler = after_step(s, values)
    assert torch.equal(euler["video_latent"][:, :PER_FRAME], values["video_latent"][:, :PER_FRAME])
    values |= {f"{stream}_noise": randn(*values[f"{stream}_latent"].shape, seed=6) for stream in STREAMS}
    values["ancestral"] = torch.tensor([[ratio, 1 - ratio, 1.0, 0.0, 1.0]] * 2)  # see signatures.ANCESTRAL
    without = after_step(s, values)
    values["ancestral"][:, 3] = 1
    noisy = after_step(s, values)
    for stream, held in (("video", PER_FRAME), ("audio", 0)):
        name, noise = f"{stream}_latent", values[f"{stream}_noise"]
        assert rel(without[name], euler[name]) < EQUAL
        assert torch.equal(noisy[name][:, :held], values[name][:, :held])
        assert rel((noisy[name] - without[name])[:, held:], noise[:, held:]) < EQUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", STREAMS)
def test_one_element_that_is_not_finite_shows_in_the_one_number_of_a_step(stream, dtype):
    """Wherever it lies, and +Inf beside -Inf too."""
    pair = {name: randn(1, count, 128).to(dtype) for name, count in zip(LATENTS, (24, 18), strict=True)}
    last = pair[f"{stream}_latent"].numel() - 1
    for planted in ({}, {0: math.nan}, {1000: math.inf}, {last: -math.inf}, {0: math.inf, last: -math.inf}):
        latents = {name: pair[f"{name}_latent"].clone() for name in STREAMS}
        for place, value in planted.items():
            latents[stream].view(-1)[place] = value
        video, audio, finite = dit.next_latents(pair, latents, torch.tensor([[0.7, 0.5], [0.7, 0.5]])).values()
        assert finite.dtype == torch.float32 and finite.shape == (1,)
        assert all(t.isfinite().all() for t in (video, audio)) != bool(planted)
        assert math.isfinite(finite.item()) != bool(planted), planted
