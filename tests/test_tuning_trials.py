"""Trials of a search: which samples, what they cost, what is kept in float."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from calib8 import build as build_all
from calib8 import calibrate
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.errors import ExportError
from deploy.feed.feed import open_feed
from deploy.feed.sampling import sampling_order
from deploy.frontends import load
from deploy.method import NO_CHOICES, Choices, Method
from deploy.metrics.output_form import derive_form
from deploy.runtimes.ort import BoundSession, OrtSession
from deploy.targets import TARGETS
from deploy.targets.base import BuildRequest
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tasks.slices import count_form_samples
from deploy.tuning import probe, search_samples, slice_signals
from deploy.tuning.plan_file import read_plan
from deploy.tuning.reasons import BETWEEN, float_reasons
from deploy.tuning.sensitivity import Sensitivity
from tests.models import as_float32, build_net, make_model, make_node
from tests.test_tuning import SAME, ran, saved


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w1": rng.normal(0, 0.3, (8, 3, 3, 3)), "w2": rng.normal(0, 0.2, (4, 8, 3, 3))}
    nodes = [("Conv", "x w1", "c", SAME), ("Relu", "c", "r", {}), ("Conv", "r w2", "y", SAME)]
    return saved(tmp_path, "net", nodes, weights)


def images(count, *, loud=()):
    """Noise, ten times as strong at some places."""
    x = np.random.default_rng(1).normal(size=(count, 3, 12, 12)).astype(np.float32)
    x[list(loud)] *= 10
    return x


@pytest.fixture
def request_for(model, tmp_path):
    def make(target, x):
        np.save(tmp_path / "x.npy", x)
        calibration = calibrate(model, tmp_path / "x.npy", targets=(target,))
        made_from = {
            "subject": calibration.subject,
            "ranges": calibration.ranges,
            "feed": calibration.feed,
        }
        return TARGETS[target](), BuildRequest(folder=tmp_path, manifest={}, **made_from)

    return make


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_search_ranges_exclude_evaluation_samples(target, request_for):
    made_for, request = request_for(target, images(20, loud=(3, 7)))
    judges = [
        sample for index, sample in enumerate(request.feed.first_samples(20)) if index in (3, 7)
    ]
    search = search_samples.with_held_out_ranges(made_for, request, judges)
    expected = OrtSession.open(request.model).run(judges[0])["y"]

    def lost(request_used):
        got = OrtSession.open(made_for.trial(request_used)).run(judges[0])["y"]
        return np.square(got - expected).sum() / np.square(expected).sum()

    assert lost(request) < 0.01 < 0.3 < lost(search)  # what they show is clipped


@pytest.mark.parametrize(("target", "runs"), [("onnxruntime", 3), ("tensorrt", 3), ("ascend", 17)])
def test_only_evaluation_samples_are_run_again(target, runs, request_for, monkeypatch):
    made_for, request = request_for(target, images(20))
    ran = []
    for session_class in (OrtSession, BoundSession):
        counted = lambda *a, run=session_class.run: ran.append(1) or run(*a)  # noqa: E731
        monkeypatch.setattr(session_class, "run", counted)
    search = search_samples.with_held_out_ranges(made_for, request, request.feed.first_samples(3))
    assert len(ran) == runs
    assert search is not request


@pytest.mark.parametrize("count", [search_samples.LARGE_FEED + 10, 3])
def test_ranges_stay_for_extreme_sample_counts(count, request_for):
    made_for, request = request_for("onnxruntime", images(count))
    assert (
        search_samples.with_held_out_ranges(made_for, request, request.feed.first_samples(3))
        is request
    )


def test_full_batch_configuration_keeps_its_ranges(request_for, tmp_path):
    config = tmp_path / "all.cfg"
    config.write_text("batch_num: 20\n")
    _, request = request_for("ascend", images(20))
    target = TARGETS["ascend"](config=config)
    assert (
        search_samples.with_held_out_ranges(target, request, request.feed.first_samples(2))
        is request
    )


def build(model, x, out, *arguments):
    np.save(out.parent / "x.npy", x)
    return ran(model, "--images", out.parent / "x.npy", "--duration", 0, *arguments, out=out)


@pytest.mark.slow
def test_clipping_is_judged_on_unseen_samples(tmp_path):
    """Rare values that matter: squares of noise. All images together would show no loss."""
    rng = np.random.default_rng(0)
    weights = {"w1": rng.normal(0, 0.3, (8, 3, 3, 3)), "w2": rng.normal(0, 0.2, (4, 8, 3, 3))}
    nodes = [("Conv", "x w1", "c", SAME), ("Relu", "c", "r", {}), ("Conv", "r w2", "y", SAME)]
    noise = np.random.default_rng(1).normal(size=(40, 3, 12, 12)).astype(np.float32)
    build(saved(tmp_path, "net", nodes, weights), np.sign(noise) * noise**2, tmp_path / "o")
    plan = read_plan(next(tmp_path.glob("o/calib8/*.toml")))
    method = plan.targets["onnxruntime"].choices.method
    assert method.label == "minmax"  # by 1.5 dB on other samples


def test_ascend_plan_sets_unclipped_search_ranges(model, tmp_path):
    x = images(20) ** 3  # of long tails, which AMCT's search clips
    out, arguments = tmp_path / "o", ("--target", "ascend", "--repair", "none", "--accept")
    plan = tmp_path / "net.plan.toml"
    result_by_method = {}
    for method in ("", 'method = "minmax"\n', 'methods = { "x" = "minmax" }\n'):
        plan.write_text(f'schema = "calib8-plan/1"\n[ascend]\n{method}')
        assert build(model, x, out, *arguments, "--plan", plan, "--refresh").code == 0
        config = json.loads((out / "net_config.json").read_text())
        ranges = {
            name: layer["activation_quant_params"].get("search_range", [0.7, 1.3])
            for name, layer in config.items()
            if isinstance(layer, dict) and "activation_quant_params" in layer
        }
        result_by_method[method] = (ranges, (out / "net_record.txt").read_text())
    (
        (default_ranges, default_record),
        (minmax_ranges, minmax_record),
        (tensor_ranges, tensor_record),
    ) = result_by_method.values()
    assert default_ranges == {"/c/Conv": [0.7, 1.3], "/y/Conv": [0.7, 1.3]}
    assert minmax_ranges == {"/c/Conv": [1.0, 1.3], "/y/Conv": [1.0, 1.3]}
    assert tensor_ranges == {"/c/Conv": [1.0, 1.3], "/y/Conv": [0.7, 1.3]}
    assert default_record != minmax_record
    assert default_record != tensor_record


def test_ascend_refuses_methods_unknown_to_amct(model, tmp_path):
    plan = tmp_path / "net.plan.toml"
    plan.write_text('schema = "calib8-plan/1"\n[ascend]\nmethod = "entropy"\n')
    refused = build(model, images(8), tmp_path / "o", "--target", "ascend", "--plan", plan)
    assert refused.code == 1
    assert refused.error.count("\n") == 1
    assert "takes the method minmax or none, got 'entropy'" in refused.error


@pytest.mark.slow
def test_ascend_search_tries_minmax_without_configuration(model, tmp_path):
    config = tmp_path / "own.cfg"
    config.write_text("batch_num: 20\n")
    x = images(20)
    for arguments, tries_minmax in (
        ((), True),
        (("--ascend-config", config, "--effort", 1), False),
    ):
        out = tmp_path / f"o{tries_minmax}"
        assert build(model, x, out, "--target", "ascend", "--accept", *arguments).code == 0
        assert ("without clipping" in (out / "calib8/net.plan.toml").read_text()) == tries_minmax


def test_search_asks_target_demands_once(small_cnn, pictures, tmp_path, monkeypatch):
    calls, demand = [], OnnxRuntime.demand
    monkeypatch.setattr(OnnxRuntime, "demand", lambda *a: calls.append(1) or demand(*a))
    report = build_all(small_cnn, pictures, out=tmp_path, duration_s=0)
    # 13 where each trial asks; what judges the one that was chosen asks once more
    assert len(calls) <= report.targets[0].search.probes + 1


def doubling():
    """x [batch, 4] -> y = 2 x."""
    nodes = [make_node("MatMul", "x w", "y", name="/y")]
    weights = {"w": np.float32(2 * np.eye(4))}
    return load(make_model(nodes, {"x": ["batch", 4]}, {"y": ["batch", 4]}, weights, opset=17))


def chosen(count, max_samples, *, loud=()):
    """Places of the samples that tell most; those that are loud have a hundred times the signal."""
    loaded = doubling()
    rows = [np.ones((1, 4), np.float32) for _ in range(count)]
    for index, row in enumerate(rows):
        if index in loud:
            row *= 100
        row[0, 0] = index  # by which it is known again
    judges = make_evaluation_set(open_feed(rows, loaded.inputs), loaded.model, 500)
    selected, form = search_samples.select_samples(judges, max_samples)
    assert [part.output for part in form.parts] == ["y"]
    return [int(sample["x"][0, 0]) for sample, _ in selected]


def test_loud_and_spread_samples_are_selected():
    loud = set(range(11, 19))
    indices = chosen(40, 8, loud=loud)
    assert len(loud & set(indices)) >= 4
    assert len(indices) == 8
    assert indices == sorted(indices)
    quiet = set(indices) - loud
    assert min(quiet) < 10
    assert max(quiet) >= 30


def test_mean_uses_more_samples_than_form():
    """Of samples in order the first four have a mean of their own: all deviate to one side."""
    ages = [np.full((1, 6), index + 100, np.float32) for index in range(48)]
    judges = SimpleNamespace(
        samples_with_outputs=lambda max_samples: (({"x": age}, {"y": age}) for age in ages)
    )
    selected, form = search_samples.select_samples(judges, 8)
    assert [float(mean[0, 0]) for mean in form.means.values()] == [115.5]
    # not the youngest and the oldest, where a Softmax hides what int8 loses before it
    indices = [int(sample["x"][0, 0]) - 100 for sample, _ in selected]
    assert indices == sorted(sampling_order(48)[:8])


@pytest.mark.parametrize("values, enough", [(1, 5_000_000), (1_228_800, 4), (6_000_000, 0)])
def test_large_samples_reduce_the_count(values, enough):
    sample = {"x": np.zeros(values - 1, np.int8), "size": np.zeros(1)}
    judges = SimpleNamespace(samples_with_outputs=lambda max_samples: iter([(sample, {})]))
    assert search_samples.max_sample_count(judges) == enough


@pytest.mark.parametrize(
    "side, numbers, count", [(8, 16, 32), (1024, 16, 21), (9000, 16, 4), (8, 17, 4)]
)
def test_form_samples_follow_size_and_memory(side, numbers, count):
    pictures = np.broadcast_to(np.float32(0), (1, 3, side, side))
    rows, flag = {"y": np.zeros((1, numbers))}, {"z": np.zeros((1, 1))}
    assert count_form_samples({"x": pictures}, rows) == count
    with_flag = count_form_samples({"x": pictures}, {**rows, **flag})
    assert with_flag == max(count, 32 if side == 8 else count)  # one value beside many


def strongest_samples(form, outputs, count):
    samples = []
    for arrays in outputs:
        samples.append([part.of(arrays[part.output]) for part in form.parts])
    return slice_signals.strongest_samples(form, samples, count)


def test_strongest_samples_consider_all_parts():
    outputs = [{"y": np.full((1, 4), size, np.float32)} for size in (1, 5, np.inf, 2, 4)]
    form = derive_form([outputs[0]], inputs=[{"x": np.ones((1, 4), np.float32)}])
    assert strongest_samples(form, outputs, 2) == [1, 4]
    assert strongest_samples(form, outputs, 9) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1)])
def test_uncertain_shares_are_the_strongest_samples(shape):
    sure = np.array([1.0, 0, 0, 0])
    shares = [(1 - k) * sure + k / 4 for k in (0.0, 0.9, 0.3, 0.01, 0.6)]
    outputs = [{"y": values.reshape(shape).astype(np.float32)} for values in shares]
    form = derive_form(outputs, inputs=[{"x": np.ones((1, 4), np.float32)}] * 5)
    assert strongest_samples(form, outputs, 2) == [1, 4]
    no_shares = [{"y": 3 * values["y"]} for values in outputs]
    assert strongest_samples(form, no_shares, 2) == [0, 3]
    outputs[4]["y"] = outputs[4]["y"] * np.nan
    assert 4 not in strongest_samples(form, outputs, 2)
    steps = [{"y": np.stack([values, sure])[None].astype(np.float32)} for values in shares]
    assert strongest_samples(derive_form(steps), steps, 2) == [
        0,
        3,
    ]  # several steps a sample


@pytest.mark.parametrize("shape", [(1, 1), (1,), (1, 1, 1, 1)])
def test_uncertain_probabilities_are_the_strongest_samples(shape):
    outputs = [{"y": np.full(shape, p, np.float32)} for p in (1.0, 0.55, 0.0, 0.99, 0.3)]
    form = derive_form(outputs, inputs=[{"x": np.ones((1, 4), np.float32)}] * 5)
    assert strongest_samples(form, outputs, 2) == [1, 4]
    ages = [{"y": 3 * output["y"]} for output in outputs]
    assert strongest_samples(form, ages, 2) == [0, 3]
    with_box = [
        {**output, "z": np.float32([[2, -3, 1]])} for output in outputs
    ]  # of a face that is there
    assert strongest_samples(derive_form(with_box), with_box, 2) == [0, 3]


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 120), st.integers(1, 9))
def test_selection_is_bounded_and_unique(count, max_samples):
    indices = chosen(count, max_samples)
    assert len(indices) == len(set(indices)) == min(count, max_samples)
    assert indices == sorted(indices)


def test_long_feed_is_sampled_throughout():
    feed = open_feed(
        [np.full((1, 4), index, np.float32) for index in range(500)], doubling().inputs
    )
    spread = [
        int(sample["x"][0, 0]) for sample in feed.spread_samples(search_samples.CANDIDATE_COUNT)
    ]
    assert len(spread) == search_samples.CANDIDATE_COUNT
    assert spread == sorted(spread)
    assert np.diff([0, *spread, 500]).max() <= 2 * 500 / search_samples.CANDIDATE_COUNT


def noise(**powers):
    return probe.Noise({part: np.array(values, np.float64) for part, values in powers.items()})


def test_noises_average_and_add_by_part():
    assert noise(a=[0.0, 1e6]).worst == pytest.approx(0.5)
    assert noise(a=[0.0, 0.0]).worst == 0.0
    assert probe.Noise({}).worst == 0.0
    assert noise(a=[0.1, 0.1]).worst == pytest.approx(1 - math.exp(-math.sqrt(0.1)))
    assert noise(a=[0.1, 0.1]).db == pytest.approx(10.0)
    total = noise(a=[0.1, 0.3], b=[0.2, 0.2]).combined_with(noise(a=[0.3, 0.1]))
    assert total.worst_slice_label == "a"
    assert total.db == pytest.approx(-10 * math.log10(0.4))
    assert total.powers_by_slice["a"] == pytest.approx([0.4, 0.4])
    assert total.powers_by_slice["b"] == pytest.approx([0.2, 0.2])
    assert total.mean < total.worst


def test_noise_is_relative_to_signal_shares():
    powers = np.array([0.01, 0.0, 0.01, 0.0])
    alike, half = probe.Noise({"a": powers}), probe.Noise({"a": powers}, {"a": 0.5})
    assert half.worst == pytest.approx(2 * alike.worst)
    assert half.worst == pytest.approx(1 - math.exp(-0.1))
    assert half.db == pytest.approx(20.0)
    assert half.scaled(0.25).combined_with(half.scaled(0.75)).worst == pytest.approx(half.worst)
    assert half.marginal_loss(half) == pytest.approx(2 * alike.marginal_loss(alike))
    assert probe.Noise({"a": np.full(4, 1e6)}, {"a": 0.5}).worst == 1.0


def constant_outputs(*values):
    return [[np.full((1, 4), value, np.float32)] for value in values]


def test_half_loud_sample_counts_fully():
    outputs = constant_outputs(9.0, 9.0, 0.0, 0.0)
    powers = slice_signals.slice_powers(outputs)
    mean_power = slice_signals.mean_powers(powers)  # that of 4.5
    assert slice_signals.signal_shares(powers, mean_power) == pytest.approx([0.5])
    assert slice_signals.signal_shares(powers[:2], mean_power) == pytest.approx([1.0])
    assert slice_signals.signal_shares(powers[2:], mean_power) == [1.0]
    assert slice_signals.signal_shares(powers[:1], np.zeros(1)) == [1.0]
    for level, share in ((2.3, 1.0), (2.25 / 2, 0.25), (2.25 / 10, 0.01)):
        quiet_powers = slice_signals.slice_powers(constant_outputs(level))
        assert slice_signals.signal_shares(quiet_powers, mean_power) == pytest.approx([share])


def test_quiet_sample_is_measured_against_mean():
    loud, silent = outputs = constant_outputs(8.0, 0.02)
    powers = slice_signals.slice_powers(outputs)
    mean_power = slice_signals.mean_powers(powers)
    assert mean_power == pytest.approx(4 * 4.01**2)  # of the mean amplitude
    loud_power, silent_power = np.maximum(powers, mean_power)
    (quiet,) = slice_signals.noise_powers(silent, [2 * silent[0]], silent_power)
    assert quiet < 1e-4  # 0.04 for 0.02 is nothing where 8 is said elsewhere
    (loud_noise,) = slice_signals.noise_powers(loud, [1.5 * loud[0]], loud_power)
    assert loud_noise == pytest.approx(0.25)
    (noise_alone,) = slice_signals.noise_powers(silent, [2 * silent[0]], powers[1])
    assert noise_alone == pytest.approx(1.0)


@pytest.mark.parametrize(
    "power, int8_price, expected",
    [
        (1e-12, 1.0, BETWEEN),
        (1e-12, 3.0, "slower in int8 on this kind of CPU"),
        (1e-3, 3.0, "alone in int8 it leaves 30.0 dB of a"),
    ],
)
def test_float_reason_is_noise_then_time(power, int8_price, expected):
    """As of a policy whose moves, in the samples that were looked at, are at a Tanh's ends."""
    sensitivity = Sensitivity({("one",): noise(a=[power]), ("other",): noise(a=[power])})
    units = SimpleNamespace(members={"one": ["/one"], "other": ["/other"]})
    prices = SimpleNamespace(unit_prices=dict.fromkeys(("one", "other"), (int8_price, 2.0)))
    search = SimpleNamespace(
        units=units,
        prices=prices,
        sensitivity=sensitivity,
        precision="int8",
        refused=(),
        float_adds={},
    )
    reasons = float_reasons(search, SimpleNamespace(in_float={"one", "other"}))
    assert reasons == {"/one": expected, "/other": expected}


