"""Pairs of inner tensors of a float and an int8 model, to compare layer by layer.

Top-1 hardly moves if one layer is badly quantized, but its tensors differ. A tensor of the float
model is compared with the one that the int8 model's next layers read in its place, the output of
the DequantizeLinear downstream::

    float   ... Conv --X--> Relu ...
    int8    ... Conv --X--> QuantizeLinear --> DequantizeLinear --X'--> Relu ...
                                                        compared: X and X'

If X' has additional all-zero channels (`deploy.targets.onnxruntime.depthwise_rewrite`), only the
first ones are compared.
"""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto

from deploy.graph.index import PADDED_SUFFIX


def pair_quantized_tensors(reference: ModelProto, candidate: ModelProto) -> dict[str, str]:
    """Return tensor of the float model -> tensor that the int8 model's layers read in its place.

    Only tensors that the int8 model quantizes and that a node of the float model makes.
    """
    reading_by_tensor = {}
    for name, reading in _dequantized_readings(candidate).items():
        reading_by_tensor[_without_padding(name)] = reading
    pairs = {}
    for node in reference.graph.node:
        for name in node.output:
            if name in reading_by_tensor:
                pairs[name] = reading_by_tensor[name]
    return pairs


def pair_tensors_by_name(first: ModelProto, second: ModelProto) -> dict[str, str]:
    """Return tensor of `first` -> tensor of `second` of the same name, in the first one's order.

    Either model may be a Q/DQ model; then the output of the DequantizeLinear is used. A tensor
    matches by the name of its producer's output or by the name its readers use: writers of Q/DQ
    models put a new name upstream or downstream of the Q/DQ pair.
    """
    second_readings = dict(_named_readings(second))
    pairs = {}
    for name, reading in _named_readings(first):
        if name in second_readings:
            pairs[reading] = second_readings[name]
    return pairs


def _without_padding(tensor: str) -> str:
    return tensor.removesuffix(PADDED_SUFFIX)


def _named_readings(model: ModelProto) -> Iterator[tuple[str, str]]:
    """Yield (name of a tensor, tensor that is read in its place), for both names of a tensor.

    Outputs of QuantizeLinear and DequantizeLinear are left out, unless an int8 kernel made the
    integers. So are constants: they are weights, which another writer keeps as initializers.
    """
    readings = _dequantized_readings(model)
    from_kernels = _dequantized_from_kernels(model)
    for node in model.graph.node:
        is_in_pair = _is_quantize(node) or (
            _is_dequantize(node) and node.output[0] not in from_kernels
        )
        if is_in_pair or node.op_type == "Constant":
            continue
        for output in filter(None, node.output):
            reading = readings.get(output, output)
            yield _without_padding(output), reading
            yield _without_padding(reading), reading


def _dequantized_readings(model: ModelProto) -> dict[str, str]:
    """Return input of a QuantizeLinear -> output of the DequantizeLinear that reads its result.

    Outputs of DequantizeLinear are read as themselves.
    """
    dequantized, readings = {}, {}
    for node in model.graph.node:
        if _is_dequantize(node):
            dequantized[node.input[0]] = node.output[0]
    for node in model.graph.node:
        if _is_quantize(node) and node.output[0] in dequantized:
            readings[node.input[0]] = dequantized[node.output[0]]
    # where all readers read int8, deploy.targets.onnxruntime.qdq gives the tensor's own name to the
    # result
    for name in (*readings.values(), *_dequantized_from_kernels(model)):
        readings[name] = name
    return readings


def _dequantized_from_kernels(model: ModelProto) -> set[str]:
    """Return outputs of DequantizeLinears whose int8 input is not made by a QuantizeLinear.

    Copies of a nearest Resize or a ConvTranspose in int8 have such
    (`deploy.targets.onnxruntime.target`).
    """
    kernel_outputs: set[str] = set()
    for node in model.graph.node:
        if not _is_quantize(node) and node.op_type != "Constant":
            kernel_outputs.update(node.output)
    dequantized = set()
    for node in model.graph.node:
        if _is_dequantize(node) and node.input[0] in kernel_outputs:
            dequantized.add(node.output[0])
    return dequantized


def _is_quantize(node: NodeProto) -> bool:
    return node.op_type == "QuantizeLinear"


def _is_dequantize(node: NodeProto) -> bool:
    return node.op_type == "DequantizeLinear"
