"""What small programs show of the runtime, for test/device.

    python -m device.probes REQUEST.json

REQUEST.json has probe (a key of PROBES) with its arguments, profile, settings, dtype, tp, folder (for graphs and
weights) and output, the JSON that is written. Not run on hardware.
"""

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
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
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
    "gather": (lambda comm, x: comm.all_gather(x), lambda x: x.flatten(0, 1).expand(len(x), -1, -1)),
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


class Cores:
    """The ranks with the programs of a probe, and where they are kept."""

    def __init__(self, request: dict):
        self.profile = resolve(request["profile"], tuple(request["settings"]))
        self.tp, self.dtype = request["tp"], DTYPES[request["dtype"]]
        self.folder = Path(request["folder"])
        shutil.rmtree(self.folder, ignore_errors=True)

    def compiled(self, name: str, operation: str, count: int, *shape: int) -> Manifest:
        """A program of one graph. shape: tokens and channels of a rank."""
        with torch.device("meta"):
            module = Probe(registry.comm(self.profile, self.tp), operation, count)
        x, runs = Field((1, *shape), self.dtype, split=1), {"main": (("probe", 0),)}
        program = Program({"probe": module}, runs, {"x": x}, {"y": x}, self.dtype)
        # Under the other names of `outputs` too.
        program.fields.update(other=x, first=program.fields["y"], second=program.fields["y"])
        # Compiled with the flags of the DiT, whose collectives these are.
        identity = {"model": "dit", "bucket": name, "backend": self.profile.backend}
        registry.compile_program(lambda: program, self.folder / name, identity, self.dtype, self.profile, self.tp)
        return Manifest(self.folder / name)

    def started(self, programs: dict[str, Manifest]) -> Ranks:
        ones = write_weights(self.folder / "weights", self.tp, self.dtype)
        ranks = registry.ranks(self.profile, self.tp, self.folder / "cache")
        ranks.load(ones, programs, self.dtype)
        return ranks


def outputs(request: dict) -> dict:
    """Whether a graph's output is still what it was after the graph has run again: as guided passes keep it, and, with
    NxD, as its own model returns it."""
    cores, tokens, channels = Cores(request), 128, 512
    manifest = cores.compiled("outputs", "none", 1, tokens, channels)
    with cores.started({"probe": manifest}) as ranks:
        x = torch.ones(1, tokens * cores.tp, channels)
        ranks.put("probe", x=x)
        ranks.put("probe", like="x", other=2 * x)
        ranks.define("probe", "first", [("main", {}, {"y": "first"})])
        ranks.define("probe", "second", [("main", {"x": "other"}, {"y": "second"})])
        ranks.run("probe", "first")
        before = ranks.get("probe", "first").clone()
        for _ in range(2):  # whoever has two instances of a graph gets to the first one again
            ranks.run("probe", "second")
        after, second = (ranks.get("probe", name) for name in ("first", "second"))
        right = torch.equal(before, x.to(cores.dtype)) and torch.equal(second, 2 * before)
        raw = _raw_output_stays(manifest, cores) if cores.profile.backend == "nxd" else None
    return {"right": right, "kept": torch.equal(after, before), "raw": raw}


def _raw_output_stays(manifest: Manifest, cores: Cores) -> bool:
    """The same with NxD's model itself, whose outputs nobody copies."""
    model = runtime._open(manifest, "probe", cores.tp)
    weight = {f"{nxd_compile.WRAPPED}weight": torch.ones(1, dtype=cores.dtype)}
    model.set_weights([dict(weight) for _ in range(cores.tp)])
    model.to_neuron()

    def run(value: float) -> list[Tensor]:
        x = torch.full(manifest.fields["x"].shape, value, dtype=cores.dtype)
        parts = [runtime.to_core(x, rank) for rank in range(cores.tp)]
        (y,) = model(x=parts, model_name=manifest.graphs["probe"]["tag"], forward_mode="ranked")
        return y

    first = run(1.0)
    before = first[0].cpu().clone()
    run(2.0)
    return torch.equal(first[0].cpu(), before)


def collectives(request: dict) -> dict:
    """Milliseconds of collectives and whether they give what they should. request: cases, of [operation, count, tokens
    of a rank, channels] each."""
    cores, found = Cores(request), []
    cases = {f"probe{number}": case for number, case in enumerate(request["cases"])}
    manifests = {name: cores.compiled(name, *case) for name, case in cases.items()}
    with cores.started(manifests) as ranks:
        for name, (operation, count, tokens, channels) in cases.items():
            # Every rank's number in its tokens.
            numbers = torch.arange(float(cores.tp)).view(-1, 1, 1).expand(-1, tokens, channels)
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
