"""Paddle's models: PaddleOCR's recognisers by their metadata, PaddleDetection's by `infer_cfg.yml`.

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
from deploy.feed.preprocess import INTERPOLATIONS, Preprocess
from deploy.feed.presets import preset
from deploy.frontends.metadata.values import Found, Said, numbers, shown, single, whole

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


def read(found: Found) -> Said | None:
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
