"""What NxD's ranks keep on their cores: weights, inputs and outputs over a job's steps, and what is refused."""

import weakref

import nxd_fixtures as nxd
import pytest
import torch
from helpers import rel, save_weights
from jobs import make_job
from nxd_fixtures import CUT, LATENTS, PROMPT, SHOWS, SIZE, TP, dit_loaded, manifests_of, open_workspace, rank_weights
from torch import Tensor

from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.backends.nxd.runtime import GraphInputs
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.report.latency import Recorder

if nxd.MISSING:
    pytest.skip(nxd.SKIP, allow_module_level=True)
pytest_plugins = ["nxd_fixtures"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nxd_source")]


@pytest.fixture
def program(generated) -> str:
    """The program of the job's last stage, whose inputs are still on the cores."""
    tokens = generated.tensors["s2_video"].flatten(2).shape[2]
    return next(name for name in generated.ranks.programs if name.startswith(f"v{tokens}-"))


@pytest.fixture
def step(generated, program):
    """A function (**changed): rank 0's video latent after a step; every named tensor is then what it was."""
    ranks = generated.ranks

    def one_step(**changed) -> Tensor:
        buffers = ranks._buffers
        tensors, owners = dict(buffers.tensors), dict(buffers.owners)
        buffers.tensors.update(changed)
        try:
            ranks.run(program, step=0)
            return runtime.to_host(buffers.tensors["video_latent"][0])
        finally:
            buffers.tensors, buffers.owners = tensors, owners

    return one_step


def weights_of(inputs: GraphInputs) -> dict[str, list[Tensor]]:
    """The weights among a graph's inputs by keyword: one tensor per rank."""
    return {
        name: [tensors[place] for tensors in inputs._of_ranks]
        for name, place in inputs._places.items()
        if name not in inputs.fields
    }


# --- weights ----------------------------------------------------------------------------------------------------------


def test_both_buckets_and_both_blocks_use_one_copy_of_the_weights(generated, workspace):
    (weight_set,) = generated.ranks._sets
    assert weight_set.folder == workspace.dit_weights() and len(weight_set.models) == 2 * 3
    for rank in range(TP):
        copy = {t.data_ptr() for t in weight_set.tensors[rank].values()}
        for program in weight_set.manifests:
            bound = [
                {t.data_ptr() for t in model.weights[rank].values()}
                for (of, _), copies in weight_set.models.items()
                if of == program
                for model in copies
            ]
            passed = [
                {parts[rank].data_ptr() for parts in weights_of(inputs).values()}
                for (of, graph, _), inputs in weight_set.inputs.items()
                if (of, graph) == (program, "blocks")
            ]
            # A head; two copies of the blocks, which take theirs in the call; two of the tail.
            assert [len(each) for each in bound] == [4, 0, 0, 6, 6] and len(passed) == 2
            head, _, _, tail, tail_again = bound
            used = [head, tail, *passed]
            assert tail_again == tail
            assert set().union(*used) == copy and sum(map(len, used)) == len(copy)


def test_a_block_is_computed_with_its_own_weights(generated, program, step):
    """Exchanged in the calls, the two blocks' weights give something else: none is in a graph."""
    (weight_set,), right = generated.ranks._sets, step()
    inputs = dict(weight_set.inputs)
    first, second = (program, "blocks", 0), (program, "blocks", 1)
    weight_set.inputs |= {first: inputs[second], second: inputs[first]}
    wrong = step()
    weight_set.inputs |= inputs
    assert rel(wrong, right) > SHOWS and rel(step(), right) == 0


def alive(references: list[weakref.ref]) -> int:
    return sum(reference() is not None for reference in references)


def test_what_is_unloaded_or_replaced_by_other_programs_or_weights_of_the_model_is_freed(workspace, tmp_path):
    other = save_weights(tmp_path / "weights", *rank_weights(workspace))
    first, second = manifests_of(workspace).items()
    with dit_loaded(workspace) as ranks:
        (weight_set,) = ranks._sets
        assert len(weight_set.inputs) == 2 * 4  # the head, both blocks and the tail of each bucket
        models = weight_set.models.items()
        leaving = [weakref.ref(model) for (of, _), copies in models if of == first[0] for model in copies]
        staying = {key: copies for key, copies in models if key[0] == second[0]}
        ranks.load(workspace.dit_weights(), dict([second]), torch.float32)
        assert len(leaving) == 1 + 2 + 2 and alive(leaving) == 0
        assert {*ranks.programs} == {second[0]} and weight_set.models == staying
        calls = ("head", 0), ("blocks", 0), ("blocks", 1), ("tail", 0)
        assert {*weight_set.inputs} == {(second[0], *call) for call in calls}
        watched = [weakref.ref(tensor) for tensor in weight_set.tensors[0].values()]
        del staying, weight_set, models
        ranks.load(other, dict([first]), torch.float32)
        assert [each.folder for each in ranks._sets] == [other] and {*ranks.programs} == {first[0]}
        assert alive(watched) == 0
        (weight_set,) = ranks._sets
        watched = [weakref.ref(model) for copies in weight_set.models.values() for model in copies]
        watched += [weakref.ref(tensor) for tensors in weight_set.tensors for tensor in tensors.values()]
        inputs = weight_set.inputs
        del weight_set
        ranks.unload()
        assert alive(watched) == 0 and inputs == {}
        ranks.load(workspace.dit_weights(), manifests_of(workspace), torch.float32)  # and comes back


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


def test_what_differs_between_ranks_is_an_input(generated, step):
    """With rank 0's part of a rotary table on every rank, the step gives something else: no part is in the graph."""
    tables = generated.ranks._buffers.tensors["video_cos"]
    assert len({table.numpy().tobytes() for table in tables}) == TP
    right = step()
    assert rel(step(), right) == 0
    assert rel(step(video_cos=[tables[0]] * TP), right) > SHOWS


# --- refused ----------------------------------------------------------------------------------------------------------


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
