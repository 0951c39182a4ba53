"""Key points as numbers, in pixels and in shares of the picture, as several families tell them."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.metrics.truth import form_of

SIDE, POINTS = 64, 24


def fed(side=SIDE):
    return {"x": np.zeros((1, 3, side, side), np.float32)}


def line(number, *, unit=SIDE):
    """Points along an outline, in their order, [K, 2]."""
    made = np.random.default_rng(number)
    turn = np.linspace(0, 5, POINTS)
    outline = np.stack([np.cos(turn), np.sin(turn)], axis=1) * made.uniform(0.2, 0.3)
    return (outline + made.uniform(0.45, 0.55, 2)) * unit


def output(number, *, unit=SIDE, more=0, flat=True, moved=0.0, among=POINTS):
    """One sample's, with so many numbers behind each place."""
    made = np.random.default_rng(90 + number)
    places = line(number, unit=unit)
    places[:among] += moved
    extra = made.normal(0, 0.05 * unit, (POINTS, more))
    value = np.concatenate([places, extra], axis=1).astype(np.float32)
    return {"y": value.reshape(1, -1) if flat else value[None, None]}


def figure(references, candidates, *, side=SIDE):
    form = form_of(references, inputs=[fed(side)] * len(references))
    tally = form.task.tally()
    for pair in zip(references, candidates, strict=True):
        tally.add(fed(side), *pair)
    return form.task, tally.result()


@pytest.mark.parametrize("unit", [1, SIDE])
@pytest.mark.parametrize(
    ("more", "flat"), [(0, True), (1, True), (2, True), (3, True), (0, False), (1, False)]
)
def test_points_near_those_of_fp32_are_kept(more, flat, unit):
    how = {"more": more, "flat": flat, "unit": unit}
    references = [output(n, **how) for n in range(5)]
    task, same = figure(references, references)
    assert task.form == "y: 24 key points" and same.value == 1
    near = [output(n, moved=0.003 * unit, **how) for n in range(5)]
    assert figure(references, near)[1].value == 1
    far = [output(n, moved=0.04 * unit, among=6, **how) for n in range(5)]
    _, found = figure(references, far)
    assert found.words == "90 of 120 key points of FP32 within 3 % of their extent"
    nothing = [{"y": one["y"] * np.nan} for one in references]
    assert figure(references, nothing)[1].value == 0
    cut = [{"y": one["y"][..., 1:]} for one in references]
    assert figure(references, cut)[1].value == 0


def test_points_that_fp32_is_not_sure_of_do_not_count():
    """As MoveNet tells them: row, column and how sure it is."""
    references = [output(n, unit=1, more=1, flat=False) for n in range(4)]
    for one in references:
        one["y"][..., 2] = np.where(np.arange(POINTS) < 8, 0.05, 0.9)
    far = [{"y": one["y"] + np.float32([0.1, 0, 0])} for one in references]
    for one, other in zip(references, far, strict=True):
        other["y"][..., 8:, :2] = one["y"][..., 8:, :2]
    assert figure(references, far)[1].count == "64 of 64"


def flagged(number, *probabilities):
    named = {f"p{n}": np.float32([[p]]) for n, p in enumerate(probabilities)}
    return {**output(number), **named}


def test_what_else_is_told_of_a_sample_must_be_told_alike():
    references = [flagged(n, 0.9, 0.2) for n in range(4)]
    candidates = [*references[:3], flagged(3, 0.9, 0.7)]
    assert figure(references, candidates)[1].count == "72 of 96"
    alone = [flagged(n, p) for n, p in enumerate([0.9, 0.1, 0.9, 0.1])]
    assert figure(alone, alone)[1].count == "48 of 48"  # nothing is where FP32 sees nothing
    form = form_of(alone, inputs=[fed()] * 4)
    assert [part.label for part in form.parts] == ["y"]  # 1e-3 of 1e-6 is no noise
    seen = [*alone[:3], flagged(3, 0.6)]
    assert figure(alone, seen)[1].count == "48 of 72"


def others():
    made = np.random.default_rng(3)
    shares = made.dirichlet([1, 1], (4, 1, 30))
    yield "features", [made.uniform(0, 1, (1, 256)) for _ in range(4)]
    yield "features of a Relu", [made.gamma(1, 0.4, (1, 256)) for _ in range(4)]
    yield "scores", [made.normal(0, 4, (1, 48)) for _ in range(4)]
    yield "shares of two classes", list(shares)
    yield "probabilities", [(made.uniform(size=(1, 30, 2)) > 0.5) * 0.99 for _ in range(4)]
    yield "about zero", [line(n).reshape(1, -1) - 32 for n in range(4)]


