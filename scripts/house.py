"""The shape of the house: rooms, floors, and the arrows that imports draw between them.

A room is a folder or a file at the first level of `deploy`, and `calibrators` as a whole. An arrow
is any import of one module by another: at the top of a file, inside a function, for type checkers
only, or by a name in a table that is imported later ("deploy.commands.build:build").
`tests/test_layout.py` holds the law with these functions; run as a program, this prints the
figures with their limits:

    python scripts/house.py [CHECKOUT]
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Each floor may import from the floors below it and from its own, never from above.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "deploy",  # the version, and what is set before anything is imported
        "deploy.cli deploy.signals deploy.__main__",
        "deploy.commands",
        "deploy.analysis",
        "deploy.pipeline",
        "deploy.report",
        "deploy.tuning",
        "deploy.fx",
        "deploy.targets",
        "deploy.calibration",
        "deploy.frontends",
        "deploy.feed",
        "deploy.metrics",
        "deploy.tasks",
        "deploy.graph",
        "deploy.runtimes",
        "deploy.files",
        "deploy.tensors deploy.terminal deploy.machine deploy.method deploy.standins",
        "deploy.version deploy.errors",
        "calibrators",
    )
)

# Arrows between rooms that climb all the same, each with its reason; three at most.
CLIMBS: Mapping[tuple[str, str], str] = {}


# The largest value of each figure that `counts` gives.
LIMITS: Mapping[str, int] = {
    "syntax nodes": 540_000,
    "files": 320,
    "rooms": 30,
    "arrows": 210,
    "climbs": 0,
    "circles": 0,
    "modules directly in deploy": 10,
    "files in the largest folder": 26,
    "class names defined twice": 0,
}


class Arrow(NamedTuple):
    """Module `start` imports module `end` in line `line`."""

    start: str
    end: str
    line: int

    @property
    def rooms(self) -> tuple[str, str]:
        """The rooms it leaves and enters."""
        return room(self.start), room(self.end)

    def __str__(self) -> str:
        return f"{self.start}:{self.line} -> {self.end}"


def modules(root: Path) -> dict[str, Path]:
    """Every module of the two packages, by its dotted name; a folder's name is its __init__."""
    found = {}
    for package in ("deploy", "calibrators"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """What a file holds, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def arrows(known: Mapping[str, Path]) -> list[Arrow]:
    """Every import of a known module by another one, wherever in the file it stands."""
    found = []
    for module, path in known.items():
        for node in ast.walk(tree(path)):
            ends = {_module(name, known) for name in _named(node)} - {None, module}
            found += [Arrow(module, str(end), getattr(node, "lineno", 0)) for end in ends]
    return found


def _named(node: ast.AST) -> Iterable[str]:
    """Dotted names that a node imports, or could import later."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        row = re.fullmatch(r"((?:deploy|calibrators)(?:\.\w+)+)(?::\w+)?", node.value)
        return [row[1]] if row else []
    return []


def _module(name: str, known: Mapping[str, Path]) -> str | None:
    """The module that holds a name: `deploy.runtimes.ort` for `deploy.runtimes.ort.OrtSession`."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else None


def room(module: str) -> str:
    """The room that a module stands in: `deploy.feed.images` -> `deploy.feed`."""
    parts = module.split(".")
    return parts[0] if parts[0] != "deploy" else ".".join(parts[:2])


def floor(module: str) -> int | None:
    """The floor of a module's room, 0 at the top; None where it has none."""
    return next((level for level, names in enumerate(FLOORS) if room(module) in names), None)


def climbing(drawn: Iterable[Arrow]) -> list[Arrow]:
    """Arrows to a floor above their own."""
    return [a for a in drawn if _floor(a.end) < _floor(a.start)]


def _floor(module: str) -> int:
    found = floor(module)
    return -1 if found is None else found


def both_ways(drawn: Iterable[Arrow]) -> dict[tuple[str, str], tuple[list[Arrow], list[Arrow]]]:
    """Neighbours that import each other, at every depth, with the arrows of the two directions.

    Neighbours are the children of one folder; a folder's `__init__` counts as one of them.
    """
    between: dict[tuple[str, str], list[Arrow]] = {}
    for arrow in drawn:
        between.setdefault(_neighbours(arrow), []).append(arrow)
    return {
        (a, b): (there, between[b, a])
        for (a, b), there in between.items()
        if a < b and (b, a) in between
    }


def _neighbours(arrow: Arrow) -> tuple[str, str]:
    """The two children of the smallest common folder that an arrow's ends are, or lie in."""
    start, end = (f"{name}.".split(".") for name in arrow[:2])  # an __init__ ends in ""
    shared = next(i for i, (a, b) in enumerate(zip(start, end, strict=False)) if a != b)
    return ".".join(start[: shared + 1]), ".".join(end[: shared + 1])


def circles(drawn: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of names of which each reaches every other along the arrows."""
    ends: dict[str, set[str]] = {}
    for start, end in drawn:
        ends.setdefault(start, set()).add(end)
        ends.setdefault(end, set())
    reach = {name: _reached(name, ends) for name in ends}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in ends if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def _reached(name: str, ends: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(ends[name])
    while left:
        if (at := left.pop()) not in found:
            found.add(at)
            left += ends[at]
    return found


def class_names(known: Mapping[str, Path]) -> dict[str, list[str]]:
    """Every class at the top of a module, by its name: the modules that define it."""
    found: dict[str, list[str]] = {}
    for module, path in known.items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return found


def counts(known: Mapping[str, Path], drawn: Sequence[Arrow]) -> dict[str, int]:
    """The figures that `LIMITS` bounds."""
    between = {a.rooms for a in drawn if a.rooms[0] != a.rooms[1]}
    folders = [path.parent for path in known.values()]
    twice = [name for name, homes in class_names(known).items() if len(homes) > 1]
    return {
        "syntax nodes": sum(1 for path in known.values() for _ in ast.walk(tree(path))),
        "files": len(known),
        "rooms": len({room(module) for module in known}),
        "arrows": len(between),
        "climbs": len({a.rooms for a in climbing(drawn)}),
        "circles": len(circles(between)) + len(circles((a.start, a.end) for a in drawn)),
        "modules directly in deploy": sum(
            path.parent.name == "deploy" and path.parent.parent.name != "deploy"
            for path in known.values()
        ),
        "files in the largest folder": max(folders.count(one) for one in set(folders)),
        "class names defined twice": len(twice),
    }


def figures(known: Mapping[str, Path], drawn: Sequence[Arrow]) -> str:
    """The counts with their limits, then each offender."""
    rooms = {room(module) for module in known}
    between = {a.rooms for a in drawn if a.rooms[0] != a.rooms[1]}
    homeless = sorted(name for name in rooms if floor(name) is None)
    up = climbing(a for a in drawn if floor(a.start) is not None and floor(a.end) is not None)
    lines = [
        *(
            f"{what}: {count} (limit {LIMITS[what]})"
            for what, count in counts(known, drawn).items()
        ),
        *(f"without a floor: {name}" for name in homeless),
        *(f"climbs: {arrow}" for arrow in up),
        *(f"both ways: {a} and {b}" for a, b in both_ways(drawn)),
        *(f"circle of rooms: {', '.join(group)}" for group in circles(between)),
        *(
            f"circle of modules: {', '.join(group)}"
            for group in circles((a.start, a.end) for a in drawn)
        ),
        *(
            f"defined twice: {name} in {', '.join(homes)}"
            for name, homes in class_names(known).items()
            if len(homes) > 1
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description="The figures of the house.")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    known = modules(parser.parse_args().checkout)
    print(figures(known, arrows(known)))


if __name__ == "__main__":
    main()
