"""Builds: every method, and when a cache is reused, stale, damaged or trusted."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calib8 import build, calibrate, merge
from calibrators.searches import SEARCHES
from deploy.calibration import trt_cache
from deploy.calibration.ranges import read_foreign_ranges
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.store import load_calibration, sidecars
from deploy.errors import CacheError, ConfigError, ModelError
from deploy.feed.preprocess import Preprocess
from deploy.method import Method
from deploy.metrics.output_form import derive_from_first
from deploy.report.documents import read_report, to_markdown
from deploy.report.screen import to_screen
from deploy.tuning.search_options import Tuning
from deploy.tuning.search_samples import GrowingComparison
from tests.models import build_net, make_model, save_fixed_batch, save_net

SMALL_INPUT = Preprocess(size=(16, 16))


@pytest.fixture
def observe_small(small_cnn, pictures):
    return partial(calibrate, small_cnn, pictures, preprocess=SMALL_INPUT)


@pytest.fixture
def build_small(small_cnn, pictures, tmp_path):
    return partial(build, small_cnn, pictures, preprocess=SMALL_INPUT, out=tmp_path, duration_s=0)


@pytest.fixture
def calibrated(observe_small, tmp_path):
    """A calibration in a fresh folder, and its cache's path."""
    cache = tmp_path / "m.cache"
    return observe_small(cache=cache), cache


def cache_bytes(cache):
    return [p.read_bytes() for p in (cache, *sidecars(cache))]


@pytest.mark.parametrize("method", SEARCHES)
def test_every_method_builds_an_accurate_engine(build_small, tmp_path, method):
    report = build_small(method=method, tuning=Tuning(effort=0))
    (engine,) = [e for e in report.engines if not e.reference]
    assert engine.accuracy.outputs[0].sqnr_db > (6 if "entropy" in method else 20)
    onnx.checker.check_model(onnx.load(engine.path), full_check=True)
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["calibration"]["method"].startswith(method)
    assert all(row["precision"] == "uint8" for row in document["targets"][0]["nodes"])


@pytest.mark.slow
def test_threads_change_no_cache_byte(observe_small, tmp_path):
    for method in ("minmax", "entropy", "percentile", "mse"):
        caches = [tmp_path / f"{method}-{threads}" / "m.cache" for threads in (1, 2, 3)]
        for threads, cache in enumerate(caches, 1):
            observe_small(method=method, threads=threads, cache=cache)
        assert len({tuple(cache_bytes(cache)) for cache in caches}) == 1, method


def test_matching_cache_is_reused_untouched(observe_small, calibrated):
    first, cache = calibrated
    assert not first.reused
    assert "does not exist yet" in first.reason
    old_files = cache_bytes(cache)
    second = observe_small(cache=cache)
    assert second.reused
    assert cache_bytes(cache) == old_files
    assert second.range_set.scales == first.range_set.scales


def test_another_method_reuses_the_observations(observe_small, calibrated, tmp_path, request):
    _, cache = calibrated
    fresh_cache = tmp_path / "fresh" / "m.cache"
    observe_small(method="entropy", cache=fresh_cache)
    request.getfixturevalue("no_pass")
    second = observe_small(method="entropy", cache=cache)
    assert "the model was not run" in second.reason
    assert cache_bytes(cache) == cache_bytes(fresh_cache)


def test_changed_input_makes_the_cache_stale(small_cnn, pictures, calibrated, tmp_path):
    _, cache = calibrated
    old_files = cache_bytes(cache)

    def reason_of(model, images, preprocess):
        result = calibrate(model, images, preprocess=preprocess, cache=cache)
        assert not result.reused
        for path, data in zip((cache, *sidecars(cache)), old_files, strict=True):
            path.write_bytes(data)
        return result.reason

    model = onnx.load(small_cnn)
    tensor = model.graph.initializer[0]
    weight = numpy_helper.to_array(tensor).copy()
    weight.flat[0] = np.nextafter(weight.flat[0], np.float32(np.inf))
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    changed_model = save_net(model, tmp_path / "changed.onnx")
    assert "weights or graph" in reason_of(changed_model, pictures, SMALL_INPUT)

    copied = shutil.copytree(pictures, tmp_path / "copied")
    first_image = copied / "00.png"
    first_image.write_bytes(first_image.read_bytes() + b"\0")
    assert "the images changed (sha256)" in reason_of(small_cnn, copied, SMALL_INPUT)
    first_image.unlink()
    assert "count 20 -> 19" in reason_of(small_cnn, copied, SMALL_INPUT)

    other_mean = replace(SMALL_INPUT, mean=(0.5,))
    assert "the preprocessing changed (mean" in reason_of(small_cnn, pictures, other_mean)


