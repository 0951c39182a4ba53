import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrators.errors import CalibrationError
from calibrators.grids import (
    INT8,
    UINT8,
    affine_params,
    dequantize,
    quantize,
    quantize_weight,
    weight_scales,
)

reals = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@given(reals, reals)
def test_an_affine_range_holds_zero_exactly_and_its_ends_within_half_a_step(a: float, b: float):
    lo, hi = min(a, b), max(a, b)
    scale, zero_point = affine_params(lo, hi)
    assert 0 <= zero_point <= 255
    assert dequantize(np.array([zero_point], np.uint8), scale, zero_point)[0] == 0
    if hi > lo:
        ends = np.array([lo, hi], np.float32)
        back = dequantize(quantize(ends, scale, zero_point, UINT8), scale, zero_point)
        assert np.all(np.abs(back - ends) <= 0.5001 * scale + 1e-6 * np.abs(ends).max())


def test_rounding_is_half_to_even():
    q = quantize(np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32), np.float32(1), 0, INT8)
    assert q.tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("bad", [(np.nan, 1.0), (0.0, np.inf), (2.0, 1.0)])
def test_a_clip_range_that_is_not_finite_or_reversed_is_refused(bad):
    with pytest.raises(CalibrationError, match="clip range"):
        affine_params(*bad)


def test_weight_scales_per_channel_and_per_tensor():
    weight = np.array([[1.0, -2.0], [0.0, 0.0], [127.0, 3.0]], np.float32)
    assert weight_scales(weight, 0).tolist() == [np.float32(2 / 127), 1.0, 1.0]
    assert weight_scales(weight, None).tolist() == [1.0]
    assert quantize_weight(weight, weight_scales(weight, 0), 0).tolist() == [
        [64, -127],
        [0, 0],
        [127, 3],
    ]


def test_a_weight_with_nan_is_refused():
    with pytest.raises(CalibrationError, match="1 NaN or Inf"):
        weight_scales(np.array([[1.0, np.nan]], np.float32), 0)
