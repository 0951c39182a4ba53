"""Quant config JSON, simplified .cfg and record files: AMCT's own, round trips, and broken ones."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from calibrators.amct.adaround import AdaParams
from calibrators.amct.hfmg import HfmgParams
from calibrators.amct.ifmr import IfmrParams
from deploy.errors import ConfigError, ModelError
from deploy.targets.ascend.config import default_config, read_config, settled, write_config
from deploy.targets.ascend.config_keys import LayerConfig, QuantConfig
from deploy.targets.ascend.layers import find_layers, name_nodes
from deploy.targets.ascend.record import LayerRecord, check_record, read_record, write_record
from deploy.targets.ascend.simple_config import read_simple_config, write_simple_config

CASES = Path(__file__).parent / "golden" / "amct" / "cases"
NAMES = ["small_default", "small_dmq", "small_hfmg_sym", "small_ifmr_asym", "small_mixed"]


def torch_named():
    """The cases' float model, its nodes named after the torch modules as AMCT names them."""
    model = onnx.load(CASES / "input_fp32.onnx")
    for node in model.graph.node:
        parts = node.name.split("/")
        if len(parts) == 3:
            node.name = parts[1]
    return name_nodes(model)


GRAPH = find_layers(torch_named())


@pytest.mark.parametrize("case", NAMES)
def test_json_is_amcts_byte_for_byte(case):
    wanted = (CASES / case / "config.json").read_text()
    assert write_config(read_config(wanted)) == wanted
    simple = CASES / case / "simple.cfg"
    if simple.exists():
        config = read_simple_config(simple.read_text(), GRAPH)
    else:
        config = default_config(GRAPH, batch_num=2)
    assert write_config(config) == wanted


@pytest.mark.parametrize("case", NAMES)
def test_simple_config_round_trip(case):
    config = settled(read_config((CASES / case / "config.json").read_text()), GRAPH)
    assert read_simple_config(write_simple_config(config), GRAPH) == config


def test_four_bits_do_not_fit_the_simplified_form():
    config = settled(read_config(conf(conv1=layer(act={"num_bits": 4}))), GRAPH)
    with pytest.raises(ConfigError, match="write JSON"):
        write_simple_config(config)


def test_what_a_configuration_leaves_out_is_amcts_default():
    ifmr = {
        "max_percentile": 0.999999, "min_percentile": 0.999999, "search_range": (0.7, 1.3),
        "search_step": 0.01,
    }  # fmt: skip
    ada = {
        "num_iteration": 10000, "reg_param": 0.01, "beta_range": (20.0, 2.0), "warm_start": 0.2,
    }  # fmt: skip
    activation = {"num_bits": 8, "act_algo": "ifmr", "asymmetric": None, "num_of_bins": 4096}
    weight = {"num_bits": 8, "wts_algo": "arq_quantize", "channel_wise": None}
    assert asdict(LayerConfig()) == {
        "quant_enable": True, "dmq_balancer_param": None, "activation": activation | ifmr,
        "weight": weight | ada,
    }  # fmt: skip
    assert asdict(IfmrParams()) == ifmr | {"bits": 8, "with_offset": False}
    assert asdict(HfmgParams()) == {"nbins": 4096, "bits": 8, "with_offset": True}
    assert asdict(AdaParams()) == ada
    left = {k: v for k, v in asdict(QuantConfig()).items() if v}
    assert left == {"version": 1, "batch_num": 1, "activation_offset": True, "do_fusion": True}


@pytest.mark.parametrize("count", [1, 100, 2**31 - 1])
def test_batch_num_is_any_positive_int32(count):
    assert read_simple_config(f"batch_num: {count}", GRAPH).batch_num == count
    assert read_config(conf(batch_num=count)).batch_num == count


@pytest.mark.parametrize("case", NAMES)
def test_record_is_amcts_byte_for_byte(case):
    text = (CASES / case / "record.txt").read_text()
    records = read_record(text)
    assert write_record(records) == text
    check_record(records, GRAPH)


def test_record_before_the_last_batch_is_told():
    text = (CASES / "small_ifmr_asym" / "record_before_last_batch.txt").read_text()
    with pytest.raises(ConfigError, match="not complete"):
        check_record(read_record(text), GRAPH)


def test_precedence_layer_over_type_over_common():
    config = read_simple_config(
        """
        activation_offset: false
        common_config { ifmr_quantize { search_step: 0.05 } }
        override_layer_types { layer_type: "Conv"
          calibration_config { hfmg_quantize { num_of_bins: 1024 } } }
        override_layer_configs { layer_name: "dw"
          calibration_config { ifmr_quantize { search_step: 0.02 asymmetric: true } } }
        """,
        GRAPH,
    )
    acts = {name: layer.activation for name, layer in config.layers.items()}
    assert (acts["fc1"].act_algo, acts["fc1"].search_step) == ("ifmr", 0.05)
    assert (acts["conv1"].act_algo, acts["conv1"].num_of_bins) == ("hfmg", 1024)
    assert (acts["dw"].search_step, acts["dw"].asymmetric) == (0.02, True)
    assert acts["fc1"].asymmetric is False


