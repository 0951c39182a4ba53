"""Layers on Ascend that share a weight: heads of a detector, two pictures through one network."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.layers import SHARED, find_layers, name_nodes
from deploy.targets.ascend.settled import planned, prepared


def two_pictures(*, tied=False) -> onnx.ModelProto:
    """Both inputs through the same Conv and Gemm; `tied`: an Add reads the Gemm's weight too."""
    rng = np.random.default_rng(5)
    nodes, ends = [], []
    for word in ("left", "right"):
        nodes += [
            helper.make_node("Conv", [word, "w", "b"], [f"{word}_c"], name=f"{word}/conv"),
            helper.make_node("Relu", [f"{word}_c"], [f"{word}_r"], name=f"{word}/relu"),
            helper.make_node("GlobalAveragePool", [f"{word}_r"], [f"{word}_p"], name=f"{word}/m"),
            helper.make_node("Flatten", [f"{word}_p"], [f"{word}_f"], name=f"{word}/flat"),
            helper.make_node("Gemm", [f"{word}_f", "v"], [f"{word}_g"], name=f"{word}/gemm"),
        ]
        ends.append(f"{word}_g")
    nodes.append(helper.make_node("Sub", ends, ["y"], name="sub"))
    if tied:
        nodes += [
            helper.make_node("ReduceMean", ["v"], ["t"], name="mean", axes=[0]),
            helper.make_node("Add", ["y", "t"], ["z"], name="add"),
        ]
    shapes = {"w": (8, 3, 3, 3), "b": (8,), "v": (8, 6)}
    held = {name: rng.normal(0, 0.4, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3, 8, 8])
            for n in ("left", "right")
        ],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["N", 6])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def computed(model, fed):
    return OrtSession.open(model, threads=1).run(fed)


def samples(count=8):
    rng = np.random.default_rng(1)
    left = rng.normal(size=(count, 3, 8, 8)).astype(np.float32)
    return {"left": left, "right": (left * 0.2).astype(np.float32)}


@pytest.mark.parametrize("effort", [0, 1])
def test_every_layer_of_one_weight_is_in_int8(run, tmp_path, effort):
    """AMCT refuses all of them; two pictures through one network were no model for Ascend."""
    model = two_pictures()
    onnx.save(model, tmp_path / "net.onnx")
    fed = samples()
    np.savez(tmp_path / "x.npz", **fed)
    words = ("--images", tmp_path / "x.npz", "--target", "ascend", "--duration", 0)
    code, out, _ = run(
        "build", tmp_path / "net.onnx", *words, "--effort", effort, "--out", tmp_path / "o"
    )
    assert code == 0
    deploy = onnx.load(tmp_path / "o" / "net_deploy_model.onnx")
    layers = [node for node in deploy.graph.node if node.op_type in ("Conv", "Gemm")]
    tensors = {tensor.name: tensor for tensor in deploy.graph.initializer}
    assert [tensors[n.input[1]].data_type for n in layers] == [TensorProto.INT8] * 4
    assert len({n.input[1] for n in layers}) == 4  # atc gets what it gets from AMCT
    wanted = computed(model, fed)
    fake = onnx.load(tmp_path / "o" / "net_fake_quant_model.onnx")
    found = computed(fake, fed)
    noise = np.square(wanted["y"] - found["y"]).mean() / np.square(wanted["y"]).mean()
    assert noise < 1e-3
    assert "share" in out and "net_modified_model.onnx" in out


def test_amct_itself_gets_a_model_whose_layers_share_nothing(run, tmp_path):
    """It refuses a configuration or a record that names a layer which shares its weight."""
    model = two_pictures()
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", **samples())
    words = ("--images", tmp_path / "x.npz", "--target", "ascend", "--effort", 0, "--duration", 0)
    assert run("build", tmp_path / "net.onnx", *words, "--out", tmp_path / "o")[0] == 0
    modified = onnx.load(tmp_path / "o" / "net_modified_model.onnx")
    config = json.loads((tmp_path / "o" / "net_config.json").read_text())
    named = {name for name, value in config.items() if isinstance(value, dict)}
    assert named == {"left/conv", "right/conv", "left/gemm", "right/gemm"}
    assert find_layers(modified).layers.keys() == named
    fed = samples(2)
    same = [computed(one, fed)["y"] for one in (model, modified)]
    np.testing.assert_array_equal(*same)


