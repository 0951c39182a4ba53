"""Inputs by name: a model whose forward takes keywords or a dict, as one that takes tensors.

::

    forward(self, ids, kinds=None, mask=None)    ids, mask      called as forward(ids=., mask=.)
    forward(self, **batch)                       image          called as forward(image=.)
    forward(self, batch)                         image, scale   called as forward({"image": ., ...})

Whatever captures, exports and quantizes gives a model tensors in order. So a model that is asked
for by other names gets a class of its own with such a forward; modules keep their names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from inspect import Parameter
from keyword import iskeyword
from typing import Any

import torch
from torch import nn

from deploy.errors import ConfigError, did_you_mean

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
