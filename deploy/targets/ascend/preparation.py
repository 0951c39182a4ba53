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

from deploy.errors import counted, list_first
from deploy.graph.edit import claim_name, copy_message, copy_tensor
from deploy.graph.index import Graph, count_reads

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import CalibrationSubject
    from deploy.graph.plan import Decision, FloatNodes, Plan
    from deploy.targets.ascend.amct_calibration import CalibrationRecord, RecordPlan
    from deploy.targets.ascend.config_keys import QuantConfig
    from deploy.targets.ascend.layers import Layer, LayerGraph

_MAX_COPY_BYTES = 1 << 29  # of copied float32 weights; an ONNX file holds 2 GiB
_INPUT_IN_INT8 = "it computes in float; by tensor_quantize its input is moved in int8"


def find_weight_sharers(layers: Iterable[Layer], graph: LayerGraph) -> list[str]:
    """Return the names of the layers that share their weight in the original model."""
    shared = {*graph.shared_weights, *graph.shared_weights.values()}
    return [layer.name for layer in layers if layer.weight in shared]


def prepare_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, LayerGraph]:
    """Return the model with unshared weights, and its layers.

    A weight that several layers read is copied for each, since AMCT refuses such layers. If the
    copies would be too large, such layers stay in float. The result is the model itself if it has
    no such weight; the caller must not change it.

    `model`: float model with unique node names, as `deploy.frontends.load` returns it.
    """
    from deploy.targets.ascend.layers import SHARED_WEIGHT, find_layers

    layer_graph = find_layers(model)
    if SHARED_WEIGHT not in layer_graph.float_reasons.values():
        return model, layer_graph

    unshared = copy_message(model)
    index = Graph(unshared)  # constants, and the nodes that make tensors
    sharing_nodes = []  # would be layers if they did not share their weight
    for node in unshared.graph.node:
        if layer_graph.float_reasons.get(node.name) == SHARED_WEIGHT:
            sharing_nodes.append(node)
    read_counts = count_reads(unshared.graph)  # tensor -> how often nodes read it
    copy_count_by_weight = Counter(node.input[1] for node in sharing_nodes)
    weights_to_copy = _choose_weights_to_copy(copy_count_by_weight, index.constants)
    used_names = {*read_counts, *index.constants, *index.producer}
    weight_by_copy: dict[str, str] = {}
    for node in sharing_nodes:
        weight = node.input[1]
        # the last node that still reads the weight keeps it
        if weight not in weights_to_copy or read_counts[weight] < 2:
            continue
        copy_name = claim_name(f"{node.name}.weight", used_names)
        unshared.graph.initializer.append(copy_tensor(index.constants[weight], copy_name))
        read_counts[weight] -= 1
        node.input[1] = copy_name
        weight_by_copy[copy_name] = weight
    return unshared, replace(find_layers(unshared), shared_weights=weight_by_copy)


def _choose_weights_to_copy(
    copy_count_by_weight: Mapping[str, int], constants: Mapping[str, onnx.TensorProto]
) -> set[str]:
    """Return the weights to copy: as many as fit the limit of bytes, those of few bytes first.

    The copies for a recurrent cell that is unrolled over hundreds of steps may not fit.

    Args:
        copy_count_by_weight: weight -> number of copies, one for each node that reads it.
        constants: name -> constant, with the weights.
    """
    copy_bytes = {
        name: 4 * math.prod(constants[name].dims) * count
        for name, count in copy_count_by_weight.items()
    }
    chosen_weights = set()
    total = 0
    for name in sorted(copy_bytes, key=copy_bytes.__getitem__):
        total += copy_bytes[name]
        if total <= _MAX_COPY_BYTES:
            chosen_weights.add(name)
    return chosen_weights


