"""Text, classes of steps, states and outputs that repeat others."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper

from deploy.metrics.output_form import derive_form
from deploy.pipeline.measure import state_notes
from deploy.tasks import Metric
from deploy.tasks.declarations import Declaration, declare
from deploy.tasks.sequences import edit_distance
from tests.models import as_float32, make_model, make_value, run_command, save_net
from tests.outputs import fed, figure, framed, rng, same_task, softmax, spoken, steps


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("sides", ["NTC", "TNC", "NCT", "NC1T", "NT1C"])
@pytest.mark.parametrize("blank", [0, 29])
def test_texts_are_decoded_and_edits_counted(raw, sides, blank):
    how = {"raw": raw, "sides": sides, "blank": blank}
    texts = [[3, 3, 4, 5], [7, 8, 9, 7], [4, 4], [5, 6, 7, 8]]
    read = [[3, 3, 4, 5], [7, 8, 7, 7], [4, 5], [5, 6, 7, 8]]
    references = [steps(text, **how) for text in texts]
    form, found = figure(references, [steps(text, **how) for text in read])
    assert form.task.name == "text" and form.task.blank == blank
    assert found.value == 0.5 and found.words == "2 of 4 texts as FP32's, 2 edits in 14 symbols"


@pytest.mark.parametrize(("best", "symbols", "fed_with", "text"), [
    ([0, 1, 0, 2], 11, 0, True), ([0, 1, 0, 2], 10, 0, False), ([0, 1, 0, 1], 11, 0, True),
    ([0, 1, 0], 11, 0, False), ([0, 0, 0, 0], 11, 0, False),
    ([0, 1, 0, 2], 11, 3, True), ([0, 1, 0, 2], 11, 4, False),  # as of tokens
    ([1, 0, 0, 2], 11, 0, True), ([1, 5, 5, 2], 11, 0, False),  # the blank is first or last
    ([0, 0, *range(1, 9), 0, 0, *range(9, 17)], 30, 0, True),  # a fifth is blank
    ([0, 0, *range(1, 9), 0, 0, *range(9, 18)], 30, 0, False),
    ([0, *range(1, 17), 0, 0, 0, 0], 30, 0, True),  # 16 steps between two blanks
    ([0, *range(1, 18), 0, 0, 0, 0], 30, 0, False),
])  # fmt: skip
def test_a_text_is_known_by_its_steps_symbols_and_blanks(best, symbols, fed_with, text):
    outputs = {"y": softmax(framed(best, symbols))[None]}
    fed_too = {"tokens": np.zeros((1, fed_with), np.int64)} if fed_with else fed()
    assert (same_task([outputs], [fed_too]) == "text") == text


@pytest.mark.parametrize("count", [9, 18, 40])
def test_symbols_may_come_before_steps(count):
    best = ([0, 1, 0, 2] * 10)[:count]
    outputs = {"y": softmax(framed(best, 30))[None].swapaxes(1, 2)}
    assert same_task([outputs], [fed()]) == "text"


def test_slots_of_a_number_plate_keep_their_repeats():
    def plate(*best):
        scores = rng().standard_normal((9, 37))
        scores[np.arange(9), [*best, *[36] * (9 - len(best))]] = 12
        return {"y": softmax(scores)[None].astype(np.float32)}

    references = [plate(1, 1, 5, 5, 30), plate(4, 4, 4, 4, 8, 9), plate(7, 2, 3, 30), plate(3, 3)]
    form, same = figure(references, references)
    assert form.task.form == "y: text of 36 symbols, blank 36, one a slot" and same.value == 1
    fewer = [plate(1, 5, 5, 30), *references[1:]]  # one 1 of two is lost
    assert figure(references, fewer)[1].words == "3 of 4 texts as FP32's, 1 edit in 17 symbols"


def test_edit_distance_counts_changed_symbols():
    assert edit_distance([1, 2, 3], []) == 3
    assert edit_distance([1, 2, 3, 4], [2, 3, 5, 4]) == 2


SPELLED = {
    "shares": lambda scores: softmax(scores)[None],
    "logarithms": lambda scores: np.log(softmax(scores))[None],
    "turned": lambda scores: softmax(scores).T[None],
    "steps first": lambda scores: softmax(scores)[:, None],
}


@pytest.mark.parametrize("how", SPELLED)
@pytest.mark.parametrize("classes", [2, 6, 248])
def test_classes_of_steps_are_counted(how, classes):
    best = [spoken(n, classes) for n in range(4)]
    lost = [one.copy() for one in best]
    lost[1][10:22] = 0  # silence in the place of what was said
    references, candidates = [], []
    for samples, texts in ((references, best), (candidates, lost)):
        for text in texts:
            samples.append({"y": SPELLED[how](framed(text, classes)).astype(np.float32)})
    form, found = figure(references, candidates, [{"sound": np.zeros((1, 60, 80))}] * 4)
    assert form.task.form == f"y: {classes} classes a step"
    assert found.task == "steps" and found.figure == "steps alike"
    assert found.value == 228 / 240 and found.count == "228 of 240"
    assert found.words == "228 of 240 steps of FP32's class"
    assert figure(references, [{"y": one["y"] * np.nan} for one in references])[1].value == 0
    assert figure(references, [{"y": one["y"][..., :1]} for one in references])[1].value == 0


def test_a_candidate_that_hears_silence_alone_does_not_pass_for_good():
    best = [np.repeat([0, 2, 1, 0], [57, 2, 1, 0]) for _ in range(4)]
    references = [{"y": softmax(framed(one))[None]} for one in best]
    silent = [{"y": softmax(framed(one * 0))[None]} for one in best]
    _, found = figure(references, silent)
    assert found.value == 0
    assert found.words.startswith("0 of 12 steps of FP32's class, without 0, the usual one, where")
    assert figure(references, references)[1].value == 1
    assert figure(silent, references)[1] is None  # nothing to be compared with


@pytest.mark.parametrize("classes", [12, 248])
def test_long_stretches_without_the_first_class_are_no_text(classes):
    short = [{"y": softmax(framed([0, 0, 3, 0, 0, 4, 4, 0] * 7, classes))[None]}] * 4
    assert same_task(short) == "text"
    long = [{"y": softmax(framed(spoken(n, classes), classes))[None]} for n in range(4)]
    assert same_task(long) == "steps"
    for run, task in (3, "text"), (4, "steps"):  # of one symbol
        best = np.repeat([0, 3, 0, 4, 5] * 4, run)
        assert same_task([{"y": softmax(framed(best, classes))[None]}] * 4) == task
    sure = [
        {"kind": np.zeros((1, 40), int) + n, "sure": softmax(framed([0, 1] * 20)).max(1)[None]}
        for n in range(4)
    ]
    sure[0]["sure"][0, :9] = 0.4
    assert same_task(sure) == "indices"  # sure says nothing by its side of 0.5


@pytest.mark.parametrize(
    ("inputs", "task"),
    [
        ({"images": np.zeros((1, 3, 160, 224), np.float32)}, "text"),
        ({"ids": np.arange(8)[None], "mask": np.ones((1, 8), np.int64)}, "steps"),
        ({"letters": np.ones((1, 8, 5), np.int32)}, "steps"),
        ({"ids": np.arange(11)[None]}, "steps"),  # some words are two tokens
        ({"vectors": np.ones((1, 8, 50), np.float32)}, "steps"),
        ({"sound": np.zeros((1, 80, 8)), "length": np.array([80])}, "text"),
    ],
)
def test_a_class_for_each_token_that_was_fed_is_no_text(inputs, task):
    tags = [{"y": softmax(framed([0, 0, 3, 0, 0, 4, 4, 0], 17))[None]}] * 4
    assert same_task(tags, [inputs] * 4) == task


def test_other_outputs_are_no_reason_against_steps():
    def task(**others):
        return same_task([{"y": softmax(framed(spoken(n, 6)))[None], **others} for n in range(4)])

    assert task(state=rng().standard_normal((1, 128, 19, 1))) == "steps"
    assert task(places=rng().standard_normal((1, 60, 4))) == "steps"  # judged by their decibels


SOUND = [{"sound": np.zeros((1, 800), np.float32)}] * 4


@pytest.mark.parametrize("shape", [(1, 50), (1, 50, 1), (1, 1, 50), (50,)])
def test_values_of_steps_are_compared_by_their_side(shape):
    count, made = int(np.prod(shape)), rng()

    def output(lost=0):
        value = np.where(np.arange(count) < 0.2 * count, 0.97, 0.02)
        value += made.uniform(-0.01, 0.01, count)
        value[:lost] = 0.4
        return {"y": value.reshape(shape).astype(np.float32)}

    references = [output() for _ in range(4)]
    form, found = figure(references, [output(5), *references[1:]], SOUND, {"y": "sigmoid"})
    assert form.task.form == "y: scores of steps or labels, each its own"
    high = round(0.8 * count)  # of all samples; low ones count where they differ
    assert found.words.startswith(f"{high - 5} of {high} scores on FP32's side of 0.5, without 0,")
    weather = [{"y": 15 * np.sin(np.arange(96) / 8 + n)[None]} for n in range(4)]
    assert same_task(weather, SOUND) is None  # as many degrees above 0 as below


def test_one_probability_a_sample_is_on_a_side_of_a_half():
    said = [{"y": np.array([[share]])} for share in [0.02, 0.97, 0.02, 0.02] * 4]
    ends = {"y": "sigmoid"}
    for inputs in (None, SOUND * 4):  # a wake word's, or whether a picture is upside down
        form, same = figure(said, said, inputs, ends)
        assert form.task.name == "labels" and same.value == 1
        quiet = [said[0], {"y": said[1]["y"] * 0.5}, *said[2:]]
        _, found = figure(said, quiet, inputs, ends)
        assert found.words.startswith("3 of 4 scores on FP32's side of 0.5, without 0, the usual")
        broken = [{"y": one["y"] * np.nan} for one in said]
        assert figure(said, broken, inputs, ends)[1].value == 0
    state = rng().normal(size=(2, 1, 16))  # is fed to the next call
    calls = [{"sound": np.zeros((1, 512)), "state": state}] * 4
    heard = [{**one, "state_n": state} for one in said[:4]]
    stated = Metric(None, declared=Declaration(ends=ends, states={"state": "state_n"}))
    assert derive_form(heard, inputs=calls, metric=stated).task.name == "labels"
    assert same_task(heard, ends=ends) is None  # a probability and what it is about, maybe
    sized = [{**one, "size": np.array(2.5)} for one in said]
    assert same_task(sized, ends=ends) == "labels"
    assert same_task(said) is None  # the graph does not show a Sigmoid
    assert same_task([{"y": np.array([[0.02]])}] * 4, ends=ends) is None  # always near 0


def test_further_decisions_are_judged_by_decibels():
    said = [{"glasses": np.float32([[n % 2]]), "hat": np.float32([[n // 2 % 2]])} for n in range(8)]
    form, same = figure(said, said, ends={"glasses": "sigmoid", "hat": "sigmoid"})
    assert form.task.output == "glasses" and form.uncovered == ("hat",) and same.count == "8 of 8"


def test_further_classes_of_steps_are_judged_by_decibels():
    letters = [{"letters": np.ones((1, 30), np.float32)}] * 4
    dots = [{"dot": softmax(framed(spoken(n, 3), 3))[None]} for n in range(4)]
    assert same_task(dots, letters) == "steps"
    accents = [{**output, "accent": output["dot"][:, ::-1]} for output in dots]
    form, same = figure(accents, accents, letters)
    assert form.task.output == "dot" and form.uncovered == ("accent",) and same.value == 1
    vectors = [{**output, "size": rng().standard_normal((1, 60, 8))} for output in dots]
    assert figure(vectors, vectors, letters)[0].uncovered == ("size",)


OUTLIER = np.where(np.arange(384) == 7, 40, 0)


@pytest.mark.parametrize("inputs", [None, SOUND])
@pytest.mark.parametrize(
    "make",
    [
        lambda made: made.standard_normal((1, 40, 384)),
        lambda made: made.standard_normal((1, 40, 384)) + OUTLIER,
        lambda made: made.standard_normal((1, 40, 12)) * 2,
        lambda made: made.standard_normal((1, 17, 2)) * 50,  # places
        lambda made: made.standard_normal((1, 24, 3)) * 50,
        lambda made: np.cumsum(made.standard_normal((1, 400, 2)), 1),
        lambda made: made.uniform(-80, 10, (1, 100, 80)),  # decibels
        lambda made: made.uniform(0, 1, (1, 50)),
    ],
)
def test_features_and_regressions_are_no_steps(make, inputs):
    made = rng()
    assert same_task([{"y": make(made).astype(np.float32)} for _ in range(4)], inputs) is None


def test_pictures_and_spectra_are_no_steps():
    made = rng()
    loud, size = made.uniform(0.1, 9, (1, 1, 100)), (4, 1, 257, 100)
    for sounds in (made.exponential(1, size) ** 4, made.normal(size=size) ** 3):
        assert same_task([{"y": np.float32(loud * one)} for one in sounds]) is None
    picture = np.zeros((1, 64, 64), np.float32)
    picture[:, 10:30] = 1
    assert same_task([{"y": picture}] * 4, [fed((64, 64))] * 4) is None


STEPS, FEATURES, CLASSES = 50, 8, 6


def saved(path, nodes, shape, **weights):
    """A model of x [1, 8, 50] -> y."""
    inputs = {"x": [1, FEATURES, STEPS]}
    return save_net(make_model(nodes, inputs, {"y": shape}, as_float32(weights)), path)


def frames(path, sure=0.0):
    """Softmax over six classes of frames, [1, 50, 6]; the first feature decides nothing."""
    made = np.random.default_rng(4)
    first, second = made.normal(size=(16, FEATURES, 5)), made.normal(size=(CLASSES, 16, 1))
    first[:, 0] = 0
    nodes = """
        c1 = Conv <pads = [2, 2]> (x, w1) r1 = Relu (c1) c2 = Conv (r1, w2, b2)
        t = Transpose <perm = [0, 2, 1]> (c2) y = Softmax <axis = 2> (t)
    """
    bias = -second.sum(axis=(1, 2)) * 2.3  # so that no class is the best one everywhere
    bias[0] += sure
    return saved(path, nodes, [1, STEPS, CLASSES], w1=first, w2=second, b2=bias)


# The same, far from sure of any class but the first: nothing but that one is fed.
silence = partial(frames, sure=100)


# f: one number a filter of w1, over all steps
SUMMED = """
    c1 = Conv <pads = [2, 2]> (x, w1) r1 = Relu (c1)
    g = GlobalAveragePool (r1) f = Flatten (g)
