"""Readers and changed inputs: each case writes a file and has one reader read it."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.attacks.inside import Screen, command, reading
from scripts.attacks.mutate import mutated
from scripts.attacks.outcome import FAILED, Outcome, judged
from scripts.attacks.part import Case, Part

Mutate = Callable[[random.Random, bytes, bytes], bytes]
_CPU_S = 60  # of a case: C code hears no alarm
NO_MEMORY = b"memory did not suffice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader and what it is given.

    Attributes:
        name: of the part, after `fuzz-`.
        suffix: of the file.
        seeds: whole inputs, made in a folder.
        open: a folder -> (path of the changed file -> what reads it). Words are a command line;
            a function is called where a command would run.
        mutate: gives a changed input.
        cases: number of changed inputs. The short form tries the first fortieth of them, the
            long form a hundred times as many.
        limit_s: of a case, which takes milliseconds; the machine may do other things as well.
        memory: bytes beyond what a worker has: an input of some kilobytes needs no more.
    """

    name: str
    suffix: str
    seeds: Callable[[Path], list[bytes]]
    open: Callable[[Path], Callable[[Path], list[str] | Callable[[], object]]]
    mutate: Mutate = mutated
    cases: int = 10_000
    limit_s: float = 60
    memory: int = 2 << 30

    @property
    def part(self) -> Part:
        """As a part of the attack."""
        return Part(
            name=f"fuzz-{self.name}",
            short=-(-self.cases // 40),
            long=100 * self.cases,
            start=self._start,
            limit_s=3 * self.limit_s,
        )

    def _start(self, folder: Path, count: int) -> Case:
        work = folder / "work"
        work.mkdir()
        seeds, ways = self.seeds(work), self.open(work)
        path = folder / f"case{self.suffix}"
        screen = Screen()
        limit_memory(self.memory)

        def case(rng: random.Random, number: int) -> Outcome:
            data = self.mutate(rng, rng.choice(seeds), rng.choice(seeds))
            path.write_bytes(data)
            way = ways(path)
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + _CPU_S)
            if isinstance(way, list):
                ended = command(screen, way, limit_s=self.limit_s)
            else:
                ended = reading(screen, way, limit_s=self.limit_s)
            outcome = judged(ended)
            if NO_MEMORY in ended.err:
                needed = f"{len(data)} bytes of input needed over {self.memory >> 30} GiB"
                return Outcome(FAILED, needed, data)
            return replace(outcome, kept=data) if outcome.word == FAILED else outcome

        return case


def limit_memory(more: int) -> None:
    """So many bytes beyond what this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
