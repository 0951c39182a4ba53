"""`--dynamic-matmul`: scales found anew for each input."""

import json

import numpy as np
import onnx
import onnxruntime as ort
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli


def attention() -> onnx.ModelProto:
    """One head over x [n, 12, 32]: scores of Q and K, Softmax, V, a projection, a skip."""
    rng = np.random.default_rng(2)
    weights = {n: rng.normal(scale=0.2, size=(32, 32)) for n in ("wq", "wk", "wv", "wo")}
    weights["wo"][:, 3] *= 40  # one column far larger than the others
    nodes = [
        ("MatMul", "x wq", "q", {}), ("MatMul", "x wk", "k", {}), ("MatMul", "x wv", "v", {}),
        ("Transpose", "k", "kt", {"perm": [0, 2, 1]}), ("MatMul", "q kt", "s", {}),
        ("Softmax", "s", "p", {"axis": -1}), ("MatMul", "p v", "z", {}),
        ("MatMul", "z wo", "o", {}), ("Add", "o x", "y", {}),
    ]  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node(op, reads.split(), [made], name=f"{op}_{made}", **given)
            for op, reads, made, given in nodes
        ],
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 12, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 12, 32])],
        [numpy_helper.from_array(v.astype(np.float32), n) for n, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def built(folder, *options):
    """SQNR in dB over inputs of very different size, the kernels that run, the decisions."""
    folder.mkdir()
    onnx.save(attention(), folder / "net.onnx")
    x = np.random.default_rng(3).normal(size=(8, 12, 32)).astype(np.float32)
    x *= np.geomspace(0.05, 3, 8, dtype=np.float32)[:, None, None]
    np.save(folder / "x.npy", x)
    given = ["build", folder / "net.onnx", "--images", folder / "x.npy", "--duration", 0]
    given += ["--effort", 0, "--accept", "--out", folder / "out", *options]
    done = CliRunner().invoke(cli, [str(word) for word in given])
    assert done.exit_code == 0, done.output
    session = ort.SessionOptions()
    session.log_severity_level = 4
    session.optimized_model_filepath = str(folder / "optimized.onnx")
    int8 = ort.InferenceSession(folder / "out/net.int8.onnx", session)
    float32 = ort.InferenceSession(folder / "net.onnx")
    noise = []
    for one in x:
        want, got = (s.run(None, {"x": one[None]})[0] for s in (float32, int8))
        noise.append(((want - got) ** 2).sum() / (want**2).sum())
    kernels = [n.op_type for n in onnx.load(folder / "optimized.onnx").graph.node]
    nodes = json.loads((folder / "out/report.json").read_text())["targets"][0]["nodes"]
    return -10 * np.log10(np.max(noise)), kernels, {n["name"]: n["precision"] for n in nodes}


def test_an_input_of_another_size_keeps_its_accuracy(tmp_path):
    static, _, _ = built(tmp_path / "static")
    dynamic, kernels, precision = built(tmp_path / "dynamic", "--dynamic-matmul")
    assert dynamic > 19 > 0 > static
    integer = kernels.count("MatMulIntegerToFloat") + kernels.count("DynamicQuantizeMatMul")
    assert integer == 4 and kernels.count("MatMul") + kernels.count("FusedMatMul") == 2
    assert kernels.count("DynamicQuantizeLinear") <= 2  # one for the three that read x
    assert [precision[f"MatMul_{n}"] for n in "qkvoz"] == ["uint8"] * 4 + ["float32"]


def test_a_matmul_kept_float_stays_float(tmp_path):
    _, kernels, precision = built(tmp_path / "a", "--dynamic-matmul", "--keep-float", "MatMul_o")
    assert precision["MatMul_o"] == "float32" and kernels.count("MatMul") >= 1
    constants = {t.name for t in onnx.load(tmp_path / "a/out/net.int8.onnx").graph.initializer}
    assert "wo" in constants and "wq" not in constants


def test_inspect_shows_the_matmuls_as_they_will_be_built(tmp_path):
    onnx.save(attention(), tmp_path / "net.onnx")
    given = ["inspect", str(tmp_path / "net.onnx"), "--all"]
    static, dynamic = (
        CliRunner().invoke(cli, [*given, *more]).output for more in ([], ["--dynamic-matmul"])
    )
    assert static != dynamic and "MatMul_q" in dynamic


def test_seven_bit_weights_hold_for_dynamic_matmuls_too(tmp_path):
    built(tmp_path / "a", "--dynamic-matmul", "--weight-bits", "7")
    held = onnx.load(tmp_path / "a/out/net.int8.onnx").graph.initializer
    weights = [numpy_helper.to_array(t) for t in held if t.name.endswith("/dynamic/quantized")]
    assert len(weights) == 4 and max(np.abs(w.astype(int)).max() for w in weights) == 63