def fake_request(model, choices=NO_CHOICES):
    add_choices = partial(fake_request, model)
    return SimpleNamespace(model=model, choices=choices, with_added_choices=add_choices, threads=2)


class FakeTarget:
    """Trial models that double, but fail with /y in float, halve with minmax, are NaN with mse."""

    built = 0

    def trial(self, request):
        self.built += 1
        if "/y" in request.choices.float_nodes:
            raise ExportError("a layer must be what it is, got another; build something else")
        if request.choices.method is None:
            return request.model
        weight = np.eye(4) if request.choices.method.name == "minmax" else np.full((4, 4), np.nan)
        trial_model = onnx.ModelProto()
        trial_model.CopyFrom(request.model)
        trial_model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32(weight), "w"))
        return trial_model


def doubled(*values):
    """Samples of such values, and what the doubling model makes of them."""
    rows = [np.full((1, 4), value, np.float32) for value in values]
    return [({"x": row}, {"y": 2 * row}) for row in rows]


def make_prober(build_trial, model, samples, isolated_count=1):
    """A prober whose noise is that of the samples' outputs, in the form that these show."""
    inputs, outputs = zip(*samples, strict=True)
    form = derive_form(outputs, inputs=inputs)
    return probe.Prober(
        build_trial,
        fake_request(model),
        samples,
        form,
        runs_here=True,
        isolated_sample_count=isolated_count,
    )


