"""What is fed, held against what the model's first layer learned from."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.expected import first_layer, oddities
from deploy.feed.preprocess import Preprocess

FASHION = Path(__file__).parent.parent / "datasets" / "fashion"
HALF = Preprocess(size=(16, 16), color="rgb", mean=(0.5,), std=(0.5,), layout="nchw")


def pictures(count=6):
    """uint8 pictures [1, 3, 16, 16] that are as smooth as photos."""
    made = np.random.default_rng(3)
    coarse = made.integers(0, 256, (count, 1, 3, 4, 4))
    return [np.kron(one, np.ones((1, 1, 4, 4))) for one in coarse]


def fed(how, found=None):
    return [
        {"x": ((p * how.scale - how.mean[0]) / how.std[0]).astype(np.float32)}
        for p in (found or pictures())
    ]


def network(before=(), *, norm=True, bias=True, layout="nchw"):
    """x -> `before` -> Conv -> BatchNormalization (with the moments of `HALF`) or a bias -> y."""
    made = np.random.default_rng(5)
    weight = made.normal(size=(4, 3, 3, 3)).astype(np.float32) * 0.3
    held = {"w": weight, "half": np.float32(0.5), "most": np.float32(255)}
    held |= {"b": np.array([0.4, -0.7, 0.5, -0.3], np.float32)}
    nodes, at = [], "x"
    for op, constant in before:
        nodes.append(helper.make_node(op, [at, constant], [f"{at}_"], name=op))
        at += "_"
    with_bias = bias and not norm
    nodes.append(
        helper.make_node("Conv", [at, "w", *(["b"] if with_bias else [])], ["c"], name="c")
    )
    if norm:
        held |= dict(zip(("mean", "var"), moments(weight), strict=True))
        held |= {"one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
        nodes.append(
            helper.make_node(
                "BatchNormalization", ["c", "one", "zero", "mean", "var"], ["n"], "norm"
            )
        )
    nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["y"], name="r"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 14, 14])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def moments(weight):
    """Mean and variance of each channel behind the Conv, of pictures fed as `HALF` has it."""
    rows = []
    for sample in fed(HALF):
        windows = np.lib.stride_tricks.sliding_window_view(sample["x"][0], (3, 3), axis=(1, 2))
        rows.append(np.einsum("chwij,ocij->ohw", windows, weight).reshape(4, -1))
    values = np.concatenate(rows, axis=1)
    return values.mean(axis=1).astype(np.float32), values.var(axis=1).astype(np.float32)


def changed(**options):
    return Preprocess.from_json({**HALF.to_json(), **options})


UNIT, RAW = changed(mean=[0.0], std=[1.0]), changed(mean=[0.0], std=[1.0], scale=1.0)


def test_a_batchnormalization_tells_the_mean_and_std_that_it_learned_with():
    assert oddities(fed(HALF), HALF, network()) == []
    for how in (UNIT, RAW):
        (said,) = oddities(fed(how), how, network())
        assert "pixels / 255 with mean 0.5 and std 0.5" in said and "(norm)" in said
        assert "--mean" in said


def test_arrays_of_another_unit_are_told_without_a_guess_which():
    (said,) = oddities(fed(RAW), None, network())
    assert "has another unit" in said and "how the arrays were made" in said
    (said,) = oddities([{"x": one["x"] / 1000} for one in fed(HALF)], None, network())
    assert "has another unit" in said
    assert oddities(fed(UNIT), None, network()) == []  # other images may explain as much


def test_a_model_that_normalises_by_itself_is_fed_pixels_as_they_are():
    net = network([("Div", "most"), ("Sub", "half"), ("Div", "half")])
    assert oddities(fed(RAW), RAW, net) == []
    assert oddities(fed(HALF), None, net) != []


def test_a_batchnormalization_at_the_input_tells_too():
    net = network(norm=False)
    node = helper.make_node("BatchNormalization", ["x", "s", "z", "m", "v"], ["x0"], "data")
    net.graph.node.insert(0, node)
    net.graph.node[1].input[0] = "x0"
    values = {"s": 1, "z": 0, "m": 127.5, "v": 5400}
    net.graph.initializer.extend(
        numpy_helper.from_array(np.full(3, v, np.float32), k) for k, v in values.items()
    )
    assert oddities(fed(RAW), RAW, net) == []
    (said,) = oddities(fed(UNIT), UNIT, net)
    assert "(data)" in said


def test_a_bias_tells_pixels_that_are_not_normalised_and_what_hardly_counts():
    net = network(norm=False)
    for how in (HALF, UNIT):
        assert oddities(fed(how), how, net) == []
    (said,) = oddities(fed(RAW), RAW, net)
    assert "pixels of 0 to 255 as they are" in said and "(c)" in said
    assert "pixels of 0 to 255" in oddities(fed(RAW), None, net)[0]
    (said,) = oddities([{"x": one["x"] / 255} for one in fed(UNIT)], None, net)
    assert "hardly reaches it" in said
    wide = [{"x": one["x"] * 200 - 7.5} for one in fed(UNIT)]  # no pixels, whatever they are
    assert oddities(wide, None, net) == []


def space_to_depth(parts=2):
    """YOLOX's first nodes: x sliced into `parts` of every second row and column, joined, a Conv."""
    made = np.random.default_rng(5)
    held = {
        "w": made.normal(size=(4, 3 * parts**2, 3, 3)).astype(np.float32) * 0.3,
        "b": np.array([0.4, -0.7, 0.5, -0.3], np.float32) * 255,
        "end": np.array([2**31]),
        "two": np.array([parts]),
        "rows": np.array([2]),
        "columns": np.array([3]),
    }
    held |= {f"at{n}": np.array([n]) for n in range(parts)}
    nodes, found = [], []
    for column in range(parts):
        for row in range(parts):
            tall, both = f"r{row}{column}", f"p{row}{column}"
            for axes, start, one, other in (
                ("rows", row, "x", tall),
                ("columns", column, tall, both),
            ):
                reads = [one, f"at{start}", "end", axes, "two"]
                nodes.append(helper.make_node("Slice", reads, [other], name=f"{other}"))
            found.append(both)
    nodes.append(helper.make_node("Concat", found, ["j"], "j", axis=1))
    nodes.append(helper.make_node("Conv", ["j", "w", "b"], ["c"], "c"))
    nodes.append(helper.make_node("Relu", ["c"], ["y"], "r"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 6, 6])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_the_first_conv_is_found_behind_a_space_to_depth_of_slices():
    net = space_to_depth()
    assert oddities(fed(RAW), RAW, net) == []
    (said,) = oddities(fed(UNIT), UNIT, net)
    assert "hardly reaches it" in said and "(c)" in said


