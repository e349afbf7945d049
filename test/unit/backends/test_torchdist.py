"""Rank processes over gloo: what is uploaded, run and downloaded, and that no failure leaves a
process or a wait behind."""

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

import pytest
import torch
from helpers import allowed, randn, rel, save_weights, shared_memories
from safetensors.torch import load_file
from toy import EQUAL, SOON, STEPS, TP, WIDTH, alive, assert_all_end, make_toy, pids_of, ready, upload, wanted

from ltx_neuron.backends.ranks import NotFiniteError, RankError, RankRefusal
from ltx_neuron.backends.torchdist import host
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.backends.torchdist.protocol import SharedTensor
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.denoise import StageRun
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.job import Stage
from ltx_neuron.weights.rankfiles import rank_file
from ltx_neuron.weights.tensorfile import finite

SOURCE = Path(host.__file__).parents[3]
SHOWS = 0.1  # another step's number, other weights or a part too few
COMMAND_BYTES = 1000  # of a step, over all ranks: a short line, never a tensor
KILLS = 50  # memory that had a name stayed after two of five

pytestmark = pytest.mark.timeout(60)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; weights are pages of their file."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def started():
    """Two ranks, for all tests that leave them in good health."""
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


def test_a_program_runs_on_what_was_uploaded_and_keeps_what_it_returns(ranks, toy):
    milliseconds = ranks.run("toy", step=3)
    assert 0 < milliseconds < 1e3 * SOON
    assert rel(ranks.get("toy", "y"), wanted(toy, 3)) < EQUAL
    ranks.run("toy", step=5)
    assert rel(ranks.get("toy", "y"), wanted(toy, 5)) < EQUAL


def test_a_split_tensor_is_sent_whole_and_each_rank_keeps_its_part(ranks, toy):
    assert torch.equal(ranks.get("toy", "table"), toy.table)
    ranks.run("toy", step=0)
    assert torch.equal(ranks.get("toy", "doubled"), 2 * toy.table)
    parts = [part.contiguous().numpy().tobytes() for part in toy.table.chunk(TP, dim=2)]
    assert ranks.hashes("table") == [hashlib.sha256(part).hexdigest() for part in parts]


def test_hashes_are_over_the_bits_of_the_named_tensors_in_their_order(ranks, toy):
    ranks.run("toy", step=1)
    y = ranks.get("toy", "y")
    bits = toy.x.numpy().tobytes(), y.numpy().tobytes()
    assert ranks.hashes("x", "y") == [hashlib.sha256(bits[0] + bits[1]).hexdigest()] * TP
    assert ranks.hashes("y", "x") == [hashlib.sha256(bits[1] + bits[0]).hexdigest()] * TP
    changed = toy.x.clone()
    changed.view(torch.int32)[0, 0, 0] ^= 1  # one bit
    ranks.put("toy", x=changed)
    assert ranks.hashes("x", "y") != [hashlib.sha256(bits[0] + bits[1]).hexdigest()] * TP


