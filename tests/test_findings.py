"""What a report finds of weights, ranges, outputs and samples."""

import dataclasses
import json
import math
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from calibrators.entropy import entropy
from calibrators.histogram import Histogram
from calibrators.mse import mse
from calibrators.weights import PAIR_LIMIT, PAIR_ROUNDING
from deploy.graph.bounds import find_bounds, find_range_limits
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse
from deploy.metrics.accuracy import Comparison
from deploy.metrics.output_form import derive_form
from deploy.pipeline.evaluate import CandidateImages
from deploy.report import Report, to_html, to_json, to_markdown
from deploy.report.charts import front_figure, weight_strip
from deploy.report.parts import EngineRow, SearchPart, SplitRow, TargetPart
from deploy.report.previews import box_rows
from deploy.report.report_rows import MAX_STRIPS, weight_rows
from deploy.targets.stored_weights import StoredWeight, make_stored_weight, read_stored_weights
from deploy.targets.tensorrt.cache_qdq import to_qdq
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.detections import Detections, scale_to_pixels
from deploy.tasks.evaluation_task import MOST, ClassExample, ExampleSelection
from deploy.tasks.slices import OutputSlice, split_output
from deploy.tasks.vectors import Classes
from deploy.tensors import TensorSpec
from tests.models import as_float32, build_net, make_model, make_node, run_net
from tests.outputs import softmax

QUICK = ("--effort", 0, "--duration", 0, "--accept")


def rows(*amax, scales=None):
    """One weight of int8 rows with these largest values, in steps."""
    stored = np.array([[value, -1 if value else 0] for value in amax], np.int8)
    scales = np.array([0.5], np.float32) if scales is None else np.array(scales, np.float32)
    return weight_rows([make_stored_weight("n", "Conv", stored, scales)])


# what is told of a weight
def test_one_scale_for_all_leaves_a_small_channel_few_steps():
    (row,) = rows(127, 3, 64, -127)
    assert (row.channels, row.scales, row.worst[:2]) == (4, 1, (1, 2))
    assert row.used == pytest.approx(3 / 127)
    assert row.ratio == pytest.approx(127 / 3)
    assert (row.least, row.largest) == (1.5, 63.5)
    assert row.strip == (63.5, 1.5, 32.0, 63.5)
    (row,) = rows(127, -127)
    assert row.worst == ()
    assert row.ratio == 1


def test_a_scale_each_uses_the_whole_grid_however_far_channels_lie_apart():
    (row,) = rows(127, -128, 127, scales=[1, 0.01, 0.1])  # of -128 no step is more than whole
    assert row.used == 1
    assert row.scales == 3
    assert row.worst == (1, 2, 0)
    assert row.ratio == pytest.approx(100, rel=0.01)


def test_dead_channels_are_counted_apart():
    (row,) = rows(127, 0, 127, 127, scales=[1, 1, 1e-9, 0.5])
    assert row.dead == 2
    assert row.ratio == 2
    assert 1 not in row.worst
    assert 2 not in row.worst
    (row,) = rows(0, 0)
    assert row.dead == 2
    assert row.largest == 0
    assert weight_strip(row) == ""


def test_the_worst_weights_have_a_strip_of_few_bars():
    wide = np.full((1000, 2), 127, np.int8)
    wide[617] = 1
    weights = [make_stored_weight(f"n{i}", "Conv", wide[: 1000 - i], np.ones(1)) for i in range(9)]
    rows_of_weights = weight_rows(weights)
    assert sum(bool(row.strip) for row in rows_of_weights) == MAX_STRIPS
    (row,) = (row for row in rows_of_weights if row.node == "n0")
    assert len(row.strip) <= 96
    assert row.strip.count(1.0) == 1  # the least of a run is seen
    drawn = weight_strip(row)
    assert "each bar is the least of a run of channels" in drawn
    assert drawn.count("v-") == 91


# what is read of a model
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
    result = stored_weight(model)
    assert (result.node, result.op, result.scales.size) == ("node", op, scales)
    np.testing.assert_allclose(result.amax, np.abs(weight).max(axis=inside), rtol=1e-6)
    assert (result.used == 1).all()


def test_groups_of_a_transposed_convolution_share_one_scale():
    model, weight = net("ConvTranspose", (6, 2, 2, 2), group=3)
    result = stored_weight(model)
    want = np.abs(weight).reshape(3, 2, 2, 4).max(axis=(1, 3)).reshape(-1)
    np.testing.assert_allclose(result.amax, want, rtol=1e-6)
    assert result.scales.size == 1
    assert result.used.min() == pytest.approx(want.min() / 9)


# through a build
def test_each_target_tells_the_weights_of_its_files(run, small_cnn, pictures, tmp_path):
    arguments = ("build", small_cnn, "--images", pictures, *QUICK, "--out", tmp_path)
    run.ok(*arguments, "--target", "onnxruntime,tensorrt,ascend")
    report = json.loads((tmp_path / "report.json").read_text())
    floats = {t.name: numpy_helper.to_array(t) for t in onnx.load(small_cnn).graph.initializer}
    want = np.abs(floats["w4"]).max(axis=1)
    for target in report["targets"]:
        weights = {row["node"]: row for row in target["weights"]}
        gemm = weights["Gemm_logits"]
        alone = target["name"] == "ascend"  # AMCT gives a Gemm one scale
        assert gemm["channels"] == 10
        assert gemm["scales"] == (1 if alone else 10)
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


def built_target(model, x_shape, folder, *arguments):
    """The one target of a build's report."""
    x = np.random.default_rng(1).normal(size=x_shape)
    out = build_net(model, x, folder, "--effort", 0, "--accept", *arguments)
    (target,) = json.loads((out / "report.json").read_text())["targets"]
    return target


def test_weights_of_matmuls_with_scales_of_their_own_inputs_are_told(tmp_path):
    model, _ = net("MatMul", (6, 7))
    (row,) = built_target(model, (4, 6), tmp_path, "--dynamic-matmul")["weights"]
    assert (row["node"], row["channels"], row["scales"]) == ("node", 7, 7)
    assert row["largest"] == pytest.approx(9, rel=1e-4)