"""
LINEAR = SUMMED + "y = Gemm <transB = 1> (f, w2, b2)"


def scores(path, *, alike=False):
    """Three figures of 2 to 6, of which the second is the largest; or about 3, and any is."""
    made = np.random.default_rng(4)
    first, second = made.normal(size=(16, FEATURES, 5)), made.uniform(0, 0.02, (3, 16))
    least = 3 - second @ means_of(first) if alike else [2, 4, 3]
    return saved(path, LINEAR, [1, 3], w1=first, w2=second, b2=least)


def level(path, *, numbers=1):
    """Numbers of about 100, which hardly vary beside that; of one number: an age, a temperature."""
    first = np.random.default_rng(4).normal(size=(16, FEATURES, 5))
    first[:, 0] = 0
    b2 = np.repeat(100 - means_of(first).sum(keepdims=True), numbers)
    return saved(path, LINEAR, [1, numbers], w1=first, w2=np.full((numbers, 16), 1.0), b2=b2)


def switch(path):
    """Whether the features are louder than usual: one probability, hardly ever in between."""
    first = np.random.default_rng(4).normal(size=(16, FEATURES, 5))
    nodes = SUMMED + "s = Gemm <transB = 1> (f, w2, b2) y = Sigmoid (s)"
    usual = -60 * means_of(first).sum(keepdims=True)
    return saved(path, nodes, [1, 1], w1=first, w2=np.full((1, 16), 60), b2=usual)


def means_of(weights):
    """What Relu leaves of normal numbers, in the mean, after the convolution."""
    return np.sqrt((weights**2).sum(axis=(1, 2)) / (2 * np.pi))


@pytest.fixture
def build(build_with_accuracy, tmp_path):
    """A build on sequences whose first feature is as large as asked: (code, screen, report)."""

    def call(model, large=1.0):
        rows = np.random.default_rng(6).normal(size=(24, FEATURES, STEPS)).astype(np.float32)
        rows[:, 0] *= large
        return build_with_accuracy(model(tmp_path / "m.onnx"), rows)

    return call


def test_steps_alike_are_on_the_screen_and_in_the_report_and_decide_the_verdict(build):
    code, out, told = build(frames)
    task = told["task"]
    assert code == 0 and task["task"] == "steps" and task["form"] == "y: 6 classes a step"
    assert task["value"] > 0.95 and task["count"].endswith(" of 1200")
    lines = {line[:16].strip(): line for line in out.splitlines()}
    assert task["count"] in lines["Steps alike"]
    assert f"good: {task['count']} steps of FP32's class" in out
    assert "Top-1 agreement" not in out and told["top1_agreement"] is None
    code, out, told = build(frames, large=100.0)
    assert told["task"]["value"] < 0.75 and code == 3
    assert f"unusable: {told['task']['count']} steps of FP32's class" in out


def test_samples_in_which_nothing_is_found_prove_nothing(build):
    code, out, told = build(silence)
    assert told["task"] is None and told["reading"].endswith("next to nothing on these samples")
    said = "doubtful: the float model finds nothing, or the same everywhere, in all 24 samples"
    assert code == 0 and said in " ".join(out.split())


@pytest.mark.slow
def test_of_numbers_that_hardly_vary_what_varies_is_judged(build):
    code, out, told = build(level)
    (part,) = told["parts"]
    assert code == 0 and part["label"] == "y - its mean" and part["less"] == "its mean"
    assert 5 < part["sqnr_db"] < told["outputs"][0]["sqnr_db"] - 15
    assert "good:" in out and "(worst: y - its mean" in " ".join(out.split())
    code, out, told = build(level, large=100.0)
    assert told["outputs"][0]["sqnr_db"] > 15 > 5 > told["parts"][0]["sqnr_db"]
    assert code == 0 and "doubtful:" in out
    # of many, as those of a network with random weights are, the whole
    for numbers, label in ((32, "y - its mean"), (33, "y")):
        _, _, told = build(partial(level, numbers=numbers))
        assert [part["label"] for part in told["parts"]] == [label]


def test_one_probability_is_counted_sample_by_sample(build):
    _, out, told = build(switch)
    task = told["task"]
    assert task["task"] == "labels" and task["count"].endswith(" of 24") and task["value"] > 0.75
    assert f"{task['count']} scores on FP32's side of 0.5" in out


def places(path):
    """Forty numbers from 0.2 to 0.8, the same one always the largest: points in a picture."""
    made = np.random.default_rng(4)
    first, second = made.normal(size=(16, FEATURES, 5)), made.normal(0, 0.001, (40, 16))
    return saved(path, LINEAR, [1, 40], w1=first, w2=second, b2=np.linspace(0.2, 0.8, 40))


def forecast(path):
    """What a series goes on with: 40 numbers that lie about where it is, above 0 or below."""
    made = np.random.default_rng(4)
    first, shape = made.normal(size=(8, FEATURES, 5)), 0.02 * made.normal(size=(40, 16))
    twice = np.concatenate([first, np.roll(first, 1, axis=1)])
    level = np.repeat([1.0, -1.0], 8)
    return saved(path, LINEAR, [1, 40], w1=twice, w2=level + shape, b2=np.zeros(40))


def of_six_scores(path, nodes, **kinds):
    """What these nodes make of six raw scores f1, with outputs of these types."""
    made = np.random.default_rng(4)
    nodes = f"c1 = Conv (x, w1) g1 = GlobalAveragePool (c1) f1 = Flatten (g1) {nodes}"
    outputs = [make_value(name, None, kind) for name, kind in kinds.items()]
    weights = as_float32({"w1": made.normal(size=(CLASSES, FEATURES, 5)), "zero": 0}) | {"k": [3]}
    return save_net(make_model(nodes, {"x": [1, FEATURES, STEPS]}, outputs, weights), path)


def best_few(path):
    """The best three of six raw scores, and their numbers."""
    kinds = {"y": TensorProto.FLOAT, "places": TensorProto.INT64}
    return of_six_scores(path, "y, places = TopK <axis = 1> (f1, k)", **kinds)


def flags(path):
    """Whether each of six scores is above 0, each a matter of its own."""
    return of_six_scores(path, "y = Greater (f1, zero)", y=TensorProto.BOOL)


@pytest.mark.parametrize("model", [scores, partial(scores, alike=True), places, forecast, flags])
def test_a_regression_or_flags_have_no_best_class(build, model):
    _, out, told = build(model)
    assert told["task"] is None and told["top1_agreement"] is None
    assert "Top-1 agreement" not in out and "gives one class" not in out


def test_what_is_ranked_is_told_by_its_places(build):
    """The first of the best is always the best: that is no model that gives one class."""
    _, out, told = build(best_few)
    assert told["task"]["task"] == "classes"
    assert told["top1_agreement"] == told["task"]["value"] and "gives one class" not in out


def of(*counts):
    """(value, how often), ... -> [n]."""
    return np.concatenate([np.full(count, value) for value, count in counts])


@pytest.mark.parametrize(
    ("values", "are"),
    [
        ([1, 0], True),
        ([0.51, 0.09], True),
        ([0.5, 0.05], False),
        ([0.95, 0.11], False),
        ([0.95, 0.95], False),
        ([0.05, 0.05], False),
        ([0.97, 0.4, 0.02, 0.99], True),
        ([0.95, 0.05, 0.4, 0.6] * 4, True),
        ([0.95, 0.05, 0.4, 0.6, 0.5] * 3, False),
    ],
)
def test_one_value_a_sample_is_a_probability_where_both_sides_are_seen(values, are):
    for shape in (1, 1), (1,):
        outputs = [{"y": np.full(shape, value, np.float32)} for value in values]
        assert (same_task(outputs, SOUND * 4, {"y": "sigmoid"}) == "labels") == are


@pytest.mark.parametrize(
    ("values", "are"),
    [
        (of((0.95, 2), (0.05, 2)), True),
        (of((0.95, 2), (0.05, 1)), False),  # four steps
        (of((0.95, 30), (0.89, 25), (0.05, 45)), True),  # a quarter may be in between
        (of((0.95, 30), (0.5, 26), (0.05, 44)), False),
        (of((0.95, 8)), False),
        (of((0.95, 7), (0.1, 1)), False),
    ],
)
def test_values_of_steps_are_probabilities_where_few_are_between(values, are):
    outputs = [{"y": values.reshape(1, -1)}] * 4
    assert (same_task(outputs, SOUND, {"y": "sigmoid"}) == "labels") == are


IN, STATE, OUT = 8, 16, 5


def recurrent(path):
    """x [1, 8] and h [1, 16] -> shares of 5 classes, and h_next."""
    made = np.random.default_rng(3)
    weights = {"w": made.normal(0, 0.5, (IN + STATE, STATE)), "v": made.normal(0, 2, (STATE, OUT))}
    nodes = """
        both = Concat <axis = 1> (x, h) m = MatMul (both, w) h_next = Tanh (m)
        scores = MatMul (h_next, v) y = Softmax <axis = 1> (scores)
    """
    inputs, outputs = {"x": [1, IN], "h": [1, STATE]}, {"y": [1, OUT], "h_next": [1, STATE]}
    return save_net(make_model(nodes, inputs, outputs, as_float32(weights)), path)


@pytest.mark.parametrize("held", [False, True])
def test_a_state_is_no_reason_against_classes_and_is_told(held, tmp_path):
    made = np.random.default_rng(1)
    fed, out = tmp_path / "calls", tmp_path / "out"
    fed.mkdir()
    for n in range(24):
        rows = {"x": made.normal(size=(1, IN)), "h": made.uniform(-1, 1, (1, STATE))}
        np.savez(fed / f"{n:02}.npz", **as_float32(rows))
    words = ["--out", out, "--duration", 0, "--effort", 0, *(["--eval-images", fed] * held)]
    said = run_command("build", recurrent(tmp_path / "net.onnx"), "--images", fed, *words)
    assert " of 24 samples keep FP32's top-1 class" in " ".join(said.split())
    report = json.loads((out / "report.json").read_text())
    (said,) = (note for note in report["notes"] if "the next call" in note)
    assert "(h_next as h)" in said and "compare whole sequences too" in said


@pytest.mark.parametrize(("decibel", "told"), [(50.0, 1), (math.nan, 1), (140.0, 0), (math.inf, 0)])
def test_of_a_state_that_int8_does_not_touch_nothing_adds_up(decibel, told):
    sqnr = {"h_next": decibel, "y": 9}
    outputs = [SimpleNamespace(name=name, sqnr_db=db) for name, db in sqnr.items()]
    found = SimpleNamespace(outputs=outputs, carried={"h_next": "h"})
    assert len([*state_notes([found, found])]) == told


INPUTS, KINDS, LONG = 12, 4, 30


def table(path):
    """Rows of a table -> their class and the share of each, as scikit-learn's classifiers give."""
    made = np.random.default_rng(4)
    nodes = """
        g1 = Gemm (x, w1) r1 = Relu (g1) g2 = Gemm (r1, w2)
        label = ArgMax <axis = 1, keepdims = 0> (g2) probabilities = Softmax <axis = 1> (g2)
    """
    weights = {"w1": made.normal(size=(INPUTS, 32)), "w2": made.normal(size=(32, KINDS))}
    label = make_value("label", ["n"], TensorProto.INT64)
    outputs = [label, make_value("probabilities", ["n", KINDS])]
    model = make_model(nodes, {"x": ["n", INPUTS]}, outputs, as_float32(weights))
    return save_net(model, path), made.normal(size=(60, INPUTS))


