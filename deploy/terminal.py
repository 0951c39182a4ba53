"""What a terminal is shown: every text of the command line goes out through here.

::

    say(line)        one line; what would steer the terminal, line breaks too, is written out
    say_lines(text)  several lines, as a report has them
    say_data(text)   what was asked for in place of the text, such as JSON
    draw(line)       one line of progress, in place of the one before, on a terminal's stderr

Names of tensors, words of records and paths come from files that anybody may have written: an
escape sequence in them would colour, move or retype what the terminal shows.

What is going on, told on stderr for as long as it lasts.

::

    with telling():                                   one run; without it nothing is told
        with numbered("calibration", "accuracy"):     the parts of the run, in their order
            with phase("accuracy", 400, "samples") as step:
                step()                                2/2 accuracy: 120 of 400 samples, 31 s left

A terminal gets one line that is drawn over and taken away at the end; a file or a pipe gets plain
lines, one of each phase that lasts and one now and then. A thread tells, so that a single long call
is told of too, unless it holds Python itself, as ONNX's checker does (for seconds, of a model of
hundreds of MiB); it ends with the run, however that ends. Phases are begun and ended by the thread
that the run is in; steps are made by any.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

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


def terminal_columns() -> int:
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


FIRST_S = 1.0  # of a run: what is quicker is not told on a terminal
LASTING_S = 2.0  # of a phase: what is quicker gets no plain line
EVERY_S = 10.0  # between plain lines of one phase
TICK_S = 0.5  # between looks of the thread

Step = Callable[[], None]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class Phase:
    """A part of a run.

    Attributes:
        what: in a word or two.
        total: steps, or seconds where `timed`; None where nobody knows.
        unit: of the steps, in the plural.
        about: whether its total is a guess.
        timed: whether it lasts for its total by the clock.
        number: its place among the parts of the run, as "3/7 "; "" for none.
        began: by the run's clock, in seconds.
        done: steps.
        aside: seconds that inner phases took, which tell nothing of its steps.
        told: whether a plain line told of it.
    """

    what: str
    total: float | None = None
    unit: str = ""
    about: bool = False
    timed: bool = False
    number: str = ""
    began: float
    done: int = 0
    aside: float = 0.0
    told: bool = False

    def share(self, now: float) -> float | None:
        """How much of it is done, 0 to 1; None where nobody knows."""
        if not self.total:
            return None
        return min((now - self.began if self.timed else self.done) / self.total, 1.0)

    def words(self, now: float) -> str:
        """Steps and time left where they are known, else the time that it took so far."""
        taken, share = now - self.began, self.share(now)
        about, time, of = "about " if self.about else "", in_words(taken), ""
        if share and share < 1:
            stepping = taken - self.aside
            time = f"{about}{in_words(stepping / share - stepping)} left"
        if self.timed or not self.done or self.total is None:
            return time
        if not self.about or self.done < self.total:
            of = f" of {about}{self.total:.0f}"
        return f"{self.done}{of} {self.unit}".rstrip() + f", {time}"


@dataclass(slots=True, eq=False)
class Teller:
    """The phases of a run, the inner ones last, and what was told of them.

    Attributes:
        clock: gives seconds.
        drawn: whether stderr is a terminal, on which a line can be drawn over.
    """

    clock: Callable[[], float] = time.monotonic
    drawn: bool = False
    parts: Sequence[str] = ()
    phases: list[Phase] = field(default_factory=list)
    _began: float = 0.0
    _last: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._began = self._last = self.clock()
        self.phases = [Phase(what="working", began=self._began)]

    def begin(self) -> None:
        """Let a thread tell from now on."""
        self._thread = threading.Thread(target=self._tell, name="calib8 progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have nothing told from now on, and the line taken away."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self.drawn:
            draw("")

    def enter(self, phase: Phase) -> None:
        """A phase begins, in the one before it."""
        if phase.what in self.parts:
            phase.number = f"{self.parts.index(phase.what) + 1}/{len(self.parts)} "
        with self._lock:
            self.phases.append(phase)

    def leave(self, phase: Phase) -> None:
        """A phase ends."""
        with self._lock:
            self.phases.remove(phase)
            self.phases[-1].aside += self.clock() - phase.began

    def step(self, phase: Phase) -> None:
        """One step more is done."""
        with self._lock:
            phase.done += 1

    def look(self) -> None:
        """Tell what is to be told now."""
        with self._lock:
            phases, now = list(self.phases), self.clock()
        if self.drawn and now - self._began >= FIRST_S:
            draw(_bar(phases, now))
        elif not self.drawn and self._due(phases[-1], now):
            phases[-1].told, self._last = True, now
            say(f"calib8: {_where(phases)}: {phases[-1].words(now)}", err=True)

    def _due(self, phase: Phase, now: float) -> bool:
        """Whether there is a plain line to say."""
        silent = now - self._last
        lasts = now - phase.began >= LASTING_S and not phase.told
        return (lasts and silent >= LASTING_S) or silent >= EVERY_S

    def _tell(self) -> None:
        while not self._over.wait(TICK_S):
            try:
                self.look()
            except (OSError, ValueError):  # stderr is closed, or nobody reads it any more
                return


_TELLER: ContextVar[Teller | None] = ContextVar("_TELLER", default=None)


@contextmanager
def telling(asked: bool = True) -> Iterator[None]:
    """Tell of the phases in here, where that is asked for; a run in another is told by that one."""
    if not asked or _TELLER.get() is not None:
        yield
        return
    teller = Teller(drawn=drawn_on())
    token = _TELLER.set(teller)
    teller.begin()
    try:
        yield
    finally:
        _TELLER.reset(token)
        teller.end()


def on_request(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose argument `progress` says whether what it does is told."""

    @wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        with telling(bool(kwargs.get("progress"))):
            return function(*args, **kwargs)

    return asked


