"""Inputs to run a model with: made up by shape and dtype, or read from a file of arrays."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from deploy.archives import check_archive, read_array
from deploy.errors import ConfigError, FeedError
from deploy.files.reading import opened
from deploy.fx.model_inputs import take_named
from deploy.tensors import Array

_MOST_ARRAYS = 64
_MOST_BYTES = 4 << 30
_NUMBERED = re.compile(r"arr_(\d+)")  # as numpy.savez calls arrays without names


def example_inputs(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str | None] = (),
    *,
    floating: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    """One tensor for each shape, the same on every call.

    Standard normal values; 0 to 255 of uint8, which is pixels; 0 and 1 of bool and of other
    integers, which is within every vocabulary and a mask too.

    Args:
        shapes: of the inputs.
        dtypes: torch's name of each one's dtype; None, or none at all, for `floating`.
        floating: what the model computes in.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    names = [*dtypes, *[None] * (len(shapes) - len(dtypes))]
    kinds = [floating if name is None else getattr(torch, name) for name in names]
    return tuple(
        _made_up(tuple(shape), kind, generator) for shape, kind in zip(shapes, kinds, strict=True)
    )


def _made_up(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    most = 256 if dtype == torch.uint8 else 2
    return torch.randint(0, most, shape, generator=generator).to(dtype)


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first floating parameter or buffer; float32 where it has none."""
    tensors = (*model.parameters(), *model.buffers())
    found = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return next(found, torch.float32)


def in_float32(model: nn.Module) -> str | None:
    """Make a model of another floating dtype one of float32, in place; a sentence that says so.

    What is exported and quantized is float32; float16 and bfloat16 lose nothing by it.
    """
    dtype = floating_dtype(model)
    if dtype == torch.float32:
        return None
    model.float()
    lost = ", which rounds its weights" if dtype == torch.float64 else ""
    return f"the model computes in {_name(dtype)} and is taken in float32{lost}"


def read_sample(path: Path, model: nn.Module) -> tuple[torch.Tensor, ...]:
    """The inputs of one run from an .npy file, or an .npz file with an array for each.

    An archive's arrays are inputs by their names, as `deploy.fx.model_inputs.take_named` gives them to
    the model, which it may change; or arr_0, arr_1, ... as `numpy.savez(path, a, b)` writes them.

    Raises:
        FeedError: the file is damaged, holds objects, or its names are no inputs of the model.
        ConfigError: another suffix.
    """
    if path.suffix.lower() not in (".npy", ".npz"):
        raise ConfigError(
            f"a sample is an .npy or .npz file, got {path}; write it with numpy.savez"
        )
    arrays = _read(path)
    chosen = [arrays[name] for name in _in_order(arrays, model, path)]
    try:
        return tuple(torch.from_numpy(np.array(array)) for array in chosen)
    except TypeError as error:
        kinds = ", ".join(sorted({str(array.dtype) for array in chosen}))
        raise FeedError(f"{path} must hold numbers that torch has, got {kinds}") from error


def _read(path: Path) -> dict[str, Array]:
    """Every array of a file by its name; that of an .npy file has none."""
    with opened(path, what="a sample", error=FeedError, most=_MOST_BYTES) as file:
        try:
            if path.suffix.lower() == ".npy":
                return {"": read_array(file, _MOST_BYTES)}
            budget = {"entries": _MOST_ARRAYS, "most": _MOST_BYTES}
            check_archive(file, path, what="a sample", error=FeedError, **budget)
            with zipfile.ZipFile(file) as archive:
                return {
                    info.filename.removesuffix(".npy"): _entry(archive, info)
                    for info in archive.infolist()
                }
        except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            raise FeedError(f"{path} must be a sound file of arrays, got: {error}") from error


def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as stream:
        return read_array(stream, info.file_size)


def _in_order(arrays: Mapping[str, Array], model: nn.Module, path: Path) -> list[str]:
    """The names of arrays, in the order of the inputs that they are."""
    numbers = {int(found[1]): name for name in arrays if (found := _NUMBERED.fullmatch(name))}
    if sorted(numbers) == list(range(len(arrays))):
        return [numbers[number] for number in sorted(numbers)]
    names = list(arrays)
    try:
        return [names[i] for i in take_named(model, [name or None for name in names])]
    except ConfigError as error:
        raise FeedError(
            f"{path} cannot be given to the model: {error}; write it with numpy.savez under these"
            " names, or as arr_0, arr_1, ... in their order"
        ) from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
