"""Accuracy, precision and the verdict on an engine."""

import json
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from deploy.errors import BackendError, ConfigError, FeedError
from deploy.metrics.accuracy import Accuracy, TensorComparison
from deploy.metrics.latency import SpeedUp
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.metrics.output_errors import RunningError, cosine, sqnr_db
from deploy.metrics.output_form import SliceAccuracy
from deploy.metrics.precision import MeanPrecision
from deploy.report.verdict import Gates, verdict
from deploy.runtimes.ort import OrtSession
from deploy.tasks import Metric, TaskFigure
from deploy.tasks.evaluation_task import share_interval
from deploy.tensors import TensorSpec
from tests.models import as_float32, build_net, make_model, make_value, save_net
from tests.outputs import compare, compare_outputs


class Scored:
    """A session that computes y = f(x) in numpy."""

    inputs = (TensorSpec("x", "float32", ("n", 4)),)

    def __init__(self, f, names=("y",)):
        self.f = f
        self.outputs = tuple(TensorSpec(name, "float32", ("n", 4)) for name in names)

    def run(self, feed):
        return {spec.name: self.f(feed["x"]) for spec in self.outputs}


def batches(x, size):
    return ({"x": x[i : i + size]} for i in range(0, len(x), size))


X = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
SAME = Scored(lambda x: x)
IMAGE = Scored(lambda x: x.reshape(len(x), 1, 2, 2))
BEST = Scored(lambda x: x.argmax(axis=1))


@pytest.mark.parametrize("size", [1, 7, 30])
def test_sqnr_cosine_and_error_are_their_formulas(size):
    def noisy(x):
        return x + np.float32(0.1) * np.sign(x)

    (output,) = compare(SAME, Scored(noisy), batches(X, size)).outputs
    x, y = X.astype(np.float64), noisy(X).astype(np.float64)
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    assert output.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))
    assert output.cosine_mean == pytest.approx(cosine.mean())
    assert output.cosine_min == pytest.approx(cosine.min())
    assert output.max_abs_error == pytest.approx(np.abs(x - y).max())


@pytest.mark.parametrize("size", [1, 7, 30])
@pytest.mark.parametrize("form", [(-1, 1), (-1,)])
def test_the_cosine_of_one_value_a_sample_is_that_of_all_samples(size, form):
    def noisy(x):
        return (x[:, :1] + x[:, 1:2]).reshape(form)

    reference, candidate = Scored(lambda x: x[:, :1].reshape(form)), Scored(noisy)
    (output,) = compare(reference, candidate, batches(X, size)).outputs
    x, y = X[:, 0].astype(np.float64), noisy(X).reshape(-1).astype(np.float64)
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    assert output.cosine_mean == pytest.approx(cosine) == output.cosine_min and cosine < 0.9
    (equal_output,) = compare(reference, reference, batches(X, size)).outputs
    assert equal_output.cosine_mean == pytest.approx(1)


def test_the_largest_loss_holds_for_one_value_a_sample(build_with_accuracy, tmp_path):
    """Of each sample alone its cosine would be 1 as long as the sign is kept."""
    weights = np.random.default_rng(3).normal(0, 0.3, (1, 32)).astype(np.float32)
    nodes = [("Gemm", "x w", "y", {"transB": 1})]
    model = make_model(nodes, {"x": [1, 32]}, {"y": [1, 1]}, {"w": weights}, opset=17)
    path = save_net(model, tmp_path / "age.onnx")
    samples = np.random.default_rng(4).normal(0, 1, (40, 32)).astype(np.float32)
    code, out, make_detections = build_with_accuracy(path, samples, "--max-loss", 1e-9)
    assert code == 3 and "1 - cosine is" in out
    assert (
        make_detections["parts"][0]["cosine_mean"]
        == make_detections["parts"][0]["cosine_min"]
        < 1 - 1e-8
    )
    assert build_with_accuracy(path, samples, "--max-loss", 0.05)[0] == 0


def test_equal_outputs_are_exact():
    accuracy = compare(SAME, SAME, batches(X, 8))
    assert accuracy.outputs[0].sqnr_db == math.inf and accuracy.outputs[
        0
    ].cosine_min == pytest.approx(1)
    assert accuracy.top1_agreement is None and accuracy.samples == 30 and not accuracy.problems
    assert accuracy.to_json()["outputs"][0]["sqnr_db"] == "inf"
    assert compare(IMAGE, IMAGE, batches(X, 6)).top1_agreement is None  # no classes
    accuracy = compare(BEST, BEST, batches(X, 6), labels=X.argmax(axis=1).tolist())
    assert accuracy.top1_reference == 1 and accuracy.top1_candidate == 1


