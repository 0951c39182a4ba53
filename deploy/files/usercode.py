"""Load a user's code, given as `file.py:function`; its errors become one sentence.

The file is imported under a unique name, with its folder on `sys.path` during the import, so that
it can import modules next to it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from deploy.errors import Calib8Error, ConfigError
from deploy.files.reading import refuse_irregular

# Libraries whose models are given as `package:name`: import name -> name for pip.
MODEL_LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "ultralytics": "ultralytics"}


def is_library_model(spec: object) -> bool:
    """Return whether a spec is `package:name` of one of `MODEL_LIBRARIES`."""
    package, colon, name = str(spec).partition(":")
    return package in MODEL_LIBRARIES and bool(colon and name)


def load_function(spec: str, *, what: str, form: str, error: type[Calib8Error]) -> Any:
    """Return the function of `path/to/file.py:name`.

    Args:
        spec: the user's text.
        what: its purpose, such as "a metric".
        form: its form, such as "file.py:function".
        error: class of the error raised for an error in the file.

    Raises:
        ConfigError: the spec has another form, or there is no such file or function.
        error: importing the file failed; the message names the user's file and line.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{what} is given as {form}, got {spec!r}")
    refuse_irregular(path, what=f"the file of {what}, given as {form}", error=ConfigError)
    module = _import_file(Path(path), error)
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise ConfigError(f"{path} has no function {name!r}; it has {', '.join(defined) or 'none'}")
    return function


@contextmanager
def wrap_user_errors(
    what: str, *, error: type[Calib8Error], where: Callable[[BaseException], str] | None = None
) -> Iterator[None]:
    """Raise any exception of the user's code as one `error` with its file and line."""
    try:
        yield
    except Calib8Error:
        raise
    except (Exception, SystemExit) as raised:
        line = (where or find_user_line)(raised)
        message = (str(raised).strip().splitlines() or [""])[0][:300]
        raise error(
            f"{what} must run without error, got {type(raised).__name__}: {message}"
            + (f" at {line}" if line else "")
        ) from raised


def find_user_line(error: BaseException, *, besides: tuple[str, ...] = ()) -> str:
    """Return `file:line: code` of the deepest frame in the user's code, or ''.

    Args:
        error: the exception.
        besides: folders whose frames are not the user's, like this package and libraries.
    """
    own = (Path(__file__).parents[1], sysconfig.get_path("stdlib"))
    folders = [f"{folder}{os.sep}" for folder in (*own, *besides)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = frame.filename.startswith(("<", *folders))
        if not ours and not {"importlib", "site-packages"} & set(Path(frame.filename).parts):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _import_file(path: Path, error: type[Calib8Error]) -> ModuleType:
    resolved = path.resolve()
    name = f"calib8_user_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        with wrap_user_errors(str(path), error=error):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(resolved.parent))
    return module
