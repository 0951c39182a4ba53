"""The verdict on an engine, at its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest

from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.metrics.output_errors import RunningError
from deploy.metrics.precision import MeanPrecision
from deploy.metrics.tasks import TaskFigure
from deploy.metrics.truth import PartAccuracy
from deploy.report.verdict import Gates, verdict
from deploy.tensors import TensorSpec


def part(db=40.0, *, cosine=0.999, label="y"):
    return PartAccuracy(
        label=label, output="y", sqnr_db=db, cosine_mean=cosine, cosine_min=cosine, max_abs_error=1
    )


def task(value, reference=1.0):
    return TaskFigure(
        task="boxes", figure="boxes kept", value=value, reference=reference, count="9 of 10",
        words="9 of 10 boxes kept", samples=10,
    )  # fmt: skip


def accuracy(*parts, **rest):
    return Accuracy(**{"samples": 100, "outputs": (), "parts": parts or (part(),), **rest})


def judged(found=None, *, speed=None, int8=True, **gates):
    one = accuracy() if found is None else found
    return verdict(accuracy=one, speed_up=speed, int8=int8, gates=Gates(**gates))


@pytest.mark.parametrize(
    ("db", "level"),
    [(15.0, GOOD), (14.9, DOUBTFUL), (5.0, DOUBTFUL), (4.9, UNUSABLE), (math.nan, UNUSABLE),
     (math.inf, GOOD), (-math.inf, UNUSABLE)],
)  # fmt: skip
def test_an_unknown_task_is_judged_by_its_worst_part(db, level):
    found = judged(accuracy(part(db, label="scores"), part(60)))
    assert found.level == level and "scores" in found.words


@pytest.mark.parametrize(
    ("value", "level"),
    [(0.95, GOOD), (0.949, DOUBTFUL), (0.75, DOUBTFUL), (0.749, UNUSABLE), (math.nan, UNUSABLE)],
)
def test_a_task_is_judged_by_what_is_lost_of_it(value, level):
    found = judged(accuracy(part(6), task=task(value)))
    assert found.level == level and "9 of 10 boxes kept" in found.words


def test_a_users_figure_is_judged_by_what_the_float_model_reaches():
    assert judged(accuracy(task=task(0.60, reference=0.62))).level == GOOD
    assert judged(accuracy(task=task(0.60, reference=0.70))).level == DOUBTFUL


def test_a_part_that_is_more_noise_than_signal_is_never_good_whatever_the_task_says():
    assert judged(accuracy(part(0.0), task=task(1.0))).level == GOOD
    assert judged(accuracy(part(-0.1), task=task(1.0))).level == DOUBTFUL


@pytest.mark.parametrize(
    ("lost", "level"), [(0.01, GOOD), (0.011, DOUBTFUL), (0.05, DOUBTFUL), (0.051, UNUSABLE)]
)
def test_labels_decide_before_the_task(lost, level):
    one = accuracy(
        task=task(0.1), top1_reference=0.9, top1_candidate=0.9 - lost, classes=10, favourite=0.2
    )
    found = judged(one)
    assert found.level == level and f"{100 * lost:.2f} points of top-1 lost" in found.words


@pytest.mark.parametrize(
    ("most", "level"), [(0.01, GOOD), (0.009, UNUSABLE)]
)  # there is no doubt between them
def test_what_the_user_allows_to_be_lost_decides_before_the_limits(most, level):
    labelled = accuracy(top1_reference=0.9, top1_candidate=0.89, classes=10, favourite=0.2)
    for one in (labelled, accuracy(task=task(0.99)), accuracy(part(cosine=0.99))):
        assert judged(one, max_loss=most).level == level


def test_a_loss_that_is_no_number_is_more_than_is_allowed():
    assert judged(accuracy(part(math.nan, cosine=math.nan)), max_loss=1.0).level == UNUSABLE


@pytest.mark.parametrize(
    ("right", "classes", "samples", "level"),
    [
        (0.0875, 10, 400, UNUSABLE),  # chance is 10 % and its spread 1.5 points
        (0.145, 10, 400, UNUSABLE),  # three spreads are not surely better than chance
        (0.146, 10, 400, DOUBTFUL),  # no guess, and still wrong in six of seven
        (0.24, 10, 400, DOUBTFUL),
        (0.25, 10, 400, GOOD),
        (0.0875, 10, 19, GOOD),  # too few to tell
        (0.02, 1000, 400, DOUBTFUL),
        (0.05, 1000, 20, DOUBTFUL),  # an ImageNet model with the wrong scale
        (0.0, 1000, 20, UNUSABLE),
        (0.5, 2, 36, UNUSABLE),  # guessing reaches 75 % once in a thousand times
        (0.8, 2, 20, GOOD),  # and 83 % of so few, which tell nothing
    ],
)
def test_a_float_model_that_guesses_was_fed_something_else(right, classes, samples, level):
    found = judged(
        accuracy(samples=samples, top1_reference=right, top1_candidate=right, classes=classes)
    )
    assert found.level == level
    assert ("chance is" in found.words) == (level == UNUSABLE)
    assert ("check --preprocess" in found.words) == (level != GOOD)


def precision(own, other, *, own_50=0.5):
    return MeanPrecision(
        reference=own, candidate=other, reference_50=own_50, candidate_50=other, objects=40
    )


@pytest.mark.parametrize(
    ("lost", "level"), [(0.01, GOOD), (0.011, DOUBTFUL), (0.05, DOUBTFUL), (0.051, UNUSABLE)]
)
def test_annotated_objects_decide_before_the_boxes_of_fp32(lost, level):
    found = judged(accuracy(task=task(0.8), precision=precision(0.4, 0.4 - lost)))
    assert found.level == level and f"{100 * lost:.2f} points of mAP .50:.95 lost" in found.words
    own = replace(task(0.99), task="metric")
    found = judged(accuracy(task=own, precision=precision(0.4, 0.4 - lost)))
    assert found.level == GOOD and "mAP" not in found.words


@pytest.mark.parametrize(("samples", "level"), [(20, UNUSABLE), (19, GOOD)])
def test_a_detector_that_finds_nothing_of_what_is_annotated_proves_nothing(samples, level):
    one = accuracy(samples=samples, task=task(1.0), precision=precision(0.0, 0.0, own_50=0.009))
    found = judged(one)
    assert found.level == level
    assert ("finds next to none of the 40 objects" in found.words) == (level == UNUSABLE)
    fed = {"accuracy": one, "speed_up": None, "int8": True, "gates": Gates(), "fed_wrong": True}
    assert "did not learn from" in verdict(**fed).words
    seen = replace(one, precision=precision(0.4, 0.4))
    assert "did not learn from" not in verdict(**{**fed, "accuracy": seen}).words


@pytest.mark.parametrize(
    ("share", "samples", "level"), [(0.95, 20, DOUBTFUL), (0.94, 20, GOOD), (1.0, 19, GOOD)]
)
def test_without_labels_a_float_model_that_knows_one_class_is_doubted(share, samples, level):
    found = judged(accuracy(samples=samples, classes=10, favourite=share))
    assert found.level == level
    assert ("check the preprocessing" in found.words) == (level == DOUBTFUL)


def test_with_labels_one_class_may_be_all_that_is_there():
    one = accuracy(classes=10, favourite=1.0, top1_reference=1.0, top1_candidate=1.0)
    assert judged(one).level == GOOD


@pytest.mark.parametrize(("value", "level"), [(0, DOUBTFUL), (1e-30, GOOD)])
def test_outputs_of_zeros_prove_nothing(value, level):
    error = RunningError("y")
    error.add(np.full((2, 3), value, np.float32), np.full((2, 3), value, np.float32), 2)
    found = judged(accuracy(part(math.inf), outputs=(error.result(),)))
    assert found.level == level
    assert ("prove nothing" in " ".join(found.reasons)) is (level == DOUBTFUL)


def test_outputs_that_are_not_finite_are_unusable_and_said_first():
    problem = "output 'y' of the int8 engine holds NaN or Inf in 1 of 2 samples"
    found = judged(accuracy(part(14), problems=(problem,)), speed=0.5)
    assert found.level == UNUSABLE and found.reasons[0] == problem
    assert len(found.reasons) == 3  # what is doubtful is told too


def test_nothing_measured_is_doubtful():
    found = verdict(accuracy=None, speed_up=None, int8=True, gates=Gates())
    assert found.level == DOUBTFUL and found.words == "doubtful: nothing was measured of it"


@pytest.mark.parametrize(
    ("speed", "least", "level"),
    [(0.95, None, GOOD), (0.949, None, DOUBTFUL), (1.5, 1.5, GOOD), (1.49, 1.5, UNUSABLE),
     (0.5, 0.4, GOOD), (None, 9.0, DOUBTFUL)],
)  # fmt: skip
def test_speed_is_judged_against_fp32_or_what_the_user_demands(speed, least, level):
    assert judged(speed=speed, min_speedup=least).level == level


def test_a_model_that_stays_in_float_is_said_to_and_is_not_doubted_for_speed_by_chance():
    found = judged(speed=0.94, int8=False)
    assert found.level == FLOAT and "the float model was written" in found.words
    assert judged(speed=1.1, int8=False, min_speedup=1.5).level == UNUSABLE
    assert judged(accuracy(part(math.nan)), int8=False).level == UNUSABLE


def test_what_is_good_is_told_only_where_nothing_is_worse():
    assert judged(accuracy(part(40)), speed=2.0).reasons == (
        "40.0 dB in the worst part, y",
        "2.00 times as fast as FP32",
    )
    assert judged(accuracy(part(4)), speed=2.0).reasons == ("4.0 dB in the worst part, y",)


@pytest.mark.parametrize(("slower_ms", "level"), [(0.019, GOOD), (0.021, DOUBTFUL)])
def test_a_model_of_microseconds_is_not_slower_by_the_runtimes_own_overhead(slower_ms, level):
    found = verdict(
        accuracy=accuracy(part(30)), speed_up=0.8, int8=True, gates=Gates(), slower_ms=slower_ms
    )
    assert found.level == level


@pytest.mark.parametrize(("best", "level"), [(1.59, GOOD), (0.67, DOUBTFUL)])
def test_a_speed_that_the_fastest_runs_do_not_bear_out_is_told_with_theirs(best, level):
    """On a busy machine p50 told 10.93 times, and no word of the verdict that int8 won 1.59."""
    found = verdict(
        accuracy=accuracy(part(30)), speed_up=10.93, slower_ms=-5.0, by_fastest=best, int8=True,
        gates=Gates(),
    )  # fmt: skip
    said = f"10.93 times as fast as FP32 by p50, {best:.2f} times by the fastest runs"
    assert found.level == level and said in found.words


class Given:
    """A session in a name alone: what it says is told to the comparison."""

    outputs = (TensorSpec("y", "float32", (1, 3, 16, 16)),)


def compared(change, error, *, shape=(1, 3, 16, 16), cut=0):
    """The figures of an engine that is off by so much, of a model that changes so much."""
    made, comparison = np.random.default_rng(3), Comparison(Given(), Given())
    for _ in range(6):
        x = made.normal(size=shape).astype(np.float32)
        own = x + change * made.normal(size=shape).astype(np.float32)
        noise = error * made.normal(size=shape).astype(np.float32)
        fed = x[..., cut:]
        comparison.add({"x": fed}, {"y": own}, {"y": own + noise})
    return comparison.result()


@pytest.mark.parametrize(
    ("change", "error", "level"),
    [(0.03, 0.03, DOUBTFUL), (0.03, 0.003, GOOD), (0.5, 0.03, GOOD)],
)  # fmt: skip
def test_what_is_left_of_a_small_change_of_the_input_is_judged(change, error, level):
    found = judged(compared(change, error))
    assert found.level == level
    assert ("what the model changes of x in y" in found.words) == (level == DOUBTFUL)


def test_an_engine_that_gives_its_input_back_is_not_good():
    found = compared(0.03, 0.0)
    assert judged(found).level == GOOD and not found.doubts
    comparison, made = Comparison(Given(), Given()), np.random.default_rng(4)
    for _ in range(6):
        x = made.normal(size=(1, 3, 16, 16)).astype(np.float32)
        comparison.add({"x": x}, {"y": x + 0.03 * made.normal(size=x.shape)}, {"y": x})
    (doubt,) = comparison.result().doubts
    assert doubt.startswith("0.0 dB are left") and judged(comparison.result()).level == DOUBTFUL


def test_a_task_or_a_limit_that_is_met_leaves_no_doubt_of_changes():
    found = compared(0.03, 0.02)
    assert judged(found).level == DOUBTFUL
    assert judged(replace(found, task=task(1.0))).level == GOOD
    assert judged(found, max_loss=0.3).level == GOOD
    assert judged(found, max_loss=0.1).level == UNUSABLE  # by the change's cosine


def test_labels_decide_before_the_worst_part():
    """Of numbers of classes it has no meaning, as of the places alone that TopK gives."""
    found = accuracy(part(6.5))
    assert judged(found).level == DOUBTFUL
    named = replace(found, top1_reference=0.9, top1_candidate=0.9)
    assert judged(named).level == GOOD
    assert judged(replace(named, parts=(part(-1.0),))).level == DOUBTFUL


def test_the_worst_figure_of_a_changed_input_is_that_of_the_change():
    found = compared(0.03, 0.003)
    assert found.worst.label == "y - x" and found.worst.sqnr_db == pytest.approx(20, abs=0.5)
    words = judged(found).words
    assert "19.8 dB in the worst part, y - x; 50.4 dB in y" in words
    assert compared(0.5, 0.03).worst.label == "y"
    assert compared(1e-6, 0.03).worst.label == "y"  # rounding alone


def test_an_output_that_is_lost_is_unusable_whatever_it_changes():
    assert judged(compared(0.1, 0.9)).level == UNUSABLE


def test_states_and_outputs_of_another_shape_are_no_changed_inputs():
    assert not compared(0.03, 0.03, shape=(1, 3, 256)).doubts
    assert not compared(0.03, 0.03, cut=1).doubts
