"""A TensorRT cache made on the CPU: scales, tensors and batches, beside TensorRT's own."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from calib8 import calibrate
from calibrators.histogram import Histogram
from calibrators.statistics import HistogramOf
from deploy.calibration.observation import count_in_full_batches, full_batches, note_left_out
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import CalibrationCache, dump, parse
from deploy.errors import ConfigError
from deploy.frontends import load
from deploy.method import Method
from deploy.targets.tensorrt import cache_contents
from deploy.targets.tensorrt.cache_contents import cache_tensors, has_caffe_names
from tests.models import save_fixed_batch
from tests.vendor_models import build_net, parse_nodes

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "golden" / "tensorrt"
NEEDS_SHARED = pytest.mark.skipif(not SHARED.exists(), reason=f"no golden files at {SHARED}")
LENET = SHARED / "lenet"


@dataclass
class Calibration:
    """A cache and what it was made from."""

    cache: CalibrationCache
    statistics: dict[str, Histogram]
    notes: tuple[str, ...]


def calibrate_cache(model, samples, folder, version, method, threads=2):
    path = folder / "m.cache"
    policy = CachePolicy(path=path, trt_version=version, refresh=True)
    options = {"targets": ["tensorrt"], "method": method, "cache": policy, "threads": threads}
    calibration = calibrate(model, samples, **options)
    statistics = {o.tensor: calibration.ranges.histogram(o) for o in calibration.searched}
    return Calibration(parse(path.read_bytes(), origin="m.cache"), statistics, calibration.notes)


def lenet(folder, method):
    images = np.load(LENET / "images.npz")["images"].astype(np.float32)[:, None] / np.float32(255)
    return calibrate_cache(LENET / "lenet.onnx", images, folder, "7.2.2", method)


TENSORRT_RULE = Method.of("entropy-tensorrt", {"batch_size": 50})


def indices(calibration, cache):
    """Grid index of every entry, from its scale: T = (i + 0.5) * R / 2048."""
    ranges = {name: h.full_range for name, h in calibration.statistics.items()}
    sources = ["data", "conv1", "conv1", "conv2", "conv2", "fc1", "ip1", "ip2", "prob"]
    return [
        round(float(entry.scale) * 127 * 2048 / ranges[source] - 0.5)
        for entry, source in zip(cache.entries, sources, strict=True)
    ]


@pytest.mark.slow
@NEEDS_SHARED
def test_lenet_cache_equals_tensorrts(tmp_path):
    real = parse((LENET / "table.cache").read_bytes(), origin="table.cache")
    calibration = lenet(tmp_path, TENSORRT_RULE)
    assert dump(calibration.cache).splitlines()[0] == b"TRT-7202-EntropyCalibration2"
    assert [e.name for e in calibration.cache.entries] == [e.name for e in real.entries]
    assert indices(calibration, calibration.cache) == [
        2040,
        704,
        704,
        962,
        962,
        1153,
        1155,
        1289,
        1081,
    ]
    assert indices(calibration, real) == indices(calibration, calibration.cache)
    for ours, theirs in zip(calibration.cache.entries, real.entries, strict=True):
        assert abs(ours.bits - theirs.bits) <= 8, ours.name  # each CPU sums in its own order
    tensorrt_scales = lenet(tmp_path, TENSORRT_RULE).cache.scales()
    for name, scale in lenet(tmp_path, Method.of("entropy")).cache.scales().items():
        assert abs(float(scale) / float(tensorrt_scales[name]) - 1) < 0.1, name
    calibration = lenet(tmp_path, Method.of("minmax"))
    assert calibration.cache.header.text == "TRT-7202-MinMaxCalibration"
    assert calibration.cache.scales()["data"] == np.float32(1 / 127)
    legacy = lenet(tmp_path, Method.of("legacy"))
    assert legacy.cache.header.text == "03ff00000000000003feffffde7210be9"
    assert legacy.cache.scales()["data"] == np.float32(1 / 127)


@pytest.mark.parametrize("name", ["entropy2", "minmax"])
def test_classifier_cache_equals_tensorrts(name, tmp_path):
    """TensorRT 8.5.3 wrote them on an H200; Python's calibrators and C++'s gave the same bytes.

    Our minmax observes the fused model: a Conv before a Relu gets the Relu's range.
    """
    golden = ROOT / "tests" / "golden" / "tensorrt" / f"fashion_{name}.cache"
    theirs = parse(golden.read_bytes(), origin=golden.name).scales()
    method_options = {
        "entropy2": ("entropy-tensorrt", {"batch_size": 10}),
        "minmax": ("minmax", None),
    }[name]
    fashion = ROOT / "datasets" / "fashion"
    images, method = str(fashion / "calib"), Method.of(*method_options)
    ours = calibrate_cache(
        fashion / "fashion.onnx", images, tmp_path, "8.5.3", method
    ).cache.scales()
    unnamed = {n for n in theirs if n.startswith("(Unnamed Layer* ")}  # inside the Gemm
    assert list(ours) == [n for n in theirs if n not in unnamed]
    assert len(unnamed) == 4
    off = {n for n, scale in ours.items() if abs(scale / theirs[n] - 1) > 1e-5}
    fused = {"/stem/stem.0/Conv_output_0", "/r1/a/a.0/Conv_output_0"}
    assert off == (fused if name == "minmax" else set())


def residual():
    """Conv + BatchNormalization, a dead branch, a mask with infinity, a Gemm."""
    rng = np.random.default_rng(3)
    weights = {"s": np.full(4, 2.0), "o": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    weights |= {"w": rng.standard_normal((4, 3, 3, 3)), "fc": rng.standard_normal((4, 2))}
    weights |= {"none": np.zeros((1, 4, 1, 1)), "inf": np.full((1, 4, 1, 1), -np.inf)}
    weights["fb"] = np.ones(2)
    nodes = parse_nodes(
        "Conv x w -> c | BatchNormalization c s o m v -> n | Relu n -> r | Mul r none -> dead",
        "Min dead inf -> mask | Max r mask -> kept | GlobalAveragePool kept -> p | Flatten p -> f",
        "Gemm f fc fb -> y",
        name="/{out}/{op}",
    )
    return build_net(nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 2]}, weights, producer_name="test")


def samples():
    rng = np.random.default_rng(5)
    for _ in range(6):
        yield {"x": rng.standard_normal((1, 3, 6, 6)).astype(np.float32)}


@pytest.fixture
def calibrate_residual(tmp_path):
    def make(name="entropy-tensorrt", **options):
        return calibrate_cache(residual(), samples(), tmp_path, "10.3.0", Method.of(name, options))

    return make


@pytest.mark.slow
def test_tensors_of_a_version_10_cache(calibrate_residual):
    scales = calibrate_residual(batch_size=2).cache.scales()
    names = ["x", "c", "n", "r", "dead", "mask", "kept", "p", "f", "/y/gemm_output", "y"]
    assert list(scales) == names
    assert scales["n"] == np.float32(2) * scales["c"] or abs(scales["n"] / scales["c"] - 2) < 1e-3
    assert scales["p"] == scales["f"] < scales["kept"]
    assert scales["dead"] == 0
    assert np.isinf(scales["mask"])
    calibration = calibrate_residual(batch_size=2)
    products, outputs = calibration.statistics["/y/gemm_output"], calibration.statistics["y"]
    assert np.isclose(outputs.maximum - products.maximum, 1, atol=1e-5)
    assert np.isclose(outputs.minimum - products.minimum, 1, atol=1e-5)
    searched = [name for name in names if name not in ("c", "/y/gemm_output")]
    assert list(calibrate_residual("mse").cache.scales()) == searched


FEED = list(samples())
TENSORRT_RULE_BATCH_2 = Method.of("entropy-tensorrt", {"batch_size": 2})


@pytest.mark.parametrize(
    ("method", "feeds", "threads"),
    [
        pytest.param(Method.of("entropy"), [FEED, FEED[::-1]], [1, 2], marks=pytest.mark.slow),
        (TENSORRT_RULE_BATCH_2, [FEED], [1, 2, 3]),
    ],
    ids=["entropy", "TensorRT's own"],
)
def test_threads_and_order_keep_the_cache(tmp_path, method, feeds, threads):
    texts = {
        dump(calibrate_cache(residual(), feed, tmp_path, "8.5.3", method, count).cache)
        for feed in feeds
        for count in threads
    }
    assert len(texts) == 1


def model_of(nodes, shape, weights, name="x"):
    outputs = {nodes[-1].output[0]: None}
    model = build_net(nodes, {name: shape}, outputs, weights, producer_name="test")
    return onnx.shape_inference.infer_shapes(model)


def tensors_of(original, version):
    """The tensors that a cache of this version lists."""
    model = load(original, fold_batchnorm=False).model
    return cache_tensors(model, version=version, original=original)


def vgg16():
    """The layers of torchvision's VGG16, four channels wide, with the names of torch's exporter."""
    convs = ["Conv Relu " * depth + "MaxPool" for depth in (2, 2, 3, 3, 3)]
    ops = " ".join([*convs, "AveragePool Flatten Gemm Relu Gemm Relu Gemm"]).split()
    attributes = {
        "Conv": {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        "MaxPool": {"kernel_shape": [2, 2], "strides": [2, 2]},
        "AveragePool": {"kernel_shape": [1, 1]},
        "Gemm": {"transB": 1},
    }
    names = ["input.1", *map(str, range(33, 71))]
    texts, weights = [], {}
    for op, source, out in zip(ops, names[:-1], names[1:], strict=True):
        constants = ""
        if op in ("Conv", "Gemm"):
            channels = 3 if source == "input.1" else 4
            shape = (4, channels, 3, 3) if op == "Conv" else (4, 4)
            weights |= {f"w{out}": np.ones(shape), f"b{out}": np.ones(4)}
            constants = f" w{out} b{out}"
        texts.append(f"{op} {source}{constants} -> {out}")
    return model_of(parse_nodes(*texts, **attributes), [1, 3, 32, 32], weights, "input.1")


@NEEDS_SHARED
def test_vgg16_and_lenet_names_equal_tensorrts():
    path = SHARED / "caches" / "model_convert_7201_entropy2.cache"
    real = parse(path.read_bytes(), origin=path.name)
    tensors = cache_tensors(vgg16(), version="7.2.1")
    assert [t.name for t in tensors] == [entry.name for entry in real.entries]
    scales = real.scales()
    for tensor in tensors:  # a pool's entry is its input's, in TensorRT's file as in ours
        if tensor.owner != tensor.tensor:
            assert scales[tensor.name] == scales[tensor.owner]
    path = SHARED / "lenet" / "lenet.onnx"
    real = parse((SHARED / "lenet" / "table.cache").read_bytes(), origin="table.cache")
    original = onnx.load(path)
    assert has_caffe_names(original, "7.2.2")
    assert not has_caffe_names(original, "8.5.3")
    tensors = tensors_of(original, "7.2.2")
    assert [t.name for t in tensors] == [entry.name for entry in real.entries]


LINEAR = {"w": np.eye(4), "b": np.ones(4)}


def test_gemm_products_are_listed_from_10():
    gemm = "Gemm same w b -> y"
    nodes = parse_nodes(f"Identity x -> same | {gemm} | Relu y -> z", name="/cls/{out}.0/{op}")
    original = model_of(nodes, [1, 4], LINEAR)
    tensors = tensors_of(original, "10.3.0")
    assert [t.name for t in tensors] == ["x", "same", "/cls/y.0/gemm_output", "y", "z"]
    assert tensors[1].tensor == "x"
    assert [t.name for t in tensors_of(original, "8.5.3")] == ["x", "same", "y", "z"]
    original = model_of(parse_nodes(f"Softplus x -> same | {gemm}"), [1, 4], LINEAR)
    tensors = cache_tensors(original, version="7.2.1")
    assert [t.name for t in tensors] == ["x", "same", "y"]


def test_casts_share_the_input_scale():
    nodes = parse_nodes("Cast x -> same | Relu same -> z", same={"to": 1})
    tensors = tensors_of(model_of(nodes, [1, 4], {}), "10.3.0")
    assert [(t.name, t.tensor) for t in tensors] == [("x", "x"), ("same", "x"), ("z", "z")]


def test_indices_are_not_listed():
    text = "Conv x w -> c | BatchNormalization c s s s s -> n | Relu n -> r | ArgMax r -> i"
    nodes = parse_nodes(text, i={"axis": 1})
    weights = {"w": np.ones((4, 3, 1, 1)), "s": np.ones(4)}
    original = build_net(nodes, {"x": [1, 3, 2, 2]}, {"i": (TensorProto.INT64, None)}, weights)
    names = cache_contents.trt_tensors(load(original, fold_batchnorm=False).model)
    assert names == ["x", "c", "n", "r"]


MODELS = Path(os.environ.get("CALIB8_MODELS") or Path.home() / ".cache" / "calib8-models")
YOLO = MODELS / "nudenet-3.4.2" / "nudenet" / "320n.onnx"


@NEEDS_SHARED
@pytest.mark.skipif(not YOLO.exists(), reason=f"no {YOLO.name}; benchmarks/fetch_models.py")
@pytest.mark.parametrize("stem", ["yolov8n_101401", "yolov8_selahattinsina_101401"])
def test_yolov8n_names_equal_tensorrt_10(stem):
    """Another YOLOv8n than the caches' own: the layers before the head are the same."""
    real = parse((SHARED / "caches" / f"{stem}_entropy2.cache").read_bytes(), origin=stem)
    tensors = tensors_of(onnx.load(YOLO), "10.14.1")

    def body(names):
        return {name for name in names if name.startswith("/model.") and "/model.22" not in name}

    scales = real.scales()
    assert body(list(scales)) == body([t.name for t in tensors])
    assert len(body(list(scales))) > 150
    assert "/model.22/dfl/Softmax_output" in {t.name for t in tensors} & set(scales)
    pools = [t for t in tensors if t.owner != t.tensor and {t.owner, t.name} <= scales.keys()]
    assert pools
    assert all(scales[t.name] == scales[t.owner] for t in pools)


