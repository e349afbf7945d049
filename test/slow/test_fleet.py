"""The fleet on a real Ray, whose nodes are processes of this machine: its videos are the script's bit for bit."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, SCRIPT_SECONDS, needs, succeeded
from helpers import wait_for
from jobs import make_job
from serving import Service

from ltx_neuron import flags
from ltx_neuron.artifacts.store import Store
from ltx_neuron.artifacts.transfer import push
from ltx_neuron.batch import RESULTS
from ltx_neuron.commands import generate
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.outputs import state_path
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.service.jobs import VIDEO
from ltx_neuron.service.queue import NewJob, Queue

needs("ray", "openai", extras="dev,fleet,serve")

SIZE = {"height": 128, "width": 128, "num_frames": 9, "two_stage": True}  # and its half, in one
SMALL = {"height": 64, "width": 64, "num_frames": 9}
QUIET = {"num_cpus": 0, "object_store_memory": 100 * 2**20}
# That a node is gone is known within seconds.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 4000}
# Else Ray ends replicas where other programs fill the memory, and other tests get nearly all of the machine.
HEALTH |= {"health_check_failure_threshold": 4, "memory_monitor_refresh_ms": 0, "worker_niceness": 0}
LINES = [
    {"prompt": "waves crash on the shore", **SIZE},
    {"prompt": "birds sing", **SMALL},
    {"prompt": "« hello » says a man", "seed": 4, **SIZE},
]


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    setup = scripts(tiny, 1)
    setup.prepare(**SIZE, image=((tiny.image, 0, 1.0),))
    return setup


@pytest.fixture(scope="module")
def prompts(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "jobs.jsonl"
    lines = [*LINES, {"prompt": "a golden retriever", "image": [str(tiny.image), 0], **SMALL}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def words_of(setup, **more) -> list[str]:
    words = setup.words(neuron_gemma=True, spatial_upsampler_path=setup.assets.spatial_upsampler, **more)
    return [*words, *(("--artifacts-dir", str(more["artifacts_dir"])) if "artifacts_dir" in more else ())]


@pytest.fixture(scope="module")
def wanted(setup, prompts, tmp_path_factory) -> Path:
    """The folder that generate_ltx23.py makes without Ray."""
    folder, upsampler = tmp_path_factory.mktemp("wanted"), setup.assets.spatial_upsampler
    flags = dict(neuron_gemma=True, spatial_upsampler_path=upsampler, prompts_file=prompts, output_dir=folder)
    succeeded(setup.run("src/generate_ltx23.py", **flags))
    return folder


@pytest.fixture(scope="module")
def cluster():
    """A head that computes nothing; tests add nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(True, head_node_args={"include_dashboard": False, "_system_config": HEALTH, **QUIET})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def node(cluster):
    """node(num_cpus=1) adds a node for the length of a test."""
    added = []

    def add(**resources):
        added.append(cluster.add_node(**QUIET | resources))
        return added[-1]

    yield add
    for one in added:
        if one in cluster.list_all_nodes():
            cluster.remove_node(one, allow_graceful=False)
    cluster.wait_for_nodes()  # the next test finds none of them


def make_batch(args) -> None:
    from ltx_neuron.fleet.batch import generate_batch

    workspace = flags.workspace(args, writes=False)
    generate_batch(flags.lines(args, workspace), args, workspace)


def test_two_replicas_make_a_batch_bit_for_bit_and_go_on_with_one_that_was_interrupted(
    cluster, node, setup, prompts, wanted, tmp_path, capsys
):
    from ltx_neuron.fleet.batch import FOLDER

    node(num_cpus=1), node(num_cpus=1)
    out = tmp_path / "out"
    flags = dict(prompts_file=prompts, output_dir=out, ray=cluster.address)
    script = [sys.executable, ROOT / "src/generate_ltx23.py", *words_of(setup, **flags)]
    process = subprocess.Popen(script, stderr=subprocess.PIPE, text=True)
    wait_for((out / RESULTS).is_file)  # one is done
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SCRIPT_SECONDS)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors, errors
    assert (out / FOLDER).is_dir()
    make_batch(generate.arguments(words_of(setup, **flags)))
    assert "lines were done before" in capsys.readouterr().out
    names = [f"000{number}.mp4" for number in range(1, 5)]
    assert sorted(path.name for path in out.glob("*.mp4")) == names
    for name in names:
        assert (out / name).read_bytes() == (wanted / name).read_bytes(), name
        ours, theirs = (json.loads((each / name).with_suffix(".json").read_text()) for each in (out, wanted))
        assert ours.pop("seconds") and theirs.pop("seconds") and ours == theirs
    assert json.loads((out / RESULTS).read_text()) == json.loads((wanted / RESULTS).read_text())
    assert not (out / FOLDER).exists()


