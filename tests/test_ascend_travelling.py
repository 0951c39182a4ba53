"""The folder of an Ascend build on another machine: what its parser reads, what it tells."""

import json
import subprocess
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.targets.ascend.atc import stripped

SECRET = "/home/someone/secret/train.py"


def tensor(name, *shape):
    values = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return numpy_helper.from_array(np.abs(values) if name.endswith("v") else values, name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Conv+BN, LayerNormalization, Conv+BN, MatMul+Add at opset 20, telling of its exporter."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c1", *(f"n1{k}" for k in "gbmv")], ["b1"]),
        helper.make_node("Relu", ["b1"], ["r1"], name="relu1"),
        helper.make_node("LayerNormalization", ["r1", "lg"], ["l1"], name="norm", axis=-1),
        helper.make_node("Conv", ["l1", "w2"], ["c2"], name="conv2", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c2", *(f"n2{k}" for k in "gbmv")], ["b2"], "bn2"),
        helper.make_node("Flatten", ["b2"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "w3"], ["m"], name="fc"),
        helper.make_node("Add", ["m", "bias"], ["y"], name="plus"),
    ]
    weights = [tensor("w1", 4, 3, 3, 3), tensor("w2", 4, 4, 3, 3), tensor("w3", 256, 10)]
    weights += [tensor(f"n{n}{k}", 4) for n in "12" for k in "gbmv"]
    weights += [tensor("lg", 8), tensor("bias", 10)]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    made.metadata_props.add(key="author", value=SECRET)
    for node in made.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=SECRET)
        node.doc_string = SECRET
    made.graph.initializer[0].doc_string = SECRET
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    onnx.save(made, path)
    np.save(
        path.with_suffix(".npy"), np.float32(np.random.default_rng(0).normal(size=(6, 3, 8, 8)))
    )
    return path


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """One build, for all that only reads it."""
    from deploy.pipeline import build
    from deploy.targets import Ascend
    from deploy.tuning.search_options import Tuning

    out = tmp_path_factory.mktemp("built")
    build(
        model,
        model.with_suffix(".npy"),
        out=out,
        targets=[Ascend(soc="Ascend310P3")],
        duration_s=0,
        tuning=Tuning(effort=0),
    )
    return out


@pytest.mark.parametrize(("cann", "opset", "ir"), [("5.0", 13, 7), ("7.0", 18, 8), ("8.2", 18, 8)])
def test_models_are_written_for_the_cann_that_is_named(cann, opset, ir, model, tmp_path, run):
    words = ("--images", model.with_suffix(".npy"), "--target", "ascend", "--out", tmp_path)
    code, _, err = run("build", model, *words, "--cann", cann, "--effort", 0, "--duration", 0)
    assert code == 0, err
    for ending in ("deploy_model", "amct_qdq"):
        made = onnx.load(tmp_path / f"net_{ending}.onnx")
        assert (made.opset_import[0].version, made.ir_version) == (opset, ir)
        types = Counter(node.op_type for node in made.graph.node)
        assert types["LayerNormalization"] == (0 if opset < 17 else 1)
    assert f"CANN {cann} or newer" in (tmp_path / "net_README.txt").read_text()


def test_an_older_opset_computes_the_same(model, folder, tmp_path, run):
    from deploy.targets.ascend.executor import open_deploy

    words = ("--images", model.with_suffix(".npy"), "--target", "ascend", "--out", tmp_path)
    run("build", model, *words, "--cann", "5.0", "--effort", 0, "--duration", 0)
    x = {"x": np.float32(np.random.default_rng(3).normal(size=(1, 3, 8, 8)))}
    old, new = (
        open_deploy(onnx.load(where / "net_deploy_model.onnx")).run(x)["y"]
        for where in (tmp_path, folder)
    )
    np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-5)
    record = "net_record.txt"
    assert (tmp_path / record).read_text() == (folder / record).read_text()


def test_nothing_of_the_exporter_leaves_with_the_files(model, folder):
    assert SECRET.encode() in model.read_bytes()
    for path in folder.glob("net_*"):
        assert SECRET.encode() not in path.read_bytes(), path.name


def test_stripping_changes_nothing_else(model):
    made, plain = onnx.load(model), stripped(onnx.load(model))
    assert [n.output for n in made.graph.node] == [n.output for n in plain.graph.node]
    assert made.graph.initializer[1] == plain.graph.initializer[1]
    assert stripped(plain) == plain and made.metadata_props and not plain.metadata_props


def entries(path):
    """Node of the deploy model -> its entry, as CANN's comparison reads them."""
    (graph,) = json.loads(path.read_text())["graph"]
    return {entry["name"]: entry for entry in graph["op"]}


def value(entry, key):
    (found,) = [a["value"] for a in entry["attr"] if a["key"] == f"_datadump_{key}"]
    return found


def test_the_mapping_tells_what_every_node_stands_for(folder):
    known = entries(folder / "net_quant.json")
    originals = {
        name: value(e, "original_op_names")["list"].get("s", []) for name, e in known.items()
    }
    assert originals["conv1"] == originals["conv1.dequant"] == ["conv1", "BatchNormalization_1"]
    assert originals["conv2.dequant"] == ["conv2", "bn2"]
    assert originals["conv1.quant"] == [] and originals["relu1"] == ["relu1"]
    assert originals["fc"] == ["fc"] and originals["fc.dequant"] == ["plus"]
    outputs = {
        name: [(value(d, "origin_name")["s"], value(d, "origin_output_index")["i"]) for d in shown]
        for name, shown in ((name, entry["output_desc"]) for name, entry in known.items())
    }
    assert outputs["conv1.dequant"] == [("BatchNormalization_1", 0)] and outputs["conv1"] == []
    assert outputs["fc.dequant"] == [("plus", 0)] and outputs["x"] == [("x", 0)]


def test_the_mapping_holds_every_node_once_and_its_edges(folder):
    deploy = onnx.load(folder / "net_deploy_model.onnx")
    known = entries(folder / "net_quant.json")
    moving = {node.name for node in deploy.graph.node if node.op_type != "Constant"}
    assert set(known) == {"x", *moving}
    assert known["conv1.quant"]["input"] == ["x:0"]
    assert known["conv1.dequant"]["input"] == ["conv1:0"]
    assert {edge.rpartition(":")[0] for e in known.values() for edge in e["input"]} <= set(known)


def test_the_readme_has_the_three_commands_and_every_file(folder):
    text = (folder / "net_README.txt").read_text()
    for words in ("sh net_atc.sh", "ais_bench --model net.om", "-om net.om -q net_quant.json"):
        assert words in text
    names = {path.name for path in folder.glob("net_*")} - {"net_README.txt"}
    assert all(name in text for name in names) and "Ascend310P3" in text
    done = subprocess.run(["sh", "-n", folder / "net_atc.sh"], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_flag_s_file_that_stays_behind_is_told(model, tmp_path, run):
    (tmp_path / "switch.cfg").write_text("{}")
    words = ("--images", model.with_suffix(".npy"), "--target", "ascend", "--out", tmp_path / "b")
    flag = f"--atc-flag=--fusion_switch_file={tmp_path / 'switch.cfg'}"
    code, _, err = run("build", model, *words, flag, "--effort", 0, "--duration", 0)
    assert code == 0, err
    assert "take it along" in (tmp_path / "b" / "net_README.txt").read_text()
