"""The cut of a trial model: only what is behind an int8 layer is run, and it gives the same."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.runtimes.ort import OrtSession
from deploy.tuning import downstream
from deploy.tuning.downstream import Kept, behind, border

SAMPLES = [
    {"x": np.random.default_rng(seed).normal(size=(1, 4)).astype(np.float32)} for seed in (0, 1)
]


def chain():
    """x -> a -> b -> c -> y, and a is added once more before y."""
    weights = np.random.default_rng(2).normal(size=(3, 4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="A"),
        helper.make_node("MatMul", ["a", "w1"], ["b"], name="B"),
        helper.make_node("MatMul", ["b", "w2"], ["c"], name="C"),
        helper.make_node("Add", ["c", "a"], ["y"], name="D"),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xy"]
    constants = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def rounded(model, *nodes):
    """The model with a Round before these nodes."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for node in model.graph.node:
        if node.name in nodes:
            inner = f"{node.input[0]}/rounded"
            made.graph.node.append(helper.make_node("Round", [node.input[0]], [inner]))
            node = helper.make_node(node.op_type, [inner, *node.input[1:]], node.output)
        made.graph.node.append(node)
    return made


def run(model, feed):
    return OrtSession.open(model, threads=1).run(feed)["y"]


@pytest.fixture
def kept():
    said = [OrtSession.open(chain(), threads=1).run(sample) for sample in SAMPLES]
    return Kept.of(chain(), [["B"], ["C"]], list(zip(SAMPLES, said, strict=True)))


def test_what_is_read_behind_a_change_and_made_before_it_is_its_border():
    assert border(chain(), ["C"]) == ["b", "a"]
    assert border(chain(), ["B"]) == ["a"]
    assert border(chain(), ["A"]) == []  # the model's own input is no border


@pytest.mark.parametrize("changed, left", [("B", 4), ("C", 3), ("A", 5)])
def test_the_part_behind_a_change_gives_what_the_whole_gives(kept, changed, left):
    trial = rounded(chain(), changed)
    short = behind(trial, kept.same(trial), kept.values)
    assert len(short.graph.node) == left
    names = [value.name for value in short.graph.input]
    for (sample, _), values in zip(kept.heard, kept.values, strict=True):
        own = {name: {**sample, **values}[name] for name in names}
        np.testing.assert_allclose(run(short, own), run(trial, sample), rtol=1e-5, atol=1e-6)


def test_a_node_is_the_same_only_with_the_same_constants_and_words(kept):
    trial = rounded(chain(), "C")
    assert {"a", "b"} <= kept.same(trial) and "c" not in kept.same(trial)
    other = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w1")
    trial.graph.initializer[1].CopyFrom(other)
    assert "a" in kept.same(trial) and "b" not in kept.same(trial)


def test_a_model_in_which_nothing_changed_is_run_from_what_is_known(kept):
    short = behind(chain(), kept.same(chain()), kept.values)
    assert [node.name for node in short.graph.node] == ["C", "D"]


def test_only_so_much_is_kept(monkeypatch):
    monkeypatch.setattr(downstream, "_MOST_BYTES", 4 * 4 * len(SAMPLES))
    kept = Kept.of(chain(), [["B"], ["C"]], [(sample, {}) for sample in SAMPLES])
    assert [list(values) for values in kept.values] == [["a"], ["a"]]


def lines():
    """chain() over as many steps as a sample has: [1, T, 4]."""
    model = chain()
    for end in (model.graph.input, model.graph.output):
        end[0].CopyFrom(helper.make_tensor_value_info(end[0].name, TensorProto.FLOAT, [1, "T", 4]))
    return model


def test_samples_of_several_sizes_are_all_run_from_what_is_known():
    samples = [{"x": np.full((1, steps, 4), steps, np.float32)} for steps in (3, 5, 3)]
    kept = Kept.of(lines(), [["B"]], [(sample, {}) for sample in samples])
    trial = rounded(lines(), "B")
    short = behind(trial, kept.same(trial), kept.values)
    (value,) = short.graph.input
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [1, 0, 4]
    for (sample, _), values in zip(kept.heard, kept.values, strict=True):
        np.testing.assert_allclose(run(short, values), run(trial, sample), rtol=1e-5)