def test_cache_can_be_required_or_trusted(observe_small, calibrated):
    _, cache = calibrated
    required = CachePolicy(path=cache, require=True)
    assert observe_small(cache=required).reused
    with pytest.raises(CacheError, match=r"--require-cache.*mean"):
        observe_small(preprocess=replace(SMALL_INPUT, mean=(0.5,)), cache=required)
    assert not observe_small(cache=CachePolicy(path=cache, refresh=True)).reused
    for sidecar in sidecars(cache):
        sidecar.unlink()
    with pytest.raises(CacheError, match="--force"):
        observe_small(cache=cache)
    forced = observe_small(cache=CachePolicy(path=cache, force=True))
    assert not forced.reused
    assert "no fingerprint" in forced.reason
    for sidecar in sidecars(cache):
        sidecar.unlink()
    trusted = observe_small(cache=CachePolicy(path=cache, trust=True))
    assert trusted.reused
    assert trusted.ranges.trusted is not None
    scales = trusted.range_set.scales
    assert scales["r1"].lo == 0
    assert scales["c2"].lo < 0  # a Relu's output cannot be negative
    assert not any(sidecar.exists() for sidecar in sidecars(cache))


def test_method_without_effect_is_refused(observe_small, tmp_path):
    with pytest.raises(ConfigError, match=r"mse.* for ascend alone"):
        observe_small(targets="ascend", method="mse")
    policy = CachePolicy(path=tmp_path / "m.cache", trust=True)
    with pytest.raises(ConfigError, match="--trust-cache"):
        observe_small(method="mse", cache=policy)
    with pytest.raises(ConfigError, match="--trust-cache"):
        merge("m.onnx", ["a.shard"], cache=policy)
    with pytest.raises(ConfigError, match="--refresh"):
        replace(policy, refresh=True)


def test_all_nodes_kept_in_float_are_refused(small_cnn, pictures, tmp_path):
    with pytest.raises(ModelError, match="--keep-float"):
        build(small_cnn, pictures, out=tmp_path, float_nodes=["op:*"])


def test_fused_nodes_cannot_stay_float(small_cnn, pictures, wording):
    result = calibrate(small_cnn, pictures, float_nodes=["op:Relu"], targets=["tensorrt", "ascend"])
    (warning,) = result.warnings
    wording.check(warning)
    assert "Relu" not in "".join(calibrate(small_cnn, pictures, float_nodes="Conv_c1").warnings)


@pytest.mark.parametrize("entry", ["infinite", "x"])
def test_infinite_scale_of_cache_stays_infinite(entry, tmp_path):
    """TensorRT writes `inf` for a tensor that overflowed; a cache made from that one must, too.

    The entry of a float16 input "x" is that of its cast.
    """
    path = tmp_path / "foreign.cache"
    scales = {"finite": np.float32(0.5), entry: np.float32(np.inf)}
    path.write_bytes(trt_cache.dump(trt_cache.from_scales(scales, version="8.6.1")))
    tensors = ("finite", "infinite")
    ranges = read_foreign_ranges(path, tensors, frozenset(), {"x": "infinite"})
    assert ranges.symmetric == {"finite": np.float32(0.5), "infinite": np.float32(np.inf)}
    assert "has a inf scale" in ranges.unusable["infinite"].text
    assert ranges.scales.keys() == {"finite"}


