"""The size and the rooms of the program, with limits; import-linter holds its floors and circles.

A room is a folder or a file at the first level of `deploy`, and `calibrators` as a whole. What may
import what stands in setup.cfg, under `importlinter`: each room from those below it, and no circle
at any depth. `tests/test_layout.py` holds both; run as a program, this prints the figures:

    python scripts/house.py [CHECKOUT]
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# The largest value of each figure that `counts` gives.
LIMITS: Mapping[str, int] = {
    "syntax nodes": 508_000,
    "files": 330,
    "rooms": 30,
    "class names defined twice": 0,
}


def modules(root: Path) -> dict[str, Path]:
    """Return every module of the product by its dotted name; a folder's name is its __init__."""
    path_by_module = {}
    for package in ("calib8", "deploy", "calibrators"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            path_by_module[".".join(parts)] = path
    return path_by_module


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def room(module: str) -> str:
    """Return the room of a module: `deploy.feed.images` -> `deploy.feed`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "deploy" else parts[0]


def repeated_class_names(path_by_module: Mapping[str, Path]) -> list[str]:
    """Return the names of classes that are defined at the top of several modules."""
    definitions: Counter[str] = Counter()
    for path in path_by_module.values():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                definitions[node.name] += 1
    return [name for name, count in definitions.items() if count > 1]


def counts(path_by_module: Mapping[str, Path]) -> dict[str, int]:
    """Return the figures that `LIMITS` bounds."""
    return {
        "syntax nodes": sum(1 for path in path_by_module.values() for _ in ast.walk(tree(path))),
        "files": len(path_by_module),
        "rooms": len({room(module) for module in path_by_module}),
        "class names defined twice": len(repeated_class_names(path_by_module)),
    }


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description="The figures of the house.")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    path_by_module = modules(parser.parse_args().checkout)
    for figure, count in counts(path_by_module).items():
        print(f"{figure}: {count} (limit {LIMITS[figure]})")
    for name in repeated_class_names(path_by_module):
        print(f"defined twice: {name}")


if __name__ == "__main__":
    main()