def test_fp8_weights_are_told_in_real_units(tmp_path):
    model, _ = net("Conv", (32, 32, 3, 3), channels=32)
    arguments = ("--target", "tensorrt", "--precision", "fp8")
    target = built_target(model, (2, 32, 8, 8), tmp_path, *arguments)
    (row,) = target["weights"]
    assert row["scales"] == 32
    assert row["used"] == 1
    assert row["largest"] == pytest.approx(9, rel=1e-5)
    others = {o["method"] for o in target["tensors"][0]["histogram"]["others"]}
    assert "minmax" in others
    assert "entropy" not in others  # which is TensorRT's for int8


# Markdown, and the front of a search
def test_markdown_has_the_weights_worst_first():
    weight_list = [
        make_stored_weight(f"n{i}", "Conv", np.array([[127], [i + 1]], np.int8), np.ones(1))
        for i in range(20)
    ]
    text = to_markdown(
        Report(targets=(TargetPart(name="t", weights=weight_rows(weight_list[::-1])),))
    )
    table = re.findall(r"^\| (n\d+) \| 2 \| 1 \|", text, re.MULTILINE)
    assert table == [f"n{i}" for i in range(20)]


def front_split(number, **changed):
    """A split of a front: faster and noisier the lower its number."""
    fields = {
        "number": number,
        "float_layers": 4 * number,
        "layers": 40,
        "time": 0.5 + 0.1 * number,
        "size": 0.3,
        "sqnr_db": 10.0 * number,
    }
    return SplitRow(**{**fields, **changed})


def points_of(figure):
    """Return class, x in percent and y of each point that is drawn."""
    point = r'<svg x="([\d.]+)%" y="([\d.]+)" overflow="visible"><circle class="(\w+)"'
    return [(kind, float(x), float(y)) for x, y, kind in re.findall(point, figure)]


def test_front_is_drawn_from_fast_to_exact():
    front = (
        front_split(1),
        front_split(2, taken=True),
        front_split(3, sqnr_db=math.inf),
        front_split(4, sqnr_db=math.nan),
    )
    float_model, fast, built, exact = points_of(front_figure(front))
    assert [fast[0], built[0], exact[0], float_model[0]] == ["tried", "kept", "tried", "time"]
    assert fast[1] < built[1] < exact[1] < float_model[1]
    assert fast[2] > built[2] > exact[2] == float_model[2]


@pytest.mark.parametrize(
    "front", [(), (front_split(1),), (front_split(1), front_split(2, time=math.nan))]
)
def test_front_of_one_split_is_not_drawn(front):
    assert front_figure(front) == ""


def test_splits_stand_in_both_texts_with_the_built_one_marked():
    front = (front_split(1, is_timed=True), front_split(2, taken=True, figure="27 of 28 boxes"))
    search = SearchPart(reused=False, probes=2, settled="8 of 40 layers in float", front=front)
    report = Report(targets=(TargetPart(name="tensorrt", search=search),))
    for text in (to_html(report), to_markdown(report)):
        assert "0.60 measured" in text
        assert "0.70 estimated" in text
        assert "27 of 28 boxes" in text
        assert "8 of 40" in text
    assert re.search(r"--split 2 .*yes", to_markdown(report))
    assert not re.search(r"--split 1 .*yes", to_markdown(report))


def test_a_channel_uses_the_grid_by_its_largest_weight_or_pair():
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


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


@pytest.mark.parametrize(
    ("nodes", "function", "span"),
    [
        ("y = Sigmoid (t)", sigmoid, 1),
        ("y = Tanh (t)", np.tanh, 2),
        ("s = Sigmoid (t) y = Mul (t, s)", lambda t: t * sigmoid(t), 0.278),
        ("y = Gelu (t)", lambda t: 0.5 * t * (1 + np.vectorize(math.erf)(t / math.sqrt(2))), 0.170),
    ],
)
def test_what_is_lost_beyond_a_bound_is_less_than_half_a_step_of_8_bits(nodes, function, span):
    t = np.linspace(-40, 40, 8001)
    low, high = find_bounds(model(nodes))["t"]
    assert 0 < np.abs(function(t) - function(np.clip(t, low, high))).max() < 0.5 * span / 255


NUMBERS = {
    "three": 3,
    "zero": 0,
    "six": 6,
    "one": 1,
    "two": 2,
    "half": 0.5,
    "down": -2,
    "root": math.sqrt(2),
    "shape": 4,
}


def model(nodes):
    """These nodes behind an Abs of x."""
    shape = {"x": [4]}, {"y": [4]}
    return make_model(f"t = Abs (x) {nodes}", *shape, as_float32(NUMBERS), opset=14)


ERF_AND_ONE = "d = Div (t, root) e = Erf (d) a = Add (e, one)"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a = Add (t, three) c = Clip (a, zero, six) m = Mul (t, c) y = Div (m, six)", (-3, None)),
        ("y = HardSwish (t)", (-3, None)),
        ("y = Relu (t)", (0, None)),
        ("y = Clip (t, zero, six)", (0, 6)),
        ("s = HardSigmoid (t) y = Mul (t, s)", (-2.5, None)),
        ("y = HardSigmoid <alpha = 0.25> (t)", (-2, 2)),
        ("y = Sigmoid (t)", (-8, 8)),
        ("y = Tanh (t)", (-4, 4)),
        ("s = Sigmoid (t) y = Mul (t, s)", (-10, None)),
        ("h = Mul (t, half) s = Sigmoid (h) y = Mul (t, s)", (-20, None)),
        ("s = Sigmoid (t) y = Pow (s, two)", (-8, 8)),
        ("s = Sigmoid (t) y = Pow (s, one)", (-8, 8)),
        (f"{ERF_AND_ONE} m = Mul (t, a) y = Mul (m, half)", (-3 * math.sqrt(2), None)),
        (f"{ERF_AND_ONE} h = Mul (t, half) y = Mul (h, a)", (-3 * math.sqrt(2), None)),
        ("m = Mul (t, two) a = Add (m, six) y = Sigmoid (a)", (-7, 1)),
        ("m = Sub (t, three) a = Div (m, down) y = Sigmoid (a)", (-13, 19)),
        ("r = Relu (t) y = Sigmoid (r)", (0, 8)),
        (
            "r = Reshape (t, shape) c = Concat <axis = 0> (r, r) m = Transpose (c) y = Sigmoid (m)",
            (-8, 8),
        ),
        ("a, b, c = Split (t) k = Sigmoid (a) l = Tanh (b) y = Concat <axis = 0> (k, l)", (-8, 8)),
    ],
)
def test_known_readers(nodes, expected):
    low, high = expected
    bounds = (low, math.inf if high is None else high)
    assert find_bounds(model(nodes))["t"] == pytest.approx(bounds)


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Sigmoid (t) y = Log (s)",
        "s = Sigmoid (t) r = Reshape (s, shape) y = Div (x, r)",
        "s = Sigmoid (t) y = Pow (s, half)",
        "y = Softmax (t)",
        "s = Sigmoid (x) y = Mul (t, s)",
        "a, b = Split (t) y = Sigmoid (a) z = Sin (b)",
        "y = Reshape (t, shape) s = Sigmoid (y)",
        "m = AveragePool (t) y = Sigmoid (m)",
        "r = Relu (t) y = Add (t, r)",
        "y = Add (t, t)",
        "y = Neg (t) r = Relu (y)",  # leaves the model
    ],
)
def test_any_other_reader_keeps_every_value(nodes):
    assert not find_bounds(model(nodes)).keys() & {"t", "y"}


