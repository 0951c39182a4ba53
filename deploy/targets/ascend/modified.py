"""<prefix>_modified_model.onnx: the float model with the weights that AdaRound rounded.

As in AMCT, whose quantize_model leaves such a model beside the record: a record holds scales alone,
and only with these weights do they give the codes again. It is left too where layers shared their
weights, which AMCT refuses: here each has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from onnx import numpy_helper

from deploy.graph.index import Graph
from deploy.targets.ascend.quant_layer import (
    QuantLayer,
    array_of,
    balanced_weight,
    from_rows,
    rows_of,
)
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.rewrite import rewrite_inputs

if TYPE_CHECKING:
    import onnx

    from deploy.targets.ascend.layers import LayerGraph

_NEAR = 0.01  # of a step: what factors and float32 leave of a weight on its code


def modified_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """A copy of the float model with what AdaRound's codes stand for as weights."""
    index, arrays = Graph(model), {}
    for q in layers.values():
        if q.record.rounded is None:
            continue
        name, layer = q.layer.weight, q.layer
        shape = rows_of(array_of(index, name), layer).shape
        scale = q.record.scale_w.reshape((-1,) + (1,) * (len(shape) - 1))
        weight = from_rows(q.record.rounded.reshape(shape) * scale, layer)
        inverse = np.asarray(1 / q.record.factors, np.float32)
        arrays[name] = numpy_helper.from_array(balanced_weight(weight, layer, inverse), name)
    return rewrite_inputs(model, {}, arrays, {})


def unrounded(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records: Mapping[str, LayerRecord],
    names: list[str],
) -> list[str]:
    """Those of the layers that AdaRound rounded whose weights are not on codes in this model."""
    index, found = Graph(model), []
    for name in names:
        if name not in records or name not in graph.layers:
            continue
        layer, record = graph.layers[name], records[name]
        rows = rows_of(balanced_weight(array_of(index, layer.weight), layer, record.factors), layer)
        steps = rows / record.scale_w.reshape((-1,) + (1,) * (rows.ndim - 1))
        if np.abs(steps - np.rint(steps)).max() > _NEAR:
            found.append(name)
    return found
