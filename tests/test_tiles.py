"""ConvTransposes whose windows lie side by side, in int8: what is written, and what stays float."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.graph.edit import with_outputs
from deploy.targets.onnxruntime import conv_rewrites, rewrites
from deploy.tuning.timing import attributed

SIDE_BY_SIDE = {
    "square": ((16, 12, 2, 2), {"strides": [2, 2]}),
    "oblong": ((16, 12, 2, 3), {"strides": [2, 3]}),
    "row": ((16, 12, 1, 4), {"strides": [1, 4]}),
    "one channel": ((16, 1, 2, 2), {"strides": [2, 2], "pads": [0] * 4, "group": 1}),
    "said": ((16, 12, 2, 2), {"strides": [2, 2], "kernel_shape": [2, 2], "dilations": [1, 1]}),
}
OTHER = {
    "cut off": ((16, 12, 2, 2), {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    "wider": ((16, 12, 2, 2), {"strides": [2, 2], "output_padding": [1, 1]}),
    "apart": ((16, 12, 2, 2), {"strides": [3, 3]}),
    "overlapping": ((16, 12, 3, 3), {"strides": [2, 2]}),
    "overlapping in columns": ((16, 12, 2, 2), {"strides": [2, 1]}),
    "dilated": ((16, 12, 2, 2), {"strides": [2, 2], "dilations": [2, 2]}),
    "in groups": ((16, 6, 2, 2), {"strides": [2, 2], "group": 2}),
    "said how": ((16, 12, 2, 2), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "of one size": ((16, 12, 2, 2), {"strides": [2, 2], "output_shape": [11, 9]}),
    "of one pixel": ((16, 12, 1, 1), {}),
    "of a line": ((16, 12, 2), {"strides": [2]}),
    "of a volume": ((16, 12, 2, 2, 2), {"strides": [2, 2, 2]}),
}


@pytest.fixture
def built(tmp_path):
    """The engine of x -> Conv, Relu -> t -> ConvTranspose, [Relu] -> y -> Conv or Sigmoid -> out.

    By `calib8 build`; net.onnx and x.npy lie beside it.
    """

    def build(shape, given, *more, **how) -> onnx.ModelProto:
        onnx.save(network(shape, given, **how), tmp_path / "net.onnx")
        sizes = [s if isinstance(s, int) else 7 for s in how.get("sizes", (6, 5))]
        x = np.random.default_rng(4).normal(size=(6, 16, *sizes)).astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        run("build", tmp_path / "net.onnx", *images(tmp_path), *more)
        return onnx.load(tmp_path / "out/net.int8.onnx")

    return build


def network(shape, given, *, relu=True, bias=True, end="Conv", sizes=(6, 5), lopsided=False):
    """The float model; lopsided weights of the ConvTranspose all round down."""
    rng = np.random.default_rng(3)
    channels, rank = shape[1] * given.get("group", 1), len(shape) - 2
    held = {
        "v": rng.normal(size=(16, 16, *[3] * rank)), "w": rng.normal(size=shape),
        "b": rng.normal(size=channels), "u": rng.normal(size=(8, channels, *[1] * rank)),
    }  # fmt: skip
    if lopsided:
        held["w"] = (rng.integers(-20, 21, shape) + 0.45) / 126  # the steps of a pair
        held["w"][0], held["w"][1] = 1, 0
    made = "c" if relu else "y"
    turned = ["t", "w", *["b"] * bias]
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="first", pads=[1] * 2 * rank),
        helper.make_node("Relu", ["a"], ["t"], name="first relu"),
        helper.make_node("ConvTranspose", turned, [made], name="up", **given),
        *([helper.make_node("Relu", ["c"], ["y"], name="relu")] if relu else []),
        helper.make_node(end, ["y", *["u"] * (end == "Conv")], ["out"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiles",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16, *sizes])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(v), n) for n, v in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def images(folder):
    plain = ("--duration", 0, "--effort", 0, "--accept")
    return ("--images", folder / "x.npy", *plain, "--out", folder / "out")


def run(*words) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def counted(nodes, op) -> int:
    return [node.op_type for node in nodes].count(op)


def tensors(engine, names, folder):
    session = ort.InferenceSession(with_outputs(engine, names).SerializeToString())
    return session.run(names, {"x": np.load(folder / "x.npy")})


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_windows_side_by_side_are_an_int8_conv(
    kind, sizes, built, tmp_path, monkeypatch, optimized
):
    engine = built(*SIDE_BY_SIDE[kind], sizes=sizes)
    assert counted(engine.graph.node, "ConvTranspose") == 0
    ran = optimized(engine)
    assert counted(ran, "QLinearConv") == 3
    assert counted(ran, "QuantizeLinear") == counted(ran, "DequantizeLinear") == 1
    monkeypatch.setattr(rewrites, "REWRITES", rewrites.REWRITES[:-1])
    plain = built(*SIDE_BY_SIDE[kind], sizes=sizes)
    assert counted(plain.graph.node, "ConvTranspose") == 1
    names = ["t/quantized", "y/quantized", "y", "out"]
    (before, wanted, _, far), (same, found, y, out) = (
        tensors(one, names, tmp_path) for one in (plain, engine)
    )
    assert np.array_equal(before, same) and wanted.shape == found.shape == y.shape
    steps = np.abs(wanted.astype(int) - found)
    assert steps.max() <= 1 and (steps > 0).mean() < 0.001
    assert np.unique(found).size > 20 and np.linalg.norm(far - out) < 0.01 * np.linalg.norm(far)


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_a_conv_of_one_pixel_makes_what_the_float_layer_makes(kind, tmp_path):
    shape, given = SIDE_BY_SIDE[kind]
    channels, *tile = shape[1:]
    model = network(shape, given, relu=False, bias=False, end="Identity")
    x = np.random.default_rng(4).normal(size=(2, 16, 6, 5))
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    t, want = tensors(model, ["t", "y"], tmp_path)
    (held,) = [numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "w"]
    weight = conv_rewrites.tiled(held, tuple(tile))[:, :, 0, 0]
    pixels = np.einsum("nchw,oc->nohw", t.astype(float), weight)
    moved = pixels.reshape(2, *tile, channels, 6, 5).transpose(0, 3, 4, 1, 5, 2)
    made = moved.reshape(2, channels, 6 * tile[0], 5 * tile[1])
    np.testing.assert_allclose(made, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("how", [{"relu": False}, {"bias": False}, {"relu": False, "bias": False}])
@pytest.mark.parametrize("end", ["Conv", "Sigmoid"])
def test_with_and_without_activation_and_bias(how, end, built, tmp_path, optimized):
    engine = built((16, 1, 2, 2), {"strides": [2, 2]}, end=end, **how)
    assert counted(optimized(engine), "QLinearConv") == 2 + (end == "Conv")
    (want,) = tensors(onnx.load(tmp_path / "net.onnx"), ["out"], tmp_path)
    (found,) = tensors(engine, ["out"], tmp_path)
    assert np.linalg.norm(want - found) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", OTHER)
def test_other_windows_stay_in_float(kind, built, tmp_path, optimized):
    shape, given = OTHER[kind]
    engine = built(shape, given, sizes=(6, 5, 4)[: len(shape) - 2])
    assert counted(engine.graph.node, "ConvTranspose") == 1
    assert counted(optimized(engine), "QLinearConv") == 2
    assert not any(t.name.startswith("w/") for t in engine.graph.initializer)
    said = run("inspect", tmp_path / "net.onnx", "--target", "onnxruntime")
    assert "ConvTranspose: it has no int8 kernel" in " ".join(said.split())


def test_a_layer_whose_bias_is_computed_stays_in_float(tmp_path):
    model = network(*SIDE_BY_SIDE["square"])
    (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "b"]
    model.graph.initializer.remove(bias)
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [12]))
    onnx.save(model, tmp_path / "net.onnx")
    said = run("inspect", tmp_path / "net.onnx", "--target", "onnxruntime")
    assert "ConvTranspose: its bias is not constant" in " ".join(said.split())


def test_what_is_kept_in_float_is_the_layer_as_it_was(built, tmp_path, optimized):
    engine = built(*SIDE_BY_SIDE["square"], "--keep-float", "up")
    (node,) = [node for node in engine.graph.node if node.name == "up"]
    assert node.op_type == "ConvTranspose" and list(node.input)[1:] == ["w", "b"]
    assert counted(optimized(engine), "QLinearConv") == 2


def test_other_targets_have_the_layer_as_it_was(built, tmp_path):
    built(*SIDE_BY_SIDE["square"], "--target", "onnxruntime,tensorrt,ascend")
    for file in ("net.tensorrt.qdq.onnx", "net_fake_quant_model.onnx"):
        assert counted(onnx.load(tmp_path / "out" / file).graph.node, "ConvTranspose") == 1


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
def test_every_kernel_of_tiles_is_priced_as_the_layer(sizes, built, tmp_path, optimized):
    engine = built(*SIDE_BY_SIDE["square"], sizes=sizes)
    ran = {node.name: 1.0 for node in optimized(engine)}
    found = attributed(ran, onnx.load(tmp_path / "net.onnx"))
    own = [name for name in ran if name.startswith("up")]
    assert found.nodes["up"] == len(own) >= 4
    assert len([name for name in own if "token" in name]) == 1  # the Conv, fused with its Relu


def test_the_report_tells_the_weights_of_the_layer(built, tmp_path):
    built(*SIDE_BY_SIDE["square"])
    (target,) = json.loads((tmp_path / "out/report.json").read_text())["targets"]
    (row,) = [row for row in target["weights"] if row["node"] == "up"]
    assert (row["channels"], row["scales"]) == (12, 12)


def test_what_the_layer_makes_is_compared_with_the_float_layer(built, tmp_path):
    built(*SIDE_BY_SIDE["square"])
    (target,) = json.loads((tmp_path / "out/report.json").read_text())["targets"]
    assert {"t", "y"} <= {row["name"] for row in target["layers"]}
    models = (tmp_path / "net.onnx", tmp_path / "out/net.int8.onnx")
    said = run("compare", *models, "--images", tmp_path / "x.npy")
    assert " y  (Relu relu)" in said and "They do not part" in said
    back = run("compare", *reversed(models), "--images", tmp_path / "x.npy")
    assert " y  (Transpose up/whole)" in back


def test_biases_behind_which_there_is_no_layer_are_corrected_alike(built, tmp_path, monkeypatch):
    how = {"relu": False, "end": "Sigmoid", "lopsided": True}
    words = ("--repair", "bias")

    def bias(name, engine):
        held = {t.name: numpy_helper.to_array(t) for t in engine.graph.initializer}
        return held[f"{name}/quantized"] * held[f"{name}/scale"].astype(float)

    engine = built((16, 3, 2, 2), {"strides": [2, 2]}, *words, **how)
    notes = json.loads((tmp_path / "out/report.json").read_text())["targets"][0]["notes"]
    assert any("bias correction" in note and note.endswith(", kept") for note in notes)
    found = bias("up/bias", engine).reshape(4, 3)
    monkeypatch.setattr(rewrites, "REWRITES", rewrites.REWRITES[:-1])
    plain = built((16, 3, 2, 2), {"strides": [2, 2]}, *words, **how)
    own = numpy_helper.to_array(network((16, 3, 2, 2), {}, **how).graph.initializer[2])
    assert np.array_equal(found, found[[0] * 4]) and np.abs(found[0] - own).min() > 1e-3
    assert np.abs(found[0] - bias("b/up", plain)).max() < 0.02 * np.abs(found[0] - own).min()


def test_a_model_with_pairs_is_kept_but_for_such_layers(built, tmp_path, monkeypatch, optimized):
    with monkeypatch.context() as patch:
        patch.setattr(rewrites, "REWRITES", rewrites.REWRITES[:-1])
        plain = built(*SIDE_BY_SIDE["square"])
    (tmp_path / "paired.onnx").write_bytes(plain.SerializeToString())
    words = ("--duration", 0, "--accept", "--images", tmp_path / "x.npy", "--out", tmp_path / "o")
    run("build", tmp_path / "paired.onnx", *words)
    engine = onnx.load(tmp_path / "o/paired.int8.onnx")
    assert counted(optimized(engine), "QLinearConv") == 3
    assert np.array_equal(*(tensors(one, ["t"], tmp_path)[0] for one in (plain, engine)))


def test_another_layer_between_pairs_of_a_model_is_called_float(built, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("deploy.graph.refusal.tile_of", lambda node, sizes: (3, 3))
        plain = built(*OTHER["overlapping"])
    assert any(tensor.name == "w/quantized" for tensor in plain.graph.initializer)
    (tmp_path / "paired.onnx").write_bytes(plain.SerializeToString())
    words = ("--duration", 0, "--accept", "--images", tmp_path / "x.npy", "--out", tmp_path / "o")
    run("build", tmp_path / "paired.onnx", *words)
    (target,) = json.loads((tmp_path / "o/report.json").read_text())["targets"]
    (up,) = [node for node in target["nodes"] if node["name"] == "up"]
    assert up["precision"] == "float32" and up["reason"].startswith("it has no int8 kernel")