def test_rows_that_fill_up_the_last_batch_are_not_compared():
    other_rows = np.arange(8).reshape(-1, 1) >= 6

    def differs_at_the_end(x):
        return x + other_rows[len(other_rows) - len(x) :] if x is last_batch else x

    first_batch, last_batch = X[:4], X[4:8]
    samples = [{"x": first_batch}, {"x": last_batch}]
    figures = compare(SAME, Scored(differs_at_the_end), samples, count=6)
    assert figures.samples == 6
    assert figures.outputs[0].max_abs_error == 0


def test_labels_of_an_unset_task_read_the_indices_of_topk():
    scores = np.random.default_rng(3).normal(size=(8, 1, 6))
    places = np.argsort(-scores, axis=-1)[..., :3]
    samples = [
        {"values": -np.sort(-row)[:, :3], "places": place}
        for row, place in zip(scores, places, strict=True)
    ]
    labels = [int(place[0, 0]) for place in places]
    metric = Metric(None, task="none")
    inputs = [{"x": np.zeros((1, 2))}] * len(samples)
    accuracy = compare_outputs(samples, samples, inputs, labels=labels, metric=metric)
    assert accuracy.top1_reference == accuracy.top1_candidate == 1


def test_top1_with_labels_counts_both_and_their_agreement():
    labels = X.argmax(axis=1)
    labels[:3] = (labels[:3] + 1) % 4  # the reference is wrong three times

    def swapped(x):  # the candidate is wrong wherever class 0 was right
        return np.where(x.argmax(1, keepdims=True) == 0, x[:, [1, 0, 2, 3]], x)

    make_detections = compare(SAME, Scored(swapped), batches(X, 7), labels=labels.tolist())
    assert make_detections.top1_reference == 27 / 30
    assert make_detections.top1_candidate == (swapped(X).argmax(1) == labels).mean()
    assert make_detections.top1_agreement == (X.argmax(1) != 0).mean()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_are_said_and_never_averaged_away(bad):
    def broken(x):
        y = x.copy()
        y[x[:, 0] == X[11, 0], 2] = bad
        return y

    make_detections = compare(SAME, Scored(broken), batches(X, 4))
    (output,) = make_detections.outputs
    assert output.not_finite == (0, 1)
    assert all(math.isnan(v) for v in (output.sqnr_db, output.cosine_mean, output.max_abs_error))
    assert make_detections.problems == (
        "output 'y' of the int8 engine holds NaN or Inf in 1 of 30 samples",
    )
    json.dumps(make_detections.to_json(), allow_nan=False)


def test_a_sample_of_nan_or_of_another_shape_is_never_right():
    nan = Scored(lambda x: x * np.float32(np.nan))
    make_detections = compare(nan, nan, batches(X, 5), labels=[0] * 30)
    assert make_detections.top1_reference == 0 and make_detections.top1_agreement == 0
    make_detections = compare(SAME, Scored(lambda x: x[:, :3]), batches(X, 5))
    assert "another shape" in make_detections.problems[0] and math.isnan(
        make_detections.outputs[0].sqnr_db
    )
    assert make_detections.top1_agreement is None


@pytest.mark.parametrize(
    ("session", "labels", "rule"),
    [
        (SAME, [0] * 29, "one label a sample"),
        (SAME, [0] * 31, "one label a sample"),
        (SAME, [0] * 29 + [4], "start at 1"),
        (SAME, [-1] * 30, "0 to 3"),
        (IMAGE, [0] * 30, "leave the labels out"),
    ],
)
def test_labels_that_do_not_fit_are_refused(session, labels, rule):
    with pytest.raises(FeedError, match=rule):
        compare(session, session, batches(X, 6), labels=labels)


def test_pairs_of_tensors_by_other_names():
    half = Scored(lambda x: x * np.float32(0.5), ("z",))
    comparison = TensorComparison({"y": "z"})
    for feed in batches(X, 6):
        comparison.add(feed, SAME.run(feed), half.run(feed))
    (output,) = comparison.result()
    assert output.name == "y" and output.sqnr_db == pytest.approx(10 * np.log10(4))


def test_other_outputs_and_no_samples_are_refused(wording):
    with pytest.raises(ConfigError, match="same outputs"):
        compare(SAME, Scored(lambda x: x, ("z",)), batches(X, 6))
    with pytest.raises(FeedError) as refusal:
        compare(SAME, SAME, [])
    wording.check(refusal.value)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_samples():
    def peak(count):
        x = np.ones((1, 4), np.float32)
        tracemalloc.start()
        compare(SAME, SAME, ({"x": x} for _ in range(count)))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(50)
    assert peak(1000) < peak(50) + 20_000


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_sqnr_rises_with_signal_and_falls_with_noise(signal, noise):
    assert sqnr_db(2 * signal, noise) > sqnr_db(signal, noise) > sqnr_db(signal, 2 * noise)


