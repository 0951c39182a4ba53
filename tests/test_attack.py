"""The attack itself: what is broken is found, what is sound is not accused."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.attacks.mutate import CHANGES, TOKENS, mutated
from scripts.attacks.outcome import FAILED, REFUSED, SURVIVED, Ended, judged
from scripts.attacks.parts import PARTS

ROOT = Path(__file__).parents[1]

# Parts of our own, each with one fault that must be found, or none.
BROKEN = """
import os, sys, time
from pathlib import Path
import click
from deploy.errors import FeedError
from scripts.attacks.__main__ import main
from scripts.attacks.fuzz import Reader

def raises(path):
    raise IndexError("a fault")

def refuses(path):
    raise FeedError("a rule, what was got, the way out")

def speaks(path):
    os.write(2, b"calib8: error: \\x1b[2J\\n")  # past the printer
    sys.exit(1)

def chatters(path):
    os.write(2, b"libjpeg: premature end\\n")
    raise FeedError("a rule, what was got, the way out")

def eats(path):
    bytearray(8 << 30)

def dies(path):
    if b"die" in path.read_bytes():
        os.abort()

READERS = {
    "sound": lambda path: None, "refusing": refuses, "faulty": raises, "speaking": speaks,
    "printing": lambda path: click.echo("name: \\u202e"), "chattering": chatters, "eating": eats,
    "endless": lambda path: time.sleep(600), "dying": dies,
}
parts = {
    f"fuzz-{name}": Reader(
        name=name, suffix=".txt", cases=4, limit_s=0.2, seeds=lambda folder: [b"die"],
        open=lambda folder, read=read: lambda path: lambda: read(path),
        mutate=lambda rng, data, other: rng.choice((data, b"live")),
    ).part
    for name, read in READERS.items()
}
sys.exit(main(sys.argv[1:], parts=parts))
"""


def run(program, *words):
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    table = {
        row[0]: tuple(map(int, row[1:5])) for row in rows if len(row) == 6 and row[1].isdigit()
    }
    return done, table


def test_every_way_to_break_is_found_and_named():
    done, table = run(BROKEN, "--seed", "3")
    assert done.returncode == 1
    assert table.pop("fuzz-sound") == (4, 4, 0, 0) and table.pop("fuzz-refusing") == (4, 0, 4, 0)
    dying = table.pop("fuzz-dying")  # a process that dies is replaced; no case is lost
    assert dying[0] == 4 and dying[1] > 0 and dying[3] > 0 and dying[1] + dying[3] == 4
    assert set(table.values()) == {(4, 0, 0, 4)} and len(table) == 6
    for words in (
        "FAILED fuzz-faulty (4 of this kind): exit code 70", "IndexError", "stderr holds '\\x1b'",
        "stdout holds '\\u202e'", "no one sentence but 2 lines", "bytes of input needed over 2 GiB",
        "exit code -14", "the process died: signal 6", "scripts/attack fuzz-dying --seed 3 --case",
    ):  # fmt: skip
        assert words in done.stdout, words
    kept = next(line for line in done.stdout.splitlines() if line.startswith("FAILED fuzz-dying"))
    assert Path(kept.split("kept: ")[1].split(";")[0]).read_bytes() == b"die"


def test_a_case_is_the_same_alone():
    whole, _ = run(BROKEN, "fuzz-dying", "--seed", "5", "--workers", "1")
    found = [line for line in whole.stdout.splitlines() if line.startswith("FAILED")]
    case = found[0].rpartition(" ")[2]
    done, table = run(BROKEN, "fuzz-dying", "--seed", "5", "--case", case)
    assert table == {"fuzz-dying": (1, 0, 0, 1)} and done.returncode == 1
    done, table = run(BROKEN, "fuzz-sound")
    assert table == {"fuzz-sound": (4, 4, 0, 0)} and done.returncode == 0
    done, _ = run(BROKEN, "nothing")
    assert done.returncode == 1 and "a part must be one of" in done.stderr


TORN = """
import sys
from dataclasses import replace
from pathlib import Path
from deploy import atomic, staging
from scripts.attacks import __main__, crew, faults

