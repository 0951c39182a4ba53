"""Quant configs, simplified .cfg and record files: AMCT's own, round trips, broken ones, chips."""

import json
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.amct.ifmr import IfmrParams, ratios
from deploy.errors import ConfigError, ModelError
from deploy.targets import Ascend
from deploy.targets.ascend.atc import AtcOptions, normalize_chip
from deploy.targets.ascend.config import default_config, read_config, resolve_config, write_config
from deploy.targets.ascend.config_keys import (
    ActivationParams,
    LayerConfig,
    QuantConfig,
    make_activation_params,
)
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.record import LayerRecord, check_record, read_record, write_record
from deploy.targets.ascend.simple_config import read_simple_config
from tests.test_ascend_models import CASES, NAMES, float_model
from tests.vendor_models import build_net

GRAPH = find_layers(float_model("small_default"))
KINDS = {layer.kind for layer in GRAPH.layers.values()} | {"MatMul"}


@pytest.mark.parametrize("case", NAMES)
def test_files_are_amcts_byte_for_byte(case):
    expected = (CASES / case / "config.json").read_text()
    assert write_config(read_config(expected)) == expected
    simple = CASES / case / "simple.cfg"
    if simple.exists():
        config = read_simple_config(simple.read_text(), GRAPH)
    else:
        config = default_config(GRAPH, batch_num=2)
    assert write_config(config) == expected
    assert write_config(resolve_config(read_config(expected), GRAPH)) == expected
    text = (CASES / case / "record.txt").read_text()
    records = read_record(text)
    assert write_record(records) == text
    check_record(records, GRAPH)


def test_a_fusion_mapping_is_refused_with_the_name_of_the_config(refusal, tmp_path):
    onnx.save(float_model("small_default"), tmp_path / "net.onnx")
    mapping = tmp_path / "scenes_quant.json"
    mapping.write_text('{"name": "scenes", "graph": [{"name": "scenes", "op": []}]}')
    arguments = ("ascend", "config", tmp_path / "net.onnx", "--from", mapping)
    message = refusal(*arguments, "-o", tmp_path / "new.json")
    assert "a fusion mapping" in message
    assert "scenes_config.json" in message
    other = mapping.rename(tmp_path / "map.json")
    message = refusal(*arguments[:-1], other, "-o", tmp_path / "new.json")
    assert "a fusion mapping" in message
    assert "X_config.json of the same build" in message
    assert not (tmp_path / "new.json").exists()


def test_incomplete_records_fail():
    text = (CASES / "small_ifmr_asym" / "record_before_last_batch.txt").read_text()
    with pytest.raises(ConfigError, match="not complete"):
        read_record(text)


def test_missing_keys_have_amct_defaults():
    ifmr = {"max_percentile": 0.999999, "min_percentile": 0.999999, "search_step": 0.01}
    ifmr["search_range"] = (0.7, 1.3)
    ada = {"num_iteration": 10000, "reg_param": 0.01, "beta_range": (20.0, 2.0)}
    ada["warm_start"] = 0.2
    activation = {"num_bits": 8, "act_algo": "ifmr", "asymmetric": None, "num_of_bins": 4096}
    weight = {"num_bits": 8, "wts_algo": "arq_quantize", "channel_wise": None}
    both_texts = {"activation": activation | ifmr, "weight": weight | ada}
    assert asdict(LayerConfig()) == {"quant_enable": True, "dmq_balancer_param": None, **both_texts}
    assert asdict(IfmrParams()) == ifmr | {"bits": 8, "with_offset": False}
    remaining = {k: v for k, v in asdict(QuantConfig()).items() if v}
    assert remaining == {"version": 1, "batch_num": 1, "activation_offset": True, "do_fusion": True}


def test_unlisted_layers_are_float():
    """An entry without quant_enable is float too, as in AMCT; the version may be unset."""
    text = json.dumps({"conv1": {"quant_enable": True}, "conv2": {"weight_quant_params": {}}})
    config = resolve_config(read_config(text), GRAPH)
    assert list(config.enabled_layers()) == ["conv1"]


@pytest.mark.parametrize("count", [1, 100, 2**31 - 1])
def test_batch_num_is_any_positive_int32(count):
    assert read_simple_config(f"batch_num: {count}", GRAPH).batch_num == count
    assert read_config(conf(batch_num=count)).batch_num == count


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


