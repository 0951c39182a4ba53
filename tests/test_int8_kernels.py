"""Nodes reported as int8 on ONNX Runtime run in its integer kernels, and compute the same."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from deploy.runtimes.ort import OrtSession
from tests.models import build_net, make_model, read_target, run_command, run_net

pytestmark = pytest.mark.slow

SAME_PADS = {"pads": [1] * 4}
HALF = {"kernel_shape": [3, 3], "strides": [2, 2]}
CEIL_MODE = {"ceil_mode": 1, "count_include_pad": 1}
UP = {"r": np.zeros(0), "s": np.array([1, 1, 2, 2.0])}
FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def whole(*values):
    return np.array(values, np.int64)


# name -> nodes from d, which a Conv and a Relu make, to e, which a Conv reads; and constants
RING, ROWS = {"p": whole(0, 0, 1, 1, 0, 0, 1, 1)}, {"perm": [0, 1, 3, 2]}
POOL = ("MaxPool", "d", "g", {"kernel_shape": [3, 3], **SAME_PADS})
CUT = {"i": whole(0, 0), "j": whole(8, 8), "k": whole(2, 3)}
LOPSIDED = np.full((16, 1, 1, 1), 0.1)
LOPSIDED[0] = 1
TILES = {"t": np.random.default_rng(5).normal(size=(16, 16, 2, 2)) * LOPSIDED}
BETWEEN = {
    "nearest": ([("Resize", "d r s", "e", FLOOR)], UP),
    "nearest by 1.5": ([("Resize", "d r s", "e")], {**UP, "s": np.array([1, 1, 1.5, 1.5])}),
    "linear": ([("Resize", "d r s", "e", {"mode": "linear"})], UP),
    "cubic": ([("Resize", "d r s", "e", {"mode": "cubic"})], UP),
    "reshape": ([("Reshape", "d s", "e")], {"s": whole(0, 16, 8, -1)}),
    "transpose": ([("Transpose", "d", "e", ROWS)], {}),
    "pad": ([("Pad", "d p", "e")], RING),
    "pad by 9": ([("Pad", "d p k", "e")], {**RING, "k": np.array(99.0)}),
    "reflect": ([("Pad", "d p", "e", {"mode": "reflect"})], RING),
    "slice": ([("Slice", "d i j k", "e")], CUT),
    "max": ([("MaxPool", "d", "e", {**HALF, **SAME_PADS})], {}),
    "mean": ([("AveragePool", "d", "e", {**HALF, **SAME_PADS})], {}),
    "mean beyond": ([("AveragePool", "d", "e", {**HALF, **CEIL_MODE})], {}),
    "mean beyond pads": ([("AveragePool", "d", "e", {**HALF, **SAME_PADS, **CEIL_MODE})], {}),
    "global mean": ([("GlobalAveragePool", "d", "e")], {}),
    "add a number": ([("Add", "d k", "e")], {"k": np.array(3.0)}),
    "by a number": ([("Mul", "d k", "e")], {"k": np.array(3.0)}),
    "gelu": (
        [
            ("Div", "d r", "f"),
            ("Erf", "f", "g"),
            ("Add", "g k", "h"),
            ("Mul", "d h", "i"),
            ("Mul", "i j", "e"),
        ],
        {"r": np.array(2**0.5), "k": np.array(1.0), "j": np.array(0.5)},
    ),
    "silu": ([("Sigmoid", "d", "g"), ("Mul", "d g", "e")], {}),
    "leaky": ([("LeakyRelu", "d", "e", {"alpha": 0.2})], {}),
    "prelu": ([("PRelu", "d k", "e")], {"k": np.full((16, 1, 1), 0.1)}),
    "hard-swish": ([("HardSwish", "d", "e")], {}),
    "concat": ([POOL, ("Concat", "g d", "e", {"axis": 1})], {}),
    "split": ([("Split", "d", "f g", {"axis": 1}), ("Concat", "g f", "e", {"axis": 1})], {}),
    "transposed": ([("ConvTranspose", "d t", "e", {"strides": [2, 2]})], TILES),
    "conv": ([("Conv", "d t", "e")], TILES),
    "conv and relu": (
        [("Transpose", "d", "f", ROWS), ("Conv", "f t", "g"), ("Relu", "g", "e")],
        TILES,
    ),
    "softmax": ([("Softmax", "d", "e", {"axis": 1})], {}),
    "softmax of rows": ([("Softmax", "d", "e", {"axis": -1})], {}),
    "softmax of the transposed": (
        [("Transpose", "d", "t", ROWS), ("Softmax", "t", "e", {"axis": -1})],
        {},
    ),
    "sum of two": ([POOL, ("Add", "d g", "e")], {}),
    "product of two": ([("Sigmoid", "d", "g"), ("Mul", "d g", "f"), ("Mul", "d f", "e")], {}),
    "matrices": ([("MatMul", "d d", "e")], {}),
    "where": ([("Where", "k d d", "e")], {"k": np.eye(16, dtype=bool)}),
}
DENSE = {
    "one bias a column": (["b1", "b2"], []),
    "of two axes": (["c1", "c2"], []),
    "a number": (["one", "one"], ["Add", "Add", "Relu"]),
}


def build_engine(nodes, constants, shape, folder, *options, batch="n"):
    """The engine of a model, the first of its samples, and what the report says of it."""
    floats = {n: np.float32(v) for n, v in constants.items() if v.dtype not in (np.int64, bool)}
    model = make_model(nodes, {"x": [batch, *shape]}, {"y": None}, constants | floats, opset=17)
    x = np.random.default_rng(2).normal(size=(12, *shape)).astype(np.float32)
    out = build_net(model, x, folder, "--accept", "--effort", 0, *options)
    return out / "net.int8.onnx", x[:1], read_target(out)


def kernels(engine, x, folder):
    """(operator, type of its first input) of every kernel that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(str(engine), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    return {(args["op_name"], *args["input_type_shape"][0]) for args in ran}


def reported_int8(target):
    return {d["op"] for d in target["nodes"] if d["precision"] == "uint8"}


def ran_in_float(ran, target):
    """Return the operators that are reported as int8 and run in float."""
    int8_operators = {
        "Conv",
        "Gemm",
        "MatMul",
        "FusedConv",
        "FusedGemm",
        "ConvTranspose",
    } | reported_int8(target)
    return {kind for kind, read in ran if read == "float" and kind in int8_operators}


def integer_kernels(ran, target):
    """Return the kernels on integers of operators that are reported as float."""
    int8_operators = reported_int8(target) | (
        {"Add", "Mul"} if "HardSwish" in reported_int8(target) else set()
    )
    kernel_types = {kind for kind, _ in ran if kind.startswith("QLinear")}
    return kernel_types - {f"QLinear{op}" for op in int8_operators}


def between(name):
    """The nodes of a model of `BETWEEN`, and its constants."""
    nodes, constants = BETWEEN[name]
    rng, channels = np.random.default_rng(1), 32 if name == "concat" else 16
    sizes = {"w": (16, 16, 3, 3), "b": 16, "v": (8, channels, 1, 1)}
    weights = {weight: rng.normal(size=size) for weight, size in sizes.items()}
    all_nodes = [
        ("Conv", "x w b", "c", SAME_PADS),
        ("Relu", "c", "d"),
        *nodes,
        ("Conv", "e v", "y"),
    ]
    return all_nodes, {**weights, **constants}


@pytest.mark.parametrize("name", BETWEEN)
def test_operators_between_convs_run_on_integers(name, tmp_path):
    engine, x, target = build_engine(*between(name), (16, 16, 16), tmp_path)
    ran = kernels(engine, x, tmp_path)
    assert not ran_in_float(ran, target)
    assert not integer_kernels(ran, target)
    assert "Erf" not in {kind for kind, _ in ran}  # a Gelu holds it
    expected, outputs = (run_net(path, x)[0] for path in (tmp_path / "net.onnx", engine))
    assert np.square(expected).sum() > 10**2.5 * np.square(outputs - expected).sum()


@pytest.mark.parametrize("name", BETWEEN)
def test_float_operators_between_convs_stay_float(name, tmp_path):
    """ONNX Runtime would make integer kernels of some of these by itself."""
    nodes, constants = between(name)
    float_nodes = [f"{op}_{outputs.split()[0]}" for op, _, outputs, *_ in nodes[2:-1]]
    keep = [argument for name in float_nodes for argument in ("--keep-float", name)]
    engine, x, target = build_engine(nodes, constants, (16, 16, 16), tmp_path, *keep)
    assert reported_int8(target) <= {"Conv", "Relu"}
    ran = kernels(engine, x, tmp_path)
    assert not integer_kernels(ran, target)
    assert not {"MatMulInteger", "MatMulIntegerToFloat"} & {kind for kind, _ in ran}
    written = OrtSession.open(engine, threads=1, optimize=False).run({"x": x})["y"]
    assert np.square(written).sum() > 1e4 * np.square(run_net(engine, x)[0] - written).sum()


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("shape", [("n", 64), (1, 3, 64)])
def test_biased_matmul_runs_on_integers(name, shape, tmp_path):
    """Exports from TensorFlow have such layers; ONNX Runtime makes float Gemms of them."""
    biases, in_float = DENSE[name]
    rng = np.random.default_rng(1)
    sizes = {"w1": (64, 32), "w2": (32, 10), "b1": 32, "b2": 10, "c1": (1, 32), "c2": (1, 10)}
    constants = {weight: rng.normal(size=size) for weight, size in sizes.items()}
    constants["one"] = np.array([0.5])
    nodes = [
        ("MatMul", "x w1", "m"),
        ("Add", f"m {biases[0]}", "a"),
        ("Relu", "a", "r"),
        ("MatMul", "r w2", "k"),
        ("Add", f"{biases[1]} k", "y"),
    ]
    engine, x, target = build_engine(nodes, constants, shape[1:], tmp_path, batch=shape[0])
    assert not ran_in_float(kernels(engine, x, tmp_path), target)
    float_operators = [d["op"] for d in target["nodes"] if d["precision"] == "float32"]
    assert sorted(float_operators) == (in_float if len(shape) == 2 else ["Add", "Add", "Relu"])


def test_float_bias_is_added_in_float(tmp_path):
    constants = {"w": np.random.default_rng(1).normal(size=(64, 10)), "b": np.arange(10.0)}
    engine, *_ = build_engine(
        [("MatMul", "x w", "m"), ("Add", "m b", "y")], constants, (64,), tmp_path
    )
    images = ("--images", tmp_path / "x.npy", "--duration", 0, "--effort", 0)
    options = (*images, "--accept", "--keep-float", "Add_y", "--out", tmp_path / "kept")
    run_command("build", tmp_path / "net.onnx", *options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "kept/net.int8.onnx").graph.node]
    assert "Add" in kinds
    assert "MatMul" in kinds
    assert "Gemm" not in kinds
    assert "Gemm" in [node.op_type for node in onnx.load(engine).graph.node]
    (target,) = json.loads((tmp_path / "kept" / "report.json").read_text())["targets"]
    (reason,) = [node["reason"] for node in target["nodes"] if node["name"] == "Add_y"]
    assert reason.startswith("kept float")
