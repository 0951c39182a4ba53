"""`calib8 ascend auto` by measured gain: its steps on made losses, and the command."""

import json

import numpy as np
import onnx
import pytest

from deploy.targets.ascend.auto_layers import CONFIGURED, config_of
from deploy.targets.ascend.auto_losses import FINAL, HISTORY, RANKING
from deploy.targets.ascend.autocalibrate import ByGain
from deploy.targets.ascend.config import read_config
from deploy.targets.ascend.record import read_record

LAYERS = [f"l{n}" for n in range(12)]


class Made:
    """Losses that add up, a layer's own under each search; what was asked is noted.

    `near` is what each layer is nearest by, and `taken` the share that correcting biases takes.
    """

    def __init__(self, own, budget, *, full=1.0, near=None, taken=0.0):
        self.own, self.budget, self.full = own, budget, full
        self.near, self.taken = near, taken
        self.asked, self.corrected = [], False

    def nearer(self, variants):
        self.corrected = True
        return self.near or dict.fromkeys(LAYERS, next(iter(variants)))

    def plain(self):
        self.corrected = False

    def rounded(self, chosen, records, worst):
        return {}

    def hold(self):
        self.asked.append("hold")

    def of(self, forms):
        self.asked += [len(form) for form in forms]
        return [self._loss(form) for form in forms]

    def judge(self, records):
        loss = self.full * self._loss(records)
        return loss <= self.budget, loss

    def _loss(self, form):
        plain = sum(self.own[name][search] for name, search in form.items())
        return plain * (1 - self.taken * self.corrected)


def variants(*names):
    """Records that are the search's name, so that losses can tell them apart."""
    return {name: dict.fromkeys(LAYERS, name) for name in names}


def searched(own, budget, *names, **how):
    losses = Made(own, budget, **how)
    more = {"dmq 0.5": {"l2": "dmq 0.5"}} if how.get("near") else {}
    work = ByGain(variants=variants(*names) | more, losses=losses, budget=budget)
    return work.run(), work, losses


def test_the_layers_that_lose_go_to_float_and_no_others():
    own = {name: {"a": 1e-5} for name in LAYERS}
    own["l3"]["a"], own["l7"]["a"] = 0.1, 0.2
    chosen, work, _ = searched(own, 0.01, "a")
    assert set(LAYERS) - set(chosen) == {"l3", "l7"}
    assert [name for name, _ in sorted(work.ranking.items(), key=lambda e: -e[1])][:1] == ["l7"]


def test_the_best_search_begins_and_a_layer_takes_another_before_float():
    own = {name: {"a": 1e-5, "b": 1e-3} for name in LAYERS}
    own["l6"] = {"a": 0.02, "b": 1e-5}  # all in a lose 0.0201, all in b 0.011
    chosen, _, _ = searched(own, 0.01, "a", "b")
    assert len(chosen) == len(LAYERS) and chosen["l6"] == "b" and "a" in chosen.values()
    own["l6"] = {"a": 0.005, "b": 1e-5}  # now all in a lose 0.0051
    chosen, _, _ = searched(own, 0.004, "a", "b")
    assert chosen == {name: "b" if name == "l6" else "a" for name in LAYERS}


def test_a_budget_that_holds_at_once_looks_at_nothing_else():
    _, work, losses = searched({name: {"a": 0.0} for name in LAYERS}, 0.01, "a")
    assert losses.asked == ["hold", 12] and len(work.history) == 1 and not work.ranking


def test_no_layer_is_left_where_none_can_stay():
    chosen, work, _ = searched({name: {"a": 1.0} for name in LAYERS}, 0.01, "a")
    assert chosen == {} and work.records == {}


def test_biases_are_corrected_and_each_layer_takes_its_own_search_before_float():
    own = {name: {"a": 0.002, "b": 0.002, "dmq 0.5": 0.001} for name in LAYERS}
    near = {name: "dmq 0.5" if name == "l2" else "b" for name in LAYERS}
    chosen, work, losses = searched(own, 0.01, "a", "b", near=near, taken=0.6)
    assert chosen == near and losses.corrected  # 0.024 in all, 0.0092 so
    assert len(work.history) == 2
    near = dict.fromkeys(LAYERS, "b")
    chosen, _, losses = searched(own, 0.01, "a", "b", near=near, taken=-0.1)
    assert not losses.corrected and len(chosen) == 5  # more was lost so, and it is not kept


def test_a_search_that_a_layer_lacks_is_not_tried_for_it():
    """Balancing helps the one layer that it can be done to, and begins nowhere."""
    own = {name: {"a": 1e-5, "dmq 0.5": 0.0} for name in LAYERS}
    own["l6"] = {"a": 0.02, "dmq 0.5": 1e-5}
    losses = Made(own, 0.01)
    searches = {"a": dict.fromkeys(LAYERS, "a"), "dmq 0.5": {"l6": "dmq 0.5"}}
    work = ByGain(variants=searches, losses=losses, budget=0.01)
    assert work.run() == {name: "dmq 0.5" if name == "l6" else "a" for name in LAYERS}
    assert losses.asked[:2] == ["hold", 12]


def test_all_images_have_the_last_word():
    """On the held images half as much is lost as on all of them."""
    own = {name: {"a": 0.001} for name in LAYERS}
    chosen, work, losses = searched(own, 0.01, "a", full=2.0)
    assert losses.judge(work.records)[0] and 4 <= len(chosen) <= 5


