"""Outputs where none should go: over inputs, devices and folders, on full disks, nowhere."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.attacks import whole
from scripts.attacks.children import run
from scripts.attacks.outcome import FAILED, REFUSED, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import Subject, digest, made


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A command whose output goes where it should not.

    Attributes:
        name: in a failure.
        words: of the subject and a folder of its own.
        before: in the child, as a limit of its own.
        refused: whether it must be.
        starved: whether too few files can be open to clean up.
    """

    name: str
    words: Callable[[Subject, Path], list[str]]
    before: Callable[[], object] | None = None
    refused: bool = True
    starved: bool = False


def _to(path: Callable[[Subject, Path], str | Path], *, name: str, refused: bool = True) -> Odd:
    """A calibration to a path."""

    def words(subject: Subject, out: Path) -> list[str]:
        return [*subject.calibrate(0, out), "-o", str(path(subject, out))]

    return Odd(name=f"calibrate -o {name}", words=words, refused=refused)


def _into(path: Callable[[Subject, Path], str | Path], *, name: str, refused: bool = True) -> Odd:
    """A build into a folder."""

    def words(subject: Subject, out: Path) -> list[str]:
        return [*subject.build(0, out), "--out", str(path(subject, out))]

    return Odd(name=f"build --out {name}", words=words, refused=refused)


def _file(out: Path) -> Path:
    (out / "file").write_text("mine")
    return out / "file"


def _linked(subject: Subject, out: Path) -> Path:
    os.link(subject.model, out / "linked")
    return out / "linked"


def _fifo(out: Path) -> Path:
    os.mkfifo(out / "fifo")
    return out / "fifo"


def _link(out: Path, device: str) -> Path:
    """Never the device itself: where this attack wins as root, it would be gone."""
    (out / "link").symlink_to(device)
    return out / "link"


def _limit(kind: int, value: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself has it
        resource.setrlimit(kind, (value, value))

    return limit


def _full(size: int) -> Odd:
    """A disk that takes files of so many bytes."""
    return Odd(
        name=f"files of {size} bytes at most",
        words=lambda subject, out: subject.build(0, out / "out"),
        before=_limit(resource.RLIMIT_FSIZE, size),
    )


def _few(most: int) -> Odd:
    """Only so many files can be open."""
    return Odd(
        name=f"{most} open files",
        words=lambda subject, out: subject.build(0, out / "out"),
        before=_limit(resource.RLIMIT_NOFILE, most),
        refused=False,
        starved=True,
    )


def _screen(*words: str) -> Odd:
    """A screen that is full."""

    def before() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    return Odd(
        name="/dev/full as stdout",
        words=lambda subject, out: [w.replace("MODEL", str(subject.model)) for w in words],
        before=before,
    )


ALL = (
    _to(lambda s, out: s.model, name="its model"),
    _to(_linked, name="a link to its model"),
    _to(lambda s, out: next(s.pictures(0).iterdir()), name="a picture"),
    _to(lambda s, out: s.pictures(0), name="the folder of pictures"),
    _to(lambda s, out: _file(out), name="a text"),
    _to(lambda s, out: _fifo(out), name="a pipe"),
    *(_to(lambda s, out, d=d: _link(out, d), name=f"a link to {d}")
      for d in ("/dev/null", "/dev/full", "/dev/stdout", "/proc/self/fd/1")),
    _to(lambda s, out: "/", name="/"),
    _to(lambda s, out: ".", name="."),
    _to(lambda s, out: _file(out) / "x", name="below a file"),
    _to(lambda s, out: "", name="nothing"),
    _to(lambda s, out: out / ("n" * 300), name="a name of 300 letters"),
    _to(lambda s, out: out / ("n" * 240), name="a name of 240 letters", refused=False),
    _to(lambda s, out: out / "/".join(["n" * 200] * 30), name="a path of 6,000 letters"),
    _to(lambda s, out: out / "\x1b[2J\u202e\n.cache", name="a name with escapes", refused=False),
    _to(lambda s, out: out / "\udcff.cache", name="a name that is no UTF-8", refused=False),
    _to(lambda s, out: out / "a/b/c.cache", name="folders that are to be made", refused=False),
    _to(lambda s, out: "/proc/x.cache", name="/proc"),
    _into(lambda s, out: s.model, name="the model"),
    _into(lambda s, out: _link(out, "/dev/null"), name="a link to /dev/null"),
    _into(lambda s, out: _file(out), name="a file"),
    _into(lambda s, out: out / "\x1b]0;x\x07", name="a name with escapes", refused=False),
    _into(lambda s, out: "/proc/1/x", name="/proc/1"),
    *(_full(size) for size in (0, 100, 2000, 9000, 30_000)),
    *(_few(most) for most in (6, 8, 12, 16)),
    _screen("inspect", "MODEL"),
    _screen("--help"),
)  # fmt: skip


def _start(folder: Path, count: int) -> Case:
    subject = made(folder / "subject")
    before = digest(subject.folder)

    def case(rng: random.Random, number: int) -> Outcome:
        odd, out = ALL[number % len(ALL)], folder / f"odd-{number}"
        out.mkdir()
        wrong = _wrong(odd, subject, out)
        if digest(subject.folder) != before:
            wrong = "an input was changed"
            shutil.rmtree(subject.folder)
            made(subject.folder)
        if not wrong and (out / "out").is_dir():
            wrong = whole.verified(out / "out")
        return Outcome(FAILED, f"{odd.name}: {wrong}", out) if wrong else Outcome(REFUSED)

    return case


def _wrong(odd: Odd, subject: Subject, out: Path) -> str | None:
    words = odd.words(subject, out)
    mine = out / "file"
    ended = run(words, before=odd.before)
    outcome = judged(ended)
    if outcome.why:
        return outcome.why
    if odd.refused and ended.code == 0:
        return "was not refused"
    if odd.starved:  # to remove a folder takes an open file; the next run does it
        return None
    left = [name for folder in (out, *out.rglob("*")) for name in whole.leftovers(folder)]
    if left:
        return f"temporary files stay: {left}"
    if mine.is_file() and mine.read_text() != "mine":
        return "a file that is not calib8's was written over"
    return None


PARTS = (Part(name="outputs", short=len(ALL), long=len(ALL), start=_start, chunk=10**6),)
