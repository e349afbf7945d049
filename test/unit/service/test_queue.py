"""The durable queue: an accepted job survives kill -9, every job ends once, and owners alternate."""

import os
import random
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import pytest
from fuzz import times
from helpers import exit_code, forked, wait_for
from service_app import open_queue

from ltx_neuron.service.periodic import run_periodically
from ltx_neuron.service.queue import Entry, KeyUsed, NewJob, Queue, QueueFull, Room

FAR = 1e9  # days and bytes that nothing reaches


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float):
        self.now = now

    def __call__(self) -> float:
        self.now += 1e-3  # no two moments are the same
        return self.now


@pytest.fixture
def queue(tmp_path):
    """Its clock may be set; that of leases is the time since the machine started."""
    with open_queue(tmp_path, clock=Clock(1e9), monotonic=Clock(500.0)) as queue:
        yield queue


def submit(queue: Queue, owner: str = "ada", batch_key: str = "small", room: Room | None = None, **fields) -> Entry:
    id = queue.new_id()
    queue.folder_of(id).mkdir()
    (queue.folder_of(id) / "input.png").write_bytes(b"picture")
    fields = {"digest": "digest", "params": {"prompt": "waves"}, "public_fields": {"size": "64x64"}} | fields
    return queue.submit(NewJob(id, owner, batch_key=batch_key, **fields), room or Room())[0]


def claim(queue: Queue, worker: str = "w1", batch_key: str = "small", count: int = 1) -> list[Entry]:
    return queue.claim(worker, batch_key, count)


def begin(queue: Queue) -> Entry:
    submit(queue)
    (entry,) = claim(queue)
    assert queue.report(entry, 1)
    return entry


def status(queue: Queue, entry: Entry) -> str | None:
    stored = queue.get(entry.owner, entry.id)
    return stored and stored.status


def test_a_job_goes_from_queued_to_completed_or_failed_and_is_the_same_after_a_restart(queue, tmp_path):
    submit(queue)
    (entry,) = claim(queue)
    assert status(queue, entry) == "queued"  # taken, and not begun
    assert queue.report(entry, 40, {"stage": "stage_1", "step": 3})
    stored = queue.get("ada", entry.id)
    assert (stored.status, stored.progress, stored.detail["step"]) == ("in_progress", 40, 3)
    assert queue.complete(entry, bytes=1000) and claim(queue) == []
    stored = queue.get("ada", entry.id)
    assert (stored.status, stored.progress, stored.bytes) == ("completed", 100, 1000)
    assert stored.created_at < stored.started_at < stored.completed_at
    assert queue.fail(failed := begin(queue), "internal_error", "not finite")
    with open_queue(tmp_path) as reopened:
        assert reopened.get("ada", entry.id) == stored
        assert reopened.get("ada", failed.id).error == {"code": "internal_error", "message": "not finite"}


def test_an_owner_pages_in_both_orders_through_their_jobs_alone_and_an_id_is_no_path(queue):
    first, second, third = (submit(queue) for _ in range(3))
    for newest_first, order in ((True, [third, second, first]), (False, [first, second, third])):
        assert queue.page("ada", limit=2, newest_first=newest_first) == (order[:2], True)
        assert queue.page("ada", order[1].number, 2, newest_first) == (order[2:], False)
    assert queue.get("bob", first.id) is None and not queue.cancel("bob", first.id) and queue.page("bob") == ([], False)
    for id in ("../../etc", "video_", "video_" + "A" * 32, "video_" + "0" * 32 + "\n"):
        assert queue.get("ada", id) is None and not queue.cancel("ada", id)
        with pytest.raises(AssertionError):
            queue.folder_of(id)
    assert status(queue, first) == "queued"


