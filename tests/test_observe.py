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


def recorder_bytes(statistics):
    return {
        n: (h.counts.tolist(), h.full_range, h.minimum, h.maximum, h.total)
        for n, h in statistics.items()
    }


def test_threads_and_order_change_nothing(histograms, model, samples):
    tensors = analyse(model, ONNXRUNTIME).activations
    expected = recorder_bytes(histograms(model, tensors, samples, threads=1))
    assert expected == recorder_bytes(histograms(model, tensors, samples, threads=3))
    assert expected == recorder_bytes(histograms(model, tensors, reversed(samples), threads=2))


def test_joint_observation_equals_separate_observations(model, samples):
    variant, kept = Variant(FOLDED, lambda _: model), {}
    tensors = list(analyse(model, ONNXRUNTIME).activations)[:2]
    statistics = HistogramOf(), HistogramOf(5), ChannelMaxOf()
    observations = [
        Observation(variant, name, statistic) for name in tensors for statistic in statistics
    ]
    joint_recorders = observe(observations, samples, threads=2, on_outputs=kept.__setitem__)
    for observation in observations:
        separate_recorders = observe([observation], samples, threads=2)
        np.testing.assert_equal(
            joint_recorders.recorder(observation).to_arrays(),
            separate_recorders.recorder(observation).to_arrays(),
        )
    assert len(kept) == len(samples)
    assert all("logits" in outputs for outputs in kept.values())


def test_first_batch_sets_tensorrt_range(histograms, model, samples):
    statistics = histograms(model, analyse(model, ONNXRUNTIME).activations, samples, first=5)
    first_amax = max(float(np.abs(s["x"]).max()) for s in samples[:5])
    assert statistics["x"].initial_range == first_amax
    assert statistics["x"].full_range / first_amax in (
        1.0,
        2.0,
    )
    assert statistics["x"].total == sum(s["x"].size for s in samples)


def test_unobservable_samples_are_refused(histograms, model, samples, wording):
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


def test_feed_error_ends_all_threads(histograms, model, samples):
    def broken():
        yield samples[0]
        raise FeedError("image 2 is broken")

    threads_before = threading.enumerate()
    with pytest.raises(FeedError, match="image 2 is broken"):
        histograms(model, ["x"], broken(), threads=3)
    assert not {thread.name for thread in threading.enumerate() if thread not in threads_before}


def test_needed_observation_is_made_first(model, samples):
    """Each form of the model is made when all that it needs is known, and of the known nothing."""
    order = []

    def observation(name, *needs):
        def make(needed_recorders):
            order.append(name)
            assert all(need.key in needed_recorders for need in needs)
            return model

        return Observation(Variant(name, make, needs), "x", ChannelMaxOf())

    first_need = observation("first")
    second = observation("second", first_need)
    third = observation("third", first_need, second)
    last_need = replace(observation("last", third), statistic=HistogramOf())
    recorders = observe([last_need], samples, threads=2)
    assert order == ["first", "second", "third", "last"]
    assert set(recorders) == {one.key for one in (first_need, second, third, last_need)}
    order.clear()
    observe(
        [last_need], samples, observed=ObservedStatistics({third.key: recorders.recorder(third)})
    )
    assert order == ["last"]
