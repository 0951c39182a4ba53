"""Many images on a small model: one process beside 1, 2 and 4 workers of a dask scheduler.

    pip install '.[dask]'
    python benchmarks/dask_workers.py [--images 100000] [--workers 1 2 4]

The bundled Fashion-MNIST network, of whose pictures as many are made by noise as are asked for
(28 x 28, PNG).

Scheduler and workers (one thread each) are processes of their own on this machine, started anew for
each row; the client is `calib8 calibrate`. CPU time is user and system time of client and workers,
memory the peak of each process; a worker's holds the libraries alone before its first piece. The
first row of each number of images runs here, without a scheduler; every cache must have its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "datasets" / "fashion"


@dataclass(frozen=True, slots=True)
class Row:
    """What a run took: seconds of wall and CPU, MB of the client and of the largest worker."""

    images: int
    workers: int
    wall: float
    cpu: float
    client: float
    worker: float


def pictures(folder: Path, count: int) -> list[str]:
    """Names of its own pictures, each again and again with noise of its own."""
    rng = np.random.default_rng(5)
    own = [
        cv2.imread(str(p), cv2.IMREAD_GRAYSCALE) for p in sorted((DATA / "calib").rglob("*.png"))
    ]
    (folder / "pictures").mkdir()
    names = []
    for number in range(count):
        noise = rng.integers(-8, 9, own[0].shape)
        made = np.clip(own[number % len(own)] + noise, 0, 255).astype(np.uint8)
        names.append(f"pictures/{number:06}.png")
        cv2.imwrite(str(folder / names[-1]), made)
    return names


@contextmanager
def dask(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of dask's command line."""
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dask", *words, "--no-dashboard"]
    with (folder / "dask.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=told, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def peak(pid: int) -> float:
    """Peak memory of a process, MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def cpu(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def client(folder: Path, listed: Path, words: list[str]) -> tuple[float, float, float]:
    """(wall, CPU, peak memory) of one calibration."""
    command = [
        sys.executable, "-m", "deploy", "calibrate", str(DATA / "fashion.onnx"), "--images",
        str(listed), "--mean", "0.5", "--std", "0.5", "--quiet", "--refresh",
        "-o", str(folder / "out.cache"), *words,
    ]  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"calib8 ended with {os.waitstatus_to_exitcode(status)}")
    assert isinstance(used, resource.struct_rusage)
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measured(folder: Path, listed: Path, count: int, workers: int) -> Row:
    """One row; of no worker, one process with one thread."""
    if not workers:
        return Row(count, 0, *client(folder, listed, ["--threads", "1"]), 0.0)
    with ExitStack() as stack:
        file = folder / "scheduler.json"
        file.unlink(missing_ok=True)
        told = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        stack.enter_context(dask(folder, "scheduler", *told))
        while not file.exists() or not file.stat().st_size:
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        words = (
            "worker",
            address,
            "--nthreads",
            "1",
            "--no-nanny",
            "--local-directory",
            str(folder),
        )
        there = [stack.enter_context(dask(folder, *words)) for _ in range(workers)]
        client(
            folder, listed, ["--scheduler", address, "--limit", str(8 * workers)]
        )  # libraries are loaded
        before = sum(cpu(one.pid) for one in there)
        wall, own, memory = client(folder, listed, ["--scheduler", address])
        spent = sum(cpu(one.pid) for one in there) - before
        largest = max(peak(one.pid) for one in there)
    return Row(count, workers, wall, own + spent, memory, largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    print("| images | workers | wall, s | speed-up | CPU, s | client, MB | largest worker, MB |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="calib8-dask-") as place:
        folder = Path(place)
        names = pictures(folder, asked.images)
        listed = folder / "list.txt"
        for count in (asked.images // 10, asked.images):
            listed.write_text("".join(f"{name}\n" for name in names[:count]))
            known: list[bytes] = []
            first = 0.0
            for workers in (0, *asked.workers):
                row = measured(folder, listed, count, workers)
                first = first or row.wall
                known.append((folder / "out.cache.npz").read_bytes())
                if known[-1] != known[0]:
                    sys.exit(f"{workers} workers wrote other bytes than one process")
                print(
                    f"| {row.images:,} | {row.workers or 'none'} | {row.wall:.1f} |"
                    f" {first / row.wall:.2f}x | {row.cpu:.1f} | {row.client:.0f} |"
                    f" {row.worker:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
