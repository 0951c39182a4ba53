"""Load a Q/DQ model, trained or calibrated by any tool, as a model that needs no calibration.

Its pairs are removed (`deploy.frontends.pair_removal`), and their data is stored
(`QdqCalibration`). The forms of ModelOpt, torchao, NNCF, ONNX Runtime and calib8 are all accepted:
float weights with a pair or integer weights before a DequantizeLinear, int32 biases, constants as
nodes, omitted zero points, pairs of ONNX Runtime's own domain.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.scales import Scale
from deploy.errors import ModelError
from deploy.frontends.base import LoadedModel, QdqCalibration, model_digest
from deploy.frontends.metadata import (
    read_class_names,
    read_declaration,
    read_metadata_preprocess,
)
from deploy.frontends.onnx_file import load_onnx, read_source
from deploy.frontends.pair_removal import StrippedModel, prepare_qdq_model, remove_pairs
from deploy.frontends.pairs import (
    DQ,
    PairGrid,
    PairGrids,
    Q,
    UnfitError,
    input_grid,
    read_pair_grid,
    refuse_integer_operators,
    spread_ranges,
    weight_grid,
)
from deploy.graph.edit import tensor_names
from deploy.graph.index import TAILS, Graph, by_name, describe_node
from deploy.graph.placement import WEIGHTED
from deploy.graph.plan import never_negative

_METHOD = "trained"
_COPIES = ("Cast", "Identity", "Dropout")  # cleaning removes them


def read_qdq_model(source: str | Path | onnx.ModelProto) -> LoadedModel:
    """Load a Q/DQ model as its float model, with the data of its pairs.

    Raises:
        ModelError: it cannot be read, or its pairs cannot serve as a calibration.
    """
    path, original, file_digests = read_source(source)
    refuse_integer_operators(original)
    model = prepare_qdq_model(original)
    constant_grids = check_pairs(model)
    stripped = remove_pairs(model, int8_layers=(), keep_rounding=False)
    # folding norms would change the weights, and the scales of the pairs would not fit them
    loaded = load_onnx(stripped.model, fold_batchnorm=False)
    if loaded.cut_off is not None:
        raise ModelError(
            "ONNX Runtime must know every operator of a Q/DQ model, got"
            f" {loaded.cut_off.first_unknown_text};"
            " build the float model, whose other operators the files for TensorRT and Ascend keep"
        )
    name = path.stem if path else loaded.name  # that of the graph, for a model in memory
    grids = _find_cleaned_grids(stripped, loaded.model)
    calibration = _read_calibration(model, str(path or name), loaded.model, grids, constant_grids)
    # file, digest, metadata and classes are those of the original, not of the copy without pairs
    loaded_qdq = replace(
        loaded,
        source=path,
        name=name,
        digest=model_digest(original),
        file_digests=file_digests,
        metadata_preprocess=read_metadata_preprocess(original, path),
        classes=read_class_names(original),
        declaration=read_declaration(original, path),
        notes=(*_make_notes(calibration), *loaded.notes),
        qdq=calibration,
    )
    # `with_inputs` also writes the inputs into the original's declaration
    return loaded_qdq.with_inputs(loaded.inputs)


def _find_cleaned_grids(stripped: StrippedModel, cleaned: onnx.ModelProto) -> PairGrids:
    """Return tensor of the cleaned model -> grids (scale, zero point, type) of its removed pairs.

    Cleaning removes each Cast, Identity or Dropout whose output equals its input; the grids of the
    output then go to the input. The grids of other tensors that cleaning removed are left out.
    """
    producer = Graph(stripped.model).producer
    cleaned_tensors = tensor_names(cleaned.graph)
    grids: dict[str, tuple[PairGrid, ...]] = {}
    for tensor, tensor_grids in stripped.grids.items():
        while tensor not in cleaned_tensors and tensor in producer:
            node = producer[tensor]
            if node.op_type not in _COPIES:
                break
            tensor = node.input[0]
        if tensor in cleaned_tensors:
            grids[tensor] = (*grids.get(tensor, ()), *tensor_grids)
    return grids


def _count_ambiguous(grids: PairGrids) -> int:
    """Return the number of tensors whose Q/DQ pairs have different scales or zero points."""
    count = 0
    for grid, *more_grids in grids.values():
        if not all(map(grid.equals, more_grids)):
            count += 1
    return count


def check_pairs(model: onnx.ModelProto) -> tuple[PairGrid, ...]:
    """Check every Q/DQ pair, and return the grids of the nodes on constants, such as weights.

    A grid is the scale, zero point and integer type of a QuantizeLinear or DequantizeLinear.

    `model`: with sorted nodes.

    Raises:
        ModelError: names a node that does not fit, and why.
    """
    graph = Graph(model)
    constant_tensors = graph.computed_constants.union(graph.initializers)
    constant_grids = []
    for node in graph.nodes:
        if node.op_type not in (Q, DQ):
            continue
        try:
            grid = read_pair_grid(node, graph)
            if node.input[0] in constant_tensors:
                if grid.dtype not in ("int8", "uint8", "int32"):  # int32 is for biases
                    raise UnfitError(f"it is quantized to {grid.dtype}")
                constant_grids.append(grid)
            else:
                _check_activation_pair(node, grid, graph)
        except UnfitError as error:
            raise ModelError(
                "activations of a Q/DQ model must form pairs of one constant scale in int8 or"
                " uint8, and its weights must be int8 or uint8 with constant scales, got"
                f" {describe_node(node)}: {error}; quantize it again in that form, or give"
                " the float model"
            ) from error
    return tuple(constant_grids)


def _check_activation_pair(node: onnx.NodeProto, grid: PairGrid, graph: Graph) -> None:
    """Refuse a Q or DQ of an activation unless it has one 8-bit scale and a partner.

    A DequantizeLinear must read a QuantizeLinear with an equal scale and zero point. A Q only needs
    a reader that is a DQ, since the grids of both are compared when that DQ is checked.
    """
    if not grid.is_per_tensor:
        raise UnfitError("it has a scale a channel")
    if not grid.is_8_bit:
        raise UnfitError(f"it is quantized to {grid.dtype}")
    if node.op_type == Q:
        reader_types = [reader.op_type for reader in graph.readers.get(node.output[0], [])]
        # `prepare_qdq_model` has removed the Clips that let all integers pass
        if "Clip" in reader_types:
            raise UnfitError("a Clip leaves fewer than 8 bits of it")
        if DQ not in reader_types:
            raise UnfitError("no DequantizeLinear reads it")
        return
    quantizer = graph.find_producer(node.input[0], Q)
    if quantizer is None:
        raise UnfitError("no QuantizeLinear stands before it")
    if not read_pair_grid(quantizer, graph).equals(grid):
        raise UnfitError("the QuantizeLinear before it has another scale or zero point")


def _read_calibration(
    qdq_model: onnx.ModelProto,
    name: str,
    float_model: onnx.ModelProto,
    grids: PairGrids,
    constant_grids: tuple[PairGrid, ...],
) -> QdqCalibration:
    """Return what the pairs of a Q/DQ model say: ranges, weight scales, and which nodes are float.

    Args:
        qdq_model: the model with its pairs.
        name: of the file or model.
        float_model: the cleaned model without pairs.
        grids: tensor of the float model -> grids (scale, zero point, type) of its pairs.
        constant_grids: grids of the pairs on constants.
    """
    qdq_graph = Graph(qdq_model)
    float_graph = Graph(float_model)
    nodes_with_output_pair = frozenset(
        node.name for node in qdq_graph.nodes if _has_output_pair(node, qdq_graph)
    )
    weight_scales, float_reasons = _read_layers(qdq_graph, float_graph, nodes_with_output_pair)
    ranges = _find_widest_ranges(grids, float_model)
    return QdqCalibration(
        model=qdq_model,
        name=name,
        # the ranges, also for tensors that a Transpose, MaxPool, ... connects with those of pairs
        scales=spread_ranges(float_graph, ranges),
        weight_scales=weight_scales,
        float_reasons=float_reasons,
        nodes_with_output_pair=nodes_with_output_pair,
        grids=grids,
        constant_grids=constant_grids,
    )


def _find_widest_ranges(grids: PairGrids, float_model: onnx.ModelProto) -> dict[str, Scale]:
    """Return tensor of the float model -> its range; of several pairs on it, the widest."""
    non_negative_tensors = never_negative(float_model)
    range_by_tensor = {}
    for tensor, tensor_grids in grids.items():
        ranges = [_make_range(grid, tensor in non_negative_tensors) for grid in tensor_grids]
        range_by_tensor[tensor] = max(ranges, key=lambda pair_range: pair_range.hi - pair_range.lo)
    return range_by_tensor


def _make_range(grid: PairGrid, is_non_negative: bool) -> Scale:
    """Return a grid's range, from which an affine or a symmetric 8-bit grid is restored exactly."""
    step = grid.scale.item()
    zero = grid.zero.item()
    lo = (grid.min_code - zero) * step
    hi = (grid.max_code - zero) * step
    is_symmetric = not grid.int8_zero.any()
    amax = hi if is_symmetric else max(-lo, hi)
    if is_symmetric and is_non_negative:  # half of the codes are unused
        lo = 0.0
    return Scale(lo=lo, hi=hi, amax=amax, observed_min=lo, observed_max=hi, method=_METHOD)


