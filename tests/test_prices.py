"""What units cost on either side, measured or counted."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.frontends import load
from deploy.targets import TARGETS
from deploy.tuning import prices
from deploy.tuning.prices import Prices, Units, cheapest, counted, measured, units_of
from deploy.tuning.timing import KernelTimes

SAMPLE = {"x": np.ones((1, 16, 8, 8), np.float32)}
NAMES = ("a", "b", "y")


@pytest.fixture(scope="module")
def chain():
    """Three Convs in a row, as loaded, and its units on ONNX Runtime."""
    weights = [np.full((16, 16, 3, 3), 0.01), np.full((16, 1, 3, 3), 0.1), np.ones((8, 16, 1, 1))]
    groups, pads = (1, 16, 1), ([1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0])
    nodes = [
        helper.make_node("Conv", [i, f"w{o}"], [o], name=f"/{o}", group=group, pads=pad)
        for i, o, group, pad in zip(("x", "a", "b"), NAMES, groups, pads, strict=True)
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.float32(w), f"w{o}")
            for o, w in zip(NAMES, weights, strict=True)
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = load(made).model
    return model, units_of(model, TARGETS["onnxruntime"]().plan(model).decisions)


def timed(monkeypatch, chain, *, int8, floats, rest=0.0, pairs=None):
    """`measured`, with kernels that take so long."""
    model, units = chain
    turned = pairs or {}
    ours = onnx.ModelProto()
    for name in turned:
        ours.graph.node.append(helper.make_node("QuantizeLinear", ["x"], ["q"], name=name))

    def times(ran, feeds, *, made_from, runs, seconds):
        if ran is ours:
            return KernelTimes({**dict(zip(("/a", "/b", "/y"), int8, strict=True)), **turned}, rest)
        return KernelTimes(dict(zip(("/a", "/b", "/y"), floats, strict=True)), 0.0)

    monkeypatch.setattr(prices, "kernel_times", times)
    return measured(model, model, ours, units, [SAMPLE])


def test_int8_that_is_slower_by_less_than_a_fifth_counts_as_fast_as_float(monkeypatch, chain):
    found = timed(monkeypatch, chain, int8=(119, 121, 50), floats=(100, 100, 100))
    assert found.units == {"/a": (100, 100), "/b": (121, 100), "/y": (50, 100)}
    assert found.measured


def test_a_unit_that_takes_next_to_no_time_does_not_change_sides_for_it(monkeypatch, chain):
    found = timed(monkeypatch, chain, int8=(1.9, 2.2, 500), floats=(1, 1, 998))
    assert found.units["/a"] == (1, 1)  # less than a thousandth of 1000 us
    assert found.units["/b"] == (2.2, 1)


@pytest.mark.parametrize(
    ("pairs", "rest", "rate"),
    [
        ({"x/Q": 0.3}, 0.2, 0.5 / 1024),  # 16 x 8 x 8 values of x
        ({"x/Q": 0.3, "a/Q": 0.7}, 0.0, 1 / 2048),
        ({"x/Q": 0.3, "a/Q": 0.0}, 0.0, 0.3 / 1024),  # folded away: turns nothing
        ({"x/Q": 90.0}, 0.0, 1.0e-3),
        ({"x/Q": 0.001}, 0.0, 0.1e-3),
        ({}, 5.0, 0.1e-3),
    ],
)
def test_turning_costs_by_the_value_within_limits(monkeypatch, chain, pairs, rest, rate):
    found = timed(monkeypatch, chain, int8=(1, 1, 1), floats=(9, 9, 9), rest=rest, pairs=pairs)
    assert found.turning["x"] - found.turning["y"] == pytest.approx(512 * rate)  # of 1024 and 512
    assert len({found.turning[name] for name in "xab"}) == 1


def test_turning_costs_two_of_the_least_kernels_however_few_the_values(monkeypatch, chain):
    found = timed(monkeypatch, chain, int8=(3, 5, 4), floats=(9, 9, 9))
    assert found.turning["y"] == pytest.approx(2 * 3 + 512 * 0.1e-3)


def test_kernels_are_timed_as_each_side_is_written(monkeypatch, chain):
    ran = []

    def times(model, feeds, *, made_from, runs, seconds):
        ran.append((model, made_from))
        return KernelTimes(dict.fromkeys(("/a", "/b", "/y"), 1.0), 0.0)

    monkeypatch.setattr(prices, "kernel_times", times)
    float32, int8 = onnx.ModelProto(ir_version=1), onnx.ModelProto(ir_version=2)
    measured(chain[0], float32, int8, chain[1], [SAMPLE])
    assert ran == 2 * [(float32, chain[0]), (int8, chain[0])]


def test_counted_prices_are_products_seven_tenths_of_them_in_int8_and_turning_is_free(chain):
    model, units = chain
    found = counted(model, units, SAMPLE)
    assert found.units == {
        "/a": (0.7 * (1024 * 144), 1024 * 144),  # 16 channels of 3x3 behind each of 1024 values
        "/b": (0.7 * (1024 * 9), 1024 * 9),  # one channel each: depthwise
        "/y": (0.7 * (512 * 16), 512 * 16),
    }
    assert set(found.turning.values()) == {0.0} and not found.measured


ROW = Units(
    members={name: (name,) for name in "abc"},
    edges=(("a", "b", "t"), ("b", "c", "u")),
    inlets=(("a", "x"),),
    outlets=(("c", "y"),),
    layers=("a", "b", "c"),
)


def row(turning=1.0, **units):
    sides = {name: (1.0, 10.0) for name in "abc"} | units
    return Prices(units=sides, turning=dict.fromkeys("xtuy", turning), outside=5.0, measured=True)


def test_the_price_of_a_split_counts_every_border_once():
    found = row()
    assert found.total(ROW, frozenset()) == 5 + 3 + 2  # in and out
    assert found.total(ROW, frozenset("b")) == 5 + 12 + 4
    assert found.total(ROW, frozenset("abc")) == 5 + 30
    both = Units(
        members=ROW.members, edges=(("a", "b", "t"), ("a", "c", "t")), inlets=(), outlets=(),
        layers=ROW.layers,
    )  # fmt: skip
    assert found.total(both, frozenset("bc")) == 5 + 21 + 1  # two readers, one pair


def test_the_cheapest_split_weighs_time_turning_and_noise():
    assert cheapest(row(), ROW, {}, weight=0) == frozenset()
    slow = row(b=(13.0, 10.0))
    assert cheapest(slow, ROW, {}, weight=0) == {"b"}  # wins 3, turns 2
    assert cheapest(row(turning=2.0, b=(13.0, 10.0)), ROW, {}, weight=0) == frozenset()
    assert cheapest(row(), ROW, {"b": 1.0}, weight=10) == frozenset()
    assert cheapest(row(), ROW, {"b": 1.0}, weight=12) == {"b"}
    assert cheapest(row(), ROW, {}, weight=0, pinned=frozenset("c")) == {"c"}
    dear = row(a=(5.0, 5.5), b=(5.0, 5.5), c=(5.0, 5.5))
    assert cheapest(dear, ROW, {}, weight=0) == frozenset("abc")  # in and out count too


def test_what_only_passes_int8_on_is_float_behind_a_float_layer():
    glue = Units(
        members=ROW.members, edges=ROW.edges, inlets=ROW.inlets, outlets=ROW.outlets,
        layers=("a", "c"),
    )  # fmt: skip
    noisy = {"a": 100.0}
    assert cheapest(row(turning=0.0), ROW, noisy, weight=1) == {"a"}
    assert cheapest(row(turning=0.0), glue, noisy, weight=1) == {"a", "b"}
