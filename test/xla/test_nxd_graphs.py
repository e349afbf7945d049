"""What NxD compiles: the graphs' contents, inputs, collectives and flags, and what is refused."""

import json
import math

import nxd_fixtures as nxd
import nxd_stubs
import pytest
import torch
from jobs import make_job, replace
from nxd_fixtures import CUT, LAYOUTS, PER_BLOCK, SHAPE, TP, open_workspace

from ltx_neuron.artifacts import build
from ltx_neuron.backends import mesh
from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group
from ltx_neuron.backends.export import trace as export_trace
from ltx_neuron.backends.neuron_errors import DeviceFailure
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.groups import probe
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import Program, dit_program

if nxd.MISSING:
    pytest.skip(nxd.SKIP, allow_module_level=True)
pytest_plugins = ["nxd_fixtures"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nxd_source")]


def program_for(config, workspace, blocks_per_graph: int, dtype=torch.float32) -> Program:
    comm = nxd_compile.XlaComm(TP)
    return dit_program(config, SHAPE.buckets[0], TP, comm, dtype, blocks_per_graph, workspace.profile.attention)


def hlo_of(program: Program, graph: str):
    with nxd.inside_nxd():
        return nxd_compile.trace(program, graph, "tag").trace_artifacts_collection["tag"].hlo


def test_the_graph_of_blocks_does_not_grow_with_the_depth_and_a_whole_step_does(workspace):
    """Compilers take a time that grows with the operations."""
    counts = {}
    for blocks_per_graph, graph in ((1, "blocks"), (0, "step")):
        for layers in (2, 4):
            config = replace(workspace.transformer, num_layers=layers)
            hlo = hlo_of(program_for(config, workspace, blocks_per_graph), graph)
            counts[graph, layers] = sum(len(each.instructions) for each in hlo.computations)
    assert counts["blocks", 2] == counts["blocks", 4] < 0.6 * counts["step", 2]
    assert counts["step", 4] > 1.7 * counts["step", 2]


def test_a_saved_graph_contains_no_weights(workspace):
    """NxD saves the inputs that it traced with; at full width those of four blocks have 0.8 GB."""
    for manifest in nxd.manifests_of(workspace).values():
        parameters = manifest.graphs["blocks"]["parameters"]
        (examples,) = runtime._open(manifest, "blocks", TP).reserved_example_inputs.values()
        assert len(examples) > len(parameters)
        assert sum(each.numel() for each in examples) > sum(map(math.prod, parameters.values()))
        assert all(each.untyped_storage().nbytes() == each.element_size() for each in examples)


def test_the_kernel_of_the_profile_is_in_the_graphs(assets, nxd_source, tmp_path):
    """Six attentions in a block go through NKI, on both cores of a logical one; `matmul` has none of them."""
    launched = {}
    for kernel in ("nki", "matmul"):
        before = nxd_stubs.NkiKernel.launched
        workspace = open_workspace(assets, tmp_path, CUT, f"attention={kernel}")
        build.make(workspace, workspace.dit_graphs([SHAPE.buckets[0]]))
        launched[kernel] = nxd_stubs.NkiKernel.launched - before
    assert launched == {"nki": 6, "matmul": 0}


def test_a_step_has_the_bytes_and_the_flops_of_the_other_backends_in_fewer_collectives(workspace):
    bucket, manifest = workspace.dit_program_for(SHAPE, SHAPE.stages[1])
    with fake_process_group(TP):
        program = dit_program(workspace.transformer, bucket, TP, TorchDistComm(TP), torch.float32, 1, "nki")
        others = [cost(export_trace(program, name, torch.float32)) for name, _ in program.runs["main"]]
    ours, layers = manifest.cost(), workspace.transformer.num_layers
    other = {key: sum(each[key] for each in others) for key in ours}
    assert ours["collectives"] == PER_BLOCK * layers and other["collectives"] == 11 * layers
    assert all(ours[key] == other[key] for key in ("collective_bytes", "flops"))
    # The other backend has the buffers of its all-reduces besides.
    assert 0 < ours["peak_bytes"] <= max(each["peak_bytes"] for each in others)


def test_in_bf16_activations_travel_as_bf16_and_statistics_as_fp32(workspace):
    """Sums in fp32 would move twice the bytes."""
    bucket, sent = SHAPE.buckets[0], {}
    for dtype in (torch.float32, torch.bfloat16):
        with nxd.inside_nxd():
            program = program_for(workspace.transformer, workspace, 0, dtype)
        program.graphs["step"].module.to(dtype)
        sent[dtype] = nxd_compile.collectives(hlo_of(program, "step"), mesh.compiled(workspace.profile, TP))
    config, (wide, narrow) = workspace.transformer, sent.values()
    activations = bucket.video_tokens * config.video.inner + bucket.audio_tokens * config.audio.inner
    assert wide["collective_bytes"] - narrow["collective_bytes"] == 2 * 4 * activations * config.num_layers
    assert wide["collectives"] == narrow["collectives"]


@pytest.mark.parametrize(("cut", "name", "weight"), [(0, "step", "module.unused"), (1, "blocks", "unused")])
def test_a_weight_that_became_a_constant_is_refused(workspace, cut, name, weight):
    program = program_for(workspace.transformer, workspace, cut)
    program.graphs[name].module.unused = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match=f"constants or are not used: {weight}$"):
        hlo_of(program, name)