def test_a_database_of_an_earlier_version_is_opened_and_its_jobs_go_on(tmp_path):
    with open_queue(tmp_path) as queue:
        job = begin(queue)
    earlier_names = {"batch_key": "kind", "params": "line", "public_fields": "shown", "crash_count": "losses"}
    with closing(sqlite3.connect(tmp_path / "queue.sqlite", isolation_level=None)) as earlier:
        for name, earlier_name in earlier_names.items():
            earlier.execute(f"ALTER TABLE jobs RENAME COLUMN {name} TO {earlier_name}")
        earlier.executescript("UPDATE jobs SET losses = 1, lease_until = 0; DROP TABLE owners; DROP TABLE workers")
    for _ in range(2):  # and again, when nothing is to be renamed
        with open_queue(tmp_path) as queue:
            stored = queue.get("ada", job.id)
    assert (stored.batch_key, stored.params, stored.public_fields) == (job.batch_key, job.params, job.public_fields)
    with open_queue(tmp_path) as queue:
        (entry,) = claim(queue)
        assert (entry.attempt, entry.crash_count) == (job.attempt + 1, 2)
        assert queue.complete(entry) and submit(queue).number == 2


def test_the_same_key_returns_the_same_job_and_another_request_is_refused(queue):
    with ThreadPoolExecutor(8) as pool:  # at once: one makes a job
        (entry,) = {entry.id: entry for entry in pool.map(lambda _: submit(queue, key="k"), range(24))}.values()
    assert queue.counts()["queued"] == 1
    assert queue.submit(NewJob(queue.new_id(), "ada", "digest", "small", {}, {}, "k")) == (entry, False)
    assert submit(queue, owner="bob", key="k") != entry  # a key is its owner's
    with pytest.raises(KeyUsed):
        submit(queue, key="k", digest="other")
    queue.cancel("ada", entry.id)
    assert submit(queue, key="k").id != entry.id  # a deleted job can be requested again


def test_a_full_queue_refuses_jobs_and_retries_beyond_its_room(queue):
    def refuses(words: str, submit_or_retry, *arguments, **room) -> None:
        with pytest.raises(QueueFull, match=words):
            submit_or_retry(queue, *arguments, room=Room(**room))

    failed = begin(queue)
    assert not queue.retry(failed)  # it has not failed
    assert queue.fail(failed, "x", "y")
    submit(queue, room=Room(jobs_of_owner=1))
    refuses("1 of your jobs wait", submit, jobs_of_owner=1)
    refuses("1 of your jobs wait", Queue.retry, failed, jobs_of_owner=1)
    assert status(queue, failed) == "failed"
    submit(queue, owner="bob", room=Room(2, 1))
    refuses("2 jobs are waiting", submit, "eve", jobs=2)
    queue.report(claim(queue)[0], 1)
    submit(queue, owner="eve", room=Room(2), bytes=5)  # a running job does not wait
    refuses("its files have 5 of 9 bytes", lambda queue, room: submit(queue, bytes=5, room=room), bytes=9)
    assert queue.retry(failed, Room(jobs_of_owner=2)) and not queue.retry(failed)


def test_owners_alternate_and_a_loaded_batch_key_goes_on_until_another_has_waited_too_long(queue):
    assert queue.next_batch_key() is None
    for owner in ("ada",) * 6 + ("bob", "eve"):
        submit(queue, owner)
    assert [entry.owner for entry in claim(queue, count=4)] == ["ada", "bob", "eve", "ada"]
    for owner, batch_key in (("bob", "large"), ("eve", "other"), ("eve", "large")):
        submit(queue, owner, batch_key)
    assert queue.next_batch_key() == "large"  # bob was served before eve and ada
    assert [entry.owner for entry in claim(queue, batch_key="large", count=5)] == ["bob", "eve"]
    submit(queue, "bob", "large")
    assert queue.next_batch_key(loaded="large", max_delay=30) == "large"
    queue.clock.now += 31
    assert queue.next_batch_key(loaded="large", max_delay=30) == "small"  # ada's


def test_a_worker_presumed_dead_changes_nothing_when_it_comes_back(queue):
    submit(queue)
    (first,) = claim(queue, "w1")
    for _ in range(2):
        queue.monotonic.now += queue.lease - 1
        assert claim(queue, "w2") == []
        queue.renew("w1", {})
    queue.monotonic.now += queue.lease + 1
    (second,) = claim(queue, "w1")  # the same name even
    assert second.id == first.id and second.attempt == first.attempt + 1
    assert not queue.owns(first) and queue.owns(second)
    assert not queue.report(first, 50) and not queue.fail(first, "x", "y") and not queue.complete(first)
    assert queue.complete(second) and not queue.complete(second)


