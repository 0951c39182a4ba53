"""A user's own code, given as `file.py:function`; an error in it becomes one sentence.

The file is imported under a name of its own, with its folder on `sys.path` meanwhile, so it can
import its neighbours.
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

# Packages whose models are given as `package:name`, by their import names -> what installs them.
MODEL_LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "ultralytics": "ultralytics"}


def is_named(spec: object) -> bool:
    """Whether a spec reads as `package:name` of `MODEL_LIBRARIES`."""
    package, colon, name = str(spec).partition(":")
    return package in MODEL_LIBRARIES and bool(colon and name)


def load_function(spec: str, *, what: str, form: str, error: type[Calib8Error]) -> Any:
    """`path/to/file.py:name` -> the function `name` of that file.

    Args:
        spec: what the user gave.
        what: what it is for, such as "a metric".
        form: how it is given, such as "file.py:function".
        error: what an error in the file becomes.

    Raises:
        ConfigError: the spec is not of that form, or there is no such file or name.
        error: importing the file failed; the message gives the user's file and line.
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
def users_errors(
    what: str, *, error: type[Calib8Error], where: Callable[[BaseException], str] | None = None
) -> Iterator[None]:
    """Turn any exception of the user's code into one `error` with its file and line."""
    try:
        yield
    except Calib8Error:
        raise
    except (Exception, SystemExit) as raised:
        line = (where or users_line)(raised)
        said = (str(raised).strip().splitlines() or [""])[0][:300]
        raise error(
            f"{what} must run without error, got {type(raised).__name__}: {said}"
            + (f" at {line}" if line else "")
        ) from raised


def users_line(error: BaseException, *, besides: tuple[str, ...] = ()) -> str:
    """`file:line: the code there` of the deepest frame that is the user's, or ''.

    Args:
        error: what was raised.
        besides: folders whose frames are not the user's, beside this package and libraries.
    """
    own = (Path(__file__).parent, sysconfig.get_path("stdlib"))
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
        with users_errors(str(path), error=error):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(resolved.parent))
    return module
