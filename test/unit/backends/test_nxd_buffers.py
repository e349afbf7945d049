"""Which loaded copy of a graph owns a buffer of an NxD run, and which may run: without NxD."""

from types import SimpleNamespace

from ltx_neuron.backends.nxd.buffers import Buffers, copies_needed
from ltx_neuron.backends.ranks import Call, calls_of
from ltx_neuron.models.signatures import PASSES, Field


def call(graph: str, reads: list[str], writes: list[str]) -> Call:
    return Call(graph, 0, {name: name for name in reads}, {name: name for name in writes})


HEAD, BLOCKS = call("head", ["latent"], ["hidden"]), call("blocks", ["hidden"], ["hidden"])
TAIL = call("tail", ["hidden"], ["latent"])


def test_a_graph_that_reads_its_own_output_runs_on_two_copies_in_turn_at_any_number_of_blocks_and_steps():
    buffers = Buffers()
    assert [buffers.claim("v64", BLOCKS) for _ in range(5)] == [0, 1, 0, 1, 0]
    for repeat in (2, 5):
        step = [HEAD, *[BLOCKS] * repeat, TAIL]
        needed = {"head": 1, "blocks": 2, "tail": 1}
        assert copies_needed("v64", step * repeat) == needed


def test_each_pass_of_a_guided_step_has_its_own_copy_of_the_graph_that_predicts():
    predictions, calls = [f"{kind}_x0" for kind in PASSES], []
    for name in predictions:
        calls += [HEAD, BLOCKS, BLOCKS, call("tail", ["hidden"], [name])]
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


def test_buckets_have_copies_of_their_own_and_a_released_one_forgets_them_and_no_upload():
    buffers, step = Buffers(), call("step", ["latent"], ["latent"])
    buffers.upload("context", [])
    assert buffers.claim("v64", step) == buffers.claim("v256", step) == 0
    assert buffers.owners == {"latent": ("v256", "step", 0)}
    buffers.claim("v64", call("step", [], ["other"]))
    buffers.tensors |= {"latent": [], "other": []}
    buffers.release({"v64"})
    assert {*buffers.tensors} == {"context", "latent"} and {*buffers.owners} == {"latent"}


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
