"""What changes sides alone: layers with their tails, gates with what makes them."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from deploy.frontends import load
from deploy.targets import TARGETS
from deploy.tuning.prices import units_of

CONSTANTS = {"three": 3.0, "zero": 0.0, "six": 6.0}
WEIGHT = np.full((16, 16, 3, 3), 0.01)
SAME = {"pads": [1, 1, 1, 1]}


def units(*nodes, target="onnxruntime", keep=(), outputs=("y",)):
    """Units of a model x -> outputs of (op, inputs, output, attributes)."""
    weights = {i.split()[1]: WEIGHT for op, i, *_ in nodes if op == "Conv"}
    graph = helper.make_graph(
        [helper.make_node(op, i.split(), [o], name=f"/{o}", **a) for op, i, o, a in nodes],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array(np.float32(value), key)
            for key, value in (CONSTANTS | weights).items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    cleaned = load(model).model
    return units_of(cleaned, TARGETS[target]().plan(cleaned, keep).decisions)


def conv(source, output):
    return "Conv", f"{source} w_{output}", output, SAME


def test_a_layer_and_its_tail_are_one_unit():
    found = units(conv("x", "c1"), ("Relu", "c1", "r1", {}), conv("r1", "y"))
    assert found.members == {"/c1": ("/c1", "/r1"), "/y": ("/y",)}
    assert found.layers == ("/c1", "/y")


def test_a_relu_that_others_look_behind_is_no_tail():
    found = units(conv("x", "c1"), ("Relu", "c1", "r1", {}), conv("r1", "y"), outputs=("y", "c1"))
    assert found.members["/c1"] == ("/c1",)


def test_a_silu_is_one_unit_with_its_gate_and_apart_from_the_layer():
    found = units(
        conv("x", "c1"), ("Sigmoid", "c1", "s", {}), ("Mul", "c1 s", "m", {}), conv("m", "y")
    )
    assert found.members == {"/c1": ("/c1",), "/s": ("/s", "/m"), "/y": ("/y",)}
    assert found.layers == ("/c1", "/y")
    assert found.edges == (("/c1", "/s", "c1"), ("/s", "/y", "m"))


def test_a_gate_of_another_tensor_is_none():
    found = units(
        conv("x", "c1"), conv("x", "c2"), ("Sigmoid", "c2", "s", {}), ("Mul", "c1 s", "m", {}),
        conv("m", "y"),
    )  # fmt: skip
    assert found.members["/s"] == ("/s",) and found.members["/m"] == ("/m",)


def test_a_hard_swish_written_out_is_one_unit_with_the_layer_before():
    found = units(
        conv("x", "c1"), ("Add", "c1 three", "a", {}), ("Clip", "a zero six", "b", {}),
        ("Mul", "c1 b", "m", {}), ("Div", "m six", "d", {}), conv("d", "y"),
    )  # fmt: skip
    assert found.members == {"/c1": ("/c1", "/a", "/b", "/m", "/d"), "/y": ("/y",)}


def test_a_hard_swish_as_an_operator_is_of_the_layer_before_that_makes_it_for_it_alone():
    swish = ("HardSwish", "c1", "h", {})
    assert list(units(conv("x", "c1"), swish, conv("h", "y")).members) == ["/c1", "/y"]
    apart = units(conv("x", "c1"), swish, conv("h", "y"), outputs=("y", "c1"))
    assert list(apart.members) == ["/c1", "/h", "/y"]
    apart = units(conv("x", "c1"), swish, conv("h", "c2"), ("Add", "c1 c2", "y", {}))
    assert list(apart.members) == ["/c1", "/h", "/c2"]


def test_a_gate_of_another_tensor_is_of_the_layer_that_makes_the_gate():
    found = units(
        conv("x", "c1"), conv("c1", "c2"), ("HardSigmoid", "c2", "s", {}),
        ("Mul", "c1 s", "m", {}), conv("m", "y"),
    )  # fmt: skip
    assert found.members["/c2"] == ("/c2", "/s", "/m")


def test_borders_are_edges_inlets_and_outlets():
    found = units(
        conv("x", "c1"), ("Exp", "c1", "e", {}), conv("e", "c2"), conv("c1", "c3"),
        ("Add", "c2 c3", "s", {}), conv("s", "y"),
    )  # fmt: skip
    edges = {("/c1", "/c3", "c1"), ("/c2", "/s", "c2"), ("/c3", "/s", "c3"), ("/s", "/y", "s")}
    assert set(found.edges) == edges
    assert set(found.inlets) == {("/c1", "x"), ("/c2", "e")}
    assert set(found.outlets) == {("/c1", "c1"), ("/y", "y")}
    assert set(found.tensors) == {"c1", "c2", "c3", "s", "x", "e", "y"}
    assert set(found.around(["/c2"])) == {"c2", "e"}
    assert found.layers == ("/c1", "/c2", "/c3", "/y")
    assert found.nodes(["/c3", "/s"]) == ("/c3", "/s")


def test_what_is_float_anyway_is_in_no_unit():
    found = units(conv("x", "c1"), conv("c1", "c2"), conv("c2", "y"), keep=("/c2",))
    assert list(found.members) == ["/c1", "/y"]
    assert found.outlets == (("/c1", "c1"), ("/y", "y")) and ("/y", "c2") in found.inlets


def test_a_tail_that_the_target_leaves_in_float_is_no_member():
    found = units(conv("x", "c1"), ("Relu", "c1", "r1", {}), conv("r1", "y"), target="ascend")
    assert found.members == {"/c1": ("/c1",), "/y": ("/y",)}
