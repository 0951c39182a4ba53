"""State dicts as people keep them: inside a checkpoint, under a wrapper's prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import ModelError

# where training scripts put the weights, the more telling name first
KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
_DEPTH = 3  # of checkpoints within each other


def found_state(read: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """The state dict in what `torch.load` gave: itself, under one of `KEYS`, or the only one in it.

    Raises:
        ModelError: there is none, or several; the message lists what there is.
    """
    if not isinstance(read, dict):
        raise ModelError(
            f"{path} must hold a state dict, got {type(read).__name__}; save model.state_dict()"
        )
    found = list(_states(read))
    if len(found) == 1:
        return found[0][1]
    if found:
        names = " and ".join(repr(name) for name, _ in found[:8])
        raise ModelError(
            f"{path} must hold one state dict, got several under {names}; save the one that is"
            " meant by itself"
        )
    names = ", ".join(map(repr, list(read)[:8])) or "nothing"
    raise ModelError(
        f"{path} must hold a state dict, itself or under one of {', '.join(KEYS)}, got {names};"
        " save model.state_dict()"
    )


def _states(
    inside: Mapping[Any, Any], name: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """The state dicts in a checkpoint by where they lie; that under one of `KEYS` before others."""
    if _is_state(inside):
        yield name, inside
        return
    parts = {key: part for key, part in inside.items() if isinstance(part, dict) and depth}
    known = next((key for key in KEYS if key in parts), None)
    for key in parts if known is None else (known,):
        if isinstance(key, str):  # an optimizer's states have numbers
            yield from _states(parts[key], f"{name}.{key}" if name else key, depth - 1)


def fitted(state: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The state under the model's own names, where a prefix of all of them is what differs.

    DataParallel writes `module.`, torch.compile `_orig_mod.`, a training loop the name of its own
    attribute, beside which it may have other tensors.
    """
    wanted = set(model.state_dict())
    while state and set(state) != wanted:
        first = {name.partition(".")[0] for name in state}
        if len(first) != 1 or not all("." in name for name in state):
            break
        if all(name.partition(".")[0] in first for name in wanted):
            break  # the model's own names begin so
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state if set(state) == wanted else _part(state, wanted) or state


def _part(state: Mapping[str, torch.Tensor], wanted: set[str]) -> Mapping[str, torch.Tensor]:
    """What stands under the one prefix with all of the names and no other, beside something else.

    So a training module keeps its loss's weights, and an average of weights the number of steps.
    """
    first = min(wanted, default="")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    parts = [
        {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        for prefix in prefixes
    ]
    whole = [part for part in parts if set(part) == wanted]
    return whole[0] if len(whole) == 1 and not wanted <= set(state) else {}


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Whether it maps names to tensors; a module may add a value of its own (`_extra_state`)."""
    if not value or not all(isinstance(name, str) for name in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for item in value.values()]
    return any(tensors) and all(
        tensor or name.endswith("_extra_state") for tensor, name in zip(tensors, value, strict=True)
    )
