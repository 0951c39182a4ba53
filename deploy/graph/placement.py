"""Q/DQ placement rules: where each target wants pairs, and on which grid.

A `Placement` holds the rules of one target. `deploy.graph.plan` applies it to a model;
`deploy.graph.refusal` says which nodes it leaves float.

TensorRT wants pairs on inputs only. A residual Add is fused into a heavy node that makes one of its
inputs for it alone, and reads the other input, the skip branch, in int8. Pointwise operators, data
movement and norms between int8 nodes stay float without separating them::

    x --[Q DQ]--> Conv --> Sigmoid, Mul --> Add --> Concat --[Q DQ]--> Conv
      '----- the pair's second reader -------'

Sources: ModelOpt 0.47, `build_non_residual_input_map` and `find_quantizable_nodes`; TensorRT's
developer guide, "Q/DQ layer-placement recommendations"; NVIDIA/TensorRT issue 4366.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx
from onnx import numpy_helper

from calibrators.grids import FP8, INT8, UINT8, Grid
from deploy.graph.index import GATE, Graph, attributes, names_of, optional_input, standard_type

MOVES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})
CUTS = frozenset({"Pad", "Slice"})
POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})
AVERAGES = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
POINTWISE = frozenset(
    {"Relu", "Clip", "Sigmoid", "Mul", "LeakyRelu", "PRelu", "HardSigmoid", "HardSwish", "Tanh"}
)
# a norm, or the nodes that exporters decompose it into
NORM = frozenset({"LayerNormalization", "ReduceMean", "Sub", "Pow", "Sqrt", "Div"})
WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # where int8 is the gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Q/DQ placement rules and grids of a target.

    Attributes:
        name: name of the target in reasons and reports.
        grid: grid of the activations.
        weights: grid of the weights.
        heavy: op types that gain from an int8 kernel.
        glue: op types that pass int8 on.
        keeps_scale: op types whose output must have the input's scale.
        runs_on_onnxruntime: the rules of ONNX Runtime's integer kernels hold. Pairs stand after
            every int8 node too, not on inputs only as for TensorRT, and biases are int32 with a
            DequantizeLinear. A 2-D MatMul and the Add of its bias form one Gemm. An Add or Mul of a
            tensor and a scalar is glue too, with the scalar in int8. A ConvTranspose stays float
            unless it makes one tile of each pixel, and glue if its kernel is missing or computes
            something else.
        runs_on_dla: the rules of DLA, NVIDIA's accelerator in Jetson chips, hold. Pairs stand on
            all inputs and outputs of every node that can run on the grid.
        per_tensor: op types whose weights get one scale per tensor.
        passes_int8: op types that stay float between an int8 node and glue without separating them.
        float_after_concat: readers of a Concat stay float unless int8 nodes make all its inputs.
        separates_tail: op types with a pair between them and their tail.
        min_products: a Conv on a model input with fewer products per output value than this stays
            float, and one on a picture of one channel, unless a MaxPool follows or it makes many
            values of each input value.
        min_channels: op type -> layers with fewer input or output channels stay float.
        max_window: a Conv with a window of more elements stays float; 0 for no limit.
        allows_groups: whether a Conv may have groups.
        limits_pair_sums: store weights so that no CPU saturates the sum of two adjacent products
            (`calibrators.weights`).
    """

    name: str
    grid: Grid
    heavy: frozenset[str]
    glue: frozenset[str]
    keeps_scale: frozenset[str]
    runs_on_onnxruntime: bool = False
    runs_on_dla: bool = False
    weights: Grid = INT8
    per_tensor: frozenset[str] = frozenset()
    passes_int8: frozenset[str] = frozenset()
    float_after_concat: bool = False
    separates_tail: frozenset[str] = frozenset()
    min_products: int = 0
    min_channels: Mapping[str, int] = field(default_factory=dict)
    max_window: int = 0
    allows_groups: bool = True
    limits_pair_sums: bool = False

    @property
    def runnable_op_types(self) -> frozenset[str]:
        """Op types that can run on the grid."""
        return self.heavy | self.glue

    @property
    def precision_name(self) -> str:
        """Name of the grid in reasons: "int8" for any zero point, or "fp8"."""
        return INT8.name if self.grid.kind == "integer" else self.grid.name


