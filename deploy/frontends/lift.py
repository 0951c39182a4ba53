"""Opset 7 to 12 lifted to 13, the first in which DequantizeLinear has a scale per channel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from deploy.errors import first_line
from deploy.frontends.checks import opset_of
from deploy.graph.index import all_nodes, subgraphs

if TYPE_CHECKING:
    import onnx

TARGET_OPSET = 13

# Operators that mean the same thing, with the same inputs and attributes, in all of opset 7 to
# 13 although their schema got a new number: only types were added.
_SAME_MEANING = """
    Abs Add And ArgMax ArgMin AveragePool Cast Ceil Compress Concat Constant ConstantOfShape
    Conv ConvTranspose Cos DepthToSpace Div Elu Equal Erf Exp Expand Flatten Floor GRU Gather
    GatherElements Gemm GlobalAveragePool GlobalMaxPool Greater HardSigmoid Identity If
    InstanceNormalization IsNaN LRN LSTM LeakyRelu Less Log Loop MatMul Max MaxPool Mean Min Mod
    Mul Neg NonZero Not OneHot Or PRelu Pow Range Reciprocal ReduceL1 ReduceL2 ReduceMax
    ReduceMean ReduceMin ReduceProd Relu Reshape Shape Sigmoid Sign Sin Size SpaceToDepth Sqrt
    Sub Sum Tan Tanh Tile Transpose Where Xor
"""
# The same for operators that changed their meaning, and then no more up to opset 13.
_SAME_SINCE = {
    "BatchNormalization": 9,
    "Clip": 11,
    "Pad": 11,
    "Resize": 11,
    "Slice": 10,
    "TopK": 11,
}


# From 13 on: operators that got another form, or meaning, in the opset that is told.
_OTHER_FORM = {
    "DFT": 20, "GridSample": 20, "GroupNormalization": 21, "RoiAlign": 16, "Split": 18,
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
         "ReduceMin", "ReduceProd", "ReduceSumSquare"), 18,
    ),
}  # fmt: skip


def lift(
    model: onnx.ModelProto, behind: Sequence[onnx.NodeProto] = ()
) -> tuple[onnx.ModelProto, str | None]:
    """The model at opset 13 or newer where that can be done, and a note on what happened.

    Onnx's converter does it where it can. It does not go into subgraphs and knows no custom
    domain: then, and where it fails, the number alone is raised if every operator in the model
    means the same in opset 13; else the opset stays, and weights get one scale per tensor.

    Args:
        model: the model.
        behind: nodes that were cut off it and will be put back as they are.
    """
    opset = opset_of(model)
    if opset >= TARGET_OPSET:
        return model, None
    done = f"Lifted from opset {opset} to {TARGET_OPSET}, which per-channel scales need."
    fixed = other_form(behind, opset, TARGET_OPSET)
    reason = "" if fixed else why_not_converted(model)
    if not (reason or fixed):
        try:
            return _converted(model), done
        except Exception as error:  # C++ behind a binding: no error class of its own
            reason = f"onnx's version converter says: {first_line(error)}"
    changed = fixed or other_form(model.graph.node, opset, TARGET_OPSET)
    if changed:
        reason = reason or "nodes that onnxruntime does not know keep what is behind them as it is"
        return model, (
            f"Left at opset {opset}, so weights get one scale per tensor: {reason}, and "
            f"{', '.join(changed)} changed on the way to opset {TARGET_OPSET}."
        )
    set_opset(model, TARGET_OPSET)
    return model, done


def why_not_converted(model: onnx.ModelProto) -> str:
    """What onnx's version converter does not know of a model; "" where it knows all."""
    nodes = list(all_nodes(model.graph))
    custom = sorted({node.domain for node in nodes} - {"", "ai.onnx"})
    if custom:
        return f"it has operators of the domain {', '.join(custom)}"
    if any(True for node in nodes for _ in subgraphs(node)):
        return "it has subgraphs"
    return ""


def _converted(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnx import version_converter

    lifted = version_converter.convert_version(model, TARGET_OPSET)
    before = {name for node in model.graph.node for name in node.output if name}
    after = {name for node in lifted.graph.node for name in node.output if name}
    missing = before - after
    if missing:
        raise ValueError(f"tensor '{min(missing)}' lost its name")
    return lifted


def other_form(nodes: Iterable[onnx.NodeProto], own: int, opset: int) -> list[str]:
    """Operators of the default domain in these nodes that may be another thing in a newer opset."""
    from onnx import defs

    same_meaning = set(_SAME_MEANING.split())

    def same(op_type: str) -> bool:
        if own < _OTHER_FORM.get(op_type, 0) <= opset:
            return False
        if op_type in same_meaning or own >= _SAME_SINCE.get(op_type, TARGET_OPSET):
            return True
        try:
            old = defs.get_schema(op_type, own, "").since_version
            return old == defs.get_schema(op_type, TARGET_OPSET, "").since_version
        except defs.SchemaError:
            return not defs.has(op_type)  # not ONNX's at all

    whole = (inner for node in nodes for inner in (node, *_inside(node)))
    used = {node.op_type for node in whole if node.domain in ("", "ai.onnx")}
    return sorted(op_type for op_type in used if not same(op_type))


def _inside(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    for body in subgraphs(node):
        yield from all_nodes(body)


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Let the model import this version of the default operator set."""
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = version
