"""Searches for a range, by the histogram: percentiles, errors, tails."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators import mse as ranges_by_error
from calibrators.errors import CalibrationError
from calibrators.grids import INT4, INT8, UINT8, dequantize, quantize, unsigned_grid
from calibrators.histogram import BINS, Histogram
from calibrators.mse import _RATIOS, _Bins, lp, mse, range_errors
from calibrators.percentile import extend_by_tail, minmax, percentile, quantile, tail_length
from calibrators.searches import SEARCHES, LpParams, PercentileParams

seeds = st.integers(0, 10_000)


def observed(x, base=None):
    h = Histogram(initial_range=base)
    h.observe(np.asarray(x, np.float32))
    return h


def searched(name, histogram):
    row = SEARCHES[name]
    return row.function(histogram, row.params())


def sample(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(rng.uniform(1.5, 8), size=4000) * rng.uniform(1e-3, 1e3)
    return np.maximum(x, 0) if seed % 3 == 0 else x + rng.normal()


@given(seeds)
@settings(max_examples=30)
def test_every_range_is_inside_the_data(seed):
    h = observed(sample(seed))
    for name in SEARCHES:
        scale = searched(name, h)
        assert h.minimum <= scale.lo or scale.lo >= 0, name
        assert scale.hi <= h.maximum, name
        assert 0 < scale.amax <= h.full_range * (1 + 0.5 / 2048)


@pytest.mark.parametrize("values", [[], [1.0, np.inf]])
def test_searches_need_finite_values(values):
    for name in SEARCHES:
        with pytest.raises(CalibrationError, match="finite values"):
            searched(name, observed(values))


@given(seeds)
@settings(max_examples=30)
def test_percentile_is_exact_within_a_bin(seed):
    x = sample(seed).astype(np.float32)
    h = observed(x)
    bin_width = h.full_range / BINS
    scale = percentile(h, percent=99)
    assert scale.amax == pytest.approx(np.quantile(np.abs(x), 0.99), abs=3 * bin_width + 0.05)
    if x.min() < 0:
        low = min(np.quantile(x, 0.01, method="inverted_cdf"), 0)
        assert abs(scale.lo - low) <= max(3 * bin_width, 0.1 * abs(low))


@pytest.mark.parametrize(
    ("params", "options", "reason"),
    [
        *((PercentileParams, {"percent": p}, "percentile") for p in (50, 0, 100.1, math.nan)),
        *((LpParams, {"power": p}, "a power must be 1 to 16") for p in (0.5, 17, math.nan, "3")),
    ],
)
def test_parameter_out_of_range_is_refused(params, options, reason):
    with pytest.raises(CalibrationError, match=reason):
        params(**options)


@given(seeds)
@settings(max_examples=15)
def test_mse_has_the_smallest_error(seed):
    x = sample(seed).astype(np.float32)
    for grid in (INT8, UINT8):
        losses = {}
        for name in SEARCHES:
            scale, zero = searched(name, observed(x)).on(grid)
            back = dequantize(quantize(x, scale, zero, grid), scale, zero)
            losses[name] = float(np.mean((back - x) ** 2, dtype=np.float64))
        assert losses["mse"] <= min(losses.values()) * 1.1  # a candidate step, and bins for values


def test_minmax_and_quantiles_of_known_values():
    scale = searched("minmax", observed(np.array([-3.5, 1.25])))
    assert (scale.lo, scale.hi, scale.amax) == (-3.5, 1.25, 3.5)
    counts = np.array([0, 2, 0, 2])
    assert [quantile(counts, s) for s in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 1.5, 2.0, 3.5, 4.0]
    h = observed(np.random.default_rng(0).normal(size=1000))
    scale = percentile(h, percent=100)
    assert scale.amax == pytest.approx(h.amax, abs=h.full_range / BINS)


@pytest.mark.parametrize("values", [[8.0], [8.0, 8.0001], [-8.0], [-8.0001, -8.0], [3.0, 8.0]])
def test_values_of_one_bin_have_ranges(values):
    for name in SEARCHES:
        scale = searched(name, observed(np.array(values * 50)))
        assert scale.lo <= scale.hi


@given(seeds)
@settings(max_examples=15)
def test_higher_power_clips_less(seed):
    h = observed(sample(seed))
    squared = mse(h)
    scales = [lp(h, power=power) for power in (2, 3, 16)]
    assert (scales[0].lo, scales[0].hi, scales[0].amax) == (squared.lo, squared.hi, squared.amax)
    # between neighbours of one error the minimum may jump, by a few hundredths of the range
    assert scales[0].amax <= scales[1].amax * 1.1
    assert scales[1].amax <= scales[2].amax * 1.1
    assert scales[2].amax >= 0.5 * h.amax


@given(seeds, st.sampled_from([1.0, 2.4, 3.0, 6.0, 16.0]))
@settings(max_examples=40)
def test_quick_search_equals_exact_sums(seed, power):
    x = sample(seed)
    h = observed(x if seed % 2 else x / (1 + np.exp(-np.clip(x, -50, 50))))
    quick_scale = lp(h, power=power)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_by_error, "_MAX_FLOAT32_BITS", 0)
        assert quick_scale == lp(h, power=power)


@pytest.fixture
def added(monkeypatch):
    """The number of ranges that were summed in each call."""
    sizes = []

    def counted(*args, **options):
        sizes.append(args[2].size)
        return range_errors(*args, **options)

    monkeypatch.setattr(ranges_by_error, "range_errors", counted)
    return sizes


def test_bins_are_summed_for_few_ranges(added, monkeypatch):
    lp(observed(np.random.default_rng(0).normal(size=100_000)), power=2.4)
    assert added
    assert max(added) < 20  # of 120
    added.clear()
    h = observed(np.random.default_rng(3).normal(size=5000))
    mse(h)
    assert sum(added) < 10
    monkeypatch.setattr(_Bins, "_candidates", lambda self, lows, highs: np.arange(lows.size))
    mse(h)
    assert sum(added) >= 3 * _RATIOS.size


UINT4 = unsigned_grid(4)


def values(seed):
    """Heavy tails, few values, whole numbers that tie, one side of 0: in turns."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(rng.uniform(1.2, 8), size=rng.integers(1, 3000)) * 10 ** rng.uniform(-5, 5)
    x = np.rint(x) if seed % 5 == 0 else x
    return (x, np.abs(x), -np.abs(x), np.concatenate([x, -x]))[seed % 4]


