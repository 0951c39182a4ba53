"""A small picture inside the report: PNG or JPEG, whichever takes fewer bytes."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np

from deploy.feed.images import opencv
from deploy.tensors import Array

_QUALITY = 85  # of JPEG


@dataclass(frozen=True, slots=True)
class Raster:
    """An encoded picture.

    Attributes:
        kind: "png" or "jpeg".
        data: the file's bytes.
        width, height: in pixels.
    """

    kind: str
    data: bytes
    width: int
    height: int

    @property
    def uri(self) -> str:
        """As an address that holds the picture itself."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode('ascii')}"


def raster(picture: Array) -> Raster:
    """Encode uint8 [h, w, 3], red, green, blue; the same bytes for the same picture and OpenCV."""
    cv2 = opencv()
    turned = np.ascontiguousarray(picture[:, :, ::-1])
    made = {
        "png": cv2.imencode(".png", turned)[1].tobytes(),
        "jpeg": cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes(),
    }
    kind = min(made, key=lambda one: len(made[one]))
    return Raster(kind, made[kind], width=picture.shape[1], height=picture.shape[0])
