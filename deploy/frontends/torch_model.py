"""PyTorch models as they are named on a command line; `deploy.fx.opening` loads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy.errors import ConfigError, did_you_mean
from deploy.files.usercode import is_named
from deploy.frontends.base import LoadedModel

if TYPE_CHECKING:
    import onnx

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")
_FLOATS = ("float32", "float16", "bfloat16", "float64")
DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")


def is_torch_spec(source: object) -> bool:
    """Whether `source` reads as `file.py:factory`, or as a named model such as timm:resnet18."""
    path, _, name = str(source).rpartition(":")
    return (path.endswith(".py") and name.isidentifier()) or is_named(source)


def parse_shape(text: str) -> tuple[int, ...]:
    """`1x3x224x224` -> (1, 3, 224, 224).

    Raises:
        ConfigError: not positive integers joined by x.
    """
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"an input shape is like 1x3x224x224, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


class Wanted(NamedTuple):
    """An input that was asked for: dtype None for the model's own, name None for the next one."""

    shape: tuple[int, ...]
    dtype: str | None = None
    name: str | None = None


def parse_input(text: str) -> Wanted:
    """`1x3x8x8`, `1x128:int64` or `ids=1x128:int64` -> the shape, its dtype and its name.

    Raises:
        ConfigError: no shape, or no dtype of `DTYPES`.
    """
    name, equals, rest = text.rpartition("=")
    shape, colon, dtype = rest.partition(":")
    if (equals and not name) or (colon and dtype not in DTYPES):
        raise ConfigError(
            "an input is like 1x3x224x224, 1x128:int64 or mask=1x128, of a dtype of"
            f" {', '.join(DTYPES)}, got {text!r}{_meant(dtype)}"
        )
    return Wanted(parse_shape(shape), dtype or None, name or None)


def _meant(dtype: str) -> str:
    way_out = did_you_mean(dtype, DTYPES)
    return f"; {way_out}" if way_out else ""


def load_torch(source: str | Path | onnx.ModelProto, fold_batchnorm: bool) -> LoadedModel:
    """The table's row: says that a PyTorch model needs the shapes of its inputs.

    Raises:
        ConfigError: always; `deploy.fx.opening.open_torch` takes the shapes.
    """
    if not is_torch_spec(source):
        raise ConfigError(f"a model in PyTorch is given as file.py:factory, got {str(source)!r}")
    raise shapeless(source)


def shapeless(spec: object) -> ConfigError:
    """What to say of a model in PyTorch whose inputs have no shape."""
    return ConfigError(
        f"{spec} needs the shape of its input: --input 1x3x224x224, once for each input"
    )
