"""The inputs of NxD graphs, bound once, so that a launch passes only what changed.

NxDModel.forward sorts, routes and transposes every input of every rank at each call. `Inputs` does
so once, with NxD's own methods. `launch` then calls the runtime's object, which forward calls too.
"""

from operator import is_

import torch
from torch import Tensor

from ltx_neuron.models.signatures import Field


class Inputs:
    """A graph's inputs for one group of blocks, in the compiled graph's order, for all its copies.

    Its lists are TorchScript's (torch.jit.script), which the runtime gets by reference. A Python
    list would be converted, tensor by tensor, at each call.

    model    a loaded NxDModel; it must route these names and shapes to the graph `tag`
    fields   of the inputs that calls set
    weights  of the group, by keyword: one tensor per rank
    """

    def __init__(self, model, tag: str, fields: dict[str, Field], weights: dict[str, list[Tensor]]):
        self.tag, self.fields = tag, fields
        self._held: dict[str, list[Tensor]] = {}  # the tensors of the last call
        shapes = {name: field.shape for name, field in fields.items()}
        shapes |= {name: parts[0].shape for name, parts in weights.items()}
        marks = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        ordered, names = model.convert_dict_to_ordered_list(marks, 0)
        if tag not in (routes := model.router(ordered, names)):
            raise RuntimeError(f"NxD routes the inputs of {tag} to {', '.join(routes)}")
        # Without inputs that the graph does not use.
        flat = model.flattener_map[tag](ordered)
        name_of = {id(mark): name for name, mark in marks.items()}
        if not all(id(mark) in name_of for mark in flat):
            raise RuntimeError(f"{tag}: NxD's flattener returns other tensors than it was given")
        self._places = {name_of[id(mark)]: place for place, mark in enumerate(flat)}
        size = model.local_ranks_size
        self._of_ranks = [torch.jit.script([torch.empty(0)] * len(flat)) for _ in range(size)]
        self._ranked = torch.jit.script([[torch.empty(0)]] * size)
        for rank, tensors in enumerate(self._of_ranks):
            self._ranked[rank] = tensors  # by reference
        for name, parts in weights.items():
            self._set(name, parts)

    def take(self, name: str, parts: list[Tensor]) -> None:
        """Use these tensors, one per rank, as an input from now on. RuntimeError unless they have
        the field's shape and dtype: NxD would misread another dtype."""
        held = self._held.get(name, ())
        if len(held) == len(parts) and all(map(is_, held, parts)):
            return
        check(f"{self.tag}.{name}", parts, (self.fields[name].shape, self.fields[name].dtype))
        self._set(name, parts)
        self._held[name] = [*parts]

    def _set(self, name: str, parts: list[Tensor]) -> None:
        if (place := self._places.get(name)) is not None:
            for tensors, part in zip(self._of_ranks, parts, strict=True):
                tensors[place] = part

    def launch(self, model) -> list[list[Tensor]]:
        """Run a copy of the graph. Returns one list per output, with a tensor per rank."""
        outputs = model.spmd_models[self.tag].forward_ranked(self._ranked)
        return [[*parts] for parts in zip(*outputs, strict=True)]


def check(name: str, parts: list[Tensor], wanted: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Raise RuntimeError unless the ranks' parts of a tensor have this shape and dtype."""
    for part in parts:
        if (tuple(part.shape), part.dtype) != wanted:
            raise RuntimeError(f"{name}: got {tuple(part.shape)} {part.dtype}, wanted {wanted}")
