"""Mutation testing: change one expression at a time, and run the tests that execute its line.

The tests that are not slow run once under coverage, which gives the map: line -> tests, with the
seconds of each test. The map is kept in build/mutate. Where a source file changed it is measured
again; where only test files changed, those alone run again. Then each mutant runs in a throwaway
copy of the checkout, in a process forked from this one, which has numpy and onnxruntime loaded.
The same seed gives the same mutants as long as the sources are the same.

Mutants that no caller can tell from the original are listed in scripts/mutate_equivalent.txt and
never chosen: file, line before (-), line after (+), reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import cv2  # noqa: F401 - loaded once, before the forks
import numpy  # noqa: F401
import onnx  # noqa: F401
import onnxruntime  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTATED = ("calibrators", *(f"deploy/{r}" for r in ("calibration", "graph", "targets", "metrics")))
MAP, TESTS, ROWS = (
    ROOT / "build/mutate" / name for name in ("lines.coverage", "tests.json", "rows.jsonl")
)
CPU_S = 40.0  # of tests for one mutant: the cheapest ones, as the map measured them
NEAR = 4  # test files that run first: the module's own, and those with most tests of the line

_COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Pow: "*",
    ast.Mod: "//",
}  # fmt: skip
# an assertion, what a debugger shows, and the size that numpy finds, which may be any below 0
_NO_MATTER = re.compile(r"strict=False|repr=True|reshape\(.*-2\)")


class Mutant(NamedTuple):
    """One changed expression: bytes `start` to `end` of a file become `new`."""

    file: str
    line: int
    kind: str
    before: str  # the source lines of the expression, with single blanks: these, the file and
    after: str  # `after` say which mutant it is, wherever the lines move
    start: int
    end: int
    new: str
    statement: tuple[int, int]  # first and last line of the statement, or of its head
    names: tuple[str, ...]  # what it defines, if it runs at import or its result is cached


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its text."""
    raw = (ROOT / file).read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def code(node: ast.AST) -> str:
        return raw[slice(*span(node))].decode()

    def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                yield "compare", node, f"({code(left)} {_COMPARE[type(op)]} {code(right)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                if not _is_text(left) and not _is_text(right):
                    word = _ARITHMETIC[type(op)]
                    yield "arithmetic", node, f"({code(left)} {word} {code(right)})"
            case ast.Constant(value=bool(value)):
                yield "constant", node, str(not value)
            case ast.Constant(value=int(value)):
                yield "constant", node, str(value + 1)
            case ast.Constant(value=float(value)):
                yield "constant", node, str(value * 2 or 1.0)
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield "logic", node, "(" + word.join(f"({code(value)})" for value in values) + ")"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "logic", node, f"bool({code(operand)})"
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield "branch", test, f"(not ({code(test)}))"
            case ast.Return(value=ast.expr() as value) if code(value) != "None":
                truth = isinstance(value, ast.Compare | ast.BoolOp) or code(value) in "True False"
                yield "return", value, f"(not ({code(value)}))" if truth else "None"
            case ast.Expr(value=ast.Call()):
                yield "call", node, "pass"

    def walk(
        node: ast.AST, statement: tuple[int, int], names: tuple[str, ...] | None
    ) -> Iterator[Mutant]:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            last = _first_line(body[0]) - 1 if body else node.end_lineno or 0
            statement = node.lineno, max(node.lineno, last)
        if isinstance(node, ast.If) and code(node.test) == "TYPE_CHECKING":
            return
        for kind, part, new in changed(node):
            start, end = span(part)
            first, last = raw.rfind(b"\n", 0, start) + 1, raw.find(b"\n", end)
            texts = raw[first:last], raw[first:start] + new.encode() + raw[end:last]
            before, after = (" ".join(text.decode().split()) for text in texts)
            line = raw.count(b"\n", 0, start) + 1
            yield Mutant(file, line, kind, before, after, start, end, new, statement, names or ())
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            called = isinstance(node, ast.FunctionDef) and field == "body" and not _cached(node)
            below = None if called or names is None else names + _defined(node)
            for child in value if isinstance(value, list) else [value]:
                # the words of errors and messages are not what this is about
                if isinstance(child, ast.AST) and not isinstance(
                    child, ast.Raise | ast.Assert | ast.JoinedStr
                ):
                    yield from walk(child, statement, below)

    yield from walk(ast.parse(raw), (1, 1), ())


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _cached(node: ast.FunctionDef) -> bool:
    return any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)


