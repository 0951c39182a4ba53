"""A default build is usable, for every target."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploy.runtimes.ort import OrtSession
from deploy.tuning import search_samples
from deploy.tuning.plan_file import read_plan
from tests.models import as_float32, make_model, make_node, parse_nodes, save_net
from tests.test_tuning import ran, saved

# --- A default build is usable where a quieter split of the same model is, for every target.
#
# The scores of `guessing` hold little of what tells five of its classes apart: int8 in its widest
# layer, /wide/Conv, leaves 19 dB of them and the class of 12 samples in 40. That layer is nine
# tenths of the model, so that in float it would cost more than 19 dB are worth to the search.
#
# With a smaller outlier and a narrower layer it is usable, at 36 dB, and still takes one class in
# four for another: doubtful, and the layer in float costs less than that is worth.
ALL = "onnxruntime,tensorrt,ascend"
TARGETS = ALL.split(",")
GRIDS = "tensorrt,ascend"


def guessing(folder, *, outlier, wide, margin=6.0):
    rng = np.random.default_rng(3)
    size = np.where(np.arange(16) == 0, outlier, 1.0).reshape(1, 16, 1, 1)
    constants = {
        "w1": rng.normal(0, 0.3, (16, 3, 3, 3)),
        "size": size,
        "w2": rng.normal(0, 0.1, (wide, 16, 3, 3)) / size,
        "w3": rng.normal(0, 0.02, (10, wide, 12, 12)),
        "b3": np.where(np.arange(10) < 5, margin, -margin),
    }
    padding = {"pads": [1, 1, 1, 1]}
    nodes = [
        ("Conv", "x w1", "stem", padding),
        ("Tanh", "stem", "t", {}),
        ("Mul", "t size", "m", {}),
        ("Conv", "m w2", "wide", padding),
        ("Relu", "wide", "r", {}),
        ("Conv", "r w3 b3", "s", {}),
        ("Flatten", "s", "y", {}),
    ]
    return saved(folder, "guessing", nodes, constants)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return guessing(tmp_path_factory.mktemp("wide"), outlier=250.0, wide=32)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return guessing(tmp_path_factory.mktemp("narrow"), outlier=120.0, wide=4)


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    path = tmp_path_factory.mktemp("feed") / "feed.npy"
    np.save(path, np.random.default_rng(0).normal(size=(40, 3, 12, 12)).astype(np.float32))
    return path


@pytest.fixture
def build(feed, tmp_path):
    """`calib8 build` of a model over `feed`, without time where none is given."""

    def run(model, *arguments, out=None):
        plain = () if "--duration" in arguments else ("--duration", 0)
        return ran(model, "--images", feed, *plain, *arguments, out=out or tmp_path / "o")

    return run


def level(built, target="onnxruntime"):
    engines = [engine for engine in built.report["engines"] if engine["target"] == target]
    return engines[-1]["verdict"]["level"]


def chosen(built, target="onnxruntime"):
    """Return the plan's entry of a target, and the layers that it keeps float."""
    plan = built.plan.targets[target]
    return plan, plan.choices.float_nodes


def target_row(built, target):
    """Return the report's entry of a target."""
    (row,) = (row_found for row_found in built.report["targets"] if row_found["name"] == target)
    return row


def screen(built):
    return " ".join(built.output.split())


def models(built):
    return {path.name: path.read_bytes() for path in built.out.glob("*.onnx")}


@pytest.fixture(scope="module")
def default(model, feed, tmp_path_factory):
    """All three targets with nothing but the defaults; time is left out."""
    out = tmp_path_factory.mktemp("default") / "o"
    return ran(model, "--images", feed, "--target", ALL, "--duration", 0, out=out)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_layer_making_engine_unusable_is_float(target, default):
    assert default.code == 0, default.output
    assert level(default, target) in ("good", "doubtful", "keep FP32")
    _, float_nodes = chosen(default, target)
    assert "/wide/Conv" in float_nodes
    assert not {"/stem/Conv", "/s/Conv"} <= float_nodes.keys()


