"""Ultralytics' exports: YOLOv8 and later, RT-DETR, and YOLOv5.

Source: `ultralytics/engine/exporter.py` writes "author", "version", "task", "imgsz", "stride",
"channels", "names" and "description" into the metadata, and `export.py` of YOLOv5 "stride" and
"names" alone. What a task does to a picture: `LetterBox` and `classify_transforms` of
`ultralytics/data/augment.py`, and `RTDETRPredictor.pre_transform`, which stretches.

What OpenVINO's Model API calls `model_info`, which training tools write into ONNX files too.

Source: `OTXModelExporter._embed_onnx_metadata` of OpenVINO Training Extensions joins the path of
a value with spaces ("model_info mean_values"); `InputTransform` and `RESIZE_TYPES` of the Model
API's `models/utils.py` say what is done: channels reversed first where asked for, then minus mean,
divided by scale, in pixel units.

Paddle's models: PaddleOCR's recognisers by their metadata, PaddleDetection's by `infer_cfg.yml`.

Source: RapidOCR puts the characters of a text recogniser into the metadata as "character"; its
pictures are read as `RecResizeImg` of PaddleOCR does, 48 pixels high where the model leaves that
open, as it is from PP-OCRv3 on. (Layout models have the names of their classes there: words, not
characters.) `ppdet/engine/export_utils.py` writes the operators of
`deploy/python/preprocess.py` into the `Preprocess` of `infer_cfg.yml`, by PyYAML's `dump`, whose
form is read here and nothing else of YAML.
"""

from __future__ import annotations

import re
from dataclasses import replace

from deploy.errors import ConfigError
from deploy.feed.preprocess import COLORS, INTERPOLATIONS, Preprocess, Size, preset
from deploy.frontends.metadata.values import Found, Said, numbers, shown, single, whole, word

_BOXES = ("detect", "segment", "pose", "obb")
_YOLOV5 = frozenset(("stride", "names"))


def read_ultralytics(found: Found) -> Said | None:
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


_PATH = "model_info "
_TELLING = ("mean_values", "scale_values", "resize_type")
_RESIZES = {
    "standard": Preprocess(),
    "fit_to_window": Preprocess(resize="letterbox", anchor="top-left"),
    "fit_to_window_letterbox": Preprocess(resize="letterbox"),
}
_UNITS = {"": 1.0, "none": 1.0, "scale_to_unit": 1 / 255}


def read_openvino(found: Found) -> Said | None:
    """Mean, scale, resize and order of the channels; None where there is no `model_info`.

    Raises:
        ConfigError: what calib8 does not do, or values that are none.
    """
    held = {key: found.text(_PATH + key) for key in _TELLING}
    if not any(held.values()):
        return None
    kind, units = held["resize_type"] or "standard", found.text(f"{_PATH}intensity_mode") or ""
    if _true(found, "embedded_processing"):
        raise ConfigError("its model does its preprocessing itself")
    if kind not in _RESIZES or units not in _UNITS or found.text(f"{_PATH}intensity_max_value"):
        raise ConfigError(
            f"its resize_type must be one of {', '.join(_RESIZES)} and its intensity_mode"
            f" scale_to_unit or none, got {shown(kind)} and {shown(units)}"
        )
    return Said(
        replace(
            _RESIZES[kind],
            color="rgb" if _true(found, "reverse_input_channels") else "bgr",
            scale=_UNITS[units],
            mean=numbers(held["mean_values"] or "0", "mean_values"),
            std=numbers(held["scale_values"] or "1", "scale_values"),
            pad=numbers(found.text(f"{_PATH}pad_value") or "0", "pad_value"),
        )
    )


def _true(found: Found, key: str) -> bool:
    return (found.text(_PATH + key) or "").lower() in ("true", "yes", "1")


FILE = "infer_cfg.yml"
_SECTION = "Preprocess"
_HEIGHTS = (32, 48)  # of a text line, in PaddleOCR's recognisers
_FEWEST = 10  # characters of a script: the digits
_MOST_LINES = 200
_KEYS = {
    "Resize": {"target_size", "keep_ratio", "interp"},
    "NormalizeImage": {"mean", "std", "is_scale", "norm_type"},
    "Permute": set[str](),
}
_OPENCV = dict(enumerate(INTERPOLATIONS))  # OpenCV's numbers of them, in its order