@pytest.mark.parametrize(
    ("override", "layer"),
    [
        ('types { layer_type: "Conv" calibration_config { arq_quantize { } } }', "dw"),
        ('configs { layer_name: "dw" calibration_config { } }', "dw"),
        ('configs { layer_name: "fc1" calibration_config { } }', "fc1"),
    ],
)
def test_override_takes_only_asymmetric_from_common(override, layer):
    """As in AMCT: the override replaces common_config, and defaults fill in what it leaves out."""
    common = """common_config { arq_quantize { quant_bits: 4 } dmq_balancer { }
      ifmr_quantize { max_percentile: 0.9 search_step: 0.05 asymmetric: false } }"""
    config = read_simple_config(f"{common} override_layer_{override}", GRAPH)
    overridden = config.layers[layer]
    assert overridden.activation == ActivationParams(asymmetric=False)
    assert (overridden.weight.num_bits, overridden.dmq_balancer_param) == (8, None)
    assert config.layers["fc2"].activation.max_percentile == 0.9


def test_torch_types_tell_the_ranks_apart():
    nodes = [("Conv", "x w", "a", "flat"), ("Conv", "z w2", "b", "square")]
    weights = {"w": np.ones((4, 4, 1)), "w2": np.ones((4, 4, 1, 1))}
    model = build_net(nodes, {"x": [1, 4, 8], "z": [1, 4, 8, 8]}, {"a": None, "b": None}, weights)
    text = """skip_layer_types: "Conv1d" override_layer_types {
      layer_type: "Conv2d" calibration_config { hfmg_quantize { } } }"""
    config = read_simple_config(text, find_layers(model))
    assert list(config.enabled_layers()) == ["square"]
    algorithms = {name: layer.activation.act_algo for name, layer in config.layers.items()}
    assert algorithms == {"flat": "ifmr", "square": "hfmg"}


def conf(**changes):
    base = json.loads((CASES / "small_default" / "config.json").read_text())
    return json.dumps({**base, **changes})


def layer(**changes):
    act = {"num_bits": 8, **changes.pop("act", {})}
    wts = {"num_bits": 8, **changes.pop("wts", {})}
    return {"activation_quant_params": act, "weight_quant_params": wts, **changes}


ADA = {"wts_algo": "ada_quantize"}
BROKEN_JSON = {
    "empty": ("", "must be JSON"),
    "list": ("[]", "JSON object"),
    "truncated": ('{"version": 1, ', "line 1"),
    "deep": ("[" * 100_000, "JSON"),
    "nan": ('{"version": 1, "batch_num": NaN}', "NaN"),
    "huge number": ('{"version": 1, "batch_num": ' + "9" * 5000 + "}", "JSON"),
    "repeated key": ('{"version": 1, "version": 1}', "repeated"),
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
    "ifmr keys": (conf(conv1=layer(act={"act_algo": "hfmg", "search_step": 0.01})), "other algor"),
    "bins": (conf(conv1=layer(act={"num_of_bins": 1000})), "1024"),
    "percentile": (conf(conv1=layer(act={"max_percentile": 0.5})), r"\(0.5, 1\]"),
    "percentile text": (conf(conv1=layer(act={"max_percentile": "1"})), "type float"),
    "range order": (conf(conv1=layer(act={"search_range": [1.3, 0.7]})), "start < end"),
    "range too large": (conf(conv1=layer(act={"search_range": [1, 10**400]})), "start"),
    "endless search": (conf(conv1=layer(act={"search_step": 1e-7})), "1 to 10000 scales"),
    "range length": (conf(conv1=layer(act={"search_range": [1]})), "start"),
    "step 0": (conf(conv1=layer(act={"search_step": 0})), "> 0"),
    "step long": (conf(conv1=layer(act={"search_step": 2})), "1 to 10000 scales"),
    "weight bits": (conf(conv1=layer(wts={"num_bits": 5})), "4, 6, 7 or 8"),
    "weight algo": (conf(conv1=layer(wts={"wts_algo": "arq"})), "arq_quantize"),
    "ada keys": (conf(conv1=layer(wts={"reg_param": 0.1})), "ada_quantize"),
    "ada range": (conf(conv1=layer(wts=ADA | {"beta_range": [2, 20]})), "start > end"),
    "channel_wise Gemm": (conf(fc1=layer(wts={"channel_wise": True})), "channel_wise must be"),
}


