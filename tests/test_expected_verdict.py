"""Verdicts that a search expects of a trial."""

from types import SimpleNamespace

import pytest

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.levels import DOUBTFUL, GOOD
from deploy.metrics.output_errors import SAMPLE_MEAN, OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy
from deploy.tasks import TaskFigure
from deploy.tuning import search_samples


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """No model is opened: the tests give the accuracies."""
    comparison = SimpleNamespace(outputs={})
    monkeypatch.setattr(search_samples, "GrowingComparison", lambda *_, **__: comparison)
    monkeypatch.setattr(search_samples, "model_digest", lambda model: "")


def make_predictor():
    """A predictor without limits, whose accuracies the test gives."""
    return search_samples.VerdictPredictor(
        None,
        int8_kernels=True,
        threads=1,
        max_loss=None,
        form=None,
        count_samples=lambda count: None,
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
    verdict = judge.predict(None, noise=0.0)
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
    make_predictor().predict(None, noise=0.0)
    assert len(calls) == expected_calls


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
    verdict = judge.predict(None, noise=0.0)
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
    expected = judge.predict(None, noise=noise)
    assert (expected.level == GOOD) is good
