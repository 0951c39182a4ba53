"""`X_run.py`: a program that runs the engine on pictures, with cv2, numpy and onnxruntime alone.

::

    run_script.txt    reading, preparing, timing, writing
    run_tasks.txt     parts that decode and draw outputs: those of the recognised task

It repeats the arithmetic of `deploy.feed.pixels` bit for bit, so that it feeds what calibrated. A
model whose inputs are not one picture of a fixed size has no such program. Outputs of a task that
has no part here are listed by their shapes and ranges.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from string import Template

import onnx

from deploy.feed.preprocess import Preprocess
from deploy.files.reading import read_package_text
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.detector import (
    ANCHOR_MAP,
    CODINGS,
    COLUMNS,
    LIST,
    MAP,
    ROWS,
    ROWS_FIRST,
    Columns,
    RowDecoder,
)
from deploy.tasks.evaluation_task import EvaluationTask
from deploy.tasks.keypoints import Points, SimccPoints
from deploy.tasks.maps import HeatMaps, MaskMaps, Pixels
from deploy.tasks.rows import Outputs
from deploy.tasks.sequences import Text
from deploy.tasks.vectors import Classes, Labels
from deploy.tensors import Array, TensorSpec

# how a picture is resized -> the lines that give the (height, width) of the resized picture
_RESIZED_SIZE_LINES = {
    "stretch": "    return HEIGHT, WIDTH\n",
    "letterbox": (
        "    ratio = min(HEIGHT / rows, WIDTH / columns)\n"
        "    return max(1, round(rows * ratio)), max(1, round(columns * ratio))\n"
    ),
    "short-side": (
        "    if rows <= columns:\n"
        "        return {short}, columns * {short} // rows\n"
        "    return rows * {short} // columns, {short}\n"
    ),
    "fit-height": "    return HEIGHT, min(WIDTH, -(-HEIGHT * columns // rows))\n",
}
# where the resized picture stands -> the lines that copy it
_COPY_LINES = {
    "centre": (
        "    top, left = (HEIGHT - rows) // 2, (WIDTH - columns) // 2\n"
        "    canvas[top : top + rows, left : left + columns] = picture\n"
    ),
    "top-left": "    canvas[:rows, :columns] = picture\n",
    "crop": (
        "    if rows < HEIGHT or columns < WIDTH:\n"
        "        got = f'got {rows}x{columns} once it is resized'\n"
        "        sys.exit(f'a picture must reach the crop of {HEIGHT}x{WIDTH}, {got}')\n"
        "    top, left = round((rows - HEIGHT) / 2), round((columns - WIDTH) / 2)\n"
        "    canvas[:] = picture[top : top + HEIGHT, left : left + WIDTH]\n"
    ),
}
# the same -> the (row, column) in the input of its first pixel, negative where it is cropped
_FIRST_PIXELS = {
    "centre": "(HEIGHT - rows) // 2, (WIDTH - columns) // 2",
    "top-left": "0, 0",
    "crop": "round((HEIGHT - rows) / 2), round((WIDTH - columns) / 2)",
}
# interpolation -> the expression for cv2's flag; enlarging by areas would repeat pixels
_INTERPOLATIONS = {
    "nearest": "cv2.INTER_NEAREST",
    "linear": "cv2.INTER_LINEAR",
    "cubic": "cv2.INTER_CUBIC",
    "lanczos": "cv2.INTER_LANCZOS4",
    "area": (
        "cv2.INTER_LINEAR if rows > picture.shape[0] or columns > picture.shape[1]"
        " else cv2.INTER_AREA"
    ),
}


def run_program(
    engine: str,
    inputs: Sequence[TensorSpec],
    preprocess: Preprocess,
    classes: Mapping[int, str],
    task: EvaluationTask | None = None,
    outputs: Outputs | None = None,
) -> str | None:
    """Return the text of a Python program that runs an engine on a picture and draws the outputs.

    None if the model's input is not a single picture of a fixed size.

    Args:
        engine: file name of the engine, in the same folder.
        inputs: specs of the model's inputs.
        preprocess: resolved preprocessing of the pictures.
        classes: class -> name; empty if unknown.
        task: task of the outputs, whose results the program draws; None if it was not recognised.
        outputs: outputs of a sample by name, which show shapes and ranges.
    """
    if len(inputs) != 1 or preprocess.size is None or None in preprocess.size:
        return None
    batch = inputs[0].shape[0]
    if isinstance(batch, int) and batch != 1:  # a fixed batch of several pictures
        return None
    return Template(read_package_text(__package__, "run_script.txt")).substitute(
        engine=ascii(engine),
        classes=ascii(dict(classes)),
        dtype=inputs[0].dtype,
        input=ascii(inputs[0].name),
        task=_task_text(task, outputs or {}).rstrip(),  # the functions that draw the outputs
        **_reading_fields(preprocess),
        **_preparing_fields(preprocess),
    )


def _reading_fields(preprocess: Preprocess) -> dict[str, str]:
    """Return field -> Python text, for the fields of the program's template that read a picture.

    "read_flag" is OpenCV's flag for reading a file, "frame_expression" the same picture of a
    video's frame. "drawing_lines" return a copy of the picture in BGR of 8 bits, to draw on.
    """
    if preprocess.color != "grey":
        return {
            "read_flag": "IMREAD_COLOR",
            "frame_expression": "frame",
            "drawing_lines": "    return picture.copy()\n",
        }
    read_flag = "IMREAD_GRAYSCALE"
    drawing_lines = "    return cv2.cvtColor(picture, cv2.COLOR_GRAY2BGR)\n"
    if preprocess.deep:  # pixels of more than 8 bits
        read_flag = "IMREAD_ANYDEPTH"
        limits = "0, 255, cv2.NORM_MINMAX, cv2.CV_8U"
        scale_line = f"    picture = cv2.normalize(picture, None, {limits})\n"
        drawing_lines = scale_line + drawing_lines
    return {
        "read_flag": read_flag,
        "frame_expression": "cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY)",
        "drawing_lines": drawing_lines,
    }


def _preparing_fields(preprocess: Preprocess) -> dict[str, object]:
    """Return name -> value, for the fields of the program's template that prepare a picture.

    A value is a number, a list, or text: an expression or lines of Python. "first_pixel" is the
    (row, column) of the picture's first pixel in the model's input.
    """
    # where the resized picture is copied to in the input, a key of _COPY_LINES
    position = "top-left"
    if preprocess.resize == "letterbox":
        position = preprocess.anchor
    elif preprocess.resize == "short-side":
        position = "crop"
    resized_size_lines = _RESIZED_SIZE_LINES[preprocess.resize]
    return {
        "height": preprocess.input_size[0],
        "width": preprocess.input_size[1],
        "resized_size_lines": resized_size_lines.format(short=preprocess.resized_short_side),
        "interpolation": _INTERPOLATIONS[preprocess.interpolation],
        "channels": preprocess.channels,
        "color_order": "[:, :, ::-1]" if preprocess.color == "rgb" else "",
        "pad": list(preprocess.pad),
        "copy_lines": _COPY_LINES[position],
        "first_pixel": _FIRST_PIXELS[position],
        "scale": preprocess.scale,
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "axis_order": "" if preprocess.layout == "nhwc" else ".transpose(2, 0, 1)",
    }


def read_characters(model: onnx.ModelProto, task: Text) -> dict[int, str]:
    """Return symbol -> character, as the metadata of RapidOCR's models has them; {} without.

    Symbol 0 is the blank, the characters of the list follow, and a space is the last symbol.
    """
    properties = {entry.key: entry.value for entry in model.metadata_props}
    characters = properties.get("character", "").split("\n")
    if task.blank != 0 or len(characters) + 2 != task.symbols:
        return {}
    return dict(enumerate([*characters, " "], start=1))


def _task_text(task: EvaluationTask | None, outputs: Outputs) -> str:
    """Return the Python functions, as text, that decode and draw a task's outputs.

    Outputs of a task without such functions, and of an unknown one (None), are listed by their
    shapes and ranges ("values").
    """
    if isinstance(task, Classes):
        if task.are_numbers:  # class numbers without scores
            return _template_part("ranked", output=ascii(task.outputs[0]))
        return _template_part("classes", outputs=ascii(task.outputs))
    # labels are listed by name; a single probability has no name, and is listed as a value
    if isinstance(task, Labels) and outputs[task.output].size > 1:
        activation_lines = _ACTIVATIONS[task.activation]
        return _template_part("labels", output=ascii(task.output), activation=activation_lines)
    if isinstance(task, Text) and task.axis == -1:  # the program reads symbols last
        merging_lines = _MERGED_STEPS if task.merged else ""  # a repeated symbol counts once
        fields = {"symbols": task.symbols, "blank": task.blank, "merged": merging_lines}
        return _template_part("text", output=ascii(task.output), **fields)
    if isinstance(task, Pixels):
        class_expression = _pixel_classes(task, outputs)
        resize_function = _template_part("map", interpolation="NEAREST")
        return resize_function + _template_part(
            "segmentation", output=ascii(task.output), kinds=class_expression
        )
    if isinstance(task, MaskMaps):
        resize_function = _template_part("map", interpolation="LINEAR")
        return resize_function + _template_part("masks", outputs=ascii(task.outputs))
    if isinstance(task, Points | HeatMaps):
        scale = ""
        if isinstance(task, Points):
            first_output = next(iter(task.outputs))
            if _are_relative(outputs[first_output]):
                scale = " * [WIDTH, HEIGHT]"  # shares of the input's sides become pixels
        return _template_part("points", points=_point_lines(task), scale=scale)
    if isinstance(task, BoxDetection):
        return _box_text(task, outputs) or _template_part("values")
    return _template_part("values")


def _template_part(name: str, **fields: object) -> str:
    """Return a part of the template run_tasks.txt, filled in, and two empty lines after it."""
    text = read_package_text(__package__, "run_tasks.txt")
    (part,) = re.findall(rf"^=== {name}\n(.*?)\s*(?=^===|\Z)", text, re.MULTILINE | re.DOTALL)
    return Template(part).substitute(fields) + "\n\n\n"


_SIGMOID = "    scores = 1 / (1 + np.exp(-scores))\n"
_SOFTMAX = (
    "    scores = np.exp(scores - scores.max(axis=1, keepdims=True))\n"
    "    scores /= scores.sum(axis=1, keepdims=True)\n"
)
_ACTIVATIONS = {"": "", "sigmoid": _SIGMOID, "softmax": _SOFTMAX}
_MERGED_STEPS = (
    "    best = best[np.insert(best[1:] != best[:-1], 0, True)]  # a repeated symbol counts once\n"
)


def _pixel_classes(task: Pixels, outputs: Outputs) -> str:
    """Return the expression for the class of each pixel [h, w] of `values`, without the batch."""
    shape = outputs[task.output].shape
    # class numbers are not compared value by value: `parts` has the output without any slices
    has_class_numbers = task.output in task.parts and not task.parts[task.output]
    if has_class_numbers:
        return f"values.reshape({shape[-2]}, {shape[-1]})"
    axis = -1 if task.axis == -1 else 0
    if task.classes == 1:
        return f"(values.max(axis={axis}) > 0)"
    return f"values.argmax(axis={axis})"


def _point_lines(task: Points | HeatMaps) -> str:
    """Return the lines of Python that find key points, in pixels of the model's input.

    SimCC has the scores of each column and row, a heat map those of each cell; other models have
    the coordinates themselves. The lines use variables of the written program: `outputs` are the
    model's by name, and points of heat maps with scores up to `conf` are left out.
    """
    if isinstance(task, SimccPoints):
        columns, rows = map(ascii, task.outputs)
        return (
            f"    columns, rows = outputs[{columns}][0], outputs[{rows}][0]\n"
            "    places = [columns.argmax(axis=1), rows.argmax(axis=1)]\n"
            "    sizes = [columns.shape[1], rows.shape[1]]\n"
            "    return np.stack(places, axis=1) * [WIDTH, HEIGHT] / sizes\n"
        )
    if isinstance(task, HeatMaps):
        maps_expression = f"outputs[{task.outputs[0]!a}][0]"
        if task.axis == -1:  # [rows, columns, points], and the lines below read [points, ...]
            maps_expression += ".transpose(2, 0, 1)"
        return (
            f"    maps = {maps_expression}\n"
            "    maps = maps[maps.max(axis=(1, 2)) > conf]\n"
            "    cells = maps.reshape(len(maps), -1).argmax(axis=1)\n"
            "    rows, columns = np.divmod(cells, maps.shape[2])\n"
            "    places = np.stack([columns, rows], axis=1) + 0.5\n"
            "    return places * [WIDTH / maps.shape[2], HEIGHT / maps.shape[1]]\n"
        )
    tables = []
    for name, point_width in task.outputs.items():  # numbers of a point, x and y first
        tables.append(f"outputs[{name!a}].reshape(-1, {point_width})[:, :2]")
    return f"    return np.concatenate([{', '.join(tables)}])\n"


# layout of an output -> the expression for its table: a row for each possible box
_TABLES = {
    ROWS: "values.reshape(-1, values.shape[-1])",
    COLUMNS: "values.reshape(-1, values.shape[-1]).T",
    MAP: "values.reshape(values.shape[1], -1).T",
}
# coding of boxes -> the lines that find their corners
_CORNER_LINES = {
    "corners": "    low, high = boxes[:, :2], boxes[:, 2:4]\n",
    "centre": (
        "    centre, size = boxes[:, :2], boxes[:, 2:4]\n"
        "    low, high = centre - size / 2, centre + size / 2\n"
    ),
    "cell": (
        "    places, sides = cells()\n"
        "    centre, size = (boxes[:, :2] + places) * sides, np.exp(boxes[:, 2:4]) * sides\n"
        "    low, high = centre - size / 2, centre + size / 2\n"
    ),
    "distribution": (
        "    places, sides = cells()\n"
        "    bins = np.exp(boxes.reshape(len(boxes), 4, -1))\n"
        "    bins /= bins.sum(axis=2, keepdims=True)\n"
        "    distances = bins @ np.arange(bins.shape[2])  # to the left, top, right, bottom\n"
        "    low = (places + 0.5 - distances[:, :2]) * sides\n"
        "    high = (places + 0.5 + distances[:, 2:]) * sides\n"
    ),
}
_RECTANGLE = (
    "        corners = [[int(side) for side in corner] for corner in (low, high)]\n"
    "        cv2.rectangle(canvas, *corners, colour, 1 + max(canvas.shape) // 400)\n"
)
_POINT_MARKS = (
    "        for x, y in to_picture(extra, canvas):\n"
    "            cv2.circle(canvas, (int(x), int(y)), 3, colour, -1, cv2.LINE_AA)\n"
)
_MASK_TINT = (
    "        mask = map_to_picture(extra, canvas) > 0\n"
    "        rows, columns = np.mgrid[: mask.shape[0], : mask.shape[1]]\n"
    "        mask &= (columns > low[0]) & (columns < high[0])\n"
    "        mask &= (rows > low[1]) & (rows < high[1])\n"
    "        tint(canvas, mask, colour)\n"
)
_ROTATED = (
    "        centre, size = (low + high) / 2, high - low\n"
    "        degrees = float(np.degrees(extra[0]))\n"
    "        turned = cv2.boxPoints((centre.tolist(), size.tolist(), degrees))\n"
    "        cv2.polylines(canvas, [np.int32(turned)], True, colour, 2)\n"
)


_MAX_SHARE = 2  # of a side of the input, that a place relative to it reaches


def _box_text(task: BoxDetection, outputs: Outputs) -> str:
    """Return the Python functions, as text, that decode the boxes of a detector and draw them.

    Return "" if the program cannot decode them: it has no lines for the coding of the boxes, the
    outputs have several layouts (such as rows and maps), or their layout is a map for each anchor.
    """
    decoder = task.decoder
    if decoder.is_list:  # an end-to-end detector
        return _list_text(decoder, outputs) if decoder.coding == "corners" else ""
    if decoder.coding not in _CORNER_LINES:
        return ""
    # the layouts of all columns: of scores, boxes, ... of each level (feature map)
    all_columns = chain.from_iterable(_columns_by_name(decoder).values())
    layouts = {columns.layout for columns in all_columns}
    if len(layouts) > 1 or ANCHOR_MAP in layouts:
        return ""
    (layout,) = layouts

    # boxes from 0 to 1 become pixels; codings by cells are in pixels already
    scale = ""
    if decoder.coding in ("corners", "centre"):
        first_boxes = decoder.box_columns[0].of(outputs)  # of the first level, [boxes, 4]
        if _are_relative(first_boxes):
            scale = "    low, high = low * [WIDTH, HEIGHT], high * [WIDTH, HEIGHT]\n"
    extras = _box_extras(decoder, is_relative=bool(scale))  # points, masks or angles of the boxes

    strides = ""
    functions = extras.functions  # Python text, which comes after that of the rows
    if CODINGS[decoder.coding].uses_cells:  # boxes are relative to the cells of feature maps
        strides = f"STRIDES = {[*decoder.strides]}  # pixels from cell to cell\n"
        functions += _template_part("cells")
    rows = _template_part(
        "rows",
        levels=_levels_text(decoder),
        strides=strides,
        table=_TABLES[layout],
        scores=_score_lines(decoder),
        corners=_CORNER_LINES[decoder.coding],
        scale=scale,
        extra=extras.expression,
    )
    return rows + functions + _template_part("boxes", outline=extras.outline)


def _list_text(decoder: RowDecoder, outputs: Outputs) -> str:
    """Return the functions for an end-to-end detector, which lists its boxes itself."""
    scale = ""
    detections = decoder.boxes({}, outputs)
    if _are_relative(detections.boxes):
        scale = "    boxes = boxes * [WIDTH, HEIGHT, WIDTH, HEIGHT]\n"
    rows = _list_lines(decoder, outputs)
    return _template_part("list", rows=rows, scale=scale) + _template_part(
        "boxes", outline=_RECTANGLE
    )


def _score_lines(decoder: RowDecoder) -> str:
    """Return the lines of Python that change `scores`, an array [boxes, classes] of the program.

    Before these lines it has the numbers that the model writes, after them the classes' scores. The
    lines apply the activation, drop the background's column, and multiply by the objectness if the
    detector has one. The written program calls the columns of the objectness "gate".
    """
    lines = _ACTIVATIONS[decoder.activation]
    if decoder.background is not None:
        lines += f"    scores = np.delete(scores, {decoder.background}, axis=1)\n"
    if decoder.gates:  # the columns of the objectness; () without one
        gate_expression = 'columns(outputs, "gate")'
        if decoder.gate_activation == "sigmoid":
            gate_expression = f"1 / (1 + np.exp(-{gate_expression}))"
        lines += f"    scores = scores * {gate_expression}\n"
    return lines


@dataclass(frozen=True, slots=True)
class _BoxExtras:
    """Code for what a box has besides its corners: key points, a mask or an angle.

    Attributes:
        expression: Python expression of the extra values of each box that `find_boxes` returns.
        outline: lines that draw a box.
        functions: functions that these lines call.
    """

    expression: str = "[None] * len(kept)"
    outline: str = _RECTANGLE
    functions: str = ""


def _box_extras(decoder: RowDecoder, *, is_relative: bool) -> _BoxExtras:
    """Return the code of the written program for a box's key points, mask or angle.

    It reads them for the boxes that the program shows (`kept`), and draws them.

    `is_relative`: coordinates are shares of the input's sides, else pixels.
    """
    if decoder.point_width:
        width = decoder.point_width  # numbers of a point, of which x and y are the first
        points = f'columns(outputs, "extra").reshape(len(boxes), -1, {width})[kept, :, :2]'
        points += " * [WIDTH, HEIGHT]" if is_relative else ""
        return _BoxExtras(expression=points, outline=_RECTANGLE + _POINT_MARKS)
    if decoder.mask_maps:
        maps = f"outputs[{decoder.mask_maps!a}][0]"
        return _BoxExtras(
            expression=f'np.tensordot(columns(outputs, "extra")[kept], {maps}, 1)',
            outline=_RECTANGLE + _MASK_TINT,
            functions=_template_part("map", interpolation="LINEAR"),
        )
    if decoder.has_angle:
        return _BoxExtras(expression='columns(outputs, "extra")[kept]', outline=_ROTATED)
    return _BoxExtras()


def _are_relative(places: Array) -> bool:
    """Whether places are shares of the input's sides, and not pixels."""
    return bool(places.size and places.max() <= _MAX_SHARE)


