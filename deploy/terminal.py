"""Print to the terminal: all text of the command line, and progress.

::

    say(line)        one line; control characters and line breaks are escaped
    say_lines(text)  several lines, such as a report
    say_data(text)   data requested instead of text, such as JSON
    draw(line)       a progress line on a terminal's stderr, replacing the previous one

Names of tensors, paths and texts come from files that anybody may have written: an escape sequence
in them could color, move or rewrite what the terminal shows.

Progress goes to stderr::

    with telling():                                   one run; no progress without it
        with numbered("calibration", "accuracy"):     the run's phases, in order
            with phase("accuracy", 400, "samples") as step:
                step()                                2/2 accuracy: 120 of 400 samples, 31 s left

A terminal gets one line, which is redrawn and removed at the end. A file or pipe gets plain lines:
one per long phase, and one now and then. A thread prints them, so that a single long call shows
progress too, unless it holds the GIL, as ONNX's checker does (for seconds, with a model of hundreds
of MiB). The thread ends with the run, however that ends. Phases start and end in the run's thread;
any thread may call `step`.
"""

import math
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
_PEN = threading.Lock()  # a separate thread draws the progress line
_COLUMNS = 80  # if the terminal does not report its width
_drawing: list[str] = []  # the current progress line, if any


def visible(line: str) -> str:
    r"""Return one line without anything that controls a terminal.

    Control characters, line breaks, marks of writing direction and bytes that are not valid text
    become \x1b, \n, \u202e and \xff.
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else _escaped(c) for c in line)


def join_visible(lines: Iterable[str]) -> str:
    """Join lines, each made visible; there is no line break at the end."""
    return "\n".join(map(visible, lines))


@contextmanager
def without_text(asked: bool = True) -> Iterator[None]:
    """Suppress the output of `say` and `say_lines` to stdout if `asked`."""
    token = _TEXT.set(_TEXT.get() and not asked)
    try:
        yield
    finally:
        _TEXT.reset(token)


def is_text_suppressed() -> bool:
    """Return whether text is suppressed, so that serious messages must go to stderr."""
    return not _TEXT.get()


def say(line: str = "", *, err: bool = False) -> None:
    """Print one line, on stderr if `err`."""
    if err or _TEXT.get():
        _put(visible(line) + "\n", err=err)


def say_lines(text: str) -> None:
    """Print lines from `join_visible`, whose names are visible already, and a final line break."""
    if _TEXT.get():
        say_data(text)


def say_data(text: str) -> None:
    """Print lines on stdout even if text is suppressed."""
    _put(join_visible(text.removesuffix("\n").split("\n")) + "\n", err=False)


def terminal_columns() -> int:
    """Return the maximum length of a progress line: a full-width one would wrap."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return (width or _COLUMNS) - 1


def draw(line: str) -> None:
    """Draw a progress line over the previous one; an empty line removes it."""
    with _PEN:
        if line or _drawing:
            _write(f"\r\x1b[K{visible(line)}", err=True)
        _drawing[:] = [line] if line else []


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is not valid text
        return f"\\x{code - 0xDC00:02x}"
    return ascii(character)[1:-1]


def _put(text: str, *, err: bool) -> None:
    """Write over the progress line; the next `draw` restores it."""
    with _PEN:
        if _drawing:
            _drawing.clear()
            _write("\r\x1b[K", err=True)
        _write(text, err=err)


def _write(text: str, *, err: bool) -> None:
    import click  # imported here, so that progress needs no click

    click.echo(_encodable(text, err=err), nl=False, err=err)


def _encodable(text: str, *, err: bool) -> str:
    """Escape characters that the stream's encoding lacks."""
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


FIRST_S = 1.0  # seconds of a run before a terminal shows progress
LASTING_S = 2.0  # seconds of a phase before it gets a plain line
EVERY_S = 10.0  # seconds between plain lines of one phase
TICK_S = 0.5  # seconds between checks of the thread