def conf(**changes):
    base = json.loads((CASES / "small_default" / "config.json").read_text())
    return json.dumps({**base, **changes})


def layer(**changes):
    act = {"num_bits": 8, **changes.pop("act", {})}
    wts = {"num_bits": 8, **changes.pop("wts", {})}
    return {"activation_quant_params": act, "weight_quant_params": wts, **changes}


BROKEN_JSON = {
    "empty": ("", "must be JSON"),
    "list": ("[]", "JSON object"),
    "truncated": ('{"version": 1, ', "line 1"),
    "deep": ("[" * 100_000, "JSON"),
    "nan": ('{"version": 1, "batch_num": NaN}', "NaN"),
    "huge number": ('{"version": 1, "batch_num": ' + "9" * 5000 + "}", "JSON"),
    "repeated key": ('{"version": 1, "version": 1}', "repeated"),
    "no version": ("{}", "version"),
    "version 2": (conf(version=2), "version must be 1"),
    "version text": (conf(version="1"), "type int"),
    "batch_num 0": (conf(batch_num=0), "batch_num must be > 0"),
    "batch_num bool": (conf(batch_num=True), "type int"),
    "batch_num float": (conf(batch_num=1.5), "type int"),
    "misspelt global": (conf(batch_nun=3), "did you mean 'batch_num'"),
    "offset text": (conf(activation_offset="true"), "type bool"),
    "joint_quant": (conf(joint_quant=True), "binary packages"),
    "weight_offset": (conf(weight_offset=True), "offset_w 0"),
    "fusion list": (conf(skip_fusion_layers="conv1"), "type list"),
    "fusion repeats": (conf(skip_fusion_layers=["conv1", "conv1"]), "repeated"),
    "fusion unknown": (conf(skip_fusion_layers=["conv9"]), "did you mean"),
    "fusion of Gemm": (conf(skip_fusion_layers=["fc1"]), "takes Conv layers"),
    "unknown layer": (conf(conv11=layer()), "did you mean 'conv1'"),
    "layer is a list": (conf(conv1=[]), "neither a key"),
    "unknown layer key": (conf(conv1=layer(quant_enabled=True)), "did you mean 'quant_enable'"),
    "quant_enable int": (conf(conv1=layer(quant_enable=1)), "type bool"),
    "dmq low": (conf(conv1=layer(dmq_balancer_param=0.1)), r"\[0.2, 0.8\].*'conv1'"),
    "dmq on pool": (conf(pool=layer(dmq_balancer_param=0.5)), "AveragePool"),
    "act bits 7": (conf(conv1=layer(act={"num_bits": 7})), "4, 8 or 16"),
    "act algo": (conf(conv1=layer(act={"act_algo": "kl"})), "'ifmr' or 'hfmg'"),
    "mixed keys": (conf(conv1=layer(act={"num_of_bins": 4096, "search_step": 0.01})), "other"),
    "hfmg with ifmr keys": (
        conf(conv1=layer(act={"act_algo": "hfmg", "search_step": 0.01})),
        "other algorithm",
    ),
    "bins": (conf(conv1=layer(act={"num_of_bins": 1000})), "1024"),
    "percentile": (conf(conv1=layer(act={"max_percentile": 0.5})), r"\(0.5, 1\]"),
    "percentile text": (conf(conv1=layer(act={"max_percentile": "1"})), "type float"),
    "range order": (conf(conv1=layer(act={"search_range": [1.3, 0.7]})), "start < end"),
    "range too large": (conf(conv1=layer(act={"search_range": [1, 10**400]})), "start"),
    "endless search": (conf(conv1=layer(act={"search_step": 1e-7})), "at most 10000 scales"),
    "range length": (conf(conv1=layer(act={"search_range": [1]})), "start"),
    "step 0": (conf(conv1=layer(act={"search_step": 0})), "> 0"),
    "step long": (conf(conv1=layer(act={"search_step": 2})), "at most end - start"),
    "weight bits": (conf(conv1=layer(wts={"num_bits": 5})), "4, 6, 7 or 8"),
    "weight algo": (conf(conv1=layer(wts={"wts_algo": "arq"})), "arq_quantize"),
    "ada keys": (conf(conv1=layer(wts={"reg_param": 0.1})), "ada_quantize"),
    "ada range": (
        conf(conv1=layer(wts={"wts_algo": "ada_quantize", "beta_range": [2, 20]})),
        "start > end",
    ),
    "channel_wise Gemm": (conf(fc1=layer(wts={"channel_wise": True})), "channel_wise must be"),
}

