import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from calibrators.errors import CalibrationError
from calibrators.grids import DTYPES, quantize_per_channel, quantize_per_tensor


def test_per_tensor_integers_and_distances():
    q = quantize_per_tensor([-1.0, 0.0, 1.0, 2.0], 0.1, 10)
    assert q.int_repr().tolist() == [0, 10, 20, 30]
    assert q.int_repr().dtype == np.uint8
    assert q.distance_from_zero_point().tolist() == [-10, 0, 10, 20]
    assert q.dequantize().tolist() == pytest.approx([-1.0, 0.0, 1.0, 2.0])
    q.int_repr()[0] = 9  # a copy
    assert q.stored.tolist() == [0, 10, 20, 30]


def test_values_outside_saturate_in_both_views():
    q = quantize_per_tensor([-1000.0, 100.0], 0.1, 10)
    assert q.int_repr().tolist() == [0, 255]
    assert q.dequantize().tolist() == pytest.approx([-1.0, 24.5])
    low, high = q.representable()
    assert (low[0], high[0]) == (pytest.approx(-1.0), pytest.approx(24.5))


def test_per_channel_along_axis_0():
    q = quantize_per_channel([[-1.0, 0.0], [1.0, 2.0]], [0.1, 0.01], [10, 0], 0)
    assert q.int_repr().tolist() == [[0, 10], [100, 200]]
    assert q.dequantize() == pytest.approx(np.array([[-1.0, 0.0], [1.0, 2.0]]))


def test_each_dtype_has_its_range():
    stored = [quantize_per_tensor(100.0, 0.1, 10, d).int_repr() for d in DTYPES]
    assert [integers.item() for integers in stored] == [255, 127, 1010]
    assert [str(integers.dtype) for integers in stored] == ["uint8", "int8", "int32"]
    assert quantize_per_tensor([3e38, -np.inf], 0.1, 0, "qint8").stored.tolist() == [127, -128]
    assert quantize_per_tensor(1e12, 0.1, 0, "qint32").stored.item() == 2**31 - 1


@settings(max_examples=50)
@given(
    arrays(np.float32, (2, 3, 4), elements=st.floats(-50, 50, width=32)),
    st.integers(-3, 2),
    st.data(),
)
def test_per_channel_equals_per_tensor_slices(x, axis, data):
    channels = x.shape[axis]
    scales = data.draw(st.lists(st.floats(0.01, 2), min_size=channels, max_size=channels))
    zeros = data.draw(st.lists(st.integers(-128, 127), min_size=channels, max_size=channels))
    per_channel = quantize_per_channel(x, scales, zeros, axis, "qint8")
    for i in range(channels):
        per_tensor = quantize_per_tensor(np.take(x, i, axis), scales[i], zeros[i], "qint8")
        assert np.array_equal(np.take(per_channel.stored, i, axis), per_tensor.stored)
        assert np.array_equal(np.take(per_channel.dequantize(), i, axis), per_tensor.dequantize())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], 0.0, 0, "quint8"), "positive"),
        (([1.0], float("nan"), 0, "quint8"), "positive"),
        (([1.0], 0.1, 256, "quint8"), "zero_point of quint8"),
        (([1.0], 0.1, 0, "quint4"), "one of"),
        (([float("nan")], 0.1, 0, "quint8"), "NaN has no integer"),
        (([1.0], 0.1, 1.5, "quint8"), "an integer in 0..255, got [1.5]"),
        (([1.0], 0.1, None, "quint8"), "an integer in 0..255, got [None]"),
        (([1.0], 0.1, 2**70, "qint32"), "zero_point of qint32"),
    ],
)
def test_meaningless_parameters_are_refused(arguments, message):
    with pytest.raises(CalibrationError, match=re.escape(message)):
        quantize_per_tensor(*arguments)


def test_per_channel_needs_matching_pairs():
    with pytest.raises(CalibrationError, match="2 channels"):
        quantize_per_channel([[1.0], [2.0]], [0.1], [0], 0)
    with pytest.raises(CalibrationError, match="the axis"):
        quantize_per_channel([[1.0], [2.0]], [0.1, 0.1], [0, 0], 2)
