"""Run calib8's command line as a checkout has it, and measure the process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OWN = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command that ended.

    Attributes:
        code: exit status.
        said: standard output and error together.
        cpu_s: seconds of user and system time, of the process and of what it waited for.
        wall_s: seconds by the clock.
        rss_mb: largest resident memory of one process, in MB.
    """

    code: int
    said: str
    cpu_s: float
    wall_s: float
    rss_mb: float

    @property
    def last_line(self) -> str:
        """What it said last; an error ends in its sentence."""
        lines = [line for line in self.said.splitlines() if line.strip()]
        return lines[-1] if lines else f"nothing, status {self.code}"


def calib8(checkout: Path, words: Sequence[str], folder: Path) -> Run:
    """`python -m deploy WORDS` with the packages of `checkout`, in `folder`."""
    return run([sys.executable, "-m", "deploy", *words], checkout, folder)


def run(command: Sequence[str], checkout: Path, folder: Path) -> Run:
    """Any command that imports the packages of `checkout` before installed ones."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return Run(
            code=process.returncode,
            said=said.read(),
            cpu_s=used.ru_utime + used.ru_stime,
            wall_s=wall_s,
            rss_mb=_megabytes(used),
        )


def _megabytes(used: resource.struct_rusage) -> float:
    return used.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def check(checkout: Path) -> None:
    """Refuse a folder whose packages are not the ones that are imported.

    Raises:
        SystemExit: with a sentence.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = run(
            [sys.executable, "-c", "import deploy; print(deploy.__file__)"], checkout, Path(folder)
        )
    if told.last_line != str(checkout / "deploy" / "__init__.py"):
        sys.exit(f"{checkout} must be a checkout of calib8, got deploy from {told.last_line}")
