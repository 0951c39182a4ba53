"""Grids of integers and floats, and how a GPU's memory holds them."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrators.amct.arq import arq_integers
from calibrators.errors import CalibrationError
from calibrators.grids import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8,
    GRIDS,
    INT4,
    INT8,
    INT16,
    UINT8,
    UINT16,
    affine_params,
    dequantize,
    quantize,
    quantize_weight,
    signed_grid,
    symmetric_scale,
    unsigned_grid,
    weight_scales,
)
from calibrators.scales import Scale
from calibrators.tensorrt import BITS, from_device, host_type, to_device

reals = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@given(reals, reals)
def test_affine_range_represents_zero_and_ends(a, b):
    lo, hi = min(a, b), max(a, b)
    scale, zero_point = affine_params(lo, hi)
    assert 0 <= zero_point <= 255
    assert affine_params(0.0, 0.0) == (1, 0)
    assert dequantize(np.array([zero_point], np.uint8), scale, zero_point)[0] == 0
    if hi > lo:
        ends = np.array([lo, hi], np.float32)
        back = dequantize(quantize(ends, scale, zero_point, UINT8), scale, zero_point)
        coarse = 255 * 2.0**-150  # a scale below float32's normal numbers is itself rounded
        assert np.all(np.abs(back - ends) <= 0.5001 * scale + 1e-6 * np.abs(ends).max() + coarse)


def test_rounding_is_half_to_even():
    q = quantize(np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32), np.float32(1), 0, INT8)
    assert q.tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("bad", [(np.nan, 1.0), (0.0, np.inf), (2.0, 1.0), (0.0, 1e300)])
def test_bad_clip_range_is_refused(bad):
    with pytest.raises(CalibrationError, match=re.escape(f"got [{bad[0]}, {bad[1]}]")):
        affine_params(*bad)


def test_weight_scales_by_channel_or_tensor(wording):
    weight = np.array([[1.0, -2.0], [0.0, 0.0], [127.0, 3.0]], np.float32)
    assert weight_scales(weight, 0).tolist() == [np.float32(2 / 127), 1.0, 1.0]
    assert weight_scales(weight, None).tolist() == [1.0]
    stored = quantize_weight(weight, weight_scales(weight, 0), 0)
    assert stored.tolist() == [[64, -127], [0, 0], [127, 3]]
    for bad in (np.nan, 1e300):  # beyond float32
        with pytest.raises(CalibrationError, match="1 NaN or Inf"):
            weight_scales(np.array([[1.0, bad]]), 0)
    with pytest.raises(CalibrationError) as refusal:
        weight_scales(weight, 2)
    wording.check(refusal.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_scale_must_be_finite_and_positive(bad, wording):
    x, scale = np.ones(2, np.float32), np.float32([bad])
    for call in (
        lambda: quantize(x, scale, 0, INT8),
        lambda: quantize_weight(x, scale, None),
        lambda: arq_integers(x, scale),
    ):
        with pytest.raises(CalibrationError) as refusal:
            call()
        wording.check(refusal.value)
    if bad != 0:  # a threshold of 0 has scale 0
        with pytest.raises(CalibrationError) as refusal:
            symmetric_scale(bad)
        wording.check(refusal.value)


# -- other grids ------------------------------------------------------------------------------
grids = st.sampled_from(list(GRIDS.values()))

short = st.sampled_from([grid for grid in GRIDS.values() if grid.scaled])
sizes = st.floats(2.0**-60, 2.0**60, width=32)


def scale_of(amax, lo=None, hi=None):
    low, high = -amax if lo is None else lo, amax if hi is None else hi
    return Scale(lo=low, hi=high, amax=amax, observed_min=low, observed_max=high, method="test")


def test_table_lists_grids_and_ends():
    assert all(name == grid.name for name, grid in GRIDS.items())
    assert {name: (grid.bits, grid.qmin, grid.qmax) for name, grid in GRIDS.items()} == {
        "int4": (4, -8, 7),
        "int8": (8, -128, 127),
        "int16": (16, -32768, 32767),
        "uint8": (8, 0, 255),
        "uint16": (16, 0, 65535),
        "fp8": (8, -448, 448),
        "float16": (16, -65504, 65504),
        "bfloat16": (16, -3.3895313892515355e38, 3.3895313892515355e38),
        "float32": (32, -3.4028234663852886e38, 3.4028234663852886e38),
    }
    assert signed_grid(8) == INT8
    assert unsigned_grid(8) == UINT8
    assert FLOAT16.qmax == np.finfo("f2").max


@pytest.mark.parametrize(("make", "sign"), [(signed_grid, ""), (unsigned_grid, "u")])
def test_integers_use_the_smallest_type(make, sign):
    for bits, dtype in ((2, "int8"), (8, "int8"), (9, "int16"), (16, "int16")):
        assert make(bits).dtype == f"{sign}{dtype}"
    for bits in (1, 17):
        with pytest.raises(CalibrationError, match="2 to 16 bits"):
            make(bits)


@pytest.mark.parametrize(
    ("grid", "ends", "scale"),
    [
        (INT4, (), (3 / 7, 0)),
        (INT8, (), (3 / 127, 0)),
        (INT16, (), (3 / 32767, 0)),
        (FP8, (), (3 / 448, 0)),
        (FLOAT16, (), (1, 0)),
        (BFLOAT16, (), (1, 0)),
        (FLOAT32, (), (1, 0)),
        (UINT8, (-1.0, 3.0), (4 / 255, 64)),
        (UINT16, (-1.0, 3.0), (4 / 65535, 16384)),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_range_scales_on_each_grid(grid, ends, scale):
    assert scale_of(3.0, *ends).on(grid) == (np.float32(scale[0]), scale[1])


@given(grids, sizes, sizes)
def test_values_in_range_are_not_clipped(grid, a, b):
    lo, hi = (-a, b) if not grid.symmetric else (-max(a, b), max(a, b))
    scale, zero = scale_of(max(a, b), lo, hi).on(grid)
    ends = np.array([lo, hi], np.float32)
    back = dequantize(quantize(ends, scale, zero, grid), scale, zero)
    largest = np.abs(ends).max()
    if grid.kind == "integer":
        assert np.all(np.abs(back - ends) <= 0.501 * scale + 1e-6 * largest)
    elif grid.scaled:
        assert np.allclose(back, ends, rtol=1e-6)
    elif largest < grid.qmax and np.abs(ends).min() >= 2.0**grid.least_exponent:
        assert np.all(np.abs(back - ends) <= np.abs(ends) * 2.0 ** -(grid.mantissa + 1))


@given(short, sizes, st.floats(1, 1000), st.lists(st.floats(0, 8, width=32), min_size=1))
def test_wider_range_never_clips_more(grid, amax, wider, values):
    x = np.array([*values, np.inf], np.float32) * np.float32(amax)
    clipped = []
    for end in (amax, amax * wider):
        scale, zero = scale_of(end).on(grid)
        reach = dequantize(quantize(x, scale, zero, grid), scale, zero)[-1]
        assert reach >= np.float32(end) * (1 - 1e-6) - end / grid.qmax
        clipped.append(np.maximum(x[:-1] - reach, 0))
    assert np.all(clipped[1] <= clipped[0])


@given(grids, sizes, st.lists(st.floats(-4, 4, width=32), min_size=1))
def test_grid_values_survive_quantization(grid, amax, values):
    scale, zero = scale_of(amax).on(grid)
    stored = quantize(np.array(values, np.float32) * np.float32(amax), scale, zero, grid)
    assert stored.dtype == grid.dtype
    stored_again = quantize(dequantize(stored, scale, zero), scale, zero, grid)
    assert np.array_equal(stored, stored_again)


def e4m3(code):
    """The value of one of the 256 codes, as the paper's table 1 tells it."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)
