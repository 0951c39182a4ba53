"""What a model's file says of pictures, or a file beside it: one file here per exporter.

Metadata is anybody's. What is malformed, too large or only half understood is not followed, and
that is said; it never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ConfigError
from deploy.feed.model_preprocess import Carried
from deploy.frontends.metadata import exporters, huggingface
from deploy.frontends.metadata.values import LONGEST, Found, Said

if TYPE_CHECKING:
    import onnx

_OWN = "the model's metadata"

# (where it stands, who writes it, what reads it); the first that finds its own is followed.
READERS: tuple[tuple[str, str, Callable[[Found], Said | None]], ...] = (
    (_OWN, "Ultralytics", exporters.read_ultralytics),
    (_OWN, "OpenVINO's model_info", exporters.read_openvino),
    (_OWN, "timm", huggingface.read_timm),
    (_OWN, "PaddleOCR's characters", exporters.read_characters),
    (f"the {huggingface.FILE} beside the model", "Hugging Face", huggingface.read_huggingface),
    (f"the {huggingface.TIMM_FILE} beside the model", "timm", huggingface.read_timm_config),
    (f"the {exporters.FILE} beside the model", "PaddleDetection", exporters.read_paddle),
)


def carried_of(model: onnx.ModelProto, path: Path | None = None) -> Carried | None:
    """What the model carries, or the files in the folder of `path`; None where nothing does."""
    found = Found(
        properties={one.key: one.value[: LONGEST + 1] for one in model.metadata_props},
        folder=None if path is None else path.parent,
        shape=_shape(model),
    )
    for where, writer, read in READERS:
        try:
            said = read(found)
        except ConfigError as error:
            return Carried(f"{where} ({writer})", reason=str(error))
        if said is not None:
            return Carried(f"{where} ({writer}{said.detail})", how=said.how)
    return None


def _shape(model: onnx.ModelProto) -> tuple[int | None, ...]:
    """Of the first input; None for what is open."""
    first = next(iter(model.graph.input), None)
    dims = () if first is None else first.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in dims)


__all__ = ["READERS", "carried_of"]
