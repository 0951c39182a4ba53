"""`scripts/attack`: everything that calib8 reads and everything that can happen to it, tried."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scripts.attacks.crew import Found, attack
from scripts.attacks.outcome import FAILED, REFUSED, SURVIVED
from scripts.attacks.part import Part

_KINDS = 8  # of failures of a part, one of each is shown
_OWN = re.compile(r"[0-9]+|'[^']*'|/[^ ]*")  # what tells failures of one kind apart


def main(argv: Sequence[str] | None = None, *, parts: Mapping[str, Part] | None = None) -> int:
    """Attack, print the table; gives the exit code: 1 where anything failed."""
    from scripts.attacks.parts import PARTS, SKIPPED

    known = PARTS if parts is None else parts
    asked = _parser().parse_args(argv)
    chosen = [known[name] for name in _named(asked.parts, known)]
    folder = Path(tempfile.mkdtemp(prefix="calib8-attack-"))
    started = time.monotonic()
    found = attack(
        chosen,
        seed=asked.seed,
        long=asked.long,
        workers=asked.workers,
        folder=folder,
        case=asked.case,
        ended=lambda name, one: print(_row(name, one), file=sys.stderr, flush=True),
    )
    print(table(found))
    for name, why in SKIPPED.items():
        print(f"{name} was not tried: {why}")
    print(f"{time.monotonic() - started:.0f} s with {asked.workers} workers, seed {asked.seed}")
    failures = list(told(found, asked.seed, long=asked.long))
    print("\n".join(failures), end="\n" if failures else "")
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument("parts", nargs="*", help="such as fuzz, fuzz-npy or kills; default: all")
    parser.add_argument("--long", action="store_true", help="four thousand times as many changes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one of a part alone")
    # one more than cores: they wait for processes and signals now and then
    parser.add_argument("--workers", type=int, default=1 + (os.cpu_count() or 1))
    return parser


def _named(asked: Sequence[str], known: Mapping[str, Part]) -> list[str]:
    """Names of parts; the beginning of a name, up to a dash, means all of them."""
    if not asked:
        return list(known)
    chosen = []
    for word in asked:
        fitting = [name for name in known if name == word or name.startswith(f"{word}-")]
        if not fitting:
            raise SystemExit(f"a part must be one of {', '.join(known)}, got {word!r}")
        chosen += fitting
    return list(dict.fromkeys(chosen))


def table(found: Mapping[str, Found]) -> str:
    """One line a part."""
    lines = [f"{'part':16}{'tried':>9}{'survived':>10}{'refused':>9}{'failed':>8}{'seconds':>9}"]
    return "\n".join([*lines, *(_row(name, one) for name, one in found.items())])


def _row(name: str, one: Found) -> str:
    counts = [one.counts.get(word, 0) for word in (SURVIVED, REFUSED, FAILED)]
    columns = f"{sum(counts):9,}{counts[0]:10,}{counts[1]:9,}{counts[2]:8,}"
    return f"{name:16}{columns}{one.seconds:9.1f}"


def told(found: Mapping[str, Found], seed: int, *, long: bool) -> Iterator[str]:
    """The failures in words, the first of each kind, with what repeats it."""
    for name, one in found.items():
        kinds: dict[str, list[dict[str, object]]] = {}
        for row in one.failures:
            kinds.setdefault(_OWN.sub("", str(row["why"]))[:40], []).append(row)
        for rows in list(kinds.values())[:_KINDS]:
            again = f"scripts/attack {name}{' --long' if long else ''} --seed {seed}"
            kept = f"; kept: {rows[0]['kept']}" if rows[0]["kept"] else ""
            more = f" ({len(rows)} of this kind)" if len(rows) > 1 else ""
            yield f"FAILED {name}{more}: {rows[0]['why']}{kept}; {again} --case {rows[0]['case']}"
        if len(kinds) > _KINDS:
            yield f"FAILED {name}: and {len(kinds) - _KINDS} other kinds"


if __name__ == "__main__":
    sys.exit(main())
