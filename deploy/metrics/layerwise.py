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


def _without_padding(tensor: str) -> str:
    """Return the name of a tensor without the suffix for additional channels of zeros."""
    return tensor.removesuffix(PADDED_SUFFIX)


def _named_tensors(model: ModelProto) -> Iterator[tuple[str, str]]:
    """Yield (name to find a tensor by, name of the tensor that layers read in its place).

    Layers read the output of a tensor's Q/DQ pair (QuantizeLinear, DequantizeLinear), or the tensor
    itself if it has no pair. It can be found by both names, without the suffix that marks a tensor
    padded with channels. Constants are left out: they are weights, which other models hold as
    initializers.
    """
    dequantized_by_tensor = _find_dequantized(model)
    computed_as_integers = _dequantized_from_kernels(model)  # no QuantizeLinear before the DQ
    for node in model.graph.node:
        if node.op_type in (_Q, "Constant"):
            continue
        if node.op_type == _DQ and node.output[0] not in computed_as_integers:
            continue  # yielded with the tensor in front of its pair
        for output in filter(None, node.output):  # an optional output without a name is unused
            tensor = dequantized_by_tensor.get(output, output)
            yield _without_padding(output), tensor
            yield _without_padding(tensor), tensor


def _find_dequantized(model: ModelProto) -> dict[str, str]:
    """Return tensor -> tensor that layers read in its place, the output of a DequantizeLinear (DQ).

    The keys are the inputs of Q/DQ pairs. The outputs of DQs are keys too, with themselves as
    values, since the float model's tensor may be found under their name: if every reader reads
    int8, the pair's output has that name (`deploy.targets.onnxruntime.qdq`).
    """
    dequantized_by_integers = {}  # input of a DQ -> its output
    for node in model.graph.node:
        if node.op_type == _DQ:
            dequantized_by_integers[node.input[0]] = node.output[0]
    dequantized_by_tensor = {}
    for node in model.graph.node:
        if node.op_type == _Q and node.output[0] in dequantized_by_integers:
            dequantized_by_tensor[node.input[0]] = dequantized_by_integers[node.output[0]]
    for name in (*dequantized_by_tensor.values(), *_dequantized_from_kernels(model)):
        dequantized_by_tensor[name] = name
    return dequantized_by_tensor


def _dequantized_from_kernels(model: ModelProto) -> set[str]:
    """Return outputs of DequantizeLinears whose integers no QuantizeLinear computes.

    A Resize (nearest) or ConvTranspose that runs on integers gives such
    (`deploy.targets.onnxruntime.target`).
    """
    kernel_outputs: set[str] = set()
    for node in model.graph.node:
        if node.op_type not in (_Q, "Constant"):
            kernel_outputs.update(node.output)
    dequantized = set()
    for node in model.graph.node:
        if node.op_type == _DQ and node.input[0] in kernel_outputs:
            dequantized.add(node.output[0])
    return dequantized