Step = Callable[[], None]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class Phase:
    """A phase of a run.

    Attributes:
        what: its name, a word or two.
        total: number of steps, or seconds if `timed`; None if unknown.
        unit: of the steps, in the plural.
        about: whether `total` is an estimate.
        timed: whether the phase lasts for `total` seconds.
        number: its position in the run, such as "3/7 "; "" for none.
        began: time of the run's clock, in seconds.
        done: steps done.
        aside: seconds in inner phases, which do not count for the time per step.
        told: whether a plain line was printed for it.
        ends: the earliest end that was estimated, so that the time left only falls.
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
    ends: float = math.inf

    def share(self, now: float) -> float | None:
        """Return the fraction done, 0 to 1; None if unknown."""
        if not self.total:
            return None
        return min((now - self.began if self.timed else self.done) / self.total, 1.0)

    def words(self, now: float) -> str:
        """Return steps and time left if known, else the time so far.

        The estimate never rises: a phase that lasts longer than estimated shows the time so far.
        """
        taken, share = now - self.began, self.share(now)
        about, time, of = "about " if self.about else "", format_seconds(taken), ""
        if share and share < 1:
            stepping = taken - self.aside
            self.ends = min(self.ends, now + stepping / share - stepping)
            if self.ends > now:
                time = f"{about}{format_seconds(self.ends - now)} left"
        if self.timed or not self.done or self.total is None:
            return time
        if not self.about or self.done < self.total:
            of = f" of {about}{self.total:.0f}"
        return f"{self.done}{of} {self.unit}".rstrip() + f", {time}"


@dataclass(slots=True, eq=False)
class ProgressReporter:
    """The phases of a run, innermost last, and the thread that prints progress.

    Attributes:
        clock: returns seconds.
        drawn: whether stderr is a terminal on which a line can be redrawn.
        parts: names of the run's phases, in order, for their numbers.
        phases: the phases now open.
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
        self.phases = [Phase(what="working", began=self._began, told=True)]

    def begin(self) -> None:
        """Start the thread that prints progress."""
        self._thread = threading.Thread(target=self._run, name="calib8 progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread and remove the progress line."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self.drawn:
            draw("")

    def enter(self, phase: Phase) -> None:
        """Start a phase inside the current one."""
        if phase.what in self.parts:
            phase.number = f"{self.parts.index(phase.what) + 1}/{len(self.parts)} "
        with self._lock:
            self.phases.append(phase)

    def leave(self, phase: Phase) -> None:
        """End a phase."""
        with self._lock:
            self.phases.remove(phase)
            self.phases[-1].aside += self.clock() - phase.began

    def step(self, phase: Phase) -> None:
        """Count one more step."""
        with self._lock:
            phase.done += 1

    def look(self) -> None:
        """Print what is due now."""
        with self._lock:
            phases, now = list(self.phases), self.clock()
        if self.drawn and now - self._began >= FIRST_S:
            draw(_bar(phases, now))
        elif not self.drawn and self._due(phases[-1], now):
            phases[-1].told, self._last = True, now
            say(f"calib8: {_where(phases)}: {phases[-1].words(now)}", err=True)

    def _due(self, phase: Phase, now: float) -> bool:
        """Return whether a plain line is due."""
        silent = now - self._last
        lasts = now - phase.began >= LASTING_S and not phase.told
        return (lasts and silent >= LASTING_S) or silent >= EVERY_S

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            try:
                self.look()
            except (OSError, ValueError):  # stderr is closed, or its reader is gone
                return


_TELLER: ContextVar[ProgressReporter | None] = ContextVar("_TELLER", default=None)


@contextmanager
def show_progress(asked: bool = True) -> Iterator[None]:
    """Print progress of the phases in the body if `asked`; a nested call uses the outer one."""
    if not asked or _TELLER.get() is not None:
        yield
        return
    teller = ProgressReporter(
        drawn=bool(sys.stderr and sys.stderr.isatty()) and os.environ.get("TERM") != "dumb"
    )
    token = _TELLER.set(teller)
    teller.begin()
    try:
        yield
    finally:
        _TELLER.reset(token)
        teller.end()


def with_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose keyword argument `progress` turns progress output on."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with show_progress(bool(kwargs.get("progress"))):
            return function(*args, **kwargs)

    return wrapper


@contextmanager
def number_phases(*parts: str) -> Iterator[None]:
    """Number the phases of these names in the body."""
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
    """Show a phase's progress while the body runs; yield the function that counts a step.

    `what`: name of the phase, a word or two. `total`: number of steps; None if unknown. `unit`: of
    the steps, in the plural. `about`: whether `total` is an estimate.
    """
    teller = _TELLER.get()
    if teller is None:
        yield lambda: None
        return
    new_phase = Phase(what=what, total=total, unit=unit, about=about, began=teller.clock())
    with _open_phase(teller, new_phase):
        yield lambda: teller.step(new_phase)


@contextmanager
def timed_phase(what: str, seconds: float) -> Iterator[None]:
    """Show the progress of a body that lasts for `seconds`; it counts no steps."""
    teller = _TELLER.get()
    if teller is None:
        yield
        return
    with _open_phase(teller, Phase(what=what, total=seconds, timed=True, began=teller.clock())):
        yield


def say_progress(line: str) -> None:
    """Print a line at once if progress is shown, before the end of the run."""
    if _TELLER.get() is not None:
        say(f"calib8: {line}", err=True)


@contextmanager
def _open_phase(teller: ProgressReporter, own: Phase) -> Iterator[None]:
    teller.enter(own)
    try:
        yield
    finally:
        teller.leave(own)


def _where(phases: Sequence[Phase]) -> str:
    """Return the names of the open phases; "working" only if there is no other."""
    return ": ".join(f"{one.number}{one.what}" for one in phases[1:] or phases)


def _bar(phases: Sequence[Phase], now: float) -> str:
    """Return a progress line that fits the terminal, with a bar if the fraction done is known."""
    from tqdm import tqdm

    where, words, columns = _where(phases), phases[-1].words(now), terminal_columns()
    share = phases[-1].share(now)
    if share is None:
        return f"{where}: {words}"[:columns]
    form = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {words}"
    plain = _encodable("█", err=True) != "█"
    line = tqdm.format_meter(share, 1, 1, ncols=columns, prefix=where, bar_format=form, ascii=plain)
    return str(line)[:columns]


def format_seconds(seconds: float) -> str:
    """Format seconds: "31 s", "2 min 5 s", "1 h 3 min"."""
    total = max(round(seconds), 0)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
