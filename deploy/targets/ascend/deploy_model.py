"""<prefix>_deploy_model.onnx: what ATC compiles. AscendQuant, int8 layer, AscendDequant.

The packed parameter of AscendDequant is one uint64 a channel::

    bits 31..0   float32 bits of scale_w * scale_d
    bits 39..32  shift N, 0
    bits 47..40  offset_w, 0

Source: hicann/ge quant_host_cpu_op_common.h; measured on AMCT's own outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.targets.ascend.quant_layer import Float32Array, QuantLayer
from deploy.targets.ascend.rewrite import Nodes, rewrite


def deploy_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Float model + integers -> deploy model.

    The activation offset is not folded into the bias: GE does that itself when it compiles.
    """
    made = rewrite(model, layers, before=_quant, after=_dequant, back=_anti_quant, store=_store)
    parameters = [_parameter(q) for q in layers.values() if q.layer.at is None]
    made.graph.initializer.extend(parameters)
    return made


def pack(dequant: Float32Array) -> NDArray[np.uint64]:
    """float32 [C] -> uint64 [C] with the scale's bits in the low half."""
    return np.ascontiguousarray(dequant).view(np.uint32).astype(np.uint64)


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
        dst_type="INT8",
    )
    return [node], f"{name}.output0"


def _dequant(q: QuantLayer, start: str, end: str) -> Nodes:
    name = f"{q.layer.name}.dequant"
    inputs = [start, f"{name}.param"]
    return [helper.make_node("AscendDequant", inputs, [end], name=name, dtype=0)]


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


def _store(name: str, value: NDArray[Any]) -> onnx.TensorProto:
    return numpy_helper.from_array(value, name)