@pytest.mark.parametrize("reader", ["Mul", "Sub"])
def test_a_constant_may_stand_before_what_it_scales_or_shifts(reader):
    net = network(norm=False)
    net.graph.node.insert(0, helper.make_node(reader, ["most", "x"], ["x0"], "scaled"))
    net.graph.node[1].input[0] = "x0"
    found = first_layer(net, "x")
    assert found is not None and found.node == "c"


@pytest.mark.parametrize("tensor", ["r10", "p01", "j"])
def test_slices_that_something_else_reads_too_are_no_way_to_the_first_conv(tensor):
    net = space_to_depth()
    assert first_layer(net, "x") is not None
    other = helper.make_node("Relu", [tensor], ["z"], "z")
    net.graph.node.append(other)
    net.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert first_layer(net, "x") is None


@pytest.mark.parametrize("reader", ["first", "last"])
def test_a_conv_that_reads_one_slice_alone_says_nothing_of_the_input(reader):
    net = space_to_depth()
    beside = helper.make_node("Conv", ["p00", "v"], ["z"], "beside")
    net.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "v"))
    net.graph.node.insert(2 if reader == "first" else len(net.graph.node), beside)
    net.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert first_layer(net, "x") is None


def verdict_of(report):
    """Level and reasons of the one int8 engine."""
    engines = json.loads(report.read_text())["engines"]
    (found,) = (one["verdict"] for one in engines if one.get("verdict"))
    return " ".join([found["level"], *found["reasons"]])


