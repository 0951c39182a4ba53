"""Workers: forked, so that nothing is imported twice; watched, so that a crash is a finding."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from deploy.errors import Calib8Error
from scripts.attacks.outcome import FAILED, Outcome
from scripts.attacks.part import Part
from scripts.attacks.tally import Tally
from scripts.house import modules


@dataclass(slots=True, kw_only=True)
class Found:
    """What a part found.

    Attributes:
        counts: word -> cases.
        failures: rows of `case`, `why` and `kept`.
        seconds: of all workers together.
    """

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, tally: Tally, seconds: float) -> None:
        """What a worker found."""
        for word, count in tally.counts.items():
            self.counts[word] = self.counts.get(word, 0) + count
        self.failures += tally.failures
        self.seconds += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    part: Part
    cases: range
    count: int
    seed: int
    folder: Path


@dataclass(frozen=True, slots=True)
class _Worker:
    job: _Job
    tally: Tally
    started: float


def attack(
    parts: Iterable[Part],
    *,
    seed: int,
    long: bool,
    workers: int,
    folder: Path,
    case: int | None,
    ended: Callable[[str, Found], object] = lambda name, found: None,
) -> dict[str, Found]:
    """Try every case of the parts.

    Args:
        parts: to be tried, in this order.
        seed: of every case's random numbers, with its part's name and its own number.
        long: the long form.
        workers: how many at a time.
        folder: for what is written meanwhile, and for what is kept.
        case: this one alone.
        ended: called with each part that is over.
    """
    warm()
    chosen = list(parts)
    found = {part.name: Found() for part in chosen}
    # every worker of a part prepares it anew: where there are parts enough, a short one has one
    shared = workers if long or len(chosen) < workers else 1
    waiting = [job for part in chosen for job in _jobs(part, seed, long, shared, folder, case)]
    running: dict[int, _Worker] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            tally = Tally(job.folder)
            tally.begin(job.cases.start)
            running[_fork(job, tally)] = _Worker(job, tally, time.monotonic())
        for number, status in _gone(running):
            worker = running.pop(number)
            job, tally = worker.job, worker.tally
            if status:
                kept = next(iter(sorted(job.folder.glob("case*"))), None)
                tally.end(Outcome(FAILED, _crash(status, worker), kept))
                if rest := range(tally.at + 1, job.cases.stop):
                    waiting.insert(0, _again(job, rest))
            found[job.part.name].add(tally, time.monotonic() - worker.started)
            unfinished = [*waiting, *(one.job for one in running.values())]
            if all(one.part.name != job.part.name for one in unfinished):
                ended(job.part.name, found[job.part.name])
        time.sleep(0.02)
    return found


def warm() -> None:
    """Import what calib8 is made of, so that no worker does; torch's half may be missing."""
    for name in modules(Path(__file__).parents[2]):
        if not name.startswith("deploy.fx") and not name.endswith("__main__"):
            with suppress(ImportError, Calib8Error):
                import_module(name)
    for name in ("cv2", "onnxruntime", "onnx.shape_inference", "onnx.version_converter"):
        import_module(name)


def _jobs(
    part: Part, seed: int, long: bool, workers: int, folder: Path, case: int | None
) -> Iterator[_Job]:
    count = part.long if long else part.short
    every = range(count) if case is None else range(case, case + 1)
    size = max(1, min(part.chunk, -(-len(every) // workers)))
    for start in range(every.start, every.stop, size):
        own = folder / f"{part.name}-{start}"
        yield _Job(
            part=part,
            cases=range(start, min(start + size, every.stop)),
            count=count,
            seed=seed,
            folder=own,
        )


def _again(job: _Job, rest: range) -> _Job:
    """What a worker that died had still to do."""
    folder = job.folder.with_name(f"{job.part.name}-{rest.start}-again")
    return _Job(part=job.part, cases=rest, count=job.count, seed=job.seed, folder=folder)


def _fork(job: _Job, tally: Tally) -> int:
    job.folder.mkdir(parents=True)
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        os.setpgid(0, 0)  # so that whatever it starts ends with it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _work(job, tally)
        status = 0
    except BaseException:
        (job.folder / "case-of-the-attack-itself").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _work(job: _Job, tally: Tally) -> None:
    case = job.part.start(job.folder, job.count)
    for number in job.cases:
        tally.begin(number)
        tally.end(case(random.Random(f"{job.seed}/{job.part.name}/{number}"), number))


def _gone(running: dict[int, _Worker]) -> Iterator[tuple[int, int]]:
    """Workers that ended, with their status; those that hang are ended."""
    for number, worker in list(running.items()):
        if worker.tally.silent_s > worker.job.part.limit_s:
            with suppress(ProcessLookupError):
                os.killpg(number, signal.SIGKILL)
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            yield number, status


def _crash(status: int, worker: _Worker) -> str:
    code = os.waitstatus_to_exitcode(status)
    silent = worker.tally.silent_s
    if code == -signal.SIGKILL and silent > worker.job.part.limit_s:
        return f"hung for {silent:.0f} s"
    if code == -signal.SIGXCPU:
        return "hung in C code"
    return f"the process died: {'signal' if code < 0 else 'code'} {abs(code)}"
