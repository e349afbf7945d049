"""A function in a thread beside its caller: its result, its error, and its end."""

import signal
import threading
import time

import pytest
import torch

from ltx_neuron.host.background import BackgroundTask, check_cancelled
from ltx_neuron.host.winograd import Workers

SOON = 2  # seconds; a function here is at its next check_cancelled within milliseconds


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test ends with the threads and the number of threads it began with."""
    count, threads = torch.get_num_threads(), set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == threads
    torch.set_num_threads(count)


def for_ever() -> None:
    """So long that no test passes that waits for it."""
    until = time.monotonic() + 10 * SOON
    while time.monotonic() < until:
        time.sleep(0.001)
        check_cancelled()


def test_the_result_and_the_error_are_the_callers():
    assert BackgroundTask(lambda: 3).result() == 3
    with pytest.raises(ZeroDivisionError):
        BackgroundTask(lambda: 1 / 0).result()


def test_it_runs_beside_its_caller():
    told, heard = threading.Event(), threading.Event()

    def answer() -> str:
        assert told.wait(SOON)
        heard.set()
        return "answered"

    with BackgroundTask(answer) as beside:
        told.set()
        assert heard.wait(SOON)
    assert beside.result() == "answered"


def test_leaving_it_waits_and_raises_its_error():
    with pytest.raises(ZeroDivisionError), BackgroundTask(lambda: 1 / 0):
        pass


def test_an_exception_that_leaves_it_ends_a_function_that_would_run_for_ever_and_says_nothing(
    capsys,
):
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), BackgroundTask(for_ever):
        raise KeyboardInterrupt
    assert time.monotonic() - began < SOON
    assert capsys.readouterr().err == ""


def test_ending_it_ends_what_runs_beside_it_and_leaves_its_with_blocks():
    left = []

    def outer() -> None:
        try:
            with BackgroundTask(for_ever), Workers() as workers:
                workers.run(lambda _: time.sleep(0.001), range(100_000))
        finally:
            left.append(True)

    beside = BackgroundTask(outer)
    time.sleep(0.05)
    beside.cancel()
    assert left == [True]


def test_ending_it_ends_one_that_waits_for_another():
    def outer() -> None:
        with BackgroundTask(for_ever):
            pass

    beside = BackgroundTask(outer)
    time.sleep(0.05)
    began = time.monotonic()
    beside.cancel()
    assert time.monotonic() - began < SOON


def test_ctrl_c_while_it_is_waited_for_ends_it():
    interrupt = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), BackgroundTask(for_ever):
        pass
    assert time.monotonic() - began < SOON
    interrupt.join()


def test_who_is_not_told_passes_every_checkpoint():
    beside = BackgroundTask(for_ever)
    check_cancelled()
    with BackgroundTask(check_cancelled):
        check_cancelled()
    beside.cancel()


def test_workers_that_are_made_beside_it_do_not_change_its_number_of_threads():
    """Each makes its first operation while the workers' own number is the default of new
    threads."""
    torch.get_num_threads()
    torch.set_num_threads(3)
    go, counts = threading.Event(), []

    def count() -> None:
        go.wait()
        counts.append(torch.get_num_threads())

    with BackgroundTask(count), Workers() as workers:
        workers.run(lambda _: torch.set_num_threads(1), range(10))
        go.set()
    torch.set_num_threads(3)
    assert counts == [3]
    assert BackgroundTask(torch.get_num_threads).result() == 3
