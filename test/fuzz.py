"""Checks on examples that hypothesis draws; how many, its profile says."""

from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, given, settings, strategies


class _Drawn(Random):
    """Chance that hypothesis draws, and makes simple. Numbers are as likely as Random's, unlike those of `randoms`."""

    def __init__(self, data):
        super().__init__(0)
        self._data = data

    def _randbelow(self, n: int) -> int:
        return self._data.draw(strategies.integers(0, n - 1))

    def getrandbits(self, k: int) -> int:
        return self._randbelow(2**k)

    def random(self) -> float:
        return self._randbelow(1000) / 1000


def on_random(check: Callable[[Random], None]) -> None:
    """Call check(chance) for each example."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @settings(deadline=None, suppress_health_check=slow)
    @given(strategies.data())
    def example(data) -> None:
        check(_Drawn(data))

    example()


def times(few: int, many: int) -> int:
    """How often to try what no strategy draws, such as a kill at any moment: `many` in the large profile."""
    return many if settings().max_examples > 100 else few
