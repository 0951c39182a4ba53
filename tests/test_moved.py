"""Where a layer's channels are behind nodes that only move values."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.frontends.affine import Moved
from deploy.targets.ascend.settled import unfused

CONV = helper.make_node("Conv", ["x", "w"], ["c"], name="conv")


def move(kind, *axes, **given):
    """The node and the constant that gives its axes, where there are any."""
    constants = {"axes": numpy_helper.from_array(np.array(axes, np.int64), "axes")} if axes else {}
    node = helper.make_node(kind, ["c", "axes"] if axes else ["c"], ["m"], **given)
    return node, constants


@pytest.mark.parametrize(
    ("kind", "axes", "given", "found"),
    [
        ("Transpose", (), {"perm": [0, 2, 3, 1]}, (3, 4)),
        ("Transpose", (), {}, (2, 4)),  # all axes the other way round
        ("Transpose", (), {"perm": [0, 1]}, None),
        ("Squeeze", (0,), {}, (0, 3)),
        ("Squeeze", (-1, 2), {}, (1, 2)),
        ("Squeeze", (1,), {}, None),  # the channels themselves
        ("Squeeze", (), {"axes": [2]}, (1, 3)),  # before opset 13
        ("Squeeze", (), {}, None),  # all of one, whichever they are
        ("Squeeze", (7,), {}, None),
        ("Unsqueeze", (0, -1), {}, (2, 6)),
        ("Unsqueeze", (1,), {}, (2, 5)),
    ],
)
def test_the_channels_are_where_the_moves_put_them(kind, axes, given, found):
    node, constants = move(kind, *axes, **given)
    assert Moved(CONV, (node,)).axis(4, constants) == found


def test_axes_that_are_computed_are_not_known():
    node, _ = move("Squeeze", 2)
    assert Moved(CONV, (node,)).axis(4, {}) is None


@pytest.mark.parametrize(("bare", "left"), [((), 0), (("conv",), 1)])
def test_what_amct_is_to_find_apart_from_its_layer_stays_apart_behind_a_move(bare, left):
    nodes = [
        CONV,
        helper.make_node("Transpose", ["c"], ["t"], name="turn", perm=[0, 2, 3, 1]),
        helper.make_node("Add", ["t", "k"], ["y"], name="add"),
    ]
    rng = np.random.default_rng(0)
    held = {"w": rng.normal(size=(4, 3, 1, 1)), "k": rng.normal(size=4)}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 4, 4])],
        [numpy_helper.from_array(np.float32(value), name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    subject = SimpleNamespace(unfolded=SimpleNamespace(model=model))
    config = SimpleNamespace(do_fusion=True, skip_fusion_layers=())
    found, _ = unfused(subject, config, bare=bare)
    assert [node.op_type for node in found.graph.node].count("Add") == left


@pytest.mark.parametrize("kept", [{"bare": ("other",)}, {"skipped": ("conv",)}, {}])
def test_what_amct_is_to_find_apart_stays_apart_behind_layers_side_by_side(kept):
    """Also where the configuration names but one of them."""
    nodes = [
        CONV,
        helper.make_node("Conv", ["x", "w"], ["d"], name="other"),
        helper.make_node("Concat", ["c", "d"], ["cd"], name="concat", axis=1),
        helper.make_node("BatchNormalization", ["cd", *["k"] * 4], ["y"], name="norm"),
    ]
    held = {"w": np.ones((4, 3, 1, 1)), "k": np.ones(8)}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 4, 4])],
        [numpy_helper.from_array(np.float32(value), name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    subject = SimpleNamespace(unfolded=SimpleNamespace(model=model))
    config = SimpleNamespace(do_fusion=True, skip_fusion_layers=kept.get("skipped", ()))
    found, _ = unfused(subject, config, bare=kept.get("bare", ()))
    left = [node.op_type for node in found.graph.node].count("BatchNormalization")
    assert left == (1 if kept else 0)


def test_a_build_runs_a_conv1d_of_keras_in_int8_from_one_layer_to_the_next(run, tmp_path):
    """Conv, Squeeze, Add, Relu, Unsqueeze, Conv: the Add between them was float, and the Relu."""
    rng = np.random.default_rng(0)
    nodes, held = [], {"axes": np.array([2], np.int64)}
    last, wide = "x", 3
    for n in range(3):
        held |= {f"w{n}": np.float32(rng.normal(0, 0.3, (8, wide, 1, 3))),
                 f"b{n}": np.float32(rng.normal(size=(8, 1)))}  # fmt: skip
        nodes += [
            helper.make_node("Unsqueeze", [last, "axes"], [f"u{n}"]),
            helper.make_node("Conv", [f"u{n}", f"w{n}"], [f"c{n}"], pads=[0, 1, 0, 1]),
            helper.make_node("Squeeze", [f"c{n}", "axes"], [f"s{n}"]),
            helper.make_node("Add", [f"s{n}", f"b{n}"], [f"a{n}"]),
            helper.make_node("Relu", [f"a{n}"], [f"r{n}"]),
        ]
        last, wide = f"r{n}", 8
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, 64])
        for name, channels in (("x", 3), (last, 8))
    ]
    constants = [numpy_helper.from_array(value, name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", rng.normal(size=(8, 3, 64)).astype(np.float32))
    words = ("--images", tmp_path / "x.npy", "--effort", 0, "--duration", 0, "--int8-stem")
    code, _, _ = run("build", tmp_path / "net.onnx", *words, "--out", tmp_path / "o")
    assert code == 0
    engine = onnx.load(tmp_path / "o" / "net.int8.onnx")
    made = {name: node.op_type for node in engine.graph.node for name in node.output}
    assert "Add" not in made.values()
    convs = [node for node in engine.graph.node if node.op_type == "Conv"]
    assert len(convs) == 3 and {made[node.input[0]] for node in convs} == {"DequantizeLinear"}
    moves = [node for node in engine.graph.node if node.op_type == "Unsqueeze"]
    assert [made.get(node.input[0]) for node in moves[1:]] == ["DequantizeLinear"] * 2
