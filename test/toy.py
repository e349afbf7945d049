"""The smallest program that ranks of a backend may run, in its files, for tests of their processes."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from helpers import allowed, randn, save_weights, wait_for
from torch import Tensor, nn

from ltx_neuron.backends.export import TorchDistComm, compile_program, fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import PROFILES, Profile
from ltx_neuron.models.parallel import Comm, RowLinear
from ltx_neuron.models.programs import Program
from ltx_neuron.models.signatures import Field

TP, WIDTH = 2, 256  # wide enough that a tensor has more bytes than a command
EQUAL = 1e-6  # fp32 sums of two halves against one sum of the whole
STEPS = 10  # numbers that a run may name
SOON = 10  # seconds in which every process must have ended; it takes a tenth of one


class Toy(nn.Module):
    """One matrix product split over the ranks, a step's number, and a table of which each rank has its own part."""

    def __init__(self, width: int, comm: Comm, name: str):
        super().__init__()
        self.comm, self.name = comm, name
        self.add_module(name, RowLinear(width, width, comm.size, bias=False))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (summed,) = self.comm.sum(getattr(self, self.name).partial(inputs["table"]))
        y = summed + inputs["step"] * inputs["x"]
        return {"y": y, "doubled": inputs["table"] * 2, "finite": y.mean((1, 2))}


def make_toy(folder: Path, width: int = WIDTH, names: tuple[str, str] = ("down", "toy")) -> SimpleNamespace:
    """The program compiled, its weights for all ranks, and whole inputs. names: of its layer and of itself."""
    split, whole = Field((1, 4, width // TP), torch.float32, split=2), Field((1, 4, width), torch.float32)
    inputs = {"step": Field((1,), torch.int32), "x": whole, "table": split}
    with torch.device("meta"):
        module = Toy(width, TorchDistComm(TP), names[0])
    with fake_process_group(TP):
        returned = {"y": whole, "doubled": split, "finite": whole}
        program = Program({"toy": module}, {"main": (("toy", 0),)}, inputs, returned)
        compile_program(program, folder / "graphs", {}, torch.float32)
    weights = {seed: randn(width, width, seed=seed) for seed in (1, 2)}
    folders = {seed: folder / f"weights{seed}" for seed in weights}
    for seed, weight in weights.items():
        save_weights(folders[seed], *({f"{names[0]}.weight": part} for part in weight.chunk(TP, dim=1)))
    x, table = (randn(1, 4, width, seed=seed) for seed in (3, 4))
    programs = {names[1]: Manifest(folder / "graphs")}
    return SimpleNamespace(programs=programs, folders=folders, weights=weights, x=x, table=table)


def upload(ranks: TorchDistRanks, toy, name: str = "toy") -> None:
    """All that a run of the toy takes."""
    ranks.put(name, x=toy.x, table=toy.table)
    ranks.put_numbers(name, "step", STEPS)


def wanted(toy, step: int, seed: int = 1) -> Tensor:
    return toy.table @ toy.weights[seed].T + step * toy.x


def alive(pids: list[int]) -> list[int]:
    """Processes that are neither gone nor merely waiting to be collected."""
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            running += [pid] * (psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return running


def assert_all_end(pids: list[int]) -> None:
    wait_for(lambda: alive(pids) == [], allowed(SOON))


def pids_of(ranks: TorchDistRanks) -> list[int]:
    pids = [process.pid for process in ranks._processes]
    assert len(pids) == TP and alive(pids) == pids
    return pids


def ready(toy, profile: Profile = PROFILES["cpu"]) -> TorchDistRanks:
    """Ranks of their own, that a test may break."""
    ranks = TorchDistRanks(profile, TP)
    ranks.load(toy.folders[1], toy.programs, torch.float32)
    upload(ranks, toy)
    return ranks