@pytest.mark.parametrize("which", ["net.onnx", "o/net_modified_model.onnx"])
def test_a_record_makes_the_same_models_again_of_either(run, tmp_path, which):
    onnx.save(two_pictures(), tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", **samples())
    words = ("--images", tmp_path / "x.npz", "--target", "ascend", "--effort", 0, "--duration", 0)
    assert run("build", tmp_path / "net.onnx", *words, "--out", tmp_path / "o")[0] == 0
    made = ("ascend", "deploy", tmp_path / which, tmp_path / "o" / "net_record.txt")
    assert run(*made, "--out", tmp_path / "again")[0] == 0
    (again,) = (tmp_path / "again").glob("*_deploy_model.onnx")
    models = [onnx.load(tmp_path / "o" / "net_deploy_model.onnx"), onnx.load(again)]
    arrays = [
        {n.name: numpy_helper.to_array(t) for n in model.graph.node for t in model.graph.initializer
         if len(n.input) > 1 and t.name == n.input[1]} for model in models
    ]  # fmt: skip
    assert arrays[0].keys() == arrays[1].keys()
    assert all(np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])


def test_what_reads_the_weight_and_is_no_layer_reads_it_in_float(run, tmp_path):
    model = two_pictures(tied=True)
    onnx.save(model, tmp_path / "net.onnx")
    fed = samples()
    np.savez(tmp_path / "x.npz", **fed)
    words = ("--images", tmp_path / "x.npz", "--target", "ascend", "--effort", 0, "--duration", 0)
    assert run("build", tmp_path / "net.onnx", *words, "--out", tmp_path / "o")[0] == 0
    fake = onnx.load(tmp_path / "o" / "net_fake_quant_model.onnx")
    wanted, found = computed(model, fed)["z"], computed(fake, fed)["z"]
    assert np.square(wanted - found).mean() < 1e-3 * np.square(wanted).mean()


def test_a_plan_speaks_of_the_weights_of_the_model_that_it_is_of():
    model = name_nodes(two_pictures())
    own, graph = prepared(model)
    held = {tensor.name for tensor in model.graph.initializer}
    assert len({layer.weight for layer in graph.layers.values()}) == 4
    assert {one.name for one in planned(model).weights} == {"w", "v"} < held
    assert len(own.graph.initializer) == len(model.graph.initializer) + 2  # one keeps what there is


def test_copies_that_would_fill_the_file_are_not_made(monkeypatch):
    """All layers of one weight stay as they are then, and say why."""
    monkeypatch.setattr("deploy.targets.ascend.settled._MOST", 4 * 2 * 8 * 6)
    _, graph = prepared(name_nodes(two_pictures()))
    assert graph.layers.keys() == {"left/gemm", "right/gemm"}
    assert {graph.refused[f"{word}/conv"] for word in ("left", "right")} == {SHARED}


def test_a_trained_model_of_pairs_keeps_its_layers_of_one_weight_in_int8(run, tmp_path):
    onnx.save(two_pictures(), tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", **samples())
    words = ("--images", tmp_path / "x.npz", "--target", "tensorrt", "--effort", 0, "--duration", 0)
    assert run("build", tmp_path / "net.onnx", *words, "--out", tmp_path / "o")[0] == 0
    paired = tmp_path / "o" / "net.tensorrt.qdq.onnx"
    assert run("ascend", "convert", paired, "--out", tmp_path / "again")[0] == 0
    (made,) = (tmp_path / "again").glob("*_deploy_model.onnx")
    ops = [node.op_type for node in onnx.load(made).graph.node]
    assert ops.count("AscendDequant") == 4
