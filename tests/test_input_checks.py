"""Inputs that do not match how the model was trained."""

import json
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploy.calibration.input_checks import check_input_samples, find_first_layer
from deploy.feed.preprocess import Preprocess
from tests.models import as_float32, make_model, make_node, make_value, save_net

FASHION = Path(__file__).parent.parent / "datasets" / "fashion"
HALF = Preprocess(size=(16, 16), color="rgb", mean=(0.5,), std=(0.5,), layout="nchw")


def make_smooth_pictures(count=6):
    """uint8 pictures [1, 3, 16, 16] that are as smooth as photos."""
    coarse = np.random.default_rng(3).integers(0, 256, (count, 1, 3, 4, 4))
    return [np.kron(picture, np.ones((1, 1, 4, 4))) for picture in coarse]


def make_samples(preprocess, pictures=None):
    scaled_pictures = [
        (picture * preprocess.scale - preprocess.mean[0]) / preprocess.std[0]
        for picture in pictures or make_smooth_pictures()
    ]
    return [{"x": picture.astype(np.float32)} for picture in scaled_pictures]


def make_network(nodes_before=(), *, norm=True, bias=True):
    """x -> `nodes_before` -> Conv -> BatchNormalization (moments of `HALF`) or a bias -> y."""
    weight = np.random.default_rng(5).normal(size=(4, 3, 3, 3)) * 0.3
    constants = {"w": weight, "half": 0.5, "most": 255, "b": [0.4, -0.7, 0.5, -0.3]}
    constants |= {"one": np.ones(4), "zero": np.zeros(4)}
    constants |= dict(zip(("mean", "var"), channel_moments(weight.astype(np.float32)), strict=True))
    nodes, tensor = [], "x"
    for op, constant in nodes_before:
        nodes.append((op, [tensor, constant], f"{tensor}_"))
        tensor += "_"
    bias_input = " b" if bias and not norm else ""
    nodes.append(("Conv", f"{tensor} w{bias_input}", "c", {"name": "c"}))
    if norm:
        nodes.append(("BatchNormalization", "c one zero mean var", "n", {"name": "norm"}))
    nodes.append(("Relu", "n" if norm else "c", "y"))
    inputs_and_outputs = {"x": [1, 3, 16, 16]}, {"y": [1, 4, 14, 14]}
    return make_model(nodes, *inputs_and_outputs, as_float32(constants))


def channel_moments(weight):
    """Mean and variance of each channel behind the Conv, of pictures fed as `HALF` has it."""
    rows = []
    for sample in make_samples(HALF):
        windows = np.lib.stride_tricks.sliding_window_view(sample["x"][0], (3, 3), axis=(1, 2))
        rows.append(np.einsum("chwij,ocij->ohw", windows, weight).reshape(4, -1))
    values = np.concatenate(rows, axis=1)
    return values.mean(axis=1).astype(np.float32), values.var(axis=1).astype(np.float32)


def change_half(**options):
    return Preprocess.from_json({**HALF.to_json(), **options})


UNIT, RAW = change_half(mean=[0.0], std=[1.0]), change_half(mean=[0.0], std=[1.0], scale=1.0)


def test_batch_norm_reveals_mean_and_std():
    assert check_input_samples(make_samples(HALF), HALF, make_network()) == []
    for preprocess in (UNIT, RAW):
        (message,) = check_input_samples(make_samples(preprocess), preprocess, make_network())
        assert "pixels / 255 with mean 0.5 and std 0.5" in message
        assert "(norm)" in message
        assert "--mean" in message


def test_arrays_of_another_unit_are_reported():
    for offset, scale in ((20, 1), (0, 1 / 9e4)):
        samples = [
            {"x": (sample["x"] - offset) * np.float32(scale)} for sample in make_samples(RAW)
        ]
        (message,) = check_input_samples(samples, None, make_network())
        assert "has another unit" in message
        assert "arrays were made" in message
    (message,) = check_input_samples(make_samples(UNIT), None, make_network())
    assert "does not match the training data, but pixels / 255 with mean 0.5" in message
    changed_samples = [
        {"x": sample["x"] * 2 + 0.5} for sample in make_samples(UNIT)
    ]  # other images may explain as much
    assert check_input_samples(changed_samples, None, make_network()) == []


