"""What the default search costs, counted in samples that it runs: five calibrations at most.

A calibration runs every image once. Of the search all is counted that runs a sample: trials, layers
alone, ranges without the judges' samples, and the judging of what would be built.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deploy.calibration import one_pass
from deploy.metrics.levels import DOUBTFUL, UNUSABLE
from deploy.runtimes.ort import OrtSession
from deploy.tuning import downstream, probe, search_samples
from deploy.tuning.search_options import EFFORTS, Allowance
from tests.test_tuning import SAME, ran, saved

IMAGES = 100
MOST = 5 * IMAGES


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    path = tmp_path_factory.mktemp("feed") / "feed.npy"
    np.save(path, np.random.default_rng(0).normal(size=(IMAGES, 3, 12, 12)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """30 layers that int8 hurts differently: alone in float each wins a little, for its price."""
    rng = np.random.default_rng(1)
    constants, nodes, before = {}, [], "x"
    for number in range(31):
        first, last = number == 0, number == 30
        sizes = np.where(np.arange(8) == 0, 1.0 + number % 7, 1.0).reshape(1, 8, 1, 1)
        weights = rng.normal(0, 0.09, (8, 3 if first else 8, 3, 3))
        constants |= {f"w{number}": weights, f"s{number}": sizes}
        end = "y" if last else f"c{number}"
        nodes.append(("Conv", f"{before} w{number}", end, SAME))
        nodes.append(("Tanh", end, f"t{number}", {}))
        nodes.append(("Mul", f"t{number} s{number}", f"m{number}", {}))
        before = f"m{number}"
    return saved(tmp_path_factory.mktemp("deep"), "deep", nodes[:-2], constants)


@pytest.fixture
def runs(monkeypatch):
    """Samples that were run, by what ran them."""
    found = Counter()

    def counting(name):
        class Counting(OrtSession):
            def run(self, feed):
                found[name] += 1
                return super().run(feed)

        return Counting

    def observing(wanted, samples, **words):
        def drawn():
            for sample in samples:
                found["unseen"] += 1
                yield sample

        return observe(wanted, drawn(), **words)

    observe = one_pass.observe
    monkeypatch.setattr(search_samples, "observe", observing)
    for module in (probe, downstream, search_samples):
        monkeypatch.setattr(module, "OrtSession", counting(module.__name__.rpartition(".")[2]))
    return found


@pytest.fixture
def never_usable(monkeypatch):
    """Whatever is judged is doubtful on a few samples, and unusable on all: the dearest case."""

    def levels(found, _):
        yield (UNUSABLE if found.outputs and asked[-1] else DOUBTFUL), "as the test has it"

    asked = []
    on = search_samples.Judged.on

    def noted(self, most, **words):
        asked.append(most == IMAGES)
        return on(self, most, **words)

    monkeypatch.setattr(search_samples.Judged, "on", noted)
    monkeypatch.setattr(search_samples, "of_accuracy", levels)


def spent(monkeypatch):
    """What the search itself counted."""
    made = []
    of = Allowance.of

    def noted(*args):
        made.append(of(*args))
        return made[-1]

    monkeypatch.setattr(Allowance, "of", noted)
    return made


TARGETS = ["onnxruntime", "tensorrt", "ascend"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_default_search_costs_five_calibrations_at_most(
    target, deep, feed, runs, never_usable, tmp_path, monkeypatch
):
    counted = spent(monkeypatch)
    words = ("--images", feed, "--duration", 0, "--target", target, "--threads", 1, "--accept")
    built = ran(deep, *words, out=tmp_path / "o")
    (row,) = built.report["targets"]
    assert row["search"]["probes"] > 24  # as many alone as it may try, and others whole
    assert runs["judging"] > IMAGES  # more than one split was judged on all samples
    total = sum(runs.values())
    assert total <= MOST
    assert [one.ran for one in counted] == [total]  # what is not counted is not bounded


@pytest.mark.slow
def test_no_further_split_is_judged_where_the_search_has_cost_what_it_may(
    deep, feed, runs, never_usable, tmp_path, monkeypatch
):
    """Of three calibrations the trials take half, and the judging of the first choice one."""
    monkeypatch.setitem(EFFORTS, 1, replace(EFFORTS[1], calibrations=3))
    words = ("--images", feed, "--duration", 0, "--threads", 1, "--accept")
    built = ran(deep, *words, out=tmp_path / "o")
    assert built.code == 0 and runs["judging"] == IMAGES
    assert sum(runs.values()) <= 3 * IMAGES
    (row,) = built.report["targets"]
    assert "would be unusable" in " ".join(row["notes"])


@pytest.mark.slow
def test_no_sample_is_judged_twice_for_one_model(deep, feed, runs, never_usable, tmp_path):
    ran(deep, "--images", feed, "--duration", 0, "--accept", out=tmp_path / "o")
    assert runs["judging"] == 3 * IMAGES  # each model on 48, then on the other 52
