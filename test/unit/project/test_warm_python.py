"""Scripts that the tests run in forked processes end as they would in a terminal."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import forkserver

from helpers import ended
from warm_python import run

RUNS, THREADS = 24, 4


def test_scripts_that_run_at_once_have_exit_codes_of_their_own(tmp_path, monkeypatch):
    """An exit code can be read once: of two threads that ask after a process at the same time, the
    second one would get 255. Reading takes longer here, so that they do."""
    delay = partial(random.uniform, 0, 0.05)  # seconds
    script, read = tmp_path / "ends.py", forkserver.read_signed
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    monkeypatch.setattr(forkserver, "read_signed", lambda fd: time.sleep(delay()) or read(fd))

    def exit_code(number: int) -> int:
        return run([str(script), str(number % 3)], tmp_path, 60).returncode

    with ThreadPoolExecutor(THREADS) as pool:
        codes = [*pool.map(exit_code, range(RUNS))]
    assert codes == [number % 3 for number in range(RUNS)]


def test_the_server_of_a_scripts_ranks_is_there_before_the_script_and_ends_with_it(tmp_path):
    """It ends when nobody can write to it, so it must not hold that end of its own pipe."""
    script = tmp_path / "says.py"
    server = "forkserver._forkserver._forkserver_pid"
    script.write_text(f"from multiprocessing import forkserver\nprint({server})\n")
    assert ended([int(run([str(script)], tmp_path, 60).stdout)])
