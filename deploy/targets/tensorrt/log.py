"""TensorRT's log: kept whole, and its "missing scale" warnings sorted by what they mean.

In an int8 build TensorRT warns of every tensor without a scale, most of which never had a use for
one (constants, shapes, indices). The few that matter sit on the layers that were to run in int8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse

if TYPE_CHECKING:
    import onnx
    import tensorrt as trt

_MISSING = re.compile(r"Missing scale and zero-point for tensor (.+?), expect fall ?back")
_LAST = 3  # warnings that an error message quotes where TensorRT logged no error
_MADE_INSIDE = ("(Unnamed Layer* ", "(Unnamed ITensor* ", "ONNXTRT_")


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor that TensorRT found without a scale: whether int8 is lost there, and why (not)."""

    tensor: str
    harmful: bool
    reason: str


def missing_tensors(lines: Iterable[str]) -> list[str]:
    """Names in "Missing scale and zero-point for tensor ..." lines, each once, in order."""
    found = (match[1] for line in lines if (match := _MISSING.search(line)))
    return list(dict.fromkeys(found))


def sort_missing(names: Iterable[str], model: onnx.ModelProto) -> list[Missing]:
    """Judge each tensor by its place in the model; harmful ones first.

    Args:
        names: of `missing_tensors`.
        model: cleaned float model that was built.
    """
    graph = Graph(model)
    plan = analyse(model, TENSORRT)
    read = {pair.tensor for pair in plan.pairs}
    int8 = set(plan.int8_nodes)
    made = {out: n for n in graph.nodes for out in n.output if n.name in int8}
    judged = [_judge(name, graph, read, made) for name in names]
    return sorted(judged, key=lambda item: not item.harmful)


def _judge(
    name: str, graph: Graph, read: Collection[str], made: dict[str, onnx.NodeProto]
) -> Missing:
    constant = name.removesuffix("_output")
    if name in graph.initializers or constant in graph.initializers or "[Constant]" in name:
        return Missing(name, False, "a constant: TensorRT reads its range from its values")
    if name in read:
        return Missing(name, True, "an int8 layer reads it: that layer falls back to float")
    if name in made and name in graph.outputs:
        return Missing(name, False, "an output of the model, which stays float")
    if name in made and graph.tail(made[name]) == name:
        return Missing(name, True, f"{made[name].op_type} {made[name].name} cannot write int8")
    if name in made:
        return Missing(name, False, "inside a fused layer, where no int8 value exists")
    if name in graph.dtypes and not graph.is_float(name):
        return Missing(name, False, "a shape or an index, which is no float at all")
    if name.startswith(_MADE_INSIDE) or not (name in graph.producer or name in graph.inputs):
        return Missing(name, False, "made by TensorRT's parser inside a node")
    return Missing(name, False, "no layer that gains from int8 reads or writes it")


class KeepingLogger:
    """What TensorRT said: every message up to a severity, errors and warnings once more."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def keep(self, severity: int, error: int, message: str) -> None:
        """File one message; TensorRT's severities grow with harmlessness."""
        if severity <= error:
            self.errors.append(message)
        elif severity == error + 1:
            self.warnings.append(message)
        if severity <= self.least:
            self.lines.append(message)

    def words(self) -> str:
        """For an error message: TensorRT's errors, or else the last that it said."""
        chosen = self.errors or self.warnings[-_LAST:] or self.lines[-1:]
        return " | ".join(chosen) or "its log says nothing"


_listeners: list[KeepingLogger] = []


@cache
def process_logger() -> trt.ILogger:
    """The one logger of this process; prints nothing, and tells all who are `listening`.

    TensorRT keeps the first logger it gets for as long as any of its objects lives, and its plugins
    keep a bare pointer to the last. With a logger a build, messages would go to an earlier one, or
    to one that is gone.
    """
    import tensorrt as trt

    error = int(trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            for kept in tuple(_listeners):
                kept.keep(int(severity), error, msg)

    return Logger()


@contextmanager
def listening(*, verbose: bool = False) -> Iterator[KeepingLogger]:
    """Keep what TensorRT says meanwhile, whichever thread or object makes it speak."""
    import tensorrt as trt

    levels = trt.ILogger.Severity
    kept = KeepingLogger(int(levels.VERBOSE if verbose else levels.INFO))
    _listeners.append(kept)
    try:
        yield kept
    finally:
        _listeners.remove(kept)
