"""What a worker counts, in memory that it shares with who started it: a crash loses nothing."""

from __future__ import annotations

import json
import mmap
import shutil
import time
from pathlib import Path

from scripts.attacks.outcome import FAILED, REFUSED, SURVIVED, Outcome

_WORDS = (SURVIVED, REFUSED, FAILED)
_AT, _BEAT = len(_WORDS), len(_WORDS) + 1


class Tally:
    """Counts of one part by word, the case that is being tried, and its failures in a file."""

    def __init__(self, folder: Path) -> None:
        self._held = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.folder = folder

    def begin(self, case: int) -> None:
        """A case begins now."""
        self._held[_AT] = case
        self._held[_BEAT] = time.monotonic_ns()

    def end(self, outcome: Outcome) -> None:
        """It ended; a failure is written down with what was kept of it."""
        self._held[_WORDS.index(outcome.word)] += 1
        if outcome.word == FAILED:
            self._write(outcome)

    def _write(self, outcome: Outcome) -> None:
        kept = self.folder / f"kept-{self.at}"
        if isinstance(outcome.kept, bytes):
            kept.write_bytes(outcome.kept)
        elif outcome.kept is not None and outcome.kept.is_dir():
            shutil.copytree(outcome.kept, kept, dirs_exist_ok=True, symlinks=True)
        elif outcome.kept is not None and outcome.kept.is_file():
            shutil.copyfile(outcome.kept, kept)
        row = {"case": self.at, "why": outcome.why, "kept": str(kept) if kept.exists() else ""}
        with (self.folder / "failures.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def at(self) -> int:
        """The case that is tried, or was tried last."""
        return self._held[_AT]

    @property
    def silent_s(self) -> float:
        """Seconds since it began."""
        return (time.monotonic_ns() - self._held[_BEAT]) / 1e9

    @property
    def counts(self) -> dict[str, int]:
        """Word -> how often."""
        return {word: self._held[place] for place, word in enumerate(_WORDS)}

    @property
    def failures(self) -> list[dict[str, object]]:
        """Rows of `case`, `why` and `kept`."""
        path = self.folder / "failures.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]
