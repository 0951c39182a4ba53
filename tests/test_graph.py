"""The index of an ONNX graph, edits of it, and names that collide with added ones."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from deploy.errors import ModelError
from deploy.graph import edit
from deploy.graph.edit import _find_base_name, free_added_names
from deploy.graph.index import Graph, attributes, describe_node
from deploy.runtimes.mapped_model import copy_without_initializers
from deploy.targets.onnxruntime import qdq
from deploy.tuning.search_options import Tuning
from tests.models import as_float32, make_model, make_node, make_value


def tensor(name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(2, np.float32), name)


def value(name: str) -> onnx.ValueInfoProto:
    return make_value(name, [2])


@pytest.fixture
def model() -> onnx.ModelProto:
    """Two Adds, an If whose branch captures `inner`, a Constant node, and a weight nobody reads."""
    branch = helper.make_graph([make_node("Add", "b inner", "then")], "branch", [], [value("then")])
    nodes = [
        make_node("Constant", "", "five", value=tensor("")),
        make_node("Add", "x w", "a"),
        make_node("Add", "a a", "b", name="mine"),
        make_node("If", "cond", "y", then_branch=branch, else_branch=branch),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x"), make_value("cond", [], TensorProto.BOOL), value("w")],
        [value("y")],
        [tensor("w"), tensor("inner"), tensor("idle")],
        value_info=[value("a")],
    )
    return helper.make_model(graph)


def test_copies_leave_the_original_unchanged(model):
    original_bytes = model.SerializeToString(deterministic=True)
    copy = edit.copy_message(model)
    del copy.graph.node[:]
    tapped = edit.copy_with_outputs(model, ["a", "y", "a"])
    assert [output.name for output in tapped.graph.output] == ["y", "a"]
    assert model.SerializeToString(deterministic=True) == original_bytes


def test_field_can_take_its_own_parts(model):
    graph = model.graph
    edit.replace_nodes(graph, reversed(graph.node))
    assert [node.op_type for node in graph.node] == ["If", "Add", "Add", "Constant"]
    edit.update_tensors(graph.initializer, {"w": tensor("w"), "new": tensor("new")})
    assert [t.name for t in graph.initializer] == ["w", "inner", "idle", "new"]


def test_unread_weights_are_dropped(model):
    graph = model.graph
    edit.drop_unread(graph)
    assert [t.name for t in graph.initializer] == ["w", "inner"]
    edit.rebuild(graph, [node for node in graph.node if node.op_type == "If"])
    assert [t.name for t in graph.initializer] == ["inner"]
    assert not graph.value_info
    assert [i.name for i in graph.input] == ["x", "cond", "w"]


def test_weights_are_removed_from_inputs(model):
    assert [edit.drop_initializer_inputs(model.graph) for _ in range(2)] == [1, 0]
    assert [i.name for i in model.graph.input] == ["x", "cond"]


def test_node_names_by_output_or_index(model):
    copy = edit.copy_message(model)
    edit.name_nodes(model.graph)
    edit.name_nodes_by_index(copy.graph)
    names_by_output = [node.name for node in model.graph.node]
    names_by_index = [node.name for node in copy.graph.node]
    assert names_by_output == ["Constant_five", "Add_a", "mine", "If_y"]
    assert names_by_index == ["Constant_0", "Add_1", "mine", "If_3"]


def test_index_lists_inputs_constants_and_readers(model):
    graph = Graph(model)
    assert graph.inputs == ["x", "cond"]
    assert graph.outputs == {"y"}
    assert set(graph.initializers) == {"w", "inner", "idle"}
    assert set(graph.constants) == {"w", "inner", "idle", "five"}
    assert [node.name for node in graph.readers["a"]] == ["mine"]
    assert graph.captured == {"b", "inner"}
    conv_attributes = {"group": 2, "pads": [1, 1]}
    assert attributes(make_node("Conv", "x w", "y", **conv_attributes)) == conv_attributes


def test_replaced_nodes_keep_remaining_objects(model):
    graph = model.graph
    constant, first_add, second_add, branches = graph.node
    new = make_node("Neg", "a", "n")
    edit.replace_nodes(graph, [first_add, new, branches, constant])
    assert [node.op_type for node in graph.node] == ["Add", "Neg", "If", "Constant"]
    assert graph.node[0] is first_add
    assert graph.node[1] == new
    assert graph.node[1] is not new
    assert second_add.name == "mine"
    assert second_add not in list(graph.node)


def test_copy_without_initializers_lacks_only_these(model):
    model.metadata_props.add(key="made by", value="a test")
    model.doc_string = "with notes"
    assert copy_without_initializers(model, ()) == model
    copy, expected = copy_without_initializers(model, {"w", "idle"}), edit.copy_message(model)
    del expected.graph.initializer[2], expected.graph.initializer[0]
    copy_bytes, expected_bytes = (m.SerializeToString(deterministic=True) for m in (copy, expected))
    assert copy_bytes == expected_bytes


COLLIDING = {
    "a scale": ("Mul(f, k)", {"k": "r/scale"}),
    "a weight's integers": ("Conv(f, w3)", {"w3": "w2/quantized"}),
    "an activation's integers": ("Relu(f)", {"f": "r/quantized"}),
    "what Ascend runs": ("Relu(f)", {"d": "Conv_d.quant.exec.1.out"}),
    "an output": ("Relu(f)", {"y": "r/dequantized"}),
    "a pair that is gone": ("Conv(f, w3, e)", {"f": "gone/dequantized", "d": "none/float"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COLLIDING)
def test_colliding_names_change_no_accuracy(case, tmp_path):
    expression, names = COLLIDING[case]
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 1, 3, 3), "w2": (4, 4, 1, 1), "w3": (4, 4, 1, 1), "e": (4,)}
    arrays = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    text = "c = Conv(x, w) r = Relu(c) d = Conv(r, w2) f = Relu(d) g = "
    text += f"{expression} y = Relu(g)"
    arrays |= {"k": np.array(0.004)}
    arrays = {name: array for name, array in arrays.items() if name in text}
    plain = make_model(text, {"x": [1, 1, 8, 8]}, {"y": None}, as_float32(arrays))
    renamed = onnx.ModelProto.FromString(plain.SerializeToString())
    for value in (*renamed.graph.initializer, *renamed.graph.output):
        value.name = names.get(value.name, value.name)
    for node in renamed.graph.node:
        for tensor_names in (node.input, node.output):
            tensor_names[:] = [names.get(name, name) for name in tensor_names]
    samples = rng.normal(size=(4, 1, 1, 8, 8)).astype(np.float32)
    figures = []
    for model in (plain, renamed):
        report = build(
            model,
            [{"x": sample} for sample in samples],
            targets=["onnxruntime", "tensorrt", "ascend"],
            out=tmp_path / str(len(figures)),
            duration_s=0,
            tuning=Tuning(effort=0),
        )
        assert not report.failed
        engines = [engine for engine in report.engines if engine.verdict is not None]
        figures.append([engine.accuracy.outputs[0].sqnr_db for engine in engines])
    assert figures[0] == figures[1]
    assert len(figures[0]) == 3


def test_colliding_input_and_output_is_refused():
    with pytest.raises(ModelError, match="'x/scale' beside 'x'"):
        free_added_names(make_model([("Relu", "x", "x/scale")], {"x": [1]}, {"x/scale": [1]}).graph)


def test_tensor_beside_two_outputs_is_renamed_once():
    nodes = [("Relu", "x", "t"), ("Relu", "t", "t/scale"), ("Relu", "t", "t/zero")]
    model = make_model(nodes, {"x": [1]}, {"t/scale": [1], "t/zero": [1]})
    assert free_added_names(model.graph).count("t") == 1
    assert model.graph.node[2].input == ["t_own"]


def test_every_added_suffix_is_known():
    """Suffixes are read from the code: f"{name}/word" and f"{name}.word" in what writes models."""
    pattern = re.compile(r'f"\{[^"{}]+\}((?:[/.][A-Za-z_]+\d*(?:\{[a-z]+\})?)+)"')
    file_by_suffix = {}
    for folder in ("targets", "graph"):
        for path in (Path(qdq.__file__).parents[2] / folder).rglob("*.py"):
            for text in pattern.findall(path.read_text()):
                file_by_suffix[re.sub(r"\{[a-z]+\}", "", text)] = path.name
    names = {"x", *(f"x{text}" for text in file_by_suffix)}
    unknown = {
        text: file
        for text, file in file_by_suffix.items()
        if not _find_base_name(f"x{text}", names)
    }
    files = {".engine", ".gpu.cache", ".json", ".om", ".tensorrt", ".weight"}
    assert {t: w for t, w in unknown.items() if t not in files} == {}
    assert len(file_by_suffix) > 60


def test_names_of_nodes_are_escaped():
    node = helper.make_node("Conv", ["x"], ["y"], "it's\nb")
    assert describe_node(node) == 'Conv "it\'s\\nb"'
