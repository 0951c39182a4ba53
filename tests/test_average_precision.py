"""Mean average precision equals that of pycocotools."""

import numpy as np
import pytest

from deploy.metrics.precision import AveragePrecision
from deploy.tasks.detections import Detections

coco = pytest.importorskip(
    "pycocotools.coco", reason="pycocotools is not installed (scripts/setup dev)"
)
cocoeval = pytest.importorskip("pycocotools.cocoeval")

SIDE = 640
CLASSES = 4  # the last one is never annotated


def draw_boxes(rng, count, *, in_pixels):
    """Return boxes x y w h of all areas that COCO tells apart."""
    sides = np.exp(rng.uniform(np.log(4), np.log(400), (count, 2)))
    boxes = np.concatenate([rng.uniform(0, SIDE - sides), sides], axis=1)
    return boxes.round() if in_pixels else boxes


def draw_image(rng, *, in_pixels):
    """Return (objects, their classes and crowds), (detections, their classes and scores)."""
    count = 0 if rng.random() < 0.2 else rng.integers(1, 9)
    objects = draw_boxes(rng, count, in_pixels=in_pixels)
    classes, crowds = rng.integers(0, CLASSES - 1, count), rng.random(count) < 0.15
    repeats = rng.integers(0, 4, count)  # some objects are found several times, some never
    found = np.repeat(objects, repeats, axis=0)
    found = found + rng.normal(0, 0.08, found.shape) * np.tile(found[:, 2:], 2)
    found[:, 2:] = np.abs(found[:, 2:]) + 1
    false = draw_boxes(
        rng, rng.choice([0, 9, 90, 500], p=[0.3, 0.3, 0.3, 0.1]), in_pixels=in_pixels
    )
    detections = np.concatenate([found.round() if in_pixels else found, false])
    kinds = np.concatenate([np.repeat(classes, repeats), rng.integers(0, CLASSES, len(false))])
    scores = rng.uniform(0.06, 0.8, len(detections))
    scores[: len(found)] += 0.2
    scores = scores.round(2)  # many are equal
    order = np.argsort(-scores, kind="stable")
    return (objects, classes, crowds), (detections[order], kinds[order], scores[order])


def to_corners(boxes):
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


def evaluate_with_coco(rng, images):
    annotations, results = [], []
    for image_id, (truth, detected) in enumerate(images):
        for box, kind, crowd in zip(*truth, strict=True):
            area = float(box[2] * box[3] * rng.uniform(0.3, 1))  # that of a mask
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "bbox": box.tolist(),
                    "category_id": int(kind),
                    "iscrowd": int(crowd),
                    "area": area,
                }
            )
        for box, kind, score in zip(*detected, strict=True):
            result = {"image_id": image_id, "bbox": box.tolist(), "category_id": int(kind)}
            results.append({**result, "score": float(score)})
    truth = coco.COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": number} for number in range(len(images))],
        "categories": [{"id": number} for number in range(CLASSES)],
        "annotations": annotations,
    }
    truth.createIndex()
    evaluation = cocoeval.COCOeval(truth, truth.loadRes(results), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:2]


@pytest.mark.parametrize("in_pixels", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_mean_average_precision_equals_pycocotools(seed, in_pixels):
    rng = np.random.default_rng(seed)
    images = [draw_image(rng, in_pixels=in_pixels) for _ in range(25)]
    counts = AveragePrecision()
    for (objects, classes, crowds), (detections, kinds, scores) in images:
        found = Detections(to_corners(detections), scores, kinds)
        counts.add(found, to_corners(objects), classes, crowds)
    mean, at_50 = counts.result()
    assert 0.1 < mean < at_50 < 0.98
    np.testing.assert_allclose((mean, at_50), evaluate_with_coco(rng, images), rtol=0, atol=1e-6)
