"""Threads: results, errors, cancellation, their number of threads; and what is made ahead in one."""

import signal
import threading
import time
from contextlib import closing

import pytest
import torch
from helpers import allowed, within

from ltx_neuron.host.background import Background, Cancelled, Workers, check_cancelled, prefetch, wait_for

SOON = 2  # seconds; a function here is at its next check_cancelled within milliseconds


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Every test ends with the threads and the number of threads it began with."""
    count, threads = torch.get_num_threads(), set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == threads
    torch.set_num_threads(count)


def run_for_ever() -> None:
    """Run until cancelled, or so long that a test that waits for it fails."""
    until = time.monotonic() + allowed(10 * SOON)
    while time.monotonic() < until:
        time.sleep(0.001)
        check_cancelled()


def result_of(function):
    with Background() as thread:
        return wait_for(thread.submit(function))


def test_functions_run_beside_their_caller_one_after_another_with_results_and_errors():
    requested, order = threading.Event(), []

    def first() -> str:
        assert requested.wait(allowed(SOON))
        order.append(1)
        time.sleep(0.01)
        order.append(2)
        return "answered"

    with Background() as thread:
        futures = [thread.submit(first), thread.submit(lambda: order.append(3))]
        requested.set()
        assert wait_for(futures[0]) == "answered"
        wait_for(futures[1])
    assert order == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        result_of(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), Workers(3) as workers:
        workers.map(lambda _: 1 / 0, range(9))


def test_cancelling_ends_nested_threads_leaves_their_with_blocks_and_other_threads_alone():
    left = []

    def outer() -> None:
        try:
            with Background() as inner, Workers() as workers:
                inner.submit(run_for_ever)
                workers.map(lambda _: time.sleep(0.05), range(1000))
        finally:
            left.append(True)

    with Background() as other:
        for arguments in ((outer,), (result_of, run_for_ever)):  # the second one waits for another thread
            with within(SOON), Background() as thread:
                thread.submit(*arguments)
                time.sleep(0.05)
                check_cancelled()
        wait_for(other.submit(check_cancelled))
    assert left == [True]


def test_ctrl_c_and_the_error_of_a_poll_end_the_waiting_and_cancel_the_functions_silently(capsys):
    with within(SOON), pytest.raises(ZeroDivisionError), Background() as thread:
        running, later = thread.submit(run_for_ever), thread.submit(run_for_ever)
        wait_for(running, lambda: 1 // 0)
    assert isinstance(running.exception(), Cancelled) and later.cancelled()
    interrupt = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with within(SOON), pytest.raises(KeyboardInterrupt):
        result_of(run_for_ever)
    interrupt.join()
    assert capsys.readouterr().err == ""


def test_a_thread_that_begins_while_workers_are_made_has_the_usual_number_of_threads():
    """With another number, a video would have other bits."""
    torch.set_num_threads(3)
    over, counts, own = threading.Event(), [], set()

    def make_workers() -> None:
        while not over.is_set():
            with Workers(2) as workers:
                workers.map(lambda _: own.add(torch.get_num_threads()), range(4))
            counts.append(torch.get_num_threads())

    with Background() as one, Background() as two:
        futures = [thread.submit(make_workers) for thread in (one, two)]
        counts += [result_of(torch.get_num_threads) for _ in range(200)]
        over.set()
        assert not [wait_for(future) for future in futures if future.exception()]
    assert ({*counts}, own) == ({3}, {1})


def counted(count: int, numbers: list[int]):
    """A generator of numbers, each of which is noted; its end, in the same thread, is noted as -1."""
    thread = threading.get_ident()
    try:
        for number in range(count):
            numbers.append(number)
            yield number
    finally:
        numbers.append(-1 if threading.get_ident() == thread else -2)


def test_while_a_prefetched_item_is_used_one_waits_and_the_next_is_made():
    numbers, taken = [], []
    with closing(prefetch(counted(6, numbers))) as items:
        for item in items:
            time.sleep(allowed(0.02))  # of three: one is taken, one waits, one is made and finds no room
            taken.append((item, max(numbers)))
    assert taken == [*zip(range(6), (2, 3, 4, 5, 5, 5), strict=True)] and numbers == [*range(6), -1]
    with closing(prefetch(1 // (2 - number) for number in range(5))) as items:
        assert (next(items), next(items)) == (0, 1)
        with pytest.raises(ZeroDivisionError):  # after the items before it
            next(items)


def test_who_takes_no_more_ends_what_is_made_ahead_at_once_and_who_waits_for_it_can_be_cancelled():
    numbers, waiting = [], threading.Event()
    with within(SOON), pytest.raises(OSError), closing(prefetch(counted(1000, numbers))) as items:
        assert next(items) == 0
        raise OSError(28, "No space left on device")
    assert numbers[-1] == -1 and len(numbers) <= 4

    def slow():
        waiting.set()
        run_for_ever()
        yield

    with within(SOON), Background() as thread:
        thread.submit(lambda: next(prefetch(slow())))
        assert waiting.wait(allowed(SOON))
