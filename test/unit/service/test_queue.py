"""The durable queue: what is accepted is there after kill -9, every job ends once, and owners take
turns."""

import os
import random
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from fuzz import times
from helpers import exit_code, forked

from ltx_neuron.errors import UserError
from ltx_neuron.service.periodic import run_periodically
from ltx_neuron.service.queue import Entry, KeyUsed, NewJob, Queue, QueueFull, Room

FAR = 1e9  # days and bytes that nothing reaches


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1e-3  # no two moments are the same
        return self.now


def opened(folder, **more) -> Queue:
    return Queue(folder / "queue.sqlite", folder / "jobs", **more)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(tmp_path, clock):
    made = opened(tmp_path, clock=clock, monotonic=clock)
    yield made
    made.close()


def put(queue: Queue, owner: str = "ada", batch_key: str = "small", **more) -> Entry:
    """Submit a job whose folder holds a file, as the API does."""
    id = queue.new_id()
    queue.folder_of(id).mkdir()
    (queue.folder_of(id) / "input.png").write_bytes(b"picture")
    new = NewJob(id, owner, "digest", batch_key, {"prompt": "waves"}, {"size": "64x64"})
    return queue.submit(NewJob(**vars(new) | more.pop("new", {})), **more)[0]


def claim(queue: Queue, worker: str = "w1", batch_key: str = "small", count: int = 1) -> list[Entry]:
    return queue.claim(worker, batch_key, count)


def status(queue: Queue, entry: Entry) -> str | None:
    found = queue.get(entry.owner, entry.id)
    return found and found.status


# --- one job ------------------------------------------------------------------------------------


def test_a_job_goes_from_queued_to_completed(queue):
    put(queue)
    (entry,) = claim(queue)
    assert status(queue, entry) == "queued"  # taken, and not begun
    assert queue.report(entry, 40, {"stage": "stage_1", "step": 3})
    seen = queue.get("ada", entry.id)
    assert (seen.status, seen.progress, seen.detail["step"]) == ("in_progress", 40, 3)
    assert queue.complete(entry, bytes=1000)
    seen = queue.get("ada", entry.id)
    assert (seen.status, seen.progress, seen.bytes) == ("completed", 100, 1000)
    assert seen.created_at < seen.started_at < seen.completed_at
    assert claim(queue) == []


def test_what_was_accepted_is_there_when_the_database_is_opened_again(queue, tmp_path):
    entry = put(queue)
    again = opened(tmp_path)
    assert again.get("ada", entry.id) == entry
    again.close()


def test_a_failed_job_says_why(queue):
    put(queue)
    (entry,) = claim(queue)
    assert queue.fail(entry, "internal_error", "not finite")
    seen = queue.get("ada", entry.id)
    assert seen.status == "failed"
    assert seen.error == {"code": "internal_error", "message": "not finite"}


def test_an_owner_sees_and_cancels_no_job_of_another(queue):
    entry = put(queue, owner="ada")
    assert queue.get("bob", entry.id) is None
    assert queue.page("bob") == ([], False)
    assert not queue.cancel("bob", entry.id)
    assert status(queue, entry) == "queued"


def test_pages_follow_each_other_in_both_orders(queue):
    numbers = [put(queue).number for _ in range(5)]
    for newest_first, wanted in ((True, numbers[::-1]), (False, numbers)):
        got, after, more = [], None, True
        while more:
            entries, more = queue.page("ada", after, limit=2, newest_first=newest_first)
            got += [entry.number for entry in entries]
            after = got[-1]
        assert got == wanted


EARLIER = """
CREATE TABLE jobs (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, id VARCHAR(64) NOT NULL,
    owner VARCHAR(64) NOT NULL, "key" VARCHAR(255), digest VARCHAR(64) NOT NULL,
    status VARCHAR(16) NOT NULL, kind VARCHAR(255) NOT NULL, line JSON NOT NULL,
    shown JSON NOT NULL, progress INTEGER NOT NULL, detail JSON, created_at FLOAT NOT NULL,
    started_at FLOAT, completed_at FLOAT, error JSON, bytes INTEGER NOT NULL, worker VARCHAR(64),
    lease_until FLOAT, attempt INTEGER NOT NULL, losses INTEGER NOT NULL,
    UNIQUE (owner, "key"), UNIQUE (id)
);
INSERT INTO jobs VALUES (
    1, 'video_{id}', 'ada', 'k', 'digest', 'in_progress', 'small', '{{"prompt": "waves"}}',
    '{{"size": "64x64"}}', 10, 'null', 5.0, 6.0, NULL, NULL, 7, 'w1', 8.0, 3, 1
)
"""