def test_a_clamped_histogram_is_that_of_clamped_values():
    x = np.random.default_rng(1).normal(scale=5, size=20_000).astype(np.float32)
    h, want = Histogram(), Histogram()
    h.observe(x)
    want.observe(np.append(np.clip(x, -3, 4), np.float32(h.full_range)))  # the same range
    got = h.clamped(-3, 4)
    want.counts[-1] -= 1
    assert got.counts.tolist() == want.counts.tolist()
    assert (got.minimum, got.maximum, got.total) == (-3, 4, x.size)
    assert mse(got).lo >= -3
    assert mse(h).lo < -3
    assert h.clamped(-100, 100).counts.tolist() == h.counts.tolist()
    for beyond in ((1e3, 2e3), (-2e3, -1e3)):  # no value lies between the two
        assert entropy(h.clamped(*beyond)) == entropy(h)
        assert mse(h.clamped(*beyond)) == mse(h)


def test_scores_of_logits_with_a_long_tail_stay_right(tmp_path):
    """Logits of -1274 to 1: their range on 255 steps would make every score 0.5."""
    nodes = """
        c = Conv (x, w, b) r = Reshape (c, to)
        s = Slice (r, zero, half, two) u = Slice (r, half, end, two)
        k = Concat <axis = 2> (u, s) y = Sigmoid (k)
    """
    constants = {
        "w": np.float32([[2, -1.5, 0.5], [1, 1, 1]]).reshape(2, 3, 1, 1),
        "b": np.float32([-1, -1274]),
        "to": np.int64([0, 2, 256]),
    }
    constants |= {"zero": [0], "half": [128], "end": [256], "two": [2]}
    model = make_model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 2, 256]}, constants, opset=14)
    x = np.random.default_rng(3).random((8, 3, 16, 16)).astype(np.float32)
    out = build_net(model, x, tmp_path, "--int8-stem")
    for image in x:
        want, got = (run_net(network, image[None])[0] for network in (model, out / "net.int8.onnx"))
        assert np.abs(want - got).max() < 0.1 < 0.3 < np.ptp(want[0, 0])


CONSTANTS = as_float32({"two": 2, "w": np.ones((4, 4, 1, 1))})


def range_limits(nodes, outputs="y"):
    """Those of the tensors of these nodes behind an Abs of x."""
    ends = {"x": [1, 4, 4, 4]}, dict.fromkeys(outputs)
    return find_range_limits(make_model(f"t = Abs (x) {nodes}", *ends, CONSTANTS, opset=17))


def followed(nodes, outputs="y"):
    limits = range_limits(nodes, outputs)
    return {name for name, limit in limits.items() if limit.extrapolation_limit > 0}


def test_logits_are_followed_to_what_made_them():
    nodes = """
        b = Neg (x) c = Flatten (t) d = Flatten (b) e = Concat <axis = 1> (c, d)
        f, g = Split <num_outputs = 2> (e) h = Transpose (f) y = Sigmoid (h) z = Exp (g)
    """
    assert followed(nodes, "yz") == set("tbcdefh")


def test_a_followed_tensor_keeps_its_bounds():
    assert range_limits("y = Sigmoid (t)")["t"] == (-8, 8, 8)
    assert range_limits("y = Sigmoid (t)", "yt")["t"] == (-math.inf, math.inf, 8)


@pytest.mark.parametrize(
    ("nodes", "scores"),
    [
        # scores may be scaled and multiplied by scores
        ("s = Sigmoid (t) y = Mul (s, two)", True),
        ("s = Sigmoid (t) r = Sigmoid (x) u = Transpose (r) y = Mul (s, u)", True),
        ("s = Sigmoid (t) y = Mul (s, s)", True),
        ("s = Sigmoid (t) y = ReduceMax (s)", True),
        # gates, and what layers read on from, are none
        ("s = Sigmoid (t) y = Mul (t, s)", False),
        ("s = Sigmoid (t) y = Mul (s, x)", False),
        ("s = Sigmoid (t) u = Transpose (s) y = Mul (u, x)", False),
        ("s = Sigmoid (t) y = Conv (s, w)", False),
        ("s = Sigmoid (t) n = Neg (s) y = Conv (n, w)", False),
        ("y = Tanh (t)", False),
        ("y = Softmax (t)", False),
        ("m = Mul (t, two) y = Exp (m)", False),
    ],
)
def test_scores_are_followed_and_gates_are_not(nodes, scores):
    result = followed(nodes)
    assert "t" in result if scores else not result


