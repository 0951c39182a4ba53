"""Units of layers that a search keeps float or int8 together."""

import numpy as np
import pytest

from deploy.frontends import load
from deploy.targets import TARGETS
from deploy.tuning.prices import FLOAT_SIDE, group_units
from tests.models import as_float32, make_model, make_node

CONSTANTS = {"three": 3.0, "zero": 0.0, "six": 6.0}


WEIGHT = np.full((16, 16, 3, 3), 0.01)


def units(*nodes, target="onnxruntime", keep=(), outputs="y"):
    """Units of a model x -> outputs of (op, inputs, output[, attributes])."""
    weights = {i.split()[1]: WEIGHT for op, i, *_ in nodes if op == "Conv"}
    nodes = [make_node(op, i, [o], name=f"/{o}", **dict(*a)) for op, i, o, *a in nodes]
    inputs, outputs = {"x": [1, 16, 8, 8]}, dict.fromkeys(outputs.split())
    model = make_model(nodes, inputs, outputs, as_float32(CONSTANTS | weights), opset=17)
    cleaned = load(model).model
    return group_units(cleaned, TARGETS[target]().plan(cleaned, keep).decisions)


def conv(source, output):
    return "Conv", f"{source} w_{output}", output, {"pads": [1, 1, 1, 1]}


C1, RELU, SWISH = conv("x", "c1"), ("Relu", "c1", "r1"), ("HardSwish", "c1", "h")


SILU = [C1, ("Sigmoid", "c1", "s"), ("Mul", "c1 s", "m"), conv("m", "y")]


OTHER_GATE = [C1, conv("x", "c2"), ("Sigmoid", "c2", "s"), ("Mul", "c1 s", "m"), conv("m", "y")]


WRITTEN_OUT = [
    C1,
    ("Add", "c1 three", "a"),
    ("Clip", "a zero six", "b"),
    ("Mul", "c1 b", "m"),
    ("Div", "m six", "d"),
    conv("d", "y"),
]


EXCITE = [C1, conv("c1", "c2"), ("HardSigmoid", "c2", "s"), *OTHER_GATE[3:]]


@pytest.mark.parametrize(
    ("nodes", "options", "members"),
    [
        ([C1, RELU, conv("r1", "y")], {}, ["c1 r1", "y"]),  # a layer and its tail
        ([C1, RELU, conv("r1", "y")], {"outputs": "y c1"}, ["c1", "y"]),  # others look behind it
        ([C1, RELU, conv("r1", "y")], {"target": "ascend"}, ["c1", "y"]),  # float there
        (SILU, {}, ["c1", "s m", "y"]),  # with its gate, and apart from the layer
        (OTHER_GATE, {}, ["c1", "c2", "s", "m", "y"]),
        (EXCITE, {}, ["c1", "c2 s m", "y"]),  # of the layer that makes the gate
        (WRITTEN_OUT, {}, ["c1 a b m d", "y"]),
        ([C1, SWISH, conv("h", "y")], {}, ["c1 h", "y"]),
        ([C1, SWISH, conv("h", "y")], {"outputs": "y c1"}, ["c1", "h", "y"]),
        ([C1, SWISH, conv("h", "c2"), ("Add", "c1 c2", "y")], {}, ["c1", "h", "c2"]),
    ],
)
def test_unit_is_a_layer_and_tail(nodes, options, members):
    expected = {}
    for unit in members:
        names = tuple(f"/{node}" for node in unit.split())
        expected[names[0]] = names
    layer_units = units(*nodes, **options)
    assert layer_units.members == expected
    assert set(layer_units.layers) == {f"/{o}" for op, _, o, *_ in nodes if op == "Conv"}


def test_borders_are_between_units_and_float():
    assert set(units(*SILU).borders) == {
        (FLOAT_SIDE, "/c1", "x"),
        ("/c1", "/s", "c1"),
        ("/s", "/y", "m"),
        ("/y", FLOAT_SIDE, "y"),
    }
    layer_units = units(
        C1,
        ("Exp", "c1", "e"),
        conv("e", "c2"),
        conv("c1", "c3"),
        ("Add", "c2 c3", "s"),
        conv("s", "y"),
    )
    edges = {("/c1", "/c3", "c1"), ("/c2", "/s", "c2"), ("/c3", "/s", "c3"), ("/s", "/y", "s")}
    inlets = {(FLOAT_SIDE, "/c1", "x"), (FLOAT_SIDE, "/c2", "e")}
    outlets = {("/c1", FLOAT_SIDE, "c1"), ("/y", FLOAT_SIDE, "y")}
    assert set(layer_units.borders) == edges | inlets | outlets
    assert set(layer_units.tensors) == {"c1", "c2", "c3", "s", "x", "e", "y"}
    assert layer_units.layers == ("/c1", "/c2", "/c3", "/y")
    assert layer_units.node_names(["/c3", "/s"]) == ("/c3", "/s")


def test_float_nodes_are_in_no_unit():
    layer_units = units(C1, conv("c1", "c2"), conv("c2", "y"), keep=("/c2",))
    assert list(layer_units.members) == ["/c1", "/y"]
    assert set(layer_units.borders) == {
        (FLOAT_SIDE, "/c1", "x"),
        ("/c1", FLOAT_SIDE, "c1"),
        (FLOAT_SIDE, "/y", "c2"),
        ("/y", FLOAT_SIDE, "y"),
    }
