"""`file.py:factory` -> `nn.Module`: the user's own code is run, and nothing is unpickled.

Weights come from a file only where one is named, through `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from deploy.errors import Calib8Error, ConfigError, ModelError


def load_factory(spec: str) -> Callable[[], Any]:
    """`path/to/net.py:make` -> the function `make` of that file.

    The file is imported under a name of its own, with its folder on `sys.path` meanwhile, so it
    can import its neighbours.

    Raises:
        ConfigError: the spec is not `file.py:name`, or there is no such file or name.
        ModelError: importing the file failed; the message gives the user's file and line.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"a model in PyTorch is given as file.py:factory, got {spec!r}")
    module = _import_file(Path(path))
    factory = getattr(module, name, None)
    if not callable(factory):
        defined = sorted(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise ConfigError(f"{path} has no function {name!r}; it has {', '.join(defined) or 'none'}")
    return factory  # type: ignore[no-any-return]


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

    Raises:
        ConfigError, ModelError: as `load_factory`; or not a module, or weights that do not fit.
    """
    model = call_factory(spec)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} must return a torch.nn.Module, got {type(model).__name__}")
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict (or a checkpoint that holds one as `state_dict`) into `model`, strictly.

    Raises:
        ModelError: not a file of plain tensors, or names or shapes that are not the model's.
    """
    state = read_tensors(path)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ModelError(f"{path} must hold a state dict, got {type(state).__name__}")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{path} must hold this model's weights: {said[:400]}") from error


def read_tensors(path: Path) -> Any:
    """What `torch.save` wrote, if it is tensors and plain containers only.

    Raises:
        ModelError: the file is missing, broken, or would run code when unpickled.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ModelError(f"{path} must be a readable file, got: {error.strerror}") from error
    except Exception as error:  # torch raises half a dozen kinds for a broken or unsafe file
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{path} must be a file of tensors that torch.load(weights_only=True) accepts,"
            f" got: {first[0][:200]}; save model.state_dict()"
        ) from error


def example_inputs(shapes: Sequence[Sequence[int]], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """One float32 tensor of standard normal values for each shape, the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def users_line(error: BaseException) -> str:
    """`file:line: the code there` of the deepest frame outside torch and this package, or ''."""
    torch_home = str(Path(torch.__file__).parent)
    here = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = frame.filename.startswith((torch_home, here, "<"))
        if not ours and "importlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"a model in PyTorch is given as file.py:factory, but no file {path}")
    resolved = path.resolve()
    name = f"calib8_user_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        with users_errors(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(resolved.parent))
    return module


@contextmanager
def users_errors(what: str) -> Iterator[None]:
    """Turn any exception of the user's code into one `ModelError` with its file and line."""
    try:
        yield
    except Calib8Error:
        raise
    except (Exception, SystemExit) as error:
        where = users_line(error)
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"{what} must run without error, got {type(error).__name__}: {said}"
            + (f" at {where}" if where else "")
        ) from error
