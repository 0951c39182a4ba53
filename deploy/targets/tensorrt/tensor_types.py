"""TensorRT's shapes and types in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.errors import BackendError

if TYPE_CHECKING:
    import tensorrt as trt

# Where the name in lower case is not numpy's; the last two are those of `device_types`.
_WORDS = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8"}
_PLAIN = {"INT8", "INT32", "INT64", "UINT8", "BOOL"}


def dims(shape: trt.Dims) -> tuple[int, ...]:
    """TensorRT's shape as a tuple; -1 where it is dynamic."""
    return tuple(int(shape[axis]) for axis in range(len(shape)))


def dtype_of(data_type: trt.DataType) -> str:
    """Name of a trt.DataType; `trt.nptype` of 8.5 fails with newer numpy, and knows no bfloat16.

    Raises:
        BackendError: values of this type do not fill whole bytes.
    """
    name = str(data_type).rpartition(".")[2]
    if name in _WORDS:
        return _WORDS[name]
    if name not in _PLAIN:
        raise BackendError(
            f"an input or output must be of a type of whole bytes, got {name}; cast it in the model"
        )
    return name.lower()
