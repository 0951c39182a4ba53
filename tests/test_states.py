"""Recurrent models, whose states the next call is fed: their task, and what is told of it."""

import json
import math
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.metrics.truth import form_of
from deploy.pipeline.measure import _states

FEATURES, STATE, CLASSES = 8, 16, 5


def recurrent(path):
    """x [1, 8] and h [1, 16] -> shares of 5 classes, and h_next."""
    made = np.random.default_rng(3)
    weights = {
        "w": made.normal(0, 0.5, (FEATURES + STATE, STATE)),
        "v": made.normal(0, 2, (STATE, CLASSES)),
    }
    nodes = [
        helper.make_node("Concat", ["x", "h"], ["both"], axis=1),
        helper.make_node("MatMul", ["both", "w"], ["m"], name="first"),
        helper.make_node("Tanh", ["m"], ["h_next"]),
        helper.make_node("MatMul", ["h_next", "v"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"], axis=1),
    ]
    sizes = {"x": FEATURES, "h": STATE, "y": CLASSES, "h_next": STATE}
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in sizes.items()
    }
    graph = helper.make_graph(
        nodes,
        "recurrent",
        [infos["x"], infos["h"]],
        [infos["y"], infos["h_next"]],
        [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.mark.parametrize("held", [False, True])
def test_a_state_is_no_reason_against_classes_and_is_told(held, tmp_path):
    made = np.random.default_rng(1)
    for n in range(24):
        rows = {"x": made.normal(size=(1, FEATURES)), "h": made.uniform(-1, 1, (1, STATE))}
        (tmp_path / "calls").mkdir(exist_ok=True)
        np.savez(tmp_path / "calls" / f"{n:02}.npz", **{k: np.float32(v) for k, v in rows.items()})
    fed, out = str(tmp_path / "calls"), tmp_path / "out"
    asked = ["build", str(recurrent(tmp_path / "net.onnx")), "--images", fed, "--out", str(out)]
    given = ["--eval-images", fed] if held else []
    run = CliRunner().invoke(cli, [*asked, *given, "--duration", "0", "--effort", "0"])
    assert run.exit_code == 0, run.output
    assert " of 24 best classes as FP32's" in " ".join(run.output.split())
    report = json.loads((out / "report.json").read_text())
    (said,) = (note for note in report["notes"] if "the next call" in note)
    assert "(h_next like h)" in said and "compare whole sequences too" in said


@pytest.mark.parametrize(("decibel", "told"), [(50.0, 1), (math.nan, 1), (140.0, 0), (math.inf, 0)])
def test_of_a_state_that_int8_does_not_touch_nothing_adds_up(decibel, told):
    outputs = [
        SimpleNamespace(name="h_next", sqnr_db=decibel),
        SimpleNamespace(name="y", sqnr_db=9),
    ]
    found = SimpleNamespace(outputs=outputs, carried={"h_next": "h"})
    assert len([*_states([found, found])]) == told


def sampled(count=4, **shapes):
    made = np.random.default_rng(2)
    return [{name: made.normal(size=size) for name, size in shapes.items()} for _ in range(count)]


def test_pictures_and_what_is_fed_alone_are_no_states():
    pictures = sampled(image=(1, 3, 16, 16), mask=(1, 1, 16, 16))
    assert not form_of(sampled(out=(1, 3, 16, 16), more=(1, 9)), inputs=pictures).carried
    series = sampled(x=(1, 1, 40))
    assert not form_of(sampled(rebuilt=(1, 1, 40), code=(1, 8)), inputs=series).carried
    tokens = [{"ids": np.ones((1, 40), np.int64), "mask": np.ones((1, 40), np.int64)}] * 4
    assert not form_of(sampled(scores=(1, 40), code=(1, 8)), inputs=tokens).carried
    states = sampled(x=(1, 9), h=(2, 1, 8), c=(2, 1, 8))
    found = form_of(sampled(y=(1, 4), hn=(2, 1, 8), cn=(2, 1, 8)), inputs=states).carried
    assert found == {"hn": "h", "cn": "c"}
