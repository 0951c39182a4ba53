"""<prefix>_fake_quant_model.onnx: the same integers in plain float ops, for any ONNX runtime.

::

    x -> Mul 1/scale_d -> Round -> Add offset -> Clip -128 127 -> Sub offset -> layer -> Mul dqscale

(Clip to -8 and 7 or to -32768 and 32767 where activations are of 4 or 16 bits.) An input of an Add
or MaxPool that is quantized by itself has Mul scale_d behind Sub.

Weights and biases hold integers as floats. Offset is added after rounding here and before it in
AscendQuant, so at exact halves the two differ by one code where the offset is odd.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx
from onnx import helper, numpy_helper

from calibrators.amct.grid import ascend_range
from deploy.targets.ascend.quant_layer import QuantLayer
from deploy.targets.ascend.rewrite import Form, Nodes, make_constant, rewrite


def fake_quant_model(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], *, npu_rounding: bool = False
) -> onnx.ModelProto:
    """Float model + integers -> model of the same numerics in standard operators.

    Args:
        model: float model, nodes named.
        layers: integers by node name.
        npu_rounding: add offset before rounding, as AscendQuant does, not after, as AMCT's own
            fake-quant models do.
    """
    before = partial(_quant, npu_rounding=npu_rounding)
    form = Form(before=before, after=_dequant, back=_anti_quant, weight=_weight, bias=_bias)
    return rewrite(model, layers, form)


def _quant(q: QuantLayer, start: str, *, npu_rounding: bool) -> tuple[Nodes, str]:
    name = f"{q.layer.stem}.quant.fakequant"
    low, high = ascend_range(q.record.act_bits)
    values = {
        "scale": float(q.scale),
        "offset": q.record.offset_d,
        "min_val": low,
        "max_val": high,
    }
    constants = [make_constant(f"{name}.{k}", np.float32(v)) for k, v in values.items()]
    scale, offset, least, most = (node.output[0] for node in constants)
    steps = [
        ("Mul", "mul", [scale]),
        ("Round", "round", []),
        ("Add", "add", [offset]),
        ("Clip", "clip", [least, most]),
        ("Sub", "sub", [offset]),
    ]
    if npu_rounding:
        steps[1], steps[2] = steps[2], steps[1]
    nodes, tensor = list(constants), start
    for op, word, others in steps:
        output = f"{name}.{word}.output0"
        nodes.append(helper.make_node(op, [tensor, *others], [output], name=f"{name}.{word}"))
        tensor = output
    return nodes, tensor


def _dequant(q: QuantLayer, start: str, end: str) -> Nodes:
    name = f"{q.layer.name}.fakedequant"
    rank = q.layer.rank if q.layer.weight else 0
    shape = (1, -1, *[1] * rank)
    constant = make_constant(f"{name}.dqscale", q.dequant.reshape(shape))
    return [
        constant,
        helper.make_node("Mul", [start, constant.output[0]], [end], name=f"{name}.mul"),
    ]


def _anti_quant(q: QuantLayer, start: str) -> tuple[Nodes, str]:
    name = f"{q.layer.stem}.anti_quant.fake_antiquant"
    scale = make_constant(f"{name}.scale", np.float32(q.record.scale_d))
    output = f"{name}.mul.output0"
    mul = helper.make_node("Mul", [start, scale.output[0]], [output], name=f"{name}.mul")
    return [scale, mul], output


def _weight(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.weight is not None
    return numpy_helper.from_array(q.weight.astype(np.float32), name)


def _bias(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.bias is not None
    return numpy_helper.from_array(q.bias.astype(np.float32), name)
