"""Read the metadata of Ultralytics, OpenVINO and Paddle.

Ultralytics' exports are YOLOv8 and later, RT-DETR, and YOLOv5. Source:
`ultralytics/engine/exporter.py` writes "author", "version", "task", "imgsz", "stride", "channels",
"names" and "description" into the metadata, and YOLOv5's `export.py` only "stride" and "names". The
preprocessing of a task: `LetterBox` and `classify_transforms` of `ultralytics/data/augment.py`, and
`RTDETRPredictor.pre_transform`, which stretches.

OpenVINO's Model API has `model_info`, which training tools write into ONNX files too. Source:
`OTXModelExporter._embed_onnx_metadata` of OpenVINO Training Extensions joins the path of a value
with spaces ("model_info mean_values"); `InputTransform` and `RESIZE_TYPES` of the Model API's
`models/utils.py` define the steps: reverse channels if requested, subtract mean, divide by scale,
in pixel units.

Paddle's models are PaddleOCR's text recognizers (metadata) and PaddleDetection's (`infer_cfg.yml`).
Source: RapidOCR writes the characters of a text recognizer into the metadata as "character"; its
images are read like PaddleOCR's `RecResizeImg`, 48 pixels high if the model leaves that open, as
since PP-OCRv3. (Layout models have class names there: words, not characters.)
`ppdet/engine/export_utils.py` writes the operators of `deploy/python/preprocess.py` into the
`Preprocess` section of `infer_cfg.yml` .
"""

from dataclasses import replace

from deploy.errors import ConfigError
from deploy.feed.preprocess import INTERPOLATIONS, Preprocess, Size, find_preset
from deploy.files.reading import from_yaml
from deploy.frontends.metadata.values import (
    ModelMetadata,
    StoredPreprocess,
    parse_integers,
    parse_number,
    parse_numbers,
    plain_word,
    short_text,
)

_BOX_TASKS = ("detect", "segment", "pose", "obb")
_YOLOV5_KEYS = frozenset(("stride", "names"))  # YOLOv5's export.py writes no others
_YOLOV5_CLASSIFIER_SIDE = 224  # pixels, its default


