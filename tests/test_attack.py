"""The attack itself: what is broken is found, what is sound is not accused."""

import json
import random
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from scripts.attacks.fields import changed_fields
from scripts.attacks.forms import forms
from scripts.attacks.mutate import CHANGES, TOKENS, mutated
from scripts.attacks.outcome import FAILED, REFUSED, SURVIVED, Ended, judged

ROOT = Path(__file__).parents[1]


def parse_table(output):
    rows = [line.split() for line in output.splitlines()]
    return {row[0]: tuple(map(int, row[1:5])) for row in rows if len(row) == 6 and row[1].isdigit()}


@pytest.fixture(scope="module")
def attack_faulty_parts():
    """A command line of the attack on these parts -> its exit code, what it prints, its table."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faulty_attack_parts"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:

        def attack(arguments):
            child.stdin.write(f"{arguments}\n")
            child.stdin.flush()
            code, output = json.loads(child.stdout.readline())
            return code, output, parse_table(output)

        yield attack
        child.stdin.close()
    assert child.wait() == 0


@pytest.mark.slow
def test_every_fault_is_found_and_named(attack_faulty_parts):
    code, output, table = attack_faulty_parts("--seed 3")
    assert code == 1
    assert table.pop("fuzz-sound") == (4, 4, 0, 0)
    assert table.pop("fuzz-refusing") == (4, 0, 4, 0)
    dying = table.pop("fuzz-dying")  # a process that dies is replaced; no case is lost
    assert dying[0] == 4
    assert dying[1] > 0
    assert dying[3] > 0
    assert dying[1] + dying[3] == 4
    assert set(table.values()) == {(4, 0, 0, 4)}
    assert len(table) == 6
    for finding in (
        "FAILED fuzz-faulty (4 of this kind): exit code 70",
        "IndexError",
        "stderr holds '\\x1b'",
        "stdout holds '\\u202e'",
        "no one sentence but 2 lines",
        "bytes of input needed over 2 GiB",
        "exit code -14",
        "the process died: signal 6",
        "scripts/attack fuzz-dying --seed 3 --case",
    ):
        assert finding in output, finding
    failure_line = next(
        line for line in output.splitlines() if line.startswith("FAILED fuzz-dying")
    )
    assert Path(failure_line.split("kept: ")[1].split(";")[0]).read_bytes() == b"die"


@pytest.mark.slow
def test_single_case_repeats_its_failure(attack_faulty_parts):
    _, output, _ = attack_faulty_parts("fuzz-dying --seed 5 --workers 1")
    case = next(line for line in output.splitlines() if line.startswith("FAILED")).rpartition(" ")[
        2
    ]
    code, _, table = attack_faulty_parts(f"fuzz-dying --seed 5 --case {case}")
    assert table == {"fuzz-dying": (1, 0, 0, 1)}
    assert code == 1
    code, _, table = attack_faulty_parts("fuzz-sound")
    assert table == {"fuzz-sound": (4, 4, 0, 0)}
    assert code == 0
    code, _, _ = attack_faulty_parts("nothing")
    assert "a part must be one of" in code


UNSAFE_WRITES = """
import sys
from dataclasses import replace
from pathlib import Path
from deploy.files import atomic, staging
from scripts.attacks import __main__, crew, faults

def plainly(path, fill):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fill(Path(path))
    return Path(path)

def write(path, data):
    return plainly(path, lambda place: place.write_bytes(data))

crew.warm()
atomic.write_with, atomic.write_bytes = plainly, write
staging.Stage.temporary_folder = property(lambda self: self.folder)
staging.Stage.publish = lambda self, complete=lambda: None: complete()
staging.Stage.close = lambda self: None
parts = {part.name: replace(part, short=3) for part in faults.PARTS}
sys.exit(__main__.main(["faults-disk"], parts=parts))
"""


@pytest.mark.slow
@pytest.mark.release
def test_build_writing_in_place_is_found():
    process = subprocess.run(
        [sys.executable, "-c", UNSAFE_WRITES], cwd=ROOT, capture_output=True, text=True
    )
    tried_cases, _, _, failed_cases = parse_table(process.stdout)["faults-disk"]
    assert tried_cases == 3, process.stdout + process.stderr
    assert failed_cases > 0, process.stdout + process.stderr
    assert process.returncode == 1, process.stdout + process.stderr


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
        (Ended(1, b"", b"calib8: ascend failed: a\ncalib8: tensorrt: doubtful: b\n"), REFUSED),
        (Ended(1, b"", b"calib8: ascend failed: a\ncalib8: ascend failed: b\n"), FAILED),
        (Ended(130, b"", b"calib8: interrupted\n"), FAILED),
        (Ended(70, b"", b"calib8: a fault\n"), FAILED),
        (Ended(1, b"", b"calib8: ascend failed: a fault of calib8 itself (KeyError)\n"), FAILED),
        (Ended(1), FAILED),
        (Ended(-11), FAILED),
        (Ended(1, b"", b"Error: of another\n"), FAILED),
        (Ended(1, b"", b"calib8: one\ncalib8: two\n"), FAILED),
        (Ended(0, b"\x9b1m"), FAILED),
        (Ended(0, "\u202e".encode()), FAILED),
        (Ended(1, b"", b"calib8: error: " + b"n" * 9000), FAILED),
    ],
)
def test_outcome_follows_from_visible_output(ended, word):
    assert judged(ended).word == word


@pytest.mark.slow
def test_mutations_follow_the_seed(tmp_path):
    data = bytes(range(256))
    other_data = b'{"a": 1.5}'

    def mutants_of(seed):
        return [mutated(random.Random(f"{seed}/{n}"), data, other_data) for n in range(300)]

    mutants = mutants_of(1)
    assert mutants == mutants_of(1) != mutants_of(2)
    assert len(set(mutants)) > 250
    assert any(token in mutant for mutant in mutants for token in TOKENS[:9])
    seeds = forms(tmp_path)

    def models_of(seed):
        numbers = (random.Random(f"{seed}/{n}") for n in range(50))
        return [changed_fields(rng, rng.choice(seeds), rng.choice(seeds)) for rng in numbers]

    models = models_of(1)
    assert models == models_of(1) != models_of(2)
    assert len(set(models) - set(seeds)) > 40
    for model in models:
        onnx.ModelProto.FromString(model)
    for change in CHANGES:
        changed = {
            change(random.Random(n), json.dumps([1, 2.5]).encode(), other_data) for n in range(9)
        }
        assert len(changed) > 1, change
        assert change(random.Random(0), b"", b"") is not None
