"""Decide which files a run may write: never an input, a folder, a device, or an output twice.

A run (a command, or a call of `calibrate` or `build`) remembers the files that it reads, its
inputs, and `deploy.files.atomic` refuses to overwrite them::

    with guard_inputs():
        add_input_file(model)  # remembered by device and inode, so another name does not hide it,
                               # while it exists: a new file may get the inode of a deleted one
        add_output(page, ok)   # the user named it; `ok` raises if the file there is not calib8's
        refuse_output(output)  # ExportError: it is an input, a folder, a device, or that page
        refuse_unwritable(output)  # ExportError: its folder takes no file

Outside of a run nothing is remembered: one run may write what another one reads.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from deploy.errors import ExportError

_Inode = tuple[int, int]  # (device, number)
PathOf = Callable[[int], Path]


@dataclass(frozen=True, slots=True)
class _RunFiles:
    """The inputs of a run, and the outputs that the user named.

    Attributes:
        input_path_by_inode: inode of a file -> its path.
        input_lists: for the files of a data set, possibly very many: (number of the inode of each,
            function that returns the path of the file at an index).
        check_by_output: real location of an output -> its check, see `add_output`.
    """

    input_path_by_inode: dict[_Inode, str] = field(default_factory=dict)
    input_lists: list[tuple[Sequence[int], PathOf]] = field(default_factory=list)
    check_by_output: dict[str, Callable[[], None]] = field(default_factory=dict)

    def is_input(self, inode: _Inode) -> bool:
        """Return whether an input still has this inode; a new file may reuse a deleted one's."""
        path = self.input_path_by_inode.get(inode)
        if path is not None and _find_inode(path) == inode:
            return True
        _, inode_number = inode
        for numbers, path_of in self.input_lists:
            for index, number in enumerate(numbers):  # an equal one may be on another device
                if number == inode_number and _find_inode(path_of(index)) == inode:
                    return True
        return False


_RUN: ContextVar[_RunFiles | None] = ContextVar("_RUN", default=None)


@contextmanager
def guard_inputs() -> Iterator[None]:
    """Remember inputs until the end of the body; a run inside another one shares its files."""
    if _RUN.get() is not None:
        yield
        return
    token = _RUN.set(_RunFiles())
    try:
        yield
    finally:
        _RUN.reset(token)


def add_input_file(path: Path | str) -> None:
    """Remember a file as an input of this run; ignore a path that does not exist."""
    run = _RUN.get()
    if run is None:
        return
    inode = _find_inode(path)
    if inode is not None:
        run.input_path_by_inode[inode] = os.fspath(path)


def add_input_files(count: int, path_of: PathOf) -> None:
    """Remember many files as inputs of this run.

    Args:
        count: number of files.
        path_of: index of a file, from 0 -> its path; called again for a file whose number equals
            that of a file to be written.
    """
    run = _RUN.get()
    if run is None:
        return
    inode_numbers = array("Q")  # 8 bytes a file, without the device
    for index in range(count):
        _, inode_number = _find_inode(path_of(index)) or (0, 0)  # 0: there is no such file
        inode_numbers.append(inode_number)
    run.input_lists.append((inode_numbers, path_of))


def add_output(path: Path | str, check: Callable[[], None]) -> None:
    """Remember a file that the user named as an output of this run.

    `check`: raises if the file that is there must stay; called now and before it is replaced.

    Raises:
        ExportError: see `refuse_output` and `refuse_unwritable`.
    """
    refuse_output(path)
    refuse_unwritable(path)
    run = _RUN.get()
    if run is not None:
        run.check_by_output[_real_location(path)] = check
    check()


def refuse_output(path: Path | str, *, is_named: bool = False) -> None:
    """Refuse to write over an input, a folder, a device, or another output that the user named.

    The user names an output by an option with its path; `add_output` remembers it with a check of
    the file that it would replace.

    Args:
        path: of the file to be written; it may not exist yet.
        is_named: whether this output may be one that the user named: then its check is called, if
            there is a file. Else a path that the user named is refused, as that of another output.

    Raises:
        ExportError: `path` is one of these, or its check raises.
    """
    run = _RUN.get() or _RunFiles()
    # None if `add_output` was not called for this path
    check_existing_file = run.check_by_output.get(_real_location(path))
    if check_existing_file is not None and not is_named:
        raise ExportError(f"each output must have a path of its own, got {path} twice; change one")

    inode = _find_inode(path)
    if inode is None:  # there is no file to write over
        return
    # /dev/stdout may be a link to a plain file, which must not be replaced either
    in_dev = os.path.realpath(os.path.dirname(os.path.abspath(path))) == "/dev"
    if not os.path.isfile(path) or in_dev:
        kind = "a folder" if os.path.isdir(path) else "a device"
        raise ExportError(f"{path} must be a file to write to, got {kind}; give another path")
    if run.is_input(inode):
        raise ExportError(
            f"an output must not be an input, got {path}, which this run reads; give another path"
        )
    if check_existing_file is not None:
        check_existing_file()


def refuse_unwritable(path: Path | str) -> None:
    """Refuse an output that cannot be written, before a run is spent on it.

    Raises:
        ExportError: the folder that it is in, or would be made in, takes no new file.
    """
    parents = Path(os.path.abspath(path)).parents
    folder = next(parent for parent in parents if os.path.lexists(parent))
    is_virtual = not os.statvfs(folder).f_blocks  # such as /proc, which takes no files
    # "/.": a file in place of the folder is refused too
    if is_virtual or not os.access(f"{folder}/.", os.W_OK | os.X_OK):
        raise ExportError(
            f"{path} must be in a folder that can be written to, got {folder}; give another path"
        )


def _real_location(path: Path | str) -> str:
    """Return a file's name in its real folder: what a rename replaces."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _find_inode(path: Path | str) -> _Inode | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino
