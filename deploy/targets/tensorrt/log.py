"""TensorRT's log: kept whole, and its "missing scale" warnings sorted by what they mean.

In an int8 build TensorRT warns of every tensor without a scale, most of which never had a use for
one (constants, shapes, indices). The few that matter sit on the layers that were to run in int8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.graph.index import Graph
from deploy.graph.plan import TENSORRT, analyse

if TYPE_CHECKING:
    import onnx
    import tensorrt as trt

_MISSING = re.compile(r"Missing scale and zero-point for tensor (.+?), expect fall ?back")
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
    """What TensorRT said: every message up to a severity, and the errors once more."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.lines: list[str] = []
        self.errors: list[str] = []

    def keep(self, severity: int, error: int, message: str) -> None:
        """File one message; TensorRT's severities grow with harmlessness."""
        if severity <= error:
            self.errors.append(message)
        if severity <= self.least:
            self.lines.append(message)


def make_logger(*, verbose: bool = False) -> tuple[KeepingLogger, trt.ILogger]:
    """A `trt.ILogger` that prints nothing, and the `KeepingLogger` behind it."""
    import tensorrt as trt

    levels = trt.ILogger.Severity
    kept = KeepingLogger(int(levels.VERBOSE if verbose else levels.INFO))

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            kept.keep(int(severity), int(levels.ERROR), msg)

    return kept, Logger()
