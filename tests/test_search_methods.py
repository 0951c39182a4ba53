"""The range method that a search settles on, and what it tells the search of another target."""

import numpy as np
import pytest

from calibrators.searches import COMPARABLE
from deploy.method import Method
from deploy.tuning.prices import Prices, Units
from deploy.tuning.probe import Noise
from deploy.tuning.search import Search, SharedFindings
from deploy.tuning.search_options import EFFORTS

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
        prices=Prices(units=units, pairs={"/c": (0.7, 1.0)}, conversions={}),
        prober=FakeProber(db_by_method),
        methods=methods,
        effort=EFFORTS[1],
        shared=shared,
    )
    search.run()
    search.share_findings()
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
