"""A batch on the cluster's queue, with a pool in Ray's place; a replica's cores and layout."""

import os
import threading
from argparse import Namespace
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest
from conftest import needs
from jobs import make_job

from ltx_neuron.batch import Line, Results
from ltx_neuron.commands import generate
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.service.jobs import VIDEO
from ltx_neuron.service.queue import Queue

needs("ray", extras="dev,fleet")


class Pool:
    """Makes the jobs whose prompts are not bad, until it is stopped or has made `most`."""

    most, made = 9, []

    def __init__(self, queue, *_):
        self.queue, self.stop = queue, threading.Event()

    def run(self, look) -> None:
        while not self.stop.is_set() and len(self.made) < self.most:
            self.make_one()
            look()

    def make_one(self) -> None:
        (entry,) = self.queue.claim("w", self.queue.next_batch_key(), 1)
        self.made.append(prompt := entry.params["prompt"])
        if prompt == "bad":
            self.queue.fail(entry, "internal_error", "no")
            return
        video = self.queue.folder_of(entry.id) / VIDEO
        video.write_text(prompt)
        write_json(video.with_suffix(".json"), {"seconds": {}})
        self.queue.complete(entry)


@pytest.fixture
def run(monkeypatch):
    """The prompts of the jobs that a run of a batch's lines in a folder makes, in that order."""
    from ltx_neuron.fleet import batch

    def run(folder, prompts: str, most: int = 9) -> list[str]:
        monkeypatch.setattr(Pool, "most", most)
        monkeypatch.setattr(Pool, "made", made := [])
        folder.mkdir(exist_ok=True)
        lines = [Line(n, make_job(prompt), f"digest {prompt}") for n, prompt in enumerate(prompts.split(), 1)]
        results = Results(folder, lines)
        left = [line for line in lines if line.number not in results.entries]
        with closing(Queue(folder / "queue.sqlite", folder / "jobs")) as queue:
            resolved = []  # by the checkpoint's release
            workspace = SimpleNamespace(resolved=lambda job: resolved.append(job) or job)
            batch._make(left, Namespace(replicas=None), workspace, queue, results)
            assert len(resolved) == len(left)
            ids = [entry.id for entry in queue.page(batch.OWNER)[0]]
            assert sorted(folder.name for folder in queue.folder.iterdir()) == sorted(ids)
        return made

    monkeypatch.setattr(batch, "Pool", Pool)
    return run


def test_a_predicted_length_is_refused_before_a_cluster_is_asked(split, tmp_path):
    lines = tmp_path / "jobs.jsonl"
    lines.write_text('{"prompt": "a red fox"}')
    words = ["--checkpoint-path", split.folder, "--output-dir", tmp_path, "--profile", "cpu"]
    words += ["--recipe", "distilled", "--auto-duration", "--ray", "local", lines]
    with pytest.raises(UserError, match="Type --num-frames N, and leave out --duration-head-path"):
        generate.batch_main([*map(str, words)])


def test_finished_videos_get_their_names_and_their_jobs_go(tmp_path, run):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(first, "waves bad birds") == ["waves", "bad", "birds"]
    assert {path.name: path.read_text() for path in first.glob("*.mp4")} == {"0001.mp4": "waves", "0003.mp4": "birds"}
    run(second, "waves birds", most=0)
    with closing(Queue(second / "queue.sqlite", second / "jobs")) as queue:
        Pool(queue).make_one()  # just before a kill
    assert run(second, "waves birds") == ["birds"]
    assert (second / "0001.mp4").read_text() == "waves"


def test_an_interrupted_run_goes_on_with_its_own_jobs_but_not_with_those_that_failed_or_changed(tmp_path, run):
    assert run(tmp_path, "waves birds wind", most=1) == ["waves"]
    assert len([*(tmp_path / "jobs").iterdir()]) == 2
    assert run(tmp_path, "waves rain wind") == ["wind", "rain"]
    assert (tmp_path / "0002.mp4").read_text() == "rain" and list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "visible", "cores"),
    [
        ((), "4-7", range(4, 8)),
        (("context_parallel=2", "guidance_parallel=2", "backend=torchdist"), "8-23", range(8, 24)),
        ((), None, "RAY_EXPERIMENTAL_NOSET"),
        ((), "2-5", "4 ranks begin at a multiple of 4 cores(.|\n)*take 4 neuron"),
        (("context_parallel=4",), "2-17", "multiple of 16 cores, to have whole(.|\n)*take 16 neuron"),
        (("context_parallel=4",), "0-7,16-23", "the cores of a run follow each other"),
    ],
)
def test_a_replica_takes_the_visible_cores_if_they_are_whole_chips_in_a_row(monkeypatch, settings, visible, cores):
    from ltx_neuron.fleet import cluster

    profile = resolve("trn2.48xlarge", settings)
    monkeypatch.setenv(cluster.VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(cluster.VISIBLE)
    with pytest.raises(UserError, match=cores) if isinstance(cores, str) else nullcontext():
        assert cluster.check_cores(profile, 4) == [*cores]
        assert os.environ[cluster.VISIBLE] == ",".join(map(str, cores))


def test_the_replicas_of_a_node_follow_from_the_layout(monkeypatch):
    from ltx_neuron.fleet import cluster

    nodes = [("10.0.0.1", {"neuron_cores": 64.0})]
    monkeypatch.setattr(cluster, "_living_nodes", lambda: nodes)
    for settings, cores in (((), 4), (("guidance_parallel=4", "context_parallel=4"), 64)):
        layout = cluster.Needs.of(resolve("trn2.48xlarge", ("backend=torchdist", *settings)), 4)
        assert layout == cluster.Needs("neuron_cores", cores) and layout.capacity() == 64 // cores
        assert layout.options == {"num_cpus": 0, "resources": {"neuron_cores": cores}}
    assert layout.layout() == "room for 1 replica with neuron_cores 64: 1 on 10.0.0.1"
    nodes[:] = [("10.0.0.1", {"neuron_cores": 4.0})] * 2
    assert layout.too_small().startswith("no node of the Ray cluster has neuron_cores 64 for")