def _columns_by_name(decoder: RowDecoder) -> dict[str, tuple[Columns, ...]]:
    """Return what columns hold (scores, boxes, gate, extra) -> these columns of each level.

    What a detector lacks has no entry. "gate" is the objectness; "extra" are key points, mask
    coefficients or angles.
    """
    columns = {
        "scores": decoder.scores,
        "boxes": decoder.box_columns,
        "gate": decoder.gates,
        "extra": decoder.shape_columns,
    }
    return {name: levels for name, levels in columns.items() if levels}


def _levels_text(decoder: RowDecoder) -> str:
    """Return a Python list with a dict for each level of a detector (feature map of one stride).

    A dict has name -> (output, first column, end of the columns).
    """
    columns_by_name = _columns_by_name(decoder)
    lines = []
    for level in zip(*columns_by_name.values(), strict=True):
        entries = []
        for name, columns in zip(columns_by_name, level, strict=True):
            entries.append(f'"{name}": ({columns.output!a}, {columns.start}, {columns.stop})')
        lines.append(f"    {{{', '.join(entries)}}},\n")
    return f"[\n{''.join(lines)}]"


def _list_lines(decoder: RowDecoder, outputs: Outputs) -> str:
    """Return the lines that read corners, scores and classes of an end-to-end list."""
    lines = []
    # scores and class numbers are 0 if the list lacks them; else each has one output
    for variable, columns in (("scores", decoder.scores), ("best", decoder.class_columns)):
        expression = "np.zeros(len(boxes))"
        if columns:
            expression = f"{_list_table(columns[0], outputs)}[:, {columns[0].start}]"
        lines.append(f"    {variable} = {expression}\n")
    (corners,) = decoder.box_columns
    indices = str(ROWS_FIRST) if decoder.has_rows_first else f"{corners.start} : {corners.stop}"
    return f"    boxes = {_list_table(corners, outputs)}[:, {indices}]\n{''.join(lines)}"


def _list_table(columns: Columns, outputs: Outputs) -> str:
    """Return the expression for the table [boxes, columns] in which an output lists the boxes."""
    width = outputs[columns.output].shape[-1] if columns.layout == LIST else 1
    return f"np.float64(outputs[{columns.output!a}]).reshape(-1, {width})"