def test_search_range_is_compared_in_decimals():
    """As in AMCT: in binary, 1.0 - 0.9 is less than 0.1."""
    search = {"search_range": (0.9, 1.0), "search_step": 0.1}
    assert make_activation_params(search).search_step == 0.1
    assert ratios(IfmrParams(**search)).tolist() == [np.float32(0.9)]


OF_TYPE = 'override_layer_types { layer_type: "%s" calibration_config {} }'
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
    "unknown skip": ('skip_layers: "bn1"', "does not exist in the model once .* folded"),
    "repeated skip": ('skip_layers: "fc1" skip_layers: "fc1"', "repeated"),
    "unknown type": ('skip_layer_types: "Conv9d"', "did you mean"),
    "all": (f"skip_layer_types: {json.dumps(sorted(KINDS))}", "leave a type"),
    "unknown": ('override_layer_configs { layer_name: "fc9" calibration_config {} }', "you mean"),
    "override twice": (OF_TYPE % "Conv" + OF_TYPE % "Conv2d", "once"),
    "nan": ("common_config { ifmr_quantize { search_step: nan } }", "float"),
}


def record(key, fields="", good=True):
    fields_given = (
        'scale_d: 0.1 offset_d: 3 scale_w: 0.2 offset_w: 0 act_type: "INT8" wts_type: "INT8"'
    )
    return f'record {{ key: "{key}" value {{ {fields_given if good else ""} {fields} }} }} '


BROKEN_RECORD = {
    "empty": ("", "at least one layer"),
    "not text": ("{{{", "protobuf text"),
    "unknown key": (record("fc1", "scale_x: 1", False), "did you mean 'scale_"),
    "no key": ("record { value { scale_d: 1 } }", "key"),
    "twice": (record("fc1") * 2, "once"),
    "unknown layer": (record("fc3"), "did you mean 'fc"),
    "zero scale": (record("fc1", "scale_d: 0"), "scale must be in"),
    "negative": (record("fc1", "scale_d: -1"), "scale must be in"),
    "inf": (record("fc1", "scale_d: inf"), "scale must be in"),
    "nan": (record("fc1", "scale_d: nan"), "scale must be in"),
    "offset": (record("fc1", "offset_d: 128"), "offset_d must be"),
    "offset_w": (record("fc1", "scale_w: 1 offset_w: 2"), "be 0"),
    "lengths": (record("fc1", "scale_w: 1"), "as many"),
    "two scales": (record("fc1", "scale_w: 1 offset_w: 0"), "takes one scale_w"),
    "no offset": (record("fc1", "scale_d: 1", False), "scale_d and offset_d"),
    "no weights": (record("fc1", "scale_d: 1 offset_d: 0", False), "scale_w"),
    "shift": (record("fc1", "shift_bit: 1"), "shift_bit"),
    "type": (record("fc1", 'act_type: "INT9"'), "INT9"),
    "int16": (record("pool", 'scale_d: 1 offset_d: 0 act_type: "INT16"', False), "INT16 is for C"),
    "factor": (record("fc1", "tensor_balance_factor: 0"), "balance"),
    "pool weight": (record("pool"), "AveragePool"),
}
BROKEN = {
    "json": (lambda text: resolve_config(read_config(text), GRAPH), BROKEN_JSON),
    "cfg": (lambda text: read_simple_config(text, GRAPH), BROKEN_CFG),
    "record": (lambda text: check_record(read_record(text), GRAPH), BROKEN_RECORD),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, cases) in BROKEN.items() for name in cases]
)
def test_broken_configuration_is_refused(kind, name):
    read, cases = BROKEN[kind]
    with pytest.raises(ConfigError, match=cases[name][1]) as error:
        read(cases[name][0])
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 700
    assert "Traceback" not in message


