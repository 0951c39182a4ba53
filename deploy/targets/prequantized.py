"""Building a target from a model that is quantized already (Q/DQ): decisions and notes.

The model is kept if its activations are on the target's own grid, and rewritten otherwise::

    uint8 activations --.--> ONNX Runtime: the model itself         TensorRT: int8, zero point 0,
                         '-> Ascend: the same codes less 128                  the same real range
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx

from deploy.errors import ConfigError
from deploy.frontends.base import QdqCalibration
from deploy.frontends.pairs import UnfitError, weight_grid
from deploy.graph.index import TAILS, Graph, standard_type
from deploy.graph.placement import WEIGHTED, Placement
from deploy.graph.plan import FLOAT32, Decision
from deploy.graph.refusal import find_shape_refusal
from deploy.targets.base import Target
from deploy.targets.options import changed_options

_MAX_NAMES = 3  # listed in a sentence


def refuse_options(trained: QdqCalibration, target: Target, flags: Iterable[str]) -> None:
    """Refuse options of a target that decide how a float model is quantized.

    Args:
        trained: the user's Q/DQ model, which is quantized already.
        target: the target with its options.
        flags: flags of the options to refuse. A flag may be followed by the value that is not its
            default, as in "--precision fp8"; the message then names both.
    """
    given_flags = changed_options(target)  # flag -> value, of options that are not at their default
    for flag in flags:
        name = flag.partition(" ")[0]
        if name in given_flags:
            raise ConfigError(
                f"{flag} decides how {target.name} quantizes a float model, got it with"
                f" {trained.name}, which is quantized already; leave it out, or give the float"
                " model"
            )


def qdq_decisions(
    trained: QdqCalibration, model: onnx.ModelProto, placement: Placement
) -> tuple[Decision, ...]:
    """Return each node's precision if the user's Q/DQ model runs unchanged.

    Args:
        trained: the user's Q/DQ model.
        model: the float model that was extracted from it.
        placement: the operators that the target runs on integers, and the type of these (`grid`).
    """
    graph = Graph(model)
    decisions = []
    for node in model.graph.node:
        reason = _float_reason(trained, graph, node, placement)  # "" for an integer node
        precision = FLOAT32 if reason else placement.grid.name
        decisions.append(Decision(node.name, node.op_type, precision, reason))
    return tuple(decisions)


def _float_reason(
    trained: QdqCalibration, graph: Graph, node: onnx.NodeProto, placement: Placement
) -> str:
    """Return why a node runs in float when the user's Q/DQ model runs unchanged.

    "" if it runs on integers.

    Args:
        trained: the user's Q/DQ model.
        graph: the float model that was extracted from it.
        node: a node of that float model.
        placement: the operators that the target runs on integers; `heavy` are those among them
            with products, such as a Conv.
    """
    if node.name in trained.float_reasons:
        return trained.float_reasons[node.name]
    # a Relu or Clip is fused into the node before it
    op_type = standard_type(node)
    if op_type not in placement.runnable_op_types | TAILS:
        return f"{op_type} is not run in {placement.precision_name} on {placement.name}"
    if node.op_type in placement.heavy:
        refusal = find_shape_refusal(graph, node, placement)
        if refusal:
            return refusal
    # a layer is a node of `WEIGHTED`, with weights. The integer kernels of a Gemm and a MatMul can
    # write float, those of a Conv and a ConvTranspose cannot
    must_write_integers = node.op_type in WEIGHTED - {"Gemm", "MatMul"}
    if must_write_integers and node.name not in trained.nodes_with_output_pair:
        return f"no pair stands on what it makes in {Path(trained.name).name}"
    return ""


def unchanged_note(trained: QdqCalibration) -> str:
    """Return the note for a Q/DQ model that is kept unchanged."""
    return (
        f"Kept to the bit: the pairs of {Path(trained.name).name} and the integers of its weights."
    )


def rewritten_notes(
    trained: QdqCalibration,
    written: onnx.ModelProto,
    decisions: Iterable[Decision],
    target: str,
    conversion: str,
) -> Iterator[str]:
    """Yield the notes for the user's Q/DQ model that is rewritten on a target's own grid.

    A grid is the type and zero point of the integers: ONNX Runtime's is uint8, TensorRT's int8.

    Args:
        trained: the user's model.
        written: the Q/DQ model on the other grid.
        decisions: the precision of each node in `written`.
        target: name of the target.
        conversion: end of the first note: how the ranges are converted.
    """
    yield f"{Path(trained.name).name} has activations in {trained.grid_text}; {conversion}."
    float_layers = []
    for decision in decisions:
        is_float_layer = decision.op_type in WEIGHTED and not decision.quantized
        was_int8 = decision.node not in trained.float_reasons
        if is_float_layer and was_int8:
            float_layers.append(decision.node)
    if float_layers:
        yield (
            "Layers that are int8 in the given model and float here, since a tensor has no scale or"
            f" the target has no kernel: {len(float_layers)}"
            f" ({', '.join(float_layers[:_MAX_NAMES])}); quantize for {target} to have them in int8"
            " (calib8 qat --target)."
        )
    changed_nodes = list(_changed_weights(trained, written))
    if changed_nodes:
        yield (
            "Weights with channels that were rounded again, because their scales do not fit (a zero"
            " point, a bias that fills int32, or for onnxruntime products that saturate CPUs"
            f" without VNNI): {len(changed_nodes)}"
            f" ({', '.join(changed_nodes[:_MAX_NAMES])}); all others keep their integers."
        )


def _changed_weights(trained: QdqCalibration, written: onnx.ModelProto) -> Iterator[str]:
    """Yield the nodes whose weight has other scales in the written model than in the user's.

    Equal scales mean equal integers, since the float weight is scale times integer.

    Args:
        trained: the user's Q/DQ model.
        written: the Q/DQ model that a target writes from it.
    """
    graph = Graph(written)
    for node in graph.nodes:
        if standard_type(node) not in WEIGHTED:
            continue
        try:
            _, scales = weight_grid(node, graph)
        except UnfitError:  # a float layer, or a MatMul of two activations
            continue
        trained_scales = trained.weight_scales.get(node.name)
        if trained_scales is None or not np.all(scales == trained_scales):
            yield node.name
