"""Outputs that say again what another says: a class beside scores, scores beside their Softmax."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.truth import form_of

FEATURES, CLASSES, STEPS = 12, 4, 30


def node(op, inputs, outputs, **attributes):
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=f"{op}_{outputs}", **attributes
    )


def saved(path, nodes, fed, given, **weights):
    infos = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in given]
    graph = helper.make_graph(
        nodes,
        "echoes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, fed)],
        infos,
        [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


def table(path):
    """Rows of a table -> their class and the share of each, as scikit-learn's classifiers give."""
    made = np.random.default_rng(4)
    nodes = [
        node("Gemm", "x w1", "g1"),
        node("Relu", "g1", "r1"),
        node("Gemm", "r1 w2", "g2"),
        node("ArgMax", "g2", "label", axis=1, keepdims=0),
        node("Softmax", "g2", "probabilities", axis=1),
    ]
    given = [
        ("label", TensorProto.INT64, ["n"]),
        ("probabilities", TensorProto.FLOAT, ["n", CLASSES]),
    ]
    weights = {"w1": made.normal(size=(FEATURES, 32)), "w2": made.normal(size=(32, CLASSES))}
    return saved(path, nodes, ["n", FEATURES], given, **weights), made.normal(size=(60, FEATURES))


def frames(path):
    """Raw scores of the classes of steps [T, 1, C], and their Softmax, as a recurrent model's."""
    made = np.random.default_rng(4)
    nodes = [
        node("Conv", "x w1", "c1", pads=[2, 2]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2 b2", "c2"),
        node("Transpose", "c2", "logits", perm=[2, 0, 1]),
        node("Softmax", "logits", "probs", axis=2),
    ]
    first, second = made.normal(size=(16, FEATURES, 5)), made.normal(size=(CLASSES, 16, 1))
    bias = -second.sum(axis=(1, 2)) * 3
    given = [(name, TensorProto.FLOAT, [STEPS, 1, CLASSES]) for name in ("logits", "probs")]
    weights = {"w1": first, "w2": second, "b2": bias}
    fed = [1, FEATURES, STEPS]
    return saved(path, nodes, fed, given, **weights), made.normal(size=(24, FEATURES, STEPS))


@pytest.mark.parametrize(
    ("model", "form", "said"),
    [
        (table, "probabilities: 4 classes", "best classes as FP32's"),
        (frames, "probs: 4 classes a step", "steps of FP32's class"),
    ],
)
def test_classes_decide_where_they_are_said_twice(model, form, said, run, tmp_path):
    path, rows = model(tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.float32(rows))
    words = ("build", path, "--images", tmp_path / "x.npy", "--out", tmp_path / "o")
    code, out, error = run(*words, "--duration", 0, "--effort", 0)
    assert code == 0, error
    told = json.loads((tmp_path / "o" / "report.json").read_text())["engines"][1]["accuracy"]
    assert told["task"]["form"] == form and told["task"]["value"] > 0.9
    assert said in " ".join(out.split())


def softmax(values, axis=-1):
    power = np.exp(values - values.max(axis=axis, keepdims=True))
    return power / power.sum(axis=axis, keepdims=True)


def drawn(count, *shape, wide=5.0):
    made = np.random.default_rng(3)
    return [made.normal(size=shape) * wide for _ in range(count)]


def task_of(outputs, picture=False):
    shape = (1, 3, 64, 64) if picture else (1, 20)
    return form_of(outputs, inputs=[{"x": np.zeros(shape, np.float32)}] * len(outputs)).task


@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        lambda raw: {"label": raw.argmax(1), "p": softmax(raw)},
        lambda raw: {"p": softmax(raw), "label": raw.argmax(1)[:, None]},
        lambda raw: {"raw": raw, "p": softmax(raw)},
        lambda raw: {"p": np.log(softmax(raw)), "raw": raw},
        lambda raw: {"p": softmax(raw), "raw": raw, "label": raw.argmax(1)},
    ],
)
def test_one_of_them_is_the_task_and_the_rest_is_not_beside_it(said, picture):
    task = task_of([said(raw) for raw in drawn(4, 1, 12)], picture)
    assert task is not None and task.name == "classes"
    assert len(task.outputs) == 1 and not task.beside


def test_a_picture_of_classes_is_found_in_scores_that_are_no_task_themselves():
    raw = drawn(4, 1, 5, 64, 64)  # of neighbours that differ: no form of scores
    raw = [np.kron(one[:, :, :8, :8], np.ones((8, 8))) for one in raw]
    outputs = [{"raw": one, "classes": one.argmax(1)} for one in raw]
    assert task_of(outputs, picture=True).name == "segmentation"


def test_what_only_looks_alike_stays():
    scores = [softmax(raw) for raw in drawn(4, 1, 12)]
    shifted = [{"p": one, "number": (one.argmax(1) + 1) % 12} for one in scores]
    assert task_of(shifted).name != "classes"
    counts = [{"p": one, "ages": np.float32([[20 + n]])} for n, one in enumerate(scores)]
    assert task_of(counts) is None
    places = drawn(4, 1, 4, wide=0.3)  # no shares of one whole, and no Sigmoid of the other
    assert task_of([{"a": one, "b": one * 1.01} for one in places]) is None
