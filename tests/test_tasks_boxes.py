"""Boxes among a model's outputs: how they are recognised, and how many a candidate keeps."""

import numpy as np
import pytest

from deploy.metrics.output_form import derive_form
from deploy.tasks import Metric, detections
from deploy.tasks.declarations import Declaration
from deploy.tasks.detections import Detections, match_detections, suppress_overlaps
from deploy.tasks.detector import CODINGS, BoxCoding
from tests import outputs as forms
from tests.outputs import (
    CELLS,
    SIZE,
    change_all,
    compare_outputs,
    fed,
    figure,
    rng,
    same_task,
    scene,
    v8,
    yolo,
)


def v5(number):
    boxes, scores = yolo(number)
    best = scores.max(axis=1, keepdims=True)
    classes = np.where(scores > 0.5, 1.0, np.random.default_rng(9).uniform(0, 0.7, scores.shape))
    return {"output": np.concatenate([boxes, best, classes], axis=1)[None].astype(np.float32)}


def yolox(number):
    """As v5, the boxes left in their cells."""
    value = v5(number)["output"].astype(np.float64)
    cells, strides = np.hsplit(CELLS, [2])
    value[0, :, :2] = value[0, :, :2] / strides - cells
    value[0, :, 2:4] = np.log(value[0, :, 2:4] / strides)
    return {"output": value.astype(np.float32)}


def v6(number):
    """Rows with 1 in place of an objectness."""
    return {"outputs": np.insert(v8(number)["output0"], 4, 1, axis=1).transpose(0, 2, 1)}


def tall(number):
    """As YOLOX, every box taller than its cell."""
    value = yolox(number)["output"]
    value[..., 3] = np.random.default_rng(number).uniform(0.01, 0.5, value.shape[:2])
    return {"output": value}


def without(outputs, number, lost, rows):
    """The same with the first `lost` objects unseen; `rows` is where the scores are."""
    ((name, value),) = outputs.items()
    value, anchors = value.copy(), scene(number)[0][:lost]
    value[(0, slice(4, None), anchors) if rows == 1 else (0, anchors, slice(4, None))] = 0
    return {name: value}


def changed(outputs, **changes):
    """Each sample's outputs with what these functions make of those of a name."""
    samples = []
    for sample in outputs:
        changed_outputs = {name: change(sample[name]) for name, change in changes.items()}
        samples.append(sample | changed_outputs)
    return samples


def broken(outputs):
    return change_all(outputs, lambda value: value * np.nan)


@pytest.mark.parametrize(("form", "rows"), [(v8, 1), (v5, -1), (v6, -1), (yolox, -1), (tall, -1)])
def test_lost_boxes_are_counted_in_every_form(form, rows):
    references = [form(n) for n in range(8)]
    candidates = [without(one, n, 1, rows) for n, one in enumerate(references)]
    _, same = figure(references, references)
    assert same.value == 1 and same.task == "boxes" and same.figure == "boxes kept"
    assert same.words == "48 of 48 boxes of FP32 kept, 0 new (score above 0.25)"
    _, found = figure(references, candidates)
    assert found.words.startswith("40 of 48 boxes of FP32 kept, 0 new")
    assert found.value == pytest.approx(40 / 48) and found.samples == 8
    assert figure(references, broken(references))[1].value == 0


def test_scores_are_a_part_even_where_first_samples_show_no_object():
    form, found = figure([v8(n, score=0.0) for n in range(4)], [v8(n) for n in range(4)])
    assert [part.label for part in form.parts] == ["output0[0:4]", "output0[4:9]"]
    assert found is None  # FP32 finds next to nothing


def test_boxes_that_move_change_class_or_appear_are_told():
    references = [v8(n) for n in range(8)]
    by = np.array([2, 2, *[0] * 7], np.float32)[:, None]  # of boxes 3 wide
    moved = changed(references, output0=lambda v: v + by)
    assert "0 of 48 boxes of FP32 kept, 48 new" in figure(references, moved)[1].words
    turned = changed(
        references, output0=lambda v: np.concatenate([v[:, :4], np.roll(v[:, 4:], 1, axis=1)], 1)
    )
    assert "0 of 48 boxes" in figure(references, turned)[1].words
    fewer = [without(one, n, 3, 1) for n, one in enumerate(references)]
    assert "24 of 24 boxes of FP32 kept, 24 new" in figure(fewer, references)[1].words


def test_anchors_that_do_not_fit_the_picture_are_no_boxes():
    outputs = [v8(n) for n in range(4)]
    assert same_task(outputs) == "boxes" and same_task(outputs, [fed((96, 96))] * 4) is None
    assert same_task(changed(outputs, output0=lambda v: v / 9)) is None  # all in a corner


def test_overlaps_by_hand_and_suppression_by_class_and_matching_one_to_one():
    one = np.array([[0.0, 0, 2, 2], [5, 5, 5, 9]])
    other = np.array([[1.0, 0, 3, 2], [0, 0, 2, 2]])
    np.testing.assert_allclose(detections.box_ious(one, other), [[1 / 3, 1], [0, 0]])
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    found = Detections.of(boxes, np.array([0.9, 0.8, 0.7, 0.6]), np.array([0, 0, 1, 0]))
    kept = suppress_overlaps(found)
    np.testing.assert_allclose(kept.scores, [0.9, 0.7, 0.6])
    assert match_detections(kept, kept) == [(0, 0), (1, 1), (2, 2)]
    assert len(match_detections(found, kept)) == 3  # one box of the candidate stands for one


