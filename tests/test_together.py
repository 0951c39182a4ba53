"""Histograms counted in one call are those that each counts by itself."""

import numpy as np
import pytest

from calibrators import histogram, kernel
from calibrators.errors import CalibrationError
from calibrators.histogram import BINS, Histogram, Located, Refused, Together

WAYS = (None, *(kernel.load(kernel.LIBRARY) if kernel.LIBRARY.exists() else ()))


@pytest.fixture(params=WAYS, ids=lambda way: way.name if way else "numpy")
def way(request, monkeypatch):
    for module in (histogram, histogram):
        monkeypatch.setattr(module, "kernel", lambda: request.param)
    return request.param


def state(one):
    return {name: value.tobytes() for name, value in one.to_arrays().items()}, one.latest


def arrays(seed):
    """Of every size and form; some larger than what is seen of them at first."""
    rng = np.random.default_rng(seed)
    sizes = [0, 1, 7, 2048, 2049, 5000, 140_000]
    made = [rng.standard_normal(n).astype(np.float32) * (1 + seed) for n in sizes]
    turned = rng.standard_normal((3, 40, 50)).astype(np.float32).T
    odd = np.frombuffer(b"x" + made[4].tobytes(), np.float32, offset=1)
    infinite = np.where(made[5] > 2, np.inf, made[5]).astype(np.float32)
    half = made[3].astype(np.float16)
    return [*made, turned, odd, infinite, half, np.zeros(3000, np.float32), np.float32([[-0.0]])]


def test_each_counts_what_it_counts_alone(way):
    alone, beside = ([Histogram() for _ in arrays(0)] for _ in range(2))
    one = Together(beside)
    for seed in range(3):
        for histogram_, x in zip(alone, arrays(seed), strict=True):
            histogram_.observe(x)
        one.observe(Located(arrays(seed)))
        assert [state(h) for h in beside] == [state(h) for h in alone]


def test_memory_that_is_used_again_is_looked_up_once(way):
    rng = np.random.default_rng(3)
    lasting, alone = np.empty(5000, np.float32), [Histogram(), Histogram()]
    beside = [Histogram(), Histogram()]
    one, located = Together(beside), Located([lasting, lasting[:9]])
    for _ in range(3):
        lasting[:] = rng.standard_normal(5000)
        other = rng.standard_normal(2100).astype(np.float64)
        located.put(1, other)
        one.observe(located)
        alone[0].observe(lasting)
        alone[1].observe(other)
    assert [state(h) for h in beside] == [state(h) for h in alone]


def test_of_no_histograms_nothing_is_counted(way):
    Together([]).observe(Located([]))


def test_what_is_refused_has_its_place_and_what_came_before_is_counted(way):
    beside = [Histogram() for _ in range(3)]
    values = [np.ones(9, np.float32), np.float32([1, np.nan, np.nan]), np.ones(9, np.float32)]
    with pytest.raises(Refused, match=r"values must be numbers, got 2 NaN$") as refused:
        Together(beside).observe(Located(values))
    assert refused.value.place == 1 and [h.total for h in beside] == [9, 0, 0]
    beside[2].full_range = 1e-300
    values[1] = values[0]
    with pytest.raises(Refused, match="range is 0 or at least") as refused:
        Together(beside).observe(Located(values))
    assert refused.value.place == 2 and isinstance(refused.value, CalibrationError)
    assert not beside[2].counts.any()


def test_a_state_that_no_values_gave_leads_nowhere(way):
    """Extremes beyond the range, as a spoilt cache may hold them, are no bins."""
    for low, high in ((-1e30, 1e30), (np.nan, np.nan), (np.inf, -np.inf), (0.5, -0.5)):
        seen = Histogram()
        seen.full_range, seen.minimum, seen.maximum = 1.0, low, high
        Together([seen]).observe(Located([np.full(3000, 0.25, np.float32)]))
        assert seen.counts[BINS + BINS // 4] == seen.counts.sum() == 3000