def plainly(path, fill):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fill(Path(path))
    return Path(path)

def write(path, data):
    return plainly(path, lambda place: place.write_bytes(data))

crew.warm()
atomic.write_with, atomic.write_bytes = plainly, write
staging.Stage.inside = property(lambda self: self.folder)
staging.Stage.publish = lambda self, complete=lambda: None: complete()
staging.Stage.end = lambda self: None
parts = {part.name: replace(part, short=6) for part in faults.PARTS}
sys.exit(__main__.main(["faults-disk"], parts=parts))
"""


@pytest.mark.slow
def test_a_build_that_writes_in_place_is_found():
    done, table = run(TORN)
    tried, _, _, failed = table["faults-disk"]
    assert tried == 6 and failed > 0 and done.returncode == 1, done.stdout


QUICK = """
import sys
from dataclasses import replace
from scripts.attacks import __main__
from scripts.attacks.parts import PARTS

few = {name: replace(part, short=int(sys.argv[1])) for name, part in PARTS.items()}
sys.exit(__main__.main(sys.argv[2:], parts=few))
"""


SOME = sorted(name.removeprefix("fuzz-") for name in PARTS if name.startswith("fuzz-"))


@pytest.mark.slow
def test_readers_survive_or_refuse_a_few_changed_inputs():
    done, table = run(QUICK, "16", *(f"fuzz-{name}" for name in SOME))
    assert done.returncode == 0, done.stdout
    assert len(table) == len(SOME) and all(row[0] == 16 for row in table.values())
    assert sum(row[1] for row in table.values()) > 9 < sum(row[2] for row in table.values())


@pytest.mark.slow
def test_the_other_parts_find_nothing_in_two_cases():
    done, table = run(QUICK, "2", "faults-memory", "kills", "soak", "outputs")
    assert done.returncode == 0 and {row[0] for row in table.values()} == {2}, done.stdout


@pytest.mark.parametrize(
    ("ended", "word"),
    [
        (Ended(0), SURVIVED),
        (Ended(0, b"a table\n\xc3\xa9\n"), SURVIVED),
        (Ended(1, b"", b"calib8: error: a rule, what was got\n"), REFUSED),
        (Ended(1, b"", b"calib8: 1/7 a: 3 s left\ncalib8: error: what was got\n"), REFUSED),
        (Ended(1, b"", b"calib8: 1/7 a: 1 min 3 s\n"), FAILED),
        (Ended(1, b"", b"bar |##|\r\ncalib8: error: what was got\n"), FAILED),
        (Ended(1, b"what differs\n"), REFUSED),
        (Ended(130, b"", b"calib8: interrupted\n"), FAILED),
        (Ended(70, b"", b"calib8: a fault\n"), FAILED),
        (Ended(1), FAILED),
        (Ended(-11), FAILED),
        (Ended(1, b"", b"Error: of another\n"), FAILED),
        (Ended(1, b"", b"calib8: one\ncalib8: two\n"), FAILED),
        (Ended(0, b"\x9b1m"), FAILED),
        (Ended(0, "\u202e".encode()), FAILED),
        (Ended(1, b"", b"calib8: error: " + b"n" * 9000), FAILED),
    ],
)
def test_an_end_is_judged_by_what_a_user_sees(ended, word):
    assert judged(ended).word == word


def test_changes_come_from_the_seed_alone_and_use_every_way():
    data, other = bytes(range(256)), b'{"a": 1.5}'

    def some(seed):
        return [mutated(random.Random(f"{seed}/{n}"), data, other) for n in range(300)]

    assert some(1) == some(1) != some(2)
    assert len(set(some(1))) > 250 and any(token in one for one in some(1) for token in TOKENS[:9])
    for change in CHANGES:
        changed = {change(random.Random(n), json.dumps([1, 2.5]).encode(), other) for n in range(9)}
        assert len(changed) > 1, change
        assert change(random.Random(0), b"", b"") is not None
