import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators import SEARCHES, Histogram, Scale
from calibrators import mse as ranges_by_error
from calibrators.errors import CalibrationError
from calibrators.grids import INT8, UINT8, dequantize, quantize
from calibrators.histogram import BINS
from calibrators.mse import lp, mse
from calibrators.percentile import percentile, quantile
from calibrators.searches import LpParams, PercentileParams

seeds = st.integers(0, 10_000)


def observed(x: np.ndarray) -> Histogram:
    h = Histogram()
    h.observe(x.astype(np.float32))
    return h


def searched(name: str, histogram: Histogram) -> Scale:
    row = SEARCHES[name]
    return row.function(histogram, row.params())


def sample(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_t(rng.uniform(1.5, 8), size=4000) * rng.uniform(1e-3, 1e3)
    return np.maximum(x, 0) if seed % 3 == 0 else x + rng.normal()


@given(seeds)
@settings(max_examples=30)
def test_every_search_gives_a_range_inside_the_data(seed):
    h = observed(sample(seed))
    for name in SEARCHES:
        scale = searched(name, h)
        assert h.minimum <= scale.lo or scale.lo >= 0, name
        assert scale.hi <= h.maximum, name
        assert 0 < scale.amax <= h.full_range * (1 + 0.5 / 2048)


@given(seeds)
@settings(max_examples=30)
def test_percentiles_are_those_of_the_values_within_a_bin(seed):
    x = sample(seed).astype(np.float32)
    h = observed(x)
    bin_width = h.full_range / BINS
    scale = percentile(h, percent=99)
    assert scale.amax == pytest.approx(np.quantile(np.abs(x), 0.99), abs=3 * bin_width + 0.05)
    if x.min() < 0:
        low = min(np.quantile(x, 0.01, method="inverted_cdf"), 0)
        assert abs(scale.lo - low) <= max(3 * bin_width, 0.1 * abs(low))


def test_percentile_100_is_minmax_within_a_bin():
    h = observed(np.random.default_rng(0).normal(size=1000))
    scale = percentile(h, percent=100)
    assert scale.amax == pytest.approx(h.amax, abs=h.full_range / BINS)


def test_quantile_positions():
    counts = np.array([0, 2, 0, 2])
    assert [quantile(counts, s) for s in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 1.5, 2.0, 3.5, 4.0]


@pytest.mark.parametrize("percent", [50, 0, 100.1, float("nan")])
def test_a_percentile_out_of_range_is_refused(percent):
    with pytest.raises(CalibrationError, match="percentile"):
        PercentileParams(percent=percent)


@given(seeds)
@settings(max_examples=15)
def test_mse_is_no_worse_than_any_other_search(seed):
    x = sample(seed).astype(np.float32)
    h = observed(x)
    losses = {}
    for name in SEARCHES:
        for grid in (INT8, UINT8):
            scale, zero = searched(name, h).on(grid)
            back = dequantize(quantize(x, scale, zero, grid), scale, zero)
            losses[name, grid.name] = float(np.mean((back - x) ** 2, dtype=np.float64))
    for (_, grid_name), loss in losses.items():
        assert losses["mse", grid_name] <= loss * 1.1  # a candidate step, and bins for values


def test_minmax_is_exact():
    scale = searched("minmax", observed(np.array([-3.5, 1.25])))
    assert (scale.lo, scale.hi, scale.amax) == (-3.5, 1.25, 3.5)


@pytest.mark.parametrize("values", [[8.0], [8.0, 8.0001], [-8.0], [-8.0001, -8.0], [3.0, 8.0]])
def test_values_of_one_bin_have_a_range_by_every_search(values):
    for name in SEARCHES:
        scale = searched(name, observed(np.array(values * 50)))
        assert scale.lo <= scale.hi


@given(seeds)
@settings(max_examples=15)
def test_a_higher_power_clips_less_and_the_second_is_mse(seed):
    h = observed(sample(seed))
    squared = mse(h)
    found = [lp(h, power=power) for power in (2, 3, 16)]
    assert (found[0].lo, found[0].hi, found[0].amax) == (squared.lo, squared.hi, squared.amax)
    # between neighbours of one error the minimum may jump, by a few hundredths of the range
    assert found[0].amax <= found[1].amax * 1.1
    assert found[1].amax <= found[2].amax * 1.1
    assert found[2].amax >= 0.5 * h.amax


@pytest.mark.parametrize("power", [0.5, 17, float("nan"), "3"])
def test_a_power_out_of_range_is_refused(power):
    with pytest.raises(CalibrationError, match="a power must be 1 to 16"):
        LpParams(power=power)


@given(seeds, st.sampled_from([1.0, 2.4, 3.0, 6.0, 16.0]))
@settings(max_examples=40)
def test_a_quick_look_in_float32_finds_what_adding_up_all_ranges_finds(seed, power):
    x = sample(seed)
    h = observed(x if seed % 2 else x / (1 + np.exp(-np.clip(x, -50, 50))))
    found = lp(h, power=power)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_by_error, "_QUICK_BITS", 0)
        assert found == lp(h, power=power)


def test_a_quick_look_tries_few_ranges_again(monkeypatch):
    tried = []
    errors = ranges_by_error.errors
    monkeypatch.setattr(
        ranges_by_error, "errors", lambda *a, **k: tried.append(a[2].size) or errors(*a, **k)
    )
    lp(observed(np.random.default_rng(0).normal(size=100_000)), power=2.4)
    assert tried and max(tried) < 20  # of 120
