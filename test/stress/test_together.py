"""Processes that shard, compile, generate and read the prompt cache in one folder at once all succeed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import SCRIPT_SECONDS, Setup, succeeded
from helpers import stress_count

from ltx_neuron.backends.manifest import damaged_graphs
from ltx_neuron.files import MANIFEST

pytestmark = pytest.mark.timeout(4 * SCRIPT_SECONDS)
ROUNDS, PROCESSES, TP = stress_count(50), 4, 2
SIZE = {"height": 64, "width": 64, "num_frames": 9}
DIT, GEMMA = ("shards/shard_backbone_weights.py", False), ("shards/shard_gemma3_weights.py", True)
VIDEOS: set[bytes] = set()  # of all rounds


def make_all(setup: Setup, number: int) -> None:
    """What a process does. Every second one generates once more, now with a prompt that some process has encoded."""
    for script in (DIT, GEMMA, ("compile/compile_gemma3.py", True)):
        succeeded(setup.run(*script))
    succeeded(setup.run("compile/compile_transformer.py", gemma=False, **SIZE))
    for again in range(1 + number % 2):
        path = setup.folder / f"{number}-{again}.mp4"
        flags = SIZE | {"prompt": "a red fox", "output_path": path, "neuron_gemma": True}
        succeeded(setup.run("src/generate_ltx23.py", **flags))
        VIDEOS.add(path.read_bytes())


@pytest.mark.parametrize("number", range(ROUNDS))
def test_processes_in_one_empty_folder_all_succeed_and_make_the_same_video(tiny, tmp_path, number):
    setup = Setup(tmp_path, tiny, TP, "float32")
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(lambda process: make_all(setup, process), range(PROCESSES)))
    assert len(VIDEOS) == 1
    for script in (DIT, GEMMA):
        succeeded(setup.run(*script, verify=True))
    graphs = [path.parent for path in setup.artifacts.glob(f"graphs/*/{MANIFEST}")]
    assert len(graphs) > 2 and [bad for path in graphs for bad in damaged_graphs(path)] == []
    assert [path for path in setup.artifacts.rglob("*") if path.name.endswith((".lock", ".partial"))] == []
