"""The worst tensors' histograms: in few bars, with the ends of their range, in JSON and drawn."""

import json
import math
import re

import numpy as np
import pytest

from calib8 import build
from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr import MAX_STORED_VALUES, IfmrHistogram
from calibrators.histogram import Histogram
from calibrators.statistics import Amax
from deploy.calibration import trt_cache
from deploy.report import Report, parts, report_rows, to_html
from deploy.report.blocks import sections_html
from deploy.report.charts import histogram
from deploy.report.report_rows import MAX_BARS, histogram_part
from deploy.report.sections import tensor_sections
from deploy.tuning.search_options import Tuning
from tests.models import run_command

QUICK = ("--effort", 0, "--duration", 0, "--accept")
PLAIN = {"duration_s": 0, "tuning": Tuning(effort=0)}
VALUES = np.random.default_rng(5).normal(size=80_000).astype(np.float32)


def feed_recorder(recorder, *batches):
    for batch in batches:
        recorder.observe(batch)
    return recorder


def edges(part):
    return part.start + part.width * np.arange(len(part.counts) + 1)


def row(**changed):
    fields = dict(name="t", observed_min=-2.0, observed_max=2.0, lo=-1.0, hi=1.0, amax=1.0)
    return parts.TensorRow(**{**fields, "method": "mse", **changed})


@pytest.mark.parametrize("shift", [0.0, 5.0, -3.0, 100.0])
def test_every_value_is_in_its_bar(shift):
    values = VALUES + np.float32(shift)
    part = histogram_part(feed_recorder(Histogram(), values))
    assert sum(part.counts) == values.size
    assert 20 < len(part.counts) <= MAX_BARS
    assert part.counts[0]
    assert part.counts[-1]  # none before the first value, none after the last
    want = np.histogram(values.astype(np.float64), edges(part))[0]
    assert np.abs(np.cumsum(want) - np.cumsum(part.counts)).max() <= 3  # of values on an edge


@pytest.mark.parametrize("recorder", [Histogram, IfmrHistogram])
def test_last_bar_holds_the_range_end(recorder):
    ends = np.array([-4.0, 4.0], np.float32)  # powers of two: bins of their own
    part = histogram_part(feed_recorder(recorder(), np.tile(ends, MAX_STORED_VALUES)))
    assert part.counts[0] == part.counts[-1] == MAX_STORED_VALUES == sum(part.counts) / 2
    assert edges(part)[0] <= -4
    assert edges(part)[-1] >= 4
    assert len(part.counts) <= MAX_BARS


@pytest.mark.parametrize("values", [VALUES[:1000], VALUES], ids=["kept", "counted"])
def test_ascend_histograms_have_bars(values):
    for recorder in (IfmrHistogram(), HfmgHistogram(4096)):
        part = histogram_part(feed_recorder(recorder, values))
        assert sum(part.counts) == values.size
        assert len(part.counts) <= MAX_BARS
        assert edges(part)[0] <= values.min()
        assert edges(part)[-1] >= values.max() - 1e-5


@pytest.mark.parametrize("recorder", [Histogram, IfmrHistogram, lambda: HfmgHistogram(1024)])
@pytest.mark.parametrize("value", [0.0, 3.0, -0.1])
def test_one_value_is_one_bar(recorder, value):
    part = histogram_part(feed_recorder(recorder(), np.full(9, value, np.float32)))
    assert part.counts == (9,)
    assert edges(part)[0] <= value <= edges(part)[-1] + 1e-6


def test_empty_recorders_have_no_bars():
    for recorder in (Amax(), Histogram(), IfmrHistogram(), HfmgHistogram(1024)):
        assert histogram_part(recorder) is None


def lines(drawn, kind):
    return [float(x) for x in re.findall(rf'<line class="{kind}" x1="([-\d.]+)"', drawn)]


