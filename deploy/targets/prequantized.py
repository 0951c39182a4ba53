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
from deploy.graph.index import Graph
from deploy.graph.placement import WEIGHTED, Placement
from deploy.graph.plan import FLOAT32, Decision
from deploy.graph.refusal import find_shape_refusal

_SHOWN = 3  # names in a sentence


def refuse_options(trained: QdqCalibration, target: str, given: dict[str, bool]) -> None:
    """Refuse target options that decide how a float model is quantized.

    `given`: flag -> whether it was given.
    """
    refused = next((flag for flag, is_given in given.items() if is_given), None)
    if refused is not None:
        raise ConfigError(
            f"{refused} decides how {target} quantizes a float model, got it with"
            f" {trained.name}, which is quantized already; leave it out, or give the float model"
        )


def qdq_decisions(
    trained: QdqCalibration, model: onnx.ModelProto, placement: Placement
) -> tuple[Decision, ...]:
    """Return each node's precision if the Q/DQ model runs unchanged.

    `model`: the float model that was extracted from it. `placement`: that of a target whose
    kernels write integers.
    """
    decisions = []
    graph = Graph(model)
    for node in model.graph.node:
        why = trained.float_reasons.get(node.name, "")
        kernel = node.op_type in placement.heavy_or_glue or node.op_type in ("Relu", "Clip")
        if not why and not kernel:
            why = f"{node.op_type} is not run in {placement.precision_name} on {placement.name}"
        if not why and node.op_type in placement.heavy:
            why = find_shape_refusal(graph, node, placement)
        writes = node.op_type in WEIGHTED and node.op_type not in ("Gemm", "MatMul")
        if not why and writes and node.name not in trained.nodes_with_output_pair:
            why = f"no pair stands on what it makes in {Path(trained.name).name}"
        precision = FLOAT32 if why else placement.grid.name
        decisions.append(Decision(node.name, node.op_type, precision, why))
    return tuple(decisions)


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
    how: str,
) -> Iterator[str]:
    """Yield the notes for a Q/DQ model that is rewritten on another grid.

    `decisions`: precisions of its nodes in `written`. `how`: end of the sentence about the grid.
    """
    yield f"{Path(trained.name).name} has activations in {trained.grid_text}; {how}."
    lost = [
        one.node
        for one in decisions
        if one.op_type in WEIGHTED and not one.quantized and one.node not in trained.float_reasons
    ]
    if lost:
        yield (
            "Layers that are int8 in the given model and float here, since a tensor has no scale or"
            f" the target has no kernel: {len(lost)} ({', '.join(lost[:_SHOWN])}); quantize for"
            f" {target} to have them in int8 (calib8 qat --target)."
        )
    changed = [name for name, same in _weights(trained, written) if not same]
    if changed:
        yield (
            "Weights with channels that were rounded again, because their scales do not fit (a zero"
            f" point, or a bias that fills int32): {len(changed)} ({', '.join(changed[:_SHOWN])});"
            " all others keep their integers."
        )


def _weights(trained: QdqCalibration, written: onnx.ModelProto) -> Iterator[tuple[str, bool]]:
    """Yield (node, whether its written weight has the scales it was trained with).

    Equal scales mean equal integers, since the float weight is scale times integer.
    """
    index = Graph(written)
    for node in index.nodes:
        if node.op_type not in WEIGHTED:
            continue
        try:
            scales = weight_grid(node, index)[1]
        except UnfitError:  # a float layer, or a MatMul of two activations
            continue
        before = trained.weight_scales.get(node.name)
        yield node.name, before is not None and bool(np.all(scales == before))
