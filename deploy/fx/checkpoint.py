"""Checkpoints of a training for int8: tensors and plain values, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import CacheError, ModelError
from deploy.files.atomic import write_bytes
from deploy.fx import randomness
from deploy.fx.source import read_tensors

_KEYS = {"format", "marks", "epoch", "model", "optimizer", "rng", "losses"}
_FORMAT = "calib8-qat-3"

Marks = dict[str, str]


def marks(
    model: nn.Module,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    teacher: nn.Module | None,
    settings: Mapping[str, object],
) -> Marks:
    """What a training is known by: the name of each part that must be the same -> sha256 (hex).

    Args:
        model: the float model, whose values count.
        prepared: made of it; its names and shapes count, and not the ranges, which a machine may
            round otherwise.
        optimizer: its class and options count.
        teacher: whose values count too.
        settings: name -> value.
    """
    shapes = [(name, list(value.shape)) for name, value in prepared.state_dict().items()]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    found: dict[str, object] = {
        "form of the model": shapes,
        "float weights": _values(model),
        "optimizer": (type(optimizer).__name__, groups),
        "teacher": None if teacher is None else _values(teacher),
    }
    found |= settings
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}


def save(
    path: Path,
    mark: Marks,
    epoch: int,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Write all that the next epoch needs: weights, ranges, momenta, random state."""
    state = {
        "format": _FORMAT,
        "marks": mark,
        "epoch": epoch,
        "model": dict(prepared.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rng": randomness.state(),
        "losses": losses,
    }
    data = io.BytesIO()
    torch.save(state, data)
    write_bytes(path, data.getvalue())


def resume(
    path: Path, mark: Marks, prepared: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, list[float]]:
    """Put a checkpoint back; gives (the next epoch, losses so far).

    Raises:
        CacheError: the file is broken, or of another model or other settings.
    """
    try:
        state: Any = read_tensors(path, own=True)
    except ModelError as error:
        raise CacheError(f"{error}; remove it to start anew") from error
    if not isinstance(state, dict) or set(state) != _KEYS or state["format"] != _FORMAT:
        raise CacheError(
            f"{path} must be a checkpoint of this calib8's qat; remove it to start anew"
        )
    _refuse_others(path, mark, state["marks"])
    try:
        prepared.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        randomness.restore(state["rng"])
        return int(state["epoch"]), [float(loss) for loss in state["losses"]]
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CacheError(f"{path} is damaged; remove it to start anew") from error


def _refuse_others(path: Path, mark: Marks, kept: Any) -> None:
    if kept == mark:
        return
    known = kept if isinstance(kept, dict) else {}
    other = [name for name, value in mark.items() if known.get(name) != value]
    raise CacheError(
        f"{path} must be of this training, and is of another {', '.join(other) or 'one'};"
        " give another --checkpoint, or remove it to start anew"
    )


def _values(model: nn.Module) -> str:
    """Sha256 (hex) of the names and values of a model's state, wherever it lies."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(repr((name, str(value.dtype), list(value.shape))).encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
