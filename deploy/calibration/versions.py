"""Versions that a calibration depends on."""

from __future__ import annotations

from calibrators.statistics import FORMAT

# Raise one where a change of code gives other numbers for the same model and images.
FRONTEND = 1  # names or values of the cleaned model
SEARCHES = 1  # scales from the same statistics
DECODING = 1  # samples from the same files and preprocessing


def of_feed(kind: str) -> dict[str, str | int]:
    """All that a calibration on "arrays", or on pictures of any kind, depends on."""
    return {**of_observation(), **({} if kind == "arrays" else of_images())}


def of_observation() -> dict[str, str | int]:
    """What computed the activations and in which form the statistics are kept."""
    import onnxruntime

    return {
        "onnxruntime": onnxruntime.__version__,
        "statistics": FORMAT,
        "frontend": FRONTEND,
        "searches": SEARCHES,
    }


def of_images() -> dict[str, str | int]:
    """What made samples of files; of arrays nothing did."""
    from deploy.feed.images import opencv

    return {"opencv": str(opencv().__version__), "decoding": DECODING}