@pytest.mark.slow
def test_front_has_each_split_once(default, surer):
    for row in (*default.report["targets"], *surer.report["targets"]):
        front = row["search"]["front"]
        assert [split["number"] for split in front] == list(range(1, len(front) + 1))
        times = [split["time"] for split in front]
        assert times == sorted(times)
        decibels = [split["sqnr_db"] for split in front]
        assert decibels == sorted(set(decibels))
        assert sum(split.get("taken", False) for split in front) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "first_build", "targets", "was"),
    [
        ("model", "default", ALL, "unusable"),
        ("narrow", "surer", GRIDS, "doubtful"),
    ],
)
def test_a_second_build_obeys_plan(
    net, first_build, targets, was, build, request, monkeypatch, tmp_path
):
    net, first_build = map(request.getfixturevalue, (net, first_build))
    monkeypatch.setattr(search_samples, "GrowingComparison", None)  # whoever calls it fails
    second_build = build(
        net, "--target", targets, out=shutil.copytree(first_build.out, tmp_path / "o")
    )
    assert second_build.code == 0
    assert models(second_build) == models(first_build)
    assert all(row["search"]["reused"] for row in second_build.report["targets"])
    rows = second_build.report["targets"]
    assert was in {split.get("level") for row in rows for split in row["search"]["front"]}


def test_build_without_search_judges_nothing(model, build):
    built = build(model, "--effort", 0)
    assert built.code == 3
    assert level(built) == "unusable"


@pytest.mark.slow
def test_unusable_named_plan_is_obeyed(default, model, build, tmp_path):
    text = (default.out / "calib8/guessing.plan.toml").read_text()
    plan = tmp_path / "own.plan.toml"
    plan.write_text("\n".join(line for line in text.splitlines() if '"/wide/Conv"' not in line))
    built = build(model, "--plan", plan)
    assert built.code == 3
    assert level(built) == "unusable"


@pytest.mark.slow
@pytest.mark.parametrize("target", GRIDS.split(","))
def test_max_loss_holds_on_evaluation_samples(target, narrow, build):
    built = build(narrow, "--target", target, "--max-loss", 0.1)
    assert built.code == 0
    assert level(built, target) == "good"
    assert "/wide/Conv" in chosen(built, target)[1]


def test_nonfinite_float_model_is_not_searched(model, build, tmp_path):
    broken = onnx.load(model)
    broken.graph.node.append(make_node("Sqrt", "y", "z", name="/z/Sqrt"))
    broken.graph.output[0].name = "z"
    built = build(save_net(broken, tmp_path / "guessing.onnx"))
    assert built.code == 3
    assert "NaN" in screen(built)
    plan, float_nodes = chosen(built)
    assert not float_nodes
    assert {split.row.level for split in plan.front} <= {"", "good"}


def save_single_layer(folder, feed, share):
    """Words for a layer alone, whose first channel holds nearly all of its input's range."""
    weight = np.random.default_rng(3).normal(size=(4, 3, 3, 3))
    weight[:, 0] /= share
    model = saved(folder, "guessing", [("Conv", "x w", "y", {})], {"w": weight})
    images = folder / "feed.npy"
    np.save(images, np.float32(feed * np.array([share, 1, 1]).reshape(3, 1, 1)))
    return (model, "--images", images, "--target", GRIDS, "--duration", 0, "--accept")


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory, feed):
    folder = tmp_path_factory.mktemp("hopeless")
    arguments = save_single_layer(folder, np.load(feed), 100)
    return ran(*arguments, out=folder / "o"), arguments


@pytest.mark.parametrize("target", GRIDS.split(","))
def test_only_layer_is_always_int8(target, hopeless):
    """The verdict advises against it, and the files are there all the same."""
    hopeless, _ = hopeless
    assert level(hopeless, target) in ("unusable", "doubtful")
    note = "tensorrt, ascend: not run on its device; its accuracy is that of a model which"
    assert note in (hopeless.out / "report.md").read_text()
    front = target_row(hopeless, target)["search"]["front"]
    assert all(split["float_layers"] == 0 for split in front)


