"""What OpenVINO's Model API calls `model_info`, which training tools write into ONNX files too.

Source: `OTXModelExporter._embed_onnx_metadata` of OpenVINO Training Extensions joins the path of
a value with spaces ("model_info mean_values"); `InputTransform` and `RESIZE_TYPES` of the Model
API's `models/utils.py` say what is done: channels reversed first where asked for, then minus mean,
divided by scale, in pixel units.
"""

from __future__ import annotations

from dataclasses import replace

from deploy.errors import ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.frontends.metadata.values import Found, Said, numbers, shown

_PATH = "model_info "
_TELLING = ("mean_values", "scale_values", "resize_type")
_RESIZES = {
    "standard": Preprocess(),
    "fit_to_window": Preprocess(resize="letterbox", anchor="top-left"),
    "fit_to_window_letterbox": Preprocess(resize="letterbox"),
}
_UNITS = {"": 1.0, "none": 1.0, "scale_to_unit": 1 / 255}


def read(found: Found) -> Said | None:
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
