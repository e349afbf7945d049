"""What NxD compiles, what its ranks keep on their cores over a job's steps, and what is refused."""

import json
import math
import shutil
import weakref
from unittest.mock import Mock

import nxd_fixtures as nxd
import nxd_stubs
import pytest
import torch
from helpers import rel
from jobs import make_job, replace
from nxd_fixtures import CUT, LATENTS, LAYOUTS, PER_BLOCK, PROMPT, SHAPE, SHOWS, SIZE, TP, dit_loaded, open_workspace
from torch import Tensor

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.backends import mesh
from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group
from ltx_neuron.backends.export import trace as export_trace
from ltx_neuron.backends.neuron_errors import DeviceFailure
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.groups import probe
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import Program, dit_program
from ltx_neuron.report.latency import Recorder

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
    for blocks_per_graph, graph, layers in ((1, "blocks", 2), (1, "blocks", 4), (0, "step", 2), (0, "step", 4)):
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
    for kernel, launches in (("nki", 6), ("matmul", 0)):
        before = nxd_stubs.NkiKernel.launched
        workspace = open_workspace(assets, tmp_path, CUT, f"attention={kernel}")
        build.make(workspace, workspace.dit_graphs([SHAPE.buckets[0]]))
        assert nxd_stubs.NkiKernel.launched - before == launches


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
    for folder in map(workspace.find, graphs):
        manifest = json.loads((folder / "manifest.json").read_text())
        identity, flags = manifest["identity"], manifest["compiler_flags"]
        assert identity["backend"] == "nxd" and "--lnc=2" in flags
        # Each model has its own, and what was compiled with is what the identity says.
        assert flags == workspace.profile.flags(identity["model"]) == identity["compiler_flags"]
        assert ("--vectorize-strided-dma" in flags) == (identity["model"] == "gemma3")
        assert identity["neuron"]["neuronx-distributed"] and identity["config"]
        assert identity["torch"] == torch.__version__
        assert [path.name for path in folder.iterdir() if path.suffix not in (".pt", ".json")] == []


