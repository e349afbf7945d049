"""Kill -9 of the service's front and of its worker at random moments, while jobs are sent and made:
is every accepted job completed, once, with the bytes that generate_ltx23.py writes?

    python benchmarks/serve_kill.py --folder DIR [--jobs 1000] [--kills 20] [--ray-nodes 3]

Tiny assets are made, sharded and compiled in the folder. Jobs are sent until some hundreds wait,
and further ones as videos are made; a request that was not answered is sent again with its
Idempotency-Key. Before each kill a random number of videos are made, and at most a second passes
then. With --ray-nodes the service has a Ray cluster of so many nodes on this machine: a replica is
killed in place of the worker, and half-way a node is killed and another joins.

Prints one line a kill and the verdict last; exits 1 if a job is lost, failed, is there twice, or
has other bytes. Stopped at any moment, the same command, with as many jobs, goes on: kills.log in
the folder has the kills so far.
"""

import argparse
import hashlib
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import psutil
from lib.local_ray import LocalRay
from lib.scripts import Scripts, tiny_scripts

from ltx_neuron.service.queue import Queue

PROMPTS = ("a red fox", "waves crash on the shore", "birds sing")
SIZE = ["--height", "32", "--width", "32", "--num-frames", "9"]
START_SECONDS = 300  # until a front answers
LEFT = ("queued", "in_progress")
AHEAD = 300  # jobs that wait at most


class Service:
    """python -m ltx_neuron.serve on a folder, and what is asked of it."""

    def __init__(self, scripts: Scripts, folder: Path, jobs: int, ray: LocalRay | None = None):
        words = [sys.executable, "-m", "ltx_neuron.serve", *scripts.command("generate")[1:]]
        more = {"--data-dir": folder / "data", "--port": 0, "--rate": 1e6, "--max-queue": jobs}
        more |= {"--ray": ray.address} if ray else {}
        words += [str(word) for pair in more.items() for word in pair]
        self.ray, self.command, self.log = ray, words, open(folder / "log", "a")
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
        raise SystemExit(f"the service did not start: see {self.log.name}")

    def _copy(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.log.write(line)

    def ask(self, path: str, body: dict | None = None, key: str = "") -> bytes:
        """What is answered; asked again while the front is away."""
        data = json.dumps(body).encode() if body else None
        while True:
            headers = {"Content-Type": "application/json"} | (
                {"Idempotency-Key": key} if key else {}
            )
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.read()
            except urllib.error.HTTPError as error:
                raise SystemExit(f"{path}: {error.code} {error.read()!r}") from None
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


def body_of(number: int) -> dict:
    """The request of a job."""
    return {"prompt": PROMPTS[number % len(PROMPTS)], "size": "32x32"}


def send(service: Service, jobs: int, ids: list[str], queue: Queue) -> None:
    for number in range(jobs):
        while number - queue.counts()["completed"] > AHEAD:
            time.sleep(0.1)
        answer = service.ask("/videos", body_of(number), key=f"job-{number}")
        ids.append(json.loads(answer)["id"])


def wanted(scripts: Scripts, folder: Path) -> list[str]:
    """Digests of the script's own videos."""
    if len(videos := sorted((folder / "wanted").glob("*.mp4"))) == len(PROMPTS):
        return [hashlib.sha256(video.read_bytes()).hexdigest() for video in videos]
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "jobs.jsonl").write_text("\n".join(lines))
    flags = ["--prompts-file", folder / "jobs.jsonl", "--output-dir", folder / "wanted"]
    command = [sys.executable, *scripts.command("generate", *flags)]
    subprocess.run(command, check=True, capture_output=True)
    videos = sorted((folder / "wanted").glob("*.mp4"))
    return [hashlib.sha256(video.read_bytes()).hexdigest() for video in videos]


def disturb(service: Service, args: argparse.Namespace, queue: Queue) -> None:
    """Kill the front and the worker in turn, so many times each, before each of which a random
    number of videos are made. Those that kills.log has were killed before."""
    log, what = args.folder / "kills.log", ("replica" if service.ray else "worker", "front")
    most = round(1.8 * args.jobs / (2 * args.kills + 1))
    done = len(log.read_text().splitlines()) if log.is_file() else 0
    for number in range(done, 2 * args.kills):
        rng = random.Random(args.seed * 1000 + number)
        until = min(queue.counts()["completed"] + rng.randint(0, most), args.jobs)
        while queue.counts()["completed"] < until:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1))
        while not (pid := service.kill(what[number % 2], queue)):  # until one is there again
            time.sleep(0.05)
        counts = queue.counts()
        counts = ", ".join(f"{counts[status]} {status}" for status in (*LEFT, "completed"))
        said = f"kill {number + 1}: {what[number % 2]} {pid}; {counts}"
        if what[number % 2] == "front":
            service.process.wait()
            service.start()
        if service.ray and number == args.kills:
            service.ray.kill()
            service.ray.join()
            said += "; a node killed, another joined"
        print(said, flush=True)
        with open(log, "a") as file:
            file.write(said + "\n")


def check(service: Service, ids: list[str], digests: list[str]) -> list[str]:
    """What is wrong, in words."""
    videos = service.videos()
    problems = [f"{v['id']} is {v['status']}" for v in videos if v["status"] != "completed"]
    if len(set(ids)) != len(ids) or {v["id"] for v in videos} != set(ids):
        problems.append(f"{len(ids)} accepted, {len(videos)} there")
    for number, id in enumerate(ids):
        content = service.ask(f"/videos/{id}/content")
        if hashlib.sha256(content).hexdigest() != digests[number % len(digests)]:
            problems.append(f"{id} has other bytes")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20, help="of the front, and of the worker")
    parser.add_argument("--ray-nodes", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    scripts = tiny_scripts(args.folder, 1, SIZE)
    if not (args.folder / "wanted").is_dir():
        scripts.prepare()
    digests = wanted(scripts, args.folder)
    with LocalRay(args.ray_nodes) if args.ray_nodes else nullcontext() as ray:
        service = Service(scripts, args.folder, args.jobs, ray)
        began, problems = time.monotonic(), run(service, args, digests)
    seconds = time.monotonic() - began
    kills = len((args.folder / "kills.log").read_text().splitlines())
    print(f"{args.jobs} jobs, {kills} kills, {seconds:.0f} s; bad: {problems or 'none'}")
    raise SystemExit(bool(problems))


def run(service: Service, args: argparse.Namespace, digests: list[str]) -> list[str]:
    """Send, kill, and wait for all that is left; what is wrong, in words."""
    service.start()
    data, ids = args.folder / "data", []
    queue = Queue(data / "queue.sqlite", data / "jobs")
    sending = threading.Thread(target=send, args=(service, args.jobs, ids, queue), daemon=True)
    sending.start()
    try:
        disturb(service, args, queue)
        sending.join()
        while sum(queue.counts()[status] for status in LEFT):
            time.sleep(1)
        for name, state in queue.workers().items():
            if state["videos"]:
                print(f"{name}: {state['videos']} videos when it was heard last", flush=True)
        return check(service, ids, digests)
    finally:
        service.process.terminate()
        service.process.wait()


if __name__ == "__main__":
    main()
