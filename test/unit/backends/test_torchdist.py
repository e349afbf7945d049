"""Rank processes over gloo: uploads, runs and downloads, and no failure leaves a process or a wait behind."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from helpers import exit_code, forked, randn, rel, save_weights, shared_memories, wait_for, within
from safetensors.torch import load_file
from toy import EQUAL, SOON, TP, WIDTH, alive, assert_all_end, make_toy, pids_of, ready, upload, wanted

from ltx_neuron.backends.ranks import NotFiniteError, RankError, RankRefusal
from ltx_neuron.backends.torchdist import host
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.backends.torchdist.protocol import SharedTensor
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.errors import UserError
from ltx_neuron.weights.rankfiles import rank_file
from ltx_neuron.weights.tensorfile import finite

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def started():
    with TorchDistRanks(PROFILES["cpu"], TP) as ranks:
        pids = pids_of(ranks)
        yield ranks
        os.kill(pids[1], signal.SIGSTOP)  # leaving the block ends even a rank that does not answer
    assert_all_end(pids)
    assert not Path(ranks._folder).exists()


@pytest.fixture
def ranks(started, toy):
    """The ranks with the toy loaded and its inputs uploaded."""
    started.load(toy.folders[1], toy.programs, torch.float32)
    upload(started, toy)
    return started


@pytest.fixture
def own(request, toy, monkeypatch):
    """Ranks that a test may break; nothing of them may be left. Their host's interface does not matter."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    before = shared_memories()
    with ready(toy, resolve("cpu", getattr(request, "param", ()))) as ranks:
        pids = pids_of(ranks)
        yield ranks
        assert_all_end(pids)
    assert not Path(ranks._folder).exists() and shared_memories() <= before
    assert os.environ["GLOO_SOCKET_IFNAME"] == "nosuch0"


def assert_right(ranks, toy, step: int, seed: int = 1, program: str = "toy") -> None:
    assert 0 < ranks.run(program, step=step) < 1e3 * SOON  # milliseconds
    assert rel(ranks.get(program, "y"), wanted(toy, step, seed)) < EQUAL