def test_self_normalising_model_takes_raw_pixels():
    net = make_network([("Div", "most"), ("Sub", "half"), ("Div", "half")])
    assert check_input_samples(make_samples(RAW), RAW, net) == []
    assert check_input_samples(make_samples(HALF), None, net) != []


def make_network_behind(op, inputs, name, **values):
    """A network without a norm, behind a node that reads x and constants of each channel."""
    net = make_network(norm=False)
    net.graph.node.insert(0, make_node(op, inputs, "x0", name))
    net.graph.node[1].input[0] = "x0"
    for constant_name, value in values.items():
        net.graph.initializer.append(
            numpy_helper.from_array(np.full(3, value, np.float32), constant_name)
        )
    return net


def test_batch_norm_at_input_is_checked():
    values = {"s": 1, "z": 0, "m": 127.5, "v": 5400}
    net = make_network_behind("BatchNormalization", "x s z m v", "data", **values)
    assert check_input_samples(make_samples(RAW), RAW, net) == []
    (message,) = check_input_samples(make_samples(UNIT), UNIT, net)
    assert "(data)" in message


def test_bias_reveals_wrong_pixel_scale():
    net = make_network(norm=False)
    for preprocess in (HALF, UNIT):
        assert check_input_samples(make_samples(preprocess), preprocess, net) == []
    (message,) = check_input_samples(make_samples(RAW), RAW, net)
    assert "values of 0 to 249" in message
    assert "(c)" in message
    assert "values of 0 to 249" in check_input_samples(make_samples(RAW), None, net)[0]
    (message,) = check_input_samples(
        [{"x": sample["x"] / 255} for sample in make_samples(UNIT)], None, net
    )
    assert "calibration data is too small" in message
    for offset in (0.5, 7.5, 120):  # resized in float, or a mean alone
        (message,) = check_input_samples(
            [{"x": sample["x"] - offset} for sample in make_samples(RAW)], None, net
        )
        assert f"values of {0 - offset:g} to " in message
    wide_samples = [
        {"x": sample["x"] / 5 - 7.5} for sample in make_samples(RAW)
    ]  # no pixels, whatever they are
    assert check_input_samples(wide_samples, None, net) == []


@pytest.mark.parametrize("wrong_input", ["x", "right", "sound", "vector", ""])
def test_inputs_are_compared_with_norms(wrong_input):
    shapes = {"x": [1, 1, 8, 8], "right": [1, 1, 8, 8], "sound": [1, 400], "vector": [1, 2]}
    constants = as_float32({"one": [1], "zero": [0], "w": [[1], [1]]}) | {"at": np.array([1])}
    nodes = [("Unsqueeze", "sound at", "s"), ("Gemm", "vector w", "v")]
    for name, tensor in {"x": "x", "right": "right", "sound": "s", "vector": "v"}.items():
        nodes.append(("BatchNormalization", f"{tensor} one zero zero one", f"{name}/n"))
    net = make_model(nodes, shapes, {f"{name}/n": None for name in shapes}, constants)
    draw_normal = np.random.default_rng(0).normal
    samples = []
    for _ in range(4):
        sample = {}
        for input_name, shape in shapes.items():
            spread = 1000 if input_name == wrong_input else 1
            sample[input_name] = draw_normal(0, spread, shape)
        samples.append(as_float32(sample))
    messages = check_input_samples(samples, None, net)
    assert len(messages) == (wrong_input != "")
    assert all("has another unit" in message for message in messages)


