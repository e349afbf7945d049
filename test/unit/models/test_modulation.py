"""The modulation table's rows are the outputs of ltx-core's AdaLN modules."""

from functools import cache

import pytest
import torch
from helpers import SIZES, STREAMS, fp32_bound, ltx_model, made_config, rel
from helpers import one_thread as one_thread

from ltx_neuron.engine.residency import _REMEMBERED_TABLES, ModulationTables
from ltx_neuron.models.modulation import (
    A2V,
    AV_GATE,
    EMBEDDED_TIMESTEP,
    FEED_FORWARD,
    MODULATION_ROWS,
    PROMPT,
    SELF_ATTENTION,
    TEXT_ATTENTION,
    V2A,
    modulation_table,
    sinusoid,
)
from ltx_neuron.sampling.schedules import DISTILLED_SIGMAS, STAGE_2_SIGMAS

SIGMAS = torch.tensor(DISTILLED_SIGMAS[:-1])
MASKS = torch.tensor([1.0, 0.0, 0.3])
SHOWS = 0.05  # rows of another timestep
GATE_MULTIPLIER = 250.0  # unlike the release's 1000, which would hide a gate that ignores it


@cache
def model_of(name="4 heads of 8", **overrides):
    content, config = made_config(SIZES[name], **overrides)
    model = ltx_model(content)
    return model, config, model.state_dict()


def adaln(module, timestep):
    """Rows (n, D) and the embedded timestep (D,) of an ltx-core AdaLayerNormSingle at one
    timestep."""
    rows, embedded = module(timestep.reshape(1), hidden_dtype=torch.float32)
    return rows[0].unflatten(0, (-1, embedded.shape[-1])), embedded[0]


def ltx_rows(model, stream, sigma, mask, gate_factor=1.0, cross_sigma=False):
    """The 17 rows of a stream at one timestep by ltx-core's five modules, by their first row."""
    prefix, gate = {"video": ("", "a2v"), "audio": ("audio_", "v2a")}[stream]
    own, full = mask * sigma * 1000, sigma * 1000
    rows, embedded = adaln(getattr(model, f"{prefix}adaln_single"), own)
    cross, _ = adaln(getattr(model, f"av_ca_{stream}_scale_shift_adaln_single"), full if cross_sigma else own)
    gates, _ = adaln(getattr(model, f"av_ca_{gate}_gate_adaln_single"), full * gate_factor)
    prompt, _ = adaln(getattr(model, f"{prefix}prompt_adaln_single"), full)
    return {
        SELF_ATTENTION.row: rows,
        A2V.row: cross,
        AV_GATE.row: gates,
        PROMPT.row: prompt,
        EMBEDDED_TIMESTEP.row: embedded[None],
    }


def same(width: int) -> float:
    """Bound of rows that come from the same products, of many timesteps at once and of one: the
    layers of AdaLN sum over the sinusoid's 256 channels, then twice over the width."""
    return fp32_bound(256, width, width)


def check(table, model, stream, **options):
    bound = same(table.shape[-1])
    for step, sigma in enumerate(SIGMAS):
        for u, mask in enumerate(MASKS):
            for first, rows in ltx_rows(model, stream, sigma, mask, **options).items():
                for offset, row in enumerate(rows):
                    assert rel(table[step, u, first + offset], row) < bound, (step, u, first + offset)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("stream", STREAMS)
def test_every_row_is_that_of_ltx_cores_modules(name, stream):
    model, config, weights = model_of(name)
    table = modulation_table(weights, config, stream, SIGMAS, MASKS)
    assert table.shape == (len(SIGMAS), len(MASKS), MODULATION_ROWS, getattr(config, stream).inner)
    assert table.dtype == torch.float32
    check(table, model, stream)


def test_the_rows_of_the_five_modules_fill_the_table_without_a_gap():
    groups = (SELF_ATTENTION, FEED_FORWARD, TEXT_ATTENTION, A2V, V2A, AV_GATE, PROMPT, EMBEDDED_TIMESTEP)
    every_row = list(range(MODULATION_ROWS))
    assert [row for group in groups for row in every_row[group.rows]] == every_row
    model, _, _ = model_of()
    modules = ltx_rows(model, "video", SIGMAS[0], MASKS[0])
    assert [row for first, rows in modules.items() for row in range(first, first + len(rows))] == every_row


@pytest.mark.parametrize(
    ("parameter", "groups"),
    [
        ("scale_shift_table", (SELF_ATTENTION, FEED_FORWARD, TEXT_ATTENTION)),
        ("scale_shift_table_a2v_ca_video", (A2V, V2A, AV_GATE)),
        ("prompt_scale_shift_table", (PROMPT,)),
    ],
)
def test_the_groups_of_a_learned_table_take_each_of_its_entries_once(parameter, groups):
    model, _, _ = model_of()
    entries = list(range(len(getattr(model.transformer_blocks[0], parameter))))
    assert [entry for group in groups for entry in entries[group.entries]] == entries