def test_a_job_that_crashes_its_workers_fails_but_not_by_ends_before_it_began_or_after_a_stage(queue):
    job = submit(queue)
    for _ in range(2 * queue.max_crashes):
        claim(queue)
        queue.release_worker("w1", crashed=True)  # never begun
    for crashed in (True, False) * queue.max_crashes:
        queue.report(claim(queue)[0], 50, stage_ended=crashed)
        queue.release_worker("w1", crashed)
    assert queue.get("ada", job.id).crash_count == 1  # of the last crash, with a stage since
    for count in range(1, queue.max_crashes):
        (entry,) = claim(queue)
        queue.report(entry, 60)
        assert status(queue, job) == "in_progress" and entry.crash_count == count
        queue.release_worker("w1", crashed=True)  # its jobs are free at once
    stored = queue.get("ada", job.id)
    assert (stored.status, stored.error["code"]) == ("failed", "worker_lost")


@pytest.mark.parametrize("seconds", [-1e9, 365 * 86400.0], ids=["to 1970", "a year on"])
def test_leases_and_alternation_do_not_depend_on_a_clock_that_is_set(queue, seconds):
    for owner in ("ada", "ada", "ada", "bob"):
        submit(queue, owner)
    (entry,) = claim(queue, "w1")
    queue.report(entry, 1)
    submit(queue, "eve", "large")
    queue.renew("w1", {})
    queue.clock.now += seconds
    queue.sweep(FAR, FAR)
    assert queue.owns(entry) and queue.workers()["w1"]["alive"] and queue.oldest_wait() >= 0
    assert [claim(queue, "w2")[0].owner for _ in range(2)] == ["bob", "ada"]
    assert queue.next_batch_key(loaded="small", max_delay=30) == "large"
    queue.monotonic.now += queue.lease + 1
    assert not queue.workers()["w1"]["alive"]
    assert entry.id in {lost.id for lost in claim(queue, "w2", count=9)} and not queue.owns(entry)


def test_a_restarted_machine_or_worker_of_the_data_folder_frees_all_earlier_jobs(queue):
    queue.monotonic.now = 1e6
    begin(queue)
    queue.renew("w1", {"videos": 3})
    queue.monotonic.now = 10.0  # the machine started again: no lease and no worker of before counts
    assert not queue.workers()["w1"]["alive"]
    (entry,) = claim(queue, "w2")
    queue.renew("w2", {"videos": 4})
    queue.clock.now -= 3600
    queue.release_worker(None, crashed=True)
    assert queue.workers() == {"w1": {"videos": 3, "alive": False}, "w2": {"videos": 4, "alive": False}}
    assert claim(queue, "w3")[0].crash_count == entry.crash_count + 1 == 2


@pytest.mark.parametrize(
    ("change", "max_crashes"),
    [(Queue.complete, 5), (lambda q, e: q.fail(e, "", ""), 5), (lambda q, _: claim(q), 5), (lambda q, _: claim(q), 1)],
)
def test_partial_files_of_a_killed_worker_go_with_the_next_change_of_its_job(queue, change, max_crashes):
    queue.max_crashes, folder = max_crashes, queue.folder_of((entry := begin(queue)).id)
    queue.monotonic.now += queue.lease + 1
    for name in (".video.mp4.1-0a.partial", ".a.1-3d.partial.mp4", "video.resume.safetensors"):
        (folder / name).touch()
    change(queue, entry)
    assert {path.name for path in folder.iterdir()} == {"input.png", "video.resume.safetensors"}


@pytest.mark.parametrize("dies", [False, True])
def test_a_waiting_job_goes_at_once_and_a_running_one_when_its_worker_releases_it_or_dies(queue, dies):
    running, waiting = begin(queue), submit(queue, "bob")
    assert queue.cancel("bob", waiting.id) and not queue.cancel("bob", waiting.id)
    assert not queue.folder_of(waiting.id).exists()
    assert queue.cancel("ada", running.id) and queue.folder_of(running.id).exists()
    assert status(queue, running) is None and queue.page("ada") == ([], False)
    assert not queue.owns(running) and not queue.complete(running)
    if dies:
        queue.monotonic.now += queue.lease + 1
        queue.sweep(FAR, 10**21)  # more than an integer of SQLite holds
    else:
        queue.release_job(running)
    assert not queue.folder_of(running.id).exists() and queue.counts()["cancelled"] == 0 and claim(queue) == []


