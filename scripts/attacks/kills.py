"""Signals at random moments: SIGKILL leaves whole files, SIGINT and SIGTERM end a run in order.

Every fifth run is in an inference that does not end. Every second one of the others keeps a
checkpoint between any two samples, and the next one goes on from it.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.files.staging import has_unfinished_publication
from scripts.attacks import whole
from scripts.attacks.children import run, start
from scripts.attacks.forms import model_of
from scripts.attacks.outcome import FAILED, REFUSED, SURVIVED, Ended, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import Subject, made, reference

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_ENDLESS = """c = Conv (x, w) l = Loop (, true, c) <
    body = b (int64 i, bool ci, float[n, 4, 14, 14] s) => (bool co, float[n, 4, 14, 14] so)
    { co = Identity (ci) so = Relu (s) }> y = Relu (l)"""
_HANG_S = 60.0  # from the signal to the end, however busy the machine is


def _start(folder: Path, count: int) -> Case:
    subject, out = made(folder / "subject"), folder / "out"
    written = [reference(subject.build(job, out), out, folder / f"build-{job}") for job in range(2)]
    began = time.monotonic()
    run(subject.build(1, out))
    lasts = time.monotonic() - began
    shutil.rmtree(out)

    endless = Subject(folder / "subject" / "endless")
    shutil.copytree(subject.folder / "b", endless.folder / "b")
    endless.model.write_bytes(model_of(_ENDLESS).SerializeToString())

    def case(rng: random.Random, number: int) -> Outcome:
        shutil.copytree(folder / "build-0", out)
        if number % 5 == 4:
            return _endless(rng, endless.build(1, out), out, lasts, written[0])
        sent = rng.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
        threads = rng.choice((1, 2))
        words = [*subject.build(1, out), "--threads", str(threads)]
        resume = rng.random() < 0.5
        child = start(words, before=_often if resume else None)
        child.wait_ready()
        time.sleep(rng.random() * lasts * 1.1)
        child.send(sent)
        began = time.monotonic()
        ended = child.ended()
        wrong = (
            _wrong(sent, ended, time.monotonic() - began, out)
            or _not_whole(sent, out, *written)
            or whole.next_run([*words, "--resume"] if resume else words, out, written[1])
            or _stays(out)
        )
        try:
            if wrong:
                return Outcome(FAILED, f"{sent.name}, {threads} threads: {wrong}", out)
            return Outcome(REFUSED if ended.code > 0 else SURVIVED)
        finally:
            shutil.rmtree(out)

    return case


def _endless(
    rng: random.Random, words: list[str], out: Path, lasts: float, before: dict[str, bytes]
) -> Outcome:
    """A signal ends an inference that does not end by itself."""
    sent = rng.choice((signal.SIGINT, signal.SIGTERM))
    child = start(words)
    child.wait_ready()
    time.sleep((0.2 + rng.random()) * lasts)
    child.send(sent)
    began = time.monotonic()
    ended = child.ended()
    wrong = _wrong(sent, ended, time.monotonic() - began, out) or whole.torn(out, before)
    if wrong:
        return Outcome(FAILED, f"{sent.name} in an endless loop: {wrong}", out)
    shutil.rmtree(out)
    return Outcome(REFUSED)


def _not_whole(sent: int, out: Path, *builds: Mapping[str, bytes]) -> str | None:
    """Why the folder is not as one build left it, or None.

    SIGKILL may hit while files are put there: files of two builds, until the next run.
    """
    if sent == signal.SIGKILL and has_unfinished_publication(out):
        return whole.mixed(out, *builds)
    return whole.verified(out) or whole.torn(out, *builds)


def _often() -> None:
    """In the child: a checkpoint between any two samples."""
    from deploy.calibration import checkpoint

    checkpoint.MIN_INTERVAL_S = checkpoint.INTERVAL_RATIO = 0


def _stays(out: Path) -> str | None:
    left = sorted(path.name for path in out.rglob("*.checkpoint"))
    return f"after the next run checkpoints stay: {left}" if left else None


def _wrong(sent: int, ended: Ended, seconds: float, out: Path) -> str | None:
    if sent == signal.SIGKILL:
        return None if ended.code in (0, -signal.SIGKILL) else f"exit code {ended.code}"
    outcome = judged(ended, refusals=(_CODES[signal.Signals(sent)],))
    if outcome.word == FAILED:
        return outcome.why
    if seconds > _HANG_S:
        return f"took {seconds:.1f} s to end"
    left = whole.leftovers(out)
    return f"temporary files stay: {left}" if left else None


PARTS = (Part(name="kills", short=5, long=5000, start=_start, chunk=10**6),)
