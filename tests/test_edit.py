"""The contract of edits on a model: what is left alone, what keeps its name."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.graph.edit import (
    copied,
    copied_without,
    drop_unread,
    free_inputs,
    name_nodes,
    name_nodes_by_place,
    rebuild,
    replace_nodes,
    update,
    with_outputs,
)
from deploy.graph.index import Graph, Still, attributes


def tensor(name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(2, np.float32), name)


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


@pytest.fixture
def model() -> onnx.ModelProto:
    """Two Adds, an If whose branch captures `inner`, a Constant node, and a weight nobody reads."""
    branch = helper.make_graph(
        [helper.make_node("Add", ["b", "inner"], ["then"])], "branch", [], [value("then")]
    )
    nodes = [
        helper.make_node("Constant", [], ["five"], value=tensor("")),
        helper.make_node("Add", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "a"], ["b"], name="mine"),
        helper.make_node("If", ["cond"], ["y"], then_branch=branch, else_branch=branch),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x"), helper.make_tensor_value_info("cond", TensorProto.BOOL, []), value("w")],
        [value("y")],
        [tensor("w"), tensor("inner"), tensor("idle")],
        value_info=[value("a")],
    )
    return helper.make_model(graph)


def test_edits_that_give_a_model_leave_theirs_alone(model):
    before = model.SerializeToString(deterministic=True)
    copy = copied(model)
    del copy.graph.node[:]
    tapped = with_outputs(model, ["a", "y", "a"])
    assert [output.name for output in tapped.graph.output] == ["y", "a"]
    assert model.SerializeToString(deterministic=True) == before


def test_a_field_can_be_replaced_by_parts_of_itself(model):
    graph = model.graph
    replace_nodes(graph, reversed(graph.node))
    assert [node.op_type for node in graph.node] == ["If", "Add", "Add", "Constant"]
    update(graph.initializer, {"w": tensor("w"), "new": tensor("new")})
    assert [t.name for t in graph.initializer] == ["w", "inner", "idle", "new"]


def test_a_constant_that_only_a_subgraph_reads_is_kept(model):
    drop_unread(model.graph)
    assert [t.name for t in model.graph.initializer] == ["w", "inner"]


def test_a_rebuilt_graph_forgets_types_and_what_nobody_reads(model):
    graph = model.graph
    rebuild(graph, [node for node in graph.node if node.op_type == "If"])
    assert [t.name for t in graph.initializer] == ["inner"]
    assert not graph.value_info and [i.name for i in graph.input] == ["x", "cond", "w"]


def test_weights_leave_the_list_of_inputs(model):
    assert free_inputs(model.graph) == 1 and free_inputs(model.graph) == 0
    assert [i.name for i in model.graph.input] == ["x", "cond"]


def test_the_two_rules_for_names(model):
    other = copied(model)
    assert name_nodes(model.graph) == name_nodes_by_place(other.graph) == 3
    names = [[node.name for node in m.graph.node] for m in (model, other)]
    assert names == [
        ["Constant_five", "Add_a", "mine", "If_y"],
        ["Constant_0", "Add_1", "mine", "If_3"],
    ]


def test_the_index_knows_constants_readers_and_what_is_fed(model):
    graph = Graph(model)
    assert graph.inputs == ["x", "cond"] and graph.outputs == {"y"}
    assert set(graph.initializers) == {"w", "inner", "idle"}
    assert set(graph.constants) == {"w", "inner", "idle", "five"}
    assert [node.name for node in graph.readers["a"]] == ["mine"]
    assert graph.captured == {"b", "inner"}
    assert attributes(helper.make_node("Conv", ["x", "w"], ["y"], group=2, pads=[1, 1])) == {
        "group": 2,
        "pads": [1, 1],
    }


def test_nodes_that_stay_are_the_same_and_new_ones_come_between_them(model):
    graph = model.graph
    constant, first, second, branches = graph.node
    new = helper.make_node("Neg", ["a"], ["n"])
    replace_nodes(graph, [first, new, branches, constant])
    assert [node.op_type for node in graph.node] == ["Add", "Neg", "If", "Constant"]
    assert graph.node[0] is first and graph.node[1] == new and graph.node[1] is not new
    assert second.name == "mine" and second not in list(graph.node)


def test_a_copy_can_leave_constants_out_and_is_the_same_but_for_them(model):
    model.metadata_props.add(key="made by", value="a test")
    model.doc_string = "with notes"
    assert copied_without(model, ()) == model
    copy, wanted = copied_without(model, {"w", "idle"}), copied(model)
    del wanted.graph.initializer[2], wanted.graph.initializer[0]
    assert copy.SerializeToString(deterministic=True) == wanted.SerializeToString(
        deterministic=True
    )


def test_an_index_of_what_nobody_changes_says_what_any_index_says(model):
    still, graph = Still(model), Graph(model)
    for node in (*model.graph.node, *model.graph.node):
        assert still.data_inputs(node) == graph.data_inputs(node)
        assert still.tail(node) == graph.tail(node)
    for number in range(50):  # nodes of no graph, each where the one before it lay
        node = helper.make_node("Add", [f"in{number}", "w"], [f"out{number}"])
        assert still.data_inputs(node) == [f"in{number}"]
        assert still.tail(node) == f"out{number}"
