"""What small programs show of the runtime, for test/device.

    python -m device.probes REQUEST.json

REQUEST.json has probe (a key of PROBES) with its arguments, profile, settings, dtype, tp, folder
(for graphs and weights) and output, the JSON that is written. Not run on hardware.
"""

import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ltx_neuron import errors
from ltx_neuron.backends import mesh, registry
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

OPERATIONS = {
    "none": lambda comm, x: x,
    "sum": lambda comm, x: comm.sum(x)[0],
    "gather": lambda comm, x: comm.all_gather(x),
    "gather and scatter": lambda comm, x: comm.reduce_scatter(comm.all_gather(x)),
}
RUNS = 20  # of which the median counts, after one that does not
CHAIN = 5  # collectives of a graph, to tell their own time from the launch's


class Probe(nn.Module):
    """A collective of a rank's own tokens, `count` times."""

    def __init__(self, comm: Comm, operation: str, count: int):
        super().__init__()
        self.comm, self.operation, self.count = comm, OPERATIONS[operation], count
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        y = inputs["x"] * self.weight
        for _ in range(self.count - 1):
            # Its own tokens again: a compiler may replace a sum of equal tensors by a product.
            y = self.operation(self.comm, y) + inputs["x"]
        return {"y": self.operation(self.comm, y)}


def program(comm: Comm, operation: str, count: int, shape: tuple[int, int], dtype: torch.dtype) -> Program:
    """A program of one graph. shape: tokens and channels of a rank."""
    tokens, channels = shape
    with torch.device("meta"):
        module = Probe(comm, operation, count)
    x, runs = Field((1, tokens, channels), dtype, split=1), {"main": (("probe", 0),)}
    made = Program({"probe": module}, runs, {"x": x}, {"y": x}, dtype)
    # Under the other names of `outputs` too.
    made.fields.update(other=x, first=made.fields["y"], second=made.fields["y"])
    return made


class Cores:
    """The ranks with the programs of a probe, and where they are kept."""

    def __init__(self, request: dict):
        self.profile = resolve(request["profile"], tuple(request["settings"]))
        self.tp, self.dtype = request["tp"], DTYPES[request["dtype"]]
        self.folder = Path(request["folder"])
        shutil.rmtree(self.folder, ignore_errors=True)

    def compiled(self, name: str, made: Program) -> Manifest:
        # Compiled with the flags of the DiT, whose collectives these are.
        identity = {"model": "dit", "bucket": name, "backend": self.profile.backend}
        folder = self.folder / name
        registry.compile_program(lambda: made, folder, identity, self.dtype, self.profile, self.tp)
        return Manifest(folder)

    def started(self, programs: dict[str, Manifest]) -> Ranks:
        """The ranks with these programs, whose weight is 1."""
        ones = write_weights(self.folder / "weights", self.tp, self.dtype)
        ranks = registry.ranks(self.profile, self.tp, self.folder / "cache")
        ranks.load(ones, programs, self.dtype)
        return ranks


# --- a graph's outputs after its next run ---------------------------------------------------------


def outputs(request: dict) -> dict:
    """Whether a graph's output is still what it was after the graph has run again: as guided passes
    keep it, and, with NxD, as its own model returns it."""
    cores, shape = Cores(request), (128, 512)
    made = program(registry.comm(cores.profile, cores.tp), "none", 1, shape, cores.dtype)
    manifest = cores.compiled("outputs", made)
    with cores.started({"probe": manifest}) as ranks:
        whole = made.fields["x"].shape[1] * cores.tp
        x = torch.ones(1, whole, shape[1])
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
        kept = torch.equal(after, before)
        raw = _raw_output_stays(manifest, cores) if cores.profile.backend == "nxd" else None
    return {"right": right, "kept": kept, "raw": raw}


def _raw_output_stays(manifest: Manifest, cores: Cores) -> bool:
    """The same with NxD's model itself, whose outputs nobody copies."""
    model = runtime._open(manifest, "probe", cores.tp)
    weight = {f"{nxd_compile.WRAPPED}weight": torch.ones(1, dtype=cores.dtype)}
    model.set_weights([dict(weight) for _ in range(cores.tp)])
    model.to_neuron()
    shape = manifest.fields["x"].shape

    def run(value: float) -> list[Tensor]:
        x = torch.full(shape, value, dtype=cores.dtype)
        given = [runtime.to_core(x, rank) for rank in range(cores.tp)]
        tag = manifest.graphs["probe"]["tag"]
        (y,) = model(x=given, model_name=tag, forward_mode="ranked")
        return y

    first = run(1.0)
    before = first[0].cpu().clone()
    run(2.0)
    return torch.equal(first[0].cpu(), before)