# --- identities, flags and the compiler -------------------------------------------------------------------------------


def test_the_identity_of_a_graph_has_versions_flags_and_sizes_and_no_working_file_stays(workspace):
    graphs = [*workspace.text_graphs(), *workspace.dit_graphs(SHAPE.buckets)]
    assert len(graphs) == 5
    for folder in (workspace.find(graph) for graph in graphs):
        manifest = json.loads((folder / "manifest.json").read_text())
        identity, flags = manifest["identity"], manifest["compiler_flags"]
        assert identity["backend"] == "nxd" and "--lnc=2" in flags
        # Each model has its own, and what was compiled with is what the identity says.
        assert flags == workspace.profile.flags(identity["model"]) == identity["compiler_flags"]
        assert ("--vectorize-strided-dma" in flags) == (identity["model"] == "gemma3")
        assert identity["neuron"]["neuronx-distributed"] and identity["config"]
        assert identity["torch"] == torch.__version__
        assert [path.name for path in folder.iterdir() if path.suffix not in (".pt", ".json")] == []


def test_flags_reach_the_compiler_without_layout_optimisation_and_its_failure_has_a_remedy(
    workspace, tmp_path, monkeypatch
):
    """A priority model would be compiled with --enable-internal-neff-wrapper, and its weights' layout with --lnc=1."""
    from neuronx_distributed.trace import functions

    calls = []

    def fail(**options):
        calls.append(options)
        raise RuntimeError("neuronx-cc: [NCC_EBVF030] Instructions generated by compiler exceed the typical limit")

    monkeypatch.setattr(functions, "neuron_xla_compile", fail)
    monkeypatch.setattr(workspace, "artifacts", tmp_path)
    monkeypatch.setattr(workspace, "_found", {})
    with pytest.raises(DeviceFailure, match="NCC_EBVF030.*\n.*blocks_per_graph=2"):
        build.make(workspace, workspace.dit_graphs([SHAPE.buckets[0]]))
    assert [*tmp_path.glob("graphs/*/neuronx-cc/*/*/model/graph.hlo")]  # beside the compiler's log
    for options in calls:
        assert options["compiler_flags"].startswith(workspace.profile.flags("dit"))
        assert "wrapper" not in options["compiler_flags"] and options["platform_target"] == "trn2"
    with pytest.raises(UserError, match="not finished"):
        workspace.dit_program_for(make_job("", nxd.SIZE), SHAPE.stages[0])


# --- the doctor's probe of groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_probe_of_groups_finds_right_results(layout, eight_ranks):
    tp, settings = LAYOUTS[layout]
    findings = [*probe(resolve("trn2.48xlarge", settings), tp)]
    assert [(each.check, each.state) for each in findings] == [("group tp", "ok"), ("group cp", "ok")]
