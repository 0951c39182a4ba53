"""A TensorRT cache made on the CPU: scales, tensors and batches, beside TensorRT's own."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibrators.histogram import Histogram
from calibrators.statistics import HistogramOf
from deploy.calibration.observation import count_in_full_batches, full_batches, note_left_out
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import CalibrationCache, dump, parse
from deploy.errors import ConfigError
from deploy.frontends import load
from deploy.method import Method
from deploy.pipeline import calibrate
from deploy.targets.tensorrt.cache_contents import (
    CAFFE,
    ONNX,
    cache_tensors,
    likely_parser,
    trt_tensors,
)
from tests.vendor_models import build_net

LENET = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt" / "lenet"

NEEDS_LENET = pytest.mark.skipif(not LENET.exists(), reason=f"no golden LeNet at {LENET}")


@dataclass
class Made:
    """A cache and what it was made from."""

    cache: CalibrationCache
    statistics: dict[str, Histogram]
    notes: tuple[str, ...]


def made_of(model, samples, folder, version, method, threads=2):
    path = folder / "m.cache"
    policy = CachePolicy(path=path, trt_version=version, refresh=True)
    found = calibrate(
        model, samples, targets=["tensorrt"], method=method, cache=policy, threads=threads
    )
    statistics = {o.tensor: found.ranges.histogram(o) for o in found.searched}
    return Made(parse(path.read_bytes(), origin="m.cache"), statistics, found.notes)


def lenet(folder, method):
    images = np.load(LENET / "images.npz")["images"].astype(np.float32)[:, None] / np.float32(255)
    return made_of(LENET / "lenet.onnx", images, folder, "7.2.2", method)


OWN = Method.of("entropy-tensorrt", {"batch_size": 50})


def indices(calibration, cache):
    """Grid index of every entry, from its scale: T = (i + 0.5) * R / 2048."""
    ranges = {name: h.full_range for name, h in calibration.statistics.items()}
    sources = ["data", "conv1", "conv1", "conv2", "conv2", "fc1", "ip1", "ip2", "prob"]
    return [
        round(float(entry.scale) * 127 * 2048 / ranges[source] - 0.5)
        for entry, source in zip(cache.entries, sources, strict=True)
    ]


@NEEDS_LENET
def test_lenets_cache_is_tensorrts(tmp_path):
    real = parse((LENET / "table.cache").read_bytes(), origin="table.cache")
    made = lenet(tmp_path, OWN)
    assert dump(made.cache).splitlines()[0] == b"TRT-7202-EntropyCalibration2"
    assert [e.name for e in made.cache.entries] == [e.name for e in real.entries]
    assert indices(made, made.cache) == [2040, 704, 704, 962, 962, 1153, 1155, 1289, 1081]
    assert indices(made, real) == indices(made, made.cache)
    for ours, theirs in zip(made.cache.entries, real.entries, strict=True):
        assert abs(ours.bits - theirs.bits) <= 8, ours.name  # each CPU sums in its own order
    faithful = lenet(tmp_path, OWN).cache.scales()
    for name, scale in lenet(tmp_path, Method.of("entropy")).cache.scales().items():
        assert abs(float(scale) / float(faithful[name]) - 1) < 0.1, name
    made = lenet(tmp_path, Method.of("minmax"))
    assert made.cache.header.text == "TRT-7202-MinMaxCalibration"
    assert made.cache.scales()["data"] == np.float32(1 / 127)
    legacy = lenet(tmp_path, Method.of("legacy"))
    assert legacy.cache.header.text == "03ff00000000000003feffffde7210be9"
    assert legacy.cache.scales()["data"] == np.float32(1 / 127)


def residual():
    """Conv + BatchNormalization, a dead branch, a mask with infinity, a Gemm."""
    rng = np.random.default_rng(3)
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "s": np.full(4, 2, np.float32),
        "o": np.zeros(4, np.float32),
        "m": np.zeros(4, np.float32),
        "v": np.ones(4, np.float32),
        "none": np.zeros((1, 4, 1, 1), np.float32),
        "inf": np.full((1, 4, 1, 1), -np.inf, np.float32),
        "fc": rng.standard_normal((4, 2)).astype(np.float32),
        "fb": np.ones(2, np.float32),
    }
    nodes = [
        ("Conv", "x w", "c", "/conv", {"kernel_shape": [3, 3]}),
        ("BatchNormalization", "c s o m v", "n", "/bn"),
        ("Relu", "n", "r", "/relu"),
        ("Mul", "r none", "dead", "/dead"),
        ("Min", "dead inf", "mask", "/mask"),
        ("Max", "r mask", "kept", "/kept"),
        ("GlobalAveragePool", "kept", "p", "/pool"),
        ("Flatten", "p", "f", "/flat"),
        ("Gemm", "f fc fb", "y", "/fc/Gemm"),
    ]
    return build_net(nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 2]}, weights, producer_name="test")


def samples():
    rng = np.random.default_rng(5)
    for _ in range(6):
        yield {"x": rng.standard_normal((1, 3, 6, 6)).astype(np.float32)}


@pytest.fixture
def made(tmp_path):
    def make(name="entropy-tensorrt", **given):
        return made_of(residual(), samples(), tmp_path, "10.3.0", Method.of(name, given))

    return make


def test_tensors_of_a_cache_of_10(made):
    scales = made(batch_size=2).cache.scales()
    assert list(scales) == [
        *("x", "c", "n", "r", "dead", "mask", "kept", "p", "f", "/fc/Gemm_output", "y")
    ]
    assert scales["n"] == np.float32(2) * scales["c"] or abs(scales["n"] / scales["c"] - 2) < 1e-3
    assert scales["p"] == scales["kept"]
    assert scales["dead"] == 0
    assert np.isinf(scales["mask"])
    found = made(batch_size=2)
    products = found.statistics["/fc/Gemm_output"]
    outputs = found.statistics["y"]
    assert np.isclose(outputs.maximum - products.maximum, 1, atol=1e-5)
    assert np.isclose(outputs.minimum - products.minimum, 1, atol=1e-5)
    assert list(made("mse").cache.scales()) == [
        "x", "n", "r", "dead", "mask", "kept", "p", "f", "y",
    ]  # fmt: skip


@pytest.mark.slow
def test_order_independent_caches_do_not_depend_on_threads_or_order(tmp_path):
    feeds = (list(samples()), list(samples())[::-1])
    texts = {
        dump(made_of(residual(), f, tmp_path, "8.5.3", Method.of("entropy"), threads).cache)
        for f in feeds
        for threads in (1, 2)
    }
    assert len(texts) == 1


def test_tensorrts_own_rule_does_not_depend_on_threads(tmp_path):
    own = Method.of("entropy-tensorrt", {"batch_size": 2})
    texts = {
        dump(made_of(residual(), samples(), tmp_path, "8.5.3", own, threads).cache)
        for threads in (1, 2, 3)
    }
    assert len(texts) == 1


SHARED = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt"

NEEDS_SHARED = pytest.mark.skipif(not SHARED.exists(), reason=f"no golden files at {SHARED}")


def model_of(nodes, shape, name="x", **weights):
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
    outputs = [helper.make_empty_tensor_value_info(nodes[-1].output[0])]
    constants = [numpy_helper.from_array(array, key) for key, array in weights.items()]
    made = build_net(nodes, inputs, outputs, constants)
    made.producer_name = "test"
    return onnx.shape_inference.infer_shapes(made)


def tensors_of(original, version):
    """The tensors that a cache of this version lists."""
    model = load(original, fold_batchnorm=False).model
    return cache_tensors(model, version=version, original=original)


def vgg16():
    """The layers of torchvision's VGG16, four channels wide, with the names of torch's exporter."""
    nodes = []
    weights = {}
    names = iter(["input.1", *map(str, range(33, 71))])
    last, channels = next(names), 3

    def add(op, **attributes):
        nonlocal last
        out = next(names)
        extra = [f"w{out}", f"b{out}"] if op in ("Conv", "Gemm") else []
        nodes.append(helper.make_node(op, [last, *extra], [out], f"{op}_{out}", **attributes))
        last = out

    for depth in (2, 2, 3, 3, 3):
        for _ in range(depth):
            add("Conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            weights[f"w{last}"] = np.ones((4, channels, 3, 3), np.float32)
            weights[f"b{last}"] = np.ones(4, np.float32)
            channels = 4
            add("Relu")
        add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    add("AveragePool", kernel_shape=[1, 1])
    add("Flatten")
    for layer in range(3):
        add("Gemm", transB=1)
        weights[f"w{last}"] = np.ones((4, 4), np.float32)
        weights[f"b{last}"] = np.ones(4, np.float32)
        if layer < 2:
            add("Relu")
    return model_of(nodes, [1, 3, 32, 32], "input.1", **weights)


@NEEDS_SHARED
def test_vgg16_and_lenet_have_the_names_tensorrt_wrote():
    path = SHARED / "caches" / "model_convert_7201_entropy2.cache"
    real = parse(path.read_bytes(), origin=path.name)
    wanted = cache_tensors(vgg16(), version="7.2.1")
    assert [t.name for t in wanted] == [entry.name for entry in real.entries]
    scales = real.scales()
    for tensor in wanted:  # a pool's entry is its input's, in TensorRT's file as in ours
        if tensor.shares is not None:
            assert scales[tensor.name] == scales[tensor.shares]
    path = SHARED / "lenet" / "lenet.onnx"
    real = parse((SHARED / "lenet" / "table.cache").read_bytes(), origin="table.cache")
    original = onnx.load(path)
    assert likely_parser(original, "7.2.2") == CAFFE
    assert likely_parser(original, "8.5.3") == ONNX
    wanted = tensors_of(original, "7.2.2")
    assert [t.name for t in wanted] == [entry.name for entry in real.entries]


def gemm_model():
    nodes = [
        helper.make_node("Identity", ["x"], ["same"], "/same"),
        helper.make_node("Gemm", ["same", "w", "b"], ["y"], "/cls/cls.0/Gemm"),
        helper.make_node("Relu", ["y"], ["z"], "/relu"),
    ]
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    return model_of(nodes, [1, 4], **weights)


def test_the_inside_of_a_gemm_is_listed_from_10_on():
    original = gemm_model()
    wanted = tensors_of(original, "10.3.0")
    names = [t.name for t in wanted]
    assert names == ["x", "same", "/cls/cls.0/Gemm_output", "y", "z"]
    assert wanted[1].source == "x"
    wanted = tensors_of(original, "8.5.3")
    assert [t.name for t in wanted] == ["x", "same", "y", "z"]
    nodes = [
        helper.make_node("Softplus", ["x"], ["h"], "/h"),
        helper.make_node("Gemm", ["h", "w", "b"], ["y"], "/fc"),
    ]
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    wanted = cache_tensors(model_of(nodes, [1, 4], **weights), version="7.2.1")
    assert [t.name for t in wanted] == ["x", "h", "y"]


def test_casts_share_a_scale_and_indices_are_not_listed():
    nodes = [
        helper.make_node("Cast", ["x"], ["same"], "/cast", to=1),
        helper.make_node("Relu", ["same"], ["z"], "/relu"),
    ]
    original = model_of(nodes, [1, 4])
    wanted = tensors_of(original, "10.3.0")
    assert [(t.name, t.source) for t in wanted] == [("x", "x"), ("same", "x"), ("z", "z")]
    channel = np.ones(4, np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "/conv", kernel_shape=[1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "o", "m", "v"], ["n"], "/bn"),
        helper.make_node("Relu", ["n"], ["r"], "/relu"),
        helper.make_node("ArgMax", ["r"], ["i"], "/argmax", axis=1),
    ]
    weights = {"w": np.ones((4, 3, 1, 1), np.float32), "s": channel, "o": channel}
    weights |= {"m": channel, "v": channel}
    model = load(model_of(nodes, [1, 3, 2, 2], **weights), fold_batchnorm=False).model
    assert trt_tensors(model) == ["x", "c", "n", "r"]


MODELS = Path(os.environ.get("CALIB8_MODELS") or Path.home() / ".cache" / "calib8-models")

YOLO = MODELS / "nudenet-3.4.2" / "nudenet" / "320n.onnx"


@NEEDS_SHARED
@pytest.mark.skipif(not YOLO.exists(), reason=f"no {YOLO.name}; benchmarks/fetch_models.py")
@pytest.mark.parametrize("stem", ["yolov8n_101401", "yolov8_selahattinsina_101401"])
def test_yolov8n_has_the_names_that_tensorrt_10_14_wrote(stem):
    """Another YOLOv8n than the caches' own: the layers before the head are the same."""
    real = parse((SHARED / "caches" / f"{stem}_entropy2.cache").read_bytes(), origin=stem)
    original = onnx.load(YOLO)
    wanted = tensors_of(original, "10.14.1")

    def body(names):
        return {name for name in names if name.startswith("/model.") and "/model.22" not in name}

    scales = real.scales()
    assert body(list(scales)) == body([t.name for t in wanted])
    assert len(body(list(scales))) > 150
    assert "/model.22/dfl/Softmax_output" in {t.name for t in wanted} & set(scales)
    pools = [t for t in wanted if t.shares in scales and t.name in scales]
    assert pools
    assert all(scales[t.name] == scales[str(t.shares)] for t in pools)


