"""Whether what stands in a folder of outputs is whole: each file by itself, and all together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.attacks.children import run
from scripts.attacks.outcome import SURVIVED, judged
from scripts.attacks.subject import written


def torn(out: Path, *builds: Mapping[str, bytes]) -> str | None:
    """Why a folder is not just as one of these builds left it, or None.

    Args:
        out: the folder.
        builds: name -> bytes of the files that are the same at every run.
    """
    found = written(out)
    if found in builds or _apart(out, found, builds):
        return verified(out)
    near = max(builds, key=lambda one: sum(one.get(name) == data for name, data in found.items()))
    other = [name for name in {**near, **found} if near.get(name) != found.get(name)]
    return f"not as one build left it: {', '.join(sorted(other))} differ from the nearest"


def _apart(out: Path, found: Mapping[str, bytes], builds: Sequence[Mapping[str, bytes]]) -> bool:
    """Whether the manifest tells the files of one build from those that it left of another.

    So it is where a target could not be built: its files stay as they were, named as earlier ones.
    """
    try:
        told = json.loads((out / "calib8" / "manifest.json").read_bytes())
    except OSError:
        return False
    parts = [{n: d for n, d in found.items() if n in told[part]} for part in ("files", "earlier")]
    if sum(map(len, parts)) != len(found):
        return False
    return all(any(part.items() <= one.items() for one in builds) for part in parts)


def mixed(out: Path, *builds: Mapping[str, bytes]) -> str | None:
    """A file that is in none of these builds, or None: what a kill may leave until the next run."""
    for name, data in written(out).items():
        if not any(one.get(name) == data for one in builds):
            return f"{name} is of none of the builds ({len(data)} bytes)"
    return None


def leftovers(out: Path) -> list[str]:
    """Temporary files of calib8; a calibration that is kept for the next run is none."""
    if not out.is_dir():
        return []
    found = [*out.glob(".calib8-*"), *out.glob("calib8/.calib8-*")]
    return sorted(path.name for path in found if path.name != ".calib8-kept")


def next_run(words: list[str], out: Path, expected: Mapping[str, bytes]) -> str | None:
    """Run again where nothing goes wrong; what is not as it must be then, or None."""
    ended = run(words)
    if judged(ended).word != SURVIVED:
        return f"the next run ends with {ended.code}: {ended.err[-300:]!r}"
    if wrong := torn(out, expected):
        return f"after the next run: {wrong}"
    left = leftovers(out)
    return f"after the next run temporary files stay: {left}" if left else None


def verified(out: Path) -> str | None:
    """What `calib8 verify` says against a build, or None; of a calibration alone, nothing."""
    if not (out / "calib8" / "manifest.json").exists():
        return None
    ended = run(["verify", str(out)])
    return None if ended.code == 0 else f"verify: {(ended.err + ended.out)[-300:]!r}"