@pytest.mark.parametrize(("what", "values"), list(others()))
def test_other_numbers_are_no_points(what, values):
    form = form_of([{"y": np.float32(one)} for one in values], inputs=[fed()] * 4)
    assert form.task is None or form.task.name != "key points", what


def between(count, low, high, flat=False):
    """So many points evenly between two shares of the picture's side, in its pixels."""
    along = np.linspace(low, high, count) * SIDE
    places = np.stack([along, along if flat else np.roll(along, count // 2)], axis=1)
    return {"y": np.float32(places).reshape(1, *((-1,) if flat else (count, 2)))}


@pytest.mark.parametrize(
    ("output", "points"),
    [
        (between(4, 0.2, 0.7), True), (between(3, 0.2, 0.7), False),
        (between(600, 0.2, 0.7), True), (between(601, 0.2, 0.7), False),
        (between(8, 0.2, 0.7, flat=True), True), (between(7, 0.2, 0.7, flat=True), False),
        (between(50, 0.05, 0.26), True), (between(50, 0.04, 0.25), False),  # in the mean 0.15
        (between(50, 0.74, 0.95), True), (between(50, 0.75, 0.96), False),  # and 0.85
        (between(50, 0.48, 0.52), True), (between(50, 0.485, 0.515), False),  # 0.01 apart
        (between(50, -0.3, 1.3), True), (between(50, -0.4, 1.4), False),  # and 0.5
        (between(50, 0.05, 1.45), True), (between(50, 0.05, 1.6), False),  # half a side beyond
    ],
)  # fmt: skip
def test_points_are_places_in_and_around_the_picture(output, points):
    task = form_of([output] * 2, inputs=[fed()] * 2).task
    assert (task is not None and task.name == "key points") == points


@pytest.mark.parametrize(("sure", "far", "count"), [
    (0.21, 0.029, "48 of 48"), (0.21, 0.031, "47 of 48"), (0.19, 0.031, "46 of 46"),
])  # fmt: skip
def test_a_point_is_near_within_three_percent_where_fp32_is_sure_of_it(sure, far, count):
    own = output(0, unit=1, more=1, flat=False)
    own["y"][..., 2] = 0.9
    own["y"][0, 0, 5, 2] = sure
    other = {"y": own["y"].copy()}
    places = np.delete(own["y"][0, 0, :, :2], 5 if sure < 0.2 else [], axis=0)
    other["y"][0, 0, 5, 0] += far * np.ptp(places, axis=0).max()
    assert figure([own] * 2, [own, other])[1].count == count


def test_without_a_picture_nothing_is_a_place_in_it():
    form = form_of([output(n) for n in range(4)], inputs=[{"x": np.zeros((1, 9), np.float32)}] * 4)
    assert form.task is None


def mesh(*, beside: bool = False) -> onnx.ModelProto:
    """A model of 24 points that move with the picture, or of such numbers about 0 beside others."""
    rng = np.random.default_rng(0)
    held = {
        "w": rng.normal(0, 0.3, (16, 3, 3, 3)),
        "v": rng.normal(0, 0.01, (2 * POINTS, 16)),
        "b": line(1).reshape(-1) - (SIDE / 2 if beside else 0),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["g"], name="mean"),
        helper.make_node("Flatten", ["g"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "v", "b"], ["y"], name="gemm", transB=1),
        *([helper.make_node("Sigmoid", ["g"], ["z"], name="gate")] if beside else []),
    ]
    graph = helper.make_graph(
        nodes,
        "mesh",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "yz"[: 1 + beside]],
        [numpy_helper.from_array(np.float32(value), name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def screen(model: onnx.ModelProto, folder: Path) -> str:
    """What a build prints."""
    onnx.save(model, folder / "net.onnx")
    x = np.random.default_rng(1).uniform(0, 1, (24, 3, SIDE, SIDE)).astype(np.float32)
    np.save(folder / "x.npy", x)
    words = ["build", str(folder / "net.onnx"), "--images", str(folder / "x.npy"), "--accept"]
    words += ["--out", str(folder / "out"), "--duration", "0", "--effort", "0"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_screen_tells_key_points_and_no_classes(tmp_path):
    said = screen(mesh(), tmp_path)
    assert "576 of 576 key points of FP32 within 3 %" in said and "Top-1" not in said
    (told,) = json.loads((tmp_path / "out" / "report.json").read_text())["engines"][1:]
    assert told["accuracy"]["task"]["task"] == "key points"


def test_the_first_of_several_outputs_of_no_task_tells_no_class(tmp_path):
    said = screen(mesh(beside=True), tmp_path)
    assert "Top-1" not in said and "dB in the worst part" in said