@contextmanager
def numbered(*parts: str) -> Iterator[None]:
    """Phases of these names are told with their place among them."""
    teller = _TELLER.get()
    if teller is None:
        yield
        return
    before, teller.parts = teller.parts, parts
    try:
        yield
    finally:
        teller.parts = before


@contextmanager
def phase(
    what: str, total: int | None = None, unit: str = "", *, about: bool = False
) -> Iterator[Step]:
    """Tell of what is done in here; gives the function that makes one step, from any thread.

    Args:
        what: it is, in a word or two.
        total: steps; None where nobody knows.
        unit: of the steps, in the plural.
        about: whether that is a guess.
    """
    teller = _TELLER.get()
    if teller is None:
        yield lambda: None
        return
    own = Phase(what=what, total=total, unit=unit, about=about, began=teller.clock())
    with _entered(teller, own):
        yield lambda: teller.step(own)


@contextmanager
def lasting(what: str, seconds: float) -> Iterator[None]:
    """Tell of what is done in here for so long; no step disturbs it."""
    teller = _TELLER.get()
    if teller is None:
        yield
        return
    with _entered(teller, Phase(what=what, total=seconds, timed=True, began=teller.clock())):
        yield


def tell(line: str) -> None:
    """Say at once what a run that is told must not keep to itself until its end."""
    if _TELLER.get() is not None:
        say(f"calib8: {line}", err=True)


@contextmanager
def _entered(teller: Teller, own: Phase) -> Iterator[None]:
    teller.enter(own)
    try:
        yield
    finally:
        teller.leave(own)


def _where(phases: Sequence[Phase]) -> str:
    """The phases' names; of the run itself only where there is no other."""
    return ": ".join(f"{one.number}{one.what}" for one in phases[1:] or phases)


def _bar(phases: Sequence[Phase], now: float) -> str:
    """One line as wide as the terminal at most: a bar where it is known how much is done."""
    from tqdm import tqdm

    where, words, columns = _where(phases), phases[-1].words(now), terminal_columns()
    share = phases[-1].share(now)
    if share is None:
        return f"{where}: {words}"[:columns]
    form = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {words}"
    plain = not holds("█")
    line = tqdm.format_meter(share, 1, 1, ncols=columns, prefix=where, bar_format=form, ascii=plain)
    return str(line)[:columns]


def in_words(seconds: float) -> str:
    """A time as a person says it: "31 s", "2 min 5 s", "1 h 3 min"."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