def _defined(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [node for target in targets if target for node in ast.walk(target)]
    return tuple(node.id for node in names if isinstance(node, ast.Name))


def _first_line(node: ast.AST) -> int:
    """The first line of a statement or of a case, decorators included."""
    return min(int(n.lineno) for n in ast.walk(node) if hasattr(n, "lineno"))


class Watch:
    """A plugin of pytest: the seconds of each test, and which did not pass.

    With `order`, these tests alone run, in this order.
    """

    def __init__(self, order: list[str] | None = None) -> None:
        self.order = order and {test: number for number, test in enumerate(order)}
        self.seconds, self.others = defaultdict[str, float](float), dict[str, None]()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:  # noqa: D102
        if order := self.order:
            wanted = [item for item in items if item.nodeid in order]
            items[:] = sorted(wanted, key=lambda item: order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:  # noqa: D102
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.others[report.nodeid] = None


def run_pytest(
    copy: Path, words: list[str], order: list[str] | None = None, cpu_s: float = 0
) -> tuple[int, dict[str, float], list[str]]:
    """Run pytest in a forked child: code (minus a signal), seconds of tests, those not passed."""
    told = copy / "mutate.json"
    told.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setpgid(0, 0)
            os.chdir(copy)
            os.environ["PYTHONPATH"] = f"{copy}{os.pathsep}{os.environ['PYTHONPATH']}"
            os.dup2(os.open("mutate.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            if cpu_s:
                resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))
                signal.alarm(int(5 * cpu_s))  # where it waits for what never comes
            watch = Watch(order)
            words = ["-q", "-p", "no:cacheprovider", f"--basetemp={copy / 'tmp'}", *words]
            code = int(pytest.main(words, [watch]))
            told.write_text(json.dumps([watch.seconds, list(watch.others)]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests left running
    seconds, others = json.loads(told.read_text()) if told.exists() else ({}, [])
    return code, seconds, others


def copy_into(folder: Path) -> Path:
    """Copy the checkout as it stands, with the compiled kernel."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    kernels = [f"calibrators/{path.name}" for path in (ROOT / "calibrators").glob("*.so")]
    for name in [*filter(None, os.fsdecode(listed).split("\0")), *kernels]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def measure(workers: int) -> dict[str, float]:
    """Bring the map up to date: the seconds of every test that passes and is not slow."""

    def digest(*files: Path) -> str:
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()

    rooms = (*ROOT.glob("calibrators/**/*.py"), *ROOT.glob("deploy/**/*.py"))
    product = digest(*rooms, ROOT / "tests" / "conftest.py")
    now = {f"tests/{path.name}": digest(path) for path in ROOT.glob("tests/test_*.py")}
    known: dict[str, Any] = json.loads(TESTS.read_text()) if TESTS.exists() else {}
    if known.get("product") != product:
        known = {"files": {}, "seconds": {}}
        MAP.unlink(missing_ok=True)
    new = sorted(file for file in now if known["files"].get(file) != now[file])
    seconds = {t: s for t, s in known["seconds"].items() if t.split("::")[0] in set(now) - set(new)}
    if new:
        print(f"mutate: running the tests of {len(new)} files for the map", file=sys.stderr)
        with tempfile.TemporaryDirectory() as name:
            folder = copy_into(Path(name))
            source = "\n  ".join(MUTATED)
            (folder / "rc").write_text(f"[run]\nrelative_files = true\nsource =\n  {source}\n")
            words = ["-n", str(workers), "-m", "not slow", "--cov", "--cov-config=rc"]
            words += ["--cov-context=test", "--cov-report="]
            words += ["-W", "ignore::coverage.exceptions.CoverageWarning"]
            code, measured, others = run_pytest(folder, [*words, *new])
            log = (folder / "mutate.log").read_text()
            if not measured or not (folder / ".coverage").exists():
                sys.exit(f"mutate: the tests of the map ended with {code}:\n{log}")
            print(log.rpartition("\n\n")[2], file=sys.stderr)
            MAP.parent.mkdir(parents=True, exist_ok=True)
            lines, fresh = (coverage.CoverageData(str(p)) for p in (MAP, folder / ".coverage"))
            lines.read()  # or the first update would empty it
            fresh.read()
            lines.update(fresh)
        seconds |= {test: s for test, s in measured.items() if test not in others}
        TESTS.write_text(json.dumps({"product": product, "files": now, "seconds": seconds}))
    return seconds


@cache
def _contexts(file: str) -> dict[int, set[str]]:
    """Line -> the tests that execute it, as "test|setup", "test|run" or "test|teardown"."""
    data = coverage.CoverageData(str(MAP))
    data.read()
    return {n: set(names) - {""} for n, names in data.contexts_by_lineno(file).items()}


def tests_of(mutant: Mutant, seconds: dict[str, float], sources: list[str]) -> list[str]:
    """The tests that execute a line; of one that runs at import, those that use what it defines."""
    first, last = mutant.statement
    places = {(mutant.file, n) for n in range(first, last + 1)}
    files = set()  # of which all tests may see it
    if mutant.names:
        word = re.compile(r"\b(" + "|".join(map(re.escape, mutant.names)) + r")\b")
        for file in sources:
            lines = (ROOT / file).read_text().splitlines()
            places |= {(file, n) for n, line in enumerate(lines, 1) if word.search(line)}
        written = {test.split("::")[0] for test in seconds}
        files = {file for file in written if word.search((ROOT / file).read_text())}
    found = {name for file, n in places for name in _contexts(file).get(n, ())}
    if mutant.names and not found:
        found = {name for names in _contexts(mutant.file).values() for name in names}
    # a fixture may be made once for all tests of a file
    files |= {name.split("::")[0] for name in found if name.endswith("|setup")}
    exact = {name.rpartition("|")[0] for name in found}
    return [test for test in seconds if test in exact or test.split("::")[0] in files]


def judge(
    mutant: Mutant, copy: Path, tests: list[str], seconds: dict[str, float], *, times: Iterator[int]
) -> str:
    """Run the tests of a mutant in a copy: what killed it, or nothing if it survives.

    A test that fails kills if it fails alone too, and passes alone without the mutant: not one that
    depends on the tests before it.
    """
    path, whole = copy / mutant.file, (ROOT / mutant.file).read_bytes()
    changed = whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :]

    def ran(batch: list[str], *, mutated: bool) -> tuple[int, list[str]]:
        path.write_bytes(changed if mutated else whole)
        time = next(times)
        os.utime(path, (time, time))  # so that the bytecode of no other mutant is taken
        limit = 20 + 3 * sum(seconds[test] for test in batch)
        files = sorted({test.split("::")[0] for test in batch})
        code, _, others = run_pytest(copy, ["-x", "--tb=no", *files], batch, limit)
        return (0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code), others

    left, ranked = CPU_S, list[str]()
    for test in sorted(tests, key=seconds.__getitem__):
        left -= seconds[test]
        if left > 0 or not ranked:
            ranked.append(test)
    count = Counter(test.split("::")[0] for test in ranked)
    own = Path(mutant.file).stem
    near = set(sorted(count, key=lambda file: (own not in file, -count[file]))[:NEAR])
    for files in (near, set(count) - near):
        batch = [test for test in ranked if test.split("::")[0] in files]
        while batch:
            code, others = ran(batch, mutated=True)
            if not code:
                break
            if not others:
                return f"the end of pytest with {code}"
            alone = others[-1:]
            if ran(alone, mutated=True)[0] and not ran(alone, mutated=False)[0]:
                return alone[0]
            batch.remove(alone[0])
    return ""


def run(plan: list[Mutant], seconds: dict[str, float], workers: int, sources: list[str]) -> None:
    """Judge every mutant of the plan, and write a row of each into ROWS."""

    def run_one(number: int, mutant: Mutant, copy: Path) -> None:
        tests = tests_of(mutant, seconds, sources)
        killer = judge(mutant, copy, tests, seconds, times=itertools.count(1000 * number))
        shutil.copy2(ROOT / mutant.file, copy / mutant.file)
        with ROWS.open("a") as rows:
            row = mutant._asdict() | {"tests": len(tests), "killer": killer}
            rows.write(json.dumps(row) + "\n")
        words = f"killed by {killer}" if killer else f"survived {len(tests)} tests"
        print(f"{number}/{len(plan)} {mutant.file}:{mutant.line} {words}", flush=True)

    ROWS.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        free = [copy_into(Path(name) / str(number)) for number in range(workers)]
        running: dict[int, Path] = {}
        for number, mutant in enumerate(plan, 1):
            if not free:
                free.append(running.pop(os.wait()[0]))
            copy = free.pop()
            child = os.fork()
            if not child:
                try:
                    run_one(number, mutant, copy)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            running[child] = copy
        while running:
            running.pop(os.wait()[0])


def choose(count: int, seed: int, files: list[str]) -> list[Mutant]:
    """Choose mutants: a file by its length, then a kind, then one of that kind."""
    text = (ROOT / "scripts" / "mutate_equivalent.txt").read_text()
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith(MUTATED)]
    equivalent = {(file, before, after) for file, before, after, *_ in blocks}
    dice, made, plan = random.Random(seed), dict[str, list[Mutant]](), dict[Mutant, None]()
    lengths = [(ROOT / file).read_bytes().count(b"\n") for file in files]
    for _ in range(20 * count):
        file = dice.choices(files, lengths)[0]
        made[file] = made.get(file) or list(mutants(file))
        if not made[file]:
            continue
        kind = dice.choice(sorted({mutant.kind for mutant in made[file]}))
        one = dice.choice([m for m in made[file] if m.kind == kind])
        harmless = _NO_MATTER.search(one.after) and not _NO_MATTER.search(one.before)
        if not harmless and (file, "- " + one.before, "+ " + one.after) not in equivalent:
            plan[one] = None
        if len(plan) == count:
            break
    return list(plan)


def main() -> None:
    """Choose mutants, run them, and print the survivors and the score."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("--count", type=int, default=100, help="number of mutants [100]")
    ask.add_argument("--seed", type=int, default=1, help="of the random choice [1]")
    ask.add_argument("--only", default="*", metavar="GLOB", help="files, as 'deploy/graph/*'")
    ask.add_argument("--workers", type=int, default=os.cpu_count(), help="processes [cores]")
    ask.add_argument("--redo", action="store_true", help="the survivors of the last run again")
    given = ask.parse_args()
    paths = [path for room in MUTATED for path in (ROOT / room).glob("**/*.py")]
    sources = sorted(str(path.relative_to(ROOT)) for path in paths)
    seconds = measure(given.workers)

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in ROWS.read_text().splitlines()]

    if given.redo:
        alive = {(row["file"], row["before"], row["after"]) for row in rows() if not row["killer"]}
        files = sorted({file for file, *_ in alive})
        plan = [m for f in files for m in mutants(f) if (f, m.before, m.after) in alive]
    else:
        plan = choose(given.count, given.seed, fnmatch.filter(sources, given.only))
    run(plan, seconds, given.workers, sources)
    done = sorted(rows(), key=lambda row: (row["file"], row["line"]))
    for row in done:
        if not row["killer"]:
            print("\n{file}:{line} {kind}, {tests} tests\n- {before}\n+ {after}".format(**row))
    killed = sum(bool(row["killer"]) for row in done)
    print(f"\nkilled {killed} of {len(done)} mutants: {killed / max(len(done), 1):.0%}")


if __name__ == "__main__":
    main()
