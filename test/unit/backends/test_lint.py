"""Lint finds what neuronx-cc would refuse: in exported and AOT graphs, and in HLO text captured
from torch_xla.

The files in hlo/ are torch_xla 2.9's own text of small functions; test/xla/test_xla_lint.py
traces the real graphs.
"""

import dataclasses
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from graph_faults import FAULTS, program
from helpers import made_config, one_thread  # noqa: F401
from lint import Recorder, cases, check_fx, check_hlo, compare_ranks, fx, hlo
from lint.__main__ import main, table
from lint.rules import Finding, Kind
from tiny import TinySizes

from ltx_neuron.backends import mesh, registry
from ltx_neuron.backends.export import TorchDistComm, fake_process_group, trace
from ltx_neuron.backends.mesh import WORLD as GROUP
from ltx_neuron.backends.torchdist.compiled import OPTIONS, Compiled
from ltx_neuron.config.profiles import Profile, resolve
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import dit_program, gemma3_program, tile_program

TP = 4
RANKS = {"tp": [[*range(TP)]]}
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


CONTEXT = resolve("cpu", ("context_parallel=4", "attention=sdpa"))


def in_context(profile: Profile, rank: int = 0):
    """A process group of a profile's world."""
    return fake_process_group(profile.world_size(TP), rank, mesh.groups(profile, TP))


def context_program(profile: Profile):
    """A DiT with padding, cut into graphs, for a profile's layout."""
    config = made_config(TinySizes(layers=1, heads=2 * TP))[1]
    bucket = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=3)
    comms = registry.comm(profile, TP), registry.context(profile, TP)
    return dit_program(config, bucket, TP, comms[0], torch.bfloat16, 1, context=comms[1])


def text_of(findings):
    return "\n".join(f"{finding.operation}: {finding.wrong}" for finding in findings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_the_exported_graph(name):
    readings = {}
    for rank in (0, TP - 1):
        with fake_process_group(TP, rank):
            readings[rank] = fx.read(program(FAULTS[name].function), "planted", RANKS, torch.bfloat16, "graph")
    findings = readings[0].check()[1] + compare_ranks(
        "graph", {rank: reading.text for rank, reading in readings.items()}
    )
    assert re.search(FAULTS[name].exported, text_of(findings)), text_of(findings)
    assert all(finding.graph.startswith("graph") and finding.do for finding in findings)


@pytest.mark.parametrize(("dim", "actual"), [(0, False), (1, True), (-1, True)])
def test_a_split_into_a_list_of_sizes_is_refused_along_any_dimension_but_the_first(dim, actual):
    """Not in HLO: torch-xla's lowering is what goes wrong, and HLO is its result."""

    def split(x, index):
        first, *_ = x.split([1, x.shape[dim] - 1], dim)
        return first * 2

    with fake_process_group(TP):
        reading = fx.read(program(split), "planted", RANKS, torch.bfloat16, "graph")
        _, findings = reading.check()
    assert [finding for finding in findings if "reads wrong data" in finding.wrong] or not actual
    assert bool(findings) == actual


def test_an_exported_graph_without_a_fault_has_no_finding():
    comm = TorchDistComm(TP)
    with fake_process_group(TP):
        reading = fx.read(program(lambda x, index: comm.sum(x * 2)[0]), "planted", RANKS, torch.bfloat16, "graph")
        operations, findings = reading.check()
    assert findings == []
    assert [operation.collective.group for operation in operations if operation.collective] == [GROUP]


def test_the_collectives_of_each_named_group_are_found_and_ranks_have_one_text():
    """Ranks of different groups: torch would number their groups differently."""
    texts, counts = {}, Counter()
    for rank in (0, CONTEXT.world_size(TP) - 1):
        with in_context(CONTEXT, rank):
            made = context_program(CONTEXT)
            exported = {name: trace(made, name, torch.bfloat16) for name in made.graphs}
        texts[rank] = "".join(fx.text(each) for each in exported.values())
    assert compare_ranks("graph", texts) == []
    for each in exported.values():
        assert check_fx(each, mesh.groups(CONTEXT, TP)) == []
        counts.update(o.collective.group for o in fx.operations(each.graph) if o.collective)
    # Keys and values are gathered; the sound's attention to the video gathers maxima and sums
    # parts; the velocity is gathered.
    assert counts == {GROUP: 11, "cp": 4}


def test_a_group_by_torchs_own_name_is_found_because_ranks_number_theirs_differently():
    texts, profile = {}, resolve("cpu", ("context_parallel=2",))
    for rank in (0, profile.world_size(TP) - 1):
        with fake_process_group(profile.world_size(TP), rank):
            parts = [dist.new_group(ranks) for ranks in mesh.groups(profile, TP)["tp"]]
            (own,) = (p for p in parts if p is not dist.GroupMember.NON_GROUP_MEMBER)
            comm = TorchDistComm(TP, own.group_name)
            planted = program(lambda x, index, comm=comm: comm.sum(x * 2)[0])
            groups = mesh.groups(profile, TP)
            reading = fx.read(planted, "planted", groups, torch.bfloat16, "graph")
        texts[rank] = reading.text
        assert f"ranks {own.group_name}, wanted 0 or cp" in text_of(reading.check()[1])
    (finding,) = compare_ranks("graph", texts)
    assert "rank 0 has" in finding.wrong and "rank 7 has" in finding.wrong


def test_a_collective_over_a_group_that_the_world_does_not_have_is_found():
    """Graphs for context parallelism, for ranks without it."""
    with in_context(CONTEXT):
        exported = trace(context_program(CONTEXT), "blocks", torch.bfloat16)
    text = text_of(check_fx(exported, mesh.compiled(resolve("cpu"), TP)))
    assert "ranks cp, wanted 0" in text


def test_a_gather_of_another_number_of_ranks_than_the_groups_is_found():
    """As over a tensor-parallel group, though the tokens are divided between these."""
    with in_context(CONTEXT):
        exported = trace(context_program(CONTEXT), "blocks", torch.bfloat16)
    twice = mesh.groups(resolve("cpu", ("context_parallel=2",)), TP)
    text = text_of(check_fx(exported, mesh.groups(CONTEXT, TP) | {"cp": twice["cp"]}))
    assert "4 ranks of group cp, which has 2" in text


def in_place(x):
    dist.all_reduce(x)
    return x * 1


COMPILED = {
    "a value fetched by .item()": (lambda x: x * x.float().sum().item(), "f64 is introduced|only at run time"),
    "several tensors in one collective": (
        lambda x: [functional.wait_tensor(t) for t in functional.all_reduce_coalesced([x, x * 2], "sum", GROUP)],
        "all_reduce_coalesced.*Comm has only",
    ),
    "a broadcast": (lambda x: functional.wait_tensor(functional.broadcast(x, 0, GROUP)), "broadcast.*Comm has only"),
    "a maximum over the ranks": (
        lambda x: functional.wait_tensor(functional.all_reduce(x, "max", GROUP)),
        "reduces by max",
    ),
    "a sum of integers": (
        lambda x: functional.wait_tensor(functional.all_reduce(x.int(), "sum", GROUP)),
        "NCC_EVRF061",
    ),
    "a collective that writes into its input": (in_place, "writes into one of its inputs"),
    "an int64 range": (lambda x: x * torch.arange(8), "s64 is introduced"),
}


def compiled(function, *values):
    """The AOT graphs that torch.compile makes of a function, kept by a Recorder."""
    torch._dynamo.reset()
    recorder = Recorder()
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):  # the default since torch 2.13
        torch.compile(function, backend=recorder, fullgraph=True, dynamic=False)(*values)
    return recorder


