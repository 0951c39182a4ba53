"""The range method that a search settles on, and what one target's search tells the next."""

import numpy as np
import pytest

from calibrators.searches import COMPARABLE
from deploy.method import NO_CHOICES, Method
from deploy.tuning.prices import Prices, Units
from deploy.tuning.probe import Noise
from deploy.tuning.search import Search, SharedFindings
from deploy.tuning.search_options import EFFORTS, Trial

METHODS = [Method.of(name, parameters) for name, parameters in COMPARABLE]
ASYMMETRIC = {"mse": 34.0, "lp 2.4": 35.0, "lp 3": 37.4, "minmax": 37.0, "percentile 99.99": 33.0}


class FakeProber:
    """A prober of a grid on which each method has this SQNR in dB, whatever is in float."""

    def __init__(self, db_by_method):
        self._db_by_method = db_by_method
        self.tried = []

    def noises(self, choices):
        noises = []
        for trial_choices in choices:
            label = (trial_choices.method or METHODS[0]).label
            self.tried.append(label)
            noises.append(Noise({"y": np.array([10 ** (-self._db_by_method[label] / 10)])}))
        return noises


def run_search(db_by_method, methods, shared):
    """A finished search of a model with one layer."""
    units = Units(members={"/c": ("/c",)}, borders=(), layers=("/c",))
    search = Search(
        prices=Prices(units=units, unit_prices={"/c": (0.7, 1.0)}, conversions={}),
        prober=FakeProber(db_by_method),
        methods=methods,
        effort=EFFORTS[1],
        shared=shared,
    )
    search.run()
    return search


@pytest.mark.parametrize(
    ("changed_db", "settled"), [({"minmax": 37.6}, "minmax"), ({"minmax": 37.2}, "lp 3")]
)
def test_each_grid_has_its_best_method(changed_db, settled):
    shared = SharedFindings()
    first = run_search(ASYMMETRIC, METHODS, shared)
    assert first.settled_method == "lp 3"

    shared_methods = list(dict.fromkeys((METHODS[0], *shared.best_methods)))
    second = run_search(ASYMMETRIC | changed_db, shared_methods, shared)
    assert second.settled_method == settled
    assert set(second.prober.tried) == {"lp 3", "minmax"}


LAYERS = tuple(f"/c{index}" for index in range(64))


class LayerProber:
    """A prober of a grid on which some layers have a noise of 20 dB, the last ones nearly none."""

    isolated_indices = None

    def __init__(self, noisy_layers):
        self._noisy_layers = noisy_layers
        self.trial_count = 0

    def isolated_noises(self, trials, int8_nodes):
        self.trial_count += len(trials)
        return [self.noise(nodes) for nodes in int8_nodes]

    def noise(self, int8_nodes):
        power = 0.0
        for name in int8_nodes:
            quiet_power = 1e-6 if name in LAYERS[:32] else 1e-9
            power += 1e-2 if name in self._noisy_layers else quiet_power
        return Noise({"y": np.array([power])})


def measure_layers(noisy_layers, method, shared):
    """(the noisy layers that are found, number of trials) on a grid with these noisy layers."""
    units = Units(members={name: (name,) for name in LAYERS}, borders=(), layers=LAYERS)
    prober = LayerProber(noisy_layers)
    search = Search(
        prices=Prices(units=units, unit_prices=dict.fromkeys(LAYERS, (0.7, 1.0)), conversions={}),
        prober=prober,
        methods=[Method.of(method, {})],
        effort=EFFORTS[1],
        shared=shared,
    )
    int8_noise = prober.noise(LAYERS)
    base = Trial(in_float=frozenset(), choices=NO_CHOICES, noise=int8_noise, predicted_time=0.7)
    losses = search.layer_losses(base)
    most_first = sorted(losses, key=losses.__getitem__, reverse=True)
    return set(most_first[: len(noisy_layers)]), prober.trial_count


FIRST_NOISY_LAYERS = {"/c3", "/c11", "/c19", "/c27"}


def test_next_target_measures_few_layers_again():
    shared = SharedFindings()
    found, trial_count = measure_layers(FIRST_NOISY_LAYERS, "mse", shared)
    assert found == FIRST_NOISY_LAYERS
    found, next_trial_count = measure_layers(FIRST_NOISY_LAYERS, "minmax", shared)
    assert found == FIRST_NOISY_LAYERS
    assert next_trial_count <= trial_count / 2


def test_next_target_finds_another_noisy_layer():
    shared = SharedFindings()
    measure_layers(FIRST_NOISY_LAYERS, "mse", shared)
    found, _ = measure_layers({"/c40"}, "minmax", shared)
    assert found == {"/c40"}


class OutlierProber:
    """A prober of 16 layers; the first has a few huge values, which percentile clips.

    In int8 that layer loses nearly all without clipping. Every other layer has `clipped_power` of
    noise with clipping, `power` without.
    """

    isolated_indices = None

    def __init__(self, *, power, clipped_power):
        self._power = power
        self._clipped_power = clipped_power

    def noises(self, choices):
        noises = []
        for trial_choices in choices:
            int8_nodes = [name for name in LAYERS[:16] if name not in trial_choices.float_nodes]
            noises.append(self.noise(trial_choices.method, int8_nodes))
        return noises

    def isolated_noises(self, trials, int8_nodes):
        methods = [trial.method for trial in trials]
        return [self.noise(*pair) for pair in zip(methods, int8_nodes, strict=True)]

    def noise(self, method, int8_nodes):
        is_clipped = method.label == "percentile 99.99"
        power = 0.0
        for name in int8_nodes:
            if name == LAYERS[0]:
                power += self._clipped_power + 0.001 if is_clipped else 0.1
            else:
                power += self._clipped_power if is_clipped else self._power
        return Noise({"y": np.array([power])})


def search_outliers(**powers):
    """A finished search with an `OutlierProber`."""
    layers = LAYERS[:16]
    units = Units(members={name: (name,) for name in layers}, borders=(), layers=layers)
    search = Search(
        prices=Prices(units=units, unit_prices=dict.fromkeys(layers, (0.7, 1.0)), conversions={}),
        prober=OutlierProber(**powers),
        methods=[Method.of("percentile", {}), Method.of("minmax", {})],
        effort=EFFORTS[1],
    )
    search.run()
    return search


def test_a_layer_with_huge_values_does_not_choose_the_method_of_all_others():
    search = search_outliers(power=0.0002, clipped_power=0.002)
    assert search.settled_method == "minmax"
    assert search.best.in_float == {LAYERS[0]}
    all_in_int8 = [trial for trial in search.trial_by_key.values() if not trial.in_float]
    assert min(all_in_int8, key=lambda trial: trial.loss).choices.method.label != "minmax"


def test_noise_is_measured_anew_where_clipping_wins():
    search = search_outliers(power=0.01, clipped_power=0.00002)
    assert search.settled_method == "percentile 99.99"
    assert search.sensitivity.predict(()).worst < search.shared.sensitivity.predict(()).worst / 2
