"""Verdicts that a search expects of a trial."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import pytest

from calib8 import calibrate
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE
from deploy.metrics.output_errors import SAMPLE_MEAN, OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy, derive_from_first
from deploy.tasks import TaskFigure
from deploy.tuning import search_samples
from deploy.tuning.search_samples import GrowingComparison


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """No model is opened: the tests give the accuracies."""
    comparison = SimpleNamespace(outputs={})
    monkeypatch.setattr(search_samples, "GrowingComparison", lambda *_, **__: comparison)
    monkeypatch.setattr(search_samples, "model_digest", lambda model: "")


def make_predictor(evaluation_set=None, max_loss=None):
    """A predictor whose accuracies the test gives."""
    return search_samples.VerdictPredictor(
        evaluation_set,
        int8_kernels=True,
        threads=1,
        max_loss=max_loss,
        form=None,
        count_samples=lambda count: None,
        few_box_keys=[],
    )


@pytest.mark.parametrize(
    ("first_loss", "expected_calls"), [(0.0, 1), (0.02, 1), (0.04, 2), (0.1, 2), (0.3, 2), (0.6, 1)]
)
def test_sampling_stops_when_result_is_stable(first_loss, expected_calls, monkeypatch):
    judged_texts = []

    def judge_parts(self, model):
        for share in (first_loss, 0.1):
            text = f"{share:.2f} lost"
            figure = TaskFigure(
                task="text", figure="", value=1 - share, count="", words=text, samples=9, form=""
            )
            judged_texts.append(text)
            yield Accuracy(samples=9, outputs=(), task=figure)

    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", judge_parts)
    judge = make_predictor()
    verdict = judge.predict(None, worst_loss=0.0)
    assert len(judged_texts) == expected_calls
    assert verdict.task_loss.words == judged_texts[-1]


@pytest.mark.parametrize(
    ("counted", "samples", "expected_calls"), [(0, 12, 1), (12, 12, 2), (40, 12, 1), (12, 48, 1)]
)
def test_few_counted_need_more_samples(counted, samples, expected_calls, monkeypatch):
    calls = []

    def judge_parts(self, model):
        for _ in range(2):
            calls.append(model)
            figure = TaskFigure(
                task="", figure="", value=1, count="", words="", samples=samples, counted=counted
            )
            yield Accuracy(samples=samples, outputs=(), task=figure)

    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", judge_parts)
    make_predictor().predict(None, worst_loss=0.0)
    assert len(calls) == expected_calls


@pytest.mark.parametrize(
    ("max_loss", "expected_level"), [(0.0, UNUSABLE), (0.01, UNUSABLE), (0.03, GOOD), (None, GOOD)]
)
def test_no_loss_in_few_samples_does_not_prove_a_strict_limit(
    max_loss, expected_level, monkeypatch
):
    def accuracies(self, comparison):
        for samples, lost in ((12, 0.0), (48, 0.04)):
            figure = TaskFigure(
                task="boxes",
                figure="",
                value=1 - lost,
                count="",
                words="",
                samples=samples,
                found=50,
                counted=50,
            )
            yield Accuracy(samples=samples, outputs=(), task=figure)

    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", accuracies)
    expected = make_predictor(max_loss=max_loss).predict(None, worst_loss=0.0)
    assert expected.level == expected_level


def test_other_task_outputs_are_judged(monkeypatch):
    figure = TaskFigure(
        task="steps", figure="", value=1, count="", words="", samples=9, form="", beside=("age",)
    )
    age = OutputAccuracy(name="age", sqnr_db=16, cosine_mean=1, cosine_min=1, max_abs_error=9)
    part = SliceAccuracy(
        label="age",
        output="age",
        sqnr_db=6,
        cosine_mean=1,
        cosine_min=1,
        max_abs_error=9,
        less=SAMPLE_MEAN,
    )
    figures = Accuracy(samples=9, outputs=(age,), parts=(part,), task=figure)
    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", lambda *_: [figures])
    judge = make_predictor()
    verdict = judge.predict(None, worst_loss=0.0)
    assert verdict.level == DOUBTFUL


@pytest.mark.parametrize(
    ("box_count", "lost", "new_boxes", "noise", "good"),
    [
        (13, 0, 0, 0.075, False),  # of 86 boxes in other photos 91 % were kept
        (13, 0, 0, 0.06, True),
        (13, 1 / 13, 0, 0.06, False),
        (13, 1 / 13, 0, 0.03, True),
        (7, 0, 1, 0.046, True),  # of 86 boxes in other photos 97 % were kept
        (7, 0, 4, 0.046, False),
        (200, 0, 0, 0.075, True),
        (200, 0.04, 0, 0.08, True),
        (200, 0, 21, 0.01, False),
        (None, 0, 0, 0.075, True),
    ],
)
def test_few_boxes_are_extrapolated_by_noise(box_count, lost, new_boxes, noise, good, monkeypatch):
    """A single box of a few would decide between good and doubtful."""
    figure = TaskFigure(
        task="boxes",
        figure="",
        value=1 - lost,
        count="",
        words=f"all of {box_count} boxes",
        samples=51,
        found=box_count,
        new=new_boxes,
        counted=box_count or 0,
        form="",
    )
    figures = Accuracy(samples=51, outputs=(), task=figure)
    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", lambda *_: [figures])
    judge = make_predictor()
    expected = judge.predict(None, worst_loss=noise)
    assert (expected.level == GOOD) is good


class Subset(list):
    """Samples without states."""

    states: ClassVar[dict[str, str]] = {}


class BoxComparison:
    """A comparison in which the samples with even keys below `box_limit` hold one box each."""

    calls: ClassVar[list[tuple[int, tuple[int, ...]]]] = []
    box_limit = 14

    def __init__(self, *_, **__):
        self.keys, self.outputs = [], {}

    @property
    def box_keys(self):
        return [key for key in self.keys if key % 2 == 0 and key < self.box_limit]

    def compare(self, max_samples, *, threads, added_keys):
        self.calls.append((max_samples, tuple(added_keys)))
        self.keys = sorted({*range(max_samples), *added_keys})
        found = len(self.box_keys)
        figure = TaskFigure(
            task="boxes",
            figure="",
            value=1,
            count="",
            words="",
            samples=len(self.keys),
            found=found,
            new=1,  # of a few boxes, so that more samples are needed
            counted=found,
        )
        return Accuracy(samples=len(self.keys), outputs=(), task=figure)


@pytest.mark.parametrize(
    ("box_limit", "calls_again"),
    [
        (0, [(12, ())]),
        (14, [(5, (0, 2, 4, 6, 8, 10, 12))]),
        (64, [(1, tuple(range(0, 64, 2)))]),
        (90, None),
    ],
)
def test_samples_without_boxes_are_hardly_run_again(box_limit, calls_again, monkeypatch):
    """Where there are few boxes, later models run on those samples, and on 12 at least."""
    monkeypatch.setattr(BoxComparison, "calls", [])
    monkeypatch.setattr(BoxComparison, "box_limit", box_limit)
    monkeypatch.setattr(search_samples, "GrowingComparison", BoxComparison)
    predictor = make_predictor(SimpleNamespace(subset=Subset(range(100))))
    predictor.predict(None, worst_loss=0.1)
    calls = BoxComparison.calls[:]
    assert [max_samples for max_samples, _ in calls] == [12, 48, 100]
    predictor.predict(None, worst_loss=0.1)
    assert BoxComparison.calls[3:] == (calls if calls_again is None else calls_again)


def test_a_comparison_knows_the_samples_with_boxes(detector):
    rng = np.random.default_rng(3)
    pictures = rng.normal(scale=0.05, size=(16, 1, 3, 32, 32)).astype(np.float32)
    pictures[[4, 11]] *= 60  # in the others the scores are low
    model = onnx.load(detector)
    evaluation_set = make_evaluation_set(calibrate(detector, pictures).feed, model, 16)
    form, _ = derive_from_first(evaluation_set.samples_with_outputs(16))
    comparison = GrowingComparison(model, evaluation_set, form, int8_kernels=False)
    comparison.compare(1, threads=1, added_keys=[4])
    assert comparison.box_keys == [4]
    comparison.compare(16, threads=2)
    assert comparison.box_keys == [4, 11]
    assert len(comparison.keys) == len(set(comparison.keys)) == 16