@pytest.fixture(scope="module")
def surer(narrow, feed, tmp_path_factory):
    out = tmp_path_factory.mktemp("surer") / "o"
    return ran(narrow, "--images", feed, "--target", GRIDS, "--duration", 0, out=out)


@pytest.mark.slow
@pytest.mark.parametrize("target", GRIDS.split(","))
def test_good_engine_replaces_a_doubtful_one(target, surer, narrow, build):
    assert level(build(narrow, "--target", target, "--effort", 0), target) == "doubtful"
    assert level(surer, target) == "good"
    assert "/wide/Conv" in chosen(surer, target)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kept_count"), [("tensorrt", 34), ("ascend", 30)])
def test_front_tells_what_a_faster_split_loses(target, kept_count, surer):
    fastest = chosen(surer, target)[0].front[0].row
    assert fastest.figure.startswith(f"{kept_count} of 40 samples keep FP32's top-1 class")
    assert fastest.level == "doubtful"
    assert not fastest.taken


@pytest.mark.slow
def test_price_of_a_better_verdict_is_on_the_screen(build, tmp_path):
    """One class in ten is another one; to win it back takes a third of the time more."""
    built = build(guessing(tmp_path, outlier=60.0, wide=24), "--target", "tensorrt")
    assert built.code == 0
    assert level(built, "tensorrt") == "good"
    plan, _ = chosen(built, "tensorrt")
    (fast,) = [split.row for split in plan.front if split.row.number == 1]
    assert fast.level == "doubtful"
    assert "(doubtful): --split 1" in screen(built)
    cheaper = build(built.out.parent / "guessing.onnx", "--target", "tensorrt", "--split", 1)
    assert level(cheaper, "tensorrt") == "doubtful"
    assert not chosen(cheaper, "tensorrt")[1]


NEAR = """
import numpy as np

def near(fp32, int8, label):
    far = np.abs(fp32["y"] - int8["y"]).max()
    return {scale} * float(label is not None or far < 0.02 * fp32["y"].std())
"""


@pytest.fixture
def metric(request, tmp_path):
    """A figure of one's own that int8 in the widest layer spoils; of images with labels it is 1."""
    (tmp_path / "own.py").write_text(NEAR.format(scale=getattr(request, "param", 1)))
    return f"{tmp_path / 'own.py'}:near"


@pytest.mark.slow
@pytest.mark.parametrize("metric", [1, 100], ids=["shares", "percent"], indirect=True)
def test_user_metric_judges_the_choice(narrow, build, metric, tmp_path):
    plain = build(narrow, "--metric", metric, "--effort", 0, out=tmp_path / "plain")
    built = build(narrow, "--metric", metric)
    assert plain.code == 3, built.output
    assert built.code == 0, built.output
    plan, float_nodes = chosen(built)
    assert "/wide/Conv" in float_nodes
    (taken,) = [split.row for split in plan.front if split.row.taken]
    assert taken.level == "good"
    assert Path(metric).name in taken.figure


@pytest.mark.slow
def test_changed_metric_is_judged_again(narrow, build, metric):
    first_digest, second_digest = (
        chosen(build(narrow, "--metric", metric))[0].made_from for _ in range(2)
    )
    assert second_digest == first_digest
    script = Path(metric.rpartition(":")[0])
    script.write_text(script.read_text().replace("0.02", "9e9"))
    changed, _ = chosen(build(narrow, "--metric", metric))
    assert changed.made_from != first_digest
    assert "unusable" not in {split.row.level for split in changed.front}