def test_the_rest_is_left_out_and_said():
    samples = [{"x": np.full((1, 2), i), "k": np.float32(7)} for i in range(7)]
    batches = list(full_batches(iter(samples), 3))
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert batches[0]["k"] == 7
    assert (count_in_full_batches(7, 3), count_in_full_batches(6, 3)) == (6, 6)
    assert note_left_out(6, 3) == ()
    assert "the last 1 of 7 samples" in note_left_out(7, 3)[0]
    with pytest.raises(ConfigError, match="got 2 samples for batches of 3"):
        count_in_full_batches(2, 3)
    assert count_in_full_batches(3, 1, filled=1) == 2
    assert count_in_full_batches(5, 2, filled=1) == 4
    assert "the last 1 of 3 samples" in note_left_out(3, 1, filled=1)[0]
    with pytest.raises(ConfigError, match="got 0 samples for batches of 1"):
        count_in_full_batches(1, 1, filled=1)
    samples = [{"x": np.zeros((1, width), np.float32)} for width in (2, 2, 3, 4)]
    batches = full_batches(iter(samples), 2)
    assert next(batches)["x"].shape == (2, 2)
    with pytest.raises(ConfigError, match=r"one shape, got samples of \(1, 3\) and \(1, 4\)"):
        next(batches)
    keys = {HistogramOf(8).key, HistogramOf(8, 16).key, HistogramOf(8, 24).key}
    assert len(keys) == 3


