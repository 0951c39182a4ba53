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

from deploy.graph.index import PADDED_SUFFIX, map_producers

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"


def pair_quantized_tensors(reference: ModelProto, candidate: ModelProto) -> dict[str, str]:
    """Return tensor of the float model -> tensor that the int8 model's layers read in its place.

    Only tensors that the int8 model quantizes and that a node of the float model computes.
    """
    dequantized = {*_find_dequantized(candidate).values()}
    pairs = pair_tensors_by_name(reference, candidate)
    return {name: tensor for name, tensor in pairs.items() if tensor in dequantized}


def pair_tensors_by_name(first: ModelProto, second: ModelProto) -> dict[str, str]:
    """Return tensor of `first` -> tensor of `second` of the same name, in the order of `first`.

    Either model may be a Q/DQ model; then the output of the DequantizeLinear is used. A tensor
    matches by the name of its producer's output or by the name its readers use: writers of Q/DQ
    models put a new name upstream or downstream of the Q/DQ pair.
    """
    second_tensors = dict(_named_tensors(second))
    pairs = {}
    for name, tensor in _named_tensors(first):
        if name in second_tensors:
            pairs[tensor] = second_tensors[name]
    return pairs


def _named_tensors(model: ModelProto) -> Iterator[tuple[str, str]]:
    """Yield (name that a tensor may have in the float model, name of the tensor that layers read).

    If a Q/DQ pair follows the tensor, layers read the output of the pair. One of the two has the
    float model's name: the output if all readers read the pair, else the tensor before the pair
    (`deploy.targets.onnxruntime.qdq`). This model does not show which, so both names are yielded.
    The suffix of a tensor that was padded with channels is dropped. Constants are left out: they
    are weights.
    """
    dequantized_by_tensor = _find_dequantized(model)
    for node in model.graph.node:
        if node.op_type in (_Q, _DQ, "Constant"):
            continue  # the output of a pair is yielded with the tensor that the pair quantizes
        for output in filter(None, node.output):  # an optional output without a name is unused
            read_name = dequantized_by_tensor.get(output, output)
            yield output.removesuffix(PADDED_SUFFIX), read_name
            yield read_name.removesuffix(PADDED_SUFFIX), read_name


def _find_dequantized(model: ModelProto) -> dict[str, str]:
    """Return tensor -> output of the DequantizeLinear that layers read in its place.

    The tensor is the input of a QuantizeLinear, or integers that another node computes, such as a
    Resize (nearest) that runs on integers (`deploy.targets.onnxruntime.target`).
    """
    producers = map_producers(model.graph.node)
    dequantized_by_tensor = {}
    for node in model.graph.node:
        producer = producers.get(node.input[0]) if node.op_type == _DQ else None
        if producer is None or producer.op_type == "Constant":  # no DequantizeLinear, or a weight
            continue
        tensor = producer.input[0] if producer.op_type == _Q else node.input[0]
        dequantized_by_tensor[tensor] = node.output[0]
    return dequantized_by_tensor
