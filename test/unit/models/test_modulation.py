"""The modulation table's rows are the outputs of ltx-core's AdaLN modules."""

import pytest
import torch
from helpers import SIZES, STREAMS, fp32_bound, rel
from helpers import one_thread as one_thread
from steps import model_of

from ltx_neuron.engine.residency import _REMEMBERED_TABLES, ModulationTables
from ltx_neuron.models import modulation
from ltx_neuron.models.modulation import A2V, AV_GATE, MODULATION_ROWS, host_weights, modulation_table
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
    # The rows come from the same products, of many timesteps at once and of one: the layers of AdaLN sum over the
    # sinusoid's 256 channels, then twice over the width.
    bound = fp32_bound(256, table.shape[-1], table.shape[-1])
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


def test_weights_in_bf16_are_widened_not_the_timestep_narrowed():
    _, config, weights = model_of()
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    wide = {name: weight.float() for name, weight in narrow.items()}
    assert torch.equal(*(modulation_table(each, config, "video", SIGMAS, MASKS) for each in (narrow, wide)))


class Read(dict):
    """Weights that note which of them are read."""

    names = ()

    def __getitem__(self, name):
        self.names += (name,)
        return super().__getitem__(name)


def test_the_weights_are_read_for_the_first_table_of_a_schedule_alone():
    _, config, weights = model_of()
    tables = ModulationTables(weights := Read(weights), config)
    first = tables("video", SIGMAS, MASKS, False, SIGMAS)
    read = {*weights.names}
    assert read and not any(name.startswith("audio_") for name in read)
    assert tables("video", SIGMAS.clone(), MASKS.clone(), False, SIGMAS.clone()) is first
    assert {*weights.names} == read
    tables("audio", SIGMAS, MASKS, False, SIGMAS)
    assert {name: weights.get(name).shape for name in weights.names} == host_weights(config)
    for number in range(1, 3 * _REMEMBERED_TABLES):  # no more are kept than fit in memory
        tables("video", SIGMAS / number, MASKS, False, SIGMAS)
        assert len(tables._tables) <= _REMEMBERED_TABLES


CHANGES = {"stream": "audio", "sigmas": SIGMAS / 2, "masks": MASKS / 2, "cross_sigma": True, "other_sigmas": SIGMAS * 0}


@pytest.mark.parametrize("changed", CHANGES)
def test_another_schedule_has_another_table(changed):
    _, config, weights = model_of()
    first = {"stream": "video", "sigmas": SIGMAS, "masks": MASKS, "cross_sigma": False, "other_sigmas": SIGMAS}
    other, tables = first | {changed: CHANGES[changed]}, ModulationTables(weights, config)
    tables(*first.values())
    assert torch.equal(tables(*other.values()), modulation_table(weights, config, **other))
