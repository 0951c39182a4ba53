"""Hard-Swish and squeeze-excite: activations with a gate, matched in every form exporters write.

A *gate* multiplies a tensor by a Hard-Sigmoid of itself (Hard-Swish) or of another tensor
(squeeze-excite). Exporters write it in many forms, which all compute::

    y = factor * gain * clip(source + shift, 0, top) + offset

    HardSwish(x)                       x * clip(x + 3, 0, 6) / 6
    x * HardSigmoid(g, alpha, beta)    x * alpha * clip(g + beta / alpha, 0, 1 / alpha)
    Add 3, Clip 0..6, Mul x, Div 6     in this order, or with the Div before the Mul

A following Mul or Div by a positive scalar becomes part of the gain, a final Add of a scalar the
offset. In int8 the saturation of Q is the Clip, a DQ scale that differs from the Q scale is the
gain, and a differing zero point the offset::

    source -> Add(shift) -> Q(top / 255, 0) -> DQ(gain * top / 255) -> Mul(factor)
           -> Q(scale, zero_point + offset / scale) -> DQ(scale, zero_point) -> y

so that two int8 kernels (QLinearAdd, QLinearMul) and two roundings remain. If the Clip is centred
on a source of 0, as in a Hard-Swish, and the source's range nearly reaches down to -shift, the
source's own integers are clipped and read with another zero point::

    Q(scale, zero) -> Clip(low, low + top / scale) -> DQ(gain * scale, low) -> Mul(factor) -> ...
                      low = zero - shift / scale

which leaves one rounding and a Clip in a third of the time, or no Clip if the range ends below
top - shift. If a Conv makes the source for the gate alone, as in squeeze-excite, the shift is added
to its bias, so that the Conv itself writes the clipped values.

Source: ONNX operators HardSigmoid-6 and HardSwish-14; A. Howard et al., "Searching for
MobileNetV3", arXiv:1905.02244, section 5.2.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx

from deploy.graph.edit import make_node
from deploy.graph.index import (
    GATE,
    ONNX_DOMAINS,
    Graph,
    Nodes,
    attributes,
    by_name,
    optional_input,
    other_inputs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate: y = factor * gain * clip(source + shift, 0, top) + offset.

    Attributes:
        nodes: names of its nodes, in execution order.
        source: name of the tensor that is shifted and clipped.
        factor: name of the tensor that is multiplied; "" while none was found.
        output: name of y.
        shift: not 0.
        top: upper bound of the clip, positive.
        gain: positive.
        offset: added last.
    """

    nodes: tuple[str, ...]
    source: str
    factor: str = ""
    output: str
    shift: float
    top: float
    gain: float = 1.0
    offset: float = 0.0

    @property
    def name(self) -> str:
        """Name of the node that replaces the gate: the name of its last node."""
        return self.nodes[-1]

    @property
    def is_centred(self) -> bool:
        """Whether the clip is symmetric about a source of 0."""
        return math.isclose(self.top, 2 * self.shift, rel_tol=1e-5)


def find_gates(graph: Graph) -> tuple[Gate, ...]:
    """Return every gate (see `Gate`) whose inner tensors no other node reads, in graph order."""
    gates = []
    for node in graph.nodes:
        gate = _match_hard_sigmoid(graph, node)
        if gate is None:
            continue
        # several scalars and one tensor may be multiplied, in any order
        while (longer_gate := _append_product(graph, gate)) is not None:
            gate = longer_gate
        if gate.factor:  # "" if no tensor is multiplied, so that it is no gate
            gates.append(_append_offset(graph, gate))
    return tuple(gates)


def collapse_gates(nodes: Iterable[onnx.NodeProto], gates: Iterable[Gate]) -> Nodes:
    """Return the nodes with the nodes of each gate replaced by one `GATE` node.

    The new node stands in place of the gate's last node and has its name. A Mul of two gates is the
    last node of both; then only the second gate is replaced.
    """
    gate_by_last_node: dict[str, Gate] = by_name(gates)  # a gate has the name of its last node
    dropped_names: set[str] = set()
    for gate in gate_by_last_node.values():
        dropped_names.update(gate.nodes[:-1])  # names of all nodes but the last
    collapsed = []
    for node in nodes:
        if node.name in gate_by_last_node:
            gate = gate_by_last_node[node.name]
            # the source of a Hard-Swish is its factor too, but the new node reads it once
            input_names = list(dict.fromkeys([gate.source, gate.factor]))
            collapsed.append(make_node(GATE, input_names, gate.output, gate.name))
        elif node.name not in dropped_names:
            collapsed.append(node)
    return collapsed