def test_samples_beyond_full_batches_are_noted(wording):
    samples = [{"x": np.full((1, 2), i), "k": np.float32(7)} for i in range(7)]
    batches = list(full_batches(iter(samples), 3))
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert batches[0]["k"] == 7
    assert (count_in_full_batches(7, 3), count_in_full_batches(6, 3)) == (6, 6)
    assert note_left_out(6, 3) == ()
    assert "last 1 of 7 samples" in note_left_out(7, 3)[0]
    with pytest.raises(ConfigError) as raised:
        count_in_full_batches(2, 3)
    wording.check(raised.value)
    assert count_in_full_batches(3, 1, padded_sample_count=1) == 2
    assert count_in_full_batches(5, 2, padded_sample_count=1) == 4
    assert "last 1 of 3 samples" in note_left_out(3, 1, padded_sample_count=1)[0]
    with pytest.raises(ConfigError) as raised:
        count_in_full_batches(1, 1, padded_sample_count=1)
    wording.check(raised.value)
    samples = [{"x": np.zeros((1, width), np.float32)} for width in (2, 2, 3, 4)]
    batches = full_batches(iter(samples), 2)
    assert next(batches)["x"].shape == (2, 2)
    with pytest.raises(ConfigError) as raised:
        next(batches)
    wording.check(raised.value)
    assert len({HistogramOf(8).key, HistogramOf(8, 16).key, HistogramOf(8, 24).key}) == 3


