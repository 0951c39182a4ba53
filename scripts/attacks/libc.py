"""Calls of the C library fail under a build, whoever makes them; see `libc.c`.

Before: a folder with another build. After: the files of one of both builds; or files of both and
the journal from which the next run finishes. The next run gives the bytes of an undisturbed one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from scripts.attacks import whole
from scripts.attacks.outcome import FAILED, SURVIVED, Ended, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import made, reference

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc")
_FAIL, _HALF, _KILL_BEFORE, _KILL_AFTER = range(4)
_ONCE = ("EIO", "ENOSPC", "EINTR", "ESTALE", "EDQUOT")
_LASTING = ("ENOSPC", "EROFS", "EMFILE", "EDQUOT", "EACCES")


def _start(folder: Path, count: int) -> Case:
    assert COMPILER is not None
    subject, out = made(folder / "subject"), folder / "out"
    old, new = (reference(subject.build(n, out), out, folder / f"build-{n}") for n in range(2))
    library, words = folder / "libc.so", subject.build(1, out)
    source = Path(__file__).with_suffix(".c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)

    def fresh(plan: str) -> Ended:
        variables = {"LD_PRELOAD": str(library), "CALIB8_FAULT": f"{plan} {out}/"}
        variables |= {"CALIB8_CALLS": str(folder / "calls"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "deploy", *words],
            env={**os.environ, **variables}, cwd=ROOT, capture_output=True, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    shutil.copytree(folder / "build-0", out)
    fresh("0 0 0 0")
    calls = int((folder / "calls").read_text())
    shutil.rmtree(out)

    def case(rng: random.Random, number: int) -> Outcome:
        shutil.copytree(folder / "build-0", out)
        act = rng.choice((_FAIL, _FAIL, _FAIL, _HALF, _KILL_BEFORE, _KILL_AFTER))
        lasting = act == _FAIL and rng.random() < 0.4
        name = rng.choice(_LASTING if lasting else _ONCE)
        place = rng.randrange(calls) + 1
        ended = fresh(f"{place} {act} {getattr(errno, name)} {int(lasting)}")
        killed = ended.code == -signal.SIGKILL and act in (_KILL_BEFORE, _KILL_AFTER)
        outcome = Outcome(SURVIVED) if killed else judged(ended, refusals=(1,))
        wrong = outcome.why or _torn(out, old, new, ended) or whole.next_run(words, out, new)
        try:
            if wrong:
                what = ("fails", "writes half", "is the last, before it", "is the last")[act]
                said = f"call {place} of {calls} {what} ({name}{', and all after' * lasting})"
                return Outcome(FAILED, f"{said}: {wrong}", out)
            return outcome
        finally:
            shutil.rmtree(out, ignore_errors=True)

    return case


def _torn(out: Path, old: dict[str, bytes], new: dict[str, bytes], ended: Ended) -> str | None:
    """What no run may leave: files of two builds without a journal, or half of a file."""
    if ended.code == 0:
        return whole.torn(out, new)
    wrong = whole.torn(out, old, new)
    journals = [*out.glob(".calib8-*/publishing.json")]
    return whole.mixed(out, old, new) if wrong and journals else wrong


PARTS = (Part(name="faults-libc", short=2, long=3000, start=_start, limit_s=600, chunk=10**6),)
