"""What a target makes of a Q/DQ model: kept as it is where the grid is its own, else written anew.

::

    uint8 activations --.--> ONNX Runtime: the model itself         TensorRT: int8, zero point 0,
                         '-> Ascend: the same codes less 128                  the same real range
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.errors import ConfigError
from deploy.frontends.pairs import UnfitError, weight_grid
from deploy.graph.index import Graph
from deploy.graph.placement import WEIGHTED, Placement
from deploy.graph.plan import FLOAT32, Decision
from deploy.graph.refusal import form_refusal

if TYPE_CHECKING:
    import onnx

    from deploy.frontends.base import Trained

_TOLD = 3  # names in a sentence


def refuse_options(trained: Trained, target: str, given: dict[str, bool]) -> None:
    """Refuse options of a target that say how a float model is quantized.

    Args:
        trained: the model.
        target: its name.
        given: flag -> whether it was given.

    Raises:
        ConfigError: there is one.
    """
    asked = next((flag for flag, was in given.items() if was), None)
    if asked is not None:
        raise ConfigError(
            f"{asked} decides how {target} quantizes a float model, got it with"
            f" {trained.name}, which is quantized already; leave it away, or give the float model"
        )


def decisions_of(
    trained: Trained, model: onnx.ModelProto, placement: Placement
) -> tuple[Decision, ...]:
    """What each node of the float model is where the Q/DQ model is run as it stands.

    Args:
        trained: the Q/DQ model.
        model: the float model that was taken out of it.
        placement: of the target, whose kernels write integers.
    """
    found = []
    graph = Graph(model)
    for node in model.graph.node:
        why = trained.floats.get(node.name, "")
        kernel = node.op_type in placement.heavy_or_glue or node.op_type in ("Relu", "Clip")
        if not why and not kernel:
            why = f"{node.op_type} is not run in {placement.word} on {placement.name}"
        if not why and node.op_type in placement.heavy:
            why = form_refusal(graph, node, placement)
        writes = node.op_type in WEIGHTED and node.op_type not in ("Gemm", "MatMul")
        if not why and writes and node.name not in trained.written:
            why = f"no pair stands on what it makes in {Path(trained.name).name}"
        precision = FLOAT32 if why else placement.grid.name
        found.append(Decision(node.name, node.op_type, precision, why))
    return tuple(found)


def kept_note(trained: Trained) -> str:
    """A sentence on a model that stays as it is."""
    return (
        f"Kept to the bit: the pairs of {Path(trained.name).name} and the integers of its weights."
    )


def anew_notes(
    trained: Trained, written: onnx.ModelProto, decisions: Iterable[Decision], target: str, how: str
) -> Iterator[str]:
    """Sentences on a model that is written on another grid.

    Args:
        trained: the Q/DQ model.
        written: what was written of it.
        decisions: what its nodes are now.
        target: whose grid that is.
        how: the end of the sentence on the grid.
    """
    yield f"{Path(trained.name).name} has activations in {trained.kinds}; {how}."
    lost = [
        one.node
        for one in decisions
        if one.op_type in WEIGHTED and not one.quantized and one.node not in trained.floats
    ]
    if lost:
        yield (
            f"Layers in int8 there and in float here, where a tensor has no scale or the target no"
            f" kernel: {len(lost)} ({', '.join(lost[:_TOLD])}); quantize for {target} to have them"
            " in int8 (calib8 qat --target)."
        )
    changed = [name for name, same in _weights(trained, written) if not same]
    if changed:
        yield (
            "Weights with channels that were rounded again, whose scales do not fit (a zero point,"
            f" or no room beside the bias in int32): {len(changed)} ({', '.join(changed[:_TOLD])});"
            " all others keep their integers."
        )


def _weights(trained: Trained, written: onnx.ModelProto) -> Iterator[tuple[str, bool]]:
    """Each quantized weight of what was written, and whether it has the scales it was trained on.

    With these it has the integers too: the float weight is their product.
    """
    index = Graph(written)
    for node in index.nodes:
        if node.op_type not in WEIGHTED:
            continue
        try:
            scales = weight_grid(node, index)[1]
        except UnfitError:  # a float layer, or of two activations
            continue
        own = trained.weights.get(node.name)
        yield node.name, own is not None and bool(np.all(scales == own))
