"""Sequence models through the command: a class for each step decides, where dB alone did before."""

import json
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.tasks import classes

STEPS, FEATURES, CLASSES = 50, 8, 6


def saved(path, nodes, shape, **weights):
    """A model of x [1, 8, 50] -> y."""
    graph = helper.make_graph(
        nodes,
        "frames",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, FEATURES, STEPS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], name=f"{op}_{output}", **attributes)


def frames(path):
    """Softmax over six classes of frames, [1, 50, 6]; the first feature decides nothing."""
    made = np.random.default_rng(4)
    first, second = made.normal(size=(16, FEATURES, 5)), made.normal(size=(CLASSES, 16, 1))
    first[:, 0] = 0
    nodes = [
        node("Conv", "x w1", "c1", pads=[2, 2]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2 b2", "c2"),
        node("Transpose", "c2", "t", perm=[0, 2, 1]),
        node("Softmax", "t", "y", axis=2),
    ]
    bias = -second.sum(axis=(1, 2)) * 2.3  # so that no class is the best one everywhere
    return saved(path, nodes, [1, STEPS, CLASSES], w1=first, w2=second, b2=bias)


def silence(path):
    """The same, far from sure of any class but the first: nothing but that one is fed."""
    model = onnx.load(frames(path))
    (bias,) = (one for one in model.graph.initializer if one.name == "b2")
    values = numpy_helper.to_array(bias).copy()
    values[0] += 100
    bias.CopyFrom(numpy_helper.from_array(values, "b2"))
    onnx.save(model, path)
    return path


def notes(path):
    """How loud each of seven features is, and how much louder than that again."""
    weight = np.zeros((FEATURES - 1, FEATURES, 5))
    weight[np.arange(FEATURES - 1), 1 + np.arange(FEATURES - 1), 2] = 1
    own = np.eye(FEATURES - 1)[..., None]
    nodes = [
        node("Conv", "x w", "c", pads=[2, 2]),
        node("Relu", "c", "r"),
        node("Conv", "r w1 b", "c1"),
        node("Conv", "r w2 b", "c2"),
        node("Transpose", "c1", "t1", perm=[0, 2, 1]),
        node("Transpose", "c2", "t2", perm=[0, 2, 1]),
        node("Sigmoid", "t1", "y"),
        node("Sigmoid", "t2", "onsets"),
    ]
    weights = {"w": weight, "w1": own * 15, "w2": own * 12, "b": np.full(FEATURES - 1, -21.0)}
    saved(path, nodes, [1, STEPS, FEATURES - 1], **weights)
    model = onnx.load(path)
    other = onnx.ValueInfoProto()
    other.CopyFrom(model.graph.output[0])
    other.name = "onsets"
    model.graph.output.append(other)
    onnx.save(model, path)
    return path


def summed():
    """f: one number a filter of w1, over all steps."""
    return (
        node("Conv", "x w1", "c1", pads=[2, 2]),
        node("Relu", "c1", "r1"),
        node("GlobalAveragePool", "r1", "g"),
        node("Flatten", "g", "f"),
    )


def scores(path, *, alike=False):
    """Three figures of 2 to 6, of which the second is the largest; or about 3, and any is."""
    made = np.random.default_rng(4)
    nodes = [
        *summed(),
        node("Gemm", "f w2 b2", "y", transB=1),
    ]
    first, second = made.normal(size=(16, FEATURES, 5)), made.uniform(0, 0.02, (3, 16))
    least = 3 - second @ means_of(first) if alike else [2, 4, 3]
    return saved(path, nodes, [1, 3], w1=first, w2=second, b2=least)


def level(path, *, numbers=1):
    """Numbers of about 100, which hardly vary beside that; of one number: an age, a temperature."""
    made = np.random.default_rng(4)
    first = made.normal(size=(16, FEATURES, 5))
    first[:, 0] = 0
    nodes = [*summed(), node("Gemm", "f w2 b2", "y", transB=1)]
    usual = 100 - means_of(first).sum(keepdims=True)
    b2 = np.repeat(usual, numbers)
    return saved(path, nodes, [1, numbers], w1=first, w2=np.full((numbers, 16), 1.0), b2=b2)


def switch(path):
    """Whether the features are louder than usual: one probability, hardly ever in between."""
    made = np.random.default_rng(4)
    first = made.normal(size=(16, FEATURES, 5))
    nodes = [
        *summed(),
        node("Gemm", "f w2 b2", "s", transB=1),
        node("Sigmoid", "s", "y"),
    ]
    usual = -60 * means_of(first).sum(keepdims=True)
    return saved(path, nodes, [1, 1], w1=first, w2=np.full((1, 16), 60), b2=usual)


def means_of(weights):
    """What Relu leaves of normal numbers, in the mean, after the convolution."""
    return np.sqrt((weights**2).sum(axis=(1, 2)) / (2 * np.pi))


@pytest.fixture
def build(run, tmp_path):
    """A build on sequences whose first feature is as large as asked: (code, screen, report)."""

    def call(model, large=1.0):
        made = np.random.default_rng(6)
        rows = made.normal(size=(24, FEATURES, STEPS)).astype(np.float32)
        rows[:, 0] *= large
        np.save(tmp_path / "x.npy", rows)
        words = ("build", model(tmp_path / "m.onnx"), "--images", tmp_path / "x.npy")
        asked = ("--duration", 0, "--effort", 0, "--out", tmp_path / "o")
        code, out, error = run(*words, *asked)
        report = tmp_path / "o" / "report.json"
        assert report.exists(), error
        return code, out, json.loads(report.read_text())["engines"][1]["accuracy"]

    return call


def test_steps_alike_are_on_the_screen_and_in_the_report(build, tmp_path):
    code, out, told = build(frames)
    task = told["task"]
    assert code == 0 and task["task"] == "steps" and task["form"] == "y: 6 classes a step"
    assert task["value"] > 0.95 and task["count"].endswith(" of 1200")
    lines = {line[:16].strip(): line for line in out.splitlines()}
    assert task["count"] in lines["Steps alike"]
    assert f"good: {task['count']} steps of FP32's class" in out
    assert "Top-1 agreement" not in out and told["top1_agreement"] is None
    assert "in the worst sample" in (tmp_path / "o" / "report.md").read_text()


def test_steps_that_change_their_class_decide_the_verdict(build):
    code, out, told = build(frames, large=100.0)
    assert told["task"]["value"] < 0.75 and code == 3
    assert f"unusable: {told['task']['count']} steps of FP32's class" in out


def test_samples_in_which_nothing_is_found_prove_nothing(build):
    code, out, told = build(silence)
    assert told["task"] is None and told["reading"].endswith("next to nothing on these samples")
    said = "doubtful: the float model finds nothing, or the same everywhere, in all 24 samples"
    assert code == 0 and said in " ".join(out.split())


@pytest.mark.parametrize("large", [1.0, 100.0])
def test_decisions_of_several_outputs_decide_the_verdict(build, large):
    code, out, told = build(notes, large=large)
    task = told["task"]
    assert task["form"].startswith("y, onsets: probabilities")
    assert task["figure"] == "steps alike but the usual" and "Steps alike but the usual" in out
    assert (task["value"] > 0.9, code) == ((True, 0) if large == 1 else (False, 3))
    assert "probabilities on FP32's side of 0.5" in out


def test_of_numbers_that_hardly_vary_what_varies_is_judged(build):
    code, out, told = build(level)
    (part,) = told["parts"]
    assert code == 0 and part["label"] == "y - its mean" and part["less"] == "its mean"
    assert 5 < part["sqnr_db"] < told["outputs"][0]["sqnr_db"] - 15
    assert "good:" in out and "in the worst part, y - its mean" in " ".join(out.split())
    code, out, told = build(level, large=100.0)
    assert told["outputs"][0]["sqnr_db"] > 15 > 5 > told["parts"][0]["sqnr_db"]
    assert code == 0 and "doubtful:" in out


def test_of_many_numbers_that_hardly_vary_the_whole_is_judged(build):
    """As those of a network with random weights are."""
    for numbers, label in ((32, "y - its mean"), (33, "y")):
        _, _, told = build(partial(level, numbers=numbers))
        assert [part["label"] for part in told["parts"]] == [label]


def test_one_probability_is_counted_sample_by_sample(build):
    _, out, told = build(switch)
    task = told["task"]
    assert task["task"] == "steps" and task["count"].endswith(" of 24") and task["value"] > 0.75
    assert f"{task['count']} probabilities on FP32's side of 0.5" in out
    assert "in the worst sample" not in out


def places(path):
    """Forty numbers from 0.2 to 0.8, the same one always the largest: points in a picture."""
    made = np.random.default_rng(4)
    nodes = [
        *summed(),
        node("Gemm", "f w2 b2", "y", transB=1),
    ]
    first, second = made.normal(size=(16, FEATURES, 5)), made.normal(0, 0.001, (40, 16))
    return saved(path, nodes, [1, 40], w1=first, w2=second, b2=np.linspace(0.2, 0.8, 40))


def any_scores(path):
    return scores(path, alike=True)


def forecast(path):
    """What a series goes on with: 40 numbers that lie about where it is, above 0 or below."""
    made = np.random.default_rng(4)
    nodes = [
        *summed(),
        node("Gemm", "f w2 b2", "y", transB=1),
    ]
    first, shape = made.normal(size=(8, FEATURES, 5)), 0.02 * made.normal(size=(40, 16))
    twice = np.concatenate([first, np.roll(first, 1, axis=1)])
    level = np.repeat([1.0, -1.0], 8)
    return saved(path, nodes, [1, 40], w1=twice, w2=level + shape, b2=np.zeros(40))


@pytest.mark.parametrize("model", [scores, any_scores, places, forecast])
def test_a_regression_has_no_best_class(build, model):
    _, out, told = build(model)
    assert told["task"] is None and told["top1_agreement"] is None
    assert "Top-1 agreement" not in out and "gives one class" not in out


def best_few(path):
    """The best three of six raw scores, and their numbers."""
    made = np.random.default_rng(4)
    nodes = [
        node("Conv", "x w1", "c1"),
        node("GlobalAveragePool", "c1", "g1"),
        node("Flatten", "g1", "f1"),
        helper.make_node("TopK", ["f1", "k"], ["y", "places"], name="best", axis=1),
    ]
    saved(path, nodes, [1, 3], w1=made.normal(size=(CLASSES, FEATURES, 5)))
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.int64([3]), "k"))
    places = helper.make_tensor_value_info("places", TensorProto.INT64, [1, 3])
    model.graph.output.append(places)
    onnx.save(model, path)
    return path


