"""Models written beside each other, named after the model that they are of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.files import atomic

if TYPE_CHECKING:
    import onnx


def written(stem: Path, suffix: str, model: onnx.ModelProto | bytes) -> Path:
    """Write a model, or a text, as `stem` + `suffix`; a model always as the same bytes."""
    whole = model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)
    return atomic.write_bytes(stem.with_name(stem.name + suffix), whole)