def frames_echoes(path):
    """Raw scores of the classes of steps [T, 1, C], and their Softmax, as a recurrent model's."""
    made = np.random.default_rng(4)
    nodes = """
        c1 = Conv <pads = [2, 2]> (x, w1) r1 = Relu (c1) c2 = Conv (r1, w2, b2)
        logits = Transpose <perm = [2, 0, 1]> (c2) probs = Softmax <axis = 2> (logits)
    """
    first, second = made.normal(size=(16, INPUTS, 5)), made.normal(size=(KINDS, 16, 1))
    weights = as_float32({"w1": first, "w2": second, "b2": -second.sum(axis=(1, 2)) * 3})
    outputs = {name: [LONG, 1, KINDS] for name in ("logits", "probs")}
    model = make_model(nodes, {"x": [1, INPUTS, LONG]}, outputs, weights)
    return save_net(model, path), made.normal(size=(24, INPUTS, LONG))


@pytest.mark.parametrize(
    ("model", "form", "said"),
    [
        (table, "probabilities: 4 classes", "samples keep FP32's top-1 class"),
        (frames_echoes, "probs: 4 classes a step", "steps of FP32's class"),
    ],
)
def test_classes_decide_where_they_are_said_twice(model, form, said, build_with_accuracy, tmp_path):
    path, rows = model(tmp_path / "m.onnx")
    _, out, told = build_with_accuracy(path, np.float32(rows))
    assert told["task"]["form"] == form and told["task"]["value"] > 0.9
    assert said in " ".join(out.split())


