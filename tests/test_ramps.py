import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators import Histogram
from calibrators.grids import INT4, INT8, UINT8, Grid, unsigned
from calibrators.histogram import BINS
from calibrators.mse import _RATIOS, Ramps, _Bins, errors, mse

seeds = st.integers(0, 10_000)
UINT4 = unsigned(4)


def observed(x: np.ndarray, base: float | None = None) -> Histogram:
    h = Histogram(base=base)
    h.observe(x.astype(np.float32))
    return h


def values(seed: int) -> np.ndarray:
    """Heavy tails, few values, whole numbers that tie, one side of 0: in turns."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(rng.uniform(1.2, 8), size=rng.integers(1, 3000)) * 10 ** rng.uniform(-5, 5)
    x = np.rint(x) if seed % 5 == 0 else x
    return (x, np.abs(x), -np.abs(x), np.concatenate([x, -x]))[seed % 4]


def by_bins(h: Histogram, symmetric: Grid, affine: Grid) -> tuple[float, float, float]:
    """The definition: every bin of every range, the first of the least errors."""
    middle = (np.arange(BINS) + 0.5) * h.full_range / BINS
    highs = h.amax * _RATIOS
    tried = errors(middle, h.magnitudes(BINS), -highs, highs, symmetric)
    edges = h.edges()
    centres, counts = (edges[:-1] + edges[1:]) / 2, h.signed()
    counts = np.where(centres == 0, 0, counts)
    ends = {"low": min(h.minimum, 0.0), "high": max(h.maximum, 0.0)}
    first = dict(ends)
    for side in ("high", "low") * 2 if ends["high"] >= -ends["low"] else ("low", "high") * 2:
        lows, highs_ = (np.full(_RATIOS.size, ends[one]) for one in ("low", "high"))
        own = first[side] * _RATIOS
        lows, highs_ = (own, highs_) if side == "low" else (lows, own)
        ends[side] = float(own[np.argmin(errors(centres, counts, lows, highs_, affine))])
    return float(highs[np.argmin(tried)]), ends["low"], ends["high"]


@pytest.mark.slow
@given(seeds)
@settings(max_examples=25)
def test_the_quick_look_finds_what_every_bin_of_every_range_gives(seed):
    x = values(seed)
    if not x.any():
        return
    h = observed(x, base=float(np.abs(x[:7]).max()) if seed % 3 == 0 else None)
    for symmetric, affine in ((INT8, UINT8), (INT4, UINT4)):
        scale = mse(h, symmetric=symmetric, affine=affine)
        assert (scale.amax, scale.lo, scale.hi) == by_bins(h, symmetric, affine)


@given(seeds)
@settings(max_examples=25)
def test_ramps_are_the_errors_of_the_nearest_levels(seed):
    rng = np.random.default_rng(seed)
    above, below = rng.integers(0, 9, (2, 64)) * rng.integers(0, 2, (2, 1))
    centres = np.arange(64) + 0.5
    steps = rng.uniform(0.1, 9, 90)  # finer than a bin, and wider than all
    lowest, highest = -rng.integers(0, 300, 90) * 1.0, rng.integers(0, 300, 90) * 1.0
    found = Ramps.of(above, below).errors(steps, lowest, highest)
    for step, low, high, error in zip(steps, lowest, highest, found, strict=True):
        levels = np.arange(low, high + 1) * step
        near = [np.square(side[:, None] - levels).min(axis=1) for side in (centres, -centres)]
        assert error == pytest.approx(near[0] @ above + near[1] @ below, rel=1e-9, abs=1e-7)


def test_bins_are_added_up_for_few_ranges_alone(monkeypatch):
    from calibrators import mse as module

    added = []

    def counted(*args, **options):
        added.append(args[2].size)
        return errors(*args, **options)

    monkeypatch.setattr(module, "errors", counted)
    rng = np.random.default_rng(3)
    mse(observed(rng.normal(size=5000)))
    assert sum(added) < 10
    monkeypatch.setattr(_Bins, "_near", lambda self, lows, highs: np.arange(lows.size))
    mse(observed(rng.normal(size=5000)))
    assert sum(added) >= 3 * _RATIOS.size