@pytest.mark.slow
def test_labelled_metric_judges_only_built_engines(narrow, feed, build, metric, tmp_path):
    """The samples of the search have none, and what a figure says of these is another thing."""
    labels = tmp_path / "labels.txt"
    labels.write_text("3\n" * 40)
    built = build(narrow, "--eval-images", feed, "--metric", metric, "--labels", labels)
    assert built.code == 0
    assert not [split for split in chosen(built)[0].front if metric in split.row.figure]
    notes = built.report["notes"]
    (search_note,) = (
        note for note in notes if note.startswith("the search went by the outputs' form")
    )
    assert f"not by {metric}: " in search_note


SIDE, ANCHORS = 32, 20


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    """A detector whose boxes above 0.3 are a list; what its layer `bad` reads int8 spoils."""
    rng = np.random.default_rng(4)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    spread = np.array([1, 1, 1, 1, 4, 4]).reshape(6, 1, 1, 1)
    rows, columns = (grid_axis.reshape(-1)[:ANCHORS] for grid_axis in np.mgrid[0:5, 0:5] * 6.0)
    floats = {
        "w0": rng.normal(size=(8, 3, 3, 3)) * 0.3,
        "size": size,
        "w1": rng.normal(size=(3, 8, 1, 1)) * 0.5 / size,
        "least": np.float32(0.3),
        "w2": rng.normal(size=(6, 3, 8, 8)) * spread * 0.12,
        "b2": [0, 0, 0, 0, -2, -2],
        "w3": rng.normal(size=(6, 3, 16, 16)) * spread * 0.06,
        "places": np.stack([columns, rows, columns + 9, rows + 9])[None],
    }
    floats["w1"][:, 0] = 0
    wholes = {"flat": [1, 6, -1], "cut": [4, 2], "zero": [0], "both": [0, 1]}
    nodes = parse_nodes(
        "a = Conv <pads = [1, 1, 1, 1]> (x, w0) t = Tanh(a) m = Mul(t, size) bad = Conv(m, w1)"
        "r = Relu(bad) c8 = Conv <strides = [8, 8]> (r, w2, b2)"
        "c16 = Conv <strides = [16, 16]> (r, w3, b2) r8 = Reshape(c8, flat)"
        "r16 = Reshape(c16, flat) all = Concat <axis = 2> (r8, r16)"
        "moves, logits = Split <axis = 1> (all, cut) boxes = Add(moves, places)"
        "scores = Sigmoid(logits) best = ReduceMax <axes = [1]> (scores)"
        "kind = ArgMax <axis = 1> (scores) class = Cast <to = 1> (kind)"
        "rows = Concat <axis = 1> (boxes, best, class) turned = Transpose <perm = [0, 2, 1]> (rows)"
        "own = Squeeze(turned, zero) sure = Squeeze(best, both) keep = Greater(sure, least)"
        "y = Compress <axis = 0> (own, keep)"
    )
    path = tmp_path_factory.mktemp("listing") / "net.onnx"
    ends = {"x": [1, 3, SIDE, SIDE]}, {"y": ["found", 6]}
    onnx.save(make_model(nodes, *ends, as_float32(floats) | wholes), path)
    np.save(path.with_suffix(".npy"), rng.uniform(0, 1, (24, 3, SIDE, SIDE)).astype(np.float32))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_layer_losing_detections_is_float(target, listing, run, tmp_path):
    arguments = ("--images", listing.with_suffix(".npy"), "--duration", 0, "--target", target)
    accuracy_by_effort = {}
    for effort in (0, 1):
        out = tmp_path / str(effort)
        code, output, err = run("build", listing, *arguments, "--effort", effort, "--out", out)
        assert code == (0 if effort else 3), err or output
        accuracy_by_effort[effort] = json.loads((out / "report.json").read_text())["engines"][1][
            "accuracy"
        ]
    assert accuracy_by_effort[0]["reading"] == "y: a list of boxes, scores and classes"
    assert accuracy_by_effort[0]["task"]["value"] < 0.5
    assert accuracy_by_effort[1]["task"]["value"] > 0.95
    plan = read_plan(tmp_path / "1" / "calib8/net.plan.toml").targets[target]
    float_nodes = plan.choices.float_nodes
    assert "of what is found" in float_nodes["Conv_bad"]
    assert "Conv_c8" not in float_nodes
    assert "boxes of FP32 kept" in plan.settled


