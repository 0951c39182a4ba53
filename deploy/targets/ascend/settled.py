"""The model that a configuration quantizes: its nodes named, what it wants apart, its layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.subject import Subject
    from deploy.graph.plan import Decision, FloatNodes, Plan
    from deploy.targets.ascend.config_types import QuantConfig
    from deploy.targets.ascend.layers import LayerGraph

_MOVED = "it computes in float; by tensor_quantize its input is moved in int8"


def prepared(model: onnx.ModelProto) -> tuple[onnx.ModelProto, LayerGraph]:
    """The model, each node with a name and each layer with a weight of its own, and its layers."""
    from deploy.targets.ascend.layers import SHARED, find_layers, name_nodes
    from deploy.targets.ascend.shared import with_own_weights

    named = name_nodes(model)
    graph = find_layers(named)
    shared = {name for name, reason in graph.refused.items() if reason == SHARED}
    if not shared:
        return named, graph
    own = with_own_weights(named, shared)
    return named, replace(find_layers(named), shared=own)


def unfused(
    subject: Subject, config: QuantConfig, *, bare: Collection[str] = ()
) -> tuple[onnx.ModelProto, LayerGraph]:
    """The model with the BatchNormalizations that the config wants apart from their Conv.

    Args:
        subject: the model.
        config: its do_fusion and skip_fusion_layers.
        bare: layers of which nothing behind becomes a part.
    """
    from deploy.frontends.affine import NORM, fold_affine
    from deploy.frontends.moved import MOVES

    model, graph = prepared(subject.unfolded.model)
    if not config.do_fusion:
        return model, graph
    names = {*config.skip_fusion_layers, *bare}
    ends = {n.output[0]: n.name in bare for n in model.graph.node if n.name in names}
    for n in model.graph.node:  # a node is folded through what only moves values, too
        found = [ends[tensor] for tensor in n.input if tensor in ends]
        if found and (n.op_type in MOVES or n.op_type == "Concat"):
            ends[n.output[0]] = any(found)
    apart = {
        n.name
        for n in model.graph.node
        for end in n.input
        if end in ends and (n.op_type == NORM or ends[end])
    }
    fold_affine(model.graph, apart=apart)
    return prepared(model)


def without(config: QuantConfig, float_nodes: tuple[str, ...]) -> QuantConfig:
    """The config with these layers disabled, and no inputs of these nodes or of these names."""
    layers = {
        name: replace(layer, quant_enable=False) if name in float_nodes else layer
        for name, layer in config.layers.items()
    }
    tensors = (one for one in config.tensors if not {one.key, one.layer_name} & {*float_nodes})
    return replace(config, layers=layers, tensors=tuple(tensors))


def planned(model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
    """What AMCT quantizes by default, as a plan; its pairs stand on the inputs of layers."""
    from deploy.graph.placement import ASCEND
    from deploy.graph.plan import Pair, Plan, reasons
    from deploy.targets.ascend.shared import as_given

    kept = reasons(float_nodes)
    named, graph = prepared(model)
    chosen = {name: layer for name, layer in as_given(graph).items() if name not in kept}
    readers: dict[str, tuple[str, ...]] = {}
    for layer in chosen.values():
        readers[layer.input] = (*readers.get(layer.input, ()), layer.node)
    return Plan(
        placement=ASCEND,
        decisions=decided(named, graph, chosen, kept),
        pairs=tuple(Pair(tensor, nodes) for tensor, nodes in readers.items()),
        weights=tuple(layer.target for layer in chosen.values() if layer.weight),
    )


def decided(
    model: onnx.ModelProto,
    graph: LayerGraph,
    chosen: Collection[str],
    why: Mapping[str, str] | None = None,
) -> tuple[Decision, ...]:
    """Every node of the model: int8 where it is chosen, or why it is float.

    Args:
        model: prepared.
        graph: its layers.
        chosen: names of those in int8.
        why: layer -> why it is float, where that was not the user's word.
    """
    from deploy.graph.placement import ASCEND
    from deploy.graph.plan import AS_ASKED, FLOAT32, Decision

    decisions = []
    moved = {one.node for one in graph.asked(chosen).values() if one.at is not None}
    for node in model.graph.node:
        int8 = node.name in chosen
        reason = graph.refused.get(node.name, "")
        if not int8 and not reason:
            off = node.name in graph.layers
            asked = (why or {}).get(node.name, AS_ASKED)
            reason = asked if off else "no int8 on Ascend for this type"
            reason = _MOVED if node.name in moved else reason
        precision = ASCEND.grid.name if int8 else FLOAT32
        decisions.append(Decision(node.name, node.op_type, precision, "" if int8 else reason))
    return tuple(decisions)
