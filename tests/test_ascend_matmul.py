"""MatMuls on Ascend by the command: of two activations where named, weights of 3 dimensions."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import calibrate
from deploy.targets.ascend.config import default_config, settled
from deploy.targets.ascend.config_keys import LayerConfig, QuantConfig
from deploy.targets.ascend.deploy_model import deploy_model
from deploy.targets.ascend.executor import open_deploy, verify
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import read_record

HEADS, TOKENS, WIDE = 2, 6, 8


def attention() -> onnx.ModelProto:
    """x [N, heads, tokens, wide]: softmax(q k') v, with a matrix a head for q and v."""
    rng = np.random.default_rng(3)

    def tensor(name, *shape):
        return numpy_helper.from_array(rng.normal(0, 0.4, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("MatMul", ["x", "wq"], ["q"], name="query"),
        helper.make_node("MatMul", ["x", "wk"], ["k"], name="key"),
        helper.make_node("Transpose", ["k"], ["kt"], name="turn", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"], name="scores"),
        helper.make_node("Softmax", ["s"], ["p"], name="soft", axis=-1),
        helper.make_node("MatMul", ["x", "wv"], ["m"], name="value"),
        helper.make_node("Add", ["m", "bv"], ["v"], name="value_bias"),
        helper.make_node("MatMul", ["p", "v"], ["y"], name="context"),
    ]
    shape = ["N", HEADS, TOKENS, WIDE]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            tensor("wq", HEADS, WIDE, WIDE),
            tensor("wk", WIDE, WIDE),
            tensor("wv", HEADS, WIDE, WIDE),
            tensor("bv", WIDE),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    path = folder / "net.onnx"
    onnx.save(attention(), path)
    data = np.random.default_rng(4).normal(size=(4, HEADS, TOKENS, WIDE)).astype(np.float32)
    np.save(folder / "net.npy", data)
    return path


@pytest.fixture
def built(files, tmp_path, run):
    """Configuration text -> what was said, and the folder."""

    def build(text, *more, suffix=".cfg", code=0):
        config = tmp_path / f"my{suffix}"
        config.write_text(text)
        found, out, err = run(
            "build", files, "--images", files.with_suffix(".npy"), "--target", "ascend",
            "--effort", 0, "--duration", 0, "--out", tmp_path / "o", "--ascend-config", config,
            *more,
        )  # fmt: skip
        assert found == code, err
        return " ".join((out + err).split()), tmp_path / "o"

    return build


def named(*names, inner=""):
    return "batch_num: 4\n" + "\n".join(
        f'override_layer_configs {{ layer_name: "{name}" calibration_config {{ {inner} }} }}'
        for name in names
    )


@pytest.fixture(scope="module")
def kept():
    """What `plain` and `both` gave, for the tests after the first."""
    return {}


@pytest.fixture
def plain(built, kept):
    """What is said where no MatMul is named, and the folder; built once."""
    if "plain" not in kept:
        kept["plain"] = built("batch_num: 4")
    return kept["plain"]


@pytest.fixture
def both(built, kept):
    """The same with both MatMuls of two activations."""
    if "both" not in kept:
        kept["both"] = built(named("scores", "context"))
    return kept["both"]


def nodes_of(path):
    return {node.name: node for node in onnx.load(path).graph.node}


def test_two_activations_are_float_unless_they_are_named(plain):
    said, folder = plain
    assert "3 of 8 nodes int8 (MatMul 3)" in said
    assert "neither factor is a constant: int8 only where a configuration names it" in said
    assert "scores" not in json.loads((folder / "net_config.json").read_text())
    assert "scores.quant" not in nodes_of(folder / "net_deploy_model.onnx")


def test_two_activations_are_quantized_where_they_are_named(both):
    """Both factors symmetric; the second's scale stands in the record where a weight's would."""
    said, folder = both
    assert "5 of 8 nodes int8 (MatMul 5)" in said and "within 0 of the fake-quant model" in said
    assert "MatMuls of two activations in int8: 2. Huawei says that this gains on" in said
    config = json.loads((folder / "net_config.json").read_text())
    assert config["scores"]["quant_enable"] is True
    assert config["scores"]["activation_quant_params"]["asymmetric"] is False
    record = read_record((folder / "net_record.txt").read_text())["scores"]
    assert record.offset_d == 0 and record.scale_w.shape == (1,) and not record.tensor
    nodes = nodes_of(folder / "net_deploy_model.onnx")
    assert list(nodes["scores"].input) == ["scores.quant.output0", "scores.1.quant.output0"]
    assert nodes["scores.1.quant"].input[0] == "kt"
    assert nodes["scores.dequant"].op_type == "AscendDequant"
    scales = [helper.get_node_attr_value(nodes[f"scores{n}.quant"], "scale") for n in ("", ".1")]
    np.testing.assert_allclose(scales, [1 / record.scale_d, 1 / record.scale_w[0]], rtol=1e-6)
    offsets = [helper.get_node_attr_value(nodes[f"scores{n}.quant"], "offset") for n in ("", ".1")]
    assert offsets == [0, 0]


def test_the_scales_are_those_that_a_search_of_each_factor_gives(built, files):
    """HFMG with its own bins, as the configuration says, on both factors."""
    _, folder = built(named("scores", inner="hfmg_quantize { num_of_bins: 1024 }"))
    record = read_record((folder / "net_record.txt").read_text())["scores"]
    parts = json.loads((folder / "net_config.json").read_text())["scores"]
    assert parts["activation_quant_params"]["num_of_bins"] == 1024
    model = attention()
    for name in ("q", "kt"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    session = OrtSession.open(model.SerializeToString(), threads=1)
    values = session.run({"x": np.load(files.with_suffix(".npy"))})
    largest = [np.abs(values[name]).max() for name in ("q", "kt")]
    for scale, most in zip((record.scale_d, record.scale_w[0]), largest, strict=True):
        assert (
            0.3 * most < 127 * scale < 1.1 * most
        )  # HFMG may clip, and sees fake-quantized weights


def test_a_quant_config_names_them_too_and_keep_float_wins(built):
    layers = {name: {"quant_enable": True} for name in ("query", "scores")}
    text = json.dumps({"version": 1, "batch_num": 4, **layers})
    said, _ = built(text, suffix=".json")
    assert "2 of 8 nodes int8 (MatMul 2)" in said
    said, folder = built(text, "--keep-float", "scores", suffix=".json")
    assert "1 of 8 nodes int8 (MatMul 1)" in said
    assert json.loads((folder / "net_config.json").read_text())["scores"]["quant_enable"] is False


ASYMMETRIC = "ifmr_quantize { asymmetric: true }"
WRONG = {
    "asymmetric": (
        named("scores", inner=ASYMMETRIC),
        "a MatMul of two activations takes symmetric",
    ),
    "balanced": (named("scores", inner="dmq_balancer { }"), "dmq_balancer_param does not apply"),
    "wide": (
        named("scores", inner="ifmr_quantize { dst_type: INT16 }"),
        "a MatMul of two activations takes 8-bit activations, got 16 bits",
    ),
    "by channel": (
        named("scores", inner="arq_quantize { channel_wise: true }"),
        "channel_wise must be false for layer type MatMul",
    ),
    "no such name": (named("score"), "does not exist in the model; did you mean 'scores'"),
    "another type": (
        named("soft"),
        "of override_layer_configs of type Softmax cannot be quantized",
    ),
    "an Add": (named("value_bias"), "cannot be quantized, but for its inputs, by tensor_quantize"),
    "an input": (named("value_bias:0"), "does not exist in the model"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_does_not_fit_is_told_before_any_pass(key, built, monkeypatch):
    monkeypatch.setattr("deploy.pipeline.observing.observe", lambda *a, **k: pytest.fail("a pass"))
    text, said = WRONG[key]
    err, folder = built(text, code=1)
    assert said in err and err.count("calib8: error") == 1 and "Traceback" not in err
    assert not (folder / "net_config.json").exists()


def test_common_settings_do_not_stand_in_the_way(built):
    """What common_config says of offsets and balancing is for layers that take it."""
    common = "common_config { ifmr_quantize { asymmetric: true } dmq_balancer { } }"
    said, folder = built(named("scores") + common)
    config = json.loads((folder / "net_config.json").read_text())
    assert config["scores"]["activation_quant_params"]["asymmetric"] is False
    assert "dmq_balancer_param" not in config["scores"]
    assert config["query"]["dmq_balancer_param"] == 0.5 and "4 of 8 nodes int8" in said
    said, folder = built(named("scores", inner="ifmr_quantize { search_step: 0.1 }") + common)
    config = json.loads((folder / "net_config.json").read_text())
    found = config["scores"]["activation_quant_params"]
    assert found["asymmetric"] is False and found["search_step"] == 0.1


def test_check_deploy_and_the_mapping_follow(both, run, files, tmp_path):
    _, folder = both
    for ending, said in (
        ("record.txt", "a sound record of 5 layers"),
        ("config.json", "a sound quant config, 5 layers in int8"),
        ("deploy_model.onnx", "a sound deploy model, 5 layers in int8"),
    ):
        more = () if ending.endswith("onnx") else ("--model", files)
        code, out, err = run("ascend", "check", folder / f"net_{ending}", *more)
        assert code == 0 and said in out, err
    mapping = json.loads((folder / "net_quant.json").read_text())
    ops = {op["name"]: op for op in mapping["graph"][0]["op"]}
    assert ops["scores"]["attr"][0]["value"]["list"]["s"] == ["scores"]
    again = tmp_path / "again"
    code, _, err = run(
        "ascend", "deploy", files, folder / "net_record.txt", "-o", again, "--ascend-config",
        folder / "net_config.json",
    )  # fmt: skip
    assert code == 0, err
    for name in ("deploy_model.onnx", "fake_quant_model.onnx", "record.txt", "config.json"):
        assert (again / f"net_{name}").read_bytes() == (folder / f"net_{name}").read_bytes(), name


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("offset_d: 0", "offset_d: 3", "takes offset_d 0, got 3"),
        ('wts_type: "INT8"', 'wts_type: "INT8" scale_w: 1 offset_w: 0', "takes one scale_w, got 2"),
        ("scale_w", "#", "must hold scale_w"),
    ],
)
def test_a_record_of_two_activations_that_is_wrong_is_refused(
    both, run, files, tmp_path, old, new, said
):
    _, folder = both
    before, mark, after = (folder / "net_record.txt").read_text().partition('key: "scores"')
    after = after.replace("offset_w: 0", "", 1) if new == "#" else after
    record = tmp_path / "edited.txt"
    record.write_text(before + mark + after.replace(old, new, 1))
    code, _, err = run("ascend", "deploy", files, record, "-o", tmp_path / "again")
    assert code == 1 and said in " ".join(err.split())


def test_a_weight_of_3_dimensions_has_one_scale_and_keeps_its_layout(plain, files):
    _, folder = plain
    records = read_record((folder / "net_record.txt").read_text())
    weights = {t.name: numpy_helper.to_array(t) for t in attention().graph.initializer}
    deployed = onnx.load(folder / "net_deploy_model.onnx")
    stored = {t.name: numpy_helper.to_array(t) for t in deployed.graph.initializer}
    for layer, name in (("query", "wq"), ("value", "wv")):
        weight, (scale,) = weights[name], records[layer].scale_w
        low = np.abs(weight.min()) > weight.max()
        assert scale == np.float32(np.abs(weight).max()) / np.float32(128 if low else 127)
        np.testing.assert_array_equal(stored[name], np.rint(weight / scale))
    assert stored["bv"].dtype == np.int32
    qdq = OrtSession.open(folder / "net_amct_qdq.onnx", threads=1)
    twin = OrtSession.open(folder / "net_fake_quant_model.onnx", threads=1)
    x = {"x": np.load(files.with_suffix(".npy"))}
    np.testing.assert_allclose(qdq.run(x)["y"], twin.run(x)["y"], atol=0.05)
    assert nodes_of(folder / "net_deploy_model.onnx")["value.dequant"].input[0] == "value_output0"


def test_dmq_balances_the_rows_of_every_matrix(built, files):
    _, folder = built(
        "batch_num: 4 override_layer_types { layer_type: 'MatMul'"
        " calibration_config { dmq_balancer { } } }"
    )
    factors = read_record((folder / "net_record.txt").read_text())["query"].factors
    first = np.abs(np.load(files.with_suffix(".npy"))[0]).reshape(-1, WIDE).max(axis=0)
    (weight,) = (t for t in attention().graph.initializer if t.name == "wq")
    rows = np.abs(numpy_helper.to_array(weight)).max(axis=(0, 2))
    np.testing.assert_allclose(factors, np.sqrt(first / rows), rtol=1e-5)


def test_4_dimensions_are_refused_in_words(tmp_path, run):
    model = attention()
    for tensor in model.graph.initializer:
        if tensor.name == "wq":
            tensor.dims.insert(0, 1)
    onnx.save(model, tmp_path / "four.onnx")
    code, out, _ = run("ascend", "config", tmp_path / "four.onnx", "-o", tmp_path / "c.json")
    assert code == 0 and "a MatMul weight must be 2-D or 3-D, got 4-D" in out


@settings(max_examples=15)
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 5), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
def test_integers_and_floats_agree_for_any_shape(heads, rows, inner, columns, computed, seed):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(heads, inner, columns)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")
    value = helper.make_tensor_value_info
    inputs = [value("x", 1, [2, heads, rows, inner])]
    inputs += [value("w", 1, [heads, inner, columns])] if computed else []
    held = [] if computed else [numpy_helper.from_array(weight, "w")]
    graph = helper.make_graph([node], "g", inputs, [value("y", 1, None)], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    layers = find_layers(model)
    config = QuantConfig(layers={"mm": LayerConfig()})
    feed = {"x": rng.normal(size=(2, heads, rows, inner)).astype(np.float32)}
    feed |= {"w": weight} if computed else {}
    found = calibrate(model, layers, [feed], settled(config, layers))
    quantized = quantize_layers(model, layers, found.records)
    assert verify(model, quantized, [feed], threads=1).same_rounding <= 1e-6
    (got,) = open_deploy(deploy_model(model, quantized), threads=1).run(feed).values()
    error = inner * (np.abs(feed["x"]).max() + np.abs(weight).max() + 1) ** 2 / 30
    assert np.abs(got - feed["x"] @ weight).max() <= error


@pytest.mark.parametrize(
    ("op", "shape", "kind", "offered"),
    [
        ("MatMul", [1, 4, 4], TensorProto.FLOAT, True),
        ("MatMul", [4], TensorProto.FLOAT, False),
        ("MatMul", [1, 4, 4], TensorProto.INT32, False),
        ("Gemm", [4, 4], TensorProto.FLOAT, False),
    ],
)
def test_two_activations_are_offered_where_a_matmul_multiplies_float_matrices(
    op, shape, kind, offered
):
    values = [helper.make_tensor_value_info(n, kind, shape) for n in "ab"]
    end = helper.make_tensor_value_info("y", kind, None)
    graph = helper.make_graph(
        [helper.make_node(op, ["a", "b"], ["y"], name="m")], "g", values, [end]
    )
    found = find_layers(helper.make_model(graph))
    assert list(found.offered) == ["m"] * offered and "m" in found.refused


def test_the_default_configuration_does_not_list_them():
    assert set(default_config(find_layers(attention())).layers) == {"query", "key", "value"}


def test_a_configuration_converted_says_what_is_float(files, run, tmp_path):
    config = tmp_path / "my.cfg"
    config.write_text(named("scores"))
    code, out, _ = run("ascend", "config", files, "--from", config, "-o", tmp_path / "c.json")
    assert code == 0 and "4 of 4 layers in int8" in out
    assert "float  context: neither factor" in out and "float  scores" not in out


@pytest.mark.parametrize("strategy", ["gain", "binary-search"])
def test_auto_weighs_them_like_other_layers(strategy, files, run, tmp_path):
    config = tmp_path / "my.cfg"
    config.write_text(named("scores", "context"))
    code, out, err = run(
        "ascend", "auto", files, "--images", files.with_suffix(".npy"), "--max-loss", 0.0001,
        "--ascend-config", config, "--strategy", strategy, "-o", tmp_path / "o",
    )  # fmt: skip
    assert code == 0 and "5 layers in int8" in out + err, err
    found = json.loads(
        (tmp_path / "o" / "accuracy_based_auto_calibration_final_config.json").read_text()
    )
    left = {name for name in ("query", "key", "scores", "value", "context")
            if found[name]["quant_enable"]}  # fmt: skip
    assert set(read_record((tmp_path / "o" / "net_record.txt").read_text())) == left
    assert 0 < len(left) < 5
