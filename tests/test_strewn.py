"""Which samples are taken where not all are: from all over, in step with nothing in the feed."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.one_pass import in_turns
from deploy.feed.sampling import order, some, strewn

QUICK = ("--effort", 0, "--duration", 0)


@given(st.integers(0, 3000))
def test_every_place_comes_once(count):
    assert sorted(order(count)) == list(range(count)) == sorted(strewn(range(count)))


def test_of_a_million_too():
    assert np.array_equal(np.sort(order(10**6)), np.arange(10**6))


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_some_are_from_all_over_and_hold_the_fewer(count, most):
    found = some(range(count), most)
    assert len(found) == min(count, most) and found == sorted(found)
    assert np.diff([0, *found, count]).max() <= 4 * count / len(found) + 1
    assert set(some(range(count), most // 2)) <= set(found)


@given(st.integers(2, 9), st.sampled_from([16, 48, 64, 100]), st.sampled_from([2, 3, 4, 8]))
def test_what_comes_round_in_a_feed_is_met_in_all_its_kinds(period, many, times):
    kinds = np.bincount(np.array(some(range(times * many), many)) % period, minlength=period)
    assert many < 8 * period or kinds.min() >= many / period / 4


@given(st.integers(0, 10**6))
def test_neighbours_are_of_different_halves(number):
    assert in_turns(number) in (number, number ^ 1)
    assert in_turns(number) ^ in_turns(number ^ 1) == 1


# --- through the command ----------------------------------------------------------------------


@pytest.fixture
def taking_turns(tmp_path):
    """200 samples, one quiet and one eight times as loud in turns; their model tells which."""
    rng = np.random.default_rng(1)
    x = rng.uniform(0.5, 1, size=(200, 1, 8, 8)).astype(np.float32)
    x[1::2] *= 8
    np.save(tmp_path / "x.npy", x)
    weight = np.ones((2, 1, 8, 8), np.float32) / 64
    weight[0] *= -1
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
            helper.make_node("Flatten", ["c"], ["f"], name="flat"),
            helper.make_node("Softmax", ["f"], ["y"], name="shares", axis=1),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.array([2.5, -2.5], np.float32), "b"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path


def report_of(run, folder, *words):
    given = ("build", folder / "net.onnx", "--images", folder / "x.npy", "--out", folder / "out")
    code, out, err = run(*given, *QUICK, *words)
    assert code == 0, err
    return json.loads((folder / "out/report.json").read_text()), out


def test_both_classes_judge(run, taking_turns):
    report, out = report_of(run, taking_turns)
    assert "gives one class" not in out and "Verdict       good" in out
    assert report["engines"][1]["accuracy"]["samples"] == 100


@pytest.mark.parametrize("words", [("--limit", 50), ("--until-stable",)])
def test_fewer_samples_have_both(words, run, taking_turns):
    """By powers of two through 200, and by fours, every sample was a quiet one."""
    report_of(run, taking_turns, *words, "--method", "minmax")
    held = onnx.load(taking_turns / "out/net.int8.onnx").graph.initializer
    (scale,) = [numpy_helper.to_array(one) for one in held if one.name == "x/scale"]
    assert 255 * scale > 7
