"""Mean average precision against cases worked out by hand."""

import numpy as np
import pytest

from deploy.metrics.precision import AveragePrecision
from deploy.metrics.tasks.detections import Detections

ONE = np.array([[0.0, 0, 10, 10]])
TWO = np.array([[0.0, 0, 10, 10], [20, 20, 30, 30]])


def found(boxes, scores, classes=None):
    boxes = np.array(boxes, np.float64).reshape(-1, 4)
    kinds = np.zeros(len(boxes), np.int64) if classes is None else np.array(classes)
    return Detections(boxes, np.array(scores, np.float64), kinds)


def precision(*images):
    counts = AveragePrecision()
    for detections, boxes, *rest in images:
        classes = np.array(rest[0] if rest else [0] * len(boxes), np.int64)
        crowds = np.array(rest[1] if len(rest) > 1 else [False] * len(boxes), np.bool_)
        counts.add(detections, np.array(boxes, np.float64).reshape(-1, 4), classes, crowds)
    return counts.result()


def test_all_found_and_nothing_else_is_one():
    assert precision((found(TWO, [0.9, 0.8]), TWO)) == (1, 1)


def test_one_of_two_found_is_half_of_the_recalls():
    # precision 1 up to recall 0.5: 51 of the 101 points
    assert precision((found(ONE, [0.9]), TWO))[1] == pytest.approx(51 / 101)


def test_a_false_box_before_the_true_one_halves_the_precision():
    wrong = [[50, 50, 60, 60], [0, 0, 10, 10]]
    assert precision((found(wrong, [0.9, 0.8]), ONE))[1] == pytest.approx(0.5)
    assert precision((found(wrong, [0.9, 0.95]), ONE))[1] == 1  # and behind it, it costs nothing


def test_precision_is_made_to_fall():
    # hit, miss, hit of 2 objects: precision 1 up to recall .5, then 2/3
    boxes = [TWO[0], [50, 50, 60, 60], TWO[1]]
    wanted = (51 + 50 * 2 / 3) / 101
    assert precision((found(boxes, [0.9, 0.8, 0.7]), TWO))[1] == pytest.approx(wanted)


def test_an_overlap_of_0_72_counts_at_five_of_ten_thresholds():
    # IoU 0.72: right at .50 .55 .60 .65 .70
    assert precision((found([[0, 0, 10, 7.2]], [0.9]), ONE)) == (pytest.approx(0.5), 1)


def test_a_second_box_on_one_object_is_false():
    boxes = [[0, 0, 10, 10], [0, 0, 10, 9.9], TWO[1]]
    wanted = (51 + 50 * 2 / 3) / 101
    assert precision((found(boxes, [0.9, 0.8, 0.7]), TWO))[1] == pytest.approx(wanted)


def test_classes_and_images_count_apart():
    # class 0: 1; class 1, found elsewhere alone: 0
    first = (found(ONE, [0.9]), TWO, [0, 1])
    second = (found(TWO[1:], [0.9], [1]), np.zeros((0, 4)))
    assert precision(first, second)[1] == pytest.approx(0.5)


def test_crowds_are_neither_objects_nor_misses():
    boxes = [[50, 50, 52, 52], [0, 0, 10, 10]]  # the first lies in the crowd
    there = [[0, 0, 10, 10], [40, 40, 80, 80]]
    assert precision((found(boxes, [0.9, 0.8]), there, [0, 0], [False, True]))[1] == 1


def test_nothing_found_is_zero():
    assert precision((found([], []), ONE)) == (0, 0)
