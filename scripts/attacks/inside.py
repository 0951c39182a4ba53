"""calib8's own `main` inside this process, with what it writes to the screen taken from the files.

A reader is called beneath `main`, so that its error ends as a user would see it. The two streams
are taken as bytes at their file descriptors, since a decoder in C writes there as well.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from unittest.mock import patch

import click

from deploy import cli
from scripts.attacks.outcome import Ended

HANG = -signal.SIGALRM


def as_terminal() -> None:
    """Let nothing take escapes out of what is printed, as click does where it sees no terminal."""
    click.utils.should_strip_ansi = lambda *_: False  # type: ignore[attr-defined]


class _Hang(BaseException):
    """The alarm clock rang; no `except Exception` of what hangs swallows it."""


class Screen:
    """The two streams of this process, from now on kept in files."""

    def __init__(self) -> None:
        as_terminal()
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        for place, file in enumerate(self._files, 1):
            os.dup2(file.fileno(), place)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115

    def taken(self) -> tuple[bytes, bytes]:
        """What was written since the last time."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        out, err = (self._take(file.fileno()) for file in self._files)
        return out, err

    def _take(self, handle: int) -> bytes:
        size = os.fstat(handle).st_size
        if not size:
            return b""
        data = os.pread(handle, size, 0)
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        return data


def command(screen: Screen, words: list[str], *, limit_s: float) -> Ended:
    """`calib8 WORDS` in this process."""
    return _ended(screen, lambda: cli.main(words), limit_s)


def reading(screen: Screen, read: Callable[[], object], *, limit_s: float) -> Ended:
    """`read()` where a command would run, below calib8's `main`; it may give an exit code."""

    def run(**_: object) -> object:
        return read()

    with patch.object(cli.cli, "main", run):
        return _ended(screen, lambda: cli.main([]), limit_s)


def _ended(screen: Screen, run: Callable[[], None], limit_s: float) -> Ended:
    def ring(number: int, frame: object) -> None:
        raise _Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    code = 0
    try:
        run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except _Hang:
        code = HANG
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Ended(code, *screen.taken())
