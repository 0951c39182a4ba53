"""Models that rank their classes themselves, by TopK or ArgMax, judged by labels and without."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.tuning.plan_file import read_plan
from deploy.tuning.probe import ranked

SAMPLES = 24


@pytest.fixture(scope="module")
def ranking(small_cnn, tmp_path_factory):
    """(outputs, k) -> the small CNN with its logits ranked, which gives these outputs."""
    folder = tmp_path_factory.mktemp("ranking")

    def made(outputs, k=3):
        model = onnx.load(small_cnn)
        graph = model.graph
        graph.initializer.append(numpy_helper.from_array(np.array([k], np.int64), "k"))
        graph.node.extend(
            [
                helper.make_node("TopK", ["logits", "k"], ["values", "places"], name="rank"),
                helper.make_node("ArgMax", ["logits"], ["best"], name="best", axis=1, keepdims=0),
                helper.make_node("ReduceMax", ["logits"], ["most"], axes=[1], keepdims=0),
                helper.make_node("Flatten", ["r1"], ["features"]),
            ]
        )
        kinds = {"values": (1, k), "places": (7, k), "best": (7,), "most": (1,), "logits": (1, 10)}
        del graph.output[:]
        for name in outputs.split():
            kind, *sides = kinds[name]
            graph.output.append(helper.make_tensor_value_info(name, kind, ["batch", *sides]))
        onnx.save(model, path := folder / f"{outputs.replace(' ', '-')}-{k}.onnx")
        return path

    return made


@pytest.fixture
def judged(judged_build, tmp_path):
    """(model, labels or None, words) -> code, stdout, int8's accuracy."""
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)

    def build(model, labels, *words):
        np.save(tmp_path / "eval.npy", samples)
        asked = ["--eval-images", tmp_path / "eval.npy"]
        if labels is not None:
            (tmp_path / "labels.txt").write_text("\n".join(map(str, labels)))
            asked += ["--labels", tmp_path / "labels.txt"]
        return judged_build(model, samples, *asked, *words)

    return build


@pytest.fixture(scope="module")
def said(small_cnn):
    """What the float model says of these samples."""
    from deploy.runtimes.ort import OrtSession

    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    logits = OrtSession.open(small_cnn, threads=1).run({"x": samples})["logits"]
    return logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("outputs", "k"),
    [("values places", 3), ("places values", 3), ("places", 3), ("values places", 1),
     ("values places", 2), ("best", 1), ("most best", 1), ("logits values places", 3)],
)  # fmt: skip
def test_labels_of_a_model_that_ranks_its_classes(ranking, judged, said, outputs, k):
    wrong = [(label + 1) % 10 if n < 6 else label for n, label in enumerate(said)]
    _, _, found = judged(ranking(outputs, k), wrong)
    assert found["top1_reference"] == pytest.approx((SAMPLES - 6) / SAMPLES)
    assert abs(found["top1_candidate"] - found["top1_reference"]) <= 3 / SAMPLES
    assert found["classes"] == (10 if "logits" in outputs else 1 + max(*said, *wrong))


@pytest.mark.parametrize(("outputs", "k"), [("values places", 3), ("best", 1), ("most best", 1)])
def test_without_labels_the_places_tell_how_many_are_alike(ranking, judged, outputs, k):
    _, out, found = judged(ranking(outputs, k), None)
    name = "best" if "best" in outputs else "places"
    best = "the best class" if k == 1 else f"the best {k} classes"
    assert found["reading"] == f"{name}: {best}"
    assert found["task"]["value"] == found["top1_agreement"] > 0.5
    assert f"of {SAMPLES} best classes as FP32's" in out
    assert all(part["output"] != "places" for part in found["parts"])


def refused(run, tmp_path, model, labels):
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    (tmp_path / "labels.txt").write_text("\n".join(map(str, labels)))
    asked = ("--images", tmp_path / "x.npy", "--eval-images", tmp_path / "x.npy")
    asked += ("--labels", tmp_path / "labels.txt", "--effort", 0, "--duration", 0)
    code, _, error = run("build", model, *asked, "--out", tmp_path / "o")
    assert code == 1
    return error


def test_labels_that_no_output_can_tell_are_refused_with_a_way_out(ranking, run, tmp_path, said):
    error = refused(run, tmp_path, ranking("values"), [9, *said[1:]])
    assert "got 'values' of 3 values" in error
    assert "TopK's second output" in error
    error = refused(run, tmp_path, ranking("most"), said)
    assert "[N, classes]" in error


def test_labels_below_0_are_told_a_way_out(ranking, run, tmp_path, said):
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=samples, labels=np.array([-1, *said[1:]]))
    asked = ("--images", tmp_path / "x.npz", "--eval-images", tmp_path / "x.npz", "--effort", 0)
    code, _, error = run("build", ranking("best"), *asked, "--out", tmp_path / "o")
    assert code == 1 and "'labels' must be whole numbers from 0, got -1" in error
    error = refused(run, tmp_path, ranking("best"), [-1, *said[1:]])
    assert "ends in '-1'" in error


