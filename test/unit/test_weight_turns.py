"""Weight sets are loaded in an order that serves all jobs with the fewest loads."""

from itertools import combinations_with_replacement, groupby, product

import pytest

from ltx_neuron.weights.turns import order_of_sets


def loads(order: list, loaded=None) -> int:
    """How often a set takes another's place, or an empty one."""
    changes = [one for one, _ in groupby([loaded, *order])]
    return len(changes) - 1


def serves(order: list, sets: tuple) -> bool:
    """Whether a job finds its sets in an order, one behind the other."""
    places = iter(order)
    return all(any(one == other for other in places) for one, _ in groupby(sets))


def least(jobs: tuple, loaded=None) -> int:
    """The fewest loads, by trying every order."""
    names = sorted({one for sets in jobs for one in sets})
    for count in range(2 * len(names) + 1):
        for order in product(names, repeat=count):
            found = [loaded, *order] if loaded else list(order)
            if all(serves(found, sets) for sets in jobs):
                return loads(list(order), loaded)
    raise AssertionError(jobs)


JOBS = [(a,) for a in "abc"] + [(a, b) for a in "abc" for b in "abc"]


@pytest.mark.parametrize("loaded", [None, "a", "d"])
def test_the_order_has_the_fewest_loads_of_all_orders(loaded):
    cases = [jobs for count in (1, 2, 3, 4) for jobs in combinations_with_replacement(JOBS, count)]
    for jobs in cases[:: 1 if loaded is None else 7]:
        order = order_of_sets(jobs, loaded)
        assert all(serves(order, sets) for sets in jobs), (jobs, order)
        assert loads(order, loaded) == least(jobs, loaded), (jobs, order)


def test_every_circle_of_four_sets_is_broken_with_the_fewest_loads():
    arcs = [(a, b) for a in range(4) for b in range(4) if a != b]
    for chosen in range(0, 2 ** len(arcs), 13):
        jobs = tuple(arc for index, arc in enumerate(arcs) if chosen >> index & 1)
        order = order_of_sets(jobs)
        assert all(serves(order, sets) for sets in jobs)
        # That many sets are there twice as must be left out until no circle is there.
        assert len(order) - len(set(order)) == fewest_that_break(jobs)


def fewest_that_break(arcs: tuple) -> int:
    def has_circle(names: set) -> bool:
        while ends := {n for n in names if not any(a == n and b in names for a, b in arcs)}:
            names = names - ends
        return bool(names)

    choices = [{n for n in range(4) if bits >> n & 1} for bits in range(16)]
    return min(4 - len(names) for names in choices if not has_circle(names))


def test_sets_that_wait_for_none_keep_the_order_of_the_jobs():
    assert order_of_sets([("c",), ("a", "b"), ("b",)]) == ["c", "a", "b"]
    assert order_of_sets([("b", "z"), ("a", "z")]) == ["b", "a", "z"]


def test_what_is_loaded_already_comes_first():
    jobs = [("a", "b"), ("b", "c"), ("c",)]
    assert order_of_sets(jobs, "b") == ["b", "a", "b", "c"]
    assert order_of_sets(jobs, "c") == ["c", "a", "b", "c"]
    assert order_of_sets(jobs, "d") == ["a", "b", "c"]


def test_the_published_pipelines_together_swap_once_a_set():
    plain, ic, style = "plain", "ic", "style"
    jobs = [(plain, plain), (ic, plain), (style, style), (plain,), (ic, plain)]
    assert loads(order_of_sets(jobs)) == 3


def test_very_many_circles_are_served_without_trying_for_ever():
    jobs = [(a, b) for a in range(40) for b in range(40) if a != b]
    order = order_of_sets(jobs)
    assert all(serves(order, sets) for sets in jobs) and len(order) == 80
