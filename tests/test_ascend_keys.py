"""Every key of AMCT's configurations by `build --ascend-config`: obeyed, or refused at once."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.targets.ascend.config_keys import ACTIVATION, GLOBAL, LAYER, WEIGHT
from deploy.targets.ascend.proto import MESSAGES

CONFIGS = ("AMCTConfig", "OverrideLayerType", "OverrideLayer", "CalibrationConfig", "ARQuantize",
           "ADAquantize", "DMQBalancer", "FMRQuantize", "HFMGQuantize",
           "TensorQuantize")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two Conv+BN and a Gemm, of 4 images."""
    rng = np.random.default_rng(0)

    def tensor(name, *shape):
        values = rng.normal(size=shape).astype(np.float32)
        return numpy_helper.from_array(np.abs(values) + 0.1 if name.endswith("v") else values, name)

    def norm(n):
        return [f"n{n}{k}" for k in "gbmv"]

    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c1", *norm(1)], ["b1"], name="bn1"),
        helper.make_node("Relu", ["b1"], ["r0"], name="relu"),
        helper.make_node("MaxPool", ["r0"], ["r1"], name="pool", kernel_shape=[1, 1]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv2", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c2", *norm(2)], ["b2"], name="bn2"),
        helper.make_node("Flatten", ["b2"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], name="fc", transB=1),
    ]
    weights = [tensor("w1", 4, 3, 3, 3), tensor("w2", 4, 4, 3, 3), tensor("w3", 5, 256)]
    weights += [tensor("b3", 5), *(tensor(name, 4) for n in (1, 2) for name in norm(n))]
    graph = helper.make_graph(
        nodes,
        "keys",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        weights,
    )
    path = tmp_path_factory.mktemp("keys") / "keys.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, path)
    np.save(path.with_suffix(".npy"), rng.normal(size=(4, 3, 8, 8)).astype(np.float32))
    return path


@pytest.fixture
def built(model, tmp_path, run, monkeypatch):
    """(text, suffix) -> exit code, what was said, the config that was used; None where refused."""

    def build(text, suffix, *, passes=True):
        if not passes:
            monkeypatch.setattr(
                "deploy.pipeline.observing.observe", lambda *a, **k: pytest.fail("a pass")
            )
        config = tmp_path / f"my{suffix}"
        config.write_text(text)
        words = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", tmp_path / "o")
        images = ("--images", model.with_suffix(".npy"))
        code, _, err = run("build", model, *images, *words, "--ascend-config", config)
        used = tmp_path / "o" / "keys_config.json"
        return code, err, json.loads(used.read_text()) if used.exists() else None

    return build


def common(inner):
    return f"common_config {{ {inner} }}"


def ada(inner):
    return common(f"{ADA} {{ {inner} {'' if 'iteration' in inner else 'num_iteration: 3'} }}")


def tensor(inner):
    return f'tensor_quantize {{ layer_name: "pool" input_index: 0 {inner} }}'


IFMR, HFMG, ARQ, ADA = "ifmr_quantize", "hfmg_quantize", "arq_quantize", "ada_quantize"

