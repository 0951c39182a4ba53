"""Every write, rename, fsync and allocation of a build and of a calibration fails once, or kills.

Before: a folder with the whole files of another job. After: all files are as they were, or all are
as the new job writes them; nothing temporary is left but by a kill; the next run works, and what
stands there then is, byte for byte, what an untouched run writes.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.attacks import whole
from scripts.attacks.children import run
from scripts.attacks.inject import ACTS, KILLED, Trigger, on_disk, on_memory, starves
from scripts.attacks.outcome import FAILED, SURVIVED, Ended, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import Subject, made, reference

_NOTHING_LEFT = ("write", "fsync", "rename", "chmod")  # faults after which all can be removed


@dataclass(frozen=True, slots=True)
class _Point:
    """The n-th call of a command, of what kind it is, and what happens there."""

    command: str
    place: int
    call: str
    act: str


def _disk(folder: Path, count: int) -> Case:
    return _attack(folder, count, tuple(ACTS), lambda trigger, out: on_disk(trigger, (out,)))


def _memory(folder: Path, count: int) -> Case:
    return _attack(folder, count, ("memory",), lambda trigger, out: on_memory(trigger))


def _attack(
    folder: Path, count: int, acts: tuple[str, ...], listen: Callable[[Trigger, Path], None]
) -> Case:
    subject, out = made(folder / "subject"), folder / "out"
    old, new = {}, {}
    points = []
    for command in ("build", "calibrate"):
        for job, kept in ((0, old), (1, new)):
            words = _words(subject, command, job, out)
            kept[command] = reference(words, out, folder / f"{command}-{job}")
        calls = _calls(_words(subject, command, 1, out), folder / f"{command}-0", out, listen)
        points += [
            _Point(command, place, call, act) for act in acts for place, call in enumerate(calls)
        ]

    def case(rng: random.Random, number: int) -> Outcome:
        first = number * len(points) // count
        last = (number + 1) * len(points) // count
        point = points[rng.randrange(first, max(last, first + 1)) % len(points)]
        return _tried(point, subject, folder, out, (old, new), listen)

    return case


def _words(subject: Subject, command: str, job: int, out: Path) -> list[str]:
    return (subject.build if command == "build" else subject.calibrate)(job, out)


def _calls(
    words: list[str], before: Path, out: Path, listen: Callable[[Trigger, Path], None]
) -> list[str]:
    """The calls of a run in which nothing goes wrong."""
    shutil.copytree(before, out)
    with tempfile.TemporaryFile() as log:
        handle = log.fileno()
        trigger = Trigger(None, lambda: None, handle)
        run(words, before=lambda: listen(trigger, out))
        log.seek(0)
        calls = log.read().decode().split()
    shutil.rmtree(out)
    return calls


def _tried(
    point: _Point,
    subject: Subject,
    folder: Path,
    out: Path,
    references: tuple[dict[str, dict[str, bytes]], dict[str, dict[str, bytes]]],
    listen: Callable[[Trigger, Path], None],
) -> Outcome:
    shutil.copytree(folder / f"{point.command}-0", out)
    old, new = (one[point.command] for one in references)
    words = _words(subject, point.command, 1, out)
    trigger = Trigger(point.place, ACTS.get(point.act, starves))
    try:
        ended = run(words, before=lambda: listen(trigger, out))
        wrong = _wrong(point, ended, out, old, new) or whole.next_run(words, out, new)
        if wrong:
            said = f"{point.act} at call {point.place} ({point.call}) of {point.command}: {wrong}"
            return Outcome(FAILED, said, out)
        return Outcome(SURVIVED if ended.code in (0, KILLED) else judged(ended).word)
    finally:
        shutil.rmtree(out)


def _wrong(
    point: _Point, ended: Ended, out: Path, old: dict[str, bytes], new: dict[str, bytes]
) -> str | None:
    if point.act == "kill":
        if ended.code not in (KILLED, 0):
            return f"exit code {ended.code}"
    elif (outcome := judged(ended)).word == FAILED:
        return outcome.why
    elif point.call in _NOTHING_LEFT and (left := whole.leftovers(out)):
        return f"temporary files stay: {left}"
    if point.act == "kill" or point.call == "rename":  # the next run finishes it
        return whole.mixed(out, old, new)
    return whole.verified(out) or whole.torn(out, old, new)


PARTS = (
    Part(name="faults-disk", short=8, long=3000, start=_disk, chunk=10**6),
    Part(name="faults-memory", short=6, long=10_000, start=_memory, chunk=10**6),
)
