"""Parts of a report in words, the same in every form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

from deploy.report import figures
from deploy.report.model import Findings
from deploy.report.parts import CalibrationPart, GroupRow, SearchPart, TrialRow, WeightRow, WorkPart
from deploy.report.tables import common_method

PLAN = "plan"  # role of the plan among the report's files
TRIAL_HEADS = ("SQNR", "time, FP32 = 1", "built", "tried whole")
WEIGHT_HEADS = (
    "weight",
    "channels",
    "scales",
    "dead",
    "used",
    "ratio",
    "least",
    "median",
    "largest",
    "worst",
)


def whose(report: Findings, name: str, joint: str = " of ") -> str:
    """What is put behind a title that each target has: its name, where there are several."""
    return f"{joint}{name}" if len(report.targets) > 1 else ""


def calibration_words(report: Findings) -> str:
    """Method where one serves every target, reuse and time, in one line."""
    part = report.calibration or CalibrationPart()
    method = common_method(report)
    time = f" in {part.seconds:.1f} s" if part.seconds is not None else ""
    reason = f": {part.reason}" if part.reason else ""
    return f"{f'{method}, ' if method else ''}{_reuse(part)}{time}{reason}"


def _reuse(part: CalibrationPart) -> str:
    if part.reused:
        return "cache reused"
    if part.by_model:
        return "nothing calibrated"
    some = any(group.reused for group in part.groups)
    return "cache reused in part" if some else "calibrated anew"


def group_words(group: GroupRow) -> str:
    """One kind of observation: "folded, histogram: 31 tensors, reused"."""
    how = "reused" if group.reused else "observed anew"
    tensors = figures.count(group.tensors, "tensor")
    return f"{group.variant}, {group.statistic}: {tensors}, {how}"


def work_words(part: WorkPart) -> Iterator[str]:
    """What a run cost: decoded images, then inferences by what they were for."""
    yield f"{figures.count(part.decodes, 'image')} decoded"
    yield _runs("calibration", part.calibration_runs)
    yield figures.count(part.reference_runs, "reference inference")
    yield _runs("engine", part.engine_runs)


def _runs(what: str, runs: Mapping[str, int]) -> str:
    total = figures.count(sum(runs.values()), f"{what} inference")
    each = ", ".join(f"{name} {number}" for name, number in runs.items())
    return f"{total} ({each})" if each else total


def search_words(search: SearchPart) -> str:
    """What a search did, and what of it was built."""
    tried = "from the plan, nothing tried" if search.reused else f"{search.probes} trials"
    return f"{search.settled} ({tried})" if search.settled else tried


def trial_row(trial: TrialRow) -> list[str]:
    """One thing that was tried, under `TRIAL_HEADS`."""
    built = "yes" if trial.taken else ""
    return [figures.decibels(trial.sqnr_db), f"{trial.time:.2f}", built, trial.what]


def weight_row(row: WeightRow) -> list[str]:
    """One weight under `WEIGHT_HEADS`."""
    return [
        row.node,
        str(row.channels),
        str(row.scales),
        str(row.dead) if row.dead else "",
        f"{100 * row.used:.3g} %",
        f"{row.ratio:.3g}",
        *map(figures.real, (row.least, row.median, row.largest)),
        *map(str, row.worst[:1] or ("",)),
    ]


def plan_name(report: Findings) -> str:
    """Name of the plan's file, which stands beside the report; "" where there is none."""
    paths = [file.path for file in report.files if file.role == PLAN]
    return PurePath(paths[0]).name if paths else ""
