"""What outputs are for, told from their form, and how much of it a candidate keeps."""

import numpy as np
import pytest

from deploy.metrics.form import form_of
from deploy.metrics.tasks.detections import Detections, matched, overlaps, suppressed
from deploy.metrics.tasks.grid import Grid

SIZE = (160, 224)  # height, width of the picture
GRID = Grid((8, 16, 32), 1, False)


def rng():
    return np.random.default_rng(5)


def fed(size=SIZE):
    return {"images": np.zeros((1, 3, *size), np.float32)}


def figure(references, candidates, inputs=None):
    """Form and figure of two models' outputs, one mapping a sample."""
    inputs = inputs or [fed()] * len(references)
    form = form_of(references, inputs=inputs)
    assert form.task is not None
    tally = form.task.tally()
    for one in zip(inputs, references, candidates, strict=True):
        tally.add(*one)
    return form, tally.result()


def same_task(outputs, inputs=None):
    task = form_of(outputs, inputs=inputs or [fed()] * len(outputs)).task
    return None if task is None else task.name


# ------------------------------------------------------------------ boxes


def scene(number, objects=6, classes=5):
    """What one picture shows: anchors of the grid that see an object, their class."""
    made = np.random.default_rng(number)
    return made.choice(GRID.count(SIZE), objects, replace=False), made.integers(0, classes, objects)


def yolo(number, *, classes=5, floor=0.001, score=0.9):
    """(cx cy w h) [A, 4] at the anchors and scores [A, C] of a picture."""
    cells, strides = GRID.cells(SIZE)
    made = np.random.default_rng(100 + number)
    places = (cells + 0.5) * strides[:, None] + made.uniform(-2, 2, cells.shape)
    boxes = np.concatenate([places, np.tile([[3.0, 3.0]], (len(cells), 1))], axis=1)
    scores = made.uniform(0, floor, (len(cells), classes))
    seen, which = scene(number, classes=classes)
    scores[seen, which] = score
    return boxes, scores


def v8(number, **options):
    boxes, scores = yolo(number, **options)
    return {"output0": np.concatenate([boxes, scores], axis=1).T[None].astype(np.float32)}


def v5(number):
    boxes, scores = yolo(number)
    best = scores.max(axis=1, keepdims=True)
    classes = np.where(scores > 0.5, 1.0, np.random.default_rng(9).uniform(0, 0.7, scores.shape))
    value = np.concatenate([boxes, best, classes], axis=1)[None]
    return {"output": value.astype(np.float32)}


def yolox(number):
    """As v5, the boxes left in their cells."""
    value = v5(number)["output"].astype(np.float64)
    cells, strides = GRID.cells(SIZE)
    value[0, :, :2] = value[0, :, :2] / strides[:, None] - cells
    value[0, :, 2:4] = np.log(value[0, :, 2:4] / strides[:, None])
    return {"output": value.astype(np.float32)}


def without(outputs, number, lost, rows):
    """The same with the first `lost` objects unseen; `rows` is where the scores are."""
    value = next(iter(outputs.values())).copy()
    anchors = scene(number)[0][:lost]
    value[(0, slice(4, None), anchors) if rows == 1 else (0, anchors, slice(4, None))] = 0
    return {next(iter(outputs)): value}


@pytest.mark.parametrize(("form", "rows"), [(v8, 1), (v5, -1), (yolox, -1)])
def test_lost_boxes_are_counted_in_every_form(form, rows):
    references = [form(n) for n in range(8)]
    candidates = [without(one, n, 1, rows) for n, one in enumerate(references)]
    _, same = figure(references, references)
    assert same.value == 1 and same.task == "boxes" and same.figure == "boxes kept"
    assert same.words == "48 of 48 boxes of FP32 kept, 0 new (score above 0.25)"
    _, found = figure(references, candidates)
    assert found.words.startswith("40 of 48 boxes of FP32 kept, 0 new")
    assert found.value == pytest.approx(80 / 88) and found.samples == 8


def test_scores_are_a_part_even_where_first_samples_show_no_object():
    form, _ = figure([v8(n, score=0.0) for n in range(4)], [v8(n) for n in range(4)])
    assert [part.label for part in form.parts] == ["output0[0:4]", "output0[4:9]"]


