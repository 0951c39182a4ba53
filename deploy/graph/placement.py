"""Where a target wants its Q/DQ pairs, and on which grid: one `Placement` each.

`deploy.graph.plan` reads a model by one of them; `deploy.graph.refusal` says what it leaves float.

How int8 gets through a graph whose pairs stand on inputs alone: Adds, pools, Concats (TensorRT).

A residual Add is computed inside a heavy node that makes one of its inputs for it alone, and reads
the other, the skip branch, in int8. Pointwise operators, moves and norms between int8 nodes stay
float without parting them::

    x --[Q DQ]--> Conv --> Sigmoid, Mul --> Add --> Concat --[Q DQ]--> Conv
      '----- the pair's second reader -------'

Sources: ModelOpt 0.47, `build_non_residual_input_map` and `find_quantizable_nodes`; TensorRT's
developer guide, "Q/DQ layer-placement recommendations"; NVIDIA/TensorRT issue 4366.

Hard-Sigmoid gates: found by their structure, and what they are in int8.

A gate multiplies a tensor by a Hard-Sigmoid of itself (Hard-Swish) or of another one
(squeeze-excite). Exporters write it in many ways, which all compute::

    y = factor * gain * clip(source + shift, 0, top) + offset

    HardSwish(x)                       x * clip(x + 3, 0, 6) / 6
    x * HardSigmoid(g, alpha, beta)    x * alpha * clip(g + beta / alpha, 0, 1 / alpha)
    Add 3, Clip 0..6, Mul x, Div 6     in this order, or with the Div before the Mul

What follows with one number for all is part of the gain (Mul, Div by a positive one) or, at the
end, the offset (Add). In int8 the saturation of the grid is the Clip, a scale read otherwise than
it was written is the gain, and a zero point read otherwise the offset::

    source -> Add(shift) -> Q(top / 255, 0) -> DQ(gain * top / 255) -> Mul(factor)
           -> Q(scale, zero_point + offset / scale) -> DQ(scale, zero_point) -> y

so that no more than two int8 kernels are left of it (QLinearAdd, QLinearMul), and two roundings.
Where the Clip's middle is a source of 0, as in a Hard-Swish, and the source's range is not far from
reaching down to -shift, its own integers are clipped, and read from another zero point::

    Q(scale, zero) -> Clip(low, low + top / scale) -> DQ(gain * scale, low) -> Mul(factor) -> ...
                      low = zero - shift / scale

of which one rounding is left, and a Clip in a third of the time, or none where the range ends below
top - shift. Where a Conv makes the source for the gate alone, as in squeeze-excite, the shift is
added to its bias, so that the Conv itself writes what is clipped.

Source: ONNX operators HardSigmoid-6 and HardSwish-14; A. Howard et al., "Searching for
MobileNetV3", arXiv:1905.02244, section 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import onnx
from onnx import helper

from calibrators.grids import FP8, INT8, UINT8, Grid
from deploy.graph.index import Graph, attributes

MOVES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})
CUTS = frozenset({"Pad", "Slice"})
POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})
AVERAGES = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
POINTWISE = frozenset(
    {"Relu", "Clip", "Sigmoid", "Mul", "LeakyRelu", "PRelu", "HardSigmoid", "HardSwish", "Tanh"}
)
# a norm, or the nodes that it is written as
NORM = frozenset({"LayerNormalization", "ReduceMean", "Sub", "Pow", "Sqrt", "Div"})


def is_pool(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a ReduceMean is the GlobalAveragePool of a picture, as torch exports it."""
    from onnx import numpy_helper

    axes = attributes(node).get("axes")
    if axes is None and len(node.input) > 1 and node.input[1] in graph.initializers:
        axes = numpy_helper.to_array(graph.initializers[node.input[1]]).tolist()
    rank = len(graph.shapes.get(node.input[0]) or ())
    return rank > 3 and sorted(axis % rank for axis in axes or ()) == list(range(2, rank))


