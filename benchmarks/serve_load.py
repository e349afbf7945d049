"""The service against the same jobs by --prompts-file: throughput, latency, the time to cancel a
running job, and what of a job's time is the queue's own work.

    python benchmarks/serve_load.py --folder DIR [--jobs 24] [--clients 8] [--rounds 2]
        [--replicas 2]

Without --replicas it has its own worker; with them as many, each on a Ray node of this machine.
--prompts-file runs on one replica, without Ray.

Tiny assets are made, sharded and compiled in the folder. A round sends all jobs by OpenAI's client,
so many at a time, and then runs them by generate_ltx23.py. Throughput is of what lies between the
first and the last video: loading is no part of it, on either side. Latency is from the request to
the last byte of the video, for clients that wait for one before they ask for the next. A running
job is cancelled at its first steps; the time is until its worker has let go of it.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import openai
from lib.harness import finish
from lib.harness import parser as harness_parser
from lib.local_ray import LocalRay
from lib.scripts import Scripts, tiny_scripts
from lib.service import PROMPTS, Service

from ltx_neuron.service.queue import NewJob, Queue

QUEUE_JOBS = 200  # whose queue work is timed
STEPS = 8
CANCELLED = 8  # running jobs
LONG = {"size": "256x256", "num_frames": 25}  # a job to be cancelled: its steps last


async def one(client: openai.AsyncOpenAI, fields: dict) -> float:
    """Seconds from a request to its video's last byte."""
    began = time.monotonic()
    video = await client.videos.create_and_poll(**fields)
    assert video.status == "completed", video.error
    await (await client.videos.download_content(video.id)).aread()
    return time.monotonic() - began


