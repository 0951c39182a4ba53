"""The few samples that a search looks at, and what a trial on them is worth."""

import json
import math
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.reference import judges_of
from deploy.errors import ExportError
from deploy.feed.feed import open_feed
from deploy.frontends import load
from deploy.method import NO_CHOICES, Choices, Method
from deploy.metrics.truth import form_of
from deploy.tuning.plan_file import NOT_FASTER, read_plan, reasons
from deploy.tuning.probe import Noise, Prober, loudest, noise_powers, said_of, usual_powers
from deploy.tuning.search import Sensitivity
from deploy.tuning.search_samples import CANDIDATES, alike, as_many, telling


def doubling():
    """x [batch, 4] -> y = 2 x."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="/y")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.float32(2 * np.eye(4)), "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return load(made)


def chosen(count, most, *, loud=()):
    """Places of the samples that tell most; those that are loud have a hundred times the signal."""
    loaded = doubling()
    rows = [np.full((1, 4), 100.0 if at in loud else 1.0, np.float32) for at in range(count)]
    for at, row in enumerate(rows):
        row[0, 0] = at  # by which it is known again
    feed = open_feed(rows, loaded.inputs)
    judges = judges_of(feed, loaded.model, 500)
    return [int(sample["x"][0, 0]) for sample, _ in telling(judges, most)]


def test_samples_in_which_the_model_says_most_are_looked_at_and_others_from_all_over():
    loud = set(range(11, 19))
    places = chosen(40, 8, loud=loud)
    assert len(loud & set(places)) >= 4 and len(places) == 8 and places == sorted(places)
    quiet = set(places) - loud
    assert min(quiet) < 10 and max(quiet) >= 30


@pytest.mark.parametrize("values, enough", [(1, 5_000_000), (1_228_800, 4), (6_000_000, 0)])
def test_of_large_samples_fewer_are_enough(values, enough):
    sample = {"x": np.zeros(values - 1, np.int8), "size": np.zeros(1)}
    judges = SimpleNamespace(heard=lambda most: iter([(sample, {})]))
    assert as_many(judges) == enough


def test_the_loudest_samples_are_those_of_every_part_together():
    outputs = [{"y": np.full((1, 4), size, np.float32)} for size in (1, 5, np.inf, 2, 4)]
    form = form_of([outputs[0]], inputs=[{"x": np.ones((1, 4), np.float32)}])
    assert loudest(form, outputs, 2) == [1, 4]
    assert loudest(form, outputs, 9) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1)])
def test_of_shares_the_samples_tell_most_that_are_least_sure(shape):
    sure = np.array([1.0, 0, 0, 0])
    shares = [(1 - k) * sure + k / 4 for k in (0.0, 0.9, 0.3, 0.01, 0.6)]
    outputs = [{"y": one.reshape(shape).astype(np.float32)} for one in shares]
    form = form_of(outputs, inputs=[{"x": np.ones((1, 4), np.float32)}] * 5)
    assert loudest(form, outputs, 2) == [1, 4]
    assert loudest(form, [{"y": 3 * one["y"]} for one in outputs], 2) == [0, 3]  # no shares
    steps = [{"y": np.stack([one, sure])[None].astype(np.float32)} for one in shares]
    assert loudest(form_of(steps), steps, 2) == [0, 3]  # of several steps a sample
    broken = [*outputs[:4], {"y": outputs[4]["y"] * np.nan}]
    assert 4 not in loudest(form, broken, 2)


@pytest.mark.parametrize("shape", [(1, 1), (1,), (1, 1, 1, 1)])
def test_of_one_probability_the_samples_tell_most_that_are_least_sure(shape):
    outputs = [{"y": np.full(shape, p, np.float32)} for p in (1.0, 0.55, 0.0, 0.99, 0.3)]
    form = form_of(outputs, inputs=[{"x": np.ones((1, 4), np.float32)}] * 5)
    assert loudest(form, outputs, 2) == [1, 4]
    assert loudest(form, [{"y": 3 * one["y"]} for one in outputs], 2) == [0, 3]  # an age, maybe
    beside = [{**one, "z": np.float32([[2, -3, 1]])} for one in outputs]  # of a face that is there
    assert loudest(form_of(beside), beside, 2) == [0, 3]


@settings(max_examples=25)
@given(st.integers(1, 120), st.integers(1, 9))
def test_no_more_are_taken_than_asked_and_each_once(count, most):
    places = chosen(count, most)
    assert len(places) == len(set(places)) == min(count, most) and places == sorted(places)


def test_of_a_long_feed_only_some_are_run_and_they_reach_to_its_end():
    loaded = doubling()
    feed = open_feed([np.full((1, 4), at, np.float32) for at in range(500)], loaded.inputs)
    spread = [int(sample["x"][0, 0]) for sample in feed.spread(CANDIDATES)]
    assert len(spread) == CANDIDATES and spread == sorted(spread)
    steps = np.diff([0, *spread, 500])
    assert steps.max() <= 2 * 500 / CANDIDATES


def noise(**powers):
    return Noise({part: np.array(found, np.float64) for part, found in powers.items()})


def test_every_sample_counts_alike_in_what_a_part_loses():
    assert noise(a=[0.0, 1e6]).worst == pytest.approx(0.5)
    assert noise(a=[0.0, 0.0]).worst == 0.0 and Noise({}).worst == 0.0
    assert noise(a=[0.1, 0.1]).worst == pytest.approx(1 - math.exp(-math.sqrt(0.1)))
    assert noise(a=[0.1, 0.1]).db == pytest.approx(10.0)


def test_what_is_lost_is_held_against_what_is_said_and_not_against_the_number_of_samples():
    powers = np.array([0.01, 0.0, 0.01, 0.0])
    alike, half = Noise({"a": powers}), Noise({"a": powers}, {"a": 0.5})
    assert half.worst == pytest.approx(2 * alike.worst)
    assert half.worst == pytest.approx(1 - math.exp(-0.1)) and half.db == pytest.approx(20.0)
    assert half.times(0.25).plus(half.times(0.75)).worst == pytest.approx(half.worst)
    assert half.weighed(half) == pytest.approx(2 * alike.weighed(alike))
    assert Noise({"a": np.full(4, 1e6)}, {"a": 0.5}).worst == 1.0


def test_a_sample_that_says_half_as_much_as_the_usual_one_counts_whole():
    outputs = [{"y": np.full((1, 4), value, np.float32)} for value in (9.0, 9.0, 0.0, 0.0)]
    form = form_of(outputs)
    usual = usual_powers(form, outputs)  # that of 4.5
    assert said_of(form, outputs, usual) == pytest.approx([0.5])
    assert said_of(form, outputs[:2], usual) == pytest.approx([1.0])
    assert said_of(form, outputs[2:], usual) == said_of(form, outputs[:1], [0.0]) == [1.0]
    for said, share in ((2.3, 1.0), (2.25 / 2, 0.25), (2.25 / 10, 0.01)):
        one = [{"y": np.full((1, 4), said, np.float32)}]
        assert said_of(form, one, usual) == pytest.approx([share])


def test_a_sample_that_says_little_is_measured_by_the_usual_one():
    loud, silent = (np.full((1, 4), value, np.float32) for value in (8.0, 0.02))
    form = form_of([{"y": loud}, {"y": silent}])
    (usual,) = usual_powers(form, [{"y": loud}, {"y": silent}])
    assert usual == pytest.approx(4 * 4.01**2)  # of the mean amplitude
    (quiet,) = noise_powers(form, {"y": silent}, {"y": 2 * silent}, [usual])
    assert quiet < 1e-4  # 0.04 for 0.02 is nothing where 8 is said elsewhere
    (heard,) = noise_powers(form, {"y": loud}, {"y": 1.5 * loud}, [usual])
    assert heard == pytest.approx(0.25)
    (alone,) = noise_powers(form, {"y": silent}, {"y": 2 * silent}, [0.0])
    assert alone == pytest.approx(1.0)


def test_noises_add_up_by_part_and_the_worst_part_is_named():
    total = noise(a=[0.1, 0.3], b=[0.2, 0.2]).plus(noise(a=[0.3, 0.1]))
    assert total.part == "a" and total.db == pytest.approx(-10 * math.log10(0.4))
    assert total.parts["a"] == pytest.approx([0.4, 0.4])
    assert total.parts["b"] == pytest.approx([0.2, 0.2])
    assert total.mean < total.worst


@pytest.mark.parametrize("power, by_noise", [(1e-12, False), (1e-3, True)])
def test_a_layer_that_loses_next_to_nothing_is_not_float_for_its_noise(power, by_noise):
    """As of a policy whose moves, in the samples that were looked at, are at a Tanh's ends."""
    found = Sensitivity({("one",): noise(a=[power]), ("other",): noise(a=[power])})
    units = SimpleNamespace(members={"one": ["/one"], "other": ["/other"]})
    prices = SimpleNamespace(units={"one": (3.0, 2.0), "other": (3.0, 2.0)}, measured=False)
    best = SimpleNamespace(in_float={"one", "other"})
    said = reasons(best, units, prices, found, "int8", otherwise=NOT_FASTER)
    expected = "alone in int8 it leaves 30.0 dB of a" if by_noise else NOT_FASTER
    assert said == {"/one": expected, "/other": expected}