def test_choices_are_tried_once_unless_unbuildable():
    target = FakeTarget()
    prober = make_prober(target.trial, doubling().model, doubled(1))
    broken, minmax = Choices(float_nodes={"/y": "why"}), Choices(method=Method.of("minmax"))
    equal, half, unbuildable, repeated = prober.noises([NO_CHOICES, minmax, broken, minmax])
    assert equal.worst == 0
    assert half.powers_by_slice["y"] == pytest.approx([0.25]) == repeated.powers_by_slice["y"]
    assert unbuildable is None
    assert prober.noises([Choices(float_nodes={"/y": "another reason"})]) == [None]
    assert (prober.trial_count, target.built) == (3, 3)
    assert [str(error)[:32] for error in prober.errors] == ["a layer must be what it is, got "]
    (nan,) = prober.noises([Choices(method=Method.of("mse"))])
    assert nan.worst > 0.99
    assert nan.worst_slice_label == "y"


def test_trial_stopped_before_its_samples_could_not_run():
    model = doubling().model
    prober = make_prober(lambda _: model, model, doubled(1))
    prober._is_stopped = True  # by Ctrl-C, while the model was built
    assert prober.noises([NO_CHOICES]) == [None]
    assert "interrupted" in str(prober.errors[0])


@pytest.mark.parametrize("factor, temperatures", [(1.0, {"y": (4.0, -1)}), (0.2, {})])
def test_certain_softmax_shows_logit_noise(factor, temperatures):
    """Half of the logits changes the certain outputs by 37 dB only."""
    nodes = [make_node("MatMul", "x w", "z"), make_node("Softmax", "z", "y", axis=2)]
    full_model, halved_model = (
        make_model(nodes, {"x": [1, 2, 3]}, {"y": [1, 2, 3]}, {"w": w}, opset=17)
        for w in (np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32) / 2)
    )
    logits = factor * np.float32([[[9, -9, 0], [0, 9, -9]]])
    outputs = {"y": np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)}
    prober = make_prober(lambda _: halved_model, full_model, [({"x": logits}, outputs)])
    (noise,) = prober.noises([NO_CHOICES])
    assert 0.1 < noise.worst < 0.3
    by_slice = slice_signals.find_temperatures(derive_form([outputs]), [outputs])
    assert {part.output: found for part, found in by_slice.items()} == temperatures
    restored = slice_signals.apply_temperature(
        slice_signals.apply_temperature(outputs["y"], 4, 2), 0.25, 2
    )
    assert restored == pytest.approx(outputs["y"], rel=1e-6)


