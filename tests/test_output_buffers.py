"""Output buffers: samples of one shape are run into the same memory."""

import gc
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from onnx import TensorProto

from calibrators.statistics import HistogramOf
from deploy import machine
from deploy.calibration import taps
from deploy.calibration.observation import FOLDED, Observation, Variant
from deploy.calibration.one_pass import observe
from deploy.calibration.taps import BufferedSession
from deploy.errors import BackendError
from deploy.machine import trim_memory
from deploy.runtimes.ort import OrtSession
from tests.models import make_model, make_value

IMAGES = {"x": ["n", 3, "h", "w"]}


MEAN_NODES = [
    ("Relu", "x", "relu"),
    ("GlobalAveragePool", "relu", "mean"),
    ("Sub", "relu mean", "y"),
]


PLAIN_MODEL = make_model(MEAN_NODES, IMAGES, {"y": None, "mean": None}, opset=17, ir=9)


INDEX_OUTPUT = [make_value("places", None, TensorProto.INT64)]


VALUE_SHAPED_MODEL = make_model([("NonZero", "x", "places")], IMAGES, INDEX_OUTPUT, opset=17, ir=9)


def samples(*sides, batch=1):
    rng = np.random.default_rng(4)
    return [{"x": rng.standard_normal((batch, 3, s, s)).astype(np.float32)} for s in sides]


def open_session(model):
    return OrtSession.open(model, threads=1, spin=False)


def reuses_buffers(runs):
    return runs._bound is not None


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    assert all(np.array_equal(result[name], expected[name]) for name in expected)


def test_second_sample_reuses_output_buffers():
    session = open_session(PLAIN_MODEL)
    addresses = []
    reused = []
    runs = BufferedSession(session)
    for sample in samples(4, 4, 4, 5, 5, 5, 4, 4):
        values = runs.run(sample)
        assert_same(values, session.run(sample))
        reused.append(reuses_buffers(runs))
        if reuses_buffers(runs):
            assert all(x.ctypes.data % 64 == 0 for x in values.values())
            addresses.append(values["y"].ctypes.data)
    assert reused == [False, True, True, False, True, True, False, True]
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3]


def test_value_shaped_output_is_never_buffered():
    session = open_session(VALUE_SHAPED_MODEL)
    runs = BufferedSession(session)
    for positive in (5, 5, 7, 2, 0, 27):
        sample = {"x": np.zeros((1, 3, 3, 3), np.float32)}
        sample["x"].reshape(-1)[:positive] = 1
        assert_same(runs.run(sample), session.run(sample))
    assert not reuses_buffers(runs)


def test_large_outputs_are_not_buffered(monkeypatch):
    monkeypatch.setattr(taps, "MOST_BYTES", 100)
    runs = BufferedSession(open_session(PLAIN_MODEL))
    reused = []
    for sample in samples(2, 2, 9, 9, 9):
        runs.run(sample)
        reused.append(reuses_buffers(runs))
    assert reused == [False, True, False, False, False]


def test_bad_sample_fails_like_unbuffered_run():
    session = open_session(PLAIN_MODEL)
    runs = BufferedSession(session)
    (first_sample, second_sample), (larger,) = samples(4, 4), samples(4, batch=2)
    for sample in (first_sample, second_sample):
        runs.run(sample)
    for bad in (
        {},
        {"z": first_sample["x"]},
        {"x": first_sample["x"][0]},
        {"x": first_sample["x"].astype(int)},
    ):
        with pytest.raises(BackendError) as expected:
            session.run(bad)
        with pytest.raises(BackendError) as refusal:
            runs.run(bad)
        assert str(refusal.value) == str(expected.value)
    for sample in (first_sample, larger, second_sample):
        assert_same(runs.run(sample), session.run(sample))


@pytest.mark.slow
def test_buffers_keep_no_earlier_sample():
    runs = BufferedSession(open_session(PLAIN_MODEL))
    references = []
    for _ in range(5):
        (sample,) = samples(4)
        references.append(weakref.ref(sample["x"]))
        runs.run(sample)
    del sample
    gc.collect()
    assert reuses_buffers(runs)
    assert [reference() for reference in references[:4]] == [None] * 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", [PLAIN_MODEL, VALUE_SHAPED_MODEL], ids=["plain", "by value"])
def test_buffers_change_no_observation(model, threads, monkeypatch):
    names = ["x", *(o.name for o in model.graph.output)]
    variant = Variant(FOLDED, lambda _: model)
    observations = [Observation(variant, name, HistogramOf()) for name in names]
    feed = samples(4, 4, 4, 6, 4, 6, 6, 6, 6)

    def run_pass():
        outputs_by_sample = {}

        def record_outputs(number, values):
            outputs_by_sample[number] = {
                o.name: values[o.name].tobytes() for o in model.graph.output
            }

        observed = observe(observations, feed, threads=threads, on_outputs=record_outputs)
        assert len(outputs_by_sample) == len(feed)
        statistics = []
        for observation in observations:
            arrays = observed.recorder(observation).to_arrays()
            statistics.append({name: values.tobytes() for name, values in arrays.items()})
        return outputs_by_sample, statistics

    with_buffers = run_pass()
    monkeypatch.setattr(taps, "MOST_BYTES", -1)
    assert run_pass() == with_buffers


def test_first_run_memory_is_trimmed_once(monkeypatch):
    trimmed = []
    monkeypatch.setattr(taps, "trim_memory", lambda: trimmed.append(1))
    runs = BufferedSession(open_session(PLAIN_MODEL))
    for sample in samples(4, 4, 5, 5, 4, 4):
        runs.run(sample)
    assert len(trimmed) == 1
    trim_memory()
    monkeypatch.setattr(machine.ctypes, "CDLL", Mock(side_effect=OSError))
    trim_memory()  # where the allocator cannot be told, nothing is given back


def test_blocks_are_returned_only_for_a_time(monkeypatch):
    library = Mock()
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: library)
    with pytest.raises(MemoryError), machine.large_blocks_returned():
        (inside,) = library.mallopt.call_args_list
        raise MemoryError
    _, outside = library.mallopt.call_args_list
    assert inside.args[1] < outside.args[1]
    library.malloc_trim.assert_called_once()