def pictures_of(count, rng):
    """[count, 3, 24, 24] float32: a bright blue on which redness thins out evenly."""
    result = np.zeros((count, 3, 24, 24), np.float32)
    result[:, 0] = np.minimum(rng.exponential(0.055, (count, 24, 24)), 1)
    result[:, 2] = 1
    return result


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_scores_that_no_image_held_are_not_cut_off(tmp_path, method):
    """No place of 40 pictures is surer than 0.6; a redder one comes later."""
    weight = np.zeros((16, 3, 3, 3))
    weight[:, 0, 1, 1] = 24  # the logit of a place is 24 times its redness, less 16
    nodes = "c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Sigmoid (c)"
    weights = as_float32({"w": weight, "b": np.full(16, -16)})
    model = make_model(nodes, {"x": [1, 3, 24, 24]}, {"y": [1, 16, 24, 24]}, weights, opset=17)
    rng = np.random.default_rng(5)
    pictures = pictures_of(40, rng)
    out = build_net(model, pictures, tmp_path, "--int8-stem", "--effort", 0, "--method", method)
    float_session, int8_session = map(
        ort.InferenceSession, (tmp_path / "net.onnx", out / "net.int8.onnx")
    )
    red = pictures_of(1, rng)
    red[0, 0, 12, 12] = 18.5 / 24  # a logit of 2.5
    want, got = (
        session.run(None, {"x": red})[0][0, 0, 12, 12] for session in (float_session, int8_session)
    )
    sure = max(float_session.run(None, {"x": session[None]})[0].max() for session in pictures)
    assert sure < 0.6 < 0.9 < want
    assert got == pytest.approx(want, abs=0.03)


HOSTILE = "<script>alert('x')</script>&\"\udcff"


class Rows:
    """A decoder of outputs that are boxes already: [n, 6] of corners, score, class."""

    form, parts, placed, classes = "rows", {}, True, 3

    def boxes(self, inputs, outputs):
        rows = np.asarray(outputs["y"], np.float64)
        return Detections.of(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64))


def row(left_edge, score=0.9, kind=0):
    return [left_edge, 10, left_edge + 8, 18, score, kind]


def scene(*rows):
    return {"y": np.array(rows, np.float64).reshape(-1, 6)}


FED = {"x": np.zeros((1, 3, 32, 320), np.float32)}


def tallied(pairs):
    tally = BoxDetection(Rows()).tally()
    for left, right in pairs:
        tally.add(FED, left, right)
    return tally


def test_boxes_that_are_drawn_are_those_that_are_counted():
    full = scene(*(row(10 * n) for n in range(8)))
    pairs = [
        (full, scene(*(row(10 * n) for n in range(5)))),  # 3 lost
        (full, full),
        (full, scene(*(row(10 * n) for n in range(8)), row(100), row(120))),  # 2 new
        (full, scene(*(row(10 * n, kind=1) for n in range(8)))),  # all of another class
    ]
    tally = tallied(pairs)
    message, shown = tally.result(), tally.shown()
    assert [sample.number for sample in shown] == [3, 0, 2, 1]  # what differs most first
    kept_count = sum(len(sample.kept.scores) for sample in shown)
    new = sum(len(sample.new.scores) for sample in shown)
    lost = sum(len(sample.lost.scores) for sample in shown)
    assert (
        message.words
        == f"{kept_count} of {kept_count + lost} boxes of FP32 kept, {new} new (score above 0.25)"
    )
    assert all(len(sample.kept.scores) == len(sample.found.scores) for sample in shown)
    np.testing.assert_allclose(shown[1].lost.boxes[:, 0], [50, 60, 70])


def test_one_that_agrees_is_among_those_shown_where_there_is_one():
    full = scene(*(row(10 * n) for n in range(8)))
    worse = [(full, scene(*(row(10 * n) for n in range(8 - lost)))) for lost in range(1, 7)]
    shown = tallied([(full, full), *worse]).shown()
    assert [sample.number for sample in shown] == [6, 5, 4, 0]
    assert len(shown) == MOST
    assert [sample.number for sample in tallied(worse).shown()] == [5, 4, 3, 2]
    tally = tallied([(full, full), *worse, (full, scene())] * 25)  # few are kept of many
    assert len(tally.watched) <= 2 * MOST * 3
    assert {sample.number for sample in tally.shown()} <= tally.watched


@pytest.mark.parametrize(
    ("score", "count", "threshold"),
    [
        (0.9, 20, 0.25),
        (0.26, 5, 0.25),
        (0.26, 4, None),
        (0.24, 20, 0.15),
        (0.16, 5, 0.15),
        (0.16, 4, None),
        (0.14, 5, 0.05),
        (0.06, 5, 0.05),
        (0.06, 4, None),
        (0.04, 20, None),
        (0, 0, None),
    ],
)
def test_the_threshold_is_the_highest_with_enough_boxes(score, count, threshold):
    detections = scene(*(row(10 * n, score=score) for n in range(count)))
    tally = tallied([(detections, scene(row(0, score=score)))])
    assert tally.threshold == threshold
    assert [sample.threshold for sample in tally.shown()] == [threshold] * (threshold is not None)
    result = tally.result()
    assert (result and result.words.rpartition("score above ")[2]) == (
        threshold and f"{threshold})"
    )


@pytest.mark.parametrize(("weak_count", "threshold"), [(45, 0.25), (46, 0.15)])
def test_rare_peaks_of_a_weak_detector_set_no_threshold(weak_count, threshold):
    rows = [row(10 * n, score=0.3 if n < 5 else 0.2) for n in range(5 + weak_count)]
    assert tallied([(scene(*rows), scene())]).threshold == threshold


def test_threshold_of_the_calibration_is_kept():
    tally = BoxDetection(Rows()).tally()
    tally.fixed_threshold = 0.15
    tally.add(FED, scene(*(row(10 * n) for n in range(20))), scene())
    assert tally.threshold == 0.15
    assert tally.result().words.endswith("(score above 0.15)")


def test_boxes_in_shares_of_the_picture_become_pixels():
    result = Detections(np.array([[0.1, 0.5, 0.2, 1.0]]), np.ones(1), np.zeros(1, np.int64))
    np.testing.assert_allclose(scale_to_pixels(result, (32, 320)).boxes, [[32, 16, 64, 32]])


def test_classes_that_change_are_kept_the_surest_first():
    tally = Classes(("logits",), (3,)).tally()
    for reference_logit, candidate_logit in ((5.0, 6.0), (9.0, 2.0), (3.0, 8.0)):
        tally.add(
            {},
            {"logits": np.array([[reference_logit, 1, 0]])},
            {"logits": np.array([[1, candidate_logit, 0]])},
        )
    tally.add({}, {"logits": np.array([[5.0, 1, 0]])}, {"logits": np.array([[5.0, 1, 0]])})
    assert [(sample.number, sample.reference, sample.candidate) for sample in tally.shown()] == [
        (1, (0, 9.0), (1, 2.0)),
        (0, (0, 5.0), (1, 6.0)),
        (2, (0, 3.0), (1, 8.0)),
    ]
    assert tally.watched == {0, 1, 2}


