"""Several heads: classes beside numbers that they tell nothing of, and heads of raw scores."""

import numpy as np
import pytest

from deploy.errors import FeedError
from deploy.metrics.accuracy import Accuracy, compare
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE, of_accuracy
from deploy.metrics.tasks.task import TaskFigure
from deploy.metrics.truth import PartAccuracy, form_of
from deploy.tensors import TensorSpec

FED = {"x": np.zeros((1, 3, 24, 24), np.float32)}


def shares(number, classes=2, sure=3.0):
    scores = np.random.default_rng(number).normal(0, sure, (1, classes))
    power = np.exp(scores)
    return np.float32(power / power.sum())


def face(number):
    """A box, key points and whether it is a face, as MTCNN's last net tells them."""
    made = np.random.default_rng(70 + number)
    box, points = made.normal(0, 0.1, (1, 4)), made.uniform(0.1, 0.9, (1, 10))
    return {"box": np.float32(box), "points": np.float32(points), "face": shares(number)}


def task_of(outputs, fed=FED):
    return form_of(outputs, inputs=[fed] * len(outputs)).task


def test_probabilities_beside_numbers_are_classes():
    outputs = [face(n) for n in range(4)]
    task = task_of(outputs)
    assert task.form == "face: 2 classes" and task.beside == ("box", "points")
    tally = task.tally()
    for one in outputs:
        tally.add(FED, one, one)
    assert tally.result().count == "4 of 4" and tally.result().beside == ("box", "points")


def test_an_age_and_two_heads_of_classes():
    made = np.random.default_rng(0)
    ages = [{"age": np.float32([[made.uniform(5, 80)]])} for _ in range(4)]
    outputs = [{**age, "a": shares(n), "b": shares(n, 7)} for n, age in enumerate(ages)]
    task = task_of(outputs)
    assert task.form == "a, b: 2 and 7 classes" and task.beside == ("age",)


@pytest.mark.parametrize("what", ["a map", "no picture", "raw"])
def test_others_are_no_classes(what):
    outputs = [face(n) for n in range(4)]
    for one in outputs:
        if what == "a map":
            one["box"] = np.zeros((1, 4, 12, 12), np.float32)
        if what == "raw":
            one["face"] = one["face"] * 9
    fed = {"x": np.zeros((1, 40), np.float32)} if what == "no picture" else FED
    assert task_of(outputs, fed) is None


class Heads:
    """A session of a box and of shares of two classes, by the mean of the picture."""

    inputs = (TensorSpec("x", "float32", ("n", 3, 24, 24)),)
    outputs = (TensorSpec("box", "float32", ("n", 4)), TensorSpec("face", "float32", ("n", 2)))

    def run(self, feed):
        mean = feed["x"].mean(axis=(1, 2, 3))
        box = np.stack([mean, mean * 0, -mean, mean + 3], axis=1)
        yes = 1 / (1 + np.exp(-9 * mean))
        return {"box": np.float32(box), "face": np.float32(np.stack([1 - yes, yes], axis=1))}


def test_labels_are_of_the_output_that_tells_classes():
    means = np.random.default_rng(2).choice([-1.0, 1.0], 30)
    x = np.broadcast_to(means[:, None, None, None], (30, 3, 24, 24)).astype(np.float32)
    labels = (means > 0).astype(int).tolist()
    found = compare(Heads(), Heads(), [{"x": one[None]} for one in x], labels=labels)
    assert found.classes == 2 and found.top1_reference == found.top1_candidate == 1
    wrong = [label + 2 for label in labels]
    with pytest.raises(FeedError, match="0 to 1 for the model's 2 classes"):
        compare(Heads(), Heads(), [{"x": one[None]} for one in x], labels=wrong)


def part(output, db):
    return PartAccuracy(
        label=output, output=output, sqnr_db=db, cosine_mean=1, cosine_min=1, max_abs_error=0
    )


@pytest.mark.parametrize(
    ("db", "beside", "level"), [(30, 20, GOOD), (4, 20, GOOD), (30, 9, DOUBTFUL), (30, 3, UNUSABLE)]
)
def test_what_the_classes_do_not_tell_is_judged_by_its_noise(db, beside, level):
    task = TaskFigure(
        task="classes",
        figure="top-1 agreement",
        value=1.0,
        words="9 of 9 best classes as FP32's",
        count="9 of 9",
        samples=9,
        beside=("box",),
    )
    parts = tuple(sorted([part("face", db), part("box", beside)], key=lambda one: one.sqnr_db))
    found = dict(of_accuracy(Accuracy(samples=9, outputs=(), parts=parts, task=task), None))
    assert set(found) == {level, GOOD}
    assert level == GOOD or "in the worst part, box" in found[level]
