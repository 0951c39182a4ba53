"""Inputs by tensor_quantize and MatMuls of two activations, by the command."""

import json
import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calibrators.amct.hfmg import HfmgHistogram, hfmg
from calibrators.amct.ifmr import IfmrParams, ifmr
from deploy.errors import ModelError
from deploy.pipeline.ascend_auto import FINAL, RANKING
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend import config_keys as keys
from deploy.targets.ascend.config import default_config, resolve_config
from deploy.targets.ascend.deploy_model import deploy_model
from deploy.targets.ascend.executor import compare_deploy_model, open_deploy
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import read_record
from tests.models import run_net
from tests.vendor_models import build_net, calibrate_amct, save_net

pytestmark = pytest.mark.slow

DATA = np.random.default_rng(0).normal(size=(6, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def built(small_cnn, tmp_path, ascend_build):
    """Configuration text -> what was said, and the folder."""
    np.save(tmp_path / "images.npy", DATA)
    return partial(ascend_build, small_cnn, tmp_path / "images.npy")


def tensor(name, index, inner=""):
    return f'tensor_quantize {{ layer_name: "{name}" input_index: {index} {inner} }}\n'


BOTH = "batch_num: 6\n" + tensor("Add_a", 1) + tensor("MaxPool_p", 0, "hfmg_quantize { }")


KEPT = {}  # what was built once, for all tests that only read it


@pytest.fixture
def shared_build(built, built_matmul):
    """(name) -> what is said of `BOTH` or of a build of the attention, and the folder."""
    builds = {
        "inputs": lambda: built(BOTH),
        "plain": lambda: built_matmul("batch_num: 4"),  # no MatMul of two activations is named
        "matmuls": lambda: built_matmul(named("scores", "context")),
    }

    def call(name):
        if name not in KEPT:
            output, folder = builds[name]()
            KEPT[name] = output, folder.rename(folder.with_name(name))
        return KEPT[name]

    return call


def nodes_of(path):
    return {node.name: node for node in onnx.load(path).graph.node}


def records_of(folder):
    (path,) = folder.glob("*_record.txt")
    return read_record(path.read_text())


def config_of(folder):
    (path,) = folder.glob("*_config.json")
    return json.loads(path.read_text())


def same_bytes(first_folder, second_folder, stem, *endings):
    for name in (f"{stem}_{ending}" for ending in endings):
        assert (first_folder / name).read_bytes() == (second_folder / name).read_bytes(), name


def test_named_inputs_of_floats_are_int8(shared_build):
    output, folder = shared_build("inputs")
    assert "4 of 10 nodes int8" in output
    assert "within 0 of the fake-quant model" in output
    reason = "it computes in float; by tensor_quantize its input is moved in int8"
    assert f"| Add | Add_a | {reason}" in output
    nodes = nodes_of(folder / "small_cnn_deploy_model.onnx")
    for name, index in (("Add_a.1", 1), ("MaxPool_p.0", 0)):
        back = nodes[f"{name}.anti_quant"]
        assert back.op_type == "AscendAntiQuant"
        assert nodes[name[:-2]].input[index] == back.output[0]
        (quant,) = (n for n in nodes.values() if n.output[0] == back.input[0])
        quant_attributes = {a.name: helper.get_attribute_value(a) for a in quant.attribute}
        back_attributes = {a.name: helper.get_attribute_value(a) for a in back.attribute}
        assert back_attributes["offset"] == quant_attributes["offset"]
        assert back_attributes["dtype"] == 0
        assert back_attributes["scale"] == pytest.approx(1 / quant_attributes["scale"], rel=1e-6)
    assert not (folder / "small_cnn_modified_model.onnx").exists()  # AMCT takes the model as it is
    records = records_of(folder)
    assert [n for n, r in records.items() if r.is_node_input] == ["Add_a:1", "MaxPool_p:0"]
    assert records["Add_a:1"].scale_w.size == 0
    # AMCT's `convert` takes these; of a MaxPool's it knows nothing.
    nodes = nodes_of(folder / "small_cnn_amct_qdq.onnx")
    assert list(nodes["Add_a"].input) == ["c2", nodes["Conv_c2"].input[0]]
    assert nodes["Conv_c2"].input[0] == "Conv_c2.input.dequantized"
    assert nodes["MaxPool_p"].input[0] == "r3"


def test_equal_scales_share_one_ascendquant(built):
    """Conv_c2 and the Add read r1 and are searched alike; with another search each has its own."""
    for inner, nodes in (("", 4), ("hfmg_quantize { }", 5)):
        _, folder = built("batch_num: 6\n" + tensor("Add_a", 1, inner), out=f"o{nodes}")
        deploy_nodes = onnx.load(folder / "small_cnn_deploy_model.onnx").graph.node
        assert sum(node.op_type == "AscendQuant" for node in deploy_nodes) == nodes


def test_input_scales_equal_their_searches(small_cnn, built):
    """On the values of the model whose weights are fake-quantized, as layers are searched."""
    ifmr_input = tensor(
        "Add_a", 0, "ifmr_quantize { search_range_start: 0.9 max_percentile: 0.99 }"
    )
    hfmg_input = tensor("MaxPool_p", 0, "hfmg_quantize { num_of_bins: 1024 asymmetric: false }")
    _, folder = built("batch_num: 6\n" + ifmr_input + hfmg_input, "--exact-ifmr")
    records = records_of(folder)
    fake = onnx.load(small_cnn)
    for (
        initializer
    ) in fake.graph.initializer:  # ARQ, a scale a channel in Convs and one in the Gemm
        if initializer.name in ("w1", "w2", "w3"):
            scale = records[f"Conv_c{initializer.name[1]}"].scale_w.reshape(-1, 1, 1, 1)
            value = np.rint(numpy_helper.to_array(initializer) / scale) * scale
            initializer.CopyFrom(numpy_helper.from_array(value, initializer.name))
    observed_values = [run_net(fake, image[None], ["c2", "r3"]) for image in DATA]
    params = IfmrParams(search_range=(0.9, 1.3), max_percentile=0.99, with_offset=True)
    by_ifmr = ifmr(np.concatenate([values.ravel() for values, _ in observed_values]), params)
    histogram = HfmgHistogram(1024)
    for _, values in observed_values:
        histogram.observe(values)
    by_hfmg = hfmg(histogram, with_offset=False)
    for name, expected in (("Add_a:0", by_ifmr), ("MaxPool_p:0", by_hfmg)):
        assert records[name].offset_d == expected.offset
        assert records[name].scale_d == pytest.approx(expected.scale, rel=1e-5)
    assert by_hfmg.offset == 0


def test_both_configuration_forms_are_equal(built, run, small_cnn, tmp_path):
    """cfg -> build -> its JSON, in AMCT's place and order -> build: the same bytes."""
    _, folder = built(BOTH + "common_config { ifmr_quantize { asymmetric: false } }")
    text = (folder / "small_cnn_config.json").read_text()
    config = json.loads(text)
    assert list(config)[5] == "tensor_quantize"
    assert list(config)[6] == "Conv_c1"
    first_input, second_input = config["tensor_quantize"]
    assert list(first_input) == ["layer_name", "input_index", "activation_quant_params"]
    assert (
        first_input["activation_quant_params"]["asymmetric"] is False
    )  # common_config, also of IFMR
    assert second_input["activation_quant_params"]["asymmetric"] is True  # activation_offset
    assert second_input["activation_quant_params"]["num_of_bins"] == 4096
    _, json_folder = built(text, suffix=".json", out="again")
    files = ("config.json", "record.txt", "deploy_model.onnx", "fake_quant_model.onnx")
    same_bytes(folder, json_folder, "small_cnn", *files)
    again, config = tmp_path / "again.json", folder / "small_cnn_config.json"
    out = run.ok("ascend", "config", small_cnn, "--from", config, "-o", again)
    assert "4 of 4 layers in int8, 2 inputs moved in int8" in out
    assert again.read_bytes() == config.read_bytes()


def test_inputs_stay_quantized_without_layers(built):
    """Inputs alone are enough to quantize; the executor and the check take such a model too."""
    output, folder = built(BOTH + 'skip_layer_types: "Conv" skip_layers: "Gemm_logits"')
    assert "0 of 10 nodes int8" in output
    assert "within 0 of the fake-quant model" in output
    assert set(records_of(folder)) == {"Add_a:1", "MaxPool_p:0"}
    _, folder = built(BOTH, "--keep-float", "Add_a")
    assert list(config_of(folder))[5] == "tensor_quantize"
    records = records_of(folder)
    assert "Add_a:1" not in records
    assert "MaxPool_p:0" in records


def test_layer_cache_serves_quantized_inputs(built, tmp_path):
    """Inputs that no layer reads are observed in addition, in the same form of the model."""
    cache = ("--cache", tmp_path / "kept.cache")
    built("batch_num: 6", *cache)
    output, _ = built("batch_num: 6\n" + tensor("Add_a", 1), *cache, out="second")
    assert "reused" in output
    assert "in part" not in output  # r1 is what Conv_c2 reads
    output, _ = built("batch_num: 6\n" + tensor("Add_a", 0), *cache, out="third")
    assert "reused in part" in output
    assert "lacks 1 observation " in output


@pytest.mark.parametrize("attribute", ["scale", "dtype"])
def test_antiquant_without_scale_is_refused(shared_build, attribute):
    model = onnx.load(shared_build("inputs")[1] / "small_cnn_deploy_model.onnx")
    (back,) = (node for node in model.graph.node if node.name == "Add_a.1.anti_quant")
    remaining = [entry for entry in back.attribute if entry.name != attribute]
    del back.attribute[:]
    back.attribute.extend(remaining)
    back.name = ""
    expected = pytest.raises(ModelError, match=f"AscendAntiQuant '{back.output[0]}' must have")
    with expected if attribute == "scale" else nullcontext():
        open_deploy(model)


def check_and_deploy(command, folder, model, layers, inputs, redeployed):
    """Every file is sound, and the record gives the files again; entries of the mapping by name."""
    stem = model.stem
    for ending, summary in (
        ("record.txt", f"a sound record of {layers} layers{inputs[0]}"),
        ("config.json", f"a sound quant config, {layers} layers in int8{inputs[1]}"),
        ("deploy_model.onnx", f"a sound deploy model, {layers} layers in int8{inputs[1]}"),
    ):
        model_option = () if ending.endswith("onnx") else ("--model", model)
        assert summary in command("ascend", "check", folder / f"{stem}_{ending}", *model_option)
    config = ("--ascend-config", folder / f"{stem}_config.json")
    command("ascend", "deploy", model, folder / f"{stem}_record.txt", "-o", redeployed, *config)
    files = ("deploy_model.onnx", "fake_quant_model.onnx", "record.txt", "config.json")
    same_bytes(folder, redeployed, stem, *files)
    mapping = json.loads((folder / f"{stem}_quant.json").read_text())
    return {op["name"]: op for op in mapping["graph"][0]["op"]}


def test_input_files_check_and_deploy(shared_build, command, small_cnn, tmp_path):
    inputs = (" and 2 inputs of tensor_quantize", ", 2 inputs moved in int8")
    ops = check_and_deploy(
        command, shared_build("inputs")[1], small_cnn, 4, inputs, tmp_path / "again"
    )
    assert ops["Add_a"]["input"] == ["Conv_c2.dequant:0", "Add_a.1.anti_quant:0"]
    assert ops["Add_a"]["attr"][0]["value"]["list"]["s"] == ["Add_a"]
    assert ops["Add_a.1.anti_quant"]["attr"][0]["value"]["list"] == {}


def test_input_removed_from_record_stays_float(shared_build, command, small_cnn, tmp_path):
    _, folder = shared_build("inputs")
    text = (folder / "small_cnn_record.txt").read_text()
    remaining_text, mark, _ = text.partition('record {\n  key: "MaxPool_p:0"')
    assert mark
    record, redeployed = tmp_path / "less.txt", tmp_path / "again"
    record.write_text(remaining_text)
    config = ("--ascend-config", folder / "small_cnn_config.json")
    command("ascend", "deploy", small_cnn, record, "-o", redeployed, *config)
    assert [entry["layer_name"] for entry in config_of(redeployed)["tensor_quantize"]] == ["Add_a"]
    assert "MaxPool_p.0.anti_quant" not in nodes_of(redeployed / "small_cnn_deploy_model.onnx")


EDITS = {  # what stands behind a key of the record, and what takes its place
    "no such input": ("Add_a:", '1"', '2"', "must be below 2, got 2"),
    "another spelling": ("Add_a:", '1"', '01"', "must be below 2, got 01"),
    "no such node": ("Add_", 'a:1"', 'b:1"', "did you mean 'Add_a'"),
    "of a layer": ("", 'Add_a:1"', 'Conv_c9"', "must be of an input, '<layer>:<index>', got"),
    "no flag": ("Add_a:1", "is_tensor_quantize: true", "", "must hold is_tensor_quantize: true"),
    "a weight": ("Add_a:1", 'act_type: "INT8"', "scale_w: 2 offset_w: 0", "no scale_w"),
    "an offset": ("scores", "offset_d: 0", "offset_d: 3", "takes offset_d 0, got 3"),
    "two scales": ("scores", "scale_w", "scale_w: 1 offset_w: 0 scale_w", "one scale_w, got 2"),
    "no scale": ("scores", r"scale_w: \S+\s+offset_w: 0", "", "must hold scale_w"),
}


@pytest.mark.parametrize("key", EDITS)
def test_wrong_input_record_is_refused(key, shared_build, small_cnn, files, refusal, tmp_path):
    key_text, old, new, message = EDITS[key]
    name, model = ("matmuls", files) if key_text == "scores" else ("inputs", small_cnn)
    _, folder = shared_build(name)
    text = (folder / f"{model.stem}_record.txt").read_text()
    edited, count = re.subn(f'(?s)(key: "{key_text}.*?){old}', rf"\g<1>{new}", text, count=1)
    assert count == 1
    record = tmp_path / "edited.txt"
    record.write_text(edited)
    assert message in refusal("ascend", "deploy", model, record, "-o", tmp_path / "again")


WRONG = {
    "no such node": (tensor("Add_b", 0), "of tensor_quantize does not exist in the model; did you"),
    "another type": (tensor("Conv_c2", 0), "inputs of Add and MaxPool, got 'Conv_c2' of type Conv"),
    "no such input": (tensor("Add_a", 2), "of type Add, must be below 2, got 2"),
    "one input only": (tensor("MaxPool_p", 1), "of type MaxPool, must be below 1, got 1"),
    "twice": (
        tensor("Add_a", 0) + tensor("Add_a", 0),
        "must name each once, got ['Add_a:0'] repeated",
    ),
    "16 bits": (tensor("Add_a", 0, "ifmr_quantize { dst_type: INT16 }"), "8-bit, got 16 bits"),
    "a value": (
        tensor("Add_a", 0, "hfmg_quantize { num_of_bins: 7 }"),
        "num_of_bins must be one of [1024, 2048, 4096, 8192], got 7 (in tensor_quantize of 'Add_a'",
    ),
    "a key": (tensor("Add_a", 0, "kl_quantize { }"), "no key 'kl_quantize' in TensorQuantize"),
    # of the other form: what stands under tensor_quantize
    "no object": ({"Add_a": 1}, "tensor_quantize must be of type list"),
    "no index": ([{"layer_name": "Add_a"}], "each tensor_quantize must hold input_index"),
    "no name": ([{"input_index": 0}], "each tensor_quantize must hold layer_name"),
    "half": ([{"layer_name": "Add_a", "input_index": 0.5}], "input_index must be of type int"),
    "below 0": ([{"layer_name": "Add_a", "input_index": -1}], "input_index must be >= 0, got -1"),
    "a number": ([{"layer_name": 3, "input_index": 0}], "layer_name must be of type str"),
    "an unknown key": (
        [{"layer_name": "Add_a", "input_index": 0, "activation": {}}],
        "unknown key 'activation' in tensor_quantize; did you mean 'activation_quant_params'",
    ),
    "two algorithms": (
        [
            {
                "layer_name": "Add_a",
                "input_index": 0,
                "activation_quant_params": {"act_algo": "hfmg", "search_step": 0.1},
            }
        ],
        "does not take keys of the other algorithm",
    ),
}


def refused(built, text, message, suffix=".cfg"):
    err, folder = built(text, suffix=suffix, code=1)
    assert message in err
    assert err.count("calib8: error") == 1
    assert "Traceback" not in err
    assert not list(folder.glob("*_config.json"))


@pytest.mark.parametrize("key", WRONG)
def test_unsuitable_inputs_are_refused_before_observing(key, built, no_pass):
    value, message = WRONG[key]
    if isinstance(value, str):
        refused(built, value, message)
    else:
        text = json.dumps({"version": 1, "tensor_quantize": value, "Conv_c1": {}})
        refused(built, text, message, ".json")


@pytest.fixture
def auto(command, tmp_path):
    """(model, images, configuration, strategy) -> what was said, the configuration it left."""

    def call(model, images, text, strategy):
        config, out = tmp_path / "my.cfg", tmp_path / "o"
        config.write_text(text)
        arguments = ("--images", images, "--max-loss", 0.0001, "--ascend-config", config, "-o", out)
        output = command("ascend", "auto", model, *arguments, "--strategy", strategy)
        return output, json.loads((out / FINAL).read_text())

    return call


@pytest.mark.parametrize("strategy", ["gain", "binary-search"])
def test_auto_may_keep_inputs_float(strategy, auto, small_cnn, tmp_path):
    """What it leaves in float is neither in the record nor in the final configuration."""
    np.save(tmp_path / "images.npy", DATA)
    _, config = auto(small_cnn, tmp_path / "images.npy", BOTH, strategy)
    ranked = json.loads((tmp_path / "o" / RANKING).read_text())
    assert {"Add_a:1", "MaxPool_p:0"} <= {entry for entry, _ in ranked}
    records = records_of(tmp_path / "o")
    quantized_inputs = config.get("tensor_quantize", [])
    keys = {f"{entry['layer_name']}:{entry['input_index']}" for entry in quantized_inputs}
    assert keys == {key for key, entry in records.items() if entry.is_node_input}
    assert 0 < len(records) < 6


def test_unquantizable_add_inputs_are_refused(tmp_path, refusal):
    """What an Add is not to have quantized, each with its reason."""
    nodes = [
        ("MatMul", "x w", "m", "mm"),
        ("Add", "m b", "a", "bias"),
        ("Add", "a c", "d", "shift"),
        ("Cast", "x", "s", "whole", {"to": TensorProto.INT64}),
        ("Add", "s s", "t", "sizes"),
        ("Relu", "d", "y", "relu"),
    ]
    weights = {"w": np.ones((4, 4)), "b": np.ones(4), "c": np.ones((2, 1))}
    ends = {"y": None, "t": (TensorProto.INT64, None)}
    path = save_net(tmp_path / "g.onnx", nodes, {"x": [2, 4]}, ends, weights)
    config = tmp_path / "my.cfg"
    for name, index, reason in (
        ("bias", 0, "this Add is the bias of 'mm'"),
        ("shift", 1, "it is a constant"),
        ("sizes", 0, "it is not float32"),
    ):
        config.write_text(tensor(name, index))
        err = refusal("ascend", "config", path, "--from", config, "-o", tmp_path / "out.json")
        assert f"input {index} of {name!r} cannot be quantized: {reason}" in err


@settings(max_examples=20)
@given(
    st.sampled_from(["Add", "MaxPool"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
@example(op="Add", all_inputs=False, asymmetric=False, padded=False, seed=532492818)
def test_integers_and_floats_agree(op, all_inputs, asymmetric, padded, seed):
    """The executor's codes are within half a step of the input, and the fake-quant model's own.

    A MaxPool may have padding, which is no value of the tensor: its output is a value that is. Of a
    symmetric range that the least value gives, as its step 128, the greatest may lie above 127.
    """
    rng, shape = np.random.default_rng(seed), [1, 2, 5, 4]
    names = ["x", "z"] if op == "Add" else ["x"]
    pool = {} if op == "Add" else {"kernel_shape": [2, 2], "pads": [int(padded)] * 4}
    model = build_net([(op, names, "y", "one", pool)], dict.fromkeys(names, shape), {"y": None})
    layers = find_layers(model)
    act = keys.ActivationParams(asymmetric=asymmetric, search_range=(1.0, 1.3))
    indices = (0, 1) if all_inputs and op == "Add" else (0,)
    requested_tensors = {f"one:{index}": act for index in indices}
    shift = -2 if seed % 2 else 0
    feed = {name: (rng.normal(size=shape) + shift).astype(np.float32) for name in names}
    config = resolve_config(keys.QuantConfig(tensors=requested_tensors), layers)
    calibration = calibrate_amct(model, layers, [feed], config)
    quantized = quantize_layers(model, layers, calibration.records)
    (got,) = open_deploy(deploy_model(model, quantized), threads=1).run(feed).values()
    twin = fake_quant_model(model, quantized, npu_rounding=True)
    (fake,) = OrtSession.open(twin, threads=1, optimize=False).run(feed).values()
    (real,) = OrtSession.open(model, threads=1).run(feed).values()
    np.testing.assert_array_equal(got, fake)
    scales = [float(record.scale_d) for record in calibration.records.values()]
    maxima = [0.0] * len(indices)
    if not asymmetric:
        maxima = [float(feed[names[index]].max()) for index in indices]
    bounds = [max(0.51 * s, above - 127 * s) for s, above in zip(scales, maxima, strict=True)]
    assert np.abs(got - real).max() <= sum(bounds) + 1e-6


HEADS, TOKENS, WIDE = 2, 6, 8


def attention():
    """x [N, heads, tokens, wide]: softmax(q k') v, with a matrix a head for q and v."""
    rng = np.random.default_rng(3)
    nodes = [
        ("MatMul", "x wq", "q", "query"),
        ("MatMul", "x wk", "k", "key"),
        ("Transpose", "k", "kt", "turn", {"perm": [0, 1, 3, 2]}),
        ("MatMul", "q kt", "s", "scores"),
        ("Softmax", "s", "p", "soft", {"axis": -1}),
        ("MatMul", "x wv", "m", "value"),
        ("Add", "m bv", "v", "value_bias"),
        ("MatMul", "p v", "y", "context"),
    ]
    a_head, shape = (HEADS, WIDE, WIDE), ["N", HEADS, TOKENS, WIDE]
    shapes = {"wq": a_head, "wk": (WIDE, WIDE), "wv": a_head, "bv": (WIDE,)}
    constants = {name: rng.normal(0, 0.4, size) for name, size in shapes.items()}
    return build_net(nodes, {"x": shape}, {"y": shape}, constants)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("attention") / "net.onnx"
    onnx.save(attention(), path)
    data = np.random.default_rng(4).normal(size=(4, HEADS, TOKENS, WIDE)).astype(np.float32)
    np.save(path.with_suffix(".npy"), data)
    return path


@pytest.fixture
def built_matmul(files, ascend_build):
    """The same of the attention."""
    return partial(ascend_build, files, files.with_suffix(".npy"))


def named(*names, inner=""):
    layer_config = f"calibration_config {{ {inner} }}"
    layers = [
        f'override_layer_configs {{ layer_name: "{name}" {layer_config} }}\n' for name in names
    ]
    return "batch_num: 4\n" + "".join(layers)


def test_unnamed_activation_matmuls_are_float(shared_build):
    output, folder = shared_build("plain")
    assert "3 of 8 nodes int8 | MatMul 3 |" in output
    assert "neither factor is a constant: int8 only where a configuration names it" in output
    assert "scores" not in config_of(folder)
    assert "scores.quant" not in nodes_of(folder / "net_deploy_model.onnx")
    assert set(default_config(find_layers(attention())).layers) == {"query", "key", "value"}


def test_named_activation_matmuls_are_int8(shared_build):
    """Both factors symmetric; the second's scale stands in the record where a weight's would."""
    output, folder = shared_build("matmuls")
    assert "5 of 8 nodes int8 | MatMul 5 |" in output
    assert "within 0 of the fake-quant model" in output
    assert "MatMuls of two activations in int8: 2. Huawei says that this gains on" in output
    config = config_of(folder)["scores"]
    assert config["quant_enable"] is True
    assert config["activation_quant_params"]["asymmetric"] is False
    record = records_of(folder)["scores"]
    assert record.offset_d == 0
    assert record.scale_w.shape == (1,)
    assert not record.is_node_input
    nodes = nodes_of(folder / "net_deploy_model.onnx")
    assert list(nodes["scores"].input) == ["scores.quant.output0", "scores.1.quant.output0"]
    assert nodes["scores.1.quant"].input[0] == "kt"
    assert nodes["scores.dequant"].op_type == "AscendDequant"
    for name, scale in (("scores", record.scale_d), ("scores.1", record.scale_w[0])):
        quant = nodes[f"{name}.quant"]
        assert helper.get_node_attr_value(quant, "scale") == pytest.approx(1 / scale, rel=1e-6)
        assert helper.get_node_attr_value(quant, "offset") == 0


def test_matmul_factors_have_searched_scales(built_matmul, files):
    """HFMG with its own bins, as the configuration says, on both factors."""
    _, folder = built_matmul(named("scores", inner="hfmg_quantize { num_of_bins: 1024 }"))
    record = records_of(folder)["scores"]
    assert config_of(folder)["scores"]["activation_quant_params"]["num_of_bins"] == 1024
    factors = run_net(attention(), np.load(files.with_suffix(".npy")), ["q", "kt"])
    for scale, values in zip((record.scale_d, record.scale_w[0]), factors, strict=True):
        maximum = np.abs(values).max()  # HFMG may clip, and sees fake-quantized weights
        assert 0.3 * maximum < 127 * scale < 1.1 * maximum


def test_keep_float_overrides_named_matmuls(built_matmul):
    layers = {name: {"quant_enable": True} for name in ("query", "scores")}
    text = json.dumps({"version": 1, "batch_num": 4, **layers})
    output, _ = built_matmul(text, suffix=".json")
    assert "2 of 8 nodes int8 | MatMul 2 |" in output
    output, folder = built_matmul(text, "--keep-float", "scores", suffix=".json")
    assert "1 of 8 nodes int8 | MatMul 1 |" in output
    assert config_of(folder)["scores"]["quant_enable"] is False


@pytest.mark.parametrize(
    ("name", "inner", "message"),
    [
        ("scores", "ifmr_quantize { asymmetric: true }", "of two activations takes symmetric"),
        ("scores", "dmq_balancer { }", "dmq_balancer_param does not apply"),
        (
            "scores",
            "ifmr_quantize { dst_type: INT16 }",
            "a MatMul of two activations takes 8-bit activations, got 16 bits",
        ),
        ("scores", "arq_quantize { channel_wise: true }", "must be false for layer type MatMul"),
        ("score", "", "model once its BatchNormalization is folded; did you mean 'scores'"),
        ("soft", "", "of override_layer_configs of type Softmax cannot be quantized"),
        ("value_bias", "", "cannot be quantized, but for its inputs, by tensor_quantize"),
        ("value_bias:0", "", "does not exist in the model"),
    ],
)
def test_unsuitable_matmul_is_refused_before_observing(name, inner, message, built_matmul, no_pass):
    refused(built_matmul, named(name, inner=inner), message)


def test_common_settings_skip_activation_matmuls(built_matmul):
    """What common_config says of offsets and balancing is for layers that take it."""
    common = "common_config { ifmr_quantize { asymmetric: true } dmq_balancer { } }"
    output, folder = built_matmul(named("scores") + common)
    config = config_of(folder)
    assert config["scores"]["activation_quant_params"]["asymmetric"] is False
    assert "dmq_balancer_param" not in config["scores"]
    assert config["query"]["dmq_balancer_param"] == 0.5
    assert "4 of 8 nodes int8" in output
    _, folder = built_matmul(named("scores", inner="ifmr_quantize { search_step: 0.1 }") + common)
    activation_params = config_of(folder)["scores"]["activation_quant_params"]
    assert activation_params["asymmetric"] is False
    assert activation_params["search_step"] == 0.1


def test_matmul_files_check_and_deploy(shared_build, command, files, tmp_path):
    ops = check_and_deploy(
        command, shared_build("matmuls")[1], files, 5, ("", ""), tmp_path / "again"
    )
    assert ops["scores"]["attr"][0]["value"]["list"]["s"] == ["scores"]


def test_three_dimensional_weight_has_one_scale(shared_build, files):
    _, folder = shared_build("plain")
    records = records_of(folder)
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


def test_dmq_balances_rows_of_matrices(built_matmul, files):
    balanced = "layer_type: 'MatMul' calibration_config { dmq_balancer { } }"
    _, folder = built_matmul(f"batch_num: 4 override_layer_types {{ {balanced} }}")
    factors = records_of(folder)["query"].dmq_factors
    first_image_maxima = np.abs(np.load(files.with_suffix(".npy"))[0]).reshape(-1, WIDE).max(axis=0)
    (weight,) = (t for t in attention().graph.initializer if t.name == "wq")
    rows = np.abs(numpy_helper.to_array(weight)).max(axis=(0, 2))
    np.testing.assert_allclose(factors, np.sqrt(first_image_maxima / rows), rtol=1e-5)


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_matmul_integers_agree_with_floats(heads, rows, inner, columns, computed, seed):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(heads, inner, columns)).astype(np.float32)
    inputs = {"x": [2, heads, rows, inner]} | ({"w": [*weight.shape]} if computed else {})
    constants = {} if computed else {"w": weight}
    model = build_net([("MatMul", "x w", "y", "mm")], inputs, {"y": None}, constants)
    layers = find_layers(model)
    config = keys.QuantConfig(layers={"mm": keys.LayerConfig()})
    feed = {"x": rng.normal(size=(2, heads, rows, inner)).astype(np.float32)}
    feed |= {"w": weight} if computed else {}
    calibration = calibrate_amct(model, layers, [feed], resolve_config(config, layers))
    quantized = quantize_layers(model, layers, calibration.records)
    assert compare_deploy_model(model, quantized, [feed], threads=1).max_npu_difference <= 1e-6
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
def test_float_matrix_matmul_is_optional(op, shape, kind, offered):
    inputs = dict.fromkeys("ab", (kind, shape))
    layers = find_layers(build_net([(op, "a b", "y", "m")], inputs, {"y": (kind, None)}, opset=17))
    assert list(layers.optional_layers) == ["m"] * offered
    assert "m" in layers.float_reasons


def test_vector_matmul_stays_float():
    values, weights = {"x": [4]}, {"w": np.ones((4, 3), np.float32)}
    model = build_net([("MatMul", "x w", "y", "m")], values, {"y": [3]}, weights, opset=17)
    assert find_layers(model).float_reasons == {
        "m": "a MatMul's input must be 2-D or more, got 1-D"
    }


def test_a_configuration_says_what_is_float(files, run, tmp_path):
    config = tmp_path / "my.cfg"
    config.write_text(named("scores"))
    out = run.ok("ascend", "config", files, "--from", config, "-o", tmp_path / "c.json")
    assert "4 of 4 layers in int8" in out
    assert "float  context: neither factor" in out
    assert "float  scores" not in out
    model = attention()
    model.graph.initializer[0].dims.insert(0, 1)
    onnx.save(model, tmp_path / "four.onnx")
    out = run.ok("ascend", "config", tmp_path / "four.onnx", "-o", tmp_path / "c.json")
    assert "a MatMul weight must be 2-D or 3-D, got 4-D" in out


@pytest.mark.parametrize("strategy", ["gain", "binary-search"])
def test_auto_ranks_activation_matmuls_with_layers(strategy, auto, files, tmp_path):
    text = named("scores", "context")
    output, config = auto(files, files.with_suffix(".npy"), text, strategy)
    assert "5 layers in int8" in output
    names = ("query", "key", "scores", "value", "context")
    int8_layers = {name for name in names if config[name]["quant_enable"]}
    assert set(records_of(tmp_path / "o")) == int8_layers
    assert 0 < len(int8_layers) < 5
