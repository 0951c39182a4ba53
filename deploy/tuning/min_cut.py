"""The split of least total price, found exactly as a minimum cut.

A tensor between the two sides adds the price of its conversion::

    int8 end ==float's price==> unit ==int8's price==> float end     the cut pays what it cuts
                                 |^
                          price of conversion

Source: Picard, Ratliff, "Minimum cuts and related problems", Networks 5, 1975 (the model); Dinic,
"Algorithm for solution of a problem of maximum flow", 1970 (the flow).
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)

_INT8_END, _FLOAT_END = 0, 1  # source and sink
_MIN_CAPACITY = 1e-9  # smaller residual capacities, as a share of all prices, count as 0


def cheapest_split(
    prices: Mapping[Unit, tuple[float, float]],
    conversions: Iterable[tuple[Unit, Unit, float]],
    followers: Iterable[tuple[Unit, Unit]] = (),
    pinned: Iterable[Unit] = (),
) -> frozenset[Unit]:
    """Return the units to run in float for the least total price; on a tie a unit runs in int8.

    The units are nodes of a network of pipes between an int8 end and a float end. A cut divides
    them into an int8 side and a float side, one with each end. It pays for every pipe that starts
    on the int8 side and ends on the float side. So pipes stand for the prices, and the cheapest cut
    is the result.

    Args:
        prices: unit -> (price in int8, price in float), each 0 or more.
        conversions: (unit, unit, price if one is int8 and the other float).
        followers: (unit, other unit): the first must be float if the other is.
        pinned: units that must be float.
    """
    index_by_unit = {unit: index for index, unit in enumerate(prices, start=2)}  # 0, 1: the ends
    network = _FlowNetwork(len(index_by_unit) + 2)
    unlimited = 1.0  # in the end more than all prices together, so that no cut pays it
    for unit, (int8_price, float_price) in prices.items():
        least_price = min(int8_price, float_price)  # paid on either side, so it decides nothing
        # of these two pipes the first is cut where the unit is float, the second where it is int8
        network.add_pipe(_INT8_END, index_by_unit[unit], float_price - least_price)
        network.add_pipe(index_by_unit[unit], _FLOAT_END, int8_price - least_price)
        unlimited += max(int8_price, float_price)
    for unit, other, price in conversions:
        network.add_pipe(index_by_unit[unit], index_by_unit[other], price)
        network.add_pipe(index_by_unit[other], index_by_unit[unit], price)
        unlimited += price
    # cut where `unit` is int8 and `other` is float, which no cut pays
    for unit, other in followers:
        network.add_pipe(index_by_unit[unit], index_by_unit[other], unlimited)
    for unit in pinned:  # the same where `unit` is int8
        network.add_pipe(index_by_unit[unit], _FLOAT_END, unlimited)

    float_side = network.find_float_side()
    return frozenset(unit for unit, index in index_by_unit.items() if index in float_side)


class _FlowNetwork:
    """Network of numbered nodes, with the residual capacity of the pipe between each two."""

    def __init__(self, node_count: int) -> None:
        self._residuals: list[dict[int, float]] = [{} for _ in range(node_count)]
        self._min_capacity = _MIN_CAPACITY

    def add_pipe(self, start: int, end: int, size: float) -> None:
        """Add a pipe; it widens one that is there."""
        if size > 0:
            self._residuals[start][end] = self._residuals[start].get(end, 0.0) + size
            self._residuals[end].setdefault(start, 0.0)
            self._min_capacity += _MIN_CAPACITY * size

    def find_float_side(self) -> Mapping[int, int]:
        """Return the nodes that can still reach the float end at maximum flow."""
        distances = self._measure_distances()
        while _INT8_END in distances:
            # start of a pipe -> ends that may still lead to the float end
            untried_ends = [list(ends) for ends in self._residuals]
            while path := self._find_path(distances, untried_ends):
                self._fill_path(path)
            distances = self._measure_distances()
        return distances

    def _measure_distances(self) -> dict[int, int]:
        """Return the nodes that can reach the float end -> the fewest pipes on the way."""
        distances = {_FLOAT_END: 0}
        waiting = deque([_FLOAT_END])
        while waiting:
            end = waiting.popleft()
            for start in self._residuals[end]:
                if start not in distances and self._has_capacity(start, end):
                    distances[start] = distances[end] + 1
                    waiting.append(start)
        return distances

    def _find_path(self, distances: Mapping[int, int], untried_ends: list[list[int]]) -> list[int]:
        """Return one shortest path of pipes from the int8 end to the float end; empty without one.

        This is the depth-first step of Dinic's algorithm.

        Args:
            distances: node -> number of pipes from it to the float end, for nodes that reach it;
                the int8 end is one of them.
            untried_ends: for each node, the ends of its pipes that may still lead on; those that
                do not are removed.
        """
        path = [_INT8_END]
        while path and path[-1] != _FLOAT_END:
            start = path[-1]
            if not untried_ends[start]:  # a dead end: go back, and do not try that pipe again
                path.pop()
                if path:
                    untried_ends[path[-1]].pop()
                continue
            end = untried_ends[start][-1]
            is_nearer = distances.get(end) == distances[start] - 1
            if is_nearer and self._has_capacity(start, end):
                path.append(end)
            else:
                untried_ends[start].pop()
        return path

    def _fill_path(self, path: list[int]) -> None:
        """Send as much along a path as its narrowest pipe takes."""
        pipes = list(pairwise(path))
        size = min(self._residuals[start][end] for start, end in pipes)
        for start, end in pipes:
            self._residuals[start][end] -= size
            self._residuals[end][start] += size

    def _has_capacity(self, start: int, end: int) -> bool:
        return self._residuals[start][end] > self._min_capacity