# message.key: (a configuration, a path into the JSON that is written and what stands there), or
# (a configuration, words of the refusal)
OBEYED = {
    "AMCTConfig.batch_num": ("batch_num: 3", ["batch_num"], 3),
    "AMCTConfig.activation_offset": ("activation_offset: false", ["activation_offset"], False),
    "AMCTConfig.do_fusion": ("do_fusion: false", ["do_fusion"], False),
    "AMCTConfig.skip_layers": ('skip_layers: "conv1"', ["conv1"], None),
    "AMCTConfig.skip_layer_types": ('skip_layer_types: "Gemm"', ["fc"], None),
    "AMCTConfig.skip_fusion_layers": (
        'skip_fusion_layers: "conv1"',
        ["skip_fusion_layers"],
        ["conv1"],
    ),
    "AMCTConfig.common_config": (common(f"{HFMG} {{ }}"), ["fc", "a", "act_algo"], "hfmg"),
    "AMCTConfig.override_layer_types": (
        f'override_layer_types {{ layer_type: "Gemm" calibration_config {{ {HFMG} {{ }} }} }}',
        ["fc", "a", "act_algo"],
        "hfmg",
    ),
    "AMCTConfig.override_layer_configs": (
        f'override_layer_configs {{ layer_name: "conv2" calibration_config {{ {HFMG} {{ }} }} }}',
        ["conv2", "a", "act_algo"],
        "hfmg",
    ),
    "AMCTConfig.tensor_quantize": (tensor(""), ["tensor_quantize", 0, "input_index"], 0),
    "TensorQuantize.layer_name": (tensor(""), ["tensor_quantize", 0, "layer_name"], "pool"),
    "TensorQuantize.input_index": (tensor(""), ["tensor_quantize", 0, "input_index"], 0),
    "TensorQuantize.ifmr_quantize": (
        tensor(f"{IFMR} {{ search_step: 0.05 }}"),
        ["tensor_quantize", 0, "a", "search_step"],
        pytest.approx(0.05),
    ),
    "TensorQuantize.hfmg_quantize": (
        tensor(f"{HFMG} {{ }}"),
        ["tensor_quantize", 0, "a", "act_algo"],
        "hfmg",
    ),
    "ARQuantize.channel_wise": (
        common(f"{ARQ} {{ channel_wise: false }}"),
        ["conv1", "w", "channel_wise"],
        False,
    ),
    "ARQuantize.quant_bits": (common(f"{ARQ} {{ quant_bits: 7 }}"), ["conv1", "w", "num_bits"], 7),
    "DMQBalancer.migration_strength": (
        'override_layer_types { layer_type: "Conv" calibration_config {'
        " dmq_balancer { migration_strength: 0.3 } } }",
        ["conv1", "dmq_balancer_param"],
        pytest.approx(0.3),
    ),
    "FMRQuantize.search_range_start": (
        common(f"{IFMR} {{ search_range_start: 0.9 }}"),
        ["fc", "a", "search_range", 0],
        pytest.approx(0.9),
    ),
    "FMRQuantize.search_range_end": (
        common(f"{IFMR} {{ search_range_end: 1.1 }}"),
        ["fc", "a", "search_range", 1],
        pytest.approx(1.1),
    ),
    "FMRQuantize.search_step": (
        common(f"{IFMR} {{ search_step: 0.05 }}"),
        ["fc", "a", "search_step"],
        pytest.approx(0.05),
    ),
    "FMRQuantize.max_percentile": (
        common(f"{IFMR} {{ max_percentile: 0.99 }}"),
        ["fc", "a", "max_percentile"],
        pytest.approx(0.99),
    ),
    "FMRQuantize.min_percentile": (
        common(f"{IFMR} {{ min_percentile: 0.99 }}"),
        ["fc", "a", "min_percentile"],
        pytest.approx(0.99),
    ),
    "FMRQuantize.asymmetric": (
        common(f"{IFMR} {{ asymmetric: false }}"),
        ["fc", "a", "asymmetric"],
        False,
    ),
    "FMRQuantize.dst_type": (common(f"{IFMR} {{ dst_type: INT16 }}"), ["fc", "a", "num_bits"], 16),
    "HFMGQuantize.num_of_bins": (
        common(f"{HFMG} {{ num_of_bins: 1024 }}"),
        ["fc", "a", "num_of_bins"],
        1024,
    ),
    "HFMGQuantize.asymmetric": (
        common(f"{HFMG} {{ asymmetric: false }}"),
        ["fc", "a", "asymmetric"],
        False,
    ),
    "ADAquantize.num_iteration": (ada("num_iteration: 7"), ["fc", "w", "num_iteration"], 7),
    "ADAquantize.reg_param": (ada("reg_param: 0.1"), ["fc", "w", "reg_param"], pytest.approx(0.1)),
    "ADAquantize.beta_range_start": (ada("beta_range_start: 9"), ["fc", "w", "beta_range", 0], 9),
    "ADAquantize.beta_range_end": (ada("beta_range_end: 3"), ["fc", "w", "beta_range", 1], 3),
    "ADAquantize.warm_start": (ada("warm_start: 0.5"), ["fc", "w", "warm_start"], 0.5),
    "ADAquantize.channel_wise": (ada("channel_wise: false"), ["conv1", "w", "channel_wise"], False),
    "HFMGQuantize.dst_type": (common(f"{HFMG} {{ dst_type: INT16 }}"), ["fc", "a", "num_bits"], 16),
    "AMCTConfig.fakequant_precision_mode": (
        "fakequant_precision_mode: FORCE_FP16_QUANT",
        ["fakequant_precision_mode"],
        "FORCE_FP16_QUANT",
    ),
}
REFUSED = {
    "AMCTConfig.batch_num": ("batch_num: 5", "batch_num batches, 5, got 4"),
    "AMCTConfig.activation_offset": ("activation_offset: 7", "activation_offset"),
    "AMCTConfig.do_fusion": ("do_fusion: maybe", "do_fusion"),
    "AMCTConfig.skip_layers": ('skip_layers: "conv9"', "did you mean"),
    "AMCTConfig.skip_layer_types": ('skip_layer_types: "Convolution"', "Convolution"),
    "AMCTConfig.skip_fusion_layers": ('skip_fusion_layers: "fc"', "takes Conv layers"),
    "AMCTConfig.fakequant_precision_mode": (
        "fakequant_precision_mode: FP8",
        "FP8",
    ),
    "AMCTConfig.common_config": (common("x: 1"), "no key 'x' in CalibrationConfig"),
    "AMCTConfig.override_layer_types": ("override_layer_types { }", "layer_type"),
    "AMCTConfig.override_layer_configs": ("override_layer_configs { }", "layer_name"),
    "OverrideLayerType.layer_type": (
        'override_layer_types { layer_type: "LSTM" calibration_config { } }',
        "LSTM",
    ),
    "OverrideLayerType.calibration_config": (
        'override_layer_types { layer_type: "Conv" }',
        "calibration_config",
    ),
    "OverrideLayer.layer_name": (
        'override_layer_configs { layer_name: "conv7" calibration_config { } }',
        "conv7",
    ),
    "OverrideLayer.calibration_config": (
        'override_layer_configs { layer_name: "conv1" }',
        "calibration_config",
    ),
    "AMCTConfig.tensor_quantize": ("tensor_quantize: 1", "tensor_quantize"),
    "TensorQuantize.layer_name": ("tensor_quantize { input_index: 0 }", "must hold layer_name"),
    "TensorQuantize.input_index": (
        'tensor_quantize { layer_name: "pool" }',
        "must hold input_index",
    ),
    "TensorQuantize.ifmr_quantize": (tensor(f"{IFMR} {{ search_step: 9 }}"), "search_step"),
    "TensorQuantize.hfmg_quantize": (tensor(f"{HFMG} {{ num_of_bins: 9 }}"), "num_of_bins"),
    "CalibrationConfig.arq_quantize": (common("arq_quantize: 1"), "arq_quantize"),
    "CalibrationConfig.ada_quantize": (common(f"{ADA}: 1"), ADA),
    "CalibrationConfig.ifmr_quantize": (common("ifmr_quantize: 1"), "ifmr_quantize"),
    "CalibrationConfig.hfmg_quantize": (common("hfmg_quantize: 1"), "hfmg_quantize"),
    "CalibrationConfig.dmq_balancer": (common("dmq_balancer: 1"), "dmq_balancer"),
    "ARQuantize.channel_wise": (
        common(f"{ARQ} {{ channel_wise: true }}"),
        "channel_wise must be false",
    ),
    "ARQuantize.quant_bits": (
        common(f"{ARQ} {{ quant_bits: 5 }}"),
        "num_bits must be 4, 6, 7 or 8",
    ),
    "ADAquantize.num_iteration": (common(f"{ADA} {{ num_iteration: -1 }}"), "num_iteration"),
    "ADAquantize.reg_param": (common(f"{ADA} {{ reg_param: 2 }}"), "reg_param"),
    "ADAquantize.beta_range_start": (common(f"{ADA} {{ beta_range_start: 1 }}"), "beta_range"),
    "ADAquantize.beta_range_end": (common(f"{ADA} {{ beta_range_end: 30 }}"), "beta_range"),
    "ADAquantize.warm_start": (common(f"{ADA} {{ warm_start: 1.5 }}"), "warm_start"),
    "ADAquantize.channel_wise": (common(f"{ADA} {{ channel_wise: true }}"), "channel_wise"),
    "DMQBalancer.migration_strength": (common("dmq_balancer { migration_strength: 0.9 }"), "0.8"),
    "FMRQuantize.search_range_start": (
        common(f"{IFMR} {{ search_range_start: 2 }}"),
        "search_range",
    ),
    "FMRQuantize.search_range_end": (common(f"{IFMR} {{ search_range_end: 0.1 }}"), "search_range"),
    "FMRQuantize.search_step": (common(f"{IFMR} {{ search_step: 1e-7 }}"), "10000 scales to try"),
    "FMRQuantize.max_percentile": (common(f"{IFMR} {{ max_percentile: 0.4 }}"), "max_percentile"),
    "FMRQuantize.min_percentile": (common(f"{IFMR} {{ min_percentile: nan }}"), "min_percentile"),
    "FMRQuantize.asymmetric": (common(f"{IFMR} {{ asymmetric: 3 }}"), "asymmetric"),
    "FMRQuantize.dst_type": (common(f"{IFMR} {{ dst_type: INT4 }}"), "INT4"),
    "HFMGQuantize.num_of_bins": (common(f"{HFMG} {{ num_of_bins: 1000 }}"), "num_of_bins"),
    "HFMGQuantize.asymmetric": (common(f"{HFMG} {{ asymmetric: 3 }}"), "asymmetric"),
    "HFMGQuantize.dst_type": (common(f"{HFMG} {{ dst_type: INT4 }}"), "INT4"),
}
SHORT = {"a": "activation_quant_params", "w": "weight_quant_params"}


