"""The XLA lowering check: every planted fault is found in the HLO that torch_xla makes, and the real graphs have none.

Needs torch_xla, so a venv of its own: test/xla/make_xla_venv.sh makes it, and PYTHONPATH=src VENV/bin/python -m pytest
runs this file there.
"""

import re

import pytest
import torch
import torch.distributed as dist
from graphs import FAULTS, RANKS, TP, findings_of, program, text_of
from lint import compare_ranks, hlo, lower
from lint.cases import dtype_of, programs

from ltx_neuron.backends import mesh
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.config.profiles import PROFILES

REASON = "XLA LOWERING NOT CHECKED: torch_xla is not installed here. test/xla/make_xla_venv.sh makes a venv that has it"
pytest.importorskip("torch_xla", reason=REASON)
DTYPE = torch.bfloat16


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_the_hlo(name):
    """Faults of collectives are in test/unit/backends/test_lint.py, in captured HLO."""
    findings = findings_of(lower, FAULTS[name].function)
    assert re.search(FAULTS[name].hlo, text_of(findings)), text_of(findings)


def test_a_value_that_is_the_ranks_own_is_found_though_its_hlo_is_the_same():
    """torch_xla makes a parameter of a tensor that the function makes of Python numbers: the tracing rank's."""
    text = text_of(findings_of(lower, lambda x, index: x * torch.tensor([1.0 + dist.get_rank()] * 8).to(x.device)))
    assert "made while tracing: tensor (8,)" in text and "rank 0 has" in text


def test_a_function_without_a_fault_has_no_finding_and_its_collectives_do_not_come_into_the_next_graph():
    comm = lower.comm(RANKS)
    assert findings_of(lower, lambda x, index: comm.sum(x * 2 @ x.mT, x.float().square().sum(-1))[0]) == []
    for _ in range(2):
        with fake_process_group(TP):
            reading = lower.read(program(lambda x, index: comm.sum(x)[0]), "planted", RANKS, DTYPE, "graph")
        assert len([operation for operation in hlo.operations(reading.text) if operation.collective]) == 1


@pytest.fixture(scope="module")
def graphs():
    """Operations and findings of every graph of the toolkit, tiny and at full width, with one block and with two."""
    graphs = {}
    for case in programs(PROFILES["trn2.3xlarge"], TP, DTYPE):
        readings, dtype = {}, dtype_of(case.name, DTYPE)
        for rank in (0, case.profile.world_size(TP) - 1):
            with fake_process_group(case.profile.world_size(TP), rank, mesh.groups(case.profile, TP)):
                made = case.program(lower, TP)
                for name in made.graphs:
                    reading = lower.read(made, name, case.groups(TP), dtype, name)
                    readings.setdefault(f"{case.name}: {name}", {})[rank] = reading
        for name, of_rank in readings.items():
            operations, findings = of_rank[0].check()
            findings += compare_ranks(name, {rank: reading.text for rank, reading in of_rank.items()})
            graphs[name] = operations, findings
    return graphs


def test_no_graph_has_a_finding_and_every_rank_traces_the_same(graphs):
    # Two widths, each with LTX-2.3 in one block and in two, LTX-2.5, Gemma 4, the video decoder with both forms of its
    # convolutions, the diffusion decoder, the mel decoder and the vocoder. Then the video encoder with both, and
    # layouts with context parallelism, each tiny and at full width.
    each = 115 + 49 + 36 + 8 + 2 * 11 + 12 + 5 + 15
    assert len(graphs) == 2 * each + 2 * (9 + 11) + (17 + 3)
    assert {name: text_of(findings) for name, (_, findings) in graphs.items() if findings} == {}
    used = {operation.name for operations, _ in graphs.values() for operation in operations}
    assert used == hlo.OPERATIONS | hlo.MOST_TENSORS.keys()  # no operation is allowed that none needs


def test_the_graphs_have_as_many_collectives_as_the_models_group_sums(graphs):
    """Three stages of attention, each with one group of statistics and one of outputs, and the feed-forward."""
    counts = {name: sum(o.collective is not None for o in operations) for name, (operations, _) in graphs.items()}
    assert counts["tiny, 1 block: DiT, text to video, cut: blocks"] == 7
    assert counts["tiny, 1 block: DiT, image to video, guided, whole: step"] == 7
    assert counts["tiny, 1 block: Gemma3, 1024 tokens: gemma3"] == 2
    assert counts["tiny, 1 block: connectors: connectors"] == 3
    # The two or three outputs of a group are large, so that each travels alone.
    assert counts["full, 2 blocks: DiT, text to video, whole: step"] == 2 * 11
    # Five gathers and four scattered sums of the video; the tail gathers the velocity.
    assert counts["full, 2 blocks: DiT, text to video, divided, cut: blocks"] == 2 * 16
    assert counts["full, 2 blocks: DiT, text to video, divided, cut: tail"] == 1