UNIT_SCALE = np.float32(1)


def test_fp8_rounds_to_nearest_and_saturates():
    assert np.array_equal(quantize(E4M3, UNIT_SCALE, 0, FP8), E4M3, equal_nan=True)
    assert np.nanmax(E4M3) == FP8.qmax
    assert np.nanmin(E4M3[E4M3 > 0]) == 2.0**-9
    values = np.unique(E4M3[np.isfinite(E4M3)])  # -0 and 0 are one
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact in float32
    below, above = np.nextafter(middle, low), np.nextafter(middle, high)
    assert np.array_equal(quantize(below, UNIT_SCALE, 0, FP8), low)
    assert np.array_equal(quantize(above, UNIT_SCALE, 0, FP8), high)
    is_even_by_value = {value: code % 2 == 0 for code, value in enumerate(E4M3.tolist())}
    expected = np.where([is_even_by_value[v] for v in low.tolist()], low, high)
    assert np.array_equal(quantize(middle, UNIT_SCALE, 0, FP8), expected)
    outside = np.array([464, 465, 1e30, np.inf, -500, -np.inf], np.float32)
    assert quantize(outside, UNIT_SCALE, 0, FP8).tolist() == [448, 448, 448, 448, -448, -448]


@pytest.mark.parametrize(
    ("grid", "theirs"), [(FP8, "float8_e4m3fn"), (FLOAT16, "float16"), (BFLOAT16, "bfloat16")]
)
@given(st.lists(st.floats(-1e39, 1e39), min_size=1), st.integers(-140, 0))
def test_float_rounding_equals_ml_dtypes(grid, theirs, values, power):
    dtype = getattr(pytest.importorskip("ml_dtypes"), theirs, None) or np.dtype(theirs)
    with np.errstate(over="ignore", under="ignore"):
        x = (np.array(values) * 2.0**power).astype(np.float32)
        clipped = np.clip(x, grid.qmin, grid.qmax)  # theirs gives NaN or infinity beyond
        expected = clipped.astype(dtype).astype(np.float32)
    assert np.array_equal(quantize(x, UNIT_SCALE, 0, grid).astype(np.float32), expected)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_float32_grid_keeps_every_value(values):
    x = np.array(values, np.float32)
    assert np.array_equal(quantize(x, *scale_of(1.0).on(FLOAT32), FLOAT32), x)


