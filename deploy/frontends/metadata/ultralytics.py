"""Ultralytics' exports: YOLOv8 and later, RT-DETR, and YOLOv5.

Source: `ultralytics/engine/exporter.py` writes "author", "version", "task", "imgsz", "stride",
"channels", "names" and "description" into the metadata, and `export.py` of YOLOv5 "stride" and
"names" alone. What a task does to a picture: `LetterBox` and `classify_transforms` of
`ultralytics/data/augment.py`, and `RTDETRPredictor.pre_transform`, which stretches.
"""

from __future__ import annotations

from dataclasses import replace

from deploy.errors import ConfigError
from deploy.feed.preprocess import COLORS, Preprocess, Size
from deploy.feed.presets import preset
from deploy.frontends.metadata.values import Found, Said, shown, whole, word

_BOXES = ("detect", "segment", "pose", "obb")
_YOLOV5 = frozenset(("stride", "names"))


def read(found: Found) -> Said | None:
    """Letterbox for boxes, a centre crop for classes; None where another one wrote the file.

    Raises:
        ConfigError: another task, or values that are none.
    """
    keys = {key for key in found.properties if not key.startswith("onnx.")}  # the runtime's own
    if found.text("author") != "Ultralytics":
        return Said(preset("yolo"), " YOLOv5") if keys == _YOLOV5 else None
    size = _size(found.text("imgsz"))
    how = replace(_of_task(found, size), default_size=size, color=_color(found.text("channels")))
    version = word(found.text("version"))
    told = f", imgsz {size[0] if size[0] == size[1] else f'{size[0]}x{size[1]}'}"
    return Said(how, f"{f' {version}' if version else ''}{told}")


def _of_task(found: Found, size: Size) -> Preprocess:
    task = found.text("task")
    if task in _BOXES:
        boxes = preset("yolo")
        stretched = "rtdetr" in (found.text("description") or "").lower()
        return replace(boxes, resize="stretch", pad=(0.0,)) if stretched else boxes
    if task == "classify" and size[0] == size[1]:
        return Preprocess(resize="short-side", short_side=size[0], interpolation="area")
    raise ConfigError(
        f"its task must be one of {', '.join(_BOXES)}, or classify with a square imgsz, got"
        f" {shown(task)} with {size[0]}x{size[1]}"
    )


def _size(text: str | None) -> Size:
    """(height, width) of "[640, 640]" or "640"."""
    sides = (640,) if text is None else whole(text, "imgsz")
    if len(sides) > 2:
        raise ConfigError(f"its imgsz must be a height and a width, got {shown(text)}")
    return sides[0], sides[-1]


def _color(text: str | None) -> str:
    """By the number of channels, which older versions did not write."""
    kinds = {COLORS["rgb"]: "rgb", COLORS["grey"]: "grey"}
    channels = 3 if text is None else whole(text, "channels")[0]
    if channels not in kinds:
        raise ConfigError(f"its channels must be 1 or 3, got {shown(text)}")
    return kinds[channels]
