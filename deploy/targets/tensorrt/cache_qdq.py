"""A symmetric Q/DQ model -> the plain float model and the scales of its pairs, for DLA and 8.x.

::

    p -> t/float -> Q -> DQ -> t -> c       becomes      p -> t -> c        t: scale of the pair
    w ------------> Q -> DQ ------> c       becomes      w ------> c        (float weight as it was)
    int8 w -------------> DQ ------> c      becomes      float w -> c       (w * scale)

A cache can say one float scale a tensor and nothing else, so what it cannot say is refused: a
zero-point other than 0, a scale for each channel of an activation, two scales for one tensor,
integers at the ends of the model, operators that compute on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ExportError
from deploy.frontends import checks
from deploy.frontends.plugins import check_part_valid
from deploy.graph.edit import copied, rebuild
from deploy.graph.index import Graph, attributes, reads

if TYPE_CHECKING:
    import onnx

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_INTEGER_OPS = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "ConvInteger", "MatMulInteger")


@dataclass(frozen=True, slots=True)
class Plain:
    """What `from_qdq` gives.

    Attributes:
        model: the float model, without a Q or DQ.
        scales: activation tensor -> float32 scale of its pair, in the model's order.
        weights: weights that were stored as integers, and are now those integers times their scale.
    """

    model: onnx.ModelProto
    scales: dict[str, np.float32]
    weights: tuple[str, ...]


def from_qdq(quantized: onnx.ModelProto) -> Plain:
    """Take every Q/DQ pair out; `quantized` is left as it is.

    Raises:
        ModelError: it is no valid model.
        ExportError: nothing to take out, or something that a calibration cache cannot say.
    """
    checks.check_names(quantized)
    check_part_valid(quantized)
    return _Reader(copied(quantized)).run()


class _Reader:
    """One model being freed of its pairs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        index = Graph(model)
        self.constants = {name: checks.to_array(t) for name, t in index.constants.items()}
        self.makers, self.outputs = index.producer, index.outputs
        self.scales: dict[str, np.float32] = {}
        self.weights: list[str] = []
        self.same: dict[str, str] = {}  # output of a DQ -> the float tensor it stands for
        self.renamed: dict[str, str] = {}  # what a node makes -> the name it had before

    def run(self) -> Plain:
        """Read every pair, then rewire."""
        self._refuse_integers()
        for node in self.graph.node:
            if node.op_type == _DQ:
                self._dequantize(node)
        if not self.same:
            raise ExportError(
                "a Q/DQ model holds QuantizeLinear and DequantizeLinear nodes, got none; this model"
                " is plain already"
            )
        self._rewire()
        order = [v.name for v in self.graph.input] + [o for n in self.graph.node for o in n.output]
        scales = {name: self.scales[name] for name in order if name in self.scales}
        return Plain(self.model, scales, tuple(self.weights))

    def _refuse_integers(self) -> None:
        for node in self.graph.node:
            if node.op_type.startswith(_INTEGER_OPS):
                raise ExportError(
                    f"only QuantizeLinear and DequantizeLinear can be taken out of a model, got the"
                    f" integer operator {node.op_type}; export it in the Q/DQ form"
                )
        ends = [*self.graph.input, *self.graph.output]
        ints = [v.name for v in ends if v.type.tensor_type.elem_type in (2, 3)]
        if ints:
            raise ExportError(
                "a model that a cache is for has float inputs and outputs, got int8 at"
                f" {ints[0]!r}; export it with float ends"
            )

    def _dequantize(self, node: onnx.NodeProto) -> None:
        source, out = node.input[0], node.output[0]
        quantizer = self.makers.get(source)
        if source in self.constants:
            if self.constants[source].dtype.kind not in "iu":
                raise ExportError(
                    f"a cache is for int8, got a weight stored as {self.constants[source].dtype}"
                    f" for {out!r}; there is no cache of an fp8 model"
                )
            self.same[out] = self._constant(out, self._times(node, self.constants[source]))
            self.weights.append(source)
        elif quantizer is None or quantizer.op_type != _Q:
            maker = quantizer.op_type if quantizer is not None else "an input of the model"
            raise ExportError(
                f"each DequantizeLinear follows its QuantizeLinear, got {maker} before {out!r}"
            )
        elif quantizer.input[0] in self.constants:  # a float weight
            self.same[out] = quantizer.input[0]
        else:
            self._activation(quantizer, node)

    def _activation(self, quantizer: onnx.NodeProto, node: onnx.NodeProto) -> None:
        source, out = quantizer.input[0], node.output[0]
        source = self.same.get(source, source)
        scale = self._scale(quantizer, source)
        if self._scale(node, source) != scale:
            raise ExportError(f"the two scales of the pair on {source!r} must be equal")
        name = source
        if out in self.outputs or source == f"{out}/float":  # the tensor's name went to the DQ
            name = out
            self.renamed[source] = out
        self.same[out] = name
        if self.scales.setdefault(name, scale) != scale:
            raise ExportError(
                f"a cache has one scale a tensor, got {self.scales[name]} and {scale} for {name!r};"
                " give its pairs one scale"
            )

    def _scale(self, node: onnx.NodeProto, tensor: str) -> np.float32:
        """The one scale of an activation's Q or DQ."""
        scale = self._known(node.input[1], tensor).astype(np.float32)
        zero = self._known(node.input[2], tensor) if len(node.input) > 2 and node.input[2] else None
        if scale.size != 1:
            raise ExportError(
                f"a cache has one scale a tensor, got {scale.size} (one a channel) for {tensor!r}"
            )
        if zero is None or zero.dtype != np.int8 or zero.any():
            kind = "uint8" if zero is None else str(zero.dtype)
            point = 0 if zero is None else int(zero.reshape(-1)[0])
            raise ExportError(
                f"a cache is for symmetric int8 (zero-point 0), got {kind} with zero-point"
                f" {point} for {tensor!r}; quantize the model symmetrically"
            )
        value = np.float32(scale.reshape(-1)[0])
        if not (np.isfinite(value) and value > 0):
            raise ExportError(f"a scale is positive and finite, got {value} for {tensor!r}")
        return value

    def _times(self, node: onnx.NodeProto, integers: NDArray[Any]) -> NDArray[np.float32]:
        """What a DequantizeLinear makes of constant integers."""
        scale: NDArray[Any] = self._known(node.input[1], node.output[0]).astype(np.float32)
        zero: NDArray[Any] = np.zeros(1, np.int32)
        if len(node.input) > 2 and node.input[2]:
            zero = self._known(node.input[2], node.output[0]).astype(np.int32)
        axis = attributes(node).get("axis", 1)
        channels = [-1 if a in (axis, axis + integers.ndim) else 1 for a in range(integers.ndim)]
        try:
            scale, zero = (v.reshape(channels if v.size > 1 else ()) for v in (scale, zero))
            steps = (integers.astype(np.int32) - zero).astype(np.float32)
            return np.asarray(steps * scale, np.float32)
        except ValueError as error:
            raise ExportError(
                f"the scales of a weight must fit its axis, got {scale.size} on axis {axis} of"
                f" {list(integers.shape)} for {node.output[0]!r}"
            ) from error

    def _known(self, name: str, tensor: str) -> NDArray[Any]:
        if name not in self.constants:
            raise ExportError(
                f"scales and zero-points must be constants, got a computed one for {tensor!r};"
                " fold the model's constants first"
            )
        return self.constants[name]

    def _constant(self, name: str, array: NDArray[np.float32]) -> str:
        from onnx import numpy_helper

        if name in self.outputs:
            raise ExportError(f"an output of the model cannot be a constant, got {name!r}")
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _rewire(self) -> None:
        """Drop the pairs, let their readers read the float tensors, drop what nobody reads."""
        kept = [node for node in self.graph.node if node.op_type not in (_Q, _DQ)]
        stray = [n for n in self.graph.node if n.op_type == _Q and n.input[0] not in self.constants]
        read = {name for node in self.graph.node if node.op_type == _DQ for name in node.input}
        for node in stray:
            if node.output[0] not in read:
                raise ExportError(
                    f"a DequantizeLinear follows each QuantizeLinear, got none after {node.name!r}"
                )
        for node in kept:
            for place, name in enumerate(node.input):
                node.input[place] = self._final(name)
            for place, name in enumerate(node.output):
                node.output[place] = self.renamed.get(name, name)
        used = {name for node in kept for name in reads(node)} | self.outputs
        rebuild(self.graph, (n for n in kept if n.op_type != "Constant" or n.output[0] in used))

    def _final(self, name: str) -> str:
        name = self.same.get(name, name)
        return self.renamed.get(name, name)
