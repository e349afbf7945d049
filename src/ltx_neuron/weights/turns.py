"""The order in which weight sets are loaded, so that several jobs need the fewest loads.

A job needs one set after another, one for each of its stages. An order serves all jobs where each
finds its sets in it, one behind the other: it is a common supersequence of theirs, and the shortest
one has the fewest loads. For jobs of at most two sets that is every set once, and twice those sets
that leave no circle of jobs which wait for each other when they are left out: the fewest such sets
are looked for among all choices of one, two, and so on.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Set = TypeVar("Set", bound=Hashable)
_MOST_TRIED = 12  # sets in circles, of which all choices are tried; above, each is loaded twice


def order_of_sets(jobs: Sequence[Sequence[Set]], loaded: Set | None = None) -> list[Set]:
    """The sets in an order that serves all jobs with the fewest loads, and among such orders as
    the jobs come.

    jobs    the sets that each needs, one after the other: at most two different ones
    loaded  the set that is there already: where any job needs it, the order begins with it

    It is least unless more than _MOST_TRIED sets lie in circles.
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
    """What a job still needs after its first stages on a set."""
    left = list(sets)
    while left and left[0] == loaded:
        del left[0]
    return left


def _sorted(sets: list[Set], arcs: set[tuple[Set, Set]]) -> list[Set]:
    """The sets with every arc's first before its second, else as they are; it ends before a
    circle."""
    left, ordered = list(sets), []
    while ready := [one for one in left if not any((other, one) in arcs for other in left)]:
        ordered.append(ready[0])
        left.remove(ready[0])
    return ordered


def _in_circles(sets: list[Set], arcs: set[tuple[Set, Set]]) -> list[Set]:
    """The sets that neither begin nor end every way through them: all circles are of these."""
    backwards = {(second, first) for first, second in arcs}
    for way in (arcs, backwards):
        free = _sorted(sets, way)
        sets = [one for one in sets if one not in free]
    return sets
