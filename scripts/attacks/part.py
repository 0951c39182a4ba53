"""A part of the attack: a number of cases, each made anew from the seed and its own number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.attacks.outcome import Outcome

Case = Callable[[random.Random, int], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is tried.

    Attributes:
        name: as `scripts/attack` takes it; `fuzz` means every `fuzz-...`.
        short, long: cases of the two forms.
        start: (a folder to work in, how many cases the whole part has) -> what tries one.
        limit_s: seconds after which a case counts as a hang, whatever it does.
        chunk: cases that one worker tries.
    """

    name: str
    short: int
    long: int
    start: Callable[[Path, int], Case]
    limit_s: float = 60
    chunk: int = 2500