def test_order_of_equals_is_that_of_the_samples():
    selection, classes = ExampleSelection(), {"reference": (0, 1.0), "candidate": (1, 1.0)}
    for number in (3, 1, 2, 0, 4):
        selection.offer(ClassExample(number=number, output="y", **classes), differs=1.0, says=0)
    assert [sample.number for sample in selection.result()] == [0, 1, 2, 3]


class Feed:
    names = [f"{number}.png" for number in range(100)]  # noqa: RUF012

    def to_image(self, sample):
        return np.full((600, 300, 3), sample["x"].flat[0], np.uint8)


def test_pictures_are_kept_only_while_somebody_watches_them():
    looks = CandidateImages(Feed())
    for start in range(0, 20, 2):  # batches of two
        batch = {"x": np.array([start, start + 1], np.float32).reshape(2, 1, 1, 1)}
        looks.add(batch, {0, start + 1})
        assert len(looks) <= 2
    result = looks.select([0, 19, 5, 77])
    assert list(result) == [0, 19]
    assert result[19][0] == "19.png"
    assert result[19][1].shape == (256, 128, 3)
    assert (result[19][1] == 19).all()


def boxes(name="a.png", number=0, names=None):
    full = scene(*(row(10 * n) for n in range(8)))
    (example,) = tallied([(full, scene(*(row(10 * n) for n in range(1, 8)), row(200)))]).shown()
    return box_rows([example], {number: (name, np.zeros((32, 320, 3), np.uint8))}, names or {})


def test_the_page_draws_what_was_kept_lost_and_new_as_vectors():
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=boxes()),)))
    left, right = re.findall(r'<svg class="boxes".*?</svg>', page)
    assert left.count('<rect class="kept"') == right.count('<rect class="kept"') == 7
    assert left.count('<rect class="lost"') == 1
    assert right.count('<rect class="new"') == 1
    assert 'class="new"' not in left
    assert 'class="lost"' not in right
    assert left.count(">0 0.90</text>") == 8
    assert "7 of 8 boxes kept, 1 new" in page
    assert page.count("data:image/") == 1
    assert '<use href="#look-0"/>' in right
    engines = tuple(EngineRow(label=label, boxes=boxes()) for label in ("a", "b"))
    page = to_html(Report(engines=engines))  # a picture stands once for several engines
    assert page.count("data:image/") == 1
    assert page.count('<use href="#look-0"/>') == 3
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=boxes(names={0: "a<b"})),)))
    assert page.count(">a&lt;b 0.90</text>") == 16
    assert page.count('id="look-0"') == 1


def test_names_and_labels_are_escaped_and_json_has_counts_alone():
    report = Report(engines=(EngineRow(label=HOSTILE, boxes=boxes(HOSTILE)),))
    assert "<script>alert" not in to_html(report)
    (message,) = to_json(report)["engines"][0]["boxes"]
    assert (message["kept"], message["lost"], message["new"]) == (7, 1, 1)
    assert "data:" not in json.dumps(message)
    assert "data:" not in to_markdown(report)


def test_of_very_many_boxes_the_best_are_drawn_and_it_is_said():
    (own,) = boxes()
    drawn = replace(
        own.boxes,
        matched_fp32=own.boxes.matched_fp32 * 20,
        matched_engine=own.boxes.matched_engine * 20,
    )
    many = replace(own, kept=len(drawn.matched_fp32), boxes=drawn)
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=(many,)),)))
    assert page.count('<rect class="kept"') == 200
    assert "the best 100" in page


def test_a_build_of_a_detector_draws_its_boxes(run, detector, pictures, tmp_path):
    arguments = ("build", detector, "--images", pictures, *QUICK, "--out", tmp_path)
    run.ok(*arguments, "--target", "onnxruntime,ascend")
    page = (tmp_path / "report.html").read_text()
    message = json.loads((tmp_path / "report.json").read_text())["engines"][1]
    assert "Boxes of FP32 and onnxruntime" in page
    assert "Boxes of FP32 and ascend" in page
    assert 1 <= len(message["boxes"]) <= MOST
    first = message["boxes"][0]
    assert {"sample", "threshold", "kept", "lost", "new"} == set(first)
    kept, _, new = re.search(r"(\d+) of (\d+) boxes kept, (\d+) new", page).groups()
    assert (int(kept), int(new)) == (first["kept"], first["new"])
    # reads the words, and draws nothing
    assert "boxes of FP32 kept" in " ".join(run.ok("report", tmp_path).split())


def test_a_build_of_a_classifier_tells_the_samples_that_change(run, small_cnn, tmp_path):
    rng = np.random.default_rng(1).normal(size=(40, 3, 16, 16)).astype(np.float32)
    rng[::10] *= 30  # a range that costs the others their int8 steps
    np.save(tmp_path / "a.npy", rng)
    metric = tmp_path / "own.py"  # a figure of one's own takes the task's place, not its pictures
    metric.write_text("def score(fp32, int8, label):\n    return 1.0\n")
    arguments = ("build", small_cnn, "--images", tmp_path / "a.npy", *QUICK, "--out", tmp_path)
    run.ok(*arguments, "--metric", f"{metric}:score", "--method", "minmax")
    engine = json.loads((tmp_path / "report.json").read_text())["engines"][1]
    assert engine["accuracy"]["top1_agreement"] < 0.9
    changed = engine["changed"]
    assert len(changed) == MOST
    assert all(sample["fp32"] != sample["engine"] for sample in changed)
    page = (tmp_path / "report.html").read_text()
    assert f"FP32 class {changed[0]['fp32']}" in page
    assert "Samples of another class in int8" in page


def corners(anchors, side=640):
    return lambda rng: rng.uniform(0, side, (1, 4, anchors))


def scores(classes, anchors):
    return lambda rng: rng.uniform(0, 1, (1, classes, anchors)) ** 4


