import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.amct.arq import (
    balance_factors,
    channel_max,
    channels_back,
    channels_first,
    weight_channel_max,
)
from calibrators.errors import CalibrationError

FLOAT = st.floats(2**-7, 100, width=32)


def test_known_factor():
    factor = balance_factors(np.float32([4.0, 9.0]), np.float32([1.0, 0.25]), strength=0.5)
    np.testing.assert_allclose(factor, [2.0, 6.0])


@settings(max_examples=40)
@given(st.lists(st.tuples(FLOAT, FLOAT), min_size=1, max_size=16))
def test_half_strength_levels_activation_and_weight(pairs):
    act, weight = np.array(pairs, np.float32).T
    factor = balance_factors(act, weight, strength=0.5)
    np.testing.assert_allclose(act / factor, weight * factor, rtol=1e-5)


def test_channels_without_data():
    act, weight = np.float32([0, 0, 4, 4]), np.float32([0, 2, 0, 1])
    factor = balance_factors(act, weight)
    # the last channel is ordinary: factor 2, so its weight becomes 2 and its activation 2
    np.testing.assert_allclose(factor, [1.0, 1.0, 1.0, 2.0])


def test_depthwise_and_grouped_weights():
    weight = np.arange(1, 9, dtype=np.float32).reshape(4, 2, 1, 1)
    np.testing.assert_array_equal(weight_channel_max(weight, group=2), [3, 4, 7, 8])
    np.testing.assert_array_equal(channel_max(weight, 1), [7, 8])


@pytest.mark.parametrize("group", [1, 2, 4])
def test_transposed_channels_round_trip(group):
    weight = np.arange(8 * 3 * 2 * 2, dtype=np.float32).reshape(8, 3, 2, 2)
    first = channels_first(weight, group)
    assert first.shape == (3 * group, 8 // group, 2, 2)
    np.testing.assert_array_equal(channels_back(first, group), weight)


@pytest.mark.parametrize("strength", [0.1, 0.9, float("nan")])
def test_strength_out_of_range(strength):
    with pytest.raises(CalibrationError, match=r"0\.2"):
        balance_factors(np.float32([1]), np.float32([1]), strength=strength)


def test_factor_out_of_range():
    with pytest.raises(CalibrationError, match="epsilon"):
        balance_factors(np.float32([1e20]), np.float32([1e-6]), strength=0.5)
