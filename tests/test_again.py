"""Outputs in memory that is used again: the numbers of ordinary runs, whatever the shapes."""

import gc
import weakref

import numpy as np
import pytest
from onnx import TensorProto, helper

from calibrators.statistics import HistogramOf
from deploy import machine
from deploy.calibration import taps
from deploy.calibration.observation import FOLDED, Observation, Variant
from deploy.calibration.one_pass import observe
from deploy.calibration.taps import Again
from deploy.errors import BackendError
from deploy.machine import trim_memory
from deploy.runtimes.ort import OrtSession

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def network(*nodes, outputs, kind=FLOAT):
    x = helper.make_tensor_value_info("x", FLOAT, ["n", 3, "h", "w"])
    made = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    graph = helper.make_graph([helper.make_node(*one) for one in nodes], "g", [x], made)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


PLAIN = network(
    ("Relu", ["x"], ["relu"]),
    ("GlobalAveragePool", ["relu"], ["mean"]),
    ("Sub", ["relu", "mean"], ["y"]),
    outputs=["y", "mean"],
)
BY_VALUE = network(("NonZero", ["x"], ["places"]), outputs=["places"], kind=INT)


def samples(*sides, batch=1):
    rng = np.random.default_rng(4)
    return [{"x": rng.standard_normal((batch, 3, s, s)).astype(np.float32)} for s in sides]


def opened(model):
    return OrtSession.open(model, threads=1, spin=False)


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_samples_of_one_shape_lie_in_the_same_memory_from_the_second_on():
    session, places, lasting = opened(PLAIN), [], []
    runs = Again(session)
    for sample in samples(4, 4, 4, 5, 5, 5, 4, 4):
        values = runs.run(sample)
        same(values, session.run(sample))
        lasting.append(runs.lasting)
        if runs.lasting:
            assert all(x.ctypes.data % 64 == 0 for x in values.values())
            places.append(values["y"].ctypes.data)
    assert lasting == [False, True, True, False, True, True, False, True]
    assert places[0] == places[1] and places[2] == places[3]


def test_an_output_whose_shape_follows_from_values_is_given_all_the_same():
    session = opened(BY_VALUE)
    runs = Again(session)
    for positive in (5, 5, 7, 2, 0, 27):
        sample = {"x": np.zeros((1, 3, 3, 3), np.float32)}
        sample["x"].reshape(-1)[:positive] = 1
        same(runs.run(sample), session.run(sample))
    assert not runs.lasting


def test_larger_outputs_are_let_go(monkeypatch):
    monkeypatch.setattr(taps, "MOST_BYTES", 100)
    runs, lasting = Again(opened(PLAIN)), []
    for sample in samples(2, 2, 9, 9, 9):
        runs.run(sample)
        lasting.append(runs.lasting)
    assert lasting == [False, True, False, False, False]


def test_a_bad_sample_is_told_as_by_an_ordinary_run_and_the_next_is_run():
    session = opened(PLAIN)
    runs = Again(session)
    (first, second), (other,) = samples(4, 4), samples(4, batch=2)
    for sample in (first, second):
        runs.run(sample)
    for bad in ({}, {"z": first["x"]}, {"x": first["x"][0]}, {"x": first["x"].astype(int)}):
        with pytest.raises(BackendError) as wanted:
            session.run(bad)
        with pytest.raises(BackendError) as found:
            runs.run(bad)
        assert str(found.value) == str(wanted.value)
    for sample in (first, other, second):
        same(runs.run(sample), session.run(sample))


def test_of_the_samples_at_most_the_last_is_held():
    runs, held = Again(opened(PLAIN)), []
    for _ in range(5):
        (sample,) = samples(4)
        held.append(weakref.ref(sample["x"]))
        runs.run(sample)
    del sample
    gc.collect()
    assert runs.lasting and [one() for one in held[:4]] == [None] * 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", [PLAIN, BY_VALUE], ids=["plain", "by value"])
def test_a_pass_gives_the_same_with_and_without(model, threads, monkeypatch):
    names = ["x", *(o.name for o in model.graph.output)]
    variant = Variant(FOLDED, lambda _: model)
    wanted = [Observation(variant, name, HistogramOf()) for name in names]
    feed = samples(4, 4, 4, 6, 4, 6, 6, 6, 6)

    def seen():
        kept = {}

        def keep(number, values):
            kept[number] = {o.name: values[o.name].tobytes() for o in model.graph.output}

        found = observe(wanted, feed, threads=threads, keep=keep)
        assert len(kept) == len(feed)
        arrays = [found.of(o).to_arrays() for o in wanted]
        return kept, [{k: v.tobytes() for k, v in one.items()} for one in arrays]

    with_memory = seen()
    monkeypatch.setattr(taps, "MOST_BYTES", -1)
    assert seen() == with_memory


def test_memory_of_the_first_run_is_given_back_once(monkeypatch):
    given = []
    monkeypatch.setattr(taps, "trim_memory", lambda: given.append(1))
    runs = Again(opened(PLAIN))
    for sample in samples(4, 4, 5, 5, 4, 4):
        runs.run(sample)
    assert len(given) == 1


def test_where_the_allocator_cannot_be_told_nothing_is_given_back(monkeypatch):
    def missing(name):
        raise OSError(name)

    trim_memory()
    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    trim_memory()