@pytest.mark.parametrize("name", COMPILED)
def test_a_planted_fault_is_found_in_the_graph_that_torch_compile_makes(name):
    function, expected = COMPILED[name]
    with fake_process_group(TP):
        recorder = compiled(function, torch.ones(4, 8, dtype=torch.bfloat16))
    (graph,) = recorder.graphs
    assert re.search(expected, text_of(check_fx(graph, RANKS))), text_of(check_fx(graph, RANKS))


def test_a_sum_over_some_ranks_is_found_in_the_graph_that_torch_compile_makes():
    with fake_process_group(TP):
        some = dist.new_group([0, 1]).group_name
        recorder = compiled(lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", some)), torch.ones(4))
    assert f"ranks {some}, wanted {GROUP}" in text_of(check_fx(recorder.graphs[0], RANKS))


def test_the_rank_is_found_in_the_graphs_that_torch_compile_makes():
    texts = {}
    for rank in (0, 3):
        with fake_process_group(TP, rank):
            (graph,) = compiled(lambda x: x * (2 + dist.get_rank()), torch.ones(4)).graphs
        texts[rank] = graph.code
    (finding,) = compare_ranks("graph", texts)
    assert "rank 0 has" in finding.wrong and "rank 3 has" in finding.wrong


@pytest.fixture(scope="module")
def recorded():
    """What torchdist's compiled graphs are, by model and rank: {"dit": {0: Recorder}, "gemma3": {0:
    Recorder, 3: Recorder}}. That ranks trace the same DiT is test_signatures'.

    The DiT runs three blocks in three calls, and a second time with another seed.
    """
    bucket = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=3)
    config = made_config(TinySizes(layers=3))[1]
    gemma = dataclasses.replace(cases.widths(TP)["tiny"].gemmas["Gemma3"], num_hidden_layers=1)
    common = dict(tp=TP, comm=TorchDistComm(TP), dtype=torch.bfloat16)
    dit = partial(dit_program, config, bucket, blocks_per_graph=1, **common)
    gemma3 = partial(gemma3_program, gemma, config, 128, states=True, **common)
    of_gemma3 = {rank: record(gemma3, (0,), rank) for rank in (0, TP - 1)}
    return {"dit": {0: record(dit, (0, 1), 0)}, "gemma3": of_gemma3}