def flags(path):
    """Whether each of six scores is above 0, each a matter of its own."""
    best_few(path)
    model = onnx.load(path)
    del model.graph.node[-1], model.graph.output[:]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    model.graph.node.append(node("Greater", "f1 zero", "y"))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.BOOL, [1, CLASSES]))
    onnx.save(model, path)
    return path


def test_flags_are_no_scores_of_a_class(build):
    _, out, told = build(flags)
    assert told["task"] is None and told["top1_agreement"] is None
    assert "Top-1 agreement" not in out and "gives one class" not in out


def test_what_is_ranked_is_told_by_its_places(build):
    """The first of the best is always the best: that is no model that gives one class."""
    _, out, told = build(best_few)
    assert told["task"]["task"] == "classes" and "among the best 3" in told["task"]["words"]
    assert told["top1_agreement"] == told["task"]["value"] and "gives one class" not in out


def of(*counts):
    """(value, how often), ... -> [n]."""
    return np.concatenate([np.full(count, value) for value, count in counts])


@pytest.mark.parametrize(
    ("values", "are"),
    [
        ([1, 0], True), ([0.91, 0.09], True), ([0.9, 0.05], False), ([0.95, 0.1], False),
        ([0.95, 0.95], False), ([0.05, 0.05], False), ([1.1, 0], False), ([1, -0.1], False),
    ],
)  # fmt: skip
def test_one_value_a_sample_is_a_probability_where_both_sides_are_seen(values, are):
    assert classes.are_switches([np.array([[value]]) for value in values]) == are
    assert not classes.are_switches([np.array([[value, value]]) for value in values])


