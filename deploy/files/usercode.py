"""Load a user's code, given as `file.py:function`; its errors become one sentence.

The file is imported under a unique name. Its folder is on `sys.path` while user code runs, so that
it can import modules next to it, also later than at its top.

Whatever runs code that is named by a text asks `refuse_foreign_code` first, just before running it:
Python files, plugin libraries, a scheduler, flags of another program. In a command whose `--config`
another user can write, only code that the command line names passes.
"""

import hashlib
import importlib.util
import os
import signal
import stat
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from deploy.errors import Calib8Error, ConfigError, Terminated
from deploy.files.reading import ErrorClass, refuse_irregular

# Libraries whose models are given as `package:name`: import name -> name for pip.
MODEL_LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "ultralytics": "ultralytics"}

_SCRIPT_FOLDERS: list[str] = []  # of the imported files, the last one first
# of the command that runs, for all its threads: (file of `--config` that another user can write,
# code that the user typed)
_FOREIGN_CONFIGS: list[tuple[Path, set[str]]] = []


@contextmanager
def distrust_config(file: Path, typed_texts: Iterable[str]) -> Iterator[None]:
    """In the body, refuse to run code that a config file names if another user can write that file.

    Code that the command line names too is run, since the user typed it. The refusals themselves
    are raised by `refuse_foreign_code`.

    Args:
        file: the file of `--config`.
        typed_texts: values of the command line, some of which name code.
    """
    if not _is_foreign(file):
        yield
        return
    typed_code: set[str] = set()
    for text in typed_texts:
        file_name, _, _ = text.rpartition(":")  # `file.py:function` allows file.py; else it is ""
        typed_code |= {_normalized(text), _normalized(file_name)}
    config = (file, typed_code)
    _FOREIGN_CONFIGS.append(config)
    try:
        yield
    finally:
        _FOREIGN_CONFIGS.remove(config)


def refuse_foreign_code(code: object) -> None:
    """Refuse code that the command line does not name, if the command has a foreign `--config`.

    Args:
        code: a file, library, address or flag, as the user gives it.

    Raises:
        ConfigError: another user can write the file of `--config`, and may have named the code.
    """
    for file, typed_code in _FOREIGN_CONFIGS:  # empty if only the user can write the file
        if _normalized(code) not in typed_code:
            raise ConfigError(
                f"code runs only with --trust-config where another user can write {file},"
                f" got {str(code)!r}; read that code first"
            )


def _normalized(code: object) -> str:
    """Return a name without './' and doubled slashes; '..' stays, since a link may precede it."""
    return str(Path(str(code)))


def _is_foreign(file: Path) -> bool:
    """Return whether another user owns a file or its folder, or anyone may write or replace it."""
    for path in (file.absolute(), file.resolve()):  # a link, and where it leads
        owners = {os.stat(path).st_uid, os.stat(path.parent).st_uid}
        if owners != {os.geteuid()} or _is_writable_by_all(path):
            return True
        for folder in path.parents:
            # in a sticky folder, such as /tmp, nobody replaces files of others
            is_sticky = bool(os.stat(folder).st_mode & stat.S_ISVTX)
            if _is_writable_by_all(folder) and not is_sticky:
                return True
    return False


def _is_writable_by_all(path: Path) -> bool:
    return bool(os.stat(path).st_mode & stat.S_IWOTH)


def is_library_model(spec: object) -> bool:
    """Return whether a spec is `package:name` of one of `MODEL_LIBRARIES`."""
    package, colon, name = str(spec).partition(":")
    return package in MODEL_LIBRARIES and bool(colon and name)


