"""Nearest upsampling in int8: what is written for it, that it repeats, and that layouts stay."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.graph.edit import with_outputs
from deploy.graph.index import Graph
from deploy.targets.onnxruntime.conv_rewrites import RewriteContext
from deploy.targets.onnxruntime.map_rewrites import write_upsampling

FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric"}
REPEATING = [
    ((2, 2), {}),
    ((3, 3), {}),
    ((4, 2), {"coordinate_transformation_mode": "pytorch_half_pixel"}),
    ((2, 2), ASYMMETRIC),
    ((1, 3), FLOOR),
    ((8, 8), FLOOR | {"mode": "nearest"}),
]
OTHER = [
    ((3, 3), ASYMMETRIC),  # the third of three comes from the next
    ((2, 2), {"nearest_mode": "ceil"}),
    ((2, 2), {"nearest_mode": "floor"}),
    ((2, 2), {"coordinate_transformation_mode": "align_corners"}),
    ((1.5, 1.5), FLOOR),
    ((2, 2), {"mode": "linear"}),
]


@pytest.fixture
def built(tmp_path):
    """The engine of x -> Conv -> t -> Resize -> y -> Conv, with or without known sizes."""

    def build(factors, given, sizes=(6, 5), *, read=False) -> onnx.ModelProto:
        rng = np.random.default_rng(3)
        weights = {
            "v": rng.normal(size=(16, 8, 3, 3)), "w": rng.normal(size=(16, 16, 3, 3)),
            "scales": np.array([1, 1, *factors]),
        }  # fmt: skip
        nodes = [
            helper.make_node("Conv", ["x", "v"], ["t"], name="first", pads=[1, 1, 1, 1]),
            helper.make_node("Resize", ["t", "", "scales"], ["y"], name="up", **given),
            helper.make_node("Conv", ["y", "w"], ["out"], name="last", pads=[1, 1, 1, 1]),
        ]
        ends = ["out", "y"] if read else ["out"]
        graph = helper.make_graph(
            nodes,
            "upsampling",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, *sizes])],
            [helper.make_tensor_value_info(end, TensorProto.FLOAT, None) for end in ends],
            [numpy_helper.from_array(np.float32(v), n) for n, v in weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.save(model, tmp_path / "net.onnx")
        np.save(tmp_path / "x.npy", rng.normal(size=(6, 8, 6, 5)).astype(np.float32))
        given_words = ["--images", str(tmp_path / "x.npy"), "--out", str(tmp_path / "out")]
        words = ["build", str(tmp_path / "net.onnx"), *given_words, "--duration", "0"]
        done = CliRunner().invoke(cli, [*words, "--effort", "0", "--accept"])
        assert done.exit_code == 0, done.output
        return onnx.load(tmp_path / "out/net.int8.onnx")

    return build


def resizes(model: onnx.ModelProto) -> int:
    return [node.op_type for node in model.graph.node].count("Resize")


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
@pytest.mark.parametrize(("factors", "given"), REPEATING)
def test_a_resize_that_repeats_is_written_as_copies(factors, given, sizes, built, tmp_path):
    engine = built(factors, given, sizes)
    assert resizes(engine) == 0
    names = ["t/quantized", "y/quantized"]
    session = ort.InferenceSession(with_outputs(engine, names).SerializeToString())
    before, after = session.run(names, {"x": np.load(tmp_path / "x.npy")})
    assert np.array_equal(after, before.repeat(factors[0], 2).repeat(factors[1], 3))
    float32 = ort.InferenceSession(str(tmp_path / "net.onnx"))
    want, got = (
        one.run(["out"], {"x": np.load(tmp_path / "x.npy")})[0]
        for one in (float32, ort.InferenceSession(engine.SerializeToString()))
    )
    assert np.linalg.norm(want - got) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize(("factors", "given"), OTHER)
def test_a_resize_that_does_more_stays(factors, given, built):
    assert resizes(built(factors, given)) == 1


def test_what_the_user_reads_is_repeated_too(built, tmp_path):
    engine = built((2, 2), {}, read=True)
    assert resizes(engine) == 0
    x = np.load(tmp_path / "x.npy")
    names = ["t/quantized", "y/quantized", "y"]
    session = ort.InferenceSession(with_outputs(engine, names).SerializeToString())
    before, after, read = session.run(names, {"x": x})
    assert np.array_equal(after, before.repeat(2, 2).repeat(2, 3))
    assert np.unique(read).size == np.unique(after).size


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
def test_layers_around_copies_are_turned_once(sizes, built, kernels):
    ran = kernels(built((2, 2), {}, sizes))
    assert ran.count("QLinearConv") == 2 and ran.count("Tile") == 1
    assert ran.count("Transpose") == 2  # of what comes in and what goes out


@pytest.mark.parametrize(("scale", "left"), [(0.5, 0), (0.25, 1)])
def test_pairs_are_of_one_grid_by_their_numbers_however_stored(scale, left):
    numbers = [
        helper.make_tensor(name, kind, [], [value])  # in float_data, and not in raw_data
        for name, kind, value in (
            ("s", TensorProto.FLOAT, 0.5),
            ("r", TensorProto.FLOAT, scale),
            ("z", TensorProto.UINT8, 3),
        )
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["t"], name="before"),
        helper.make_node("Resize", ["t", "", "scales"], ["y"], name="up"),
        helper.make_node("QuantizeLinear", ["y", "r", "z"], ["out"], name="behind"),
    ]
    sizes, doubled = [1, 2, 3, 3], [1, 2, 6, 6]
    graph = helper.make_graph(
        nodes,
        "pairs",
        [helper.make_tensor_value_info("q", TensorProto.UINT8, sizes)],
        [helper.make_tensor_value_info("out", TensorProto.UINT8, doubled)],
        [*numbers, numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")],
        value_info=[helper.make_tensor_value_info("t", TensorProto.FLOAT, sizes)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    write_upsampling(model, RewriteContext(like=Graph(model)))
    assert resizes(model) == left
