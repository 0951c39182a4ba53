"""Shares of a whole are known as such: beside rounding, and from their logarithms."""

import numpy as np
import pytest

from deploy.metrics.rows import add_up, are_shares, are_shares_or_logarithms


@pytest.fixture
def shares():
    power = np.exp(np.random.default_rng(0).normal(size=(7, 5)))
    return power / power.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_what_a_softmax_gives(shares, kind):
    shares = shares.astype(kind)
    assert add_up(shares).shape == (7,)
    assert are_shares(shares) and are_shares(shares.T, 0) and not are_shares(shares, 0)
    assert are_shares_or_logarithms(shares) and are_shares_or_logarithms(np.log(shares))


def test_what_is_none(shares):
    assert not are_shares(np.log(shares))
    assert not are_shares_or_logarithms(shares * 1.02)
    assert not are_shares_or_logarithms(np.log(shares) + 0.02)
    sums_to_1 = np.array([[-0.5, 1.5]])
    assert add_up(sums_to_1).all() and not are_shares(sums_to_1)
    assert list(add_up(np.array([[0.4, 0.6], [0.4, 0.5]]))) == [True, False]


def test_large_raw_scores_are_no_logarithms():
    """Whose power would be infinite, which numpy warns of."""
    assert not are_shares_or_logarithms(np.array([[-3.0, 5000.0]], np.float32))