@pytest.fixture
def fixed(small_cnn, tmp_path):
    """The model with a batch of 8."""
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, tmp_path / "fixed.onnx")
    return tmp_path / "fixed.onnx"


def test_whole_batches_alone_are_observed_fixed_or_asked_for(
    fixed, calibrated, command, listed, tmp_path
):
    scales = calibrated(20, "--batch-size", 8)[3]
    words = "calibrate", fixed, "--images", listed(20), "--preprocess", "unit"
    own = "--target", "tensorrt", "--method", "entropy-tensorrt"
    out = command(*words, *own, "--batch-size", 8, "-o", tmp_path / "own.cache")
    assert "the last 1 of 3 samples fill none and were left out" in out
    assert (tmp_path / "own.cache").read_bytes() == scales
    code, out, _, cache = calibrated(20, "--batch-size", 8)
    assert code == 0 and "the last 4 of 20 samples" in " ".join(out.split())
    code, out, _, fewer = calibrated(16, "--batch-size", 8)
    assert code == 0 and "fill none" not in out
    assert cache == fewer
    assert cache != calibrated(20, "--batch-size", 5)[3]
    code, _, err, _ = calibrated(20, "--batch-size", 21)
    assert code == 1 and "got 20 samples for batches of 21" in err


@pytest.fixture
def listed(pictures, tmp_path):
    """(number) -> a list of the first pictures."""

    def call(number):
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"{one}\n" for one in sorted(pictures.glob("*.png"))[:number]))
        return path

    return call


