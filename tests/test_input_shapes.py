"""A size for an ONNX file that was exported at another one: `--input 1x3x256x256`."""

import numpy as np
import onnx
import pytest

from deploy.errors import ConfigError, ModelError
from deploy.frontends.input_shapes import open_with_shapes, parse_input
from tests.models import make_model, run_net

WEIGHT = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
SIDE, HALF = 16, 8


def sizes(*values):
    return np.array(values, np.int64)


# tail after a Conv of [1, 8, 8, 8] -> its constants
CONVOLUTIONAL = {
    "y = Relu(c)": {},
    "p = GlobalAveragePool(c) y = Flatten(p)": {},
    "y = Reshape(c, s)": {"s": sizes(0, 8, -1)},
    "y = Resize(c, , s)": {"s": np.array([1, 1, 2, 2], np.float32)},
    "n = Shape(c) e = Slice(n, s, t) y = Expand(r, e)": {
        "s": sizes(2),
        "t": sizes(4),
        "r": np.ones((1, 1), np.float32),
    },
    "y = Slice(c, s, t, s, u)": {"s": sizes(1), "t": sizes(2**31), "u": sizes(2)},
}
FIXED = {
    "y = Reshape(c, s)": {"s": sizes(1, 8, 64)},
    "r = Reshape(c, s) y = Relu(r)": {"s": sizes(-1, 512)},
    "y = Resize(c, , , s)": {"s": sizes(1, 8, 16, 16)},
    "y = Slice(c, s, t, u)": {"s": sizes(0, 0), "t": sizes(8, 8), "u": sizes(2, 3)},
    "y = Expand(c, s)": {"s": sizes(1, 8, 8, 8)},
    "y = Add(c, s)": {"s": np.zeros((1, 8, 8, 8), np.float32)},
    "f = Flatten(c) y = Gemm(f, s)": {"s": np.zeros((512, 4), np.float32)},
    "p = AveragePool <kernel_shape = [8, 8]> (c) f = Flatten(p) y = Gemm(f, s)": {
        "s": np.zeros((8, 4), np.float32)
    },
}


def make_net(tail, constants, batch, sides):
    conv = "c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w) "
    inputs, outputs = {"x": [batch, 3, *sides]}, {"y": None}
    return make_model(conv + tail, inputs, outputs, {"w": WEIGHT} | constants, opset=17)


@pytest.fixture
def save(tmp_path):
    def save_net(tail, constants, batch=1):
        onnx.save(make_net(tail, constants, batch, (SIDE, SIDE)), tmp_path / "net.onnx")
        return tmp_path / "net.onnx"

    return save_net


@pytest.mark.parametrize("batch", [1, "n"])
@pytest.mark.parametrize("tail", CONVOLUTIONAL)
def test_convolutional_file_takes_other_sizes(tail, batch, save):
    rng = np.random.default_rng(len(tail))
    sides = [int(side) for side in rng.integers(5, 40, 2) * 2]
    path = save(tail, CONVOLUTIONAL[tail], batch)
    loaded = open_with_shapes(path, [parse_input(f"1x3x{sides[0]}x{sides[1]}")])
    assert loaded.inputs[0].shape == (batch, 3, *sides) and loaded.name == "net"
    x = rng.normal(size=(1, 3, *sides)).astype(np.float32)
    expected = run_net(make_net(tail, CONVOLUTIONAL[tail], batch, sides), x)
    assert np.array_equal(run_net(loaded.model, x)[0], expected[0])


@pytest.mark.parametrize("batch", [1, "n"])
@pytest.mark.parametrize("tail", FIXED)
def test_node_with_a_size_inside_is_named(tail, batch, save):
    node = tail.split("= ")[-1].split("(")[0].split()[0]
    if "r = Reshape" in tail:
        node = "Reshape"
    with pytest.raises(ModelError, match=f"{node}.*{node}_|{node}_.*{node}"):
        open_with_shapes(save(tail, FIXED[tail], batch), [parse_input("1x3x48x32")])


def test_equal_shape_leaves_the_file(save):
    path = save("y = Relu(c)", {})
    assert open_with_shapes(path, [parse_input("x=1x3x16x16")]).source == path


def test_shape_fills_an_unknown_rank(save):
    path = save("y = Relu(c)", {})
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    loaded = open_with_shapes(path, [parse_input("1x3x24x16")])
    assert loaded.inputs[0].shape[1:] == (3, 24, 16)


@pytest.mark.parametrize("text", ["1x3x48", "z=1x3x8x8", "1x3x8x8:uint8"])
def test_shape_of_another_input_is_refused(text, save, wording):
    with pytest.raises(ConfigError) as refusal:
        open_with_shapes(save("y = Relu(c)", {}), [parse_input(text)])
    wording.check(refusal.value)


def test_number_of_channels_is_refused(save):
    with pytest.raises(ModelError, match="Conv_c"):
        open_with_shapes(save("y = Relu(c)", {}), [parse_input("1x4x16x16")])


def test_more_shapes_than_inputs_are_refused(save):
    shape = parse_input("1x3x8x8")
    with pytest.raises(ConfigError, match="got 2 of them"):
        open_with_shapes(save("y = Relu(c)", {}), [shape, shape])


@pytest.mark.slow
def test_build_takes_the_size(save, pictures, tmp_path, run):
    constants = {"v": np.random.default_rng(1).normal(size=(8, 8, 3, 3)).astype(np.float32)}
    path = save("d = Conv(c, v) p = GlobalAveragePool(d) y = Flatten(p)", constants)
    quick = ("--effort", 0, "--duration", 0, "--accept", "--out", tmp_path / "o")
    out = run.ok("build", path, "--input", "1x3x24x32", "--images", pictures, *quick)
    assert "24x32" in out and (tmp_path / "o" / "net.int8.onnx").exists()
    again = ("--images", pictures, "--limit", 8)
    assert "24x32" in run.ok("check", tmp_path / "o", *again, "--duration", 0)
    run.ok("explain", tmp_path / "o", *again)