def _match_hard_sigmoid(graph: Graph, node: onnx.NodeProto) -> Gate | None:
    """Return the gate, gain * clip(source + shift, 0, top), that starts at a node; else None.

    The tensor that it multiplies, its factor, is found later. Only a HardSwish is a complete gate:
    its factor is its source.
    """
    if node.domain not in ONNX_DOMAINS:
        return None
    if node.op_type == "Add":
        return _match_add_clip(graph, node)
    if node.op_type not in ("HardSigmoid", "HardSwish"):
        return None

    # clip(alpha * source + beta, 0, 1) = alpha * clip(source + beta / alpha, 0, 1 / alpha)
    source = node.input[0]
    if node.op_type == "HardSwish":  # source * HardSigmoid(source), with constants of its own
        alpha = 1 / 6
        beta = 0.5
        factor = source
    else:
        attrs = attributes(node)
        alpha = attrs.get("alpha", 0.2)
        beta = attrs.get("beta", 0.5)
        factor = ""
    if alpha <= 0 or beta == 0:  # a falling or constant gate; a shift of 0, which has no int8 scale
        return None
    return Gate(
        nodes=(node.name,),
        source=source,
        factor=factor,
        output=node.output[0],
        shift=beta / alpha,
        top=1 / alpha,
        gain=alpha,
    )


def _match_add_clip(graph: Graph, add: onnx.NodeProto) -> Gate | None:
    """Return the gate clip(source + shift, 0, top) that an Add of a scalar and a Clip compute.

    The tensor that it multiplies, its factor, is found later. None if the Add adds 0 or has another
    reader too, or if the Clip's lower bound is not 0 or its upper bound not a positive constant.
    """
    source = next(iter(graph.data_inputs(add)), "")  # "" if both inputs are constant
    shift = graph.scalar_operand(source, add)
    clip = graph.only_reader(add.output[0], "Clip")
    if shift is None or shift == 0 or clip is None:
        return None
    clips_sum = clip.input[0] == add.output[0]  # else the sum is one of the Clip's limits
    if not clips_sum or not graph.clips_at_zero(clip):
        return None

    top = graph.scalar(optional_input(clip, 2))
    if top is None or top <= 0:
        return None
    nodes = (add.name, clip.name)
    return Gate(nodes=nodes, source=source, output=clip.output[0], shift=shift, top=top)


def _append_product(graph: Graph, gate: Gate) -> Gate | None:
    """Return a gate that includes the Mul or Div that alone reads its output; None without one.

    A gate is factor * gain * clip(source + shift, 0, top). Of the Mul or Div, the other operand
    becomes part of the gain if it is a positive scalar that multiplies or divides the gate, or the
    factor if it is a computed tensor that multiplies the gate. A gate has one factor.
    """
    product = graph.only_reader(gate.output, "Mul", "Div")
    if product is None:
        return None
    extended_gate = replace(gate, nodes=(*gate.nodes, product.name), output=product.output[0])
    scalar = graph.scalar_operand(gate.output, product)
    if scalar is not None and scalar > 0:  # a negative gain would turn the clip around
        if product.op_type == "Mul":
            return replace(extended_gate, gain=gate.gain * scalar)
        if product.input[0] == gate.output:
            return replace(extended_gate, gain=gate.gain / scalar)

    # any other Div is no part of the gate; nor is a Mul by a second factor
    if product.op_type == "Div" or gate.factor:
        return None
    factors = other_inputs(product, gate.output)  # empty if the Mul squares the gate
    # an initializer that was no gain above: several values, or one that is not positive
    if not factors or factors[0] in graph.initializers:
        return None
    return replace(extended_gate, factor=factors[0])


def _append_offset(graph: Graph, gate: Gate) -> Gate:
    """Return a gate with a following Add of a scalar, unless a Relu or Clip follows that."""
    add = graph.only_reader(gate.output, "Add")
    if add is None or graph.fused_output(add) != add.output[0]:
        return gate
    offset = graph.scalar_operand(gate.output, add)
    if offset is None:
        return gate
    nodes = (*gate.nodes, add.name)
    return replace(gate, nodes=nodes, output=add.output[0], offset=offset)
