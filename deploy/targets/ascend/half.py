"""float16 layers, as AMCT leaves them: what the file computes in float16 stays in float16.

::

    file         x f16 ------------------> Conv ------------------> y f16
    deploy       x f16 -> AscendQuant ---> Conv -> AscendDequant -> y f16     dtype 1
    fake-quant   x f16 -> Cast, fakequant -> Conv -> Mul, Cast ---> y f16

Scales are measured, and the models made, on the float32 form (`deploy.frontends.lift`), whose
tensors keep their names; by those the types come back. AMCT's PyTorch package looks the dtype of
AscendDequant up by a name it does not know, and so writes 0 (float32) there; 1 is meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.errors import ExportError
from deploy.graph.edit import copied, rebuild, rename_reads, unused, update
from deploy.graph.index import Graph, attributes, reads, subgraphs
from deploy.graph.lowering import is_standard, schema

if TYPE_CHECKING:
    from deploy.calibration.observation import Subject

_FLOAT, _HALF = 1, 10  # onnx.TensorProto
_MOST = 65504.0  # of float16


def halves_of(subject: Subject) -> frozenset[str]:
    """Names of the tensors that the model's file holds in float16, as `subject.model` has them.

    None where no file is at hand, or where nodes with bodies, or of other runtimes, read tensors.
    """
    if not subject.loaded.widened or subject.loaded.behind is not None:
        return frozenset()
    original = subject.original
    if original is None or any(list(subgraphs(node)) for node in subject.model.graph.node):
        return frozenset()
    try:
        typed = onnx.shape_inference.infer_shapes(original)
    except Exception:  # C++ behind a binding; then the files stay in float32
        return frozenset()
    declared = (*typed.graph.input, *typed.graph.output, *typed.graph.value_info)
    found = {v.name for v in declared if v.type.tensor_type.elem_type == _HALF}
    found |= {t.name for t in typed.graph.initializer if t.data_type == _HALF}
    casts = (node for node in subject.model.graph.node if _is_cast(node, _HALF))  # at the ends
    return frozenset(found | {node.input[0] for node in casts if node.output[0] in found})


def narrowed(
    model: onnx.ModelProto, halves: Collection[str], *, exact: Collection[str] = ()
) -> onnx.ModelProto:
    """A copy that computes in float16 what `halves` names, but for integers and their scales.

    Args:
        model: deploy or fake-quant model in float32.
        halves: from `halves_of`.
        exact: nodes that compute in float32 whatever their output is.

    Raises:
        ExportError: a constant that float16 does not hold.
    """
    out = copied(model)
    _Narrowing(out, halves, exact).run()
    return out


class _Narrowing:
    def __init__(
        self, model: onnx.ModelProto, halves: Collection[str], exact: Collection[str]
    ) -> None:
        self.graph, self.index = model.graph, Graph(model)
        self.opset = max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        self.exact = exact
        self.wanted = halves
        self.half = {
            v.name for v in model.graph.input if v.type.tensor_type.elem_type == _HALF
        }  # made so far
        self.twins: dict[tuple[str, int], str] = {}  # (tensor, type) -> the same in that type
        self.constants: dict[str, onnx.TensorProto] = {}
        self.names = {*self.index.producer, *self.index.constants, *self.index.inputs}
        self.nodes = {node.name for node in model.graph.node}

    def run(self) -> None:
        """Type every node's tensors, then drop casts and constants that nothing reads."""
        nodes = [new for node in self.graph.node for new in self.node(node)]
        nodes = self.without_idle(nodes)
        self.rename_constants(nodes)
        update(self.graph.initializer, self.constants)
        rebuild(self.graph, nodes)

    def node(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """A node with the casts that it needs."""
        if node.op_type == "AscendDequant" and node.output[0] in self.wanted:
            _set_dtype(node)
            self.half.update(node.output)
        elif node.op_type == "AscendAntiQuant":
            self.back(node)
        elif node.op_type == "AscendQuant":
            node.input[0] = self.twins.get((node.input[0], _HALF), node.input[0])
        elif node.op_type == "Cast":
            self.cast(node)
        elif is_standard(node):
            yield from self.standard(node)
            return
        yield node

    def back(self, node: onnx.NodeProto) -> None:
        """An input of an Add or MaxPool has the type again that it had before."""
        if self.index.producer[node.input[0]].input[0] in self.half:
            _set_dtype(node)
            self.half.update(node.output)

    def cast(self, node: onnx.NodeProto) -> None:
        start, end = node.input[0], node.output[0]
        if attributes(node)["to"] == _HALF:
            self.half.add(end)
        elif attributes(node)["to"] == _FLOAT and start in self.half:
            self.twins[end, _HALF] = start

    def standard(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        known = schema(node.op_type, self.opset)
        assert known is not None
        inputs = list(zip(_formal(known.inputs, len(node.input)), node.input, strict=True))
        outputs = list(zip(_formal(known.outputs, len(node.output)), node.output, strict=True))
        read = {kind for kind, _ in inputs}
        half = {kind for kind, name in outputs if name in self.wanted and kind in read}
        if not any(kind in read for kind, _ in outputs):  # such as a comparison or a shape
            half = {kind for kind, name in inputs if self.is_half(name)}
        half = set() if node.name in self.exact else half
        for place, (kind, name) in enumerate(inputs):
            if kind in half:
                yield from self.give(node, place, name, _HALF)
            elif self.is_half(name):
                yield from self.give(node, place, name, _FLOAT)
        after = []
        for place, (kind, name) in enumerate(outputs):
            if name not in self.wanted:
                continue
            self.half.add(name)
            if kind not in half:
                node.output[place] = self.own(f"{name}.float32")
                after.append(self.to(node.output[place], name, _HALF))
        yield node
        yield from after

    def is_half(self, name: str) -> bool:
        """Whether a tensor is in float16 by now; a constant, whether the file has it so."""
        return name in self.half or (name in self.index.constants and name in self.wanted)

    def give(
        self, node: onnx.NodeProto, place: int, name: str, dtype: int
    ) -> Iterator[onnx.NodeProto]:
        """Let an input read a tensor in a type."""
        if not name or (dtype == _HALF and name in self.half):
            return
        constant = self.index.constants.get(name)
        if constant is not None and (dtype == _FLOAT or constant.data_type != _FLOAT):
            return  # constants of the float32 form are in float32 until they are asked for
        key = (name, dtype)
        if key not in self.twins:
            made = self.own(f"{name}.float{16 if dtype == _HALF else 32}")
            self.twins[key] = made
            if constant is None:
                yield self.to(name, made, dtype)
            else:
                self.constants[made] = _narrow(constant, made)
        node.input[place] = self.twins[key]

    def without_idle(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Let what a Cast of float16 to float16 reads have the name of what it gives."""
        idle = [n for n in nodes if _is_cast(n, _HALF) and n.input[0] in self.half]
        named = {n.input[0]: n.output[0] for n in idle if n.input[0] in self.index.producer}
        kept = [n for n in nodes if not (_is_cast(n, _HALF) and n.input[0] in named)]
        rename_reads(kept, named)
        for node in kept:
            for place, name in enumerate(node.output):
                node.output[place] = named.get(name, name)
        read = {name for node in kept for name in reads(node)} | self.index.outputs
        return [n for n in kept if not (n.op_type == "Cast" and n.output[0] not in read)]

    def rename_constants(self, nodes: list[onnx.NodeProto]) -> None:
        """Let constants that are read in float16 alone have their own names again."""
        read = {name for node in nodes for name in reads(node)}
        back = {
            made: name
            for (name, _), made in self.twins.items()
            if made in self.constants and name in self.index.initializers and name not in read
        }
        rename_reads(nodes, back)
        for made, name in back.items():
            self.constants[name] = self.constants.pop(made)
            self.constants[name].name = name

    def to(self, start: str, end: str, dtype: int) -> onnx.NodeProto:
        """A Cast, named after what it gives; a converter's may be named after what it reads."""
        name = unused(end, self.nodes)
        self.nodes.add(name)
        return helper.make_node("Cast", [start], [end], name=name, to=dtype)

    def own(self, wanted: str) -> str:
        """A name that no tensor has."""
        name = unused(wanted, self.names)
        self.names.add(name)
        return name


def _formal(slots: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Type variable or type of each of `count` tensors; the last slot may stand for several."""
    kinds = [slot.type_str for slot in slots]
    return [kinds[min(place, len(kinds) - 1)] for place in range(count)]


def _set_dtype(node: onnx.NodeProto) -> None:
    """Have an operator of Ascend's give float16."""
    for attribute in node.attribute:
        if attribute.name == "dtype":
            attribute.i = 1


def _is_cast(node: onnx.NodeProto, dtype: int) -> bool:
    return node.op_type == "Cast" and attributes(node)["to"] == dtype


def _narrow(constant: onnx.TensorProto, name: str) -> onnx.TensorProto:
    values = numpy_helper.to_array(constant)
    if np.abs(values).max(initial=0) > _MOST:
        raise ExportError(
            f"a float16 model's constants must be within {_MOST:g}, got {np.abs(values).max():g} in"
            f" {constant.name!r}; give the model in float32"
        )
    return numpy_helper.from_array(values.astype(np.float16), name)
