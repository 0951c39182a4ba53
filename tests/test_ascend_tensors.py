"""tensor_quantize by the command: inputs of an Add or MaxPool in int8, the node itself in float."""

import json
from contextlib import nullcontext

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calibrators.amct.hfmg import HfmgHistogram, HfmgParams, hfmg
from calibrators.amct.ifmr import IfmrParams, ifmr
from deploy.errors import ModelError
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import calibrate
from deploy.targets.ascend.config import settled
from deploy.targets.ascend.config_keys import Activation, QuantConfig, TensorConfig
from deploy.targets.ascend.deploy_model import deploy_model
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import read_record

DATA = np.random.default_rng(0).normal(size=(6, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def built(small_cnn, tmp_path, run):
    """Configuration text -> what was said, and the folder."""
    np.save(tmp_path / "images.npy", DATA)

    def build(text, *more, suffix=".cfg", code=0, out="o"):
        config = tmp_path / f"my{suffix}"
        config.write_text(text)
        found, said, err = run(
            "build", small_cnn, "--images", tmp_path / "images.npy", "--target", "ascend",
            "--effort", 0, "--duration", 0, "--out", tmp_path / out, "--ascend-config", config,
            *more,
        )  # fmt: skip
        assert found == code, err
        return " ".join((said + err).split()), tmp_path / out

    return build


def tensor(name, index, inner=""):
    return f'tensor_quantize {{ layer_name: "{name}" input_index: {index} {inner} }}\n'


BOTH = "batch_num: 6\n" + tensor("Add_a", 1) + tensor("MaxPool_p", 0, "hfmg_quantize { }")


@pytest.fixture(scope="module")
def kept():
    """What `both` gave, for the tests after the first."""
    return {}


@pytest.fixture
def both(built, kept):
    """What is said of `BOTH`, and the folder; built once."""
    if not kept:
        kept["both"] = built(BOTH)
    return kept["both"]


def nodes_of(path):
    return {node.name: node for node in onnx.load(path).graph.node}


def test_the_inputs_named_are_quantized_and_their_nodes_are_float(both):
    said, folder = both
    assert "4 of 10 nodes int8" in said and "within 0 of the fake-quant model" in said
    assert (
        "Add (Add_a): it computes in float; by tensor_quantize its input is moved in int8" in said
    )
    nodes = nodes_of(folder / "small_cnn_deploy_model.onnx")
    for name, place in (("Add_a.1", 1), ("MaxPool_p.0", 0)):
        back = nodes[f"{name}.anti_quant"]
        assert back.op_type == "AscendAntiQuant"
        assert nodes[name[:-2]].input[place] == back.output[0]
        (quant,) = (n for n in nodes.values() if n.output[0] == back.input[0])
        given_ = {a.name: helper.get_attribute_value(a) for a in quant.attribute}
        taken = {a.name: helper.get_attribute_value(a) for a in back.attribute}
        assert taken["offset"] == given_["offset"] and taken["dtype"] == 0
        assert taken["scale"] == pytest.approx(1 / given_["scale"], rel=1e-6)


def test_a_record_says_them_as_amcts_does(both):
    _, folder = both
    text = (folder / "small_cnn_record.txt").read_text()
    assert not (folder / "small_cnn_modified_model.onnx").exists()  # AMCT takes the model as it is
    assert text.count("is_tensor_quantize: true") == 2
    records = read_record(text)
    assert [n for n, r in records.items() if r.tensor] == ["Add_a:1", "MaxPool_p:0"]
    assert records["Add_a:1"].scale_w.size == 0


def test_readers_that_agree_on_the_scale_share_one_ascendquant(built):
    """Conv_c2 and the Add read r1 and are searched alike; with another search each has its own."""
    for inner, nodes in (("", 4), ("hfmg_quantize { }", 5)):
        _, folder = built("batch_num: 6\n" + tensor("Add_a", 1, inner), out=f"o{nodes}")
        made = onnx.load(folder / "small_cnn_deploy_model.onnx").graph.node
        assert sum(node.op_type == "AscendQuant" for node in made) == nodes


def test_the_scales_are_those_of_the_searches(small_cnn, built):
    """On the values of the model whose weights are fake-quantized, as layers are searched."""
    text = (
        "batch_num: 6\n"
        + tensor("Add_a", 0, "ifmr_quantize { search_range_start: 0.9 max_percentile: 0.99 }")
        + tensor("MaxPool_p", 0, "hfmg_quantize { num_of_bins: 1024 asymmetric: false }")
    )
    _, folder = built(text, "--exact-ifmr")
    records = read_record((folder / "small_cnn_record.txt").read_text())
    fake = onnx.load(small_cnn)
    for held in fake.graph.initializer:  # ARQ, a scale a channel in Convs and one in the Gemm
        name = {"w1": "Conv_c1", "w2": "Conv_c2", "w3": "Conv_c3"}.get(held.name)
        if name:
            value = numpy_helper.to_array(held)
            scale = records[name].scale_w.reshape(-1, 1, 1, 1)
            held.CopyFrom(numpy_helper.from_array(np.rint(value / scale) * scale, held.name))
    for name in ("c2", "r3"):
        fake.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    session = OrtSession.open(fake.SerializeToString(), threads=1)
    seen = [session.run({"x": image[None]}) for image in DATA]
    params = IfmrParams(search_range=(0.9, 1.3), max_percentile=0.99, with_offset=True)
    wanted = ifmr(np.concatenate([one["c2"].ravel() for one in seen]), params)
    assert records["Add_a:0"].offset_d == wanted.offset
    assert records["Add_a:0"].scale_d == pytest.approx(wanted.scale, rel=1e-5)
    histogram = HfmgHistogram(1024)
    for one in seen:
        histogram.observe(one["r3"])
    wanted = hfmg(histogram, HfmgParams(nbins=1024, with_offset=False))
    assert records["MaxPool_p:0"].offset_d == 0 == wanted.offset
    assert records["MaxPool_p:0"].scale_d == pytest.approx(wanted.scale, rel=1e-5)


def test_both_configurations_say_the_same(built, run, small_cnn, tmp_path):
    """cfg -> build -> its JSON, in AMCT's place and order -> build: the same bytes."""
    _, folder = built(BOTH + "common_config { ifmr_quantize { asymmetric: false } }")
    text = (folder / "small_cnn_config.json").read_text()
    config = json.loads(text)
    assert list(config)[5] == "tensor_quantize" and list(config)[6] == "Conv_c1"
    first, second = config["tensor_quantize"]
    assert list(first) == ["layer_name", "input_index", "activation_quant_params"]
    assert first["activation_quant_params"]["asymmetric"] is False  # common_config, also of IFMR
    assert second["activation_quant_params"]["asymmetric"] is True  # activation_offset
    assert second["activation_quant_params"]["num_of_bins"] == 4096
    _, again = built(text, suffix=".json", out="again")
    for name in ("config.json", "record.txt", "deploy_model.onnx", "fake_quant_model.onnx"):
        made = [(one / f"small_cnn_{name}").read_bytes() for one in (folder, again)]
        assert made[0] == made[1], name
    simple = tmp_path / "again.cfg"
    code, out, _ = run(
        "ascend", "config", small_cnn, "--from", folder / "small_cnn_config.json", "-o", simple
    )
    assert code == 0 and "4 of 4 layers in int8, 2 inputs moved in int8" in out
    _, third = built(simple.read_text(), out="third")
    made = [(one / "small_cnn_config.json").read_bytes() for one in (folder, third)]
    assert made[0] == made[1]


def test_layers_may_all_be_skipped(built):
    """Inputs alone are enough to quantize; the executor and the check take such a model too."""
    said, folder = built(BOTH + 'skip_layer_types: "Conv" skip_layer_types: "Gemm"')
    assert "0 of 10 nodes int8" in said and "within 0 of the fake-quant model" in said
    assert set(read_record((folder / "small_cnn_record.txt").read_text())) == {
        "Add_a:1",
        "MaxPool_p:0",
    }


def test_keep_float_of_the_node_takes_its_inputs_out(built):
    _, folder = built(BOTH, "--keep-float", "Add_a")
    assert list(json.loads((folder / "small_cnn_config.json").read_text()))[5] == "tensor_quantize"
    records = read_record((folder / "small_cnn_record.txt").read_text())
    assert "Add_a:1" not in records and "MaxPool_p:0" in records


def test_a_cache_of_the_layers_serves_them_too(built, tmp_path):
    """Inputs that no layer reads are observed in addition, in the same form of the model."""
    cache = ("--cache", tmp_path / "kept.cache")
    built("batch_num: 6", *cache)
    said, _ = built("batch_num: 6\n" + tensor("Add_a", 1), *cache, out="second")
    assert "reused" in said and "in part" not in said  # r1 is what Conv_c2 reads
    said, _ = built("batch_num: 6\n" + tensor("Add_a", 0), *cache, out="third")
    assert "reused in part" in said and "lacks 1 observations" in said


@pytest.mark.parametrize("attribute", ["scale", "dtype"])
def test_a_deploy_model_without_the_scale_of_its_antiquant_is_not_run(both, attribute):
    model = onnx.load(both[1] / "small_cnn_deploy_model.onnx")
    (back,) = (node for node in model.graph.node if node.name == "Add_a.1.anti_quant")
    kept = [one for one in back.attribute if one.name != attribute]
    del back.attribute[:]
    back.attribute.extend(kept)
    expected = pytest.raises(ModelError, match="must have a scale")
    with expected if attribute == "scale" else nullcontext():
        open_deploy(model)


def test_check_deploy_and_the_mapping_follow(both, run, small_cnn, tmp_path):
    _, folder = both
    for ending, said in (
        ("record.txt", "a sound record of 4 layers and 2 inputs of tensor_quantize"),
        ("config.json", "a sound quant config, 4 layers in int8, 2 inputs moved in int8"),
        ("deploy_model.onnx", "a sound deploy model, 4 layers in int8, 2 inputs moved in int8"),
    ):
        more = () if ending.endswith("onnx") else ("--model", small_cnn)
        code, out, err = run("ascend", "check", folder / f"small_cnn_{ending}", *more)
        assert code == 0 and said in out, err
    mapping = json.loads((folder / "small_cnn_quant.json").read_text())
    ops = {op["name"]: op for op in mapping["graph"][0]["op"]}
    assert ops["Add_a"]["input"] == ["Conv_c2.dequant:0", "Add_a.1.anti_quant:0"]
    assert ops["Add_a"]["attr"][0]["value"]["list"]["s"] == ["Add_a"]
    assert ops["Add_a.1.anti_quant"]["attr"][0]["value"]["list"] == {}
    again = tmp_path / "again"
    code, out, err = run(
        "ascend", "deploy", small_cnn, folder / "small_cnn_record.txt", "-o", again,
        "--ascend-config", folder / "small_cnn_config.json",
    )  # fmt: skip
    assert code == 0, err
    for name in ("deploy_model.onnx", "fake_quant_model.onnx", "record.txt", "config.json"):
        made = [(one / f"small_cnn_{name}").read_bytes() for one in (folder, again)]
        assert made[0] == made[1], name


def test_the_qdq_model_has_pairs_on_adds_alone(both):
    """AMCT's `convert` takes these; of a MaxPool's it knows nothing."""
    nodes = nodes_of(both[1] / "small_cnn_amct_qdq.onnx")
    assert list(nodes["Add_a"].input) == ["c2", nodes["Conv_c2"].input[0]]
    assert nodes["Conv_c2"].input[0] == "Conv_c2.input.dequantized"
    assert nodes["MaxPool_p"].input[0] == "r3"


def test_an_input_taken_out_of_the_record_is_not_deployed(both, run, small_cnn, tmp_path):
    _, folder = both
    text = (folder / "small_cnn_record.txt").read_text()
    before, mark, _ = text.partition('record {\n  key: "MaxPool_p:0"')
    assert mark
    record, again = tmp_path / "less.txt", tmp_path / "again"
    record.write_text(before)
    code, _, err = run(
        "ascend", "deploy", small_cnn, record, "-o", again, "--ascend-config",
        folder / "small_cnn_config.json",
    )  # fmt: skip
    assert code == 0, err
    config = json.loads((again / "small_cnn_config.json").read_text())
    assert [one["layer_name"] for one in config["tensor_quantize"]] == ["Add_a"]
    assert "MaxPool_p.0.anti_quant" not in nodes_of(again / "small_cnn_deploy_model.onnx")


EDITS = {
    "no such input": ('"Add_a:1"', '"Add_a:2"', "must be below 2, got 2"),
    "no such node": ('"Add_a:1"', '"Add_b:1"', "did you mean 'Add_a'"),
    "of a layer": ('"Add_a:1"', '"Conv_c9"', "must be of an input, '<layer>:<index>', got"),
    "no flag": ("    is_tensor_quantize: true\n", "", "must hold is_tensor_quantize: true"),
    "a weight": ("is_tensor_quantize", "scale_w: 2 offset_w: 0 is_tensor_quantize", "no scale_w"),
}


@pytest.mark.parametrize("key", EDITS)
def test_a_record_of_an_input_that_is_wrong_is_refused(key, both, run, small_cnn, tmp_path):
    old, new, said = EDITS[key]
    _, folder = both
    text = (folder / "small_cnn_record.txt").read_text()
    assert old in text
    record = tmp_path / "edited.txt"
    record.write_text(text.replace(old, new, 1))
    code, _, err = run("ascend", "deploy", small_cnn, record, "-o", tmp_path / "again")
    assert code == 1 and said in " ".join(err.split()) and "Traceback" not in err


WRONG = {
    "no such node": (tensor("Add_b", 0), "of tensor_quantize does not exist in the model; did you"),
    "another type": (tensor("Conv_c2", 0), "inputs of Add and MaxPool, got 'Conv_c2' of type Conv"),
    "no such input": (tensor("Add_a", 2), "of type Add, must be below 2, got 2"),
    "one input only": (tensor("MaxPool_p", 1), "of type MaxPool, must be below 1, got 1"),
    "twice": (tensor("Add_a", 0) + tensor("Add_a", 0), "each input once, got 'Add_a:0' again"),
    "16 bits": (tensor("Add_a", 0, "ifmr_quantize { dst_type: INT16 }"), "8-bit, got 16 bits"),
    "a wrong value": (
        tensor("Add_a", 0, "hfmg_quantize { num_of_bins: 7 }"),
        "num_of_bins must be one of [1024, 2048, 4096, 8192], got 7 (in tensor_quantize of 'Add_a'",
    ),
    "a wrong key": (
        tensor("Add_a", 0, "kl_quantize { }"),
        "no key 'kl_quantize' in TensorQuantize",
    ),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_does_not_fit_is_told_before_any_pass(key, built, monkeypatch):
    monkeypatch.setattr("deploy.pipeline.observing.observe", lambda *a, **k: pytest.fail("a pass"))
    text, said = WRONG[key]
    err, folder = built(text, code=1)
    assert said in err and err.count("calib8: error") == 1 and "Traceback" not in err
    assert not (folder / "small_cnn_config.json").exists()


WRONG_JSON = {
    "no object": ({"Add_a": 1}, "tensor_quantize must be of type list"),
    "no index": ([{"layer_name": "Add_a"}], "each tensor_quantize must hold input_index"),
    "no name": ([{"input_index": 0}], "each tensor_quantize must hold layer_name"),
    "half": ([{"layer_name": "Add_a", "input_index": 0.5}], "input_index must be of type int"),
    "below 0": ([{"layer_name": "Add_a", "input_index": -1}], "input_index must be >= 0, got -1"),
    "a number": ([{"layer_name": 3, "input_index": 0}], "layer_name must be of type str"),
    "a wrong key": (
        [{"layer_name": "Add_a", "input_index": 0, "activation": {}}],
        "unknown key 'activation' in tensor_quantize; did you mean 'activation_quant_params'",
    ),
    "two algorithms": (
        [{"layer_name": "Add_a", "input_index": 0,
          "activation_quant_params": {"act_algo": "hfmg", "search_step": 0.1}}],
        "does not take keys of the other algorithm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG_JSON)
def test_a_quant_config_that_does_not_fit_is_told_before_any_pass(key, built, monkeypatch):
    monkeypatch.setattr("deploy.pipeline.observing.observe", lambda *a, **k: pytest.fail("a pass"))
    value, said = WRONG_JSON[key]
    text = json.dumps({"version": 1, "tensor_quantize": value, "Conv_c1": {}})
    err, folder = built(text, suffix=".json", code=1)
    assert said in err and err.count("calib8: error") == 1 and "Traceback" not in err
    assert not (folder / "small_cnn_config.json").exists()


@pytest.mark.parametrize("strategy", ["gain", "binary-search"])
def test_auto_may_leave_them_in_float(strategy, built, run, small_cnn, tmp_path):
    """What it leaves in float is neither in the record nor in the final configuration."""
    np.save(tmp_path / "images.npy", DATA)
    config = tmp_path / "my.cfg"
    config.write_text(BOTH)
    code, _, err = run(
        "ascend", "auto", small_cnn, "--images", tmp_path / "images.npy", "--max-loss", 0.0001,
        "--ascend-config", config, "--strategy", strategy, "-o", tmp_path / "o",
    )  # fmt: skip
    assert code == 0, err
    name = "accuracy_based_auto_calibration_{}.json"
    found = json.loads((tmp_path / "o" / name.format("final_config")).read_text())
    ranked = json.loads((tmp_path / "o" / name.format("ranking_information")).read_text())
    assert {"Add_a:1", "MaxPool_p:0"} <= {one for one, _ in ranked}
    records = read_record((tmp_path / "o" / "small_cnn_record.txt").read_text())
    asked = found.get("tensor_quantize", [])
    keys = {f"{one['layer_name']}:{one['input_index']}" for one in asked}
    assert keys == {key for key, one in records.items() if one.tensor}
    assert 0 < len(records) < 6


def test_constants_integers_and_biases_are_told(tmp_path, run):
    """What an Add is not to have quantized, each with its reason."""

    def value(name, *shape):
        return numpy_helper.from_array(np.ones(shape, np.float32), name)

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="mm"),
        helper.make_node("Add", ["m", "b"], ["a"], name="bias"),
        helper.make_node("Add", ["a", "c"], ["d"], name="shift"),
        helper.make_node("Cast", ["x"], ["s"], name="whole", to=TensorProto.INT64),
        helper.make_node("Add", ["s", "s"], ["t"], name="sizes"),
        helper.make_node("Relu", ["d"], ["y"], name="relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("t", TensorProto.INT64, None),
        ],
        [value("w", 4, 4), value("b", 4), value("c", 2, 1)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(made, tmp_path / "g.onnx")
    config = tmp_path / "my.cfg"
    for name, index, why in (
        ("bias", 0, "this Add is the bias of 'mm'"),
        ("shift", 1, "it is a constant"),
        ("sizes", 0, "it is not float32"),
    ):
        config.write_text(tensor(name, index))
        words = ("--from", config, "-o", tmp_path / "out.json")
        code, _, err = run("ascend", "config", tmp_path / "g.onnx", *words)
        said = f"input {index} of {name!r} cannot be quantized: {why}"
        assert code == 1 and said in " ".join(err.split()), err


@settings(max_examples=20)
@given(
    st.sampled_from(["Add", "MaxPool"]), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
@example(op="Add", both=False, asymmetric=False, padded=False, seed=532492818)
def test_integers_and_floats_agree(op, both, asymmetric, padded, seed):
    """The executor's codes are within half a step of the input, and the fake-quant model's own.

    A MaxPool may have padding, which is no value of the tensor: its output is a value that is. Of a
    symmetric range that the least value gives, as its step 128, the greatest may lie above 127.
    """
    rng = np.random.default_rng(seed)
    names = ["x", "z"] if op == "Add" else ["x"]
    pool = {} if op == "Add" else {"kernel_shape": [2, 2], "pads": [int(padded)] * 4}
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], name="one", **pool)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 5, 4]) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    layers, act = find_layers(model), Activation(asymmetric=asymmetric, search_range=(1.0, 1.3))
    places = (0, 1) if both and op == "Add" else (0,)
    asked = [TensorConfig(layer_name="one", input_index=i, activation=act) for i in places]
    shift = -2 if seed % 2 else 0
    feed = {name: (rng.normal(size=(1, 2, 5, 4)) + shift).astype(np.float32) for name in names}
    found = calibrate(model, layers, [feed], settled(QuantConfig(tensors=tuple(asked)), layers))
    made = quantize_layers(model, layers, found.records)
    (got,) = open_deploy(deploy_model(model, made), threads=1).run(feed).values()
    twin = fake_quant_model(model, made, npu_rounding=True)
    (fake,) = OrtSession.open(twin, threads=1, optimize=False).run(feed).values()
    (real,) = OrtSession.open(model, threads=1).run(feed).values()
    np.testing.assert_array_equal(got, fake)
    scales = [float(record.scale_d) for record in found.records.values()]
    most = [0 if asymmetric else float(feed[names[place]].max()) for place in places]
    bounds = [max(0.51 * s, above - 127 * s) for s, above in zip(scales, most, strict=True)]
    assert np.abs(got - real).max() <= sum(bounds) + 1e-6
