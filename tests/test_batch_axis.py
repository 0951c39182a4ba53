"""Whether the first dimension of inputs is a batch, or all rows are one sample."""

import re
from dataclasses import replace

import hypothesis
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import strategies as st

from deploy.errors import ConfigError, FeedError
from deploy.feed.batch_axis import batch_inputs
from deploy.feed.feed import Dataset
from deploy.frontends import load
from tests.models import as_float32, make_model, save_net


def normal(*shape, scale=1.0):
    return np.random.default_rng(60).normal(0, scale, shape).astype(np.float32)


CONVS = as_float32(
    {
        "w": normal(8, 3, 3, 3, scale=0.3),
        "b": normal(8, scale=0.2),
        "w2": normal(8, 8, 3, 3, scale=0.2),
    }
)
CONV_NODES = """d = Conv <pads = [1, 1, 1, 1]> (x, w, b) e = Relu(d)
    c = Conv <pads = [1, 1, 1, 1]> (e, w2)"""
RUNNABLE = ("*.int8.onnx", "*.tensorrt.qdq.onnx", "*_fake_quant_model.onnx")


def camera_model(count):
    """Images of so many cameras to one row: [count, 3, 6, 6] -> [1, 5]."""
    weights = CONVS | as_float32({"v": normal(8 * count, 5, scale=0.3)})
    nodes = f"""{CONV_NODES} r = Relu(c) g = GlobalAveragePool(r)
        f = Reshape(g, shape) y = MatMul(f, v)"""
    weights["shape"] = np.array([1, 8 * count])
    return make_model(nodes, {"x": [count, 3, 6, 6]}, {"y": [1, 5]}, weights)


def clip_model(first="T"):
    """The frames of a clip to one row: [T, 3, 6, 6] -> [1, 5]."""
    weights = CONVS | as_float32({"v": normal(8, 5, scale=0.3)})
    nodes = f"""{CONV_NODES} r = Relu(c) g = GlobalAveragePool(r)
        m = ReduceMean <axes = [0]> (g) f = Flatten(m) y = MatMul(f, v)"""
    return make_model(nodes, {"x": [first, 3, 6, 6]}, {"y": [1, 5]}, weights)


def region_model():
    """A map [1, 3, 6, 6] and its regions [K, 4] to a row for each region: [K, 5]."""
    weights = CONVS | as_float32({"u": normal(4, 8, scale=0.5)})
    weights |= as_float32({"v": normal(8, 5, scale=0.3)})
    nodes = f"""{CONV_NODES} r = Relu(c) g = GlobalAveragePool(r)
        f = Flatten(g) p = MatMul(regions, u) s = Add(p, f) y = MatMul(s, v)"""
    inputs = {"x": [1, 3, 6, 6], "regions": ["K", 4]}
    return make_model(nodes, inputs, {"y": ["K", 5]}, weights)


def scene_model():
    """Points [P, 3, 6, 6] and their weights [P, 1, 1, 1] to one map: [1, 8, 6, 6]."""
    weights = dict(CONVS)
    nodes = f"""{CONV_NODES} r = Relu(c) z = Mul(r, share)
        y = ReduceMax <axes = [0]> (z)"""
    inputs = {"x": ["P", 3, 6, 6], "share": ["P", 1, 1, 1]}
    return make_model(nodes, inputs, {"y": [1, 8, 6, 6]}, weights)


KINDS = {
    "cameras": (lambda: camera_model(6), {"x": (6, 3, 6, 6)}),
    "clip": (clip_model, {"x": (None, 3, 6, 6)}),
    "regions": (region_model, {"x": (1, 3, 6, 6), "regions": (None, 4)}),
    "scene": (scene_model, {"x": (None, 3, 6, 6), "share": (None, 1, 1, 1)}),
}


def draw_samples(kind, row_counts):
    """Return a sample for each number of rows, which open dimensions take."""
    _, shapes = KINDS[kind]
    rng = np.random.default_rng(7)
    samples = []
    for count in row_counts:
        sample = {}
        for name, (rows, *sizes) in shapes.items():
            values = rng.normal(size=(rows or count, *sizes))
            sample[name] = values.astype(np.float32)
        samples.append(sample)
    return samples


def save_samples(folder, samples):
    folder.mkdir()
    for number, sample in enumerate(samples):
        np.savez(folder / f"{number:02}.npz", **sample)
    return folder