def test_without_a_cluster_or_room_the_command_to_type_is_named(cluster, setup, prompts, tmp_path, monkeypatch):
    for address, command in (("127.0.0.1:1", "ray start --head"), (cluster.address, "--num-cpus 1")):
        args = generate.arguments(words_of(setup, prompts_file=prompts, output_dir=tmp_path / "out", ray=address))
        with pytest.raises(UserError, match=command):
            make_batch(args)
    monkeypatch.setattr(flags, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs ray, and(.|\n)*pip install"):
        flags.check_fleet(args)


class Scene:
    """A pool on a queue of its own, and what happens to it: a generator that is asked again until it is done."""

    def __init__(self, folder, setup, cluster, flags, capability_jobs=(), **more):
        from ltx_neuron.fleet.pool import Pool

        args = generate.arguments(words_of(setup, ray=cluster.address, prompt="-", **dict(flags)))
        self.queue = Queue(folder / "queue.sqlite", folder / "jobs")
        self.pool = Pool(self.queue, args, [*capability_jobs], **more)

    def submit(self, line: dict) -> str:
        id = self.queue.new_id()
        self.queue.folder_of(id).mkdir()
        self.queue.submit(NewJob(id, "ada", "0", f"{line['height']}", {"recipe": "distilled"} | line, {}))
        return id

    def get(self, id: str):
        return self.queue.get("ada", id)

    def run(self, happens) -> None:
        end = time.monotonic() + SCRIPT_SECONDS

        def look() -> None:
            assert time.monotonic() < end, "it did not happen"
            if next(happens, "done") == "done":
                self.pool.stop.set()

        with closing(self.queue):
            self.pool.run(look)

    def denoised(self, id: str) -> bool:
        """Whether a running job's latents are kept, all or those of its first stage."""
        return state_path(self.queue.folder_of(id) / VIDEO).is_file()

    def process(self, id: str) -> psutil.Process:
        return psutil.Process(self.queue.workers()[self.get(id).worker]["pid"])

    def video(self, id: str) -> bytes:
        return (self.queue.folder_of(id) / VIDEO).read_bytes()


def until(happened):
    while not happened():
        yield


@pytest.fixture
def scene(cluster, setup, tmp_path, monkeypatch):
    monkeypatch.setattr("ltx_neuron.fleet.pool._LOOK_SECONDS", 0.05)
    return partial(Scene, tmp_path, setup, cluster)


def test_a_killed_replica_and_a_lost_node_leave_their_jobs_to_others(cluster, node, scene, wanted, capfd):
    first, scene, processes = node(num_cpus=1), scene({}), []
    one, two = scene.submit(LINES[0]), scene.submit(LINES[2])

    def happens():
        yield from until(lambda: scene.denoised(one))
        scene.process(one).kill()
        yield from until(lambda: scene.get(one).status == "completed" and scene.denoised(two))
        processes.append(scene.process(two))
        processes[0].suspend()  # its machine is gone: nothing more comes of it
        cluster.remove_node(first, allow_graceful=False)
        node(num_cpus=1)
        yield from until(lambda: scene.get(two).status == "completed")

    scene.run(happens())
    with suppress(psutil.NoSuchProcess):
        processes[0].kill()
    printed = capfd.readouterr().out
    for id, name in ((one, "0001.mp4"), (two, "0003.mp4")):
        assert scene.video(id) == (wanted / name).read_bytes() and not scene.denoised(id)
        assert f"{id}: resumed" in printed
    assert scene.get(one).attempt == 2 and scene.get(two).attempt >= 2


def test_a_node_without_artifacts_pulls_them_and_a_job_is_cancelled_within_a_step(node, scene, setup, wanted, tmp_path):
    push(Store(tmp_path / "store"), setup.artifacts, [])
    node(num_cpus=1)
    empty = {"artifacts_dir": tmp_path / "empty"}
    pulls = scene(empty | {"artifacts_url": tmp_path / "store"})
    one, two = pulls.submit(LINES[0]), pulls.submit(LINES[1])

    def happens():
        yield from until(lambda: pulls.get(one).status == "in_progress")
        assert pulls.queue.cancel("ada", one)
        yield from until(lambda: not pulls.queue.folder_of(one).exists() and pulls.get(two).status == "completed")

    pulls.run(happens())
    assert pulls.video(two) == (wanted / "0002.mp4").read_bytes()
    assert [folder.name for folder in pulls.queue.folder.iterdir()] == [two]
    shutil.rmtree(tmp_path / "empty")
    with pytest.raises(UserError, match="no dit graphs in(.|\n)*--artifacts-url URL"):
        scene(empty, max_failures=1, capability_jobs=[make_job("-", Size(64, 64, 9))]).run(until(lambda: 0))


def test_the_service_outlives_its_pool_and_makes_the_videos_on_the_cluster(cluster, node, setup, wanted, tmp_path):
    import ray

    from ltx_neuron.fleet import cluster as rays

    node(num_cpus=1)
    service = Service(setup, setup.assets, tmp_path)
    service.command += ["--ray", cluster.address]
    service.start()
    try:
        videos = service.client().videos
        ids = [videos.create(prompt=prompt, size="64x64").id for prompt in ("-", "-", LINES[1]["prompt"])]
        wait_for(lambda: videos.retrieve(ids[0]).status == "completed")
        service.worker.kill()  # the pool
        wait_for(lambda: videos.retrieve(ids[-1]).status == "completed")
        assert videos.download_content(ids[-1]).read() == (wanted / "0002.mp4").read_bytes()
    finally:
        assert service.stop() == 143
    with rays.connected(cluster.address, resolve("cpu", ())):
        wait_for(lambda: ray.available_resources().get("CPU") == 1.0)


def test_a_replica_has_four_cores_of_one_chip_or_gives_them_back(cluster, node):
    """A layout of several chips has whole ones, and guidance groups have a share each."""
    import ray

    from ltx_neuron.fleet import cluster as rays

    profile, row = resolve("trn2.48xlarge", ()), resolve("trn2.48xlarge", ("context_parallel=2",))
    assert rays.Needs.of(resolve("cpu", ("guidance_parallel=2",)), 1) == rays.Needs("CPU", 2)

    def asking(profile, count: int):
        """An actor that says which cores a replica would have in its place."""

        @ray.remote(**rays.Needs("neuron_cores", count).options)
        class Asking:  # a local one: Ray's processes cannot import this file
            def cores(self):
                return rays.check_cores(profile, 4)

        return Asking.remote()

    def cores_of(*actors) -> list[list[int]]:
        return sorted(ray.get([actor.cores.remote() for actor in actors]))

    node(resources={"neuron_cores": 16})
    with rays.connected(cluster.address, profile):
        assert (rays.Needs.of(profile, 4).capacity(), rays.Needs.of(row, 4).capacity()) == (4, 2)
        actors = [asking(profile, 4), asking(profile, 4), asking(row, 8)]
        assert cores_of(*actors) == [[0, 1, 2, 3], [4, 5, 6, 7], [*range(8, 16)]]
        for actor in actors:
            ray.kill(actor)
        wait_for(lambda: ray.available_resources().get("neuron_cores") == 16)
        # Somebody else takes two cores: what is left begins in the middle of a chip.
        other = asking(profile, 2)
        with pytest.raises(UserError, match="4 ranks need 4 different logical cores"):
            cores_of(other)
        with pytest.raises(UserError, match="'2,3,4,5': 4 ranks begin at a multiple of 4"):
            cores_of(asking(profile, 4))