def test_lines_mark_the_range_ends():
    part = parts.HistogramPart(start=-2.0, width=1.0, counts=(1, 9, 9, 1))
    drawn = histogram(row(lo=-1.0, hi=1.5), part)
    low, high = lines(drawn, "clip")
    zero = lines(drawn, "zero")[0]
    assert high - zero == pytest.approx(1.5 * (zero - low), abs=0.2)
    cut = re.search(r'<path class="cut" d="([^"]*)"', drawn)[1]
    starts = [float(x) for x in re.findall(r"M([\d.]+),", cut)]
    assert len(starts) == 2
    assert starts[0] < low
    assert starts[1] == pytest.approx(high, abs=0.1)
    part = parts.HistogramPart(start=-0.5, width=1.0, counts=(9, 9, 1))
    drawn = histogram(row(observed_min=0.0, lo=-2.0, hi=2.0), part)
    assert len(lines(drawn, "clip")) == 1
    assert "\N{PLUS-MINUS SIGN}2 is kept" in drawn
    bars = re.search(r'<path class="kept" d="M([\d.]+),', drawn)
    assert float(bars[1]) == lines(drawn, "zero")[0]


def test_bar_heights_are_logarithmic():
    part = parts.HistogramPart(start=-2.0, width=1.0, counts=(0, 999_999, 999, 0))
    drawn = histogram(row(lo=-2.0, hi=2.0), part)
    tops = [float(y) for y in re.findall(r"V([\d.]+)h", drawn)]
    floor = float(re.search(r'class="axis"[^>]* y1="(\d+)"', drawn)[1])
    assert len(tops) == 2
    assert (floor - tops[0]) / (floor - tops[1]) == pytest.approx(2, rel=0.01)
    assert 'class="cut"' not in drawn
    part = parts.HistogramPart(start=0.5, width=0.5, counts=(9, 9, 9))
    drawn = histogram(row(observed_min=0.5, observed_max=2.0, lo=1.0, hi=1.5), part)
    assert re.search(r'class="cut" d="([^"]*)"', drawn)[1].count("M") == 1
    assert re.search(r'class="kept" d="([^"]*)"', drawn)[1].count("M") == 2


@pytest.mark.parametrize("ends", [(0.0, 0.0), (-math.inf, 1.0), (5.0, 5.0)])
def test_infinite_ranges_are_not_drawn(ends):
    lo, hi = ends
    part = parts.HistogramPart(start=lo if math.isfinite(lo) else 0.0, width=0.0, counts=(3,))
    drawn = histogram(row(observed_min=lo, observed_max=hi, lo=lo, hi=hi), part)
    assert ("kept" in drawn) == math.isfinite(lo)
    assert "nan" not in drawn


TARGETS = ("--target", "onnxruntime,tensorrt,ascend")


@pytest.fixture(scope="module")
def build_and_report(small_cnn, pictures, tmp_path_factory):
    """The folder of a build for the three targets, and its report as JSON."""
    out = tmp_path_factory.mktemp("histograms")
    options = ("--images", pictures, "--out", out, *QUICK, "--threads", 2, *TARGETS)
    run_command("build", small_cnn, *options)
    return out, report_of(out)


def report_of(out):
    return json.loads((out / "report.json").read_text())


def drawn_facts(report):
    """Histograms and weights, which no thread and no batch can change."""
    return [
        ({t["name"]: t.get("histogram") for t in target["tensors"]}, target["weights"])
        for target in report["targets"]
    ]


def test_worst_tensor_has_its_histogram(build_and_report):
    out, report = build_and_report
    cache = trt_cache.parse((out / "small_cnn.tensorrt.cache").read_bytes(), origin="test")
    (target,) = [entry for entry in report["targets"] if entry["name"] == "tensorrt"]
    worst = min((t for t in target["tensors"] if "sqnr_db" in t), key=lambda t: t["sqnr_db"])
    part = worst["histogram"]
    assert sum(part["counts"]) % 20 == 0
    assert len(part["counts"]) <= MAX_BARS  # of 20 pictures
    assert part["start"] <= worst["observed_min"]
    assert part["start"] + part["width"] * len(part["counts"]) >= worst["observed_max"]
    assert worst["hi"] == -worst["lo"] == worst["amax"]
    assert worst["amax"] == pytest.approx(127 * float(cache.scales()[worst["name"]]), rel=1e-6)
    page = (out / "report.html").read_text()
    assert f"<title>Histogram of {worst['name']}</title><desc>{sum(part['counts']):,} va" in page
    drawn = ("histogram" in t for entry in report["targets"] for t in entry["tensors"])
    assert page.count('class="hist"') == sum(drawn)


