"""`file.py:factory` -> `nn.Module`: the user's own code is run, and nothing is unpickled.

Weights come from a file only where one is named, through `torch.load(weights_only=True)` or the
package safetensors.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from deploy.archives import check_archive
from deploy.errors import Calib8Error, ModelError, SdkMissingError
from deploy.files import usercode
from deploy.files.reading import MOST_BYTES, opened
from deploy.files.usercode import is_named
from deploy.fx.copied import unwrapped
from deploy.fx.states import fitted, found_state
from deploy.fx.zoo import make_named

_EXPORTED = "give the module that the program was exported from"
_HELD = re.compile(r"(?:GLOBAL|class|type) ([A-Za-z_][\w]*\.[\w.]*\w)")


def load_factory(spec: str) -> Callable[[], Any]:
    """`path/to/net.py:make` -> the function `make` of that file.

    Raises:
        ConfigError: the spec is not `file.py:name`, or there is no such file or name.
        ModelError: importing the file failed; the message gives the user's file and line.
    """
    return usercode.load_function(  # type: ignore[no-any-return]
        spec, what="a model in PyTorch", form="file.py:factory", error=ModelError
    )


def call_factory(spec: str) -> Any:
    """What the factory of `spec` gives, called with no argument.

    Raises:
        ConfigError, ModelError: as `load_factory`, or the factory itself failed.
    """
    factory = load_factory(spec)
    with users_errors(spec):
        return factory()


def load_module(spec: str, weights: Path | None = None) -> nn.Module:
    """The model that `spec` makes, in eval mode, with `weights` loaded where given.

    Args:
        spec: `file.py:factory`, or a name such as timm:resnet18 (`deploy.fx.zoo`).
        weights: file of a state dict.

    Raises:
        ConfigError, ModelError: as `load_factory`; or not a module, TorchScript, or weights that do
            not fit.
        SdkMissingError: the package of a named model, or safetensors, is not installed.
    """
    model = make_named(spec) if is_named(spec) else call_factory(spec)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        way = f"; {_EXPORTED}" if kind == "ExportedProgram" else ""
        raise ModelError(f"{spec} must return a torch.nn.Module, got {kind}{way}")
    model = unwrapped(model)
    if weights is not None:
        load_weights(model, weights)
    try:
        return model.eval()
    except NotImplementedError as error:
        raise ModelError(f"{spec} must return a module with an eval mode; {_EXPORTED}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict, or a checkpoint that holds one, into `model`, strictly.

    Raises:
        ModelError: not a file of plain tensors, or names or shapes that are not the model's.
        SdkMissingError: a file of safetensors, without the package.
    """
    read = read_safetensors if path.suffix == ".safetensors" else read_tensors
    state = fitted(found_state(read(path), path), model)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{path} must hold this model's weights: {said[:400]}") from error


def read_tensors(path: Path, *, own: bool = False) -> Any:
    """What `torch.save` wrote, if it is tensors and plain containers only.

    Args:
        path: of the file.
        own: it is a checkpoint that the run writes again.

    Raises:
        ModelError: the file is missing, broken, or would run code when unpickled.
    """
    try:
        with opened(
            path, what="a file of tensors", error=ModelError, most=MOST_BYTES, own=own
        ) as file:
            _refuse_bomb(file, path)
            with warnings.catch_warnings(action="ignore"):  # of TorchScript, which is told below
                return torch.load(file, map_location="cpu", weights_only=True)
    except Calib8Error:
        raise
    except Exception as error:  # torch raises half a dozen kinds for a broken or unsafe file
        raise ModelError(
            f"{path} must be a file of tensors that torch.load(weights_only=True) accepts,"
            f" got {_told(error)}; save model.state_dict()"
        ) from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, of a file that holds nothing else.

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
    with opened(path, what=what, error=ModelError, most=MOST_BYTES):
        try:
            found: dict[str, torch.Tensor] = load_file(path)
            return found
        except Exception as error:  # its own error, and whatever torch says of a type
            said = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} must be {what}, got: {said}; save it again") from error


def _told(error: Exception) -> str:
    """What torch's message comes down to; it is about its own options."""
    said = str(error)
    if "TorchScript" in said:
        return "TorchScript, which torch.jit.load reads"
    if held := _HELD.search(said):
        return f"an object of {held[1]}, which only unpickling could make"
    first = (said.strip().splitlines() or [""])[0]
    if isinstance(error, pickle.UnpicklingError | KeyError):
        return "what torch.save did not write"
    return f"{type(error).__name__}: {first[:200]}"


def _refuse_bomb(file: IO[bytes], path: Path) -> None:
    """Refuse an archive that unpacks to more than a file of tensors has; older ones are none."""
    if file.read(2) == b"PK":
        check_archive(file, path, what="a file of tensors", error=ModelError, most=MOST_BYTES)
    file.seek(0)


def users_line(error: BaseException) -> str:
    """`file:line: the code there` of the deepest frame outside torch and this package, or ''."""
    return usercode.users_line(error, besides=(str(Path(torch.__file__).parent),))


def users_errors(what: str) -> AbstractContextManager[None]:
    """Turn any exception of the user's code into one `ModelError` with its file and line."""
    return usercode.users_errors(what, error=ModelError, where=users_line)
