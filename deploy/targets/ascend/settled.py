"""The model that a configuration quantizes: its nodes named, what it wants apart, its layers.

Weights that several nodes read: each layer of them gets one of its own.

::

    left -> Conv(w) ->                left -> Conv(w) ->
    right -> Conv(w) ->               right -> Conv(right/conv.weight) ->

AMCT writes integers over a weight, by the scales of the one layer that reads it, and refuses the
others. Heads of detectors that go over maps of several sizes, two pictures through one network and
cells that are written out step by step would stay in float, whole models of them.

What a build says of how AMCT's searches found the scales, and on what.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.graph.edit import copied, unused
from deploy.graph.index import Graph, users

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import Subject
    from deploy.graph.plan import Decision, FloatNodes, Plan
    from deploy.targets.ascend.amct_calibration import Recorded, RecordPlan
    from deploy.targets.ascend.config_keys import QuantConfig
    from deploy.targets.ascend.layers import Layer, LayerGraph
    from deploy.targets.ascend.quant_layer import QuantLayer


_MOST = 1 << 29  # bytes of copies in float32: a file holds 2 GiB


def with_own_weights(model: onnx.ModelProto, nodes: Collection[str]) -> dict[str, str]:
    """Give each of these nodes a weight that it alone reads, in place.

    All that share a weight get one, or none where the copies would be too large: a cell that is
    written out for hundreds of steps.

    Args:
        model: every node has a name of its own.
        nodes: names of those whose second input is a weight that others read too.

    Returns:
        Name of a new weight -> the one that it is a copy of.
    """
    index, readers = Graph(model), users(model.graph)
    sharing = [node for node in model.graph.node if node.name in nodes]
    few = _affordable(Counter(node.input[1] for node in sharing), index.constants)
    taken = {*readers, *index.constants, *index.producer}
    made: dict[str, str] = {}
    for node in sharing:
        shared = node.input[1]
        if shared not in few or readers[shared] < 2:
            continue
        tensor = copied(index.constants[shared])
        tensor.name = unused(f"{node.name}.weight", taken)
        model.graph.initializer.append(tensor)
        taken.add(tensor.name)
        readers[shared] -= 1
        node.input[1], made[tensor.name] = tensor.name, shared
    return made


def _affordable(wanted: Mapping[str, int], constants: Mapping[str, onnx.TensorProto]) -> set[str]:
    """Weights of which there may be so many, those first that add least."""
    bytes_of = {name: 4 * math.prod(constants[name].dims) * wanted[name] for name in wanted}
    found, total = set(), 0
    for name in sorted(bytes_of, key=bytes_of.__getitem__):
        total += bytes_of[name]
        if total <= _MOST:
            found.add(name)
    return found


def own_of(layers: Iterable[Layer], graph: LayerGraph) -> list[str]:
    """Names of those of the layers that share their weight in the model as it was given."""
    shared = {*graph.shared, *graph.shared.values()}
    return [layer.name for layer in layers if layer.weight in shared]


def as_given(graph: LayerGraph) -> dict[str, Layer]:
    """The layers, each with the weight that it reads in the model as it was given."""
    own = graph.shared
    return {
        name: replace(layer, weight=own.get(layer.weight, layer.weight))
        for name, layer in graph.layers.items()
    }


_MOVED = "it computes in float; by tensor_quantize its input is moved in int8"


def prepared(model: onnx.ModelProto) -> tuple[onnx.ModelProto, LayerGraph]:
    """The model, each node with a name and each layer with a weight of its own, and its layers."""
    from deploy.targets.ascend.layers import SHARED, find_layers, name_nodes

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
    from deploy.frontends.affine import MOVES, NORM, fold_affine

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


def searches(config: QuantConfig) -> str:
    """The searches that gave the scales, in words."""
    from deploy.targets.ascend.weight_rounding import algorithms

    enabled = config.entries().values()
    searches = sorted({layer.activation.act_algo.upper() for layer in enabled})
    return f"AMCT's {algorithms(config)} and {' and '.join(searches)}"


def calibration_notes(found: Recorded, plan: RecordPlan) -> Iterator[str]:
    """Sentences on what was searched, on how much, and on layers whose scale says nothing."""
    yield f"Scales: {searches(plan.config)} over {_batches(plan)}."
    yield from _rounding_notes(found, plan)
    yield from plan.config.told
    if found.kept_bytes:
        yield f"Exact IFMR kept {found.kept_bytes / 2**20:.1f} MiB of activations in memory."
    if found.dead:
        yield (
            f"The input of {len(found.dead)} layers was zero on every sample, so their scale says"
            f" nothing: {', '.join(found.dead[:3])}."
        )
    if found.faint:
        yield (
            f"The input of {len(found.faint)} layers is so small (under 1.2e-7 a code) that AMCT's"
            " searches give it scale 1, which rounds all of it to zero:"
            f" {', '.join(found.faint[:3])}; --keep-float keeps them in float."
        )
    if plan.used < plan.samples:
        of = plan.samples * plan.images
        yield (
            f"batch_num {plan.config.batch_num} of the configuration:"
            f" {plan.used * plan.images} of {of} samples were used."
        )


def _batches(plan: RecordPlan) -> str:
    """What was used, in images, and how they were put together."""
    images = plan.used * plan.images
    size = plan.images * plan.together
    if size == 1:
        return f"{images} samples"
    last = images % size
    partial = f", the last one of {last}" if last else ""
    return f"{images} samples in {plan.config.batch_num} batches of {size}{partial}"


def _rounding_notes(found: Recorded, plan: RecordPlan) -> Iterator[str]:
    from deploy.targets.ascend.weight_rounding import MOST_PLACES, MOST_SAMPLES

    if found.adaround is None:
        return
    least, most = (f"{100 * share:.0f} %" for share in found.adaround)
    yield (
        f"AdaRound rounded the weights of {len(plan.adaround)} layers by at most {MOST_PLACES}"
        f" places of the first {min(plan.used, MOST_SAMPLES)} samples; their outputs"
        f" err there by {least} to {most} of what the nearest codes would. The rounding is in the"
        " models, not in the record: `calib8 ascend deploy` takes it from the modified model."
    )


def chips(layers: Mapping[str, QuantLayer]) -> Iterator[str]:
    """A sentence where it depends on the chip whether int8 is of use."""
    count = sum(one.layer.two_activations for one in layers.values())
    if count:
        yield (
            f"MatMuls of two activations in int8: {count}. Huawei says that this gains on Atlas A2,"
            " A3 and 200I/500 A2 alone, and loses accuracy on other chips."
        )