def test_flags_reach_the_compiler_and_its_failure_has_a_remedy(workspace, tmp_path, monkeypatch):
    """A priority model would be compiled with --enable-internal-neff-wrapper, and its weights' layout with --lnc=1."""
    from neuronx_distributed.trace import functions

    said = "neuronx-cc: [NCC_EBVF030] Instructions generated by compiler exceed the typical limit"
    monkeypatch.setattr(functions, "neuron_xla_compile", compiler := Mock(side_effect=RuntimeError(said)))
    monkeypatch.setattr(workspace, "artifacts", tmp_path)
    monkeypatch.setattr(workspace, "_found", {})
    with pytest.raises(DeviceFailure, match="NCC_EBVF030.*\n.*blocks_per_graph=2"):
        build.make(workspace, workspace.dit_graphs([SHAPE.buckets[0]]))
    assert [*tmp_path.glob("graphs/*/neuronx-cc/*/*/model/graph.hlo")]  # beside the compiler's log
    for call in compiler.call_args_list:
        assert call.kwargs["compiler_flags"].startswith(workspace.profile.flags("dit"))
        assert "wrapper" not in call.kwargs["compiler_flags"] and call.kwargs["platform_target"] == "trn2"
    with pytest.raises(UserError, match="not finished"):
        workspace.dit_program_for(make_job("", nxd.SIZE), SHAPE.stages[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_doctors_probe_of_groups_finds_right_results(layout, eight_ranks):
    tp, settings = LAYOUTS[layout]
    findings = probe(resolve("trn2.48xlarge", settings), tp)
    assert [(each.check, each.state) for each in findings] == [("group tp", "ok"), ("group cp", "ok")]


# --- weights on the cores ---------------------------------------------------------------------------------------------


def test_both_buckets_and_both_blocks_use_one_copy_of_the_weights(generated, workspace):
    (weight_set,) = generated.ranks._sets
    assert weight_set.folder == workspace.dit_weights() and len(weight_set.models) == 2 * 3
    for rank in range(TP):
        copy = {t.data_ptr() for t in weight_set.tensors[rank].values()}
        for program in weight_set.manifests:
            models = [model for key, copies in weight_set.models.items() if key[0] == program for model in copies]
            bound = [{t.data_ptr() for t in model.weights[rank].values()} for model in models]
            passed = [
                {own._of_ranks[rank][place].data_ptr() for name, place in own._places.items() if name not in own.fields}
                for key, own in weight_set.inputs.items()
                if key[:2] == (program, "blocks")
            ]
            # A head; two copies of the blocks, which take theirs in the call; two of the tail.
            assert [len(each) for each in bound] == [4, 0, 0, 6, 6] and len(passed) == 2
            head, _, _, tail, tail_again = bound
            used = [head, tail, *passed]
            assert tail_again == tail
            assert set().union(*used) == copy and sum(map(len, used)) == len(copy)


def test_what_is_unloaded_or_replaced_by_other_programs_or_weights_of_the_model_is_freed(workspace, tmp_path):
    other = shutil.copytree(workspace.dit_weights(), tmp_path / "weights")
    first, second = nxd.manifests_of(workspace).items()
    with dit_loaded(workspace) as ranks:
        (weight_set,) = ranks._sets
        assert len(weight_set.inputs) == 2 * 4  # the head, both blocks and the tail of each bucket
        models = weight_set.models.items()
        leaving = [weakref.ref(model) for (of, _), copies in models if of == first[0] for model in copies]
        staying = {key: copies for key, copies in models if key[0] == second[0]}
        ranks.load(workspace.dit_weights(), dict([second]), torch.float32)
        assert len(leaving) == 1 + 2 + 2 and all(reference() is None for reference in leaving)
        assert {*ranks.programs} == {second[0]} and weight_set.models == staying
        calls = ("head", 0), ("blocks", 0), ("blocks", 1), ("tail", 0)
        assert {*weight_set.inputs} == {(second[0], *call) for call in calls}
        watched = [weakref.ref(tensor) for tensor in weight_set.tensors[0].values()]
        del staying, weight_set, models
        ranks.load(other, dict([first]), torch.float32)
        assert [each.folder for each in ranks._sets] == [other] and {*ranks.programs} == {first[0]}
        assert all(reference() is None for reference in watched)
        (weight_set,) = ranks._sets
        watched = [weakref.ref(model) for copies in weight_set.models.values() for model in copies]
        watched += [weakref.ref(tensor) for tensors in weight_set.tensors for tensor in tensors.values()]
        inputs = weight_set.inputs
        del weight_set
        ranks.unload()
        assert all(reference() is None for reference in watched) and inputs == {}
        ranks.load(workspace.dit_weights(), nxd.manifests_of(workspace), torch.float32)  # and comes back


def test_both_models_may_stay_on_the_cores_and_the_second_job_loads_nothing(assets, workspace, generated, monkeypatch):
    both = open_workspace(assets, workspace.artifacts, CUT, "resident=true")
    jobs = [make_job(prompt=prompt, size=SIZE) for prompt in (PROMPT, "another")]
    options = RunOptions(neuron_gemma=True, spatial_upsampler_path=assets.spatial_upsampler)
    with Engine(both, Recorder(), options) as engine:
        (first,) = engine.run(jobs[:1], keep=True, decode=False)
        folders = {weight_set.folder for weight_set in engine.residency.ranks._sets}
        assert folders == {both.dit_weights(), both.weights("gemma3")}
        monkeypatch.setattr(runtime, "_open", lambda *_: pytest.fail("loaded again"))
        (second,) = engine.run(jobs[1:], keep=True, decode=False)
    assert all(torch.equal(first.tensors[name], generated.tensors[name]) for name in LATENTS)
    assert rel(second.tensors["s2_video"], first.tensors["s2_video"]) > SHOWS


# --- inputs and outputs of a step -------------------------------------------------------------------------------------


def test_every_rank_has_the_same_latents_and_no_step_uploads_anything(generated):
    for name in ("video_latent", "audio_latent"):
        parts = generated.ranks._buffers.tensors[name]
        assert len(parts) == TP and all(torch.equal(part, parts[0]) for part in parts)
        assert len({part.data_ptr() for part in parts}) == TP  # four tensors, not one four times
    assert generated.counters.bytes_to_device_per_step == 0
    first, second = generated.sent[:8], generated.sent[8:]
    assert len({*first}) == len({*second}) == 1 and len(second) == 3


def test_what_differs_between_blocks_or_ranks_is_an_input_of_the_graph(generated):
    """The two blocks' weights exchanged, or rank 0's part of a rotary table on every rank, give something else."""
    ranks, tokens = generated.ranks, generated.tensors["s2_video"].flatten(2).shape[2]
    # Of the job's last stage, whose inputs are still on the cores.
    program = next(name for name in ranks.programs if name.startswith(f"v{tokens}-"))
    (weight_set,), buffers = ranks._sets, ranks._buffers

    def step(**changed) -> Tensor:
        """Rank 0's video latent after a step; every named tensor is then what it was."""
        tensors, owners = dict(buffers.tensors), dict(buffers.owners)
        buffers.tensors.update(changed)
        ranks.run(program, step=0)
        latent = runtime.to_host(buffers.tensors["video_latent"][0])
        buffers.tensors, buffers.owners = tensors, owners
        return latent

    right, tables, inputs = step(), buffers.tensors["video_cos"], dict(weight_set.inputs)
    assert len({table.numpy().tobytes() for table in tables}) == TP and rel(step(), right) == 0
    assert rel(step(video_cos=[tables[0]] * TP), right) > SHOWS
    first, second = (program, "blocks", 0), (program, "blocks", 1)
    weight_set.inputs |= {first: inputs[second], second: inputs[first]}
    assert rel(step(), right) > SHOWS
    weight_set.inputs |= inputs
    assert rel(step(), right) == 0


def test_another_number_of_ranks_is_refused(workspace, generated, monkeypatch):
    from neuronx_distributed import NxDModel

    with pytest.raises(UserError, match="already drives 4 ranks and cannot drive 2"):
        runtime.NxdRanks(workspace.profile, 2)
    load = NxDModel.load.__func__

    def of_two_ranks(cls, path):
        model = load(cls, path)
        model.world_size = 2
        return model

    monkeypatch.setattr(NxDModel, "load", classmethod(of_two_ranks))
    with pytest.raises(UserError, match="compiled for 2 ranks, wanted 4"), dit_loaded(workspace):
        pass