def test_jobs_expire_by_age_or_beyond_a_number_of_bytes_and_folders_without_a_job_after_an_hour(queue):
    ended = []
    for _ in range(4):
        ended.append(begin(queue))
        queue.complete(ended[-1], bytes=100)
        queue.clock.now += 86400
    waiting = submit(queue)
    for days, most, left in ((3.5, FAR, 3), (FAR, 250, 2)):
        queue.sweep(days, most)
        assert [status(queue, entry) for entry in ended] == [None] * (4 - left) + ["completed"] * left
        assert [queue.folder_of(entry.id).exists() for entry in ended] == [False] * (4 - left) + [True] * left
    assert status(queue, waiting) == "queued"
    for folder in (orphan := queue.folder_of(queue.new_id()), other := queue.folder / "notes"):
        folder.mkdir()
    for seconds in (3500, 3700):
        queue.clock.now = time.time() + seconds
        queue.sweep(FAR, FAR)
        assert orphan.exists() == (seconds < 3600)
    assert other.exists() and queue.folder_of(waiting.id).exists()


def work(folder, name: str) -> None:
    """What a worker does, without an engine: two stages a job, each noted in the job's folder."""
    queue = Queue(folder / "queue.sqlite", folder / "jobs", lease=5)
    while queue.counts()["queued"] + queue.counts()["in_progress"]:
        for entry in queue.claim(name, "small", 2):
            for stage in ("one", "two"):
                state = queue.folder_of(entry.id) / stage
                if not state.exists():
                    time.sleep(0.002)
                    state.write_text(name)
                if not queue.report(entry, 50, stage_ended=True):
                    return
            with open(queue.folder_of(entry.id) / "completed", "a") as file:
                if queue.complete(entry):
                    file.write(f"{name}\n")


def test_workers_killed_at_any_moment_lose_no_job_and_end_none_twice(tmp_path):
    def notes() -> list[str]:
        return [note.read_text() for note in tmp_path.glob("jobs/*/completed") if note.stat().st_size]

    rng = random.Random(15)
    with open_queue(tmp_path) as queue:
        for _ in range(120):
            submit(queue)
        for kill in range(times(3, 8)):
            until = len(notes()) + rng.randint(1, 5)
            child = forked(lambda name=f"w{kill}": work(tmp_path, name))
            while len(notes()) < until:  # by what is done and not by the clock: machines differ
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            assert exit_code(child) == -signal.SIGKILL
            queue.release_worker(f"w{kill}", crashed=True)
        assert exit_code(forked(lambda: work(tmp_path, "last"))) == 0
        assert queue.counts() == dict.fromkeys(queue.counts(), 0) | {"completed": 120}
    # A worker may die between the transaction and its note, never note twice.
    assert max(note.count("\n") for note in notes()) == 1 < len({*notes()})  # several workers had their share


def test_a_periodic_task_continues_after_an_error_and_ends_with_its_block(capsys):
    function = Mock(side_effect=OSError("away for a moment"))
    with run_periodically(function, 0.01, "test"):
        wait_for(lambda: function.call_count >= 3)
    ended = function.call_count
    assert "OSError: away for a moment" in capsys.readouterr().err
    time.sleep(0.05)
    assert function.call_count == ended


def test_a_transaction_that_reads_first_waits_for_the_one_that_writes(queue):
    submit(queue)

    def add(_) -> None:
        with queue.database.writing() as connection:
            count = connection.execute("SELECT count(*) FROM jobs").fetchone()[0]
            time.sleep(0.2)  # meanwhile the other one begins
            connection.execute("UPDATE jobs SET crash_count = crash_count + :count", {"count": count})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, range(2)))
    assert queue.database.read("SELECT crash_count FROM jobs")[0][0] == 2
