"""MatMuls that ONNX Runtime quantizes while it runs: --dynamic-matmul."""

from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper

from tests.models import as_float32, build_net, make_model, parse_nodes, read_target, run_net

INT8 = "net.int8.onnx"


def attention() -> onnx.ModelProto:
    """One head over x [n, 12, 32]: scores of Q and K, Softmax, V, a projection, a skip."""
    rng = np.random.default_rng(2)
    weights = {n: rng.normal(scale=0.2, size=(32, 32)) for n in ("wq", "wk", "wv", "wo")}
    weights["wo"][:, 3] *= 40  # one column far larger than the others
    nodes = parse_nodes(
        "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul(q, kt) p = Softmax <axis = -1> (s)"
        "z = MatMul(p, v) o = MatMul(z, wo) y = Add(o, x)"
    )
    return make_model(nodes, {"x": ["n", 12, 32]}, {"y": ["n", 12, 32]}, as_float32(weights))


def build_dynamic(folder, *options):
    """SQNR in dB over inputs of very different size, the engine, the decisions."""
    x = np.random.default_rng(3).normal(size=(8, 12, 32)).astype(np.float32)
    x *= np.geomspace(0.05, 3, 8, dtype=np.float32)[:, None, None]
    model = attention()
    engine = onnx.load(build_net(model, x, folder, "--effort", 0, "--accept", *options) / INT8)
    noise = []
    for sample in x:
        expected, outputs = (run_net(m, sample[None])[0] for m in (model, engine))
        noise.append(((expected - outputs) ** 2).sum() / (expected**2).sum())
    nodes = read_target(folder / "out")["nodes"]
    return -10 * np.log10(np.max(noise)), engine, {n["name"]: n["precision"] for n in nodes}


def test_dynamic_matmul_fits_any_input_size(tmp_path, kernels):
    static, _, _ = build_dynamic(tmp_path / "static")
    dynamic, engine, precision = build_dynamic(tmp_path / "dynamic", "--dynamic-matmul")
    assert dynamic > 19 > 0 > static
    kernel_counts = Counter(kernels(engine))
    assert kernel_counts["MatMulIntegerToFloat"] + kernel_counts["DynamicQuantizeMatMul"] == 4
    assert kernel_counts["MatMul"] + kernel_counts["FusedMatMul"] == 2
    assert kernel_counts["DynamicQuantizeLinear"] <= 2  # one for the three that read x
    assert [precision[f"MatMul_{n}"] for n in "qkvoz"] == ["uint8"] * 4 + ["float32"]


def test_float_matmul_stays_float(tmp_path, kernels):
    options = ("--dynamic-matmul", "--keep-float", "MatMul_o")
    _, engine, precision = build_dynamic(tmp_path / "a", *options)
    assert precision["MatMul_o"] == "float32"
    assert kernels(engine).count("MatMul") >= 1
    constants = {t.name for t in engine.graph.initializer}
    assert "wo" in constants
    assert "wq" not in constants


def test_inspect_shows_dynamic_matmuls(tmp_path, run):
    onnx.save(attention(), tmp_path / "net.onnx")
    arguments = ("inspect", tmp_path / "net.onnx", "--all")
    static = run.ok(*arguments)
    dynamic = run.ok(*arguments, "--dynamic-matmul")
    assert static != dynamic
    assert "MatMul_q" in dynamic


def test_dynamic_matmul_takes_seven_bit_weights(tmp_path):
    _, engine, _ = build_dynamic(tmp_path / "a", "--dynamic-matmul", "--weight-bits", "7")
    initializers = engine.graph.initializer
    weights = [
        numpy_helper.to_array(t) for t in initializers if t.name.endswith("/dynamic/quantized")
    ]
    assert len(weights) == 4
    assert max(np.abs(w.astype(int)).max() for w in weights) == 63