@pytest.mark.parametrize("stream", STREAMS)
def test_cross_sigma_takes_the_steps_sigma_for_audio_video_scale_and_shift_alone(stream):
    model, config, weights = model_of()
    own = modulation_table(weights, config, stream, SIGMAS, MASKS)
    cross = modulation_table(weights, config, stream, SIGMAS, MASKS, cross_sigma=True)
    check(cross, model, stream, cross_sigma=True)
    rows = list(range(A2V.row, AV_GATE.row))
    others = [row for row in range(MODULATION_ROWS) if row not in rows]
    assert torch.equal(own[:, :, others], cross[:, :, others])
    # A token that no image holds has the step's own sigma.
    assert torch.equal(own[:, 0], cross[:, 0])
    assert rel(own[:, 1, rows], cross[:, 1, rows]) > SHOWS


@pytest.mark.parametrize("stream", STREAMS)
def test_the_gates_timestep_has_a_scale_of_its_own(stream):
    model, config, weights = model_of(av_ca_timestep_scale_multiplier=GATE_MULTIPLIER)
    table = modulation_table(weights, config, stream, SIGMAS, MASKS)
    check(table, model, stream, gate_factor=GATE_MULTIPLIER / 1000)
    assert rel(table[0, 0, AV_GATE.row], ltx_rows(model, stream, SIGMAS[0], MASKS[0])[AV_GATE.row][0]) > SHOWS


def test_a_held_tokens_rows_follow_its_own_timestep():
    model, config, weights = model_of()
    table = modulation_table(weights, config, "video", SIGMAS, MASKS)
    for group in (SELF_ATTENTION, FEED_FORWARD, TEXT_ATTENTION, A2V, V2A, EMBEDDED_TIMESTEP):
        assert rel(table[0, 1, group.rows], table[0, 0, group.rows]) > SHOWS
    for group in (AV_GATE, PROMPT):  # by the step's sigma, whatever the token
        assert torch.equal(table[0, 1, group.rows], table[0, 0, group.rows])


def test_rows_do_not_depend_on_what_else_is_in_the_table():
    _, config, weights = model_of()
    table = modulation_table(weights, config, "audio", torch.tensor(STAGE_2_SIGMAS[:-1]), torch.ones(1))
    alone = modulation_table(weights, config, "audio", torch.tensor(STAGE_2_SIGMAS[1:2]), torch.ones(1))
    assert rel(alone[0], table[1]) < same(table.shape[-1])


def test_weights_in_bf16_are_widened_not_the_timestep_narrowed():
    model, config, weights = model_of()
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    wide = {name: weight.float() for name, weight in narrow.items()}
    assert torch.equal(
        modulation_table(narrow, config, "video", SIGMAS, MASKS), modulation_table(wide, config, "video", SIGMAS, MASKS)
    )


def test_the_sinusoid_is_ltx_cores_cosines_first():
    from ltx_core.model.transformer.timestep_embedding import Timesteps

    timesteps = torch.tensor([0.0, 421.875, 909.375, 1000.0])
    theirs = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)(timesteps)
    assert torch.equal(sinusoid(timesteps), theirs)


def test_a_model_without_prompt_adaln_has_rows_of_zeros_for_it():
    _, _, weights = model_of()
    without = {name: weight for name, weight in weights.items() if "prompt_adaln" not in name}
    _, config = made_config(use_prompt_adaln_single=False)
    table = modulation_table(without, config, "video", SIGMAS, MASKS)
    assert (table[:, :, PROMPT.rows] == 0).all()
    assert (table[:, :, EMBEDDED_TIMESTEP.rows] != 0).any()


class Read(dict):
    """Weights that note which of them are read."""

    def __init__(self, weights):
        super().__init__(weights)
        self.names = []

    def __getitem__(self, name):
        self.names.append(name)
        return super().__getitem__(name)


def test_the_weights_are_read_for_the_first_table_of_a_schedule_alone():
    _, config, weights = model_of()
    weights = Read(weights)
    tables = ModulationTables(weights, config)
    first = tables("video", SIGMAS, MASKS, False, SIGMAS)
    assert weights.names and not any(name.startswith("audio_") for name in weights.names)
    weights.names.clear()
    assert tables("video", SIGMAS.clone(), MASKS.clone(), False, SIGMAS.clone()) is first
    assert not weights.names


@pytest.mark.parametrize("changed", ["stream", "sigmas", "masks", "cross_sigma", "other_sigmas"])
def test_another_schedule_has_another_table(changed):
    _, config, weights = model_of()
    given = {"stream": "video", "sigmas": SIGMAS, "masks": MASKS, "cross_sigma": False, "other_sigmas": SIGMAS}
    other = {
        "stream": "audio",
        "sigmas": SIGMAS / 2,
        "masks": MASKS / 2,
        "cross_sigma": True,
        "other_sigmas": SIGMAS * 0,
    }
    tables = ModulationTables(weights, config)
    tables(*given.values())
    asked = {**given, changed: other[changed]}
    expected = modulation_table(weights, config, **asked)
    torch.testing.assert_close(tables(*asked.values()), expected, rtol=0, atol=0)


def test_no_more_tables_are_kept_than_fit_in_memory():
    _, config, weights = model_of()
    tables = ModulationTables(weights, config)
    for number in range(1, 3 * _REMEMBERED_TABLES):
        tables("video", SIGMAS / number, MASKS, False, SIGMAS)
        assert len(tables._tables) <= _REMEMBERED_TABLES
