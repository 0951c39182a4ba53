"""Inputs by name: a model whose forward takes keywords or a dict, as one that takes tensors.

::

    forward(self, ids, kinds=None, mask=None)    ids, mask      called as forward(ids=., mask=.)
    forward(self, **batch)                       image          called as forward(image=.)
    forward(self, batch)                         image, scale   called as forward({"image": ., ...})

Whatever captures, exports and quantizes gives a model tensors in order. So a model that is asked
for by other names gets a class of its own with such a forward; modules keep their names.

Inputs to run a model with: made up by shape and dtype, or read from a file of arrays.
"""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Mapping, Sequence
from inspect import Parameter
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deploy.errors import ConfigError, FeedError, did_you_mean
from deploy.files.reading import check_archive, opened, read_array
from deploy.tensors import Array

_PLAIN = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_TENSORS = (torch.Tensor, "torch.Tensor", "Tensor")  # which no dict is


def take_named(model: nn.Module, names: Sequence[str | None]) -> list[int]:
    """Let `model` take tensors for `names`; gives the order in which it takes them.

    Names are the arguments of forward; or, where it takes one argument of another name, the keys of
    a dict in that one's place.

    Args:
        model: changed in place where its forward does not take tensors in order.
        names: of the inputs; None for those that come first, which are taken in order.

    Raises:
        ConfigError: names that the forward does not take, one twice, or too few.
    """
    if not any(names):
        return list(range(len(names)))
    called = _with_first(model, names)
    ordered, into = taken(model, called)
    if ordered != _known(model):  # what is left out has its default, and is no input
        model.__class__ = named_class(type(model), ordered, into=into)
    return [called.index(name) for name in ordered]


def taken(model: nn.Module, names: Sequence[str]) -> tuple[list[str], str | None]:
    """`names` in the order in which a forward takes them, and the argument that is a dict of them.

    Raises:
        ConfigError: names that the forward does not take, or too few.
    """
    known = _known(model)
    ordered = sorted(names, key=lambda name: known.index(name) if name in known else len(known))
    return ordered, None if ordered == known else _dict_argument(model, ordered)


def input_names(model: nn.Module) -> tuple[str, ...] | None:
    """The arguments of a forward that `take_named` made; None for any other."""
    return getattr(type(model), "_calib8_inputs", None)


def as_dict(model: nn.Module) -> str | None:
    """A sentence where `take_named` gives a model a dict."""
    into = getattr(type(model), "_calib8_dict", None)
    if into is None:
        return None
    keys = ", ".join(input_names(model) or ())
    return f"forward takes one argument, {into}, and is given a dict of {keys} in it"


def _with_first(model: nn.Module, names: Sequence[str | None]) -> list[str]:
    """`names` with those of the first arguments in the place of None."""
    plain = [p.name for p in _parameters(model) if p.kind in _PLAIN]
    count = next(i for i, name in enumerate(names) if name is not None)
    if None in names[count:] or len(plain) < count:
        raise ConfigError(
            "inputs without a name are the first arguments of forward, in order and before those"
            f" with one, got {', '.join(name or 'no name' for name in names)} for"
            f" forward({', '.join(plain)})"
        )
    called = [*plain[:count], *(name for name in names if name is not None)]
    if twice := sorted({name for name in called if called.count(name) > 1}):
        raise ConfigError(f"each input has a name of its own, got {', '.join(twice)} twice")
    return called


def _dict_argument(model: nn.Module, names: Sequence[str]) -> str | None:
    """The only argument, where the names are keys of a dict in it; None where they are keywords.

    Raises:
        ConfigError: they are neither.
    """
    parameters = _parameters(model)
    fixed = [p for p in parameters if p.kind in (*_PLAIN, Parameter.KEYWORD_ONLY)]
    needed = [p for p in fixed if p.default is Parameter.empty]
    known = [p.name for p in fixed if p.kind in _NAMED]
    others = [name for name in names if name not in known]
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    if {p.name for p in needed} <= set(names) and (open_ended or not others):
        return None
    alone = needed or fixed
    if len(alone) == 1 and len(others) == len(names) and alone[0].annotation not in _TENSORS:
        return alone[0].name
    taken = ", ".join(str(parameter).partition(":")[0] for parameter in parameters)
    meant = [hint for name in others if (hint := did_you_mean(name, known))]
    raise ConfigError(
        f"inputs are named as the arguments of the model's forward({taken}), with all that have no"
        f" default, or as the keys of a dict that is the only one, got {', '.join(names)}"
        + (f"; {meant[0]}" if meant else "")
    )


def named_class(
    kind: type[nn.Module], names: Sequence[str], *, into: str | None
) -> type[nn.Module]:
    """A class of the same name whose forward takes a tensor for each name."""

    def forward(self: nn.Module, *tensors: torch.Tensor) -> Any:
        named = dict(zip(names, tensors, strict=True))
        return kind.forward(self, named) if into else kind.forward(self, **named)

    arguments = [_identifier(name) for name in names]
    taken = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *arguments)]
    forward.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    own = {"_calib8_inputs": tuple(arguments), "_calib8_dict": into}
    inside = {"forward": forward, "__module__": kind.__module__, **own}
    return type(kind.__name__, (kind,), inside)


def _identifier(name: str) -> str:
    """A key of a dict as the name of an argument."""
    plain = re.sub(r"\W", "_", name)
    free = plain.isidentifier() and not iskeyword(plain) and plain != "self"
    return plain if free else f"input_{plain}"


def _known(model: nn.Module) -> list[str]:
    """The arguments that a forward has names for."""
    return [p.name for p in _parameters(model) if p.kind in _NAMED]


def _parameters(model: nn.Module) -> list[Parameter]:
    return list(inspect.signature(model.forward).parameters.values())


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

    An archive's arrays are inputs by their names, as `deploy.fx.model_inputs.take_named` gives them
    to
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