def run_model(path, sample):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, sample)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda c: max(c) > 1))
@hypothesis.settings(max_examples=5)
def test_items_of_complete_inputs_are_samples(kind, row_counts):
    make, _ = KINDS[kind]
    samples = draw_samples(kind, row_counts)
    feed = Dataset(source=samples).open(load(make()).inputs)
    fed = list(feed.samples())
    assert len(feed) == feed.count == len(samples)
    for sample, expected in zip(fed, samples, strict=True):
        for name, values in expected.items():
            np.testing.assert_array_equal(sample[name], values)
    assert not batch_inputs(feed.specs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_targets_take_complete_samples(kind, command, tmp_path):
    make, _ = KINDS[kind]
    samples = draw_samples(kind, [3, 4, 5, 4, 3, 4, 6, 5])
    model = save_net(make(), tmp_path / "net.onnx")
    images = save_samples(tmp_path / "c", samples[:6])
    targets = ("--target", "onnxruntime,tensorrt,ascend", "--effort", 0, "--duration", 0)
    screen = command("build", model, "--images", images, *targets, "--out", tmp_path / "out")
    assert "6 samples" in screen
    for pattern in RUNNABLE:
        (path,) = (tmp_path / "out").glob(pattern)
        for sample in samples[6:]:
            (expected,), (result,) = run_model(model, sample), run_model(path, sample)
            noise = np.square(result - expected).sum()
            assert noise < 0.01 * np.square(expected).sum(), pattern
    if kind != "cameras":
        name, sides = ("regions", [4]) if kind == "regions" else ("x", [3, 6, 6])
        trtexec = (tmp_path / "out" / "net_trtexec.sh").read_text()
        for shapes, rows in (("min", 3), ("max", 5)):
            size = "x".join(map(str, [rows, *sides]))
            assert re.search(rf"--{shapes}Shapes=\S*\b{name}:{size}\b", trtexec), shapes
        size = ",".join(map(str, [5, *sides]))
        assert f"{name}:{size}" in (tmp_path / "out" / "net_atc.sh").read_text()


def test_fixed_batch_with_rows_out_is_set_by_the_user(tmp_path):
    weights = dict(CONVS)
    weights["shape"] = np.array([-1, 4])
    nodes = f"{CONV_NODES} y = Reshape(c, shape)"
    model = make_model(nodes, {"x": [2, 3, 6, 6]}, {"y": [144, 4]}, weights)
    images = normal(9, 3, 6, 6)
    np.savez(tmp_path / "x.npz", x=images)
    dataset = Dataset(source=tmp_path / "x.npz", batch_axis="0")
    first, *_, last = dataset.open(load(model).inputs).samples()
    np.testing.assert_array_equal(first["x"], images[:2])
    np.testing.assert_array_equal(last["x"], images[[8, 0]])


def test_pictures_are_no_views_of_one_sample(pictures):
    dataset = Dataset(source=pictures)
    with pytest.raises(FeedError, match="takes 6 rows as one"):
        dataset.open(load(camera_model(6)).inputs)
    feed = replace(dataset, batch_axis="0").open(load(camera_model(6)).inputs)
    assert feed.batch == 6


@pytest.mark.parametrize("tail", ["reshape", "first row"])
def test_hard_coded_batch_of_one_stays_batch(tail):
    weights = dict(CONVS)
    weights |= {"shape": np.array([1, 8, 36]), "zero": np.array([0])}
    end = "y = Reshape(c, shape)" if tail == "reshape" else "y = Gather(c, zero)"
    nodes = f"{CONV_NODES} {end}"
    model = make_model(nodes, {"x": ["N", 3, 6, 6]}, {"y": None}, weights)
    assert batch_inputs(load(model).inputs) == {"x"}


def test_user_decides_what_shapes_leave_open():
    weights = as_float32({"w": normal(4, 5)})
    points = make_model("y = MatMul(x, w)", {"x": ["N", 4]}, {"y": ["N", 5]}, weights)
    clouds = [normal(n, 4) for n in (3, 5)]
    counts = {}
    for choice in ("auto", "0", "none"):
        counts[choice] = len(Dataset(source=clouds, batch_axis=choice).open(load(points).inputs))
    assert counts == {"auto": 8, "0": 8, "none": 2}
    clips = Dataset(source=[normal(4, 3, 6, 6)], batch_axis="0")
    assert len(clips.open(load(clip_model()).inputs)) == 4
    with pytest.raises(ConfigError, match="'1'"):
        Dataset(source=clouds, batch_axis="1").open(load(points).inputs)


def test_uneven_items_say_what_sample_is():
    weights = as_float32({"w": normal(4, 5)})
    points = make_model("y = MatMul(x, w)", {"x": ["N", 4]}, {"y": ["N", 5]}, weights)
    clouds = [normal(count, 4) for count in (3, 5, 4)]
    feed = Dataset(source=clouds).open(load(points).inputs)
    assert feed.count == 12 and "--batch-axis none" in feed.sample_text
    feed = Dataset(source=clouds, batch_axis="none").open(load(points).inputs)
    assert feed.count == 3 and "--batch-axis" not in feed.sample_text
    # a loader's last batch may be smaller
    feed = Dataset(source=[*clouds[1:], normal(2, 4)][::2]).open(load(points).inputs)
    assert feed.sample_text == ""


def test_evaluation_samples_are_as_calibration_samples(refusal, tmp_path):
    model = save_net(region_model(), tmp_path / "net.onnx")
    images = save_samples(tmp_path / "c", draw_samples("regions", [3, 4, 5]))
    others = save_samples(tmp_path / "e", draw_samples("regions", [1, 1, 1]))
    options = ("--images", images, "--eval-images", others, "--duration", 0, "--effort", 0)
    assert "--batch-axis" in refusal("build", model, *options, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("nodes", "is_batch"),
    [
        ("y = MatMul(x, w)", True),
        ("h = MatMul(x, w) m = ReduceMax <axes = [0]> (h) y = Add(h, m)", False),
        ("h = MatMul(x, w) y = Softmax <axis = 0> (h)", False),
        ("h = MatMul(x, w) m = ReduceMean <keepdims = 0> (h) y = Identity(h)", True),  # and a loss
        ("h = MatMul(x, w) r = RandomNormalLike(h) y = Add(h, r)", True),
    ],
)
def test_points_that_act_on_one_another_are_no_batch(nodes, is_batch):
    outputs = {"y": ["N", 5]} | ({"m": []} if "keepdims" in nodes else {})
    model = make_model(nodes, {"x": ["N", 4]}, outputs, as_float32({"w": normal(4, 5)}))
    assert batch_inputs(load(model).inputs) == ({"x"} if is_batch else set())


def test_unequal_rows_that_fit_no_sample_are_refused():
    (sample,) = draw_samples("regions", [4])
    sample["x"] = np.concatenate([sample["x"]] * 3)
    with pytest.raises(FeedError, match="x: 3, regions: 4"):
        Dataset(source=[sample]).open(load(region_model()).inputs)
