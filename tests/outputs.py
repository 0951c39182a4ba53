"""Outputs of models, made by numpy, for the tests of what they are for."""

import numpy as np

from deploy.metrics.accuracy import Comparison
from deploy.metrics.output_form import derive_form, derive_from_first
from deploy.tasks import Metric
from deploy.tasks.declarations import Declaration
from deploy.tasks.detector import list_cells

SIZE = (160, 224)  # height, width of the picture

CELLS = list_cells((8, 16, 32), SIZE)


def rng():
    return np.random.default_rng(5)


def fed(size=SIZE):
    return {"images": np.zeros((1, 3, *size), np.float32)}


def figure(references, candidates, inputs=None, ends=None):
    """Form and figure of two models' outputs, one mapping a sample; `ends`: what the graph says."""
    inputs = inputs or [fed()] * len(references)
    metric = Metric(None, declared=Declaration(ends=ends or {}))
    form = derive_form(references, inputs=inputs, metric=metric)
    assert form.task is not None
    tally = form.task.tally()
    for one in zip(inputs, references, candidates, strict=True):
        tally.add(*one)
    return form, tally.result()


def compare(reference, candidate, samples, *, labels=None, count=None):
    """Run both sessions on the same samples and compare every output."""
    form, pairs = derive_from_first((feed, reference.run(feed)) for feed in samples)
    comparison = Comparison(form, labels=labels)
    for feed, outputs in pairs:
        comparison.add(feed, outputs, candidate.run(feed), count=count)
    return comparison.result()


def compare_outputs(references, candidates, inputs=None, *, labels=None, metric=None, form=None):
    """Accuracy of a candidate's outputs, one mapping a sample or batch."""
    inputs = inputs or [fed()] * len(references)
    form = form or derive_form(references, inputs=inputs, metric=metric)
    comparison = Comparison(form, labels=labels)
    for arrays in zip(inputs, references, candidates, strict=True):
        comparison.add(*arrays)
    return comparison.result()


def same_task(outputs, inputs=None, ends=None):
    metric = Metric(None, declared=Declaration(ends=ends or {}))
    task = derive_form(outputs, inputs=inputs or [fed()] * len(outputs), metric=metric).task
    return None if task is None else task.name


def change_all(samples, change):
    """The samples' outputs, each array after `change`."""
    changed = []
    for outputs in samples:
        changed.append({name: change(array) for name, array in outputs.items()})
    return changed


def scene(number, objects=6, classes=5):
    """What one picture shows: anchors of the grid that see an object, their class."""
    made = np.random.default_rng(number)
    return made.choice(len(CELLS), objects, replace=False), made.integers(0, classes, objects)


def yolo(number, *, classes=5, floor=0.001, score=0.9):
    """(cx cy w h) [A, 4] at the anchors and scores [A, C] of a picture."""
    cells, strides = np.hsplit(CELLS, [2])
    made = np.random.default_rng(100 + number)
    places = (cells + 0.5) * strides + made.uniform(-2, 2, cells.shape)
    boxes = np.concatenate([places, np.tile([[3.0, 3.0]], (len(cells), 1))], axis=1)
    scores = made.uniform(0, floor, (len(cells), classes))
    seen, which = scene(number, classes=classes)
    scores[seen, which] = score
    return boxes, scores


def v8(number, **options):
    boxes, scores = yolo(number, **options)
    return {"output0": np.concatenate([boxes, scores], axis=1).T[None].astype(np.float32)}


def softmax(x, axis=1):
    power = np.exp(x - x.max(axis=axis, keepdims=True))
    return power / power.sum(axis=axis, keepdims=True)


def posed(number, points=5, length=3, moved=0.0):
    """YOLO with key points about each box's centre, the last of which is never visible."""
    value = v8(number, classes=1)["output0"][0]
    value[2:4] = 20
    far = np.random.default_rng(number).uniform(-8, 8, (points, 1, 2, 1)) + moved
    seen = np.broadcast_to(np.arange(points) < points - 1, (value.shape[1], points)).T
    rows = [value]
    for own, told in zip(far, seen, strict=True):
        rows += [value[:2] + own[0], told[None] * 0.9][: length - 1]
    return {"output0": np.concatenate(rows)[None].astype(np.float32)}


