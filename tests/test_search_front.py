"""The front of a search, drawn and listed in a report."""

import math
import re

import pytest

from deploy.report import Report, to_html, to_markdown
from deploy.report.charts import front_figure
from deploy.report.parts import SearchPart, TargetPart
from deploy.tuning.plan_file import SplitRow


def front_split(number, **changed):
    """A split of a front: faster and noisier the lower its number."""
    fields = {
        "number": number,
        "float_layers": 4 * number,
        "layers": 40,
        "time": 0.5 + 0.1 * number,
        "size": 0.3,
        "sqnr_db": 10.0 * number,
    }
    return SplitRow(**{**fields, **changed})


def points_of(figure):
    """Return class, x in percent and y of each point that is drawn."""
    point = r'<svg x="([\d.]+)%" y="([\d.]+)" overflow="visible"><circle class="(\w+)"'
    return [(kind, float(x), float(y)) for x, y, kind in re.findall(point, figure)]


def test_front_runs_from_fast_to_exact():
    front = (
        front_split(1),
        front_split(2, taken=True),
        front_split(3, sqnr_db=math.inf),
        front_split(4, sqnr_db=math.nan),
    )
    float_model, fast, built, exact = points_of(front_figure(front))
    assert [fast[0], built[0], exact[0], float_model[0]] == ["tried", "kept", "tried", "time"]
    assert fast[1] < built[1] < exact[1] < float_model[1]
    assert fast[2] > built[2] > exact[2] == float_model[2]


@pytest.mark.parametrize(
    "front", [(), (front_split(1),), (front_split(1), front_split(2, time=math.nan))]
)
def test_front_needs_two_timed_splits(front):
    assert front_figure(front) == ""


def test_texts_mark_the_built_split():
    front = (front_split(1, is_timed=True), front_split(2, taken=True, figure="27 of 28 boxes"))
    search = SearchPart(reused=False, probes=2, settled="8 of 40 layers in float", front=front)
    report = Report(targets=(TargetPart(name="tensorrt", search=search),))
    for text in (to_html(report), to_markdown(report)):
        assert "0.60 measured" in text
        assert "0.70 estimated" in text
        assert "27 of 28 boxes" in text
        assert "8 of 40" in text
    assert re.search(r"--split 2 .*yes", to_markdown(report))
    assert not re.search(r"--split 1 .*yes", to_markdown(report))
