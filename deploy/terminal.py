r"""What a terminal is shown: every text of the command line goes out through here.

::

    say(line)        one line; what would steer the terminal, line breaks too, is written out
    say_lines(text)  several lines, as a report has them
    say_data(text)   what was asked for in place of the text, such as JSON
    draw(line)       one line of progress, in place of the one before, on a terminal's stderr

Names of tensors, words of records and paths come from files that anybody may have written: an
escape sequence in them would colour, move or retype what the terminal shows.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TEXT: ContextVar[bool] = ContextVar("_TEXT", default=True)  # whether stdout gets text
_PEN = threading.Lock()  # a line of progress is drawn by a thread of its own
_COLUMNS = 80  # where the terminal does not tell
_drawing: list[str] = []  # the line that is drawn now, if there is one


def visible(line: str) -> str:
    r"""One line in which nothing steers a terminal.

    Control characters, line breaks, marks that turn the direction of writing and bytes that are
    no text stand in it as \x1b, \n, \u202e and \xff.
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else _written(c) for c in line)


def page(lines: Iterable[str]) -> str:
    """Lines, each made visible, under each other; without a line end after the last."""
    return "\n".join(map(visible, lines))


@contextmanager
def without_text(asked: bool = True) -> Iterator[None]:
    """Keep what `say` and `say_lines` have for stdout to itself, where that is asked for."""
    token = _TEXT.set(_TEXT.get() and not asked)
    try:
        yield
    finally:
        _TEXT.reset(token)


def textless() -> bool:
    """Whether text does not show, so that what is grave must be said on stderr."""
    return not _TEXT.get()


def say(line: str = "", *, err: bool = False) -> None:
    """Print one line, on stderr where it is an error."""
    if err or _TEXT.get():
        _put(visible(line) + "\n", err=err)


def say_lines(text: str) -> None:
    """Print lines that `page` made of names made visible before, and end the last of them."""
    if _TEXT.get():
        say_data(text)


def say_data(text: str) -> None:
    """Print lines on stdout whether text is wanted there or not."""
    _put(page(text.removesuffix("\n").split("\n")) + "\n", err=False)


def drawn_on() -> bool:
    """Whether stderr is a terminal on which a line can be drawn over."""
    return bool(sys.stderr and sys.stderr.isatty()) and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """How long a line may be that is drawn: one short of the terminal's width, or it wraps."""
    try:
        wide = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        wide = 0
    return (wide or _COLUMNS) - 1


def holds(text: str) -> bool:
    """Whether the encoding of stderr has these letters."""
    return _held(text, err=True) == text


def draw(line: str) -> None:
    """Show a line of progress in place of the one before; an empty one takes that away."""
    with _PEN:
        if line or _drawing:
            _write(f"\r\x1b[K{visible(line)}", err=True)
        _drawing[:] = [line] if line else []


def _written(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is no text
        return f"\\x{code - 0xDC00:02x}"
    return ascii(character)[1:-1]


def _put(text: str, *, err: bool) -> None:
    """Write in place of what is drawn, which the next drawing brings back."""
    with _PEN:
        if _drawing:
            _drawing.clear()
            _write("\r\x1b[K", err=True)
        _write(text, err=err)


def _write(text: str, *, err: bool) -> None:
    import click  # here, so that what tells progress is imported without it

    click.echo(_held(text, err=err), nl=False, err=err)


def _held(text: str, *, err: bool) -> str:
    """What the stream's encoding can hold, and the rest as its escapes."""
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
