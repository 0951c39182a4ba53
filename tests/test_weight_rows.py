"""Weights in a report: channels, scales, used steps, for every target."""

import dataclasses
import json
import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibrators.weights import PAIR_LIMIT, PAIR_ROUNDING
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse
from deploy.report import Report, to_markdown
from deploy.report.parts import TargetPart
from deploy.report.report_rows import weight_row
from deploy.targets.stored_weights import StoredWeight, make_stored_weight, read_stored_weights
from deploy.targets.tensorrt.cache_qdq import to_qdq
from tests.models import build_net, make_model, make_node

QUICK = ("--effort", 0, "--duration", 0, "--accept")


def rows(*amax, scales=None):
    """One weight of int8 rows with these largest values, in steps."""
    largest = np.array(amax, np.int8)
    stored = np.stack([largest, -np.sign(largest)], axis=1)
    scales = np.array([0.5], np.float32) if scales is None else np.array(scales, np.float32)
    return [weight_row(make_stored_weight("n", "Conv", stored, scales))]


def test_shared_scale_leaves_channels_few_steps():
    (row,) = rows(127, 3, 64, -127)
    assert (row.channels, row.scales, row.worst[:2]) == (4, 1, (1, 2))
    assert row.used == pytest.approx(3 / 127)
    assert row.ratio == pytest.approx(127 / 3)
    assert (row.least, row.largest) == (1.5, 63.5)
    (row,) = rows(127, -127)
    assert row.worst == ()
    assert row.ratio == 1


def test_scales_per_channel_use_all_steps():
    (row,) = rows(127, -128, 127, scales=[1, 0.01, 0.1])  # of -128 no step is more than whole
    assert row.used == 1
    assert row.scales == 3
    assert row.worst == (1, 2, 0)
    assert row.ratio == pytest.approx(100, rel=0.01)


def test_dead_channels_are_counted():
    (row,) = rows(127, 0, 127, 127, scales=[1, 1, 1e-9, 0.5])
    assert row.dead == 2
    assert row.ratio == 2
    assert 1 not in row.worst
    assert 2 not in row.worst
    (row,) = rows(0, 0)
    assert row.dead == 2
    assert row.largest == 0


def net(op, shape, channels=6, **attributes):
    """A model of one node, and its weight, whose largest value is 9."""
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight.reshape(-1)[0] = 9
    x = {"Gemm": ["n", 6], "MatMul": ["n", 6]}.get(op, ["n", channels, 8, 8])
    nodes = [make_node(op, "x w", "y", name="node", **attributes)]
    return make_model(nodes, {"x": x}, {"y": None}, {"w": weight}), weight


def stored_weight(model):
    plan = analyse(model, TENSORRT)
    scales = dict.fromkeys(plan.activations, np.float32(0.1))
    (result,) = read_stored_weights(to_qdq(model, plan, scales))
    return result


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "inner_axes", "scales"),
    [
        ("Conv", (4, 6, 3, 3), {}, (1, 2, 3), 4),
        ("ConvTranspose", (6, 5, 2, 2), {}, (0, 2, 3), 5),
        ("Gemm", (6, 7), {}, (0,), 7),
        ("Gemm", (7, 6), {"transB": 1}, (1,), 7),
        ("MatMul", (6, 7), {}, (0,), 7),
    ],
)
def test_output_channels_of_every_layout(op, shape, attributes, inner_axes, scales):
    model, weight = net(op, shape, **attributes)
    result = stored_weight(model)
    assert (result.node, result.op, result.scales.size) == ("node", op, scales)
    np.testing.assert_allclose(result.amax, np.abs(weight).max(axis=inner_axes), rtol=1e-6)
    assert (result.used == 1).all()


def test_transposed_groups_share_one_scale():
    model, weight = net("ConvTranspose", (6, 2, 2, 2), group=3)
    result = stored_weight(model)
    want = np.abs(weight).reshape(3, 2, 2, 4).max(axis=(1, 3)).reshape(-1)
    np.testing.assert_allclose(result.amax, want, rtol=1e-6)
    assert result.scales.size == 1
    assert result.used.min() == pytest.approx(want.min() / 9)


