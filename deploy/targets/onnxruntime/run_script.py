"""`X_run.py`: a program that runs the engine on pictures, with cv2, numpy and onnxruntime alone.

It repeats the arithmetic of `deploy.feed.pixels` bit for bit, so that it feeds what calibrated. A
model whose inputs are not one picture of a fixed size has no such program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.feed.preprocess import Preprocess
from deploy.tensors import TensorSpec

# way of resizing -> the lines that give the (height, width) of the resized picture
_SIZES = {
    "stretch": "    return HEIGHT, WIDTH\n",
    "letterbox": (
        "    if WIDTH * rows <= HEIGHT * columns:\n"
        "        return max(1, min(HEIGHT, (2 * rows * WIDTH + columns) // (2 * columns))), WIDTH\n"
        "    return HEIGHT, max(1, min(WIDTH, (2 * columns * HEIGHT + rows) // (2 * rows)))\n"
    ),
    "short-side": (
        "    if rows <= columns:\n"
        "        return {short}, columns * {short} // rows\n"
        "    return rows * {short} // columns, {short}\n"
    ),
    "fit-height": "    return HEIGHT, min(WIDTH, -(-HEIGHT * columns // rows))\n",
}
_PLACES = {
    "centre": (
        "    top, left = (HEIGHT - rows) // 2, (WIDTH - columns) // 2\n"
        "    canvas[top : top + rows, left : left + columns] = picture\n"
    ),
    "top-left": "    canvas[:rows, :columns] = picture\n",
    "crop": (
        "    top, left = (rows - HEIGHT) // 2, (columns - WIDTH) // 2\n"
        "    canvas[:] = picture[top : top + HEIGHT, left : left + WIDTH]\n"
    ),
}
_FLAGS = {"nearest": "NEAREST", "linear": "LINEAR", "cubic": "CUBIC", "lanczos": "LANCZOS4"}
_PROGRAM = '''\
#!/usr/bin/env python3
"""Run the int8 model in this folder on pictures: python THIS_FILE PICTURE ..."""

import sys
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

HEIGHT, WIDTH = {height}, {width}
CLASSES = {classes}  # class -> name


def resized_size(rows, columns):
{sizes}

def read(path):
    """Return a picture as the model's input, as calib8 fed it."""
    picture = cv2.imread(path, cv2.{flag})
    if picture is None:
        sys.exit(f"{{path}} is no picture that OpenCV reads")
    rows, columns = size = resized_size(*picture.shape[:2])
    kind = {kind}
    if picture.shape[:2] != size:
        picture = cv2.resize(picture, (columns, rows), interpolation=kind)
    picture = picture.reshape(rows, columns, {channels}){order}
    canvas = np.empty((HEIGHT, WIDTH, {channels}), np.float32)
    canvas[:] = np.float32({pad})
{place}    values = canvas * np.float32({scale})
    values = (values - np.float32({mean})) / np.float32({std})
    return values{layout}[np.newaxis].astype(np.{dtype})


def find_boxes(values, path):
    """Yield (class, score, left, top, right, bottom) of a YOLO's output, in pixels of the file."""
    yolo_v8 = values.shape[1] == 4 + len(CLASSES)  # else a row has an objectness, as in YOLOv5
    rows = values[0].T if yolo_v8 else values[0]
    scores = rows[:, 4:] if yolo_v8 else rows[:, 5:] * rows[:, 4:5]
    centre, size, best = rows[:, :2], rows[:, 2:4], scores.argmax(axis=1)
    boxes = np.concatenate([centre - size / 2, size], axis=1)
    if boxes.max() <= 2:  # relative to the input
        boxes = boxes * [WIDTH, HEIGHT, WIDTH, HEIGHT]
    high, wide = cv2.imread(path).shape[:2]
    rows, columns = resized_size(high, wide)
    top, left = {corner}
    zoom = np.array([wide / columns, high / rows] * 2)
    for place in cv2.dnn.NMSBoxesBatched(boxes, scores.max(axis=1), best, 0.25, 0.45):
        corners = np.concatenate([boxes[place, :2], boxes[place, :2] + boxes[place, 2:]])
        corners = (corners - [left, top, left, top]) * zoom
        yield CLASSES[int(best[place])], float(scores[place].max()), *corners.round(1).tolist()


session = onnxruntime.InferenceSession(str(Path(__file__).with_name({engine})))
for path in sys.argv[1:]:
    outputs = session.run(None, {{{input}: read(path)}})
    for output, values in zip(session.get_outputs(), outputs):
        values = np.asarray(values)
        told = f"{{values.dtype}} {{list(values.shape)}}"
        if values.ndim == 2 and len(values) == 1 and values.shape[1] > 1:  # a score for each class
            best = int(values.argmax())
            told = f"class {{CLASSES.get(best, best)}}, {{values.max():.4g}}"
        sides = (values.shape[1], values.shape[2] - 1) if values.ndim == 3 else ()
        if CLASSES and 4 + len(CLASSES) in sides:
            for kind, score, *box in find_boxes(values, path):
                print(path, output.name, f"{{kind}} {{score:.2f}} {{box}}")
        else:
            print(path, output.name, told)
'''


def run_program(
    engine: str,
    inputs: Sequence[TensorSpec],
    how: Preprocess | None,
    classes: Mapping[int, str],
) -> str | None:
    """Return the text of a program; None where the inputs are not one picture of a fixed size.

    `engine`: file name of the engine, in the same folder. `how`: the resolved preprocessing; None
    for arrays. `classes`: class -> name; empty if unknown.
    """
    if how is None or len(inputs) != 1 or how.size is None or None in how.size:
        return None
    kind = f"cv2.INTER_{_FLAGS.get(how.interpolation, 'AREA')}"
    if how.interpolation == "area":  # enlarging by areas would repeat pixels
        enlarged = "rows > picture.shape[0] or columns > picture.shape[1]"
        kind = f"cv2.INTER_LINEAR if {enlarged} else {kind}"
    place = {"short-side": "crop", "letterbox": how.anchor}.get(how.resize, "top-left")
    return _PROGRAM.format(
        engine=ascii(engine),
        classes=ascii(dict(classes)),
        height=how.box[0],
        width=how.box[1],
        sizes=_SIZES[how.resize].format(short=how.short),
        flag=("IMREAD_ANYDEPTH" if how.deep else "IMREAD_GRAYSCALE")
        if how.color == "grey"
        else "IMREAD_COLOR",
        kind=kind,
        channels=how.channels,
        order="[:, :, ::-1]" if how.color == "rgb" else "",
        pad=list(how.pad),
        place=_PLACES[place],
        corner="(HEIGHT - rows) // 2, (WIDTH - columns) // 2" if place != "top-left" else "0, 0",
        scale=how.scale,
        mean=list(how.mean),
        std=list(how.std),
        layout="" if how.layout == "nhwc" else ".transpose(2, 0, 1)",
        dtype=inputs[0].dtype,
        input=ascii(inputs[0].name),
    )