def test_sqnr_and_cosine_at_the_ends():
    assert sqnr_db(0, 0) == math.inf and sqnr_db(0, 1) == -math.inf
    a = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    assert cosine(a, 2 * a) == 1 and cosine(a, -a) == -1
    assert cosine(0 * a, 0 * a) == 1 and cosine(a, 0 * a) == 0
    assert np.isnan(cosine(a, a * np.nan))


def part(db=40.0, *, cosine=0.999, label="y"):
    return SliceAccuracy(
        label=label, output="y", sqnr_db=db, cosine_mean=cosine, cosine_min=cosine, max_abs_error=1
    )


def task(value, reference=1.0):
    return TaskFigure(
        task="boxes",
        figure="boxes kept",
        value=value,
        reference=reference,
        count="9 of 10",
        words="9 of 10 boxes kept",
        samples=10,
    )


def accuracy(*parts, **options):
    return Accuracy(**{"samples": 100, "outputs": (), "parts": parts or (part(),), **options})


def judge(
    judged_accuracy=None, *, speed=None, int8=True, min_speedup=None, max_loss=None, **options
):
    gates = Gates(min_speedup=min_speedup, max_loss=max_loss)
    judged_accuracy = accuracy() if judged_accuracy is None else judged_accuracy
    ends = speed if isinstance(speed, tuple) else (speed, speed, speed)
    speed_up = speed and SpeedUp(**dict(zip(("ratio", "low", "high"), ends, strict=True)))
    return verdict(accuracy=judged_accuracy, speed=speed_up, int8=int8, gates=gates, **options)


@pytest.mark.parametrize(
    ("db", "level"),
    [
        (15.0, GOOD),
        (14.9, DOUBTFUL),
        (5.0, DOUBTFUL),
        (4.9, UNUSABLE),
        (math.nan, UNUSABLE),
        (math.inf, GOOD),
        (-math.inf, UNUSABLE),
    ],
)
def test_an_unknown_task_is_judged_by_its_worst_part(db, level):
    outcome = judge(accuracy(part(db, label="scores"), part(60)))
    assert outcome.level == level and "scores" in outcome.text


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (0.95, GOOD),
        (0.949, DOUBTFUL),
        (0.75, DOUBTFUL),
        (0.749, UNUSABLE),
        (math.nan, UNUSABLE),
    ],
)
def test_a_task_is_judged_by_what_is_lost_of_it(value, level):
    outcome = judge(accuracy(part(6), task=task(value)))
    assert outcome.level == level and "9 of 10 boxes kept" in outcome.text


@pytest.mark.parametrize(
    ("kept", "total", "low", "high"),
    [  # the examples of Newcombe, Statistics in Medicine 17 (1998), table I
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (28, 29, 0.8282, 0.9939),
    ],
)
def test_share_interval_is_wilsons(kept, total, low, high):
    assert share_interval(kept, total) == pytest.approx((low, high), abs=5e-5)


def kept_boxes(kept, total, new=0):
    return replace(task(kept / total), found=total, counted=total, new=new)


@pytest.mark.parametrize(
    ("figure", "max_loss", "level"),
    [
        (kept_boxes(80, 100), 0.15, UNUSABLE),  # the Dice coefficient lost 0.11
        (kept_boxes(80, 100), 0.2, GOOD),
        (kept_boxes(80, 100, new=40), 0.2, GOOD),
        (kept_boxes(94, 100), None, DOUBTFUL),
        (kept_boxes(95, 100, new=10), None, GOOD),
        (kept_boxes(100, 100, new=11), None, DOUBTFUL),
    ],
)
def test_limit_is_the_share_of_boxes_lost(figure, max_loss, level):
    assert judge(accuracy(task=figure), max_loss=max_loss).level == level


def counted(figure, things, kept, total, samples):
    words = f"{kept} of {total} {figure}, 0 new"
    found = replace(task(kept / total), figure=figure, words=words, kept=kept, counted=total)
    return accuracy(task=replace(found, task=things), samples=samples)


FEW = {
    "11 boxes are too few; about 80 more photos with objects would do": counted(
        "boxes kept", "boxes", 11, 11, 30
    ),
    "39 labels are too few; 1 more samples would do": counted("labels kept", "labels", 39, 39, 30),
    "1 box is too few; about 1170 more photos with objects would do": counted(
        "boxes kept", "boxes", 1, 1, 30
    ),
    "20 samples are too few; 10 more would do": counted("top-1 agreement", "classes", 20, 20, 20),
}


@pytest.mark.parametrize("text", FEW)
@pytest.mark.parametrize("max_loss", [None, 0.1])
def test_few_things_are_doubtful_and_say_how_many_more(text, max_loss):
    outcome = judge(FEW[text], max_loss=max_loss)
    assert outcome.level == DOUBTFUL and outcome.reasons[1] == text
    assert outcome.has_few_samples
    assert outcome.missing_samples == text.partition("too few; ")[2].removesuffix(" would do")


