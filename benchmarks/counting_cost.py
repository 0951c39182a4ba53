"""What counting a value and searching a range cost: C++ beside Python beside a plain C loop.

    cmake --preset release && cmake --build --preset release --target parity      (in cpp/)
    OMP_NUM_THREADS=1 python benchmarks/counting_cost.py [--rounds 9]

64 tensors of 262,144 values, 64 MB, so that values come from memory: two thirds behind a ReLU (half
of their values are 0), one third signed. CPU time of one thread; all sides take turns, and a figure
is the median over the rounds. Only ratios are worth comparing between machines.

The plain loops are `counting_plain.c`. The kernel is compiled as installing compiles it; every way
of it that this CPU knows is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from calibrators import kernel
from calibrators.histogram import BINS, Histogram
from calibrators.searches import SEARCHES

ROOT = Path(__file__).resolve().parents[1]
TENSORS, SIZE = 64, 1 << 18
METHODS = ("mse", "entropy", "percentile", "minmax")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-shared", "-fPIC")
Times = dict[str, float]  # what was done -> CPU seconds for all tensors


def tensors() -> np.ndarray:
    """[TENSORS, SIZE] float32 of different spreads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TENSORS, SIZE), np.float32) * rng.uniform(0.2, 8, (TENSORS, 1))
    x[: TENSORS * 2 // 3] = np.maximum(x[: TENSORS * 2 // 3], 0)
    return x.astype(np.float32)


def compiled(source: Path, folder: Path) -> Path:
    """A C file as a library."""
    library = folder / f"{source.stem}.so"
    subprocess.run(["cc", *FLAGS, "-o", library, source, "-lm"], check=True)
    return library


def plain(library: ctypes.CDLL, x: np.ndarray, found: list[Histogram]) -> Times:
    """The plain loops, which are told the range."""
    counts, extremes = np.zeros(2 * BINS + 1, np.int64), np.zeros(2, np.float32)
    library.plain_count.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]
    library.plain_count.argtypes += [ctypes.c_void_p, ctypes.c_void_p]
    start = time.process_time()
    for row, one in zip(x, found, strict=True):
        scale = BINS / one.full_range
        library.plain_count(row.ctypes.data, SIZE, scale, counts.ctypes.data, extremes.ctypes.data)
    times = {"count": time.process_time() - start}
    start = time.process_time()
    for one in found:
        library.plain_entropy(ctypes.c_void_p(one.magnitudes(2048).ctypes.data))
    return {**times, "entropy": time.process_time() - start}


def counting(way: kernel.CountingKernel | None, x: np.ndarray, found: list[Histogram]) -> Times:
    """Python, by one way of the kernel or without it."""
    kernel.kernel = lambda: way  # type: ignore[assignment]
    start = time.process_time()
    for row, one in zip(x, found, strict=True):
        one.observe(row)
    return {"count": time.process_time() - start}


def searching(found: list[Histogram]) -> Times:
    """Python's searches."""
    times = {}
    for name in METHODS:
        search, start = SEARCHES[name], time.process_time()
        for one in found:
            search.function(one, search.params())
        times[name] = time.process_time() - start
    return times


def cpp(program: subprocess.Popen[str], path: Path) -> Times:
    """The C++ library's."""
    question = {"op": "cost", "path": str(path), "size": SIZE, "searches": METHODS}
    assert program.stdin and program.stdout
    program.stdin.write(json.dumps(question) + "\n")
    program.stdin.flush()
    return dict(json.loads(program.stdout.readline()))


def measured(rounds: int, parity: Path) -> dict[str, Times]:
    """Side -> medians; the first round is not counted."""
    x = tensors()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x.tofile(folder / "x.f32")
        loops = ctypes.CDLL(str(compiled(Path(__file__).with_name("counting_plain.c"), folder)))
        ways = kernel.load_kernels(compiled(ROOT / "cpp/src/kernel/count.c", folder))
        program = subprocess.Popen(
            [parity], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found = [Histogram() for _ in x]
        counting(None, x, found)
        sides: dict[str, Callable[[], Times]] = {
            "plain C": lambda: plain(loops, x, found),
            "C++": lambda: cpp(program, folder / "x.f32"),
            "Python, no kernel": lambda: {**counting(None, x, found), **searching(found)},
        }
        for way in ways:
            sides[f"Python, {way.name}"] = lambda way=way: counting(way, x, found)
        taken: dict[str, list[Times]] = {side: [] for side in sides}
        for _ in range(rounds + 1):
            for side, run in sides.items():
                taken[side].append(run())
        program.communicate("")
    return {
        side: {what: statistics.median(t[what] for t in times[1:]) for what in times[0]}
        for side, times in taken.items()
    }


def table(times: dict[str, Times]) -> str:
    """Markdown: ns a value, ms a search."""
    lines = [f"| CPU time | count a value | {' | '.join(METHODS)} |", "| --- " * 6 + "|"]
    for side, own in times.items():
        cells = [f"{own['count'] / (TENSORS * SIZE) * 1e9:.2f} ns"]
        cells += [f"{own[m] / TENSORS * 1e3:.2f} ms" if m in own else "" for m in METHODS]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parity", type=Path, default=ROOT / "build/cpp-release/tests/parity")
    asked: Any = parser.parse_args()
    print(table(measured(asked.rounds, asked.parity)))


if __name__ == "__main__":
    main()
