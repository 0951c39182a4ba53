"""Several labels at once: a tagger's are counted, where its best one alone was before."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.tasks.labels import Labels
from deploy.metrics.truth import form_of

LABELS, SIDE = 12, 32


def fed():
    return {"images": np.zeros((1, 3, 64, 64), np.float32)}


def shares(raw):
    return 1 / (1 + np.exp(-raw))


def scores(number, count=40, on=3, rest=-5.0):
    """Raw scores of which `on` are above 0."""
    made = np.random.default_rng(number)
    values = made.normal(rest, 0.8, (1, count))
    values[0, made.choice(count, on, replace=False)] = made.uniform(1, 4, on)
    return values


def task_of(rows, inputs=None):
    task = form_of([{"y": row} for row in rows], inputs=inputs or [fed()] * len(rows)).task
    return None if task is None else task.name


def figure(references, candidates):
    form = form_of([{"y": one} for one in references], inputs=[fed()] * len(references))
    tally = form.task.tally()
    for one, other in zip(references, candidates, strict=True):
        tally.add(fed(), {"y": one}, {"y": other})
    return form.task, tally.result()


@pytest.mark.parametrize("count", [14, 40, 527])
@pytest.mark.parametrize("raw", [False, True])
def test_labels_of_both_are_counted(count, raw):
    def as_given(values):
        return values if raw else shares(values)

    rows = [scores(n, count) for n in range(10)]
    fewer = [row.copy() for row in rows]
    for row in fewer[:6]:
        row[0, row.argmax()] = -6
    task, same = figure(list(map(as_given, rows)), list(map(as_given, rows)))
    assert task.name == "labels" and same.value == 1
    assert task.form.startswith("y: raw scores of" if raw else "y: probabilities of")
    _, found = figure(list(map(as_given, rows)), list(map(as_given, fewer)))
    assert found.words == "24 of 30 labels of FP32 kept, 0 new (probability above 0.5)"
    assert found.value == pytest.approx(48 / 54)
    assert figure(list(map(as_given, rows)), [row * np.nan for row in rows])[1].value == 0


def test_the_threshold_goes_down_until_there_are_labels():
    rows = [shares(scores(n, on=4)) for n in range(4)]
    weak = [np.where(row > 0.5, row - 0.5, row) for row in rows]
    form = form_of([{"y": one} for one in rows], inputs=[fed()] * 4)
    tally = form.task.tally()
    for one in weak:
        tally.add(fed(), {"y": one}, {"y": one})
    assert tally.result().words.endswith("(probability above 0.3)")
    silent = form.task.tally()
    silent.add(fed(), {"y": rows[0] * 0}, {"y": rows[0]})
    assert silent.result() is None


@pytest.mark.parametrize(
    ("score", "count", "threshold"),
    [
        (0.51, 20, 0.5), (0.51, 19, 0.3), (0.49, 20, 0.3), (0.31, 5, 0.3), (0.31, 4, None),
        (0.29, 5, 0.1), (0.11, 5, 0.1), (0.11, 4, None), (0.09, 20, None),
    ],
)  # fmt: skip
def test_the_threshold_is_the_highest_with_labels_enough(score, count, threshold):
    row = {"y": np.concatenate([np.full(count, score), np.zeros(4)])[None]}
    tally = Labels("y", count + 4, raw=False).tally()
    tally.add(fed(), row, row)
    found = tally.result()
    assert (found and found.words.rpartition("above ")[2]) == (threshold and f"{threshold})")


@pytest.mark.parametrize(
    ("counts", "labels"),
    [
        (((0.95, 2), (0.05, 2)), True), (((0.95, 2), (0.05, 1)), False),  # four labels
        (((0.95, 1), (0.05, 3)), False), (((0.51, 2), (0.05, 8)), True),  # two of a sample
        (((0.49, 2), (0.05, 8)), False), (((0.95, 2), (0.5, 2), (0.05, 5)), True),
        (((0.95, 3), (0.5, 2), (0.05, 5)), True), (((0.95, 3), (0.5, 3), (0.05, 6)), False),
        (((0.95, 5), (0.05, 5)), True), (((0.95, 6), (0.05, 5)), False),  # half of all are off
        (((1.1, 2), (0.05, 8)), False), (((0.95, 1), (0.91, 1), (0.09, 8)), True),
    ],
)  # fmt: skip
def test_labels_are_several_of_a_sample_and_seldom_in_between(counts, labels):
    row = np.concatenate([np.full(count, share) for share, count in counts])[None]
    assert (task_of([row, row[:, ::-1]]) == "labels") == labels


@pytest.mark.parametrize(("on", "labels"), [((2, 2), True), ((2, 1), False), ((3, 1), True)])
def test_raw_labels_are_several_in_the_mean(on, labels):
    assert (task_of([scores(n, on=count) for n, count in enumerate(on)]) == "labels") == labels


def test_one_class_a_sample_is_no_label():
    made = np.random.default_rng(3)

    def rows(make):
        return [make().astype(np.float32) for _ in range(4)]

    assert task_of([scores(n, 200, on=1) for n in range(4)]) == "classes"
    assert task_of([shares(scores(n, 200, on=1)) for n in range(4)]) == "classes"
    assert task_of(rows(lambda: made.normal(0, 6, (1, 10)))) == "classes"
    assert task_of(rows(lambda: np.eye(100)[made.integers(0, 100, 1)] * 30)) == "classes"
    assert task_of(rows(lambda: made.uniform(0, 1, (1, 136)))) is None  # places
    assert task_of([scores(0, 3)] * 4) != "labels"
    sound = [{"sound": np.zeros((1, 800), np.float32)}] * 4
    said = np.where(np.arange(50) < 20, 0.97, 0.02)[None]
    assert task_of([said] * 4, sound) == "steps"


# ------------------------------------------------------------------ through the command


def saved(path):
    """Twelve tags of a picture: how bright each of twelve stripes is."""
    made = np.random.default_rng(0)
    weights = np.zeros((LABELS, 3, SIDE, SIDE), np.float32)
    for label in range(LABELS):
        weights[label, label % 2, :, 2 * label : 2 * label + 2] = 1
    weights *= 10 / weights[0].sum()
    weights[:, :2] += made.normal(0, 1e-4, (LABELS, 2, SIDE, SIDE))
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="tags"),
        helper.make_node("Flatten", ["c"], ["f"], name="flat"),
        helper.make_node("Sigmoid", ["f"], ["y"], name="each"),
    ]
    graph = helper.make_graph(
        nodes,
        "tagger",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", LABELS])],
        [
            numpy_helper.from_array(weights, "w"),
            numpy_helper.from_array(np.full(LABELS, -6, np.float32), "b"),
        ],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.mark.parametrize("glare", [1.0, 1000.0])
def test_a_build_counts_the_labels(judged_build, tmp_path, glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.1, (24, 3, SIDE, SIDE)).astype(np.float32)
    for picture in pictures:
        for label in made.choice(LABELS, 3, replace=False):
            picture[label % 2, :, 2 * label : 2 * label + 2] = 1
        picture[2, 0, 0] = glare  # what decides nothing takes the steps of int8
    code, out, told = judged_build(saved(tmp_path / "m.onnx"), pictures)
    task = told["task"]
    assert task["task"] == "labels" and task["count"].endswith(" of 72")
    assert (task["value"] == 1, code) == ((True, 0) if glare == 1 else (False, 3))
    assert f"{task['count']} labels of FP32 kept" in out and "Labels kept" in out
    assert "Top-1 agreement" not in out and told["top1_agreement"] is None
