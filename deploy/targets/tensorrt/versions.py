"""What each TensorRT reads and runs: one row a version from which something is otherwise.

Sources: docs/operators.md of onnx-tensorrt (8.0 to 10.1, 10.15, 11.2) for the opset, where versions
between two rows are taken to read what the older one does; TensorRT's release notes and NvInfer.h
for strong typing, calibrators and FP8 (matrix products alone had it before 10.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.calibration.trt_cache import version_label


@dataclass(frozen=True, slots=True)
class Row:
    """TensorRT from a version on.

    Attributes:
        since: first version.
        opset: the newest that its ONNX parser reads.
        calibrators: whether it has int8 calibrators and reads their caches.
        typed: whether it has strongly typed networks.
        fp8: whether it has FP8 convolutions, in such networks.
    """

    since: str
    opset: int
    calibrators: bool
    typed: bool
    fp8: bool = False


ROWS = (
    Row("8.0.0", 13, calibrators=True, typed=False),
    Row("8.4.0", 17, calibrators=True, typed=False),
    Row("9.0.0", 19, calibrators=True, typed=False),
    Row("10.0.0", 20, calibrators=True, typed=True),
    Row("10.2.0", 20, calibrators=True, typed=True, fp8=True),
    Row("10.15.0", 24, calibrators=True, typed=True, fp8=True),
    Row("11.0.0", 24, calibrators=False, typed=True, fp8=True),
)


def row(version: str) -> Row:
    """What TensorRT X.Y.Z reads and runs; of an older one than the table has, its first row.

    Raises:
        CacheError: the version does not read X.Y.Z.
    """
    label = version_label(version)
    reached = [one for one in ROWS if version_label(one.since) <= label]
    return reached[-1] if reached else ROWS[0]


def first_reading(opset: int, *, typed: bool = False, fp8: bool = False) -> str | None:
    """The first version whose parser reads this opset, and that has what is asked; or None."""
    able = (one for one in ROWS if (one.typed or not typed) and (one.fp8 or not fp8))
    return next((one.since for one in able if one.opset >= opset), None)