SCALARS = [st.none(), st.booleans(), st.integers(-(10**12), 10**400), st.text(max_size=8)]
SCALARS.append(st.floats(allow_nan=False, allow_infinity=False))
ANY_JSON = st.recursive(
    st.one_of(SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS[3], inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data(), ANY_JSON)
def test_no_value_breaks_the_json_reader(data, value):
    tree = json.loads((CASES / "small_mixed" / "config.json").read_text())
    key_path = tree
    while True:
        key = data.draw(st.sampled_from(sorted(key_path)))
        if not isinstance(key_path[key], dict) or data.draw(st.integers(0, 3)) == 0:
            break
        key_path = key_path[key]
    key_path[key] = value
    with suppress(ConfigError):
        config = resolve_config(read_config(json.dumps(tree)), GRAPH)
        assert resolve_config(read_config(write_config(config)), GRAPH) == config


@settings(max_examples=40)
@given(
    st.floats(2**-14, 1e4, width=32),
    st.integers(-128, 127),
    st.lists(st.floats(2**-20, 10, width=32), min_size=1, max_size=4),
)
def test_record_floats_survive(scale_d, offset_d, scale_w):
    scales = {"scale_d": np.float32(scale_d), "scale_w": np.float32(scale_w)}
    record = LayerRecord(offset_d=offset_d, **scales)
    back = read_record(write_record({"a": record}))["a"]
    assert back.scale_d == record.scale_d
    assert back.offset_d == offset_d
    np.testing.assert_array_equal(back.scale_w, record.scale_w)


# -- layers
def test_layers_and_their_names():
    assert list(GRAPH.layers) == ["conv1", "conv2", "dw", "pw", "up", "pool", "fc1", "fc2"]
    assert GRAPH.layers["dw"].group == 16
    assert GRAPH.layers["fc1"].trans_b
    # an Add whose first input is the bias stays float, as in AMCT
    for inputs, bias in (("m b", ("b", "add", "y")), ("b m", ("", "", "m"))):
        nodes = [("MatMul", "x w", "m", "mm"), ("Add", inputs, "y", "add")]
        layer = find_layers(model_of(nodes, {"w": np.ones((4, 3)), "b": np.ones(3)})).layers["mm"]
        assert (layer.bias, layer.bias_add, layer.output) == bias
    model = model_of([("Gemm", "x w", "y", "batch_num")], {"w": np.ones((4, 4))})
    with pytest.raises(ConfigError, match="rename the node"):
        default_config(find_layers(model))
    with pytest.raises(ModelError, match="QuantizeLinear"):
        find_layers(model_of([("QuantizeLinear", "x s", "y", "q")], {"s": 1}))


def model_of(nodes, weights):
    return build_net(nodes, {"x": [1, 4]}, {"y": None}, weights)


def test_float_layers_have_reasons():
    nodes = [
        ("Gemm", "x w", "a", "alpha", {"alpha": 2.0}),
        ("MatMul", "a w2", "b", "one"),
        ("MatMul", "b w2", "c", "two"),
        ("MatMul", "c x", "y", "dynamic"),
    ]
    graph = find_layers(model_of(nodes, dict.fromkeys(("w", "w2"), np.ones((4, 4)))))
    assert not graph.layers
    assert "alpha 1" in graph.float_reasons["alpha"]
    assert "shared" in graph.float_reasons["one"]
    assert "constant" in graph.float_reasons["dynamic"]
    with pytest.raises(ConfigError, match="alpha"):
        default_config(graph)


@pytest.mark.parametrize(("shape", "accepted"), [([4], True), ([1, 4], True), ([1], False)])
def test_gemm_bias_has_values_per_channel(shape, accepted):
    weights = {"w": np.ones((4, 4)), "b": np.ones(shape)}
    graph = find_layers(model_of([("Gemm", "x w b", "y", "g")], weights))
    assert ("g" in graph.layers) is accepted
    assert accepted or "one a channel" in graph.float_reasons["g"]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("length", [3, 4])
def test_convolution_bias_has_values_per_channel(operator, length):
    weights = {"w": np.ones((4, 4, 1, 1)), "b": np.ones(length)}
    graph = find_layers(model_of([(operator, "x w b", "y", "layer")], weights))
    assert ("layer" in graph.layers) is (length == 4)
    assert length == 4 or "one a channel" in graph.float_reasons["layer"]


RECORD = (CASES / "small_default" / "record.txt").read_text()

DVPP = """# from a camera, through DVPP
aipp_op {
  aipp_mode: static  related_input_rank: 0  related_input_name: "images"
  input_format: YUV420SP_U8  csc_switch: true
  matrix_r0c0: 298  matrix_r0c1: 0  matrix_r0c2: 409
  matrix_r1c0: 298  matrix_r1c1: -100  matrix_r1c2: -208
  matrix_r2c0: 298  matrix_r2c1: 516  matrix_r2c2: 0
  input_bias_0: 16  input_bias_1: 128  input_bias_2: 128
  src_image_size_w: 1280  src_image_size_h: 720
  crop: true  crop_size_w: 640  crop_size_h: 640
  mean_chn_3: 0  var_reci_chn_3: 1.0
}
"""


def checked(run, tmp_path, text):
    path = tmp_path / "file.txt"
    path.write_text(text)
    return run("ascend", "check", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DVPP, "an AIPP configuration that parses"),
        ("aipp_op { aipp_mode: dynamic max_src_image_size: 6220800 support_rotation: false }", "a"),
        ("# a record\n\n" + RECORD, "a sound record of 8 layers"),
        (
            RECORD + 'prune_record { producer { name: "conv1" attr { name: "axis" i: 1 } } }',
            "a sound record of 8 layers; calib8 does not deploy the rest: 1 x pruning",
        ),
        (
            RECORD + 'record { key: "kv" kv_cache_value { scale: 0.5 offset: 0 } }\n',
            "8 layers; calib8 does not deploy the rest: 1 x KV cache",
        ),
        (
            'record { key: "lstm" value { scale_d: 0.1 offset_d: 0 scale_w: 0.1 offset_w: 0'
            " scale_h: 0.1 offset_h: 0 scale_r: 0.1 offset_r: 0 } }",
            "1 x recurrent layer",
        ),
        ("# all defaults\nbatch_num: 4\n", "a simplified configuration"),
    ],
)
def test_foreign_spellings_are_known(text, message, tmp_path, run):
    code, out, err = checked(run, tmp_path, text)
    assert (code, err) == (0, "")
    assert message in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DVPP.replace("r0c0", "r0c9"), "matrix_r0c9"),
        ("# record of nothing\nrecords { }", "no key 'records'"),
    ],
)
def test_wrong_configuration_entries_are_refused(text, message, tmp_path, run):
    code, _, err = checked(run, tmp_path, text)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        ("ascend310p3", "Ascend310P3"),
        ("310P3", "Ascend310P3"),
        ("ASCEND910B2C", "Ascend910B2C"),
        ("910proa", "Ascend910ProA"),
        ("Ascend910_9391", "Ascend910_9391"),
        ("310p3vir01", "Ascend310P3Vir01"),
        ("950pr_957C", "Ascend950PR_957c"),
    ],
)
def test_chips_are_spelt_as_atc_does(text, spelt):
    assert AtcOptions(soc=text).soc == spelt
    assert AtcOptions(soc=text).alerts == ()


@pytest.mark.parametrize(
    ("text", "chips"),
    [("310p", "Ascend310P1"), ("910_93", "Ascend910_9391"), ("310P8", "Ascend310P"), ("999x", "")],
)
def test_chip_unknown_to_atc_is_alerted(text, chips, wording):
    (alert,) = Ascend(soc=text).option_alerts
    assert chips in alert
    wording.check(alert)


@pytest.mark.parametrize("text", ["AscendXYZ", "Ascend", "", "310P3; rm -rf", "31", "３１０"])
def test_unknown_chip_is_refused(text):
    with pytest.raises(ConfigError, match="Ascend310P3"):
        normalize_chip(text)


@pytest.mark.parametrize(("factor", "note"), [(1e-7, True), (1, False)])
def test_inputs_rounded_to_nothing_are_told(factor, note, ascend_build, small_cnn, rng, tmp_path):
    np.save(tmp_path / "x.npy", np.float32(rng.normal(scale=factor, size=(4, 3, 16, 16))))
    _, out = ascend_build(small_cnn, tmp_path / "x.npy", "", "--accept")
    assert ("rounds all of it to zero" in (out / "report.md").read_text()) is note