@pytest.fixture
def picture_list(pictures, tmp_path):
    """(number) -> a list of the first pictures."""

    def call(number):
        path = tmp_path / f"{number}.txt"
        path.write_text(
            "".join(f"{picture}\n" for picture in sorted(pictures.glob("*.png"))[:number])
        )
        return path

    return call


@pytest.fixture
def calibrate_arguments(small_cnn, picture_list):
    """(images, options) -> arguments of a calibration by TensorRT's own rule."""

    def call(number, *options, model=small_cnn):
        arguments = ("calibrate", model, "--images", picture_list(number), "--preprocess", "unit")
        return *arguments, "--target", "tensorrt", "--method", "entropy-tensorrt", *options

    return call


@pytest.fixture
def calibrated(run, calibrate_arguments, tmp_path):
    """(images, options) -> exit code, output, errors, the cache that `calib8 calibrate` wrote."""

    def call(number, *options):
        path = tmp_path / "m.cache"
        path.unlink(missing_ok=True)
        code, *streams = run(*calibrate_arguments(number, *options, "-o", path))
        return code, *streams, path.read_bytes() if path.exists() else b""

    return call


@pytest.mark.slow
def test_only_full_batches_are_observed(
    calibrated, command, calibrate_arguments, small_cnn, tmp_path
):
    scales = calibrated(20, "--batch-size", 8)[3]
    fixed, cache_path = tmp_path / "fixed.onnx", tmp_path / "own.cache"
    save_fixed_batch(small_cnn, fixed, batch=8)
    out = command(*calibrate_arguments(20, "--batch-size", 8, "-o", cache_path, model=fixed))
    assert "last 1 of 3 samples" in out
    assert cache_path.read_bytes() == scales
    code, out, _, cache = calibrated(20, "--batch-size", 8)
    assert code == 0
    assert "last 4 of 20 samples" in " ".join(out.split())
    code, out, _, fewer = calibrated(16, "--batch-size", 8)
    assert code == 0
    assert "fill none" not in out
    assert cache == fewer
    assert cache != calibrated(20, "--batch-size", 5)[3]
    code, _, err, _ = calibrated(20, "--batch-size", 21)
    assert code == 1
    assert "20 samples" in err
    assert "batches of 21" in err


