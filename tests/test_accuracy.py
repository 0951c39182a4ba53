import json
import math
import tracemalloc

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ConfigError, FeedError
from deploy.metrics.accuracy import TensorComparison, compare
from deploy.metrics.output_errors import cosine, sqnr_db
from deploy.tensors import TensorSpec


class Scored:
    """A session that computes y = f(x) in numpy."""

    inputs = (TensorSpec("x", "float32", ("n", 4)),)

    def __init__(self, f, names=("y",)):
        self.f = f
        self.outputs = tuple(TensorSpec(name, "float32", ("n", 4)) for name in names)

    def run(self, feed):
        return {spec.name: self.f(feed["x"]) for spec in self.outputs}


def identity(x):
    return x


def batches(x, size):
    return ({"x": x[i : i + size]} for i in range(0, len(x), size))


X = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 30])
def test_sqnr_cosine_and_error_are_their_formulas(size):
    def noisy(x):
        return x + np.float32(0.1) * np.sign(x)

    (found,) = compare(Scored(identity), Scored(noisy), batches(X, size)).outputs
    x, y = X.astype(np.float64), noisy(X).astype(np.float64)
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    assert found.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))
    assert found.cosine_mean == pytest.approx(cosine.mean())
    assert found.cosine_min == pytest.approx(cosine.min())
    assert found.max_abs_error == pytest.approx(np.abs(x - y).max())


@pytest.mark.parametrize("size", [1, 7, 30])
@pytest.mark.parametrize("form", [(-1, 1), (-1,)])
def test_the_cosine_of_one_value_a_sample_is_that_of_all_samples(size, form):
    def noisy(x):
        return (x[:, :1] + x[:, 1:2]).reshape(form)

    first, second = Scored(lambda x: x[:, :1].reshape(form)), Scored(noisy)
    (found,) = compare(first, second, batches(X, size)).outputs
    x, y = X[:, 0].astype(np.float64), noisy(X).reshape(-1).astype(np.float64)
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    assert found.cosine_mean == pytest.approx(cosine) == found.cosine_min and cosine < 0.9
    (same,) = compare(first, first, batches(X, size)).outputs
    assert same.cosine_mean == pytest.approx(1)


def test_the_largest_loss_holds_for_one_value_a_sample(judged_build, tmp_path):
    """Of each sample alone its cosine would be 1 as long as the sign is kept."""
    weights = np.random.default_rng(3).normal(0, 0.3, (1, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)],
        "age",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "age.onnx")
    samples = np.random.default_rng(4).normal(0, 1, (40, 32)).astype(np.float32)
    code, out, found = judged_build(tmp_path / "age.onnx", samples, "--max-loss", 1e-9)
    assert code == 3 and "1 - cosine is" in out
    assert found["parts"][0]["cosine_mean"] == found["parts"][0]["cosine_min"] < 1 - 1e-8
    assert judged_build(tmp_path / "age.onnx", samples, "--max-loss", 0.05)[0] == 0


def test_equal_outputs_are_exact():
    found = compare(Scored(identity), Scored(identity), batches(X, 8))
    assert found.outputs[0].sqnr_db == math.inf and found.outputs[0].cosine_min == pytest.approx(1)
    assert found.top1_agreement == 1 and found.samples == 30 and not found.problems
    assert found.to_json()["outputs"][0]["sqnr_db"] == "inf"