def turned(number, by=0.0):
    """YOLO with an angle of each box, which is longer than it is high."""
    value = v8(number, classes=2)["output0"][0]
    value[2:4] = [[60], [15]]
    angles = np.random.default_rng(number).uniform(-0.7, 2.2, (1, value.shape[1]))
    return {"output0": np.concatenate([value, angles + by])[None].astype(np.float32)}


def split_yolo(number, boxes="rows", scores="rows"):
    """YOLO's boxes and scores in outputs of their own, either turned."""
    value = v8(number)["output0"]
    outputs = {"boxes": value[:, :4], "scores": value[:, 4:]}
    layouts = {"boxes": boxes, "scores": scores}
    for name in outputs:
        if layouts[name] != "turned":
            outputs[name] = outputs[name].swapaxes(1, 2)
        if layouts[name] == "spaced":  # a dimension of 1 before the numbers of a box, as YOLOv4's
            outputs[name] = outputs[name][:, :, None]
    return outputs


def gated(number, raw=False, maps=False, classes=1):
    """Scores, a gate, distances and key points of each level, as of faces."""
    outputs = {}
    for stride in (8, 16, 32):
        made = np.random.default_rng(number * 100 + stride)
        sides = SIZE[0] // stride, SIZE[1] // stride
        count = sides[0] * sides[1]
        seen, which = made.choice(count, 2, replace=False), made.integers(0, classes, 2)
        gate = made.uniform(0.001, 0.01, (1, count, 1))
        scores = made.uniform(0.001, 0.04, (1, count, classes))
        gate[0, seen] = scores[0, seen, which] = 0.9
        level = {"cls": scores, "obj": gate, "bbox": made.uniform(0.5, 4, (1, count, 4))}
        if raw:
            level |= {n: np.log(level[n] / (1 - level[n])) for n in ("cls", "obj")}
        else:
            level["kps"] = made.normal(0, 2, (1, count, 10))
        for name, value in level.items():
            turned = value.transpose(0, 2, 1).reshape(1, -1, *sides)
            outputs[f"{name}_{stride}"] = (turned if maps else value).astype(np.float32)
    return outputs


def queries(number, classes=11):
    made = np.random.default_rng(number)
    value = made.uniform(0.001, 0.02, (1, 300, 4 + classes))
    value[..., :2] = made.uniform(0.2, 0.8, (1, 300, 2))
    value[..., 2:4] = made.uniform(0.1, 0.3, (1, 300, 2))
    value[0, np.arange(7), 4 + made.integers(0, classes, 7)] = 0.8
    return {"y": value.astype(np.float32)}


def peaked(*, channels=4, side=16, peak=0.9, pixels=12, rest=0.0):
    """Maps [1, K, H, W], each with so many pixels of one height."""
    maps = np.full((1, channels, side * side), rest, np.float32)
    maps[..., 40 : 40 + pixels] = peak
    return {"heat": maps.reshape(1, channels, side, side)}


def steps(text, blank=0, symbols=30, raw=False, sides="NTC"):
    """A symbol, a blank, a symbol, ...; `sides`: order of the dimensions, with 1 for another."""
    best = [symbol for one in text for symbol in (one, one, blank)]
    scores = rng().standard_normal((len(best), symbols))
    scores[np.arange(len(best)), best] = 12
    value = scores if raw else softmax(scores)
    value = value.T if sides.index("C") < sides.index("T") else value
    places = tuple(at for at, side in enumerate(sides) if side in "N1")
    return {"y": np.expand_dims(value, places).astype(np.float32)}


def framed(best, classes=6, made=None, sure=9):
    """Raw scores [T, C] of the classes of steps, about 0 in each of them."""
    made = rng() if made is None else made
    scores = made.standard_normal((len(best), classes))
    scores[np.arange(len(best)), best] += sure
    return scores - scores.mean(axis=1, keepdims=True)


def spoken(number, classes, steps=60):
    """Silence, class 0, for more than half of the time, and something else in one go."""
    made = np.random.default_rng(number)
    best = np.zeros(steps, int)
    best[10:35] = made.integers(1, classes, 25)
    return best