BROKEN_CFG = {
    "not text": ("\x00\x01", "protobuf text"),
    "misspelt": ("batchnum: 1", "did you mean 'batch_num'"),
    "nested misspelt": ("common_config { ifmr_quantize { asym: true } }", "FMRQuantize"),
    "binary only": ("joint_quant: true", "binary packages"),
    "open brace": ("common_config {", "Expected"),
    "wrong type": ("skip_layers: 3", "Expected string"),
    "negative": ("batch_num: -1", "out of range"),
    "zero batches": ("batch_num: 0", "batch_num must be > 0"),
    "too many batches": (f"batch_num: {2**31}", "below 2\\^31"),
    "unknown skip": ('skip_layers: "conv9"', "does not exist"),
    "repeated skip": ('skip_layers: "fc1" skip_layers: "fc1"', "repeated"),
    "unknown type": ('skip_layer_types: "Conv9d"', "did you mean"),
    "all types": (
        'skip_layer_types: ["Conv", "ConvTranspose", "Gemm", "MatMul", "AveragePool"]',
        "leave a type",
    ),
    "override without name": ("override_layer_configs { calibration_config {} }", "layer_name"),
    "override without config": ('override_layer_configs { layer_name: "fc1" }', "hold calib"),
    "override unknown": (
        'override_layer_configs { layer_name: "fc9" calibration_config {} }',
        "did you mean",
    ),
    "override twice": (
        'override_layer_types { layer_type: "Conv" calibration_config {} }'
        'override_layer_types { layer_type: "Conv2d" calibration_config {} }',
        "once",
    ),
    "channel_wise for all": (
        "common_config { arq_quantize { channel_wise: true } }",
        "leave channel_wise out",
    ),
    "strength": ("common_config { dmq_balancer { migration_strength: 0.9 } }", "0.2, 0.8"),
    "bins": ("common_config { hfmg_quantize { num_of_bins: 100 } }", "1024"),
    "enum": ("common_config { ifmr_quantize { dst_type: INT32 } }", "INT32"),
    "nan": ("common_config { ifmr_quantize { search_step: nan } }", "float"),
}

GOOD = 'scale_d: 0.1 offset_d: 3 scale_w: 0.2 offset_w: 0 act_type: "INT8" wts_type: "INT8"'
BROKEN_RECORD = {
    "empty": ("", "at least one layer"),
    "not text": ("{{{", "protobuf text"),
    "unknown key": ('record { key: "fc1" value { scale_x: 1 } }', "did you mean 'scale_"),
    "no key": ("record { value { scale_d: 1 } }", "key"),
    "twice": (f'record {{ key: "fc1" value {{ {GOOD} }} }} ' * 2, "once"),
    "unknown layer": (f'record {{ key: "fc3" value {{ {GOOD} }} }}', "did you mean 'fc"),
    "zero scale": (f'record {{ key: "fc1" value {{ {GOOD} scale_d: 0 }} }}', "scale must be in"),
    "negative": (f'record {{ key: "fc1" value {{ {GOOD} scale_d: -1 }} }}', "scale must be in"),
    "inf": (f'record {{ key: "fc1" value {{ {GOOD} scale_d: inf }} }}', "scale must be in"),
    "nan": (f'record {{ key: "fc1" value {{ {GOOD} scale_d: nan }} }}', "scale must be in"),
    "offset": (f'record {{ key: "fc1" value {{ {GOOD} offset_d: 128 }} }}', "offset_d must be"),
    "offset_w": (f'record {{ key: "fc1" value {{ {GOOD} scale_w: 1 offset_w: 2 }} }}', "be 0"),
    "lengths": (f'record {{ key: "fc1" value {{ {GOOD} scale_w: 1 }} }}', "as many"),
    "two scales": (
        f'record {{ key: "fc1" value {{ {GOOD} scale_w: 1 offset_w: 0 }} }}',
        "takes one scale_w",
    ),
    "no offset": ('record { key: "fc1" value { scale_d: 1 } }', "together"),
    "no weights": ('record { key: "fc1" value { scale_d: 1 offset_d: 0 } }', "scale_w"),
    "shift": (f'record {{ key: "fc1" value {{ {GOOD} shift_bit: 1 }} }}', "shift_bit"),
    "type": (f'record {{ key: "fc1" value {{ {GOOD} act_type: "INT9" }} }}', "INT9"),
    "int16": (
        'record { key: "pool" value { scale_d: 1 offset_d: 0 act_type: "INT16" } }',
        "INT16 is for Conv",
    ),
    "factor": (f'record {{ key: "fc1" value {{ {GOOD} tensor_balance_factor: 0 }} }}', "balance"),
    "pool weight": (f'record {{ key: "pool" value {{ {GOOD} }} }}', "AveragePool"),
}


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 700 and "Traceback" not in text
    return text


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_broken_json(name):
    text, match = BROKEN_JSON[name]
    with pytest.raises(ConfigError, match=match) as error:
        settled(read_config(text), GRAPH)
    one_sentence(error)