@pytest.mark.parametrize(
    ("values", "are"),
    [
        (of((0.95, 2), (0.05, 6)), True), (of((0.95, 2), (0.05, 5)), False),  # eight steps
        (of((0.9, 30), (0.89, 24), (0.05, 46)), True),
        (of((0.9, 30), (0.5, 25), (0.05, 45)), False),
        (of((0.95, 10), (0.5, 9), (0.1, 81)), True), (of((0.95, 10), (0.11, 10), (0, 80)), False),
        (of((0.95, 8)), False), (of((0.95, 7), (0.45, 1)), True),
        (of((1.1, 2), (0.05, 6)), False), (of((0.95, 2), (-0.1, 6)), False),
    ],
)  # fmt: skip
def test_values_of_steps_are_probabilities_where_few_are_between(values, are):
    assert classes.are_tracks([values.reshape(1, -1)]) == are


@pytest.mark.parametrize(
    ("values", "are"),
    [
        (of((9, 2), (-9, 6)), True), (of((9, 2), (-9, 5)), False), (of((9, 1), (-9, 7)), False),
        (of((9, 7), (-9, 1)), False), (of((40, 2), (-9, 6)), True), (of((41, 2), (-9, 6)), False),
        (of((9, 2), (0, 6)), False), (of((9, 2), (0, 5), (-1, 1)), True),
        (of((3.1, 2), (6.9, 2), (-3.1, 2), (-6.9, 2)), True),  # 10 apart, each side by 1.9
        (of((3, 2), (7, 2), (-3, 2), (-7, 2)), False),
    ],
)  # fmt: skip
def test_values_of_steps_are_raw_scores_where_the_two_sides_of_0_are_apart(values, are):
    assert classes.are_raw_tracks([values.reshape(1, -1)]) == are


