"""AMCT's algorithms: DMQ, IFMR and HFMG."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrators.amct import arq
from calibrators.amct import hfmg as hfmg_module
from calibrators.amct import ifmr as ifmr_module
from calibrators.amct.hfmg import HfmgHistogram, candidate_runs, hfmg, redistribute
from calibrators.amct.ifmr import (
    MAX_STORED_VALUES,
    IfmrHistogram,
    IfmrParams,
    ifmr,
    ifmr_streaming,
    ratios,
)
from calibrators.errors import CalibrationError

KINDS = {
    "laplace": lambda rng, size: rng.laplace(0, 1, size),
    "relu": lambda rng, size: np.maximum(rng.normal(0, 1, size), 0),
    "relu6": lambda rng, size: np.clip(rng.normal(1, 3, size), 0, 6),
    "heavy": lambda rng, size: rng.standard_t(3, size),
    "integers": lambda rng, size: rng.integers(-128, 128, size),
}


def drawn(kind, size, seed):
    return KINDS[kind](np.random.default_rng(seed), size).astype(np.float32)


def streamed_of(batches, *, exact=False):
    histogram = IfmrHistogram(exact=exact)
    for batch in batches:
        histogram.observe(batch)
    return histogram


def direct(x, params):
    """Every candidate by AMCT's float32 formula, none skipped."""
    data = np.sort(x, axis=None)
    lo = ifmr_module.initial_end(data, params.min_percentile, smallest=True)
    hi = ifmr_module.initial_end(data, params.max_percentile, smallest=False)
    candidates = ifmr_module.make_candidates(np.float32(hi), np.float32(lo), params)
    return np.array([ifmr_module.amct_loss(data, candidates, i) for i in range(candidates.hi.size)])


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_sorted_losses_choose_like_direct_ones(kind, with_offset, bits):
    params = IfmrParams(with_offset=with_offset, bits=bits)
    x = drawn(kind, 20_000, seed=3)
    result, losses = ifmr(x, params), direct(x, params)
    assert np.argmin(result.losses) == np.argmin(losses)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-4)


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_streaming_is_within_one_candidate(kind, with_offset):
    params = IfmrParams(with_offset=with_offset)
    x = drawn(kind, 160_000, seed=5)
    histogram = streamed_of(np.array_split(x, 7))
    exact, streamed = ifmr(x, params), ifmr_streaming(histogram, params)
    assert abs(np.argmin(exact.losses) - np.argmin(streamed.losses)) <= 1
    assert abs(exact.offset - streamed.offset) <= 1


def test_exact_recorder_searches_all_values():
    x = drawn("heavy", MAX_STORED_VALUES + 1, seed=5)
    recorder = streamed_of(np.array_split(x, 7), exact=True)
    assert ifmr_streaming(recorder).losses.tolist() == ifmr(x).losses.tolist()
    assert recorder.total == x.size


def test_default_ratios_end_at_the_end():
    r = ratios(IfmrParams())
    assert r.size == 61
    assert r[0] == np.float32(0.7)
    assert r[-1] == pytest.approx(1.3, abs=1e-6)


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), st.booleans())
def test_the_grid_always_holds_zero(numbers, with_offset):
    result = ifmr(np.array(numbers, np.float32), IfmrParams(with_offset=with_offset))
    assert result.scale > 0
    assert -128 <= result.offset <= 127
    clip_min, clip_max = arq.ascend_clip_range(result.scale, result.offset, 8)
    assert clip_min <= 0 <= clip_max


def test_few_values_stream_exactly():
    with pytest.raises(CalibrationError, match="not be empty"):
        ifmr_streaming(IfmrHistogram())
    histogram = IfmrHistogram()
    with pytest.raises(CalibrationError, match="1 NaN or Inf"):
        histogram.observe(np.array([1.0, np.inf], np.float32))
    assert histogram.total == 0
    x = drawn("heavy", MAX_STORED_VALUES, seed=8)
    exact, streamed = ifmr(x), ifmr_streaming(streamed_of(np.array_split(x, 5)))
    assert (exact.scale, exact.offset) == (streamed.scale, streamed.offset)
    x = drawn("heavy", 160_000, seed=6)
    params = IfmrParams(max_percentile=0.999, min_percentile=0.999)
    exact, streamed = ifmr(x, params), ifmr_streaming(streamed_of([x]), params)
    assert streamed.scale == pytest.approx(float(exact.scale), rel=0.02)


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(0, 99))
def test_batches_leave_no_trace(parts, seed):
    x = np.random.default_rng(seed).normal(size=MAX_STORED_VALUES + 5000).astype(np.float32) * (
        seed + 1
    )
    full_result, split = streamed_of([x]), streamed_of(np.array_split(x[::-1], parts))
    np.testing.assert_array_equal(full_result.counts, split.counts)
    np.testing.assert_array_equal(full_result.sums, split.sums)
    assert (full_result.full_range, full_result.total) == (split.full_range, split.total)


