"""The table of searches, the words that choose from it, and a row that is added."""

import json
import sys
from dataclasses import MISSING, dataclass, field, fields, replace

import numpy as np
import pytest

from calibrators import SEARCHES, Histogram, searches
from calibrators.errors import CalibrationError
from calibrators.percentile import minmax, percentile
from deploy.errors import ConfigError
from deploy.method import Method


@pytest.mark.parametrize("name", SEARCHES)
def test_every_parameter_has_a_default_and_says_what_it_is(name):
    row = SEARCHES[name]
    assert row.help and row.params() == row.params()
    for parameter in fields(row.params):
        assert parameter.default is not MISSING and parameter.metadata["help"].endswith(".")


def test_a_method_has_its_default_search_and_takes_no_others_parameters(wording):
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
    ("name", "given", "label", "statistic"),
    [
        ("mse", {}, "mse", "histogram"),
        ("percentile", {}, "percentile 99.99", "histogram"),
        ("percentile", {"percent": 99.0}, "percentile 99", "histogram"),
        ("percentile", {"percent": 99.99999}, "percentile 99.99999", "histogram"),
        ("entropy-tensorrt", {}, "entropy-tensorrt", "histogram, first batch of 1"),
        ("entropy-tensorrt", {"batch_size": 8}, "entropy-tensorrt", "histogram, first batch of 8"),
    ],
)
def test_label_and_statistic_are_those_of_the_fingerprint(name, given, label, statistic):
    method = Method.of(name, given)
    assert (method.label, method.statistic.key) == (label, statistic)


OTHERS = "--percent belongs to --method percentile, got --method mse; leave it out"


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("percentle", {}, "a method is one of .*did you mean 'percentile'"),
        ("kl", {}, "a method is one of .*, got 'kl'; the default is mse"),
        ("mse", {"percent": 99}, OTHERS),
        ("percentile", {"batch_size": 8}, "--batch-size belongs to --method entropy-tensorrt"),
        ("percentile", {"percnt": 99}, "belongs to a method, got 'percnt'; did you mean 'percent'"),
        ("percentile", {"percent": 50}, "over 50 and at most 100, got 50"),
        ("percentile", {"percent": "99"}, "over 50 and at most 100, got '99'"),
        ("entropy-tensorrt", {"batch_size": 0}, "1 or more, got 0"),
        ("entropy-tensorrt", {"batch_size": 1.5}, "1 or more, got 1.5"),
        ("entropy-tensorrt", {"batch_size": True}, "1 or more, got True"),
    ],
)
def test_words_that_do_not_go_together_are_refused(name, given, told):
    with pytest.raises(ConfigError, match=told):
        Method.of(name, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareParams(searches.Params):
    share: float = field(default=0.5, metadata={"help": "Share of the range to keep."})


def shared(histogram, params):
    found = minmax(histogram)
    return replace(found, lo=found.lo * params.share, hi=found.hi * params.share, method="share")


@pytest.mark.slow
def test_a_new_row_is_all_that_a_search_needs(small_cnn, pictures, tmp_path, monkeypatch, command):
    row = searches.RangeSearch(shared, ShareParams, "keeps a share of the range")
    monkeypatch.setitem(SEARCHES, "share", row)
    for name in ("build", "calibrate"):  # made anew from the table
        monkeypatch.delitem(sys.modules, f"deploy.commands.{name}", raising=False)

    assert "For --method share. [default: 0.5]" in command("build", "--help-all")
    out, images = tmp_path / "out", ("--images", pictures, "--preprocess", "unit")
    words = ("--method", "share", "--share", 0.25, "--out", out, "--duration", 0, "--effort", 0)
    command("build", small_cnn, *images, *words)
    assert json.loads((out / "report.json").read_text())["calibration"]["method"] == "share 0.25"
    cache = tmp_path / "share.cache"
    given = ("calibrate", small_cnn, *images, "--method", "share", "-o", cache)
    assert "share 0.5" in command(*given)
    assert "(share 0.5 -> share 0.75)" in command(*given, "--share", 0.75)
