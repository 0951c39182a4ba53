import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.amct import hfmg as module
from calibrators.amct.hfmg import HfmgHistogram, HfmgParams, cuts, hfmg, respread
from calibrators.errors import CalibrationError


def seen(x, nbins=1024, batches=1):
    histogram = HfmgHistogram(nbins)
    for batch in np.array_split(np.asarray(x, np.float32), batches):
        histogram.observe(batch)
    return histogram


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [4, 8])
def test_fast_losses_match_bin_by_bin(seed, bits):
    rng = np.random.default_rng(seed)
    histogram = seen(rng.laplace(0, 1, 30_000))
    runs = cuts(histogram.counts)
    width = np.float32((histogram.hi - histogram.lo) / np.float32(1024))
    direct = [module._loss32(histogram.counts, left, right, width, bits) for left, right in runs]
    result = hfmg(histogram, HfmgParams(nbins=1024, bits=bits))
    assert result.candidate == int(np.argmin(direct))
    np.testing.assert_allclose(result.losses, direct, rtol=1e-3)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2000), min_size=64, max_size=64))
def test_cuts_shrink_from_the_outside(counts):
    runs = cuts(np.array(counts, np.int32))
    widths = runs[:, 1] - runs[:, 0]
    assert (np.diff(widths) < 0).all() and (np.diff(runs[:, 0]) >= 0).all()
    assert (np.diff(runs[:, 1]) <= 0).all() and widths[-1] <= 16


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 10_000), min_size=32, max_size=32),
    st.floats(0, 10, width=32),
    st.floats(0, 10, width=32),
)
def test_respreading_loses_no_count(counts, below, above):
    counts = np.array(counts, np.int32)
    new = (np.float32(-1 - below), np.float32(1 + above))
    out = respread(counts, (np.float32(-1), np.float32(1)), new)
    assert out.sum() == counts.sum() and (out >= 0).all()


@pytest.mark.parametrize("together", [2, 3, 5])
def test_samples_that_make_a_batch_are_the_batch(together):
    """Held until it is whole, and the last one as small as it is."""
    x = (
        np.random.default_rng(4).laplace(size=(5, 400)).astype(np.float32)
        * np.arange(1, 6)[:, None]
    )
    joined = HfmgHistogram(1024, together=together)
    for sample in x.astype(np.float32):
        joined.observe(sample)
    joined.end()
    plain = HfmgHistogram(1024)
    for start in range(0, 5, together):
        plain.observe(x[start : start + together].astype(np.float32))
    np.testing.assert_array_equal(joined.counts, plain.counts)
    assert joined.extremes == plain.extremes
    joined.end()  # nothing waits
    np.testing.assert_array_equal(joined.counts, plain.counts)


def test_a_refused_batch_changes_nothing():
    histogram = seen([1.0, 2.0, 3.0])
    before = histogram.counts.copy()
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        histogram.observe(np.array([np.nan], np.float32))
    np.testing.assert_array_equal(histogram.counts, before)


def test_no_batch_and_wrong_bins():
    with pytest.raises(CalibrationError, match="at least one"):
        hfmg(HfmgHistogram())
    with pytest.raises(CalibrationError, match="1000"):
        HfmgParams(nbins=1000)