def make_sliced_stem():
    """YOLOX's first nodes: x sliced into every second row and column, joined, a Conv."""
    constants = {
        "w": np.random.default_rng(5).normal(size=(4, 12, 3, 3)).astype(np.float32) * 0.3,
        "b": np.array([0.4, -0.7, 0.5, -0.3], np.float32) * 255,
        "end": np.array([2**31]),
        "two": [2],
        "rows": [2],
        "columns": [3],
        "at0": [0],
        "at1": [1],
    }
    nodes, parts = [], []
    for column in range(2):
        for row in range(2):
            row_part, part = f"r{row}{column}", f"p{row}{column}"
            nodes.append(("Slice", f"x at{row} end rows two", row_part))
            nodes.append(("Slice", f"{row_part} at{column} end columns two", part))
            parts.append(part)
    nodes.append(("Concat", parts, "j", {"axis": 1}))
    nodes.append(("Conv", "j w b", "c", {"name": "c"}))
    nodes.append(("Relu", "c", "y"))
    return make_model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 4, 6, 6]}, constants)


@pytest.mark.parametrize("reader", ["Mul", "Sub"])
def test_constant_may_be_first_operand(reader):
    first_layer = find_first_layer(make_network_behind(reader, "most x", "scaled"), "x")
    assert first_layer is not None
    assert first_layer.node == "c"


@pytest.mark.parametrize(
    ("op", "inputs", "position"),
    [
        *(("Relu", name, 11) for name in ("r10", "p01", "j")),
        *(("Conv", "p00 v", n) for n in (2, 11)),
    ],
)
def test_shared_slices_hide_first_conv(op, inputs, position):
    net = make_sliced_stem()
    assert find_first_layer(net, "x") is not None
    assert len(net.graph.node) == 11
    net.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "v"))
    net.graph.node.insert(position, make_node(op, inputs, "z", "z"))
    net.graph.output.append(make_value("z", None))
    assert find_first_layer(net, "x") is None


def test_build_reports_sliced_stem_scale(run, tmp_path):
    for number, picture in enumerate(make_smooth_pictures()):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture[0].transpose(1, 2, 0))
    path, report = save_net(make_sliced_stem(), tmp_path / "net.onnx"), tmp_path / "a.json"
    arguments = ("build", path, "--images", tmp_path, "--duration", 0, "--effort", 0, "--accept")
    for preset, is_reported in (((), True), (("--preprocess", "raw"), False)):
        run.ok(*arguments, *preset, "--out", tmp_path, "--json", report)
        text = report.read_text()
        assert ("calibration data is too small" in text) == ("(c)" in text) == is_reported
        (verdict,) = (
            engine["verdict"] for engine in json.loads(text)["engines"] if engine.get("verdict")
        )
        assert (
            "the float model's inputs are in question: " in verdict["reasons"][0]
        ) == is_reported


@pytest.mark.parametrize("preprocess", [HALF, None])
def test_samples_of_one_value_are_reported(preprocess):
    flat = [{"x": np.full((1, 3, 16, 16), value, np.float32)} for value in (0.5, -1)]
    assert (
        check_input_samples([*flat, *make_samples(HALF)], preprocess, make_network(norm=False))
        == []
    )
    nearly_flat = [{"x": sample["x"] + 1e-4 * make_samples(HALF)[0]["x"]} for sample in flat]
    for samples in (flat, nearly_flat):
        assert "alone, such as 0.5" in check_input_samples(samples, preprocess, make_network())[0]


@pytest.mark.parametrize(
    ("rows", "is_doubtful"),
    [
        ([0] * 16, True),
        ([0], True),
        ([0, 1, 2], True),
        ([0, 1, 2, 3] * 4, True),
        ([*range(4)], False),
        ([*range(8)] * 4, False),
        ([0, 1, 2, 3, 0, 1, 2], False),
    ],
)
def test_too_few_different_samples_are_doubtful(run, small_cnn, tmp_path, rows, is_doubtful):
    arrays = np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", arrays[rows])
    arguments = ("--images", tmp_path / "x.npy", "--duration", 0, "--effort", 0, "--out", tmp_path)
    run.ok("build", small_cnn, *arguments, "--accept")
    report = json.loads((tmp_path / "report.json").read_text())
    verdict = report["engines"][1]["verdict"]
    sentence = "too few; 100 or more would do"
    reasons = " ".join(verdict["reasons"])
    assert (verdict["level"] == "doubtful" and sentence in reasons) == is_doubtful
    if is_doubtful:
        assert reasons.startswith(f"{len({*rows})} ")
    assert any(sentence in alert for alert in report.get("alerts", [])) == is_doubtful


