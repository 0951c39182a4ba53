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
    h = Histogram(initial_range=base)
    for batch in batches:
        h.observe(np.asarray(batch, np.float32))
    return h


@given(values)
@settings(max_examples=50)
def test_counts_follow_the_definition(x):
    h = observed(x)
    if h.amax > 0:
        assert h.full_range == range_for(h.amax)
        assert h.full_range / 2 < h.amax <= h.full_range or h.amax < 2.0**-100
        assert h.counts.tolist() == plain_counts(x, h.full_range).tolist()
    assert h.counts.sum() == x.size == h.total


@given(values | ends, st.lists(st.integers(0, 200), max_size=5), st.randoms())
@settings(max_examples=50)
def test_split_and_order_keep_the_state(x, cuts, random):
    parts = np.split(x, sorted(min(c, x.size) for c in cuts))
    random.shuffle(parts)
    merged = Histogram()
    for part in parts:
        merged.merge(observed(part))
    assert state(observed(*parts)) == state(observed(x)) == state(merged)


@given(values, values)
@settings(max_examples=50)
def test_base_range_doubles_without_trace(first_batch, later_batch):
    base = float(np.abs(first_batch).max())
    if base < 1e-20:
        return
    h = observed(first_batch, base=base)
    assert h.full_range == base
    assert h.counts[0] == h.counts[-1] == 0
    h.observe(later_batch)
    ratio = math.log2(h.full_range / base)
    assert ratio == int(ratio) >= 0
    counted_batch = first_batch[
        np.abs(first_batch) < base
    ]  # TensorRT counts |x| == R one bin lower
    expected = close_range(plain_counts(np.concatenate([counted_batch, later_batch]), h.full_range))
    moved_counts = h.counts - expected
    assert moved_counts.sum() == first_batch.size - counted_batch.size
    assert moved_counts.min() >= 0


@pytest.mark.parametrize("relu", [False, True])
def test_many_values_are_counted_like_numpy(relu):
    x = np.random.default_rng(1).normal(size=400_001).astype(np.float32)
    x = np.maximum(x, 0) if relu else x
    h = observed(x)
    index = (x * np.float32(BINS / h.full_range)).astype(np.int64) + BINS
    assert h.counts.tolist() == np.bincount(index, minlength=2 * BINS + 1).tolist()


def test_magnitudes_fold_signs_and_nest():
    h = observed([-1.0, 1.0, 0.5, -0.25, 0.0])
    fine, coarse = h.magnitudes(BINS), h.magnitudes(2048)
    assert fine[BINS - 1] == 2
    assert coarse[2047] == 2
    assert coarse[1024] == 1
    assert coarse[512] == 1
    assert coarse[0] == 1
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
    assert h.full_range == 4.0
    assert h.counts[BINS] == 4
    with pytest.raises(CalibrationError, match="equal initial ranges"):
        Histogram(initial_range=1.0).merge(Histogram())


@given(values | ends, values | ends)
@settings(max_examples=50)
def test_without_leaves_the_remaining_counts(remaining_batch, removed_batch):
    complete = observed(remaining_batch, removed_batch)
    removed = observed(removed_batch)
    expected = observed(remaining_batch)
    remaining = complete.without(removed)
    expected_counts = Histogram()
    expected_counts.full_range = complete.full_range
    expected_counts.merge(expected)
    assert remaining.counts.tolist() == expected_counts.counts.tolist()
    assert remaining.full_range == complete.full_range
    assert (remaining.total, remaining.infinite) == (expected.total, 0)
    width = 2 * complete.full_range / BINS  # of the bin around 0, which is the widest
    assert complete.minimum <= remaining.minimum <= expected.minimum <= remaining.minimum + width
    assert remaining.maximum - width <= expected.maximum <= remaining.maximum <= complete.maximum


def test_without_never_counts_below_zero():
    complete = observed([1, -2])
    assert state(complete.without(complete)) == state(Histogram())
    foreign = observed([1.9, 5])  # not among them, as after another optimization
    assert (remaining := complete.without(foreign)).counts.min() == 0
    assert remaining.total == 2
    with pytest.raises(CalibrationError, match="TensorRT"):
        Histogram(initial_range=1.0).without(foreign)
