"""Builds of different pictures and methods in one folder at once."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from scripts.attacks import whole
from scripts.attacks.children import start
from scripts.attacks.outcome import FAILED, SURVIVED, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import METHODS, made, reference

_JOBS = len(METHODS)


def _start(folder: Path, count: int) -> Case:
    subject, out = made(folder / "subject"), folder / "out"
    written = [reference(subject.build(job, out), out) for job in range(_JOBS)]

    def case(rng: random.Random, number: int) -> Outcome:
        shutil.rmtree(out, ignore_errors=True)
        together = (2, 8)[number % 2]
        children = []
        for place in range(together):
            children.append(start(subject.build(place % _JOBS, out)))
            time.sleep(rng.random() * 0.1)
        ended = [child.ended() for child in children]
        outcomes = [judged(one) for one in ended]
        wrong = next((one.why for one in outcomes if one.word == FAILED), None)
        if not wrong and not any(one.word == SURVIVED for one in outcomes):
            wrong = f"none of {together} builds came through"
        wrong = wrong or _left(out, written)
        return Outcome(FAILED, f"{together} at once: {wrong}", out) if wrong else Outcome(SURVIVED)

    return case


def _left(out: Path, written: list[dict[str, bytes]]) -> str | None:
    if left := whole.leftovers(out):
        return f"temporary files stay: {left}"
    return whole.torn(out, *written)


PARTS = (Part(name="races", short=2, long=500, start=_start, limit_s=180, chunk=10**6),)
