"""Long calibrations: memory, open files and threads stay as they are at the beginning."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploy import cli
from scripts.attacks.children import Child, start
from scripts.attacks.outcome import FAILED, SURVIVED, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import Subject, made

_SHORT = (4000, 1500)  # arrays of a generator, pictures
_LONG = (100_000, 20_000)
_GROWTH = 64 << 20  # bytes of memory, from the first third on
_EVERY = 0.01  # seconds: a quick machine is looked at often enough too


@dataclass(frozen=True, slots=True)
class _Sample:
    memory: int
    files: int
    threads: int


def _start(folder: Path, count: int) -> Case:
    subject = made(folder / "subject")
    arrays, pictures = _SHORT if count == len(_SHORT) else _LONG

    def case(rng: random.Random, number: int) -> Outcome:
        if number % 2 == 0:
            child = start([], before=lambda: _feed(subject, arrays))
        else:
            listing = _listing(subject, pictures)
            words = ["calibrate", str(subject.model), "--images", str(listing)]
            child = start([*words, "-o", str(folder / "m.cache"), "--refresh", "--threads", "2"])
        return _watched(child)

    return case


def _feed(subject: Subject, count: int) -> None:
    """The command's place is taken by a calibration on a generator of arrays."""
    from calib8 import calibrate

    def arrays() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for _ in range(count):
            yield rng.normal(size=(1, 3, 16, 16)).astype(np.float32)

    run: Callable[..., object] = lambda **_: calibrate(subject.model, arrays(), threads=2) and None  # noqa: E731
    cli.cli.main = run  # type: ignore[method-assign]


def _listing(subject: Subject, count: int) -> Path:
    """A list of so many pictures, the few that there are again and again."""
    names = sorted(path.name for path in subject.pictures(0).glob("*.png"))
    listing = subject.pictures(0) / "list.txt"
    listing.write_text("".join(f"{names[n % len(names)]}\n" for n in range(count)))
    return listing


def _watched(child: Child) -> Outcome:
    child.wait_ready()
    samples = []
    while (sample := _sample(child.number)) is not None:
        samples.append(sample)
        time.sleep(_EVERY)
    ended = child.ended()
    if (outcome := judged(ended)).word != SURVIVED:
        return Outcome(FAILED, outcome.why or f"refused: {ended.err!r}")
    return _steady(samples[len(samples) // 3 :])


def _sample(number: int) -> _Sample | None:
    """Of a process that still runs."""
    place = Path(f"/proc/{number}")
    try:
        pages = int((place / "statm").read_text().split()[1])
        files, threads = (len(os.listdir(place / name)) for name in ("fd", "task"))
    except (OSError, ValueError):
        return None
    return _Sample(pages * os.sysconf("SC_PAGESIZE"), files, threads) if pages else None


def _steady(samples: list[_Sample]) -> Outcome:
    if len(samples) < 5:
        return Outcome(FAILED, f"only {len(samples)} looks at it; too quick to be judged")
    grown = samples[-1].memory - samples[0].memory
    if grown > _GROWTH:
        return Outcome(FAILED, f"memory grew by {grown >> 20} MiB")
    for name in ("files", "threads"):
        first, most = getattr(samples[0], name), max(getattr(one, name) for one in samples)
        if most > first + 8:  # a few come and go
            return Outcome(FAILED, f"{name}: {first} at first, {most} later")
    return Outcome(SURVIVED)


def available() -> bool:
    """Whether this system tells of its processes."""
    return shutil.os.path.isdir("/proc/self/fd")


PARTS = (
    Part(name="soak", short=len(_SHORT), long=2 * len(_LONG), start=_start, limit_s=3600, chunk=1),
)