ONNXRUNTIME = Placement(
    name="onnxruntime",
    grid=UINT8,
    heavy=WEIGHTED,
    glue=MOVES
    | CUTS
    | POOLS
    | {"Add", "Mul", "Sigmoid", "LeakyRelu", "Concat", "Resize", "Split", "ReduceMean", GATE},
    keeps_scale=MOVES | CUTS | {"MaxPool", "Resize", "Split"},
    runs_on_onnxruntime=True,
    # 3 colours times 3x3 are 27 products: the int8 kernel's im2col costs as much as it saves, or
    # more (EfficientNet-Lite0 on AVX512-VNNI: 1.86x as fast as FP32 with the first Conv in int8,
    # 2.05x without; 2.07x either way in ONNX Runtime 1.32)
    min_products=32,
    limits_pair_sums=True,
)
TENSORRT = Placement(
    name="tensorrt",
    grid=INT8,
    heavy=WEIGHTED,
    glue=POOLS | {"Add", "ReduceMean"},
    keeps_scale=MOVES | {"MaxPool", "Resize", "Split"},
    # pointwise operators, and a residual Add with them, are fused into the layer upstream
    passes_int8=MOVES | POOLS | POINTWISE | NORM | {"Concat", "Split", "Slice", "Gather", "Resize"},
)
# FP8 has fewer kernels than int8: no fast one for groups or a window of over 32 elements
# ("Limitations" of TensorRT's release notes, such as 10.12). ModelOpt 0.47 leaves small layers in
# float16, which is faster there, and quantizes no ConvTranspose and no pooling in FP8
# (onnx/quantization/graph_utils.py, find_nodes_from_convs_to_exclude; fp8.py).
TENSORRT_FP8 = replace(
    TENSORRT,
    grid=FP8,
    weights=FP8,
    heavy=WEIGHTED - {"ConvTranspose"},
    glue=frozenset({"Add"}),
    min_channels={"Conv": 17, "Gemm": 16, "MatMul": 16},
    max_window=32,
    allows_groups=False,
)
# DLA compiles a whole region as one node, which runs in int8 only if all its tensors have a scale:
# ModelOpt 0.47 with --target_dla places pairs on all of them (NVIDIA/Model-Optimizer pull request
# 1661). What DLA runs in int8, and that the tensors of a pool or Concat must have one scale: "DLA
# Supported Layers and Restrictions" of TensorRT's developer guide.
DLA = replace(
    TENSORRT,
    name="DLA",
    runs_on_dla=True,
    glue=MOVES
    | POOLS
    | {"GlobalMaxPool", "Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "Tanh", "Abs"}
    | {"Add", "Sub", "Mul", "Div", "Max", "Min", "Concat", "Resize", "BatchNormalization"},
)
TENSORRT_BY_GRID = {TENSORRT.grid.name: TENSORRT, TENSORRT_FP8.grid.name: TENSORRT_FP8}
# Layers that AMCT quantizes, and their grid; deploy.targets.ascend.layers has further conditions
# that `analyse` does not know.
ASCEND = Placement(
    name="ascend",
    grid=replace(INT8, symmetric=False),
    heavy=WEIGHTED | {"AveragePool"},
    glue=frozenset(),
    keeps_scale=frozenset(),
    per_tensor=frozenset({"Gemm", "MatMul"}),
)


def is_global_mean(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a ReduceMean is a GlobalAveragePool of an image, as torch exports it."""
    rank = graph.rank(node.input[0])
    if rank < 4:
        return False
    return sorted(axis % rank for axis in reduced_axes(graph, node)) == list(range(2, rank))


def reduced_axes(graph: Graph, node: onnx.NodeProto) -> list[int]:
    """Return the constant axes of a ReduceMean, an attribute before opset 18; [] without any."""
    axes_tensor = graph.constants.get(optional_input(node, 1))
    if axes_tensor is not None:
        return [int(axis) for axis in numpy_helper.to_array(axes_tensor).reshape(-1)]
    return list(attributes(node).get("axes", ()))


def has_constant_operand(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node adds a constant to a tensor or multiplies a tensor by a constant."""
    is_pointwise = standard_type(node) in {"Add", "Mul"}
    return is_pointwise and any(name in graph.initializers for name in node.input)


def keeps_range(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the output of a data-movement node stays in the range of its input.

    A cubic Resize overshoots it, and a Pad may add a constant other than 0.
    """
    if node.op_type == "Pad":
        return not pads_nonzero(graph, node)
    return node.op_type != "Resize" or resize_mode(node) != "cubic"


def averages_beyond_padding(node: onnx.NodeProto) -> bool:
    """Whether a node is an AveragePool whose windows may reach beyond the padding it counts."""
    if node.op_type != "AveragePool":
        return False
    attrs = attributes(node)
    return bool(attrs.get("ceil_mode") and attrs.get("count_include_pad"))


def resize_mode(node: onnx.NodeProto) -> str:
    """Return the interpolation mode of a Resize."""
    mode: bytes = attributes(node).get("mode", b"nearest")
    return mode.decode()


def pads_nonzero(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a Pad adds a constant that is not 0 or is unknown."""
    if attributes(node).get("mode", b"constant") != b"constant":
        return False
    value = optional_input(node, 2)
    return value != "" and graph.scalar(value) != 0


def find_bias_add(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the Add after a MatMul, if both are a Gemm: 2-D, and one constant per column."""
    weight = graph.initializers.get(node.input[1])
    if weight is None or graph.rank(node.output[0]) != 2:
        return None
    columns = weight.dims[-1]
    return graph.bias_add(node, [columns], [1, columns])


def reads_int8(
    graph: Graph, node: onnx.NodeProto, int8_tensors: Collection[str], heavy: Collection[str]
) -> bool:
    """Whether int8 nodes make every input of a node, or the input that an Add is fused with.

    A fused Add is computed inside a heavy node, which reads the skip branch in int8 whatever
    made it.
    """
    inputs = graph.data_inputs(node)
    separate_inputs = int8_inputs(graph, node, heavy)  # all, but for the main branch of an Add
    fused_inputs = [name for name in inputs if name not in separate_inputs]
    required_inputs = fused_inputs or inputs
    return all(name in int8_tensors for name in required_inputs)


def reads_float_concat(graph: Graph, node: onnx.NodeProto, int8_tensors: Collection[str]) -> bool:
    """Whether a node reads a Concat, directly or past data movement, with an input made in float.

    TensorRT moves the Q after a Concat onto each of its inputs, which costs one more kernel for
    each input that no int8 kernel writes (NVIDIA/TensorRT issue 4366).
    """
    for name in graph.data_inputs(node):
        producer = graph.trace_back(name, MOVES | CUTS | {"MaxPool"})
        if producer is not None and standard_type(producer) == "Concat":
            return not all(part in int8_tensors for part in graph.data_inputs(producer))
    return False


def has_float_sibling(graph: Graph, node: onnx.NodeProto, reasons: Mapping[str, str]) -> bool:
    """Whether a float node, such as a Mul of squeeze-excite, also reads the input of an average.

    `reasons`: node -> why it is float, "" for the others.
    """
    if node.op_type not in AVERAGES:
        return False
    float_readers = [reader for reader in graph.readers[node.input[0]] if reasons[reader.name]]
    return any(reader.op_type not in MOVES | POOLS | {"Concat"} for reader in float_readers)


def add_concat_readers(graph: Graph, readers: dict[str, list[str]]) -> None:
    """Make a Concat that only int8 nodes read a reader of the Q/DQ pairs on its inputs.

    TensorRT moves the Q after it onto each input, where it merges with a Q of the same scale.
    """
    for node in graph.nodes:
        output = node.output[0]
        if standard_type(node) != "Concat" or output not in readers or output in graph.outputs:
            continue
        if names_of(graph.readers.get(output, [])) != set(readers[output]):
            continue
        for name in node.input:
            if name in readers:
                readers[name].append(node.name)


def int8_inputs(graph: Graph, node: onnx.NodeProto, heavy: Collection[str]) -> list[str]:
    """Return the inputs that a node reads in int8: all but the main branch of a residual Add.

    TensorRT fuses such an Add into the heavy node (Conv, Gemm, MatMul) that makes its main branch,
    so that this tensor is never written and needs no Q/DQ pair. If heavy nodes make both inputs,
    the main branch is the one farther from the model's input, as in ModelOpt's partitioning.
    """
    inputs = graph.data_inputs(node)
    if node.op_type != "Add":
        return inputs
    fusable_inputs = [
        name
        for name in inputs
        if len(graph.readers[name]) == 1 and _is_made_by_heavy(graph, name, heavy)
    ]
    if not fusable_inputs:
        return inputs
    # `max` takes the first of equals, so with `reversed` the last input of the greatest depth
    main_branch = max(reversed(fusable_inputs), key=lambda name: graph.depths.get(name, 0))
    return [name for name in inputs if name != main_branch]


def _is_made_by_heavy(graph: Graph, tensor: str, heavy: Collection[str]) -> bool:
    """Whether a Conv, Gemm or MatMul makes a tensor, past any pointwise operators."""
    node = graph.producer.get(tensor)
    while node is not None and (
        standard_type(node) in POINTWISE or has_constant_operand(graph, node)
    ):
        node = graph.producer.get(graph.data_inputs(node)[0])
    return node is not None and standard_type(node) in heavy
