"""Read the weights of a model from a file, without running code from it.

Files are read by `torch.load(weights_only=True)` or safetensors. State dicts are also found inside
checkpoints and under a wrapper's prefix.
"""

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
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


_MAX_DEPTH = 3  # of nested checkpoints


def find_state_dict(content: Any, path: Path, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Find the state dict of a model in the content of a file, without a wrapper's prefix.

    A file may hold several, nested in dicts. The one that fits the model is returned. If none fits,
    the only one of the file is returned, or the only one under the first of `STATE_DICT_KEYS` that
    the file has, so that the caller can report what differs.

    Raises:
        ModelError: there is none, or several; the message lists the keys.
    """
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} must hold a state dict, got {type(content).__name__}; save model.state_dict()"
        )
    states = []
    for key, state in _find_states(content):
        weights = _strip_prefix(state, model)
        if _has_names(weights, model):
            states.append((key, weights))
    if not states:
        states = list(_find_states(content, usual_keys=STATE_DICT_KEYS))
    if len(states) == 1:
        return states[0][1]
    if states:
        state_keys = " and ".join(repr(key) for key, _ in states[:8])
        raise ModelError(
            f"{path} must hold one state dict, got several under {state_keys}; save only the one to"
            " load"
        )
    content_keys = ", ".join(map(repr, list(content)[:8])) or "nothing"
    raise ModelError(
        f"{path} must hold a state dict, itself or under one of"
        f" {', '.join(STATE_DICT_KEYS)}, got {content_keys}; save model.state_dict()"
    )


def _find_states(
    checkpoint: Mapping[Any, Any],
    usual_keys: Sequence[str] = (),
    path: str = "",
    depth: int = _MAX_DEPTH,
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield (path of keys, state dict) of each state dict in a checkpoint.

    Args:
        checkpoint: content of a file, or a dict in it.
        usual_keys: if some of them are there, only what is under the first one is searched.
        path: keys that lead to `checkpoint`, joined by dots.
        depth: how many levels of dicts below `checkpoint` are searched.
    """
    if _is_state(checkpoint):
        yield path, checkpoint
        return
    if not depth:
        return
    parts = {key: value for key, value in checkpoint.items() if isinstance(value, dict)}
    present_usual_keys = [key for key in usual_keys if key in parts]
    for key in present_usual_keys[:1] or parts:
        if isinstance(key, str):  # the keys of optimizer states are integers
            part_path = f"{path}.{key}" if path else key
            yield from _find_states(parts[key], usual_keys, part_path, depth - 1)


def _strip_prefix(
    state: Mapping[str, torch.Tensor], model: nn.Module
) -> Mapping[str, torch.Tensor]:
    """Return the model's weights from a state dict in which a wrapper put a prefix on their names.

    DataParallel adds `module.`, torch.compile `_orig_mod.`, a training module the name of its
    attribute, possibly along with other tensors: the weights of a loss, or the step count of
    averaged weights. The state dict is returned unchanged if it has the model's names already, or
    if not exactly one prefix fits.
    """
    if _has_names(state, model):
        return state
    # what stands before one name of the model may be the prefix of all of them
    sample_name = min(_required_names(model))
    suffix = f".{sample_name}"
    prefixes = [name.removesuffix(sample_name) for name in state if name.endswith(suffix)]
    fitting_weights = []  # of each prefix that fits
    for prefix in prefixes:
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        if _has_names(weights, model) and weights.keys() <= model.state_dict().keys():
            fitting_weights.append(weights)
    return fitting_weights[0] if len(fitting_weights) == 1 else state


def _required_names(model: nn.Module) -> set[str]:
    """Return the names in a model's state dict, without those that torch adds to older files."""
    return {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}


def _has_names(state: Mapping[str, torch.Tensor], model: nn.Module) -> bool:
    return _required_names(model) <= state.keys()


def _refuse_casts(state: Mapping[str, torch.Tensor], model: nn.Module, path: Path) -> None:
    """Raise `ModelError` if the values of a weight would change when it is loaded.

    torch copies integers, complex numbers and 8-bit floats into a float tensor, but the scale that
    belongs to such values is lost.
    """
    for name, tensor in model.state_dict().items():
        if name.endswith("_extra_state"):  # anything that a module stores
            continue
        stored = state.get(name, tensor)
        # integers, complex numbers and 8-bit floats
        has_scale = not stored.is_floating_point() or stored.element_size() == 1
        if tensor.is_floating_point() and has_scale:
            raise ModelError(
                f"{path} must hold float weights, got {name} in {stored.dtype}; save the weights of"
                " the float model"
            )


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Return whether `value` maps names to tensors; `_extra_state` entries may be anything."""
    has_tensor = False
    for name, item in value.items():
        if not isinstance(name, str):
            return False
        if isinstance(item, torch.Tensor):
            has_tensor = True
        elif not name.endswith("_extra_state"):
            return False
    return has_tensor


_PICKLED_CLASS = re.compile(r"(?:GLOBAL|class|type) ([A-Za-z_][\w]*\.[\w.]*\w)")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict, or a checkpoint that holds one, into `model`, strictly.

    Raises:
        ModelError: the file has more than plain tensors, or names or shapes differ.
        SdkMissingError: safetensors is needed and not installed.
    """
    content = read_safetensors(path) if path.suffix == ".safetensors" else read_tensors(path)
    state = find_state_dict(content, path, model)
    _refuse_casts(state, model, path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise ModelError(f"{path} must hold this model's weights: {text[:400]}") from error


def read_tensors(path: Path) -> Any:
    """Load a file of `torch.save` that has only tensors and plain containers.

    Raises:
        ModelError: the file is missing, broken, or would run code when unpickled.
    """
    try:
        what = "a file of tensors"
        # rewritable: a training reads its checkpoint and writes it again
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
            f" got {_describe_failure(error)}; save model.state_dict()"
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
    # opened here too, which refuses what is no regular file or too large
    with open_regular_file(path, what=what, error=ModelError, max_bytes=MAX_BYTES):
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
            return tensors
        except Exception as error:  # SafetensorError, or torch's for an unknown dtype
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} must be {what}, got: {text}; save it again") from error


def _describe_failure(error: Exception) -> str:
    """Summarize torch's message, which mostly explains the options of torch.load."""
    text = str(error)
    if "TorchScript" in text:
        return "TorchScript, which torch.jit.load reads"
    if match := _PICKLED_CLASS.search(text):
        return f"an object of {match[1]}, which only unpickling could make"
    if isinstance(error, pickle.UnpicklingError | KeyError):
        return "what torch.save did not write"
    message = (text.strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message[:200]}"
