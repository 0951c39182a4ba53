"""`calib8 ascend auto`: by gain, by each layer's own search, with AdaRound."""

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from calibrators.errors import CalibrationError
from deploy.calibration.observation import ObservedStatistics
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import RecordPlan, calibrate_amct
from deploy.targets.ascend.auto_layers import (
    CONFIGURED,
    Rounder,
    config_of,
    corrected_biases,
    with_biases,
)
from deploy.targets.ascend.auto_losses import (
    FINAL,
    HISTORY,
    RANKING,
    _best,
    choose_searches,
    own_errors,
)
from deploy.targets.ascend.autocalibrate import GainSearch
from deploy.targets.ascend.config import default_config, read_config
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import find_layers, name_nodes
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import read_record
from tests.vendor_models import build_net, save_net

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
    work = GainSearch(variants=variants(*names) | more, losses=losses, budget=budget)
    return work.run(), work, losses


def test_a_layer_that_loses_takes_another_search_before_float():
    own = {name: {"a": 1e-5} for name in LAYERS}
    own["l3"]["a"], own["l7"]["a"] = 0.1, 0.2
    chosen, work, _ = searched(own, 0.01, "a")
    assert set(LAYERS) - set(chosen) == {"l3", "l7"}
    assert [name for name, _ in sorted(work.ranking.items(), key=lambda e: -e[1])][:1] == ["l7"]
    own = {name: {"a": 1e-5, "b": 1e-3} for name in LAYERS}
    own["l6"] = {"a": 0.02, "b": 1e-5}  # all in a lose 0.0201, all in b 0.011
    chosen, _, _ = searched(own, 0.01, "a", "b")
    assert len(chosen) == len(LAYERS) and chosen["l6"] == "b" and "a" in chosen.values()
    own["l6"] = {"a": 0.005, "b": 1e-5}  # now all in a lose 0.0051
    chosen, _, _ = searched(own, 0.004, "a", "b")
    assert chosen == {name: "b" if name == "l6" else "a" for name in LAYERS}


def test_a_budget_that_holds_at_once_or_never():
    _, work, losses = searched({name: {"a": 0.0} for name in LAYERS}, 0.01, "a")
    assert losses.asked == ["hold", 12] and len(work.history) == 1 and not work.ranking
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
    work = GainSearch(variants=searches, losses=losses, budget=0.01)
    assert work.run() == {name: "dmq 0.5" if name == "l6" else "a" for name in LAYERS}
    assert losses.asked[:2] == ["hold", 12]


def test_all_images_have_the_last_word():
    """On the held images half as much is lost as on all of them."""
    own = {name: {"a": 0.001} for name in LAYERS}
    chosen, work, losses = searched(own, 0.01, "a", full=2.0)
    assert losses.judge(work.records)[0] and 4 <= len(chosen) <= 5


def test_layers_whose_errors_cancel_go_together():
    """Two layers that make good for each other: each alone costs, both together do not."""

    class Cancelling(Made):
        def _loss(self, form):
            both = ("l0" in form) == ("l1" in form)
            return super()._loss(form) + (0.0 if both else 0.02)

    own = {name: {"a": 1e-4} for name in LAYERS}
    own["l2"]["a"] = 0.05
    losses = Cancelling(own, 0.01)
    chosen = GainSearch(variants=variants("a"), losses=losses, budget=0.01).run()
    assert set(LAYERS) - set(chosen) == {"l2"}

    # Each of two layers alone loses much, both together nothing more than in their sum.
    class Cancelling(Made):
        def _loss(self, form):
            return super()._loss(form) + abs(("l0" in form) * 0.5 - ("l1" in form) * 0.49)

    own = {name: {"a": 1e-4} for name in LAYERS}
    losses = Cancelling(own, 0.005)
    chosen = GainSearch(variants=variants("a"), losses=losses, budget=0.005).run()
    assert set(LAYERS) - set(chosen) == {"l0", "l1"}


def test_a_form_is_run_once():
    own = {name: {"a": 0.001, "b": 0.002} for name in LAYERS}
    losses = Made(own, 0.004)
    seen = []
    plain = losses.of
    losses.of = lambda forms: seen.extend(frozenset(f.items()) for f in forms) or plain(forms)
    GainSearch(variants=variants("a", "b"), losses=losses, budget=0.004).run()
    assert len(seen[2:]) == len(set(seen[2:]))  # the first two are the searches themselves


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, np.random.default_rng(11).normal(size=(6, 3, 16, 16)).astype(np.float32))
    return path


