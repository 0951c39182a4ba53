"""Hard-Sigmoid gates: found by their structure, and what they are in int8.

A gate multiplies a tensor by a Hard-Sigmoid of itself (Hard-Swish) or of another one
(squeeze-excite). Exporters write it in many ways, which all compute::

    y = factor * gain * clip(source + shift, 0, top) + offset

    HardSwish(x)                       x * clip(x + 3, 0, 6) / 6
    x * HardSigmoid(g, alpha, beta)    x * alpha * clip(g + beta / alpha, 0, 1 / alpha)
    Add 3, Clip 0..6, Mul x, Div 6     in this order, or with the Div before the Mul

What follows with one number for all is part of the gain (Mul, Div by a positive one) or, at the
end, the offset (Add). In int8 the saturation of the grid is the Clip, a scale read otherwise than
it was written is the gain, and a zero point read otherwise the offset::

    source -> Add(shift) -> Q(top / 255, 0) -> DQ(gain * top / 255) -> Mul(factor)
           -> Q(scale, zero_point + offset / scale) -> DQ(scale, zero_point) -> y

so that no more than two int8 kernels are left of it (QLinearAdd, QLinearMul), and two roundings.
Where the Clip's middle is a source of 0, as in a Hard-Swish, and the source's range is not far from
reaching down to -shift, its own integers are clipped, and read from another zero point::

    Q(scale, zero) -> Clip(low, low + top / scale) -> DQ(gain * scale, low) -> Mul(factor) -> ...
                      low = zero - shift / scale

of which one rounding is left, and a Clip in a third of the time, or none where the range ends below
top - shift. Where a Conv makes the source for the gate alone, as in squeeze-excite, the shift is
added to its bias, so that the Conv itself writes what is clipped.

Source: ONNX operators HardSigmoid-6 and HardSwish-14; A. Howard et al., "Searching for
MobileNetV3", arXiv:1905.02244, section 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx
from onnx import helper

from deploy.graph.index import Graph, attributes

GATE = "Gate"  # type of the one node that stands for a gate's own in a collapsed graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate: y = factor * gain * clip(source + shift, 0, top) + offset.

    Attributes:
        nodes: names of its nodes, in the order in which they run.
        source: the tensor that is shifted and clipped.
        factor: the tensor that is multiplied; "" while none was found.
        output: y.
        shift: what is added; not 0.
        top: upper end of the clip, positive.
        gain: positive.
        offset: what is added at the end.
    """

    nodes: tuple[str, ...]
    source: str
    factor: str
    output: str
    shift: float
    top: float
    gain: float
    offset: float = 0.0

    @property
    def name(self) -> str:
        """Of the node that stands for it: its last one's."""
        return self.nodes[-1]

    @property
    def centred(self) -> bool:
        """Whether the Clip goes as far above a source of 0 as below it."""
        return math.isclose(self.top, 2 * self.shift, rel_tol=1e-5)


def gates(graph: Graph) -> tuple[Gate, ...]:
    """Every gate of a graph whose inner tensors nobody else reads, in the graph's order."""
    found = []
    for node in graph.nodes:
        gate = _started(graph, node)
        while gate is not None and (longer := _continued(graph, gate)) is not None:
            gate = longer
        if gate is not None and gate.factor:
            found.append(_offset(graph, gate))
    return tuple(found)


def collapsed(nodes: Iterable[onnx.NodeProto], found: Iterable[Gate]) -> list[onnx.NodeProto]:
    """The nodes with each gate as one node of type `GATE`, in the place of its last one."""
    last = {gate.name: gate for gate in found}
    inner = {name for gate in last.values() for name in gate.nodes[:-1]}
    return [
        _stand_in(last[node.name]) if node.name in last else node
        for node in nodes
        if node.name not in inner
    ]


def _stand_in(gate: Gate) -> onnx.NodeProto:
    inputs = list(dict.fromkeys([gate.source, gate.factor]))
    return helper.make_node(GATE, inputs, [gate.output], name=gate.name)


def _started(graph: Graph, node: onnx.NodeProto) -> Gate | None:
    """The gate that a node begins, as far as its Clip; of HardSwish, all of it."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "HardSwish":
        x, y = str(node.input[0]), str(node.output[0])
        return Gate(
            nodes=(node.name,), source=x, factor=x, output=y, shift=3.0, top=6.0, gain=1 / 6
        )
    if node.op_type == "HardSigmoid":
        return _hard_sigmoid(node)
    return _written_out(graph, node) if node.op_type == "Add" else None


def _hard_sigmoid(node: onnx.NodeProto) -> Gate | None:
    given = attributes(node)
    alpha, beta = float(given.get("alpha", 0.2)), float(given.get("beta", 0.5))
    if alpha <= 0 or beta == 0:
        return None
    return Gate(
        nodes=(node.name,),
        source=str(node.input[0]),
        factor="",
        output=str(node.output[0]),
        shift=beta / alpha,
        top=1 / alpha,
        gain=alpha,
    )


def _written_out(graph: Graph, add: onnx.NodeProto) -> Gate | None:
    """Add of a number, then Clip from 0 to a number."""
    source = next((str(n) for n in add.input if n not in graph.initializers), "")
    shift = graph.number_beside(source, add)
    clip = graph.only_reader(add.output[0])
    if not shift or clip is None or clip.op_type != "Clip":
        return None
    top = graph.number(clip.input[2]) if len(clip.input) > 2 else None
    if clip.input[0] != add.output[0] or not graph.holds_zero(clip) or not top or top < 0:
        return None
    return Gate(
        nodes=(add.name, clip.name),
        source=source,
        factor="",
        output=str(clip.output[0]),
        shift=shift,
        top=top,
        gain=1.0,
    )


def _continued(graph: Graph, gate: Gate) -> Gate | None:
    """The gate with the one reader of its output, where that only multiplies."""
    after = graph.only_reader(gate.output)
    if after is None or after.op_type not in ("Mul", "Div") or gate.output not in after.input:
        return None
    longer = replace(gate, nodes=(*gate.nodes, after.name), output=str(after.output[0]))
    first, second = (str(name) for name in after.input)
    other = second if first == gate.output else first
    number = graph.number_beside(gate.output, after)
    if number is not None and number > 0 and (after.op_type == "Mul" or first == gate.output):
        gain = gate.gain * number if after.op_type == "Mul" else gate.gain / number
        return replace(longer, gain=gain)
    free = after.op_type == "Mul" and not gate.factor and other != gate.output
    return replace(longer, factor=other) if free and other not in graph.initializers else None


def _offset(graph: Graph, gate: Gate) -> Gate:
    """The gate with an Add of one number behind it, where no Relu or Clip follows that."""
    add = graph.only_reader(gate.output)
    if add is None or add.op_type != "Add" or graph.tail(add) != add.output[0]:
        return gate
    number = graph.number_beside(gate.output, add)
    if number is None:
        return gate
    longer = replace(gate, nodes=(*gate.nodes, add.name), output=str(add.output[0]))
    return replace(longer, offset=number)
