"""float16 models: tensors that are float16 in the user's file stay float16, as in AMCT.

::

    file         x f16 ------------------> Conv ------------------> y f16
    deploy       x f16 -> AscendQuant ---> Conv -> AscendDequant -> y f16     dtype 1
    fake-quant   x f16 -> Cast, fakequant -> Conv -> Mul, Cast ---> y f16

Calibration and the writing of models use the float32 form (`deploy.frontends.lift`), whose tensors
keep their names; the types are restored by name. AMCT's PyTorch package writes AscendDequant with
dtype 0 (float32), because it looks the dtype up under a wrong name; 1 is meant.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.calibration.observation import CalibrationSubject
from deploy.errors import ExportError
from deploy.graph.edit import (
    claim_name,
    copy_message,
    infer_types,
    rebuild,
    rename_reads,
    rename_tensors,
    update_tensors,
)
from deploy.graph.index import Graph, attributes, iter_reads, opset_of, subgraphs
from deploy.graph.lowering import find_schema, is_standard

_FLOAT, _HALF = 1, 10  # onnx.TensorProto
_MOST = 65504.0  # largest float16 number


def find_float16_tensors(subject: CalibrationSubject) -> frozenset[str]:
    """Return the tensors of `subject.model` that are float16 in the model's file, by name.

    Empty if there is no file, or if the model has subgraphs or nodes of other runtimes.
    """
    if not subject.loaded.was_float16 or subject.loaded.cut_off is not None:
        return frozenset()
    original = subject.original
    if original is None or any(list(subgraphs(node)) for node in subject.model.graph.node):
        return frozenset()
    try:
        typed = infer_types(original)
    except Exception:  # C++ errors of any type; then the written models stay float32
        return frozenset()
    declared = (*typed.graph.input, *typed.graph.output, *typed.graph.value_info)
    half = {v.name for v in declared if v.type.tensor_type.elem_type == _HALF}
    half |= {t.name for t in typed.graph.initializer if t.data_type == _HALF}
    casts = (node for node in subject.model.graph.node if _is_cast(node, _HALF))  # at outputs
    return frozenset(half | {node.input[0] for node in casts if node.output[0] in half})


def to_float16(
    model: onnx.ModelProto, halves: Collection[str], *, exact: Collection[str] = ()
) -> onnx.ModelProto:
    """Return a copy whose tensors in `halves` are float16, except for integers and their scales.

    `exact`: nodes that compute in float32 whatever the type of their output.

    Raises:
        ExportError: a constant exceeds float16.
    """
    out = copy_message(model)
    _Narrowing(out, halves, exact).run()
    return out


class _Narrowing:
    def __init__(
        self, model: onnx.ModelProto, halves: Collection[str], exact: Collection[str]
    ) -> None:
        self.graph, self.index = model.graph, Graph(model)
        self.opset = opset_of(model)
        self.exact = exact
        self.wanted = halves
        # float16 tensors so far
        self.half = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == _HALF}
        self.twins: dict[tuple[str, int], str] = {}  # (tensor, type) -> its cast to that type
        self.constants: dict[str, onnx.TensorProto] = {}
        self.names = {*self.index.producer, *self.index.constants, *self.index.inputs}
        self.nodes = {node.name for node in model.graph.node}

    def run(self) -> None:
        """Set the types of all nodes' tensors, then drop unused casts and constants."""
        nodes = [new for node in self.graph.node for new in self.node(node)]
        # drop unused Casts, and those of float16, whose inputs are renamed
        idle = [n for n in nodes if _is_cast(n, _HALF) and n.input[0] in self.half]
        renamed = {n.input[0]: n.output[0] for n in idle if n.input[0] in self.index.producer}
        rest = [n for n in nodes if not (_is_cast(n, _HALF) and n.input[0] in renamed)]
        rename_tensors(rest, renamed)
        read = {name for node in rest for name in iter_reads(node)} | self.index.outputs
        nodes = [n for n in rest if not (n.op_type == "Cast" and n.output[0] not in read)]
        # restore the names of constants that are read only in float16
        read = {name for node in nodes for name in iter_reads(node)}
        originals = {
            twin: name
            for (name, _), twin in self.twins.items()
            if twin in self.constants and name in self.index.initializers and name not in read
        }
        rename_reads(nodes, originals)
        for twin, name in originals.items():
            self.constants[name] = self.constants.pop(twin)
            self.constants[name].name = name
        update_tensors(self.graph.initializer, self.constants)
        rebuild(self.graph, nodes)

    def node(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a node with the casts that it needs."""
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
        """Restore the type of a tensor_quantize input."""
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
        known = find_schema(node.op_type, self.opset)
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
                node.output[place] = claim_name(f"{name}.float32", self.names)
                after.append(self.to(node.output[place], name, _HALF))
        yield node
        yield from after

    def is_half(self, name: str) -> bool:
        """Whether a tensor is float16 now, or a constant is float16 in the file."""
        return name in self.half or (name in self.index.constants and name in self.wanted)

    def give(
        self, node: onnx.NodeProto, place: int, name: str, dtype: int
    ) -> Iterator[onnx.NodeProto]:
        """Let a node's input read a tensor in this type; yield the Cast if it is new."""
        if not name or (dtype == _HALF and name in self.half):
            return
        constant = self.index.constants.get(name)
        if constant is not None and (dtype == _FLOAT or constant.data_type != _FLOAT):
            return  # all float constants are float32 until float16 is needed
        key = (name, dtype)
        if key not in self.twins:
            twin = claim_name(f"{name}.float{16 if dtype == _HALF else 32}", self.names)
            self.twins[key] = twin
            if constant is None:
                yield self.to(name, twin, dtype)
            else:
                values = numpy_helper.to_array(constant)
                if (largest := np.abs(values).max(initial=0)) > _MOST:
                    raise ExportError(
                        f"a float16 model's constants must be within {_MOST:g}, got {largest:g} in"
                        f" {constant.name!r}; give the model in float32"
                    )
                self.constants[twin] = numpy_helper.from_array(values.astype(np.float16), twin)
        node.input[place] = self.twins[key]

    def to(self, start: str, end: str, dtype: int) -> onnx.NodeProto:
        """Return a Cast, named after its output; a Cast of the file may already have that name."""
        name = claim_name(end, self.nodes)
        return helper.make_node("Cast", [start], [end], name=name, to=dtype)


def _formal(slots: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Return the schema's type (variable) of each of `count` tensors; the last slot may repeat."""
    kinds = [slot.type_str for slot in slots]
    return [kinds[min(place, len(kinds) - 1)] for place in range(count)]


def _set_dtype(node: onnx.NodeProto) -> None:
    """Set the output type of an Ascend operator to float16."""
    for attribute in node.attribute:
        if attribute.name == "dtype":
            attribute.i = 1


def _is_cast(node: onnx.NodeProto, dtype: int) -> bool:
    return node.op_type == "Cast" and attributes(node)["to"] == dtype
