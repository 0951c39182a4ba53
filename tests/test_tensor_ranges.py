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
from deploy.targets import TARGETS
from deploy.tuning.search_options import Tuning
from tests.models import run_command

QUICK = ("--effort", 0, "--duration", 0, "--accept")
PLAIN = {"duration_s": 0, "tuning": Tuning(effort=0)}
VALUES = np.random.default_rng(5).normal(size=80_000).astype(np.float32)


def make_histogram(recorder, values):
    """The histogram of a report, of a recorder that observed the values."""
    recorder.observe(values)
    return histogram_part(recorder)


def bar_edges(part):
    return part.start + part.width * np.arange(len(part.counts) + 1)


def make_row(**changes):
    fields = {"name": "t", "observed_min": -2.0, "observed_max": 2.0, "method": "mse"}
    fields |= {"lo": -1.0, "hi": 1.0, "amax": 1.0}
    return parts.TensorRow(**fields | changes)


@pytest.mark.parametrize("shift", [0.0, 5.0, -3.0, 100.0])
def test_every_value_is_in_its_bar(shift):
    values = VALUES + np.float32(shift)
    part = make_histogram(Histogram(), values)
    assert sum(part.counts) == values.size
    assert 20 < len(part.counts) <= MAX_BARS
    assert part.counts[0]
    assert part.counts[-1]  # none before the first value, none after the last
    expected_counts = np.histogram(values.astype(np.float64), bar_edges(part))[0]
    differences = np.cumsum(expected_counts) - np.cumsum(part.counts)
    assert np.abs(differences).max() <= values.size / 1000  # of bins across an edge


@pytest.mark.parametrize("recorder", [Histogram, IfmrHistogram])
def test_values_at_both_ends_have_bars(recorder):
    ends = np.array([-4.0, 4.0], np.float32)  # powers of two: bins of their own
    part = make_histogram(recorder(), np.tile(ends, MAX_STORED_VALUES))
    assert part.counts[0] == part.counts[-1] == MAX_STORED_VALUES == sum(part.counts) / 2
    assert bar_edges(part)[0] <= -4
    assert bar_edges(part)[-1] >= 4
    assert len(part.counts) <= MAX_BARS


@pytest.mark.parametrize("recorder", [IfmrHistogram, lambda: HfmgHistogram(4096)])
@pytest.mark.parametrize(
    "values",
    [VALUES[:1000], VALUES, np.float32(1) + VALUES * np.float32(1e-5)],
    ids=["stored", "counted", "narrow"],
)
def test_ascend_histograms_have_bars(values, recorder):
    part = make_histogram(recorder(), values)
    assert sum(part.counts) == values.size
    assert len(part.counts) <= MAX_BARS
    assert bar_edges(part)[0] <= values.min()
    assert bar_edges(part)[-1] >= values.max() - 1e-5


@pytest.mark.parametrize("recorder", [Histogram, IfmrHistogram, lambda: HfmgHistogram(1024)])
@pytest.mark.parametrize("value", [0.0, 3.0, -0.1])
def test_one_value_is_one_bar(recorder, value):
    part = make_histogram(recorder(), np.full(9, value, np.float32))
    assert part.counts == (9,)
    assert bar_edges(part)[0] <= value <= bar_edges(part)[-1] + 1e-6


@pytest.mark.parametrize("recorder", [Amax, Histogram, IfmrHistogram, lambda: HfmgHistogram(1024)])
def test_no_histogram_without_bins_or_values(recorder):
    assert histogram_part(recorder()) is None


def line_positions(drawing, kind):
    return [float(x) for x in re.findall(rf'<line class="{kind}" x1="([-\d.]+)"', drawing)]


def bar_positions(drawing, kind):
    """Left edges of the bars of a kind: "kept" or "cut"."""
    path = re.search(rf'<path class="{kind}" d="([^"]*)"', drawing)[1]
    return [float(x) for x in re.findall(r"M([\d.]+),", path)]


