"""Print to the terminal: all text of the command line, and progress.

::

    say(line)        one line; control characters and line breaks are escaped
    say_lines(text)  several lines, such as a report
    say_screen(text) the screen of a result; labels and verdicts in color where stdout shows it
    say_data(text)   data requested instead of text, such as JSON
    draw(line)       a progress line on a terminal's stderr, replacing the previous one

Names of tensors, paths and texts come from files that anybody may have written: an escape sequence
in them could color, move or rewrite what the terminal shows.

While a command runs, `print` of a user's loader or metric, or of a library, goes to stderr
(`separate_stdout`): `--json -` is JSON whatever they print.

Progress goes to stderr::

    with show_progress():                               one run; no progress without it
        with phase("accuracy", 400, "samples") as step:
            step()                                      accuracy: 120 of 400 samples, 31 s left

A terminal gets one line, which is redrawn and removed at the end. A file or pipe gets plain lines:
one per long phase, and one now and then, without numbers, since short phases have no line. A thread
prints them, so that a single long call shows progress too, unless it holds the GIL, as ONNX's
checker does (for seconds, with a model of hundreds of MiB). The thread ends with the run, however
that ends. Phases start and end in the run's thread; any thread may call `step`.
"""

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from html import escape
from typing import Any, ParamSpec, TextIO, TypeVar

from deploy.errors import ConfigError, did_you_mean

_SHOWS_TEXT: ContextVar[bool] = ContextVar("_SHOWS_TEXT", default=True)  # whether stdout gets text
_PRINT_LOCK = threading.Lock()  # a separate thread draws the progress line
_DEFAULT_COLUMNS = 80  # if the terminal does not report its width
_drawn_lines: list[str] = []  # the current progress line, if any
_separate_stdout: list[TextIO] = []  # the stdout of `say` while all others print to stderr


def visible(line: str) -> str:
    r"""Return one line without anything that controls a terminal.

    Control characters, line breaks, marks of writing direction and bytes that are not valid text
    become \x1b, \n, \u202e and \xff.
    """
    if line.isprintable():
        return line
    return "".join(map(_escape, line))


def join_visible(lines: Iterable[str]) -> str:
    """Join lines, each made visible; there is no line break at the end."""
    return "\n".join(map(visible, lines))


class PrintedResult:
    """A public result: printed, it is what its command prints; a notebook shows it too."""

    __slots__ = ()

    def to_screen(self) -> str:
        """Return the text that the command prints, without colours."""
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            return self.to_screen().rstrip("\n")
        except Exception:  # a debugger or traceback that shows this value must not fail
            return object.__repr__(self)

    def _repr_html_(self) -> str:
        """Return the text as it is, for a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"

    def rows(self, table: str) -> list[dict[str, object]]:
        """Return a table of the result as one dict a row, as `pandas.DataFrame` takes them.

        A table is a list of dataclasses, such as a report's "targets", each of which is a row. The
        value of a field that is a dataclass too is spread over columns named field.subfield; lists
        are left out.

        Args:
            table: name of the field with the list. A field of the rows, such as the "layers" of
                each target, is one table of all targets, with the target's name in "target".

        Raises:
            ConfigError: no such table.
        """
        tables: dict[str, list[dict[str, object]]] = {}
        for name, rows in _find_tables(self):  # "layers" comes once for each target
            tables.setdefault(name, []).extend(rows)
        if table not in tables:
            hint = did_you_mean(table, tables, f"it has {', '.join(tables) or 'none'}")
            raise ConfigError(
                f"rows are those of a table of the result, got {table!r} for a"
                f" {type(self).__name__}; {hint}"
            )
        return tables[table]


def _find_tables(value: Any) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Yield (name, rows) of the fields that hold rows, and of those in their rows.

    A name may come several times: the "layers" of each target of a report.
    """
    for table, entries in _row_fields(value):
        yield table, [dict(_cells(entry)) for entry in entries]
        for entry in entries:
            owner_name = getattr(entry, "label", None) or getattr(entry, "name", "")
            owner = {table.removesuffix("s"): owner_name}  # such as {"target": "tensorrt"}
            for inner_table, inner_entries in _row_fields(entry):
                yield inner_table, [{**owner, **dict(_cells(inner))} for inner in inner_entries]


