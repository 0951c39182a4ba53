"""Stored weights by channel, and what a search tried, as a report tells them."""

import dataclasses
import json
import math
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibrators.weights import FIT, ROUNDED
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse
from deploy.report import TargetPart, TrialRow, to_markdown
from deploy.report.report import Report
from deploy.report.report_rows import STRIPS, weight_rows
from deploy.report.sections import strip, trials
from deploy.targets.stored import StoredWeight, stored_in, stored_weight
from deploy.targets.tensorrt.cache_qdq import to_qdq

QUICK = ("--effort", 0, "--duration", 0, "--accept")


def rows(*amax, scales=None):
    """One weight of int8 rows with these largest values, in steps."""
    stored = np.array([[value, -1 if value else 0] for value in amax], np.int8)
    scales = np.array([0.5], np.float32) if scales is None else np.array(scales, np.float32)
    return weight_rows([stored_weight("n", "Conv", stored, scales)])


# what is told of a weight


def test_one_scale_for_all_leaves_a_small_channel_few_steps():
    (row,) = rows(127, 3, 64, -127)
    assert (row.channels, row.scales, row.worst[:2]) == (4, 1, (1, 2))
    assert row.used == pytest.approx(3 / 127) and row.ratio == pytest.approx(127 / 3)
    assert (row.least, row.largest) == (1.5, 63.5) and row.strip == (63.5, 1.5, 32.0, 63.5)


def test_a_scale_each_uses_the_whole_grid_however_far_channels_lie_apart():
    (row,) = rows(127, -128, 127, scales=[1, 0.01, 0.1])  # of -128 no step is more than whole
    assert row.used == 1 and row.scales == 3 and row.worst == (1, 2, 0)
    assert row.ratio == pytest.approx(100, rel=0.01)


def test_dead_channels_are_counted_apart():
    (row,) = rows(127, 0, 127, 127, scales=[1, 1, 1e-9, 0.5])
    assert row.dead == 2 and row.ratio == 2 and 1 not in row.worst and 2 not in row.worst
    (row,) = rows(0, 0)
    assert row.dead == 2 and row.largest == 0 and strip(row) == ""


def test_channels_that_are_alike_have_no_worst():
    (row,) = rows(127, -127)
    assert row.worst == () and row.ratio == 1


def test_the_worst_weights_have_a_strip_of_few_bars():
    wide = np.full((1000, 2), 127, np.int8)
    wide[617] = 1
    many = [stored_weight(f"n{i}", "Conv", wide[: 1000 - i], np.ones(1)) for i in range(9)]
    found = weight_rows(many)
    assert sum(bool(row.strip) for row in found) == STRIPS
    (row,) = (row for row in found if row.node == "n0")
    assert len(row.strip) <= 96 and row.strip.count(1.0) == 1  # the least of a run is seen
    drawn = strip(row)
    assert "each bar is the least of a run of channels" in drawn and drawn.count("v-") == 91


# what is read of a model


def net(op, shape, channels=6, **attributes):
    """A model of one node, and its weight, whose largest value is 9."""
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight.reshape(-1)[0] = 9
    x = {"Gemm": ["n", 6], "MatMul": ["n", 6]}.get(op, ["n", channels, 8, 8])
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], name="node", **attributes)],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    ), weight


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "inside", "scales"),
    [
        ("Conv", (4, 6, 3, 3), {}, (1, 2, 3), 4),
        ("ConvTranspose", (6, 5, 2, 2), {}, (0, 2, 3), 5),
        ("Gemm", (6, 7), {}, (0,), 7),
        ("Gemm", (7, 6), {"transB": 1}, (1,), 7),
        ("MatMul", (6, 7), {}, (0,), 7),
    ],
)
def test_output_channels_are_found_in_every_layout(op, shape, attributes, inside, scales):
    model, weight = net(op, shape, **attributes)
    plan = analyse(model, TENSORRT)
    (found,) = stored_in(to_qdq(model, plan, dict.fromkeys(plan.activations, np.float32(0.1))))
    assert (found.node, found.op, found.scales.size) == ("node", op, scales)
    np.testing.assert_allclose(found.amax, np.abs(weight).max(axis=inside), rtol=1e-6)
    assert (found.used == 1).all()


def test_groups_of_a_transposed_convolution_share_one_scale():
    model, weight = net("ConvTranspose", (6, 2, 2, 2), group=3)
    plan = analyse(model, TENSORRT)
    (found,) = stored_in(to_qdq(model, plan, dict.fromkeys(plan.activations, np.float32(0.1))))
    want = np.abs(weight).reshape(3, 2, 2, 4).max(axis=(1, 3)).reshape(-1)
    np.testing.assert_allclose(found.amax, want, rtol=1e-6)
    assert found.scales.size == 1 and found.used.min() == pytest.approx(want.min() / 9)


# through a build