def record(make, seeds, rank):
    """The graphs of a program that is run once for each seed: other weights, prompts, latents,
    sigmas, step numbers."""
    torch._dynamo.reset()
    recorder = Recorder()
    with fake_process_group(TP, rank), torch.no_grad(), mock.patch.dict(OPTIONS, {recorder: {}}):
        traced = make()
        graphs = {name: Compiled(trace(traced, name, torch.bfloat16).graph_module, recorder) for name in traced.graphs}
        for seed in seeds:
            run_compiled(traced, graphs, seed)
    return recorder


def test_the_dit_is_three_graphs_at_any_depth_for_any_prompt_seed_and_schedule(recorded):
    """Head, block and tail, though the blocks were called three times and then three times more
    with other values."""
    assert len(recorded["dit"][0].graphs) == 3


def test_compiled_graphs_have_no_finding_and_are_the_same_on_every_rank(recorded):
    for name, of_rank in recorded.items():
        assert [finding for graph in of_rank[0].graphs for finding in check_fx(graph, RANKS, name)] == []
        codes = {rank: "".join(g.code for g in kept.graphs) for rank, kept in of_rank.items()}
        assert compare_ranks(name, codes) == []


def test_every_operation_that_lint_allows_in_a_compiled_graph_is_needed(recorded):
    graphs = [graph for of_rank in recorded.values() for graph in of_rank[0].graphs]
    decoder = video_decoder_config(cases.widths(TP)["tiny"].config)
    dtype = torch.bfloat16
    graphs.append(fx.compiled(trace(tile_program(decoder, (2, 2, 2), dtype), "residual_0", dtype)))
    with in_context(CONTEXT):
        made = context_program(CONTEXT)
        graphs += [fx.compiled(trace(made, name, dtype)) for name in ("head", "tail")]
    used = {operation.name for graph in graphs for operation in fx.operations(graph.graph)}
    assert fx.TRACED - used == set()


def run_compiled(traced, graphs, seed):
    """One run of a program as a rank runs it: every call of a graph with weights of its own."""
    values = {name: filled(field.shape, field.dtype, seed) for name, field in traced.fields.items()}
    for number, (name, _) in enumerate(traced.runs["main"]):
        module, inputs, outputs = traced.graphs[name]
        weights = [filled(parameter.shape, torch.bfloat16, seed + number) for parameter in module.parameters()]
        results = graphs[name](*weights, *(values[field] for field in inputs))
        values |= dict(zip(outputs, results, strict=True))


def filled(shape, dtype, seed):
    return torch.full(shape, 1 + seed, dtype=dtype)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_fault_is_found_in_captured_hlo(name):
    findings = check_hlo(TEXTS[name], RANKS)
    assert CAPTURED[name] in text_of(findings), text_of(findings)


def test_captured_hlo_of_attention_and_grouped_sums_has_no_finding():
    assert check_hlo(TEXTS["clean"], RANKS) == []
    names = {operation.name for operation in hlo.operations(TEXTS["clean"])}
    assert {"all-reduce", "dot", "exponential", "reduce"} <= names <= hlo.OPERATIONS | {"all-reduce"}


def test_the_same_hlo_is_wrong_for_another_number_of_ranks():
    assert "wanted {{0,1}}" in text_of(check_hlo(TEXTS["clean"], {"tp": [[0, 1]]}))


def test_hlo_reads_as_operations_with_dtypes_shapes_and_groups():
    reduced, _ = [o for o in hlo.operations(TEXTS["clean"]) if o.collective]
    assert (reduced.label, reduced.collective.reduction, reduced.collective.group) == (
        "all-reduce.44",
        "add",
        "{{0,1,2,3}}",
    )
    assert reduced.results == reduced.operands == (Kind("f32", (4, 1)), Kind("f32", ()))


