"""Lint finds what neuronx-cc would refuse: in exported and AOT graphs, and in HLO text of torch_xla.

The files in hlo/ are torch_xla 2.9's own text of small functions; test/xla/test_xla_lint.py traces the real graphs."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from graphs import FAULTS, RANKS, TP, findings_of, program, text_of
from helpers import made_config, one_thread  # noqa: F401
from lint import Recorder, check_fx, check_hlo, compare_ranks, fx, hlo
from lint.__main__ import main
from lint.rules import Kind
from tiny import TinySizes

from ltx_neuron.backends import mesh, registry
from ltx_neuron.backends.export import TorchDistComm, fake_process_group, trace
from ltx_neuron.backends.mesh import WORLD as GROUP
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import dit_program

BF16 = torch.bfloat16
CPU, CONTEXT = resolve("cpu"), resolve("cpu", ("context_parallel=4", "attention=sdpa"))
BUCKET = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=3)


# --- exported graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_the_exported_graph(name):
    findings = findings_of(fx, FAULTS[name].function)
    assert re.search(FAULTS[name].exported, text_of(findings)), text_of(findings)
    assert all(finding.graph.startswith("graph") and finding.do for finding in findings)


@pytest.mark.parametrize(("dim", "wrong"), [(0, False), (1, True), (-1, True)])
def test_a_split_into_a_list_of_sizes_is_refused_along_any_dimension_but_the_first(dim, wrong):
    """Not in HLO: torch-xla's lowering is what goes wrong, and HLO is its result."""
    findings = findings_of(fx, lambda x, index: x.split([1, x.shape[dim] - 1], dim)[0] * 2)
    assert bool(findings) == wrong and (not wrong or "reads wrong data" in text_of(findings))


def test_collectives_are_found_by_their_named_groups_and_ranks_have_one_text():
    """Ranks of different groups: torch would number their groups differently."""
    texts, counts, groups = {}, Counter(), mesh.groups(CONTEXT, TP)
    config = made_config(TinySizes(layers=1, heads=2 * TP))[1]
    for rank in (0, CONTEXT.world_size(TP) - 1):
        with fake_process_group(CONTEXT.world_size(TP), rank, groups):
            comms = registry.comm(CONTEXT, TP), registry.context(CONTEXT, TP)
            made = dit_program(config, BUCKET, TP, comms[0], BF16, 1, context=comms[1])
            exported = {name: trace(made, name, BF16) for name in made.graphs}
        texts[rank] = "".join(map(fx.text, exported.values()))
    assert compare_ranks("graph", texts) == []
    for graph in exported.values():
        assert check_fx(graph, groups) == []
        counts.update(o.collective.group for o in fx.operations(graph.graph) if o.collective)
    # Gathers of keys and values, the velocity and maxima of the sound's attention to the video; a sum of its parts.
    assert counts == {GROUP: 11, "cp": 4}
    # Graphs for context parallelism, for ranks without it; and a gather over other ranks than divide the tokens.
    assert "ranks cp, wanted 0" in text_of(check_fx(exported["blocks"], mesh.compiled(CPU, TP)))
    twice = mesh.groups(resolve("cpu", ("context_parallel=2",)), TP)
    text = text_of(check_fx(exported["blocks"], groups | {"cp": twice["cp"]}))
    assert "4 ranks of group cp, which has 2" in text


def test_a_group_by_torchs_own_name_is_found_because_ranks_number_theirs_differently():
    texts, profile = {}, resolve("cpu", ("context_parallel=2",))
    for rank in (0, profile.world_size(TP) - 1):
        with fake_process_group(profile.world_size(TP), rank):
            parts = [dist.new_group(ranks) for ranks in mesh.groups(profile, TP)["tp"]]
            (own,) = (p for p in parts if p is not dist.GroupMember.NON_GROUP_MEMBER)
            comm = TorchDistComm(TP, own.group_name)
            planted = program(lambda x, index, comm=comm: comm.sum(x * 2)[0])
            reading = fx.read(planted, "planted", mesh.groups(profile, TP), BF16, "graph")
        texts[rank] = reading.text
        assert f"ranks {own.group_name}, wanted 0 or cp" in text_of(reading.check()[1])
    (finding,) = compare_ranks("graph", texts)
    assert "rank 0 has" in finding.wrong and "rank 7 has" in finding.wrong


# --- graphs of torch.compile ----------------------------------------------------------------------

