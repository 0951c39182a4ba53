import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrators.errors import CalibrationError
from calibrators.histogram import BINS, Histogram, close_range, range_for

values = hnp.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False),
)


# powers of two are the values that can lie on a range's end
ends = hnp.arrays(np.float32, st.integers(1, 6), elements=st.sampled_from([-4, -2, -1, 1, 2, 4, 3]))


def plain_counts(x, full_range):
    """The definition, value by value."""
    counts = np.zeros(2 * BINS + 1, np.int64)
    for value in x.astype(np.float32):
        counts[BINS + math.trunc(float(value * np.float32(BINS / full_range)))] += 1
    return counts


def state(h):
    return (h.counts.tolist(), h.full_range, h.minimum, h.maximum, h.total, h.infinite)


def observed(*batches, base=None):
    h = Histogram(base=base)
    for batch in batches:
        h.observe(np.asarray(batch, np.float32))
    return h


@given(values)
@settings(max_examples=50)
def test_counts_are_those_of_the_definition(x):
    h = observed(x)
    if h.amax > 0:
        assert h.full_range == range_for(h.amax)
        assert h.full_range / 2 < h.amax <= h.full_range or h.amax < 2.0**-100
        assert h.counts.tolist() == plain_counts(x, h.full_range).tolist()
    assert h.counts.sum() == x.size == h.total


@given(values | ends, st.lists(st.integers(0, 200), max_size=5), st.randoms())
@settings(max_examples=50)
def test_any_split_any_order_and_any_merge_tree_gives_the_same_state(x, cuts, random):
    parts = np.split(x, sorted(min(c, x.size) for c in cuts))
    random.shuffle(parts)
    merged = Histogram()
    for part in parts:
        merged.merge(observed(part))
    assert state(observed(*parts)) == state(observed(x)) == state(merged)


@given(values, values)
@settings(max_examples=50)
def test_a_base_range_doubles_as_if_the_larger_range_had_been_there_from_the_start(first, later):
    base = float(np.abs(first).max())
    if base < 1e-20:
        return
    h = observed(first, base=base)
    assert h.full_range == base and h.counts[0] == h.counts[-1] == 0
    h.observe(later)
    ratio = math.log2(h.full_range / base)
    assert ratio == int(ratio) >= 0
    inside = first[np.abs(first) < base]  # TensorRT counts |x| == R one bin lower
    expected = close_range(plain_counts(np.concatenate([inside, later]), h.full_range))
    moved = h.counts - expected
    assert moved.sum() == first.size - inside.size and moved.min() >= 0


@pytest.mark.parametrize("relu", [False, True])
def test_many_values_are_counted_as_numpy_counts_them(relu):
    x = np.random.default_rng(1).normal(size=400_001).astype(np.float32)
    x = np.maximum(x, 0) if relu else x
    h = observed(x)
    index = (x * np.float32(BINS / h.full_range)).astype(np.int64) + BINS
    assert h.counts.tolist() == np.bincount(index, minlength=2 * BINS + 1).tolist()


def test_magnitudes_fold_both_signs_and_nest_into_fewer_bins():
    h = observed([-1.0, 1.0, 0.5, -0.25, 0.0])
    fine, coarse = h.magnitudes(BINS), h.magnitudes(2048)
    assert fine[BINS - 1] == 2 and coarse[2047] == 2
    assert coarse[1024] == 1 and coarse[512] == 1 and coarse[0] == 1
    assert fine.reshape(2048, 2).sum(axis=1).tolist() == coarse.tolist()


def test_nan_infinities_zeros_and_bases():
    with pytest.raises(CalibrationError, match="1 NaN"):
        observed([1.0, np.nan])
    h = observed([np.inf, -np.inf, 2.0])
    assert (h.infinite, h.total, h.amax) == (2, 1, 2.0)
    h = observed([])
    assert (h.total, h.amax, h.full_range) == (0, 0.0, 0.0)
    h.observe(np.zeros(4, np.float32))
    assert (h.total, h.amax, h.counts[BINS]) == (4, 0.0, 4)
    h.observe(np.array([3.0], np.float32))
    assert h.full_range == 4.0 and h.counts[BINS] == 4
    with pytest.raises(CalibrationError, match="equal bases"):
        Histogram(base=1.0).merge(Histogram())


@given(values | ends, values | ends)
@settings(max_examples=50)
def test_what_is_left_without_some_values_is_what_the_others_gave(others, taken):
    whole, own, rest = observed(others, taken), observed(taken), observed(others)
    left = whole.without(own)
    same = Histogram()
    same.full_range = whole.full_range
    same.merge(rest)
    assert left.counts.tolist() == same.counts.tolist() and left.full_range == whole.full_range
    assert (left.total, left.infinite) == (rest.total, 0)
    width = 2 * whole.full_range / BINS  # of the bin around 0, which is the widest
    assert whole.minimum <= left.minimum <= rest.minimum <= left.minimum + width
    assert left.maximum - width <= rest.maximum <= left.maximum <= whole.maximum


def test_nothing_is_left_of_a_whole_and_no_count_falls_below_nothing():
    whole = observed([1, -2])
    assert state(whole.without(whole)) == state(Histogram())
    other = observed([1.9, 5])  # not among them, as after another optimization
    assert (left := whole.without(other)).counts.min() == 0 and left.total == 2
    with pytest.raises(CalibrationError, match="of no order"):
        Histogram(base=1.0).without(other)