def test_tensors_arrive_bit_for_bit(ranks, toy):
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-42, 3.4e38, 1.0, -1.0]).repeat(1, 4, WIDTH // 8)
    ranks.put("toy", x=special, table=special)
    for name in ("x", "table"):
        assert torch.equal(ranks.get("toy", name).view(torch.int32), special.contiguous().view(torch.int32))


@pytest.mark.parametrize("name", ["x", "table"])
def test_a_tensor_of_another_shape_is_refused_before_anything_is_sent(ranks, toy, name):
    before, sent = ranks.hashes("x", "table"), ranks.bytes_sent
    with pytest.raises(ValueError, match=rf"toy\.{name}: got shape \(1, 4, {WIDTH // TP}\), wanted \(1, 4, {WIDTH}\)"):
        # What a single rank has of the split one.
        ranks.put("toy", **{name: torch.zeros(1, 4, WIDTH // TP)})
    assert ranks.bytes_sent == sent
    assert ranks.hashes("x", "table") == before


def test_a_tensor_that_no_graph_knows_is_refused(ranks):
    with pytest.raises(KeyError, match="unknown"):
        ranks.put("toy", unknown=torch.zeros(1))


def test_a_run_costs_the_host_a_short_command_and_no_upload_and_an_upload_its_bytes(ranks, toy):
    sent, message = ranks.bytes_sent, ranks.command_bytes
    ranks.run("toy", step=7)
    assert ranks.bytes_sent == sent
    assert 0 < ranks.command_bytes - message < COMMAND_BYTES
    ranks.put("toy", x=toy.x)
    assert ranks.bytes_sent - sent == toy.x.nbytes


def test_a_number_that_was_not_uploaded_is_not_made_up(toy):
    with ready(toy) as ranks, pytest.raises(RankError, match="step@10"):
        ranks.run("toy", step=STEPS)


def test_a_sequence_reads_and_leaves_tensors_under_other_names(ranks, toy):
    ranks.put("toy", like="x", other=10 * toy.x)
    ranks.define("toy", "twice", [("main", {"x": "other"}, {"y": "first"}), ("main", {"x": "first"}, {})])
    launches, launch_ms = ranks.launches, ranks.launch_ms
    milliseconds = ranks.run("toy", "twice", step=1)
    assert ranks.launches - launches == 2
    assert 0 < ranks.launch_ms - launch_ms < milliseconds  # what is between the graphs
    first = toy.table @ toy.weights[1].T + 10 * toy.x
    assert rel(ranks.get("toy", "y"), toy.table @ toy.weights[1].T + first) < EQUAL


def test_replaced_weights_serve_the_same_graphs_and_tensors(ranks, toy):
    ranks.replace_weights(toy.folders[2])
    ranks.run("toy", step=3)
    assert rel(ranks.get("toy", "y"), wanted(toy, 3, seed=2)) < EQUAL
    assert rel(wanted(toy, 3, seed=2), wanted(toy, 3)) > SHOWS


def test_two_models_stay_loaded_beside_each_other_and_each_has_its_own_weights(ranks, toy, tmp_path):
    """What resident=true does: the second model takes nothing from the first, and replacing finds
    the one it is for."""
    other = make_toy(tmp_path, names=("up", "other"))
    ranks.load(other.folders[1], other.programs, torch.float32)
    ranks.replace_weights(toy.folders[2])
    upload(ranks, toy, "other")
    for name, weights, seed in (("other", other, 1), ("toy", toy, 2)):
        ranks.run(name, step=3)
        assert rel(ranks.get(name, "y"), wanted(toy, 3, seed)) < EQUAL
        assert torch.equal(weights.weights[seed], toy.weights[seed])
    ranks.replace_weights(other.folders[2])
    ranks.run("other", step=3)
    assert rel(ranks.get("other", "y"), wanted(toy, 3, seed=2)) < EQUAL


def test_an_unloaded_model_may_be_loaded_again(ranks, toy):
    ranks.unload()
    ranks.load(toy.folders[2], toy.programs, torch.float32)
    upload(ranks, toy)
    ranks.run("toy", step=2)
    assert rel(ranks.get("toy", "y"), wanted(toy, 2, seed=2)) < EQUAL


def test_unloading_frees_weights_and_tensors_and_a_ranks_own_error_reaches_the_host(tmp_path):
    width = 4096
    toy, weight_bytes = make_toy(tmp_path, width), 4 * width * width // TP
    with TorchDistRanks(PROFILES["cpu"], TP) as ranks:
        pids = pids_of(ranks)
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        upload(ranks, toy)
        ranks.run("toy", step=1)
        loaded = [resident(pid) for pid in pids]
        ranks.unload()
        freed = [before - resident(pid) for before, pid in zip(loaded, pids, strict=True)]
        assert min(freed) > 0.9 * weight_bytes
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        with pytest.raises(RankError, match=r"(?s)^rank \d of 2 failed: Traceback.*KeyError: 'x'") as error:
            ranks.hashes("x")  # was uploaded before
        assert not isinstance(error.value, UserError)
        assert_all_end(pids)


def test_an_error_of_one_rank_is_said_by_its_number_and_ends_all(toy, tmp_path):
    right = load_file(toy.folders[1] / rank_file(0))
    save_weights(tmp_path, right, {"up.weight": torch.ones(8, 4)})
    with TorchDistRanks(PROFILES["cpu"], TP) as ranks:
        pids = pids_of(ranks)
        os.kill(pids[0], signal.SIGSTOP)  # would neither answer nor end by itself
        with pytest.raises(RankRefusal) as error:
            ranks.load(tmp_path, toy.programs, torch.float32)
        assert_all_end(pids)
    assert isinstance(error.value, UserError)  # a mistake the user can mend: no traceback
    assert (
        str(error.value) == f"rank 1 of 2 failed: {tmp_path / rank_file(1)} does not have this model's weights:\n"
        "  missing: down.weight\n  unexpected: up.weight"
    )


def test_a_rank_killed_in_a_run_is_named_and_leaves_no_process(toy):
    with ready(toy) as ranks:
        pids = pids_of(ranks)
        os.kill(pids[1], signal.SIGSTOP)  # so that the run lasts: rank 0 waits in the all-reduce
        killer = threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: the process was killed \(SIGKILL\).* memory ran out"):
            ranks.run("toy", step=1)
        assert 0.3 < time.monotonic() - began < allowed(SOON)
        assert_all_end(pids)
        killer.join()
    assert not Path(ranks._folder).exists()


def test_a_rank_whose_weights_are_cut_short_under_it_is_named_and_its_end_explained(toy, tmp_path):
    weights = Path(shutil.copytree(toy.folders[1], tmp_path / "weights"))
    with TorchDistRanks(PROFILES["cpu"], TP) as ranks:
        ranks.load(weights, toy.programs, torch.float32)
        upload(ranks, toy)
        os.truncate(weights / rank_file(1), 0)
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: .* killed \(SIGBUS\): its weight file was cut short"):
            ranks.run("toy", step=1)


@pytest.mark.parametrize(("waiting", "rank"), [("in a collective", 0), ("for an answer", 1)])
def test_a_stopped_rank_is_named_when_others_have_waited_for_it_too_long(toy, monkeypatch, waiting, rank):
    """The others raise in their collective, and all but the stopped rank have then answered."""
    monkeypatch.setattr(host, "_PEERS_SECONDS", 1.0)
    before = shared_memories()
    with TorchDistRanks(resolve("cpu", ("first_run_seconds=3",)), TP) as ranks:
        pids = pids_of(ranks)
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        upload(ranks, toy)
        os.kill(pids[rank], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankError) as error:
            ranks.run("toy", step=1) if waiting == "in a collective" else ranks.hashes("x")
        assert 2.9 < time.monotonic() - began < allowed(SOON)
        assert_all_end(pids)
    assert str(error.value) == (
        f"rank {rank} of 2 failed: it is stopped (SIGSTOP) or hangs: it did not answer while others"
        " waited for it for 3 s (first_run_seconds)"
    )
    assert not Path(ranks._folder).exists() and shared_memories() <= before


def test_a_rank_that_is_killed_while_it_has_nothing_to_do_is_seen_by_a_check(toy):
    with ready(toy) as ranks:
        pids = pids_of(ranks)
        ranks.check()  # of ranks that live, nothing
        os.kill(pids[1], signal.SIGKILL)
        until = time.monotonic() + 5
        with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
            while time.monotonic() < until:
                ranks.check()
                time.sleep(0.05)
        assert_all_end(pids)


def test_a_rank_that_cannot_be_started_is_said_in_a_sentence(monkeypatch):
    def refuse(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("multiprocessing.forkserver.connect_to_new_process", refuse)
    with pytest.raises(RankError, match="rank 0 of 2 could not be started: (?s:.*)killed the process"):
        TorchDistRanks(PROFILES["cpu"], TP)


def test_an_interface_that_is_not_there_does_not_matter(monkeypatch, toy):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with ready(toy) as ranks:
        ranks.run("toy", step=1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "nosuch0"


HOST = """
import os, sys
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import PROFILES, resolve
if __name__ == "__main__":
    answer = open(os.dup(1), "w")
    os.dup2(2, 1)  # Gloo of torch 2.9 prints which ranks it connected
    ranks = TorchDistRanks(PROFILES["cpu"], 2)
    print(ranks._folder, *(each.pid for each in ranks._processes), file=answer, flush=True)
    sys.stdin.read()
"""


def test_a_forked_process_removes_nothing_of_its_parents_ranks(started):
    """Its exit runs what the parent has registered for its own."""
    child = os.fork()
    if child == 0:
        started._remove_folder()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(started._folder).is_dir()


def test_ranks_of_a_killed_host_end_and_leave_no_file_and_no_shared_memory(tmp_path):
    (tmp_path / "host.py").write_text(HOST)
    before = shared_memories()
    host = subprocess.Popen(
        [sys.executable, tmp_path / "host.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    store, *pids = host.stdout.readline().split()
    pids = [int(pid) for pid in pids]
    assert alive(pids) == pids and Path(store).exists()
    host.kill()
    host.communicate()
    assert_all_end(pids)
    assert not Path(store).exists()
    assert shared_memories() <= before


def test_a_host_killed_at_any_moment_of_an_upload_leaves_no_shared_memory():
    before, choose = shared_memories(), random.Random(1)
    for _ in range(KILLS):
        child = os.fork()
        while child == 0:
            with SharedTensor((8,), torch.int32):
                pass
        time.sleep(choose.uniform(0.001, 0.003))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert shared_memories() <= before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_one_element_that_is_not_finite_is_found_wherever_it_lies(value, dtype):
    latents = randn(1, 40, 128).to(dtype)
    latents[0, 0, 0], latents[0, 0, 1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert finite(latents)  # the largest numbers are
    for token, channel in ((0, 0), (17, 5), (39, 127)):
        broken = latents.clone()
        broken[0, token, channel] = float(value)
        assert not finite(broken)


def test_latents_that_are_not_finite_are_named(ranks, toy):
    ranks.define("toy", "latents", [("main", {}, {"y": "video_latent", "doubled": "audio_latent"})])
    ranks.run("toy", "latents", step=1)
    ranks.put("toy", x=torch.full_like(toy.x, float("nan")))
    with pytest.raises(NotFiniteError, match="NaN or Inf in video_latent"):
        ranks.run("toy", "latents", step=1)
    ranks.put("toy", x=toy.x)
    ranks.run("toy", "latents", step=1)


def test_a_step_whose_latents_are_not_finite_is_named():
    def fail(*_, **__):
        raise NotFiniteError(["audio_latent"])

    stage = Stage("stage_2", 64, 64, (0.9, 0.5, 0.0))
    run = object.__new__(StageRun)
    run.ranks, run.bucket = SimpleNamespace(run=fail), SimpleNamespace(name="x")
    run.stage, run.sequence, run.dtype = stage, ["main"] * 2, torch.bfloat16
    with pytest.raises(RunError, match=r"NaN or Inf in audio_latent after step 2 of 2 of stage 2 \(sigma 0\.5 to 0\)"):
        run.step(1)