def test_numbers_of_something_else_are_no_classes(ranking, judged_build, small_cnn):
    model = onnx.load(small_cnn)
    graph = model.graph
    del graph.output[:]
    graph.node.append(helper.make_node("Cast", ["logits"], ["whole"], to=TensorProto.INT64))
    graph.output.append(helper.make_tensor_value_info("whole", TensorProto.INT64, ["batch", 10]))
    onnx.save(model, path := ranking("best").with_name("whole.onnx"))
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    _, _, found = judged_build(path, samples)
    assert found["task"] is None and found["top1_agreement"] is None


def spoiled(path, end):
    """A classifier with a layer `bad` that int8 spoils, which ranks its classes itself."""
    rng = np.random.default_rng(1)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    weights = {
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)), "size": size,
        "w2": rng.normal(0, 0.3, (8, 8, 1, 1)) / size, "w3": rng.normal(0, 0.3, (16, 8, 3, 3)),
        "w4": rng.normal(0, 1.0, (1024, 10)),
    }  # fmt: skip
    weights["w2"][:, 0] = 0
    ends = {
        "ArgMax": [("ArgMax", "logits", "raw", {"axis": 1, "keepdims": 0}),
                   ("Cast", "raw", "class", {"to": TensorProto.INT32})],
        "TopK": [("TopK", "logits k", "values places", {})],
    }[end]  # fmt: skip
    nodes = [
        ("Conv", "x w1", "a", {"pads": [1] * 4}), ("Tanh", "a", "t", {}),
        ("Mul", "t size", "m", {}), ("Conv", "m w2", "bad", {}), ("Relu", "bad", "r", {}),
        ("Conv", "r w3", "c", {"strides": [2, 2], "pads": [1] * 4}), ("Relu", "c", "q", {}),
        ("Flatten", "q", "f", {}), ("MatMul", "f w4", "logits", {}), *ends,
    ]  # fmt: skip
    outputs = {"ArgMax": ["class"], "TopK": ["values", "places"]}[end]
    kinds = {"class": TensorProto.INT32, "values": TensorProto.FLOAT, "places": TensorProto.INT64}
    graph = helper.make_graph(
        [
            helper.make_node(op, i.split(), o.split(), name=o.split()[0], **a)
            for op, i, o, a in nodes
        ],
        "spoiled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info(name, kinds[name], None) for name in outputs],
        [
            *(numpy_helper.from_array(np.float32(v), k) for k, v in weights.items()),
            numpy_helper.from_array(np.array([3], np.int64), "k"),
        ],
    )
    imports = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "end"), [("onnxruntime", "ArgMax"), ("tensorrt", "TopK"), ("ascend", "ArgMax")]
)
def test_the_search_hears_the_scores_before_they_are_ranked(target, end, run, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(3).normal(size=(48, 3, 16, 16)).astype("f4"))
    model, alike = spoiled(tmp_path / "net.onnx", end), {}
    words = ("--images", tmp_path / "x.npy", "--duration", 0, "--target", target, "--accept")
    for effort in (0, 1):
        out = tmp_path / str(effort)
        code, said, err = run("build", model, *words, "--effort", effort, "--out", out)
        assert code == 0, err or said
        report = json.loads((out / "report.json").read_text())
        alike[effort] = report["engines"][1]["accuracy"]["task"]["value"]
    assert alike[0] < 0.9 < 0.93 < alike[1]
    plan = read_plan(tmp_path / "1" / "net.plan.toml").targets[target]
    assert plan.choices.float_nodes["bad"].endswith("dB of logits")


def test_scores_are_heard_where_all_outputs_are_ranked_alone(tmp_path):
    model = onnx.load(spoiled(tmp_path / "net.onnx", "ArgMax"))
    assert ranked(model) == {"class": "logits"}
    model.graph.output.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, None))
    assert ranked(model) == {}
    assert ranked(onnx.load(spoiled(tmp_path / "net.onnx", "TopK"))) == {
        "values": "logits", "places": "logits",
    }  # fmt: skip


def test_a_figure_of_ones_own_gets_what_the_model_ranked(run, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(3).normal(size=(48, 3, 16, 16)).astype("f4"))
    text = (
        "def same(fp32, int8, label):\n    return float((fp32['class'] == int8['class']).all())\n"
    )
    (tmp_path / "own.py").write_text(text)
    words = ("--images", tmp_path / "x.npy", "--duration", 0, "--out", tmp_path / "o")
    words = (*words, "--metric", f"{tmp_path / 'own.py'}:same", "--max-loss", 0.03)
    code, said, err = run("build", spoiled(tmp_path / "net.onnx", "ArgMax"), *words)
    assert code == 0, err or said
