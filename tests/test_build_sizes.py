"""No int8 file of a build is larger than the float model."""

import numpy as np
import pytest

from deploy.targets import TARGETS
from tests.models import build_net, make_model, parse_nodes

pytestmark = pytest.mark.slow


SIGNAL_LENGTH = 256


TABLE = "angles = Mul (times, tones) table = Cos (angles)"


LAYERS = "c = Conv (x, w) m = Mul (c, grid) r = Relu (m) y = Conv (r, v)"


NODES_BY_CASE = {
    "spectrum": f"{TABLE} s = MatMul (x, table) r = Relu (s) y = MatMul (r, wide)",
    "windows": f"{TABLE} windows = Unsqueeze (table, one) s = Conv (x, windows) y = Conv (s, long)",
    "numbers": f"row = Range (zero, many, half) grid = Reshape (row, sizes) {LAYERS}",
    "expanded": f"grid = Expand (half, sizes) {LAYERS}",
    "tiled": f"grid = Tile (line, often) {LAYERS}",
    "filled": f"zeros = ConstantOfShape (sizes) grid = Add (zeros, half) {LAYERS}",
    "shared": "a = Conv (x, w) b = Conv (a, v, b1) c = Conv (b, v, b2) d = Conv (c, v, b3)"
    "e = Conv (d, v, b4) f = Conv (e, v, b5) y = Conv (f, v, b6)",
    "halves": "h = Cast <to = 10> (x) b = Add (h, grid16) c = Conv (b, w16) y = Cast <to = 1> (c)",
    "tiny": "a = Conv (x, u) b = Conv (a, u) c = Conv (b, u) y = Conv (c, u)",
}


SHAPES = {"spectrum": ["n", SIGNAL_LENGTH], "windows": ["n", 1, SIGNAL_LENGTH]}


WEIGHT_SHAPES = {
    "u": (4, 4, 1, 1),
    "w": (32, 4, 1, 1),
    "v": (32, 32, 3, 3),
    "wide": (SIGNAL_LENGTH, 16),
    "long": (64, SIGNAL_LENGTH, 1),
}


CONSTANTS = {
    "times": np.arange(SIGNAL_LENGTH)[:, None],
    "tones": np.linspace(0, 0.1, SIGNAL_LENGTH)[None],
    "half": 0.5,
    "zero": 0,
    "many": 16384,
    "line": np.linspace(0, 1, 32).reshape(1, 1, 1, 32),
    "grid16": np.random.default_rng(0).normal(size=(4, 32, 32)),
    "w16": np.linspace(-1, 1, 1152).reshape(32, 4, 3, 3),
    **{f"b{index}": np.full(32, 4.0**index) for index in range(1, 7)},
}


INT64_CONSTANTS = {"one": [1], "sizes": [1, 32, 32, 32], "often": [1, 32, 32, 1]}


@pytest.mark.parametrize("case", NODES_BY_CASE)
def test_int8_files_never_outgrow_the_model(case, tmp_path):
    rng = np.random.default_rng(3)
    nodes = parse_nodes(NODES_BY_CASE[case])
    constants = {name: rng.normal(0, 0.1, shape) for name, shape in WEIGHT_SHAPES.items()}
    for name, value in (CONSTANTS | constants).items():
        dtype = np.float16 if "16" in name else np.float32
        constants[name] = dtype(value)
    for name, value in INT64_CONSTANTS.items():
        constants[name] = np.int64(value)
    input_names = {name for node in nodes for name in node.input}
    used = {name: value for name, value in constants.items() if name in input_names}
    shape = SHAPES.get(case, ["n", 4, 32, 32])
    model = make_model(nodes, {"x": shape}, {"y": None}, used)
    x = rng.normal(size=(8, *shape[1:]))
    options = ("--effort", 0, "--accept", "--target", ",".join(TARGETS))
    out = build_net(model, x, tmp_path, *options)
    names = ["net.int8.onnx", "net.tensorrt.typed.onnx", "net_deploy_model.onnx"]
    if case in ("shared", "halves"):
        names.pop()  # AMCT copies a weight for each layer, and knows float32 alone
    allowed_growth = 600 * len(nodes) if case == "tiny" else 0  # hardly any weights to shrink
    largest = max((out / name).stat().st_size for name in names)
    assert largest <= model.ByteSize() + allowed_growth