HLO = "ENTRY %main (a: f32[2]) -> f32[2] {{\n  %a.1 = f32[2]{{0}} parameter(0)\n  ROOT %b.2 = {line}\n}}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[<=2]{0} add(f32[2]{0} %a.1, f32[2]{0} %a.1)", "only at run time"),
        ("f32[?]{0} add(f32[2]{0} %a.1, f32[2]{0} %a.1)", "only at run time"),
        ("f16[2]{0} convert(%a.1)", "f16 is introduced"),
        ("f8e4m3fn[2]{0} convert(%a.1)", "NCC_EVRF051"),
        ('f32[2]{0} custom-call(%a.1), custom_call_target="Other"', "NCC_EHCA005"),
        (
            "f32[2]{0} collective-permute(%a.1), source_target_pairs={{0,1}}",
            "Comm has only all-gather, all-reduce, reduce-scatter",
        ),
        ("f32[8]{0} all-gather(%a.1), replica_groups={{0,1},{2,3}}, dimensions={0}", "ranks {{0,1},{2,3}}"),
        ("f32[2]{0} all-reduce(%a.1), replica_groups=[2,2]<=[4], to_apply=%sum", "ranks {{0,1},{2,3}}"),
        ("f32[2]{0} all-reduce(%a.1), replica_groups={}, to_apply=%sum", "ranks {}"),
        ("f32[2]{0} constant({1, 2})", "a constant tensor"),
    ],
)
def test_a_line_of_hlo_that_the_compiler_would_refuse_is_found(line, expected):
    sums = "%sum (x: f32[], y: f32[]) -> f32[] {\n  ROOT %add.1 = f32[] add(%x, %y)\n}\n"
    assert expected in text_of(check_hlo(sums + HLO.format(line=line), RANKS))


def test_gathers_and_scattered_sums_over_all_ranks_have_no_finding():
    sums = "%sum (x: f32[], y: f32[]) -> f32[] {\n  ROOT %add.1 = f32[] add(%x, %y)\n}\n"
    for line in (
        "f32[8]{0} all-gather(%a.1), replica_groups={{0,1,2,3}}, dimensions={0}",
        "f32[1]{0} reduce-scatter(%a.1), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum",
    ):
        assert check_hlo(sums + HLO.format(line=line), RANKS) == []


@pytest.mark.parametrize(
    ("groups", "actual"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ""),
        ("{{0,1,2,3},{4,5,6,7}}", ""),
        ("{{0,1,2,3,4,5,6,7}}", "wanted {{0,1,2,3},{4,5,6,7}} or {{0,4},{1,5},{2,6},{3,7}}"),
        ("{{0,1},{2,3},{4,5},{6,7}}", "ranks {{0,1},{2,3},{4,5},{6,7}}, wanted"),
        ("{{4,0},{5,1},{6,2},{7,3}}", "ranks {{4,0},{5,1},{6,2},{7,3}}, wanted"),
    ],
)
def test_replica_groups_are_those_of_a_named_group_in_its_order(groups, actual):
    line = f"f32[4]{{0}} all-gather(%a.1), replica_groups={groups}, dimensions={{0}}"
    named = mesh.groups(resolve("trn2.48xlarge", ("context_parallel=2",)), TP)
    text = text_of(check_hlo(HLO.format(line=line), named))
    assert actual in text and bool(text) == bool(actual)


def test_groups_written_short_are_the_same_groups():
    line = "f32[2]{0} all-reduce(%a.1), replica_groups=[1,4]<=[4], to_apply=%sum"
    sums = "%sum (x: f32[], y: f32[]) -> f32[] {\n  ROOT %add.1 = f32[] add(%x, %y)\n}\n"
    assert check_hlo(sums + HLO.format(line=line), RANKS) == []
    halves = check_hlo(sums + HLO.format(line=line.replace("[1,4]", "[2,2]")), RANKS)
    assert "ranks {{0,1},{2,3}}, wanted {{0,1,2,3}}" in text_of(halves)


def test_text_that_is_no_hlo_is_an_error():
    with pytest.raises(ValueError, match="no HLO instruction"):
        check_hlo("HloModule nothing", RANKS)


def test_the_same_fault_of_many_graphs_is_told_once_with_every_graph():
    faults = [
        Finding(graph, f"sort.{i} (sort)", "no sort", "sort on the host") for i, graph in enumerate(("head", "tail"))
    ]
    described = table([*faults, Finding("tail", "add.3 (add)", "f64 is introduced", "make it fp32")])
    assert described.count("no sort") == 1 and described.count("f64 is introduced") == 1
    assert (
        described.index("head")
        < described.index("tail")
        < described.index("no sort")
        < described.index("sort on the host")
    )


def test_without_torch_xla_the_exported_graphs_are_checked_and_the_rest_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(UserError, match="was NOT checked") as refusal:
        main(["--only", "tiny, 1 block: connectors"])
    assert "torch_xla==2.9.*" in str(refusal.value)
    printed = capsys.readouterr().out
    assert "tiny, 1 block: connectors: connectors" in printed and "0 findings" in printed


def test_a_finding_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setattr(fx, "OPERATIONS", fx.OPERATIONS - {"aten.linear.default"})
    with pytest.raises(SystemExit) as exit_code:
        main(["--only", "tiny, 1 block: connectors"])
    assert exit_code.value.code == 1
    assert "aten.linear.default" in capsys.readouterr().out
