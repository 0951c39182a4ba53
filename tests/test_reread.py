import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from calibrators.grids import affine_params
from deploy.targets.onnxruntime.uint8_forms import with_offset, with_shift

RANGES = st.tuples(st.floats(0.01, 50), st.floats(0.01, 50))


@given(RANGES, st.floats(0.01, 10))
def test_integers_of_a_shifted_tensor_are_its_own_from_a_lower_zero_point(ends, shift):
    low, high = ends
    scale, zero = affine_params(-low, high)
    got = with_shift(scale, zero, shift)
    if not got.steps:
        assert (got.scale, got.zero) == (scale, zero)
        return
    assert np.isclose(got.steps * float(got.scale), shift, rtol=1e-6)
    assert got.zero - got.steps >= 0  # the other zero point is one that uint8 holds
    half = float(scale) / 2 + 1e-6
    assert got.zero * float(got.scale) >= min(low, zero * float(scale)) - 2 * half
    assert (255 - got.zero) * float(got.scale) >= high - 3 * half
    assert scale <= got.scale * (1 + 1e-6) and got.scale <= scale * 4 / 3 * (1 + 1e-6)


@given(RANGES, st.floats(0.01, 10))
def test_a_range_that_reaches_to_the_shift_has_steps(ends, shift):
    low, high = ends
    assume(low >= shift and (low + high) / 255 < shift / 4)
    scale, zero = affine_params(-low, high)
    assert with_shift(scale, zero, shift).steps


@given(RANGES, st.floats(-10, 0))
def test_nothing_is_shifted_downwards(ends, shift):
    scale, zero = affine_params(-ends[0], ends[1])
    assert not with_shift(scale, zero, shift).steps


@given(RANGES, st.floats(-10, 10))
def test_an_offset_is_a_whole_number_of_steps(ends, offset):
    scale, zero = affine_params(-ends[0], ends[1])
    got = with_offset(scale, zero, offset)
    assert not got.steps or np.isclose(got.steps * float(got.scale), offset, rtol=1e-5)
    assert 0 <= got.zero + got.steps <= 255