def test_bars_beyond_range_ends_are_cut():
    part = parts.HistogramPart(start=-2.0, width=1.0, counts=(1, 9, 9, 1))
    drawing = histogram(make_row(lo=-1.0, hi=1.5), part)
    low, high = line_positions(drawing, "clip")
    zero = line_positions(drawing, "zero")[0]
    assert high - zero == pytest.approx(1.5 * (zero - low), abs=0.2)
    (start,) = bar_positions(drawing, "cut")
    assert start < low


def test_far_range_end_has_no_line():
    part = parts.HistogramPart(start=-0.5, width=1.0, counts=(9, 9, 1))
    drawing = histogram(make_row(observed_min=0.0, lo=-2.0, hi=2.0), part)
    assert len(line_positions(drawing, "clip")) == 1
    assert bar_positions(drawing, "kept")[0] == line_positions(drawing, "zero")[0]


def test_bar_heights_are_logarithms():
    part = parts.HistogramPart(start=-2.0, width=1.0, counts=(0, 999_999, 999, 0))
    drawing = histogram(make_row(lo=-2.0, hi=2.0), part)
    tall, low = [float(height) for height in re.findall(r"v-([\d.]+)h", drawing)]
    assert tall / low == pytest.approx(2, rel=0.01)
    assert 'class="cut"' not in drawing


def test_kept_range_always_holds_zero():
    part = parts.HistogramPart(start=0.5, width=0.5, counts=(9, 9, 9))
    drawing = histogram(make_row(observed_min=0.5, observed_max=2.0, lo=1.0, hi=1.5), part)
    assert len(bar_positions(drawing, "cut")) == 1
    assert len(bar_positions(drawing, "kept")) == 2


@pytest.mark.parametrize(("lo", "hi"), [(0.0, 0.0), (-math.inf, 1.0), (5.0, 5.0)])
def test_only_finite_ranges_are_drawn(lo, hi):
    part = parts.HistogramPart(start=lo if math.isfinite(lo) else 0.0, width=0.0, counts=(3,))
    drawing = histogram(make_row(observed_min=lo, observed_max=hi, lo=lo, hi=hi), part)
    assert ("kept" in drawing) == math.isfinite(lo)
    assert "nan" not in drawing


ALL_TARGETS = ("--target", ",".join(TARGETS))


@pytest.fixture(scope="module")
def build_folder(small_cnn, pictures, tmp_path_factory):
    """The folder of a build for every target."""
    out = tmp_path_factory.mktemp("histograms")
    arguments = ("--images", pictures, "--out", out, *QUICK, "--threads", 2, *ALL_TARGETS)
    run_command("build", small_cnn, *arguments)
    return out


@pytest.fixture(scope="module")
def built_report(build_folder):
    """Its report as JSON."""
    return read_report(build_folder)


def read_report(out):
    return json.loads((out / "report.json").read_text())


def histograms_by_target(report):
    """What no number of threads and no batch size can change."""
    values = []
    for target in report["targets"]:
        values.append({t["name"]: t.get("histogram") for t in target["tensors"]})
    return values


def test_worst_tensor_shows_the_cached_range(build_folder, built_report):
    cache_file = build_folder / "small_cnn.tensorrt.cache"
    cache = trt_cache.parse(cache_file.read_bytes(), origin="test")
    (target,) = [target for target in built_report["targets"] if target["name"] == "tensorrt"]
    measured = [tensor for tensor in target["tensors"] if "sqnr_db" in tensor]
    worst = min(measured, key=lambda tensor: tensor["sqnr_db"])
    part = worst["histogram"]
    assert sum(part["counts"]) % 20 == 0
    assert len(part["counts"]) <= MAX_BARS  # of 20 pictures
    assert part["start"] <= worst["observed_min"]
    assert part["start"] + part["width"] * len(part["counts"]) >= worst["observed_max"]
    assert worst["hi"] == -worst["lo"] == worst["amax"]
    assert worst["amax"] == pytest.approx(127 * float(cache.scales()[worst["name"]]), rel=1e-6)
    page = (build_folder / "report.html").read_text()
    assert f"<title>Histogram of {worst['name']}</title>" in page