@pytest.mark.parametrize("name", BROKEN_CFG)
def test_broken_cfg(name):
    text, match = BROKEN_CFG[name]
    with pytest.raises(ConfigError, match=match) as error:
        read_simple_config(text, GRAPH)
    one_sentence(error)


@pytest.mark.parametrize("name", BROKEN_RECORD)
def test_broken_record(name):
    text, match = BROKEN_RECORD[name]
    with pytest.raises(ConfigError, match=match) as error:
        check_record(read_record(text), GRAPH)
    one_sentence(error)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data(), ANY_JSON)
def test_no_value_breaks_the_json_reader(data, value):
    tree = json.loads((CASES / "small_mixed" / "config.json").read_text())
    place = tree
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = value
    with suppress(ConfigError):
        config = settled(read_config(json.dumps(tree)), GRAPH)
        assert settled(read_config(write_config(config)), GRAPH) == config
        write_simple_config(config)


@settings(max_examples=40)
@given(
    st.floats(2**-14, 1e4, width=32),
    st.integers(-128, 127),
    st.lists(st.floats(2**-20, 10, width=32), min_size=1, max_size=4),
)
def test_record_floats_survive(scale_d, offset_d, scale_w):
    record = LayerRecord(
        scale_d=np.float32(scale_d), offset_d=offset_d, scale_w=np.array(scale_w, np.float32)
    )
    back = read_record(write_record({"a": record}))["a"]
    assert back.scale_d == record.scale_d and back.offset_d == offset_d
    np.testing.assert_array_equal(back.scale_w, record.scale_w)


# -- layers -----------------------------------------------------------------------------------


def test_layers_of_the_case_model():
    kinds = {name: layer.kind for name, layer in GRAPH.layers.items()}
    assert list(kinds) == ["conv1", "conv2", "dw", "pw", "up", "pool", "fc1", "fc2"]
    assert GRAPH.layers["dw"].group == 16 and GRAPH.layers["fc1"].trans_b


def model_of(nodes, weights, outputs=("y",)):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", 1, [1, 4])],
        [value(o, 1, None) for o in outputs],
        [onnx.numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_a_matmuls_bias_is_its_add():
    weight, bias = np.ones((4, 3), np.float32), np.ones(3, np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="mm"),
        helper.make_node("Add", ["b", "m"], ["y"], name="add"),
    ]
    layer = find_layers(model_of(nodes, {"w": weight, "b": bias})).layers["mm"]
    assert (layer.bias, layer.bias_add, layer.output) == ("b", "add", "y")


def test_what_stays_float_says_why():
    weight = np.ones((4, 4), np.float32)
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], name="alpha", alpha=2.0),
        helper.make_node("MatMul", ["a", "w2"], ["b"], name="one"),
        helper.make_node("MatMul", ["b", "w2"], ["c"], name="two"),
        helper.make_node("MatMul", ["c", "x"], ["y"], name="dynamic"),
    ]
    graph = find_layers(model_of(nodes, {"w": weight, "w2": weight}))
    assert not graph.layers
    assert "alpha 1" in graph.refused["alpha"] and "shared" in graph.refused["one"]
    assert "constant" in graph.refused["dynamic"]
    with pytest.raises(ConfigError, match="alpha"):
        default_config(graph)


@pytest.mark.parametrize(("shape", "taken"), [([4], True), ([1, 4], True), ([1], False)])
def test_a_gemms_bias_has_one_value_a_channel(shape, taken):
    weights = {"w": np.ones((4, 4), np.float32), "b": np.ones(shape, np.float32)}
    model = model_of([helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="g")], weights)
    graph = find_layers(model)
    assert ("g" in graph.layers) is taken
    assert taken or "one a channel" in graph.refused["g"]


def test_a_layer_named_like_a_key_is_refused():
    weights = {"w": np.ones((4, 4), np.float32)}
    model = model_of([helper.make_node("Gemm", ["x", "w"], ["y"], name="batch_num")], weights)
    with pytest.raises(ConfigError, match="rename the node"):
        default_config(find_layers(model))


def test_a_quantized_model_is_refused():
    nodes = [helper.make_node("AscendQuant", ["x"], ["y"], name="q")]
    with pytest.raises(ModelError, match="AscendQuant"):
        find_layers(model_of(nodes, {}))


def test_nameless_and_double_names():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"], name="r"),
        helper.make_node("Relu", ["b"], ["y"], name="r"),
    ]
    names = [n.name for n in name_nodes(model_of(nodes, {})).graph.node]
    assert names == ["Relu_0", "r", "Relu_2"]