def test_every_target_reports_its_weights(run, small_cnn, pictures, tmp_path):
    arguments = ("build", small_cnn, "--images", pictures, *QUICK, "--out", tmp_path)
    run.ok(*arguments, "--target", "onnxruntime,tensorrt,ascend")
    report = json.loads((tmp_path / "report.json").read_text())
    floats = {t.name: numpy_helper.to_array(t) for t in onnx.load(small_cnn).graph.initializer}
    want = np.abs(floats["w4"]).max(axis=1)
    for target in report["targets"]:
        weights = {row["node"]: row for row in target["weights"]}
        gemm = weights["Gemm_logits"]
        has_one_scale = target["name"] == "ascend"  # AMCT gives a Gemm one scale
        assert gemm["channels"] == 10
        assert gemm["scales"] == (1 if has_one_scale else 10)
        assert gemm["least"] == pytest.approx(want.min(), rel=0.01)
        assert gemm["largest"] == pytest.approx(want.max(), rel=0.01)
        assert gemm["used"] == (
            pytest.approx(want.min() / want.max(), rel=0.01) if has_one_scale else 1
        )
        assert gemm["worst"][0] == want.argmin()
        int8 = {n["name"] for n in target["nodes"] if n["op"] in ("Conv", "Gemm")}
        int8 -= {n["name"] for n in target["nodes"] if n["precision"] == "float32"}
        assert set(weights) == int8
    text = (tmp_path / "report.md").read_text()
    assert text.count("| weight | channels | scales | dead | used |") == 3


def built_target(model, x_shape, folder, *arguments):
    """The one target of a build's report."""
    x = np.random.default_rng(1).normal(size=x_shape)
    out = build_net(model, x, folder, "--effort", 0, "--accept", *arguments)
    (target,) = json.loads((out / "report.json").read_text())["targets"]
    return target


def test_dynamic_matmul_weights_are_reported(tmp_path):
    model, _ = net("MatMul", (6, 7))
    (row,) = built_target(model, (4, 6), tmp_path, "--dynamic-matmul")["weights"]
    assert (row["node"], row["channels"], row["scales"]) == ("node", 7, 7)
    assert row["largest"] == pytest.approx(9, rel=1e-4)


def test_fp8_weights_have_real_units(tmp_path):
    model, _ = net("Conv", (32, 32, 3, 3), channels=32)
    arguments = ("--target", "tensorrt", "--precision", "fp8")
    target = built_target(model, (2, 32, 8, 8), tmp_path, *arguments)
    (row,) = target["weights"]
    assert row["scales"] == 32
    assert row["used"] == 1
    assert row["largest"] == pytest.approx(9, rel=1e-5)


def test_markdown_sorts_weights_worst_first():
    weight_list = [
        make_stored_weight(f"n{i}", "Conv", np.array([[127], [i + 1]], np.int8), np.ones(1))
        for i in range(20)
    ]
    text = to_markdown(
        Report(targets=(TargetPart(name="t", weights=tuple(map(weight_row, weight_list[::-1]))),))
    )
    table = re.findall(r"^\| (n\d+) \| 2 \| 1 \|", text, re.MULTILINE)
    assert table == [f"n{i}" for i in range(20)]


def test_used_grid_counts_weights_and_pairs():
    amax, scales = np.array([12.7, 1.27, 1.27]), np.array([0.1])
    pairs = np.array([0.0, PAIR_LIMIT - PAIR_ROUNDING, (PAIR_LIMIT - PAIR_ROUNDING) / 2])
    weight = StoredWeight(node="n", op="Conv", amax=amax, scales=scales)
    assert weight.used.tolist() == pytest.approx([1, 0.1, 0.1])
    assert not weight.saturates
    paired = dataclasses.replace(weight, pairs=pairs)
    assert paired.used.tolist() == pytest.approx([1, 1, 0.5])
    assert not paired.saturates
    assert not dataclasses.replace(weight, pairs=np.array([PAIR_LIMIT])).saturates
    assert dataclasses.replace(weight, pairs=np.array([PAIR_LIMIT + 1])).saturates
