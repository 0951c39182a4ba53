"""Preparation of a model for Ascend: named nodes, unshared weights, layers; its plan and notes.

A weight that several layers read is copied, so that each layer has its own::

    left -> Conv(w) ->                left -> Conv(w) ->
    right -> Conv(w) ->               right -> Conv(right/conv.weight) ->

AMCT replaces a weight by integers with the scales of the one layer that reads it, and refuses the
other readers. That would keep whole models in float: detection heads shared by several feature
maps, siamese networks, unrolled recurrent cells.

A configuration may also want a BatchNormalization left unfolded (`unfuse_batchnorms`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.graph.edit import claim_name, copy_tensor
from deploy.graph.index import Graph, count_reads

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import CalibrationSubject
    from deploy.graph.plan import Decision, FloatNodes, Plan
    from deploy.targets.ascend.amct_calibration import CalibrationRecord, RecordPlan
    from deploy.targets.ascend.config_keys import QuantConfig
    from deploy.targets.ascend.layers import Layer, LayerGraph

_MOST = 1 << 29  # bytes of copied float32 weights; an ONNX file holds 2 GiB
_MOVED = "it computes in float; by tensor_quantize its input is moved in int8"


def _affordable(copies: Mapping[str, int], constants: Mapping[str, onnx.TensorProto]) -> set[str]:
    """Return the weights of `copies`, weight -> number, that fit into `_MOST`, smallest first."""
    bytes_of = {name: 4 * math.prod(constants[name].dims) * copies[name] for name in copies}
    affordable, total = set(), 0
    for name in sorted(bytes_of, key=bytes_of.__getitem__):
        total += bytes_of[name]
        if total <= _MOST:
            affordable.add(name)
    return affordable


def find_weight_sharers(layers: Iterable[Layer], graph: LayerGraph) -> list[str]:
    """Return the names of the layers that share their weight in the original model."""
    shared = {*graph.shared_weights, *graph.shared_weights.values()}
    return [layer.name for layer in layers if layer.weight in shared]


def prepare_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, LayerGraph]:
    """Return a copy with unique node names and unshared weights, and its layers."""
    from deploy.targets.ascend.layers import SHARED, find_layers, name_nodes

    named = name_nodes(model)
    graph = find_layers(named)
    shared = {name for name, reason in graph.float_reasons.items() if reason == SHARED}
    if not shared:
        return named, graph
    # copy a shared weight for each node, or for none if the copies would be too large, as for a
    # cell unrolled over hundreds of steps
    index, readers = Graph(named), count_reads(named.graph)
    sharing = [node for node in named.graph.node if node.name in shared]
    affordable = _affordable(Counter(node.input[1] for node in sharing), index.constants)
    used_names = {*readers, *index.constants, *index.producer}
    copies: dict[str, str] = {}  # name of a new weight -> the weight that it copies
    for node in sharing:
        weight = node.input[1]
        if weight not in affordable or readers[weight] < 2:
            continue
        name = claim_name(f"{node.name}.weight", used_names)
        named.graph.initializer.append(copy_tensor(index.constants[weight], name))
        readers[weight] -= 1
        node.input[1], copies[name] = name, weight
    return named, replace(find_layers(named), shared_weights=copies)


def unfuse_batchnorms(
    subject: CalibrationSubject, config: QuantConfig, *, unfolded: Collection[str] = ()
) -> tuple[onnx.ModelProto, LayerGraph]:
    """Return the model without the BatchNormalization folding that the config forbids.

    `config`: its do_fusion and skip_fusion_layers are used.
    `unfolded`: layers into which nothing downstream is folded.

    Returns:
        As `prepare_model`.
    """
    from deploy.frontends.affine import MOVES, NORM, fold_affine

    model, graph = prepare_model(subject.unfolded.model)
    if not config.do_fusion:
        return model, graph
    names = {*config.skip_fusion_layers, *unfolded}
    ends = {n.output[0]: n.name in unfolded for n in model.graph.node if n.name in names}
    for n in model.graph.node:  # folding also passes through nodes that only move values
        passed = [ends[tensor] for tensor in n.input if tensor in ends]
        if passed and (n.op_type in MOVES or n.op_type == "Concat"):
            ends[n.output[0]] = any(passed)
    apart = {
        n.name
        for n in model.graph.node
        for end in n.input
        if end in ends and (n.op_type == NORM or ends[end])
    }
    fold_affine(model.graph, excluded=apart)
    return prepare_model(model)


def find_unfolded_deconvs(model: onnx.ModelProto) -> list[str]:
    """Return the ConvTranspose nodes before a BatchNormalization, which AMCT leaves apart."""
    from deploy.frontends.affine import NORM

    named, _ = prepare_model(model)
    nodes = named.graph.node
    outputs = {node.output[0]: node.name for node in nodes if node.op_type == "ConvTranspose"}
    return [outputs[n.input[0]] for n in nodes if n.op_type == NORM and n.input[0] in outputs]


def disable_layers(config: QuantConfig, float_nodes: tuple[str, ...]) -> QuantConfig:
    """Return the config without these layers, and without tensor_quantize of these nodes."""
    layers = {
        name: replace(layer, quant_enable=False) if name in float_nodes else layer
        for name, layer in config.layers.items()
    }
    tensors = (one for one in config.tensors if not {one.key, one.layer_name} & {*float_nodes})
    return replace(config, layers=layers, tensors=tuple(tensors))


def make_default_plan(model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
    """Return AMCT's default quantization as a plan, with pairs on the inputs of layers."""
    from deploy.graph.placement import ASCEND
    from deploy.graph.plan import Plan, QdqPair, reasons_by_node

    why = reasons_by_node(float_nodes)
    named, graph = prepare_model(model)
    originals = graph.shared_weights
    chosen = {  # each with the weight that it reads in the original model
        name: replace(layer, weight=originals.get(layer.weight, layer.weight))
        for name, layer in graph.layers.items()
        if name not in why
    }
    readers: dict[str, tuple[str, ...]] = {}
    for layer in chosen.values():
        readers[layer.input] = (*readers.get(layer.input, ()), layer.node)
    return Plan(
        placement=ASCEND,
        decisions=decide_precisions(named, graph, chosen, why),
        pairs=tuple(QdqPair(tensor, nodes) for tensor, nodes in readers.items()),
        weights=tuple(layer.weight_target for layer in chosen.values() if layer.weight),
    )


