r"""What a terminal is shown: every text of the command line goes out through here.

::

    say(line)        one line; what would steer the terminal, line breaks too, is written out
    say_lines(text)  several lines, as a report has them

Names of tensors, words of records and paths come from files that anybody may have written: an
escape sequence in them would colour, move or retype what the terminal shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click


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


def say(line: str = "", *, err: bool = False) -> None:
    """Print one line, on stderr where it is an error."""
    _put(visible(line) + "\n", err=err)


def say_lines(text: str) -> None:
    """Print lines that `page` made of names made visible before, and end the last of them."""
    _put(page(text.removesuffix("\n").split("\n")) + "\n", err=False)


def _written(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is no text
        return f"\\x{code - 0xDC00:02x}"
    return ascii(character)[1:-1]


def _put(text: str, *, err: bool) -> None:
    """Write what the stream's encoding can hold, and the rest as its escapes."""
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    held = text.encode(encoding, "backslashreplace").decode(encoding)
    click.echo(held, nl=False, err=err)