def read_ultralytics(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Return letterbox for boxes, or a center crop for classes; None for other exporters' files.

    Raises:
        ConfigError: the model is for another task, or has invalid values.
    """
    if metadata.text("author") != "Ultralytics":
        # YOLOv5 writes no author, but exactly two keys; keys with "onnx." are ONNX Runtime's
        keys = {key for key in metadata.properties if not key.startswith("onnx.")}
        if keys != _YOLOV5_KEYS:
            return None
        # messages append the detail to the writer's name: "Ultralytics YOLOv5"
        return StoredPreprocess(_yolov5_preprocess(metadata), detail=" YOLOv5")

    size = _parse_size(metadata.text("imgsz"))
    height, width = size
    preprocess = _task_preprocess(metadata, size)  # has neither size nor color yet
    color = _parse_color(metadata.text("channels"))
    version = plain_word(metadata.text("version"))
    size_text = f"{height}" if width == height else f"{height}x{width}"
    # as in "Ultralytics 8.3, imgsz 640"
    detail = f" {version}" if version else ""
    detail += f", imgsz {size_text}"
    return StoredPreprocess(replace(preprocess, default_size=size, color=color), detail)


def _yolov5_preprocess(metadata: ModelMetadata) -> Preprocess:
    """Return letterbox, or for a classifier `classify_transforms` of `utils/augmentations.py`."""
    if not metadata.is_classifier:
        return find_preset("yolo")
    width = metadata.shape[-1] if metadata.shape else None  # no shape: of unknown rank
    side = width or _YOLOV5_CLASSIFIER_SIDE
    return replace(
        find_preset("imagenet"),
        default_size=(side, side),
        short_side=side,
        interpolation="linear",
    )


def _task_preprocess(metadata: ModelMetadata, size: Size) -> Preprocess:
    """Return the preprocessing of a model's task, without size and color; refuse other tasks.

    `size`: of the model's input, to which a classifier resizes the short side.
    """
    task = metadata.text("task")
    height, width = size
    if task in _BOX_TASKS:
        letterbox = find_preset("yolo")
        if "rtdetr" in (metadata.text("description") or "").lower():
            return replace(letterbox, resize="stretch", pad=(0.0,))
        return letterbox
    if task == "classify" and height == width:
        return Preprocess(resize="short-side", short_side=height, interpolation="area")
    raise ConfigError(
        f"its task must be one of {', '.join(_BOX_TASKS)}, or classify with a square imgsz, got"
        f" {short_text(task)} with {height}x{width}"
    )


def _parse_size(text: str | None) -> Size:
    """Return (height, width) of "[640, 640]" or "640"."""
    sides = parse_integers("640" if text is None else text, "imgsz")
    if len(sides) > 2:
        raise ConfigError(f"its imgsz must be a height and a width, got {short_text(text)}")
    return sides[0], sides[-1]


def _parse_color(text: str | None) -> str:
    """Return the color for a number of channels, which older versions did not write."""
    if text is None:
        return "rgb"
    channels = parse_integers(text, "channels")[0]
    if channels not in (1, 3):
        raise ConfigError(f"its channels must be 1 or 3, got {short_text(text)}")
    return "rgb" if channels == 3 else "grey"


_PATH = "model_info "  # start of the name of every value
_VALUE_KEYS = ("mean_values", "scale_values", "resize_type")  # without any there is no model_info
_RESIZES = {  # resize_type -> preprocessing that resizes so
    "standard": Preprocess(),
    "fit_to_window": Preprocess(resize="letterbox", anchor="top-left"),
    "fit_to_window_letterbox": Preprocess(resize="letterbox"),
}
_UNITS = {"": 1.0, "none": 1.0, "scale_to_unit": 1 / 255}  # intensity_mode -> factor of pixels


def read_openvino(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Return mean, scale, resize and order of channels; None without `model_info`.

    Raises:
        ConfigError: unsupported preprocessing, or invalid values.
    """
    values = {key: _read_value(metadata, key) for key in _VALUE_KEYS}
    if not any(values.values()):
        return None
    resize_type = values["resize_type"] or "standard"
    pixel_units = _read_value(metadata, "intensity_mode")
    # a maximum belongs to an intensity_mode for pixels of more than 8 bits: both are refused
    has_maximum = _read_value(metadata, "intensity_max_value") != ""
    if _is_true(metadata, "embedded_processing"):
        raise ConfigError("its model preprocesses its input itself")
    if resize_type not in _RESIZES or pixel_units not in _UNITS or has_maximum:
        raise ConfigError(
            f"its resize_type must be one of {', '.join(_RESIZES)} and its intensity_mode"
            f" scale_to_unit or none, got {short_text(resize_type)} and {short_text(pixel_units)}"
        )
    color = "rgb" if _is_true(metadata, "reverse_input_channels") else "bgr"
    preprocess = replace(
        _RESIZES[resize_type],
        color=color,
        scale=_UNITS[pixel_units],
        mean=parse_numbers(values["mean_values"] or "0", "mean_values"),
        std=parse_numbers(values["scale_values"] or "1", "scale_values"),
        pad=parse_numbers(_read_value(metadata, "pad_value") or "0", "pad_value"),
    )
    return StoredPreprocess(preprocess)


def _is_true(metadata: ModelMetadata, key: str) -> bool:
    """Whether `model_info` has a flag."""
    return _read_value(metadata, key).lower() in ("true", "yes", "1")


def _read_value(metadata: ModelMetadata, key: str) -> str:
    """Return a value of `model_info`; "" without one."""
    return metadata.text(_PATH + key) or ""


FILE = "infer_cfg.yml"
_SECTION = "Preprocess"
_HEIGHTS = (32, 48)  # pixels of a text line, in PaddleOCR's recognizers
_DEFAULT_WIDTH = 320  # pixels, of PaddleOCR
_MIN_CHARACTERS = 10  # characters of an alphabet: at least the digits
_KEYS = {  # step -> the keys that it may have
    "Resize": {"target_size", "keep_ratio", "interp"},
    "NormalizeImage": {"mean", "std", "is_scale", "norm_type"},
    "Permute": set[str](),
}
_OPENCV = dict(enumerate(INTERPOLATIONS))  # OpenCV's number -> interpolation


def read_characters(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Return text-line preprocessing if the model has characters and a fitting input; else None.

    The metadata has one character a line. Entries of several characters are class names instead.
    """
    entries = metadata.properties.get("character", "").splitlines()
    character_count = sum(len(entry) <= 1 for entry in entries)
    is_alphabet = len(entries) >= _MIN_CHARACTERS and character_count >= 0.9 * len(entries)
    if not is_alphabet or len(metadata.shape) != 4:
        return None
    _, channels, height, width = metadata.shape
    if height is None:
        height = _HEIGHTS[-1]
    if width is None:
        width = _DEFAULT_WIDTH
    if channels != 3 or height not in _HEIGHTS or width < 2 * height:
        return None
    return StoredPreprocess(replace(find_preset("ppocr-rec"), default_size=(height, width)))


def read_paddle(metadata: ModelMetadata) -> StoredPreprocess | None:
    """Read Resize, NormalizeImage and Permute from `infer_cfg.yml`; None without the file.

    Raises:
        ConfigError: another operator, or unsupported preprocessing.
    """
    text = metadata.read_sibling(FILE)
    if text is None:
        return None
    steps: dict[str, dict[str, object]] = {}
    for step in parse_operators(text):
        name = str(step.pop("type", ""))
        is_known = name in _KEYS and step.keys() <= _KEYS[name]
        if name in steps or not is_known:  # the order of two steps of one name is not supported
            keys = ", ".join(step)
            raise ConfigError(f"calib8 does not know its {short_text(name)} of {keys}")
        steps[name] = step
    if "Resize" not in steps or "Permute" not in steps:
        raise ConfigError(f"its steps must resize and permute, got {', '.join(steps) or 'none'}")
    preprocess = replace(_read_resize(steps["Resize"]), scale=1.0)  # pixels of 0 to 255
    if "NormalizeImage" in steps:
        preprocess = _add_normalization(preprocess, steps["NormalizeImage"])
    return StoredPreprocess(preprocess)


def _read_resize(step: dict[str, object]) -> Preprocess:
    """Return preprocessing with the size and interpolation of a Resize, which must stretch."""
    size = parse_integers(step.get("target_size"), "target_size")
    interpolation = parse_number(step.get("interp", 1), "interp")
    if _read_flag(step, "keep_ratio") or len(size) > 2 or interpolation not in _OPENCV:
        raise ConfigError(
            "its Resize must have a target_size and keep_ratio false, got keep_ratio"
            f" {step.get('keep_ratio', 'true')}"
        )
    return Preprocess(
        default_size=(size[0], size[-1]), interpolation=_OPENCV[int(interpolation)], color="rgb"
    )


def _add_normalization(preprocess: Preprocess, step: dict[str, object]) -> Preprocess:
    """Return the preprocessing with the scale, mean and std of a NormalizeImage."""
    if _read_flag(step, "is_scale"):
        preprocess = replace(preprocess, scale=1 / 255)
    if step.get("norm_type", "mean_std") == "none":
        return preprocess
    mean = parse_numbers(step.get("mean"), "mean")
    return replace(preprocess, mean=mean, std=parse_numbers(step.get("std"), "std"))


def _read_flag(step: dict[str, object], name: str) -> bool:
    """Return a boolean of a step, true if it is missing."""
    text = str(step.get(name, "true")).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"its {name} must be true or false, got {short_text(step[name])}")
    return text == "true"


def parse_operators(text: str) -> list[dict[str, object]]:
    """Return the steps in the section `Preprocess`, each name -> value; numbers are texts.

    Raises:
        ConfigError: no YAML, or steps of another form.
    """
    data = from_yaml(text, rule=f"its {FILE} must be YAML", error=ConfigError)
    operators = data.get(_SECTION, []) if isinstance(data, dict) else []
    if not isinstance(operators, list) or not all(isinstance(step, dict) for step in operators):
        raise ConfigError(f"its {_SECTION} must be a list of steps, got {short_text(operators)}")
    return operators
