"""One file per source of models; each gives an ONNX model that the graph analysis accepts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.frontends.base import LoadedModel, Loader
from deploy.frontends.onnx import load_onnx
from deploy.frontends.torch import is_torch_spec, load_torch
from deploy.progress import phase

if TYPE_CHECKING:
    import onnx

__all__ = ["FRONTENDS", "LoadedModel", "Loader", "load"]

# Kind of source -> loader. A kind is a file's suffix; "file.py:factory" is of kind ".py".
FRONTENDS: dict[str, Loader] = {
    ".onnx": load_onnx,
    ".py": load_torch,
}


@phase("model")
def load(source: str | Path | onnx.ModelProto, *, fold_batchnorm: bool = True) -> LoadedModel:
    """Read a trained model from any known source and clean it for calibration.

    Args:
        source: an ONNX file of opset 7 or newer (external data beside it is read), an
            `onnx.ModelProto` in memory, or another kind of the table FRONTENDS.
        fold_batchnorm: fold BatchNormalization, and Mul and Add with constants per channel, into
            the Conv, ConvTranspose or Gemm before them.

    Raises:
        ModelError: it cannot be read, is quantized already, or onnxruntime cannot load it.
    """
    # A file of an unknown suffix goes to the ONNX reader, which says what the file really is.
    return FRONTENDS.get(_kind(source), load_onnx)(source, fold_batchnorm)


def _kind(source: str | Path | onnx.ModelProto) -> str:
    if not isinstance(source, str | Path):
        return ".onnx"
    path, colon, _ = str(source).rpartition(":")
    torch = (colon and path.endswith(".py")) or is_torch_spec(source)
    return ".py" if torch else Path(source).suffix.lower()