def _row_fields(value: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield (name, rows) of a dataclass's fields that hold rows, and of the dataclasses in it."""
    for stored_field in fields(value):
        entries = getattr(value, stored_field.name)
        if is_dataclass(entries):
            yield from _row_fields(entries)
        elif isinstance(entries, list | tuple) and all(map(is_dataclass, entries)):
            yield stored_field.name, entries


def _cells(entry: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (name, value) of a dataclass and of the dataclasses in it, without lists."""
    for stored_field in fields(entry):
        value = getattr(entry, stored_field.name)
        if is_dataclass(value):
            yield from _cells(value, f"{prefix}{stored_field.name}.")
        elif not isinstance(value, list | tuple | Mapping):
            yield f"{prefix}{stored_field.name}", value


@contextmanager
def without_text(suppressed: bool = True) -> Iterator[None]:
    """Suppress the output of `say` and `say_lines` to stdout if `suppressed`."""
    token = _SHOWS_TEXT.set(_SHOWS_TEXT.get() and not suppressed)
    try:
        yield
    finally:
        _SHOWS_TEXT.reset(token)


def is_text_suppressed() -> bool:
    """Return whether text is suppressed, so that serious messages must go to stderr."""
    return not _SHOWS_TEXT.get()


@contextmanager
def separate_stdout() -> Iterator[None]:
    """Leave stdout to this module: whatever else is printed goes to stderr, until the end.

    That is what a user's code and libraries print, from Python, C or a child process.
    """
    if _separate_stdout or sys.stdout is None or sys.stderr is None:
        yield
        return
    with ExitStack() as cleanup:
        _separate_stdout.append(_redirect_descriptor(cleanup))
        cleanup.callback(_separate_stdout.clear)
        cleanup.enter_context(redirect_stdout(sys.stderr))
        yield


_STDOUT, _STDERR = 1, 2  # descriptors, whatever `sys.stdout` is


def _redirect_descriptor(cleanup: ExitStack) -> TextIO:
    """Let file descriptor 1 lead to stderr until `cleanup` ends; return a stream to real stdout.

    So C code and child processes print to stderr too.
    """
    stream = sys.stdout
    stream.flush()
    try:
        real_stdout = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # one of them is closed
        return stream
    # the callbacks are called from the last one to the first
    cleanup.callback(os.close, real_stdout)
    cleanup.callback(os.dup2, real_stdout, _STDOUT)
    cleanup.callback(_flush_c)  # else what C holds back would be printed to stdout later
    with suppress(OSError, ValueError):  # a stream in memory has no descriptor
        if stream.fileno() == _STDOUT:  # it leads to stderr now, so a new stream is opened
            stream = os.fdopen(
                os.dup(real_stdout), "w", encoding=stream.encoding, errors=stream.errors
            )
            cleanup.callback(_close, stream)
    return stream


def _flush_c() -> None:
    """Print what C's stdio holds back, as it does unless stdout is a terminal."""
    import ctypes  # imported here, so that --help need not wait for it

    with suppress(OSError, AttributeError, TypeError):  # no libc of that kind
        ctypes.CDLL(None).fflush(None)


def _close(stream: TextIO) -> None:
    """Close a stream; what it still holds is printed if possible."""
    with suppress(OSError):  # a closed pipe or a full disk, reported when the text was printed
        stream.close()


def say(line: str, *, err: bool = False) -> None:
    """Print one line, on stderr if `err`."""
    if err or _SHOWS_TEXT.get():
        _put(visible(line) + "\n", err=err)


def say_lines(text: str) -> None:
    """Print lines from `join_visible`, whose names are visible already, and a final line break."""
    if _SHOWS_TEXT.get():
        say_data(text)


# a label in the margin; a verdict behind it or behind the name of an engine
_LABEL = re.compile(r"^\w[\w .:]{1,11}\w(?=  )", re.MULTILINE)
_LEVEL = re.compile(
    r"^((?:Verdict)? *(?:[\w, -]+: )?)(good|doubtful|unusable|keep FP32)(?=:|$)", re.MULTILINE
)
_COLORS = {"good": "green", "doubtful": "yellow", "keep FP32": "yellow", "unusable": "red"}


def say_screen(text: str) -> None:
    """Print the screen of a result; labels are bold and verdicts colored on a color terminal."""
    if not (_SHOWS_TEXT.get() and _has_colors(_stdout())):
        say_lines(text)
        return
    import click

    def color_level(match: re.Match[str]) -> str:
        """Return what stands before a verdict's level, and the level in its color."""
        return match[1] + click.style(match[2], fg=_COLORS[match[2]], bold=True)

    colored_text = _LEVEL.sub(color_level, _visible_lines(text))
    _put(_LABEL.sub(lambda match: click.style(match[0], bold=True), colored_text), err=False)


def _has_colors(stream: TextIO | None) -> bool:
    """Whether colors are wanted: see https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream and stream.isatty()) and os.environ.get("TERM") != "dumb"


def say_data(text: str) -> None:
    """Print lines on stdout even if text is suppressed."""
    _put(_visible_lines(text), err=False)


def _visible_lines(text: str) -> str:
    """Return a text with its lines made visible, and a line break at the end."""
    return join_visible(text.removesuffix("\n").split("\n")) + "\n"


def terminal_columns() -> int:
    """Return the maximum length of a progress line: a full-width one would wrap."""
    width = 0
    with suppress(OSError, ValueError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    return (width or _DEFAULT_COLUMNS) - 1


def draw(line: str) -> None:
    """Draw a progress line over the previous one; an empty line removes it."""
    with _PRINT_LOCK:
        if line or _drawn_lines:
            _write(f"\r\x1b[K{visible(line)}", err=True)
        _drawn_lines[:] = [line] if line else []


def _escape(character: str) -> str:
    """Return a character as `visible` shows it."""
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is not valid text
        return f"\\x{code - 0xDC00:02x}"
    return ascii(character)[1:-1]


def _put(text: str, *, err: bool) -> None:
    """Write over the progress line; the next `draw` restores it."""
    with _PRINT_LOCK:
        if _drawn_lines:
            _drawn_lines.clear()
            _write("\r\x1b[K", err=True)
        _write(text, err=err)


def _write(text: str, *, err: bool) -> None:
    """Print a text as it is on stderr if `err`, else on stdout."""
    import click  # imported here, so that progress needs no click

    stream = sys.stderr if err else _stdout()
    click.echo(_encodable(text, stream), file=stream, nl=False, err=err, color=True)


def _stdout() -> TextIO | None:
    """Return the stream of `say`: the real stdout, whatever others print to."""
    return next(iter(_separate_stdout), sys.stdout)


def _encodable(text: str, stream: TextIO | None) -> str:
    """Escape characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
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
        name: a word or two.
        total: number of steps, or seconds if `counts_seconds`; None if unknown.
        unit: of the steps, in the plural.
        counts_seconds: whether the phase lasts for `total` seconds.
        start: time of the run's clock, in seconds.
        done: steps done.
        inner_seconds: seconds in inner phases, which do not count for the time per step.
        has_line: whether a plain line was printed for it.
        estimated_end: the earliest end that was estimated, so that the time left only falls.
    """

    name: str
    total: float | None = None
    unit: str = ""
    counts_seconds: bool = False
    start: float = 0.0
    done: int = 0
    inner_seconds: float = 0.0
    has_line: bool = False
    estimated_end: float = math.inf

    def share(self, now: float) -> float | None:
        """Return the fraction done, 0 to 1; None if unknown."""
        if not self.total:
            return None
        done = now - self.start if self.counts_seconds else self.done
        return min(done / self.total, 1.0)

    def describe(self, now: float) -> str:
        """Return the phase's progress, such as "120 of 400 samples, 31 s left".

        Without a known total, or for a phase that counts seconds, it is the time alone.
        """
        time_text = self._describe_time(now)
        if self.counts_seconds or not self.done or self.total is None:
            return time_text
        steps = f"{self.done}"
        if self.done <= self.total:  # else it was estimated too low
            steps += f" of {self.total:.0f}"
        return f"{steps} {self.unit}".rstrip() + f", {time_text}"

    def _describe_time(self, now: float) -> str:
        """Return the time left, such as "31 s left"; the time so far if that is unknown.

        The time left never rises: a phase that lasts longer than estimated shows the time so far
        again.
        """
        elapsed = now - self.start
        share = self.share(now)
        if share and share < 1:
            # the time of inner phases is not time of this phase's steps
            step_seconds = elapsed - self.inner_seconds
            seconds_left = step_seconds / share - step_seconds
            self.estimated_end = min(self.estimated_end, now + seconds_left)
            if self.estimated_end > now:
                return f"{format_seconds(self.estimated_end - now)} left"
        return format_seconds(elapsed)


@dataclass(slots=True, eq=False)
class ProgressReporter:
    """The phases of a run, innermost last, and the thread that prints progress.

    Attributes:
        clock: returns seconds.
        is_terminal: whether stderr is a terminal on which a line can be redrawn.
        phases: "loading" or the last outer phase that ended, then the phases now open.
    """

    clock: Callable[[], float] = time.monotonic
    is_terminal: bool = False
    phases: list[Phase] = field(default_factory=list)
    _start_time: float = 0.0
    _last_line_time: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._start_time = self._last_line_time = self.clock()
        # shown while no other phase is open; later the last one that ended is
        self.phases = [Phase(name="loading", start=self._start_time, has_line=True)]

    def begin(self) -> None:
        """Start the thread that prints progress."""
        self._thread = threading.Thread(target=self._run, name="calib8 progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread, if it was started, and remove the progress line."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()
        if self.is_terminal:
            draw("")

    def enter(self, phase: Phase) -> None:
        """Start a phase inside the current one."""
        with self._lock:
            self.phases.append(phase)

    def leave(self, phase: Phase) -> None:
        """End a phase."""
        with self._lock:
            self.phases.remove(phase)
            self.phases[-1].inner_seconds += self.clock() - phase.start
            if len(self.phases) == 1:
                self.phases = [phase]  # what comes before the next phase belongs to this one

    def step(self, phase: Phase) -> None:
        """Count one more step."""
        with self._lock:
            phase.done += 1

    def print_due(self) -> None:
        """Print what is due now."""
        with self._lock:
            phases = list(self.phases)
            now = self.clock()
        innermost = phases[-1]
        # the first of them has ended: it is named only while no other one runs
        names = ": ".join(phase.name for phase in phases[1:] or phases)
        if self.is_terminal:
            if now - self._start_time >= FIRST_S:
                draw(_format_bar(names, innermost, now))
        elif self._is_line_due(innermost, now):
            innermost.has_line = True
            self._last_line_time = now
            say(f"calib8: {names}: {innermost.describe(now)}", err=True)

    def _is_line_due(self, phase: Phase, now: float) -> bool:
        """Whether a plain line is due: the first one of a long phase, or one now and then."""
        is_first_line = now - phase.start >= LASTING_S and not phase.has_line
        return now - self._last_line_time >= (LASTING_S if is_first_line else EVERY_S)

    def _run(self) -> None:
        """Print what is due from time to time, until the end."""
        while not self._has_ended.wait(TICK_S):
            try:
                self.print_due()
            except (OSError, ValueError):  # stderr is closed, or its reader is gone
                return


_REPORTER: ContextVar[ProgressReporter | None] = ContextVar("_REPORTER", default=None)


@contextmanager
def show_progress(enabled: bool = True) -> Iterator[None]:
    """Print progress of the phases in the body if `enabled`; a nested call uses the outer one."""
    if not enabled or _REPORTER.get() is not None:
        yield
        return
    has_terminal = bool(sys.stderr and sys.stderr.isatty())
    reporter = ProgressReporter(is_terminal=has_terminal and os.environ.get("TERM") != "dumb")
    token = _REPORTER.set(reporter)
    reporter.begin()
    try:
        yield
    finally:
        _REPORTER.reset(token)
        reporter.end()


def with_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose keyword argument `progress` turns progress output on."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, with progress if it is asked for."""
        with show_progress(bool(kwargs.get("progress"))):
            return function(*args, **kwargs)

    return wrapper


@contextmanager
def phase(
    name: str,
    total: float | None = None,
    unit: str = "",
    *,
    counts_seconds: bool = False,
) -> Iterator[Step]:
    """Show a phase's progress while the body runs; yield the function that counts a step.

    Args:
        name: a word or two.
        total: number of steps, or seconds if `counts_seconds`; None if unknown.
        unit: of the steps, in the plural.
        counts_seconds: whether the phase lasts for `total` seconds; then it counts no steps.
    """
    reporter = _REPORTER.get()
    if reporter is None:
        yield lambda: None
        return
    new_phase = Phase(
        name=name,
        total=total,
        unit=unit,
        counts_seconds=counts_seconds,
        start=reporter.clock(),
    )
    reporter.enter(new_phase)
    try:
        yield lambda: reporter.step(new_phase)
    finally:
        reporter.leave(new_phase)


timed_phase = partial(phase, counts_seconds=True)


def say_progress(line: str) -> None:
    """Print a line at once if progress is shown, before the end of the run."""
    if _REPORTER.get() is not None:
        say(f"calib8: {line}", err=True)


def _format_bar(names: str, innermost: Phase, now: float) -> str:
    """Return a progress line that fits the terminal, with a bar if the fraction done is known.

    Args:
        names: names of the phases in progress, as text.
        innermost: the phase whose progress is shown.
        now: time of the run's clock, in seconds.
    """
    from tqdm import tqdm

    description = innermost.describe(now)
    columns = terminal_columns()
    share = innermost.share(now)
    if share is None:
        return f"{names}: {description}"[:columns]
    line = tqdm.format_meter(
        n=share,
        total=1,
        elapsed=1,  # not shown: the description has the time
        ncols=columns,
        prefix=names,
        bar_format=f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {description}",
        ascii=_encodable("█", sys.stderr) != "█",
    )
    return str(line)[:columns]


def format_seconds(seconds: float) -> str:
    """Format seconds: "31 s", "2 min 5 s", "1 h 3 min"."""
    total = max(round(seconds), 0)
    minutes, remaining_seconds = divmod(total, 60)
    if total < 60:
        return f"{total} s"
    if minutes < 60:
        return f"{minutes} min {remaining_seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"