def test_a_database_of_an_earlier_version_is_opened_and_its_jobs_go_on(tmp_path, clock):
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as earlier:
        earlier.executescript(EARLIER.format(id="0" * 32))
    for _ in range(2):  # and again, when nothing is to be renamed
        with closing(opened(tmp_path, clock=clock)) as queue:
            seen = queue.of_key("ada", "k", "digest")
    assert (seen.batch_key, seen.params, seen.public_fields, seen.detail, seen.crash_count) == (
        *("small", {"prompt": "waves"}, {"size": "64x64"}, None, 1),
    )
    with closing(opened(tmp_path, clock=clock)) as queue:
        (entry,) = claim(queue)
        assert (entry.id, entry.attempt, entry.crash_count) == (seen.id, 4, 2)
        assert queue.complete(entry) and put(queue).number == 2


def test_a_file_that_is_no_database_is_refused_and_not_changed(tmp_path):
    (tmp_path / "queue.sqlite").write_text("notes" * 1000)
    with pytest.raises(UserError, match="queue.sqlite cannot be opened(.|\n)*--data-dir DIR"):
        opened(tmp_path)
    assert (tmp_path / "queue.sqlite").read_text() == "notes" * 1000


# --- idempotency and room -------------------------------------------------------------------------


def test_the_same_key_gives_the_same_job_and_another_request_is_refused(queue):
    entry = put(queue, new={"key": "k"})
    again, is_new = queue.submit(NewJob(queue.new_id(), "ada", "digest", "small", {}, {}, "k"))
    assert again == entry and not is_new
    assert put(queue, owner="bob", new={"key": "k"}) != entry  # a key is its owner's
    with pytest.raises(KeyUsed):
        put(queue, new={"key": "k", "digest": "other"})
    queue.cancel("ada", entry.id)
    assert put(queue, new={"key": "k"}).id != entry.id  # a deleted job can be asked for again


def test_of_requests_at_once_with_one_key_one_makes_a_job(queue):
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda _: put(queue, new={"key": "k"}), range(24)))
    assert len({entry.id for entry in entries}) == 1
    assert queue.counts()["queued"] == 1


def test_a_full_queue_refuses_what_waits_beyond_its_room(queue):
    put(queue, room=Room(jobs_of_owner=1))
    with pytest.raises(QueueFull, match="1 of your jobs wait"):
        put(queue, room=Room(jobs_of_owner=1))
    put(queue, owner="bob", room=Room(2, 1))
    with pytest.raises(QueueFull, match="2 jobs are waiting"):
        put(queue, owner="eve", room=Room(2))
    claim(queue)
    queue.report(claim(queue)[0], 1)
    put(queue, owner="eve", room=Room(2))  # what is made does not wait


def test_a_retry_takes_no_more_places_than_a_new_job(queue):
    entry = put(queue)
    (running,) = queue.claim("w", queue.next_batch_key(), 1)
    assert queue.fail(running, "x", "y")
    put(queue)
    with pytest.raises(QueueFull, match="1 of your jobs"):
        queue.retry(entry, Room(jobs_of_owner=1))
    assert queue.get("ada", entry.id).status == "failed"
    assert queue.retry(entry, Room(jobs_of_owner=2)) and not queue.retry(entry)


# --- turns ----------------------------------------------------------------------------------------


def test_owners_take_turns_however_many_jobs_one_of_them_has(queue):
    for _ in range(6):
        put(queue, owner="ada")
    put(queue, owner="bob")
    put(queue, owner="eve")
    assert [e.owner for e in claim(queue, count=4)] == ["ada", "bob", "eve", "ada"]


def test_owners_take_turns_when_jobs_are_taken_one_at_a_time(queue):
    for _ in range(3):
        put(queue, owner="ada")
    first = claim(queue)[0].owner
    put(queue, owner="bob")
    assert [first, *(claim(queue)[0].owner for _ in range(3))] == ["ada", "bob", "ada", "ada"]


