"""The model whose activations AMCT looks at: weights fake-quantized, inputs balanced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import arq_fake_quantize
from deploy.graph.index import Graph
from deploy.targets.ascend.config_types import QuantConfig
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.weight_rounding import adaptive

if TYPE_CHECKING:
    import onnx

_NONE = np.zeros(0, np.float32)


def prepared_model(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    weights: Mapping[str, tuple[NDArray[np.float32], NDArray[np.int32]]],
    factors: Mapping[str, NDArray[np.float32]],
    rounded: Mapping[str, NDArray[np.int8]] | None = None,
) -> onnx.ModelProto:
    """The float model to observe: weights fake-quantized, inputs divided by DMQ factors.

    Of AdaRound's layers those that are `rounded` are so, the others stay as they are.
    """
    from onnx import numpy_helper

    from deploy.targets.ascend.quant_layer import array_of, balanced_weight, from_rows, rows_of
    from deploy.targets.ascend.rewrite import rewrite_inputs

    index, integers = Graph(model), rounded or {}
    arrays = {}
    for name, layer in layers.items():
        if not layer.weight:
            continue
        weight = balanced_weight(array_of(index, layer.weight), layer, factors.get(name, _NONE))
        rows = rows_of(weight, layer)
        if name in integers:
            shape = (-1,) + (1,) * (rows.ndim - 1)
            rows = integers[name].reshape(rows.shape) * weights[name][0].reshape(shape)
        elif layer.kind != "ConvTranspose" and not adaptive(config, name):  # AMCT leaves it
            bits = config.layers[name].weight.num_bits
            rows = np.asarray(arq_fake_quantize(rows, *weights[name], bits=bits), np.float32)
        arrays[layer.weight] = numpy_helper.from_array(from_rows(rows, layer), layer.weight)
    inverse = {n: np.float32(1) / f for n, f in factors.items() if n in layers}
    return rewrite_inputs(model, layers, arrays, inverse)
