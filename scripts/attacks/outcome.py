"""How one attack ended, judged by what a user would see: an exit code and two streams.

::

    survived    exit code 0, and nothing on a screen but printable text
    refused     exit code 1, 2 or 3 with one printable sentence, or a finding on stdout
    failed      all else: a fault of calib8 itself, a traceback, a signal, a raw control character
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SURVIVED, REFUSED, FAILED = "survived", "refused", "failed"
# progress, as deploy/terminal.py writes it into a pipe, and warnings of a run that prints no report
_TOLD = re.compile(r"calib8: (.+ (\d+ s|\d+ min \d+ s|\d+ h \d+ min)( left)?|warning: .+)")
_TARGET = re.compile(r"calib8: (onnxruntime|tensorrt|ascend)( failed)?: .+")
_FAULT = b"a fault of calib8 itself"
_LONGEST = 8000  # letters of a sentence; names in it are cut by calib8 long before


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run left: its exit code (below 0: the signal that killed it) and its two streams."""

    code: int
    out: bytes = b""
    err: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The judgement.

    Attributes:
        word: SURVIVED, REFUSED or FAILED.
        why: of a failure, in one line.
        kept: the input, or what was left, for who wants to see it again.
    """

    word: str
    why: str = ""
    kept: bytes | Path | None = None


def judged(ended: Ended, *, refusals: Collection[int] = (1, 2, 3)) -> Outcome:
    """Judge a run by its code and by what stands on the screen."""
    if ended.code != 0 and ended.code not in refusals:
        return Outcome(FAILED, f"exit code {ended.code}: {_last(ended.err)}")
    for name, stream in (("stdout", ended.out), ("stderr", ended.err)):
        if (wrong := _unprintable(stream)) is not None:
            return Outcome(FAILED, f"{name} holds {wrong}: {_last(stream)}")
        if _FAULT in stream:  # also of a target whose others are built
            return Outcome(FAILED, f"{name} tells of a fault: {_last(stream)}")
    if ended.code == 0:
        return Outcome(SURVIVED)
    said = (line for line in ended.err.decode().splitlines() if line)  # click ends a ^C's line
    lines = [line for line in said if not _TOLD.fullmatch(line)]
    targets = [found[1] for line in lines if (found := _TARGET.fullmatch(line))]
    if len(lines) > max(1, len(set(targets))) or (lines and not lines[0].startswith("calib8: ")):
        return Outcome(FAILED, f"no one sentence but {len(lines)} lines: {_last(ended.err)}")
    if not lines and not ended.out:
        return Outcome(FAILED, f"exit code {ended.code} without a word")
    if lines and len(lines[0]) > _LONGEST:
        return Outcome(FAILED, f"a sentence of {len(lines[0])} letters: {_last(ended.err)}")
    return Outcome(REFUSED)


def _unprintable(stream: bytes) -> str | None:
    """The first thing that may not go to a terminal, or None."""
    try:
        text = stream.decode()
    except UnicodeDecodeError as error:
        return f"the byte {stream[error.start]:#x}, which is no UTF-8"
    return next((repr(c) for c in text if not (c.isprintable() or c == "\n")), None)


def _last(stream: bytes) -> str:
    """The last line, short and printable."""
    lines = [line for line in stream.decode("utf-8", "replace").split("\n") if line.strip()]
    return repr(lines[-1][:300]) if lines else "nothing was said"