@pytest.fixture(autouse=True)
def few_iterations(monkeypatch):
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


SIZES = np.logspace(0, 2.5, 8)  # how much larger a channel is than the first


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A depthwise layer whose channels differ 300 times, without a bias, and layers behind it."""
    rng = np.random.default_rng(3)

    def tensor(name, *shape, spread=1.0):
        values = rng.normal(scale=spread, size=shape).astype(np.float32)
        return numpy_helper.from_array(values, name)

    small = (1 / SIZES).reshape(8, 1, 1, 1).astype(np.float32)
    weights = [
        numpy_helper.from_array(np.float32(rng.normal(size=(8, 1, 3, 3))) * small, "w1"),
        tensor("w2", 6, 8, 1, 1), tensor("shared", 6), tensor("w3", 6, 6, 1, 1),
        tensor("w4", 150, 5, spread=0.1), tensor("b4", 5),
    ]  # fmt: skip
    nodes = [
        ("Conv", "x w1", "d", "dw", {"group": 8}),
        ("HardSwish", "d", "h"),
        ("Conv", "h w2 shared", "c2", "one"),
        ("HardSwish", "c2", "h2"),
        ("Conv", "h2 w3 shared", "c3", "two"),
        ("MaxPool", "c3", "p", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Flatten", "p", "f"),
        ("MatMul", "f w4", "m", "mat"),
        ("Add", "b4 m", "y", "add"),
    ]
    path = tmp_path_factory.mktemp("uneven") / "uneven.onnx"
    return save_net(path, nodes, {"x": ["n", 8, 12, 12]}, {"y": ["n", 5]}, weights, opset=14)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    rng = np.random.default_rng(5)
    x = np.abs(rng.normal(size=(12, 8, 12, 12))) * SIZES.reshape(1, 8, 1, 1)
    path = tmp_path_factory.mktemp("images") / "x.npy"
    np.save(path, x.astype(np.float32))
    return path


@pytest.fixture(scope="module")
def parts(uneven, images):
    """(model, its layers, records by search, samples)."""
    model = name_nodes(onnx.load(uneven))
    graph = find_layers(model)
    samples = [{"x": row[None]} for row in np.load(images)]
    config = default_config(graph, batch_num=len(samples))

    def records(search):
        own = config_of(config, dict.fromkeys(graph.layers, search))
        return calibrate_amct(model, graph, samples, own).records

    found = {search: records(search) for search in ("as configured", "hfmg", "dmq 0.5")}
    return model, graph, found, samples


def test_a_depthwise_layer_of_uneven_channels_is_balanced(parts):
    model, graph, records, samples = parts
    chosen = choose_searches(model, graph, records, samples[:4], threads=2)
    assert list(chosen) == list(graph.layers)
    assert chosen["dw"] == "dmq 0.5"  # each channel keeps its weights' steps, and wins input's
    errors = own_errors(
        model, quantize_layers(model, graph, records["dmq 0.5"]), samples[:4], threads=1
    )
    plain = quantize_layers(model, graph, records["as configured"])
    assert errors["dw"] < 0.1 * own_errors(model, plain, samples[:4], threads=1)["dw"]


def test_dmq_must_halve_the_error_as_it_costs_an_operator():
    assert _best({"as configured": 1.0, "hfmg": 0.9, "dmq 0.5": 0.5}) == "hfmg"
    assert _best({"as configured": 1.0, "hfmg": 0.9, "dmq 0.5": 0.44}) == "dmq 0.5"
    assert _best({"as configured": 1.0, "hfmg": 1.0}) == "as configured"


def channel_means(model, samples, tensors):
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.output[:]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    session = OrtSession.open(made, threads=1)
    runs = [session.run(sample) for sample in samples]
    rows = {t: np.concatenate([np.moveaxis(run[t], 1, -1) for run in runs]) for t in tensors}
    return {t: value.reshape(-1, value.shape[-1]).mean(axis=0) for t, value in rows.items()}


def test_corrected_layers_keep_the_means_of_their_channels(parts):
    """Behind each other too, with a bias, without one, with a shared one, and in an Add."""
    model, graph, records, samples = parts
    own = records["as configured"]
    biases = corrected_biases(model, graph, own, samples, threads=2)
    assert list(biases) == ["dw", "one", "two", "mat"] and biases["dw"].shape == (8,)
    changed = with_biases(model, graph, biases)
    onnx.checker.check_model(changed)
    tensors = ["d", "c2", "c3", "y"]
    wanted = channel_means(model, samples, tensors)

    def moved(form):
        layers = quantize_layers(form, find_layers(form), own)
        found = channel_means(fake_quant_model(form, layers), samples, tensors)
        return {t: np.abs(found[t] - wanted[t]).max() for t in tensors}

    before, after = moved(model), moved(changed)
    assert all(after[t] < 0.3 * before[t] for t in tensors), (before, after)
    alone = corrected_biases(model, graph, own, samples, threads=1)
    assert all((alone[name] == one).all() for name, one in biases.items())


def auto_uneven(run, model, images, out, *words):
    return run("ascend", "auto", model, "--images", images, "-o", out, *words)


def test_the_command_balances_and_corrects_before_it_leaves_a_layer(run, uneven, images, tmp_path):
    code, said, err = auto_uneven(run, uneven, images, tmp_path, "--max-loss", "1e-4")
    assert code == 0, err
    assert "4 layers in int8, 0 in float" in said
    assert "DMQ balances 1 layers, with a multiplication more in front of each, by the" in said
    assert "largest values of 12 images." in said
    assert "biases of 4 layers are corrected" in said and "uneven_corrected.onnx" in said
    layers = read_config((tmp_path / FINAL).read_text()).layers
    assert layers["dw"].dmq_balancer_param and not layers["one"].dmq_balancer_param
    deployed = onnx.load(tmp_path / "uneven_deploy_model.onnx")
    assert [n.name for n in deployed.graph.node if n.op_type == "Mul"] == ["dw.mul"]


def test_the_corrected_model_and_the_record_are_what_was_judged(
    run, command, uneven, images, tmp_path
):
    assert auto_uneven(run, uneven, images, tmp_path, "--max-loss", "1e-4")[0] == 0
    words = (tmp_path / "uneven_corrected.onnx", tmp_path / "uneven_record.txt")
    command("ascend", "deploy", *words, "-o", tmp_path / "again")
    first = onnx.load(tmp_path / "uneven_fake_quant_model.onnx")
    second = onnx.load(tmp_path / "again" / "uneven_corrected_fake_quant_model.onnx")
    samples = [{"x": row[None]} for row in np.load(images)]
    for sample in samples:
        a, b = (OrtSession.open(m, threads=1).run(sample)["y"] for m in (first, second))
        np.testing.assert_array_equal(a, b)


def test_a_budget_that_holds_needs_no_dmq_and_a_batch_is_that_of_dmq(run, uneven, images, tmp_path):
    code, said, err = auto_uneven(run, uneven, images, tmp_path, "--max-loss", "0.5")
    assert code == 0, err
    assert "corrected" not in said and "DMQ" not in said
    assert not (tmp_path / "uneven_corrected.onnx").exists()
    code, said, err = auto_uneven(
        run, uneven, images, tmp_path, "--max-loss", "1e-4", "--amct-batch", 3
    )
    assert code == 0, err
    assert "largest values of 3 images." in said
    assert read_config((tmp_path / FINAL).read_text()).batch_num == 4


BUDGET = 4e-5  # the best searches lose 6e-5 with corrected biases, 3.1e-5 with AdaRound too


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """A Gemm whose one scale is coarse for most of its rows, on inputs that go together."""
    rng = np.random.default_rng(22)
    weight = rng.uniform(-1, 1, size=(10, 192)) * np.logspace(0, -1.5, 10)[:, None]
    weights = {
        "w1": rng.normal(scale=0.3, size=(3, 3, 1, 1)), "b1": rng.normal(size=3),
        "w2": weight, "b2": np.zeros(10),
    }  # fmt: skip
    nodes = [
        ("Conv", "x w1 b1", "c", "first"),
        ("HardSwish", "c", "h"),
        ("AveragePool", "h", "p", "pool", {"kernel_shape": [1, 1]}),
        ("Flatten", "p", "f"),
        ("Gemm", "f w2 b2", "y", "fc", {"transB": 1}),
    ]
    path = tmp_path_factory.mktemp("coarse") / "coarse.onnx"
    save_net(path, nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 10]}, weights, opset=14)
    flat = rng.normal(size=(32, 3, 2, 2)).repeat(4, axis=2).repeat(4, axis=3)
    np.save(
        path.with_suffix(".npy"), (flat + 0.3 * rng.normal(size=(32, 3, 8, 8))).astype(np.float32)
    )
    return path


@pytest.fixture
def auto_rounded(coarse, command, tmp_path, monkeypatch):
    """(folder, budget, words) -> what was said, and the folder."""
    monkeypatch.setattr("deploy.targets.ascend.auto_layers.ITERATIONS", 1000)

    def call(folder="o", budget=BUDGET, *words):
        out = tmp_path / folder
        images = ("--images", coarse.with_suffix(".npy"), "-o", out, "--max-loss", budget)
        said = command("ascend", "auto", coarse, *images, *words)
        return said, out

    return call


def test_adaround_keeps_a_layer_in_int8_that_would_go_to_float(auto_rounded):
    said, out = auto_rounded()
    assert "3 layers in int8, 0 in float." in said and "AdaRound of 2 layers to try:" in said
    assert "AdaRound rounds the weights of" in said and "modified_model.onnx is the float" in said
    losses = [entry["metric_eval"][1] for entry in json.loads((out / HISTORY).read_text())]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[-2]
    weights = {
        name: one.weight for name, one in read_config((out / FINAL).read_text()).layers.items()
    }
    assert weights["fc"].wts_algo == "ada_quantize" and weights["fc"].num_iteration == 1000
    assert weights["pool"].wts_algo == "arq_quantize"


def outputs(path, images):
    session = OrtSession.open(onnx.load(path), threads=1)
    return np.concatenate([session.run({"x": x[None]})["y"] for x in np.load(images)])


@pytest.mark.slow
def test_the_modified_model_has_both_and_with_the_record_gives_the_same(
    auto_rounded, coarse, command, tmp_path
):
    said, out = auto_rounded()
    assert "The biases of 2 layers are corrected" in said and "with the configuration." in said
    assert "that has them, and the corrected biases, and goes with the record." in said
    record, wanted = out / "coarse_record.txt", out / "coarse_fake_quant_model.onnx"
    images = coarse.with_suffix(".npy")
    for name, same in (("modified_model", True), ("corrected", False)):
        words = (out / f"coarse_{name}.onnx", record, "-o", tmp_path / name)
        said = command("ascend", "deploy", *words)
        assert ("AdaRound" in said) != same  # it says that it rounds to nearest
        made = tmp_path / name / f"coarse_{name}_fake_quant_model.onnx"
        found = outputs(made, images) == outputs(wanted, images)
        assert found.all() == same
    deployed = (
        tmp_path / "modified_model" / "coarse_modified_model_deploy_model.onnx"
    ).read_bytes()
    assert deployed == (out / "coarse_deploy_model.onnx").read_bytes()


@pytest.mark.slow
def test_threads_change_no_byte(auto_rounded):
    _, one = auto_rounded("one", BUDGET, "--threads", 1)
    _, three = auto_rounded("three", BUDGET, "--threads", 3)
    names = sorted(path.name for path in one.iterdir())
    assert {FINAL, HISTORY, RANKING, "coarse_modified_model.onnx"} <= set(names)
    assert names == sorted(path.name for path in three.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (three / name).read_bytes(), name


def test_adaround_is_not_tried_where_a_budget_or_a_configuration_rules_it_out(
    auto_rounded, monkeypatch, tmp_path
):
    monkeypatch.setattr(Rounder, "rounded", lambda *_: pytest.fail("AdaRound"))
    said, out = auto_rounded("o", 7e-5)
    assert "3 layers in int8, 0 in float." in said
    assert not (out / "coarse_modified_model.onnx").exists()
    (tmp_path / "my.cfg").write_text("batch_num: 8\n")
    said, _ = auto_rounded("o", BUDGET, "--ascend-config", tmp_path / "my.cfg")
    assert "AdaRound" not in said


def test_without_adaround_or_where_it_fails_the_search_goes_on(auto_rounded, monkeypatch):
    def fails(*_):
        raise CalibrationError("AdaRound's loss must be finite")

    monkeypatch.setattr(Rounder, "rounded", fails)
    said, _ = auto_rounded()
    assert "AdaRound is left out: AdaRound's loss must be finite" in said
    monkeypatch.setattr(Rounder, "able", lambda *_: [])
    said, _ = auto_rounded()
    assert "3 layers in int8, 0 in float" not in said and "AdaRound" not in said


# -- which layers ----------------------------------------------------------------------------


def rounder_of(nodes, weights, shape):
    model = build_net(
        nodes,
        {"x": shape},
        {"y": None},
        [
            numpy_helper.from_array(np.ones(dims, np.float32), name)
            for name, dims in weights.items()
        ],
        opset=14,
    )
    layers = find_layers(model)
    plan = RecordPlan(
        model=model, graph=layers, config=default_config(layers), base="float", samples=1
    )
    return Rounder(plan=plan, observed=ObservedStatistics({}), calibration=None, threads=1)


def test_pools_and_open_convolutions_are_not_offered():
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w1"], ["a"], name="conv"),
        make("AveragePool", ["a"], ["b"], name="pool", kernel_shape=[2, 2]),
        make("ConvTranspose", ["b", "w2"], ["c"], name="open", auto_pad="SAME_UPPER"),
        make("ConvTranspose", ["c", "w3"], ["y"], name="turned"),
    ]
    sizes = {"w1": (2, 3, 1, 1), "w2": (2, 2, 3, 3), "w3": (2, 2, 3, 3)}
    rounder = rounder_of(nodes, sizes, [1, 3, 8, 8])
    assert rounder.able(["pool", "turned", "open", "conv"]) == ["turned", "conv"]


def test_the_layers_are_few_and_have_not_too_many_weights():
    wide = [f"l{n}" for n in range(9)]
    nodes = [
        helper.make_node("Gemm", [f"t{n}" if n else "x", f"w{n}"], [f"t{n + 1}"], name=name)
        for n, name in enumerate(wide)
    ]
    nodes[-1].output[0] = "y"
    sizes = {f"w{n}": (4, 4) for n in range(9)} | {
        "w0": (1100, 1000),
        "w1": (1000, 1000),
        "w2": (1000, 100),
    }
    sizes["w3"] = (100, 4)
    rounder = rounder_of(nodes, sizes, [1, 1100])
    assert rounder.able(wide) == ["l1", *wide[3:8]]
    assert rounder.able(wide[2:]) == wide[2:8]


class MadeRounded:
    """Losses that add up; AdaRound halves that of l1 and doubles that of l2.

    `apart` is lost where l1 is rounded and l2 in float.
    """

    def __init__(self, apart=0.0):
        self.own, self.apart = {"l1": 0.01, "l2": 0.005, "l3": 0.0}, apart

    def hold(self):
        pass

    def plain(self):
        pass

    def nearer(self, variants):
        return dict.fromkeys(self.own, "a")

    def rounded(self, chosen, records, worst):
        assert worst == ["l1", "l2"]  # none that gains nothing in float
        return {"a, AdaRound": {name: "a, AdaRound" for name in worst}}

    def of(self, forms):
        share = {("l1", "a, AdaRound"): 0.5, ("l2", "a, AdaRound"): 2.0}
        return [
            sum(self.own[n] * share.get((n, how), 1) for n, how in form.items())
            + self.apart * (form.get("l1") == "a, AdaRound" and "l2" not in form)
            for form in forms
        ]

    def judge(self, records):
        (loss,) = self.of([records])
        return loss <= 0.01, loss


def test_adaround_is_kept_only_where_less_is_lost():
    work = GainSearch(
        variants={"a": dict.fromkeys(("l1", "l2", "l3"), "a")}, losses=MadeRounded(), budget=0.01
    )
    assert work.run() == {"l1": "a, AdaRound", "l2": "a", "l3": "a"}
    assert [entry["metric_eval"][0] for entry in work.history] == [False, True]
    # With AdaRound l1 and l2 go in the end, without it l1 alone.
    losses = MadeRounded(apart=0.5)
    losses.own["l2"] = 0.0055
    work = GainSearch(variants={"a": dict.fromkeys(losses.own, "a")}, losses=losses, budget=0.0056)
    assert work.run() == {"l2": "a", "l3": "a"}