def test_a_program_runs_on_uploads_and_a_split_tensor_is_whole_for_the_host(ranks, toy):
    assert_right(ranks, toy, 3)
    assert torch.equal(ranks.get("toy", "doubled"), 2 * toy.table)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-42, 3.4e38, 1.0, -1.0]).repeat(1, 4, WIDTH // 8)
    for name in ("x", "table"):  # bit for bit
        ranks.put("toy", **{name: special})
        assert torch.equal(ranks.get("toy", name).view(torch.int32), special.view(torch.int32))
    # Over all ranks a short command for a run, and its bytes for an upload.
    sent, commands = ranks.bytes_sent, ranks.command_bytes
    ranks.run("toy", step=7)
    assert ranks.bytes_sent == sent and 0 < ranks.command_bytes - commands < 1000
    ranks.put("toy", x=toy.x)
    assert ranks.bytes_sent - sent == toy.x.nbytes


def test_hashes_are_over_the_bits_of_the_named_tensors_in_their_order(ranks, toy):
    def digest(*tensors) -> str:
        return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()

    ranks.run("toy", step=1)
    y = ranks.get("toy", "y")
    assert (ranks.hashes("x", "y"), ranks.hashes("y", "x")) == ([digest(toy.x, y)] * TP, [digest(y, toy.x)] * TP)
    assert ranks.hashes("table") == [digest(part) for part in toy.table.chunk(TP, dim=2)]
    changed = toy.x.clone()
    changed.view(torch.int32)[0, 0, 0] ^= 1  # one bit
    ranks.put("toy", x=changed)
    assert ranks.hashes("x") == [digest(changed)] * TP


def test_a_tensor_of_another_shape_or_name_is_refused_before_anything_is_sent(ranks):
    before, sent = ranks.hashes("x", "table"), ranks.bytes_sent
    for name, error in (("x", ValueError), ("table", ValueError), ("unknown", KeyError)):
        with pytest.raises(error, match=name):  # what one rank has of the split one
            ranks.put("toy", **{name: torch.zeros(1, 4, WIDTH // TP)})
    assert ranks.bytes_sent == sent and ranks.hashes("x", "table") == before


def test_a_sequence_reads_and_leaves_tensors_under_other_names(ranks, toy):
    ranks.put("toy", like="x", other=10 * toy.x)
    ranks.define("toy", "twice", [("main", {"x": "other"}, {"y": "first"}), ("main", {"x": "first"}, {})])
    launches, launch_ms = ranks.launches, ranks.launch_ms
    milliseconds = ranks.run("toy", "twice", step=1)
    assert ranks.launches - launches == 2
    assert 0 < ranks.launch_ms - launch_ms < milliseconds  # what is between the graphs
    product = toy.table @ toy.weights[1].T
    assert rel(ranks.get("toy", "y"), product + product + 10 * toy.x) < EQUAL


def test_models_stay_loaded_beside_each_other_and_replaced_weights_find_their_own(ranks, toy, tmp_path):
    """What resident=true does."""
    other = make_toy(tmp_path, names=("up", "other"))
    ranks.load(other.folders[1], other.programs, torch.float32)
    ranks.replace_weights(toy.folders[2])
    upload(ranks, toy, "other")
    assert_right(ranks, toy, 3, 1, "other")
    assert_right(ranks, toy, 3, 2)
    assert rel(wanted(toy, 3, seed=2), wanted(toy, 3)) > 0.1
    ranks.replace_weights(other.folders[2])
    assert_right(ranks, toy, 3, 2, "other")
    ranks.unload()
    ranks.load(toy.folders[2], toy.programs, torch.float32)
    upload(ranks, toy)
    assert_right(ranks, toy, 2, 2)


def test_latents_that_are_not_finite_are_named_wherever_their_element_lies(ranks, toy):
    ranks.define("toy", "latents", [("main", {}, {"y": "video_latent", "doubled": "audio_latent"})])
    ranks.put("toy", x=torch.full_like(toy.x, float("nan")))
    with pytest.raises(NotFiniteError, match="NaN or Inf in video_latent"):
        ranks.run("toy", "latents", step=1)
    ranks.put("toy", x=toy.x)
    ranks.run("toy", "latents", step=1)
    for dtype in (torch.bfloat16, torch.float32):
        latents = randn(1, 40, 128).to(dtype)
        latents[0, 0, 0], latents[0, 0, 1] = torch.finfo(dtype).max, torch.finfo(dtype).min
        assert finite(latents)  # the largest numbers are
        for value, token, channel in (("nan", 0, 0), ("inf", 17, 5), ("-inf", 39, 127)):
            broken = latents.clone()
            broken[0, token, channel] = float(value)
            assert not finite(broken)


def test_unloading_frees_weights_and_tensors_and_an_error_of_a_rank_reaches_the_host(tmp_path):
    width = 4096
    toy, weight_bytes = make_toy(tmp_path, width), 4 * width * width // TP
    with ready(toy) as ranks:
        processes = [psutil.Process(pid) for pid in pids_of(ranks)]
        ranks.run("toy", step=1)
        loaded = [process.memory_info().rss for process in processes]
        ranks.unload()
        for process, rss in zip(processes, loaded, strict=True):
            assert rss - process.memory_info().rss > 0.9 * weight_bytes
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        with pytest.raises(RankError, match=r"(?s)^rank \d of 2 failed: Traceback.*KeyError: 'x'") as error:
            ranks.hashes("x")  # was uploaded before
        assert not isinstance(error.value, UserError)
        assert_all_end([process.pid for process in processes])


def test_an_error_of_one_rank_is_told_by_its_number_and_ends_all(own, toy, tmp_path):
    right = load_file(toy.folders[1] / rank_file(0))
    save_weights(tmp_path, right, {"up.weight": torch.ones(8, 4)})
    os.kill(pids_of(own)[0], signal.SIGSTOP)  # would neither answer nor end by itself
    with pytest.raises(RankRefusal) as error:  # a mistake the user can mend: no traceback
        own.load(tmp_path, toy.programs, torch.float32)
    text = f"rank 1 of 2 failed: {tmp_path / rank_file(1)} does not have this model's weights:\n"
    assert str(error.value) == f"{text}  missing: down.weight\n  unexpected: up.weight"


def test_a_rank_killed_in_a_run_is_named_and_leaves_no_process(own):
    pids = pids_of(own)
    os.kill(pids[1], signal.SIGSTOP)  # so that the run lasts: rank 0 waits in the all-reduce
    killer = threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL))
    killer.start()
    killed = r"rank 1 of 2 failed: the process was killed \(SIGKILL\).* memory ran out"
    with within(SOON), pytest.raises(RankError, match=killed):
        own.run("toy", step=1)
    killer.join()


def test_a_rank_whose_weights_are_cut_short_under_it_is_named_and_its_end_explained(toy, tmp_path):
    weights = Path(shutil.copytree(toy.folders[1], tmp_path / "weights"))
    with ready(SimpleNamespace(**vars(toy) | {"folders": {1: weights}})) as ranks:
        os.truncate(weights / rank_file(1), 0)
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: .* killed \(SIGBUS\): its weight file was cut short"):
            ranks.run("toy", step=1)


@pytest.mark.parametrize("own", [("first_run_seconds=3",)], indirect=True)
@pytest.mark.parametrize(("waiting", "rank"), [("in a collective", 0), ("for an answer", 1)])
def test_a_stopped_rank_is_named_when_others_have_waited_for_it_too_long(own, monkeypatch, waiting, rank):
    """The others raise in their collective, and all but the stopped rank have then answered."""
    monkeypatch.setattr(host, "_PEERS_SECONDS", 1.0)
    os.kill(pids_of(own)[rank], signal.SIGSTOP)
    began = time.monotonic()
    with within(SOON), pytest.raises(RankError) as error:
        own.run("toy", step=1) if waiting == "in a collective" else own.hashes("x")
    assert time.monotonic() - began > 2.9
    stopped = f"rank {rank} of 2 failed: it is stopped (SIGSTOP) or hangs: it did not answer while others"
    assert str(error.value) == f"{stopped} waited for it for 3 s (first_run_seconds)"


def test_a_rank_that_is_killed_while_idle_is_found_by_a_check(own):
    own.check()  # of ranks that live, nothing
    pid = pids_of(own)[1]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive([pid]), SOON)
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
        wait_for(lambda: own.check() or False, SOON)


def test_a_rank_that_cannot_be_started_or_has_no_device_is_told_by_its_number(monkeypatch):
    with pytest.raises(RankError, match=r"rank 0 of 1 failed"):
        TorchDistRanks(resolve("cuda"), 1)
    refuse = Mock(side_effect=ConnectionRefusedError(111, "Connection refused"))
    monkeypatch.setattr("multiprocessing.forkserver.connect_to_new_process", refuse)
    with pytest.raises(RankError, match="rank 0 of 2 could not be started: (?s:.*)killed the process"):
        TorchDistRanks(PROFILES["cpu"], TP)


HOST = """
import os, sys
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import PROFILES
if __name__ == "__main__":
    answer = open(os.dup(1), "w")
    os.dup2(2, 1)  # Gloo of torch 2.9 prints which ranks it connected
    ranks = TorchDistRanks(PROFILES["cpu"], 2)
    print(ranks._folder, *(each.pid for each in ranks._processes), file=answer, flush=True)
    sys.stdin.read()
"""


def test_ranks_of_a_killed_host_end_and_leave_no_file_and_no_shared_memory(tmp_path):
    (tmp_path / "host.py").write_text(HOST)
    before, pipe = shared_memories(), subprocess.PIPE
    process = subprocess.Popen([sys.executable, tmp_path / "host.py"], stdin=pipe, stdout=pipe, text=True)
    store, *pids = process.stdout.readline().split()
    assert alive(pids := [int(pid) for pid in pids]) == pids and Path(store).exists()
    process.kill()
    process.communicate()
    assert_all_end(pids)
    assert not Path(store).exists() and shared_memories() <= before


def test_a_forked_process_removes_nothing_of_its_parents_ranks(started):
    """Its exit runs what the parent has registered for its own."""
    assert exit_code(forked(started._remove_folder)) == 0 and Path(started._folder).is_dir()


def test_a_host_killed_at_any_moment_of_an_upload_leaves_no_shared_memory():
    before, choose = shared_memories(), random.Random(1)
    for _ in range(50):  # memory that had a name stayed after two of five
        child = os.fork()
        while child == 0:
            with SharedTensor((8,), torch.int32):
                pass
        time.sleep(choose.uniform(0.001, 0.003))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert shared_memories() <= before
