"""The bound inputs of NxD's graphs, with an NxDModel's methods stood in for; NxD's own source is in test/xla."""

from types import SimpleNamespace

import pytest
import torch

from ltx_neuron.backends.nxd.runtime import GraphInputs
from ltx_neuron.models.signatures import Field

RANKS = 3
FIELDS = {"hidden": Field((2,), torch.float32), "table": Field((1,), torch.float32)}


class Model:
    """NxD's methods, and a runtime that keeps what it was given. The graph does not use `unused`."""

    def __init__(self, route: str = "blocks"):
        self.local_ranks_size, self.route = RANKS, route
        self.flattener_map = {"blocks": lambda inputs: inputs[:-1][::-1]}
        self.spmd_models = {"blocks": SimpleNamespace(forward_ranked=self.forward_ranked)}
        self.given: list[list[torch.Tensor]] = []

    def convert_dict_to_ordered_list(self, inputs: dict, positional: int) -> tuple[list, list[str]]:
        assert positional == 0
        return [*inputs.values()], [*inputs]

    def router(self, inputs: list[torch.Tensor], names: list[str]) -> list[str]:
        shapes = [tuple(each.shape) for each in inputs]
        assert (names, shapes) == (["hidden", "table", "weight", "unused"], [(2,), (1,), (4,), ()])
        return [self.route]

    def forward_ranked(self, ranked) -> list[list[torch.Tensor]]:
        self.given = [[*tensors] for tensors in ranked]
        return [[torch.tensor(rank), torch.tensor(-rank)] for rank in range(RANKS)]


def parts(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(RANKS)]


def bound(model: Model, weight: list[torch.Tensor]) -> GraphInputs:
    return GraphInputs(model, "blocks", FIELDS, {"weight": weight, "unused": parts()})


def test_a_warm_call_replaces_only_the_inputs_that_changed_on_a_rank(monkeypatch):
    replaced, inner = [], GraphInputs._set
    monkeypatch.setattr(
        GraphInputs, "_set", lambda self, name, parts: replaced.append(name) or inner(self, name, parts)
    )
    model, weight, table = Model(), parts(4), parts(1)
    inputs = bound(model, weight)
    for hidden in (parts(2), parts(2)):
        replaced.clear()
        inputs.take("hidden", hidden)
        inputs.take("table", table)
        inputs.launch(model)
        # In the graph's order, without the input that it does not use.
        for rank, given in enumerate(model.given):
            assert [each.data_ptr() for each in given] == [each[rank].data_ptr() for each in (weight, table, hidden)]
    # The same tensors in another list are the same input; another tensor of one rank is not.
    inputs.take("table", [*table])
    assert replaced == ["hidden"]
    table[2] = torch.randn(1)
    inputs.take("table", table)
    assert replaced == ["hidden", "table"]
    # A further copy of the graph gets the inputs of the first.
    copy, changed = Model(), parts(2)
    inputs.take("hidden", changed)
    outputs = inputs.launch(copy)
    assert model.given[1][2] is hidden[1] and copy.given[1][2] is changed[1] and copy.given[2][1] is table[2]
    assert [[int(each) for each in output] for output in outputs] == [[0, 1, 2], [0, -1, -2]]


def test_shapes_and_dtypes_of_every_rank_and_the_routed_graph_are_checked():
    inputs = bound(Model(), parts(4))
    inputs.take("hidden", parts(2))
    for rank in range(RANKS):
        for wrong, text in ((torch.zeros(3), r"\(3,\)"), (torch.zeros(2).bfloat16(), "bfloat16")):
            hidden = parts(2)
            hidden[rank] = wrong
            with pytest.raises(RuntimeError, match=rf"blocks\.hidden: got .*{text}"):
                inputs.take("hidden", hidden)
    with pytest.raises(RuntimeError, match="routes the inputs of blocks to head"):
        bound(Model("head"), parts(4))
