"""Load models: one module per source; each returns an ONNX model ready for graph analysis."""

from pathlib import Path

import onnx

from deploy.errors import ModelError, QuantizedError
from deploy.frontends.base import LoadedModel, Loader
from deploy.frontends.checks import check_fields, check_float
from deploy.frontends.input_shapes import is_torch_spec, load_torch
from deploy.frontends.lift import restore_float_weights
from deploy.frontends.onnx_file import load_onnx
from deploy.frontends.onnx_reader import read_model
from deploy.terminal import phase

__all__ = ["FRONTENDS", "LoadedModel", "Loader", "is_quantized", "load", "load_float_or_qdq"]

# Kind of source -> loader. A kind is a file's suffix; "file.py:factory" is of kind ".py".
FRONTENDS: dict[str, Loader] = {".onnx": load_onnx, ".py": load_torch}


@phase("model")
def load(
    source: str | Path | onnx.ModelProto | LoadedModel, *, fold_batchnorm: bool = True
) -> LoadedModel:
    """Load a trained model from any known source and clean it for calibration.

    Args:
        source: an ONNX file of opset 7 or newer (with its external data next to it), an
            `onnx.ModelProto` in memory, or another kind of source in FRONTENDS. A `LoadedModel`
            is returned unchanged.
        fold_batchnorm: fold BatchNormalization, and Mul and Add with constants per channel, into
            the Conv, ConvTranspose or Gemm before them.

    Raises:
        ModelError: the source cannot be read, is quantized already, or onnxruntime cannot load it.
    """
    if isinstance(source, LoadedModel):
        return source
    # For an unknown suffix the ONNX reader reports what the file really is.
    load_source = FRONTENDS.get(_find_kind(source), load_onnx)
    return load_source(source, fold_batchnorm)


def load_float_or_qdq(source: str | Path | onnx.ModelProto | LoadedModel) -> LoadedModel:
    """Load a float model with `load`, or a Q/DQ model with the data of its pairs in `qdq`.

    Raises:
        ModelError: see `load`; or a Q/DQ model whose pairs cannot serve as a calibration.
    """
    try:
        return load(source)
    except QuantizedError:
        assert not isinstance(source, LoadedModel)
        from deploy.frontends.qdq_model import read_qdq_model

        with phase("model"):
            return read_qdq_model(source)


def is_quantized(path: Path) -> bool:
    """Return whether a file is a quantized ONNX model; False if it cannot be read."""
    try:
        model = read_model(path)
        check_fields(model)
        restore_float_weights(model)
        check_float(model)
    except ModelError as error:
        return isinstance(error, QuantizedError)
    return False


def _find_kind(source: str | Path | onnx.ModelProto) -> str:
    """Return the kind of a source, a key of `FRONTENDS` if it is known."""
    if not isinstance(source, str | Path):
        return ".onnx"
    path, _, _ = str(source).rpartition(":")  # "" without a colon
    if path.endswith(".py") or is_torch_spec(source):
        return ".py"
    return Path(source).suffix.lower()