@pytest.mark.slow
def test_calibration_of_full_batches_is_reused(command, calibrate_arguments, tmp_path):
    arguments = calibrate_arguments(20, "--batch-size", 8, "-o", tmp_path / "m.cache")
    assert "reused" not in command(*arguments)
    assert "reused" in command(*arguments)


@pytest.mark.slow
def test_tensorrt_gets_the_same_batches(
    tensorrt, command, refusal, small_cnn, picture_list, tmp_path
):
    trt = tensorrt("8.5.3.1")
    build_arguments = [
        "build",
        small_cnn,
        "--preprocess",
        "unit",
        "--effort",
        0,
        "--duration",
        0,
    ]
    build_arguments += ["--target", "tensorrt", "--calibrator", "minmax"]

    def built(number):
        out = tmp_path / f"{number}"
        command(*build_arguments, "--images", picture_list(number), "--out", out)
        report = json.loads((out / "report.json").read_text())
        (cache,) = out.glob("*.gpu.cache")
        return " ".join(report["targets"][0]["notes"]), cache.read_bytes()

    streams, cache = built(20)
    assert "the last 4 of 20 samples" in streams
    assert trt.STORY.configs[0].int8_calibrator.batches_taken == 2
    streams, fewer = built(16)
    assert "fill none" not in streams
    assert cache == fewer
    err = refusal(*build_arguments, "--images", picture_list(6), "--out", tmp_path / "few")
    assert "6 samples" in err
    assert "batches of 8" in err
