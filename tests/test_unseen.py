"""What a search makes of inputs that it has not seen: ranges without its own samples, caution."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy import pipeline
from deploy.cli import main
from deploy.method import NO_CHOICES, Choices, Method
from deploy.pipeline import calibrate
from deploy.runtimes.ort import Bound, OrtSession
from deploy.targets import TARGETS
from deploy.targets.base import BuildRequest
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tuning.probe import Noise
from deploy.tuning.search_options import Trial
from deploy.tuning.search_samples import MANY, unseen

SAME = {"pads": [1, 1, 1, 1]}


@pytest.fixture
def model(tmp_path):
    """Conv, Relu, Conv."""
    rng = np.random.default_rng(0)
    weights = {"w1": rng.normal(0, 0.3, (8, 3, 3, 3)), "w2": rng.normal(0, 0.2, (4, 8, 3, 3))}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1"], ["c"], name="/c", **SAME),
            helper.make_node("Relu", ["c"], ["r"], name="/r"),
            helper.make_node("Conv", ["r", "w2"], ["y"], name="/y", **SAME),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()],
    )
    path = tmp_path / "net.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, path)
    return path


def images(count, *, loud=()):
    """Noise, ten times as strong at some places."""
    x = np.random.default_rng(1).normal(size=(count, 3, 12, 12)).astype(np.float32)
    x[list(loud)] *= 10
    return x


@pytest.fixture
def request_for(model, tmp_path):
    def made(target, x):
        np.save(tmp_path / "x.npy", x)
        found = calibrate(model, tmp_path / "x.npy", targets=(target,))
        request = BuildRequest(
            subject=found.subject,
            folder=tmp_path,
            ranges=found.ranges,
            feed=found.feed,
            manifest={},
        )
        return TARGETS[target](), request

    return made


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_what_the_judges_alone_show_is_in_no_range_of_the_search(target, request_for):
    made_for, request = request_for(target, images(20, loud=(3, 7)))
    judges = [sample for at, sample in enumerate(request.feed.first(20)) if at in (3, 7)]
    search = unseen(made_for, request, judges)
    wanted = OrtSession.open(request.model).run(judges[0])["y"]

    def lost(one):
        got = OrtSession.open(made_for.trial(one)).run(judges[0])["y"]
        return np.square(got - wanted).sum() / np.square(wanted).sum()

    assert lost(request) < 0.01 < 0.3 < lost(search)  # what they show is clipped


@pytest.mark.parametrize(("target", "runs"), [("onnxruntime", 3), ("tensorrt", 3), ("ascend", 17)])
def test_where_it_can_be_the_judges_alone_are_run_again(target, runs, request_for, monkeypatch):
    made_for, request = request_for(target, images(20))
    ran: list[int] = []
    for way in (OrtSession, Bound):
        run = way.run
        counted = lambda self, feed, run=run: ran.append(1) or run(self, feed)  # noqa: E731
        monkeypatch.setattr(way, "run", counted)
    judges = request.feed.first(3)
    search = unseen(made_for, request, judges)
    assert len(ran) == runs and search is not request


@pytest.mark.parametrize("count", [MANY + 10, 3])
def test_of_many_samples_a_few_make_no_difference_and_none_may_be_left(count, request_for):
    made_for, request = request_for("onnxruntime", images(count))
    judges = request.feed.first(3)
    assert unseen(made_for, request, judges) is request


def test_a_configuration_that_wants_every_sample_keeps_its_ranges(request_for, tmp_path):
    config = tmp_path / "all.cfg"
    config.write_text("batch_num: 20\n")
    _, request = request_for("ascend", images(20))
    wants_all = TARGETS["ascend"](config=config)
    assert unseen(wants_all, request, request.feed.first(2)) is request


def trial(method, *powers):
    choices = Choices(method=Method.of(method)) if method else NO_CHOICES
    noise = Noise({"y": np.array(powers)})
    return Trial(what="", in_float=frozenset(), choices=choices, noise=noise, time=0.5)


def test_what_clips_must_win_more_than_what_does_not():
    little, less = 0.002, 0.001  # 27 and 30 dB
    assert trial("lp", little).cost(2.0) < trial("mse", less).cost(2.0)
    assert trial(None, less).cost(2.0) == trial("mse", less).cost(2.0)
    assert trial("minmax", little).cost(2.0) == trial("lp", little).cost(2.0)
    assert trial("mse", 0.01).cost(2.0) < trial("lp", 0.02).cost(2.0)  # 20 and 17 dB
    as_float = replace(trial("mse", less), is_float=True)  # where no range clips
    assert as_float.cost(2.0) == trial("minmax", less).cost(2.0)


def build(model, x, out, *words):
    np.save(out.parent / "x.npy", x)
    given = ["build", model, "--images", out.parent / "x.npy", "--out", out, "--duration", 0]
    try:
        main([str(word) for word in (*given, *words)])
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_ascend_obeys_a_plan_that_wants_nothing_clipped_and_its_config_says_so(model, tmp_path):
    x = images(20) ** 3  # of long tails, which AMCT's search clips
    out, words = tmp_path / "o", ("--target", "ascend", "--repair", "none", "--accept")
    plan = tmp_path / "net.plan.toml"
    found = {}
    for method in ("", 'method = "minmax"\n', 'methods = { "x" = "minmax" }\n'):
        plan.write_text(f'schema = "calib8-plan/1"\n[ascend]\n{method}')
        assert build(model, x, out, *words, "--plan", plan, "--refresh") == 0
        config = json.loads((out / "net_config.json").read_text())
        ranges = {
            name: layer["activation_quant_params"].get("search_range", [0.7, 1.3])
            for name, layer in config.items()
            if isinstance(layer, dict) and "activation_quant_params" in layer
        }
        found[method] = (ranges, (out / "net_record.txt").read_text())
    (own, plain), (whole, every), (one, first) = found.values()
    assert own == {"/c": [0.7, 1.3], "/y": [0.7, 1.3]}
    assert whole == {"/c": [1.0, 1.3], "/y": [1.0, 1.3]}
    assert one == {"/c": [1.0, 1.3], "/y": [0.7, 1.3]}
    assert plain != every and plain != first


def test_ascend_refuses_a_method_that_amct_does_not_have(model, tmp_path, capsys):
    plan = tmp_path / "net.plan.toml"
    plan.write_text('schema = "calib8-plan/1"\n[ascend]\nmethod = "entropy"\n')
    words = ("--target", "ascend", "--plan", plan)
    assert build(model, images(8), tmp_path / "o", *words) == 1
    said = capsys.readouterr().err
    assert "takes the method minmax or none, got 'entropy'" in said and said.count("\n") == 1


def test_a_search_for_ascend_tries_no_clipping_unless_a_configuration_says_how(model, tmp_path):
    config = tmp_path / "own.cfg"
    config.write_text("batch_num: 20\n")
    x = images(20)
    for words, tried in (((), True), (("--ascend-config", config), False)):
        out = tmp_path / f"o{tried}"
        assert build(model, x, out, "--target", "ascend", "--accept", *words) == 0
        assert ("all in int8, minmax" in (out / "net.plan.toml").read_text()) == tried


def test_a_search_asks_what_a_target_demands_no_more_often_the_more_it_tries(
    small_cnn, pictures, tmp_path, monkeypatch
):
    asked: list[int] = []
    demand = OnnxRuntime.demand
    monkeypatch.setattr(
        OnnxRuntime, "demand", lambda self, subject: asked.append(1) or demand(self, subject)
    )
    report = pipeline.build(small_cnn, pictures, out=tmp_path, duration_s=0)
    # 13 where each trial asks; what judges the one that was chosen asks once more
    assert len(asked) <= report.targets[0].search.probes + 1