class FakeRequest:
    """Of the doubling model; keeps what was chosen."""

    def __init__(self, model, choices=NO_CHOICES):
        self.model, self.choices = model, choices

    def adding(self, choices):
        return FakeRequest(self.model, choices)


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
        made = onnx.ModelProto()
        made.CopyFrom(request.model)
        made.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32(weight), "w"))
        return made


def test_each_choice_is_tried_once_and_one_that_cannot_be_built_is_no_choice():
    heard = [({"x": np.ones((1, 4), np.float32)}, {"y": np.full((1, 4), 2, np.float32)})]
    target, request = FakeTarget(), FakeRequest(doubling().model)
    prober = Prober(target.trial, request, heard, runs_here=True, threads=2)
    broken, off = Choices(float_nodes={"/y": "why"}), Choices(method=Method.of("minmax"))
    equal, half, none, again = prober.noises([NO_CHOICES, off, broken, off])
    assert equal.worst == 0 and half.parts["y"] == pytest.approx([0.25]) == again.parts["y"]
    assert none is None
    assert prober.noises([Choices(float_nodes={"/y": "another reason"})]) == [None]
    assert (prober.tried, target.built) == (3, 3)
    assert [str(error)[:32] for error in prober.errors] == ["a layer must be what it is, got "]
    (nan,) = prober.noises([Choices(method=Method.of("mse"))])
    assert nan.worst > 0.99 and nan.part == "y"


