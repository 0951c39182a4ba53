"""The command compare: the tensor at which two models differ."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto

from deploy.analysis.comparison import compare
from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.graph.edit import extract_output
from tests.models import make_model, parse_nodes, run_command, save_fixed_batch, save_net


def refusal_of(*arguments, command="explain"):
    """Return the message, of one line, with which a command refuses."""
    result = CliRunner().invoke(cli, [command, *map(str, arguments)])
    assert result.exit_code == 1, result.exception
    assert isinstance(result.exception, Calib8Error), result.exception
    message = str(result.exception)
    assert message
    assert "\n" not in message
    return message


CHAIN = "a = Relu (x) b = Mul (a, factor) c = Add (b, one) y = Neg (c)"


def save(path, nodes=CHAIN, *, factor=1.0, out="y", x="x", **weights):
    weights |= {"factor": np.float32(factor), "one": np.float32(1)}
    return save_net(make_model(nodes, {x: ["n", 4]}, {out: ["n", 4]}, weights), path)


@pytest.fixture
def model_a(tmp_path):
    return save(tmp_path / "a.onnx")


@pytest.fixture
def sample_file(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 4)).astype(np.float32))
    return path


def test_node_without_name_is_named_by_its_output(tmp_path, compare_json):
    paths = (save(tmp_path / "a.onnx"), save(tmp_path / "b.onnx", factor=3))
    for path in paths:
        model = onnx.load(path)
        for node in model.graph.node:
            node.name = ""
        onnx.save(model, path)
    comparison = compare_json(*paths)
    assert {layer["tensor"]: layer["node"] for layer in comparison["layers"]}["b"] == "b"


def test_random_models_are_named(model_a, tmp_path, sample_file, compare_json):
    noisy = save(tmp_path / "b.onnx", CHAIN.replace("Relu (x)", "RandomNormalLike (x)"))
    notes = compare_json(model_a, noisy)["notes"]
    assert any("random: the second model" in note for note in notes)
    noisy_twice = screen_of(noisy, model_a, "--images", sample_file)
    assert "random: the first model" in noisy_twice
    assert not any("random" in note for note in compare_json(model_a, model_a)["notes"])


def screen_of(*arguments):
    return run_command("compare", *arguments)


@pytest.fixture
def compare_json(sample_file):
    """(*arguments of compare) -> its JSON for the sample file."""
    return lambda *arguments: json.loads(
        screen_of(*arguments, "--images", sample_file, "--json", "-")
    )


@pytest.fixture
def refusal(sample_file):
    return lambda *arguments: refusal_of(*arguments, "--images", sample_file, command="compare")


def test_first_difference_is_named_by_node(tmp_path, model_a, sample_file, compare_json):
    model_b = save(tmp_path / "b.onnx", factor=2)
    screen = screen_of(model_a, model_b, "--images", sample_file, "--json", tmp_path / "found.json")
    assert "'b' on, made by Mul 'Mul_b': 0.0 dB" in screen
    assert screen.index("outputs") < screen.index("  y  (Neg Neg_y)")
    comparison = compare_json(model_a, model_b)
    assert [row["tensor"] for row in comparison["layers"]] == ["a", "b", "c"]
    assert json.loads((tmp_path / "found.json").read_text()) == comparison


def test_equal_models_have_no_difference(tmp_path, model_a, sample_file, compare_json):
    model_b = save(tmp_path / "b.onnx")
    comparison = compare_json(model_a, model_b)
    assert comparison["parts_at"] is None
    assert comparison["samples"] == 6
    assert all(row["sqnr_db"] == "inf" for row in comparison["layers"] + comparison["outputs"])
    assert "models agree" in screen_of(model_a, model_b, "--images", sample_file)


@pytest.mark.parametrize(
    ("float_name", "read_name"),
    [("a", "a_dq"), ("a/float", "a")],
    ids=["pair behind", "pair before"],
)
def test_quantized_tensor_compares_as_read(tmp_path, model_a, compare_json, float_name, read_name):
    nodes = [
        ("Relu", "x", float_name),
        ("QuantizeLinear", f"{float_name} s z", "q"),
        ("DequantizeLinear", "q s z", read_name),
        *parse_nodes(f"b = Mul ({read_name}, one) c = Add (b, one) y = Neg (c)"),
    ]
    model_b = save(tmp_path / "b.onnx", nodes, s=np.float32(0.1), z=np.uint8(128))
    first_layer = compare_json(model_a, model_b)["layers"][0]
    assert first_layer["tensor"] == "a"
    assert 15 < first_layer["sqnr_db"] < 60
    reverse_layer = compare_json(model_b, model_a)["layers"][0]
    assert (reverse_layer["operator"], reverse_layer["node"]) == ("Relu", f"Relu_{float_name}")


def test_compare_takes_min_sqnr_and_limit(tmp_path, model_a, compare_json):
    model_b = save(tmp_path / "b.onnx", factor=1.01)
    assert compare_json(model_a, model_b)["parts_at"] is None
    comparison = compare_json(model_a, model_b, "--min-sqnr", 50, "--limit", 2)
    assert comparison["parts_at"] == "b"
    assert comparison["samples"] == 2
    assert comparison["min_sqnr_db"] == 50
    assert compare_json(model_a, save(model_b, factor=np.nan))["parts_at"] == "b"


def test_empty_or_constant_tensor_never_differs(tmp_path, compare_json):
    empty_slice = {"from": np.array([0]), "to": np.array([0])}
    models = []
    for number in range(2):
        nodes = f"{CHAIN} nothing = Slice (a, from, to) k = Constant <value_float = {number}.0> ()"
        models.append(save(tmp_path / f"{number}.onnx", nodes, **empty_slice))
    comparison = compare_json(*models)
    assert comparison["parts_at"] is None
    assert [row["tensor"] for row in comparison["layers"]] == ["a", "b", "c"]
    model = onnx.load(models[0])
    model.graph.output.append(model.graph.input[0])  # an output that is an input is a row
    onnx.save(model, models[0])
    assert [row["tensor"] for row in compare_json(models[0], models[0])["outputs"]] == ["y", "x"]


def test_output_of_one_model_is_named(tmp_path, model_a, sample_file):
    """Without them nobody knows whether the models part."""
    model_b = save(tmp_path / "b.onnx", CHAIN.replace("y = Neg", "z = Abs"), out="z")
    screen = screen_of(model_a, model_b, "--images", sample_file)
    assert "not compared: 'y'" in screen
    assert "not compared: 'z'" in screen
    assert "not compared" not in screen_of(model_a, model_a, "--images", sample_file)


@pytest.mark.parametrize("second_end", ["y = ArgMax <axis = 1> (c)", "y = Neg (c)"])
def test_class_numbers_are_named_as_uncompared(tmp_path, sample_file, second_end):
    models = []
    for number, end in enumerate(("y = ArgMax <axis = 1> (c)", second_end)):
        path = tmp_path / f"{number}.onnx"
        model = onnx.load(save(path, CHAIN.replace("y = Neg (c)", end)))
        if "ArgMax" in end:
            model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
        models.append(save_net(model, path))
    screen = screen_of(*models, "--images", sample_file)
    assert "not compared: 'y'" in screen and "The models agree" not in screen


def test_states_are_computed_as_in_builds(tmp_path):
    nodes = "s = Add (x, h) k = Mul (s, factor) y = Neg (s) hn = Tanh (k)"
    shapes = {"x": [1, 4], "h": [1, 4]}, {"y": [1, 4], "hn": [1, 4]}
    models = []
    for factor in (1, 1.01):
        model = make_model(nodes, *shapes, {"factor": np.float32(factor)})
        models.append(save_net(model, tmp_path / f"{factor}.onnx"))
    steps = np.random.default_rng(0).normal(0, 1, (5, 1, 4)).astype(np.float32)
    comparison = compare(*models, steps, min_sqnr_db=50)
    assert comparison.samples == 5
    # the second model gets the first one's states, so the inputs of a step are the same
    assert comparison.first_difference.tensor == "k"


def test_float16_pairs_are_computed_as_written(tmp_path):
    """A channel of tiny weights: float16 rounds the product of its scale and the input's to 0."""
    random = np.random.default_rng(0)
    weights = {"w": random.normal(0, 0.1, (4, 3, 1, 1)).astype(np.float32)}
    weights["w"][0] = 1e-6
    weights |= {"b": np.ones(4, np.float32), "v": np.ones((4, 4, 1, 1), np.float32)}
    shapes = {"x": ["n", 3, 8, 8]}, {"y": ["n", 4, 8, 8]}
    net = make_model("h = Conv (x, w, b) y = Conv (h, v)", *shapes, weights)
    paths = [save_net(net, tmp_path / "net.onnx"), tmp_path / "typed.onnx"]
    scales = {name: np.float32(3 / 127).tobytes()[::-1].hex() for name in "xhy"}
    lines = ["TRT-8601-EntropyCalibration2", *(f"{name}: {scales[name]}" for name in "xhy")]
    (tmp_path / "c.cache").write_text("\n".join(lines) + "\n")
    run_command("cache", "to-qdq", paths[0], tmp_path / "c.cache", "-o", paths[1], "--rest", "fp16")
    samples = random.normal(0, 1, (4, 1, 3, 8, 8)).astype(np.float32)
    assert compare(*paths, samples, min_sqnr_db=30).first_difference is None