def drawn(count, *shape, wide=5.0):
    made = np.random.default_rng(3)
    return [made.normal(size=shape) * wide for _ in range(count)]


def form_of(outputs, picture=False, declared=None):
    inputs = [{"x": np.zeros((1, 3, 64, 64) if picture else (1, 20), np.float32)}] * len(outputs)
    metric = Metric(None, declared=declared or Declaration())
    return derive_form(outputs, inputs=inputs, metric=metric)


def repeated(*names):
    """What a graph declares whose outputs are scores, their Softmax and their ArgMax."""
    ends = {"raw": "Identity", "p": "Softmax", "label": "ArgMax"}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"])]
    nodes += [helper.make_node(ends[name], ["m"], [name]) for name in names]
    values = [make_value(name, None) for name in ("x", *names)]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:])
    return declare(helper.make_model(graph), {})


@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize("names", ["label p", "p label", "raw p", "p raw", "p raw label"])
def test_one_of_repeated_outputs_is_the_task(names, picture):
    outputs = []
    for raw in drawn(4, 1, 12):
        values = {"raw": raw, "p": softmax(raw, -1), "label": raw.argmax(1)}
        outputs.append({name: values[name] for name in names.split()})
    form = form_of(outputs, picture, repeated(*names.split()))
    assert form.task.name == "classes"
    assert form.task.outputs == ("p",)
    assert not form.uncovered


