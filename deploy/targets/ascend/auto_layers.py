"""Biases corrected one layer after the other: what int8 moves a channel's mean by is taken out.

::

    float      mean of a channel of layer k                 wanted
    int8       layers 1 .. k-1 corrected already            found       b_k + wanted - found

Each layer is measured behind the corrected ones, so it takes out what is its own and what it gets
from those before it. A bias is an int32 in steps of scale_w * scale_d, so this costs no time on the
device; the float model with the new biases is what all files are made of.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), appendix D (the correction on data, layer by layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.correction import trusted_mean
from deploy.feed.parallel import Sample, in_order
from deploy.graph.edit import copied, cut, drop_unread, unused, with_outputs
from deploy.graph.index import Graph, users
from deploy.progress import phase
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import Layer, LayerGraph, find_layers
from deploy.targets.ascend.quant_layer import (
    array_of,
    bias_steps,
    quantize_layers,
    rows_of,
    step_of,
)
from deploy.targets.ascend.record import LayerRecord
from deploy.tensors import Array

if TYPE_CHECKING:
    import onnx

Biases = Mapping[str, NDArray[np.float32]]  # layer -> [C_out]


def corrected_biases(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records: Mapping[str, LayerRecord],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, NDArray[np.float32]]:
    """Biases with which the int8 layers keep the means that their channels have in float.

    Args:
        model: float model, nodes named.
        graph: its layers.
        records: of the layers in int8.
        samples: a few of the calibration's.
        threads: samples that run beside each other; the result does not depend on it.

    Returns:
        Layer -> bias [C_out], of every layer in int8 that can hold one.

    Raises:
        ExportError: a layer is outside what the hardware takes.
        BackendError: ONNX Runtime could not run a form of the model.
    """
    able = {n: one for n, one in graph.layers.items() if n in records and one.holds_bias}
    index = Graph(model)
    found = {name: _bias(index, layer) for name, layer in able.items()}
    wanted = _means(model, list(able.values()), samples, threads)
    plain = with_biases(model, graph, found)
    layers = quantize_layers(plain, find_layers(plain), records)
    int8 = fake_quant_model(plain, layers)
    stored = {tensor.name: tensor for tensor in int8.graph.initializer}
    with phase("correcting biases", len(able), "layers") as step:
        for name, layer in able.items():
            means = _means(cut(int8, layer.output), [layer], samples, threads)
            change = trusted_mean(wanted[name] - means[name])
            found[name] = np.asarray(found[name] + change, np.float32)
            steps = bias_steps(found[name], step_of(records[name]))
            _put(stored[layers[name].layer.bias], steps)
            step()
    return found


def with_biases(model: onnx.ModelProto, graph: LayerGraph, biases: Biases) -> onnx.ModelProto:
    """A copy of the float model whose layers have these biases, each an initializer of its own."""
    from onnx import numpy_helper

    changed = copied(model)
    nodes = {node.name: node for node in changed.graph.node}
    taken = {*users(model.graph), *(tensor.name for tensor in model.graph.initializer)}
    for name, values in biases.items():
        layer = graph.layers[name]
        own = unused(f"{name}.bias", taken)
        taken.add(own)
        changed.graph.initializer.append(numpy_helper.from_array(values, own))
        if layer.bias_add:
            add = nodes[layer.bias_add]
            add.input[list(add.input).index(layer.bias)] = own
        else:
            del nodes[name].input[2:]
            nodes[name].input.append(own)
    drop_unread(changed.graph)
    return changed


def _bias(index: Graph, layer: Layer) -> NDArray[np.float32]:
    """The bias of every output channel, [C_out]; zeros where there is none."""
    if layer.bias:
        return array_of(index, layer.bias).reshape(-1)
    rows = rows_of(array_of(index, layer.weight), layer)
    return np.zeros(len(rows), np.float32)


def _means(
    model: onnx.ModelProto, layers: Sequence[Layer], samples: Sequence[Sample], threads: int
) -> dict[str, NDArray[np.float64]]:
    """Layer -> the means of its output's channels, a row a sample: [samples, C_out]."""
    tapped = with_outputs(model, [layer.output for layer in layers])
    session = OrtSession.open(tapped, threads=1, spin=False)
    rows: list[dict[str, NDArray[np.float64]]] = []

    def work(_: int, __: int, sample: Sample) -> dict[str, NDArray[np.float64]]:
        values = session.run(sample)
        return {layer.name: _channel_means(values[layer.output], layer) for layer in layers}

    in_order(samples, work, lambda _, row: rows.append(row), threads=threads)
    return {layer.name: np.stack([row[layer.name] for row in rows]) for layer in layers}


def _channel_means(value: Array, layer: Layer) -> NDArray[np.float64]:
    """A layer's output -> the means of its channels, [C_out]."""
    channels = np.moveaxis(value, layer.channel_axis, -1)
    means = channels.reshape(-1, channels.shape[-1]).mean(axis=0, dtype=np.float64)
    return np.asarray(means, np.float64)


def _put(tensor: onnx.TensorProto, steps: NDArray[np.int32]) -> None:
    """Let an initializer of a fake-quant model hold these integers, as floats."""
    from onnx import numpy_helper

    tensor.CopyFrom(numpy_helper.from_array(steps.astype(np.float32), tensor.name))
