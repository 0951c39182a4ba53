"""Read the weights of a model from a file, without running code from it.

Files are read by `torch.load(weights_only=True)` or safetensors. State dicts are also found inside
checkpoints and under a wrapper's prefix.
"""

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import Calib8Error, ModelError, SdkMissingError
from deploy.files.archives import check_archive
from deploy.files.reading import MAX_BYTES, open_regular_file

# keys under which training scripts store the weights, the more specific ones first
STATE_DICT_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
)


_DEPTH = 3  # of nested checkpoints


def find_state_dict(read: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """Find the state dict in a loaded file: the file itself, under a key, or the only one in it.

    Keys of `STATE_DICT_KEYS` come first.

    Raises:
        ModelError: there is none, or several; the message lists the keys.
    """
    if not isinstance(read, dict):
        raise ModelError(
            f"{path} must hold a state dict, got {type(read).__name__}; save model.state_dict()"
        )
    states = list(_states(read))
    if len(states) == 1:
        return states[0][1]
    if states:
        names = " and ".join(repr(name) for name, _ in states[:8])
        raise ModelError(
            f"{path} must hold one state dict, got several under {names}; save only the one to load"
        )
    names = ", ".join(map(repr, list(read)[:8])) or "nothing"
    raise ModelError(
        f"{path} must hold a state dict, itself or under one of"
        f" {', '.join(STATE_DICT_KEYS)}, got {names}; save model.state_dict()"
    )


def _states(
    checkpoint: Mapping[Any, Any], name: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield (path, state dict) in a checkpoint; if it has a preferred key, only below that."""
    if _is_state(checkpoint):
        yield name, checkpoint
        return
    parts = {key: part for key, part in checkpoint.items() if isinstance(part, dict) and depth}
    preferred = next((key for key in STATE_DICT_KEYS if key in parts), None)
    for key in parts if preferred is None else (preferred,):
        if isinstance(key, str):  # the keys of optimizer states are integers
            yield from _states(parts[key], f"{name}.{key}" if name else key, depth - 1)


def strip_prefix(state: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the state under the model's names, with a common prefix removed.

    DataParallel adds `module.`, torch.compile `_orig_mod.`, a training module the name of its
    attribute, possibly along with other tensors.
    """
    wanted = set(model.state_dict())
    while state and set(state) != wanted:
        first = {name.partition(".")[0] for name in state}
        if len(first) != 1 or not all("." in name for name in state):
            break
        if all(name.partition(".")[0] in first for name in wanted):
            break  # the model's own names have this prefix
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state if set(state) == wanted else _under_prefix(state, wanted) or state


def _under_prefix(
    state: Mapping[str, torch.Tensor], wanted: set[str]
) -> Mapping[str, torch.Tensor]:
    """Return the entries under the only prefix with exactly the wanted names, else {}.

    Other entries are for example the weights of a loss, or the step count of averaged weights.
    """
    first = min(wanted, default="")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    parts = [
        {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        for prefix in prefixes
    ]
    complete = [part for part in parts if set(part) == wanted]
    return complete[0] if len(complete) == 1 and not wanted <= set(state) else {}


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Return whether `value` maps names to tensors; `_extra_state` entries may be anything."""
    if not value or not all(isinstance(name, str) for name in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for item in value.values()]
    return any(tensors) and all(
        tensor or name.endswith("_extra_state") for tensor, name in zip(tensors, value, strict=True)
    )


_PICKLED_CLASS = re.compile(r"(?:GLOBAL|class|type) ([A-Za-z_][\w]*\.[\w.]*\w)")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict, or a checkpoint that holds one, into `model`, strictly.

    Raises:
        ModelError: the file has more than plain tensors, or names or shapes differ.
        SdkMissingError: safetensors is needed and not installed.
    """
    read = read_safetensors if path.suffix == ".safetensors" else read_tensors
    state = strip_prefix(find_state_dict(read(path), path), model)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise ModelError(f"{path} must hold this model's weights: {text[:400]}") from error


def read_tensors(path: Path) -> Any:
    """Load a file of `torch.save` that has only tensors and plain containers, a run's own.

    Raises:
        ModelError: the file is missing, broken, or would run code when unpickled.
    """
    try:
        what = "a file of tensors"
        with open_regular_file(
            path, what=what, error=ModelError, max_bytes=MAX_BYTES, rewritable=True
        ) as file:
            if file.read(2) == b"PK":  # files of old torch versions are not zip archives
                check_archive(file, path, what=what, error=ModelError, max_bytes=MAX_BYTES)
            file.seek(0)
            with warnings.catch_warnings(action="ignore"):  # on TorchScript, reported below
                return torch.load(file, map_location="cpu", weights_only=True)
    except Calib8Error:
        raise
    except Exception as error:  # torch raises several classes for a broken or unsafe file
        raise ModelError(
            f"{path} must be a file of tensors that torch.load(weights_only=True) accepts,"
            f" got {_describe(error)}; save model.state_dict()"
        ) from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Load a safetensors file; return name -> tensor.

    Raises:
        ModelError: the file is missing or broken.
        SdkMissingError: the package is not installed.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise SdkMissingError(
            f"{path} needs the package safetensors, which is not installed: pip install safetensors"
        ) from error
    what = "a file of safetensors"
    with open_regular_file(path, what=what, error=ModelError, max_bytes=MAX_BYTES):
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
            return tensors
        except Exception as error:  # SafetensorError, or torch's for an unknown dtype
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} must be {what}, got: {text}; save it again") from error


def _describe(error: Exception) -> str:
    """Summarize torch's message, which mostly explains the options of torch.load."""
    text = str(error)
    if "TorchScript" in text:
        return "TorchScript, which torch.jit.load reads"
    if match := _PICKLED_CLASS.search(text):
        return f"an object of {match[1]}, which only unpickling could make"
    first = (text.strip().splitlines() or [""])[0]
    if isinstance(error, pickle.UnpicklingError | KeyError):
        return "what torch.save did not write"
    return f"{type(error).__name__}: {first[:200]}"
