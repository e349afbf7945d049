"""The probe of the groups of ranks over which a profile with context parallelism has collectives.

Which groups a machine routes, in which order of ranks and how fast is not documented. The probe
runs a small graph per group on the ranks of a run, and compares all its results.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ltx_neuron.backends import mesh, registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.config.profiles import Profile
from ltx_neuron.doctor.finding import Finding
from ltx_neuron.errors import RunError
from ltx_neuron.invocation import command
from ltx_neuron.models.parallel import Comm
from ltx_neuron.models.programs import Program
from ltx_neuron.models.signatures import Field
from ltx_neuron.weights.sharder import ShardSpec, shard_weights

WIDTH = 128  # of a row of numbers
RUNS = 5  # of which the median counts, after one that does not
ANOTHER = (
    "type another --profile-set context_parallel=N, and send us"
    f" {command('doctor', '--bundle', 'report.tar.gz')}"
)


class Collectives(nn.Module):
    """Every collective of a group, of a rank's rows (size, WIDTH): one row for each rank."""

    def __init__(self, comm: Comm):
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = inputs["rows"] * self.weight
        gathered = self.comm.all_gather(rows[None])[0]
        # Last, because a backend may sum in place.
        (summed,) = self.comm.sum(rows)
        return {"gathered": gathered, "summed": summed}


def program(comm: Comm) -> Program:
    with torch.device("meta"):
        module = Collectives(comm)
    rows = Field.of_ranks((comm.size, WIDTH), torch.float32)
    runs = {"main": (("collectives", 0),)}
    return Program(
        {"collectives": module}, runs, {"rows": rows}, {"gathered": rows, "summed": rows}
    )


def probe(profile: Profile, tp: int) -> Iterator[Finding]:
    """A finding for each group of more than one rank, of the first guidance group. Takes the cores
    of a run. After a group that fails, the others are not probed."""
    profile = replace(profile, guidance_parallel=1)
    partitions = mesh.groups(profile, tp).items()
    groups = {name: partition for name, partition in partitions if len(partition[0]) > 1}
    check, manifests = "groups", {}
    with tempfile.TemporaryDirectory(prefix="ltx-neuron-") as folder:
        folder = Path(folder)
        try:
            for name in groups:
                make = partial(program, registry.comm(profile, tp, name))
                # With the compiler flags of the DiT, whose collectives these are.
                identity = {"model": "dit", "bucket": name, "backend": profile.backend}
                registry.compile_program(make, folder / name, identity, torch.float32, profile, tp)
                manifests[name] = Manifest(folder / name)
            weights = write_weights(folder / "weights", tp, torch.float32)
            with registry.ranks(profile, tp, folder / "cache") as ranks:
                for name, partition in groups.items():
                    check = f"group {name}"
                    ranks.load(weights, {name: manifests[name]}, torch.float32)
                    yield _probed(ranks, name, partition)
        except RunError as error:
            yield Finding(check, "blocks", str(error), ANOTHER)


class _Ones:
    """A source of weights, as shard_weights reads one."""

    def nbytes(self, name: str) -> int:
        return 4

    def pieces(self, name: str, bounds: list) -> Iterator[Tensor]:
        for start, stop in bounds:
            yield torch.ones(stop - start)

    def provenance(self, digests: dict) -> dict:
        return {}


def write_weights(folder: Path, tp: int, dtype: torch.dtype) -> Path:
    """Write a weight set whose one weight, (1,), is 1 on every rank. Returns its folder."""
    spec = ShardSpec("weight", (1,), None, (1,), None)
    identity = {"kind": "weights", "model": "probe", "tp": tp}
    shard_weights(_Ones(), folder, identity, tp, dtype, [spec])  # pyright: ignore[reportArgumentType]
    return folder


def _probed(ranks: Ranks, name: str, partition: list[list[int]]) -> Finding:
    size, outputs = len(partition[0]), ranks.programs[name].graphs["collectives"]["outputs"]
    described = f"{len(partition)} group{'s' * (len(partition) > 1)} of {size} ranks"
    # Row i of rank r: the number r * size + i, exact in fp32 as are the sums.
    rows = torch.arange(float(ranks.size * size)).view(ranks.size, size)
    ranks.put(name, rows=rows.flatten()[:, None].expand(-1, WIDTH))
    ranks.run(name)
    results_of = expected(rows, partition)
    for output in outputs:
        results = ranks.get(name, output).view(ranks.size, -1, WIDTH)
        for rank, (mine, right) in enumerate(zip(results, results_of[output], strict=True)):
            if not torch.equal(mine, right[:, None].expand(-1, WIDTH)):
                text, got = f"{output} on rank {rank} is wrong", mine[:, 0]
                if output == "gathered" and sorted(got.tolist()) == sorted(right.tolist()):
                    order, right_order = ((r[::size] // size).int().tolist() for r in (got, right))
                    text = f"rank {rank} gathers from ranks {order}, wanted {right_order}: tokens"
                    text += " would be mixed"
                return Finding(f"group {name}", "blocks", f"{described}: {text}", ANOTHER)
    milliseconds = statistics.median(ranks.run(name) for _ in range(RUNS))
    text = f"{described}: {', '.join(outputs)} in {milliseconds:.2f} ms"
    return Finding(f"group {name}", "ok", text)


def expected(rows: Tensor, partition: list[list[int]]) -> dict[str, Tensor]:
    """Every rank's results (world, rows of the result), from every rank's rows (world, size)."""
    groups = [next(group for group in partition if rank in group) for rank in range(len(rows))]
    return {
        "summed": torch.stack([rows[group].sum(0) for group in groups]),
        "gathered": torch.stack([rows[group].flatten() for group in groups]),
    }
