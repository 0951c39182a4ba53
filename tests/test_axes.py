"""Key points by the columns and rows they are in, as RTMPose tells them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.truth import form_of

SIZE, POINTS = (64, 48), 6  # height, width of the picture


def fed(size=SIZE):
    return {"x": np.zeros((1, 3, *size), np.float32)}


def places(number):
    made = np.random.default_rng(number)
    return [made.uniform(5, side - 5, POINTS) for side in (SIZE[1], SIZE[0])]


def rows(middles, side, fine, made):
    far = np.arange(int(side * fine)) / fine - middles[:, None]
    return (0.8 * np.exp(-(far**2) / 4) + made.normal(0, 0.01, far.shape))[None]


def outputs(number, *, fine=2.0, moved=0.0, among=POINTS, soft=False):
    made = np.random.default_rng(50 + number)
    named = {}
    for name, middles, side in zip("xy", places(number), SIZE[::-1], strict=True):
        shifted = middles + moved * (np.arange(POINTS) < among)
        value = rows(shifted, side, fine, made)
        if soft:
            power = np.exp(20 * value)
            value = power / power.sum(axis=2, keepdims=True)
        named[name] = value.astype(np.float32)
    return named


def figure(references, candidates):
    form = form_of(references, inputs=[fed()] * len(references))
    tally = form.task.tally()
    for pair in zip(references, candidates, strict=True):
        tally.add(fed(), *pair)
    return form.task, tally.result()


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("fine", [1.0, 2.0, 1.5])
def test_points_within_two_pixels_are_kept(fine, soft):
    how = {"fine": fine, "soft": soft}
    references = [outputs(n, **how) for n in range(5)]
    task, same = figure(references, references)
    assert task.form == "x, y: columns and rows of 6 key points" and same.value == 1
    near = [outputs(n, moved=1, **how) for n in range(5)]
    assert figure(references, near)[1].value == 1
    far = [outputs(n, moved=5, among=2, **how) for n in range(5)]
    _, found = figure(references, far)
    assert found.words == "20 of 30 key points of FP32 within 2 pixels"
    assert (
        figure(references, [{k: v * np.nan for k, v in one.items()} for one in far])[1].value == 0
    )
    cut = [{k: v[..., 1:] for k, v in one.items()} for one in references]
    assert figure(references, cut)[1].value == 0


def test_points_that_fp32_does_not_see_do_not_count():
    references = [outputs(n) for n in range(4)]
    seen = (np.arange(POINTS) > 1)[:, None] * 1.0
    hidden = [{k: v * seen for k, v in one.items()} for one in references]
    form = form_of(references, inputs=[fed()] * 4)
    tally = form.task.tally()
    for pair in zip(hidden, references, strict=True):
        tally.add(fed(), *pair)
    assert tally.result().words.startswith("16 of 16 key points")


def test_the_order_of_the_outputs_tells_nothing():
    turned = [{"a": one["y"], "b": one["x"]} for one in (outputs(n) for n in range(4))]
    assert figure(turned, turned)[0].outputs == ("b", "a")


def test_other_pairs_are_no_points():
    def task(change, size=SIZE):
        found = form_of([change(outputs(n)) for n in range(4)], inputs=[fed(size)] * 4).task
        return None if found is None else found.name

    assert task(lambda one: one) == "key points"
    assert task(lambda one: one, (64, 64)) is None
    assert task(lambda one: {"x": one["x"]}) != "key points"
    flat = np.random.default_rng(1)
    assert task(lambda one: {k: flat.uniform(0, 1, v.shape) for k, v in one.items()}) is None


# ------------------------------------------------------------------ through the command


def saved(path):
    """A bright spot in each of three colours is a point: its column and its row."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="blur", pads=[1, 1, 1, 1]),
        helper.make_node("ReduceMax", ["c"], ["columns"], name="columns", axes=[2], keepdims=0),
        helper.make_node("ReduceMax", ["c"], ["rows"], name="rows", axes=[3], keepdims=0),
    ]
    weights = np.zeros((4, 4, 3, 3), np.float32)
    weights[np.arange(4), np.arange(4)] = [[0.1, 0.2, 0.1], [0.2, 1, 0.2], [0.1, 0.2, 0.1]]
    graph = helper.make_graph(
        nodes,
        "points",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, *SIZE])],
        [
            helper.make_tensor_value_info("columns", TensorProto.FLOAT, ["n", 4, SIZE[1]]),
            helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", 4, SIZE[0]]),
        ],
        [
            numpy_helper.from_array(weights, "w"),
            numpy_helper.from_array(np.zeros(4, np.float32), "b"),
        ],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.mark.parametrize("glare", [1.0, 1000.0])
def test_a_build_counts_the_points(judged_build, tmp_path, glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.02, (16, 4, *SIZE)).astype(np.float32)
    for number, picture in enumerate(pictures):
        row, column = made.integers(3, SIZE[0] - 3, 4), made.integers(3, SIZE[1] - 3, 4)
        picture[np.arange(4), row, column] = glare if number == 15 else 1
    code, out, told = judged_build(saved(tmp_path / "m.onnx"), pictures)
    task = told["task"]
    assert task["form"] == "columns, rows: columns and rows of 4 key points"
    assert f"{task['count']} key points of FP32 within 2 pixels" in out
    assert (task["value"] == 1, code) == ((True, 0) if glare == 1 else (False, 3))