def test_a_build_that_feeds_a_sliced_stem_shares_in_place_of_pixels_says_so(run, tmp_path):
    import cv2

    for number, picture in enumerate(pictures()):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture[0].transpose(1, 2, 0))
    onnx.save(space_to_depth(), tmp_path / "net.onnx")
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path, "--duration", 0, "--effort", 0)
    code, _, _ = run(*words, "--accept", "--out", tmp_path / "a", "--json", tmp_path / "a.json")
    assert code == 0 and "hardly reaches it" in (tmp_path / "a.json").read_text()
    assert "what it did not learn from" in verdict_of(tmp_path / "a.json")
    words = (*words, "--accept", "--preprocess", "raw", "--out", tmp_path / "b")
    code, _, _ = run(*words, "--json", tmp_path / "b.json")
    assert code == 0 and "hardly reaches it" not in (tmp_path / "b.json").read_text()
    assert "what it did not learn from" not in verdict_of(tmp_path / "b.json")


def test_without_bias_and_norm_nothing_is_said():
    assert oddities(fed(RAW), RAW, network(norm=False, bias=False)) == []


@pytest.mark.parametrize("how", [HALF, None])
def test_samples_of_one_value_are_told(how):
    flat = [{"x": np.full((1, 3, 16, 16), value, np.float32)} for value in (0.5, -1)]
    (said,) = oddities(flat, how, network())
    assert "one value alone, such as 0.5" in said
    assert oddities([*flat, *fed(HALF)], how, network(norm=False)) == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_state_at_its_start_is_no_picture_without_content(run, tmp_path, silent):
    nodes = [
        helper.make_node("Concat", ["cache", "sound"], ["both"], name="j", axis=2),
        helper.make_node("Conv", ["both", "w"], ["y"], name="c"),
    ]
    forms = {"cache": [1, 4, 3, 1], "sound": [1, 4, 9, 1], "y": [1, 2, 11, 1]}
    values = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in forms.items()}
    weight = np.random.default_rng(0).normal(size=(2, 4, 2, 1)).astype(np.float32)
    graph = helper.make_graph(
        nodes, "net", [values["cache"], values["sound"]], [values["y"]],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    (tmp_path / "fed").mkdir()
    for number in range(4):
        sound = np.random.default_rng(number).normal(size=forms["sound"]) * (not silent)
        fed = {"cache": np.zeros(forms["cache"]), "sound": sound}
        np.savez(
            tmp_path / "fed" / f"{number}.npz",
            **{name: value.astype(np.float32) for name, value in fed.items()},
        )
    code, out, error = run(
        "calibrate", tmp_path / "m.onnx", "--images", tmp_path / "fed", "-o", tmp_path / "c"
    )
    assert code == 0, error
    assert ("one value alone, such as 0;" in " ".join((out + error).split())) == silent


def test_pictures_of_nearly_one_colour_are_told():
    dark = [one // 24 for one in pictures()]  # as 12 bits in the upper byte of 16
    (said,) = oddities(fed(HALF, dark), HALF, network())
    assert "16 of 255" in said and "16-bit" in said


def test_inputs_that_are_no_pictures_and_layers_that_are_no_conv_say_nothing():
    assert oddities([{"x": np.zeros((1, 40), np.float32)}], None, network()) == []
    assert oddities([], None, network()) == []
    net = network()
    assert first_layer(net, "other") is None
    net.graph.output.append(onnx.ValueInfoProto(name="c"))
    assert first_layer(net, "x") is None  # somebody else reads the Conv as well
    far = network()
    far.graph.initializer[0].data_location = TensorProto.EXTERNAL
    assert first_layer(far, "x") is None


@pytest.mark.parametrize(("words", "odd"), [(("--mean", 0.5, "--std", 0.5), False), ((), True)])
def test_the_demo_without_its_mean_and_std_is_told_by_a_model_with_batchnormalization(
    run, tmp_path, words, odd
):
    code, out, error = run(
        "build", FASHION / "fashion_bn.onnx", "--images", FASHION / "calib.txt", "--limit", 20,
        "--duration", 0, "--effort", 0, "--out", tmp_path / "o", "--accept", *words,
    )  # fmt: skip
    assert code == 0, error
    said = "pixels / 255 with mean 0.5 and std 0.5"
    assert (said in " ".join(out.split())) == odd
    notes = json.loads((tmp_path / "o" / "report.json").read_text()).get("notes", [])
    assert any(said in note for note in notes) == odd
    assert (said in (tmp_path / "o" / "report.html").read_text()) == odd
