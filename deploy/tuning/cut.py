"""The cheapest way to split a graph in two: a minimum cut.

Every unit runs in int8 or in float, at a price for each; a tensor between two sides costs what
turning it costs. The cheapest choice of all is a minimum cut between two ends, found exactly::

    int8 end ==float's price==> unit ==int8's price==> float end     the cut pays what it cuts
                                 |^
                          price of turning

Source: Picard, Ratliff, "Minimum cuts and related problems", Networks 5, 1975 (the model); Dinic,
"Algorithm for solution of a problem of maximum flow", 1970 (the flow).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)

_INT8, _FLOAT = 0, 1  # the two ends
_NOTHING = 1e-9  # a residual below this share of all prices is none


def cheapest_split(
    prices: Mapping[Unit, tuple[float, float]],
    between: Iterable[tuple[Unit, Unit, float]],
    follows: Iterable[tuple[Unit, Unit]] = (),
) -> frozenset[Unit]:
    """Units that run in float where the sum of all prices is least; int8 where both are equal.

    Args:
        prices: unit -> (price in int8, price in float), each 0 or more.
        between: (unit, unit, price paid where one is int8 and the other float).
        follows: (unit, other): the unit cannot be int8 where the other is float.
    """
    places = {unit: place for place, unit in enumerate(prices, start=2)}
    flow = _Flow(len(places) + 2)
    for unit, (int8, float32) in prices.items():
        shared = min(int8, float32)  # paid either way
        flow.pipe(_INT8, places[unit], float32 - shared)
        flow.pipe(places[unit], _FLOAT, int8 - shared)
    for one, other, price in between:
        flow.pipe(places[one], places[other], price)
        flow.pipe(places[other], places[one], price)
    every = 1 + sum(max(pair) for pair in prices.values())
    for unit, other in follows:
        flow.pipe(places[unit], places[other], every)
    return frozenset(unit for unit, place in places.items() if place in flow.far_side())


class _Flow:
    """Pipes between numbered places, and what still fits through them."""

    def __init__(self, places: int) -> None:
        self._ends: list[int] = []
        self._left: list[float] = []
        self._out: list[list[int]] = [[] for _ in range(places)]
        self._far: frozenset[int] | None = None

    def pipe(self, start: int, end: int, size: float) -> None:
        """A pipe, and its way back, which is empty."""
        if size <= 0 or start == end:
            return
        for place, to, left in ((start, end, size), (end, start, 0.0)):
            self._out[place].append(len(self._ends))
            self._ends.append(to)
            self._left.append(left)

    def far_side(self) -> frozenset[int]:
        """Places that the float end still drains once the flow is greatest."""
        if self._far is None:
            least = _NOTHING * (1 + sum(self._left))
            while (levels := self._levels(least))[_FLOAT] >= 0:
                used = [0] * len(self._out)
                while self._push(levels, used, least) > 0:
                    pass
            self._far = self._draining(least)
        return self._far

    def _levels(self, least: float) -> list[int]:
        levels = [-1] * len(self._out)
        levels[_INT8] = 0
        waiting = deque([_INT8])
        while waiting:
            place = waiting.popleft()
            for pipe in self._out[place]:
                end = self._ends[pipe]
                if levels[end] < 0 and self._left[pipe] > least:
                    levels[end] = levels[place] + 1
                    waiting.append(end)
        return levels

    def _push(self, levels: list[int], used: list[int], least: float) -> float:
        """One path from end to end, as much as fits; 0 where none is left on these levels."""
        path: list[int] = []
        place = _INT8
        while place != _FLOAT:
            pipe = self._next(place, levels, used, least)
            if pipe is not None:
                path.append(pipe)
                place = self._ends[pipe]
            elif path:
                place = self._ends[path.pop() ^ 1]
                used[place] += 1
            else:
                return 0.0
        size = min(self._left[pipe] for pipe in path)
        for pipe in path:
            self._left[pipe] -= size
            self._left[pipe ^ 1] += size
        return size

    def _next(self, place: int, levels: list[int], used: list[int], least: float) -> int | None:
        """The first pipe of a place that leads on; those tried before are passed over."""
        pipes = self._out[place]
        while used[place] < len(pipes):
            pipe = pipes[used[place]]
            if self._left[pipe] > least and levels[self._ends[pipe]] == levels[place] + 1:
                return pipe
            used[place] += 1
        return None

    def _draining(self, least: float) -> frozenset[int]:
        """Places from which the float end can still be reached."""
        found, waiting = {_FLOAT}, deque([_FLOAT])
        while waiting:
            place = waiting.popleft()
            for pipe in self._out[place]:  # the way back of a pipe that ends here
                start = self._ends[pipe]
                if start not in found and self._left[pipe ^ 1] > least:
                    found.add(start)
                    waiting.append(start)
        return frozenset(found)