def unfuse_batchnorms(
    subject: CalibrationSubject, config: QuantConfig, *, unfolded_layers: Collection[str] = ()
) -> tuple[onnx.ModelProto, LayerGraph]:
    """Return the model with only those BatchNormalizations folded that the config allows.

    It starts from the model before any folding, and folds all nodes but those after a layer into
    which the config, or `unfolded_layers`, allows no folding.

    Args:
        subject: the user's model, as it was loaded; `subject.unfolded` is without any folding.
        config: its do_fusion and skip_fusion_layers are used.
        unfolded_layers: layers into which no node downstream is folded, not even a Mul.

    Returns:
        (the model with unshared weights, its layers).
    """
    from deploy.frontends.affine import MOVES, NORM, fold_affine

    model, graph = prepare_model(subject.unfolded.model)
    if not config.do_fusion:
        return model, graph

    model = copy_message(model)
    closed_outputs: set[str] = set()  # of layers into which nothing is folded
    skip_fusion_outputs: set[str] = set()  # of layers into which no BatchNormalization is folded
    nodes_to_keep = set()
    for node in model.graph.node:
        reads_closed = bool(closed_outputs.intersection(node.input))
        reads_skip_fusion = bool(skip_fusion_outputs.intersection(node.input))
        if reads_closed or (reads_skip_fusion and node.op_type == NORM):
            nodes_to_keep.add(node.name)
        # folding goes past a node that only moves values: its output counts as the layer's
        is_move = node.op_type in MOVES or node.op_type == "Concat"
        if node.name in unfolded_layers or (is_move and reads_closed):
            closed_outputs.add(node.output[0])
        elif node.name in config.skip_fusion_layers or (is_move and reads_skip_fusion):
            skip_fusion_outputs.add(node.output[0])
    fold_affine(model.graph, excluded=nodes_to_keep)
    return prepare_model(model)


def find_amct_unfolded_layers(model: onnx.ModelProto) -> list[str]:
    """Return the layers whose BatchNormalization AMCT leaves unfolded: all but Convs."""
    from deploy.frontends.affine import NORM

    graph = Graph(model)
    layer_names = []
    for node in graph.nodes:
        if node.op_type == NORM:
            layer = graph.find_producer(node.input[0], "ConvTranspose", "Gemm")
            if layer is not None:
                layer_names.append(layer.name)
    return layer_names


def disable_layers(config: QuantConfig, float_nodes: Collection[str]) -> QuantConfig:
    """Return the config without these layers, and without tensor_quantize of these nodes."""
    layers = dict(config.layers)
    for name, layer in layers.items():
        if name in float_nodes:
            layers[name] = replace(layer, quant_enable=False)
    tensors = {}
    for name, activation in config.tensors.items():  # name: '<node>:<index>'
        if name not in float_nodes and name.rpartition(":")[0] not in float_nodes:
            tensors[name] = activation
    return replace(config, layers=layers, tensors=tensors)