def test_jobs_of_one_kind_are_taken_together_until_another_has_waited_too_long(queue, clock):
    assert queue.next_batch_key() is None
    put(queue, owner="ada", batch_key="large")
    put(queue, owner="bob", batch_key="small")
    put(queue, owner="bob", batch_key="large")
    assert queue.next_batch_key() == "large"
    assert [e.owner for e in claim(queue, batch_key="large", count=5)] == ["ada", "bob"]
    put(queue, owner="bob", batch_key="large")
    put(queue, owner="ada", batch_key="small")
    assert queue.next_batch_key(loaded="large", max_delay=30) == "large"
    clock.now += 31
    assert queue.next_batch_key(loaded="large", max_delay=30) == "small"


# --- leases ---------------------------------------------------------------------------------------


def test_a_job_is_given_to_one_worker_until_its_lease_ends(queue, clock):
    put(queue)
    (first,) = claim(queue, "w1")
    clock.now += queue.lease - 1
    assert claim(queue, "w2") == []
    queue.renew("w1", {})
    clock.now += queue.lease - 1
    assert claim(queue, "w2") == []
    clock.now += 2
    (second,) = claim(queue, "w2")
    assert second.id == first.id and second.attempt == first.attempt + 1


def test_a_worker_that_was_taken_for_dead_changes_nothing_when_it_comes_back(queue, clock):
    put(queue)
    (first,) = claim(queue, "w1")
    clock.now += queue.lease + 1
    (second,) = claim(queue, "w1")  # the same name even
    assert not queue.owns(first) and queue.owns(second)
    assert not queue.report(first, 50) and not queue.fail(first, "x", "y")
    assert not queue.complete(first)
    assert queue.complete(second) and not queue.complete(second)


def test_the_jobs_of_a_worker_that_is_known_to_be_dead_are_free_at_once(queue):
    put(queue)
    put(queue)
    claim(queue, "w1", count=2)
    queue.release_worker("w1", crashed=True)
    assert len(claim(queue, "w2", count=2)) == 2


def test_a_job_that_kills_its_workers_is_given_up(queue):
    job = put(queue)
    for _ in range(queue.max_crashes):
        (entry,) = claim(queue)
        queue.report(entry, 1)
        queue.release_worker("w1", crashed=True)
    seen = queue.get("ada", job.id)
    assert (seen.status, seen.error["code"]) == ("failed", "worker_lost")


def test_workers_lost_before_a_finished_stage_and_jobs_not_begun_do_not_count(queue):
    job = put(queue)
    for _ in range(2 * queue.max_crashes):
        claim(queue)
        queue.release_worker("w1", crashed=True)  # never begun
    for _ in range(2 * queue.max_crashes):
        (entry,) = claim(queue)
        queue.report(entry, 1)
        queue.report(entry, 50, stage_ended=True)
        queue.release_worker("w1", crashed=True)
    assert status(queue, job) == "in_progress"


def test_a_worker_that_ends_in_good_order_gives_its_jobs_back(queue):
    put(queue)
    claim(queue)
    queue.release_worker("w1")
    assert claim(queue, "w2")[0].crash_count == 0


# --- a clock that is set --------------------------------------------------------------------------

MOVES = {"an hour back": -3600, "to 1970": -1e9, "an hour on": 3600, "a year on": 365 * 86400.0}


@pytest.fixture
def clocks(tmp_path):
    """A queue, its clock, and the clock of its leases."""
    clock, monotonic = Clock(), Clock()
    monotonic.now = 500.0  # seconds since the machine started
    with closing(opened(tmp_path, clock=clock, monotonic=monotonic)) as made:
        yield made, clock, monotonic


@pytest.mark.parametrize("seconds", MOVES.values(), ids=list(MOVES))
def test_a_live_worker_keeps_its_job_and_a_dead_one_loses_it_when_the_clock_is_set(clocks, seconds):
    queue, clock, monotonic = clocks
    put(queue)
    (entry,) = claim(queue, "w1")
    queue.report(entry, 1)
    queue.renew("w1", {})
    clock.now += seconds
    queue.sweep(FAR, FAR)
    assert claim(queue, "w2") == [] and queue.owns(entry) and queue.workers()["w1"]["alive"]
    monotonic.now += queue.lease + 1
    assert not queue.workers()["w1"]["alive"]
    (second,) = claim(queue, "w2")
    assert second.id == entry.id and not queue.owns(entry) and queue.oldest_wait() >= 0