def _read_layers(
    qdq_graph: Graph, float_graph: Graph, nodes_with_output_pair: frozenset[str]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    """Read from the pairs which nodes run in int8, and with which scales of their weights.

    A node runs in int8 if there is a Q/DQ pair on each of its inputs and, unless it has a weight,
    on its output. A tail (the Relu or Clip behind a node, its head) runs as part of the head.

    Args:
        qdq_graph: the model with pairs.
        float_graph: the cleaned model without them.
        nodes_with_output_pair: names of the nodes with a pair on their output.

    Returns:
        (name of a layer -> scales of its weight, name of a node -> why it is float).
    """
    weight_scales: dict[str, NDArray[np.float32]] = {}
    float_reasons: dict[str, str] = {}
    qdq_node_by_name = by_name(qdq_graph.nodes)
    for node in float_graph.nodes:  # in graph order: a head comes before its tail
        head = _find_head(node, float_graph)
        if head is not None and head.name not in float_reasons:
            continue  # the tail runs in int8 as part of its head
        qdq_node = qdq_node_by_name.get(node.name)
        if qdq_node is None:  # a Clip that `remove_pairs` put in place of a pair
            float_reasons[node.name] = "it stands for the limits of a pair"
            continue
        try:
            if node.op_type not in WEIGHTED:
                _check_pairs_around(qdq_node, qdq_graph, nodes_with_output_pair)
                continue
            scales = _read_weight_scales(qdq_node, qdq_graph)
            if scales is not None:  # if None, the node runs in int8 with scales found by the target
                weight_scales[node.name] = scales
        except UnfitError as error:
            float_reasons[node.name] = str(error)
    return weight_scales, float_reasons


def _find_head(node: onnx.NodeProto, graph: Graph) -> onnx.NodeProto | None:
    """Return the node as part of which a tail, a Relu or Clip, runs; None for any other node."""
    if node.op_type not in TAILS:
        return None
    head = graph.producer.get(node.input[0])
    if head is None or graph.fused_output(head) != node.output[0]:
        return None
    return head


def _read_weight_scales(node: onnx.NodeProto, graph: Graph) -> NDArray[np.float32] | None:
    """Return the scales of a layer's weight, if that has 8 bits and is symmetric; else None.

    None also for a MatMul without a weight: of two activations.

    Raises:
        UnfitError: the layer does not run in int8: its input or weight has no pair.
    """
    input_grid(node, graph)  # raises if no pair stands on its input
    try:
        grid, scales = weight_grid(node, graph)
    except UnfitError:
        if node.op_type != "MatMul":
            raise
        input_grid(node, graph, 1)  # raises if no pair stands on the second activation
        return None
    return scales if grid.is_8_bit and not grid.int8_zero.any() else None


def _check_pairs_around(
    node: onnx.NodeProto, graph: Graph, nodes_with_output_pair: frozenset[str]
) -> None:
    """Refuse a node without Q/DQ pairs on its inputs and its output."""
    data_inputs = graph.data_inputs(node)
    if not data_inputs:
        raise UnfitError("all its inputs are constant")
    for tensor in data_inputs:
        if graph.find_producer(tensor, DQ) is None:
            raise UnfitError("no pair stands on what it reads")
    if node.name not in nodes_with_output_pair:
        raise UnfitError("no pair stands on what it makes")


def _has_output_pair(node: onnx.NodeProto, graph: Graph) -> bool:
    """Return whether a QuantizeLinear reads a node, or the Relu or Clip that follows it."""
    if not node.output or node.op_type in (Q, DQ):
        return False
    outputs = (node.output[0], graph.fused_output(node))
    readers = [reader for output in outputs for reader in graph.readers.get(output, [])]
    return any(reader.op_type == Q for reader in readers)


def _make_notes(qdq: QdqCalibration) -> Iterator[str]:
    """Yield the notes for the user on the pairs of a Q/DQ model."""
    yield (
        f"Quantized already: took the ranges of {len(qdq.grids)} activations"
        f" ({qdq.grid_text or 'none'}) and the scales of {len(qdq.weight_scales)} weights"
        " from its pairs, and removed the pairs from the float model."
    )
    ambiguous_count = _count_ambiguous(qdq.grids)
    if ambiguous_count:
        yield (
            f"{ambiguous_count} tensors have pairs with several scales; for a target with one scale"
            " per tensor the widest is used."
        )
