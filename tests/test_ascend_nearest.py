"""What `calib8 ascend auto` does before a layer goes to float: own searches, DMQ, biases."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import calibrate
from deploy.targets.ascend.auto_layers import config_of, corrected_biases, with_biases
from deploy.targets.ascend.auto_losses import FINAL, _best, nearest, own_errors
from deploy.targets.ascend.config import default_config, read_config
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import find_layers, name_nodes
from deploy.targets.ascend.quant_layer import quantize_layers

SIZES = np.logspace(0, 2.5, 8)  # how much larger a channel is than the first


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A depthwise layer whose channels differ 300 times, without a bias, and layers behind it."""
    rng = np.random.default_rng(3)

    def tensor(name, *shape, spread=1.0):
        values = rng.normal(scale=spread, size=shape).astype(np.float32)
        return numpy_helper.from_array(values, name)

    small = (1 / SIZES).reshape(8, 1, 1, 1).astype(np.float32)
    weights = [
        numpy_helper.from_array(np.float32(rng.normal(size=(8, 1, 3, 3))) * small, "w1"),
        tensor("w2", 6, 8, 1, 1), tensor("shared", 6), tensor("w3", 6, 6, 1, 1),
        tensor("w4", 150, 5, spread=0.1), tensor("b4", 5),
    ]  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["d"], name="dw", group=8),
        helper.make_node("HardSwish", ["d"], ["h"]),
        helper.make_node("Conv", ["h", "w2", "shared"], ["c2"], name="one"),
        helper.make_node("HardSwish", ["c2"], ["h2"]),
        helper.make_node("Conv", ["h2", "w3", "shared"], ["c3"], name="two"),
        helper.make_node("MaxPool", ["c3"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w4"], ["m"], name="mat"),
        helper.make_node("Add", ["b4", "m"], ["y"], name="add"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "uneven",
        [value("x", TensorProto.FLOAT, ["n", 8, 12, 12])],
        [value("y", TensorProto.FLOAT, ["n", 5])],
        weights,
    )
    opsets = [helper.make_opsetid("", 14)]
    path = tmp_path_factory.mktemp("uneven") / "uneven.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    rng = np.random.default_rng(5)
    x = np.abs(rng.normal(size=(12, 8, 12, 12))) * SIZES.reshape(1, 8, 1, 1)
    path = tmp_path_factory.mktemp("images") / "x.npy"
    np.save(path, x.astype(np.float32))
    return path


@pytest.fixture(scope="module")
def parts(uneven, images):
    """(model, its layers, records by search, samples)."""
    model = name_nodes(onnx.load(uneven))
    graph = find_layers(model)
    samples = [{"x": row[None]} for row in np.load(images)]
    config = default_config(graph, batch_num=len(samples))

    def records(search):
        own = config_of(config, dict.fromkeys(graph.layers, search))
        return calibrate(model, graph, samples, own).records

    found = {search: records(search) for search in ("as configured", "hfmg", "dmq 0.5")}
    return model, graph, found, samples


def test_a_depthwise_layer_of_uneven_channels_is_balanced(parts):
    model, graph, records, samples = parts
    chosen = nearest(model, graph, records, samples[:4], threads=2)
    assert list(chosen) == list(graph.layers)
    assert chosen["dw"] == "dmq 0.5"  # each channel keeps its weights' steps, and wins input's
    errors = own_errors(
        model, quantize_layers(model, graph, records["dmq 0.5"]), samples[:4], threads=1
    )
    plain = quantize_layers(model, graph, records["as configured"])
    assert errors["dw"] < 0.1 * own_errors(model, plain, samples[:4], threads=1)["dw"]


def test_dmq_must_halve_the_error_as_it_costs_an_operator():
    assert _best({"as configured": 1.0, "hfmg": 0.9, "dmq 0.5": 0.5}) == "hfmg"
    assert _best({"as configured": 1.0, "hfmg": 0.9, "dmq 0.5": 0.44}) == "dmq 0.5"
    assert _best({"as configured": 1.0, "hfmg": 1.0}) == "as configured"


def channel_means(model, samples, tensors):
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.output[:]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    session = OrtSession.open(made, threads=1)
    runs = [session.run(sample) for sample in samples]
    rows = {t: np.concatenate([np.moveaxis(run[t], 1, -1) for run in runs]) for t in tensors}
    return {t: value.reshape(-1, value.shape[-1]).mean(axis=0) for t, value in rows.items()}


def test_corrected_layers_keep_the_means_of_their_channels(parts):
    """Behind each other too, with a bias, without one, with a shared one, and in an Add."""
    model, graph, records, samples = parts
    own = records["as configured"]
    biases = corrected_biases(model, graph, own, samples, threads=2)
    assert list(biases) == ["dw", "one", "two", "mat"] and biases["dw"].shape == (8,)
    changed = with_biases(model, graph, biases)
    onnx.checker.check_model(changed)
    tensors = ["d", "c2", "c3", "y"]
    wanted = channel_means(model, samples, tensors)

    def moved(form):
        layers = quantize_layers(form, find_layers(form), own)
        found = channel_means(fake_quant_model(form, layers), samples, tensors)
        return {t: np.abs(found[t] - wanted[t]).max() for t in tensors}

    before, after = moved(model), moved(changed)
    assert all(after[t] < 0.3 * before[t] for t in tensors), (before, after)
    alone = corrected_biases(model, graph, own, samples, threads=1)
    assert all((alone[name] == one).all() for name, one in biases.items())


def auto(run, model, images, out, *words):
    return run("ascend", "auto", model, "--images", images, "-o", out, *words)


def test_the_command_balances_and_corrects_before_it_leaves_a_layer(run, uneven, images, tmp_path):
    code, said, err = auto(run, uneven, images, tmp_path, "--max-loss", "1e-4")
    assert code == 0, err
    assert "4 layers in int8, 0 in float" in said
    assert "DMQ balances 1 layers, with a multiplication more in front of each, by the" in said
    assert "largest values of 12 images." in said
    assert "biases of 4 layers are corrected" in said and "uneven_corrected.onnx" in said
    layers = read_config((tmp_path / FINAL).read_text()).layers
    assert layers["dw"].dmq_balancer_param and not layers["one"].dmq_balancer_param
    deployed = onnx.load(tmp_path / "uneven_deploy_model.onnx")
    assert [n.name for n in deployed.graph.node if n.op_type == "Mul"] == ["dw.mul"]


def test_the_corrected_model_and_the_record_are_what_was_judged(run, uneven, images, tmp_path):
    assert auto(run, uneven, images, tmp_path, "--max-loss", "1e-4")[0] == 0
    words = (tmp_path / "uneven_corrected.onnx", tmp_path / "uneven_record.txt")
    code, _, err = run("ascend", "deploy", *words, "-o", tmp_path / "again")
    assert code == 0, err
    first = onnx.load(tmp_path / "uneven_fake_quant_model.onnx")
    second = onnx.load(tmp_path / "again" / "uneven_corrected_fake_quant_model.onnx")
    samples = [{"x": row[None]} for row in np.load(images)]
    for sample in samples:
        a, b = (OrtSession.open(m, threads=1).run(sample)["y"] for m in (first, second))
        np.testing.assert_array_equal(a, b)


def test_a_budget_that_holds_at_once_changes_neither(run, uneven, images, tmp_path):
    code, said, err = auto(run, uneven, images, tmp_path, "--max-loss", "0.5")
    assert code == 0, err
    assert "corrected" not in said and "DMQ" not in said
    assert not (tmp_path / "uneven_corrected.onnx").exists()


def test_a_batch_that_is_given_is_that_of_dmq(run, uneven, images, tmp_path):
    code, said, err = auto(run, uneven, images, tmp_path, "--max-loss", "1e-4", "--amct-batch", 3)
    assert code == 0, err
    assert "largest values of 3 images." in said
    assert read_config((tmp_path / FINAL).read_text()).batch_num == 4
