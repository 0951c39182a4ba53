"""A large model of memory as files whose weights ONNX Runtime maps instead of copying them.

::

    ModelProto --> model.onnx   nodes, small tensors, places of the others
              '--> weights      the bytes of large tensors, one after the other
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import ModelProto

_MIN_MAPPED_VALUES = 1 << 18  # 1 MiB in float32; smaller tensors stay in the model
_ALIGNMENT = 1 << 12  # of the places in the file, in bytes: a page


def mapped_tensors(model: ModelProto) -> dict[str, int]:
    """Return name -> number of values of the initializers that are worth a file of their own."""
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if tensor.HasField("raw_data"):  # its bytes are not counted, since reading them copies them
            size = math.prod(tensor.dims)
            if size >= _MIN_MAPPED_VALUES:
                sizes[tensor.name] = size
    return sizes


def write_mapped(model: ModelProto, names: Collection[str], folder: Path) -> Path:
    """Write a model into a folder, with the values of some initializers in a separate file there.

    Args:
        model: the model in memory; it is not changed.
        names: names of the initializers (weights) whose values go to the separate file.
        folder: folder that gets the files `model.onnx` and `weights`.

    Returns:
        The model's path.

    Raises:
        OSError: the folder cannot be written.
    """
    from onnx.external_data_helper import set_external_data

    small_model = copy_without_initializers(model, names, placeholders=True)
    placeholder_by_name = {tensor.name: tensor for tensor in small_model.graph.initializer}
    with (folder / "weights").open("wb") as file:
        for tensor in model.graph.initializer:
            if tensor.name not in names:
                continue
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT  # rounded up to the next page
            file.seek(offset)
            data = tensor.raw_data
            file.write(data)
            placeholder = placeholder_by_name[tensor.name]
            placeholder.raw_data = b""  # `set_external_data` requires the field
            set_external_data(placeholder, location="weights", offset=offset, length=len(data))
            placeholder.ClearField("raw_data")
    path = folder / "model.onnx"
    path.write_bytes(small_model.SerializeToString())
    return path


def copy_without_initializers(
    model: ModelProto, names: Collection[str], *, placeholders: bool = False
) -> ModelProto:
    """Return a copy of a model without some of its initializers (weights).

    These may be most of the model's bytes. So the model is not copied as a whole, but field by
    field.

    Args:
        model: the model; it is not changed.
        names: names of the initializers to leave out.
        placeholders: whether each is replaced by a tensor of its name, type and shape without
            values.
    """
    copy = type(model)()
    for field, value in model.ListFields():
        if field.name != "graph":
            _copy_field(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name == "initializer":
            for tensor in value:
                if tensor.name not in names:
                    copy.graph.initializer.append(tensor)
                elif placeholders:
                    copy.graph.initializer.add(
                        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims
                    )
        else:
            _copy_field(copy.graph, field.name, value)
    return copy


def _copy_field(message: Any, field: str, value: Any) -> None:
    """Copy a field's value into the empty field of another message."""
    empty_field = getattr(message, field)
    if hasattr(empty_field, "MergeFrom"):  # of several values, or a message
        empty_field.MergeFrom(value)
    else:
        setattr(message, field, value)
