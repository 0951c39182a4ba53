"""Whether what stands in a folder of outputs is whole: each file by itself, and all together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from deploy.cli import COMMANDS
from scripts.attacks.children import run
from scripts.attacks.outcome import SURVIVED, judged
from scripts.attacks.subject import written


def mixed(out: Path, *allowed: Mapping[str, bytes]) -> str | None:
    """What is neither the one build's nor the other's, or None.

    Args:
        out: the folder.
        allowed: name -> bytes of whole builds; of reports only that they are whole is judged.
    """
    for name, data in written(out).items():
        if not any(one.get(name) == data for one in allowed):
            return f"{name} is of none of the builds ({len(data)} bytes)"
    return _report(out)


def _report(out: Path) -> str | None:
    path, page = out / "report.json", out / "report.html"
    try:
        if path.exists():
            json.loads(path.read_bytes())
    except ValueError as error:
        return f"report.json is not whole: {error}"
    if page.exists() and not page.read_bytes().rstrip().endswith(b"</html>"):
        return "report.html is not whole"
    return None


def leftovers(out: Path) -> list[str]:
    """Temporary files of calib8."""
    return sorted(path.name for path in out.glob(".calib8-*")) if out.is_dir() else []


def next_run(words: list[str], out: Path, expected: Mapping[str, bytes]) -> str | None:
    """Run again where nothing goes wrong; what is not as it must be then, or None."""
    ended = run(words)
    if judged(ended).word != SURVIVED:
        return f"the next run ends with {ended.code}: {ended.err[-300:]!r}"
    found = written(out)
    for name, data in expected.items():
        if found.get(name) != data:
            return f"after the next run {name} is not what an untouched run writes"
    return verified(out)


@cache
def verifies() -> bool:
    """Whether there is `calib8 verify`."""
    return "verify" in COMMANDS


def verified(out: Path) -> str | None:
    """What `calib8 verify` says against a build, or None."""
    if not verifies() or not (out / "report.json").exists():
        return None
    ended = run(["verify", str(out)])
    return None if ended.code == 0 else f"verify: {(ended.err + ended.out)[-300:]!r}"