def load_function(spec: str, *, what: str, form: str, error: ErrorClass) -> Any:
    """Return the function of `path/to/file.py:name`.

    Args:
        spec: the user's text.
        what: its purpose, such as "a metric".
        form: its form, such as "file.py:function".
        error: class of the error raised for an error in the file.

    Raises:
        ConfigError: the spec has another form, there is no such file or function, or
            `refuse_foreign_code` refuses the file.
        error: importing the file failed; the message names the user's file and line.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{what} is given as {form}, got {spec!r}")
    refuse_irregular(path, what=f"the file of {what}, given as {form}", error=ConfigError)
    module = _import_file(Path(path), error)
    function = getattr(module, name, None)
    if not callable(function):
        other_names = sorted(
            other_name
            for other_name, value in vars(module).items()
            if callable(value) and other_name[0] != "_"
        )
        raise ConfigError(
            f"{path} has no function {name!r}; it has {', '.join(other_names) or 'none'}"
        )
    return function


def find_user_line(error: BaseException, *, library_folders: tuple[str, ...] = ()) -> str:
    """Return `file:line: code` of the deepest frame in the user's code, or ''.

    Args:
        error: the exception.
        library_folders: more folders whose frames are not the user's; those of calib8, of Python
            and of installed packages never are.
    """
    calib8_folder = Path(__file__).parents[1]
    internal_folders = (calib8_folder, sysconfig.get_path("stdlib"), *library_folders)
    folders = [f"{folder}{os.sep}" for folder in internal_folders]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_internal = frame.filename.startswith(("<", *folders))  # such as <string>
        parts = Path(frame.filename).parts
        # `importlib` runs the user's file; packages are installed in `site-packages`
        is_library = "importlib" in parts or "site-packages" in parts
        if not (is_internal or is_library):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


@contextmanager
def wrap_user_errors(
    what: str, *, error: ErrorClass, find_line: Callable[[BaseException], str] = find_user_line
) -> Iterator[None]:
    """Raise any exception of the user's code as one `error` with its file and line.

    Afterwards the working folder, numpy's handling of errors, and the handlers of Ctrl-C and
    SIGTERM are restored. If the code changed the working folder, its next call starts in that
    folder (`_WorkingFolder`). An error of calib8, or an interrupt, is raised as it is.

    Args:
        what: the code, as in "the metric must run without error".
        error: class of the error to raise.
        find_line: returns file and line of an exception in the user's code.
    """
    import numpy as np  # not at the top, for a quick --help

    try:
        with (
            _WORKING_FOLDER.changed_for_user_code(),
            _importable_folders(),
            _restored_handlers(),
            np.errstate(),  # changes nothing, and restores at the end
        ):
            yield
    except (Calib8Error, KeyboardInterrupt, Terminated):
        raise
    except BaseException as raised:  # also SystemExit and GeneratorExit
        line = find_line(raised)
        try:
            message = str(raised).strip().partition("\n")[0][:300]
        except Exception:  # from its own __str__
            message = "an error without text"
        text = f"{what} must run without error, got {type(raised).__name__}"
        if message:
            text += f": {message}"
        if line:
            text += f" at {line}"
        raise error(text) from raised


class _WorkingFolder:
    """The working folder of the process, which the user's code may change in any thread.

    Calls of that code may overlap in several threads. They share the folder: the first one changes
    to the folder that the code left last, and each that ends changes back to the original one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active_calls = 0
        # before the first of the calls in progress; None if there is none, or it was removed
        self._original_folder: str | None = None
        # original folder -> the folder that the user's code changed to from there
        self._user_folder_by_original: dict[str | None, str | None] = {}

    @contextmanager
    def changed_for_user_code(self) -> Iterator[None]:
        """In the body, be in the folder that the user's code changed to last; then change back.

        The body is a call of that code. While it runs, other threads may begin and end such calls.
        """
        with self._lock:
            if not self._active_calls:  # else the folder may be one that a running call changed to
                self._original_folder = _working_folder()
            self._active_calls += 1
            # None, so no change, unless an earlier call left the original folder
            _change_folder(self._user_folder_by_original.get(self._original_folder))
        try:
            yield
        finally:
            with self._lock:
                self._active_calls -= 1
                user_folder = _working_folder()
                original_folder = self._original_folder
                # the next call begins in `user_folder`, as if nothing had been changed back. Calls
                # that still run in other threads find themselves in the original folder. If that
                # was removed before the call, there is nowhere to change back to
                if original_folder is not None and user_folder != original_folder:
                    self._user_folder_by_original[original_folder] = user_folder
                    _change_folder(original_folder)


_WORKING_FOLDER = _WorkingFolder()


@contextmanager
def _importable_folders() -> Iterator[None]:
    """Put the folders of all imported files at the start of `sys.path`; calls may overlap."""
    folders = tuple(_SCRIPT_FOLDERS)
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with suppress(ValueError):  # the code itself removed it
                sys.path.remove(folder)


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """Restore the handlers of Ctrl-C and SIGTERM at the end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number, handler in handlers.items():
                # None: C code set the handler, and Python cannot set it again. An unchanged one is
                # not set again: the system could then not act on a second SIGINT (deploy.signals)
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _change_folder(folder: str | None) -> None:
    if folder is not None:
        with suppress(OSError):  # it was removed
            os.chdir(folder)


def _working_folder() -> str | None:
    """Return the working folder; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _import_file(path: Path, error: ErrorClass) -> ModuleType:
    """Import a user's Python file under a name that no other file has.

    Raises:
        ConfigError: `refuse_foreign_code` refuses the file.
        error: the file failed.
    """
    refuse_foreign_code(path)
    real_path = path.resolve()
    name = f"calib8_user_{hashlib.sha256(str(real_path).encode()).hexdigest()[:12]}"
    loader = SourceFileLoader(name, str(real_path))  # the target of a link may lack the suffix .py
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # the loader is one of files
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # from now on, the user's code can import modules of this folder, before those of earlier files'
    folder = str(real_path.parent)
    _SCRIPT_FOLDERS[:] = dict.fromkeys((folder, *_SCRIPT_FOLDERS))  # each folder once
    try:
        with wrap_user_errors(str(path), error=error):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
