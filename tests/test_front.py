"""The rule that chooses a split, and the front of what could be built instead."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from deploy.errors import BackendError
from deploy.method import Choices, Method
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE, TaskLoss
from deploy.targets.base import BuildRequest
from deploy.tuning import timing
from deploy.tuning.front import MAX_POINTS, SplitChooser, find_fastest
from deploy.tuning.probe import Noise
from deploy.tuning.search import Search
from deploy.tuning.search_options import EFFORTS, Trial, split_cost
from deploy.tuning.search_samples import ExpectedVerdict
from tests.models import make_model, make_node

LAYERS = tuple(f"/c{number}" for number in range(21))


def make_trial(float_layers, *, time, db, method=None):
    """A trial with so many of the layers in float, of this time and worst SQNR."""
    in_float = frozenset(LAYERS[:float_layers])
    power = 10 ** (-db / 10)
    choices = Choices(float_nodes=dict.fromkeys(in_float, "tried"), method=method)
    return Trial(
        in_float=in_float,
        choices=choices,
        noise=Noise({"y": np.array([power])}),
        predicted_time=time,
    )


@dataclass
class FakeSearch:
    """A search whose trials are known; `untried` are those of the predicted front."""

    trials: list
    untried: list = field(default_factory=list)
    weight: float = 2.5
    refused: frozenset = frozenset()

    @property
    def eligible(self):
        return self.trials

    @property
    def prices(self):
        return self

    @property
    def units(self):
        return SimpleNamespace(layers=LAYERS)

    def count_float_layers(self, in_float):
        return len(in_float)

    def cost(self, trial):
        return split_cost(trial.time, trial.loss, self.weight)

    def layer_losses(self, base):
        return {}

    def predicted_front(self):
        return sorted((t.in_float for t in [*self.trials, *self.untried]), key=self.time_share)

    def time_share(self, in_float):
        times = {t.in_float: t.time for t in [*self.untried, *self.trials]}
        return times[in_float]

    def try_split(self, base, in_float):
        for trial in [*self.trials, *self.untried]:
            if trial.in_float == in_float:
                if trial not in self.trials:
                    self.trials.append(trial)
                return trial
        raise AssertionError(in_float)


class FakeSizes:
    def of(self, in_float):
        return 0.25 + 0.75 * len(in_float) / len(LAYERS)


def good_from(db):
    """Judge a trial good if its worst slice has so many dB, else doubtful."""

    def judge(trial):
        if trial.noise.db >= db - 1e-6:
            return ExpectedVerdict(task_loss=TaskLoss(0.0, GOOD, "28 of 28 boxes"))
        return ExpectedVerdict(level=DOUBTFUL, task_loss=TaskLoss(0.04, DOUBTFUL, "27 of 28 boxes"))

    return judge


def choose(search, judge, *, judgements=100, measure=None):
    """The chosen trial, and the chooser."""
    remaining = iter(range(judgements))
    chooser = SplitChooser(
        search=search,
        sizes=FakeSizes(),
        judge=judge,
        can_judge=lambda: next(remaining, None) is not None,
        measure=measure,
    )
    return chooser.choose(), chooser


def test_cheapest_trial_is_built_though_few_layers_are_int8():
    """A layer that ruins a slice and costs 2 % of the time; 11 of 21 layers cost a tenth."""
    all_int8 = make_trial(0, time=0.700, db=15.4)
    two_layers = make_trial(2, time=0.715, db=23.8)
    eleven_layers = make_trial(11, time=0.767, db=32.4)
    search = FakeSearch([all_int8, two_layers, eleven_layers])
    chosen, _ = choose(search, good_from(15))
    assert chosen is eleven_layers


def test_equal_time_with_less_loss_wins():
    """Six dB more at the same time, whichever method was tried last."""
    trials = [make_trial(0, time=0.7, db=29.3, method=Method.of("minmax"))]
    trials.insert(0, make_trial(0, time=0.7, db=36.0))
    chosen, chooser = choose(FakeSearch(trials), good_from(15))
    assert chosen is min(trials, key=lambda trial: trial.loss)
    assert chooser.front_trials(chosen) == [chosen]


@pytest.mark.parametrize(("weight", "index"), [(3.5, 0), (14.0, 1)])
def test_time_is_not_spent_on_quiet_losses(weight, index):
    """From 31 to 38 dB for 5 % of the time: where accuracy is preferred alone."""
    trials = [make_trial(49, time=0.874, db=31), make_trial(57, time=0.917, db=38)]
    chosen, _ = choose(FakeSearch(trials, weight=weight), good_from(15))
    assert chosen is trials[index]


@pytest.mark.parametrize("weight", [1.0, 2.5, 10.0])
def test_no_trial_of_the_best_verdict_costs_less(weight):
    rng = np.random.default_rng(7)
    for _ in range(20):
        times, decibels = rng.uniform(0.4, 0.9, 9), rng.uniform(8, 40, 9)
        trials = [
            make_trial(n, time=t, db=d)
            for n, (t, d) in enumerate(zip(times, decibels, strict=True))
        ]
        judge = good_from(25)
        search = FakeSearch(trials, weight=weight)
        chosen, _ = choose(search, judge)
        levels = {judge(trial).level for trial in trials}
        best = GOOD if GOOD in levels else DOUBTFUL
        rivals = [trial for trial in trials if judge(trial).level == best]
        assert chosen in rivals
        assert search.cost(chosen) == min(map(search.cost, rivals))


def test_fastest_good_split_is_looked_for_between_trials():
    fast, slow = make_trial(0, time=0.6, db=14.0), make_trial(20, time=0.95, db=34.0)
    untried = [make_trial(n, time=0.6 + 0.015 * n, db=14.0 + n) for n in range(1, 20)]
    chosen, _ = choose(FakeSearch([fast, slow], untried), good_from(24))
    assert chosen.time == pytest.approx(0.75)


def test_search_goes_on_where_no_trial_is_good():
    fast = make_trial(0, time=0.6, db=14.0)
    search = FakeSearch([fast], [make_trial(4, time=0.8, db=30.0)])
    chosen, _ = choose(search, good_from(24))
    assert chosen.time == 0.8


def test_split_that_wins_nothing_is_no_better_than_a_doubtful_one():
    doubtful, useless = make_trial(0, time=0.6, db=20.0), make_trial(19, time=0.99, db=50.0)
    chosen, _ = choose(FakeSearch([doubtful, useless]), good_from(40))
    assert chosen is doubtful


def test_good_split_is_looked_for_below_one_that_wins_nothing():
    trials = [make_trial(0, time=0.6, db=20.0), make_trial(19, time=0.99, db=50.0)]
    chosen, _ = choose(FakeSearch(trials, [make_trial(9, time=0.8, db=42.0)]), good_from(40))
    assert chosen.time == 0.8


def test_slow_splits_are_tried_in_the_last_resort():
    unusable, better = make_trial(1, time=1.1, db=1.0), make_trial(2, time=1.2, db=30.0)

    def judge(trial):
        return ExpectedVerdict(level=GOOD if trial is better else UNUSABLE)

    chosen, _ = choose(FakeSearch([unusable], [better]), judge)
    assert chosen is better


def test_spent_budget_builds_the_best_of_what_was_judged():
    trials = [make_trial(n, time=0.6 + 0.01 * n, db=12.0 + n) for n in range(6)]
    judged = []
    judge = good_from(90)
    search = FakeSearch(trials)
    chosen, _ = choose(
        search,
        lambda trial: judged.append(trial) or judge(trial),
        judgements=1,
    )
    assert len(judged) == 2
    assert chosen is min(judged, key=search.cost)


def test_budget_is_not_spent_on_splits_of_nearly_equal_loss():
    near_trials = [make_trial(2 + n, time=0.70 + 0.01 * n, db=20.0 + 0.4 * n) for n in range(4)]
    good = make_trial(9, time=0.80, db=24)
    chosen, _ = choose(FakeSearch([*near_trials, good]), good_from(22), judgements=1)
    assert chosen is good


def test_slower_split_of_nearly_equal_loss_is_not_judged():
    """The halving expects less loss of a slower split; one that has no less is not worth it."""
    judged_losses = []
    judge = good_from(30)
    untried = [make_trial(5, time=0.75, db=20.4), make_trial(9, time=0.8, db=32)]
    search = FakeSearch([make_trial(2, time=0.70, db=20.0)], untried)
    chosen, _ = choose(search, lambda trial: judged_losses.append(trial.loss) or judge(trial))
    assert chosen is untried[1]
    assert len(judged_losses) == 2


def test_measured_times_decide():
    predicted_fast, predicted_slow = (
        make_trial(0, time=0.5, db=25.0),
        make_trial(3, time=0.6, db=30),
    )

    def measure(trials):
        times = {0: 0.9, 3: 0.55}
        return [times[len(trial.in_float)] for trial in trials]

    chosen, chooser = choose(
        FakeSearch([predicted_fast, predicted_slow]), good_from(20), measure=measure
    )
    assert chosen.in_float == predicted_slow.in_float
    assert chosen.time == 0.55
    (point,) = chooser.front(chosen)  # the other one is slower and loses more
    assert point.row.is_timed


def test_front_falls_in_loss_and_holds_what_is_built():
    rng = np.random.default_rng(3)
    trials = [make_trial(n, time=0.5 + 0.02 * n, db=15.0 + n + 4 * rng.random()) for n in range(21)]
    chosen, chooser = choose(FakeSearch(trials), good_from(15))
    front = chooser.front_trials(chosen)
    times = [trial.time for trial in front]
    losses = [trial.loss for trial in front]
    assert len(front) == MAX_POINTS
    assert times == sorted(times)
    assert losses == sorted(losses, reverse=True)
    (taken,) = [split for split in chooser.front(chosen) if split.row.taken]
    assert taken.choices is chosen.choices
    assert taken.row.level == GOOD


@pytest.mark.parametrize("good_index", range(8))
def test_halving_finds_the_first_good_split(good_index):
    trials = [make_trial(n, time=0.5 + 0.05 * n, db=10.0 + n) for n in range(7)]
    search = FakeSearch(trials)
    tried = []

    def is_good_enough(trial):
        tried.append(trial)
        return trials.index(trial) >= good_index

    found = find_fastest(search, trials[0], [t.in_float for t in trials], is_good_enough)
    assert found is (trials[good_index] if good_index < 7 else None)
    assert len(tried) <= math.ceil(math.log2(8))


def test_front_calls_a_split_of_few_boxes_doubtful():
    """As the report does: else it would recommend a split whose build is doubtful as well."""
    trial = make_trial(4, time=0.6, db=26.0)
    few_boxes = TaskLoss(0.0, GOOD, "7 of 7 boxes", found=7)
    chosen, chooser = choose(FakeSearch([trial]), lambda _: ExpectedVerdict(task_loss=few_boxes))
    (split,) = chooser.front(chosen)
    assert split.row.level == DOUBTFUL


def test_size_counts_int8_weights_as_a_quarter():
    from deploy.targets import TARGETS
    from deploy.tuning.front import SplitSizes
    from deploy.tuning.prices import group_units

    constants = {
        "w1": np.ones((8, 3, 3, 3), np.float32),
        "w2": np.ones((8, 8, 3, 3), np.float32),
    }
    nodes = [
        make_node("Conv", "x w1", "a", name="/a/Conv", pads=[1] * 4),
        make_node("Conv", "a w2", "y", name="/y/Conv", pads=[1] * 4),
    ]
    model = make_model(nodes, {"x": [1, 3, 8, 8]}, {"y": None}, constants, opset=17)
    units = group_units(model, TARGETS["tensorrt"]().plan(model, ()).decisions)
    sizes = SplitSizes(model, units)
    assert sizes.of(frozenset()) == pytest.approx(0.25)
    assert sizes.of(frozenset(units.layers)) == 1.0
    assert sizes.of(frozenset(["/a/Conv"])) == pytest.approx((216 + 576 / 4) / 792)


def test_preferred_size_counts_in_place_of_time():
    int8, half = make_trial(0, time=0.7, db=20.0), make_trial(5, time=0.71, db=30.0)
    sizes = {int8.in_float: 0.25, half.in_float: 0.8}
    options = {
        "prices": None,
        "prober": None,
        "methods": [None],
        "effort": EFFORTS[1],
        "trial_by_key": {trial.in_float: trial for trial in (int8, half)},
    }
    assert Search(**options).best is half
    assert Search(**options, size_of=sizes.__getitem__).best is int8


def test_unmeasurable_splits_are_chosen_by_prediction():
    def measure(trials):
        raise BackendError("no kernel for this GPU")

    fast, slow = make_trial(0, time=0.5, db=25.0), make_trial(3, time=0.8, db=26.0)
    chosen, chooser = choose(FakeSearch([fast, slow]), good_from(20), measure=measure)
    assert chosen is fast
    assert not any(split.row.is_timed for split in chooser.front(chosen))


class FakeDevice:
    """A target whose engines say how long they take: 10 ms in float, 1 less a layer in int8."""

    name = "device"
    builds = 0

    def build(self, request):
        self.builds += 1
        engine = request.folder / "net.engine"
        engine.write_text(str(10 - len(LAYERS) + len(request.choices.float_nodes)))
        return SimpleNamespace(engine=engine, error="")

    def open(self, engine, *, threads):
        assert threads == 1  # so that CPU time is measured, also on a busy machine
        return float(engine.read_text())


def test_split_timer_builds_engines_of_splits_and_leaves_nothing(tmp_path, monkeypatch):
    def measure(sessions, samples, **options):
        return {
            name: SimpleNamespace(latency=SimpleNamespace(min=ms)) for name, ms in sessions.items()
        }

    monkeypatch.setattr(timing, "measure_latencies", measure)
    request = BuildRequest(
        subject=None, folder=tmp_path, ranges=None, feed=None, manifest={}, threads=4
    )
    all_float = Choices(float_nodes=dict.fromkeys(LAYERS, "float"))
    device = FakeDevice()
    timer = timing.SplitTimer(device, request, all_float, [{}])
    trials = [make_trial(19, time=0.5, db=20), make_trial(16, time=0.6, db=25)]
    assert timer.measure(trials) == [0.8, 0.5]
    assert timer.measure(trials[:1]) == [0.8]
    assert device.builds == 4  # the float engine once
    assert not list(tmp_path.iterdir())


def test_split_timer_says_why_an_engine_is_missing(tmp_path):
    device = FakeDevice()
    device.build = lambda request: SimpleNamespace(engine=None, error="no kernel for this GPU")
    request = BuildRequest(
        subject=None, folder=tmp_path, ranges=None, feed=None, manifest={}, threads=1
    )
    timer = timing.SplitTimer(device, request, Choices(), [{}])
    with pytest.raises(BackendError, match="no kernel for this GPU"):
        timer.measure([make_trial(0, time=0.5, db=20)])
    assert not list(tmp_path.iterdir())
