"""The order of loading weight sets that serves several jobs with the fewest loads.

A job needs a sequence of sets, one per stage. An order serves all jobs if it is a common
supersequence of their sequences; the shortest one has the fewest loads. For jobs of at most two
sets, each set is a vertex and each job an arc from its first set to its second. The shortest order
loads a minimum feedback vertex set (the fewest vertices that break all cycles) twice, and every
other set once. The search tries all choices of one vertex, then of two, and so on.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Set = TypeVar("Set", bound=Hashable)
_MOST_TRIED = 12  # sets in cycles whose choices are all tried; if more, each is loaded twice


def order_of_sets(jobs: Sequence[Sequence[Set]], loaded: Set | None = None) -> list[Set]:
    """The order that serves all jobs with the fewest loads; otherwise it follows the jobs' order.

    jobs    the sequence of sets of each job, at most two different ones
    loaded  the set that is loaded already; if any job needs it, the order begins with it

    The order may be longer than the shortest one if more than _MOST_TRIED sets are in cycles.
    """
    if loaded is not None and any(loaded in sets for sets in jobs):
        rest = [_after(sets, loaded) for sets in jobs]
        return [loaded, *order_of_sets(rest)]
    sets = list(dict.fromkeys(one for sets in jobs for one in sets))
    arcs = {(sets[0], sets[-1]) for sets in jobs if sets and sets[0] != sets[-1]}
    circling = _in_circles(sets, arcs)
    if len(circling) > _MOST_TRIED:
        choices = iter([tuple(circling)])
    else:
        counts = range(len(circling) + 1)
        choices = (choice for count in counts for choice in combinations(circling, count))
    for twice in choices:
        once = [one for one in sets if one not in twice]
        if len(ordered := _sorted(once, arcs)) == len(once):
            return [*twice, *ordered, *twice]
    raise AssertionError("without the sets of all circles there is no circle")


def _after(sets: Sequence[Set], loaded: Set) -> list[Set]:
    """The sets that a job still needs after its first stages on `loaded`."""
    left = list(sets)
    while left and left[0] == loaded:
        del left[0]
    return left


def _sorted(sets: list[Set], arcs: set[tuple[Set, Set]]) -> list[Set]:
    """The sets in topological order, ties in their own order, without those on or behind cycles."""
    left, ordered = list(sets), []
    while ready := [one for one in left if not any((other, one) in arcs for other in left)]:
        ordered.append(ready[0])
        left.remove(ready[0])
    return ordered


def _in_circles(sets: list[Set], arcs: set[tuple[Set, Set]]) -> list[Set]:
    """The sets that have paths from and to a cycle: all cycles consist of these."""
    backwards = {(second, first) for first, second in arcs}
    for way in (arcs, backwards):
        free = _sorted(sets, way)
        sets = [one for one in sets if one not in free]
    return sets
