"""<prefix>_deploy_model.onnx: what ATC compiles. AscendQuant, int8 layer, AscendDequant.

The packed parameter of AscendDequant is one uint64 a channel::

    bits 31..0   float32 bits of scale_w * scale_d
    bits 39..32  shift N, 0
    bits 47..40  offset_w, 0

Weights of 4 bits are int8 tensors of half as many input channels, two integers a byte.

Source: hicann/ge quant_host_cpu_op_common.h; measured on AMCT's own outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.targets.ascend.quant_layer import Float32Array, QuantLayer
from deploy.targets.ascend.rewrite import Form, Nodes, rewrite

# AMCT leaves no sign of weights that are two to a byte; ATC passes over attributes it does not know
PACKED = "wts_type"


def deploy_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Float model + integers -> deploy model.

    The activation offset is not folded into the bias: GE does that itself when it compiles.
    """
    form = Form(
        before=_quant,
        after=_dequant,
        back=_anti_quant,
        weight=_weight,
        bias=_bias,
        behind_bias=_behind_bias,
    )
    made = rewrite(model, layers, form)
    parameters = [_parameter(q) for q in layers.values() if q.layer.at is None]
    made.graph.initializer.extend(parameters)
    return made


def pack(dequant: Float32Array) -> NDArray[np.uint64]:
    """float32 [C] -> uint64 [C] with the scale's bits in the low half."""
    return np.ascontiguousarray(dequant).view(np.uint32).astype(np.uint64)


def packed_axis(kind: str) -> int:
    """Axis of the input channels of a weight in the deploy model."""
    return {"Conv": 1, "ConvTranspose": 0}.get(kind, -2)


def pack_fours(weight: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Integers in [-8, 7] -> int8, two neighbours along `axis` in one: the first in the low half.

    Args:
        weight: an even number of them along `axis`.
        axis: that of the input channels.
    """
    nibbles = np.moveaxis(weight, axis, -1).view(np.uint8) & 15
    pairs = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(np.int8)
    return np.ascontiguousarray(np.moveaxis(pairs, -1, axis))


def unpack_fours(packed: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Inverse of `pack_fours`."""
    bytes_ = np.moveaxis(packed, axis, -1)
    halves = np.stack((bytes_ << 4 >> 4, bytes_ >> 4), axis=-1)  # shifts keep the sign
    whole = halves.reshape(*bytes_.shape[:-1], 2 * bytes_.shape[-1])
    return np.ascontiguousarray(np.moveaxis(whole, -1, axis), np.int8)


def unpack(parameter: NDArray[np.uint64]) -> Float32Array:
    """Inverse of `pack`; shift and offset are not looked at."""
    low = (parameter & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.asarray(low.view(np.float32))


def _quant(q: QuantLayer, start: str) -> tuple[Nodes, str]:
    name = f"{q.layer.stem}.quant"
    node = helper.make_node(
        "AscendQuant",
        [start],
        [f"{name}.output0"],
        name=name,
        scale=float(q.scale),
        offset=float(q.record.offset_d),
        dst_type=f"INT{q.record.act_bits}",
    )
    return [node], f"{name}.output0"


def _dequant(q: QuantLayer, start: str, end: str) -> Nodes:
    name = f"{q.layer.name}.dequant"
    inputs = [start, f"{name}.param"]
    node = helper.make_node("AscendDequant", inputs, [end], name=name, dtype=0)
    if q.record.weight_bits == 4:
        node.attribute.append(helper.make_attribute(PACKED, "INT4"))
    return [node]


def _anti_quant(q: QuantLayer, start: str) -> tuple[Nodes, str]:
    """(q - offset) * scale, in float32; the operator adds, and ATC's parser turns the sign."""
    assert q.record.scale_d is not None
    name = f"{q.layer.stem}.anti_quant"
    node = helper.make_node(
        "AscendAntiQuant",
        [start],
        [f"{name}.output0"],
        name=name,
        scale=float(q.record.scale_d),
        offset=float(q.record.offset_d),
        dst_type="INT8",
        dtype=0,
    )
    return [node], f"{name}.output0"


def _parameter(q: QuantLayer) -> onnx.TensorProto:
    values = pack(q.dequant)
    return helper.make_tensor(
        f"{q.layer.name}.dequant.param", onnx.TensorProto.UINT64, [values.size], values.tolist()
    )


def _weight(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.weight is not None
    if q.record.weight_bits != 4:
        return numpy_helper.from_array(q.weight, name)
    return numpy_helper.from_array(pack_fours(q.weight, packed_axis(q.layer.kind)), name)


def _bias(name: str, q: QuantLayer) -> onnx.TensorProto:
    assert q.bias is not None
    return numpy_helper.from_array(q.bias, name)


def _behind_bias(q: QuantLayer, bias: str) -> tuple[Nodes, str]:
    """Beside activations of 4 bits AMCT casts the int32 bias to float."""
    if q.record.act_bits != 4:
        return [], bias
    name = f"{q.layer.name}.bias_quant"
    cast = helper.make_node("Cast", [bias], [f"{name}.output0"], name=name, to=1)
    return [cast], cast.output[0]
