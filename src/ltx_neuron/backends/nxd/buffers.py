"""The named tensors on the cores of an NxD run: who owns each buffer, and until when.

A loaded graph has one set of output buffers, and its next run overwrites them. A value that must
outlive that run (a guided step's four predictions), and a value that the same graph reads (the
stream between two groups of blocks), therefore need a second copy of the graph: the same file
loaded again, over the same weights. These are the rules:

- A tensor that the host uploads has a buffer of its own, until another takes its name.
- A tensor that a graph returns lies in the buffer of the loaded copy that ran, until this copy runs
  again or is released.
- A copy may run if it owns nothing that the call reads, and nothing else that still has a name.

Source: on trn2.3xlarge, running one graph of a torch.classes.neuron.SPMDModel twice overwrote the
first outputs; two loaded graphs kept them (Difflet, 2026-08). TorchNeuron allocates outputs anew
for each call (executor.py, _allocate_output) and needs none of this. Not run on hardware by us.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import count

from torch import Tensor

from ltx_neuron.backends.ranks import Call


class Buffers:
    """Named tensors, a list of one tensor per rank each, and the loaded copies that own them.

    tensors  by name
    owners   (program, graph, number of the copy) by name; an upload has no owner
    """

    def __init__(self):
        self.tensors: dict[str, list[Tensor]] = {}
        self.owners: dict[str, tuple[str, str, int]] = {}

    def upload(self, name: str, parts: list[Tensor]) -> None:
        self.tensors[name] = parts
        self.owners.pop(name, None)

    def claim(self, program: str, call: Call) -> int:
        """The number of the copy that may run a call: it then owns what the call writes."""
        reads, writes = {*call.reads.values()}, {*call.writes.values()}
        for number in count():
            copy = program, call.graph, number
            owned = {name for name, owner in self.owners.items() if owner == copy}
            if not owned & reads and owned <= writes:
                self.owners |= dict.fromkeys(writes, copy)
                return number
        raise AssertionError  # a copy that never ran owns nothing

    def release(self, programs: Iterable[str]) -> None:
        """Forget the tensors that graphs of these programs own: their buffers leave with them."""
        gone = {name for name, (program, *_) in self.owners.items() if program in programs}
        for name in gone:
            del self.owners[name]
            self.tensors.pop(name, None)


def copies_needed(program: str, calls: list[Call]) -> Counter[str]:
    """How often each graph must be loaded so that a sequence of calls may be repeated."""
    buffers, needed = Buffers(), Counter()
    for call in [*calls, *calls, *calls]:
        needed[call.graph] = max(needed[call.graph], buffers.claim(program, call) + 1)
    return needed
