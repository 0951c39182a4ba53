"""A model at an older operator set: what an old parser reads, computing what it computed before.

A node whose operator is the same in both sets stays. One that differs is written in the old form
(`deploy.graph.oldforms`), one that the old set does not have as nodes that it has
(`deploy.graph.primitives`)::

    ReduceMean(x, axes) -> y            ==>   ReduceMean(x), axes in an attribute -> y
    LayerNormalization(x, s, b) -> y    ==>   ReduceMean, Sub, Pow, ... Mul, Add -> y

Every change of an operator between opset 13 and 25 was looked through: what is not handled here
changed in types only, which shape inference checks at the end, or by an attribute, which may go
where it has its default value.

onnx's own version converter does not serve: downwards it refuses any Split or Pad, knows no
operator that has no older version, and leaves a Mish of opset 18 in a model of 17 (onnx 1.23).

Source: the schemas of ONNX, and their changelog (docs/Changelog.md of onnx).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.errors import ExportError, first_line
from deploy.graph.edit import copied, replace_nodes
from deploy.graph.index import all_nodes, subgraphs
from deploy.graph.oldforms import OLD_FORMS, Cannot, Places, same_attributes
from deploy.graph.primitives import primitives

if TYPE_CHECKING:
    import onnx
    from onnx import defs

OLDEST, NEWEST = 13, 25  # between these every change of an operator is known here
_DEFAULT = ("", "ai.onnx")
# Operator -> the opset from which the same node means something else.
_OTHER_MEANING = {"DFT": 20, "GroupNormalization": 21, "RoiAlign": 16}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A model of an older operator set.

    Attributes:
        model: the model.
        rewritten: operator -> how many of its nodes were written otherwise.
    """

    model: onnx.ModelProto
    rewritten: Mapping[str, int]


def lowered(
    model: onnx.ModelProto, *, opset: int, without: Collection[str] = frozenset()
) -> Lowered:
    """The model in `opset` at most; itself where it is that already.

    Tensors keep their names, and so does of each node that is written as several the last one.
    Nodes that ONNX does not know are kept as they are.

    Args:
        model: of opset 13 to 25.
        opset: 13 or newer.
        without: operators that the model may not have although the opset does.

    Raises:
        ExportError: a node that cannot be written so; says which, and why.
    """
    from onnx import shape_inference

    own = _opset(model)
    if own <= opset and not any(node.op_type in without for node in _standard(model)):
        return Lowered(model, {})
    target = min(own, opset)
    if not OLDEST <= target <= own <= NEWEST:
        raise ExportError(
            f"a model is lowered between opset {OLDEST} and {NEWEST}, got {own} for {opset};"
            f" export it with opset {opset}"
        )
    made = shape_inference.infer_shapes(model, data_prop=True)
    work = _Lowering(without)
    work.graph(made.graph, Places(own, target))
    del made.graph.value_info[:]
    for entry in made.opset_import:
        if entry.domain in _DEFAULT:
            entry.version = target
    made.ir_version = min(made.ir_version, _ir_version(made))
    _check(made)
    return Lowered(made, dict(sorted(work.rewritten.items())))


class _Lowering:
    """One model being lowered."""

    def __init__(self, without: Collection[str]) -> None:
        self.without = without
        self.rewritten: Counter[str] = Counter()

    def graph(self, graph: onnx.GraphProto, around: Places) -> None:
        """Lower the nodes of a graph, and of the graphs in them."""
        places = around.inside(graph)
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for body in subgraphs(node):
                self.graph(body, places)
            nodes += self._node(node, places)
        replace_nodes(graph, nodes)

    def _node(self, node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
        if not is_standard(node):
            return [node]
        try:
            made = self._forms(node, places)
        except Cannot as error:
            raise ExportError(
                f"every node must have a form in opset {places.opset} that the parser reads,"
                f" got {node.op_type} '{node.name}', which has none here: {error}; export the model"
                f" with opset {places.opset} or with other operators"
            ) from error
        if [one.op_type for one in made] != [node.op_type] or made[-1] != node:
            self.rewritten[node.op_type] += 1
        return made

    def _forms(self, node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
        own = schema(node.op_type, places.own)
        old = schema(node.op_type, places.opset)
        if old is None or node.op_type in self.without or _other_meaning(node.op_type, places):
            return primitives(node, places)
        if own is None or own.since_version == old.since_version:
            return [node]
        form = OLD_FORMS.get(node.op_type)
        made = [copied(node)] if form is None else form(copied(node), places)
        if made[-1].op_type == node.op_type:
            same_attributes(made[-1], own, old)
        return made


def _other_meaning(op_type: str, places: Places) -> bool:
    since = _OTHER_MEANING.get(op_type, OLDEST)
    return places.opset < since <= places.own


def is_standard(node: onnx.NodeProto) -> bool:
    """Whether ONNX has the operator, in some opset."""
    from onnx import defs

    return node.domain in _DEFAULT and bool(defs.has(node.op_type))


def schema(op_type: str, opset: int) -> defs.OpSchema | None:
    """What ONNX says of an operator in an opset; None where it does not have it."""
    from onnx import defs

    try:
        return defs.get_schema(op_type, opset, "")
    except defs.SchemaError:
        return None


def _standard(model: onnx.ModelProto) -> Iterable[onnx.NodeProto]:
    return (node for node in all_nodes(model.graph) if node.domain in _DEFAULT)


def _opset(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in _DEFAULT), default=0)


def _ir_version(model: onnx.ModelProto) -> int:
    """The first that came with an operator set of the model; one of no standard domain has none."""
    from onnx import helper

    known = [o for o in model.opset_import if (o.domain or "ai.onnx") in ("ai.onnx", "ai.onnx.ml")]
    return int(helper.find_min_ir_version_for(known))


def _check(model: onnx.ModelProto) -> None:
    """Let ONNX judge types and shapes, up to the nodes that it does not know."""
    from onnx import shape_inference

    part = copied(model)
    unknown: set[str] = set()
    kept = []
    for node in part.graph.node:
        if is_standard(node) and not unknown.intersection(node.input):
            kept.append(node)
        else:
            unknown.update(node.output)
    replace_nodes(part.graph, kept)
    for at in reversed(range(len(part.graph.output))):
        if part.graph.output[at].name in unknown:
            del part.graph.output[at]
    try:
        shape_inference.infer_shapes(part, check_type=True, strict_mode=True)
    except Exception as error:  # C++ behind a binding: no error class of its own
        raise ExportError(
            f"every node must have a form in opset {_opset(model)}, got: {first_line(error)};"
            f" export the model with opset {_opset(model)}"
        ) from error
