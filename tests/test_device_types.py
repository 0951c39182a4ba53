"""What lies in a GPU's memory: every code of the types that numpy lacks, and whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from calibrators.tensorrt import BITS, host_type, loaded, stored

ml_dtypes = pytest.importorskip("ml_dtypes")  # comes with onnx 1.19 and later
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float8": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("dtype", BITS)
def test_every_code_comes_back(dtype):
    kind = np.dtype(BITS[dtype])
    codes = np.arange(np.iinfo(kind).max + 1, dtype=kind)
    values = loaded(codes, dtype)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, codes.view(NARROW[dtype]).astype(np.float32))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(stored(values, dtype)[number], codes[number])
    assert np.isnan(loaded(stored(values, dtype), dtype)[~number]).all()


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 3e38), ("float8", 448)])
def test_a_float_is_rounded_to_the_nearest_even_code(dtype, most):
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(4000) * np.exp(rng.uniform(-9, 5, 4000))).astype(np.float32)
    values = np.append(values, np.float32([0, -0.0, 17, 19, 21, 1 + 2**-8, 0.001953125 / 2]))
    values = values[np.abs(values) <= most]
    expected = values.astype(NARROW[dtype]).view(BITS[dtype])
    np.testing.assert_array_equal(stored(values, dtype), expected)


def test_beyond_its_range_float8_is_its_largest():
    np.testing.assert_array_equal(loaded(stored(np.float32([1e9, -np.inf]), "float8"), "float8"),
                                  [448, -448])  # fmt: skip


def test_numbers_are_narrowed_where_they_fit():
    wide = np.int64([[1, -2], [2**31 - 1, 0]])
    narrow = stored(wide.T, "int32")
    assert narrow.dtype == np.int32 and narrow.flags.c_contiguous
    np.testing.assert_array_equal(narrow, wide.T)
    assert stored(narrow, "int64").dtype == np.int64
    with pytest.raises(ValueError, match=r"int32 from -2147483648 to 2147483647, got 2147483648"):
        stored(wide + 1, "int32")
    with pytest.raises(ValueError, match="float16 up to 65504, got 70000"):
        stored(np.float32([1, 7e4]), "float16")
    with pytest.raises(ValueError, match="int32, got float32"):
        stored(np.float32([1]), "int32")
    assert stored(np.zeros(0, np.int64), "int32").size == 0


def test_a_scalar_stays_one_and_floats_are_narrowed():
    assert stored(np.float64(1.5), "float16").shape == ()
    assert stored(np.float32(2), "bfloat16").shape == ()
    assert loaded(np.uint16(0x4000), "bfloat16") == 2
    assert host_type("float8") == "float32" and host_type("int8") == "int8"