@pytest.mark.parametrize(
    "figures",
    [
        counted("boxes kept", "boxes", 40, 40, 8),
        counted("top-1 agreement", "classes", 30, 30, 30),
        accuracy(samples=8),
        accuracy(task=replace(task(1.0), figure="mIoU with FP32"), samples=8),
    ],
)
def test_enough_things_or_values_are_judged(figures):
    assert judge(figures).level == GOOD


def test_interval_of_few_stands_in_the_verdict():
    outcome = judge(counted("boxes kept", "boxes", 10, 11, 30))
    assert outcome.reasons[0] == "10 of 11 boxes kept (62 to 98 %), 0 new"


@pytest.mark.parametrize(
    ("figures", "doubts", "level", "is_said"),
    [
        (accuracy(part(40)), (), GOOD, True),
        (accuracy(part(6)), (), DOUBTFUL, True),
        (accuracy(part(40)), ("odd",), DOUBTFUL, False),
        (
            accuracy(top1_reference=0.9, top1_candidate=0.9, classes=9, favourite=0.2),
            (),
            GOOD,
            False,
        ),
        (accuracy(top1_reference=0.1, classes=10, samples=200), ("odd",), UNUSABLE, False),
    ],
)
def test_assumed_preprocessing_stands_in_the_verdict(figures, doubts, level, is_said, wording):
    outcome = judge(figures, doubts=doubts, has_assumed_inputs=True)
    assert outcome.level == level == judge(figures, doubts=doubts).level
    assert outcome.assumes_inputs == is_said
    wording.check(outcome.text)


def test_few_do_not_excuse_a_loss():
    outcome = judge(counted("boxes kept", "boxes", 2, 11, 30))
    assert outcome.level == UNUSABLE and not outcome.has_few_samples


@pytest.mark.parametrize("figures", [accuracy(part(40)), accuracy(part(6), task=task(0.8))])
def test_figures_of_calibration_images_say_so(figures):
    outcome = judge(figures, calibrated="9 of 9 calibrated", speed=1.5)
    assert outcome.reasons[0].endswith(" (9 of 9 calibrated)")
    assert outcome.text.count("(9 of 9 calibrated)") == 1


LABELLED = accuracy(top1_reference=0.9, top1_candidate=0.89, classes=10, favourite=0.2)
LOSSES = [(0.01, GOOD), (0.011, DOUBTFUL), (0.05, DOUBTFUL), (0.051, UNUSABLE)]
NAN = accuracy(part(math.nan, cosine=math.nan))
PLACES = accuracy(part(6.5), top1_reference=0.9, top1_candidate=0.9)


@pytest.mark.parametrize(
    ("judged_accuracy", "options", "level"),
    [
        # a user's figure is judged by what the float model reaches
        (accuracy(task=task(0.60, reference=0.62)), {}, GOOD),
        (accuracy(task=task(0.60, reference=0.70)), {}, DOUBTFUL),
        # a part that is more noise than signal is never good, whatever the task says
        (accuracy(part(0.0), task=task(1.0)), {}, GOOD),
        (accuracy(part(-0.1), task=task(1.0)), {}, DOUBTFUL),
        # what the user allows to be lost decides before the limits: no doubt between them
        (LABELLED, {"max_loss": 0.01}, GOOD),
        (LABELLED, {"max_loss": 0.009}, UNUSABLE),
        (accuracy(task=task(0.99)), {"max_loss": 0.01}, GOOD),
        (accuracy(task=task(0.99)), {"max_loss": 0.009}, UNUSABLE),
        (accuracy(part(cosine=0.99)), {"max_loss": 0.01}, GOOD),
        (accuracy(part(cosine=0.99)), {"max_loss": 0.009}, UNUSABLE),
        (NAN, {"max_loss": 0.9}, UNUSABLE),
        # with labels one class may be all that is there
        (replace(LABELLED, favourite=1.0, top1_candidate=0.9), {}, GOOD),
        # labels decide before the worst part: of numbers of classes it has no meaning
        (accuracy(part(6.5)), {}, DOUBTFUL),
        (PLACES, {}, GOOD),
        (replace(PLACES, parts=(part(-1.0),)), {}, DOUBTFUL),
        # speed is judged against FP32 or what the user demands
        (None, {"speed": 1.06}, GOOD),
        (None, {"speed": 0.99}, FLOAT),
        # noise is no merit: the middle of the interval decides
        (None, {"speed": (0.77, 0.68, 1.10), "size_ratio": 0.93}, FLOAT),
        (None, {"speed": (0.98, 0.94, 1.14), "size_ratio": 1.04}, FLOAT),
        # nor does a gain of size make up for a clear loss of time
        (None, {"speed": (0.98, 0.94, 1.14), "size_ratio": 1.34}, GOOD),
        (None, {"speed": (0.98, 0.94, 1.14), "size_ratio": 1.33}, FLOAT),
        (None, {"speed": (0.96, 0.95, 0.97), "size_ratio": 3.9}, GOOD),
        (None, {"speed": (0.94, 0.93, 1.14), "size_ratio": 3.9}, FLOAT),
        (None, {"speed": 1.5, "min_speedup": 1.5}, GOOD),
        (None, {"speed": 1.49, "min_speedup": 1.5}, UNUSABLE),
        (None, {"speed": 0.5, "min_speedup": 0.4}, GOOD),
        (None, {"min_speedup": 9.0}, DOUBTFUL),
        (None, {"speed": 1.1, "int8": False, "min_speedup": 1.5}, UNUSABLE),
        (NAN, {"int8": False}, UNUSABLE),
        # a model of microseconds is not slower by the runtime's own overhead
        # two pictures of which both are right prove little
        (accuracy(samples=4), {}, GOOD),
        (accuracy(samples=3), {}, DOUBTFUL),
    ],
)
def test_the_level_of_a_verdict(judged_accuracy, options, level):
    assert judge(judged_accuracy, **options).level == level


