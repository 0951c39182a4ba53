"""Float outputs of the samples that judge: kept while observing, run where they are not."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy import frontends, pipeline
from deploy.calibration import reference
from deploy.calibration.reference import FloatOutputs, alike, judges_of
from deploy.feed.evaluation import Part
from deploy.feed.feed import open_feed
from deploy.frontends import load
from deploy.runtimes.ort import OrtSession
from deploy.tuning import search_options


@pytest.fixture
def model(tmp_path):
    """Conv, BatchNormalization, Relu, Conv: what is observed is another graph than the file's."""
    rng = np.random.default_rng(0)
    arrays = {"w1": rng.normal(0, 0.3, (4, 3, 3, 3)), "w2": rng.normal(0, 0.3, (4, 4, 3, 3))}
    arrays |= {name: rng.uniform(0.5, 1.5, 4) for name in ("scale", "var")}
    arrays |= {name: rng.normal(0, 0.1, 4) for name in ("shift", "mean")}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1"], ["c"], name="/c"),
            helper.make_node(
                "BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["b"], name="/b"
            ),
            helper.make_node("Relu", ["b"], ["r"], name="/r"),
            helper.make_node("Conv", ["r", "w2"], ["y"], name="/y"),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4, 4, 4])],
        [numpy_helper.from_array(np.float32(value), name) for name, value in arrays.items()],
    )
    path = tmp_path / "net.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, path)
    return path


def images(count):
    return np.random.default_rng(1).normal(size=(count, 3, 8, 8)).astype(np.float32)


def built(model, x, out, **words):
    """What a build without a search counted and noted: (work, notes, int8 engine's samples)."""
    words = {"tuning": search_options.Tuning(effort=0), "duration_s": 0.0, "threads": 2, **words}
    pipeline.build(model, x, out=out, **words)
    report = json.loads((out / "report.json").read_text())
    engine = next(e for e in report["engines"] if not e.get("reference"))
    return report["work"], report["notes"], engine["accuracy"]


def test_a_build_runs_each_model_once_over_each_image_and_says_how_many_judged(model, tmp_path):
    work, notes, accuracy = built(model, images(140), tmp_path / "o")
    assert sum(work["calibration_runs"].values()) == 140
    assert work["reference_runs"] == 1 + 4  # the file itself once, inner tensors of four
    assert work["engine_runs"] == {"onnxruntime": 100} and accuracy["samples"] == 100
    (note,) = (n for n in notes if "accuracy was measured" in n)
    assert "inner tensors on 4 of these" in note


def test_a_second_build_has_nothing_kept_and_runs_the_users_file_with_the_same_figures(
    model, tmp_path
):
    x = images(30)
    first, _, figures = built(model, x, tmp_path / "o")
    again, _, same = built(model, x, tmp_path / "o")
    assert first["reference_runs"] == 5 and again["reference_runs"] == 30
    assert "calibration_runs" not in again
    assert same["outputs"][0]["sqnr_db"] == pytest.approx(
        figures["outputs"][0]["sqnr_db"], abs=1e-3
    )


def test_what_was_kept_of_another_model_than_the_users_file_judges_nothing(model, tmp_path):
    _, _, wanted = built(model, images(20), tmp_path / "plain")
    loaded = frontends.load(model)
    for tensor in loaded.model.graph.initializer:  # as if folding had gone wrong
        tensor.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(tensor), tensor.name))
    work, _, accuracy = built(loaded, images(20), tmp_path / "o")
    assert work["reference_runs"] == 20 + 4  # inner tensors are still the observed model's
    assert accuracy["outputs"][0]["sqnr_db"] < 10 < wanted["outputs"][0]["sqnr_db"] - 10


class Counting:
    """A session of y = 2 x that counts."""

    def __init__(self):
        self.runs = 0
        self.outputs = OrtSession.open(_doubling(), threads=1).outputs

    def run(self, sample):
        self.runs += 1
        return {"y": 2 * sample["x"], "inner": sample["x"]}


def _doubling():
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_sample_is_run_once_and_only_its_outputs_are_kept():
    session, x = Counting(), {"x": np.ones((1, 4), np.float32)}
    outputs = FloatOutputs(lambda: session, ["y"], {3, 5})
    outputs.add(3, {"y": x["x"], "inner": x["x"]})
    assert list(outputs.of(3, x)) == ["y"] and session.runs == outputs.runs == 0
    assert [list(outputs.of(5, x)["y"][0]) for _ in range(2)] == [[2] * 4] * 2
    assert session.runs == outputs.runs == 1 and 5 in outputs
    for _ in range(2):
        outputs.of(7, x)  # of no sample that is to be kept
    assert session.runs == 3 and 7 not in outputs


def test_outputs_too_large_to_be_kept_are_made_again(monkeypatch):
    monkeypatch.setattr(reference, "MOST_BYTES", 100)
    session, x = Counting(), {"x": np.ones((4, 4), np.float32)}
    outputs = FloatOutputs(lambda: session, ["y"], range(9))
    for key in range(9):
        outputs.of(key, x)
    assert [key in outputs for key in range(9)] == [True] + 8 * [False]  # 64 bytes each
    assert np.array_equal(outputs.of(8, x)["y"], 2 * x["x"]) and session.runs == 10


def test_models_are_alike_but_for_what_float_rounds():
    one = {"y": np.linspace(-1, 1, 50, dtype=np.float32), "n": np.array([3])}
    assert alike(one, {"y": one["y"] * np.float32(1.0001), "n": one["n"]})
    assert not alike(one, {"y": one["y"] * np.float32(1.01), "n": one["n"]})
    assert not alike(one, {"y": one["y"][:9], "n": one["n"]}) and not alike(one, {"n": one["n"]})


def test_the_samples_that_judge_are_spread_over_the_feed_and_keep_their_keys():
    loaded = load(_doubling())
    rows = [np.full((1, 4), at, np.float32) for at in range(250)]
    part = Part(open_feed(rows, loaded.inputs), 100)
    seen = [int(sample["x"][0, 0]) for sample in part.samples()]
    assert len(seen) == len(part) == part.count == 100 and seen[0] < 5 and seen[-1] >= 245
    assert [part.key(number) for number in range(1, 101)] == list(part.keys) == seen
    few = [(key, int(sample["x"][0, 0])) for key, sample in part.spread_with_keys(7)]
    assert [key for key, _ in few] == [at for _, at in few] and {at for _, at in few} <= set(seen)


def test_of_bad_samples_none_judges_and_the_others_keep_what_was_said(tmp_path):
    loaded = load(_doubling())
    for at in range(12):
        np.save(tmp_path / f"{at:02d}.npy", np.full((1, 4), np.float32(at)))
    (tmp_path / "03.npy").write_bytes(b"no array")
    feed = open_feed(tmp_path, loaded.inputs, skip_bad=True)
    judges = judges_of(feed, loaded.model, 12)
    with feed.samples() as samples:
        for number, sample in enumerate(samples, 1):
            judges.outputs.add(feed.key(number), {"y": 2 * sample["x"]})
    heard = [(sample["x"][0, 0], said["y"][0, 0]) for sample, said in judges.heard(12)]
    assert heard == [(at, 2 * at) for at in range(12) if at != 3]
    assert judges.outputs.runs == 0 and len(judges.part.names) == 11
