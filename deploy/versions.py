"""Versions that a calibration depends on."""

from __future__ import annotations

from calibrators.statistics import FORMAT


def of_observation() -> dict[str, str | int]:
    """What computed the activations and in which form the statistics are kept."""
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "statistics": FORMAT}