@pytest.mark.parametrize("seconds", MOVES.values(), ids=list(MOVES))
def test_owners_and_kinds_of_jobs_keep_their_turns_when_the_clock_is_set(clocks, seconds):
    queue, clock, _ = clocks
    for owner in ("ada", "ada", "ada", "bob"):
        put(queue, owner=owner)
    assert claim(queue)[0].owner == "ada"
    put(queue, owner="eve", batch_key="large")
    clock.now += seconds
    assert [claim(queue)[0].owner for _ in range(2)] == ["bob", "ada"]
    assert queue.next_batch_key(loaded="small", max_delay=30) == "large"


def test_a_restarted_machine_holds_no_job_and_no_worker_of_before(clocks):
    queue, _, monotonic = clocks
    monotonic.now = 1e6
    put(queue)
    claim(queue, "w1")
    queue.renew("w1", {})
    monotonic.now = 10.0
    assert not queue.workers()["w1"]["alive"] and len(claim(queue, "w2")) == 1


def test_a_worker_that_starts_on_a_data_folder_takes_over_the_jobs_of_all_others(clocks):
    queue, clock, _ = clocks
    put(queue)
    (entry,) = claim(queue, "w1")
    queue.report(entry, 1)
    queue.renew("w1", {"videos": 3})
    clock.now -= 3600
    queue.release_worker(None, crashed=True)
    assert queue.workers() == {"w1": {"videos": 3, "alive": False}}
    assert claim(queue, "w2")[0].crash_count == 1


# --- files of killed workers ----------------------------------------------------------------------


def ends_by_claim(queue: Queue, entry: Entry) -> None:
    queue.release_worker("w1", crashed=True)
    claim(queue, "w2")


def ends_by_crashes(queue: Queue, entry: Entry) -> None:
    queue.max_crashes = 1
    queue.report(entry, 1)
    queue.release_worker("w1", crashed=True)
    assert status(queue, entry) == "failed"


ENDS = {
    "another worker claims it": ends_by_claim,
    "it is completed": lambda queue, entry: queue.complete(entry),
    "it failed": lambda queue, entry: queue.fail(entry, "internal_error", "x"),
    "it is given up": ends_by_crashes,
}


@pytest.mark.parametrize("end", ENDS)
def test_what_a_killed_worker_left_half_written_goes_with_the_next_change_of_its_job(queue, end):
    put(queue)
    (entry,) = claim(queue, "w1")
    folder, pid = queue.folder_of(entry.id), os.getpid()
    left = [f".video.mp4.{pid}-0a.partial", f".video.resume.safetensors.{pid}-1b.partial"]
    left += [f".thumbnail.jpg.{pid + 1}-2c.partial", f".video.mp4.{pid}-3d.partial.mp4"]
    for name in (*left, "video.resume.safetensors"):
        (folder / name).touch()
    ENDS[end](queue, entry)
    names = {path.name for path in folder.iterdir()}
    assert names == {"input.png", "video.resume.safetensors"}


# --- deleting -------------------------------------------------------------------------------------


def test_a_waiting_job_goes_at_once_with_its_files(queue):
    entry = put(queue)
    assert queue.cancel("ada", entry.id)
    assert not queue.folder_of(entry.id).exists() and claim(queue) == []
    assert not queue.cancel("ada", entry.id)


def test_a_running_job_is_gone_for_its_owner_and_its_files_stay_until_its_worker_lets_go(queue):
    put(queue)
    (entry,) = claim(queue)
    queue.report(entry, 10)
    assert queue.cancel("ada", entry.id)
    assert status(queue, entry) is None and queue.page("ada") == ([], False)
    assert not queue.owns(entry) and not queue.complete(entry)
    assert queue.folder_of(entry.id).exists()
    queue.release_job(entry)
    assert not queue.folder_of(entry.id).exists()
    assert queue.counts()["cancelled"] == 0


def test_a_cancelled_job_of_a_dead_worker_goes_when_its_lease_ends(queue, clock):
    put(queue)
    (entry,) = claim(queue)
    queue.cancel("ada", entry.id)
    clock.now += queue.lease + 1
    queue.sweep(FAR, 10**21)  # more than an integer of SQLite holds
    assert not queue.folder_of(entry.id).exists() and claim(queue) == []


def test_jobs_go_when_they_are_old_and_the_oldest_beyond_a_number_of_bytes(queue, clock):
    ended = []
    for _ in range(4):
        put(queue)
        (entry,) = claim(queue)
        queue.complete(entry, bytes=100)
        ended.append(entry)
        clock.now += 86400
    waiting = put(queue)
    queue.sweep(days=3.5, max_bytes=FAR)
    assert [status(queue, entry) for entry in ended] == [None, *["completed"] * 3]
    queue.sweep(days=FAR, max_bytes=250)
    assert [status(queue, entry) for entry in ended] == [None, None, *["completed"] * 2]
    assert not queue.folder_of(ended[0].id).exists() and queue.folder_of(ended[3].id).exists()
    assert status(queue, waiting) == "queued"