def has_number(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node adds a constant to a tensor, or multiplies it by one."""
    return node.op_type in {"Add", "Mul"} and any(n in graph.initializers for n in node.input)


def keeps_range(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether all that a node which moves values makes lies in the range of what it reads.

    Not what a cubic Resize overshoots, nor what a Pad puts around it but 0.
    """
    if node.op_type == "Pad":
        return not pads_with_more(graph, node)
    return node.op_type != "Resize" or resized_by(node) != "cubic"


def counts_beyond(node: onnx.NodeProto) -> bool:
    """Whether a node is an average whose windows may reach beyond the padding that it counts."""
    given = attributes(node) if node.op_type == "AveragePool" else {}
    return bool(given.get("ceil_mode") and given.get("count_include_pad"))


def resized_by(node: onnx.NodeProto) -> str:
    """The mode of a Resize."""
    mode: bytes = attributes(node).get("mode", b"nearest")
    return mode.decode()


def pads_with_more(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a Pad adds a constant that is not 0, or not known."""
    zeros = len(node.input) < 3 or not node.input[2] or graph.number(node.input[2]) == 0
    return attributes(node).get("mode", b"constant") == b"constant" and not zeros


def added_bias(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The Add behind a MatMul of rows that is a Gemm's bias: one constant a column."""
    after = graph.only_reader(node.output[0])
    if node.op_type != "MatMul" or after is None or after.op_type != "Add":
        return None
    weight = graph.initializers.get(node.input[1])
    bias = next((graph.initializers[n] for n in after.input if n in graph.initializers), None)
    rows = len(graph.shapes.get(node.output[0]) or ()) == 2
    if weight is None or bias is None or not rows or bias.data_type != weight.data_type:
        return None
    return after if [*bias.dims] in ([weight.dims[-1]], [1, weight.dims[-1]]) else None


def reads_int8(
    graph: Graph, node: onnx.NodeProto, made: Collection[str], heavy: Collection[str]
) -> bool:
    """Whether int8 comes in: every input is made in it; for a fused Add, what it is fused with.

    Such an Add is computed inside a heavy node, which reads the skip branch in int8 wherever that
    comes from.
    """
    names, read = graph.data_inputs(node), inputs_read(graph, node, heavy)
    fused = [name for name in names if name not in read]
    return all(name in made for name in fused or names)


def behind_float_concat(graph: Graph, node: onnx.NodeProto, made: Collection[str]) -> bool:
    """Whether a node reads a Concat, moved or not, with an input that no int8 node makes.

    TensorRT moves the Q that stands behind a Concat onto each of its inputs; where no int8 kernel
    writes them, that is a kernel more for each (NVIDIA/TensorRT issue 4366).
    """
    for name in graph.data_inputs(node):
        maker = graph.producer.get(name)
        while maker is not None and maker.op_type in MOVES | CUTS | {"MaxPool"}:
            maker = graph.producer.get(maker.input[0])
        if maker is not None and maker.op_type == "Concat":
            return not all(n in made for n in graph.data_inputs(maker))
    return False


def read_in_float(graph: Graph, node: onnx.NodeProto, why: Mapping[str, str]) -> bool:
    """Whether a mean would need an int8 copy of what a float node reads as it is (a gate's Mul)."""
    if node.op_type not in AVERAGES:
        return False
    beside = graph.readers[node.input[0]]
    return any(why[n.name] and n.op_type not in MOVES | POOLS | {"Concat"} for n in beside)


def with_concats(graph: Graph, readers: dict[str, list[str]]) -> None:
    """Let a Concat that only int8 nodes read take its inputs from the pairs that there are.

    TensorRT moves the Q behind it onto each input, where one of the same scale stands already.
    """
    for node in graph.nodes:
        out = node.output[0]
        after = {n.name for n in graph.readers.get(out, [])}
        if node.op_type == "Concat" and out in readers and out not in graph.outputs:
            for name in node.input if after == set(readers[out]) else []:
                if name in readers:
                    readers[name].append(node.name)


def inputs_read(graph: Graph, node: onnx.NodeProto, heavy: Collection[str]) -> list[str]:
    """Inputs that a node reads in int8: of a residual Add those of no heavy node fused with it."""
    names = graph.data_inputs(node)
    if node.op_type != "Add":
        return names
    fused = [
        name
        for name in names
        if len(graph.readers[name]) == 1 and made_by_heavy(graph, name, heavy)
    ]
    return [name for name in names if name not in fused[-1:]]


def made_by_heavy(graph: Graph, tensor: str, heavy: Collection[str]) -> bool:
    """Whether a heavy node makes a tensor, with pointwise operators behind it."""
    maker = graph.producer.get(tensor)
    while maker is not None and (maker.op_type in POINTWISE or has_number(graph, maker)):
        maker = graph.producer.get(graph.data_inputs(maker)[0])
    return maker is not None and maker.op_type in heavy


GATE = "Gate"  # type of the one node that stands for a gate's own in a collapsed graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate: y = factor * gain * clip(source + shift, 0, top) + offset.

    Attributes:
        nodes: names of its nodes, in the order in which they run.
        source: the tensor that is shifted and clipped.
        factor: the tensor that is multiplied; "" while none was found.
        output: y.
        shift: what is added; not 0.
        top: upper end of the clip, positive.
        gain: positive.
        offset: what is added at the end.
    """

    nodes: tuple[str, ...]
    source: str
    factor: str
    output: str
    shift: float
    top: float
    gain: float
    offset: float = 0.0

    @property
    def name(self) -> str:
        """Of the node that stands for it: its last one's."""
        return self.nodes[-1]

    @property
    def centred(self) -> bool:
        """Whether the Clip goes as far above a source of 0 as below it."""
        return math.isclose(self.top, 2 * self.shift, rel_tol=1e-5)


def gates(graph: Graph) -> tuple[Gate, ...]:
    """Every gate of a graph whose inner tensors nobody else reads, in the graph's order."""
    found = []
    for node in graph.nodes:
        gate = _started(graph, node)
        while gate is not None and (longer := _continued(graph, gate)) is not None:
            gate = longer
        if gate is not None and gate.factor:
            found.append(_offset(graph, gate))
    return tuple(found)


def collapsed(nodes: Iterable[onnx.NodeProto], found: Iterable[Gate]) -> list[onnx.NodeProto]:
    """The nodes with each gate as one node of type `GATE`, in the place of its last one."""
    last = {gate.name: gate for gate in found}
    inner = {name for gate in last.values() for name in gate.nodes[:-1]}
    return [
        _stand_in(last[node.name]) if node.name in last else node
        for node in nodes
        if node.name not in inner
    ]


def _stand_in(gate: Gate) -> onnx.NodeProto:
    inputs = list(dict.fromkeys([gate.source, gate.factor]))
    return helper.make_node(GATE, inputs, [gate.output], name=gate.name)


def _started(graph: Graph, node: onnx.NodeProto) -> Gate | None:
    """The gate that a node begins, as far as its Clip; of HardSwish, all of it."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "HardSwish":
        x, y = str(node.input[0]), str(node.output[0])
        return Gate(
            nodes=(node.name,), source=x, factor=x, output=y, shift=3.0, top=6.0, gain=1 / 6
        )
    if node.op_type == "HardSigmoid":
        return _hard_sigmoid(node)
    return _written_out(graph, node) if node.op_type == "Add" else None


def _hard_sigmoid(node: onnx.NodeProto) -> Gate | None:
    given = attributes(node)
    alpha, beta = float(given.get("alpha", 0.2)), float(given.get("beta", 0.5))
    if alpha <= 0 or beta == 0:
        return None
    return Gate(
        nodes=(node.name,),
        source=str(node.input[0]),
        factor="",
        output=str(node.output[0]),
        shift=beta / alpha,
        top=1 / alpha,
        gain=alpha,
    )


def _written_out(graph: Graph, add: onnx.NodeProto) -> Gate | None:
    """Add of a number, then Clip from 0 to a number."""
    source = next((str(n) for n in add.input if n not in graph.initializers), "")
    shift = graph.number_beside(source, add)
    clip = graph.only_reader(add.output[0])
    if not shift or clip is None or clip.op_type != "Clip":
        return None
    top = graph.number(clip.input[2]) if len(clip.input) > 2 else None
    if clip.input[0] != add.output[0] or not graph.holds_zero(clip) or not top or top < 0:
        return None
    return Gate(
        nodes=(add.name, clip.name),
        source=source,
        factor="",
        output=str(clip.output[0]),
        shift=shift,
        top=top,
        gain=1.0,
    )


def _continued(graph: Graph, gate: Gate) -> Gate | None:
    """The gate with the one reader of its output, where that only multiplies."""
    after = graph.only_reader(gate.output)
    if after is None or after.op_type not in ("Mul", "Div") or gate.output not in after.input:
        return None
    longer = replace(gate, nodes=(*gate.nodes, after.name), output=str(after.output[0]))
    first, second = (str(name) for name in after.input)
    other = second if first == gate.output else first
    number = graph.number_beside(gate.output, after)
    if number is not None and number > 0 and (after.op_type == "Mul" or first == gate.output):
        gain = gate.gain * number if after.op_type == "Mul" else gate.gain / number
        return replace(longer, gain=gain)
    free = after.op_type == "Mul" and not gate.factor and other != gate.output
    return replace(longer, factor=other) if free and other not in graph.initializers else None


def _offset(graph: Graph, gate: Gate) -> Gate:
    """The gate with an Add of one number behind it, where no Relu or Clip follows that."""
    add = graph.only_reader(gate.output)
    if add is None or add.op_type != "Add" or graph.tail(add) != add.output[0]:
        return gate
    number = graph.number_beside(gate.output, add)
    if number is None:
        return gate
    longer = replace(gate, nodes=(*gate.nodes, add.name), output=str(add.output[0]))
    return replace(longer, offset=number)


WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # where int8 is the gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a target wants Q/DQ pairs, and on which grid.

    Attributes:
        name: of the target, for reasons and reports.
        grid: integers of the activations.
        weights: integers of the weights.
        heavy: op types whose int8 kernel is the gain.
        glue: op types that pass int8 on.
        keeps_scale: op types whose output must have the input's scale.
        outputs: a pair after every int8 node (ONNX Runtime), or only on the inputs (TensorRT).
        bias: biases as int32 behind a DequantizeLinear (ONNX Runtime) or left float.
        gemms: a MatMul of rows and the Add of its bias are one Gemm.
        checked: glue stays float of which ONNX Runtime's integer kernel is missing or differs.
        per_tensor: op types whose weights get one scale for the whole tensor.
        numbers: an Add or Mul of a tensor and one number is glue too, the number held in int8.
        passes: op types that stay float between an int8 node and glue without parting them.
        float_behind_concat: what reads a Concat stays float unless int8 nodes make all its inputs.
        parted: op types with a pair of their own between them and their tail.
        thin: a Conv on an input of the model with fewer products a value than this stays float,
            unless a MaxPool follows or it makes many values of each.
        least_channels: a layer with fewer channels than this, in or out, stays float.
        most_window: a Conv whose window has more places than this stays float; 0 for no limit.
        groups: whether a Conv may have groups.
        tiles: a ConvTranspose that does more than make a tile of each pixel stays float.
        fits_pairs: weights are stored so that no CPU saturates the products of two beside each
            other (`calibrators.weights`).
    """

    name: str
    grid: Grid
    heavy: frozenset[str]
    glue: frozenset[str]
    keeps_scale: frozenset[str]
    outputs: bool
    bias: bool
    gemms: bool = False
    checked: bool = False
    weights: Grid = INT8
    per_tensor: frozenset[str] = frozenset()
    numbers: bool = False
    passes: frozenset[str] = frozenset()
    float_behind_concat: bool = False
    parted: frozenset[str] = frozenset()
    thin: int = 0
    least_channels: Mapping[str, int] = field(default_factory=dict)
    most_window: int = 0
    groups: bool = True
    tiles: bool = False
    fits_pairs: bool = False

    @property
    def heavy_or_glue(self) -> frozenset[str]:
        """Op types that can leave float."""
        return self.heavy | self.glue

    @property
    def word(self) -> str:
        """What the grid is called in reasons: "int8", whatever its zero point, or "fp8"."""
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
    outputs=True,
    bias=True,
    gemms=True,
    checked=True,
    numbers=True,
    # 3 colours times 3x3 are 27 products: the int8 kernel's unfolding costs what it saves, or more
    # (EfficientNet-Lite0 on AVX512-VNNI: 1.86x as fast as FP32 with the first Conv, 2.05x without;
    # 2.07x either way in ONNX Runtime 1.32)
    thin=32,
    tiles=True,
    fits_pairs=True,
)
TENSORRT = Placement(
    name="tensorrt",
    grid=INT8,
    heavy=WEIGHTED,
    glue=POOLS | {"Add", "ReduceMean"},
    keeps_scale=MOVES | {"MaxPool", "Resize", "Split"},
    outputs=False,
    bias=False,
    # pointwise operators are fused into what is before them, and a residual Add with them
    passes=MOVES | POOLS | POINTWISE | NORM | {"Concat", "Split", "Slice", "Gather", "Resize"},
)
# FP8 has fewer kernels than int8. A window of over 32 places, and groups, have none that is fast
# ("Limitations" of TensorRT's release notes, such as 10.12). ModelOpt 0.47 leaves small layers in
# float16, which is faster there, and quantizes no ConvTranspose and no pooling in FP8
# (onnx/quantization/graph_utils.py, find_nodes_from_convs_to_exclude; fp8.py).
TENSORRT_FP8 = replace(
    TENSORRT,
    grid=FP8,
    weights=FP8,
    heavy=WEIGHTED - {"ConvTranspose"},
    glue=frozenset({"Add"}),
    least_channels={"Conv": 17, "Gemm": 16, "MatMul": 16},
    most_window=32,
    groups=False,
)
TENSORRT_ON = {one.grid.name: one for one in (TENSORRT, TENSORRT_FP8)}
# What AMCT quantizes and on which grid; deploy.targets.ascend.layers has its further conditions,
# which `analyse` does not know.
ASCEND = Placement(
    name="ascend",
    grid=replace(INT8, symmetric=False),
    heavy=WEIGHTED | {"AveragePool"},
    glue=frozenset(),
    keeps_scale=frozenset(),
    outputs=False,
    bias=True,
    per_tensor=frozenset({"Gemm", "MatMul"}),
)
