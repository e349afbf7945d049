"""Which loaded copy of a graph owns a buffer of an NxD run, and which may run: without NxD."""

from types import SimpleNamespace

import pytest

from ltx_neuron.backends.nxd.buffers import Buffers, copies_needed
from ltx_neuron.backends.ranks import Call, calls_of
from ltx_neuron.models.signatures import PASSES, Field


def call(graph: str, reads: list[str], writes: list[str]) -> Call:
    return Call(graph, 0, {name: name for name in reads}, {name: name for name in writes})


def test_a_graph_that_reads_what_it_returned_needs_two_copies_which_take_turns():
    blocks = call("blocks", ["hidden"], ["hidden"])
    buffers = Buffers()
    assert [buffers.claim("v64", blocks) for _ in range(5)] == [0, 1, 0, 1, 0]
    assert copies_needed("v64", [blocks, blocks]) == {"blocks": 2}


def test_a_graph_that_returns_what_nobody_needs_any_more_runs_on_one_copy():
    head = call("head", ["latent"], ["hidden"])
    assert copies_needed("v64", [head, call("blocks", ["hidden"], ["hidden"])])["head"] == 1


def test_each_pass_of_a_guided_step_has_its_own_copy_of_the_graph_that_predicts():
    calls = []
    for kind in PASSES:
        calls += [
            call("head", ["latent"], ["hidden"]),
            *[call("blocks", ["hidden"], ["hidden"])] * 2,
            Call("tail", 0, {"hidden": "hidden"}, {"x0": f"{kind}_x0"}),
        ]
    predictions = [f"{kind}_x0" for kind in PASSES]
    calls.append(call("guide", [*predictions, "latent", "guided"], ["latent", "guided"]))
    assert copies_needed("v64", calls) == {"head": 1, "blocks": 2, "tail": 4, "guide": 2}


def test_a_copy_does_not_run_while_one_of_its_two_outputs_is_still_named():
    buffers = Buffers()
    assert buffers.claim("v64", call("tail", [], ["latent", "finite"])) == 0
    # "latent" gets another owner, "finite" does not.
    buffers.upload("latent", [])
    assert buffers.claim("v64", call("tail", [], ["other"])) == 1
    buffers.upload("finite", [])
    assert buffers.claim("v64", call("tail", [], ["third"])) == 0


def test_graphs_of_two_buckets_have_copies_of_their_own():
    buffers, step = Buffers(), call("step", ["latent"], ["latent"])
    assert buffers.claim("v64", step) == 0
    assert buffers.claim("v256", step) == 0
    assert buffers.owners == {"latent": ("v256", "step", 0)}


def test_releasing_a_program_forgets_what_its_graphs_own_and_nothing_that_was_uploaded():
    buffers = Buffers()
    buffers.upload("context", [])
    for program, name in (("v64", "latent"), ("v256", "other")):
        buffers.claim(program, call("step", [], [name]))
        buffers.tensors[name] = []
    buffers.release({"v64"})
    assert {*buffers.tensors} == {"context", "other"} and {*buffers.owners} == {"other"}


@pytest.mark.parametrize("repeat", [2, 5])
def test_the_number_of_copies_does_not_grow_with_the_number_of_blocks_or_steps(repeat):
    block, tail = call("blocks", ["hidden"], ["hidden"]), call("tail", ["hidden"], ["latent"])
    head = call("head", ["latent"], ["hidden"])
    step = [head, *[block] * repeat, tail]
    assert copies_needed("v64", step * repeat) == {"head": 1, "blocks": 2, "tail": 1}


def test_a_call_reads_the_tensors_of_its_pass_its_step_and_its_blocks():
    plain, per_block = Field((1,), "float32"), Field((2, 4), "float32", per_block=True)
    manifest = SimpleNamespace(
        runs={"pass": [("head", 0), ("blocks", 2)]},
        graphs={
            "head": {"inputs": ["step", "latent"], "outputs": ["hidden"]},
            "blocks": {"inputs": ["hidden", "keep"], "outputs": ["hidden"]},
        },
        fields={"step": plain, "latent": plain, "hidden": plain, "keep": per_block},
    )
    runs = [("pass", {"keep": "keep_uncond"}, {"hidden": "hidden_uncond"})]
    assert calls_of(manifest, runs, {"step": 3}) == [
        Call("head", 0, {"step": "step@3", "latent": "latent"}, {"hidden": "hidden_uncond"}),
        Call("blocks", 2, {"hidden": "hidden", "keep": "keep_uncond@2"}, {"hidden": "hidden_uncond"}),
    ]
