"""Every key of AMCT's configurations by `build --ascend-config`: obeyed, or refused at once."""

import json

import numpy as np
import onnx
import pytest

from deploy.targets.ascend.config_keys import (
    ACTIVATION_RULES,
    LAYER_RULES,
    MODEL_RULES,
    WEIGHT_RULES,
)
from deploy.targets.ascend.proto import message_class
from deploy.targets.ascend.target import Ascend
from tests.vendor_models import save_net

pytestmark = pytest.mark.slow

BLOCKS = {"ARQuantize": "arq_quantize", "ADAquantize": "ada_quantize"}
BLOCKS |= {"FMRQuantize": "ifmr_quantize", "HFMGQuantize": "hfmg_quantize"}
INNER = {"OverrideLayerType", "OverrideLayer", "CalibrationConfig"}
CONFIGS = {"AMCTConfig", "TensorQuantize", "DMQBalancer", *INNER, *BLOCKS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two Conv+BN and a Gemm, of 4 images."""
    rng = np.random.default_rng(0)
    nodes = [
        ("Conv", "x w1", "c1", "conv1", {"pads": [1] * 4}),
        ("BatchNormalization", "c1 g1 h1 m1 v1", "b1", "bn1"),
        ("Relu", "b1", "r0", "relu"),
        ("MaxPool", "r0", "r1", "pool", {"kernel_shape": [1, 1]}),
        ("Conv", "r1 w2", "c2", "conv2", {"pads": [1] * 4}),
        ("BatchNormalization", "c2 g2 h2 m2 v2", "b2", "bn2"),
        ("Flatten", "b2", "f", "flat"),
        ("Gemm", "f w3 b3", "y", "fc", {"transB": 1}),
    ]
    shapes = {"w1": (4, 3, 3, 3), "w2": (4, 4, 3, 3), "w3": (5, 256), "b3": 5}
    shapes |= {f"{kind}{n}": 4 for n in "12" for kind in "ghmv"}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    weights |= {name: np.abs(weights[name]) + 0.1 for name in ("v1", "v2")}
    path = tmp_path_factory.mktemp("keys") / "keys.onnx"
    save_net(path, nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 5]}, weights, opset=17)
    np.save(path.with_suffix(".npy"), rng.normal(size=(4, 3, 8, 8)).astype(np.float32))
    return path


@pytest.fixture
def built(model, ascend_build):
    """(text, suffix) -> what was said, the config that was used; None where refused."""

    def build(text, suffix, code=0):
        images = model.with_suffix(".npy")
        output, folder = ascend_build(model, images, text, suffix=suffix, code=code)
        used = folder / "keys_config.json"
        return output, json.loads(used.read_text()) if used.exists() else None

    return build


def refused(built, text, suffix, message):
    err, config = built(text, suffix, code=1)
    assert message in err
    assert config is None
    assert err.count("calib8: error") == 1
    assert "Traceback" not in err


def common(inner):
    return f"common_config {{ {inner} }}"


def tensor(inner):
    return f'tensor_quantize {{ layer_name: "pool" input_index: 0 {inner} }}'


def override(kind, name, inner="hfmg_quantize { }"):
    """Settings of a layer type, or of one layer."""
    word = {"type": "override_layer_types", "name": "override_layer_configs"}[kind]
    return f'{word} {{ layer_{kind}: "{name}" calibration_config {{ {inner} }} }}'


# message.key: (a configuration, where the JSON that is written has what, and what)
OBEYED = {
    "AMCTConfig.batch_num": ("batch_num: 3", "batch_num", 3),
    "AMCTConfig.activation_offset": ("activation_offset: false", "activation_offset", False),
    "AMCTConfig.do_fusion": ("do_fusion: false", "do_fusion", False),
    "AMCTConfig.joint_quant": ("joint_quant: false batch_num: 3", "batch_num", 3),
    "AMCTConfig.skip_layers": ('skip_layers: "conv1"', "conv1", None),
    "AMCTConfig.skip_layer_types": ('skip_layer_types: "Gemm"', "fc", None),
    "AMCTConfig.skip_fusion_layers": (
        'skip_fusion_layers: "conv1"',
        "skip_fusion_layers",
        ["conv1"],
    ),
    "AMCTConfig.fakequant_precision_mode": (
        "fakequant_precision_mode: FORCE_FP16_QUANT",
        "fakequant_precision_mode",
        "FORCE_FP16_QUANT",
    ),
    "AMCTConfig.common_config": (common("hfmg_quantize { }"), "fc.a.act_algo", "hfmg"),
    "AMCTConfig.override_layer_types": (override("type", "Gemm"), "fc.a.act_algo", "hfmg"),
    "AMCTConfig.override_layer_configs": (override("name", "conv2"), "conv2.a.act_algo", "hfmg"),
    "AMCTConfig.tensor_quantize": (tensor(""), "tensor_quantize.0.input_index", 0),
    "TensorQuantize.layer_name": (tensor(""), "tensor_quantize.0.layer_name", "pool"),
    "TensorQuantize.input_index": (tensor(""), "tensor_quantize.0.input_index", 0),
    "TensorQuantize.ifmr_quantize": (
        tensor("ifmr_quantize { search_step: 0.05 }"),
        "tensor_quantize.0.a.search_step",
        0.05,
    ),
    "TensorQuantize.hfmg_quantize": (
        tensor("hfmg_quantize { }"),
        "tensor_quantize.0.a.act_algo",
        "hfmg",
    ),
    "DMQBalancer.migration_strength": (
        override("type", "Conv", "dmq_balancer { migration_strength: 0.3 }"),
        "conv1.dmq_balancer_param",
        0.3,
    ),
}
# message.key: (a configuration, words of the refusal)
REFUSED = {
    "AMCTConfig.batch_num": ("batch_num: 5", "batch_num batches, 5, got 4"),
    "AMCTConfig.activation_offset": ("activation_offset: 7", "activation_offset"),
    "AMCTConfig.do_fusion": ("do_fusion: maybe", "do_fusion"),
    "AMCTConfig.joint_quant": ("joint_quant: true", "remove the line"),
    "AMCTConfig.skip_layers": ('skip_layers: "conv9"', "did you mean"),
    "AMCTConfig.skip_layer_types": ('skip_layer_types: "Convolution"', "Convolution"),
    "AMCTConfig.skip_fusion_layers": ('skip_fusion_layers: "fc"', "takes Conv layers"),
    "AMCTConfig.fakequant_precision_mode": ("fakequant_precision_mode: FP8", "FP8"),
    "AMCTConfig.common_config": (common("x: 1"), "no key 'x' in CalibrationConfig"),
    "AMCTConfig.override_layer_types": ("override_layer_types { }", "layer_type"),
    "AMCTConfig.override_layer_configs": ("override_layer_configs { }", "layer_name"),
    "OverrideLayerType.layer_type": (override("type", "LSTM", ""), "LSTM"),
    "OverrideLayerType.calibration_config": (
        'override_layer_types { layer_type: "Conv" }',
        "calibration_config",
    ),
    "OverrideLayer.layer_name": (override("name", "conv7", ""), "conv7"),
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
    "TensorQuantize.ifmr_quantize": (tensor("ifmr_quantize { search_step: 9 }"), "search_step"),
    "TensorQuantize.hfmg_quantize": (tensor("hfmg_quantize { num_of_bins: 9 }"), "num_of_bins"),
    "DMQBalancer.migration_strength": (
        common("dmq_balancer { migration_strength: 0.9 }"),
        "0.2, 0.8",
    ),
}
for _name in ("arq_quantize", "ada_quantize", "ifmr_quantize", "hfmg_quantize", "dmq_balancer"):
    REFUSED[f"CalibrationConfig.{_name}"] = (common(f"{_name}: 1"), _name)
# the keys of a search: a value, where the JSON has what; a value that is refused, words of why
SEARCHES = {
    "ARQuantize.channel_wise": (
        "false",
        "conv1.w.channel_wise",
        False,
        "true",
        "leave channel_wise out",
    ),
    "ARQuantize.quant_bits": ("7", "conv1.w.num_bits", 7, "5", "num_bits must be 4, 6, 7 or 8"),
    "ADAquantize.num_iteration": ("7", "fc.w.num_iteration", 7, "-1", "num_iteration"),
    "ADAquantize.reg_param": ("0.1", "fc.w.reg_param", 0.1, "2", "reg_param"),
    "ADAquantize.beta_range_start": ("9", "fc.w.beta_range.0", 9, "1", "beta_range"),
    "ADAquantize.beta_range_end": ("3", "fc.w.beta_range.1", 3, "30", "beta_range"),
    "ADAquantize.warm_start": ("0.5", "fc.w.warm_start", 0.5, "1.5", "warm_start"),
    "ADAquantize.channel_wise": ("false", "conv1.w.channel_wise", False, "true", "channel_wise"),
    "FMRQuantize.search_range_start": ("0.9", "fc.a.search_range.0", 0.9, "2", "search_range"),
    "FMRQuantize.search_range_end": ("1.1", "fc.a.search_range.1", 1.1, "0.1", "search_range"),
    "FMRQuantize.search_step": ("0.05", "fc.a.search_step", 0.05, "1e-7", "10000 scales to try"),
    "FMRQuantize.max_percentile": ("0.99", "fc.a.max_percentile", 0.99, "0.4", "max_percentile"),
    "FMRQuantize.min_percentile": ("0.99", "fc.a.min_percentile", 0.99, "nan", "min_percentile"),
    "FMRQuantize.asymmetric": ("false", "fc.a.asymmetric", False, "3", "asymmetric"),
    "FMRQuantize.dst_type": ("INT16", "fc.a.num_bits", 16, "INT4", "INT4"),
    "HFMGQuantize.num_of_bins": ("1024", "fc.a.num_of_bins", 1024, "1000", "num_of_bins"),
    "HFMGQuantize.asymmetric": ("false", "fc.a.asymmetric", False, "3", "asymmetric"),
    "HFMGQuantize.dst_type": ("INT16", "fc.a.num_bits", 16, "INT4", "INT4"),
}
for _key, (_good, _path, _expected, _bad, _reason) in SEARCHES.items():
    _message, _, _name = _key.partition(".")
    _block = BLOCKS[_message]
    _iterations = " num_iteration: 3" if _block[:3] == "ada" and _name != "num_iteration" else ""
    OBEYED[_key] = (common(f"{_block} {{ {_name}: {_good}{_iterations} }}"), _path, _expected)
    REFUSED[_key] = (common(f"{_block} {{ {_name}: {_bad} }}"), _reason)
SHORT = {"a": "activation_quant_params", "w": "weight_quant_params"}


def value_at(config, path):
    """What a quant config has there, as "conv1.a.search_range.0"."""
    for step in path.split("."):
        config = config[int(step) if step.isdigit() else SHORT.get(step, step)]
    return config


# the JSON below has the keys of a search too, and takes the same way from there
REPEATED = dict.fromkeys(SEARCHES, (pytest.mark.slow, pytest.mark.release))


@pytest.mark.parametrize("key", [pytest.param(key, marks=REPEATED.get(key, ())) for key in OBEYED])
def test_simplified_key_is_obeyed(key, built):
    text, path, expected = OBEYED[key]
    config = built(text, ".cfg")[1]
    if expected is None:  # the layer stays float, whichever way the configuration says so
        assert config.get(path, {"quant_enable": False})["quant_enable"] is False
    elif isinstance(expected, float) and np.float32(expected) != expected:
        assert value_at(config, path) == pytest.approx(expected)
    else:
        assert value_at(config, path) == expected


def test_plan_has_the_configuration_float_layers(model, tmp_path):
    config = tmp_path / "my.cfg"
    config.write_text('skip_layers: "conv2"')
    decisions = Ascend(config=config).plan(onnx.load(model), ("fc",)).decisions
    assert {d.node for d in decisions if d.precision == "int8"} == {"conv1"}


@pytest.mark.parametrize("key", REFUSED)
def test_wrong_simplified_value_is_refused_early(key, built, no_pass):
    text, message = REFUSED[key]
    refused(built, text, ".cfg", message)


def test_every_configuration_key_has_a_test():
    keys = {
        f"{name}.{field.name}"
        for name in CONFIGS
        for field in message_class(name).DESCRIPTOR.fields
    }
    assert keys == set(REFUSED)
    assert {key for key in keys if key.partition(".")[0] not in INNER} == set(OBEYED)
    layer = (
        {f"a.{key}" for key in ACTIVATION_RULES}
        | {f"w.{key}" for key in WEIGHT_RULES}
        | set(LAYER_RULES)
    )
    assert set(MODEL_RULES) | layer == set(JSON_REFUSED)
    refused_always = {"joint_quant", "weight_offset"}
    tables = {"activation_quant_params", "weight_quant_params"}
    assert set(JSON_REFUSED) - set(JSON_OBEYED) == refused_always | tables


# -- the quant config JSON ---------------------------------------------------------------------
JSON_REFUSED = {
    "version": 2,
    "batch_num": 0,
    "activation_offset": 1,
    "joint_quant": True,
    "weight_offset": True,
    "do_fusion": "no",
    "skip_fusion_layers": ["fc"],
    "fakequant_precision_mode": "FP8",
    "tensor_quantize": {},
    "quant_enable": 1,
    "dmq_balancer_param": 0.9,
    "activation_quant_params": 3,
    "weight_quant_params": [],
    "a.num_bits": 12,
    "a.act_algo": "mse",
    "a.asymmetric": 1,
    "a.max_percentile": 0.5,
    "a.min_percentile": 1.5,
    "a.search_range": [1.3, 0.7],
    "a.search_step": 1e-7,
    "a.num_of_bins": 1000,
    "w.num_bits": 5,
    "w.wts_algo": "adaround",
    "w.channel_wise": 0,
    "w.num_iteration": -1,
    "w.reg_param": 1,
    "w.beta_range": [2, 20],
    "w.warm_start": 0,
}
JSON_OBEYED = {
    "version": 1,
    "batch_num": 2,
    "activation_offset": False,
    "do_fusion": False,
    "fakequant_precision_mode": "FORCE_FP16_QUANT",
    "skip_fusion_layers": ["conv2"],
    "tensor_quantize": [
        {
            "layer_name": "pool",
            "input_index": 0,
            "activation_quant_params": {
                "num_bits": 8,
                "act_algo": "hfmg",
                "asymmetric": False,
                "num_of_bins": 1024,
            },
        }
    ],
    "quant_enable": False,
    "dmq_balancer_param": 0.4,
    "a.num_bits": 16,
    "a.act_algo": "ifmr",
    "a.asymmetric": False,
    "a.max_percentile": 0.99,
    "a.min_percentile": 0.98,
    "a.search_range": [0.8, 1.2],
    "a.search_step": 0.1,
    "a.num_of_bins": 1024,
    "w.num_bits": 6,
    "w.wts_algo": "arq_quantize",
    "w.channel_wise": False,
    "w.num_iteration": 7,
    "w.reg_param": 0.1,
    "w.beta_range": [9, 3],
    "w.warm_start": 0.5,
}


ADAS = {"num_iteration", "reg_param", "beta_range", "warm_start"}


def document(key, value):
    """A quant config of three layers in which one key is as said, a layer's in conv1."""
    layers = {name: {"quant_enable": True} for name in ("conv1", "conv2", "fc")}
    config = {"version": 1, "batch_num": 4, **layers}
    part, _, name = key.rpartition(".")
    if part:
        extra_keys = {"wts_algo": "ada_quantize", "num_iteration": 3} if name in ADAS else {}
        layers["conv1"][SHORT[part]] = {**extra_keys, name: value}
    elif key in MODEL_RULES:
        config[key] = value
    else:
        layers["conv1"][key] = value
    return json.dumps(config)


@pytest.mark.parametrize("key", JSON_OBEYED)
def test_quant_config_key_is_obeyed(key, built):
    config = built(document(key, JSON_OBEYED[key]), ".json")[1]
    assert value_at(config, key if key in MODEL_RULES else f"conv1.{key}") == JSON_OBEYED[key]


@pytest.mark.parametrize("key", JSON_REFUSED)
def test_wrong_config_value_is_refused_early(key, built, no_pass):
    name = key.rpartition(".")[2]
    message = {"num_bits": "bits"}.get(name, name)
    refused(built, document(key, JSON_REFUSED[key]), ".json", message)