async def load(url: str, jobs: list[dict], clients: int) -> list[float]:
    """Seconds of every job, with so many under way at a time."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
        room = asyncio.Semaphore(clients)

        async def bounded(fields: dict) -> float:
            async with room:
                return await one(client, fields)

        return await asyncio.gather(*map(bounded, jobs))


def rate(videos: list[Path]) -> float:
    """Videos a second, from the first one that was done to the last."""
    times = sorted(path.stat().st_mtime for path in videos)
    return (len(times) - 1) / (times[-1] - times[0])


def by_service(service: Service, folder: Path, jobs: list[dict], clients: int) -> tuple:
    """Videos a second, and the seconds of every job."""
    before = set(folder.glob("data/jobs/*/video.mp4"))
    seconds = asyncio.run(load(service.url, jobs, clients))
    made = set(folder.glob("data/jobs/*/video.mp4")) - before
    assert len(made) == len(jobs)
    return rate([*made]), seconds


def by_prompts_file(scripts: Scripts, folder: Path, jobs: list[dict]) -> float:
    """Videos a second."""
    lines = [json.dumps({"prompt": job["prompt"]}) for job in jobs]
    (folder / "jobs.jsonl").write_text("\n".join(lines))
    out = folder / f"batch-{time.monotonic_ns()}"
    flags = ["--prompts-file", folder / "jobs.jsonl", "--output-dir", out]
    command = [sys.executable, *scripts.command("generate", *flags)]
    subprocess.run(command, check=True, capture_output=True, env=scripts.env)
    return rate([*out.glob("*.mp4")])


def queue_work(folder: Path) -> list[float]:
    """Milliseconds that the queue itself takes for a job, from its acceptance to its end."""
    queue = Queue(folder / "queue-alone.sqlite", folder / "queue-alone")
    spent, line = [], {"prompt": PROMPTS[0], "seed": 10}

    def timed(function: Callable, *args, **more):
        began = time.perf_counter()
        result = function(*args, **more)
        spent[-1] += (time.perf_counter() - began) * 1e3
        return result

    for _ in range(QUEUE_JOBS):
        spent.append(0.0)
        timed(queue.submit, NewJob(queue.new_id(), "ada", "0" * 64, "small", line, line))
    for number in range(QUEUE_JOBS):
        spent.append(spent[number])
        timed(queue.next_batch_key, "small", 60.0)
        (entry,) = timed(queue.claim, "worker", "small", 1)
        for step in range(STEPS):  # a step is written down every quarter of a second
            detail = {"stage": "stage_1", "step": step, "steps": STEPS}
            if step % 4:
                timed(queue.owns, entry)
            else:
                timed(queue.report, entry, step, detail)
        timed(queue.report, entry, 90, {"stage": "decode"}, stage_ended=True)
        timed(queue.owns, entry)
        assert timed(queue.complete, entry, 1000)
        timed(queue.get, "ada", entry.id)
    queue.close()
    return spent[QUEUE_JOBS:]


async def cancelled(url: str, jobs: Path) -> list[float]:
    """Milliseconds from DELETE of a running job until its worker has let go of it."""
    taken = []
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        for _ in range(CANCELLED):
            video = await client.videos.create(
                prompt=PROMPTS[0], size=LONG["size"], extra_body={"num_frames": LONG["num_frames"]}
            )
            while (await client.videos.retrieve(video.id)).status != "in_progress":
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await client.videos.delete(video.id)
            while (jobs / video.id).exists():
                await asyncio.sleep(0.001)
            taken.append((time.monotonic() - began) * 1e3)
    return taken


def spread(values: list[float], unit: str, digits: int = 2) -> str:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "most": max(values)}
    return ", ".join(f"{name} {value:.{digits}f} {unit}" for name, value in shown.items())


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--size", default="128x128", metavar="WxH")
    parser.add_argument("--num-frames", type=int, default=25)
    parser.add_argument("--replicas", type=int, default=0, metavar="N", help="by Ray")
    parser.add_argument("--prepare", action="store_true", help="only make and compile all")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "The Sora API")  # the wire format lives on
    width, height = args.size.split("x")
    flags = ["--height", height, "--width", width, "--num-frames", str(args.num_frames)]
    scripts = tiny_scripts(args.folder, 1, flags)
    if args.prepare:
        scripts.prepare()
        flags = ["--height", "256", "--width", "256", "--num-frames", "25"]
        replace(scripts, size=flags).prepare()
        return
    work = queue_work(args.folder)
    print(f"queue's own work a job: {spread(work, 'ms')}", flush=True)
    jobs = [
        {"prompt": PROMPTS[n % 3], "size": args.size, "extra_body": {"num_frames": args.num_frames}}
        for n in range(args.jobs)
    ]
    with LocalRay(args.replicas) if args.replicas else nullcontext() as ray:
        flags = scripts.command("generate")[1:]
        measure(Service(flags, args.folder, 1000, ray), scripts, args, jobs)


def measure(service: Service, scripts: Scripts, args: argparse.Namespace, jobs: list[dict]) -> None:
    """Print the figures of the rounds, and the time to cancel."""
    ratios, latencies = [], []
    service.start()
    wait_for(service.url, args.replicas or 1)
    first = jobs[: 3 * (args.replicas or 1)]
    by_service(service, args.folder, first, len(first))  # everything is loaded then
    for number in range(args.rounds):
        served, seconds = by_service(service, args.folder, jobs, args.clients)
        batch = by_prompts_file(scripts, args.folder, jobs)
        latencies += seconds
        ratios.append(served / batch)
        shown = f"served {served:.3f}, by --prompts-file {batch:.3f} videos a second"
        print(f"round {number + 1}: {shown}, ratio {ratios[-1]:.3f}", flush=True)
    print(f"ratio, median: {statistics.median(ratios):.3f}")
    print(f"latency, {args.clients} clients: {spread(latencies, 's')}")
    taken = asyncio.run(cancelled(service.url, args.folder / "data/jobs"))
    print(f"time to cancel: {spread(taken, 'ms', 0)}")
    service.process.terminate()
    service.process.wait()
    medians = {"ratio": ratios, "latency_s": latencies, "cancel_ms": taken}
    finish(args, **{name: statistics.median(values) for name, values in medians.items()})


def wait_for(url: str, workers: int) -> None:
    """Return once so many workers live."""
    while True:
        with suppress(OSError), urllib.request.urlopen(url[:-3] + "/ready") as answer:
            if json.loads(answer.read())["workers"] >= workers:
                return
        time.sleep(0.5)


if __name__ == "__main__":
    main()
