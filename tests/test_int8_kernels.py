"""What is said to be int8 on ONNX Runtime runs in its integer kernels, and computes the same."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import helper

from deploy.cli import cli
from tests.vendor_models import save_net

SAME = {"pads": [1] * 4}
HALF = {"kernel_shape": [3, 3], "strides": [2, 2]}
BEYOND = {"ceil_mode": 1, "count_include_pad": 1}
UP = {"r": np.zeros(0), "s": np.array([1, 1, 2, 2.0])}
FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def whole(*values):
    return np.array(values, np.int64)


# name -> nodes from d, which a Conv and a Relu make, to e, which a Conv reads; constants; channels
BETWEEN = {
    "nearest": ([("Resize", "d r s", "e", FLOOR)], UP, 16),
    "nearest by 1.5": ([("Resize", "d r s", "e", {})], {**UP, "s": np.array([1, 1, 1.5, 1.5])}, 16),
    "linear": ([("Resize", "d r s", "e", {"mode": "linear"})], UP, 16),
    "cubic": ([("Resize", "d r s", "e", {"mode": "cubic"})], UP, 16),
    "reshape": ([("Reshape", "d s", "e", {})], {"s": whole(0, 16, 8, -1)}, 16),
    "transpose": ([("Transpose", "d", "e", {"perm": [0, 1, 3, 2]})], {}, 16),
    "pad": ([("Pad", "d p", "e", {})], {"p": whole(0, 0, 1, 1, 0, 0, 1, 1)}, 16),
    "pad by 9": (
        [("Pad", "d p k", "e", {})],
        {"p": whole(0, 0, 1, 1, 0, 0, 1, 1), "k": np.array(99.0)},
        16,
    ),
    "reflect": (
        [("Pad", "d p", "e", {"mode": "reflect"})],
        {"p": whole(0, 0, 1, 1, 0, 0, 1, 1)},
        16,
    ),
    "slice": (
        [("Slice", "d i j k", "e", {})],
        {"i": whole(0, 0), "j": whole(8, 8), "k": whole(2, 3)},
        16,
    ),
    "max": ([("MaxPool", "d", "e", {**HALF, **SAME})], {}, 16),
    "mean": ([("AveragePool", "d", "e", {**HALF, **SAME})], {}, 16),
    "mean beyond": ([("AveragePool", "d", "e", {**HALF, **BEYOND})], {}, 16),
    "mean beyond pads": ([("AveragePool", "d", "e", {**HALF, **SAME, **BEYOND})], {}, 16),
    "global mean": ([("GlobalAveragePool", "d", "e", {})], {}, 16),
    "add a number": ([("Add", "d k", "e", {})], {"k": np.array(3.0)}, 16),
    "by a number": ([("Mul", "d k", "e", {})], {"k": np.array(3.0)}, 16),
    "silu": ([("Sigmoid", "d", "g", {}), ("Mul", "d g", "e", {})], {}, 16),
    "leaky": ([("LeakyRelu", "d", "e", {"alpha": 0.2})], {}, 16),
    "prelu": ([("PRelu", "d k", "e", {})], {"k": np.full((16, 1, 1), 0.1)}, 16),
    "hard-swish": ([("HardSwish", "d", "e", {})], {}, 16),
    "concat": (
        [
            ("MaxPool", "d", "g", {"kernel_shape": [3, 3], **SAME}),
            ("Concat", "g d", "e", {"axis": 1}),
        ],
        {},
        32,
    ),
    "split": ([("Split", "d", "f g", {"axis": 1}), ("Concat", "g f", "e", {"axis": 1})], {}, 16),
    "transposed": (
        [("ConvTranspose", "d t", "e", {"strides": [2, 2]})],
        {"t": np.random.default_rng(5).normal(size=(16, 16, 2, 2))},
        16,
    ),
    "softmax": ([("Softmax", "d", "e", {"axis": 1})], {}, 16),
    "softmax of rows": ([("Softmax", "d", "e", {"axis": -1})], {}, 16),
    "softmax of the transposed": (
        [("Transpose", "d", "t", {"perm": [0, 1, 3, 2]}), ("Softmax", "t", "e", {"axis": -1})],
        {},
        16,
    ),
    "sum of two": (
        [("MaxPool", "d", "g", {"kernel_shape": [3, 3], **SAME}), ("Add", "d g", "e", {})],
        {},
        16,
    ),
    "product of two": (
        [("Sigmoid", "d", "g", {}), ("Mul", "d g", "f", {}), ("Mul", "d f", "e", {})],
        {},
        16,
    ),
    "matrices": ([("MatMul", "d d", "e", {})], {}, 16),
    "where": ([("Where", "k d d", "e", {})], {"k": np.eye(16, dtype=bool)}, 16),
}
DENSE = {
    "one bias a column": (["b1", "b2"], []),
    "of two axes": (["c1", "c2"], []),
    "a number": (["one", "one"], ["Add", "Add", "Relu"]),
}


def built(nodes, constants, shape, folder, *options):
    """The engine of a model, the first of its samples, and what the report says of it."""
    held = {n: v if v.dtype in (np.int64, bool) else np.float32(v) for n, v in constants.items()}
    made = [
        helper.make_node(kind, read.split(), given.split(), name=f"n{number}", **attributes)
        for number, (kind, read, given, attributes) in enumerate(nodes)
    ]
    save_net(folder / "net.onnx", made, {"x": ["n", *shape]}, {"y": None}, held, opset=17)
    x = np.random.default_rng(2).normal(size=(12, *shape)).astype(np.float32)
    np.save(folder / "x.npy", x)
    words = ["build", str(folder / "net.onnx"), "--images", str(folder / "x.npy"), "--accept"]
    words += ["--out", str(folder / "out"), "--duration", "0", "--effort", "0", *options]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    report = json.loads((folder / "out/report.json").read_text())
    return folder / "out/net.int8.onnx", x[:1], report["targets"][0]


def kernels(engine, x, folder):
    """(operator, type of its first input) of every kernel that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(str(engine), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    return {(args["op_name"], *args["input_type_shape"][0]) for args in ran}


def ran_in_float(engine, x, target, folder):
    """Operators that are said to be int8, and run in float."""
    said = {d["op"] for d in target["nodes"] if d["precision"] == "uint8"}
    said |= {"Conv", "Gemm", "MatMul", "FusedConv", "FusedGemm", "ConvTranspose"}
    return {kind for kind, read in kernels(engine, x, folder) if read == "float" and kind in said}


def integer_kernels(engine, x, target, folder):
    """Kernels on integers of operators that are said to be float."""
    said = {d["op"] for d in target["nodes"] if d["precision"] == "uint8"}
    found = {kind for kind, _ in kernels(engine, x, folder)}
    ours = {f"QLinear{op}" for op in said} | (
        {"QLinearAdd", "QLinearMul"} if "HardSwish" in said else set()
    )
    return {kind for kind in found if kind.startswith("QLinear")} - ours


def between(name):
    """The nodes of a model of `BETWEEN`, and its constants."""
    nodes, constants, channels = BETWEEN[name]
    rng = np.random.default_rng(1)
    weights = {
        "w": rng.normal(size=(16, 16, 3, 3)), "b": rng.normal(size=16),
        "v": rng.normal(size=(8, channels, 1, 1)),
    }  # fmt: skip
    around = [
        ("Conv", "x w b", "c", SAME), ("Relu", "c", "d", {}), *nodes, ("Conv", "e v", "y", {}),
    ]  # fmt: skip
    return around, {**weights, **constants}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_convs(name, tmp_path):
    engine, x, target = built(*between(name), (16, 16, 16), tmp_path)
    assert not ran_in_float(engine, x, target, tmp_path)
    assert not integer_kernels(engine, x, target, tmp_path)
    plain = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    own = ort.InferenceSession(str(engine), providers=["CPUExecutionProvider"])
    wanted, found = (session.run(None, {"x": x})[0] for session in (plain, own))
    assert np.square(wanted).sum() > 10**2.5 * np.square(found - wanted).sum()


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_kept_float_between_two_convs(name, tmp_path):
    """ONNX Runtime would make integer kernels of some of these by itself."""
    nodes, constants = between(name)
    keep = [word for at in range(2, len(nodes) - 1) for word in ("--keep-float", f"n{at}")]
    engine, x, target = built(nodes, constants, (16, 16, 16), tmp_path, *keep)
    assert all(
        d["precision"] != "uint8" for d in target["nodes"] if d["op"] not in ("Conv", "Relu")
    )
    assert not integer_kernels(engine, x, target, tmp_path)
    assert not {"MatMulInteger", "MatMulIntegerToFloat"} & {
        k for k, _ in kernels(engine, x, tmp_path)
    }


@pytest.mark.parametrize("name", DENSE)
def test_a_matmul_of_rows_adds_its_bias_in_integers(name, tmp_path):
    """As exports from TensorFlow have their layers; ONNX Runtime made float Gemms of these."""
    biases, in_float = DENSE[name]
    rng = np.random.default_rng(1)
    constants = {
        "w1": rng.normal(size=(64, 32)), "w2": rng.normal(size=(32, 10)), "one": np.array([0.5]),
        "b1": rng.normal(size=32), "b2": rng.normal(size=10),
        "c1": rng.normal(size=(1, 32)), "c2": rng.normal(size=(1, 10)),
    }  # fmt: skip
    nodes = [
        ("MatMul", "x w1", "m", {}), ("Add", f"m {biases[0]}", "a", {}), ("Relu", "a", "r", {}),
        ("MatMul", "r w2", "k", {}), ("Add", f"{biases[1]} k", "y", {}),
    ]  # fmt: skip
    engine, x, target = built(nodes, constants, (64,), tmp_path)
    assert not ran_in_float(engine, x, target, tmp_path)
    left = [d["op"] for d in target["nodes"] if d["precision"] == "float32"]
    assert sorted(left) == in_float


def test_a_bias_that_is_to_stay_float_is_added_in_float(tmp_path):
    constants = {"w": np.random.default_rng(1).normal(size=(64, 10)), "b": np.arange(10.0)}
    nodes = [("MatMul", "x w", "m", {}), ("Add", "m b", "y", {})]
    engine, *_ = built(nodes, constants, (64,), tmp_path)
    words = ["build", str(tmp_path / "net.onnx"), "--images", str(tmp_path / "x.npy"), "--accept"]
    words += ["--duration", "0", "--effort", "0", "--keep-float", "n1", "--out"]
    done = CliRunner().invoke(cli, [*words, str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    kinds = [node.op_type for node in onnx.load(tmp_path / "kept/net.int8.onnx").graph.node]
    assert "Add" in kinds and "MatMul" in kinds and "Gemm" not in kinds
    assert "Gemm" in [node.op_type for node in onnx.load(engine).graph.node]
    assert re.search("Add.*kept float as asked|kept float as asked", done.output)
