"""YUV to RGB as AIPP does it: whole factors of 1/256, for the standards of cameras and videos.

::

    R   | m00 m01 m02 |   | Y - b0 |        BT.601: of SD video and JPEG
    G = | m10 m11 m12 | x | U - b1 | >> 8   BT.709: of HD video
    B   | m20 m21 m22 |   | V - b2 |        narrow: Y 16..235, U and V 16..240; full: 0..255

The factors follow from the standard's weights of red and blue in Y. (CANN's docs call full "wide";
JPEG is BT.601 full.) Source: ITU-R BT.601 and BT.709; hicann/ge, docs of atc, CSC.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = tuple[tuple[int, int, int], ...]

_WEIGHTS = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}  # of red and of blue in Y


def matrix(standard: str, color: str) -> tuple[Matrix, tuple[int, int, int]]:
    """Rows for the channels of `color` ("rgb", "bgr" or "grey"), and what is taken off Y, U, V.

    `standard` is one of `deploy.targets.ascend.source.STANDARDS`. Of "grey" the first row alone
    counts.
    """
    red, blue = _WEIGHTS[standard.partition("-")[0]]
    luma, chroma, bias = _spans(standard)
    green = 1 - red - blue
    rows = [
        (1.0, 0.0, 2 * (1 - red)),
        (1.0, -2 * (1 - blue) * blue / green, -2 * (1 - red) * red / green),
        (1.0, 2 * (1 - blue), 0.0),
    ]
    if color == "grey":
        rows = [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
    if color == "bgr":
        rows.reverse()
    whole = tuple(
        (round(256 * y / luma), round(256 * u / chroma), round(256 * v / chroma))
        for y, u, v in rows
    )
    return whole, (bias, 128, 128)


def to_yuv(rgb: NDArray[np.uint8], standard: str) -> NDArray[np.uint8]:
    """RGB [H, W, 3] of even sides -> NV12 [H * 3 / 2, W], each U and V the mean of four pixels."""
    red, blue = _WEIGHTS[standard.partition("-")[0]]
    luma, chroma, bias = _spans(standard)
    r, g, b = (rgb[..., c].astype(np.float64) for c in range(3))
    y = red * r + (1 - red - blue) * g + blue * b
    u, v = (_quarter(c) for c in ((b - y) / (2 * (1 - blue)), (r - y) / (2 * (1 - red))))
    height, width = y.shape
    planes = np.stack([u, v], axis=-1).reshape(height // 2, width) * chroma + 128
    out = np.concatenate([y * luma + bias, planes])
    return np.asarray(np.clip(np.rint(out), 0, 255), np.uint8)


def _spans(standard: str) -> tuple[float, float, int]:
    """Share of 255 that Y takes, that U and V take, and where Y begins."""
    narrow = standard.endswith("narrow")
    return (219 / 255, 224 / 255, 16) if narrow else (1.0, 1.0, 0)


def _quarter(plane: NDArray[np.float64]) -> NDArray[np.float64]:
    height, width = plane.shape
    return np.asarray(plane.reshape(height // 2, 2, width // 2, 2).mean(axis=(1, 3)))