def test_a_picture_of_classes_is_found_in_scores_that_are_no_task_themselves():
    raw = drawn(4, 1, 5, 64, 64)  # of neighbours that differ: no form of scores
    raw = [np.kron(one[:, :, :8, :8], np.ones((8, 8))) for one in raw]
    outputs = [{"raw": one, "label": one.argmax(1)} for one in raw]
    form = form_of(outputs, picture=True, declared=repeated("raw", "label"))
    assert form.task.name == "segmentation"


def test_what_only_looks_alike_stays():
    scores = [softmax(raw, -1) for raw in drawn(4, 1, 12)]
    shifted = [{"p": one, "number": (one.argmax(1) + 1) % 12} for one in scores]
    assert form_of(shifted).task.name != "classes"
    counts = [{"p": one, "ages": np.float32([[20 + n]])} for n, one in enumerate(scores)]
    assert form_of(counts).task is None
    places = drawn(4, 1, 4, wide=0.3)  # no shares of one whole, and no Sigmoid of the other
    assert form_of([{"a": one, "b": one * 1.01} for one in places]).task is None


def test_sorted_values_are_no_classes_and_a_signal_is_no_text(rng):
    """TopK's values were a classifier of class 0 alone, and a Conv1d autoencoder read texts."""
    falling = [-np.sort(-rng.random((1, 8)).astype(np.float32)) for _ in range(4)]
    for rows in falling, [one[:, ::-1] for one in falling], [20 * one - 15 for one in falling]:
        assert same_task([{"y": one} for one in rows], ends={"y": "ranked"}) is None
    shares = np.float32([[0.8, 0.15, 0.05]])  # that may be by chance, and all that a model sees
    assert same_task([{"y": shares + n / 9999} for n in range(32)]) == "classes"
    signals = [rng.normal(size=(1, 16, 40)).astype(np.float32) ** 3 for _ in range(4)]
    for one in signals:
        one[..., 0] += 9
    ears = [{"x": np.zeros((1, 2, 40), np.float32)}] * 4
    assert same_task([{"y": one} for one in signals], ears) is None
