"""Checkpoints of quantization-aware training: tensors and plain values only, written atomically."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import CacheError, ModelError
from deploy.files.atomic import write_bytes
from deploy.fx.device import random_state, restore_random_state
from deploy.fx.weights import read_tensors

# "marks" are the fingerprints of the training, "rng" is the random state
_CHECKPOINT_KEYS = {"format", "marks", "epoch", "model", "optimizer", "rng", "losses"}


_FORMAT = "calib8-qat-3"


Fingerprints = dict[str, str]


def training_fingerprint(
    model: nn.Module,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    teacher: nn.Module | None,
    settings: Mapping[str, object],
) -> Fingerprints:
    """Return the fingerprints of a training: name of a part -> sha256 (hex).

    A checkpoint is of the same training if all are equal. They cover the values of the float
    models, the optimizer's class and options, and the settings, but only names and shapes of the
    prepared model: its ranges may be rounded differently on another machine.
    """
    shapes = [(name, list(value.shape)) for name, value in prepared.state_dict().items()]
    group_options = []  # of each group of parameters
    for group in optimizer.param_groups:
        group_options.append({key: value for key, value in group.items() if key != "params"})
    parts: dict[str, object] = {
        "form of the model": shapes,
        "float weights": _hash_values(model),
        "optimizer": (type(optimizer).__name__, group_options),
        "teacher": None if teacher is None else _hash_values(teacher),
    }
    parts |= settings
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in parts.items()}


def save_checkpoint(
    path: Path,
    fingerprints: Fingerprints,
    prepared: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Write a checkpoint of a training, from which `load_checkpoint` resumes it exactly.

    Args:
        path: of the file, which is replaced at once.
        fingerprints: of the training (`training_fingerprint`).
        prepared: the model, with its ranges.
        optimizer: its optimizer.
        losses: mean loss of each epoch so far.
    """
    state = {
        "format": _FORMAT,
        "marks": fingerprints,
        "epoch": len(losses),
        "model": dict(prepared.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rng": random_state(),
        "losses": losses,
    }
    data = io.BytesIO()
    torch.save(state, data)
    write_bytes(path, data.getvalue())


def load_checkpoint(
    path: Path, fingerprints: Fingerprints, prepared: nn.Module, optimizer: torch.optim.Optimizer
) -> list[float]:
    """Load a checkpoint of `save_checkpoint`; return the mean loss of each trained epoch.

    Model, optimizer and random state are as they were when it was saved.

    Raises:
        CacheError: the file is broken, or from another model or other settings.
    """
    try:
        state: Any = read_tensors(path)
    except ModelError as error:
        raise CacheError(f"{error}; remove it to start again") from error
    if not isinstance(state, dict) or set(state) != _CHECKPOINT_KEYS or state["format"] != _FORMAT:
        raise CacheError(
            f"{path} must be a checkpoint of this calib8's qat; remove it to start again"
        )
    _refuse_other_training(path, fingerprints, state["marks"])
    try:
        prepared.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        restore_random_state(state["rng"])
        return [float(loss) for loss in state["losses"]]
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CacheError(f"{path} is damaged; remove it to start again") from error


def _refuse_other_training(path: Path, fingerprints: Fingerprints, stored: Any) -> None:
    """Raise `CacheError` unless the fingerprints `stored` in a checkpoint are equal."""
    if stored == fingerprints:
        return
    if not isinstance(stored, dict):
        stored = {}
    changed_parts = [name for name, value in fingerprints.items() if stored.get(name) != value]
    raise CacheError(
        f"{path} must be of this training, and is of another {', '.join(changed_parts) or 'one'};"
        " give another --checkpoint, or remove it to start again"
    )


def _hash_values(model: nn.Module) -> str:
    """Return the sha256 (hex) of the names and values of a model's state, on any device."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(repr((name, str(value.dtype), list(value.shape))).encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
