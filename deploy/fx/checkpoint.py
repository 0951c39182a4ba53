"""Checkpoints of a training for int8: tensors and plain values, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.atomic import write_bytes
from deploy.errors import CacheError, ModelError
from deploy.fx.source import read_tensors

_KEYS = {"format", "fingerprint", "epoch", "model", "optimizer", "rng", "losses"}
_FORMAT = "calib8-qat-1"


def fingerprint(prepared: nn.Module, *settings: object) -> str:
    """Sha256 (hex) of the names and shapes of a prepared model's state, and of the settings."""
    shapes = [(name, list(value.shape)) for name, value in prepared.state_dict().items()]
    return hashlib.sha256(repr((settings, shapes)).encode()).hexdigest()


def save(
    path: Path,
    mark: str,
    epoch: int,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Write all that the next epoch needs: weights, ranges, momenta, random state."""
    state = {
        "format": _FORMAT,
        "fingerprint": mark,
        "epoch": epoch,
        "model": dict(prepared.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "losses": losses,
    }
    data = io.BytesIO()
    torch.save(state, data)
    write_bytes(path, data.getvalue())


def resume(
    path: Path, mark: str, prepared: nn.Module, optimizer: torch.optim.Optimizer
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
        raise CacheError(f"{path} must be a checkpoint of calib8 qat; remove it to start anew")
    if state["fingerprint"] != mark:
        raise CacheError(
            f"{path} must be of this model, target, bits and epochs, and is of others;"
            " give another --checkpoint, or remove it to start anew"
        )
    try:
        prepared.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        return int(state["epoch"]), [float(loss) for loss in state["losses"]]
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CacheError(f"{path} is damaged; remove it to start anew") from error
