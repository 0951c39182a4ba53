"""Objects as peaks of a heat map beside maps of their sizes, as CenterNet has them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.accuracy import Comparison, Said
from deploy.metrics.parts import Part, at_objects
from deploy.metrics.truth import form_of

SIZE, STRIDE = (96, 128), 4  # height, width of the picture; pixels of a cell
CELLS = (SIZE[0] // STRIDE, SIZE[1] // STRIDE)


def fed():
    return {"images": np.zeros((1, 3, *SIZE), np.float32)}


def places(number, objects=5, classes=6):
    """Class, row and column of what a picture shows, no two near each other."""
    made = np.random.default_rng(number)
    cells = made.choice(35, objects, replace=False)
    rows, columns = 2 + 4 * (cells // 7), 2 + 4 * (cells % 7)
    return made.integers(0, classes, objects), rows, columns


def outputs(number, *, classes=6, raw=False, lost=0, moved=0, wide=10.0, log=False):
    kinds, rows, columns = (one[lost:] for one in places(number, classes=classes))
    down, along = np.mgrid[: CELLS[0], : CELLS[1]]
    heat = np.full((classes, *CELLS), 0.002)
    for kind, row, column in zip(kinds, rows, columns, strict=True):
        far = (down - row) ** 2 + (along - column - moved) ** 2
        heat[kind] = np.maximum(heat[kind], 0.9 * np.exp(-far / 1.5))
    made = np.random.default_rng(100 + number)
    sizes = wide + made.uniform(-2, 2, (1, 2, *CELLS))
    return {
        "hm": (np.log(heat / (1 - heat)) if raw else heat)[None].astype(np.float32),
        "wh": (np.log(sizes) if log else sizes).astype(np.float32),
        "reg": made.uniform(0, 1, (1, 2, *CELLS)).astype(np.float32),
    }


def figure(candidates, references, without=()):
    rows = [
        [{k: v for k, v in one.items() if k not in without} for one in side]
        for side in (references, candidates)
    ]
    form = form_of(rows[0], inputs=[fed()] * len(rows[0]))
    assert form.task is not None
    tally = form.task.tally()
    for pair in zip(*rows, strict=True):
        tally.add(fed(), *pair)
    return form.task, tally.result()


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("classes", [1, 3, 6, 80])
def test_peaks_are_objects_of_the_sizes_beside_them(raw, classes):
    how = {"raw": raw, "classes": classes}
    references = [outputs(n, **how) for n in range(8)]
    task, same = figure(references, references)
    assert task.name == "boxes" and task.form.startswith(f"hm: centres of {classes} classes, sizes")
    assert same.value == 1 and same.words.startswith("40 of 40 boxes")
    _, found = figure([outputs(n, lost=1, **how) for n in range(8)], references)
    assert found.words.startswith("32 of 40 boxes of FP32 kept, 0 new")
    boxes = task.decoder.boxes(fed(), references[0]).boxes
    _, rows, columns = places(0, classes=classes)
    wide, tall = references[0]["wh"][0][:, rows[0], columns[0]] * STRIDE / 2
    x, y = (columns[0] + 0.5) * STRIDE, (rows[0] + 0.5) * STRIDE
    assert np.abs(boxes - [x - wide, y - tall, x + wide, y + tall]).max(axis=1).min() < 1e-3


@pytest.mark.parametrize(
    ("stride", "boxes"),
    [(1, False), (2, True), (3, False), (4, True), (8, True), (9, False), (16, False)],
)
def test_cells_are_of_two_four_or_eight_pixels(stride, boxes):
    picture = {"images": np.zeros((1, 3, CELLS[0] * stride, CELLS[1] * stride), np.float32)}
    task = form_of([outputs(n) for n in range(4)], inputs=[picture] * 4).task
    assert (task is not None and task.name == "boxes") == boxes


def test_objects_that_change_their_size_or_class_are_lost():
    references = [outputs(n) for n in range(8)]
    _, small = figure([outputs(n, wide=5) for n in range(8)], references)
    assert small.value == 0
    turned = [{**one, "hm": np.roll(one["hm"], 1, axis=1)} for one in references]
    assert figure(turned, references)[1].value == 0
    broken = [{k: v * np.nan for k, v in one.items()} for one in references]
    assert figure(broken, references)[1].value == 0


@pytest.mark.parametrize(("moved", "kept"), [(1, 40), (2, 0)])
def test_without_sizes_a_peak_may_move_by_a_cell(moved, kept):
    references = [outputs(n) for n in range(8)]
    task, found = figure([outputs(n, moved=moved) for n in range(8)], references, ["wh"])
    assert task.form.endswith("matched by place") and not task.decoder.placed
    assert found.words.startswith(f"{kept} of 40 boxes")


def test_logarithms_of_sizes_are_no_sizes():
    references = [outputs(n, log=True) for n in range(8)]
    task, same = figure(references, references)
    assert task.form.endswith("matched by place") and same.value == 1


def test_sizes_larger_than_the_map_are_pixels():
    references = [outputs(n, wide=40) for n in range(8)]
    task, _ = figure(references, references)
    boxes = task.decoder.boxes(fed(), references[0]).boxes
    assert 30 < (boxes[:, 2:] - boxes[:, :2]).max() < 50


@pytest.mark.parametrize("raw", [False, True])
def test_what_stands_beside_is_read_where_objects_are(raw):
    references = [outputs(n, raw=raw) for n in range(8)]
    form = form_of(references, inputs=[fed()] * 8)
    whole = Part(output="hm")
    assert form.parts == (whole, *(Part(output=n, at="hm", raw=raw) for n in ("wh", "reg")))
    assert [one.label for one in form.parts[1:]] == ["wh where hm is high", "reg where hm is high"]

    def decibels(far):
        """Of sizes that are wrong away from the objects, or at them."""
        figures = Comparison(Said(references[0]), Said(references[0]))
        for number, reference in enumerate(references):
            heat = outputs(number)["hm"].max(axis=1, keepdims=True)
            noise = np.float32(4) * ((heat < 0.01) if far else (heat > 0.5))
            figures.add(fed(), reference, {**reference, "wh": reference["wh"] + noise})
        found = {part.output: part.sqnr_db for part in figures.result().parts}
        assert found["reg"] == np.inf
        return found["wh"]

    assert decibels(far=True) > 30 > 15 > decibels(far=False)


def test_maps_of_other_cells_than_the_scores_are_taken_as_they_are():
    value, scores = np.ones((1, 2, 4, 4), np.float32), np.full((1, 3, 8, 8), 0.5, np.float32)
    assert at_objects(value, scores, raw=False) is value
    assert (at_objects(value, scores[..., :4, :4], raw=False) == 0.5).all()


def test_other_maps_are_no_centres():
    def task(change, inputs=None):
        rows = [change(outputs(n)) for n in range(4)]
        found = form_of(rows, inputs=inputs or [fed()] * 4).task
        return None if found is None else found.name

    assert task(lambda one: one) == "boxes"
    assert task(lambda one: {"hm": one["hm"]}) != "boxes"
    assert (
        task(lambda one: {**one, "reg": one["reg"][..., 1:], "wh": one["wh"][..., 1:]}) != "boxes"
    )
    assert task(lambda one: {**one, "points": one["hm"]}) != "boxes"  # two maps that may be it
    assert task(lambda one: {**one, "hm": one["hm"] * 0}) != "boxes"
    assert task(lambda one: {**one, "hm": one["hm"] / 2 + 0.3}) != "boxes"
    large = {"images": np.zeros((1, 3, 640, 640), np.float32)}
    assert task(lambda one: one, [large] * 4) != "boxes"


# ------------------------------------------------------------------ through the command


def saved(path):
    """A picture's bright spots, red and green, are the peaks of two classes."""
    spots = np.zeros((2, 3, 4, 4), np.float32)
    spots[0, 0], spots[1, 1] = 1 / 16, 1 / 16
    made = np.random.default_rng(0)
    sizes = made.normal(0, 0.05, (4, 3, 4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="heat", strides=[4, 4]),
        helper.make_node("Mul", ["c1", "gain"], ["m1"], name="gain_of_heat"),
        helper.make_node("Add", ["m1", "rest"], ["hm"], name="rest_of_heat"),
        helper.make_node("Conv", ["x", "w2", "b2"], ["c2"], name="sizes", strides=[4, 4]),
        helper.make_node("Split", ["c2"], ["wh", "reg"], name="parts", axis=1),
    ]
    cells = ["n", 2, *CELLS]
    graph = helper.make_graph(
        nodes,
        "centres",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, *SIZE])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, cells)
            for name in ("hm", "wh", "reg")
        ],
        [
            numpy_helper.from_array(np.float32(value), name)
            for name, value in {
                "w1": spots,
                "gain": 10.0,
                "rest": -6.0,
                "w2": sizes,
                "b2": [11, 12, 0.5, 0.5],
            }.items()
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8), path
    )
    return path


@pytest.mark.parametrize("glare", [1.0, 1000.0])
def test_a_build_counts_the_objects(judged_build, tmp_path, glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.1, (16, 3, *SIZE)).astype(np.float32)
    for number, picture in enumerate(pictures):
        for kind, row, column in zip(*places(number, classes=2), strict=True):
            picture[kind, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = 1
        picture[2, :4, :4] = glare  # what decides nothing takes the steps of int8
    code, out, told = judged_build(saved(tmp_path / "m.onnx"), pictures, "--accept")
    task = told["task"]
    assert code == 0 and task["task"] == "boxes"
    assert task["form"] == "hm: centres of 2 classes, sizes in wh"
    assert (task["value"] == 1) == (glare == 1)
    assert "boxes of FP32 kept" in out
    labels = {one["label"] for one in told["parts"]}
    assert labels == {"hm", "wh where hm is high", "reg where hm is high"}
