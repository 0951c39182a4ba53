"""Strange surroundings: whole processes, whose files must be those of a plain one byte for byte."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from scripts.attacks.outcome import FAILED, SURVIVED, Ended, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import Subject, made, reference, written

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is unlike a plain run.

    Attributes:
        name: in a failure.
        variables: of the environment; None: without it.
        python: options of the interpreter.
        umask: of the process.
        folder: name of the folder that everything lies in.
        words: more of the command line.
        relative: the working folder is that one, and paths are relative to it.
    """

    name: str
    variables: dict[str, str | None] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    umask: int = 0o022
    folder: str = "plain"
    words: tuple[str, ...] = ()
    relative: bool = False


# several together, as each is a process of its own; a failure names them all
ALL = (
    Surroundings(name="LC_ALL=C, TZ, umask 077", umask=0o077,
                 variables={"LC_ALL": "C", "TZ": "Pacific/Kiritimati"}),
    Surroundings(name="LC_ALL=C.UTF-8, no HOME, emoji", folder="\U0001f600 \u202e",
                 variables={"LC_ALL": "C.UTF-8", "HOME": None, "USER": None, "LOGNAME": None}),
    Surroundings(name="C and no UTF-8 mode, narrow screen", folder="grüße",
                 variables={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
                            "COLUMNS": "20", "TERM": "dumb"}),
    Surroundings(name="ASCII streams, hash seed", folder="grüße",
                 variables={"PYTHONIOENCODING": "ascii", "PYTHONHASHSEED": "77"}),
    Surroundings(name="no TMPDIR, no PATH, quotes", folder="a b'c\"d$(e)`f`;g",
                 variables={"TMPDIR": None, "PATH": None}),
    Surroundings(name="other folder, 4 threads", relative=True, words=("--threads", "4")),
    Surroundings(name="-OO, many OpenMP threads", python=("-OO", "-B", "-s"),
                 variables={"OMP_NUM_THREADS": "3"}),
)  # fmt: skip


def _start(folder: Path, count: int) -> Case:
    subject = made(folder / "subject")
    expected = reference(subject.build(0, folder / "out"), folder / "out")
    for named in ("m_atc.sh", "calib8.toml"):  # they name the folder
        del expected[named]

    def case(rng: random.Random, number: int) -> Outcome:
        around = ALL[number % len(ALL)]
        place = folder / "around" / around.folder
        shutil.rmtree(folder / "around", ignore_errors=True)
        shutil.copytree(subject.folder, place)
        ended = _ended(around, place)
        outcome = judged(ended)
        found = written(place / "out") if (place / "out").is_dir() else {}
        wrong = outcome.why or ("" if outcome.word == SURVIVED else f"refused: {ended.err!r}")
        different = [name for name in expected if found.get(name) != expected[name]]
        wrong = wrong or (f"other bytes: {', '.join(different)}" if different else "")
        return Outcome(FAILED, f"{around.name}: {wrong}", place) if wrong else Outcome(SURVIVED)

    return case


def _ended(around: Surroundings, place: Path) -> Ended:
    inside = Path() if around.relative else place
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **around.variables}
    words = Subject(inside).build(0, inside / "out", *around.words)
    done = subprocess.run(
        [sys.executable, *around.python, "-m", "deploy", *words],
        env={name: value for name, value in variables.items() if value is not None},
        cwd=place if around.relative else ROOT,
        umask=around.umask,
        capture_output=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


PARTS = (Part(name="environments", short=len(ALL), long=len(ALL), start=_start, chunk=10**6),)
