"""The benchmarks' own measure of a detector: boxes of a raw table, and which are found again."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from box_scores import kept, yolo


def table(*boxes):
    """[4 + 2, n] of (x, y, width, height, score of class 0, score of class 1)."""
    return np.array(boxes, np.float32).T


HERE = (50, 50, 20, 20)
NEAR = (51, 50, 20, 20)
FAR = (150, 50, 20, 20)


@pytest.mark.parametrize(
    ("found", "count"),
    [
        pytest.param((*NEAR, 0.3, 0), 1, id="moved a little"),
        pytest.param((*HERE, 0, 0.9), 0, id="of another class"),
        pytest.param((*FAR, 0.9, 0), 0, id="elsewhere"),
        pytest.param((*HERE, 0.1, 0), 0, id="of too low a score"),
    ],
)
def test_a_box_is_kept_or_lost(found, count):
    assert kept([yolo(table(found))], [yolo(table((*HERE, 0.9, 0)))]) == (count, 1)


def test_one_box_answers_for_one_other_only():
    reference = yolo(table((*HERE, 0.9, 0), (54, 54, 20, 20, 0.8, 0)), iou=0.9)
    assert len(reference.scores) == 2
    assert kept([yolo(table((52, 52, 20, 20, 0.9, 0)))], [reference]) == (1, 2)


def test_overlapping_boxes_of_one_class_are_one_and_of_two_are_two():
    for other, count in (((0.8, 0), 1), ((0, 0.8), 2)):
        assert len(yolo(table((*HERE, 0.9, 0), (*NEAR, *other))).scores) == count