@pytest.mark.parametrize(("lost", "level"), LOSSES)
def test_labels_decide_before_the_task(lost, level):
    outcome = judge(replace(LABELLED, task=task(0.1), top1_candidate=0.9 - lost))
    assert outcome.level == level and f"top-1 {-100 * lost:+.2f} points" in outcome.text


@pytest.mark.parametrize(
    ("right", "classes", "samples", "level"),
    [
        (0.0875, 10, 400, UNUSABLE),  # chance is 10 % and its spread 1.5 points
        (0.145, 10, 400, UNUSABLE),  # three spreads are not surely better than chance
        (0.146, 10, 400, DOUBTFUL),  # no guess, and still wrong in six of seven
        (0.49, 10, 400, DOUBTFUL),  # of 92 % with the right mean and std
        (0.5, 10, 400, GOOD),
        (0.0875, 10, 19, "few"),
        (0.02, 1000, 400, DOUBTFUL),
        (0.05, 1000, 20, DOUBTFUL),  # an ImageNet model with the wrong scale
        (0.0, 1000, 20, UNUSABLE),
        (0.5, 2, 36, UNUSABLE),  # guessing reaches 75 % once in a thousand times
        (0.8, 2, 20, "few"),  # and 83 % of so few, which tell nothing
    ],
)
def test_a_float_model_that_guesses_was_fed_something_else(right, classes, samples, level):
    outcome = judge(
        accuracy(samples=samples, top1_reference=right, top1_candidate=right, classes=classes)
    )
    assert outcome.level == (DOUBTFUL if level == "few" else level)
    assert ("chance is" in outcome.text) == (level == UNUSABLE)
    assert ("check --preprocess" in outcome.text) == (level in (DOUBTFUL, UNUSABLE))


@pytest.mark.parametrize(("shift", "side"), [(1, "above"), (-1, "below")])
def test_labels_shifted_by_one_are_named(shift, side):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(100, 1, 10)).astype(np.float32)
    rows = [{"y": row} for row in scores]
    labels = (scores.argmax(axis=2).ravel() + shift) % 10
    labels[:8] = (labels[:8] + 3) % 10
    inputs = [{"x": np.zeros((1, 3, 8, 8), np.float32)}] * len(rows)
    outcome = judge(compare_outputs(rows, rows, inputs, labels=labels.tolist()))
    assert outcome.level == UNUSABLE and outcome.blames_float and outcome.blames_labels
    assert f"92 % of the labels are the class {side}" in outcome.text


@pytest.mark.parametrize(
    ("order", "wrong", "blamed"),
    [
        ([0, 2, 3, 1], 8, "most images of label 1 get class 2"),
        ([0, 2, 3, 4], 8, "most images of label 1 get class 2"),  # no images of class 1
        ([1, 2, 3, 4], 8, "of the labels are the class below; shift"),
        ([0, 1, 2, 3], 90, ""),
        ([0, 0, 0, 0], 0, ""),  # wrong inputs: one class for all images
        ([0, 2, 3, 1], 60, ""),
    ],
)
def test_labels_in_another_order_are_named(order, wrong, blamed):
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 4
    classes = np.asarray(order)[labels]
    classes[:wrong] = rng.integers(5, size=wrong)
    rows = [{"y": np.eye(5, dtype=np.float32)[[number]]} for number in classes]
    inputs = [{"x": np.zeros((1, 3, 8, 8), np.float32)}] * len(rows)
    outcome = judge(compare_outputs(rows, rows, inputs, labels=labels.tolist()))
    assert outcome.level == UNUSABLE and outcome.blames_labels == bool(blamed)
    assert blamed in outcome.text


