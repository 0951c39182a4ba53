"""What a loader gives -> the model's inputs: arrays, tensors, tuples with labels, mappings.

By duck typing, so that no framework is needed: whatever numpy makes an array of is one, a torch
tensor that has a gradient too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.tensors import Array, TensorSpec

Specs = Sequence[TensorSpec]
Item = dict[str, Array]
_MOST_NAMED = 5


def inputs_of(value: object, specs: Specs, where: str) -> tuple[Item, list[str]]:
    """The inputs in an item of a loader, and what else it holds, in words.

    ::

        array                       the only input
        (array, ...), [array, ...]  the inputs in their order, then what is left out
        ({name: array}, ...)        the mapping, then what is left out
        {name: array, ...}          the inputs by name; other names are left out

    Raises:
        FeedError: it is none of these, or a tuple of which nobody can tell what is an input.
    """
    if isinstance(value, tuple | list) and not _is_numbers(value):
        return _of_tuple(value, specs, where)
    if isinstance(value, Mapping):
        return _of_mapping(value, specs, where)
    return by_name({"": as_array(value, where)}, specs, where), []


def _of_tuple(value: Sequence[Any], specs: Specs, where: str) -> tuple[Item, list[str]]:
    if value and isinstance(value[0], Mapping):
        item, left = _of_mapping(value[0], specs, where)
        return item, left + _numbered(value[1:], 1)
    if len(value) < len(specs):
        raise FeedError(
            f"{where} must hold the inputs {[s.name for s in specs]}, got a"
            f" {type(value).__name__} of {len(value)}; give a dict of arrays by input name"
        )
    arrays = [as_array(one, where) for one in value[: len(specs)]]
    rest = value[len(specs) :]
    twins = [one for one in rest if np.shape(arrays[0])[-2:] and _shape(one) == arrays[0].shape]
    if twins and arrays[0].ndim > 1:
        raise FeedError(
            f"{where} must tell its inputs from what is beside them, got a {type(value).__name__}"
            f" of {len(value)} with several of the shape {list(arrays[0].shape)}; give one array a"
            " sample, or a dict of arrays by input name"
        )
    return {s.name: a for s, a in zip(specs, arrays, strict=True)}, _numbered(rest, len(specs))


def _numbered(rest: Sequence[object], first: int) -> list[str]:
    return [f"number {place}" for place, _ in enumerate(rest[:_MOST_NAMED], first + 1)]


def _of_mapping(value: Mapping[Any, Any], specs: Specs, where: str) -> tuple[Item, list[str]]:
    wanted = [s.name for s in specs]
    missing = [name for name in wanted if name not in value]
    if missing:
        raise FeedError(
            f"{where} must name the inputs {wanted}, got {sorted(map(str, value))};"
            " name its arrays as the model does"
        )
    left = [repr(str(name)) for name in value if name not in wanted]
    return {name: as_array(value[name], where) for name in wanted}, left[:_MOST_NAMED]


def as_array(value: object, where: str) -> Array:
    """Whatever numpy makes an array of numbers of.

    Raises:
        FeedError: it makes none.
    """
    try:
        plain = value.detach().cpu() if hasattr(value, "detach") else value
        array: Array = np.asarray(plain)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(f"{where} must be an array, got {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise FeedError(
            f"{where} must be an array of numbers, a tuple that begins with them, or a dict of them"
            f" by input name, got {type(value).__name__}"
        )
    return array


def _is_numbers(value: Sequence[Any]) -> bool:
    """Whether lists are nested down to plain numbers, as JSON and datasets give them."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _shape(value: object) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def by_name(arrays: dict[str, Array], specs: Specs, where: str) -> Item:
    """Arrays by input name; a single array is the single input's, whatever its name."""
    wanted = [s.name for s in specs]
    if len(wanted) == 1 and len(arrays) == 1:
        return {wanted[0]: next(iter(arrays.values()))}
    if set(arrays) != set(wanted):
        got = sorted(arrays) if "" not in arrays else "one array"
        raise FeedError(
            f"{where} must hold exactly the inputs {wanted}, got {got};"
            " write numpy.savez with one array per input"
        )
    return arrays
