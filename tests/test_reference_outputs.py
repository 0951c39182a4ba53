"""Outputs of the float model: how often it runs, what is kept, which samples judge."""

import json

import numpy as np
import pytest
from onnx import numpy_helper

import calib8
from deploy import frontends
from deploy.calibration import reference_outputs
from deploy.errors import ModelError
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.feed import open_feed
from deploy.frontends import load
from deploy.runtimes.ort import OrtSession
from deploy.targets import OnnxRuntime
from deploy.tuning import search_options, search_samples
from tests.models import as_float32, make_model, make_node, save_net


@pytest.fixture
def model(tmp_path):
    """Conv, BatchNormalization, Relu, Conv: what is observed is another graph than the file's."""
    rng = np.random.default_rng(0)
    arrays = {"w1": rng.normal(0, 0.3, (4, 3, 3, 3)), "w2": rng.normal(0, 0.3, (4, 4, 3, 3))}
    arrays |= {name: rng.uniform(0.5, 1.5, 4) for name in ("scale", "var")}
    arrays |= {name: rng.normal(0, 0.1, 4) for name in ("shift", "mean")}
    nodes = [
        ("Conv", "x w1", "c"),
        ("BatchNormalization", "c scale shift mean var", "b"),
        ("Relu", "b", "r"),
        ("Conv", "r w2", "y"),
    ]
    ends = {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 4, 4, 4]}
    return save_net(make_model(nodes, *ends, as_float32(arrays), opset=17), tmp_path / "net.onnx")


def images(count):
    return np.random.default_rng(1).normal(size=(count, 3, 8, 8)).astype(np.float32)


def build_and_report(model, x, out, **options):
    """Build without a search; return its work counts, its notes and the int8 engine's accuracy."""
    options = {
        "tuning": search_options.Tuning(effort=0),
        "duration_s": 0.0,
        "threads": 2,
        **options,
    }
    calib8.build(model, x, out=out, **options)
    report = json.loads((out / "report.json").read_text())
    engine = next(e for e in report["engines"] if not e.get("reference"))
    return report["work"], report["notes"], engine["accuracy"]


def test_build_runs_every_image_once(model, tmp_path):
    work, notes, accuracy = build_and_report(model, images(140), tmp_path / "o")
    assert sum(work["calibration_runs"].values()) == 140
    assert work["reference_runs"] == 1 + 4  # the file itself once, inner tensors of four
    assert work["engine_runs"] == {"onnxruntime": 100}
    assert accuracy["samples"] == 100
    (note,) = (n for n in notes if "accuracy was measured" in n)
    assert "inner tensors on 4 of these" in note


@pytest.mark.slow
def test_search_outputs_are_not_computed_again(model, tmp_path, monkeypatch):
    searched = {"targets": ["onnxruntime", "ascend"], "tuning": search_options.Tuning()}
    work, _, accuracy = build_and_report(model, images(60), tmp_path / "o", **searched)
    monkeypatch.setattr(search_samples, "MOST_OUTPUT_BYTES", 0)  # no sample fits
    full_work, _, full_accuracy = build_and_report(model, images(60), tmp_path / "p", **searched)
    assert set(full_work["engine_runs"].values()) == {60}
    # a good split is judged on 48 samples, and the other 12 remain
    assert work["engine_runs"] == {"onnxruntime": 12, "ascend": 12}
    assert accuracy == full_accuracy


def test_closed_session_is_opened_again(model):
    opened = []

    def open_session():
        opened.append(OrtSession.open(model, threads=1, spin=False))
        return opened[-1]

    outputs = reference_outputs.ReferenceOutputs(open_session, ["y"])
    sample = {"x": images(1)}
    first = outputs.get(0, sample)
    outputs.get(0, sample)
    assert len(opened) == 1
    outputs.close_session()
    assert np.array_equal(outputs.get(0, sample)["y"], first["y"])
    assert len(opened) == 2


def test_targets_are_built_without_the_float_session(model, tmp_path, monkeypatch):
    sessions = []
    build = OnnxRuntime.build

    def watched_build(self, request):
        sessions.append(request.evaluation_set.reference_outputs._session)
        return build(self, request)

    monkeypatch.setattr(OnnxRuntime, "build", watched_build)
    build_and_report(model, images(20), tmp_path / "o")
    assert sessions == [None]


def test_second_build_reruns_the_float_model(model, tmp_path):
    x = images(30)
    first_work, _, first_accuracy = build_and_report(model, x, tmp_path / "o")
    second_work, _, second_accuracy = build_and_report(model, x, tmp_path / "o")
    assert first_work["reference_runs"] == 5
    assert second_work["reference_runs"] == 4 + 30  # of 4 the inner tensors
    assert "calibration_runs" not in second_work
    (first_output,), (second_output,) = first_accuracy["outputs"], second_accuracy["outputs"]
    assert second_output["sqnr_db"] == pytest.approx(first_output["sqnr_db"], abs=1e-3)


