"""Versions that a calibration depends on, and those of the programs that took part."""

from __future__ import annotations

from calibrators.statistics import FORMAT
from deploy.version import __version__

# Raise one where a change of code gives other numbers for the same model and images.
FRONTEND = 1  # names or values of the cleaned model
SEARCHES = 1  # scales from the same statistics
DECODING = 1  # samples from the same files and preprocessing; C++ has the same number


def of_feed(kind: str) -> dict[str, str | int]:
    """All that takes part in a calibration on "arrays", or on pictures of any kind."""
    found: dict[str, str | int] = {"onnxruntime": _onnxruntime(), **numbers()}
    return found if kind == "arrays" else {**found, "opencv": _opencv(), "decoding": DECODING}


def numbers() -> dict[str, int]:
    """In which form the statistics are kept, and which arithmetic of calib8 made them."""
    return {"statistics": FORMAT, "frontend": FRONTEND, "searches": SEARCHES}


def programs() -> dict[str, str]:
    """What computed the activations and the ranges."""
    return {"calib8": __version__, "onnxruntime": _onnxruntime()}


def decoder(kind: str) -> dict[str, str | int]:
    """What makes samples of files; {} for "arrays", of which nothing has to.

    Its library's name tells; the digests say what it makes of pictures of each form, and how it
    resizes, so that another library, or version, that gives the same pixels is the same decoder.
    """
    if kind == "arrays":
        return {}
    from deploy.feed.probe import digests

    return {"decoding": DECODING, "library": f"OpenCV {_opencv()}", **digests()}


def _onnxruntime() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _opencv() -> str:
    from deploy.feed.images import opencv

    return str(opencv().__version__)
