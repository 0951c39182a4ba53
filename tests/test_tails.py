import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrators.histogram import Histogram
from calibrators.percentile import minmax, tail, with_room


def seen(x):
    histogram = Histogram()
    histogram.observe(np.asarray(x, np.float32))
    return histogram


def test_an_even_tail_goes_on_to_what_a_hundred_times_as_many_values_hold():
    rng = np.random.default_rng(0)
    found = [tail(seen(rng.exponential(0.7, 200_000) - 9)) for _ in range(8)]
    assert np.mean(found) == pytest.approx(0.7 * math.log(100), rel=0.25)


def test_a_sharp_end_gets_next_to_no_room():
    x = np.random.default_rng(1).uniform(-3, 5, 100_000)
    assert 0 <= tail(seen(x)) < 0.02


@pytest.mark.parametrize("count", [1, 50, 199])
def test_few_values_have_no_tail(count):
    assert tail(seen(np.linspace(-1, 1, count))) == 0


def test_the_rank_of_some_values_is_a_hundredth_of_them():
    x = np.concatenate([np.full(990, -1.0), np.arange(10)])  # the tenth from above is 0
    assert tail(seen(x)) == pytest.approx(9, abs=0.01)


def test_room_is_for_the_upper_end_of_the_affine_range_alone():
    histogram = seen(np.random.default_rng(2).exponential(1, 10_000) - 6)
    plain = minmax(histogram)
    roomy = with_room(plain, histogram, 8.0)
    assert roomy.hi > plain.hi
    assert (roomy.lo, roomy.amax, roomy.method) == (plain.lo, plain.amax, plain.method)
    assert (roomy.observed_min, roomy.observed_max) == (plain.observed_min, plain.observed_max)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=400), st.floats(-math.inf, 50))
def test_room_lowers_no_end_and_goes_no_further_than_asked(values, most):
    histogram = seen(values)
    if histogram.amax == 0:
        return
    plain = minmax(histogram)
    roomy = with_room(plain, histogram, most)
    assert plain.hi <= roomy.hi <= max(plain.hi, most)