def numbers(classes, anchors):
    return lambda rng: rng.integers(0, classes, (1, 1, anchors))


def several(rng, *makers):
    """Four samples of rows below each other."""
    made = ([make(rng) for make in makers] for _ in range(4))
    return [np.concatenate(rows, axis=1).astype(np.float32) for rows in made]


def labels(samples):
    return [part.label for part in split_output("y", samples)]


def test_boxes_and_scores_in_one_tensor_are_two_parts(rng):
    assert labels(several(rng, corners(300), scores(18, 300))) == ["y[0:4]", "y[4:22]"]
    samples = several(rng, corners(300), scores(81, 300))
    assert labels([s.transpose(0, 2, 1) for s in samples]) == ["y[..., 0:4]", "y[..., 4:85]"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_corners_a_score_and_a_class_number_are_three_parts(order):
    rows = [(4, 1, 1)[place] for place in order]
    expected = [f"y[..., {sum(rows[:n])}:{sum(rows[: n + 1])}]" for n in range(3)]
    for side, classes, seed in product((32, 640), (20, 1000), range(15)):
        made = [corners(100, side), scores(1, 100), numbers(classes, 100)]
        samples = several(np.random.default_rng(seed), *(made[place] for place in order))
        assert labels([s.transpose(0, 2, 1) for s in samples]) == expected, (side, classes, seed)


@pytest.mark.parametrize("sure, split", [(0.005, 2), (0.0, 2), (1.0, 3)])
def test_corners_part_from_class_numbers_beside_a_score_that_is_never_sure(rng, sure, split):
    def unsure(rng):
        return scores(1, 100)(rng) * sure

    assert len(split_output("y", several(rng, corners(100), unsure, numbers(20, 100)))) == split


@pytest.mark.parametrize("place", [0, 31, 63])
@pytest.mark.parametrize("size", [0.0, 0.001, 40.0])
def test_one_odd_channel_of_a_feature_map_is_no_part(rng, place, size):
    samples = [rng.standard_normal((1, 64, 8, 8)) * 3 for _ in range(4)]
    for sample in samples:
        sample[:, place] = rng.standard_normal((8, 8)) * size
    assert labels(samples) == ["y"]


FAINT = np.array([1.0, 0.9, 1e-6, 1e-7, 0.8, 1e-6]).reshape(1, 6, 1)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rng: rng.uniform(0, 1, (1, 6, 500)) * FAINT, id="absent classes"),
        pytest.param(lambda rng: rng.standard_normal((1, 21, 40, 40)) * 5, id="logits"),
        pytest.param(lambda rng: np.array([[900.0, 800, 700, 0.2, 0.3]]), id="a vector"),
        pytest.param(lambda rng: np.full((1, 22, 300), np.nan, np.float32), id="nan"),
    ],
)
def test_values_without_ranges_of_their_own_are_one_part(rng, make):
    assert labels([make(rng) for _ in range(4)]) == ["y"]


def test_the_form_does_not_depend_on_the_batch(rng):
    samples = several(rng, corners(300), scores(18, 300))
    odd = [s * 0 for s in samples]  # never looked at: the first four decide
    fed = np.zeros((8, 3, 64, 64), np.float32)
    inputs = [{"x": fed[i : i + 1]} for i in range(8)]
    alone = derive_form([{"y": s} for s in samples + odd], inputs=inputs)
    together = derive_form([{"y": np.concatenate(samples + odd)}], inputs=[{"x": fed}])
    assert alone == together
    assert len(alone.parts) == 2


def test_every_output_is_one_part_at_least_and_integers_are_none(rng):
    one = {"a": corners(50)(rng)[0], "count": np.array([3]), "b": scores(5, 50)(rng)[0]}
    assert [part.label for part in derive_form([one] * 4).parts] == ["a", "b"]


class Net:
    """Gives what it is told to; both outputs and inputs are named y and x."""

    inputs = (TensorSpec("x", "float32", ("n", 4)),)
    outputs = (TensorSpec("y", "float32", ("n", 22, 300)),)


def compared(references, candidates, batch, form=None):
    comparison = Comparison(Net(), Net(), form=form)
    for start in range(0, len(references), batch):
        one = np.concatenate(references[start : start + batch])
        other = np.concatenate(candidates[start : start + batch])
        comparison.add({"x": np.zeros((len(one), 4))}, {"y": one}, {"y": other})
    return comparison.result()


