"""Shapes and dtypes of TensorRT's Python binding as tuples and numpy's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.errors import BackendError

if TYPE_CHECKING:
    import tensorrt as trt


# trt.DataType -> numpy's name, or that of `device_types`; other names are numpy's in upper case.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8"}
_NUMPY_DTYPES = {"INT8", "INT32", "INT64", "UINT8", "BOOL"}


def shape_of(shape: trt.Dims) -> tuple[int, ...]:
    """Return TensorRT's shape as a tuple, dynamic dimensions as -1."""
    return tuple(int(shape[axis]) for axis in range(len(shape)))


def dtype_of(data_type: trt.DataType) -> str:
    """Return the dtype name of a trt.DataType.

    `trt.nptype` is not used: that of 8.5 fails with newer numpy, and none supports bfloat16.

    Raises:
        BackendError: the type has elements of less than a byte.
    """
    name = str(data_type).rpartition(".")[2]
    if name in _DTYPES:
        return _DTYPES[name]
    if name not in _NUMPY_DTYPES:
        raise BackendError(
            f"an input or output must be of a type of whole bytes, got {name}; cast it in the model"
        )
    return name.lower()
