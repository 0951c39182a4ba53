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

from onnx import ModelProto

from deploy.graph.index import PADDED_SUFFIX


def pair_quantized_tensors(reference: ModelProto, candidate: ModelProto) -> dict[str, str]:
    """Tensor of the float model -> tensor the int8 model's layers read in its place.

    Only tensors that the int8 model quantizes and that a node of the float model makes.
    """
    read_as = {
        name.removesuffix(PADDED_SUFFIX): read for name, read in _dequantized(candidate).items()
    }
    return {
        name: read_as[name]
        for node in reference.graph.node
        for name in node.output
        if name in read_as
    }


def pair_tensors_by_name(first: ModelProto, second: ModelProto) -> dict[str, str]:
    """Return tensor of `first` -> tensor of `second` of the same name, in the first one's order.

    Either model may be a Q/DQ model; then the output of the DequantizeLinear is used. A tensor
    matches by the name of its producer's output or by the name its readers use: writers of Q/DQ
    models put a new name upstream or downstream of the Q/DQ pair.
    """
    second_reads = {
        name.removesuffix(PADDED_SUFFIX): read
        for produced, read in _readings(second)
        for name in (produced, read)
    }
    return {
        read: second_reads[own]
        for produced, read in _readings(first)
        for name in (produced, read)
        if (own := name.removesuffix(PADDED_SUFFIX)) in second_reads
    }


def _readings(model: ModelProto) -> Iterator[tuple[str, str]]:
    """(tensor that a node makes, tensor that is read in its place), without those of Q and DQ.

    Constants are left out too: they are weights, which another writer keeps as initializers.
    """
    read_as, moved = _dequantized(model), _moved(model)
    for node in model.graph.node:
        between = _is(node, "Quantize") or (_is(node, "Dequantize") and node.output[0] not in moved)
        if not between and node.op_type != "Constant":
            yield from ((name, read_as.get(name, name)) for name in node.output if name)


def _dequantized(model: ModelProto) -> dict[str, str]:
    """Return input of a QuantizeLinear -> output of the DequantizeLinear that reads its result."""
    back = {node.input[0]: node.output[0] for node in model.graph.node if _is(node, "Dequantize")}
    read_as = {
        node.input[0]: back[node.output[0]]
        for node in model.graph.node
        if _is(node, "Quantize") and node.output[0] in back
    }
    # where all readers read int8, deploy.targets.onnxruntime.qdq gives the tensor's own name to the
    # result
    return read_as | {name: name for name in (*read_as.values(), *_moved(model))}


def _moved(model: ModelProto) -> set[str]:
    """Return outputs of DequantizeLinears whose int8 input is not made by a QuantizeLinear.

    Copies of a nearest Resize or a ConvTranspose in int8 have such
    (`deploy.targets.onnxruntime.target`).
    """
    made = {
        name: _is(node, "Quantize") or node.op_type == "Constant"
        for node in model.graph.node
        for name in node.output
    }
    reads = (node for node in model.graph.node if _is(node, "Dequantize"))
    return {node.output[0] for node in reads if not made.get(node.input[0], True)}


def _is(node: object, prefix: str) -> bool:
    return getattr(node, "op_type", "") == f"{prefix}Linear"