def observed(x):
    histogram = HfmgHistogram(1024)
    histogram.observe(np.asarray(x, np.float32))
    return histogram


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [4, 8])
def test_fast_losses_match_bin_by_bin(seed, bits):
    histogram = observed(drawn("laplace", 30_000, seed))
    runs = candidate_runs(histogram.counts)
    width = np.float32((histogram.hi - histogram.lo) / np.float32(1024))
    loss = hfmg_module._amct_loss
    direct = [loss(histogram.counts, left_bins, right, width, bits) for left_bins, right in runs]
    result = hfmg(histogram, bits=bits)
    assert np.argmin(result.losses) == np.argmin(direct)
    np.testing.assert_allclose(result.losses, direct, rtol=1e-3)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2000), min_size=64, max_size=64))
def test_cuts_shrink_from_the_outside(counts):
    runs = candidate_runs(np.array(counts, np.int32))
    widths = runs[:, 1] - runs[:, 0]
    assert (np.diff(widths) < 0).all()
    assert (np.diff(runs[:, 0]) >= 0).all()
    assert (np.diff(runs[:, 1]) <= 0).all()
    assert widths[-1] <= 16


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 10_000), min_size=32, max_size=32),
    st.floats(0, 10, width=32),
    st.floats(0, 10, width=32),
)
def test_respreading_loses_no_count(counts, below, above):
    counts = np.array(counts, np.int32)
    new = (np.float32(-1 - below), np.float32(1 + above))
    out = redistribute(counts, (np.float32(-1), np.float32(1)), new)
    assert out.sum() == counts.sum()
    assert (out >= 0).all()


@pytest.mark.parametrize("batches", [2, 3, 5])
def test_samples_forming_a_batch_are_used(batches):
    """Held until it is whole, and the last one as small as it is."""
    x = np.float32(drawn("laplace", (5, 400), seed=4) * np.arange(1, 6)[:, None])
    joined, plain = HfmgHistogram(1024, samples_per_batch=batches), HfmgHistogram(1024)
    for sample in x:
        joined.observe(sample)
    scale = hfmg(joined).scale  # ends the last batch
    for start in range(0, 5, batches):
        plain.observe(x[start : start + batches])
    np.testing.assert_array_equal(joined.counts, plain.counts)
    assert joined.extremes == plain.extremes
    assert hfmg(plain).scale == scale
    joined.end()  # nothing waits
    np.testing.assert_array_equal(joined.counts, plain.counts)


def test_wrong_batches_are_refused():
    histogram = observed([1.0, 2.0, 3.0])
    counts_before = histogram.counts.copy()
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        histogram.observe(np.array([np.nan], np.float32))
    np.testing.assert_array_equal(histogram.counts, counts_before)
    with pytest.raises(CalibrationError, match="at least one"):
        hfmg(HfmgHistogram())


FLOAT = st.floats(2**-7, 100, width=32)


def test_factors_of_known_channels():
    factor = arq.balance_factors(np.float32([4.0, 9.0]), np.float32([1.0, 0.25]), strength=0.5)
    np.testing.assert_allclose(factor, [2.0, 6.0])
    factor = arq.balance_factors(np.float32([0, 0, 4, 4]), np.float32([0, 2, 0, 1]))
    # the last channel is ordinary: factor 2, so its weight becomes 2 and its activation 2
    np.testing.assert_allclose(factor, [1.0, 1.0, 1.0, 2.0])
    weight = np.arange(1, 9, dtype=np.float32).reshape(4, 2, 1, 1)
    np.testing.assert_array_equal(arq.weight_channel_max(weight, group=2), [3, 4, 7, 8])
    np.testing.assert_array_equal(arq.channel_max(weight, 1), [7, 8])
    with pytest.raises(CalibrationError, match="epsilon"):
        arq.balance_factors(np.float32([1e20]), np.float32([1e-6]), strength=0.5)


@settings(max_examples=40)
@given(st.lists(st.tuples(FLOAT, FLOAT), min_size=1, max_size=16))
def test_half_strength_levels_activation_and_weight(pairs):
    act, weight = np.array(pairs, np.float32).T
    factor = arq.balance_factors(act, weight, strength=0.5)
    np.testing.assert_allclose(act / factor, weight * factor, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_transposed_channels_round_trip(group):
    weight = np.arange(8 * 3 * 2 * 2, dtype=np.float32).reshape(8, 3, 2, 2)
    channels_first_weight = arq.channels_first(weight, group)
    assert channels_first_weight.shape == (3 * group, 8 // group, 2, 2)
    np.testing.assert_array_equal(arq.channels_first(channels_first_weight, group), weight)