def make_precision(reference, candidate, *, own_50=0.5):
    return MeanPrecision(
        reference=reference,
        candidate=candidate,
        reference_50=own_50,
        candidate_50=candidate,
        objects=40,
    )


@pytest.mark.parametrize(("lost", "level"), LOSSES)
def test_annotated_objects_decide_before_the_boxes_of_fp32(lost, level):
    outcome = judge(accuracy(task=task(0.8), precision=make_precision(0.4, 0.4 - lost)))
    assert outcome.level == level and f"mAP .50:.95 {-100 * lost:+.2f} points" in outcome.text
    metric_task = replace(task(0.99), task="metric")
    outcome = judge(accuracy(task=metric_task, precision=make_precision(0.4, 0.4 - lost)))
    assert outcome.level == GOOD and "mAP" not in outcome.text


@pytest.mark.parametrize(("own_50", "level"), [(0.02, DOUBTFUL), (0.1, GOOD)])
def test_few_annotated_objects_found_are_doubtful(own_50, level):
    """Such as by boxes of corners, where COCO has a corner and a size."""
    outcome = judge(accuracy(task=task(1.0), precision=make_precision(0.4, 0.4, own_50=own_50)))
    assert outcome.level == level and outcome.blames_float == (level == DOUBTFUL)
    assert ("finds few of the 40 objects" in outcome.text) == (level == DOUBTFUL)


@pytest.mark.parametrize(("samples", "level"), [(20, UNUSABLE), (19, GOOD)])
def test_a_detector_that_finds_nothing_of_what_is_annotated_proves_nothing(samples, level):
    blind = accuracy(
        samples=samples, task=task(1.0), precision=make_precision(0.0, 0.0, own_50=0.009)
    )
    outcome = judge(blind)
    assert outcome.level == level
    assert ("finds next to none of the 40 objects" in outcome.text) == (level == UNUSABLE)
    doubts = ("each is 0; check them",)
    assert "inputs are in question: each is 0" in judge(blind, doubts=doubts).text
    seeing = replace(blind, precision=make_precision(0.4, 0.4))
    assert "each is 0" not in judge(seeing, doubts=doubts).text
    for right, is_said in ((0.34, True), (0.92, False)):  # raw pixels fed to a net of 10 classes
        labelled = accuracy(top1_reference=right, top1_candidate=right, samples=200)
        assert ("inputs are in question" in judge(labelled, doubts=doubts).text) == is_said
    for share in (0.9, 0.1):  # unusable
        reasons = judge(accuracy(top1_agreement=0.9, task=task(share)), doubts=doubts).reasons
        assert "inputs are in question: each is 0" in reasons[0] and "9 of 10" in reasons[1]


@pytest.mark.parametrize(
    ("share", "samples", "level"), [(0.95, 20, DOUBTFUL), (0.94, 20, GOOD), (1.0, 19, GOOD)]
)
def test_without_labels_a_float_model_that_knows_one_class_is_doubted(share, samples, level):
    make_detections = judge(accuracy(samples=samples, classes=10, favourite=share))
    assert make_detections.level == level
    assert ("check the preprocessing" in make_detections.text) == (level == DOUBTFUL)


@pytest.mark.parametrize(("value", "level"), [(0, DOUBTFUL), (1e-30, GOOD)])
def test_outputs_of_zeros_prove_nothing(value, level):
    error = RunningError("y")
    error.add(np.full((1, 3), value, np.float32), np.full((1, 3), value, np.float32))
    make_detections = judge(accuracy(part(math.inf), outputs=(error.result(),)))
    assert make_detections.level == level
    assert ("prove nothing" in " ".join(make_detections.reasons)) is (level == DOUBTFUL)


def test_outputs_that_are_not_finite_are_unusable_and_said_first():
    problem = "output 'y' of the int8 engine holds NaN or Inf in 1 of 2 samples"
    make_detections = judge(accuracy(part(14), problems=(problem,)), speed=0.5)
    assert make_detections.level == UNUSABLE and make_detections.reasons[0] == problem
    assert len(make_detections.reasons) == 3  # what is doubtful is told too


def test_what_is_good_is_told_only_where_nothing_is_worse():
    make_detections = judge(
        speed=0.94, int8=False
    )  # a speed by chance, of a model that stays in float
    assert make_detections.level == FLOAT and "no layer could be int8" in make_detections.text
    assert judge(accuracy(part(40)), speed=(2.0, 1.9, 2.1)).reasons == (
        "40.0 dB (worst: y)",
        "2.00x (1.90 to 2.10) the speed of FP32",
    )
    assert judge(accuracy(part(4)), speed=2.0).reasons == ("4.0 dB (worst: y)",)
    make_detections = verdict(accuracy=None, speed=None, int8=True, gates=Gates())
    assert (
        make_detections.level == DOUBTFUL
        and make_detections.text == "doubtful: nothing was measured of it"
    )