@pytest.mark.parametrize("preprocess", ["", "logits", "unit", "few"])
@pytest.mark.parametrize(
    ("value", "gate", "cells"),
    [
        ("1 40", "1 40", "1 40"),
        ("1 40", "1 1 40", "1 40"),
        ("1 40 1", "1 40", "1 40 1"),
        ("1 40 4", "1 40", "1 40 1"),
        ("1 4 40", "1 40", "1 1 40"),
        ("1 40 4", "1 40 1", "1 40 1"),
        ("1 2 8 8", "1 1 8 8", "1 1 8 8"),
        ("1 2 8 8", "1 8 8", "1 1 8 8"),
        ("1 8 8 2", "1 8 8 1", "1 8 8 1"),
        ("1 1 32 16", "1 1 8 4", "1 1 8 4"),
    ],
)
def test_a_value_beside_a_score_of_its_cell_is_judged_where_it_counts(
    value, gate, cells, preprocess
):
    """A pitch where nobody speaks is arbitrary: 14 dB of it said nothing, and kept layers float."""
    value, gate, cells = ([int(side) for side in one.split()] for one in (value, gate, cells))
    low, high = (-7, 4) if preprocess == "logits" else (0.001, 0.98)
    usual = {"unit": 0.5, "few": 200}.get(
        preprocess, 0
    )  # of few numbers the mean could be subtracted
    rng = np.random.default_rng(0)

    def outputs(share=0.5):
        pitch = usual + (rng.random(value) - (preprocess != "")) * (
            0.3 if preprocess == "unit" else 300 - usual
        )
        return as_float32({"score": np.where(rng.random(gate) < share, low, high), "pitch": pitch})

    references = [outputs(), outputs(0), outputs(), outputs()]  # in one all count
    form = derive_form(references, inputs=[{"x": np.zeros((1, 3), np.float32)}] * 4)
    less = " - its mean" if max(value) == np.prod(value) else ""  # one value a step
    assert [part.label for part in form.parts] == ["score", f"pitch{less} where score is high"]
    one = references[0]
    message = form.told(one, {}, one)["pitch"] / (one["pitch"] - sum(form.usual.values()))
    scores = one["score"].reshape(cells)
    for axis in range(2, len(cells)):
        scores = scores.repeat(message.shape[axis] // cells[axis], axis)
    closed = np.broadcast_to(scores < 0.5, message.shape)
    assert np.abs(message[closed]).max() < 0.01
    assert np.abs(message[~closed]).min() > 0.9


@pytest.mark.parametrize(
    ("wide", "own", "channels", "sure", "weight"),
    [
        (True, False, 1, 0.6, True),
        (True, False, 1, 0.4, False),
        (False, False, 1, 0.6, False),
        (False, False, 1, 0.8, True),
        (True, True, 1, 0.6, False),
        (True, True, 1, 0.8, True),
        (True, False, 2, 0, True),
        (True, True, 2, 0.6, False),
        (True, True, 2, 0.8, True),
    ],
)
def test_scores_are_fewer_than_values_or_mostly_sure(wide, own, channels, sure, weight):
    """As many that are not sure, or columns of one output, may be deviations."""
    rng, steps = np.random.default_rng(0), np.arange(50)
    scores = np.where(steps < 50 * sure, steps % 2, np.linspace(0.12, 0.88, 50))[None, :, None]
    values = rng.normal(0, 9, (4, 1, 50, channels)) if wide else rng.uniform(0.2, 0.8, (4, 1, 50))
    joined = [{"y": np.concatenate([one, scores], 2)} for one in values] if own else []
    outputs = joined or [{"y": one, "s": scores[..., 0]} for one in values]
    label = derive_form([*map(as_float32, outputs)]).parts[0].label
    assert (" is high" in label) == weight
    assert label.startswith("y[" if own else "y")


def test_what_a_task_reads_counts_everywhere(rng):
    blocks = rng.integers(0, 5, (4, 4, 4)).repeat(8, axis=1).repeat(8, axis=2)
    maps = 9 * np.eye(5)[blocks].transpose(0, 3, 1, 2)[:, None] - 1.8
    edges = rng.integers(0, 2, (4, 1, 1, 32, 32))
    outputs = [as_float32({"y": y, "edge": edge}) for y, edge in zip(maps, edges, strict=True)]
    form = derive_form(outputs, inputs=[{"x": np.zeros((1, 3, 32, 32), np.float32)}] * 4)
    assert form.task.name == "segmentation"
    assert [output.label for output in form.parts] == [
        "y",
        "edge",
    ]
    assert form.beside == ("edge",)  # the classes say nothing of it
    stages = [{**output, "coarse": output["y"] + 1} for output in outputs]
    assert derive_form(stages, inputs=[{"x": np.zeros((1, 3, 32, 32))}] * 4).beside == ("edge",)


def test_two_signals_and_two_numbers_a_sample_do_not_weight_each_other():
    time = np.arange(64) / 9
    waves = [{"y": 9 * np.sin(time + n)[None], "z": 9 * np.cos(2 * time)[None]} for n in range(4)]
    assert [part.label for part in derive_form(waves).parts] == ["y", "z"]
    faces = [{"age": np.array([[30 + n]]), "of": np.array([[n % 2.0]])} for n in range(32)]
    form = derive_form([as_float32(face) for face in faces])
    assert [part.label for part in form.parts] == ["age - its mean", "of"]
    assert form.why == "steps: of [N, 1] in 0..1, beside age"
    assert form.beside == ("age",)


def test_one_number_a_sample_is_judged_by_what_varies():
    """Ages of 35 and a spread of 17: 29 dB of the whole may be 22 of what they say."""
    ages = [{"age": np.float32([[age]])} for age in (12, 35, 60, 31)]
    assert [part.label for part in derive_form(ages).parts] == ["age - its mean"]
    two = [{"y": np.float32([[20 + n % 5, 55 + 9 * n]])} for n in range(4)]
    assert [part.label for part in derive_form(two).parts] == ["y - its mean"]
    about_zero = [{"age": np.float32([[age]])} for age in (-12, 35, 60, -31)]
    assert [part.label for part in derive_form(about_zero).parts] == ["age"]
    turns = np.random.default_rng(0).normal(0, 0.3, (4, 1, 3, 3)) + np.eye(3)  # of a head
    for values in turns, turns[:, 0, 0, 0]:
        assert derive_form([as_float32({"y": one}) for one in values]).parts[0].less == "its mean"
    for low, high, label in (0.5, 0.7, "y - its mean"), (0.02, 0.03, "y - its mean"), (0.9, 1, "y"):
        shares = [{"y": np.float32([one])} for one in np.linspace(low, high, 16)]
        assert [part.label for part in derive_form(shares).parts] == [label]
        few = "y" if low < 0.1 else label  # so far no event was seen
        assert [part.label for part in derive_form(shares[:4]).parts] == [few]


def test_a_few_numbers_of_two_units_are_judged_apart():
    """An age and a probability; a place in mm and a turn, whose best number is no class."""
    rng = np.random.default_rng(0)
    shares = 1 / (1 + np.exp(rng.normal(0, 4, (32, 1))))
    faces = np.concatenate([rng.normal(40, 9, (32, 1)), shares], axis=1)
    turns = rng.normal([1, 0, 0, 0], 0.3, (32, 4))
    vectors = np.concatenate([rng.normal([0, 0, 800], 300, (32, 3)), turns], axis=1)
    for rows, labels in (
        (faces, ["y[0:1] - its mean", "y[1:2]"]),
        (vectors, ["y[0:3] - its mean", "y[3:7] - its mean"]),
    ):
        form = derive_form([as_float32({"y": row[None]}) for row in rows])
        assert form.task is None
        assert [part.label for part in form.parts] == labels


def compared_vectors(reference, candidate):
    names = [TensorSpec("y", "float32", ("n", len(reference[0])))]
    session = SimpleNamespace(inputs=(TensorSpec("x", "float32", ("n", 4)),), outputs=names)
    comparison = Comparison(session, session)
    for pair in zip(reference, candidate, strict=True):
        comparison.add({"x": np.zeros((1, 4))}, *({"y": np.float32([one])} for one in pair))
    return comparison.result()


def test_the_mean_of_what_varies_is_that_of_all_samples():
    """In a list in the order of ages the first samples are all young."""
    ages = np.stack([np.linspace(20, 60, 100), np.linspace(30, 90, 100)] * 3, axis=1)
    ages += np.random.default_rng(0).normal(0, 1, ages.shape)
    (part,) = compared_vectors(ages, ages + 5).parts
    assert part.label == "y - its mean"
    varies = np.square(ages - ages.mean(axis=0)).sum() / (25 * ages.size)
    assert part.sqnr_db == pytest.approx(10 * math.log10(varies), abs=1e-3)
    longer = [*ages, np.zeros(7)]  # a sample of another shape has another mean
    assert compared_vectors(longer, [*ages + 5, np.zeros(7)]).parts[0].sqnr_db > part.sqnr_db - 1


@pytest.mark.parametrize(("count", "wide"), [(101, 8), (66, 3)])
def test_probabilities_of_neighbouring_ages_are_no_classes(count, wide):
    """The best of many near ties changes in a tenth of the samples, the age by 0.3 %."""
    ages = np.random.default_rng(1).uniform(0.1, 0.9, (9, 1)) * count
    spread = np.exp(-(((np.arange(count) - ages) / wide) ** 2) / 2)
    shares = (spread / spread.sum(axis=1, keepdims=True)).astype(np.float32)
    assert derive_form([{"y": row[None]} for row in shares]).task is None


def test_scores_of_other_heads_do_not_weight_each_other():
    """Logits of the angles of a head: one has two groups, another has not."""
    rng = np.random.default_rng(0)
    heads = rng.normal(-6, 1, (4, 2, 66))
    heads[:, 0, 20:30] += 12
    heads[:, 1] += np.linspace(0, 12, 66)
    outputs = [as_float32({"yaw": head[:1], "roll": head[1:]}) for head in heads]
    assert [part.label for part in derive_form(outputs).parts] == ["yaw", "roll"]


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_the_logarithm_of_a_pitch_is_judged_where_it_is_sure_and_by_what_varies(axis, first):
    """28 dB of logarithms about 5 were two semitones of voiced frames."""
    rng = np.random.default_rng(0)
    sure = np.repeat(rng.random((4, 1, 10)) < 0.6, 10, axis=2) * 0.96 + 0.02
    pitch = np.where(sure > 0.5, rng.normal(5.3, 0.2, sure.shape), rng.uniform(4, 7, sure.shape))
    columns = [sure, pitch] if first else [pitch, sure]
    outputs = [{"y": np.stack(one, axis).astype(np.float32)} for one in zip(*columns, strict=True)]
    form = derive_form(outputs)
    (part,) = form.usual
    assert part.less == "its mean"
    assert " is high" in part.label
    assert len(form.parts) == 2
    assert float(form.usual[part][0]) == pytest.approx(5.3, abs=0.05)
    message = part.of(form.told(outputs[0], {}, outputs[0])["y"]).reshape(-1)
    expected = sure[0, 0] * (pitch[0, 0] - form.usual[part][0])
    assert np.allclose(message, expected, atol=1e-5)


def test_probabilities_of_a_value_do_not_weight_it():
    rows = np.random.default_rng(0).normal(size=(4, 1, 40)).astype(np.float32) * 9
    for shares in (1 / (1 + np.exp(-rows)), np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)):
        given = [{"y": row, "p": share} for row, share in zip(rows, shares, strict=True)]
        assert not any(part.at for part in derive_form(given).parts)
    maps = np.random.default_rng(0).normal(0, 9, (8, 1, 3, 16, 16))  # no score a cell either
    kinds = [as_float32({"m": a, "s": softmax(b)}) for a, b in zip(maps, maps[::-1], strict=True)]
    assert not any(part.at for part in derive_form(kinds).parts)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_worst_part_is_told_where_the_whole_output_looks_well(rng, batch):
    references = several(rng, corners(300), scores(18, 300)) * 2
    candidates = [candidate.copy() for candidate in references]
    for candidate in candidates:
        candidate[:, 4:] = 0  # every score is lost
    result = compared(references, candidates, batch)
    assert result.outputs[0].sqnr_db > 50
    assert result.worst == result.parts[0]
    assert result.worst.label == "y[4:22]"
    assert result.worst.sqnr_db == pytest.approx(0)
    assert [part.label for part in result.parts] == ["y[4:22]", "y[0:4]"]
    assert result.to_json()["parts"][1]["sqnr_db"] == "inf"
    candidates[2][:, 1] = np.nan  # which is worse than any other
    result = compared(references, candidates, batch)
    assert result.worst.label == "y[0:4]"
    assert np.isnan(result.worst.sqnr_db)