def at(config, path):
    for step in path:
        config = config[SHORT.get(step, step) if isinstance(step, str) else step]
    return config


@pytest.mark.parametrize("key", OBEYED)
def test_a_key_of_the_simplified_form_is_obeyed(key, built):
    text, path, wanted = OBEYED[key]
    code, err, config = built(text, ".cfg")
    assert code == 0, err
    if wanted is None:  # the layer stays float, whichever way the configuration says so
        left = config.get(path[0], {"quant_enable": False})
        assert left["quant_enable"] is False
    else:
        assert at(config, path) == wanted


@pytest.mark.parametrize("key", REFUSED)
def test_a_wrong_value_of_the_simplified_form_is_told_before_any_pass(key, built):
    text, said = REFUSED[key]
    code, err, config = built(text, ".cfg", passes=False)
    assert code == 1 and said in " ".join(err.split()) and config is None
    assert err.count("calib8: error") == 1 and "Traceback" not in err


def test_every_key_of_the_simplified_form_has_its_test():
    keys = {f"{name}.{field.name}" for name in CONFIGS for field in MESSAGES[name]}
    assert keys == set(REFUSED)
    inner = {"OverrideLayerType", "OverrideLayer", "CalibrationConfig"}
    plain = {key for key in keys if key.partition(".")[0] not in inner}
    assert plain == set(OBEYED)


