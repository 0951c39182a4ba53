"""`X_run.py`: a program that runs the engine on pictures, with cv2, numpy and onnxruntime alone.

It repeats the arithmetic of `deploy.feed.pixels` bit for bit, so that it feeds what calibrated. A
model whose inputs are not one picture of a fixed size has no such program.
"""

from collections.abc import Mapping, Sequence

from deploy.feed.preprocess import Preprocess
from deploy.files.reading import read_package_text
from deploy.tensors import TensorSpec

# how a picture is resized -> the lines that give the (height, width) of the resized picture
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
# where the resized picture stands -> the lines that copy it
_COPY_LINES = {
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
_INTERPOLATIONS = {
    "nearest": "NEAREST",
    "linear": "LINEAR",
    "cubic": "CUBIC",
    "lanczos": "LANCZOS4",
}


def run_program(
    engine: str,
    inputs: Sequence[TensorSpec],
    preprocess: Preprocess | None,
    classes: Mapping[int, str],
) -> str | None:
    """Return the text of a program; None where the inputs are not one picture of a fixed size.

    `engine`: file name of the engine, in the same folder. `preprocess`: resolved; None for arrays.
    `classes`: class -> name; empty if unknown.
    """
    if preprocess is None or len(inputs) != 1:
        return None
    if preprocess.size is None or None in preprocess.size:
        return None
    position = "top-left"
    if preprocess.resize == "letterbox":
        position = preprocess.anchor
    elif preprocess.resize == "short-side":
        position = "crop"
    corner = "0, 0"
    if position != "top-left":
        corner = "(HEIGHT - rows) // 2, (WIDTH - columns) // 2"

    flag = "IMREAD_COLOR"
    if preprocess.color == "grey":
        flag = "IMREAD_ANYDEPTH" if preprocess.deep else "IMREAD_GRAYSCALE"
    return read_package_text(__package__, "run_script.txt").format(
        engine=ascii(engine),
        classes=ascii(dict(classes)),
        height=preprocess.box[0],
        width=preprocess.box[1],
        sizes=_SIZES[preprocess.resize].format(short=preprocess.short),
        flag=flag,
        kind=_interpolation_text(preprocess.interpolation),
        channels=preprocess.channels,
        order="[:, :, ::-1]" if preprocess.color == "rgb" else "",
        pad=list(preprocess.pad),
        place=_COPY_LINES[position],
        corner=corner,
        scale=preprocess.scale,
        mean=list(preprocess.mean),
        std=list(preprocess.std),
        layout="" if preprocess.layout == "nhwc" else ".transpose(2, 0, 1)",
        dtype=inputs[0].dtype,
        input=ascii(inputs[0].name),
    )


def _interpolation_text(interpolation: str) -> str:
    """Return the expression for cv2's interpolation."""
    if interpolation != "area":
        return f"cv2.INTER_{_INTERPOLATIONS[interpolation]}"
    # enlarging by areas would repeat pixels
    is_enlarged = "rows > picture.shape[0] or columns > picture.shape[1]"
    return f"cv2.INTER_LINEAR if {is_enlarged} else cv2.INTER_AREA"