# --- collectives ----------------------------------------------------------------------------------


def collectives(request: dict) -> dict:
    """Milliseconds of collectives and whether they give what they should.

    request  cases: [operation, count, tokens of a rank, channels] each; groups: of ranks, or None
             for all of them
    """
    cores = Cores(request)
    everyone = [[*range(cores.tp)]]
    groups = request["groups"] or everyone
    if groups == everyone:
        comm = registry.comm(cores.profile, cores.tp)
    else:
        comm = nxd_compile.XlaComm(len(groups[0]), groups)
        # Else the backend compiles no collective over other groups than the layout's.
        mesh.compiled = lambda profile, tp: {mesh.TENSOR: groups}
    names, found = [f"probe{number}" for number in range(len(request["cases"]))], []
    cases = [SimpleNamespace(operation=o, count=c, shape=(t, w)) for o, c, t, w in request["cases"]]
    manifests = {
        name: cores.compiled(name, program(comm, case.operation, case.count, case.shape, cores.dtype))
        for name, case in zip(names, cases, strict=True)
    }
    with cores.started(manifests) as ranks:
        for name, case in zip(names, cases, strict=True):
            x = rank_numbers(cores.tp, case.shape)
            ranks.put(name, x=x)
            ranks.run(name)
            # A chain's numbers leave what bfloat16 tells apart.
            right = case.count > 1 or _agree(ranks.get(name, "y"), expected(x, groups, case.operation))
            times = [ranks.run(name) for _ in range(RUNS)]
            found.append({"ms": statistics.median(times), "right": right})
    return {"cases": found}


def rank_numbers(tp: int, shape: tuple[int, int]) -> Tensor:
    """(1, tp * tokens, channels) with every rank's number in its tokens."""
    tokens, channels = shape
    numbers = torch.arange(float(tp)).repeat_interleave(tokens)
    return numbers.view(1, -1, 1).expand(1, -1, channels)


def expected(x: Tensor, groups: list[list[int]], operation: str) -> Tensor:
    """What all ranks have after an operation, joined in the order of the ranks; x likewise."""
    parts, results = x.chunk(sum(map(len, groups)), dim=1), {}
    for group in groups:
        own = [parts[rank] for rank in group]
        for rank in group:
            if operation == "sum":
                results[rank] = torch.stack(own).sum(0)
            elif operation == "gather":
                results[rank] = torch.cat(own, dim=1)
            else:  # gather and scatter: as many times its own as there are ranks
                results[rank] = parts[rank] * len(group)
    return torch.cat([results[rank] for rank in sorted(results)], dim=1)


def _agree(got: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(got.float(), wanted.float(), rtol=0.02)


def torus_groups(cores: int) -> dict[str, list[list[int]]]:
    """Groups of the ranks of a trn2.48xlarge to try, by name: its 16 chips of so many ranks are
    numbered row by row on a torus of 4 x 4, as neuron-ls of AWS's documentation has chip 0 beside
    12, 3, 4 and 1."""
    rows = [[4 * row + column for column in range(4)] for row in range(4)]
    columns = [[*column] for column in zip(*rows, strict=True)]
    pairs = [row[start : start + 2] for row in rows for start in (0, 2)]

    def one_of_each(sets: list[list[int]]) -> list[list[int]]:
        return [[cores * chip + core for chip in chips] for chips in sets for core in range(cores)]

    def whole(sets: list[list[int]]) -> list[list[int]]:
        return [[cores * chip + core for chip in chips for core in range(cores)] for chips in sets]

    chips = [*range(16)]
    return {
        "a chip": whole([[chip] for chip in chips]),
        "a rank of each of two neighbours": one_of_each(pairs),
        "a rank of each of a row": one_of_each(rows),
        "a rank of each of a column": one_of_each(columns),
        "a rank of each of two rows": one_of_each([rows[0] + rows[1], rows[2] + rows[3]]),
        "a rank of each chip": one_of_each([chips]),
        "two neighbours": whole(pairs),
        "the machine": whole([chips]),
    }


PROBES = {"outputs": outputs, "collectives": collectives}


def main() -> None:
    request = read_json(Path(sys.argv[1]))
    with torch.no_grad():
        write_json(Path(request["output"]), PROBES[request["probe"]](request))


if __name__ == "__main__":
    errors.run(main)