@pytest.mark.parametrize(
    "grid", [signed_grid(4), signed_grid(7), INT8, INT16, FP8], ids=lambda g: g.name
)
def test_weight_extreme_is_the_grid_end(grid):
    weight = np.array([[0.3, -2.0], [0.0, 0.0], [5.0, 3.0]], np.float32)
    scales = weight_scales(weight, 0, grid=grid)
    assert scales.tolist() == [np.float32(2 / grid.qmax), 1.0, np.float32(5 / grid.qmax)]
    stored = quantize_weight(weight, scales, 0, grid=grid)
    assert stored.dtype == grid.dtype
    assert stored[0, 1] == -grid.qmax
    assert stored[2, 0] == grid.qmax
    back = dequantize(stored, scales[:, None], 0)
    assert np.abs(back - weight).max() <= 5 / grid.qmax * (16 if grid is FP8 else 0.51)


# -- in a GPU's memory ------------------------------------------------------------------------
def narrow(dtype):
    types = pytest.importorskip("ml_dtypes")  # comes with onnx 1.19 and later
    return {"bfloat16": types.bfloat16, "float8": types.float8_e4m3fn}[dtype]


@pytest.mark.parametrize("dtype", BITS)
def test_every_float_code_survives(dtype):
    kind = np.dtype(BITS[dtype])
    codes = np.arange(np.iinfo(kind).max + 1, dtype=kind)
    values = from_device(codes, dtype)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, codes.view(narrow(dtype)).astype(np.float32))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(to_device(values, dtype)[number], codes[number])
    assert np.isnan(from_device(to_device(values, dtype), dtype)[~number]).all()


@pytest.mark.parametrize(("dtype", "max_value"), [("bfloat16", 3e38), ("float8", 448)])
def test_floats_round_to_nearest_even_code(dtype, max_value):
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(4000) * np.exp(rng.uniform(-9, 5, 4000))).astype(np.float32)
    values = np.append(values, np.float32([0, -0.0, 17, 19, 21, 1 + 2**-8, 0.001953125 / 2]))
    values = values[np.abs(values) <= max_value]
    expected = values.astype(narrow(dtype)).view(BITS[dtype])
    np.testing.assert_array_equal(to_device(values, dtype), expected)


def test_numbers_are_narrowed_if_they_fit(wording):
    wide = np.int64([[1, -2], [2**31 - 1, 0]])
    narrow = to_device(wide.T, "int32")
    assert narrow.dtype == np.int32
    assert narrow.flags.c_contiguous
    np.testing.assert_array_equal(narrow, wide.T)
    assert to_device(narrow, "int64").dtype == np.int64
    with pytest.raises(ValueError) as refusal:
        to_device(wide + 1, "int32")
    wording.check(refusal.value)
    with pytest.raises(ValueError) as refusal:
        to_device(np.float32([1, 7e4]), "float16")
    wording.check(refusal.value)
    with pytest.raises(ValueError, match="int32, got float32"):
        to_device(np.float32([1]), "int32")
    assert to_device(np.zeros(0, np.int64), "int32").size == 0
    assert to_device(np.float64(1.5), "float16").shape == ()
    assert to_device(np.float32(2), "bfloat16").shape == ()
    assert from_device(np.uint16(0x4000), "bfloat16") == 2
    assert host_type("float8") == "float32"
    assert host_type("int8") == "int8"
    there = to_device(np.float32([1e9, -np.inf]), "float8")
    np.testing.assert_array_equal(from_device(there, "float8"), [448, -448])
