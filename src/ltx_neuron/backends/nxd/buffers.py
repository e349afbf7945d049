"""The named tensors on the cores of an NxD run, and the owner of each buffer.

A loaded graph has one set of output buffers, and its next run overwrites them. Some values must
outlive that run (a guided step's four predictions), and some are inputs of the same graph (the
stream between two groups of blocks). They need a second copy of the graph: the same file loaded
again, with the same weights. The rules:

- An uploaded tensor has its own buffer until another tensor gets its name.
- A graph's output is in the buffer of the copy that ran, until this copy runs again or is released.
- A copy may run if it owns no input of the call and no other named tensor.

Source: on trn2.3xlarge, a second run of a graph of a torch.classes.neuron.SPMDModel overwrote the
first outputs; two loaded graphs kept them (Difflet, 2026-08). TorchNeuron allocates new outputs for
each call (executor.py, _allocate_output) and needs no copies. We did not run this on hardware.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import count

from torch import Tensor

from ltx_neuron.backends.ranks import Call


class Buffers:
    """Named tensors, each a list with one tensor per rank, and the loaded copies that own them.
    tensors: by name. owners: (program, graph, number of the copy) by name; an upload has no owner.
    """

    def __init__(self):
        self.tensors: dict[str, list[Tensor]] = {}
        self.owners: dict[str, tuple[str, str, int]] = {}

    def upload(self, name: str, parts: list[Tensor]) -> None:
        self.tensors[name] = parts
        self.owners.pop(name, None)

    def claim(self, program: str, call: Call) -> int:
        """The number of a copy that may run a call. It then owns the call's outputs."""
        reads, writes = {*call.reads.values()}, {*call.writes.values()}
        for number in count():
            copy = program, call.graph, number
            owned = {name for name, owner in self.owners.items() if owner == copy}
            if not owned & reads and owned <= writes:
                self.owners |= dict.fromkeys(writes, copy)
                return number
        raise AssertionError  # a copy that never ran owns nothing

    def release(self, programs: Iterable[str]) -> None:
        """Forget the tensors that graphs of these programs own, whose buffers are freed."""
        gone = {name for name, (program, *_) in self.owners.items() if program in programs}
        for name in gone:
            del self.owners[name]
            self.tensors.pop(name, None)


def copies_needed(program: str, calls: list[Call]) -> Counter[str]:
    """The number of copies of each graph with which a sequence of calls can be repeated."""
    buffers, needed = Buffers(), Counter()
    for call in [*calls, *calls, *calls]:
        needed[call.graph] = max(needed[call.graph], buffers.claim(program, call) + 1)
    return needed