def test_incomparable_models_are_refused(tmp_path, model_a, refusal):
    other_output = save(tmp_path / "o.onnx", "z = Relu (x)", out="z")
    other_input = save(tmp_path / "f.onnx", "y = Relu (w)", x="w")
    (tmp_path / "no.onnx").write_text("text")
    narrow, wide = (save_fixed_batch(model_a, tmp_path / f"{n}.onnx", batch=n) for n in (1, 2))
    doubled = onnx.load(save(tmp_path / "d.onnx", "y = Relu (x)"))
    for value in (doubled.graph.input[0], doubled.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    onnx.save(doubled, tmp_path / "d.onnx")
    refused_messages = [
        ((model_a, other_output), "tensors of the same names"),
        ((model_a, other_input), "got x (float32) and w (float32)"),
        ((model_a, tmp_path / "d.onnx"), "got x (float32) and x (float64)"),
        ((narrow, wide), "got x (float32 [1, 4]) and x (float32 [2, 4])"),
        ((model_a, tmp_path / "no.onnx"), "must be an ONNX"),
        ((tmp_path / "gone.onnx", model_a), "must be an ONNX"),
    ]
    for arguments, message in refused_messages:
        assert message in refusal(*arguments)


def test_cut_model_holds_only_needed_nodes(model_a):
    model = onnx.load(model_a)
    cut_model = extract_output(model, "b")
    assert [node.op_type for node in cut_model.graph.node] == ["Relu", "Mul"]
    assert [value.name for value in cut_model.graph.output] == ["b"]
    assert len(model.graph.node) == 4