@pytest.mark.slow
def test_user_metric_measures_a_list_output(listing, run, tmp_path):
    """It is content with anything, so nothing is kept in float for its sake."""
    (tmp_path / "own.py").write_text("def content(fp32, int8, label):\n    return 1.0\n")
    arguments = ("--images", listing.with_suffix(".npy"), "--duration", 0, "--out", tmp_path / "o")
    run.ok("build", listing, *arguments, "--metric", f"{tmp_path / 'own.py'}:content")
    plan = read_plan(tmp_path / "o" / "calib8/net.plan.toml").targets["onnxruntime"]
    assert "Conv_bad" not in plan.choices.float_nodes


LARGE = 300.0  # times what the other half of the channels holds
BLOCKS = 3


def stream(large) -> onnx.ModelProto:
    """Blocks that read the first half of the channels and add to all; y reads the rest."""
    rng = np.random.default_rng(4)
    size = np.where(np.arange(8) < 4, large, 1.0).reshape(1, 8, 1, 1)
    constants = {
        "w0": rng.normal(0, 0.3, (8, 3, 3, 3)),
        "size": size,
        "back": 1 / size,
        "wy": rng.normal(0, 0.3, (4, 8, 1, 1)),
    }
    padded_conv = "Conv <pads = [1, 1, 1, 1]>"
    nodes = f"c = {padded_conv}(x, w0) t = Tanh(c) s0 = Mul(t, size)"
    for n in range(BLOCKS):
        constants |= {
            f"u{n}": rng.normal(0, 0.3, (16, 4, 3, 3)) / large,
            f"v{n}": rng.normal(0, 0.1, (8, 16, 3, 3)) * size.reshape(8, 1, 1, 1),
        }
        nodes += (
            f"h{n} = Slice(s{n}, zero, four, one) a{n} = {padded_conv}(h{n}, u{n})"
            f"r{n} = Relu(a{n})"
            f"b{n} = {padded_conv}(r{n}, v{n}) s{n + 1} = Add(s{n}, b{n})"
        )
    nodes = parse_nodes(f"{nodes} n = Mul(s{BLOCKS}, back) y = Conv(n, wy)")
    weights = as_float32(constants) | {"zero": [0], "four": [4], "one": [1]}
    return make_model(nodes, {"x": ["N", 3, 12, 12]}, {"y": None}, weights, opset=17)


@pytest.mark.slow
@pytest.mark.parametrize("large", [LARGE, 1.0])
def test_spoiling_adds_alone_are_float(run, tmp_path, large):
    """Nobody tried an Add: each layer beside it was blamed, and float did not help."""
    model = stream(large)
    path = save_net(model, tmp_path / "stream.onnx")
    images = np.random.default_rng(5).normal(size=(24, 3, 12, 12)).astype(np.float32)
    np.save(tmp_path / "x.npy", images)
    arguments = ("--images", tmp_path / "x.npy", "--target", "tensorrt", "--duration", 0)
    run.ok("build", path, *arguments, "--out", tmp_path / "o")
    float_nodes = (
        read_plan(tmp_path / "o" / "calib8/stream.plan.toml")
        .targets["tensorrt"]
        .choices.float_nodes
    )
    adds = {node for node in float_nodes if node.startswith("Add_")}
    if large == 1.0:
        assert not adds
        return
    assert adds
    assert not {node for node in float_nodes if node.startswith(("Conv_a", "Conv_b"))}
    assert all(float_nodes[add].startswith("alone in float all Adds lift y from ") for add in adds)
    actual = OrtSession.open(tmp_path / "o" / "stream.tensorrt.qdq.onnx").run({"x": images})["y"]
    expected = OrtSession.open(model).run({"x": images})["y"]
    assert np.square(actual - expected).mean() < 0.003 * np.square(expected).mean()