def test_layers_that_are_not_missed_go_back():
    """Two layers that make good for each other: each alone costs, both together do not."""

    class Cancelling(Made):
        def _loss(self, form):
            both = ("l0" in form) == ("l1" in form)
            return super()._loss(form) + (0.0 if both else 0.02)

    own = {name: {"a": 1e-4} for name in LAYERS}
    own["l2"]["a"] = 0.05
    losses = Cancelling(own, 0.01)
    chosen = ByGain(variants=variants("a"), losses=losses, budget=0.01).run()
    assert set(LAYERS) - set(chosen) == {"l2"}


def test_layers_whose_errors_cancel_go_to_float_together():
    """Each of two layers alone loses much, both together nothing more than in their sum."""

    class Cancelling(Made):
        def _loss(self, form):
            return super()._loss(form) + abs(("l0" in form) * 0.5 - ("l1" in form) * 0.49)

    own = {name: {"a": 1e-4} for name in LAYERS}
    losses = Cancelling(own, 0.005)
    chosen = ByGain(variants=variants("a"), losses=losses, budget=0.005).run()
    assert set(LAYERS) - set(chosen) == {"l0", "l1"}


def test_a_form_is_run_once():
    own = {name: {"a": 0.001, "b": 0.002} for name in LAYERS}
    losses = Made(own, 0.004)
    seen = []
    plain = losses.of
    losses.of = lambda forms: seen.extend(frozenset(f.items()) for f in forms) or plain(forms)
    ByGain(variants=variants("a", "b"), losses=losses, budget=0.004).run()
    assert len(seen[2:]) == len(set(seen[2:]))  # the first two are the searches themselves


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, np.random.default_rng(11).normal(size=(6, 3, 16, 16)).astype(np.float32))
    return path


@pytest.fixture(autouse=True)
def few_iterations(monkeypatch):
    """Of AdaRound, which `tests/test_ascend_rounder.py` is about."""
    monkeypatch.setattr("deploy.targets.ascend.auto_layers.ITERATIONS", 10)


def auto(run, small_cnn, data, out, *words):
    return run("ascend", "auto", small_cnn, "--images", data, "-o", out, *words)


def test_the_command_says_what_it_chose(run, small_cnn, data, tmp_path):
    code, out, err = auto(run, small_cnn, data, tmp_path, "--max-loss", "0.00008")
    assert code == 0, err
    config = read_config((tmp_path / FINAL).read_text())
    kept = set(config.enabled())
    assert f"{len(kept)} layers in int8" in out and kept < set(config.layers)
    history = json.loads((tmp_path / HISTORY).read_text())
    assert history[-1]["metric_eval"][0] is True or history[-2]["metric_eval"][0] is True
    gains = json.loads((tmp_path / RANKING).read_text())
    assert [g for _, g in gains] == sorted((g for _, g in gains), reverse=True)
    made = onnx.load(tmp_path / "small_cnn_deploy_model.onnx")
    assert sum(n.op_type == "AscendDequant" for n in made.graph.node) == len(kept)


@pytest.mark.slow
def test_the_config_that_it_leaves_builds_such_a_model(run, small_cnn, data, tmp_path):
    code, _, _ = auto(run, small_cnn, data, tmp_path / "a", "--max-loss", "0.00008")
    words = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", tmp_path / "b")
    config = ("--ascend-config", tmp_path / "a" / FINAL)
    again, _, err = run("build", small_cnn, "--images", data, *words, *config)
    assert (code, again) == (0, 0), err
    name = "small_cnn_config.json"
    assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    # observed anew with the weights of these layers alone quantized, so near and not equal
    before, after = (
        read_record((tmp_path / folder / "small_cnn_record.txt").read_text()) for folder in "ab"
    )
    assert list(before) == list(after)
    for name, one in before.items():
        assert after[name].scale_d == pytest.approx(one.scale_d, rel=0.02)


@pytest.mark.slow
def test_results_do_not_depend_on_threads(run, small_cnn, data, tmp_path):
    for threads in (1, 3):
        words = ("--max-loss", "0.00008", "--threads", threads)
        assert auto(run, small_cnn, data, tmp_path / str(threads), *words)[0] == 0
    for name in (FINAL, HISTORY, RANKING, "small_cnn_record.txt"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()


def test_a_configuration_of_the_user_s_is_the_only_search(run, small_cnn, data, tmp_path):
    (tmp_path / "my.cfg").write_text("batch_num: 4\ncommon_config { hfmg_quantize { } }\n")
    words = ("--ascend-config", tmp_path / "my.cfg", "--max-loss", "0.5")
    code, _, err = auto(run, small_cnn, data, tmp_path / "o", *words)
    assert code == 0, err
    config = read_config((tmp_path / "o" / FINAL).read_text())
    assert {one.activation.act_algo for one in config.enabled().values()} == {"hfmg"}


def test_a_config_names_the_search_of_every_layer(small_cnn):
    from deploy.frontends import load
    from deploy.targets.ascend.config import default_config
    from deploy.targets.ascend.layers import find_layers, name_nodes

    config = default_config(find_layers(name_nodes(load(small_cnn).model)))
    first, second, *_ = config.layers
    made = config_of(config, {first: "hfmg", second: "nothing clipped"})
    assert set(made.enabled()) == {first, second}
    assert made.layers[first].activation.act_algo == "hfmg"
    assert made.layers[second].activation.search_range == (1.0, 1.3)
    assert config_of(config, dict.fromkeys(config.layers, CONFIGURED)) == config