@pytest.mark.parametrize("is_silent", [False, True])
def test_zero_start_state_is_not_reported(command, tmp_path, is_silent):
    nodes = [("Concat", "cache sound", "both", {"axis": 2}), ("Conv", "both w", "y")]
    inputs = {"cache": [1, 4, 3, 1], "sound": [1, 4, 9, 1]}
    weight = np.random.default_rng(0).normal(size=(2, 4, 2, 1)).astype(np.float32)
    onnx.save(make_model(nodes, inputs, {"y": [1, 2, 11, 1]}, {"w": weight}), tmp_path / "m.onnx")
    (tmp_path / "fed").mkdir()
    for number in range(4):
        sound = np.random.default_rng(number).normal(size=inputs["sound"]) * (not is_silent)
        arrays = as_float32({"cache": np.zeros(inputs["cache"]), "sound": sound})
        np.savez(tmp_path / "fed" / f"{number}.npz", **arrays)
    arguments = (
        "calibrate",
        tmp_path / "m.onnx",
        "--images",
        tmp_path / "fed",
        "-o",
        tmp_path / "c",
    )
    assert ("one value alone, such as 0;" in command(*arguments)) == is_silent


def test_pictures_of_one_colour_are_reported():
    dark = [
        picture // 24 for picture in make_smooth_pictures()
    ]  # as 12 bits in the upper byte of 16
    (message,) = check_input_samples(make_samples(HALF, dark), HALF, make_network())
    assert "16 of 255" in message
    assert "16-bit" in message


def test_other_inputs_are_not_checked():
    rows = [{"x": np.arange(40, dtype=np.float32)[None], "rate": np.float32(3)}]
    assert check_input_samples(rows, None, make_network()) == []
    (message,) = check_input_samples([{**rows[0], "x": np.zeros((1, 40))}], None, make_network())
    assert "the sample holds one value alone, such as 0" in message
    assert check_input_samples([], None, make_network()) == []
    assert check_input_samples(make_samples(RAW), RAW, make_network(norm=False, bias=False)) == []
    shared_network = make_network()
    assert find_first_layer(shared_network, "other") is None
    shared_network.graph.output.append(onnx.ValueInfoProto(name="c"))
    assert find_first_layer(shared_network, "x") is None  # somebody else reads the Conv as well
    foreign_network = make_network()  # a node of another domain may be named like a standard one
    foreign_network.graph.node[1].domain, foreign_network.graph.node[1].input[1:] = "my", []
    assert find_first_layer(foreign_network, "x") is None
    external_network = make_network()
    external_network.graph.initializer[0].data_location = TensorProto.EXTERNAL
    assert find_first_layer(external_network, "x") is None


@pytest.mark.parametrize(
    ("options", "is_reported"), [(("--mean", 0.5, "--std", 0.5), False), ((), True)]
)
def test_demo_without_mean_is_reported(command, tmp_path, options, is_reported):
    feed = ("--images", FASHION / "calib.txt", "--limit", 20, "--duration", 0, "--effort", 0)
    options += (*feed, "--out", tmp_path, "--accept")
    sentence = "pixels / 255 with mean 0.5 and std 0.5"
    assert (sentence in command("build", FASHION / "fashion_bn.onnx", *options)) == is_reported
    alerts = json.loads((tmp_path / "report.json").read_text()).get("alerts", [])
    assert any(sentence in alert for alert in alerts) == is_reported
    assert (sentence in (tmp_path / "report.html").read_text()) == is_reported
