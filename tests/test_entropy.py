from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrators.entropy import BINS, _divergences, divergence, entropy, search_bins, threshold
from calibrators.histogram import Histogram

LENET = Path("../shared/golden/tensorrt/lenet/histograms.npz")
INDICES = dict(data=2040, conv1=704, conv2=962, fc1=1153, ip1=1155, ip2=1289, prob=1081)


@pytest.mark.skipif(not LENET.exists(), reason="the LeNet histograms are not beside this checkout")
@pytest.mark.parametrize("name", INDICES)
def test_index_equals_tensorrts_choice(name):
    assert search_bins(np.load(LENET)[name].astype(np.int64)) == INDICES[name]


counts = st.one_of(st.just(0), st.integers(0, 10_000))
histograms = hnp.arrays(np.int64, BINS, elements=counts, fill=st.just(0))


@pytest.mark.slow
@given(histograms)
@settings(max_examples=20)
def test_prefix_sums_find_the_last_minimum(histogram):
    h = histogram.astype(np.float64)
    h[0] = 0
    if not h.any():
        assert search_bins(histogram) == BINS
        return
    exact = np.array([divergence(h, i) for i in range(128, BINS + 1)])
    finite = np.isfinite(exact)
    assert np.array_equal(finite, np.isfinite(_divergences(h)))
    assert np.allclose(exact[finite], _divergences(h)[finite], atol=1e-10)
    assert search_bins(histogram) == BINS - int(np.argmin(exact[::-1]))


def test_a_tie_and_a_constant():
    h = np.zeros(BINS, np.int64)
    h[[512, 1024, 2047]] = 7  # three isolated values: nothing is lost at i = 2048
    assert divergence(h.astype(float), 2048) == 0.0
    assert search_bins(h) == 2048
    h = Histogram()
    h.observe(np.ones(10, np.float32))
    assert entropy(h).amax == 2048.5 / 2048 == threshold(2048, 1.0)
    assert (entropy(h).lo, entropy(h).hi) == (1.0, 1.0)
