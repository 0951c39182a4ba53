import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.amct import ifmr as module
from calibrators.amct.ifmr import KEPT, IfmrHistogram, IfmrParams, ifmr, ifmr_streaming, ratios
from calibrators.errors import CalibrationError


def drawn(kind, size, seed):
    rng = np.random.default_rng(seed)
    x = {
        "laplace": rng.laplace(0, 1, size),
        "relu": np.maximum(rng.normal(0, 1, size), 0),
        "relu6": np.clip(rng.normal(1, 3, size), 0, 6),
        "heavy": rng.standard_t(3, size),
        "integers": rng.integers(-128, 128, size),
    }[kind]
    return x.astype(np.float32)


KINDS = ["laplace", "relu", "relu6", "heavy", "integers"]


def direct(x, params):
    """Every candidate by AMCT's float32 formula, none skipped."""
    data = np.sort(x, axis=None)
    lo = module.kth_value(data, params.min_percentile, smallest=True)
    hi = module.kth_value(data, params.max_percentile, smallest=False)
    candidates = module.candidates_of(np.float32(hi), np.float32(lo), params)
    return np.array([module.loss32(data, candidates, i) for i in range(candidates.hi.size)])


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_sorted_losses_choose_as_the_direct_ones(kind, with_offset, bits):
    params = IfmrParams(with_offset=with_offset, bits=bits)
    x = drawn(kind, 20_000, seed=3)
    result, losses = ifmr(x, params), direct(x, params)
    assert result.candidate == int(np.argmin(losses))
    np.testing.assert_allclose(result.losses, losses, rtol=1e-4)


@pytest.mark.parametrize("stairs", [1, 7, 30])
def test_losses_are_the_same_a_few_stairs_at_a_time(stairs, monkeypatch):
    x, params = drawn("laplace", 20_000, seed=3), IfmrParams()
    whole = ifmr(x, params).losses
    monkeypatch.setattr(module, "_STEPS", stairs * 255)
    assert ifmr(x, params).losses.tolist() == whole.tolist()


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_streaming_is_within_one_candidate(kind, with_offset):
    params = IfmrParams(with_offset=with_offset)
    x = drawn(kind, 160_000, seed=5)
    histogram = IfmrHistogram()
    for batch in np.array_split(x, 7):
        histogram.observe(batch)
    exact, streamed = ifmr(x, params), ifmr_streaming(histogram, params)
    assert abs(exact.candidate - streamed.candidate) <= 1
    assert abs(exact.offset - streamed.offset) <= 1


def test_streaming_percentile_is_near_the_exact_one():
    x = drawn("heavy", 160_000, seed=6)
    histogram = IfmrHistogram()
    histogram.observe(x)
    params = IfmrParams(max_percentile=0.999, min_percentile=0.999)
    exact, streamed = ifmr(x, params), ifmr_streaming(histogram, params)
    assert streamed.scale == pytest.approx(float(exact.scale), rel=0.02)


def test_default_ratios_end_at_the_end():
    r = ratios(IfmrParams())
    assert r.size == 61 and r[0] == np.float32(0.7) and r[-1] == pytest.approx(1.3, abs=1e-6)


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), st.booleans())
def test_the_grid_always_holds_zero(numbers, with_offset):
    result = ifmr(np.array(numbers, np.float32), IfmrParams(with_offset=with_offset))
    assert result.scale > 0 and -128 <= result.offset <= 127
    assert result.clip_min <= 0 <= result.clip_max


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_percentile": 0.0},
        {"min_percentile": 1.1},
        {"search_range": (1.3, 0.7)},
        {"search_range": (0.0, 1.0)},
        {"search_step": 0.0},
        {"search_step": 0.7},
    ],
)
def test_params_out_of_range(wrong):
    with pytest.raises(CalibrationError, match="IFMR"):
        IfmrParams(**wrong)


def test_streaming_refuses_nothing_and_inf():
    with pytest.raises(CalibrationError, match="not be empty"):
        ifmr_streaming(IfmrHistogram())
    histogram = IfmrHistogram()
    with pytest.raises(CalibrationError, match="1 NaN or Inf"):
        histogram.observe(np.array([1.0, np.inf], np.float32))
    assert histogram.total == 0


def test_few_data_stream_exactly():
    x = drawn("heavy", KEPT, seed=8)
    histogram = IfmrHistogram()
    for batch in np.array_split(x, 5):
        histogram.observe(batch)
    exact, streamed = ifmr(x), ifmr_streaming(histogram)
    assert (exact.scale, exact.offset) == (streamed.scale, streamed.offset)


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(0, 99))
def test_batches_leave_no_trace(parts, seed):
    x = np.random.default_rng(seed).normal(size=KEPT + 5000).astype(np.float32) * (seed + 1)
    whole, split = IfmrHistogram(), IfmrHistogram()
    whole.observe(x)
    for batch in np.array_split(x[::-1], parts):
        split.observe(batch)
    np.testing.assert_array_equal(whole.counts, split.counts)
    np.testing.assert_array_equal(whole.sums, split.sums)
    assert (whole.full_range, whole.total) == (split.full_range, split.total)
