"""Shifts of a uint8 range by whole steps, for gates in ONNX Runtime."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.grids import affine_params
from deploy.targets.onnxruntime.uint8_gates import fit_input_shift, fit_output_offset

RANGES = st.tuples(st.floats(0.01, 50), st.floats(0.01, 50))


@settings(max_examples=300)
@given(RANGES, st.floats(-10, 10))
def test_input_shift_is_whole_steps(ends, shift):
    low, high = ends
    scale, zero = affine_params(-low, high)
    shifted = fit_input_shift(scale, zero, shift)
    if not shifted.steps:
        assert (shifted.scale, shifted.zero) == (scale, zero)
        # a range that reaches to the shift has steps
        assert shift <= 0 or low < shift or (low + high) / 255 >= shift / 4
        return
    assert shift > 0  # nothing is shifted downwards
    assert np.isclose(shifted.steps * float(shifted.scale), shift, rtol=1e-6)
    assert shifted.zero - shifted.steps >= 0  # the other zero point is one that uint8 holds
    half = float(scale) / 2 + 1e-6
    assert shifted.zero * float(shifted.scale) >= min(low, zero * float(scale)) - 2 * half
    assert (255 - shifted.zero) * float(shifted.scale) >= high - 3 * half
    assert scale <= shifted.scale * (1 + 1e-6)
    assert shifted.scale <= scale * 4 / 3 * (1 + 1e-6)


@given(RANGES, st.floats(-10, 10))
def test_output_offset_is_whole_steps(ends, offset):
    scale, zero = affine_params(-ends[0], ends[1])
    fitted = fit_output_offset(scale, zero, offset)
    assert not fitted.steps or np.isclose(fitted.steps * float(fitted.scale), offset, rtol=1e-5)
    assert 0 <= fitted.zero + fitted.steps <= 255