def decide_precisions(
    model: onnx.ModelProto,
    graph: LayerGraph,
    chosen: Collection[str],
    why: Mapping[str, str] | None = None,
) -> tuple[Decision, ...]:
    """Return the precision of every node, with a reason for float.

    `why`: layer -> why it is float, if the user did not ask for it.
    """
    from deploy.graph.placement import ASCEND
    from deploy.graph.plan import FLOAT32, FLOAT_BY_USER, Decision

    decisions = []
    moved = {one.node for one in graph.select(chosen).values() if one.input_index is not None}
    for node in model.graph.node:
        int8 = node.name in chosen
        reason = graph.float_reasons.get(node.name, "")
        if not int8 and not reason:
            given = (why or {}).get(node.name, FLOAT_BY_USER)
            reason = given if node.name in graph.layers else "no int8 on Ascend for this type"
            reason = _MOVED if node.name in moved else reason
        precision = ASCEND.grid.name if int8 else FLOAT32
        decisions.append(Decision(node.name, node.op_type, precision, "" if int8 else reason))
    return tuple(decisions)


def describe_algorithms(config: QuantConfig) -> str:
    """Describe the algorithms that chose the scales."""
    from deploy.targets.ascend.weight_rounding import weight_algorithms

    enabled = config.entries().values()
    searches = sorted({layer.activation.act_algo.upper() for layer in enabled})
    return f"AMCT's {weight_algorithms(config)} and {' and '.join(searches)}"


def calibration_notes(calibrated: CalibrationRecord, plan: RecordPlan) -> Iterator[str]:
    """Yield notes on the searches, the samples, and layers whose scale is meaningless."""
    yield f"Scales: {describe_algorithms(plan.config)} over {_batches(plan)}."
    yield from _rounding_notes(calibrated, plan)
    yield from plan.config.notes
    if calibrated.activation_bytes:
        mebibytes = calibrated.activation_bytes / 2**20
        yield f"Exact IFMR kept {mebibytes:.1f} MiB of activations in memory."
    dead, faint = calibrated.zero_layers, calibrated.underflow_layers
    if dead:
        yield (
            f"The input of {len(dead)} layers was zero on every sample, so their scale is"
            f" meaningless: {', '.join(dead[:3])}."
        )
    if faint:
        yield (
            f"The input of {len(faint)} layers is so small (under 1.2e-7 per code) that AMCT's"
            " searches give it scale 1, which rounds all of it to zero:"
            f" {', '.join(faint[:3])}; --keep-float keeps them in float."
        )
    if plan.used_samples < plan.samples:
        total = plan.samples * plan.images_per_sample
        yield (
            f"batch_num {plan.config.batch_num} of the configuration:"
            f" {plan.used_samples * plan.images_per_sample} of {total} samples were used."
        )


def _batches(plan: RecordPlan) -> str:
    """Describe the number of images, and their batches."""
    images = plan.used_samples * plan.images_per_sample
    size = plan.images_per_sample * plan.samples_per_batch
    if size == 1:
        return f"{images} samples"
    last = images % size
    partial = f", the last one of {last}" if last else ""
    return f"{images} samples in {plan.config.batch_num} batches of {size}{partial}"


def _rounding_notes(calibrated: CalibrationRecord, plan: RecordPlan) -> Iterator[str]:
    from deploy.targets.ascend.weight_rounding import MAX_POSITIONS, MAX_SAMPLES

    if calibrated.adaround_ratios is None:
        return
    least, most = (f"{100 * share:.0f} %" for share in calibrated.adaround_ratios)
    yield (
        f"AdaRound rounded the weights of {len(plan.adaround_steps)} layers, on at most"
        f" {MAX_POSITIONS} output positions of the first {min(plan.used_samples, MAX_SAMPLES)}"
        f" samples; their output error there is {least} to {most} of the error with nearest"
        " rounding. The rounding is in the models, not in the record: `calib8 ascend deploy`"
        " takes it from the modified model."
    )
