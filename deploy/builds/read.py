"""A build that was written before, read back: its report, and the options it was built with."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.builds.decode import decoded
from deploy.errors import ConfigError
from deploy.files import toml
from deploy.files.manifest import PAGES, SETTINGS
from deploy.files.reading import read_json
from deploy.metrics.levels import LEVELS
from deploy.report import Report
from deploy.report.model import SCHEMA

_MOST = 1 << 30  # bytes; a report has a row for every tensor
_WIDE = 60  # letters of an option's value


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build.

    Attributes:
        name: its folder, as it was named.
        report: what was found; without the samples of latency, which no file keeps.
        options: flag without dashes -> value in words, of `calib8.toml`; None where there is none.
    """

    name: str
    report: Report
    options: Mapping[str, str] | None = None


def read_build(folder: Path | str) -> Build:
    """Read a build.

    Args:
        folder: that was built into, or its report.json.

    Raises:
        ConfigError: no such folder, no report in it, or one that is broken or of another version.
    """
    named = Path(folder)
    path = named if named.suffix == ".json" else named / PAGES[0]
    if not os.path.isfile(path):
        raise ConfigError(
            f"a build must be a folder that `calib8 build` wrote, got {named} without a {PAGES[0]};"
            " build first, or name the folder that --out named"
        )
    return Build(name=str(folder), report=_report(path), options=_options(path.with_name(SETTINGS)))


def _report(path: Path) -> Report:
    what = "the report of a build, as calib8 wrote it"
    held = read_json(path, what=what, error=ConfigError, most=_MOST)
    found = held.get("schema") if isinstance(held, dict) else None
    if found != SCHEMA:
        got = repr(found)[:_WIDE]
        raise ConfigError(
            f"a report must be of schema {SCHEMA}, got {got} in {path}; build again with this"
            " calib8"
        )
    report = decoded(Report, held, path)
    for engine in report.engines:
        if engine.latency is not None and not 0 < engine.latency.latency.p50 < math.inf:
            raise _wrong(path, "latencies must be over 0", engine.latency.latency.p50)
        if engine.verdict is not None and engine.verdict.level not in LEVELS:
            raise _wrong(
                path, f"a verdict must be one of {', '.join(LEVELS)}", engine.verdict.level
            )
    return report


def _wrong(path: Path, rule: str, got: object) -> ConfigError:
    return ConfigError(f"{rule}, got {repr(got)[:_WIDE]} in {path}; build again")


def _options(path: Path) -> dict[str, str] | None:
    """The options of the file beside a report.

    Raises:
        ConfigError: there is one, and it cannot be read.
    """
    if not os.path.isfile(path):
        return None
    what = "the options of a build, as calib8 wrote them"
    tables = toml.read(path, what=what, way_out="build again")
    table = tables.get("build", {})
    return {name: _words(value) for name, value in table.items()} if isinstance(table, dict) else {}


def _words(value: Any) -> str:
    said = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return said if len(said) <= _WIDE else f"{said[:_WIDE]}..."