@pytest.fixture
def calibrated(run, small_cnn, listed, tmp_path):
    """(images, options) -> exit code, output, errors, the cache that `calib8 calibrate` wrote."""

    def call(number, *options):
        path = tmp_path / "m.cache"
        path.unlink(missing_ok=True)
        words = ["calibrate", small_cnn, "--images", listed(number), "-o", path]
        words += ["--preprocess", "unit"]
        words += ["--target", "tensorrt", "--method", "entropy-tensorrt", *options]
        return *run(*words), path.read_bytes() if path.exists() else b""

    return call


@pytest.mark.slow
def test_a_calibration_of_whole_batches_is_used_again(
    calibrated, command, small_cnn, listed, tmp_path
):
    calibrated(20, "--batch-size", 8)
    words = ["calibrate", small_cnn, "--images", listed(20), "--preprocess", "unit"]
    words += ["--target", "tensorrt", "--method", "entropy-tensorrt", "--batch-size", 8]
    assert "reused" in command(*words, "-o", tmp_path / "m.cache").lower()


@pytest.mark.slow
def test_tensorrts_calibrator_gets_the_same_batches(
    tensorrt, command, refusal, small_cnn, listed, tmp_path
):
    trt = tensorrt("8.5.3.1")
    words = ["build", small_cnn, "--preprocess", "unit", "--effort", 0, "--duration", 0]
    words += ["--target", "tensorrt", "--calibrator", "minmax"]

    def built(number):
        out = tmp_path / f"{number}"
        command(*words, "--images", listed(number), "--out", out)
        report = json.loads((out / "report.json").read_text())
        (cache,) = out.glob("*.gpu.cache")
        return " ".join(report["targets"][0]["notes"]), cache.read_bytes()

    said, cache = built(20)
    assert "the last 4 of 20 samples" in said
    assert trt.STORY.configs[0].int8_calibrator.taken == 2
    said, fewer = built(16)
    assert "fill none" not in said
    assert cache == fewer
    err = refusal(*words, "--images", listed(6), "--out", tmp_path / "few")
    assert "got 6 samples for batches of 8" in err