@pytest.mark.parametrize(
    ("values", "are"),
    [
        (of((0.9, 19), (0.1, 61)), True), (of((0.9, 20), (0.1, 60)), False),
        (of((0.1, 80)), False), (of((0.9, 1), (0.1, 79)), True),
        (of((0.9, 9), (0.4, 3), (0.1, 68)), True), (of((0.9, 9), (0.4, 4), (0.1, 67)), False),
        (of((0.9, 9), (0.3, 36), (0.1, 35)), True), (of((0.9, 9), (0.1, 61)), False),
        (of((1.1, 9), (0.1, 71)), False), (of((0.9, 9), (-0.1, 71)), False),
    ],
)  # fmt: skip
def test_decisions_are_a_few_probabilities_above_a_half_in_several_outputs(values, are):
    output = [values.reshape(1, -1, 10)]  # 8 steps, or 7
    assert classes.are_decisions([output, output]) == are
    assert not classes.are_decisions([output])
    assert not classes.are_decisions([output, [np.concatenate(output * 2, axis=1)]])


def scored(apart, mean=0.0, steps=8):
    """Raw scores [1, T, 2], `apart` from their mean, which is `mean` and -`mean` in turn."""
    sides, means = np.tile([1, -1], steps // 2), np.tile([1, 1, -1, -1], steps // 4)
    return np.stack([sides * apart + mean * means, mean * means - sides * apart], axis=1)[None]


@pytest.mark.parametrize(
    ("scores", "alone", "beside"),
    [
        (scored(0.7), 2, True),
        (scored(0.69), None, True),  # 0.80 of a Softmax
        (scored(0.21), None, True),
        (scored(0.2), None, False),  # 0.60
        (scored(4, 0.9), 2, True),
        (scored(4, 1.1), None, True),  # a quarter
        (scored(4, 1.9), None, True),
        (scored(4, 2.1), None, False),  # a half
        (scored(4, steps=4), 2, True),
        (scored(4)[:, :3], None, False),
        (scored(4)[:, ::2], None, False),  # one class alone
    ],
)
def test_raw_scores_of_steps_are_classes_where_they_are_sure_and_about_0(scores, alone, beside):
    assert classes.layout_of([scores], raw=True) == alone
    assert classes.are_heads([[scores], [scores]]) == beside
    assert classes.layout_of([scores], raw=False) is None and not classes.are_heads([[scores]])


def test_the_share_of_the_best_class_is_a_softmaxs():
    assert classes.best_share(np.log([[3, 1], [1, 1]])) == pytest.approx((0.75 + 0.5) / 2)
