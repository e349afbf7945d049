"""What small programs show of the runtime: python -m device.probes REQUEST.json. Not run on hardware."""

import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ltx_neuron import errors
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.groups import write_weights
from ltx_neuron.files import read_json, write_json
from ltx_neuron.models.parallel import Comm
from ltx_neuron.models.programs import Program
from ltx_neuron.models.signatures import Field
from ltx_neuron.weights.tensorfile import DTYPES

# Operation -> its collective, and what every rank has after it, of all ranks' numbers (ranks, tokens, channels).
OPERATIONS = {
    "none": (lambda comm, x: x, lambda x: x),
    "sum": (lambda comm, x: comm.sum(x)[0], lambda x: x.sum(0).expand_as(x)),
    "gather and scatter": (lambda comm, x: comm.reduce_scatter(comm.all_gather(x)), lambda x: x * len(x)),
}
RUNS = 20  # of which the median counts, after one that does not
CHAIN = 5  # collectives of a graph, to tell their own time from the launch's


class Probe(nn.Module):
    """A collective of a rank's own tokens, `count` times."""

    def __init__(self, comm: Comm, operation: str, count: int):
        super().__init__()
        self.comm, self.count, (self.operation, _) = comm, count, OPERATIONS[operation]
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        y = inputs["x"] * self.weight
        for _ in range(self.count - 1):
            # Its own tokens again: a compiler may replace a sum of equal tensors by a product.
            y = self.operation(self.comm, y) + inputs["x"]
        return {"y": self.operation(self.comm, y)}


def started(request: dict, cases: dict[str, tuple]) -> Ranks:
    """Ranks that have loaded a program of one graph for each case: operation, count, tokens and channels of a rank."""
    profile, tp = resolve(request["profile"], tuple(request["settings"])), request["tp"]
    dtype, folder, programs = DTYPES[request["dtype"]], Path(request["folder"]), {}
    shutil.rmtree(folder, ignore_errors=True)
    for name, (operation, count, *shape) in cases.items():
        with torch.device("meta"):
            module = Probe(registry.comm(profile, tp), operation, count)
        x, runs = Field((1, *shape), dtype, split=1), {"main": (("probe", 0),)}
        program = Program({"probe": module}, runs, {"x": x}, {"y": x}, dtype)
        # Under the other names of `outputs` too.
        program.fields.update(other=x, first=program.fields["y"], second=program.fields["y"])
        # Compiled with the flags of the DiT, whose collectives these are.
        identity = {"model": "dit", "bucket": name, "backend": profile.backend}
        registry.compile_program(lambda program=program: program, folder / name, identity, dtype, profile, tp)
        programs[name] = Manifest(folder / name)
    ranks = registry.ranks(profile, tp, folder / "cache")
    ranks.load(write_weights(folder / "weights", tp, dtype), programs, dtype)
    return ranks


def outputs(request: dict) -> dict:
    """Whether a graph's output is still what it was after the graph has run again, as guided passes keep it."""
    tokens, channels = 128, 512
    with started(request, {"probe": ("none", 1, tokens, channels)}) as ranks:
        x = torch.ones(1, tokens * request["tp"], channels)
        ranks.put("probe", x=x)
        ranks.put("probe", like="x", other=2 * x)
        ranks.define("probe", "first", [("main", {}, {"y": "first"})])
        ranks.define("probe", "second", [("main", {"x": "other"}, {"y": "second"})])
        ranks.run("probe", "first")
        before = ranks.get("probe", "first").clone()
        for _ in range(2):  # whoever has two instances of a graph gets to the first one again
            ranks.run("probe", "second")
        after, second = (ranks.get("probe", name) for name in ("first", "second"))
    right = torch.equal(before, x.to(before.dtype)) and torch.equal(second, 2 * before)
    return {"right": right, "kept": torch.equal(after, before)}


def collectives(request: dict) -> dict:
    """Milliseconds of the request's cases, and whether they give what they should."""
    found, cases = [], {f"probe{number}": case for number, case in enumerate(request["cases"])}
    with started(request, cases) as ranks:
        for name, (operation, count, tokens, channels) in cases.items():
            # Every rank's number in its tokens.
            numbers = torch.arange(float(request["tp"])).view(-1, 1, 1).expand(-1, tokens, channels)
            ranks.put(name, x=numbers.flatten(0, 1)[None])
            ranks.run(name)
            # A chain's numbers leave what bfloat16 tells apart.
            wanted = OPERATIONS[operation][1](numbers).flatten(0, 1)[None]
            right = count > 1 or torch.allclose(ranks.get(name, "y").float(), wanted, rtol=0.02)
            found.append({"ms": statistics.median(ranks.run(name) for _ in range(RUNS)), "right": right})
    return {"cases": found}


PROBES = {"outputs": outputs, "collectives": collectives}


def main() -> None:
    request = read_json(Path(sys.argv[1]))
    with torch.no_grad():
        write_json(Path(request["output"]), PROBES[request["probe"]](request))


if __name__ == "__main__":
    errors.run(main)
