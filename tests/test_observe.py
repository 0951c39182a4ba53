import threading
from dataclasses import replace

import numpy as np
import pytest

from calibrators.amct.recorders import ChannelMaxOf
from calibrators.statistics import HistogramOf
from deploy.calibration.observation import FOLDED, Observation, ObservedStatistics, Variant
from deploy.calibration.one_pass import observe
from deploy.errors import BackendError, CalibrationError, FeedError
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse


@pytest.fixture(scope="module")
def model(small_cnn):
    return load(small_cnn).model


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)} for _ in range(12)]


def state(statistics):
    return {
        n: (h.counts.tolist(), h.full_range, h.minimum, h.maximum, h.total)
        for n, h in statistics.items()
    }


def test_threads_and_order_do_not_show(histograms, model, samples):
    tensors = analyse(model, ONNXRUNTIME).activations
    one = state(histograms(model, tensors, samples, threads=1))
    assert one == state(histograms(model, tensors, samples, threads=3))
    assert one == state(histograms(model, tensors, reversed(samples), threads=2))


def test_what_is_observed_together_is_what_each_observes_alone(model, samples):
    variant, kept = Variant(FOLDED, lambda _: model), {}
    tensors = list(analyse(model, ONNXRUNTIME).activations)[:2]
    statistics = HistogramOf(), HistogramOf(5), ChannelMaxOf()
    wanted = [Observation(variant, name, statistic) for name in tensors for statistic in statistics]
    together = observe(wanted, samples, threads=2, on_outputs=kept.__setitem__)
    for one in wanted:
        alone = observe([one], samples, threads=2)
        np.testing.assert_equal(together.recorder(one).to_arrays(), alone.recorder(one).to_arrays())
    assert len(kept) == len(samples) and all("logits" in outputs for outputs in kept.values())


def test_the_first_batch_sets_tensorrts_range(histograms, model, samples):
    statistics = histograms(model, analyse(model, ONNXRUNTIME).activations, samples, first=5)
    first = max(float(np.abs(s["x"]).max()) for s in samples[:5])
    assert statistics["x"].base == first and statistics["x"].full_range / first in (1.0, 2.0)
    assert statistics["x"].total == sum(s["x"].size for s in samples)


def test_samples_that_cannot_be_observed_are_told(histograms, model, samples, wording):
    bad = [*samples[:2], {"x": np.full((1, 3, 16, 16), np.nan, np.float32)}]
    with pytest.raises(CalibrationError) as refusal:
        histograms(model, ["x"], bad, threads=1)
    wording.check(refusal.value)
    with pytest.raises(BackendError) as refusal:
        histograms(model, ["x"], [{"x": np.zeros((1, 3, 4), np.float32)}])
    wording.check(refusal.value)
    with pytest.raises(FeedError) as refusal:
        histograms(model, ["x"], [])
    wording.check(refusal.value)


def test_an_exception_of_the_feed_comes_through_and_no_thread_stays(histograms, model, samples):
    def broken():
        yield samples[0]
        raise FeedError("image 2 is broken")

    before = threading.enumerate()
    with pytest.raises(FeedError, match="image 2 is broken"):
        histograms(model, ["x"], broken(), threads=3)
    assert not {one.name for one in threading.enumerate() if one not in before}


def test_what_a_need_needs_is_known_before_it(model, samples):
    """Each form of the model is made when all that it needs is known, and of the known nothing."""
    order = []

    def observation(name, *needs):
        def make(seen):
            order.append(name)
            assert all(need.key in seen for need in needs)
            return model

        return Observation(Variant(name, make, needs), "x", ChannelMaxOf())

    first = observation("first")
    second = observation("second", first)
    third = observation("third", first, second)
    wanted = replace(observation("last", third), statistic=HistogramOf())
    found = observe([wanted], samples, threads=2)
    assert order == ["first", "second", "third", "last"]
    assert set(found) == {one.key for one in (first, second, third, wanted)}
    order.clear()
    observe([wanted], samples, observed=ObservedStatistics({third.key: found.recorder(third)}))
    assert order == ["last"]
