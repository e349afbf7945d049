"""The stages of many jobs run in an order that swaps weights rarely."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ltx_neuron.engine.run import stage_groups


def order(jobs: list[str], loaded: str | None = None) -> list[str]:
    """The stages in their order, each as its job's number and its weight set. A job is the names of
    its stages' sets, in order."""
    runs = []
    for number, sets in enumerate(jobs):
        stages = [SimpleNamespace(loras=each, title=f"{number}{each}") for each in sets]
        runs.append(SimpleNamespace(stages_left=stages, number=number))
    holders = [Holder(run) for run in runs]
    groups = stage_groups(holders, Path, loaded and Path(loaded))
    return [stage.title for _, stages in groups for stage in stages]


class Holder:
    """A run, which has an identity of its own."""

    def __init__(self, run: SimpleNamespace):
        self.stages_left = run.stages_left


@pytest.mark.parametrize(
    ("jobs", "loaded", "expected"),
    [
        (["a", "b", "a"], None, ["0a", "2a", "1b"]),  # equal sets together
        (["ab", "ab"], None, ["0a", "1a", "0b", "1b"]),  # stage 2 after stage 1
        (["a", "b"], "b", ["1b", "0a"]),  # the loaded set first
        (["a", "b"], "c", ["0a", "1b"]),  # the jobs' order
        (["ab", "b"], None, ["0a", "0b", "1b"]),
        (["aa", "a"], None, ["0a", "0a", "1a"]),
        (["b", "ab"], None, ["1a", "0b", "1b"]),  # once, after the job that needs it later
        (["ab", "ba"], None, ["0a", "0b", "1b", "1a"]),  # one set is loaded twice
    ],
)
def test_stages_of_one_weight_set_run_together(jobs, loaded, expected):
    assert order(jobs, loaded) == expected


def test_a_job_without_stages_left_comes_first():
    done, other = (
        Holder(SimpleNamespace(stages_left=[])),
        Holder(SimpleNamespace(stages_left=[SimpleNamespace(loras="a")])),
    )
    assert [run for run, _ in stage_groups([other, done], Path, None)] == [done, other]
