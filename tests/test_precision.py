"""Mean average precision of detections against annotated objects, by hand."""

import numpy as np
import pytest

from deploy.metrics.precision import AveragePrecision
from deploy.tasks.detections import Detections

BOX = [0.0, 0, 10, 10]
OTHER_BOX = [20.0, 20, 30, 30]
EMPTY_PLACE = [50.0, 50, 60, 60]  # a box there overlaps no object
SLIGHTLY_LOWER_BOX = [0.0, 0, 10, 9.9]
LOW_BOX = [0.0, 0, 10, 7.2]  # IoU 0.72 with `BOX`: a hit at .50 .55 .60 .65 .70
SMALL_BOX = [50.0, 50, 52, 52]
CROWD = [40.0, 40, 80, 80]  # around `SMALL_BOX`

HALF_RECALL = 51 / 101  # precision 1 at the recalls 0 to .50, 51 of the 101, then 0
HIT_MISS_HIT = (51 + 50 * 2 / 3) / 101  # precision 1 up to recall .5, then 2/3


def detect(boxes, scores, classes=None):
    boxes = np.array(boxes, np.float64).reshape(-1, 4)
    class_numbers = [0] * len(boxes) if classes is None else classes
    return Detections(boxes, np.array(scores, np.float64), np.array(class_numbers, np.int64))


def annotate(boxes, classes=None, crowds=None):
    """Boxes, classes (0 unless given) and crowds (none unless given) of the objects of an image."""
    class_numbers = [0] * len(boxes) if classes is None else classes
    is_crowd = [False] * len(boxes) if crowds is None else crowds
    return (
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(class_numbers, np.int64),
        np.array(is_crowd, np.bool_),
    )


# (detections, objects) of each image, mAP over all IoUs, mAP at .50
PRECISIONS = {
    "all found": (
        [(detect([BOX, OTHER_BOX], [0.9, 0.8]), annotate([BOX, OTHER_BOX]))],
        1,
        1,
    ),
    "one of two found": (
        [(detect([BOX], [0.9]), annotate([BOX, OTHER_BOX]))],
        HALF_RECALL,
        HALF_RECALL,
    ),
    "false box with the higher score": (
        [(detect([EMPTY_PLACE, BOX], [0.9, 0.8]), annotate([BOX]))],
        0.5,
        0.5,
    ),
    "false box with the lower score": (
        [(detect([EMPTY_PLACE, BOX], [0.9, 0.95]), annotate([BOX]))],
        1,
        1,
    ),
    "hit, miss, hit": (
        [
            (
                detect([BOX, EMPTY_PLACE, OTHER_BOX], [0.9, 0.8, 0.7]),
                annotate([BOX, OTHER_BOX]),
            )
        ],
        HIT_MISS_HIT,
        HIT_MISS_HIT,
    ),
    "overlap of 0.72": ([(detect([LOW_BOX], [0.9]), annotate([BOX]))], 0.5, 1),
    "second box on an object": (
        [
            (
                detect([BOX, SLIGHTLY_LOWER_BOX, OTHER_BOX], [0.9, 0.8, 0.7]),
                annotate([BOX, OTHER_BOX]),
            )
        ],
        HIT_MISS_HIT,
        HIT_MISS_HIT,
    ),
    # class 0 has precision 1; class 1, found in the other image only, 0
    "classes and images are separate": (
        [
            (detect([BOX], [0.9]), annotate([BOX, OTHER_BOX], classes=[0, 1])),
            (detect([OTHER_BOX], [0.9], classes=[1]), annotate([])),
        ],
        0.5,
        0.5,
    ),
    "box in a crowd is no miss, the crowd no object": (
        [
            (
                detect([SMALL_BOX, BOX], [0.9, 0.8]),
                annotate([BOX, CROWD], crowds=[False, True]),
            )
        ],
        1,
        1,
    ),
    "nothing found": ([(detect([], []), annotate([BOX]))], 0, 0),
}


@pytest.mark.parametrize("case", PRECISIONS)
def test_mean_average_precision_by_hand(case):
    images, mean, mean_at_50 = PRECISIONS[case]
    precision = AveragePrecision()
    for detections, objects in images:
        precision.add(detections, *objects)
    assert precision.result() == (pytest.approx(mean), pytest.approx(mean_at_50))


def test_objects_are_counted_without_crowds():
    precision = AveragePrecision()
    precision.add(detect([], []), *annotate([BOX, OTHER_BOX, CROWD], crowds=[False, False, True]))
    assert precision.objects == 2


def test_no_objects_have_no_precision():
    precision = AveragePrecision()
    precision.add(detect([BOX], [0.9]), *annotate([]))
    assert precision.result() == (0.0, 0.0)


def test_only_the_best_100_boxes_count():
    """COCO's evaluation reads 100 boxes of an image, the best by score."""
    precision = AveragePrecision()
    boxes = [*[EMPTY_PLACE] * 100, BOX]
    precision.add(detect(boxes, np.linspace(0.9, 0.1, 101)), *annotate([BOX]))
    assert precision.result() == (0.0, 0.0)