def test_layers_alone_run_on_some_samples():
    target = FakeTarget()
    samples = doubled(1, -3, 2)
    prober = make_prober(target.trial, doubling().model, samples, isolated_count=2)
    off = Choices(method=Method.of("minmax"))
    (full_noise,), (single_noise,) = prober.noises([off]), prober.isolated_noises([off], [["/y"]])
    assert full_noise.powers_by_slice["y"].shape == (3,)
    assert single_noise.powers_by_slice["y"] == pytest.approx([0.25, 0.25])
    broken = Choices(float_nodes={"/y": "why"})
    assert prober.isolated_noises([broken, off], [["/y"], ["/y"]]) == [None, single_noise]
    assert (prober.trial_count, target.built) == (3, 3)


@pytest.mark.parametrize(
    ("count", "has_noise"), [(1, [True]), (2, [False, True]), (3, [False, True, True])]
)
def test_layers_alone_run_where_they_lose_most(count, has_noise):
    """Half of the samples have the greatest signal; the others lose most in the first trial."""
    ones = {"x": np.ones((1, 4), np.float32)}
    deviating = [(ones, {"y": np.full((1, 4), value, np.float32)}) for value in (4, 3)]
    target = FakeTarget()
    samples = [*doubled(5, -4), *deviating]
    prober = make_prober(target.trial, doubling().model, samples, isolated_count=count)
    prober.noises([NO_CHOICES])
    (noise,) = prober.isolated_noises([NO_CHOICES], [["/y"]])
    assert list(noise.powers_by_slice["y"] > 0) == has_noise