def read_characters(found: Found) -> Said | None:
    """Lines of text, where the model has characters and an input of their shape; else None."""
    entries = found.properties.get("character", "").splitlines()
    single = sum(len(entry) <= 1 for entry in entries)
    if len(entries) < _FEWEST or single < 0.9 * len(entries) or len(found.shape) != 4:
        return None
    _, channels, height, width = found.shape
    height = _HEIGHTS[-1] if height is None else height
    width = 320 if width is None else width
    if channels != 3 or height not in _HEIGHTS or width < 2 * height:
        return None
    return Said(replace(preset("ppocr-rec"), default_size=(height, width)))


def read_paddle(found: Found) -> Said | None:
    """Resize, NormalizeImage and Permute; None where there is no such file.

    Raises:
        ConfigError: another operator, or what calib8 does not do.
    """
    text = found.beside(FILE)
    if text is None:
        return None
    steps: dict[str, dict[str, object]] = {}
    for one in operators(text):
        name = str(one.pop("type", ""))
        if name in steps or name not in _KEYS or set(one) - _KEYS[name]:
            raise ConfigError(f"calib8 does not know its {shown(name)} of {', '.join(one)}")
        steps[name] = one
    if "Resize" not in steps or "Permute" not in steps:
        raise ConfigError(f"its steps must resize and permute, got {', '.join(steps) or 'none'}")
    return Said(_normalised(_resized(steps["Resize"]), steps.get("NormalizeImage")))


def _resized(step: dict[str, object]) -> Preprocess:
    size = whole(step.get("target_size"), "target_size")
    kind = single(step.get("interp", 1), "interp")
    if step.get("keep_ratio", True) is not False or len(size) > 2 or kind not in _OPENCV:
        raise ConfigError(
            "its Resize must have a target_size and keep_ratio false, got keep_ratio"
            f" {shown(step.get('keep_ratio', True))}"
        )
    return Preprocess(
        default_size=(size[0], size[-1]), interpolation=_OPENCV[int(kind)], color="rgb"
    )


def _normalised(how: Preprocess, step: dict[str, object] | None) -> Preprocess:
    if step is None:
        return replace(how, scale=1.0)
    scale = 1 / 255 if step.get("is_scale", True) is True else 1.0
    if step.get("norm_type", "mean_std") == "none":
        return replace(how, scale=scale)
    return replace(
        how,
        scale=scale,
        mean=numbers(step.get("mean"), "mean"),
        std=numbers(step.get("std"), "std"),
    )


def operators(text: str) -> list[dict[str, object]]:
    """The list of mappings under `Preprocess`, as PyYAML's `dump` writes it.

    ::

        Preprocess:
        - interp: 2            a mapping a dash; values are numbers, words, true, false,
          target_size:         and lists of them, below or in brackets
          - 320
          - 320
          type: Resize

    Raises:
        ConfigError: a line that is none of these.
    """
    lines = text.splitlines()
    if f"{_SECTION}:" not in lines:
        return []
    found: list[dict[str, object]] = []
    key = ""
    for line in lines[lines.index(f"{_SECTION}:") + 1 :][:_MOST_LINES]:
        if re.match(r"[^\s-]", line):
            break
        if row := re.fullmatch(r"(- |  )(\w+):(?: (.+))?", line):
            if row[1] == "- ":
                found.append({})
            key = row[2]
            if found and key not in found[-1]:
                found[-1][key] = [] if row[3] is None else _value(row[3])
                continue
        elif found and (row := re.fullmatch(r" {2,4}- (.+)", line)):
            held = found[-1].get(key)
            if isinstance(held, list):
                held.append(_value(row[1]))
                continue
        raise ConfigError(f"its {_SECTION} must be as PaddleDetection writes it, got {shown(line)}")
    return found


def _value(text: str) -> object:
    if text.startswith("[") and text.endswith("]"):
        return [_word(word.strip()) for word in text[1:-1].split(",")]
    return _word(text)


def _word(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if not re.fullmatch(r"\w+", text):
        raise ConfigError(f"its {_SECTION} must hold numbers and words, got {shown(text)}")
    return text
