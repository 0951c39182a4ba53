"""The front of a search: what the screen says of it, and the next step."""

import math

import pytest

from deploy.metrics.latency import SpeedUp
from deploy.report import Report, to_screen
from deploy.report.front import find_alternative, find_taken
from deploy.report.parts import EngineRow, SearchPart, SplitRow, TargetPart
from deploy.report.verdict import Verdict


def split(number, time, level, sqnr_db, figure="", **changed):
    """A split of a front."""
    fields = {"float_layers": 4 * number, "layers": 64, "size": 0.3, **changed}
    return SplitRow(number=number, time=time, level=level, sqnr_db=sqnr_db, figure=figure, **fields)


# as the review saw it: "good" with most layers in float, and no word of what one more box costs
DETECTOR = (
    split(1, 0.70, "unusable", 9.0, "12 of 28 boxes"),
    split(2, 0.72, "doubtful", 15.0, "25 of 28 boxes"),
    split(3, 0.735, "good", 21.0, "27 of 28 boxes"),
    split(4, 0.84, "good", 30.0, "28 of 28 boxes", taken=True),
)


def screen(*fronts, speed=None, names=("tensorrt", "ascend"), level="good"):
    """The lines of the screen of a build whose searches ended in these fronts."""
    targets, engines = [], [EngineRow(label="FP32", reference=True)]
    for name, front in zip(names, fronts, strict=False):
        search = SearchPart(reused=False, probes=9, settled="16 of 64", front=front)
        targets.append(TargetPart(name=name, search=search))
        engines.append(EngineRow(label=name, target=name, verdict=Verdict(level, ()), speed=speed))
    text = to_screen(Report(targets=tuple(targets), engines=tuple(engines)))
    return text.splitlines()


def speed_lines(*fronts, **options):
    lines = screen(*fronts, **options)
    start = next((i for i, line in enumerate(lines) if line.startswith("Speed")), None)
    return [] if start is None else lines[start : start + len(fronts)]


def test_screen_tells_what_is_built_and_what_else_could_be():
    (line,) = speed_lines(DETECTOR)
    speeds = "about 1.19x FP32 (estimated); 1.36x with 27 of 28 boxes: --split 3"
    assert line == f"Speed         {speeds}"


def test_each_target_has_its_own_line():
    first, second = speed_lines(DETECTOR, DETECTOR)
    assert first.startswith("Speed         tensorrt: about 1.19x")
    assert second.strip().startswith("ascend: about 1.19x")


@pytest.mark.parametrize(
    ("others", "number"),
    [
        ([], None),
        ([(1, 0.75, "good", 20.0)], 1),
        ([(1, 0.755, "good", 20.0)], None),  # less than 8 % faster
        ([(1, 0.70, "doubtful", 20.0)], 1),
        ([(1, 0.70, "unusable", 20.0)], None),
        ([(1, 0.70, "", 20.0)], None),  # nobody knows what it keeps
        ([(1, 0.70, "doubtful", 20.0), (2, 0.72, "good", 22.0)], 2),
        ([(4, 0.85, "good", 33.0)], 4),
        ([(4, 0.85, "good", 32.9)], None),
        ([(4, 0.90, "good", 60.0)], None),  # too slow for its decibels
        ([(4, 0.85, "", math.inf)], 4),
    ],
)
def test_another_split_is_named_if_it_is_worth_knowing(others, number):
    taken = split(3, 0.81, "good", 30.0, taken=True)
    front = sorted([taken, *(split(*other) for other in others)], key=lambda row: row.number)
    other = find_alternative(front, taken)
    assert (other and other.number) == number


@pytest.mark.parametrize(("time", "is_named"), [(0.9, True), (0.96, False)])
def test_better_verdict_is_named_while_it_wins_time(time, is_named):
    taken = split(1, 0.7, "doubtful", 15.0, taken=True)
    front = (taken, split(2, time, "good", 16.0))
    assert bool(find_alternative(front, taken)) == is_named


def test_measured_engine_has_a_line_only_for_another_split():
    speed = SpeedUp(ratio=1.25, low=1.2, high=1.3)
    assert speed_lines(DETECTOR[3:], speed=speed) == []
    (line,) = speed_lines(DETECTOR, speed=speed)
    assert line.endswith("1.25x FP32; 1.43x with 27 of 28 boxes: --split 3")


def test_front_without_the_built_split_says_nothing():
    assert find_taken(DETECTOR[:3]) is None
    assert speed_lines(DETECTOR[:3]) == []
    assert speed_lines((split(1, 0.0, "good", 9.0, taken=True),)) == []