def test_timing_uses_the_median_shape():
    samples = [{"x": np.zeros((1, size)), "n": np.zeros(1)} for size in (3, 90, 40, 41, 40)]
    timed = search_samples.same_shape_samples(samples)
    assert [sample["x"].shape for sample in timed] == [(1, 40), (1, 40)]
    equal_samples = [{"x": np.zeros((1, 8)) + step} for step in range(4)]
    assert search_samples.same_shape_samples(equal_samples) == equal_samples


def test_search_weighs_samples_of_saturated_sigmoids(tmp_path):
    """Five in six lie where it is flat: there, nothing of what int8 changes before it is heard."""
    rng = np.random.default_rng(8)
    first_weight, second_weight = rng.normal(0, 0.3, (32, 64)), np.abs(rng.normal(0, 0.2, (64, 1)))
    nodes = [
        make_node("Gemm", "x first", "a"),
        make_node("Relu", "a", "r"),
        make_node("Gemm", "r second less", "s"),
        make_node("Sigmoid", "s", "y"),
    ]
    weights = as_float32({"first": first_weight, "second": second_weight, "less": [-8.0]})
    model = make_model(nodes, {"x": [1, 32]}, {"y": [1, 1]}, weights, opset=17)
    loud = np.where(np.arange(48) % 6 == 1, 1.0, 20.0)[:, None]
    out = build_net(model, loud * rng.normal(0, 1, (48, 32)), tmp_path)
    plan = read_plan(out / "calib8/net.plan.toml").targets["onnxruntime"]
    (part,) = json.loads((out / "report.json").read_text())["engines"][1]["accuracy"]["parts"]
    int8_sqnrs = [split.row.sqnr_db for split in plan.front if split.row.float_layers == 0]
    assert int8_sqnrs
    assert max(int8_sqnrs) < part["sqnr_db"] + 6 < 60