def test_marks_are_ranges_of_other_searches(build_and_report):
    _, report = build_and_report
    ort, trt, ascend = report["targets"]
    for target in (ort, trt):
        for tensor in target["tensors"]:
            marks = {o["method"]: (o["lo"], o["hi"]) for o in tensor["histogram"]["others"]}
            assert tensor["method"] == "mse"
            assert set(marks) == {"minmax", "percentile-99.99", "entropy"}
            if tensor["name"] == "r1":  # which a Relu makes
                top = tensor["observed_max"]
                assert marks["minmax"] == (0 if target is ort else -top, top)
    assert not any("others" in t["histogram"] for t in ascend["tensors"])  # AMCT's own searches


@pytest.mark.slow
def test_threads_and_reuse_keep_the_histograms(
    run, build_and_report, small_cnn, pictures, tmp_path
):
    _, report = build_and_report
    arguments = ("build", small_cnn, "--images", pictures, *QUICK, *TARGETS, "--out", tmp_path)
    for reused in (False, True):
        run.ok(*arguments, "--threads", 1)
        second_report = report_of(tmp_path)
        assert second_report["calibration"]["reused"] == reused
        assert drawn_facts(second_report) == drawn_facts(report)


def test_batch_size_keeps_the_histograms(small_cnn, tmp_path):
    samples = np.random.default_rng(1).normal(size=(8, 3, 16, 16)).astype(np.float32)
    facts = []
    for size in (1, 4):
        batches = [samples[start : start + size] for start in range(0, 8, size)]
        report = build(small_cnn, batches, out=tmp_path / str(size), **PLAIN)
        rows = report.targets[0].tensors
        assert all(row.histogram for row in rows)
        facts.append(({row.name: row.histogram for row in rows}, report.targets[0].weights))
    assert facts[0] == facts[1]


def test_trusted_cache_has_no_histograms(command, build_and_report, small_cnn, pictures, tmp_path):
    arguments = (
        "build",
        small_cnn,
        "--images",
        pictures,
        *QUICK,
        "--out",
        tmp_path,
        "--trust-cache",
    )
    command(*arguments, "--cache", build_and_report[0] / "calib8/small_cnn.cache")
    (target,) = report_of(tmp_path)["targets"]
    assert target["tensors"]
    assert not any("histogram" in t for t in target["tensors"])
    assert "Histograms" not in (tmp_path / "report.html").read_text()


def test_only_worst_histograms_are_drawn(monkeypatch, small_cnn, pictures, tmp_path):
    monkeypatch.setattr(report_rows, "MAX_HISTOGRAMS", 2)
    report = build(small_cnn, pictures, targets=["tensorrt"], out=tmp_path, **PLAIN)
    rows = report.targets[0].tensors
    sorted_sqnr = sorted(row.sqnr_db for row in rows if row.sqnr_db is not None)
    assert {row.sqnr_db for row in rows if row.histogram} <= set(sorted_sqnr[:3])
    assert sum(row.histogram is not None for row in rows) == 2
    page = to_html(report)
    assert page.count('class="hist"') == 2
    assert "Histograms (2)" in page
    (section,) = tensor_sections(report)
    assert "".join(sections_html([section])).count("<svg") == len(rows)  # all have their bar


def test_page_of_many_tensors_is_small(build_and_report):
    """Rows as a real build makes them, the worst with all that is drawn of them."""
    _, report = build_and_report
    counts = tuple(range(100_000, 100_000 + MAX_BARS))
    other_ranges = tuple(parts.RangeRow(method=f"method-{n}", lo=-n, hi=n) for n in range(5))
    part = parts.HistogramPart(
        start=-1.23456789, width=0.0456789, counts=counts, others=other_ranges
    )
    weight = report["targets"][0]["weights"][0] | {"worst": (100, 200, 300)}
    rows = tuple(
        row(
            name=f"/backbone/stage.{n // 10}/block.{n % 10}/conv/Conv_output_0",
            sqnr_db=20.0 + n,
            clipped=0.001,
            histogram=part if n < report_rows.MAX_HISTOGRAMS else None,
        )
        for n in range(200)
    )
    strip = tuple(0.1234 + n / 1000 for n in range(96))
    weights = tuple(
        parts.WeightRow(**weight | {"node": row.name, "strip": strip if n < 6 else ()})
        for n, row in enumerate(rows)
    )
    target = parts.TargetPart(name="onnxruntime", tensors=rows, weights=weights)
    page = to_html(Report(targets=(target,)))
    assert page.count('class="hist"') == report_rows.MAX_HISTOGRAMS
    assert len(page.encode()) < 450_000