def test_each_target_tells_the_weights_of_its_files(run, small_cnn, pictures, tmp_path):
    words = ("build", small_cnn, "--images", pictures, *QUICK, "--out", tmp_path)
    code, _, err = run(*words, "--target", "onnxruntime,tensorrt,ascend")
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    floats = {t.name: numpy_helper.to_array(t) for t in onnx.load(small_cnn).graph.initializer}
    want = np.abs(floats["w4"]).max(axis=1)
    for target in report["targets"]:
        weights = {row["node"]: row for row in target["weights"]}
        gemm = weights["Gemm_logits"]
        alone = target["name"] == "ascend"  # AMCT gives a Gemm one scale
        assert gemm["channels"] == 10 and gemm["scales"] == (1 if alone else 10)
        assert gemm["least"] == pytest.approx(want.min(), rel=0.01)
        assert gemm["largest"] == pytest.approx(want.max(), rel=0.01)
        assert gemm["used"] == (pytest.approx(want.min() / want.max(), rel=0.01) if alone else 1)
        assert gemm["worst"][0] == want.argmin()
        int8 = {n["name"] for n in target["nodes"] if n["op"] in ("Conv", "Gemm")}
        int8 -= {n["name"] for n in target["nodes"] if n["precision"] == "float32"}
        assert set(weights) == int8
    text, page = (tmp_path / name for name in ("report.md", "report.html"))
    assert text.read_text().count("| weight | channels | scales | dead | used |") == 3
    assert page.read_text().count("largest |w| of 10 channels") == 3


def test_weights_of_matmuls_with_scales_of_their_own_inputs_are_told(run, tmp_path):
    onnx.save(net("MatMul", (6, 7))[0], tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32))
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", *QUICK)
    code, _, err = run(*words, "--dynamic-matmul", "--out", tmp_path / "out")
    assert code == 0, err
    (target,) = json.loads((tmp_path / "out/report.json").read_text())["targets"]
    (row,) = target["weights"]
    assert (row["node"], row["channels"], row["scales"]) == ("node", 7, 7)
    assert row["largest"] == pytest.approx(9, rel=1e-4)


def test_fp8_weights_are_told_in_real_units(run, tmp_path):
    onnx.save(net("Conv", (32, 32, 3, 3), channels=32)[0], tmp_path / "net.onnx")
    x = np.random.default_rng(1).normal(size=(2, 32, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", *QUICK)
    words += ("--target", "tensorrt", "--precision", "fp8", "--out", tmp_path / "out")
    code, _, err = run(*words)
    assert code == 0, err
    (target,) = json.loads((tmp_path / "out/report.json").read_text())["targets"]
    (row,) = target["weights"]
    assert row["scales"] == 32 and row["used"] == 1
    assert row["largest"] == pytest.approx(9, rel=1e-5)
    others = {o["method"] for o in target["tensors"][0]["histogram"]["others"]}
    assert "minmax" in others and "entropy" not in others  # which is TensorRT's for int8


# Markdown, and what was tried


def test_markdown_has_the_worst_weights_and_counts_the_others():
    many = [
        stored_weight(f"n{i}", "Conv", np.array([[127], [i + 1]], np.int8), np.ones(1))
        for i in range(20)
    ]
    text = to_markdown(Report(targets=(TargetPart(name="t", weights=weight_rows(many[::-1])),)))
    table = re.findall(r"^\| (n\d+) \| 2 \| 1 \|", text, re.MULTILINE)
    assert table == [f"n{i}" for i in range(8)] and "and 12 more" in text


def test_what_was_tried_stands_side_by_side_with_what_was_built_marked():
    tried = (
        TrialRow(what="all in int8, <mse>", sqnr_db=20.0, time=0.5),
        TrialRow(what="all in int8, minmax", sqnr_db=40.0, time=0.5, taken=True),
        TrialRow(what="all in float", sqnr_db=math.inf, time=1.0),
        TrialRow(what="broken", sqnr_db=math.nan, time=0.25),
        TrialRow(what="noise", sqnr_db=-3.0, time=0.25),
    )
    html = trials(tried)
    lengths = re.findall(r'<rect class="(\w+)" width="([\d.]+)" y="2"', html)
    assert lengths == [("tried", "60.0"), ("kept", "120.0"), ("tried", "120.0"),
                       ("tried", "0.0"), ("tried", "0.0")]  # fmt: skip
    times = re.findall(r'<rect class="time" width="([\d.]+)"', html)
    assert times == ["60.0", "60.0", "120.0", "30.0", "30.0"]
    assert "<mse>" not in html and html.count(">yes</td>") == 1


def test_a_channel_uses_the_grid_by_its_largest_weight_or_pair():
    amax, scales = np.array([12.7, 1.27, 1.27]), np.array([0.1])
    pairs = np.array([0.0, FIT - ROUNDED, (FIT - ROUNDED) / 2])
    weight = StoredWeight(node="n", op="Conv", amax=amax, scales=scales)
    assert weight.used.tolist() == pytest.approx([1, 0.1, 0.1]) and not weight.saturates
    paired = dataclasses.replace(weight, pairs=pairs)
    assert paired.used.tolist() == pytest.approx([1, 1, 0.5]) and not paired.saturates
    assert not dataclasses.replace(weight, pairs=np.array([FIT])).saturates
    assert dataclasses.replace(weight, pairs=np.array([FIT + 1])).saturates