@pytest.mark.parametrize(("side", "same"), [(5.1, True), (5.0, False)])  # of 10: IoU 0.51, 0.5
def test_boxes_are_one_above_an_iou_of_a_half(side, same):
    both = np.array([[0.0, 0, 10, 10], [0, 0, 10, side]])
    one, other = (Detections.of(box[None], np.ones(1), np.zeros(1, np.int64)) for box in both)
    assert bool(match_detections(one, other)) == same
    found = Detections.of(both, np.array([0.9, 0.8]), np.zeros(2, np.int64))
    assert len(suppress_overlaps(found).scores) == 2 - same


def test_detections_are_the_thousand_best_above_the_lowest_score():
    boxes = np.tile([0.0, 0, 1, 1], (1200, 1))
    scores = np.linspace(0.9, 0.1, 1200)
    assert Detections.of(boxes, scores, np.arange(1200)).classes.tolist() == list(range(1000))
    boxes[0, 3], scores[1:] = np.nan, 0.05
    scores[[7, 3]] = 0.051, 0.052
    assert Detections.of(boxes, scores, np.arange(1200)).classes.tolist() == [3, 7]


def single_box(shapes):
    return Detections(np.array([[0.0, 0, 20, 20]]), np.ones(1), np.zeros(1, np.int64), shapes)


@pytest.mark.parametrize(
    ("moved", "seen", "same"), [(1.9, 1, True), (2.1, 1, False), (2.1, 0.5, True)]
)
def test_boxes_match_if_seen_points_are_near(moved, seen, same):
    def points(moved):
        return detections.BoxPoints(np.array([[[5 + moved, 5, seen], [9, 9, 0.4]]]))

    pairs = match_detections(single_box(points(0)), single_box(points(moved)))
    assert bool(pairs) == same


@pytest.mark.parametrize(("columns", "same"), [(16, True), (15, False)])
def test_boxes_match_if_masks_share_three_quarters(columns, same):
    def masks(columns):
        cells = np.broadcast_to(np.where(np.arange(20) < columns, 1.0, -1.0), (1, 20, 20))
        return detections.InstanceMasks(np.ones((1, 1)), cells, 1.0)

    pairs = match_detections(single_box(masks(20)), single_box(masks(columns)))
    assert bool(pairs) == same


def ended(number, layout=(0, 4, 5), columns=6, pad=4):
    """A list of rows in order of score, filled up with zeros."""
    made = np.random.default_rng(number)
    rows = np.zeros((10 + pad, columns), np.float32)
    low = made.uniform(0, 100, (10, 2))
    corner, score, kind = layout
    rows[:10, corner : corner + 4] = np.concatenate([low, low + made.uniform(5, 50, (10, 2))], 1)
    rows[:10, score] = np.sort(made.uniform(0.3, 1, 10))[::-1]
    rows[:10, kind] = made.integers(0, 3, 10)
    return rows


def small_list(number):
    return {"out": ended(number)[None]}


@pytest.mark.parametrize(("layout", "columns"), [
    ((0, 4, 5), 6), ((0, 5, 4), 6), ((2, 1, 0), 6), ((1, 6, 5), 7), ((3, 2, 1), 7),
])  # fmt: skip
def test_lists_after_suppression_are_boxes_and_only_their_scores_are_compared(layout, columns):
    references = [{"out": ended(n, layout, columns)[None]} for n in range(4)]
    candidates = [{"out": one["out"].copy()} for one in references]
    for one in candidates:
        one["out"][0, 0, layout[1]] = 0
    form, found = figure(references, candidates)
    own = int(found.words.split(" of ")[1].split()[0])
    assert f"{own - 4} of {own} boxes of FP32 kept, 0 new" in found.words
    score = layout[1]
    assert [part.label for part in form.parts] == [f"out[..., {score}:{score + 1}]"]


@pytest.mark.parametrize(
    ("column", "value", "task"),
    [
        (5, 0, "boxes"),
        (5, -1, None),
        (5, 1.5, None),
        (5, 70, "boxes"),  # classes are numbers
        (4, 1.0009, "boxes"),
        (4, 1.002, None),
        (4, np.nan, None),  # scores are shares,
        (slice(4, None, 6), 1, None),  # not all of them whole
        (slice(2, 4), -1, None),
        (slice(0, 2), 0, "boxes"),  # the second corner is the higher one
        (slice(12, None), 0, None),
        (slice(18, None), 0, "boxes"),  # three rows show the columns
    ],
)
def test_a_list_of_boxes_is_known_by_each_of_its_columns(column, value, task):
    outputs = [{"out": ended(0)[None]}]
    outputs[0]["out"].reshape(-1)[column] = value
    assert same_task(outputs) == task


def test_three_outputs_of_boxes_scores_and_classes():
    def outputs(number):
        rows = ended(number)[None]
        return {
            "num": np.array([[10]], np.int32),
            "boxes": rows[..., :4],
            "scores": rows[..., 4],
            "labels": rows[..., 5].astype(np.int32),
        }

    form, found = figure([outputs(n) for n in range(4)], [outputs(n) for n in range(4)])
    assert found.task == "boxes" and found.value == 1
    assert [part.label for part in form.parts] == ["scores"]
    changing = [{"out": ended(n, pad=0)[: 5 + n]} for n in range(4)]  # lists of no fixed length
    form, found = figure(changing, changing)
    assert found.value == 1 and form.parts == ()