# -- the quant config JSON ---------------------------------------------------------------------

JSON_REFUSED = {
    "version": 2, "batch_num": 0, "activation_offset": 1, "joint_quant": True,
    "weight_offset": True, "do_fusion": "no", "skip_fusion_layers": ["fc"],
    "fakequant_precision_mode": "FP8", "tensor_quantize": {},
    "quant_enable": 1, "dmq_balancer_param": 0.9, "activation_quant_params": 3,
    "weight_quant_params": [],
    "a.num_bits": 12, "a.act_algo": "mse", "a.asymmetric": 1, "a.max_percentile": 0.5,
    "a.min_percentile": 1.5, "a.search_range": [1.3, 0.7], "a.search_step": 1e-7,
    "a.num_of_bins": 1000,
    "w.num_bits": 5, "w.wts_algo": "adaround", "w.channel_wise": 0, "w.num_iteration": -1,
    "w.reg_param": 1, "w.beta_range": [2, 20], "w.warm_start": 0,
}  # fmt: skip
JSON_OBEYED = {
    "version": 1, "batch_num": 2, "activation_offset": False, "do_fusion": False,
    "fakequant_precision_mode": "FORCE_FP16_QUANT",
    "skip_fusion_layers": ["conv2"], "tensor_quantize": [
        {"layer_name": "pool", "input_index": 0, "activation_quant_params": {
            "num_bits": 8, "act_algo": "hfmg", "asymmetric": False, "num_of_bins": 1024}}],
    "quant_enable": False, "dmq_balancer_param": 0.4,
    "a.num_bits": 16, "a.act_algo": "ifmr", "a.asymmetric": False, "a.max_percentile": 0.99,
    "a.min_percentile": 0.98, "a.search_range": [0.8, 1.2], "a.search_step": 0.1,
    "a.num_of_bins": 1024,
    "w.num_bits": 6, "w.wts_algo": "arq_quantize", "w.channel_wise": False,
    "w.num_iteration": 7, "w.reg_param": 0.1, "w.beta_range": [9, 3], "w.warm_start": 0.5,
}  # fmt: skip