COMPILED = {
    "several tensors in one collective": (
        lambda x: [functional.wait_tensor(t) for t in functional.all_reduce_coalesced([x, x * 2], "sum", GROUP)],
        "all_reduce_coalesced.*Comm has only",
    ),
    "a maximum": (lambda x: functional.wait_tensor(functional.all_reduce(x, "max", GROUP)), "reduces by max"),
    "integers": (lambda x: functional.wait_tensor(functional.all_reduce(x.int(), "sum", GROUP)), "NCC_EVRF061"),
    "a collective in place": (lambda x: (dist.all_reduce(x), x * 1)[1], "writes into one of its inputs"),
    "an int64 range": (lambda x: x * torch.arange(8), "s64 is introduced"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_planted_fault_is_found_in_the_graph_that_torch_compile_makes(name):
    function, expected = COMPILED[name]
    torch._dynamo.reset()
    recorder = Recorder()
    with fake_process_group(TP), torch.no_grad():
        torch.compile(function, backend=recorder, fullgraph=True, dynamic=False)(torch.ones(4, 8, dtype=BF16))
        (graph,) = recorder.graphs
        findings = check_fx(graph, RANKS)
    assert re.search(expected, text_of(findings)), text_of(findings)


# --- HLO ------------------------------------------------------------------------------------------

TEXTS = {path.stem: path.read_text() for path in Path(__file__).with_name("hlo").glob("*.txt")}
CAPTURED = {
    "float64": "f64 is introduced",
    "int64": "arithmetic on int64; neuronx-cc to 2.27 computes it as int32; 2.28 by its own",
    "complex": "c64 is introduced",
    "sort": "no sort",
    "triangular_solve": "NCC_EVRF001",
    "nonzero": "known only at run time",
    "table": "holds a constant tensor",
    "groups": "ranks {{0,1},{2,3}}, wanted {{0,1,2,3}}",
    "maximum": "reduces by maximum",
    "layer_norm": "computed in bf16",
    "random": "random numbers",
}


def test_captured_hlo_reads_as_operations_and_has_the_faults_that_were_planted_in_it():
    for name, fault in CAPTURED.items():
        assert fault in text_of(check_hlo(TEXTS[name], RANKS)), name
    assert check_hlo(TEXTS["clean"], RANKS) == []
    operations = [*hlo.operations(TEXTS["clean"])]
    assert {operation.name for operation in operations} >= {"all-reduce", "dot", "exponential", "reduce"}
    reduction, _ = [operation for operation in operations if operation.collective]
    assert (reduction.label, reduction.collective.reduction) == ("all-reduce.44", "add")
    assert reduction.collective.group == "{{0,1,2,3}}"
    assert reduction.results == reduction.operands == (Kind("f32", (4, 1)), Kind("f32", ()))
    with pytest.raises(ValueError, match="no HLO instruction"):
        check_hlo("HloModule nothing", RANKS)


SUM = "%sum (x: f32[], y: f32[]) -> f32[] {\n  ROOT %add.1 = f32[] add(%x, %y)\n}\n"
ENTRY = "ENTRY %main (a: f32[2]) -> f32[2] {{\n  %a.1 = f32[2]{{0}} parameter(0)\n  ROOT %b.2 = {line}\n}}"
GATHER = "f32[8]{0} all-gather(%a.1), dimensions={0}, replica_groups="
CONTEXT_GROUPS = mesh.groups(resolve("trn2.48xlarge", ("context_parallel=2",)), TP)


@pytest.mark.parametrize(
    ("line", "groups", "expected"),
    [
        ("f32[<=2]{0} add(f32[2]{0} %a.1, f32[2]{0} %a.1)", RANKS, "only at run time"),
        ("f8e4m3fn[2]{0} convert(%a.1)", RANKS, "NCC_EVRF051"),
        ('f32[2]{0} custom-call(%a.1), custom_call_target="Other"', RANKS, "NCC_EHCA005"),
        ("f32[2]{0} collective-permute(%a.1), source_target_pairs={{0,1}}", RANKS, "Comm has only all-gather, all-"),
        ("f32[2]{0} all-reduce(%a.1), replica_groups={}, to_apply=%sum", RANKS, "ranks {}"),
        ("f32[1]{0} reduce-scatter(%a.1), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum", RANKS, ""),
        (GATHER + "{{0,1,2,3}}", RANKS, ""),
        (GATHER + "{{0,4},{1,5},{2,6},{3,7}}", CONTEXT_GROUPS, ""),
        (GATHER + "{{0,1,2,3},{4,5,6,7}}", CONTEXT_GROUPS, ""),
        (GATHER + "{{0,1,2,3,4,5,6,7}}", CONTEXT_GROUPS, "wanted {{0,1,2,3},{4,5,6,7}} or {{0,4},{1,5},{2,6},{3,7}}"),
        (GATHER + "{{4,0},{5,1},{6,2},{7,3}}", CONTEXT_GROUPS, "ranks {{4,0},{5,1},{6,2},{7,3}}, wanted"),
        (GATHER + "[2,4]<=[8]", CONTEXT_GROUPS, ""),  # written short
        (GATHER + "[4,2]<=[8]", CONTEXT_GROUPS, "ranks {{0,1},{2,3},{4,5},{6,7}}, wanted"),
    ],
)
def test_a_line_of_hlo_that_the_compiler_refuses_or_over_ranks_of_no_named_group_is_found(line, groups, expected):
    text = text_of(check_hlo(SUM + ENTRY.format(line=line), groups))
    assert expected in text and bool(text) == bool(expected)


# --- the command ----------------------------------------------------------------------------------

# Programs, and one of their graphs. That the exported graphs of all have no finding is test_signatures'.
PROGRAMS = {
    "tiny, 1 block: DiT, text to video, cut": "blocks",
    "tiny, 1 block: Gemma3, 1024 tokens, all states": "gemma3",
    "tiny, 1 block: connectors": "connectors",
}


def test_without_torch_xla_exported_and_compiled_graphs_are_checked_and_a_finding_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    for name, graph in PROGRAMS.items():
        with pytest.raises(UserError, match=r"(?s)was NOT checked.*torch_xla==2.9.\*"):
            main(["--only", name])
        printed = capsys.readouterr().out
        assert f"{name}: {graph}" in printed and "0 findings" in printed
    monkeypatch.setattr(fx, "OPERATIONS", fx.OPERATIONS - {"aten.linear.default"})
    with pytest.raises(SystemExit, match="1"):
        main(["--only", name])
    assert "aten.linear.default" in capsys.readouterr().out
