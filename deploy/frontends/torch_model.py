"""Parse the names of PyTorch models and their inputs; `deploy.fx.open_model` loads the models."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import onnx

from deploy.errors import ConfigError, did_you_mean
from deploy.files.usercode import is_library_model
from deploy.frontends.base import LoadedModel

if TYPE_CHECKING:
    from torch import nn

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")
_FLOATS = ("float32", "float16", "bfloat16", "float64")
DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")


def is_torch_spec(source: object) -> bool:
    """Return whether `source` is `file.py:factory`, or a named model such as timm:resnet18."""
    path, _, name = str(source).rpartition(":")
    return (path.endswith(".py") and name.isidentifier()) or is_library_model(source)


def is_torch_module(source: object) -> TypeGuard[nn.Module]:
    """Return whether `source` is a module or an exported program; torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(source, torch.nn.Module | torch.export.ExportedProgram)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse `1x3x224x224` to (1, 3, 224, 224).

    Raises:
        ConfigError: not positive integers joined by x.
    """
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"an input shape is like 1x3x224x224, got {text!r}")
    return tuple(map(int, text.split("x")))


class InputRequest(NamedTuple):
    """An input given by the user: dtype None for the model's own, name None for the next input."""

    shape: tuple[int, ...]
    dtype: str | None = None
    name: str | None = None


def parse_input(text: str) -> InputRequest:
    """Parse `1x3x8x8`, `1x128:int64` or `ids=1x128:int64` to shape, dtype and name.

    Raises:
        ConfigError: no shape, or no dtype of `DTYPES`.
    """
    name, equals, shape_and_dtype = text.rpartition("=")
    shape, colon, dtype = shape_and_dtype.partition(":")
    if (equals and not name) or (colon and dtype not in DTYPES):
        message = (
            "an input is like 1x3x224x224, 1x128:int64 or mask=1x128, of a dtype of"
            f" {', '.join(DTYPES)}, got {text!r}"
        )
        suggestion = did_you_mean(dtype, DTYPES)
        raise ConfigError(f"{message}; {suggestion}" if suggestion else message)
    return InputRequest(parse_shape(shape), dtype or None, name or None)


def load_torch(source: str | Path | onnx.ModelProto, fold_batchnorm: bool) -> LoadedModel:
    """Raise: a PyTorch model needs the shapes of its inputs, which FRONTENDS cannot pass.

    Raises:
        ConfigError: always; `deploy.fx.open_model.open_torch` takes the shapes.
    """
    if not is_torch_spec(source):
        raise ConfigError(f"a PyTorch model is given as file.py:factory, got {str(source)!r}")
    raise missing_shape_error(source)


def missing_shape_error(spec: object) -> ConfigError:
    """Return the error for a PyTorch model without input shapes."""
    return ConfigError(
        f"{spec} needs the shape of its input: --input 1x3x224x224, once for each input"
    )