def test_a_folder_without_a_job_is_swept_after_an_hour_and_no_other_folder(queue, clock):
    orphan, entry = queue.folder_of(queue.new_id()), put(queue)
    other = queue.folder / "notes"
    orphan.mkdir()
    other.mkdir()
    clock.now = time.time() + 3500
    queue.sweep(FAR, FAR)
    assert orphan.exists()
    clock.now = time.time() + 3700
    queue.sweep(FAR, FAR)
    assert not orphan.exists() and other.exists() and queue.folder_of(entry.id).exists()


def test_no_id_of_a_client_becomes_a_path(queue):
    for id in ("../../etc", "video_", "video_" + "A" * 32, "video_" + "0" * 32 + "\n"):
        assert queue.get("ada", id) is None and not queue.cancel("ada", id)
        with pytest.raises(AssertionError):
            queue.folder_of(id)


# --- kill -9 --------------------------------------------------------------------------------------
# No database is open where a process forks: SQLite's locks would not be those of either.


def work(folder, name: str) -> None:
    """What a worker does, without an engine: two stages a job, each noted in the job's folder."""
    queue = opened(folder, lease=5)
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
    def noted() -> int:
        return sum(note.stat().st_size > 0 for note in tmp_path.glob("jobs/*/completed"))

    rng = random.Random(15)
    with closing(opened(tmp_path)) as queue:
        ids = [put(queue).id for _ in range(120)]
    for kill in range(times(3, 8)):
        wanted = noted() + rng.randint(1, 5)
        child = forked(lambda name=f"w{kill}": work(tmp_path, name))
        while noted() < wanted:  # by what is done and not by the clock: machines differ
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        with closing(opened(tmp_path)) as queue:
            queue.release_worker(f"w{kill}", crashed=True)
    assert exit_code(forked(lambda: work(tmp_path, "last"))) == 0
    with closing(opened(tmp_path)) as queue:
        counts = queue.counts()
    assert counts == dict.fromkeys(counts, 0) | {"completed": 120}
    # A worker may die between the transaction and its note, never note twice.
    notes = [(tmp_path / "jobs" / id / "completed").read_text() for id in ids]
    assert max(note.count("\n") for note in notes) == 1
    assert len({note for note in notes if note}) > 1  # several workers had their share


def test_what_a_killed_server_said_yes_to_is_there(tmp_path):
    """The process that submits writes each id after submit returned, and dies by kill -9."""
    said = tmp_path / "said"

    def submit() -> None:
        queue = opened(tmp_path)
        with open(said, "a", buffering=1) as file:
            while True:
                file.write(put(queue).id + "\n")

    for _ in range(3):
        child = forked(submit)
        time.sleep(0.3)
        os.kill(child, signal.SIGKILL)
        exit_code(child)
    queue = opened(tmp_path)
    there = {entry.id for entry in queue.page("ada", limit=1_000_000)[0]}
    accepted = set(said.read_text().split())
    assert accepted and accepted <= there and len(there) <= len(accepted) + 3
    queue.close()


def test_threads_that_submit_claim_and_report_do_not_hinder_each_other(tmp_path):
    queue, done = opened(tmp_path), threading.Event()

    def serve(name: str) -> int:
        count = 0
        while not done.is_set() or queue.counts()["queued"]:
            for entry in queue.claim(name, "small", 3):
                assert queue.report(entry, 10) and queue.complete(entry)
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        served = [pool.submit(serve, name) for name in ("w1", "w2")]
        list(pool.map(lambda _: put(queue), range(100)))
        done.set()
        assert sum(future.result() for future in served) == 100
    queue.close()


def test_what_is_done_again_and_again_goes_on_after_an_error(capsys):
    calls, three = [], threading.Event()

    def function() -> None:
        calls.append(1)
        if len(calls) == 3:
            three.set()
        raise OSError("away for a moment")

    with run_periodically(function, 0.01, "test"):
        assert three.wait(10)
    ended = len(calls)
    time.sleep(0.05)
    assert len(calls) == ended  # nothing goes on behind the block
    assert "OSError: away for a moment" in capsys.readouterr().err