@pytest.mark.parametrize("batch", [True, False])
def test_boxes_with_their_scores_beside_classes(batch):
    """As MMDetection's exports give them."""

    def outputs(number, lost=0):
        rows = ended(number)
        rows[:lost, 4] = 0
        rows = rows[None] if batch else rows
        return {"dets": rows[..., :5], "labels": rows[..., 5].astype(np.int64)}

    references = [outputs(n) for n in range(4)]
    form, found = figure(references, references)
    assert "a list of boxes" in form.task.form and found.value == 1
    assert [part.label for part in form.parts] == (["dets[..., 4:5]"] if batch else [])
    assert figure(references, [outputs(n, lost=2) for n in range(4)])[1].value < 1
    alone = [{"dets": one["dets"]} for one in references]  # of one class, as RTMO's
    assert figure(alone, alone)[0].parts == form.parts[:1]
    for other in (lambda v: np.roll(v, 1, axis=-2), lambda v: v[..., :1, :]):
        assert same_task(changed(alone, dets=other)) != "boxes"
    turned = changed(references, labels=lambda v: v + 1)
    cut = changed(references, dets=lambda v: v[..., :4])
    assert [figure(references, other)[1].value for other in (turned, cut)] == [0, 0]


def posed_list(number, moved=0.0):
    rows = ended(number, columns=6 + 3 * 3, pad=0)
    for point in range(3):
        rows[:, 6 + 3 * point : 9 + 3 * point] = rows[:, 0:3] + moved
        rows[:, 8 + 3 * point] = 0.9
    return {"output0": rows[None]}


def test_key_points_of_a_list_move_with_its_boxes():
    """As Ultralytics' exports after suppression have them."""
    references = [posed_list(n) for n in range(4)]
    form, same = figure(references, references)
    assert form.task.form == "output0: a list of boxes, scores and classes, key points"
    assert same.words.startswith("40 of 40 boxes")
    assert figure(references, [posed_list(n, moved=9) for n in range(4)])[1].value == 0
    other_classes = changed(references, output0=lambda v: v + (np.arange(15) == 5))
    assert figure(references, other_classes)[1].value == 0


def turned_list(number, by=0.0):
    rows = ended(number, columns=7, pad=0)
    rows[:, 2:4] = [60, 15]
    rows[:, 6] = np.random.default_rng(number).uniform(-0.7, 2.2, 10) + by
    return {"output0": rows[None]}


def test_features_of_a_picture_are_no_list_of_boxes():
    features = [{"hidden": ended(n, columns=32)[:1]} for n in range(4)]  # a dead channel: class 0
    assert same_task(features) == "embeddings"


def test_rotated_boxes_of_a_list_are_kept_by_class_and_angle():
    """As Ultralytics' exports after suppression have them: centre, size, score, class, angle."""
    references = [turned_list(n) for n in range(4)]
    form, same = figure(references, references)
    assert form.task.form == "output0: a list of boxes, scores and classes, an angle"
    assert same.value == 1
    assert figure(references, [turned_list(n, by=0.4) for n in range(4)])[1].value == 0
    other_classes = changed(references, output0=lambda v: v + (np.arange(7) == 5))
    assert figure(references, other_classes)[1].value == 0


def test_number_of_the_image_is_no_centre_of_a_rotated_box():
    references = []
    for number in range(4):
        rows = ended(number, layout=(1, 6, 5), columns=7, pad=0)
        rows[:, 1:5] /= 160
        references.append({"output": rows})
    form, same = figure(references, references)
    assert "angle" not in form.task.form and same.words.startswith("40 of 40 boxes")


def test_list_may_have_no_classes():
    rows = [ended(n, pad=0) for n in range(4)]
    references = [{"boxes": row[:, :4], "scores": row[:, 4]} for row in rows]
    form, same = figure(references, references)
    assert "a list of boxes" in form.task.form and same.words.startswith("40 of 40 boxes")
    assert same_task(changed(references, scores=lambda v: np.roll(v, 1))) is None


@pytest.mark.parametrize("classes", [1, 5])
def test_maps_of_several_anchors_a_cell_match_by_cell(classes):
    """As RetinaNet's: offsets of nine anchors are no distributions of nine bins."""
    references = []
    for number in range(4):
        made, outputs = np.random.default_rng(number), {}
        for stride in (8, 16, 32):
            sides = SIZE[0] // stride, SIZE[1] // stride
            scores = made.normal(-6, 0.5, (1, 9 * classes, *sides))
            scores[0, made.integers(9 * classes), 2, 1:3] = 3
            outputs |= {
                f"cls_{stride}": scores,
                f"box_{stride}": made.normal(0, 1, (1, 36, *sides)),
            }
        references.append(outputs)
    form, same = figure(references, references)
    assert "boxes matched by anchor" in form.task.form and same.words.startswith("24 of 24 boxes")
    fewer = changed(references, cls_8=lambda v: v - 9)
    assert figure(references, fewer)[1].words.startswith("16 of 24 boxes")


def test_list_of_a_batch_is_split_by_its_image_numbers():
    """As YOLO v7's and YOLO-NAS's exports of a fixed batch give it."""
    batches = []
    for number in range(4):
        pair = []
        for image in (0, 1):
            rows = ended(2 * number + image)[: 5 - image]
            pair.append(np.insert(rows, 0, image, axis=1))
        selected = np.concatenate(pair)[:, [0, 6, 1]].astype(np.int64)
        batches.append({"output": np.concatenate(pair), "selected": selected})
    pictures = {"images": np.zeros((2, 3, *SIZE), np.float32)}
    found = compare_outputs(batches, batches, [pictures] * len(batches))
    assert found.task.words.startswith("36 of 36 boxes") and found.samples == 8