@pytest.mark.parametrize(
    ("speed", "level", "reason"),
    [
        ((1.2, 1.1, 1.3), GOOD, "1.20x (1.10 to 1.30) the speed of FP32"),
        ((0.99, 0.97, 1.02), FLOAT, "int8 has 0.99x (0.97 to 1.02) the speed of FP32 on this CPU"),
    ],
)
def test_a_speed_recommends_int8_or_fp32(speed, level, reason):
    outcome = judge(speed=speed)
    assert outcome.level == level and reason in outcome.text and "noisy" not in outcome.text


@pytest.mark.parametrize(
    ("speed", "min_speedup", "level"),
    [
        ((1.1, 0.8, 1.2), None, GOOD),
        ((0.99, 0.8, 1.2), None, FLOAT),
        ((1.81, 0.8, 14.8), 1.2, GOOD),
        ((1.1, 1.05, 1.3), 1.2, UNUSABLE),
    ],
)
def test_noise_is_named_at_every_limit(speed, min_speedup, level):
    outcome = judge(speed=speed, min_speedup=min_speedup)
    assert outcome.level == level and "noisy" in outcome.text
    surer = judge(speed=(speed[0], speed[0], speed[0]), min_speedup=min_speedup)
    assert surer.level == level and "noisy" not in surer.text


@pytest.mark.parametrize(
    ("figures", "percent"),
    [
        (accuracy(top1_reference=0.9, top1_candidate=0.8, classes=10), 10),
        (accuracy(task=task(0.7)), 30),
        (accuracy(part(cosine=0.95)), 5),
    ],
)
def test_verdict_names_the_users_loss_limit(figures, percent):
    missed = judge(figures, max_loss=0.02)
    assert missed.level == UNUSABLE and missed.gated
    assert f"a loss of {percent} %, above the limit of 2 %" in missed.reasons[0]
    assert "within the limit of 50 %" in judge(figures, max_loss=0.5).reasons[0]
    assert "limit" not in judge(figures).text


def compared(change, error, *, shape=(1, 3, 16, 16), cut=0):
    """The figures of an engine of a model that changes so much.

    It is off by so much; without an error it gives its input back.
    """
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(6):
        x = rng.normal(size=shape).astype(np.float32)
        output = x + change * rng.normal(size=shape).astype(np.float32)
        noise = (error or 0) * rng.normal(size=shape).astype(np.float32)
        candidate = x if error is None else output + noise
        samples.append(({"x": x[..., cut:]}, {"y": output}, {"y": candidate}))
    inputs, references, candidates = zip(*samples, strict=True)
    return compare_outputs(references, candidates, inputs)


@pytest.mark.parametrize(
    ("change", "error", "level"),
    [
        (0.03, 0.03, DOUBTFUL),
        (0.03, 0.003, GOOD),
        (0.5, 0.03, GOOD),
        (0.1, 0.9, UNUSABLE),
    ],
)
def test_what_is_left_of_a_small_change_of_the_input_is_judged(change, error, level):
    assert judge(compared(change, error)).level == level


def test_an_engine_that_gives_its_input_back_is_not_good():
    exact = compared(0.03, 0.0)
    assert judge(exact).level == GOOD
    identity = compared(0.03, None)
    assert "0.0 dB (worst: y - x)" in judge(identity).text
    assert judge(identity).level == DOUBTFUL


def test_a_task_or_a_limit_that_is_met_leaves_no_doubt_of_changes():
    small_change = compared(0.03, 0.02)
    assert judge(small_change).level == DOUBTFUL
    assert judge(replace(small_change, task=task(1.0))).level == GOOD
    assert judge(small_change, max_loss=0.3).level == GOOD
    assert judge(small_change, max_loss=0.1).level == UNUSABLE  # by the change's cosine


def test_the_worst_figure_of_a_changed_input_is_that_of_the_change():
    small_change = compared(0.03, 0.003)
    assert small_change.worst.label == "y - x"
    assert small_change.worst.sqnr_db == pytest.approx(20, abs=0.5)
    assert "19.8 dB (worst: y - x)" in judge(small_change).text
    assert compared(0.5, 0.03).worst.label == "y"
    assert compared(1e-6, 0.03).worst.label == "y"  # rounding alone
    # a state, or of another shape
    assert compared(0.03, 0.03, shape=(1, 3, 256)).worst.label == "y"


def one_node(op="Relu", dtype=TensorProto.FLOAT):
    x, y = (make_value(name, ("n", 3), dtype) for name in "xy")
    return make_model([(op, "x", "y")], [x], [y], opset=17, ir=9)


