"""`X_run.py`: a program that runs the engine on pictures, with cv2, numpy and onnxruntime alone.

It repeats the arithmetic of `deploy.feed.pixels` bit for bit, so that it feeds what calibrated. A
model whose inputs are not one picture of a fixed size has no such program.
"""

from collections.abc import Mapping, Sequence

from deploy.feed.preprocess import Preprocess
from deploy.files.reading import read_package_text
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


def run_program(
    engine: str, inputs: Sequence[TensorSpec], how: Preprocess | None, classes: Mapping[int, str]
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
    return read_package_text(__package__, "run_script.txt").format(
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
