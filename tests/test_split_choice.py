"""Verdicts that a search expects, and which split it chooses by them."""

from types import SimpleNamespace

import numpy as np
import pytest

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.levels import DOUBTFUL, TaskLoss
from deploy.metrics.output_errors import USUAL, OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy
from deploy.tasks import TaskFigure
from deploy.tuning import search_samples
from deploy.tuning.split_choice import ChosenSplit, SplitChooser


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
    judge = search_samples.VerdictPredictor(
        None,
        int8_kernels=True,
        threads=1,
        max_loss=None,
        metric=None,
        count_samples=lambda count: None,
    )
    verdict = judge.predict(None, noise=0.0)
    assert len(judged_texts) == expected_calls
    assert verdict.task_loss.words == judged_texts[-1]


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
        less=USUAL,
    )
    figures = Accuracy(samples=9, outputs=(age,), parts=(part,), task=figure)
    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", lambda *_: [figures])
    judge = search_samples.VerdictPredictor(
        None,
        int8_kernels=True,
        threads=1,
        max_loss=None,
        metric=None,
        count_samples=lambda count: None,
    )
    verdict = judge.predict(None, noise=0.0)
    assert not verdict.is_good
    assert verdict.doubtful == "6.0 dB in the worst part, age"


@pytest.mark.parametrize(
    ("box_count", "lost", "noise", "good"),
    [
        (13, 0, 0.075, False),
        (13, 0, 0.06, True),
        (13, 1 / 13, 0.06, False),
        (200, 0, 0.075, True),
        (200, 0.04, 0.08, True),
        (None, 0, 0.075, True),
    ],
)
def test_noise_shows_loss_hidden_by_boxes(box_count, lost, noise, good, monkeypatch):
    """Of 13 boxes all were kept, and of 86 in other photos 91 %."""
    figure = TaskFigure(
        task="boxes",
        figure="",
        value=1 - lost,
        count="",
        words=f"all of {box_count} boxes",
        samples=51,
        found=box_count,
        form="",
    )
    figures = Accuracy(samples=51, outputs=(), task=figure)
    monkeypatch.setattr(search_samples.VerdictPredictor, "_accuracies", lambda *_: [figures])
    judge = search_samples.VerdictPredictor(
        None,
        int8_kernels=True,
        threads=1,
        max_loss=None,
        metric=None,
        count_samples=lambda count: None,
    )
    expected = judge.predict(None, noise=noise)
    assert expected.is_good is good
    if not good and not lost:
        assert expected.doubtful == "all of 13 boxes, too few to show what int8 loses"


@pytest.mark.parametrize(
    ("fuller", "first_options", "built"),
    [
        ({}, {}, "fuller"),
        ({"doubtful": "9 dB"}, {}, "first"),
        ({"unusable": "3 dB"}, {}, "first"),
        ({"doubtful": "9 dB"}, {"doubtful": "12 dB"}, "first"),
    ],
)
def test_good_half_int8_split_is_preferred(fuller, first_options, built):
    options_by_trial = {"fuller": fuller, "first": first_options}
    verdict_by_trial = {
        name: search_samples.ExpectedVerdict(**options)
        for name, options in options_by_trial.items()
    }
    prices = SimpleNamespace(measured=False)
    search = SimpleNamespace(
        prices=prices, likely=lambda n: ["first"], fuller=lambda n: "fuller", faster=lambda *_: None
    )
    for has_budget in (True, False):  # of the budget, once the fuller one is judged
        budget = iter([True])
        judges = {
            "judge": verdict_by_trial.__getitem__,
            "can_go_on": lambda budget=budget, m=has_budget: next(budget, m),
        }
        chooser = SplitChooser(search=search, choose=lambda trials: (trials[0], []), **judges)
        chosen, verdict = chooser._choose_likely([])
        assert chosen.trial == built
        assert verdict == verdict_by_trial[built]


@pytest.mark.parametrize(("quietest", "built"), [(None, "first"), ("quietest", "quietest")])
def test_quietest_split_is_built_if_unusable(quietest, built):
    search = SimpleNamespace(quieter=lambda *_: None, quietest=lambda _: quietest)
    chooser = SplitChooser(
        search=search, choose=lambda trials: (trials[0], []), judge=None, can_go_on=lambda: True
    )
    first_choice = ChosenSplit(trial="first", told=[])
    chosen = chooser._choose_usable(first_choice, search_samples.ExpectedVerdict(unusable="3 dB"))
    assert (chosen.trial, chosen.unusable) == (built, "3 dB")


@pytest.mark.parametrize(
    "time, lost, built",
    [(0.8, 0.06, "quiet"), (0.95, 0.06, "loud"), (0.8, 0.22, "loud"), (0.95, 0.04, "quiet")],
)
def test_cheaper_of_two_doubtful_splits_wins(time, lost, built):
    """With more weight on noise: what keeps a third of int8's gain and loses less of the task."""
    loud, quiet = SimpleNamespace(time=0.7), SimpleNamespace(time=time)
    shares = {0.7: 0.23, time: lost}

    def judge(trial):
        share = shares[trial.time]
        doubtful = "as the test has it" if share > 0.05 else ""
        loss = TaskLoss(share, DOUBTFUL, doubtful)
        return search_samples.ExpectedVerdict(doubtful=doubtful, task_loss=loss)

    search = SimpleNamespace(
        weight=2.5,
        prices=SimpleNamespace(measured=True),
        best_without_float=loud,
        trials=[],
        likely=lambda _: [loud if search.weight < 5 else quiet],
        can_refine=lambda: True,
        faster=lambda *_: None,
        quieter=lambda *_, **__: None,
        time_of=lambda _: 0.7,
        quiet_down=lambda: setattr(search, "weight", 10.0),
    )
    for split in (loud, quiet):
        split.in_float = ""
        split.noise = SimpleNamespace(worst=0.1)
    chooser = SplitChooser(
        search=search, choose=lambda trials: (trials[0], []), judge=judge, can_go_on=lambda: False
    )
    assert chooser.run().trial is (quiet if built == "quiet" else loud)


@pytest.mark.parametrize("wins", ["quick", "known"])
def test_good_splits_are_compared_by_price(wins):
    """More weight on noise finds a good split; it must not keep a faster good one from winning."""
    costs = {"loud": (0.63, 0.07), "slow": (0.92, 0.025), "quick": (0.64, 0.092)}
    costs["known"] = (0.7, 0.06)  # from before
    loud, slow, quick, earlier = (
        SimpleNamespace(time=time, loss=loss, noise=SimpleNamespace(worst=loss))
        for time, loss in costs.values()
    )
    trial_list, faster_trial = (
        ([loud, slow], quick) if wins == "quick" else ([loud, earlier, slow], None)
    )
    search = SimpleNamespace(
        weight=3.75,
        prices=SimpleNamespace(measured=True),
        best_without_float=loud,
        trials=trial_list,
        likely=lambda n: trial_list[:n] if search.weight < 5 else [loud, slow],
        faster=lambda *_: faster_trial,
        can_refine=lambda: True,
    )
    search.quiet_down = lambda: setattr(search, "weight", 15.0)

    def choose(trials):
        return min(trials, key=lambda trial: np.log(trial.time) + search.weight * trial.loss), []

    chooser = SplitChooser(
        search=search,
        choose=choose,
        can_go_on=lambda: True,
        judge=lambda trial: search_samples.ExpectedVerdict(doubtful="2 new" * (trial is loud)),
    )
    assert chooser.run().trial is (quick if wins == "quick" else earlier)
