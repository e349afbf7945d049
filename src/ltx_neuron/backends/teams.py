"""Guidance groups: several worlds of ranks, each with the whole model, that share the passes of a
guided step or the tiles of a tiled one. Groups have no collective in common; predictions cross the
host once a step.
"""

import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import NotFiniteError, RankError, Ranks, indexed
from ltx_neuron.errors import UserError

T = TypeVar("T")
_GUIDE = "guide"  # the run that combines the passes of a sequence


class GuidanceGroups(Ranks):
    """The ranks of all guidance groups of one run.

    Every group loads the same weights and programs, and receives every upload. A sequence of passes
    and a "guide" is dealt: pass p runs on living group p mod G. Then every group receives the
    predictions of the others and runs "guide". Equal inputs and equal graphs give equal bits, so
    that every group holds the sampler's state, the same as of one group alone. Other sequences run
    on the first living group only: the others could only repeat its work, and a host with few
    processors would share them.

    A group that fails is closed, and the others repeat its passes from the latents of the last
    step, which no pass changes, or its runs since the last upload. RankError is raised if the last
    group fails; a user's mistake and NaN or Inf, which all groups have in common, at once.

    bytes_sent of all groups together; launches and launch_ms of the group with the most.
    """

    def __init__(self, start: Sequence[Callable[[], Ranks]]):
        """start: starts one group each."""
        self.groups: dict[int, Ranks] = {}  # the living ones by number, from 1 on
        pool = ThreadPoolExecutor(len(start))
        started = [pool.submit(start_group) for start_group in start]
        pool.shutdown(wait=False)
        try:
            self.groups = {n: future.result() for n, future in enumerate(started, 1)}
        except BaseException:
            for future in started:
                if not future.exception():
                    future.result().close()
            raise
        first = self.groups[1]
        super().__init__(first.tp, first.cp)
        self._sequences: dict[tuple[str, str], list[tuple[str, dict, dict]]] = {}
        self._leader = 1  # the group of the runs below
        self._unreplicated: list[tuple[str, str, dict[str, int]]] = []  # runs since the last upload
        self._shared = False  # whether the groups hold results of different work
        self._failed: RankError | None = None  # of the last group

    @property
    def at_once(self) -> int:
        return sum(group.size for group in self.groups.values())

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        self.programs |= programs
        self._broadcast(lambda group: group.load(weights, programs, dtype))

    def replace_weights(self, weights: Path) -> None:
        self._broadcast(lambda group: group.replace_weights(weights))

    def unload(self) -> None:
        self.programs.clear()
        self._sequences.clear()
        self._broadcast(lambda group: group.unload())

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        with self._counted():
            self._broadcast(lambda group: group.put(program, like, **tensors))

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._sequences[program, sequence] = runs

        def define(group: Ranks) -> None:
            group.define(program, sequence, runs)
            for number, run in enumerate(runs):
                group.define(program, indexed(sequence, number), [run])

        self._broadcast(define)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        *passes, last = self._sequences.get((program, sequence), [(sequence, {}, {})])
        with self._counted():
            if last[0] == _GUIDE:
                return self._run_guided(program, sequence, passes, numbers)
            milliseconds = self._on_leader(lambda group: group.run(program, sequence, **numbers))
            self._unreplicated.append((program, sequence, numbers))
            return milliseconds

    def _run_guided(
        self, program: str, sequence: str, passes: list[tuple], numbers: dict[str, int]
    ) -> float:
        fields = self.programs[program].fields

        def run_pass(number: int, writes: dict[str, str]) -> Callable:
            def run(group: Ranks) -> tuple[float, dict[str, Tensor]]:
                milliseconds = group.run(program, indexed(sequence, number), **numbers)
                # Predictions that "guide" reads.
                names = [name for name in writes.values() if name in fields]
                return milliseconds, {name: group.get(program, name) for name in names}

            return run

        done = self._schedule([run_pass(n, writes) for n, (_, _, writes) in enumerate(passes)])
        busy = dict.fromkeys(self.groups, 0.0)
        for (_, _, writes), (number, (milliseconds, _)) in zip(passes, done, strict=True):
            kind = next(iter(writes.values())).rpartition("_")[0]
            self.pass_ms.append((number, kind, milliseconds))
            busy[number] = busy.get(number, 0.0) + milliseconds

        def guide(number: int) -> Callable[[Ranks], float]:
            def run(group: Ranks) -> float:
                others = [tensors for maker, (_, tensors) in done if maker != number]
                if others:
                    group.put(program, None, **dict(ChainMap(*others)))
                return group.run(program, indexed(sequence, len(passes)), **numbers)

            return run

        guided = self._run_concurrently({number: guide(number) for number in self.groups})
        self.pass_ms += [(number, _GUIDE, ms) for number, ms in guided.items()]
        return max(busy.values()) + max(guided.values())

    def share(self, work: Sequence[Callable[[Ranks], T]]) -> list[T]:
        self._shared = True
        with self._counted():
            return [result for _, result in self._schedule(work)]

    def get(self, program: str, name: str) -> Tensor:
        return self._on_leader(lambda group: group.get(program, name))

    def hashes(self, *names: str) -> list[str]:
        if self._unreplicated:  # the other groups do not hold the results
            return self._on_leader(lambda group: group.hashes(*names))
        hashed = dict.fromkeys(self.groups, lambda group: group.hashes(*names))
        digests_of = self._run_concurrently(hashed)
        if self._shared:  # a group's ranks alone are alike: those of the group that differs most
            return max(digests_of.values(), key=lambda digests: len(set(digests)))
        return [digest for digests in digests_of.values() for digest in digests]

    def check(self) -> None:
        self._run_concurrently({number: lambda group: group.check() for number in self.groups})

    def close(self) -> None:
        for group in self.groups.values():
            group.close()

    def _broadcast(self, call: Callable[[Ranks], None]) -> None:
        """Call on every living group, with something that all of them hold afterwards."""
        self._unreplicated.clear()
        self._shared = False
        self._run_concurrently(dict.fromkeys(self.groups, call))

    def _on_leader(self, call: Callable[[Ranks], T]) -> T:
        while True:
            leader = next(iter(self.groups), 0)
            missed = [*self._unreplicated] if leader != self._leader else []

            def catch_up(group: Ranks, missed=missed) -> T:
                for program, sequence, numbers in missed:
                    group.run(program, sequence, **numbers)
                return call(group)

            if done := self._run_concurrently({leader: catch_up}):
                self._leader = leader
                return done[leader]

    def _schedule(self, work: Sequence[Callable[[Ranks], T]]) -> list[tuple[int, T]]:
        """Each result with the group that made it. The work of a lost group is dealt again."""
        done: dict[int, tuple[int, T]] = {}
        while waiting := [n for n in range(len(work)) if n not in done]:
            living = [*self.groups][: len(waiting)]

            def take(number: int, dealt: list[int]) -> Callable[[Ranks], None]:
                def call(group: Ranks) -> None:
                    for n in dealt:
                        done[n] = number, work[n](group)

                return call

            dealt = {n: waiting[place :: len(living)] for place, n in enumerate(living)}
            self._run_concurrently({number: take(number, dealt[number]) for number in dealt})
        return [done[n] for n in range(len(work))]

    def _run_concurrently(self, work: dict[int, Callable[[Ranks], T]]) -> dict[int, T]:
        """Call on groups at once, and drop those that fail; raises if no group is left."""
        if self._failed:
            raise self._failed
        done: dict[int, T] = {}
        lost: dict[int, RankError] = {}
        calls = {number: (call, self.groups[number]) for number, call in work.items()}
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = {number: pool.submit(call, on) for number, (call, on) in calls.items()}
        for number, future in futures.items():
            try:
                done[number] = future.result()
            except RankError as error:
                if isinstance(error, NotFiniteError | UserError):
                    raise
                lost[number] = error
        for number in lost:
            self.groups.pop(number).close()
        if not self.groups:
            self._failed = next(iter(lost.values()))
            raise self._failed
        for number, error in lost.items():
            reason, left = str(error).splitlines()[0], len(self.groups)
            where = f" {self.moment}" if self.moment else ""
            since = f"{left} group{'s' * (left != 1)} since"
            self.lost.append(f"guidance group {number} lost{where} ({reason}), {since}")
            tqdm.write(self.lost[-1], file=sys.stderr)  # not into a progress bar
        return done

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Add what the block costs the groups to the totals."""
        before = [(g, g.bytes_sent, g.launches, g.launch_ms) for g in self.groups.values()]
        try:
            yield
        finally:
            self.bytes_sent += sum(g.bytes_sent - sent for g, sent, _, _ in before)
            self.launches += max((g.launches - count for g, _, count, _ in before), default=0)
            self.launch_ms += max((g.launch_ms - ms for g, _, _, ms in before), default=0)