def test_boxes_that_move_change_class_or_appear_are_told():
    references = [v8(n) for n in range(8)]
    moved = [{"output0": one["output0"].copy()} for one in references]
    for one in moved:
        one["output0"][:, :2] += 2  # of boxes 3 wide
    assert "0 of 48 boxes of FP32 kept, 48 new" in figure(references, moved)[1].words
    turned = [
        {"output0": np.concatenate([v[:, :4], np.roll(v[:, 4:], 1, axis=1)], axis=1)}
        for v in (one["output0"] for one in references)
    ]
    assert "0 of 48 boxes" in figure(references, turned)[1].words
    fewer = [without(one, n, 3, 1) for n, one in enumerate(references)]
    assert "24 of 24 boxes of FP32 kept, 24 new" in figure(fewer, references)[1].words


@pytest.mark.parametrize(("score", "said"), [(0.9, "0.25"), (0.2, "0.15"), (0.1, "0.05")])
def test_the_threshold_goes_down_until_there_are_boxes(score, said):
    references = [v8(n, score=score) for n in range(4)]
    assert figure(references, references)[1].words.endswith(f"(score above {said})")


def test_where_fp32_finds_next_to_nothing_there_is_no_figure():
    references = [v8(n, score=0.0) for n in range(4)]
    assert figure(references, [v8(n) for n in range(4)])[1] is None


def test_a_candidate_of_nan_keeps_no_box():
    references = [v8(n) for n in range(4)]
    broken = [{"output0": one["output0"] * np.nan} for one in references]
    assert figure(references, broken)[1].value == 0


def test_anchors_that_do_not_fit_the_picture_are_no_boxes():
    outputs = [v8(n) for n in range(4)]
    assert same_task(outputs) == "boxes"
    assert same_task(outputs, [fed((96, 96))] * 4) is None
    mixed = [{"output0": rng().permutation(one["output0"], axis=2)} for one in outputs]
    assert same_task(mixed) is None


def test_overlaps_by_hand():
    one = np.array([[0.0, 0, 2, 2], [5, 5, 5, 9]])
    other = np.array([[1.0, 0, 3, 2], [0, 0, 2, 2]])
    np.testing.assert_allclose(overlaps(one, other), [[1 / 3, 1], [0, 0]])


def test_suppression_is_by_class_and_matching_one_to_one():
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    found = Detections.of(boxes, np.array([0.9, 0.8, 0.7, 0.6]), np.array([0, 0, 1, 0]))
    kept = suppressed(found)
    np.testing.assert_allclose(kept.scores, [0.9, 0.7, 0.6])
    assert matched(kept, kept) == 3
    assert matched(found, kept) == 3  # one box of the candidate stands for one


# ------------------------------------------------------------------ classes


def softmax(x):
    power = np.exp(x - x.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True)


def test_equal_best_classes_are_counted():
    made = rng()
    references = [{"y": softmax(made.standard_normal((1, 20)) * 4)} for _ in range(10)]
    candidates = [{"y": one["y"].copy()} for one in references]
    for one in candidates[:3]:
        one["y"][0, (one["y"].argmax() + 1) % 20] = 1
    _, found = figure(references, candidates)
    assert found.task == "classes" and found.value == 0.7
    assert found.words == "7 of 10 best classes as FP32's, 10 among the best five"


def test_logits_are_classes_and_other_vectors_are_not():
    made = rng()

    def outputs(make):
        return [{"y": make().astype(np.float32)} for _ in range(4)]

    assert same_task(outputs(lambda: made.standard_normal((1, 10)) * 4)) == "classes"
    peaked = np.zeros((1, 1000))
    peaked[0, 17] = 12
    assert same_task(outputs(lambda: made.standard_normal((1, 1000)) + peaked)) == "classes"
    assert same_task(outputs(lambda: made.uniform(0.1, 0.9, (1, 8)))) is None  # places
    assert same_task(outputs(lambda: made.uniform(0, 1, (1, 196)))) is None  # landmarks
