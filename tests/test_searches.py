"""The table of searches, the words that choose from it, and a row that is added."""

import json
import sys
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import import_module

import numpy as np
import pytest

from calibrators import searches
from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.percentile import minmax, percentile
from calibrators.searches import SEARCHES
from deploy.errors import ConfigError
from deploy.method import Method


@pytest.mark.parametrize("name", SEARCHES)
def test_parameters_have_default_and_help(name):
    row = SEARCHES[name]
    assert row.help
    assert row.params() == row.params()
    for parameter in fields(row.params):
        assert parameter.default is not MISSING
        assert parameter.metadata["help"].endswith(".")


def test_method_takes_its_own_parameters_only(wording):
    assert (
        Method.of() == Method.of(searches.DEFAULT_METHOD) == Method("mse", SEARCHES["mse"].params())
    )
    assert Method.of("percentile", {"percent": None}) == Method.of("percentile")
    h = Histogram()
    h.observe(np.random.default_rng(0).normal(size=5000).astype(np.float32))
    assert Method.of("percentile", {"percent": 90}).search()(h) == percentile(h, percent=90)
    assert Method.of("percentile").search()(h) == percentile(h, percent=99.99)
    legacy = Method.of("legacy").search()(h)
    assert legacy.symmetric == percentile(h, percent=0.999999 * 100).symmetric
    assert legacy.method == "legacy"
    with pytest.raises(ConfigError) as refusal:
        Method("mse", searches.PercentileParams())
    wording.check(refusal.value)
    with pytest.raises(CalibrationError, match="batch size"):
        searches.EntropyTensorrtParams(batch_size=-1)


@pytest.mark.parametrize(
    ("name", "parameters", "label", "statistic"),
    [
        ("mse", {}, "mse", "histogram"),
        ("percentile", {}, "percentile 99.99", "histogram"),
        ("percentile", {"percent": 99.0}, "percentile 99", "histogram"),
        ("percentile", {"percent": 99.99999}, "percentile 99.99999", "histogram"),
        ("entropy-tensorrt", {}, "entropy-tensorrt", "histogram, first batch of 1"),
        ("entropy-tensorrt", {"batch_size": 8}, "entropy-tensorrt", "histogram, first batch of 8"),
    ],
)
def test_label_and_statistic_key(name, parameters, label, statistic):
    method = Method.of(name, parameters)
    assert (method.label, method.statistic.key) == (label, statistic)


PERCENT_WITH_MSE = "--percent belongs to --method percentile.*, got --method mse; leave it out"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("percentle", {}, "a method is one of .*did you mean 'percentile'"),
        ("kl", {}, "a method is one of .*, got 'kl'; the default is mse"),
        ("mse", {"percent": 99}, PERCENT_WITH_MSE),
        ("percentile", {"batch_size": 8}, "--batch-size belongs to --method entropy-tensorrt"),
        ("percentile", {"percnt": 99}, "belongs to a method, got 'percnt'; did you mean 'percent'"),
        ("percentile", {"percent": 50}, "over 50 and at most 100, got 50"),
        ("percentile", {"percent": "99"}, "over 50 and at most 100, got '99'"),
        ("entropy-tensorrt", {"batch_size": 0}, "1 or more, got 0"),
        ("entropy-tensorrt", {"batch_size": 1.5}, "1 or more, got 1.5"),
        ("entropy-tensorrt", {"batch_size": True}, "1 or more, got True"),
    ],
)
def test_conflicting_parameters_are_refused(name, parameters, message):
    with pytest.raises(ConfigError, match=message):
        Method.of(name, parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareParams(searches.Params):
    share: float = field(default=0.5, metadata={"help": "Share of the range to keep."})


def share_of_range(histogram, params):
    complete_range = minmax(histogram)
    return replace(
        complete_range,
        lo=complete_range.lo * params.share,
        hi=complete_range.hi * params.share,
        method="share",
    )


@pytest.mark.slow
def test_search_needs_only_a_table_row(small_cnn, pictures, tmp_path, monkeypatch, command):
    row = searches.RangeSearch(share_of_range, ShareParams, "keeps a share of the range")
    for name in ("build", "calibrate", "calibration_options"):  # made again from the table
        import_module(f"deploy.commands.{name}")  # so that later tests get these modules back
        monkeypatch.delitem(sys.modules, f"deploy.commands.{name}")
    monkeypatch.setitem(SEARCHES, "share", row)

    assert "For --method share. [default: 0.5]" in command("build", "--help-all")
    out, images = tmp_path / "out", ("--images", pictures, "--preprocess", "unit")
    options = ("--method", "share", "--share", 0.25, "--out", out, "--duration", 0, "--effort", 0)
    command("build", small_cnn, *images, *options)
    assert json.loads((out / "report.json").read_text())["calibration"]["method"] == "share 0.25"
    cache = tmp_path / "share.cache"
    calibrate_command = ("calibrate", small_cnn, *images, "--method", "share", "-o", cache)
    assert "share 0.5" in command(*calibrate_command)
    assert "(share 0.5 -> share 0.75)" in command(*calibrate_command, "--share", 0.75)