def ssd(number, classes=4, raw=False, last=False, lost=0):
    """Offsets from anchors that nobody told, and probabilities with a background."""
    made = np.random.default_rng(number)
    scores = made.uniform(0, 1, (1, 600, classes))
    scores[..., 0] = 12
    seen = made.choice(600, 8, replace=False)
    scores[0, seen[lost:], 1 + made.integers(0, classes - 1, 8)[lost:]] = 18
    scores = scores[..., ::-1] if last else scores
    points = {"points": made.standard_normal((1, 600, 10))} if classes == 2 else {}
    conf = scores if raw else forms.softmax(scores, -1)
    return {"loc": made.standard_normal((1, 600, 4)), "conf": conf, **points}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_anchors_whose_boxes_cannot_be_told_match_by_place(classes, raw, last):
    """Boxes, and the key points of faces, count where the background is unlikely."""
    references = [ssd(n, classes, raw, last, 0) for n in range(4)]
    candidates = [ssd(n, classes, raw, last, 2) for n in range(4)]
    form, found = figure(references, candidates)
    assert "by anchor" in form.task.form
    assert found.words.startswith("24 of 32 boxes of FP32 kept, 0 new")
    where = f"weighted by conf[..., {1 - last}:{classes - last}]"
    labels = [f"loc {where}", "conf", *[f"points {where}"] * (classes == 2)]
    assert [one.label for one in form.parts] == labels


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_heads_of_several_anchors_a_cell_match_by_anchor(raw, joined):
    def outputs(number):
        made = np.random.default_rng(number)
        named = {}
        for stride in (8, 16, 32):
            value = made.standard_normal((1, 3, SIZE[0] // stride, SIZE[1] // stride, 5 + 4))
            value[..., 4] -= 8
            value[0, 1, 2, 1:4, 4] = 6
            value[0, 1, 2, 1:4, 7] = 5
            value = value if raw else 1 / (1 + np.exp(-value))
            if joined:
                value = value.transpose(0, 1, 4, 2, 3).reshape(1, 27, *value.shape[2:4])
            named[f"p{stride}"] = value.astype(np.float32)
        return named

    references = [outputs(n) for n in range(4)]
    candidates = changed(references, p8=lambda v: v - 20 if raw else v * 0)
    form, found = figure(references, candidates)
    assert "4 classes, boxes matched by anchor" in form.task.form
    assert found.words.startswith("24 of 36 boxes of FP32 kept, 0 new")
    features = change_all(references, lambda value: rng().standard_normal(value.shape))
    assert same_task(features) is None


@pytest.mark.parametrize("softmaxed", [False, True])
def test_queries_are_boxes(softmaxed):
    def detr(number):
        made = np.random.default_rng(number)
        boxes = made.uniform(0.1, 0.3, (1, 100, 4))
        boxes[..., :2] = made.uniform(0.2, 0.8, (1, 100, 2))
        logits = made.uniform(-9, -6, (1, 100, 11))
        logits[..., 10] = 6 if softmaxed else -8
        logits[0, :7, made.integers(0, 10, 7)] = 12 if softmaxed else 2
        return {"logits": logits, "pred_boxes": boxes}

    references = [detr(n) for n in range(4)]
    form, found = figure(references, references)
    assert ("softmax" if softmaxed else "sigmoid") in form.task.form
    assert "boxes by centre" in form.task.form
    assert found.value == 1 and " of FP32 kept, 0 new" in found.words


@pytest.mark.parametrize("maps", [False, True])
def test_distributions_of_distances_are_boxes_level_by_level(maps):
    size, bins = (64, 96), 8

    def outputs(number):
        named = {"score": {}, "box": {}}
        for stride in (8, 16, 32):
            rows, columns = size[0] // stride, size[1] // stride
            made = np.random.default_rng(number * 1000 + stride)
            far = made.standard_normal((1, rows * columns, 4 * bins))
            far[0, 0] = -30
            far[0, 0, [2, bins + 1, 2 * bins + 3, 3 * bins + 1]] = 30  # 2, 1, 3 and 1 strides
            scores = made.uniform(0, 0.01, (1, rows * columns, 5))
            scores[0, 0, 2] = 0.9
            for name, value in (("score", scores), ("box", far)):
                turned = value.transpose(0, 2, 1).reshape(1, -1, rows, columns)
                named[name][f"{name}{stride}"] = turned if maps else value
        return named["score"] | named["box"]

    references = [outputs(n) for n in range(8)]
    inputs = [fed(size)] * 8
    form, found = figure(references, references, inputs)
    assert "distribution" in form.task.form and found.words.startswith("24 of 24")
    boxes = form.task.decoder.boxes(fed(size), references[0]).boxes
    middle, far = np.full(2, 4.0), 8 * np.array([2, 1, 3, 1])  # of the first cell of stride 8
    wanted = np.concatenate([middle - far[:2], middle + far[2:]])
    assert np.abs(boxes - wanted).max(axis=1).min() < 1e-6
    narrow = changed(references, box8=lambda v: v[:, :-1] if maps else v[..., :-1])
    assert figure(references, narrow, inputs)[1].value == 0
    moved = changed(references, box8=lambda v: np.roll(v, bins, axis=1 if maps else 2))
    assert figure(references, moved, inputs)[1].value < 0.9
    scores = [name for name in references[0] if not name.startswith("box")]
    silent = changed(references, **dict.fromkeys(scores, lambda v: v * 0))
    assert figure(references, silent, inputs)[1].value == 0  # nothing left of any level


@pytest.mark.parametrize("length", [2, 3])
def test_key_points_of_a_box_are_kept_with_it(length):
    references = [forms.posed(n, length=length) for n in range(8)]
    form, same = figure(references, references)
    assert "1 class, boxes by centre, key points" in form.task.form and same.value == 1
    for moved, value in ((1.0, 1), (3.0, 0)):
        others = [forms.posed(n, length=length, moved=moved) for n in range(8)]
        assert figure(references, others)[1].value == value
    hidden = [{"output0": one["output0"].copy()} for one in references]
    for one in hidden:
        last = one["output0"].shape[1] - length  # the point that is not visible
        one["output0"][:, last : last + 2] += 90
    assert figure(references, hidden)[1].value == (1 if length == 3 else 0)
    others = [v8(n, classes=1) for n in range(8)]
    assert "key points" not in figure(others, others)[0].task.form


def masked(number, *, maps=3, split=0.0, stride=4, turned=False):
    """YOLO with masks: what is left of a line through a box, of boxes 20 pixels wide."""
    value = v8(number, classes=1)["output0"][0]
    value[2:4] = 20
    weights = np.stack([-np.ones_like(value[0]), (value[0] + split) / 8, -value[1] / 1e4])[:maps]
    columns = np.arange(SIZE[1] // stride) * stride / 8
    ones = np.ones(tuple(side // stride for side in SIZE))
    held = np.stack([ones * columns, ones, ones])[:maps]
    rows = np.concatenate([value, weights])
    return {
        "output0": (rows.T if turned else rows)[None].astype(np.float32),
        "output1": held[None].astype(np.float32),
    }


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_masks_of_a_box_are_kept_with_it(turned, stride):
    def split(by):
        return [masked(n, turned=turned, stride=stride, split=by) for n in range(8)]

    references = split(0.0)
    form, same = figure(references, references)
    assert "1 class, boxes by centre, a mask" in form.task.form and same.value == 1
    assert figure(references, split(0.1))[1].value > 0.9
    assert figure(references, split(7.0))[1].value < 0.1
    for change in (np.negative, lambda v: v * np.nan, lambda v: v[:, :2]):
        assert figure(references, changed(references, output1=change))[1].value == 0


def blaze(number, *, lost=0, flat=False, shares=False):
    """Offsets of boxes and key points from unknown anchors, beside a score of each."""
    made = np.random.default_rng(number)
    scores = made.normal(-4, 0.5, (1, 896, 1))
    scores[0, made.choice(896, 6, replace=False)[lost:]] = 3
    offsets = made.normal(0, 20, (1, 896, 16))
    scores = 1 / (1 + np.exp(-scores)) if shares else scores
    scores = scores[..., 0] if flat else scores
    return {"regressors": np.float32(offsets), "classificators": np.float32(scores)}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_offsets_from_anchors_are_boxes_only_if_set(flat, shares):
    references = [blaze(n, flat=flat, shares=shares) for n in range(8)]
    form = derive_form(references, inputs=[fed()] * 8)
    assert form.task is None
    labels = ["regressors weighted by classificators", "classificators"]
    metric = Metric(None, task="boxes")
    form = derive_form(references, inputs=[fed()] * 8, metric=metric)
    scores = "scores" if shares else "sigmoid"
    assert form.task.form == f"classificators: {scores} of 1 class, boxes matched by anchor"
    assert [part.label for part in form.parts] == labels
    tally = form.task.tally()
    for number, reference in enumerate(references):
        tally.add(fed(), reference, blaze(number, flat=flat, shares=shares, lost=2))
    assert tally.result().words.startswith("32 of 48 boxes of FP32 kept, 0 new")


def test_a_turned_box_is_kept_where_its_corners_are():
    references = [forms.turned(n) for n in range(8)]
    form, same = figure(references, references)
    assert "2 classes, boxes by centre, an angle" in form.task.form and same.value == 1
    for by, value in ((0.03, 1), (0.2, 0)):  # 10 % of its size is 3 pixels, 0.1 of a radian
        assert figure(references, [forms.turned(n, by) for n in range(8)])[1].value == value
    rows = len(references[0]["output0"][0])
    factors = np.where(np.arange(rows) == rows - 1, 40, 1)[:, None]
    long = changed(references, output0=lambda v: v * np.float32(factors))
    assert "angle" not in figure(long, long)[0].task.form


def test_maps_that_are_no_masks_leave_boxes_alone():
    others = [{**masked(n), "output1": np.zeros((1, 3, 5, 5), np.float32)} for n in range(8)]
    form, same = figure(others, others)
    assert "a mask" not in form.task.form and same.value == 1


@pytest.mark.parametrize("scores", ["rows", "turned"])
@pytest.mark.parametrize("boxes", ["rows", "turned", "spaced"])
def test_boxes_and_scores_may_be_turned(boxes, scores):
    references = [forms.split_yolo(n, boxes, scores) for n in range(8)]
    form, same = figure(references, references)
    assert form.task.form == "scores: scores of 5 classes, boxes by centre"
    assert form.parts[0].label == "boxes weighted by scores"
    assert same.words.startswith("48 of 48 boxes of FP32 kept, 0 new")
    moved = changed(references, boxes=lambda v: v + 2)  # of boxes 3 wide
    fewer = changed(references, scores=lambda v: v[..., 1:, 1:])  # of another form
    narrow = changed(references, boxes=lambda v: v[:, :1] if boxes == "turned" else v[..., :1])
    assert [figure(references, other)[1].value for other in (moved, fewer, narrow)] == [0, 0, 0]


def test_relative_boxes_may_leave_the_picture():
    size = np.float32([SIZE[1], SIZE[0]] * 2)
    references = [forms.split_yolo(n) for n in range(4)]
    for outputs in references:
        outputs["boxes"] /= size
        outputs["boxes"][0, :9, 2:] = 1.5
    assert figure(references, references)[0].task.form.endswith("boxes by centre")


GATED = [{}, {"classes": 4}, {"raw": True}, {"raw": True, "maps": True, "classes": 4}]


@pytest.mark.parametrize("how", GATED)
def test_an_objectness_of_each_level_multiplies_its_scores(how):
    references = [forms.gated(n, **how) for n in range(4)]
    form, same = figure(references, references)
    assert form.task.form.startswith("cls_8, cls_16, cls_32") and same.value == 1
    assert same.words.startswith("24 of 24 boxes")
    assert "bbox_8 weighted by obj_8" in [part.label for part in form.parts]
    lost = changed(references, obj_8=lambda v: v * 0 - 20 * how.get("raw", False))
    assert figure(references, lost)[1].words.startswith("16 of 24 boxes of FP32 kept, 0 new")
    assert figure(references, broken(lost))[1].value == 0
    if how.get("maps"):  # of the cells of no stride
        assert same_task(references, [fed((96, 96))] * 4) is None


def distances(number, bins=8):
    """Scores first, then distributions of 1, 2, 1 and 2 strides to each side."""
    _, scores = yolo(number)
    far = np.random.default_rng(number).normal(0, 1, (len(scores), 4, bins))
    far[:, np.arange(4), [1, 2, 1, 2]] = 30
    value = np.concatenate([scores, far.reshape(len(scores), -1)], axis=1)
    return {"y": value[None].astype(np.float32)}


def raw_levels(number, bins=16):
    """A map of each level: distributions, then raw scores, as YOLO v8's last Convs give them."""
    scores, far = np.split(distances(number, bins)["y"][0], [5], axis=1)
    rows = np.concatenate([far, np.log(scores / (1 - scores))], axis=1)
    outputs, start = {}, 0
    for stride in (8, 16, 32):
        sides = SIZE[0] // stride, SIZE[1] // stride
        stop = start + sides[0] * sides[1]
        outputs[f"p{stride}"] = rows[start:stop].T.reshape(1, -1, *sides)
        start = stop
    return outputs


def test_outputs_of_boxes_and_scores_are_levels():
    references = [raw_levels(n) for n in range(8)]
    form, same = figure(references, references)
    assert form.task.form == "p8, p16, p32: sigmoid of 5 classes, boxes by distribution"
    assert same.words.startswith("47 of 47 boxes")  # one overlaps with another
    labels = {f"p{stride}[{rows}]" for stride in (8, 16, 32) for rows in ("0:64", "64:69")}
    assert {part.label for part in form.parts} == labels
    fewer = changed(references, p8=lambda v: v - 20)
    assert figure(references, fewer)[1].value < 1


@pytest.mark.parametrize("form", [forms.queries, distances])
def test_scores_and_boxes_side_by_side(form):
    references = [form(n) for n in range(8)]
    read, same = figure(references, references)
    assert "classes, boxes by" in read.task.form and same.value == 1
    assert len(read.parts) == 2
    columns = slice(0, 2) if form is forms.queries else slice(5, 37)
    moved = [{"y": one["y"].copy()} for one in references]
    for one in moved:
        one["y"][..., columns] = np.roll(one["y"][..., columns], 1, axis=-1)
    assert figure(references, moved)[1].value < 0.5
    assert figure(references, broken(references))[1].value == 0
    assert same_task(changed(references, y=lambda v: np.clip(v + 0.2, None, 1))) is None
    anywhere = [{"y": np.random.default_rng(n).uniform(0, 1, (1, 300, 15))} for n in range(4)]
    assert same_task(anywhere) is None


def test_a_distribution_stands_where_its_cell_is():
    read, _ = figure([distances(n) for n in range(8)], [distances(n) for n in range(8)])
    cells, strides = np.hsplit(CELLS, [2])
    seen = scene(0, classes=5)[0]
    found = read.task.decoder.boxes(fed(), distances(0)).boxes
    sides = np.array([-1, -2, 1, 2])
    wanted = (np.tile(cells[seen] + 0.5, 2) + sides) * strides[seen]
    assert all(np.abs(found - one).max(axis=1).min() < 1e-3 for one in wanted)


@pytest.mark.parametrize("shares", [[4, 1], [3, 1, 1]])
def test_a_frequent_first_class_is_no_objectness(shares):
    """In rows, as of the 100 best queries of RT-DETR."""

    def rows(number):
        boxes, scores = yolo(number)
        best = np.argsort(-scores.max(axis=1))[:100]
        boxes, scores = boxes[best], scores[best]
        groups = np.split(scores, np.cumsum(shares)[:-1], axis=1)
        merged = [group.max(axis=1, keepdims=True) for group in groups]
        return {"y": np.concatenate([boxes, *merged], axis=1)[None].astype(np.float32)}

    references = [rows(n) for n in range(8)]
    read, same = figure(references, references)
    assert read.task.decoder.class_count == len(shares) and same.words.startswith("48 of 48 boxes")


@pytest.mark.parametrize("form", [v5, v8])
def test_declared_classes_tell_an_objectness(form):
    """Beside mask weights, as YOLO v5 and v8 for segmentation have them."""
    made = np.random.default_rng(0)
    references = [form(n) for n in range(4)]
    for outputs in references:
        ((name, value),) = outputs.items()
        rows = value if form is v5 else value.swapaxes(1, 2)
        rows = np.concatenate([rows, made.normal(0, 1, (*rows.shape[:2], 6))], axis=2)
        outputs[name] = np.float32(rows if form is v5 else rows.swapaxes(1, 2))
    metric = Metric(None, declared=Declaration(classes=5))
    decoder = derive_form(references, inputs=[fed()] * 4, metric=metric).task.decoder
    assert decoder.class_count == 5 and bool(decoder.gates) == (form is v5)


def test_levels_of_different_classes_are_no_detector():
    references = [forms.gated(n, classes=2) for n in range(4)]
    for number, outputs in enumerate(references):
        outputs["cls_8"] = forms.gated(number, classes=3)["cls_8"]
    assert same_task(references) != "boxes"


@pytest.mark.parametrize("count", [4, 20, 100])
def test_square_outputs_are_boxes_in_no_layout(count):
    made = np.random.default_rng(0)
    values = [{"y": made.normal(-9, 1, (1, count, count))} for _ in range(4)]
    assert same_task(values) != "boxes"
    boxes = [{**value, "boxes": made.normal(0, 9, (1, count, 4))} for value in values]
    assert same_task(boxes) == (None if count < 10 else "boxes")


def one_level(number, layout="columns", corners=False, count=16):
    """Boxes and scores of one stride of 4: squares of 12 pixels, most anchors see nothing."""
    made = np.random.default_rng(number)
    rows, columns = np.divmod(np.arange(count * count), count)
    centres = 4 * np.stack([columns, rows], axis=1) + 2 + made.uniform(-1, 1, (count * count, 2))
    boxes = np.concatenate([centres, np.full((count * count, 2), 12.0)], axis=1)
    if corners:
        boxes = np.concatenate([centres - 6, centres + 6], axis=1)
    scores = made.uniform(0, 0.01, (count * count, 3))
    scores[made.choice(count * count, 4, replace=False), made.integers(0, 3, 4)] = 0.9
    table = np.concatenate([boxes, scores], axis=1).astype(np.float32)
    if layout == "rows":
        return {"output0": table[None]}
    if layout == "map":
        return {"output0": table.T.reshape(1, -1, count, count)}
    return {"output0": table.T[None]}


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns", "map"])
def test_detector_of_one_level_needs_no_strides(layout, corners):
    inputs = [fed((64, 64))] * 8
    references = [one_level(n, layout, corners) for n in range(8)]
    form, same = figure(references, references, inputs)
    coding = "corners" if corners else "centre"
    assert form.task.form == f"output0: scores of 3 classes, boxes by {coding}"
    assert same.value == 1
    lost = changed(references, output0=lambda v: np.where((v > 0.8) & (v < 1), 0, v))
    assert figure(references, lost, inputs)[1].value == 0


def small_detr(number, classes=3, softmaxed=True):
    """A DETR whose queries are seldom empty: 4 of 20 of the background."""
    made = np.random.default_rng(number)
    logits = made.normal(0, 3, (1, 20, classes + softmaxed))
    logits[..., -1] -= 4 if softmaxed else 0
    logits[0, :4] = [*([-6.0] * classes), *([6.0] * softmaxed)]
    logits -= 0 if softmaxed else 5
    boxes = made.uniform(0.3, 0.5, (1, 20, 4))  # as wide as they are far from the side
    return {"logits": np.float32(logits), "pred_boxes": np.float32(boxes)}


@pytest.mark.parametrize("class_count", [0, 3])
@pytest.mark.parametrize("softmaxed", [False, True])
def test_names_of_a_detr_declare_boxes(softmaxed, class_count):
    declared = Declaration("boxes", "DETR's output names", class_count)
    references = [small_detr(n, softmaxed=softmaxed) for n in range(8)]
    metric = Metric(None, declared=declared)
    form = derive_form(references, inputs=[fed()] * 8, metric=metric)
    decoder = form.task.decoder
    assert decoder.activation == ("softmax" if softmaxed else "sigmoid")
    assert (decoder.coding, decoder.class_count) == ("centre", 3)
    assert decoder.background == (3 if softmaxed else None)


def test_lists_of_varying_length_are_judged_by_their_boxes():
    """The first samples have as many boxes as each other; int8 finds one less in one of them."""
    references = [{"out": ended(n, pad=0)[None]} for n in range(6)]
    candidates = [*references[:5], {"out": references[5]["out"][:, :-1]}]
    accuracy = compare_outputs(references, candidates)
    assert accuracy.parts == () and not accuracy.problems
    assert accuracy.task.value > 0.9


@pytest.mark.parametrize(
    ("name", "side", "has_rows_first"),
    [("detection_boxes:0", 1, True), ("detection_boxes", 200, False), ("boxes", 1, False)],
)
def test_corners_of_tensorflow_are_rows_first(name, side, has_rows_first):
    """Relative ones; TensorRT's NMS has pixels of the usual order under the same name."""
    rows = ended(0, pad=0)
    boxes = rows[None, :, :4] * side / 200
    outputs = {name: boxes, "scores": rows[None, :, 4], "classes": rows[None, :, 5]}
    decoder = derive_form([outputs] * 4, inputs=[fed()] * 4).task.decoder
    order = [1, 0, 3, 2] if has_rows_first else [0, 1, 2, 3]
    np.testing.assert_allclose(decoder.boxes({}, outputs).boxes, boxes[0][:, order])


@pytest.mark.parametrize("form", [v8, forms.gated, small_list])
def test_outputs_beside_boxes_are_uncovered(form):
    """As the lanes of YOLOP; the number of boxes of a list is none of them.

    A matrix [N, K] may have K classes in place of a value for each of K boxes.
    """
    made = np.random.default_rng(0)
    references = []
    for number in range(8):
        lanes = made.normal(0, 1, (1, 2, 24, 24)).astype(np.float32)
        beside = {"lanes": lanes}
        if form is small_list:
            (rows,) = form(number).values()
            beside["classes"] = made.normal(0, 1, (1, rows.shape[1])).astype(np.float32)
            beside["count"] = np.float32([number])
        references.append(form(number) | beside)
    read, _ = figure(references, references)
    others = ("lanes", "classes") if form is small_list else ("lanes",)
    assert read.task.name == "boxes" and read.uncovered == others


def test_selected_indices_may_change_in_number():
    """As Tiny YOLO v3 has them beside all boxes and scores; int8 selects one less."""
    outputs = []
    for number in range(6):
        selected = np.random.default_rng(number).integers(0, 9, (5 + number, 3))
        outputs.append(v8(number) | {"selected": selected})
    candidates = [*outputs[:5], outputs[5] | {"selected": outputs[5]["selected"][1:]}]
    accuracy = compare_outputs(outputs, candidates)
    assert accuracy.task.value == 1 and not accuracy.problems


@pytest.mark.parametrize("counts", [[10, 10, 10, 10], [9, 10, 10, 8]])
def test_masks_of_a_list_may_change_in_number(counts):
    """As Mask R-CNN has them; int8 finds one box less in the last sample."""

    def outputs(number, count):
        rows = ended(number, pad=0)[:count]
        masks = np.random.default_rng(number).uniform(0, 1, (count, 1, 28, 28)).astype(np.float32)
        return {"boxes": rows[:, :4], "labels": rows[:, 5], "scores": rows[:, 4], "masks": masks}

    references = [outputs(n, count) for n, count in enumerate(counts)]
    candidates = [*references[:3], outputs(3, counts[3] - 1)]
    accuracy = compare_outputs(references, candidates)
    assert not accuracy.problems and accuracy.parts == ()
    assert accuracy.task.lost > 0


@pytest.mark.parametrize("form", [small_detr, one_level])
def test_boxes_that_are_set_are_taken_from_any_layout(form):
    made = np.random.default_rng(0)
    references = [form(n) for n in range(8)]
    for outputs in references:
        for name, value in outputs.items():  # no rows that detect nothing
            outputs[name] = value + made.uniform(0, 0.3, value.shape).astype(np.float32)
    metric = Metric(None, task="boxes")
    task = derive_form(references, inputs=[fed((64, 64))] * 8, metric=metric).task
    assert task.name == "boxes" and "boxes" in task.form


def are_rays(boxes):
    """Whether numbers may be distances from a cell to an outline, one every 10 degrees."""
    return boxes.has_cells and boxes.numbers.shape[1] == 36 and boxes.numbers.min() >= 0


def decode_rays(numbers, cells):
    """Corners about outlines of distances [n, 36], in strides, from cells [n, 3]."""
    angles = np.radians(np.arange(0, 360, 10))
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    outlines = numbers[:, :, None] * directions + cells[:, None, :2] + 0.5
    return np.concatenate([outlines.min(axis=1), outlines.max(axis=1)], axis=1) * cells[:, 2:]


def rays(number):
    """A detector of polar boxes (PolarMask, Xie et al. 2020): circles about its cells."""
    boxes, scores = yolo(number)
    radii = np.random.default_rng(number).uniform(0.5, 2, (len(boxes), 1))
    return {
        "scores": scores[None].astype(np.float32),
        "rays": np.repeat(radii, 36, axis=1)[None].astype(np.float32),
    }


def test_coding_is_added_as_one_row(monkeypatch):
    samples, inputs = [rays(number) for number in range(4)], [fed()] * 4
    assert same_task(samples) is None
    rays_coding = BoxCoding("36 distances", "PolarMask", are_rays, decode_rays, uses_cells=True)
    monkeypatch.setitem(CODINGS, "rays", rays_coding)
    task = derive_form(samples, inputs=inputs).task
    assert task.form == "scores: scores of 5 classes, boxes by rays"

    found = task.decoder.boxes(fed(), samples[0])
    places, strides = np.hsplit(CELLS, [2])
    centres, radii = (places + 0.5) * strides, samples[0]["rays"][0, :, :1] * strides
    corners = np.concatenate([centres - radii, centres + radii], axis=1)
    seen = scene(0)[0]
    np.testing.assert_allclose(np.sort(found.boxes, axis=0), np.sort(corners[seen], axis=0))