def test_a_session_knows_its_inputs_and_runs(tmp_path):
    path = save_net(one_node(), tmp_path / "m.onnx")
    for source in (path, str(path), path.read_bytes()):
        session = OrtSession.open(source, threads=1, optimize=False)
        (spec,) = session.inputs
        assert (spec.name, spec.dtype, spec.shape) == ("x", "float32", ("n", 3))
        assert session.run({"x": np.array([[-1, 0, 2]], np.float32)})["y"].tolist() == [[0, 0, 2]]
    assert session.threads == 1


@pytest.mark.parametrize(
    ("element", "numpy_name"),
    [
        (TensorProto.DOUBLE, "float64"),
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.INT8, "int8"),
        (TensorProto.STRING, "str"),
        (TensorProto.BOOL, "bool"),
    ],
)
def test_element_types_have_numpys_names(element, numpy_name):
    session = OrtSession.open(one_node("Identity", dtype=element).SerializeToString(), threads=1)
    assert session.inputs[0].dtype == session.outputs[0].dtype == numpy_name


@pytest.mark.parametrize(
    "feed",
    [
        {},
        {"z": np.zeros((1, 3), np.float32)},
        {"x": np.zeros((1, 3), np.int32)},
        {"x": np.zeros((1, 4), np.float32)},
        {"x": np.zeros(3, np.float32)},
    ],
)
def test_a_wrong_feed_is_one_sentence(feed, wording):
    session = OrtSession.open(one_node().SerializeToString(), threads=1)
    with pytest.raises(BackendError) as caught:
        session.run(feed)
    wording.check(caught.value)
    assert "\n" not in str(caught.value)


def test_files_it_cannot_load_and_no_threads_are_one_sentence(tmp_path, capfd, wording):
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    onnx.save(one_node("NoSuchOperator"), tmp_path / "custom.onnx")
    for name in ("text.onnx", "empty.onnx", "custom.onnx", "missing.onnx", "."):
        with pytest.raises(BackendError) as caught:
            OrtSession.open(tmp_path / name, threads=1)
        wording.check(caught.value)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    with pytest.raises(BackendError) as refusal:
        OrtSession.open(one_node().SerializeToString(), threads=0)
    wording.check(refusal.value)


def two_branches(outputs):
    """Two Convs that make two channels of each, added: ONNX Runtime makes one kernel of them."""
    rng = np.random.default_rng(0)
    sizes = {"v": (16, 1, 7, 7), "w": (16, 1, 3, 3), "u": (8, 16, 1, 1)}
    nodes = """
        a = Conv <pads = [3, 3, 3, 3], group = 8> (x, v)
        b = Conv <pads = [1, 1, 1, 1], group = 8> (x, w) s = Add (a, b) y = Conv (s, u)
    """
    weights = as_float32({name: rng.normal(size=size) for name, size in sizes.items()})
    return make_model(nodes, {"x": ["n", 8, 16, 16]}, dict.fromkeys(outputs), weights)


def test_an_output_that_the_optimizer_loses_is_there(capfd):
    """ONNX Runtime 1.32 does not load it: `a` is an output, and part of the joined kernel."""
    x = np.random.default_rng(1).normal(size=(1, 8, 16, 16)).astype(np.float32)
    plain, outputs = (
        OrtSession.open(two_branches(["y", "a"]), threads=1, optimize=optimize).run({"x": x})
        for optimize in (False, True)
    )
    assert {"y", "a"} == set(outputs)
    assert all(np.allclose(outputs[name], plain[name], atol=1e-4) for name in outputs)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("outputs", [["y"], ["y", "a"]])
def test_such_a_model_is_searched_and_built(outputs, tmp_path, capfd):
    x = np.random.default_rng(1).normal(size=(10, 8, 16, 16))
    out = build_net(two_branches(outputs), x, tmp_path, "--accept", "--quiet")
    assert "nothing was searched" not in (out / "report.md").read_text()
    assert "[[onnxruntime.front]]" in (out / "calib8/net.plan.toml").read_text()
    assert "EP Error" not in "".join(capfd.readouterr())


def test_fewest_samples_ask_for_enough_at_once():
    """4 samples can be judged, but they are too few for a verdict."""
    outcome = judge(counted("top-1 agreement", "classes", 1, 1, 1))
    assert outcome.reasons == ("1 sample is too few; about 30 more would do",)


def test_few_do_not_hide_a_cause_that_drops_the_figure():
    doubt = "the calibration data is of another unit; give --scale"
    outcome = judge(FEW["20 samples are too few; 10 more would do"], doubts=(doubt,))
    assert outcome.level == DOUBTFUL
    assert outcome.reasons[0].endswith(doubt)
    assert not outcome.has_few_samples