def test_model_unlike_its_file_is_refused(model, tmp_path, wording):
    loaded = frontends.load(model)
    for tensor in loaded.model.graph.initializer:  # as if folding had gone wrong
        tensor.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(tensor), tensor.name))
    with pytest.raises(ModelError) as refusal:
        build_and_report(loaded, images(20), tmp_path / "o")
    wording.check(refusal.value)


class CountingSession:
    """A session of y = 2 x that counts."""

    def __init__(self):
        self.runs = 0
        self.outputs = OrtSession.open(make_doubling_model(), threads=1).outputs

    def run(self, sample):
        self.runs += 1
        return {"y": 2 * sample["x"], "inner": sample["x"]}


def make_doubling_model():
    return make_model([make_node("Add", "x x", "y")], {"x": ["n", 4]}, {"y": ["n", 4]}, opset=17)


def test_reference_runs_every_sample_once():
    session = CountingSession()
    x = {"x": np.ones((1, 4), np.float32)}
    outputs = reference_outputs.ReferenceOutputs(lambda: session, ["y"], {3, 5})
    outputs.add(3, {"y": x["x"], "inner": x["x"]})
    assert list(outputs.get(3, x)) == ["y"]
    assert session.runs == outputs.runs == 0
    assert [list(outputs.get(5, x)["y"][0]) for _ in range(2)] == [[2] * 4] * 2
    assert session.runs == outputs.runs == 1
    assert 5 in outputs
    for _ in range(2):
        outputs.get(7, x)  # of no sample that is to be kept
    assert session.runs == 3
    assert 7 not in outputs


def test_large_reference_outputs_are_rerun(monkeypatch):
    monkeypatch.setattr(reference_outputs, "MOST_BYTES", 100)
    session = CountingSession()
    x = {"x": np.ones((4, 4), np.float32)}
    outputs = reference_outputs.ReferenceOutputs(lambda: session, ["y"], range(9))
    for key in range(9):
        outputs.get(key, x)
    assert [key in outputs for key in range(9)] == [True] + 8 * [False]  # 64 bytes each
    assert np.array_equal(outputs.get(8, x)["y"], 2 * x["x"])
    assert session.runs == 10


def test_outputs_match_within_float_rounding():
    outputs = {"y": np.linspace(-1, 1, 50, dtype=np.float32), "n": np.array([3])}
    candidates = [
        np.float32(1.0001) * outputs["y"],
        np.float32(1.01) * outputs["y"],
        outputs["y"][:9],
    ]
    matches = [
        reference_outputs.outputs_match(outputs, {**outputs, "y": candidate})
        for candidate in candidates
    ]
    assert matches == [True, False, False]
    assert not reference_outputs.outputs_match(outputs, {"n": outputs["n"]})


def test_evaluation_subset_spreads_over_the_feed():
    loaded = load(make_doubling_model())
    rows = [np.full((1, 4), index, np.float32) for index in range(250)]
    subset = EvaluationSubset(open_feed(rows, loaded.inputs), 100)
    values = [int(sample["x"][0, 0]) for sample in subset.samples()]
    assert len(values) == len(subset) == subset.count == 100
    assert values[0] < 5
    assert values[-1] >= 245
    assert [subset.sample_key(number) for number in range(1, 101)] == list(subset.keys) == values
    spread = [(key, int(sample["x"][0, 0])) for key, sample in subset.spread_with_keys(7)]
    assert [key for key, _ in spread] == [index for _, index in spread]
    assert {index for _, index in spread} <= set(values)


def test_evaluation_leaves_out_bad_samples(tmp_path):
    loaded = load(make_doubling_model())
    for index in range(12):
        np.save(tmp_path / f"{index:02d}.npy", np.full((1, 4), np.float32(index)))
    (tmp_path / "03.npy").write_bytes(b"no array")
    feed = open_feed(tmp_path, loaded.inputs, skip_bad=True)
    evaluation = reference_outputs.make_evaluation_set(feed, loaded.model, 12)
    with feed.samples() as samples:
        for number, sample in enumerate(samples, 1):
            evaluation.reference_outputs.add(feed.sample_key(number), {"y": 2 * sample["x"]})
    pairs = [
        (sample["x"][0, 0], outputs["y"][0, 0])
        for sample, outputs in evaluation.samples_with_outputs(12)
    ]
    assert pairs == [(index, 2 * index) for index in range(12) if index != 3]
    assert evaluation.reference_outputs.runs == 0
    assert len(evaluation.subset.names) == 11
