"""Where a target wants its Q/DQ pairs, and on which grid: one `Placement` each.

`deploy.graph.plan` reads a model by one of them; `deploy.graph.refusal` says what it leaves float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from calibrators.grids import FP8, INT8, UINT8, Grid
from deploy.graph.flow import CUTS, MOVES, NORM, POINTWISE, POOLS
from deploy.graph.gates import GATE

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
