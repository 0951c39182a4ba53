"""State dicts as people keep them: inside a checkpoint, under a wrapper's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import ModelError

# where training scripts put the weights, the more telling name first
KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
_DEPTH = 3  # of checkpoints within each other


def found_state(read: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """The state dict in what `torch.load` gave: itself, or what lies under one of `KEYS`.

    Raises:
        ModelError: there is none; the message lists what there is.
    """
    inside = read
    for _ in range(_DEPTH):
        if not isinstance(inside, dict) or _is_state(inside):
            break
        key = next((key for key in KEYS if isinstance(inside.get(key), dict)), None)
        if key is None:
            break
        inside = inside[key]
    if not isinstance(inside, dict):
        raise ModelError(
            f"{path} must hold a state dict, got {type(inside).__name__}; save model.state_dict()"
        )
    if not _is_state(inside):
        names = ", ".join(map(repr, list(inside)[:8])) or "nothing"
        raise ModelError(
            f"{path} must hold a state dict, itself or under one of {', '.join(KEYS)}, got {names};"
            " save model.state_dict()"
        )
    return inside


def fitted(state: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The state under the model's own names, where a prefix of all of them is what differs.

    DataParallel writes `module.`, torch.compile `_orig_mod.`, a training loop the name of its own
    attribute.
    """
    wanted = set(model.state_dict())
    while state and set(state) != wanted:
        first = {name.partition(".")[0] for name in state}
        if len(first) != 1 or not all("." in name for name in state):
            break
        if all(name.partition(".")[0] in first for name in wanted):
            break  # the model's own names begin so
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Whether it maps names to tensors; a module may add a value of its own (`_extra_state`)."""
    if not value or not all(isinstance(name, str) for name in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for item in value.values()]
    return any(tensors) and all(
        tensor or name.endswith("_extra_state") for tensor, name in zip(tensors, value, strict=True)
    )