ADAS = {"num_iteration", "reg_param", "beta_range", "warm_start"}


def document(key, value):
    """A quant config of three layers in which one key is as said, a layer's in conv1."""
    layers = {name: {"quant_enable": True} for name in ("conv1", "conv2", "fc")}
    made = {"version": 1, "batch_num": 4, **layers}
    part, _, name = key.rpartition(".")
    if part:
        others = {"wts_algo": "ada_quantize", "num_iteration": 3} if name in ADAS else {}
        layers["conv1"][SHORT[part]] = {**others, name: value}
    elif key in GLOBAL:
        made[key] = value
    else:
        layers["conv1"][key] = value
    return json.dumps(made)


@pytest.mark.parametrize("key", JSON_OBEYED)
def test_a_key_of_the_quant_config_is_obeyed(key, built):
    code, err, config = built(document(key, JSON_OBEYED[key]), ".json")
    assert code == 0, err
    path = key.split(".") if "." in key else [key]
    found = at(config, path if key in GLOBAL else ["conv1", *path])
    assert found == JSON_OBEYED[key]


@pytest.mark.parametrize("key", JSON_REFUSED)
def test_a_wrong_value_of_the_quant_config_is_told_before_any_pass(key, built):
    code, err, config = built(document(key, JSON_REFUSED[key]), ".json", passes=False)
    assert code == 1 and config is None
    assert err.count("calib8: error") == 1 and "Traceback" not in err
    name = key.rpartition(".")[2]
    other = {"num_bits": "bits"}
    assert other.get(name, name) in err


def test_every_key_of_the_quant_config_has_its_test():
    layer = {f"a.{key}" for key in ACTIVATION} | {f"w.{key}" for key in WEIGHT} | set(LAYER)
    assert set(GLOBAL) | layer == set(JSON_REFUSED)
    refused_always = {"joint_quant", "weight_offset"}
    tables = {"activation_quant_params", "weight_quant_params"}
    assert set(JSON_REFUSED) - set(JSON_OBEYED) == refused_always | tables
