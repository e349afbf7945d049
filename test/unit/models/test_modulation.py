"""The modulation table's rows are the outputs of ltx-core's AdaLN modules."""

import pytest
import torch
from helpers import SIZES, STREAMS, fp32_bound, one_thread, rel  # noqa: F401
from steps import model_of

from ltx_neuron.engine.residency import _REMEMBERED_TABLES, ModulationTables
from ltx_neuron.models import modulation
from ltx_neuron.models.modulation import A2V, AV_GATE, MODULATION_ROWS, modulation_table
from ltx_neuron.sampling.schedules import DISTILLED_SIGMAS

SIGMAS = torch.tensor(DISTILLED_SIGMAS[:-1])
MASKS = torch.tensor([1.0, 0.0, 0.3])
SHOWS = 0.05  # rows of another timestep
GATE_MULTIPLIER = 250.0  # unlike the release's 1000, which would hide a gate that ignores it


def adaln(module, timestep):
    """Rows (n, D) and the embedded timestep (D,) of an ltx-core AdaLayerNormSingle at one timestep."""
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
        modulation.SELF_ATTENTION.row: rows,
        A2V.row: cross,
        AV_GATE.row: gates,
        modulation.PROMPT.row: prompt,
        modulation.EMBEDDED_TIMESTEP.row: embedded[None],
    }


def check(table, model, stream, **options):
    # The layers of AdaLN sum over the sinusoid's 256 channels, then twice over the width.
    bound = fp32_bound(256, table.shape[-1], table.shape[-1])
    for step, sigma in enumerate(SIGMAS):
        for u, mask in enumerate(MASKS):
            for first, rows in ltx_rows(model, stream, sigma, mask, **options).items():
                for offset, row in enumerate(rows):
                    assert rel(table[step, u, first + offset], row) < bound, (step, u, first + offset)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("cross_sigma", [False, True], ids=["now", "1.0.0"])
def test_every_row_is_that_of_ltx_cores_modules(name, stream, cross_sigma):
    model, config, weights = model_of(name)
    table = modulation_table(weights, config, stream, SIGMAS, MASKS, cross_sigma)
    assert table.shape == (len(SIGMAS), len(MASKS), MODULATION_ROWS, getattr(config, stream).inner)
    assert table.dtype == torch.float32
    check(table, model, stream, cross_sigma=cross_sigma)


@pytest.mark.parametrize("stream", STREAMS)
def test_the_gates_timestep_has_a_scale_of_its_own(stream):
    model, config, weights = model_of(av_ca_timestep_scale_multiplier=GATE_MULTIPLIER)
    table = modulation_table(weights, config, stream, SIGMAS, MASKS)
    check(table, model, stream, gate_factor=GATE_MULTIPLIER / 1000)
    assert rel(table[0, 0, AV_GATE.row], ltx_rows(model, stream, SIGMAS[0], MASKS[0])[AV_GATE.row][0]) > SHOWS


def test_weights_in_bf16_are_widened_not_the_timestep_narrowed():
    _, config, weights = model_of()
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    wide = {name: weight.float() for name, weight in narrow.items()}
    assert torch.equal(*(modulation_table(each, config, "video", SIGMAS, MASKS) for each in (narrow, wide)))


CHANGES = {"stream": "audio", "sigmas": SIGMAS / 2, "masks": MASKS / 2, "cross_sigma": True, "other_sigmas": SIGMAS * 0}


def test_each_schedule_has_its_own_table_which_is_made_once_and_kept_while_few_are():
    _, config, weights = model_of()
    first = {"stream": "video", "sigmas": SIGMAS, "masks": MASKS, "cross_sigma": False, "other_sigmas": SIGMAS}
    tables = ModulationTables(weights, config)
    made = tables(*first.values())
    assert tables("video", SIGMAS.clone(), MASKS.clone(), False, SIGMAS.clone()) is made
    for name, value in CHANGES.items():
        other = first | {name: value}
        assert torch.equal(tables(*other.values()), modulation_table(weights, config, **other)), name
    for number in range(1, 3 * _REMEMBERED_TABLES):
        tables("video", SIGMAS / number, MASKS, False, SIGMAS)
        assert len(tables._tables) <= _REMEMBERED_TABLES