def test_what_is_tried_alone_is_run_on_the_loudest_samples_and_kept_apart():
    sizes = (1, 3, 2)
    heard = [
        ({"x": np.full((1, 4), n, np.float32)}, {"y": np.full((1, 4), 2 * n, np.float32)})
        for n in sizes
    ]
    target, request = FakeTarget(), FakeRequest(doubling().model)
    prober = Prober(target.trial, request, heard, runs_here=True, threads=1, few=2)
    off = Choices(method=Method.of("minmax"))
    (whole,), (alone,) = prober.noises([off]), prober.alone([off], [["/y"]])
    assert whole.parts["y"].shape == (3,) and alone.parts["y"] == pytest.approx([0.25, 0.25])
    broken = Choices(float_nodes={"/y": "why"})
    assert prober.alone([broken, off], [["/y"], ["/y"]]) == [None, alone]
    assert (prober.tried, target.built) == (3, 3)


def test_what_is_timed_is_of_one_shape_that_of_the_middle_size():
    lengths = (3, 90, 40, 41, 40)
    samples = [{"x": np.zeros((1, length)), "n": np.zeros(1)} for length in lengths]
    assert [one["x"].shape for one in alike(samples)] == [(1, 40), (1, 40)]
    same = [{"x": np.zeros((1, 8)) + step} for step in range(4)]
    assert alike(same) == same


def test_a_search_is_not_deceived_by_samples_that_a_sigmoid_is_sure_of(run, tmp_path):
    """Five in six lie where it is flat: there, nothing of what int8 changes before it is heard."""
    made = np.random.default_rng(8)
    first, second = made.normal(0, 0.3, (32, 64)), np.abs(made.normal(0, 0.2, (64, 1)))
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "first"], ["a"]),
            helper.make_node("Relu", ["a"], ["r"]),
            helper.make_node("Gemm", ["r", "second", "less"], ["s"]),
            helper.make_node("Sigmoid", ["s"], ["y"]),
        ],
        "quality",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])],
        [
            numpy_helper.from_array(np.asarray(value, np.float32), name)
            for name, value in (("first", first), ("second", second), ("less", [-8.0]))
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    loud = np.where(np.arange(48) % 6 == 1, 1.0, 20.0)[:, None]
    np.save(tmp_path / "x.npy", (loud * made.normal(0, 1, (48, 32))).astype(np.float32))
    words = ("--images", tmp_path / "x.npy", "--duration", 0, "--out", tmp_path / "o")
    code, _, error = run("build", tmp_path / "net.onnx", *words)
    assert code == 0, error
    plan = read_plan(tmp_path / "o" / "net.plan.toml").targets["onnxruntime"]
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    (part,) = report["engines"][1]["accuracy"]["parts"]
    tried = [one["sqnr_db"] for one in plan.tried if one["what"].startswith("all in int8")]
    assert tried and max(tried) < part["sqnr_db"] + 6 < 60