def test_a_model_of_one_part_has_the_output_as_its_worst(rng):
    references = [rng.standard_normal((1, 22, 300)).astype(np.float32) for _ in range(5)]
    result = compared(references, [reference * np.float32(1.1) for reference in references], 2)
    assert result.worst.label == "y"
    assert result.worst.sqnr_db == pytest.approx(20)
    assert result.worst.sqnr_db == result.outputs[0].sqnr_db


def test_a_form_that_is_given_is_taken(rng):
    references = several(rng, corners(300), scores(18, 300))
    form = derive_form([{"y": reference} for reference in references])
    assert form.parts[1] == OutputSlice(output="y", axis=1, start=4, stop=22)
    assert len(compared(references[:1], references[:1], 1, form).parts) == 2


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_the_task_does_not_depend_on_the_batch(rng, batch):
    references = [rng.uniform(0, 1, (1, 22, 300)).astype(np.float32) for _ in range(8)]
    references = [reference / reference.sum(axis=1, keepdims=True) for reference in references]
    references = [reference[..., 0] for reference in references]  # probabilities [1, 22]
    candidates = [
        reference[:, ::-1].copy() if n % 3 else reference for n, reference in enumerate(references)
    ]
    result = compared(references, candidates, batch).task
    assert result == compared(references, candidates, 1).task
    assert result.task == "classes"
    assert result.samples == 8
    assert result.count == "3 of 8"