def test_tensors_missing_in_cache_stay_float(build_small, calibrated, tmp_path):
    _, cache = calibrated
    text = cache.read_bytes().splitlines(keepends=True)
    short = tmp_path / "short.cache"
    short.write_bytes(b"".join(line for line in text if not line.startswith(b"c2")))
    report = build_small(cache=CachePolicy(path=short, trust=True))
    reasons = {n.name: n.reason for n in report.targets[0].nodes if not n.quantized}
    assert "c2" in reasons["Conv_c2"]
    assert "short.cache" in reasons["Conv_c2"]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_damaged_cache_is_rebuilt(observe_small, calibrated, which, damage):
    _, cache = calibrated
    good = cache_bytes(cache)
    path = (cache, *sidecars(cache))[which]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x5A
    damaged = {"cut": data[: len(data) // 3], "flipped": data, "empty": b""}
    path.write_bytes(damaged.get(damage, b'{"a": [1, 2]}'))
    result = observe_small(method="minmax", cache=cache)
    assert not result.reused
    assert result.reason
    assert load_calibration(cache).fingerprint.method == "minmax"
    observe_small(cache=cache)
    assert cache_bytes(cache) == good


@pytest.mark.parametrize(
    ("preprocess", "is_assumed"), [(None, True), ({"size": (16, 16)}, True), ("unit", False)]
)
def test_assumed_preprocessing_is_in_the_verdict(build_small, tmp_path, preprocess, is_assumed):
    report = build_small(preprocess=preprocess, task="none", tuning=Tuning(effort=0))
    assert report.engines[1].verdict.assumes_inputs == is_assumed
    assert read_report(tmp_path / "report.json").engines[1].verdict == report.engines[1].verdict


@pytest.mark.slow
def test_dead_tensor_leaves_its_nodes_float(small_cnn, pictures, tmp_path):
    model = onnx.load(small_cnn)
    for tensor in model.graph.initializer:
        if tensor.name == "b1":  # so far down that the first Relu never opens
            tensor.CopyFrom(numpy_helper.from_array(np.full(8, -100, np.float32), "b1"))
    onnx.save(model, tmp_path / "dead.onnx")
    report = build(
        tmp_path / "dead.onnx", pictures, preprocess=SMALL_INPUT, out=tmp_path, duration_s=0
    )
    reasons = {n.name: n.reason for n in report.targets[0].nodes}
    assert reasons["Conv_c1"] == "r1 was 0 in every sample"
    assert any("no scale for r1" in alert for alert in report.alerts)
    data = (tmp_path / "calib8/dead.cache").read_bytes()
    assert trt_cache.parse(data, origin="cache").scales()["r1"] == 0


@pytest.mark.parametrize(
    ("count", "dead_tensors"),
    [
        (1, "r0: it was 0 in every sample; its nodes"),
        (2, "r0, r1: each was 0 in every sample; their nodes"),
        (5, "r0, r1, r2 and 2 more: each was 0 in every sample; their nodes"),
    ],
)
def test_dead_tensors_of_int8_nodes_share_one_alert(tmp_path, count, dead_tensors):
    """Not with the tensor "Cos": its reader is float, since "Cos is not run in int8"."""
    nodes = [("Conv", "x w", "c"), ("Mul", "x zero", "Cos"), ("Cos", "Cos", "one")]
    shape = [1, 1, 4, 4]
    outputs = {"one": shape}
    for index in range(count):
        nodes += [("Relu", "c", f"r{index}"), ("Conv", f"r{index} w", f"y{index}")]
        outputs[f"y{index}"] = shape
    constants = {"w": -np.ones((1, 1, 1, 1), np.float32), "zero": np.float32(0)}
    model = make_model(nodes, {"x": shape}, outputs, constants)
    x = np.random.default_rng(0).uniform(1, 2, (4, 1, 4, 4))
    out = build_net(model, x, tmp_path, "--target", "tensorrt", "--effort", 0, "--accept")
    alerts = json.loads((out / "report.json").read_text())["alerts"]
    assert [note for note in alerts if "no scale" in note] == [
        f"no scale for {dead_tensors} stay float"
    ]


def test_targets_share_one_cache(observe_small, tmp_path):
    calls = ["onnxruntime", "tensorrt", "onnxruntime", "tensorrt"]
    results = [observe_small(targets=[target], cache=tmp_path / "m.cache") for target in calls]
    assert [f.reused for f in results] == [False, False, True, True]
    assert "lacks" in results[1].reason


def test_arrays_and_dicts_feed_calibration(small_cnn, tmp_path):
    arrays = np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32)
    expected = calibrate(small_cnn, arrays)
    assert (
        expected.range_set.scales
        == calibrate(small_cnn, ({"x": a[None]} for a in arrays)).range_set.scales
    )
    np.save(tmp_path / "a.npy", arrays)
    assert calibrate(small_cnn, tmp_path / "a.npy").range_set.scales == expected.range_set.scales


@pytest.mark.slow
def test_fixed_batch_evaluates_every_image_once(small_cnn, tmp_path):
    arrays = np.random.default_rng(5).normal(size=(10, 3, 16, 16)).astype(np.float32)
    options = {"eval_images": arrays, "labels": [3] * 10, "duration_s": 0}
    models = {"fixed": save_fixed_batch(small_cnn, tmp_path / "m.onnx"), "free": small_cnn}
    accuracies = []
    for name, model in models.items():
        report = build(model, arrays, **options, out=tmp_path / name)
        accuracies.append(report.engines[1].accuracy)
    fixed, free = accuracies
    assert fixed.samples == free.samples == 10
    assert fixed.top1_reference == free.top1_reference
    assert fixed.top1_agreement == pytest.approx(free.top1_agreement, abs=0.11)
    complete = arrays[:8].reshape(2, 4, 3, 16, 16)
    report = build(models["fixed"], complete, duration_s=0, out=tmp_path / "complete")
    assert report.engines[1].accuracy.samples == 8
    model = onnx.load(models["fixed"])
    feed = calibrate(models["fixed"], complete).feed
    evaluation_set = make_evaluation_set(feed, model, 9)
    form, _ = derive_from_first(evaluation_set.samples_with_outputs(9))
    searched = GrowingComparison(model, evaluation_set, form, int8_kernels=False)
    assert searched.compare(9, threads=1).samples == 8


def test_batch_size_counts_images_not_batches(small_cnn, tmp_path):
    arrays = np.random.default_rng(6).normal(size=(12, 3, 16, 16)).astype(np.float32)
    arrays[4] *= 100  # in the second group of four, so not in the first batch
    method = Method.of("entropy-tensorrt", {"batch_size": 4})
    result = calibrate(save_fixed_batch(small_cnn, tmp_path / "four.onnx"), arrays, method=method)
    (histogram,) = (result.ranges.histogram(o) for o in result.searched if o.tensor == "x")
    assert histogram.initial_range == float(np.abs(arrays[:4]).max())


@pytest.mark.slow
def test_bad_evaluation_image_skips_its_label(build_small, pictures, tmp_path):
    lines = [f"{p} {i % 10}" for i, p in enumerate(sorted(pictures.glob("*.png")))]
    (tmp_path / "bad.png").write_bytes(b"no picture")
    lines.insert(3, f"{tmp_path / 'bad.png'} 9")
    (tmp_path / "held.txt").write_text("\n".join(lines))
    report = build_small(eval_images=tmp_path / "held.txt", skip_bad=True)
    assert report.engines[1].accuracy.samples == 20
    assert report.engines[1].accuracy.top1_reference is not None
    (reason,) = report.feed.evaluation_skipped
    assert "bad.png" in reason
    assert "1 evaluation image" in to_screen(report)
    assert f"Skipped evaluation image: {reason}" in to_markdown(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"float_nodes": ["Conv_c22"]}, "did you mean 'Conv_c2'"),
        ({"float_nodes": "Conv_c22"}, "did you mean 'Conv_c2'"),
        ({"threads": -1}, "got -1"),
        ({"targets": ["onnx"]}, "a target is one of"),
        ({"targets": 3}, "a target is one of .*got '3'"),
        ({"targets": ["tensorrt", "tensorrt"]}, "'tensorrt' twice"),
        ({"method": "kl"}, "a method is one of"),
    ],
)
def test_unknown_names_are_refused(observe_small, options, message):
    with pytest.raises(ConfigError, match=message):
        observe_small(**options)


LENET = Path("../shared/golden/tensorrt/lenet")
TENSORRT_BINS = {
    "data": 2040,
    "conv1": 704,
    "conv2": 962,
    "fc1": 1153,
    "ip1": 1155,
    "ip2": 1289,
    "prob": 1081,
}


@pytest.mark.skipif(not LENET.exists(), reason="the LeNet triple is not beside this checkout")
def test_lenet_bins_equal_those_of_tensorrt():
    from calibrators.entropy import search_bins

    pixels = np.load(LENET / "images.npz")["images"].astype(np.float32) / np.float32(255)
    method = Method.of("entropy-tensorrt", {"batch_size": 50})
    result = calibrate(
        LENET / "lenet.onnx",
        pixels[:, None],
        targets=["tensorrt"],
        method=method,
        cache=CachePolicy(trt_version="7.2.2"),
    )
    histograms = {o.tensor: result.ranges.histogram(o) for o in result.searched}
    assert {n: search_bins(h.magnitudes(2048)) for n, h in histograms.items()} == TENSORRT_BINS
