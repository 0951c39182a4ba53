"""What a search costs, counted in samples that it runs: six calibrations at most."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deploy.calibration import one_pass
from deploy.calibration.reference_outputs import open_single_thread
from deploy.metrics.levels import DOUBTFUL, UNUSABLE
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS
from deploy.tuning import float_activations, probe, search_options, search_samples
from deploy.tuning.search_options import EFFORTS, SearchBudget
from tests.test_tuning import SAME, ran, save_feed, saved

# A calibration runs every image once. Of the search all is counted that runs a sample: trials,
# layers alone, ranges without the judges' samples, and the judging of what would be built.
IMAGES = 100
# one of TensorRT's two, as the search is theirs both; ONNX Runtime's budget is tried below
REPEATED = dict.fromkeys(("onnxruntime", "tensorrt", "tensorrt-rtx"), pytest.mark.release)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """30 layers that int8 hurts differently: alone in float each wins a little, for its price."""
    rng = np.random.default_rng(1)
    constants, nodes, tensor = {}, [], "x"
    for number in range(31):
        sizes = np.where(np.arange(8) == 0, 1.0 + number % 7, 1.0).reshape(1, 8, 1, 1)
        weights = rng.normal(0, 0.09, (8, 8 if number else 3, 3, 3))
        constants |= {f"w{number}": weights, f"s{number}": sizes}
        end = "y" if number == 30 else f"c{number}"
        nodes.append(("Conv", f"{tensor} w{number}", end, SAME))
        nodes.append(("Tanh", end, f"t{number}", {}))
        nodes.append(("Mul", f"t{number} s{number}", f"m{number}", {}))
        tensor = f"m{number}"
    return saved(tmp_path_factory.mktemp("deep"), "deep", nodes[:-2], constants)


@pytest.fixture(scope="module")
def search_deep(deep, tmp_path_factory):
    """A build of it, for many samples."""
    feed = save_feed(tmp_path_factory.mktemp("feed"), IMAGES)
    arguments = ("--images", feed, "--duration", 0, "--accept", "--threads", 1)
    return lambda *extra_arguments: ran(
        deep, *arguments, *extra_arguments, out=tmp_path_factory.mktemp("deep") / "o"
    )


@pytest.fixture
def runs(monkeypatch):
    """Samples that were run, by what ran them."""
    count_by_runner = Counter()

    def counting(name):
        class Counting(OrtSession):
            def run(self, feed):
                count_by_runner[name] += 1
                return super().run(feed)

        return Counting

    def observing(observations, samples, **options):
        drawn = (count_by_runner.update(unseen=1) or sample for sample in samples)
        return observe(observations, drawn, **options)

    observe = one_pass.observe
    monkeypatch.setattr(search_samples, "observe", observing)
    for module in (probe, float_activations):
        monkeypatch.setattr(module, "OrtSession", counting(module.__name__.rpartition(".")[2]))

    class CountingJudge:
        def __init__(self, *arguments, **options):
            self.session = open_single_thread(*arguments, **options)
            self.inputs = self.session.inputs
            self.outputs = self.session.outputs

        def run(self, feed):
            count_by_runner["search_samples"] += 1
            return self.session.run(feed)

    monkeypatch.setattr(search_samples, "open_single_thread", CountingJudge)
    return count_by_runner


@pytest.fixture
def never_usable(monkeypatch):
    """Whatever is judged is doubtful on a few samples, and unusable on all: the dearest case."""

    def levels(accuracy, _):
        yield (UNUSABLE if accuracy.outputs and judged_all[-1] else DOUBTFUL), "as the test has it"

    def noted(self, max_samples, **options):
        judged_all.append(max_samples == IMAGES)
        return compare(self, max_samples, **options)

    judged_all, compare = [], search_samples.GrowingComparison.compare
    monkeypatch.setattr(search_samples.GrowingComparison, "compare", noted)
    monkeypatch.setattr(search_samples, "judge_accuracy", levels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=REPEATED.get(target, ())) for target in TARGETS],
)
def test_a_search_costs_six_calibrations(target, search_deep, runs, never_usable, monkeypatch):
    counted, make_budget = [], SearchBudget.for_feed
    monkeypatch.setattr(
        SearchBudget, "for_feed", lambda *a: counted.append(make_budget(*a)) or counted[-1]
    )
    monkeypatch.setattr(search_options, "_SMALL_MODEL_PRODUCTS", 0)  # as of a large model
    (row,) = search_deep("--target", target).report["targets"]
    assert row["search"]["probes"] > 40  # as many alone as it may try, and others whole
    # splits are judged on all samples, none twice: each on 12, then on 48, then on the other 52
    assert runs["search_samples"] >= IMAGES
    assert runs["search_samples"] % IMAGES == 0
    total = sum(runs.values())
    assert total <= 6 * IMAGES
    assert [budget.spent for budget in counted] == [total]  # what is not counted is not bounded


@pytest.mark.parametrize("products, factor", [(1e9, 1), (4e7, 2), (1.0, 4)])
def test_small_model_has_a_larger_budget(products, factor):
    budget = SearchBudget.for_feed(5, 60, products)
    assert budget.holds(factor * 500)
    assert not budget.holds(factor * 500 + 1)


@pytest.mark.slow
@pytest.mark.release
def test_spent_budget_stops_split_comparison(search_deep, runs, never_usable, monkeypatch):
    """Of four calibrations the trials take most; the first choice is judged all the same."""
    monkeypatch.setitem(EFFORTS, 1, replace(EFFORTS[1], calibrations=4))
    monkeypatch.setattr(search_options, "_SMALL_MODEL_PRODUCTS", 0)  # as of a large model
    built = search_deep()
    assert built.code == 0
    assert runs["search_samples"] == IMAGES
    assert sum(runs.values()) <= 4 * IMAGES
    (row,) = built.report["targets"]
    (taken,) = (split for split in row["search"]["front"] if split.get("taken"))
    assert taken["level"] == "unusable"