def test_page_draws_every_histogram(build_folder, built_report):
    histogram_count = 0
    for target in built_report["targets"]:
        histogram_count += sum("histogram" in tensor for tensor in target["tensors"])
    page = (build_folder / "report.html").read_text()
    assert page.count('class="hist"') == histogram_count


@pytest.mark.slow
def test_threads_and_reuse_change_no_histogram(run, built_report, small_cnn, pictures, tmp_path):
    arguments = ("build", small_cnn, "--images", pictures, *QUICK, *ALL_TARGETS, "--out", tmp_path)
    for is_reused in (False, True):
        run.ok(*arguments, "--threads", 1)
        report = read_report(tmp_path)
        assert report["calibration"]["reused"] == is_reused
        assert histograms_by_target(report) == histograms_by_target(built_report)


def test_batch_size_changes_no_histogram(small_cnn, tmp_path):
    samples = np.random.default_rng(1).normal(size=(8, 3, 16, 16)).astype(np.float32)
    targets = []
    for size in (1, 4):
        batches = [samples[start : start + size] for start in range(0, 8, size)]
        report = build(small_cnn, batches, out=tmp_path / str(size), **PLAIN)
        targets.append(report.targets[0])
    single = {row.name: row.histogram for row in targets[0].tensors}
    batched = {row.name: row.histogram for row in targets[1].tensors}
    assert all(single.values())
    assert single == batched


def test_trusted_cache_has_no_histograms(command, build_folder, small_cnn, pictures, tmp_path):
    arguments = ("build", small_cnn, "--images", pictures, *QUICK, "--out", tmp_path)
    command(*arguments, "--trust-cache", "--cache", build_folder / "calib8/small_cnn.cache")
    (target,) = read_report(tmp_path)["targets"]
    assert target["tensors"]
    assert not any("histogram" in tensor for tensor in target["tensors"])
    assert "Histograms" not in (tmp_path / "report.html").read_text()


def test_only_the_worst_tensors_are_drawn(monkeypatch, small_cnn, pictures, tmp_path):
    monkeypatch.setattr(report_rows, "MAX_HISTOGRAMS", 2)
    report = build(small_cnn, pictures, targets=["tensorrt"], out=tmp_path, **PLAIN)
    rows = report.targets[0].tensors
    sqnr_db = sorted(row.sqnr_db for row in rows if row.sqnr_db is not None)
    assert {row.sqnr_db for row in rows if row.histogram} <= set(sqnr_db[:3])
    assert sum(row.histogram is not None for row in rows) == 2
    page = to_html(report)
    assert page.count('class="hist"') == 2
    assert "Histograms (2)" in page
    (section,) = tensor_sections(report)
    assert "".join(sections_html([section])).count("<svg") == len(rows)  # all have their bar


def test_page_of_200_tensors_is_small():
    counts = tuple(range(100_000, 100_000 + MAX_BARS))
    part = parts.HistogramPart(start=-1.23456789, width=0.0456789, counts=counts)
    rows = []
    for n in range(200):
        name = f"/backbone/stage.{n // 10}/block.{n % 10}/conv/Conv_output_0"
        histogram = part if n < report_rows.MAX_HISTOGRAMS else None
        rows.append(make_row(name=name, sqnr_db=20.0 + n, clipped=0.001, histogram=histogram))
    target = parts.TargetPart(name="onnxruntime", tensors=tuple(rows))
    page = to_html(Report(targets=(target,)))
    assert page.count('class="hist"') == report_rows.MAX_HISTOGRAMS
    assert len(page.encode()) < 450_000