def make_default_plan(model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
    """Return AMCT's default quantization as a plan: int8 layers, and the pairs on their inputs.

    A pair (QuantizeLinear, DequantizeLinear) rounds a tensor to int8.

    Args:
        model: the float model.
        float_nodes: nodes that stay in float by request.
    """
    from deploy.graph.placement import ASCEND
    from deploy.graph.plan import Plan, QdqPair, reasons_by_node

    float_reasons = reasons_by_node(float_nodes)
    prepared_model, graph = prepare_model(model)
    int8_layers = {}
    nodes_by_input: dict[str, list[str]] = {}
    for node, layer in graph.layers.items():
        if node not in float_reasons:
            # `prepare_model` copied weights that several layers read; a plan names the originals
            weight = graph.shared_weights.get(layer.weight, layer.weight)
            int8_layers[node] = replace(layer, weight=weight)
            nodes_by_input.setdefault(layer.input, []).append(layer.node)
    return Plan(
        placement=ASCEND,
        decisions=decide_precisions(prepared_model, graph, int8_layers, float_reasons),
        pairs=tuple(QdqPair(tensor, tuple(nodes)) for tensor, nodes in nodes_by_input.items()),
        weights=tuple(layer.weight_target for layer in int8_layers.values() if layer.weight),
    )


def decide_precisions(
    model: onnx.ModelProto,
    graph: LayerGraph,
    int8_names: Collection[str],
    reason_by_float_layer: Mapping[str, str],
) -> tuple[Decision, ...]:
    """Return a `Decision` for every node: int8 or float, and the reason for float.

    Args:
        model: the float model, in which each layer has a weight of its own.
        graph: its layers.
        int8_names: names of the int8 layers, and '<node>:<index>' of each tensor_quantize input,
            whose node computes in float.
        reason_by_float_layer: layer that could be int8 -> why it is float, if the user did not ask
            for it. The reasons of nodes that could not are in `graph.float_reasons`.
    """
    from deploy.graph.placement import ASCEND
    from deploy.graph.plan import FLOAT32, FLOAT_BY_USER, Decision

    decisions = []
    chosen_layers = graph.select(int8_names).values()
    # `input_index` is set for an input of tensor_quantize
    nodes_with_int8_inputs = {
        layer.node for layer in chosen_layers if layer.input_index is not None
    }
    for node in model.graph.node:
        name = node.name
        precision = FLOAT32
        reason = ""
        if name in int8_names:
            precision = ASCEND.grid.name  # int8
        elif name in graph.float_reasons:  # AMCT quantizes its type, but not this node
            reason = graph.float_reasons[name]
        elif name in graph.layers:
            reason = reason_by_float_layer.get(name, FLOAT_BY_USER)
        elif name in nodes_with_int8_inputs:
            reason = _INPUT_IN_INT8
        else:
            reason = "no int8 on Ascend for this type"
        decisions.append(Decision(name, node.op_type, precision, reason))
    return tuple(decisions)


def describe_algorithms(config: QuantConfig) -> str:
    """Describe the algorithms that chose the scales."""
    from deploy.targets.ascend.weight_rounding import weight_algorithms

    entries = config.enabled_entries().values()
    searches = sorted({entry.activation.act_algo.upper() for entry in entries})
    return f"AMCT's {weight_algorithms(config)} and {' and '.join(searches)}"


def calibration_notes(calibration_record: CalibrationRecord, plan: RecordPlan) -> Iterator[str]:
    """Yield notes on searches, rounding, the configuration, tiny inputs, and unused samples.

    A sample of the plan is one run of the model, of several images if the model fixes its batch.
    The notes count images, and call them samples, as users do.

    Args:
        calibration_record: the records, and the layers whose input rounds to zero.
        plan: the calibration that made them.
    """
    yield f"Scales: {describe_algorithms(plan.config)} over {_describe_batches(plan)}."
    yield from _rounding_notes(plan)
    yield from plan.config.notes
    zero_layers = calibration_record.zero_layers
    if zero_layers:
        yield (
            f"The input of {counted(len(zero_layers), 'layer')} is zero or so small (under 1.2e-7"
            " per code) that AMCT's searches give it scale 1, which rounds all of it to zero:"
            f" {list_first(zero_layers, 3)}; --keep-float keeps them in float."
        )
    refusals = [f"{name}: {reason}" for name, reason in calibration_record.refusals.items()]
    if refusals:
        yield f"Layers in float that do not fit Ascend's int8 path: {list_first(refusals, 3)}."
    has_unused_images = plan.used_images < plan.images
    is_alerted = plan.config.batch_num == 1  # `calibration_alerts` tells of it
    if has_unused_images and not is_alerted:
        yield (
            f"batch_num {plan.config.batch_num} of the configuration:"
            f" {plan.used_images} of {plan.images} samples were used."
        )


def calibration_alerts(plan: RecordPlan) -> tuple[str, ...]:
    """Return a sentence if only one batch of several was used, which few users intend.

    A configuration that does not set batch_num does so: AMCT's default is 1.
    """
    has_unused_images = plan.used_images < plan.images
    if plan.config.batch_num > 1 or not has_unused_images:
        return ()
    return (
        "batch_num of the configuration is 1, AMCT's default, so the scales come from"
        f" {plan.used_images} of {plan.images} samples; set it to use more",
    )


def _describe_batches(plan: RecordPlan) -> str:
    """Describe the number of images, and their batches."""
    images = plan.used_images
    batch_size = plan.images_per_sample * plan.samples_per_batch
    if batch_size == 1:
        return counted(images, "sample")
    remainder = images % batch_size
    last_batch = f", the last one of {remainder}" if remainder else ""
    batches = counted(plan.config.batch_num, "batch")
    return f"{images} samples in {batches} of {batch_size}{last_batch}"


def _rounding_notes(plan: RecordPlan) -> Iterator[str]:
    """Yield a note on AdaRound's layers and samples, if it ran."""
    from deploy.targets.ascend.weight_rounding import MAX_POSITIONS, MAX_SAMPLES

    if plan.adaround_steps:
        yield (
            f"AdaRound rounded the weights of {counted(len(plan.adaround_steps), 'layer')}, on at"
            f" most {MAX_POSITIONS} output positions of the first"
            f" {counted(min(plan.used_samples, MAX_SAMPLES), 'sample')}. The rounding is in the"
            " models, not in the record: `calib8 ascend deploy` takes it from the modified model."
        )
