"""python -m ltx_neuron.serve on a folder, and what is asked of it."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ltx_neuron.service.queue import Queue

if TYPE_CHECKING:
    from lib.local_ray import LocalRay

PROMPTS = ("a red fox", "waves crash on the shore", "birds sing")
START_SECONDS = 300  # until a front answers


class Service:
    """The service with the flags of generate_ltx23.py, which may be killed and started again."""

    def __init__(self, flags: list, folder: Path, jobs: int, ray: "LocalRay | None" = None):
        more = {"--data-dir": folder / "data", "--port": 0, "--rate": 1e6, "--max-queue": jobs}
        more |= {"--ray": ray.address} if ray else {}
        words = [*flags, *(word for pair in more.items() for word in pair)]
        self.command = [sys.executable, "-m", "ltx_neuron.serve", *map(str, words)]
        self.ray, self.log = ray, open(folder / "log", "a")
        self.process, self.url = None, ""

    def start(self) -> None:
        """Start the front, which starts its worker; returns once it answers."""
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        end = time.monotonic() + START_SECONDS
        for line in self.process.stdout:
            self.log.write(line)
            if line.startswith("serving: "):
                self.url = line.split()[1]
                threading.Thread(target=self._copy, args=(self.process,), daemon=True).start()
                return
            assert time.monotonic() < end
        raise RuntimeError(f"the service did not start: see {self.log.name}")

    def _copy(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.log.write(line)

    def ask(self, path: str, body: dict | None = None, key: str = "") -> bytes:
        """What is answered; asked again while the front is away."""
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        while True:
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.read()
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"{path}: {error.code} {error.read()!r}") from None
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)

    def videos(self) -> list[dict]:
        """All jobs, by their pages."""
        found, after = [], ""
        while True:
            page = json.loads(self.ask(f"/videos?limit=100&order=asc{after}"))
            found += page["data"]
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    def kill(self, what: str, queue: Queue) -> int | None:
        """Kill the front, or its worker or one of its replicas; the pid, or None where there is no
        such process just now."""
        if what == "front":
            self.process.send_signal(signal.SIGKILL)
            return self.process.pid
        processes = psutil.Process(self.process.pid).children()
        if self.ray:
            states = [state for state in queue.workers().values() if state["alive"]]
            pids = [state["pid"] for state in states if psutil.pid_exists(state["pid"])]
            processes = [psutil.Process(pid) for pid in pids]
        for process in processes[-1:]:
            process.send_signal(signal.SIGKILL)
            return process.pid
        return None