def test_top1_with_labels_counts_both_and_their_agreement():
    labels = X.argmax(axis=1)
    labels[:3] = (labels[:3] + 1) % 4  # the reference is wrong three times

    def swapped(x):  # the candidate is wrong wherever class 0 was right
        return np.where(x.argmax(1, keepdims=True) == 0, x[:, [1, 0, 2, 3]], x)

    found = compare(Scored(identity), Scored(swapped), batches(X, 7), labels=labels.tolist())
    assert found.top1_reference == 27 / 30
    assert found.top1_candidate == (swapped(X).argmax(1) == labels).mean()
    assert found.top1_agreement == (X.argmax(1) != 0).mean()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_are_said_and_never_averaged_away(bad):
    def broken(x):
        y = x.copy()
        y[x[:, 0] == X[11, 0], 2] = bad
        return y

    found = compare(Scored(identity), Scored(broken), batches(X, 4))
    (output,) = found.outputs
    assert output.not_finite == (0, 1)
    assert all(math.isnan(v) for v in (output.sqnr_db, output.cosine_mean, output.max_abs_error))
    assert found.problems == ("output 'y' of the int8 engine holds NaN or Inf in 1 of 30 samples",)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_sample_of_nan_is_never_right():
    labels = [0] * 30
    found = compare(
        Scored(lambda x: x * np.float32(np.nan)),
        Scored(lambda x: x * np.float32(np.nan)),
        batches(X, 5),
        labels=labels,
    )
    assert found.top1_reference == 0 and found.top1_agreement == 0


def test_outputs_of_another_shape_are_said():
    found = compare(Scored(identity), Scored(lambda x: x[:, :3]), batches(X, 5))
    assert "another shape" in found.problems[0] and math.isnan(found.outputs[0].sqnr_db)
    assert found.top1_agreement is None


@pytest.mark.parametrize(
    ("labels", "rule"),
    [([0] * 29, "one label a sample"), ([0] * 31, "one label a sample"),
     ([0] * 29 + [4], "start at 1"), ([-1] * 30, "0 to 3")],
)  # fmt: skip
def test_labels_that_do_not_fit_are_refused(labels, rule):
    with pytest.raises(FeedError, match=rule):
        compare(Scored(identity), Scored(identity), batches(X, 6), labels=labels)


def test_an_output_of_no_classes_has_no_top1_and_takes_no_labels():
    def image(x):
        return x.reshape(len(x), 1, 2, 2)

    assert compare(Scored(image), Scored(image), batches(X, 6)).top1_agreement is None
    with pytest.raises(FeedError, match="leave the labels out"):
        compare(Scored(image), Scored(image), batches(X, 6), labels=[0] * 30)


def test_classes_as_integers_are_compared_as_they_are():
    def best(x):
        return x.argmax(axis=1)

    labels = best(X).tolist()
    found = compare(Scored(best), Scored(best), batches(X, 6), labels=labels)
    assert found.top1_reference == 1 and found.top1_candidate == 1


def test_other_outputs_and_no_samples_are_refused():
    with pytest.raises(ConfigError, match="same outputs"):
        compare(Scored(identity), Scored(identity, ("z",)), batches(X, 6))
    with pytest.raises(FeedError, match="at least one sample"):
        compare(Scored(identity), Scored(identity), [])


def test_pairs_of_tensors_by_other_names():
    left, right = Scored(identity, ("y",)), Scored(lambda x: x * np.float32(0.5), ("z",))
    comparison = TensorComparison({"y": "z"})
    for feed in batches(X, 6):
        comparison.add(feed, left.run(feed), right.run(feed))
    (found,) = comparison.result()
    assert found.name == "y" and found.sqnr_db == pytest.approx(10 * np.log10(4))
    with pytest.raises(ConfigError, match="at least one pair"):
        TensorComparison({})
    with pytest.raises(FeedError, match="at least one sample"):
        TensorComparison({"y": "z"}).result()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_samples():
    def peak(count):
        x = np.ones((1, 4), np.float32)
        tracemalloc.start()
        compare(Scored(identity), Scored(identity), ({"x": x} for _ in range(count)))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(50)
    assert peak(2000) < peak(50) + 20_000


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_sqnr_rises_with_signal_and_falls_with_noise(signal, noise):
    assert sqnr_db(2 * signal, noise) > sqnr_db(signal, noise) > sqnr_db(signal, 2 * noise)


def test_sqnr_at_the_ends():
    assert sqnr_db(0, 0) == math.inf and sqnr_db(0, 1) == -math.inf


def test_cosine_at_the_ends():
    a = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    assert cosine(a, 2 * a) == 1 and cosine(a, -a) == -1
    assert cosine(0 * a, 0 * a) == 1 and cosine(a, 0 * a) == 0
    assert np.isnan(cosine(a, a * np.nan))