def by_bins(h, symmetric, affine):
    """The definition: every bin of every range, the first of the least errors."""
    middle = (np.arange(BINS) + 0.5) * h.full_range / BINS
    highs = h.amax * _RATIOS
    errors = range_errors(middle, h.magnitudes(BINS), -highs, highs, symmetric)
    edges = h.edges()
    centres, counts = (edges[:-1] + edges[1:]) / 2, h.signed()
    counts = np.where(centres == 0, 0, counts)
    ends = {"low": min(h.minimum, 0.0), "high": max(h.maximum, 0.0)}
    full_ends = dict(ends)
    for side in ("high", "low") * 2 if ends["high"] >= -ends["low"] else ("low", "high") * 2:
        lows, highs_ = (np.full(_RATIOS.size, ends[name]) for name in ("low", "high"))
        candidates = full_ends[side] * _RATIOS
        lows, highs_ = (candidates, highs_) if side == "low" else (lows, candidates)
        ends[side] = float(
            candidates[np.argmin(range_errors(centres, counts, lows, highs_, affine))]
        )
    return float(highs[np.argmin(errors)]), ends["low"], ends["high"]


@pytest.mark.slow
@given(seeds)
@settings(max_examples=25)
def test_mse_equals_the_exhaustive_search(seed):
    x = values(seed)
    if not x.any():
        return
    h = observed(x, base=float(np.abs(x[:7]).max()) if seed % 3 == 0 else None)
    for symmetric, affine in ((INT8, UINT8), (INT4, UINT4)):
        scale = mse(h, symmetric=symmetric, affine=affine)
        assert (scale.amax, scale.lo, scale.hi) == by_bins(h, symmetric, affine)


def test_tails_of_known_distributions():
    rng = np.random.default_rng(0)
    tails = [tail_length(observed(rng.exponential(0.7, 200_000) - 9)) for _ in range(8)]
    assert np.mean(tails) == pytest.approx(0.7 * math.log(100), rel=0.25)
    x = np.random.default_rng(1).uniform(-3, 5, 100_000)
    assert 0 <= tail_length(observed(x)) < 0.02
    x = np.concatenate([np.full(990, -1.0), np.arange(10)])  # the tenth from above is 0
    assert tail_length(observed(x)) == pytest.approx(9, abs=0.01)
    for count in (1, 50, 199):  # too few to have one
        assert tail_length(observed(np.linspace(-1, 1, count))) == 0


def test_tail_extends_only_the_upper_end():
    histogram = observed(np.random.default_rng(2).exponential(1, 10_000) - 6)
    plain = minmax(histogram)
    roomy = extend_by_tail(plain, histogram, 8.0)
    assert roomy.hi > plain.hi
    assert replace(roomy, hi=plain.hi) == plain


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=400), st.floats(-math.inf, 50))
def test_tail_extension_has_a_limit(values, limit):
    histogram = observed(values)
    if histogram.amax == 0:
        return
    plain = minmax(histogram)
    assert plain.hi <= extend_by_tail(plain, histogram, limit).hi <= max(plain.hi, limit)
