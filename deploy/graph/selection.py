"""Which nodes a user means: names, shell patterns, types of operators, files of these.

::

    /model.22/dfl/conv/Conv     the node of this name
    /model.22/*                 every node whose name fits, as a shell matches (* crosses a slash)
    op:Sigmoid  op:Reduce*      every node of this type
    @float.txt                  one of the above a line; blank lines and # comments are passed over

A name that is a node's is that node, whatever else it could be read as: `conv[0]` is the node
`conv[0]` where there is one, and the pattern for `conv0` where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ConfigError, did_you_mean
from deploy.files.reading import read_text

if TYPE_CHECKING:
    import onnx

Named = Sequence[tuple[str, str]]  # (name, type) of every node or module

TYPE, FILE = "op:", "@"


def matching(model: onnx.ModelProto, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of the nodes of the main graph that any of the patterns means, in the model's order.

    Raises:
        ConfigError: a pattern that means no node, or a file that cannot be read.
    """
    return select([(node.name, node.op_type) for node in model.graph.node if node.name], patterns)


def select(known: Named, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names among `known` that any of the patterns means, in the order of `known`.

    Raises:
        ConfigError: a pattern that means nothing, or a file that cannot be read.
    """
    names = {name for name, _ in known}
    chosen: set[str] = set()
    for pattern in patterns:
        for one in [pattern] if pattern in names else _lines(pattern):
            chosen |= _chosen(known, names, one)
    return tuple(dict.fromkeys(name for name, _ in known if name in chosen))


def _chosen(known: Named, names: set[str], pattern: str) -> set[str]:
    """The names that one pattern, which is no file, means."""
    if pattern in names:
        return {pattern}
    if pattern.startswith(TYPE):
        wanted = pattern.removeprefix(TYPE)
        found = {name for name, kind in known if fnmatchcase(kind, wanted)}
        hint = _near(wanted, [kind for _, kind in known], TYPE)
    else:
        found = {name for name in names if fnmatchcase(name, pattern)}
        hint = _near(pattern, [name for name, _ in known], "")
    if not found:
        raise ConfigError(f"what to keep in float must be in the model, got {pattern!r}; {hint}")
    return found


def _near(wanted: str, known: Sequence[str], before: str) -> str:
    known = [before + name for name in dict.fromkeys(known)]
    return did_you_mean(before + wanted, known, "`calib8 inspect --all` lists names and types")


def _lines(pattern: str) -> list[str]:
    """The pattern itself, or those of the file that it names."""
    if not pattern.startswith(FILE):
        return [pattern]
    path = Path(pattern.removeprefix(FILE))
    text = read_text(path, what="a text file of nodes to keep in float", error=ConfigError)
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{path} must name at least one node to keep in float, got none")
    return found
